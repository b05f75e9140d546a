"""A type checker accepts right code that uses strop from outside, and rejects wrong code."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

CACHE = Path(__file__).resolve().parents[1] / ".mypy_cache" / "outside"
# The package is read, but no error is reported in it. Reading torch would take half a minute: a stub knows that Module is
# a class, and the types of everything else from large libraries are Any.
CONFIG = """
[mypy]
strict = True
follow_imports = silent
mypy_path = {stubs}
[mypy-transformers.*,datasets.*,peft.*,triton.*]
follow_imports = skip
"""
STUBS = {
    "torch/__init__.pyi": "from typing import Any\nfrom . import nn as nn\nclass Tensor: ...\ndef __getattr__(name: str) -> Any: ...",
    "torch/nn/__init__.pyi": "from typing import Any\nclass Module: ...\ndef __getattr__(name: str) -> Any: ...",
}

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
    path, config = tmp_path / "project.py", tmp_path / "mypy.ini"
    path.write_text(PROJECT)
    config.write_text(CONFIG.format(stubs=tmp_path / "stubs"))
    for name, text in STUBS.items():
        (tmp_path / "stubs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "stubs" / name).write_text(text)
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(CACHE), str(path)]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=400).stdout
    wrong = {number for number, line in enumerate(PROJECT.splitlines(), 1) if "# wrong" in line}
    told = {int(number) for number in re.findall(r"project\.py:(\d+): error", found)}
    assert told == wrong, found
