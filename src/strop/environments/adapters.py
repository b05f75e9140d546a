"""Environments from other packages: small games of gymnasium as text, and games of textarena for one player.

    pip install -c constraints.txt '.[games]'             # in a checkout of strop
    GRPO(model=model, tokenizer=tokenizer, environment=FrozenLake, max_turns=20)
    GRPO(model=model, tokenizer=tokenizer, environment=textarena_game("GuessTheNumber-v0"))

A row's `seed` chooses the game; `rows` makes such rows.
"""

import re
from types import ModuleType
from typing import Any, ClassVar

from strop._install import missing
from strop._types import Json, Row
from strop.environments.base import Environment, Turn


def _package(name: str) -> ModuleType:
    try:
        return __import__(name)
    except ImportError as error:
        raise missing("this environment", str(error.name), "games") from None


class Seeded(Environment):
    """A game whose instances differ by their seed. Even seeds are for training, odd ones are held out."""

    @classmethod
    def rows(cls, split: str = "train", limit: int | None = None, *, seed: int = 0) -> list[Json]:
        first = 2 * seed + (split == "test")
        return [{"seed": first + 2 * i} for i in range(1000 if limit is None else limit)]


class Gymnasium(Seeded):
    """A game of gymnasium as text; a subclass names it. A reply's last word that is in `actions` is the action."""

    game: ClassVar[str]
    actions: ClassVar[dict[str, int]]
    options: ClassVar[Json] = {}
    about: ClassVar[str]

    def reset(self, row: Row) -> str:
        self.env = _package("gymnasium").make(self.game, **self.options)
        seen, _ = self.env.reset(seed=row.get("seed"))
        return f"{self.about} Answer with one of: {', '.join(self.actions)}.\n{self.shown(seen)}\n"

    def step(self, reply: str) -> Turn:
        said = [word for word in re.findall(r"[a-z]+", reply.lower()) if word in self.actions]
        if not said:
            return Turn(f"Answer with one of: {', '.join(self.actions)}.\n", info={"invalid": 1})
        seen, reward, terminated, truncated, _ = self.env.step(self.actions[said[-1]])
        done = bool(terminated or truncated)
        if done:
            self.env.close()
        return Turn(f"{self.shown(seen)}\n", reward=float(reward), done=done, info={"invalid": 0})

    def shown(self, seen: object) -> str:
        """Return the game as the model reads it: a picture in characters, with the player in brackets."""
        picture = re.sub(r"\x1b\[4\dm(.)\x1b\[0m", r"[\1]", self.env.render())
        return re.sub(r"\x1b\[\d*m", "", picture).strip()


class FrozenLake(Gymnasium):
    game, options = "FrozenLake-v1", {"is_slippery": False, "render_mode": "ansi"}
    actions: ClassVar = {"left": 0, "down": 1, "right": 2, "up": 3}
    about = "Walk from S to G over the ice F; a hole H ends the game. You are in brackets."


class Taxi(Gymnasium):
    game, options = "Taxi-v4", {"render_mode": "ansi"}
    actions: ClassVar = {"south": 0, "north": 1, "east": 2, "west": 3, "pickup": 4, "dropoff": 5}
    about = "Drive the taxi to the passenger, pick up, drive to the goal, drop off."


class Blackjack(Gymnasium):
    game = "Blackjack-v1"
    actions: ClassVar = {"stick": 0, "hit": 1}
    about = "Blackjack: come closer to 21 than the dealer without going over."

    def shown(self, seen: Any) -> str:
        own, dealer, ace = seen
        return f"You have {own}{' with an ace as 11' if ace else ''}, the dealer shows {dealer}."


def textarena_game(name: str, **options: Any) -> type[Seeded]:
    """Return an environment of a textarena game for one player. The game's reward comes at its end."""

    class Game(Seeded):
        def reset(self, row: Row) -> str:
            self.env = _package("textarena").make(name, **options)
            self.env.reset(num_players=1, seed=row.get("seed"))
            _, self.seen = self.env.get_observation()
            return self.seen

        def step(self, reply: str) -> Turn:
            done, _ = self.env.step(reply)
            if done:
                rewards, about = self.env.close()
                invalid = bool(about[0].get("invalid_move"))
                return Turn(reward=float(rewards[0]), done=True, info={"invalid": int(invalid)})
            _, seen = self.env.get_observation()
            new, self.seen = seen.removeprefix(self.seen), seen
            return Turn(new.partition(reply)[2] if reply and reply in new else new)  # leave out the model's own words

    Game.__name__ = Game.__qualname__ = re.sub(r"\W", "_", name)
    return Game
