"""A prefix that sequences share is read once: log-probs and gradients are those of reading it in each sequence."""

import pytest
import torch
from tiny_models import llama, moe, plain
from tiny_types import model_of

from strop.data.batch import TokenBatch, Trajectory
from strop.models import as_policy, shared_prefixes
from strop.models.attention import Packed, Rule
from strop.models.shared_prefixes import WithPrefixes, flash_on_cpu, flash_on_cpu_bwd

# plain causal attention: a prefix and what follows it are joined by their log-sum-exp
PLAIN = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma",
    "phi",
    "phi3",
    "gpt_neox",
    "starcoder2",
    "mixtral",
    "olmo2",
    "gpt2",
    "stablelm",
)
# windows, chunks, caps, sinks, values of another size than keys: in layers with them each sequence attends by itself
OTHERS = ("mistral", "gemma2", "gemma3_text", "gpt_oss", "llama4_text", "deepseek_v3")


def trajectories(prompts=(40, 36), lengths=(5, 9, 5, 1), seed=0):
    """Completions of each prompt and one row that shares nothing, in a random order."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(2, 30, (n,), generator=generator) for n in prompts]
    rows = [(prompt, torch.randint(2, 30, (n,), generator=generator)) for prompt in ids for n in lengths]
    rows.append((ids[0][:7], ids[0][7:13]))
    return [Trajectory.of(*rows[i]) for i in torch.randperm(len(rows), generator=generator).tolist()]


@pytest.fixture
def in_float64(monkeypatch):
    """Norms, rotations and softmax compute in float64, where the models' own code says float32."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def numbers(policy, rows, shared, entropy=True):
    """Log-probs, entropies, and the gradients of a sum with another factor for each token."""
    assert policy.shares, policy.no_sharing_because
    policy.model.zero_grad()
    batch = TokenBatch.of(rows)
    assert batch.groups
    batch.groups = batch.groups if shared else []
    both = policy.logps(batch, entropy=entropy)
    logps_n, entropies_n = both if entropy else (both, torch.zeros(1))
    ((logps_n * torch.linspace(-1, 2, len(logps_n))).sum() + 0.3 * entropies_n.sum()).backward()
    grads = {name: param.grad.clone() for name, param in policy.model.named_parameters() if param.grad is not None}
    return {"logps": logps_n.detach(), "entropies": entropies_n.detach(), **grads}


def check_equal(found, wanted, allowed):
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert float((found[name] - values).abs().max()) <= allowed * max(1.0, float(values.abs().max())), name


@pytest.mark.parametrize("kind", [*PLAIN, *OTHERS])
def test_numbers_are_those_without_sharing(kind, in_float64, monkeypatch):
    policy, joined = as_policy(model_of(kind, {})), []
    flash = WithPrefixes.flash
    monkeypatch.setattr(WithPrefixes, "flash", lambda self, *states: joined.append(1) or flash(self, *states))
    rows = trajectories()
    wanted = numbers(policy, rows, False)
    joined.clear()
    check_equal(numbers(policy, rows, True), wanted, 1e-10)
    assert bool(joined) == (kind in (*PLAIN, "gemma3_text", "llama4_text"))  # these have plain layers too


def test_each_token_is_read_once():
    policy, seen = as_policy(model_of("llama", {})), []
    policy.check_reading()
    policy.model.model.embed_tokens.register_forward_hook(lambda module, ids, out: seen.append(ids[0].numel()))
    for shared, num_tokens in ((False, 4 * 40 + 4 * 36 + 2 * 20 + 13), (True, 40 + 36 + 2 * 20 + 13)):
        numbers(policy, trajectories(), shared)
        assert seen.pop() == num_tokens


