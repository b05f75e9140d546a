"""Every algorithm learns to sort five digits, on a CPU, with three seeds.

The model is the Mixture-of-Experts transformer of `strop demo`. SFT and the reward model begin with random weights. All
others begin with what SFT made of them when it had solved 40 % of some training problems. Held-out problems are answered
greedily before, during and after; the reward model is asked which of two held-out answers is the right one.
"""

import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import ROOT
from benchmarks.harness import Method
from strop import tasks
from strop.callbacks import Callback

SEEDS = (0, 1, 2)
DATA = ROOT / "examples/data"
NUM_TRAIN, NUM_LOOKED_AT, NUM_TEST = 10_000, 250, 500
MEDIOCRE = 0.4  # of training problems solved: where SFT stops
EVALUATIONS = 5  # during a run
IMITATION: dict[str, Any] = {"batch_size": 64, "learning_rate": 1e-3, "warmup_steps": 20, "betas": (0.9, 0.95)}
EXPLORATION: dict[str, Any] = {
    "batch_size": 64, "group_size": 8, "learning_rate": 5e-4, "warmup_steps": 10, "schedule": "linear",
    "betas": (0.9, 0.99), "kl_coef": 0.01, "loss_type": "dapo",
}  # fmt: skip


class Desk:
    """The task of one seed: its problems, and models to learn them."""

    def __init__(self, seed: int):
        self.seed, self.task = seed, tasks.get("sorting", length=5)
        rows = self.task.rows("train", NUM_TRAIN, seed=seed)
        self.looked_at, self.train = rows[:NUM_LOOKED_AT], rows[NUM_LOOKED_AT:]
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

    def model(self, solved: float | None = None) -> Any:
        """What SFT makes, up to the step where it solves this share of some training problems; None: 40 %."""
        from strop.algorithms.sft import SFT

        model = self.new_model()
        SFT(
            model=model, callbacks=[Enough(self, MEDIOCRE if solved is None else solved)], **self.shared, **IMITATION
        ).train(self.train, num_steps=1000, progress=False)
        return model

    def qwen2(self) -> Any:
        """A small classifier of transformers', with random weights."""
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
        from strop.algorithms.best_of_n import BestOfN

        best = BestOfN(model=model, reward_fn=self.task.reward, n=1, temperature=0.0, **self.sampled)
        best.generate(list(rows))
        return float(best.rewards.mean())


class Enough(Callback):
    """Ends SFT. It looks at training problems every five steps."""

    def __init__(self, desk: Desk, solved: float):
        self.desk, self.solved = desk, solved

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        if trainer.state.step % 5 == 0 and self.desk.solved(trainer.policy.model, self.desk.looked_at) >= self.solved:
            trainer.stop("enough")


class Watch(Callback):
    """Asks `score` every so many steps."""

    def __init__(self, score: Callable[[], float], every: int):
        self.score, self.every = score, every
        self.steps, self.scores = [0], [score()]

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        if trainer.state.step % self.every == 0:
            self.steps.append(trainer.state.step)
            self.scores.append(self.score())


@dataclass
class Lesson:
    """A trainer, its rows and the number of steps. score: None asks for held-out problems solved."""

    trainer: Any
    rows: Sequence[Any]
    num_steps: int
    score: Callable[[], float] | None = None


def _rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def sft(desk: Desk) -> Lesson:
    from strop.algorithms.sft import SFT

    return Lesson(SFT(model=desk.new_model(), **desk.shared, **IMITATION), desk.train, 200)


def dpo(desk: Desk) -> Lesson:
    from strop.algorithms.dpo import DPO

    trainer = DPO(model=desk.model(), beta=0.1, learning_rate=1e-4, batch_size=16, **desk.shared)
    return Lesson(trainer, _rows("sorting_preferences.jsonl"), 100)


def kto(desk: Desk) -> Lesson:
    from strop.algorithms.kto import KTO

    options: dict[str, Any] = {"beta": 0.3, "desirable_weight": 1.3, "learning_rate": 5e-4, "batch_size": 32}
    return Lesson(KTO(model=desk.model(), **options, **desk.shared), _rows("sorting_labels.jsonl"), 100)


