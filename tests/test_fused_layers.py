"""Decoder layers in few kernels: output and gradients are those of the model's own layers."""

import copy

import pytest
import torch

from strop.algorithms.sft import SFT
from strop.data.batch import TokenBatch, Trajectory
from strop.models import Policy, layer_kernels, trial

SHAPE = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip
KINDS = ("llama", "qwen2", "qwen3", "mistral")


def model_of(kind, dtype=torch.float32, **changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SHAPE, **changes}), dtype=dtype)
    with torch.no_grad():
        for param in model.parameters():
            param += 0.2 * torch.randn_like(param)
    return model


def batch_of(lengths=(9, 1, 14, 5)):
    generator = torch.Generator().manual_seed(len(lengths))
    lines = [torch.randint(2, 64, (n + 1,), generator=generator) for n in lengths]
    return TokenBatch.of([Trajectory.of(line[:1], line[1:]) for line in lines])


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels run on the CPU, through Triton's interpreter."""
    monkeypatch.setattr(trial, "on_gpu", lambda tensor: True)


def fused_policy(model):
    policy = Policy(model)
    assert policy.fuses, policy.no_fusing_because
    return policy


def numbers(policy, batch=None, dtype=None):
    """Log-probs and the gradients of a sum of them, each token with a weight of its own."""
    batch = batch or batch_of()
    policy.model.zero_grad()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        logps_n = policy.logps(batch)
    (logps_n * torch.linspace(-1, 2, len(logps_n))).sum().backward()
    return {"logps": logps_n.detach()} | {
        n: p.grad.clone() for n, p in policy.model.named_parameters() if p.requires_grad
    }


