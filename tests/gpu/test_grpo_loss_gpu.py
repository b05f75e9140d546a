"""grpo_loss on a GPU: as exact as eager torch, without waiting, in no more memory than its gradient."""

import math

import pytest
import torch
from measure import MiB, peak_bytes, without_waiting
from yardstick import RULES, check, check_gradient, clip_of, eager_logps, same

from strop.ops import grpo_loss, registry


def example(dtype=torch.bfloat16, B=4, T=12, V=8003):
    torch.manual_seed(0)
    policy = (torch.randn(B, T, V, device="cuda") * 2).to(dtype)
    ref = (policy.float() + 0.3 * torch.randn_like(policy, dtype=torch.float32)).to(dtype)
    ids = torch.randint(0, V, (B, T), device="cuda")
    old = eager_logps(policy, ids) + 0.2 * torch.randn(B, T, device="cuda")
    mask = torch.arange(T, device="cuda") < torch.randint(1, T + 1, (B, 1), device="cuda")
    return policy, ref, ids, old, torch.randn(B, device="cuda"), mask


def run(function, inputs, **options):
    policy, *rest = inputs
    policy = policy.detach().clone().requires_grad_()
    found = function(policy, *rest, **options)
    found.loss.backward()
    return found, policy.grad


def compare(inputs, **options):
    exact_inputs = [x.double() if x is not None and x.is_floating_point() else x for x in inputs]
    found, gradient = run(grpo_loss, inputs, **options)
    exact, exact_gradient = run(grpo_loss.reference, exact_inputs, **options)
    eager, eager_gradient = run(grpo_loss.reference, inputs, **options)
    # sums of differences of log-probs, which float32 rounds: where they cancel eager's own error may be none by luck
    scale = eager_logps(inputs[0], inputs[2])[inputs[-1]].abs().max().item()
    for part in ("loss", "policy_loss", "kl"):
        check(getattr(found, part), getattr(exact, part), getattr(eager, part), part, scale=scale)
    assert gradient.dtype == inputs[0].dtype
    p = (exact_inputs[0] / options.get("temperature", 1.0)).softmax(-1) if options.get("entropy_coef") else None
    # the coefficient of a row is the exp of a difference of log-probs, so what they are rounded by is relative to it
    check_gradient(gradient, exact_gradient, eager_gradient, inputs[2], allowance=6e-8 * scale, p=p)
    assert (gradient[~inputs[-1]] == 0).all()
    for name, value in exact.metrics.items():
        torch.testing.assert_close(found.metrics[name].double(), value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("V", [32768, 50257, 131072])
def test_as_exact_as_eager(dtype, V):
    compare(example(dtype, V=V), samples_per_prompt=2, beta=0.1)


@pytest.mark.parametrize(("loss_type", "level"), RULES)
def test_every_loss(loss_type, level):
    kl, entropy_coef = ("k1", 0.0) if level == "token" else ("k3", 0.01)
    options = {"loss_type": loss_type, "importance_level": level, "kl_estimator": kl, "entropy_coef": entropy_coef}
    options |= {"clip_eps": clip_of(loss_type), "max_completion_length": 20, "temperature": 0.9}
    compare(example(torch.float32), samples_per_prompt=2, beta=0.1, **options)


@pytest.mark.parametrize("reference", ["ref_logits", "ref_logps", "neither"])
def test_every_reference(reference):
    policy, ref, ids, *rest = example()
    options = {"ref_logps": eager_logps(ref, ids)} if reference == "ref_logps" else {}
    options["beta"] = 0.0 if reference == "neither" else 0.1
    compare([policy, ref if reference == "ref_logits" else None, ids, *rest], group_boundaries=[0, 1, 4], **options)


def test_layouts():
    policy, ref, ids, old, rewards, mask = example(V=50257)
    inputs = ref[:, :-1], ids[:, :-1], old[:, :-1], rewards, mask[:, :-1]
    _, expected = run(grpo_loss, (policy[:, :-1].contiguous(), *inputs), samples_per_prompt=2, beta=0.1)
    for x in (policy[:, :-1], policy[:, :-1].permute(2, 0, 1).contiguous().permute(1, 2, 0)):
        leaf = x.detach().requires_grad_()
        (2 * grpo_loss(leaf, *inputs, samples_per_prompt=2, beta=0.1).loss).backward()
        torch.testing.assert_close(leaf.grad, 2 * expected, rtol=0.02, atol=1e-7)
    base = policy.clone()
    view = base[:, :-1].detach().requires_grad_()
    (2 * grpo_loss(view, *inputs, samples_per_prompt=2, beta=0.1, in_place=True).loss).backward()
    torch.testing.assert_close(view.grad, 2 * expected, rtol=0.02, atol=1e-7)
    assert torch.equal(base[:, -1], policy[:, -1])  # what lies between the rows stays


def test_nothing_waits_for_the_device():
    policy, ref, ids, old, rewards, mask = example(V=4096)
    cases = [
        {"samples_per_prompt": 2},
        {"samples_per_prompt": 2, "loss_type": "dapo"},
        {"samples_per_prompt": 2, "loss_type": "dapo", "num_tokens": mask.sum()},
        {"samples_per_prompt": 2, "importance_level": "sequence"},
        {"samples_per_prompt": 2, "entropy_coef": 0.01},
        {"group_boundaries": [0, 1, 4]},
        {"advantages": rewards},
    ]
    for options in cases:
        run(grpo_loss, (policy, ref, ids, old, rewards, mask), beta=0.1, **options)  # compiles
        with without_waiting():
            run(grpo_loss, (policy, ref, ids, old, rewards, mask), beta=0.1, **options)
            run(grpo_loss, (policy, ref, ids, old, rewards, mask.long()), beta=0.1, **options)


def test_memory():
    """The gradient and nothing else to speak of; in place nothing."""
    policy, ref, ids, old, rewards, mask = example(B=8, T=512, V=32768)
    policy.requires_grad_()

    def both(in_place):
        policy.grad = None
        grpo_loss(
            policy, ref, ids, old, rewards, mask, samples_per_prompt=4, beta=0.1, in_place=in_place
        ).loss.backward()

    both(False)
    policy.grad = None
    assert peak_bytes(lambda: both(False)) <= policy.numel() * 2 + MiB
    policy.grad = None
    assert peak_bytes(lambda: both(True)) <= MiB


def test_more_than_two_to_the_31_logits():
    """17 sequences of 1,000 tokens and 131,072 logits: the last sequence's gradient is that of the sequence alone."""
    B, T, V = 17, 1000, 131072
    assert B * T * V > 2**31
    policy = torch.empty(B, T, V, device="cuda", dtype=torch.bfloat16)
    for part in policy:
        part.normal_()
    ids = torch.randint(0, V, (B, T), device="cuda")
    mask, advantages = torch.ones(B, T, device="cuda"), torch.linspace(-1, 1, B, device="cuda")
    last = policy[-1:].clone(), None, ids[-1:], None, None, mask[-1:]
    expected, expected_gradient = run(grpo_loss, last, advantages=advantages[-1:], num_sequences=B)
    leaf = policy.requires_grad_()
    found = grpo_loss(leaf, None, ids, None, None, mask, advantages=advantages, in_place=True)
    found.loss.backward()
    assert expected.loss.item() == pytest.approx(-1 / B, rel=1e-5)
    assert found.loss.item() == pytest.approx(0, abs=1e-5)
    torch.testing.assert_close(leaf.grad[-1:], expected_gradient, rtol=0.01, atol=1e-12)


def test_nan_is_not_hidden_by_the_clip():
    """min(NaN, 1.2) is 1.2 in a kernel that does not take care."""
    for loss_type in ("grpo", "cispo"):
        for sign in (1.0, -1.0):
            for spoilt in ("logits", "old", "id"):
                policy, _, ids, old, _, mask = example(torch.float32, V=1000)
                mask[0, 0] = True
                if spoilt == "logits":
                    policy[0, 0, 5] = math.nan
                elif spoilt == "old":
                    old[0, 0] = math.nan
                else:
                    ids[0, 0] = 1000
                options = {"advantages": torch.full((4,), sign, device="cuda"), "clip_eps": clip_of(loss_type)}
                found, gradient = run(grpo_loss, (policy, None, ids, old, None, mask), loss_type=loss_type, **options)
                assert found.loss.isnan()
                assert gradient[0, 0].isnan().all()
                assert gradient.isnan().any(-1).sum() == 1


def test_ids_outside_the_vocabulary():
    policy, _, ids, old, rewards, mask = example(V=1000)
    mask[1, 3:] = False
    ids[1, 3:] = -100
    options = {"samples_per_prompt": 2, "validate": True}
    assert grpo_loss(policy, None, ids, old, rewards, mask, **options).loss.isfinite()
    ids[0, 0] = 1000
    for backend in registry.backends("grpo_loss"):
        with registry.use_backend(grpo_loss=backend):
            assert grpo_loss(policy, None, ids, old, rewards, mask, samples_per_prompt=2).loss.isnan()
            with pytest.raises(ValueError, match=r"action_ids must be from 0 to 999, found 1000 at index \[0, 0\]"):
                grpo_loss(policy, None, ids, old, rewards, mask, **options)


def test_masked_garbage_and_bad_groups():
    policy, ref, ids, old, rewards, mask = example(V=1000)
    results = []
    for value, garbage_id in ((0.0, 0), (math.nan, -100), (math.inf, 1005)):
        dirty = [x.masked_fill(~mask[..., None], value) for x in (policy, ref)]
        inputs = *dirty, ids.masked_fill(~mask, garbage_id), old.masked_fill(~mask, value), rewards, mask
        found, gradient = run(grpo_loss, inputs, samples_per_prompt=2, beta=0.1)
        results.append((*found, gradient))
    for other in results[1:]:
        same(other, results[0], scale=1.0)
    for backend in registry.backends("grpo_loss"):
        with (
            registry.use_backend(grpo_loss=backend),
            pytest.raises(ValueError, match="group_boundaries must start at 0"),
        ):
            grpo_loss(policy, None, ids, old, rewards, mask, group_boundaries=torch.tensor([2, 4, 6], device="cuda"))
