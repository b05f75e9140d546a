"""Makers of the `Player` of a trainer's environment or tools, and checks of its rows, which need no prompt."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from strop._types import Row
from strop.config import TurnsConfig
from strop.data.batch import Trajectory
from strop.data.inputs import RESERVED
from strop.environments.play import Player
from strop.environments.tools import ToolBox
from strop.models import Policy
from strop.rollout.generate import Sampler
from strop.user_code import load_function

if TYPE_CHECKING:
    from strop.environments.recorder import Recorder

CONVERSATION_COLUMNS = ("conversations", "replies", "environments")  # further columns for reward functions


def trainers_player(trainer: Any, environment: Any, tools: Any, agent: Any = None) -> "Player | Recorder | None":
    """Return the player of a trainer with an environment, tools or an agent; None if it has none."""
    config = trainer.config
    if agent is not None and not (environment is None and tools is None):
        raise ValueError("environment and tools must be None with an agent, which plays and calls tools itself")
    if agent is not None:
        return make_recorder(trainer.policy, trainer.sampler, agent, config.turns)
    if environment is None and tools is None:
        if changed := _changed(getattr(config, "turns", TurnsConfig())):
            names = f"{', '.join(changed)} {'have' if len(changed) > 1 else 'has'}"
            warnings.warn(f"{names} no effect without an environment, tools or an agent", stacklevel=4)
        return None
    if not hasattr(config, "turns"):
        raise ValueError(f"environment and tools must be None for {trainer.name}: its completions have one turn")
    return make_player(trainer.policy, trainer.sampler, environment, tools, config.turns)


def make_recorder(policy: Policy, sampler: Sampler, agent: Any, turns: TurnsConfig) -> "Recorder":
    """Return the recorder of an agent, a function or its name."""
    from strop.environments.recorder import Recorder  # needs the extra `serve`

    if idle := [name for name in _changed(turns) if name in ("max_turns", "turn_discount", "environment_workers")]:
        warnings.warn(f"{', '.join(idle)} {'have' if len(idle) > 1 else 'has'} no effect with an agent", stacklevel=5)
    if turns.credit == "turn":
        raise ValueError(
            'credit must be "trajectory" with an agent, whose reward is of the whole episode, found "turn"'
        )
    return Recorder(load_function(agent, "agent") if isinstance(agent, str) else agent, sampler, policy, turns)


def _changed(turns: TurnsConfig) -> list[str]:
    """Return the options that differ from their defaults."""
    return [one.name for one in dataclasses.fields(turns) if getattr(turns, one.name) != one.default]


def make_player(policy: Policy, sampler: Sampler, environment: Any, tools: Any, turns: TurnsConfig) -> Player | None:
    """Return the player of an environment or of tools; None without them."""
    if environment is None and tools is None:
        return None
    if environment is not None and tools is not None:
        raise ValueError("give environment or tools, found both: an environment's own tools are its attribute `tools`")
    if isinstance(tools, str) or (callable(tools) and not isinstance(tools, type)):
        tools = [tools]
    if isinstance(environment, str):
        environment = load_function(environment, "environment")
    if tools is None and callable(environment) and not hasattr(environment, "tools"):
        known = environment if isinstance(environment, type) else environment()
        if hasattr(known, "reset") and not hasattr(known, "step"):
            tools = environment  # its methods are tools, as in TRL's environment_factory
    made = environment if tools is None else ToolBox(tools, policy.tokenizer)
    return Player(made, sampler, policy, turns)


def environment_rows(rows: Any, columns: Row, name: str) -> list[Trajectory]:
    """Return trajectories without tokens, one per row. A row that is not a dict becomes the column `prompt`."""
    if isinstance(rows, (str, Mapping)) or not hasattr(rows, "__len__"):
        raise TypeError(f"{name} must be a batch of rows, found a {type(rows).__name__}")
    if not len(rows):
        raise ValueError(f"{name} must hold at least one row, found none")
    found = [dict(row) if isinstance(row, Mapping) else {"prompt": row} for row in rows]
    for column, values in columns.items():
        if isinstance(values, str) or not hasattr(values, "__len__") or len(values) != len(found):
            raise ValueError(f"{column} must have one entry for each of the {len(found)} rows, found {values!r:.60}")
        for row, value in zip(found, values, strict=True):
            row[column] = value
    for column in {column for row in found for column in row} & {*RESERVED, *CONVERSATION_COLUMNS} - {"prompt"}:
        raise ValueError(f"{column} must not be a column: reward functions get their own under this name")
    return [Trajectory.of_prompt([], row=row) for row in found]


def checked_rows(rows: object, name: str, judges: Sequence[Any]) -> list[Trajectory]:
    """Return a dataset's rows after a check that they have the columns that reward functions and others need."""
    found = environment_rows(rows, {}, name)
    columns = [one.row for one in found]
    prompt = ("prompt",) if any("prompt" in row for row in columns) else ()
    for judge in judges:
        judge.check(columns, name, (*CONVERSATION_COLUMNS, *prompt))
    return found
