"""Products by oneDNN: values against float64, and every place that uses them, with its rule of size and CPU set aside."""

import contextlib

import pytest
import torch
from tiny_models import llama, mixtral
from torch import nn
from torch.utils.checkpoint import checkpoint

from strop import GRPO
from strop.data.batch import TokenBatch, Trajectory
from strop.losses import NLL
from strop.models import Policy
from strop.models.products import Linear, faster_forwards
from strop.ops import onednn
from strop.ops.linear_logp import linear_logp
from strop.rollout.decoding import complete, engine_of
from strop.rollout.sampling import Sampling

needs_onednn = pytest.mark.skipif(not onednn.has_onednn(), reason="this torch or CPU has no products of oneDNN")
pytestmark = needs_onednn


@pytest.fixture
def everywhere(monkeypatch):
    """Use oneDNN for products of any size, on any CPU that has it."""
    monkeypatch.setattr(onednn, "FEWEST_WEIGHTS", 1)
    monkeypatch.setattr("strop.models.policy.FEWEST_WEIGHTS", 1)
    monkeypatch.setattr(onednn, "is_faster", lambda: True)


def as_far_as_torch(found, wanted, plain):
    """Return whether the error of `found` is at most twice that of torch's own result."""
    return (found.double() - wanted).norm() <= 2 * (plain.double() - wanted).norm() + 1e-6 * wanted.norm()


@pytest.mark.parametrize("shape", [(1, 70), (5, 70), (2, 3, 70), (3, 0, 70), (300, 70)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_has_values_and_gradients_of_float64(shape, bias, everywhere):
    torch.manual_seed(0)
    layer, x = nn.Linear(70, 33, bias=bias), torch.randn(shape, requires_grad=True)
    exact, x_exact = nn.Linear(70, 33, bias=bias).double(), x.detach().double().requires_grad_()
    exact.load_state_dict({name: one.double() for name, one in layer.state_dict().items()})
    d_out = torch.randn(*shape[:-1], 33)
    results = []
    for by, inputs in ((faster_forwards(layer)[layer], x), (layer, x), (exact, x_exact)):
        out = by(inputs)
        params = list((exact if by is exact else layer).parameters())
        results.append([out.detach(), *torch.autograd.grad(out, [inputs, *params], d_out.to(out.dtype))])
    assert all(map(as_far_as_torch, results[0], results[2], results[1]))


def test_a_frozen_weight_has_no_gradient_and_a_second_derivative_is_refused():
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(5, 8)
    (dx,) = torch.autograd.grad(Linear.apply(x, weight, None).sum(), x, create_graph=True)
    assert torch.allclose(dx, weight.sum(0).expand(4, 8), atol=1e-5)
    with pytest.raises(RuntimeError, match="no gradient of its gradient"):
        dx.sum().backward()


def test_log_probs_and_gradients_from_hidden_states(everywhere):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(40, 24), torch.randn(101, 24), torch.randn(101)
    ids = torch.randint(0, 101, (40,))
    results = []
    for dtype in (torch.float32, torch.float64):
        inputs = [one.to(dtype).requires_grad_() for one in (hidden, weight, bias)]
        logps = linear_logp(inputs[0], inputs[1], ids, bias=inputs[2])
        results.append([logps.detach(), *torch.autograd.grad(logps.square().sum(), inputs)])
    for found, wanted in zip(*results, strict=True):
        assert torch.allclose(found.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_policy_has_the_loss_and_gradients_of_torchs_products(recomputes, everywhere, monkeypatch):
    results = []
    for by_onednn in (True, False):
        monkeypatch.setattr(onednn, "is_faster", lambda by_onednn=by_onednn: by_onednn)
        model = llama()
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        policy = Policy(model)
        trajectories = [Trajectory.of([1, 2, 3], [4, 5, 6, 7]), Trajectory.of([8], [9, 10])]
        batch = TokenBatch.of(trajectories, weights=[0.5, 0.25])
        loss = policy.loss(batch, NLL()).loss
        loss.backward()
        assert (policy.products() is not contextlib.nullcontext) == by_onednn
        assert all("forward" not in vars(module) for module in model.modules())
        results.append([loss.detach(), *(param.grad for param in model.parameters())])
    for found, wanted in zip(*results, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-6)


def test_checkpointing_around_a_layer_recomputes_by_the_same_products():
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    (dx,) = torch.autograd.grad(checkpoint(Linear.apply, x, weight, None, use_reentrant=False).sum(), x)
    assert torch.allclose(dx, weight.sum(0).expand(4, 8), atol=1e-5)


@pytest.mark.parametrize("make", [llama, mixtral])
def test_rollouts_use_the_weights_that_the_model_has_now(make, everywhere):
    """A packed weight is a copy: after an update the next rollout must draw from the new weights."""
    model = make()
    policy, sampling = Policy(model), Sampling(max_new_tokens=6, temperature=0.0)
    prompts, uniforms_BT = [torch.tensor([1, 2, 3]), torch.tensor([5])], torch.zeros(2, 6)
    for _ in range(2):
        tokens, logps = complete(policy, prompts, sampling, 1, uniforms_BT, ())
        layers = engine_of(policy).layers
        if make is llama:
            assert all(one.packed is None for one in layers._products)  # freed with the rollout
        for prompt, new, found in zip(prompts, tokens, logps, strict=True):
            with torch.no_grad():
                logits = model(torch.cat([prompt, new])[None]).logits[0, len(prompt) - 1 : -1]
            wanted = logits.log_softmax(-1).gather(1, new[:, None])[:, 0]
            assert torch.allclose(found, wanted, atol=1e-4)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.02 * torch.randn_like(param))


def test_small_weights_and_other_dtypes_are_not_packed():
    layers = engine_of(Policy(llama())).layers
    layers.pack(16)
    assert all(one.packed is None for one in layers._products)
    assert onednn.packed(torch.zeros(512, 512), 16) is not None
    assert onednn.packed(torch.zeros(512, 512, dtype=torch.float64), 16) is None


@pytest.mark.filterwarnings("ignore:rollout_dtype")
def test_rollouts_in_bfloat16_differ_by_rounding_alone():
    torch.manual_seed(0)
    options = {"reward_fn": lambda completions: [float(len(one)) for one in completions], "group_size": 2, "seed": 0}
    options |= {"kl_coef": 0.0, "max_new_tokens": 6}
    metrics = GRPO(model=llama(), rollout_dtype="bfloat16", **options).train_step([[1, 2, 3], [4, 5]])
    assert 0 < metrics["mismatch_kl"] < 1e-2
    assert GRPO(model=llama(), **options).train_step([[1, 2, 3], [4, 5]])["mismatch_kl"] < 1e-6


def test_rollout_dtype_is_refused_where_it_has_no_effect():
    from strop.config import GRPOConfig
    from strop.moe import MoEConfig, MoETransformer

    with pytest.raises(ValueError, match="rollout_dtype must be None with rollout_server"):
        GRPOConfig.from_options({}, rollout_dtype="bfloat16", rollout_server="http://127.0.0.1:1")
    with pytest.raises(ValueError, match="rollout_dtype must be None for strop's MoE"):
        GRPO(model=MoETransformer(MoEConfig()), reward_fn=len, rollout_dtype="bfloat16")
