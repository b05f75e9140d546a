"""What a type checker says of code that uses strop from outside: nothing of what is right, and something of what is wrong."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

CACHE = Path(__file__).resolve().parents[1] / ".mypy_cache" / "outside"  # the first run reads torch: half a minute

PROJECT = """
from pathlib import Path

from strop import DPO, GRPO, KTO, PPO, SFT, BestOfN, Distill, OnlineDPO, RewardModel, __version__, compute_group_advantages
from strop.callbacks import Callback, EarlyStopping
from strop.logging import ConsoleLogger
from strop.training.state import History
from strop.training.trainer import Trainer


class Count(Callback):
    def on_step_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self.steps: int = trainer.state.step


def reward(completions: list[str], answer: list[str]) -> list[float]:
    return [float(c == a) for c, a in zip(completions, answer)]


sft = SFT(model="moe:tiny", logger=ConsoleLogger(10), callbacks=[Count(), EarlyStopping()], learning_rate=1e-4)
history: History = sft.train("rows.jsonl", num_steps=3, output_dir=Path("runs"), overwrite=True)
losses: list[float] = history.values("loss")
grpo = GRPO(model=sft.model, reward_fn=reward, group_size=4)
metrics: dict[str, float] = grpo.train_step(["1+1="], answer=["2"])
again: GRPO = GRPO.from_checkpoint("a.pt", reward_fn=reward)
version: str = __version__
sft.train([{"prompt": "a", "completion": "b"}], num_steps="3")  # wrong 1
history.nothing  # wrong 2
grpo.save(7)  # wrong 3
BestOfN.nothing  # wrong 4
SFT(model=3)  # wrong 5
DPO.nothing, OnlineDPO.nothing, KTO.nothing, PPO.nothing, Distill.nothing, RewardModel.nothing  # wrong 6
SFT(model="moe:tiny", callbacks=len)  # wrong 7
"""


@pytest.mark.slow
def test_mypy_on_a_project_that_uses_strop(tmp_path):
    path = tmp_path / "project.py"
    path.write_text(PROJECT)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--cache-dir",
        str(CACHE),
        "--follow-imports=silent",
        str(path),
    ]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=400).stdout
    wrong = {number for number, line in enumerate(PROJECT.splitlines(), 1) if "# wrong" in line}
    told = {int(number) for number in re.findall(r"project\.py:(\d+): error", found)}
    assert told == wrong, found
