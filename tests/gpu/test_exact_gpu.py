"""`exact` on a GPU: equal bits of products in all tiles, of attention, of rollouts and training, and of a step's first ratio.

python -m pytest tests/gpu/test_exact_gpu.py
"""

import pytest
import torch

from strop.algorithms.grpo import GRPO
from strop.data.batch import TokenBatch
from strop.models import Policy
from strop.models.attention import Packed, Rule
from strop.rollout import Sampling, generate
from strop.rollout.cached_rows import CachedRows

SHAPES = {  # of layers as they are in these models; few of them, and a smaller vocabulary, which is no multiple of 8
    "llama": {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3},
    "qwen2": {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2},
    "qwen3": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
              "head_dim": 128},
}  # fmt: skip
HOW = ("bfloat16", "autocast")


def model_of(kind, how="bfloat16", **changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 50257, "num_hidden_layers": 4, "max_position_embeddings": 4096, "initializer_range": 0.05,
             "bos_token_id": None, "pad_token_id": None, "eos_token_id": None}  # fmt: skip
    config = AutoConfig.for_model(kind, **{**sizes, **SHAPES[kind], **changes})
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    return AutoModelForCausalLM.from_config(config).to("cuda", dtype)


def prompts_of(lengths):
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(2, 50000, (length,), generator=generator) for length in lengths]


def logps_of(policy, lines, temperature):
    with torch.no_grad():
        found = policy.logps(TokenBatch.of(lines, "cuda"), temperature=temperature).cpu()
    return found.split([line.num_loss_tokens for line in lines])


def different(found, wanted):
    """How many numbers are not the same, and by how much at most."""
    found, wanted = torch.cat(list(found)), torch.cat(list(wanted))
    return int((found != wanted).sum()), float((found - wanted).abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("K", "N"), [(896, 1152), (4864, 896), (576, 3072), (1000, 50257)])
def test_tiles_do_not_change_a_product(dtype, K, N, monkeypatch):
    """Every tile of the table by itself, all rows and some of them. If this fails, the table must have one tile."""
    from strop.ops import exact

    torch.manual_seed(K)
    x, w = torch.randn(300, K, device="cuda").to(dtype), torch.randn(N, K, device="cuda").to(dtype)
    bias, onto = torch.randn(N, device="cuda").to(dtype), torch.randn(300, N, device="cuda").to(dtype)
    block_k, tiles = exact.TILES[dtype if dtype in exact.TILES else None]
    found = []
    for tile in tiles:
        monkeypatch.setitem(exact.TILES, dtype, (block_k, [tile]))
        found.append(exact.product(x, w, bias, onto=onto))
        for rows in (slice(0, 1), slice(299, 300), slice(7, 72), slice(100, 229)):
            assert torch.equal(exact.product(x[rows], w, bias, onto=onto[rows]), found[-1][rows]), tile
    assert all(torch.equal(one, found[0]) for one in found), tiles
    exact64 = x.double() @ w.double().T + bias.double() + onto.double()
    eager = torch.addmm(bias, x, w.T) + onto
    errors = [float((one.double() - exact64).norm() / exact64.norm()) for one in (found[0], eager)]
    assert errors[0] <= 1.1 * errors[1] + 1e-6


@pytest.mark.parametrize(("Q", "K", "D"), [(14, 2, 64), (9, 3, 64), (16, 8, 128), (6, 2, 80)])
@pytest.mark.parametrize("window", [0, 100])
def test_decoding_attends_as_training(Q, K, D, window):
    from strop.models.exact import Runs, attend
    from strop.rollout.exact import Slotted
    from strop.rollout.slots import Rows

    torch.manual_seed(D)
    lengths, rule = [1, 63, 64, 65, 200, 1025], Rule(D**-0.5, window=window)
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    qkv = torch.randn(sum(lengths), Q + 2 * K, D, device="cuda").bfloat16()
    q, k, v = qkv.split([Q, K, K], 1)
    pass_ = Packed(lengths, ends)
    wanted = attend(q, k, v, Runs.packed(pass_), rule)
    flash = pass_.flash(q.contiguous(), k.contiguous(), v.contiguous(), rule)[0]
    assert (wanted.float() - flash.float()).norm() / flash.float().norm() < 1e-2
    kv = torch.stack([k, v])[None].contiguous()
    table = torch.tensor([kv.data_ptr(), kv.shape[2], 0, 0, 0, 0, 0], device="cuda")
    rows = Rows.empty(len(lengths), torch.device("cuda"))
    rows.suffix_start_N.copy_(ends[:-1])
    rows.step_N.copy_(ends.diff() - 1)
    last = ends[1:].long() - 1
    found = Slotted.decode(table, rows).attend(*(one[last][:, :, None] for one in (q, k, v)), 0, rule)
    assert torch.equal(found[:, 0], wanted[last])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", SHAPES)
