"""A training run in a process of its own, for test_resume.py: killed at random moments and resumed until it is done.

python killed_run.py FOLDER NUM_KILLS
"""

import os
import random
import signal
import sys
import time

import torch

from strop.algorithms.sft import SFT

NUM_STEPS = 150


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


def train(folder, resume):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Dropping()
    sft = SFT(
        model=model, learning_rate=1e-2, batch_size=4, save_every=1, dropout=True, schedule="cosine", warmup_steps=5,
        keep_checkpoints=2,
    )  # fmt: skip
    sft.train(rows(), num_steps=NUM_STEPS, output_dir=folder, resume=resume, progress=False)


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


def main():
    folder, num_kills = sys.argv[1], int(sys.argv[2])
    draw = random.Random(int(time.time()))
    kills = 0
    while True:
        child = in_a_child(lambda: train(folder, resume=True))
        if kills < num_kills:
            time.sleep(draw.uniform(0.0, 0.25))
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status):
            kills += 1
        else:
            break
    print(kills, os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
