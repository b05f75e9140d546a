"""The divergences of linear_divergence by hand. What holds for every operator: test_every_operator.py."""

import math

import pytest
import torch

from strop.losses.divergence import divergence


def test_by_hand():
    """p = (½, ½), q = (¼, ¾)."""
    p, q = torch.tensor([[0.5, 0.5]], dtype=torch.float64), torch.tensor([[0.25, 0.75]], dtype=torch.float64)
    forward = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    reverse = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    m = (0.375, 0.625)
    jsd = 0.5 * sum(x * math.log(x / y) for x, y in zip((0.25, 0.75), m, strict=True))
    jsd += 0.5 * sum(x * math.log(x / y) for x, y in zip((0.5, 0.5), m, strict=True))
    for beta, wanted in ((0.0, forward), (1.0, reverse), (0.5, jsd)):
        assert divergence(p.log(), q.log(), beta).item() == pytest.approx(wanted)
        assert divergence(p.log(), p.log(), beta).item() == pytest.approx(0, abs=1e-15)
