"""What every operator says of arguments that do not fit, whichever backend would run."""

import math

import pytest
import torch
from operators import V, arguments, call
from yardstick import backends

from strop.losses import PolicyRule

L = {
    name: arguments(name)
    for name in ("logp", "ratio_kl", "grpo_loss", "linear_logp", "linear_grpo_loss", "linear_dpo_loss")
}
I, M, O, W = (L["grpo_loss"][name] for name in ("action_ids", "completion_mask", "old_logps", "rewards"))  # noqa: E741
P, R = L["grpo_loss"]["policy_logits"], L["grpo_loss"]["ref_logits"]
H, U, F = (L["linear_logp"][name] for name in ("hidden", "weight", "bias"))
RH, RU = (L["linear_grpo_loss"][name] for name in ("ref_hidden", "ref_weight"))
NO_REF = {"ref_hidden": None, "ref_weight": None, "ref_bias": None}
MISTAKES = {
    "logp": [
        ({"ids": I[:, :2]}, ValueError, "ids must have shape [4, 3], found [4, 2]"),
        ({"ids": I.float()}, TypeError, "ids must be int64 or int32, found torch.float32"),
        ({"logits": P.long()}, TypeError, "logits must be of a floating dtype, found torch.int64"),
        ({"logits": P.numpy()}, TypeError, "logits must be a tensor, found ndarray"),
        ({"logits": P[..., :0]}, ValueError, "logits must have shape [.., V] with V at least 1, found [4, 3, 0]"),
        ({"completion_mask": M[0]}, ValueError, "completion_mask must have shape [4, 3], found [3]"),
        ({"completion_mask": [1]}, TypeError, "completion_mask must be a tensor, found list"),
        ({"completion_mask": P[..., 0]}, ValueError, "completion_mask must hold only 0 and 1, found"),
        ({"temperature": 0.0}, ValueError, "temperature must be finite and above 0, found 0.0"),
        ({"temperature": 1e-39}, ValueError, "temperature must be at least 1.2e-38, found 1e-39"),
        ({"temperature": math.nan}, ValueError, "temperature must be finite and above 0, found nan"),
        ({"temperature": "1"}, TypeError, "temperature must be a number, found str"),
        ({"ids": 0 * I + V, "completion_mask": None}, ValueError, "ids must be from 0 to 16, found 17 at index [0, 0]"),
        ({"ids": 0 * I - 1, "completion_mask": (torch.arange(12) == 4).view(4, 3)}, ValueError, "found -1 at index [1, 1]"),
    ],
    "ratio_kl": [
        ({"ref_logits": R[..., :4]}, ValueError, "ref_logits must have shape [4, 3, 17], found [4, 3, 4]"),
        ({"ref_logits": None}, TypeError, "ref_logits must be a tensor, found NoneType"),
        ({"action_ids": I[0]}, ValueError, "action_ids must have shape [4, 3], found [3]"),
        ({"old_logps": O[0]}, ValueError, "old_logps must have shape [4, 3], found [3]"),
        ({"old_logps": I}, TypeError, "old_logps must be of a floating dtype, found torch.int64"),
        ({"action_ids": I + V}, ValueError, "action_ids must be from 0 to 16, found"),
    ],
    "grpo_loss": [
        ({"policy_logits": P[0]}, ValueError, "action_ids must have shape [3], found [4, 3]"),
        ({"policy_logits": P[0], "action_ids": I[0]}, ValueError, "policy_logits must have shape [B, T, V], found [3, 17]"),
        ({"policy_logits": I}, TypeError, "policy_logits must be of a floating dtype, found torch.int64"),
        ({"ref_logits": R[:2]}, ValueError, "ref_logits must have shape [4, 3, 17], found [2, 3, 17]"),
        ({"ref_logps": O}, ValueError, "at most one of ref_logits and ref_logps must be given, found both"),
        ({"action_ids": I + V}, ValueError, "action_ids must be from 0 to 16, found"),
        ({"old_logps": O[:, :2]}, ValueError, "old_logps must have shape [4, 3], found [4, 2]"),
        ({"rewards": None}, TypeError, "rewards must be a tensor, found NoneType"),
        ({"rewards": W[:2]}, ValueError, "rewards must have shape [4], found [2]"),
        ({"rewards": W * math.nan}, ValueError, "rewards must be finite, found nan at index 0"),
        ({"rewards": W.to(torch.complex64)}, TypeError, "rewards must be floats or integers, found torch.complex64"),
        ({"completion_mask": None}, TypeError, "completion_mask must be a tensor, found NoneType"),
        ({"completion_mask": M * 2}, ValueError, "completion_mask must hold only 0 and 1, found 2"),
        ({"samples_per_prompt": None}, ValueError, "exactly one of samples_per_prompt, group_boundaries, advantages must be given, found none"),
        ({"group_boundaries": [0, 4]}, ValueError, "found samples_per_prompt and group_boundaries"),
        ({"samples_per_prompt": 3}, ValueError, "rewards must have a multiple of samples_per_prompt=3 elements, found 4"),
        ({"samples_per_prompt": 0}, ValueError, "samples_per_prompt must be at least 1, found 0"),
        *(
            ({"samples_per_prompt": None, "group_boundaries": wrong}, ValueError, "group_boundaries must start at 0, end at 4 and increase")
            for wrong in ([2, 4, 6], [0, 2, 2, 4], [], torch.tensor([2, 4, 6]))
        ),
        ({"samples_per_prompt": None, "advantages": W[:2]}, ValueError, "advantages must have shape [4] or [4, 3], found [2]"),
        ({"loss_type": "ppo"}, ValueError, "loss_type must be one of 'grpo'"),  # of the rule, as all that follow
        ({"delta": 1.0}, ValueError, "delta must be at least 1 + clip_eps = 1.2, found 1.0"),
        ({"ref_logits": None}, ValueError, "ref_logits or ref_logps must be given where beta is above 0, found beta=0.1"),
        ({"entropy_coef": -1.0}, ValueError, "entropy_coef must be finite and at least 0, found -1.0"),
        ({"entropy_coef": None}, TypeError, "entropy_coef must be a number, found NoneType"),
        ({"num_sequences": -1}, ValueError, "num_sequences must be finite and at least 0, found -1"),
        ({"bogus": 1}, TypeError, "got an unexpected keyword argument 'bogus'"),
    ],
    "linear_logp": [
        ({"weight": U[:, :2]}, ValueError, "weight must have shape [V, 6], found [17, 2]"),
        ({"weight": U[0]}, ValueError, "weight must have shape [V, 6], found [6]"),
        ({"weight": U.double()}, TypeError, "weight must be torch.float32 as hidden is, found torch.float64 (autocast is off)"),
        ({"weight": U.to("meta")}, TypeError, "weight must be on cpu as hidden is, found meta"),
        ({"bias": F[:3]}, ValueError, "bias must have shape [17], found [3]"),
        ({"bias": F.half()}, TypeError, "bias must be torch.float32 as hidden is, found torch.float16"),
        ({"ids": I[0]}, ValueError, "ids must have shape [4, 3], found [3]"),
        ({"ids": I.short()}, TypeError, "ids must be int64 or int32, found torch.int16"),
        ({"ids": I + V}, ValueError, "ids must be from 0 to 16, found"),
        ({"hidden": H.long()}, TypeError, "hidden must be of a floating dtype, found torch.int64"),
        ({"hidden": H[..., :0]}, ValueError, "hidden must have shape [.., H] with H at least 1, found [4, 3, 0]"),
        ({"workspace": 0}, ValueError, "workspace must be at least 1, found 0"),
        ({"workspace": 1e6}, TypeError, "workspace must be an int, found float"),
    ],
    "linear_grpo_loss": [
        ({"hidden": H[0], "action_ids": I[0]}, ValueError, "hidden must have shape [B, T, H], found [3, 6]"),
        ({"action_ids": I + V}, ValueError, "action_ids must be from 0 to 16, found"),
        ({"ref_weight": None, "ref_bias": None}, ValueError, "ref_hidden and ref_weight must be given together, found only ref_hidden"),
        ({"ref_hidden": None, "ref_weight": None}, ValueError, "ref_bias must come with ref_hidden and ref_weight, found it alone"),
        ({"ref_hidden": RH[:1]}, ValueError, "ref_hidden must have shape [4, 3, 4], found [1, 3, 4]"),
        ({"ref_weight": RU[:3], "ref_bias": None}, ValueError, "ref_weight must have shape [17, 4], found [3, 4]"),
        ({"ref_logps": O}, ValueError, "at most one of ref_hidden and ref_logps must be given"),
        (NO_REF, ValueError, "ref_hidden or ref_logps must be given where beta is above 0, found beta=0.1"),
        ({"workspace": 0}, ValueError, "workspace must be at least 1, found 0"),
        ({"in_place": True}, TypeError, "got an unexpected keyword argument 'in_place'"),
    ],
    "linear_dpo_loss": [
        ({"hidden": H[:3], "ids": I[:3]}, ValueError, "hidden must have shape [2B, T, H], chosen then rejected, found [3, 3, 6]"),
        (NO_REF, ValueError, "exactly one of ref_hidden and ref_logps must be given, found neither"),
        ({"ref_logps": O}, ValueError, "exactly one of ref_hidden and ref_logps must be given, found both"),
        (NO_REF | {"ref_logps": torch.zeros(3)}, ValueError, "ref_logps must have shape [4] or [4, 3], found [3]"),
        (NO_REF | {"ref_logps": [0.0] * 4}, TypeError, "ref_logps must be a tensor, found list"),
        ({"completion_mask": None}, TypeError, "completion_mask must be a tensor, found NoneType"),
        ({"loss_type": "dpo"}, ValueError, "loss_type must be one of 'sigmoid'"),
        ({"beta": 0.0}, ValueError, "beta must be finite and above 0, found 0.0"),
        ({"bogus": 1}, TypeError, "got an unexpected keyword argument 'bogus'"),
    ],
    "linear_divergence": [
        ({"hidden": H}, ValueError, "hidden must have shape [n, H], found [4, 3, 6]"),
        ({"teacher_hidden": torch.zeros(3, 4)}, ValueError, "teacher_hidden must have shape [12, 4], found [3, 4]"),
        ({"teacher_weight": RU[:3], "teacher_bias": None}, ValueError, "teacher_weight must have the vocabulary of weight, 17 tokens, found 3"),
        ({"teacher_weight": torch.zeros(V, 3)}, ValueError, "teacher_weight must have shape [V, 4], found [17, 3]"),
        ({"weights": torch.zeros(3)}, ValueError, "weights must have shape [12], found [3]"),
        ({"beta": 1.5}, ValueError, "beta must be at least 0 and at most 1, found 1.5"),
        ({"temperature": 0.0}, ValueError, "temperature must be finite and above 0"),
        ({"workspace": 0}, ValueError, "workspace must be at least 1, found 0"),
    ],
    "linear_token_loss": [
        ({"rule": PolicyRule(importance_level="sequence")}, ValueError, "rule must be one that a row alone gives"),
        ({"rule": PolicyRule(entropy_coef=0.1)}, ValueError, "rule must be one that a row alone gives"),
        ({"advantages": None}, ValueError, "advantages must be given for a PolicyRule"),
        ({"ref_logps": None}, ValueError, "ref_logps must be given where beta is above 0"),
        ({"old_logps": torch.zeros(3)}, ValueError, "old_logps must have shape [12], found [3]"),
    ],
}  # fmt: skip
CASES = [(name, *mistake) for name, mistakes in MISTAKES.items() for mistake in mistakes]


@pytest.mark.parametrize(("name", "change", "error", "message"), CASES)
def test_mistakes(name, change, error, message):
    for backend in backends(name):
        with pytest.raises(error) as raised:
            call(name, backend, arguments(name) | change)
        assert message in str(raised.value)


@pytest.mark.parametrize(
    ("name", "missing"), [("linear_logp", "ids"), ("ratio_kl", "old_logps"), ("grpo_loss", "completion_mask")]
)
def test_a_missing_argument_is_named(name, missing):
    given = arguments(name)
    del given[missing]
    for backend in backends(name):
        with pytest.raises(TypeError, match=f"missing a required argument: '{missing}'"):
            call(name, backend, given)
