"""Every engine from the same weights: a fixed batch memorised, and a small language learned.

The fixed batch is random tokens, which can only be memorised: the loss goes to 0, and since every engine computes the same
thing, the curves lie on each other up to rounding. The language is a Markov chain of order 2 over 12 symbols with 4
successors each: predicting it takes attention to the token before the last one. Its entropy rate is known exactly, and no
model can have a lower held-out loss. Training batches are drawn anew each step and nothing is ever seen twice; the held-out
rows are drawn with another seed.

Shapes: B rows, T tokens of a row, S symbols, K successors of a pair.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.contenders import moe as moe_contenders
from benchmarks.contenders.moe import contenders
from benchmarks.suites.engines import THREADS, TINY
from benchmarks.training import TrainingCase, first_and_last, rounded
from strop.moe.optim import warmup_cosine

EVALUATE_EVERY = 10
DIGITS = 7  # of a loss in the result
NUM_SYMBOLS, NUM_SUCCESSORS = 12, 4
HELD_OUT_SEED = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Schedule:
    batch: int
    seq_len: int
    num_steps: int
    learning_rate: float = 3e-3
    warmup_steps: int = 10

    def rates(self) -> list[float]:
        return [
            warmup_cosine(
                step, learning_rate=self.learning_rate, total_steps=self.num_steps, warmup_steps=self.warmup_steps
            )
            for step in range(self.num_steps)
        ]


MEMORISE = Schedule(batch=8, seq_len=32, num_steps=150)
LANGUAGE = Schedule(batch=16, seq_len=32, num_steps=400)


def cases() -> list[TrainingCase]:
    moe_contenders.set_threads(THREADS)
    return [curve(task, c.name) for task in TASKS for c in contenders()]


def curve(task: str, engine: str) -> TrainingCase:
    """Return the case of one engine on one task: the loss of each step, or the held-out loss every few steps."""

    def train() -> dict[str, Any]:
        found = TASKS[task](moe_contenders.contender(engine))
        if not np.isfinite(found["losses"]).all():
            raise RuntimeError(f"{task}: {engine}: a loss is not finite")
        return found

    return TrainingCase(work=f"{task}: {engine}", labels={"task": task, "engine": engine}, train=train)


def memorise(c: moe_contenders.Contender) -> dict[str, Any]:
    trainer = c.trainer(TINY, learning_rate=MEMORISE.learning_rate)
    rows = np.random.default_rng(0).integers(0, TINY.vocab_size, (MEMORISE.batch, MEMORISE.seq_len + 1))
    batch = _shifted(rows)
    losses = [trainer.step(*batch, learning_rate=rate) for rate in MEMORISE.rates()]
    return {"steps": list(range(len(losses))), "losses": rounded(losses, DIGITS)}


def learn_language(c: moe_contenders.Contender) -> dict[str, Any]:
    trainer = c.trainer(TINY, learning_rate=LANGUAGE.learning_rate)
    language = Language(seed=0)
    rows = functools.partial(language.rows, LANGUAGE.batch, LANGUAGE.seq_len)
    held_out_BT, targets_BT = _shifted(rows(seed=HELD_OUT_SEED))
    steps, losses = [0], [held_out_loss(trainer.logits(held_out_BT), targets_BT)]
    for number, rate in enumerate(LANGUAGE.rates(), 1):
        trainer.step(*_shifted(rows(seed=number)), learning_rate=rate)
        if number % EVALUATE_EVERY == 0:
            steps.append(number)
            losses.append(held_out_loss(trainer.logits(held_out_BT), targets_BT))
    return {"steps": steps, "losses": rounded(losses, DIGITS), "entropy_rate": round(language.entropy_rate(), 6)}


TASKS = {"memorise": memorise, "language": learn_language}


def held_out_loss(logits_BTV: np.ndarray, targets_BT: np.ndarray) -> float:
    """Mean cross-entropy where two tokens of context are known: from the second position on."""
    z_NV = np.asarray(logits_BTV, np.float64)[:, 1:].reshape(-1, logits_BTV.shape[-1])
    z_NV = z_NV - z_NV.max(-1, keepdims=True)
    targets_N = targets_BT[:, 1:].ravel()
    return float((np.log(np.exp(z_NV).sum(-1)) - z_NV[np.arange(len(z_NV)), targets_N]).mean())


class Language:
    """A Markov chain of order 2: after each pair of symbols, one of K successors."""

    def __init__(self, seed: int, num_symbols: int = NUM_SYMBOLS, num_successors: int = NUM_SUCCESSORS):
        rng = np.random.default_rng(seed)
        pairs = range(num_symbols**2)
        shape_SSK = (num_symbols, num_symbols, num_successors)
        self.successors_SSK = np.stack([rng.permutation(num_symbols)[:num_successors] for _ in pairs]).reshape(
            shape_SSK
        )
        self.probs_SSK = rng.dirichlet(np.ones(num_successors), (num_symbols, num_symbols))

    def rows(self, batch: int, seq_len: int, *, seed: int) -> np.ndarray:
        """(batch, seq_len + 1) symbols from the middle of the language: what comes before a row is thrown away."""
        rng = np.random.default_rng(seed)
        num_symbols, burn_in = len(self.probs_SSK), 20
        rows = np.empty((batch, burn_in + seq_len + 1), np.int64)
        rows[:, :2] = rng.integers(0, num_symbols, (batch, 2))
        cdf_SSK = self.probs_SSK.cumsum(-1)
        for t in range(2, rows.shape[1]):
            before, last = rows[:, t - 2], rows[:, t - 1]
            drawn = (rng.random(batch)[:, None] > cdf_SSK[before, last, :-1]).sum(-1)
            rows[:, t] = self.successors_SSK[before, last, drawn]
        return rows[:, burn_in:]

    def entropy_rate(self) -> float:
        """Nats a symbol: the entropy of each pair's successor, weighted by how often the pair comes up."""
        num_symbols = len(self.probs_SSK)
        share_SS = np.full((num_symbols, num_symbols), num_symbols**-2.0)
        for _ in range(2000):  # to the stationary distribution of pairs
            flow_SSK = share_SS[..., None] * self.probs_SSK
            share_SS = np.zeros_like(share_SS)
            last = np.arange(num_symbols)[None, :, None]
            np.add.at(share_SS, (np.broadcast_to(last, flow_SSK.shape), self.successors_SSK), flow_SSK)
        entropy_SS = -(self.probs_SSK * np.log(self.probs_SSK)).sum(-1)
        return float((share_SS * entropy_SS).sum())


def largest_difference(measured: list[dict[str, Any]], task: str) -> float:
    """Between any two engines' curves of a task, at any step."""
    curves = np.array([case["losses"] for case in measured if case["labels"]["task"] == task])
    return float(np.ptp(curves, axis=0).max()) if len(curves) else 0.0


def summary(measured: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of the command line's table."""
    header, rows = first_and_last(measured, "loss", lambda case: case["losses"], ".4f")
    differences = {task: f"{largest_difference(measured, task):.2g}" for task in TASKS}
    return header, rows + [[f"{task}: largest difference between curves", "", d, ""] for task, d in differences.items()]


def _shifted(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])