@pytest.mark.parametrize("mode", ["checkpointing", "lora", "autocast", "bfloat16", "float32", "longrope"])
def test_modes_of_training(mode):
    changes = {}
    if mode == "longrope":  # rows on both sides of the boundary, which is at 16 tokens
        long = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0 + i for i in range(8)]}
        changes = {"rope_parameters": {"rope_theta": 1e4, "original_max_position_embeddings": 16, **long}}
        changes["original_max_position_embeddings"] = 16
    model = model_of("phi3" if mode == "longrope" else "llama", changes).train()
    if mode == "checkpointing":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif mode == "lora":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    elif mode in ("autocast", "bfloat16", "float32"):
        model.to({"autocast": torch.float32}.get(mode) or getattr(torch, mode))
    policy = as_policy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        wanted, found = (numbers(policy, trajectories(), shared, entropy=False) for shared in (False, True))
    check_equal(found, wanted, {"autocast": 0.05, "bfloat16": 0.05, "float32": 1e-4}.get(mode, 1e-5))
    if mode == "longrope":
        assert policy.boundaries is not None


def test_a_conversation_shares_its_first_turns():
    turns = [torch.arange(2, 30).repeat(n) for n in (1, 2)]
    rows = [Trajectory.of(turns[0], torch.cat([turns[1], torch.tensor([i, 7, i])])) for i in range(3, 7)]
    assert [(length, sorted(which)) for length, which in TokenBatch.of(rows).groups] == [(84, [0, 1, 2, 3])]
    policy = as_policy(model_of("llama", {}))
    check_equal(numbers(policy, rows, True), numbers(policy, rows, False), 1e-6)


def test_models_that_do_not_share_say_why():
    def reason(model, when="auto"):
        policy = as_policy(model)
        policy.set_sharing(when)
        assert not policy.shares
        return policy.no_sharing_because

    assert reason(llama(), "never") == 'share_prefixes is "never"'
    assert reason(moe()) == "strop's engine reads each row by itself"
    assert reason(plain()) == "it is a 'plain' model"
    assert reason(torch.compile(llama(), backend="eager")).startswith(
        "it does not read packed sequences: it is compiled"
    )
    assert reason(model_of("falcon_h1", {})).startswith("it does not read packed sequences: ")


def test_a_trial_shows_what_a_model_does_with_a_prefix():
    """A layer that reaches over to the token before it, which is another one where prefixes stand apart."""
    model = llama().double()

    def with_the_token_before(module, inputs, states_BTH):
        position_BT = POSITIONS[-1]
        before = torch.nn.functional.pad(states_BTH[:, :-1], (0, 0, 1, 0))
        return states_BTH + before * (position_BT > 0)[..., None]

    POSITIONS = []
    model.model.register_forward_pre_hook(
        lambda module, given, named: POSITIONS.append(
            named["position_ids"]
            if named.get("position_ids") is not None
            else torch.arange(named["input_ids"].shape[1])[None]
        ),
        with_kwargs=True,
    )
    model.model.embed_tokens.register_forward_hook(with_the_token_before)
    policy = as_policy(model)
    assert policy.packs, policy.no_packing_because
    assert "its logits of a shared prefix are not those of its rows" in policy.no_sharing_because


def test_a_policy_that_was_tried_tries_again_when_sharing_is_switched():
    policy = as_policy(llama())
    policy.set_sharing("never")
    assert not policy.shares
    policy.set_sharing("always")
    assert policy.shares


# ---- the kernels ----


def reference_flash(
    q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None, **unused
):
    """Attention of packed sequences by its definition, with the signature of torch's operator on a GPU."""
    assert dropout_p == 0.0
    assert max_q == int(cu_q.diff().max())
    assert max_k == int(cu_k.diff().max())
    out, lse = [], []
    for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        keys, values = (one[c:d].repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[a:b], keys) * scale
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        lse.append(scores.logsumexp(-1))
    return torch.cat(out), torch.cat(lse, 1), torch.zeros(2), torch.zeros(0), torch.zeros(0)


