"""Experts chosen in a rollout: recorded for every token, and used again by the training forward."""

import contextlib
import dataclasses

import pytest
import torch
from tiny_models import batch_of, llama, moe, read_padded
from torch.nn.functional import silu

from strop.algorithms.grpo import GRPO, GRPOConfig
from strop.data.batch import TokenBatch
from strop.models import as_policy
from strop.models.attention import Unsupported
from strop.models.routing import NONE, Routers, routers_of
from strop.rollout import Sampling, generate
from strop.rollout.checks import probe
from strop.rollout.decoding import Engine, engine_of

PROMPTS = [[1, 2, 3], [7], [5, 6, 7, 8, 9, 10, 11, 12], [4, 4]]
KINDS = {
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                  "shared_expert_intermediate_size": 16, "norm_topk_prob": False},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "head_dim": 8,
                  "norm_topk_prob": True},
}  # fmt: skip
LAYERS = 2


def model_of(kind, eos_token_id=None, **changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.3,
        "bos_token_id": None, "eos_token_id": eos_token_id, "pad_token_id": None,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(sizes | KINDS.get(kind, {}) | changes)))
    model.set_experts_implementation("eager")  # the others know no float64
    return model.eval()


def routers_in(model):
    return [module for module in model.modules() if type(module).__name__.endswith("Router")]


