"""A reward function for test_faults.py: in step FAULT_STEP process 1 does what FAULT says."""

import os
import signal
import time
from pathlib import Path

CALLS = 0


def reward(completions):
    global CALLS
    CALLS += 1
    fault, rank = os.environ.get("FAULT", ""), os.environ["RANK"]
    if int(os.environ.get("FAULT_STEP", "3")) == CALLS:
        if fault == "signal" and rank == "0":
            Path(os.environ["FAULT_FILE"]).touch()
            time.sleep(1)
        if fault == "kill" and rank == "0":
            time.sleep(60)  # without a collective meanwhile: only SIGTERM can end it
        if rank == "1":
            {"raise": fail, "exit": leave, "kill": die, "hang": hang}.get(fault, bool)()
    return [float(len(set(ids.tolist()))) for ids in completions]


def fail():
    raise ValueError("the reward of this text is unknown")


def leave():
    os._exit(3)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(60)
