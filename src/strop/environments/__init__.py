"""Conversations of several turns: a model with tools, in a game, or with a partner that answers.

class GuessANumber(Environment):
    def reset(self, row): …                 # what the model reads first
    def step(self, reply): return Turn(messages, reward=0.0, done=False)

GRPO(model=model, tokenizer=tokenizer, environment=GuessANumber, max_turns=8)
"""

from strop.config import TurnsConfig
from strop.environments.base import Environment, Turn
from strop.environments.dialogue import Chat, Dialogue
from strop.environments.play import EnvironmentFailure, Player

__all__ = ["Chat", "Dialogue", "Environment", "EnvironmentFailure", "Player", "Turn", "TurnsConfig"]
