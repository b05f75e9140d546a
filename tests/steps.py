"""Parts of an on-policy step, for tests that give a trainer known trajectories or look at what it makes of them."""

import torch

from strop.data.batch import sampled


def lines_of(lengths, rollout_logps, num_prompt=2, finish="eos"):
    """Completions of zeros behind the prompts [i, 1, …], with these log-probs of sampling."""
    prompts = [torch.tensor([i, *[1] * (num_prompt - 1)]) for i in range(len(lengths))]
    lines = sampled(prompts, [torch.zeros(n, dtype=torch.long) for n in lengths], cut(rollout_logps, lengths))
    for line in lines:
        line.finish = finish
    return lines


def cut(table, lengths):
    return [row[:n] for row, n in zip(table, lengths, strict=True)]


def fill(lines, **fields):
    """Fill a field of each trajectory, by a value for each."""
    for name, values in fields.items():
        for line, value in zip(lines, values, strict=True):
            setattr(line, name, value)
    return lines


def advantages(trainer, lines, rewards):
    """Score the trajectories, reward them so, and fill their advantages; returns what is known of the whole batch."""
    trainer.score(lines)
    return advantages_only(trainer, lines, rewards)


def advantages_only(trainer, lines, rewards):
    values = [float(reward) for reward in rewards]
    fill(lines, reward=values, rewards=[dict.fromkeys(trainer.rewards.names, value) for value in values])
    batch = trainer.whole_batch(lines, 0)
    trainer.advantages(lines, batch)
    return batch


def step_lines(trainer, rows):
    """A step's trajectories up to their advantages, of rows of a dataset."""
    prompts = trainer.prepare(rows)
    lines, _ = trainer.sample(prompts, range(len(prompts)), trainer.state.step)
    trainer.score(lines)
    trainer.reward(lines)
    if trainer.rewards is not None:
        trainer.advantages(lines, trainer.whole_batch(lines, 0))
    return lines


def loss_on(trainer, lines, of=None):
    """The loss of these trajectories as their share of an update on `of`, which are these unless given."""
    of = lines if of is None else of
    trainer.weigh(lines, sum(line.num_loss_tokens for line in of), len(of))
    return trainer.loss_on(lines)
