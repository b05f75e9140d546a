"""Environments for tests: over the letters of `tiny_models.Letters`, or over ids."""

import asyncio
import random
import time

from strop.environments import Environment, Turn


class Echo(Environment):
    """Answers with what was said, for three turns; the reward is the number of letters."""

    turns = 3

    def reset(self, row):
        self.heard, self.row = [], row
        return row["prompt"]

    def step(self, reply):
        self.heard.append(reply)
        return Turn(f"b{reply[:2]}b", reward=len(reply), done=len(self.heard) == self.turns, info={"said": len(reply)})


class Slow(Echo):
    """The same after random delays."""

    def step(self, reply):
        time.sleep(random.random() * 0.03)
        return super().step(reply)


class SlowAsync(Echo):
    async def reset(self, row):
        await asyncio.sleep(random.random() * 0.02)
        return super().reset(row)

    async def step(self, reply):
        await asyncio.sleep(random.random() * 0.03)
        return super().step(reply)


class OfIds(Environment):
    def reset(self, row):
        self.count = 0
        return row["prompt"]

    def step(self, reply):
        self.count += 1
        return Turn([5, 6, len(reply) % 20], reward=float(len(reply)), done=self.count == 3)
