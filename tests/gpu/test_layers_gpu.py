"""Decoder layers in few kernels on a GPU: numbers, memory, kernels made once, one wait for the device in a step."""

import copy

import pytest
import torch
from measure import peak_bytes
from test_fused_layers import apart, model_of

from benchmarks.contenders.step_profile import waits
from strop.algorithms.grpo import GRPO
from strop.data.batch import TokenBatch, Trajectory
from strop.losses import PolicyLoss
from strop.models import Policy


def batch_of(lengths, device="cuda"):
    generator = torch.Generator().manual_seed(sum(lengths))
    lines = [torch.randint(2, 64, (n + 1,), generator=generator) for n in lengths]
    return TokenBatch.of([Trajectory.of(line[:1], line[1:]) for line in lines], device)


def numbers(policy, batch, autocast=False):
    policy.model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        logps_n = policy.logps(batch)
    (logps_n * torch.linspace(-1, 2, len(logps_n), device="cuda")).sum().backward()
    return {"logps": logps_n.detach()} | {name: param.grad.clone() for name, param in policy.model.named_parameters()}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("how", ["float32", "bfloat16", "autocast"])
def test_it_errs_no_more_than_the_models_own_layers(kind, how):
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    model = model_of(kind, dtype, num_hidden_layers=3).cuda()
    batch = batch_of((200, 1, 37, 90))
    wanted = numbers(Policy(copy.deepcopy(model).double()), batch)
    with torch.autocast("cuda", torch.bfloat16, enabled=how == "autocast"):
        policy = Policy(model)
        assert policy.fuses, policy.no_fusing_because
    found = apart(numbers(policy, batch, how == "autocast"), wanted)
    policy.fused = None
    own = apart(numbers(policy, batch, how == "autocast"), wanted)
    ratios = sorted(error / own[name] for name, error in found.items())
    assert 0 < found["logps"] < (1e-5 if how == "float32" else 0.05), (found, own)
    assert ratios[len(ratios) // 2] < 1.25
    assert ratios[-1] < 4, (found, own)


def test_it_keeps_less():
    model = model_of("llama", torch.bfloat16, num_hidden_layers=6).cuda()
    policy, batch = Policy(model), batch_of((500,) * 20)
    assert policy.fuses
    numbers(policy, batch)
    fused = peak_bytes(lambda: numbers(policy, batch))
    policy.fused = None
    assert fused < 0.5 * peak_bytes(lambda: numbers(policy, batch))


def trainer(**options):
    model = model_of("qwen2").cuda()
    return GRPO(
        model=model, reward_fn=lambda completion_ids: [float(len(ids) % 3) for ids in completion_ids], group_size=4,
        max_new_tokens=24, learning_rate=1e-3, stop_ids=(2, 3, 4, 5, 6, 7), **options,
    )  # fmt: skip


def made():
    """Kernels of Triton and graphs of torch's compiler that are there."""
    from strop.models import layer_kernels
    from strop.ops.rows import kernels, small_kernels

    modules = (layer_kernels, kernels, small_kernels)
    launchers = {name: one for module in modules for name, one in vars(module).items() if hasattr(one, "_compiled")}
    kernels_made = {name: sorted(map(str, one._compiled)) for name, one in launchers.items()}
    return kernels_made, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("options", [{}, {"autocast": "bf16"}, {"kl_coef": 0.0, "inner_epochs": 2}])
def test_a_step_waits_once_and_nothing_is_made_after_the_third(options):
    grpo = trainer(**options)
    lengths = set()

    def step(seed):
        generator = torch.Generator().manual_seed(seed)
        prompts = [torch.randint(8, 64, (1 + (seed * 7 + i) % 19,), generator=generator) for i in range(3 + seed % 4)]
        lengths.add(grpo.train_step(prompts)["completion/length"])
        return prompts

    for seed in range(3):
        prompts = step(seed)
    assert grpo.policy.fuses, grpo.policy.no_fusing_because
    before = made()
    for seed in range(3, 12):
        prompts = step(seed)
    assert made() == before
    assert len(lengths) > 6
    assert waits(grpo, prompts) == 1


def test_what_is_not_finite_does_not_reach_the_weights(monkeypatch):
    grpo = trainer(kl_coef=0.0, inner_epochs=3)
    prompts = torch.randint(8, 64, (2, 5))
    grpo.train_step(prompts)
    loss_on, weights = grpo.loss_on, []

    def second_is_nan(*arguments, **options):
        weights.append(grpo.model.lm_head.weight.detach().clone())  # before each update, which has one part
        found = loss_on(*arguments, **options)
        factor = float("nan") if len(weights) == 2 else 1.0
        return PolicyLoss(found.loss * factor, found.policy_loss, found.kl, lambda: found.metrics)

    with monkeypatch.context() as patch:
        patch.setattr(grpo, "loss_on", second_is_nan)
        with pytest.raises(FloatingPointError, match="must be finite"):
            grpo.train_step(prompts)
    assert len(weights) == 3
    assert grpo.state.updates == 4  # three of the first step, and the first of this one: the third followed a bad one
    assert not torch.equal(weights[1], weights[0])
    assert torch.equal(grpo.model.lm_head.weight, weights[1])
    assert grpo.train_step(prompts)["loss"] < float("inf")
