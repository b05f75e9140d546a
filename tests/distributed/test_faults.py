"""`strop train` under torchrun: it works from YAML and flags; whatever ends one process ends all, with one error told once,
and the run goes on from its newest checkpoint."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import preloaded
import pytest
import yaml
from tiny_models import qwen2

from strop.distributed import ALONE
from strop.training.checkpoint import newest_good
from strop.training.logging import read_metrics

FAULTY = Path(__file__).with_name("faulty.py")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A run of 4 steps with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("job")
    qwen2(eos_token_id=3).save_pretrained(folder / "model")
    rows = [{"prompt": [5 + i, 6, 7]} for i in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "model": str(folder / "model"), "data": str(folder / "rows.jsonl"), "reward": f"{FAULTY}:reward",
        "batch_size": 3, "group_size": 2, "max_new_tokens": 4, "num_steps": 4, "save_every": 1, "samples_every": 1,
        "learning_rate": 1e-3,
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(options))
    return folder / "run.yaml"


def start(config, output, *flags, **environment):
    arguments = ["train", "grpo", "--config", config, "--output", output, *flags]
    return preloaded.start("strop.cli:main", *arguments, num_processes=2, **environment)


def start_command(config, output, *flags):
    """Start it as a user does, by the command torchrun, with Python processes that import everything."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", *preloaded.TORCHRUN, "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "strop", "train", "grpo", "--config", str(config), "--output", str(output), *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=os.environ | preloaded.ONE_THREAD, text=True, **pipes)


def ended(process, seconds=120):
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, [line for line in err.splitlines() if line.startswith("strop: ")], err


def steps_of(run):
    return [entry["step"] for entry in read_metrics(run / "metrics.jsonl")]


def newest_step(run):
    from strop import GRPO

    return newest_good(run / "checkpoints", GRPO, ALONE).header["state"]["step"]


def seconds_of_the_end(err):
    """From torchrun's first word of a failure to its last."""
    stamps = [line.split()[1] for line in err.splitlines() if line[:1] in "EW" and "api.py" in line]
    hours = [[float(part) for part in stamp.split(":")] for stamp in stamps]
    values = [h * 3600 + m * 60 + s for h, m, s in hours]
    return max(values) - min(values) if values else 0.0


FAULTS = {
    # what process 1 does in step 3: what is said
    "raise": "process 1 of 2: RewardError: reward raised ValueError: the reward of this text is unknown",
    "exit": "process 0 of 2: process 1 is gone, killed perhaps",
    "kill": "process 0 of 2: process 1 is gone, killed perhaps",
    "hang": "process 0 of 2: another process did not answer for 12 s (STROP_TIMEOUT)",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_failing_process_ends_all(fault, config, tmp_path):
    run = tmp_path / "run"
    environment = {"STROP_TIMEOUT": "12"} if fault == "hang" else {}
    process = start(config, run, "--shard", "none" if fault == "kill" else "full", FAULT=fault, **environment)
    start_time = time.monotonic()
    code, _, said, err = ended(process)
    assert code != 0
    assert len(said) == 1, err
    assert FAULTS[fault] in said[0], err
    assert "--resume goes on from the newest, " in said[0]
    assert said[0].rstrip().endswith("step-00000002"), err
    assert "Error" not in err.partition("strop: ")[0]  # nothing of the others before
    assert seconds_of_the_end(err) < 30
    assert time.monotonic() - start_time < 90
    assert newest_step(run) == 2
    assert steps_of(run) == [1, 2]
    if fault == "raise":
        goes_on(config, run)


def goes_on(config, run):
    """With replicas in place of shards; then there is nothing left to begin."""
    code, out, said, err = ended(start_command(config, run, "--shard", "none", "--resume"))
    assert (code, out, said) == (0, f"{run}\n", []), err
    assert steps_of(run) == [1, 2, 3, 4]
    assert (run / "final" / "model.safetensors").exists()
    assert err.count("grpo: 6 rows, Qwen2ForCausalLM of ") == err.count(", in 2 processes; run folder ") == 1
    assert err.count("step      4") == 1
    about = json.loads((run / "run.json").read_text())
    assert (about["num_processes"], about["config"]["run"]["shard"]) == (2, "none")
    code, out, said, err = ended(start(config, run, "--shard", "full"))
    assert (code, out, len(said)) == (1, "", 1), err  # a mistake of all processes is told once
    assert "holds a run already: --resume goes on with it" in said[0]


def test_ctrl_c_writes_one_checkpoint(config, tmp_path):
    run, sign = tmp_path / "run", tmp_path / "now"
    process = start(config, run, "--shard", "full", FAULT="signal", FAULT_FILE=str(sign))
    until = time.monotonic() + 100
    while not sign.exists():
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    code, _, _, err = ended(process)
    assert code != 0
    assert err.count("finishing the step; once more to stop at once") == 1
    assert err.count("GRPO interrupted after step 3 of 4; checkpoint ") == 1
    assert "the same command with --resume goes on from there" in err
    assert newest_step(run) == 3
    assert not list((run / "checkpoints").glob(".*"))
    assert not (run / "final").exists()
