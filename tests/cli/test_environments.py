"""`strop train` and `strop generate` with environments and tools by name."""

import json
import sys
from pathlib import Path

import pytest

from strop.cli import main

ROOT = Path(__file__).resolve().parents[2]
GUESS = f"{ROOT}/examples/environments/guess.py:GuessANumber"


def run(*words):
    before, sys.argv = sys.argv, ["strop", *map(str, words)]
    try:
        main()
    except SystemExit as end:
        return end.code or 0
    finally:
        sys.argv = before
    return 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of two steps of examples/guess.yaml."""
    folder = tmp_path_factory.mktemp("guess") / "run"
    config = ROOT / "examples/guess.yaml"
    words = [
        "train",
        "grpo",
        "--config",
        config,
        "--environment",
        GUESS,
        "--output",
        folder,
        "--num-steps",
        2,
        "--quiet",
    ]
    assert run(*words, "--eval-every", 2, "--batch-size", 4) == 0
    return folder


def test_a_run_by_name_needs_no_data(folder):
    told = json.loads((folder / "run.json").read_text())
    assert told["job"]["environment"] == GUESS
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert any("eval/environment/found" in line for line in lines)
    assert any(line.get("turns/mean", 0) >= 1 for line in lines)


def test_generate_shows_conversations(folder, capsys):
    words = ["generate", "--model", folder / "final", "--environment", GUESS, "--num-rows", 2, "--max-new-tokens", 1]
    assert run(*words, "--json") == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(answers) == 2
    assert [message["role"] for message in answers[0]["conversation"]][:2] == ["user", "assistant"]
    assert all(0 <= answer["reward"] <= 1 for answer in answers)
    assert run(*words) == 0
    assert "assistant: " in capsys.readouterr().out


def test_what_sft_does_not_have(tmp_path, capsys):
    assert run("train", "sft", "--model", "moe:tiny", "--task", "sorting", "--environment", GUESS) == 1
    assert "environment must not be given: sft has none" in capsys.readouterr().err
