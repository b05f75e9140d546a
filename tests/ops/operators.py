"""Arguments for every operator, from one draw of numbers, and its results with their gradients."""

import torch
from yardstick import eager_logps

from strop.losses import PolicyRule
from strop.ops import registry

B, T, H, V = 4, 3, 6, 17
OPERATORS = (
    "logp", "ratio_kl", "grpo_loss", "linear_logp", "linear_grpo_loss", "linear_dpo_loss", "linear_divergence", "linear_token_loss",
)  # fmt: skip
LINEAR = tuple(name for name in OPERATORS if name.startswith("linear"))
MASKED = OPERATORS[:6]  # those of [B, T] with a mask; the last two take tokens one after the other
WITH_A_GRADIENT = ("logits", "policy_logits", "hidden", "weight", "bias")
WITHOUT_ROWS = ("weight", "bias", "ref_weight", "ref_bias", "teacher_weight", "teacher_bias")
# rules whose gradient takes other ways
CASES = [
    *OPERATORS,
    *(f"{name} {level}" for name in ("grpo_loss", "linear_grpo_loss") for level in ("sequence", "geometric")),
]


def arguments(case, dtype=torch.float32, V=V, H=H):
    """Return the arguments of an operator by name. Ratios are on both sides of the clip; some tokens do not count."""
    name, _, level = case.partition(" ")
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
    group |= {"importance_level": level, "entropy_coef": 0.01} if level else {}
    scored = {"ids": ids, "completion_mask": mask, "temperature": 0.7, "entropy": True}
    tokens = {key: value.flatten(0, 1) if value.ndim == 3 else value for key, value in head.items()}
    weights = {"weights": torch.rand(B * T, generator=generator).to(dtype)}
    teacher = {
        key.replace("ref", "teacher"): value.flatten(0, -2) if key == "ref_hidden" else value
        for key, value in ref.items()
    }
    return {
        "logp": {"logits": logits, **scored},
        "ratio_kl": {"policy_logits": logits, "ref_logits": ref_logits, **actions, "temperature": 0.7},
        "grpo_loss": {"policy_logits": logits, "ref_logits": ref_logits, **actions, **group},
        "linear_logp": {**head, **scored},
        "linear_grpo_loss": {**head, **ref, **actions, **group},
        "linear_dpo_loss": {**head, **ref, "ids": ids, "completion_mask": mask},
        "linear_divergence": {**tokens, **teacher, **weights, "beta": 0.3},
        "linear_token_loss": {
            **tokens, **weights, "ids": ids.view(-1), "rule": PolicyRule(beta=0.1), "old_logps": old.view(-1),
            "ref_logps": old.view(-1) + 0.1, "advantages": make(B * T).to(wide),
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
    name = case.partition(" ")[0]
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
    leaves = {
        k: x.detach().clone().requires_grad_() for k, x in given.items() if k in WITH_A_GRADIENT and k not in frozen
    }
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
    return run(registry.get_op(case.partition(" ")[0]).reference, given, **options)
