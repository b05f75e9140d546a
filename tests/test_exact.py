"""`exact`: log-probs of rollouts, of scoring and of training are equal bit for bit, through Triton's interpreter.

Bits are asserted because the order of every sum is strop's; the order within a tile's product is fixed by `one_order`.
"""

import itertools
import os

import pytest
import test_fused_layers
import torch
from interpreter import sum_dots_in_one_order

from strop.algorithms.grpo import GRPO
from strop.algorithms.ppo import PPO
from strop.data.batch import TokenBatch, Trajectory
from strop.models import Policy
from strop.models.attention import Packed, Rule, attention_of_rows
from strop.rollout import Sampling, decoding, generate
from strop.rollout.cached_rows import CachedRows

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels on a CPU need TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
SHAPE = {
    "vocab_size": 21, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip
PROMPTS = [[3, 4, 5], [7]]
SAMPLING = Sampling(max_new_tokens=3, temperature=0.7)


@pytest.fixture(autouse=True)
def one_order(monkeypatch):
    """A row of a tile's product has the same bits wherever it stands, as on a GPU."""
    sum_dots_in_one_order(monkeypatch)


def model_of(kind, dtype=torch.float32, **changes):
    return test_fused_layers.model_of(kind, dtype, **{**SHAPE, **changes})


def policy_of(kind, dtype=torch.float32, **changes):
    policy = Policy(model_of(kind, dtype, **changes))
    policy.be_exact()
    return policy


def logps_of(policy, lines, temperature=0.7):
    with torch.no_grad():
        return policy.logps(TokenBatch.of(lines), temperature=temperature).split(
            [line.num_loss_tokens for line in lines]
        )


def equal(found, wanted):
    return len(found) == len(wanted) > 0 and all(map(torch.equal, found, wanted))


# ---- products ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("K", [64, 72])
def test_a_row_of_a_product_is_the_same_in_every_batch(dtype, K):
    from strop.ops.exact import product

    generator = torch.Generator().manual_seed(K)
    x, w = torch.randn(130, K, generator=generator).to(dtype), torch.randn(131, K, generator=generator).to(dtype)
    bias, onto = torch.randn(131, generator=generator).to(dtype), torch.randn(130, 131, generator=generator)
    wanted = product(x, w, bias, onto=onto)
    exact = x.double() @ w.double().T + bias.double() + onto.double()
    assert wanted.dtype == torch.float32
    torch.testing.assert_close(wanted.double(), exact, rtol=1e-5, atol=1e-4)
    for rows in ([0], [129], [5, 3, 4], range(64), range(65, 130), torch.randperm(130, generator=generator).tolist()):
        assert torch.equal(product(x[rows], w, bias, onto=onto[rows]), wanted[rows])
    rounded = product(x, w, bias)
    assert rounded.dtype == dtype
    assert torch.equal(product(x, w, bias, onto=torch.zeros_like(onto)).to(dtype), rounded)  # rounded once
    assert product(x[:0], w).shape == (0, 131)


# ---- attention ----


@pytest.mark.parametrize(("Q", "K", "D", "rule"), [(6, 2, 8, Rule(0.3)), (3, 1, 20, Rule(0.25, window=9))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_reading_and_training_attend_alike(Q, K, D, rule, dtype):
    """The last tokens of sequences whose lengths lie around a block's edges, in a cache whose runs lie apart."""
    from strop.models.exact import Runs, attend
    from strop.rollout.exact import Slotted
    from strop.rollout.slots import Rows

    lengths, new = [1, 63, 64, 65, 130], 3
    generator = torch.Generator().manual_seed(D)
    N, ends = sum(lengths), torch.tensor([0, *lengths]).cumsum(0).int()
    qkv = torch.randn(N, Q + 2 * K, D, generator=generator).to(dtype)
    q, k, v = qkv.split([Q, K, K], 1)
    wanted = attend(q, k, v, Runs.packed(Packed(lengths, ends)), rule)
    for start, end in itertools.pairwise(ends):  # each alone
        assert torch.equal(
            attend(*(one[start:end] for one in (q, k, v)),
                   Runs.packed(Packed([end - start], torch.tensor([0, end - start]))), rule),
            wanted[start:end],
        )  # fmt: skip
    apart = zip(
        *(one.transpose(0, 1)[None].split(lengths, 2) for one in (q.float(), k.float(), v.float())), strict=True
    )
    plain = torch.cat([attention_of_rows(*states, rule)[0] for states in apart])
    assert (wanted.float() - plain).abs().max() < (1e-5 if dtype == torch.float32 else 0.05)

    # the same sequences in slots: a prefix somewhere, then the rest at the other end; what is not theirs is NaN
    slots = 2 * N + 16
    kv = torch.full((1, 2, slots, K, D), torch.nan, dtype=dtype)
    table = torch.tensor([kv.data_ptr(), slots, 0, 0, 0, 0, 0])
    rows = Rows.empty(len(lengths), torch.device("cpu"))
    for n, (start, length) in enumerate(zip(ends[:-1].tolist(), lengths, strict=True)):
        prefix = length // 2
        rows.prefix_start_N[n], rows.prefix_length_N[n] = start + 3, prefix
        rows.suffix_start_N[n], rows.step_N[n] = slots - start - length, length - prefix - 1
        for side, states in ((0, k), (1, v)):
            kv[0, side, start + 3 : start + 3 + prefix] = states[start : start + prefix]
            own = slots - start - length
            kv[0, side, own : own + length - prefix - 1] = states[start + prefix : start + length - 1]
    last = ends[1:].long() - 1
    found = Slotted.decode(table, rows).attend(*(one[last][:, :, None] for one in (q, k, v)), 0, rule)
    assert torch.equal(found[:, 0], wanted[last])

    # and read in two parts, right-padded, into slots that begin anywhere
    kv.fill_(torch.nan)
    starts, have = [7 + 2 * int(start) for start in ends[:-1]], [max(0, length - new) for length in lengths]
    news = [length - had for length, had in zip(lengths, have, strict=True)]
    for states, at in ((k, 0), (v, 1)):
        for start, begin, had in zip(ends.tolist(), starts, have, strict=False):
            kv[0, at, begin : begin + had] = states[start : start + had]
    take = torch.zeros(len(lengths), new, dtype=torch.int64)
    for row, (start, had, count) in enumerate(zip(ends.tolist(), have, news, strict=False)):
        take[row, :count] = start + had + torch.arange(count)
    padded = (one[take].transpose(1, 2) for one in (q, k, v))
    found = Slotted.prompts(table, starts, have, news).attend(*padded, 0, rule)
    for row, count in enumerate(news):
        assert torch.equal(found[row, :count], wanted[take[row, :count]])


def test_another_order_shows(monkeypatch):
    """What is asserted above is no matter of course: other blocks give other bits."""
    from strop.models import exact
    from strop.ops import exact as products

    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(130, 4, 8, generator=generator)
    given = *qkv.split([2, 1, 1], 1), exact.Runs.packed(Packed([130], torch.tensor([0, 130]))), Rule(0.3)
    x, w = torch.randn(64, 96, generator=generator), torch.randn(8, 96, generator=generator)
    wanted = exact.attend(*given), products.product(x, w)
    monkeypatch.setattr(exact, "BLOCK_S", 32)
    monkeypatch.setitem(products.TILES, torch.float32, (16, []))
    found = exact.attend(*given), products.product(x, w)
    for one, other in zip(found, wanted, strict=True):
        assert not torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# ---- whole models ----


@pytest.mark.parametrize(
    ("kind", "how"), [("llama", "bfloat16"), ("qwen2", "float32"), ("qwen3", "bfloat16"), ("llama", "autocast")]
)
def test_rollout_and_training_give_the_same_bits(kind, how):
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        dtype, num_layers = torch.bfloat16 if how == "bfloat16" else torch.float32, 2 if kind == "qwen3" else 1
        policy = policy_of(kind, dtype, num_hidden_layers=num_layers)
        rollout = generate(policy, PROMPTS, SAMPLING, num_samples=2, seed=0)
        assert rollout.engine.startswith("hf, exact layers")
        lines = rollout
        assert equal(logps_of(policy, lines[::-1])[::-1], rollout.logps)
        assert equal(logps_of(policy, lines[1:2]), rollout.logps[1:2])


def test_bits_do_not_depend_on_who_is_beside_a_row(monkeypatch):
    """Rows that wait enter slots that others have left: of the prompts' three slots and two rows of three."""
    policy = policy_of("qwen3", eos_token_id=list(range(1, 8)))
    found = generate(policy, PROMPTS, SAMPLING, num_samples=2, seed=2)
    assert len({len(ids) for ids in found.completion_ids}) > 1
    monkeypatch.setattr(decoding.Engine, "_num_slots", lambda engine: 10)
    waited = generate(policy, PROMPTS, SAMPLING, num_samples=2, seed=2)
    assert equal(waited.completion_ids, found.completion_ids)
    assert equal(waited.logps, found.logps)
    assert equal(logps_of(policy, found), found.logps)


def test_a_conversation_that_goes_on_has_the_same_bits():
    policy, cached = policy_of("llama"), CachedRows()
    first = generate(policy, PROMPTS, SAMPLING, seed=0, cached=cached.of([0, 1]), ignore_eos=True)
    assert cached.rows
    longer = [torch.cat([line.ids_T, torch.tensor([5, 6])]) for line in first]
    second = generate(policy, longer, SAMPLING, seed=1, cached=cached.of([0, 1]), ignore_eos=True)
    assert equal(logps_of(policy, second), second.logps)
    again = generate(policy, longer, SAMPLING, seed=1, ignore_eos=True)
    assert equal(again.logps, second.logps)


def test_values_and_gradients_are_those_of_the_ordinary_way():
    model = model_of("qwen3")
    lines = [Trajectory.of([3], [4, 5, 6]), Trajectory.of([2, 7], [8, 9])]
    found = []
    for exact in (False, True):
        policy = Policy(model)
        if exact:
            policy.be_exact()
        model.zero_grad()
        logps_n = policy.logps(TokenBatch.of(lines), temperature=0.7)
        (logps_n * torch.linspace(-1, 2, len(logps_n))).sum().backward()
        found.append([logps_n.detach(), *(param.grad.clone() for param in model.parameters())])
    for wanted, other in zip(*found, strict=True):
        torch.testing.assert_close(other, wanted, rtol=1e-4, atol=1e-5)


# ---- a step ----


def trainer(model=None, algorithm=GRPO, **options):
    reward = lambda completion_ids: [float(len(ids) + int(ids[0])) for ids in completion_ids]  # noqa: E731
    given = {"group_size": 2, "max_new_tokens": 3, "exact": True, "kl_coef": 0.0, **options}
    return algorithm(model=model_of("qwen2") if model is None else model, reward_fn=reward, **given)


@pytest.mark.parametrize(
    "options",
    [
        {"micro_batch_size": 1, "kl_coef": 0.1},
        {"entropy_coef": 0.1, "importance_level": "sequence", "temperature": 0.5},
    ],
)
def test_a_step_begins_on_policy(options):
    """Old log-probs are the rollout's: the first ratio is exactly 1, of every kind of loss."""
    metrics = trainer(**options).train_step(PROMPTS)
    assert metrics["mismatch_kl"] == 0.0
    assert metrics["mismatch_ratio_max"] == metrics["ratio/mean"] == metrics["ratio/max"] == 1.0
    assert metrics["grad_norm"] > 0
    assert metrics["mean_kl"] == 0.0  # the reference is exact too


def test_ppo_begins_on_policy():
    metrics = trainer(algorithm=PPO, inner_epochs=1).train_step(PROMPTS)
    assert metrics["mismatch_kl"] == 0.0
    assert metrics["ratio/max"] == 1.0


# ---- what it refuses ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_server": "http://127.0.0.1:1"}, "rollout_server must be None with exact"),
        ({"lora": {"r": 2}}, "lora must be None with exact"), ({"shard": "full"}, "shard must be 'none' with exact"),
        ({"compile": True}, "compile must be False with exact"), ({"dropout": True}, "dropout must be False with exact"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_exact(options, message):
    for algorithm in (GRPO, PPO):
        with pytest.raises(ValueError, match=message):
            trainer(model=object(), algorithm=algorithm, **options)


def test_models_that_cannot_be_exact_say_why(monkeypatch):
    for kind, changes, why in (
        ("gemma", {}, "its activation is GELUTanh"), ("llama", {"intermediate_size": 26}, "no multiples of 8"),
        ("gpt2", {"n_embd": 16, "n_head": 2}, "its projections|'layers'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"exact must be False for this .*{why}"):
            trainer(model=model_of(kind, **changes))
    with pytest.raises(ValueError, match="exact must be False for a Linear"):
        trainer(model=torch.nn.Linear(2, 2))
    monkeypatch.setattr("strop.models.trial.on_gpu_or_interpreted", lambda tensor: "it needs a GPU")
    with pytest.raises(ValueError, match="exact must be False for this LlamaForCausalLM, found True: it needs a GPU"):
        trainer(model=model_of("llama"))


def test_what_comes_later_is_refused_too():
    policy = policy_of("llama")
    lines = [Trajectory.of([3], [4, 5])]
    handle = policy.model.model.layers[0].mlp.register_forward_hook(lambda *arguments: None)
    with pytest.raises(ValueError, match="exact must be False for a model with hooks on parts of its layers"):
        logps_of(policy, lines)
    handle.remove()
    assert logps_of(policy, lines)


def test_the_moe_is_exact_already():
    from strop.moe import MoEConfig, MoETransformer

    config = MoEConfig(vocab_size=20, hidden_dim=16, num_layers=1, num_heads=2, head_dim=8)
    metrics = trainer(model=MoETransformer(config)).train_step(PROMPTS)
    assert metrics["mismatch_kl"] == 0.0
