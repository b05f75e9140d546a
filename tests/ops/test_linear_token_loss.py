"""`linear_token_loss`: a rule's loss of tokens one after the other, on every backend."""

import pytest
import torch

from strop.losses import NLL, PolicyRule
from strop.ops import linear_grpo_loss, linear_token_loss, logp, registry

every_backend = pytest.mark.parametrize("backend", registry.backends("linear_token_loss"))
RULES = {
    "grpo": PolicyRule(beta=0.1),
    "two sides": PolicyRule(delta=1.5, clip_eps=(0.1, 0.3)),
    "cispo": PolicyRule(loss_type="cispo", clip_eps=(0.2, 1.1), beta=0.2, kl_estimator="k2"),
    "sapo": PolicyRule(loss_type="sapo", sapo_temperatures=(2.0, 0.7), beta=0.1),
    "nll": NLL(),
}
N, H, V = 11, 6, 37


def problem(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(*shape, generator=generator, dtype=dtype) for shape in ((N, H), (V, H)))
    bias, *per_token = (torch.randn(n, generator=generator, dtype=dtype) for n in (V, N, N, N, N))
    weights, advantages, old, ref = per_token
    ids = torch.randint(0, V, (N,), generator=generator)
    logps = logp.reference(hidden @ weight.T + bias, ids).detach()
    given = {"old_logps": logps + 0.3 * old, "ref_logps": logps + 0.3 * ref, "advantages": advantages}
    return (hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()), ids, weights.abs(), given


def options_of(rule, given):
    return {} if isinstance(rule, NLL) else given


@pytest.mark.parametrize(
    "rule", [RULES[name] for name in ("grpo", "two sides", "sapo", "nll")]
)  # cispo holds its weight
def test_gradient_against_finite_differences(rule):
    leaves, ids, weights, given = problem()

    def loss_of(hidden, weight, bias):
        return linear_token_loss.reference(
            hidden, weight, ids, weights, rule=rule, bias=bias, temperature=0.7, **options_of(rule, given)
        ).loss

    assert torch.autograd.gradcheck(loss_of, leaves)


@every_backend
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("workspace", [None, 600])
def test_backends_agree_with_the_reference(backend, rule, frozen, workspace):
    found = []
    for name in ("torch", backend):
        (hidden, weight, bias), ids, weights, given = problem(torch.float32)
        leaves = [hidden, *([] if frozen else [weight, bias])]
        for leaf in (weight, bias):
            leaf.requires_grad_(not frozen)
        with registry.use_backend(linear_token_loss=name):
            result = linear_token_loss(
                hidden, weight, ids, weights, rule=rule, bias=bias, temperature=0.7, workspace=workspace,
                **options_of(rule, given),
            )  # fmt: skip
        (2 * result.loss).backward()
        found.append([*(x.detach() for x in result), *result.metrics.values(), *(leaf.grad for leaf in leaves)])
    for wanted, other in zip(*found, strict=True):
        assert wanted.abs().max() < 1e4
        torch.testing.assert_close(other, wanted, rtol=1e-5, atol=1e-5)
    assert found[0][-1].abs().max() > 1e-2


@pytest.mark.parametrize("backend", registry.backends("linear_grpo_loss"))
def test_is_linear_grpo_loss_of_the_tokens_that_count(backend):
    """[B, T] with a mask, flattened by hand; dapo, whose weights are the same for all."""
    (hidden, weight, bias), ids, _, given = problem(torch.float32)
    rule = PolicyRule(loss_type="dapo", beta=0.1)
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 0, 0, 1, 1]).bool()
    rows = {name: values[:10].view(2, 5) for name, values in given.items()}
    with registry.use_backend(linear_token_loss=backend, linear_grpo_loss=backend):
        wanted = linear_grpo_loss(
            hidden[:10].view(2, 5, H), weight, ids[:10].view(2, 5), rows["old_logps"], None, mask.view(2, 5), bias=bias,
            advantages=rows["advantages"], ref_logps=rows["ref_logps"], loss_type="dapo", beta=0.1,
        )  # fmt: skip
        found = linear_token_loss(
            hidden[:10][mask], weight, ids[:10][mask], torch.full((7,), 1 / 7), rule=rule, bias=bias,
            **{name: values[:10][mask] for name, values in given.items()},
        )  # fmt: skip
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-6, atol=1e-6)
    for name, value in wanted.metrics.items():
        torch.testing.assert_close(found.metrics[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": PolicyRule(importance_level="sequence")}, "rule must be one that a row alone gives"),
        ({"rule": PolicyRule(entropy_coef=0.1)}, "rule must be one that a row alone gives"),
        ({"rule": PolicyRule(), "advantages": None}, "advantages must be given for a PolicyRule"),
        ({"rule": PolicyRule(beta=0.1), "ref_logps": None}, "ref_logps must be given where beta is above 0"),
        ({"rule": PolicyRule(), "old_logps": torch.zeros(3)}, r"old_logps must have shape \[11\], found \[3\]"),
    ],
)
def test_mistakes(changes, message):
    (hidden, weight, bias), ids, weights, given = problem(torch.float32)
    with pytest.raises(ValueError, match=message):
        linear_token_loss(hidden, weight, ids, weights, bias=bias, **(given | changes))
