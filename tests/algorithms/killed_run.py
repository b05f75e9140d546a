"""A training run in a process of its own, for test_resume.py: killed at random moments and resumed until it is done.

python killed_run.py FOLDER NUM_KILLS
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from strop.algorithms.sft import SFT

NUM_STEPS = 100


class Dropping(torch.nn.Module):
    """A model whose forward draws random numbers, so that a resumed run needs the generator's state too."""

    def __init__(self, vocab_size=12, width=8):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab_size, width)
        self.drop = torch.nn.Dropout(0.3)
        self.head = torch.nn.Linear(width, vocab_size)

    def forward(self, input_ids):
        return self.head(self.drop(torch.tanh(self.embed(input_ids))))


def rows():
    draw = random.Random(1)
    return [{"prompt": [draw.randrange(12)], "completion": [draw.randrange(12), draw.randrange(12)]} for _ in range(50)]


def train(folder, resume, num_steps=NUM_STEPS):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Dropping()
    sft = SFT(
        model=model, learning_rate=1e-2, batch_size=4, save_every=1, dropout=True, schedule="cosine", warmup_steps=5,
        keep_checkpoints=2,
    )  # fmt: skip
    sft.train(rows(), num_steps=num_steps, output_dir=folder, resume=resume, progress=False)


def in_a_child(work):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def newest_step(folder):
    return max((int(path.stem[5:]) for path in Path(folder).glob("checkpoints/step-*.safetensors")), default=0)


def wait_for_a_moment(folder, draw):
    """A few steps on and then anywhere within the next one; now and then while it is still starting."""
    if draw.random() < 0.2:
        time.sleep(draw.uniform(0, 0.03))
        return
    wanted = newest_step(folder) + draw.randrange(1, 8)
    while newest_step(folder) < wanted:
        time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.01))


def main():
    folder, num_kills = sys.argv[1], int(sys.argv[2])
    draw = random.Random()
    train(folder + "-warm-up", resume=False, num_steps=1)  # every import, once for all children
    for _ in range(num_kills):
        child = in_a_child(lambda: train(folder, resume=True))
        wait_for_a_moment(folder, draw)
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    child = in_a_child(lambda: train(folder, resume=True))
    print(num_kills, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    main()
