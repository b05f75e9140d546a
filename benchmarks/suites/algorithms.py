"""Every algorithm learns to sort five digits, on a CPU, with three seeds.

The model is the Mixture-of-Experts transformer of `strop demo`. SFT and the reward model begin with random weights. All
others begin with a model trained by SFT until it solved 40 % of some training problems. Held-out problems are answered
greedily before, during and after; the reward model is asked which of two held-out answers is the right one.
"""

import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import ROOT
from benchmarks.training import TrainingCase, first_and_last
from strop import tasks
from strop.callbacks import Callback

SEEDS = (0, 1, 2)
DATA = ROOT / "examples/data"
NUM_TRAIN, NUM_CHECKED, NUM_TEST = 10_000, 250, 500
MEDIOCRE = 0.4  # of training problems solved: where SFT stops
EVALUATIONS = 5  # during a run
IMITATION: dict[str, Any] = {"batch_size": 64, "learning_rate": 1e-3, "warmup_steps": 20, "betas": (0.9, 0.95)}
EXPLORATION: dict[str, Any] = {
    "batch_size": 64, "group_size": 8, "learning_rate": 5e-4, "warmup_steps": 10, "schedule": "linear",
    "betas": (0.9, 0.99), "kl_coef": 0.01, "loss_type": "dapo",
}  # fmt: skip


class SortingTask:
    """The task of one seed: its problems, and models to learn them."""

    def __init__(self, seed: int):
        self.seed, self.task = seed, tasks.get("sorting", length=5)
        rows = self.task.rows("train", NUM_TRAIN, seed=seed)
        self.checked_rows, self.train = rows[:NUM_CHECKED], rows[NUM_CHECKED:]
        self.test = self.task.rows("test", NUM_TEST, seed=seed)
        self.shared: dict[str, Any] = {"tokenizer": self.task.tokenizer, "seed": seed}
        self.sampled = {**self.shared, "max_new_tokens": self.task.max_new_tokens}

    def new_model(self) -> Any:
        from strop.moe import MoEConfig, MoETransformer
        from strop.moe.torch import MoEForCausalLM

        tokenizer = self.task.tokenizer
        ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        config = MoEConfig.preset("tiny", vocab_size=len(tokenizer), max_seq_len=32, **ids)
        return MoEForCausalLM(MoETransformer(config, seed=self.seed))

    def model(self, solved: float = MEDIOCRE) -> Any:
        """Return a model trained by SFT until it solves this share of some training problems."""
        from strop.algorithms.sft import SFT

        model = self.new_model()
        trainer = SFT(model=model, callbacks=[StopWhenSolved(self, solved)], **self.shared, **IMITATION)
        trainer.train(self.train, num_steps=1000, progress=False)
        return model

    def qwen2(self) -> Any:
        """Return a small classifier of transformers with random weights."""
        import torch
        from transformers import Qwen2Config, Qwen2ForSequenceClassification

        torch.manual_seed(self.seed)
        tokenizer = self.task.tokenizer
        sizes: dict[str, Any] = {
            "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 32, "num_labels": 1,
            "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None,
        }  # fmt: skip
        return Qwen2ForSequenceClassification(Qwen2Config(**sizes))

    def solved(self, model: Any, rows: Sequence[Any]) -> float:
        """Return the share of the rows that the model answers correctly, greedily."""
        from strop.algorithms.best_of_n import BestOfN

        best = BestOfN(model=model, reward_fn=self.task.reward, n=1, temperature=0.0, **self.sampled)
        best.generate(list(rows))
        return float(best.rewards.mean())


class StopWhenSolved(Callback):
    """Ends SFT when enough training problems are solved. It checks every five steps."""

    def __init__(self, sorting: SortingTask, solved: float):
        self.sorting, self.solved = sorting, solved

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        if (
            trainer.state.step % 5 == 0
            and self.sorting.solved(trainer.policy.model, self.sorting.checked_rows) >= self.solved
        ):
            trainer.stop("enough")


class KeepScores(Callback):
    """Calls `score` before training and every so many steps, and keeps what it returns."""

    def __init__(self, score: Callable[[], float], every: int):
        self.score, self.every = score, every
        self.steps, self.scores = [0], [score()]

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        if trainer.state.step % self.every == 0:
            self.steps.append(trainer.state.step)
            self.scores.append(self.score())


@dataclass
class Training:
    """A trainer, its rows and the number of steps. score: None asks for held-out problems solved."""

    trainer: Any
    rows: Sequence[Any]
    num_steps: int
    score: Callable[[], float] | None = None


def _rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def sft(sorting: SortingTask) -> Training:
    from strop.algorithms.sft import SFT

    return Training(SFT(model=sorting.new_model(), **sorting.shared, **IMITATION), sorting.train, 200)