def apart(found, wanted):
    return {name: float((found[name].double() - w.double()).norm() / w.double().norm()) for name, w in wanted.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_the_models_own(kind, interpreted):
    model = model_of(kind)
    with torch.no_grad():
        policy = fused_policy(model)
    found, wanted = numbers(policy), numbers(Policy(copy.deepcopy(model).double()))
    own = Policy(model)
    own.was_tried, own.no_packing_because = True, "told so"
    errors, allowed = apart(found, wanted), apart(numbers(own), wanted)
    for name, error in errors.items():
        assert error <= 2 * allowed[name] + 1e-7, name
        assert error < 1e-4, name


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_under_autocast_it_errs_about_as_the_model_itself(kind, interpreted):
    model = model_of(kind)
    wanted = numbers(Policy(copy.deepcopy(model).double()))
    with torch.autocast("cpu", torch.bfloat16):
        policy = fused_policy(model)
    own = Policy(model)
    own.was_tried, own.no_packing_because = True, "told so"
    found, of_its_own = (apart(numbers(one, dtype=torch.bfloat16), wanted) for one in (policy, own))
    ratios = sorted(error / of_its_own[name] for name, error in found.items())
    assert 0 < found["logps"] < 0.05
    assert ratios[len(ratios) // 2] < 2  # Triton's interpreter cuts bits off where a GPU rounds: tests/gpu allows less
    assert ratios[-1] < 5


def test_a_window_and_a_scaling_are_those_the_model_asks_for(interpreted):
    """The trial's sequences are shorter than the window: its numbers alone could not tell."""
    model = model_of("mistral", sliding_window=9)
    model.model.layers[0].self_attn.scaling = 0.2
    found, wanted = numbers(fused_policy(model)), numbers(Policy(copy.deepcopy(model).double()))
    assert max(apart(found, wanted).values()) < 1e-4
    without = numbers(fused_policy(model_of("mistral", sliding_window=None)))
    assert apart(found, without)["logps"] > 1e-2


def test_layers_of_another_kind_stay_as_they_are_and_say_why(interpreted):
    def reason(model):
        policy = Policy(model)
        assert policy.packs
        assert not policy.fuses
        return policy.no_fusing_because

    assert reason(model_of("gemma")) == "its activation is GELUTanh"
    assert "other parts: input_layernorm, post_feedforward_layernorm" in reason(model_of("olmo2"))
    assert reason(model_of("llama", mlp_bias=True)) == "its products have biases in other places than before attention"
    assert reason(model_of("llama", intermediate_size=90)) == "its sizes are no multiples of 8"
    granite = model_of("granite", residual_multiplier=0.5)
    assert "the output of its GraniteDecoderLayer is another (relative error" in reason(granite)


@pytest.mark.parametrize(
    ("kind", "changes"), [("olmo2", {}), ("granite", {"residual_multiplier": 1.0}), ("llama", {"hidden_act": "relu"})]
)
def test_training_and_rollouts_recognise_the_same_layers(kind, changes, interpreted):
    from strop.rollout.decoding import engine_of

    policy = Policy(model_of(kind, **changes))
    reason = engine_of(policy).why_own
    assert policy.packs
    assert policy.no_fusing_because == reason
    assert (reason is None) == (kind == "granite")


def test_only_a_gpu_has_them():
    policy = Policy(model_of("llama"))
    assert policy.packs
    assert policy.no_fusing_because == "the tensors are on cpu, it needs a GPU"


def test_a_gradient_that_is_another_is_found(interpreted, monkeypatch):
    real = layer_kernels.gate_bwd

    def wrong(da_NF, gu_N2F):
        d_gu_N2F, m_NF = real(da_NF, gu_N2F)
        return d_gu_N2F * 1.001, m_NF

    monkeypatch.setattr(layer_kernels, "gate_bwd", wrong)
    policy = Policy(model_of("llama"))
    assert not policy.fuses
    assert "the gradient of its LlamaDecoderLayer is another" in policy.no_fusing_because


def test_nothing_is_left_in_the_model_and_a_hook_is_heard(interpreted):
    model = model_of("qwen2")
    policy = fused_policy(model)
    numbers(policy)
    assert not any("forward" in vars(module) for module in model.modules())
    heard = []
    model.model.layers[1].mlp.register_forward_hook(lambda *arguments: heard.append(1))
    wanted = numbers(policy)
    assert heard
    model.model.layers[1].mlp._forward_hooks.clear()
    assert max(apart(numbers(policy), wanted).values()) < 1e-5


def test_an_adapter_that_comes_later_counts(interpreted):
    import peft

    model = model_of("llama")
    policy = fused_policy(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    with_adapter = Policy(adapted)
    assert not with_adapter.fuses
    assert with_adapter.no_fusing_because == "its projections are more than products"
    wanted = with_adapter.logps(batch_of())
    torch.testing.assert_close(policy.logps(batch_of()), wanted, rtol=1e-5, atol=1e-5)


def test_attention_that_drops_out_stays_the_models_own(interpreted):
    model = model_of("llama")
    policy = fused_policy(model)
    wanted = numbers(policy)
    model.train()
    model.model.layers[0].self_attn.attention_dropout = 0.5
    torch.manual_seed(0)
    first = numbers(policy)
    assert apart(first, wanted)["logps"] > 1e-3
    torch.manual_seed(1)
    assert apart(numbers(policy), first)["logps"] > 1e-3


def test_gradient_checkpointing_gives_the_same(interpreted):
    model = model_of("qwen3")
    policy = fused_policy(model)
    wanted = numbers(policy)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert max(apart(numbers(policy), wanted).values()) < 1e-6


@pytest.mark.parametrize("again", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_a_prefix_that_is_read_once_gives_the_same(kind, again, interpreted):
    """The window of mistral ends inside of the prefix: each sequence attends by itself there."""
    model = model_of(kind, **({"sliding_window": 9} if kind == "mistral" else {})).train()
    if again:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy, generator = fused_policy(model), torch.Generator().manual_seed(0)
    prompt = torch.randint(2, 64, (40,), generator=generator)
    rows = [Trajectory.of(prompt, torch.randint(2, 64, (n,), generator=generator)) for n in (5, 3, 5, 9, 1)]
    batch, each = TokenBatch.of(rows), TokenBatch.of(rows)
    assert policy.shares
    assert batch.groups
    each.groups = []
    assert max(apart(numbers(policy, batch), numbers(policy, each)).values()) < 1e-5


def test_frozen_weights_get_no_gradient_and_pass_it_on(interpreted):
    model = model_of("qwen2")
    wanted = numbers(fused_policy(model))
    for name, param in model.named_parameters():
        param.requires_grad_("layers.0.self_attn.k_proj" in name or "norm" in name)
    found = numbers(fused_policy(model))
    assert 0 < len(found) < len(wanted)
    assert max(error for name, error in apart(found, {n: wanted[n] for n in found}).items()) < 1e-6


def test_a_second_gradient_is_refused(interpreted):
    model = model_of("llama")
    policy = fused_policy(model)
    hidden_nH, *_ = policy.hidden(batch_of())
    (gradient,) = torch.autograd.grad(hidden_nH.sum(), [model.model.embed_tokens.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="no gradient of its gradient"):
        gradient.sum().backward()


def test_kernels_are_made_once_whatever_the_lengths(interpreted):
    policy = fused_policy(model_of("qwen3"))
    numbers(policy)

    def made():
        launchers = [value for value in vars(layer_kernels).values() if hasattr(value, "_compiled")]
        return [len(launcher._compiled) for launcher in launchers]

    before = made()
    assert len(before) == 5
    for lengths in ((3,), (17, 2), (1, 1, 40), (64,) * 3):
        numbers(policy, batch_of(lengths))
    assert made() == before


def test_micro_batches_are_larger_where_a_token_takes_less(interpreted):
    trainer = SFT(model=model_of("llama"), micro_batch_tokens=10)
    lengths = [10] * 8
    assert [len(part) for part in trainer.micro_batches(range(8), lengths)] == [4, 4]
    trainer.policy.fused = None
    assert [len(part) for part in trainer.micro_batches(range(8), lengths)] == [1] * 8
    assert [len(part) for part in trainer.micro_batches(range(8), lengths, lean=True)] == [4, 4]
