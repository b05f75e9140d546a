"""`strop demo` with few steps: what it writes, what it says, what it leaves alone. The whole recipe is marked slow."""

import io
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import preloaded
import pytest

from strop.cli import demo, main

torch = pytest.importorskip("torch")


def command(*args):
    return [sys.executable, "-m", "strop", "demo", *map(str, args)]


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """In this process, which has imported torch already; those below that start another cannot do without."""
    folder = tmp_path_factory.mktemp("demo") / "runs" / "demo"
    arguments = command("--steps", 3, "--sft-steps", 12, "--output", folder, "--seed", 1)[3:]
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["strop", *arguments])
        patch.setattr(warnings, "formatwarning", warnings.formatwarning)  # main changes it
        with pytest.raises(SystemExit) as ended:
            main()
    return folder, subprocess.CompletedProcess(arguments, ended.value.code or 0, out.getvalue(), err.getvalue())


def test_every_stage_is_told_and_quiet_without_a_terminal(finished):
    folder, done = finished
    assert done.returncode == 0, done.stderr
    assert [line[:36] for line in done.stderr.splitlines()] in ([], ["GRPO: warning: nothing was learned: "])  # no bars
    assert "\x1b" not in done.stdout
    found = [line for line in done.stdout.splitlines() if line[:2] in ("1.", "2.", "3.", "4.")]
    assert found == ["1. Data", "2. Supervised", "3. GRPO", "4. Comparison"]
    assert "10,000 problems to train on, 500 held out" in done.stdout
    assert "12 steps on right answers" in done.stdout
    for name in ("greedy", "sampled", "best of 8"):
        assert name in done.stdout
    assert done.stdout.splitlines()[-1].endswith(f"Report: {folder / 'report.html'}")


def test_training_and_held_out_rows_are_disjoint(finished):
    folder, _ = finished
    train, test = lines_of(folder / "data" / "train.jsonl"), lines_of(folder / "data" / "test.jsonl")
    assert (len(train), len(test)) == (10_000, 500)
    assert not {row["answer"] for row in train} & {row["answer"] for row in test}


def test_the_runs_and_the_numbers_are_there(finished):
    folder, _ = finished
    steps = lines_of(folder / "grpo" / "metrics.jsonl")
    assert [row["step"] for row in steps if "loss" in row] == [1, 2, 3]
    assert all(
        {"reward/mean", "kl", "entropy", "entropy_estimate", "completion/length", "time/generate"} <= row.keys()
        for row in steps
        if "loss" in row
    )
    about = json.loads((folder / "demo.json").read_text())
    assert about["finished"]
    assert (about["seed"], about["steps"]) == (1, 3)
    evaluated = [row["eval/reward/mean"] for row in steps if "eval/reward/mean" in row]
    assert evaluated[0] == pytest.approx(about["before"]["greedy"])  # the same 500 problems, two ways
    assert evaluated[-1] == pytest.approx(about["after"]["greedy"])
    assert about["before"]["best_of"] >= about["before"]["sampled"]
    assert (folder / "grpo" / "final" / "tokenizer.json").exists()


def test_the_report_holds_itself_and_says_it(finished):
    folder, _ = finished
    page = (folder / "report.html").read_text(encoding="utf-8")
    for text in ("a model learns to sort", "Held-out problems solved", "Answers before and after GRPO", "Accuracy, held out",
                 "KL to the reference", "Entropy", "Completion length", "Where the time goes", "Loss, SFT"):  # fmt: skip
        assert text in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page
    about = json.loads((folder / "demo.json").read_text())
    for name in ("before", "after"):
        assert f"{100 * about[name]['greedy']:.1f}\u00a0%" in page


def test_a_second_demo_replaces_only_its_own_files(tmp_path):
    about = {"seed": 0}
    demo.claim_folder(tmp_path / "new", about)
    (tmp_path / "new" / "report.html").write_text("old")
    (tmp_path / "new" / "grpo" / "checkpoints").mkdir(parents=True)
    (tmp_path / "new" / "notes.txt").write_text("mine")
    demo.claim_folder(tmp_path / "new", about)
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["demo.json", "notes.txt"]
    assert json.loads((tmp_path / "new" / "demo.json").read_text()) == {"seed": 0, "finished": False}


def test_other_folders_are_left_alone(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious.csv").write_text("1")
    found = preloaded.strop("demo", "--output", tmp_path)
    assert found.returncode == 1
    wanted = (
        f"strop: FileExistsError: --output must be empty or hold an earlier demo, found other things in {tmp_path}\n"
    )
    assert found.stderr == wanted
    assert (tmp_path / "data" / "precious.csv").read_text() == "1"
    found = preloaded.strop("demo", "--output", tmp_path / "data" / "precious.csv")
    assert found.stderr.startswith("strop: NotADirectoryError: --output must be a folder, found the file")


def test_can_be_interrupted(tmp_path):
    folder = tmp_path / "demo"
    process = preloaded.start("strop.cli:main", "demo", "--output", folder, "--sft-steps", 5)
    metrics, deadline = folder / "grpo" / "metrics.jsonl", time.time() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.time() < deadline and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted in GRPO after step" in output
    assert "Traceback" not in output + errors
    assert not json.loads((folder / "demo.json").read_text())["finished"]
    assert not (folder / "report.html").exists()


def test_without_torch(tmp_path):
    program = (
        "import sys; sys.modules['torch'] = None; from strop.cli import main;"
        f"sys.argv = ['strop', 'demo', '--output', {str(tmp_path / 'demo')!r}]; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "strop: ImportError: strop demo needs torch; in a checkout of strop: pip install -c constraints.txt '.[train]'\n"
    )
    assert not (tmp_path / "demo").exists()


@pytest.mark.slow
@pytest.mark.skipif("STROP_SLOW" not in os.environ, reason="two minutes of two cores; STROP_SLOW=1 runs it")
def test_the_whole_recipe(tmp_path):
    folder = tmp_path / "demo"
    assert preloaded.strop("demo", "--output", folder, "--seed", 0, timeout=600).returncode == 0
    about = json.loads((Path(folder) / "demo.json").read_text())
    before, after = about["before"], about["after"]
    assert after["greedy"] >= max(0.9, before["greedy"] + 0.3)
    assert after["best_of"] >= after["sampled"]
    assert sum(about["seconds"].values()) < 180