def test_rollout_and_training_give_the_same_bits(kind, how):
    """Rows of many lengths that end at all times, so that graphs of every size take part; then other batches and orders."""
    sampling, prompts = Sampling(max_new_tokens=150, temperature=0.8), prompts_of([1, 3, 64, 65, 200, 700])
    with torch.autocast("cuda", torch.bfloat16, enabled=how == "autocast"):
        policy = Policy(model_of(kind, how, eos_token_id=list(range(500))))
        policy.be_exact()
        rollout = generate(policy, prompts, sampling, num_samples=16, seed=0)
        assert rollout.engine == "hf, exact layers, cuda graphs"
        lines = rollout
        assert len({len(line) for line in lines}) > 20
        assert different(logps_of(policy, lines, 0.8), rollout.logps) == (0, 0.0)
        order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(1)).tolist()
        for size in (1, 7, 40):  # micro-batches, in another order
            for start in range(0, len(order), size) if size > 1 else (0, 50):
                part = order[start : start + size]
                found = logps_of(policy, [lines[i] for i in part], 0.8)
                assert different(found, [rollout.logps[i] for i in part]) == (0, 0.0)
        alone = generate(policy, prompts[2:4], sampling, num_samples=3, seed=0, addresses=[2, 3])
        again = [*rollout.logps[32:35], *rollout.logps[48:51]]
        assert different(alone.logps, again) == (0, 0.0)
        assert "exact" not in generate(Policy(policy.model), prompts[:1], sampling, seed=0).engine


def test_a_conversation_that_goes_on_has_the_same_bits():
    policy, cached, sampling = Policy(model_of("qwen2")), CachedRows(), Sampling(max_new_tokens=70)
    policy.be_exact()
    first = generate(policy, prompts_of([5, 100]), sampling, seed=0, cached=cached.of([0, 1]))
    assert cached.rows
    longer = [torch.cat([line.ids_T, torch.tensor([5, 6, 7])]) for line in first]
    second = generate(policy, longer, sampling, seed=1, cached=cached.of([0, 1]))
    assert different(logps_of(policy, second, 1.0), second.logps) == (0, 0.0)


@pytest.mark.parametrize("kind", SHAPES)
def test_gradients_are_those_of_the_ordinary_way(kind):
    model = model_of(kind)
    lines = generate(Policy(model), prompts_of([3, 64]), Sampling(max_new_tokens=80), num_samples=2, seed=0)
    found = []
    for exact in (False, True):
        policy = Policy(model)
        if exact:
            policy.be_exact()
        model.zero_grad()
        logps_n = policy.logps(TokenBatch.of(lines, "cuda"))
        (logps_n * torch.linspace(-1, 2, len(logps_n), device="cuda")).sum().backward()
        found.append({name: param.grad.float() for name, param in model.named_parameters()})
    for name, wanted in found[0].items():
        assert (found[1][name] - wanted).norm() <= 0.05 * wanted.norm(), name


@pytest.mark.filterwarnings("ignore:.*bfloat16")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", SHAPES)
def test_a_step_begins_on_policy(kind, how):
    """Of several steps: the weights have changed, and the graphs are captured."""
    trainer = GRPO(
        model=model_of(kind, how), reward_fn=lambda completion_ids: [float(int(ids[0]) % 7) for ids in completion_ids],
        exact=True, group_size=8, max_new_tokens=96, learning_rate=1e-4, micro_batch_size=5, temperature=0.9,
        autocast="bf16" if how == "autocast" else None,
    )  # fmt: skip
    for step in range(3):
        metrics = trainer.train_step(prompts_of([4, 60, 130]))
        assert metrics["mismatch_kl"] == 0.0
        assert metrics["mismatch_ratio_max"] == metrics["ratio/mean"] == metrics["ratio/max"] == 1.0
        assert step or metrics["mean_kl"] == 0.0
        assert metrics["grad_norm"] > 0