def own_choices(model, ids):
    """[T, L, k] of a plain forward."""
    seen = []
    hooks = [one.register_forward_hook(lambda *args: seen.append(args[2][2])) for one in routers_in(model)]
    with torch.no_grad():
        model(torch.as_tensor(ids)[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1)


@contextlib.contextmanager
def other_experts(model, most=10**9):
    """Within, routers choose by logits that something is added to, and weigh by those that it is not added to.

    most   only where they see at most so many tokens
    """
    bias = torch.tensor([2.0, -1.0, 0.5, -2.0, 1.0, 0.0])

    def choose(module, arguments, output):
        logits, weights, _ = output
        added = bias.to(logits.dtype) if len(logits) <= most else 0.0
        experts = (logits + added).topk(module.top_k).indices
        chosen = logits.float().softmax(-1).gather(-1, experts)
        if getattr(module, "norm_topk_prob", True):
            chosen = chosen / chosen.sum(-1, keepdim=True)
        return logits, chosen.to(weights.dtype), experts

    hooks = [one.register_forward_hook(choose) for one in routers_in(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def perturbed_rollout(policy, **options):
    with other_experts(policy.model):
        return generate(
            policy, PROMPTS, Sampling(max_new_tokens=12), num_samples=3, seed=5, record_routing=True, **options
        )


def without_routing(batch):
    return dataclasses.replace(batch, routing_NLk=None)


# ---- recording ----


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_but_the_last_has_the_experts_of_a_plain_forward(kind):
    """Of prompts that samples share, and of rows that end at different times."""
    model = model_of(kind, eos_token_id=list(range(8)))
    found = generate(as_policy(model), PROMPTS, Sampling(max_new_tokens=20), num_samples=4, seed=0, record_routing=True)
    assert len({len(completion) for completion in found.completion_ids}) > 4
    for line in found:
        assert line.routing_TLk.shape == (len(line), LAYERS, KINDS[kind]["num_experts_per_tok"])
        assert line.routing_TLk.dtype == torch.int16
        assert (line.routing_TLk[-1] == NONE).all()
        assert torch.equal(line.routing_TLk[:-1].long(), own_choices(model, line.ids_T)[:-1])


def test_rows_that_wait_for_others_to_end_and_prompts_in_several_rounds(monkeypatch):
    model = model_of("mixtral", eos_token_id=list(range(8)))
    policy = as_policy(model)
    wanted = generate(policy, PROMPTS, Sampling(max_new_tokens=20), num_samples=4, seed=0, record_routing=True)
    rounds = []
    plan = Engine._rounds

    def few(self, *given):
        rounds.extend(plan(self, *given))
        return iter(rounds)

    monkeypatch.setattr(Engine, "_num_slots", lambda self: 70)  # three rows of 20 slots at once
    monkeypatch.setattr(Engine, "_rounds", few)
    found = generate(policy, PROMPTS * 3, Sampling(max_new_tokens=20), num_samples=4, seed=0, record_routing=True)
    assert len(rounds) > 1
    assert max(lanes for *_, lanes in rounds) <= 3
    for one, other in zip(found[:16], wanted, strict=True):
        assert torch.equal(one.ids_T, other.ids_T)
    for line in found:
        assert torch.equal(line.routing_TLk[:-1].long(), own_choices(model, line.ids_T)[:-1])


def test_recording_changes_no_completion():
    policy = as_policy(model_of("qwen3_moe"))
    plain, recorded = (
        generate(policy, PROMPTS, Sampling(max_new_tokens=9), num_samples=2, seed=3, record_routing=record)
        for record in (False, True)
    )
    assert plain[0].routing_TLk is None
    for one, other in zip(plain.completion_ids, recorded.completion_ids, strict=True):
        assert torch.equal(one, other)
    assert not any(one._forward_hooks for one in policy.model.modules())


def test_the_trial_of_the_engine_does_not_judge_choices():
    """A step, which reads one token of each of three rows, chooses other experts than the forward that it is compared with."""
    policy = as_policy(model_of("mixtral"))
    with other_experts(policy.model, most=len(probe(policy))):
        engine = engine_of(policy)
    assert isinstance(engine, Engine), engine


# ---- replaying ----


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_the_rollouts_where_its_experts_were_others(kind):
    policy = as_policy(model_of(kind))
    rollout = perturbed_rollout(policy)
    batch = TokenBatch.of(rollout)
    with torch.no_grad():
        replayed, own = policy.logps(batch), policy.logps(without_routing(batch))
    drawn = torch.cat(rollout.logps)
    torch.testing.assert_close(replayed, drawn, rtol=0, atol=2e-5)
    assert (own - drawn).abs().max() > 0.1  # the test can fail
    [(changed, places)] = [count.tolist() for count in policy.routers.counts]
    assert places == LAYERS * sum(len(line) - 1 for line in rollout)
    assert 0.3 * places < changed <= places


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [False, True])
def test_replaying_ones_own_choices_changes_nothing(kind, padded):
    policy = as_policy(model_of(kind).double())
    rollout = generate(policy, PROMPTS, Sampling(max_new_tokens=9), num_samples=2, seed=3, record_routing=True)
    policy = read_padded(policy) if padded else policy
    batch = TokenBatch.of(rollout)
    replayed, own = policy.logps(batch), policy.logps(without_routing(batch))
    torch.testing.assert_close(replayed, own, rtol=0, atol=1e-12)
    assert [count[0].item() for count in policy.routers.counts] == [0]
    grads = [torch.autograd.grad(logps.sum(), list(policy.model.parameters()), allow_unused=True)
             for logps in (replayed, own)]  # fmt: skip
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)  # the routers' softmax is in float32


def test_changed_places_are_counted():
    """Two places of seven with a record; the same experts in another order are no change."""
    policy = as_policy(model_of("mixtral"))
    batch = batch_of([([1, 2, 3], [4, 5]), ([6], [7, 8])])
    chosen = torch.cat([own_choices(policy.model, row) for row in ([1, 2, 3, 4, 5], [6, 7, 8])])
    chosen = chosen.flip(-1)
    for token in (0, 6):
        chosen[token, 1, 0] = next(e for e in range(6) if e not in chosen[token, 1])
    chosen[4] = NONE
    # of the last layer alone, so that what a token chooses there depends on no other choice
    policy.logps(dataclasses.replace(batch, routing_NLk=torch.where(torch.tensor([[[False], [True]]]), chosen, NONE)))
    assert policy.routers.counts[-1].tolist() == [2, 7]


def by_hand(model, ids, chosen_TLk):
    """[T, V] of one row: attention is the model's, experts are summed up one by one with one-hot weights, in float64."""
    chosen = chosen_TLk.long()
    layers = model.model.layers

    def block_of(layer, block):
        def forward(states):
            x = states.flatten(0, 1)
            probs = (x @ block.gate.weight.T).softmax(-1)
            mask = torch.zeros_like(probs).scatter(-1, chosen[:, layer], 1.0)
            weights = probs * mask
            if getattr(block.gate, "norm_topk_prob", True):
                weights = weights / weights.sum(-1, keepdim=True)
            out = torch.zeros_like(x)
            for e in range(weights.shape[1]):
                gate, up = (x @ block.experts.gate_up_proj[e].T).chunk(2, -1)
                out = out + weights[:, e, None] * ((silu(gate) * up) @ block.experts.down_proj[e].T)
            if hasattr(block, "shared_expert"):
                out = out + torch.sigmoid(block.shared_expert_gate(x)) * block.shared_expert(x)
            return out.view_as(states)

        return forward

    for layer, one in enumerate(layers):
        one.mlp.forward = block_of(layer, one.mlp)
    try:
        return model(torch.as_tensor(ids)[None]).logits[0]
    finally:
        for one in layers:
            del one.mlp.forward


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_a_forward_by_hand_with_forced_experts(kind):
    model = model_of(kind).double()
    prompt, completion = [3, 1, 4, 1], [5, 9, 2, 6, 5]
    ids, k = torch.tensor(prompt + completion), KINDS[kind]["num_experts_per_tok"]
    chosen = torch.rand(len(ids), LAYERS, 6, generator=torch.Generator().manual_seed(0)).argsort(-1)[..., :k]
    policy = as_policy(model)
    batch = dataclasses.replace(batch_of([(prompt, completion)]), routing_NLk=chosen.short())
    params = dict(model.named_parameters())
    found = policy.logps(batch)
    wanted = by_hand(model, ids, chosen).log_softmax(-1)[3:-1].gather(-1, ids[4:, None])[:, 0]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)  # the routers' softmax is in float32
    weights = torch.linspace(-1, 2, 5, dtype=torch.float64)
    grads = [torch.autograd.grad((one * weights).sum(), list(params.values())) for one in (found, wanted)]
    for name, one, other in zip(params, *grads, strict=True):
        assert (one - other).norm() < 2e-6 * other.norm(), name
    of_routers = [other for name, other in zip(params, grads[1], strict=True) if name.endswith("mlp.gate.weight")]
    assert len(of_routers) == LAYERS
    assert all(grad.abs().max() > 1e-3 for grad in of_routers)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_padded_and_one_by_one_are_the_same(kind):
    policy = as_policy(model_of(kind).double())
    lines = perturbed_rollout(policy)[1::2]
    assert policy.packs
    packed = policy.logps(TokenBatch.of(lines))
    alone = torch.cat([policy.logps(TokenBatch.of([line])) for line in lines])
    padded = read_padded(policy).logps(TokenBatch.of(lines))
    torch.testing.assert_close(packed, alone, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(padded, alone, rtol=1e-6, atol=1e-6)
    counts = torch.stack(policy.routers.counts)
    assert torch.equal(counts[0], counts[-1])
    assert torch.equal(counts[0], counts[1:-1].sum(0))


@pytest.mark.parametrize("padded", [False, True])
def test_layers_computed_again_in_the_backward_choose_the_same(padded):
    grads, counts = [], []
    for again in (False, True):
        policy = as_policy(model_of("qwen3_moe"))
        batch = TokenBatch.of(perturbed_rollout(policy))
        if again:
            policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            policy.model.train()
        policy = read_padded(policy) if padded else policy
        policy.logps(batch).sum().backward()
        grads.append({name: param.grad for name, param in policy.model.named_parameters()})
        counts.append([count.tolist() for count in policy.routers.counts])
        assert not any(one._forward_hooks for one in routers_in(policy.model))
    assert counts[0] == counts[1]
    assert len(counts[0]) == 1
    for name in grads[0]:
        torch.testing.assert_close(grads[0][name], grads[1][name], rtol=1e-4, atol=1e-5)


def test_the_reference_chooses_by_itself():
    policy = as_policy(model_of("mixtral"))
    batch = TokenBatch.of(perturbed_rollout(policy))
    with torch.no_grad():
        wanted = policy.logps(without_routing(batch))
    torch.testing.assert_close(policy.reference().logps(batch), wanted, rtol=0, atol=1e-6)
    assert policy.routers.counts == []


# ---- GRPO ----


def rewards(completion_ids):
    return [float(ids.sum() % 7) for ids in completion_ids]


def grpo_of(model, **options):
    defaults = {"reward_fn": rewards, "group_size": 4, "kl_coef": 0.05, "max_new_tokens": 8, "learning_rate": 1e-3,
                "replay_routing": True, "seed": 0}  # fmt: skip
    return GRPO(model=model, **(defaults | options))


def weights_of(trainer):
    return torch.cat([param.detach().flatten() for param in trainer.policy.model.parameters()])


@pytest.mark.parametrize("more", [{}, {"old_logps": "recompute"}], ids=["rollout's old", "recomputed old"])
def test_steps_with_others_experts_in_the_rollout(more, monkeypatch):
    """The mismatch is there without replay, and gone with it; how often the routers would choose otherwise is told."""
    found = {}
    for replay in (False, True):
        trainer = grpo_of(model_of("mixtral"), replay_routing=replay, **more)
        sample = trainer.complete

        def perturbed(*given, trainer=trainer, sample=sample):
            with other_experts(trainer.policy.model):
                return sample(*given)

        monkeypatch.setattr(trainer, "complete", perturbed)
        found[replay] = trainer.train_step(PROMPTS)
    assert found[True]["mismatch_kl"] < 1e-8 < 1e-2 < found[False]["mismatch_kl"]
    assert found[True]["mismatch_ratio_max"] == pytest.approx(1, abs=1e-3)
    assert 0.3 < found[True]["routing/changed_fraction"] <= 1
    assert "routing/changed_fraction" not in found[False]


def test_micro_batches_checkpointing_and_padding_make_the_same_step():
    found = {}
    ways = {
        "whole": {},
        "by one": {"micro_batch_size": 1},
        "checkpointed": {"gradient_checkpointing": True},
        "padded": {},
    }
    for name, options in ways.items():
        trainer = grpo_of(model_of("qwen2_moe").double(), inner_epochs=2, learning_rate=1e-2, **options)
        if name == "padded":
            read_padded(trainer.policy)
        found[name] = trainer.train_step(PROMPTS[:2])["routing/changed_fraction"], weights_of(trainer)
    changed, weights = found.pop("whole")
    assert changed > 0  # after the first of the step's updates
    for other_changed, other_weights in found.values():
        torch.testing.assert_close(other_weights, weights, rtol=0, atol=1e-4)
        assert (other_weights - weights).norm() < 1e-6 * weights.norm()
        assert other_changed == pytest.approx(changed, abs=1e-9)


def test_with_adapters_and_groups_sampled_again():
    pytest.importorskip("peft")
    trainer = grpo_of(
        model_of("qwen3_moe"), lora={"r": 2, "target_modules": ("q_proj", "v_proj")}, resample_rounds=1,
        reward_fn=lambda completion_ids: [float(len(ids) > 3 and ids[0] > 30) for ids in completion_ids],
    )  # fmt: skip
    metrics = trainer.train_step(PROMPTS)
    assert metrics["mismatch_kl"] < 1e-9
    assert metrics["routing/changed_fraction"] == 0
    assert metrics["reward/resampled_fraction"] > 0


def test_a_step_of_which_nothing_counts_has_no_fraction():
    metrics = grpo_of(model_of("mixtral"), mask_truncated=True).train_step(PROMPTS)
    assert "routing/changed_fraction" not in metrics


# ---- what is refused ----


class Greet:
    def reset(self, **columns):
        return "hello"

    def step(self, text):
        return None


def test_models_without_such_routers_are_refused_when_the_trainer_is_made():
    from transformers import AutoConfig, AutoModelForCausalLM

    sigmoid = AutoModelForCausalLM.from_config(AutoConfig.for_model(
        "deepseek_v3", vocab_size=40, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=0,
        q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
    ))  # fmt: skip
    for model, why in [
        (llama(), "LlamaForCausalLM: it has no routers as Mixtral and Qwen's MoE models have them"),
        (moe(), "MoEForCausalLM: strop's own MoE routes alike in rollout and training, bit for bit"),
        (sigmoid, "its DeepseekV3TopkRouter weighs experts by something else than the softmax of its logits"),
        (model_of("qwen3_moe", mlp_only_layers=[0, 1]), "it has no routers"),
    ]:
        with pytest.raises(ValueError, match=f"replay_routing must be False for this .*{why}"):
            grpo_of(model)


def test_servers_environments_and_compiled_models_are_refused():
    with pytest.raises(ValueError, match="replay_routing must be False with rollout_server"):
        GRPOConfig.from_options({"replay_routing": True, "rollout_server": "http://127.0.0.1:1"})
    with pytest.raises(ValueError, match="replay_routing must be False with an environment, tools or an agent"):
        grpo_of(model_of("mixtral"), environment=Greet)
    with pytest.raises(ValueError, match="replay_routing must be False with compile=True"):
        GRPOConfig.from_options({"replay_routing": True, "compile": True})


def test_wrong_routing_is_named():
    policy = as_policy(model_of("mixtral"))
    batch = batch_of([([1, 2, 3], [4, 5])])
    with pytest.raises(ValueError, match=r"routing must be of shape \[N, 2, 2\], found \[5, 2, 3\]"):
        policy.logps(dataclasses.replace(batch, routing_NLk=torch.zeros(5, 2, 3, dtype=torch.int16)))
    with pytest.raises(ValueError, match="one entry for each of the 5 tokens, found 4"):
        policy.logps(dataclasses.replace(batch, routing_NLk=torch.zeros(4, 2, 2, dtype=torch.int16)))
    with pytest.raises(ValueError, match="routing must be None: it has no routers"):
        as_policy(llama()).logps(dataclasses.replace(batch, routing_NLk=torch.zeros(5, 2, 2, dtype=torch.int16)))
    with pytest.raises(ValueError, match="record_routing must be False: it has no routers"):
        generate(as_policy(llama()), PROMPTS, Sampling(max_new_tokens=2), record_routing=True)
    lines = generate(policy, [[1, 2]], Sampling(max_new_tokens=3), num_samples=2, record_routing=True)
    lines[1].routing_TLk = None
    with pytest.raises(ValueError, match="in all trajectories or in none"):
        TokenBatch.of(lines)


@pytest.mark.filterwarnings("ignore:rollouts of this")
def test_a_model_that_our_engine_cannot_run_is_refused(monkeypatch):
    def fails(seen):
        raise Unsupported("of a test")

    monkeypatch.setattr("strop.rollout.checks.cache_shape", fails)
    model = model_of("qwen2_moe")
    with pytest.raises(
        ValueError, match="replay_routing must be False: rollouts of this Qwen2MoeForCausalLM go through"
    ):
        grpo_of(model).train_step(PROMPTS)


@pytest.mark.parametrize(("kind", "normalises"), [("mixtral", True), ("qwen2_moe", False), ("qwen3_moe", True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_how_a_model_weighs_its_experts_is_found(kind, normalises, dtype):
    found = routers_of(model_of(kind).to(dtype))
    assert isinstance(found, Routers)
    assert found.normalises is normalises
    assert (len(found.modules), found.top_k) == (LAYERS, KINDS[kind]["num_experts_per_tok"])


def test_layers_without_a_router_have_no_place_in_the_record():
    policy = as_policy(model_of("qwen3_moe", mlp_only_layers=[0]))
    rollout = perturbed_rollout(policy)
    assert rollout[0].routing_TLk.shape[1:] == (1, 3)
    with torch.no_grad():
        replayed = policy.logps(TokenBatch.of(rollout))
    torch.testing.assert_close(replayed, torch.cat(rollout.logps), rtol=0, atol=2e-5)
