"""Arguments for every operator, from one draw of numbers, and its results with their gradients."""

import torch
from yardstick import check_gradient, check_sums, cut_off, eager_logps

from strop.losses import NLL, PolicyRule
from strop.ops import registry

B, T, H, V = 4, 3, 6, 17
OPERATORS = (
    "logp", "ratio_kl", "grpo_loss", "linear_logp", "linear_grpo_loss", "linear_dpo_loss", "linear_divergence", "linear_token_loss",
)  # fmt: skip
LINEAR = tuple(name for name in OPERATORS if name.startswith("linear"))
MASKED = OPERATORS[:6]  # those of [B, T] with a mask; the last two take tokens one after the other
WITH_A_GRADIENT = ("logits", "policy_logits", "hidden", "weight", "bias")
WITHOUT_ROWS = ("weight", "bias", "ref_weight", "ref_bias", "teacher_weight", "teacher_bias")
RULES = {
    "": PolicyRule(beta=0.1),
    "two-sided": PolicyRule(delta=1.5, clip_eps=(0.1, 0.3)),
    "cispo": PolicyRule(loss_type="cispo", clip_eps=(0.2, 1.1), beta=0.2, kl_estimator="k2"),
    "sapo": PolicyRule(loss_type="sapo", sapo_temperatures=(2.0, 0.7), beta=0.1),
    "nll": NLL(),
}
BETAS = {"": 0.3, "forward": 0.0, "reverse": 1.0}
# an operator, then what its loss is: a rule of tokens, or a beta of the divergence
ROW_CASES = [
    *OPERATORS,
    *(f"linear_token_loss {rule}" for rule in RULES if rule),
    *(f"linear_divergence {kl}" for kl in BETAS if kl),
]
CASES = [
    *ROW_CASES,
    *(f"{name} {level}" for name in ("grpo_loss", "linear_grpo_loss") for level in ("sequence", "geometric")),
]


def name_of(case):
    return case.partition(" ")[0]


def arguments(case, dtype=torch.float32, V=V, H=H):
    """Return the arguments of an operator by name. Ratios are on both sides of the clip; some tokens do not count."""
    name, _, kind = case.partition(" ")
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    logits = 2 * make(B, T, V)
    ref_logits = logits + 0.5 * make(B, T, V)
    head = {"hidden": make(B, T, H), "weight": make(V, H), "bias": make(V)}
    ref = {"ref_hidden": make(B, T, H - 2), "ref_weight": make(V, H - 2), "ref_bias": make(V)}
    ids, mask = (
        torch.randint(0, V, (B, T), generator=generator),
        torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]]),
    )
    known = torch.nn.functional.linear(*head.values()) if name in LINEAR else logits
    old, rewards = eager_logps(known, ids).to(wide) + 0.3 * make(B, T).to(wide), make(B).to(wide)
    actions = {"action_ids": ids, "old_logps": old, "completion_mask": mask}
    group = {"rewards": rewards, "samples_per_prompt": 2, "beta": 0.1}
    group |= {"importance_level": kind, "entropy_coef": 0.01} if kind else {}
    scored = {"ids": ids, "completion_mask": mask, "temperature": 0.7, "entropy": True}
    tokens = {key: value.flatten(0, 1) if value.ndim == 3 else value for key, value in head.items()}
    weights = {"weights": torch.rand(B * T, generator=generator).to(dtype)}
    teacher = {
        key.replace("ref", "teacher"): value.flatten(0, -2) if key == "ref_hidden" else value
        for key, value in ref.items()
    }
    per_token = {"old_logps": old.view(-1), "ref_logps": old.view(-1) + 0.1, "advantages": make(B * T).to(wide)}
    return {
        "logp": {"logits": logits, **scored},
        "ratio_kl": {"policy_logits": logits, "ref_logits": ref_logits, **actions, "temperature": 0.7},
        "grpo_loss": {"policy_logits": logits, "ref_logits": ref_logits, **actions, **group},
        "linear_logp": {**head, **scored},
        "linear_grpo_loss": {**head, **ref, **actions, **group},
        "linear_dpo_loss": {**head, **ref, "ids": ids, "completion_mask": mask},
        "linear_divergence": {**tokens, **teacher, **weights, "beta": BETAS.get(kind)},
        "linear_token_loss": {
            **tokens, **weights, "ids": ids.view(-1), "rule": RULES.get(kind), **({} if kind == "nll" else per_token),
        },
    }[name]  # fmt: skip


