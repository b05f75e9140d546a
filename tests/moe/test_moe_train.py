"""The loop: it memorises, it follows the schedule, it is quiet, it stops on nonsense."""

import io
import sys

import numpy as np
import pytest
from moe_models import random_batch, small_config

from strop.moe import MoEConfig, MoETransformer
from strop.moe.optim import AdamW, warmup_cosine
from strop.moe.train import fit, next_token_batches


def forever(batch):
    while True:
        yield batch


@pytest.fixture
def batch():
    tokens, targets, mask, _ = random_batch(small_config(), (2, 6))
    return {"tokens": tokens, "targets": targets, "mask": mask}


def test_a_fixed_batch_is_memorised(moe_engine, batch):
    model = MoETransformer(small_config(aux_loss_coef=0.01), moe_engine)
    seen = []
    history = fit(model, forever(batch), num_steps=150, learning_rate=2e-2, warmup_steps=10, on_step=seen.append)
    assert seen == history
    assert history[0].loss == pytest.approx(np.log(11), rel=0.05)
    assert history[-1].loss < 0.1
    assert [m.step for m in history] == list(range(150))
    want = [warmup_cosine(step, learning_rate=2e-2, total_steps=150, warmup_steps=10) for step in range(150)]
    assert [m.learning_rate for m in history] == want


def test_engines_follow_the_same_curve(moe_engine, batch):
    curves = []
    for engine in ("numpy", moe_engine):
        model = MoETransformer(small_config(aux_loss_coef=0.01), engine, seed=1)
        curves.append([m.loss for m in fit(model, forever(batch), num_steps=20)])
    assert curves[1] == pytest.approx(curves[0], rel=1e-3)


def test_fit_equals_a_hand_written_loop(batch):
    models = [MoETransformer(small_config(), "numpy", dtype=np.float64) for _ in range(2)]
    fit(models[0], forever(batch), num_steps=3, learning_rate=0.1, max_grad_norm=0.05, weight_decay=0.2)
    optimizer = AdamW(models[1].params, learning_rate=0.1, weight_decay=0.2)
    for step in range(3):
        _, grads = models[1].loss_and_grads(**batch)
        norm = np.sqrt(sum((grad**2).sum() for grad in grads.values()))
        grads = {name: grad * min(1, 0.05 / norm) for name, grad in grads.items()}
        optimizer.step(grads, learning_rate=0.05 * (1 + np.cos(np.pi * step / 3)))
    for name, param in models[0].params.items():
        assert param == pytest.approx(models[1].params[name], rel=1e-9, abs=1e-12), name


def test_held_out_loss_of_a_synthetic_language_falls(moe_engine):
    """Each token names its successor but for noise: there is something to learn beyond the batch."""
    rng = np.random.default_rng(0)
    successor, text = rng.permutation(16), [0]
    for _ in range(4000):
        text.append(int(successor[text[-1]]) if rng.random() < 0.9 else int(rng.integers(16)))
    config = MoEConfig(hidden_dim=16, head_dim=4, num_heads=4, intermediate_dim=16, vocab_size=16, max_seq_len=32)
    model = MoETransformer(config, moe_engine)
    held_out = next(next_token_batches(text[3000:], batch_size=16, seq_len=16, seed=1))
    before = model.loss_and_grads(**held_out)[0]
    fit(model, next_token_batches(text[:3000], batch_size=8, seq_len=16), num_steps=80, learning_rate=1e-2)
    assert before > 2.7
    assert model.loss_and_grads(**held_out)[0] < 1.2


def test_no_output_without_a_terminal(batch, capsys):
    fit(MoETransformer(small_config(), "numpy"), forever(batch), num_steps=2)
    assert capsys.readouterr() == ("", "")


def test_progress_on_request(batch, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    fit(MoETransformer(small_config(), "numpy"), forever(batch), num_steps=2, progress=True)
    assert "loss 2." in screen.getvalue()
    assert "2/2" in screen.getvalue()


def test_batches_are_windows_of_a_long_row():
    batch = next(next_token_batches(np.arange(100), batch_size=5, seq_len=7))
    assert batch["tokens"].shape == (5, 7)
    assert np.array_equal(batch["targets"], batch["tokens"] + 1)
    starts = {
        int(next(next_token_batches(np.arange(3), batch_size=1, seq_len=2, seed=s))["tokens"][0, 0]) for s in range(9)
    }
    assert starts == {0}  # the last token is a target only
    with pytest.raises(ValueError, match=r"tokens must be one row of more than seq_len=4 ids, found shape \(4,\)"):
        next(next_token_batches(np.arange(4), batch_size=1, seq_len=4))


def test_refused(batch):
    model = MoETransformer(small_config(), "numpy")
    with pytest.raises(ValueError, match="batches must hold num_steps=3 batches, found 2"):
        fit(model, [batch, batch], num_steps=3)
    with pytest.raises(ValueError, match="num_steps must be at least 1, found 0"):
        fit(model, [batch], num_steps=0)
    with pytest.raises(ValueError, match=r"max_grad_norm must be above 0, found 0"):
        fit(model, [batch], num_steps=1, max_grad_norm=0)
    with pytest.raises(ValueError, match="optimizer must be made with the params of this model, found others"):
        fit(model, [batch], num_steps=1, optimizer=AdamW(MoETransformer(small_config()).params, learning_rate=0.1))
    model.params["lm_head.weight"][0, 0] = np.nan
    before = {name: param.copy() for name, param in model.params.items()}
    with pytest.raises(
        FloatingPointError, match="step 0: the loss is nan and the gradient norm nan; nothing was updated"
    ):
        fit(model, [batch], num_steps=1)
    assert all(np.array_equal(before[name], param, equal_nan=True) for name, param in model.params.items())