def dpo(sorting: SortingTask) -> Training:
    from strop.algorithms.dpo import DPO

    trainer = DPO(model=sorting.model(), beta=0.1, learning_rate=1e-4, batch_size=16, **sorting.shared)
    return Training(trainer, _rows("sorting_preferences.jsonl"), 100)


def kto(sorting: SortingTask) -> Training:
    from strop.algorithms.kto import KTO

    options: dict[str, Any] = {"beta": 0.3, "desirable_weight": 1.3, "learning_rate": 5e-4, "batch_size": 32}
    return Training(KTO(model=sorting.model(), **options, **sorting.shared), _rows("sorting_labels.jsonl"), 100)


def reward_model(sorting: SortingTask) -> Training:
    from strop.algorithms.reward_model import RewardModel

    rows = _rows("sorting_preferences.jsonl")
    trainer = RewardModel(
        model=sorting.qwen2(), learning_rate=3e-3, center_coef=0.01, batch_size=32, schedule="cosine", **sorting.shared
    )
    return Training(trainer, rows[:448], 300, lambda: trainer.evaluate(rows[448:])["eval/preference/accuracy"])


def grpo(sorting: SortingTask) -> Training:
    from strop.algorithms.grpo import GRPO

    trainer = GRPO(model=sorting.model(), reward_fn=sorting.task.reward, **sorting.sampled, **EXPLORATION)
    return Training(trainer, sorting.train, 100)


def ppo(sorting: SortingTask) -> Training:
    from strop.algorithms.ppo import PPO

    own: dict[str, Any] = {"lam": 1.0, "inner_epochs": 1, "value_coef": 1.0, "critic_learning_rate": 1e-3}
    trainer = PPO(
        model=sorting.model(),
        critic=sorting.qwen2(),
        reward_fn=sorting.task.reward,
        **sorting.sampled,
        **EXPLORATION,
        **own,
    )
    return Training(trainer, sorting.train, 100)


def online_dpo(sorting: SortingTask) -> Training:
    from strop.algorithms.online_dpo import OnlineDPO

    options: dict[str, Any] = {
        "beta": 0.1,
        "batch_size": 128,
        "learning_rate": 5e-4,
        "schedule": "linear",
        "warmup_steps": 10,
    }
    trainer = OnlineDPO(model=sorting.model(), reward_fn=sorting.task.reward, **options, **sorting.sampled)
    return Training(trainer, sorting.train, 100)


def distill(sorting: SortingTask) -> Training:
    from strop.algorithms.distill import Distill

    student, teacher = sorting.model(), sorting.model(solved=0.9)
    trainer = Distill(
        model=student, teacher=teacher, divergence="jsd", batch_size=64, learning_rate=1e-3, **sorting.sampled
    )
    return Training(trainer, sorting.train, 60)


TRAININGS: dict[str, Callable[[SortingTask], Training]] = {
    "SFT": sft, "DPO": dpo, "KTO": kto, "RewardModel": reward_model, "GRPO": grpo, "PPO": ppo, "OnlineDPO": online_dpo,
    "Distill": distill,
}  # fmt: skip


def cases() -> list[TrainingCase]:
    return [learns(algorithm, seed) for algorithm in TRAININGS for seed in SEEDS]


def learns(algorithm: str, seed: int, num_steps: int | None = None) -> TrainingCase:
    """Return the case of one algorithm and seed, by default with the algorithm's own number of steps."""
    train = functools.partial(_train, algorithm, seed, num_steps)
    return TrainingCase(work=f"{algorithm} learns to sort, seed {seed}", train=train)


def _train(algorithm: str, seed: int, num_steps: int | None) -> dict[str, Any]:
    from strop.models import one_thread

    with one_thread():
        sorting = SortingTask(seed)
        training = TRAININGS[algorithm](sorting)
        num_steps = num_steps or training.num_steps
        solved = functools.partial(sorting.solved, training.trainer.policy.model, sorting.test)
        kept = KeepScores(training.score or solved, max(1, num_steps // EVALUATIONS))
        training.trainer.callbacks.append(kept)
        before = time.process_time()
        training.trainer.train(training.rows, num_steps=num_steps, progress=False)
    return {
        "labels": {"algorithm": algorithm, "seed": seed, "num_steps": num_steps},
        "measure": "right of two answers" if training.score else "solved",
        "steps": kept.steps,
        "scores": [round(score, 4) for score in kept.scores],
        "cpu_seconds": round(time.process_time() - before, 1),  # without what SFT took to make the first model
    }


def summary(measured: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    return first_and_last(measured, "held-out problems solved or preferred", lambda case: case["scores"], ".1%")
