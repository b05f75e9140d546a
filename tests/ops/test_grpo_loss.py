"""grpo_loss on every backend: by hand, long rows, sources of advantages, numbers at the edge."""

import itertools
import math

import pytest
import torch
from operators import B, T, V, arguments, compare, run
from yardstick import backend_fixture, clip_of, eager_logps, same

from strop.losses import KL_ESTIMATORS
from strop.ops import grpo_loss

backend, fast_backend = backend_fixture("grpo_loss"), backend_fixture("grpo_loss", fast=True)
NO_GROUPS = {"samples_per_prompt": None, "rewards": None}


def example(V=V, **changes):
    """The arguments of the operator without a reference; ratios on both sides of the clip."""
    return arguments("grpo_loss", V=V) | {"ref_logits": None, "beta": 0.0} | changes


def check_as_reference(given):
    """Hold loss, metrics and gradient of a backend against the reference's and return the backend's."""
    found, gradients = run(grpo_loss, given)
    compare((found, gradients), run(grpo_loss.reference, given), rtol=1e-4, atol=1e-6)
    return found, gradients["policy_logits"]


def test_by_hand(backend):
    """Two tokens of probability ½ that were ¼ and ½ when sampled; rewards 1 and 0, so A = 1 and −1; β = 0."""
    logits = torch.zeros(2, 1, 2, requires_grad=True)
    ids, mask = torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1)
    old = torch.log(torch.tensor([[0.25], [0.5]]))
    loss, policy, kl = grpo_loss(logits, None, ids, old, torch.tensor([1.0, 0.0]), mask, samples_per_prompt=2)
    # ratio 2 is cut at 1.2 and has no gradient; ratio 1 is not: mean of −1.2 and +1
    assert loss.item() == pytest.approx(-0.1)
    assert policy.item() == pytest.approx(-0.1)
    assert kl.item() == 0
    loss.backward()
    assert logits.grad[0].tolist() == [[0.0, 0.0]]
    assert logits.grad[1, 0].tolist() == pytest.approx([0.25, -0.25])  # ½·r·(onehot − p)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("V", [4099, 16391, 50257, 100003])
def test_long_rows(fast_backend, V, in_place):
    """The kernel goes through each of them in another way; one row is garbage under the mask."""
    given = arguments("grpo_loss", V=V)
    policy, ref, ids = (given[name][:2, :2] for name in ("policy_logits", "ref_logits", "action_ids"))
    policy[1, 1], ids[1, 1] = torch.nan, V + 5
    ids[0] = torch.tensor([0, V - 1])
    known = ids.clamp(max=V - 1)
    given |= {"policy_logits": policy, "ref_logits": None, "action_ids": ids, "rewards": given["rewards"][:2]}
    given |= {"completion_mask": torch.tensor([[1, 1], [1, 0]]), "ref_logps": eager_logps(ref, known)}
    given |= {"old_logps": eager_logps(policy, known) + 0.1}
    expected, wanted = run(grpo_loss.reference, given | {"policy_logits": policy.double()})
    found, gradients = run(grpo_loss, given | {"policy_logits": policy.clone(), "in_place": in_place})
    # a log-prob of −12 is known to 1e-6 in float32, and so is the ratio
    torch.testing.assert_close(torch.stack([*found]).double(), torch.stack([*expected]), rtol=1e-5, atol=1e-6)
    gradient = gradients["policy_logits"]
    torch.testing.assert_close(gradient.double(), wanted["policy_logits"], rtol=1e-4, atol=1e-12)
    assert (gradient[1, 1] == 0).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"samples_per_prompt": 4},
        {"samples_per_prompt": None, "group_boundaries": [0, 1, 4]},
        {"samples_per_prompt": None, "group_boundaries": torch.tensor([0, 3, 4])},
        NO_GROUPS | {"advantages": torch.tensor([0.5, -1.0, 0.0, 2.0])},
        NO_GROUPS | {"advantages": torch.linspace(-1, 1, B * T).view(B, T)},
        {"rewards": torch.tensor([1, 1, 0, 1])},
        {"rewards": torch.tensor([True, False, True, True])},
        {"rewards": torch.tensor([2.5] * 4)},
        {"old_logps": None},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_every_source_of_advantages_and_kind_of_rewards(backend, changes):
    check_as_reference(example(**changes))


def test_one_sequence_of_advantages(backend):
    """B = 1: the advantage of every token is one number, wherever it lies in memory."""
    given = {name: x[:1] if isinstance(x, torch.Tensor) else x for name, x in example(**NO_GROUPS).items()}
    check_as_reference(given | {"advantages": torch.tensor([2.0])})


def test_two_sided_clip(backend):
    given = example()
    found, _ = check_as_reference(given | {"old_logps": given["old_logps"] - 1.5, "delta": 4.0})  # ratios about 4.5
    assert found.metrics["clip_fraction_delta"] > 0


def test_old_logps_of_the_policy_itself(backend):
    given = example(old_logps=None)
    on_policy = eager_logps(given["policy_logits"], given["action_ids"])
    compare(run(grpo_loss, given), run(grpo_loss, given | {"old_logps": on_policy}))


# ---- numbers at the edge ----


def test_nan_is_not_hidden_by_the_clip(backend):
    """min(NaN, 1.2) is 1.2 on a GPU: a NaN must come through the loss and its row's gradient, both signs of A."""
    for loss_type, sign, name in itertools.product(("grpo", "cispo"), (1.0, -1.0), ("policy_logits", "old_logps")):
        given = example(
            **NO_GROUPS, advantages=torch.full((B,), sign), loss_type=loss_type, clip_eps=clip_of(loss_type)
        )
        given[name][(0, 1, 4) if name == "policy_logits" else (0, 1)] = math.nan
        found, gradients = run(grpo_loss, given)
        assert found.loss.isnan()
        assert gradients["policy_logits"].isnan().any(-1).sum() == 1
        assert gradients["policy_logits"][0, 1].isnan().all()


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("kl", KL_ESTIMATORS)
def test_a_reference_that_bans_the_token(backend, beta, kl):
    """The kl is infinite; without a coefficient neither the loss nor the gradient feels it, with one as the reference."""
    given = example(beta=beta, kl_estimator=kl)
    given["ref_logps"] = eager_logps(given["policy_logits"], given["action_ids"])
    given["ref_logps"][0, 0] = -math.inf
    found, gradient = check_as_reference(given)
    if not beta:
        assert found.loss.isfinite()
        assert gradient.isfinite().all()


def test_a_ratio_that_overflows(backend):
    for sign in (1.0, -1.0):
        given = example(**NO_GROUPS, advantages=torch.full((B,), sign), delta=5.0)
        assert (check_as_reference(given | {"old_logps": given["old_logps"] - 200})[1] == 0).all()  # every ratio is cut


def test_the_logits_choose_the_backend_in_whatever_order_keywords_come(fast_backend):
    """And not old log-probs in float64 that were written before them."""
    given = arguments("grpo_loss")
    first = {"old_logps": given["old_logps"].double()}
    same(
        grpo_loss(**first, **{k: x for k, x in given.items() if k not in first}).loss,
        grpo_loss(**given).loss,
        scale=1.0,
    )