def reference_flash_bwd(
    d_out, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, *, scale=None
):
    """The gradients for weights exp(score − lse), where lse may be that of more keys than these."""
    grads = [torch.zeros_like(one) for one in (q, k, v)]
    heads_per_key = q.shape[1] // k.shape[1]
    for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        keys, values = (one[c:d].repeat_interleave(heads_per_key, 1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[a:b], keys) * scale
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
        p = (scores - lse[:, a:b, None]).exp()
        dp = torch.einsum("qhd,khd->hqk", d_out[a:b], values)
        ds = p * (dp - (d_out[a:b] * out[a:b]).sum(-1).T[..., None]) * scale
        grads[0][a:b] += torch.einsum("hqk,khd->qhd", ds, keys)
        grads[1][c:d] += torch.einsum("hqk,qhd->khd", ds, q[a:b]).unflatten(1, (-1, heads_per_key)).sum(2)
        grads[2][c:d] += torch.einsum("hqk,qhd->khd", p, d_out[a:b]).unflatten(1, (-1, heads_per_key)).sum(2)
    return tuple(grads)


@pytest.fixture
def operators_of_a_gpu(monkeypatch):
    """Calls go through torch's own operators with their schemas; on the CPU these compute by the definition."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", reference_flash, "CPU")
    library.impl("_flash_attention_backward", reference_flash_bwd, "CPU")
    monkeypatch.setattr(shared_prefixes, "flash_on_cpu", torch.ops.aten._flash_attention_forward)
    monkeypatch.setattr(shared_prefixes, "flash_on_cpu_bwd", torch.ops.aten._flash_attention_backward)
    yield
    library._destroy()


def states_of(batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, batch.num_tokens, 8, dtype=torch.float64, generator=generator) for heads in (6, 2, 2)]


def check_attention(batch):
    """Attention and its gradients are those of each sequence alone."""
    once = batch.with_prefixes(batch.groups)
    token_M, place_N = once.prefixes.token_M, once.prefixes.place_N
    states = [one.requires_grad_() for one in states_of(once)]
    out = WithPrefixes(once).attend(*states, 0, Rule(0.4))
    d_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, states, d_out)
    alone = [one[:, :, place_N] for one in states]  # differentiable: the gradients of a prefix's copies add up
    wanted = Packed(batch.lengths, batch.cu_seqlens).attend(*alone, 0, Rule(0.4))[:, token_M]
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(grads, torch.autograd.grad(wanted, states, d_out), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "rows",
    [
        {},
        {"lengths": (1, 1, 1, 1)},
        {"prompts": (33,), "lengths": (40,) * 5},
        {"prompts": (33, 50), "lengths": (3, 2, 77)},
    ],
)
def test_attention_of_a_shared_prefix(rows):
    check_attention(TokenBatch.of(trajectories(**rows)))


def test_the_same_code_with_the_operators_of_a_gpu(operators_of_a_gpu):
    check_attention(TokenBatch.of(trajectories()))


def test_flash_attention_on_a_cpu_against_its_definition():
    generator = torch.Generator().manual_seed(3)
    lengths_q, lengths_k = [4, 4, 1, 7], [3, 3, 9, 5]
    cu_q, cu_k = (torch.tensor([0, *one]).cumsum(0).int() for one in (lengths_q, lengths_k))
    q, d_out = (torch.randn(16, 4, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    k, v = (torch.randn(20, 2, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    limits = cu_q, cu_k, 7, 9, 0.0, False
    out, lse, *_ = flash_on_cpu(q, k, v, *limits, False, scale=0.3)
    wanted = reference_flash(q, k, v, *limits, False, scale=0.3)
    torch.testing.assert_close((out, lse), wanted[:2], rtol=0, atol=1e-12)
    found = flash_on_cpu_bwd(d_out, q, k, v, out, lse, *limits, None, None, scale=0.3)
    torch.testing.assert_close(
        found, reference_flash_bwd(d_out, q, k, v, out, lse, *limits, None, None, scale=0.3), rtol=0, atol=1e-12
    )
