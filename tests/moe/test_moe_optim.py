"""The optimiser against torch's, clipping and schedule by hand."""

import math

import numpy as np
import pytest
from moe_models import random_model, small_config

from strop.moe.optim import AdamW, clip_global_norm, clip_scale, global_norm, warmup_cosine


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-13), (np.float32, 2e-6)])
def test_against_torch(dtype, tolerance, moe_engine):
    torch = pytest.importorskip("torch")
    model = random_model(small_config(), moe_engine, dtype=np.float32)
    if dtype == np.float64 and np.float64 not in model.engine.dtypes:
        pytest.skip(f"{moe_engine} computes in float32")
    params = {name: param.astype(dtype) for name, param in model.params.items()}
    tensors = {name: torch.nn.Parameter(torch.from_numpy(param.copy())) for name, param in params.items()}
    settings = {"betas": (0.9, 0.95), "eps": 1e-8}
    groups = [
        {"params": [t for t in tensors.values() if t.ndim > 1], "weight_decay": 0.3},
        {"params": [t for t in tensors.values() if t.ndim == 1], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=1e-2, **settings)
    ours = AdamW(params, learning_rate=1e-2, weight_decay=0.3, update=model.engine.adamw_update_all, **settings)
    rng = np.random.default_rng(0)
    for step in range(20):
        grads = {name: rng.standard_normal(param.shape).astype(dtype) for name, param in params.items()}
        lr = 1e-2 / (step + 1)
        for group in theirs.param_groups:
            group["lr"] = lr
        for name, tensor in tensors.items():
            tensor.grad = torch.from_numpy(grads[name] * dtype(0.5))
        theirs.step()
        ours.step(grads, learning_rate=lr, grad_scale=0.5)
    for name, param in params.items():
        assert np.abs(param - tensors[name].detach().numpy()).max() <= tolerance, name


def test_first_step_by_hand():
    """m̂ = g and v̂ = g², so the step is lr·sign(g); matrices also decay, norms do not."""
    params = {"matrix": np.array([[1.0, -2.0]]), "norm": np.array([1.0])}
    AdamW(params, learning_rate=0.1, weight_decay=0.5, eps=1e-30).step(
        {"matrix": np.array([[3.0, -4.0]]), "norm": np.array([5.0])}
    )
    assert params["matrix"][0] == pytest.approx([0.95 - 0.1, -1.9 + 0.1])
    assert params["norm"] == pytest.approx([0.9])


def test_clipping_by_hand():
    grads = {"a": np.array([3.0]), "b": np.array([[0.0, 4.0]])}
    assert global_norm(grads) == 5.0
    assert clip_global_norm(grads, 10.0) == 5.0
    assert grads["a"].tolist() == [3.0]
    assert clip_global_norm(grads, 1.0) == 5.0
    assert grads["b"][0] == pytest.approx([0, 0.8])
    assert clip_scale(0.0, 1.0) == 1.0


def test_schedule_by_hand():
    settings = {"learning_rate": 1.0, "total_steps": 12, "warmup_steps": 4, "min_learning_rate": 0.2}
    rates = [warmup_cosine(step, **settings) for step in range(14)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[6] == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)
    assert rates[8] == pytest.approx(0.6)
    assert rates[12:] == pytest.approx([0.2, 0.2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: AdamW({}, learning_rate=-1), "learning_rate must be finite and at least 0, found -1"),
        (lambda: AdamW({}, learning_rate=1, betas=(0.9, 1.0)), r"betas must be at least 0 and below 1, found 1.0"),
        (lambda: AdamW({}, learning_rate=1, eps=0), "eps must be finite and above 0, found 0"),
        (lambda: AdamW({"a": np.ones(1)}, learning_rate=1).step({"b": np.ones(1)}), "found a difference at 'a'"),
        (lambda: clip_scale(1.0, 0), "max_norm must be above 0, found 0"),
        (lambda: warmup_cosine(0, learning_rate=1, total_steps=0), "total_steps must be at least 1, found 0"),
        (
            lambda: warmup_cosine(0, learning_rate=1, total_steps=3, warmup_steps=4),
            "warmup_steps must be from 0 to total_steps=3, found 4",
        ),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
