"""The schema of checkpoint headers, and the functions that check a header against it.

{"name": …}     an object with exactly these names; a name that ends in "?" may be absent
{EACH: …}       an object with any names, each value of this kind
[kind]          a list, each item of this kind
Kind            a single value: a description for errors, and a test
"""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from strop._types import Json
from strop.config.base import flat
from strop.training.state import TrainState

EACH = None
MOST_LEVELS = 20  # of nested objects and lists


class CheckpointError(ValueError):
    """The error for a file that is no checkpoint, is damaged, or does not fit this trainer."""


class Kind(NamedTuple):
    wanted: str
    fits: Callable[[Any], bool]


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether the value is a number that a float can hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


TREE = Kind("an object", lambda v: isinstance(v, dict))
LIST = Kind("a list", lambda v: isinstance(v, list))
TEXT = Kind("a text", lambda v: isinstance(v, str))
TEXT_OR_NONE = Kind("a text or null", lambda v: v is None or isinstance(v, str))
NAME = Kind("the name of a class", lambda v: isinstance(v, str) and v.isidentifier())
COUNT = Kind("a whole number from 0 to 2⁵³", lambda v: is_whole(v) and 0 <= v <= 2**53)
SECONDS = Kind("a number of at least 0", lambda v: is_number(v) and v >= 0)
NUMBER_OR_NONE = Kind("a number or null", lambda v: v is None or is_number(v))
WORD = Kind("a whole number of 32 bits", lambda v: is_whole(v) and 0 <= v < 2**32)
CALLBACK = Kind(
    "the name of a class and an object",
    lambda v: isinstance(v, list) and len(v) == 2 and NAME.fits(v[0]) and TREE.fits(v[1]),
)
MODEL = {"kind": TEXT, "class": NAME, "frozen": [TEXT]}
MODELS: dict[str, Json] = {
    "plain": MODEL,
    "moe": MODEL | {"config": TREE, "engine": TEXT, "dtype": TEXT},
    "hf": MODEL
    | {"config": TREE, "dtype": TEXT, "device": TEXT, "attention": TEXT_OR_NONE}
    | {"generation_config?": TREE, "adapters?": {EACH: TREE}},
}
HEADER = {
    "format": COUNT,
    "version": TEXT,
    "algorithm": NAME,
    "config": TREE,
    "model": TREE,  # checked by its kind, see MODELS
    "base?": WORD,  # checksum of the frozen weights below an adapter, which are not in the file
    "ref?": TREE,
    "tokenizer": TEXT_OR_NONE,
    "state": {field.name: SECONDS if field.name == "seconds" else COUNT for field in fields(TrainState)},
    "optim": {"params": {EACH: TREE}, "groups": [TREE]},
    "rng": TREE,
    "extra": TREE,
    "callbacks": [CALLBACK],
    "aliases": {EACH: TEXT},
}
OF_SEVERAL = {"rng": [TREE], "extra": [TREE]}  # if several processes wrote it: one entry per process
CALLBACKS = {  # states of strop.callbacks; those of user-defined callbacks are not checked
    "EvaluationCallback": {"last_step": Kind("a whole number of at least -1", lambda v: is_whole(v) and v >= -1)},
    "BestCheckpoint": {"best": NUMBER_OR_NONE},
    "EarlyStopping": {"best": NUMBER_OR_NONE, "num_bad": COUNT},
}


def loads(text: str) -> Any:
    """Return the value of a JSON text. Raise a ValueError if an object has a name twice or nesting is too deep."""

    def once(pairs: list[tuple[str, object]]) -> Json:
        if len(found := dict(pairs)) != len(pairs):
            raise ValueError("a name stands twice in an object")
        return found

    try:
        return json.loads(text, object_pairs_hook=once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_header(header: Any, path: Path, *, of_several: bool = False) -> None:
    """Raise a CheckpointError unless the header fits the schema."""
    check(header, HEADER | OF_SEVERAL if of_several else HEADER, path, "the header")
    _check_plain(header, path, 0)
    for name in ("model", "ref"):
        if name in header:
            kind = header[name].get("kind")
            if not isinstance(kind, str) or kind not in MODELS:
                raise CheckpointError(f"{path}: {name}.kind must be one of {', '.join(MODELS)}, found {shown(kind)}")
            check(header[name], MODELS[kind], path, name)
    state = header["state"]
    for low, high in (("first_step", "step"), ("position", "num_rows")):
        if state[low] > state[high]:
            raise CheckpointError(f"{path}: state.{low} must be at most {high}={state[high]}, found {state[low]}")


def check(value: Any, schema: Any, path: Path, where: str) -> None:
    """Raise a CheckpointError unless the value fits the schema; `where` is its name in the header."""
    kind = schema if isinstance(schema, Kind) else TREE if isinstance(schema, dict) else LIST
    if not kind.fits(value):
        raise CheckpointError(f"{path}: {where} must be {kind.wanted}, found {shown(value)}")
    if isinstance(schema, list):
        for i, item in enumerate(value):
            check(item, schema[0], path, f"{where}[{i}]")
    elif isinstance(schema, dict):
        known = (
            dict.fromkeys(value, schema[EACH]) if EACH in schema else {n.removesuffix("?"): schema[n] for n in schema}
        )
        for name in known:
            if name not in value and f"{name}?" not in schema:
                raise CheckpointError(f"{path}: {where} must have {name!r}, found none")
        for name, item in value.items():
            if name not in known:
                raise CheckpointError(f"{path}: {where} must have no {name!r:.60}, found one")
            inner = f"{name!r:.60}" if EACH in schema else name
            check(item, known[name], path, inner if where == "the header" else f"{where}.{inner}")


def _check_plain(value: object, path: Path, level: int) -> None:
    """Raise unless all numbers are finite and there are at most MOST_LEVELS levels."""
    if isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"{path}: the header must hold finite numbers, found {value}")
    if level > MOST_LEVELS:
        raise CheckpointError(f"{path}: the header must have at most {MOST_LEVELS} levels, found more")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_plain(item, path, level + 1)


def shown(value: Any) -> str:
    """Return a value as text for error messages: shortened if long, and only the length of lists and objects."""
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = repr(value) if not is_whole(value) or abs(value) < 10**40 else "a whole number of more than 40 digits"
    return text if len(text) <= 80 else f"{text[:80]}…"


def check_same(found: Json, wanted: Json, path: str | Path, where: str) -> None:
    """Raise unless `wanted`, the parsed form of `found`, is written the same way: nothing missing, added or converted."""
    found, wanted = flat(found, f"{where}."), flat(wanted, f"{where}.")
    for name in sorted(found.keys() | wanted.keys()):
        if name not in found or name not in wanted:
            what = "is missing" if name in wanted else "is unknown"
            raise CheckpointError(f"{path}: {name:.120} {what}; another version of strop may have written it")
        if json.dumps(found[name]) != json.dumps(wanted[name]):
            raise CheckpointError(f"{path}: {name} must be {shown(wanted[name])}, found {shown(found[name])}")