def reward_model(desk: Desk) -> Lesson:
    from strop.algorithms.reward_model import RewardModel

    rows = _rows("sorting_preferences.jsonl")
    trainer = RewardModel(
        model=desk.qwen2(), learning_rate=3e-3, center_coef=0.01, batch_size=32, schedule="cosine", **desk.shared
    )
    return Lesson(trainer, rows[:448], 300, lambda: trainer.evaluate(rows[448:])["eval/preference/accuracy"])


def grpo(desk: Desk) -> Lesson:
    from strop.algorithms.grpo import GRPO

    trainer = GRPO(model=desk.model(), reward_fn=desk.task.reward, **desk.sampled, **EXPLORATION)
    return Lesson(trainer, desk.train, 100)


def ppo(desk: Desk) -> Lesson:
    from strop.algorithms.ppo import PPO

    own: dict[str, Any] = {"lam": 1.0, "inner_epochs": 1, "value_coef": 1.0, "critic_learning_rate": 1e-3}
    trainer = PPO(
        model=desk.model(), critic=desk.qwen2(), reward_fn=desk.task.reward, **desk.sampled, **EXPLORATION, **own
    )
    return Lesson(trainer, desk.train, 100)


def online_dpo(desk: Desk) -> Lesson:
    from strop.algorithms.online_dpo import OnlineDPO

    options: dict[str, Any] = {
        "beta": 0.1,
        "batch_size": 128,
        "learning_rate": 5e-4,
        "schedule": "linear",
        "warmup_steps": 10,
    }
    trainer = OnlineDPO(model=desk.model(), reward_fn=desk.task.reward, **options, **desk.sampled)
    return Lesson(trainer, desk.train, 100)


def distill(desk: Desk) -> Lesson:
    from strop.algorithms.distill import Distill

    student, teacher = desk.model(), desk.model(solved=0.9)
    trainer = Distill(
        model=student, teacher=teacher, divergence="jsd", batch_size=64, learning_rate=1e-3, **desk.sampled
    )
    return Lesson(trainer, desk.train, 60)


LESSONS: dict[str, Callable[[Desk], Lesson]] = {
    "SFT": sft, "DPO": dpo, "KTO": kto, "RewardModel": reward_model, "GRPO": grpo, "PPO": ppo, "OnlineDPO": online_dpo,
    "Distill": distill,
}  # fmt: skip


def cases() -> list["Learns"]:
    return [Learns(algorithm=algorithm, seed=seed) for algorithm in LESSONS for seed in SEEDS]


@dataclass(frozen=True, kw_only=True)
class Learns:
    algorithm: str
    seed: int
    num_steps: int | None = None  # None: the lesson's

    @property
    def work(self) -> str:
        return f"{self.algorithm} learns to sort, seed {self.seed}"

    def measure(self, method: Method) -> dict[str, Any]:
        from strop.models import one_thread

        with one_thread():
            desk = Desk(self.seed)
            lesson = LESSONS[self.algorithm](desk)
            num_steps = self.num_steps or lesson.num_steps
            solved = functools.partial(desk.solved, lesson.trainer.policy.model, desk.test)
            watch = Watch(lesson.score or solved, max(1, num_steps // EVALUATIONS))
            lesson.trainer.callbacks.append(watch)
            before = time.process_time()
            lesson.trainer.train(lesson.rows, num_steps=num_steps, progress=False)
        return {
            "work": self.work,
            "labels": {"algorithm": self.algorithm, "seed": self.seed, "num_steps": num_steps},
            "measure": "right of two answers" if lesson.score else "solved",
            "steps": watch.steps,
            "scores": [round(score, 4) for score in watch.scores],
            "cpu_seconds": round(time.process_time() - before, 1),
        }


def summary(measured: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [case["work"], case["measure"], f"{case['scores'][0]:.1%}", f"{case['scores'][-1]:.1%}", f"{case['cpu_seconds']:.0f} s"]
        for case in measured
    ]  # fmt: skip
    return ["work", "held out", "before", "after", "CPU time"], rows
