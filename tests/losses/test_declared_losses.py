"""Every declared policy loss: its derivative is that of its formula, its kernel exists, its weights add up, the page has it."""

import dataclasses
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

from strop.config.policy_losses import POLICY_LOSSES, PolicyLossType
from strop.losses import PolicyRule, PreferenceRule, token_policy_loss
from strop.losses.preference import PreferenceOptions
from strop.losses.rules import PolicyOptions, from_text, token_terms
from strop.ops.rows import kernels

PAGE = Path(__file__).parents[2] / "docs" / "losses.md"
every_loss = pytest.mark.parametrize("loss_type", POLICY_LOSSES)


def rule_of(loss_type, **options):
    return PolicyRule(loss_type=loss_type, max_completion_length=7, **options)


def tokens(num=400):
    """Log-ratios from −1 to 1: on both sides of every clip, with advantages of both signs."""
    generator = torch.Generator().manual_seed(0)
    logps_N = -torch.rand(num, dtype=torch.float64, generator=generator) * 3
    old_N = logps_N - torch.empty_like(logps_N).uniform_(-1, 1, generator=generator)
    advantages_N = torch.randn(num, dtype=torch.float64, generator=generator)
    return logps_N, old_N, advantages_N


@every_loss
def test_derivative_is_that_of_the_formula(loss_type):
    rule = rule_of(loss_type)
    if rule.type.derivative is None:
        assert not rule.row_suffices
        return
    logps_N, old_N, advantages_N = tokens()
    leaf_N = logps_N.clone().requires_grad_()
    loss = token_policy_loss(
        leaf_N[None], old_N[None], advantages_N[None], loss_type=loss_type, max_completion_length=7
    )
    loss.sum().backward()
    _, derivative_N = token_terms(logps_N, old_N, None, advantages_N, torch.ones_like(logps_N), rule)
    assert leaf_N.grad.abs().max() > 0.1
    torch.testing.assert_close(derivative_N, leaf_N.grad, rtol=1e-12, atol=1e-12)


@every_loss
def test_kernel_exists_where_a_row_suffices(loss_type):
    declared = POLICY_LOSSES[loss_type]
    assert (declared.kernel is None) == (declared.derivative is None)
    assert declared.kernel is None or callable(getattr(kernels, declared.kernel))


@every_loss
def test_weights_by_hand(loss_type):
    """Two sequences of 3 and 5 tokens in an update of 8 tokens and 2 sequences."""
    wanted = {
        "tokens": (1 / 8, 1 / 8),
        "length": (1 / 6, 1 / 10),
        "max_length": (1 / 14, 1 / 14),
        "sequences": (0.5, 0.5),
    }
    found = tuple(rule_of(loss_type).weight(length, 8, 2) for length in (3, 5))
    assert found == pytest.approx(wanted[POLICY_LOSSES[loss_type].weight])


@every_loss
def test_page_lists_the_loss(loss_type):
    assert f"`{loss_type}`" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("clips", [True, False])
def test_a_new_loss_is_one_entry(monkeypatch, clips):
    """A loss with a row of its own in the table is accepted and computed: −A·log π, the policy gradient."""

    def policy_gradient(tokens, rule):
        return -tokens.advantages_N * tokens.logps_N

    def d_policy_gradient(ratio_N, advantages_N, bounds):
        return -advantages_N

    entry = PolicyLossType(policy_gradient, d_policy_gradient, "tokens", None, clips=clips)
    monkeypatch.setitem(POLICY_LOSSES, "reinforce", entry)
    logps_N, old_N, advantages_N = tokens()
    rule = PolicyRule(loss_type="reinforce")
    terms_3N, derivative_N = token_terms(logps_N, old_N, None, advantages_N, torch.ones_like(logps_N), rule)
    assert torch.equal(terms_3N[0], -advantages_N * logps_N)
    assert torch.equal(derivative_N, -advantages_N)
    assert from_text(rule.text).type is entry, "operators of torch.ops carry a rule as text"


@pytest.mark.parametrize(("options", "rule"), [(PolicyOptions, PolicyRule), (PreferenceOptions, PreferenceRule)])
def test_functions_take_every_option_of_a_rule(options, rule):
    fields = {field.name for field in dataclasses.fields(rule)}
    types = {name: kind for name, kind in get_type_hints(rule).items() if name in fields}
    assert get_type_hints(options) == types