def with_rows(given, change):
    """Return the arguments with `change` applied to every tensor that has a row for each sequence or token."""
    return {
        key: change(key, x) if isinstance(x, torch.Tensor) and key not in WITHOUT_ROWS else x
        for key, x in given.items()
    }


def with_floats(given, change):
    """Return the arguments with `change` applied to every tensor of floats."""
    return {k: change(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for k, x in given.items()}


def call(case, backend, given):
    name = name_of(case)
    with registry.use_backend(**{name: backend}):
        return registry.get_op(name)(**given)


def results_of(found):
    return (found,) if isinstance(found, torch.Tensor) else tuple(found)


def total(found):
    """Return the loss, or the sum of what is there for each token, each with a weight of its own."""
    if hasattr(found, "loss"):
        return found.loss
    return sum((x * torch.linspace(0.5, 1.5, x.numel()).view_as(x)).sum() for x in results_of(found))


def with_leaves(given, frozen=()):
    """Return the arguments with leaves of autograd in place of what has a gradient, and these leaves by name."""
    leaves = {k: x.detach().requires_grad_() for k, x in given.items() if k in WITH_A_GRADIENT and k not in frozen}
    return given | leaves, leaves


def run(function, given, frozen=(), scale=1.0):
    """Return the result of a function of these arguments, and the gradients by name."""
    given, leaves = with_leaves(given, frozen)
    found = function(**given)
    (scale * total(found)).backward()
    return found, {name: leaf.grad for name, leaf in leaves.items()}


def run_backend(case, backend, given, **options):
    return run(lambda **arguments: call(case, backend, arguments), given, **options)


def run_reference(case, given, **options):
    return run(registry.get_op(name_of(case)).reference, given, **options)


def compare(found, expected, rtol=1e-5, atol=1e-6):
    """Hold (result, gradients) against another, with the metrics where there are some."""
    torch.testing.assert_close(results_of(found[0]), results_of(expected[0]), rtol=rtol, atol=atol)
    torch.testing.assert_close(found[1], expected[1], rtol=rtol, atol=atol, equal_nan=True)
    metrics, wanted = (getattr(result, "metrics", {}) for result in (found[0], expected[0]))
    assert metrics.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(metrics[name], value, rtol=rtol, atol=10 * atol)


def check_as_exact_as_eager(case, backend, given, dtype=torch.float32, eager=None, p=None):
    """Results and gradients err at most twice as much as eager torch in the same dtype; metrics are the same.

    dtype   of the arguments
    eager   a function of the arguments; None takes the reference
    p       probabilities of the tokens, as `yardstick.check_gradient` takes them
    """
    found, gradients = run_backend(case, backend, given)
    exact, exact_gradients = run_reference(case, with_floats(given, torch.Tensor.double))
    eager, eager_gradients = run(eager or registry.get_op(name_of(case)).reference, given)
    autocast = torch.is_autocast_enabled("cpu")
    allowance = cut_off(backend, torch.bfloat16 if autocast else dtype)
    for number, results in enumerate(zip(*map(results_of, (found, exact, eager)), strict=True)):
        check_sums(*results, f"result {number}", allowance=allowance, least=1.0)
    for name, gradient in gradients.items():
        wanted, of_eager = exact_gradients[name], eager_gradients[name]
        assert gradient.dtype == dtype
        if "logits" in name:
            ids = given.get("ids", given.get("action_ids"))
            check_gradient(gradient, wanted, of_eager, ids, name, coefficient=4.0, allowance=allowance, p=p)
        else:
            check_sums(gradient, wanted, of_eager, name, allowance=allowance)
            assert gradient.abs().max() > 0.5 * wanted.abs().max()
    metrics = getattr(eager, "metrics", {})
    assert getattr(found, "metrics", {}).keys() == metrics.keys()
    for name, value in metrics.items() if dtype == torch.float32 and not autocast else ():
        torch.testing.assert_close(found.metrics[name], value, rtol=1e-4, atol=1e-5)
    return gradients
