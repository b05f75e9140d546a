"""What the header of a checkpoint must look like. One table, and the function that holds a header against it.

{"name": …}     an object with exactly these names; one that ends in "?" may be absent
{EACH: …}       an object of any names, each value of this kind
[kind]          a list of any length         (kind, kind)    a list of exactly these
Kind            a single value: what it is called, and how to tell
"""

import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from strop._types import Json
from strop.training.state import TrainState

MOST_LEVELS = 20  # of objects and lists within each other
EACH = None


class CheckpointError(ValueError):
    """A file that is no checkpoint, a damaged one, or not one for this trainer."""


class Kind(NamedTuple):
    wanted: str
    fits: Callable[[Any], bool]


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(float_of(value))


def float_of(value: Any) -> float:
    """A number as a float; infinity for a whole number beyond them."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


ANY = Kind("a value of JSON", lambda v: True)
TREE = Kind("an object", lambda v: isinstance(v, dict))
TEXT = Kind("a text", lambda v: isinstance(v, str))
NAME = Kind("the name of a class", lambda v: isinstance(v, str) and v.isidentifier())
COUNT = Kind("a whole number from 0 to 2⁵³", lambda v: is_whole(v) and 0 <= v <= 2**53)
SECONDS = Kind("a number of at least 0", lambda v: is_number(v) and v >= 0)
NUMBER = Kind("a number", is_number)
NUMBER_OR_NONE = Kind("a number or null", lambda v: v is None or is_number(v))
TEXT_OR_NONE = Kind("a text or null", lambda v: v is None or isinstance(v, str))
BIT = Kind("0 or 1", lambda v: is_whole(v) and v in (0, 1))
WORD = Kind("a whole number of 32 bits", lambda v: is_whole(v) and 0 <= v < 2**32)
PLACE = Kind("a place from 0 to 624", lambda v: is_whole(v) and 0 <= v <= 624)

PLAIN_MODEL = {"kind": TEXT, "class": NAME, "frozen": [TEXT]}
MODELS: dict[str, Json] = {
    "plain": PLAIN_MODEL,
    "moe": PLAIN_MODEL | {"config": TREE, "engine": TEXT, "dtype": TEXT},
    "hf": PLAIN_MODEL
    | {
        "config": TREE,
        "dtype": TEXT,
        "device": TEXT,
        "attention": TEXT_OR_NONE,
        "generation_config?": TREE,
        "adapters?": {EACH: TREE},
    },
}
RNG = {
    "python": (Kind("version 3", lambda v: is_whole(v) and v == 3), (*[WORD] * 624, PLACE), NUMBER_OR_NONE),
    "numpy": (Kind("'MT19937'", lambda v: v == "MT19937"), PLACE, BIT, NUMBER),
}
HEADER = {
    "format": COUNT,
    "version": TEXT,
    "algorithm": NAME,
    "config": TREE,
    "model": TREE,  # by its kind, see MODELS
    "base?": WORD,  # checksum of the frozen weights below an adapter, which are not in the file
    "ref?": TREE,
    "tokenizer": TEXT_OR_NONE,
    "state": {field.name: SECONDS if field.name == "seconds" else COUNT for field in fields(TrainState)},
    "optim": {"params": {EACH: TREE}, "groups": [TREE]},
    "rng": RNG,
    "extra": TREE,
    "callbacks": [(NAME, TREE)],
    "aliases": {EACH: TEXT},
}
OF_SEVERAL = {"rng": [RNG], "extra": [TREE]}  # where several processes wrote it: one entry each
CALLBACKS = {  # of strop.callbacks; the state of a user's own is the user's
    "EvaluationCallback": {"last_step": Kind("a whole number of at least -1", lambda v: is_whole(v) and v >= -1)},
    "BestCheckpoint": {"best": NUMBER_OR_NONE},
    "EarlyStopping": {"best": NUMBER_OR_NONE, "num_bad": COUNT},
}


def check_header(header: Any, path: Path, *, of_several: bool = False) -> None:
    """Raise a CheckpointError unless the header is as the table has it."""
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


def check(value: object, schema: Any, path: Path, where: str) -> None:
    """Raise a CheckpointError unless the value fits the schema; `where` is its name in the header."""
    if isinstance(schema, Kind):
        if not schema.fits(value):
            raise CheckpointError(f"{path}: {where} must be {schema.wanted}, found {shown(value)}")
    elif isinstance(schema, dict):
        _check_object(value, schema, path, where)
    else:
        if not isinstance(value, list) or (isinstance(schema, tuple) and len(value) != len(schema)):
            length = f" of {len(schema)}" if isinstance(schema, tuple) else ""
            raise CheckpointError(f"{path}: {where} must be a list{length}, found {shown(value)}")
        kinds = schema if isinstance(schema, tuple) else schema * len(value)
        for i, (item, kind) in enumerate(zip(value, kinds, strict=True)):
            check(item, kind, path, f"{where}[{i}]")


def _check_object(value: object, schema: dict[Any, Any], path: Path, where: str) -> None:
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: {where} must be an object, found {shown(value)}")
    inner = "" if where == "the header" else f"{where}."
    if EACH in schema:
        for name, item in value.items():
            check(item, schema[EACH], path, f"{inner}{name!r:.60}")
        return
    known = {name.removesuffix("?"): kind for name, kind in schema.items()}
    for name in known:
        if name not in value and f"{name}?" not in schema:
            raise CheckpointError(f"{path}: {where} must have {name!r}, found none")
    for name, item in value.items():
        if name not in known:
            raise CheckpointError(f"{path}: {where} must have no {name!r:.60}, found one")
        check(item, known[name], path, inner + name)


def _check_plain(value: object, path: Path, level: int) -> None:
    """Numbers are finite, and nothing is nested without end."""
    if isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"{path}: the header must hold finite numbers, found {value}")
    if level > MOST_LEVELS:
        raise CheckpointError(f"{path}: the header must have at most {MOST_LEVELS} levels, found more")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_plain(item, path, level + 1)


def shown(value: Any) -> str:
    """A value in an error: a short one as it is, of a long one only what it is."""
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = repr(value) if not is_whole(value) or abs(value) < 10**40 else "a whole number of more than 40 digits"
    return text if len(text) <= 80 else f"{text[:80]}…"


def check_same(found: object, wanted: object, path: str | Path, where: str) -> None:
    """`wanted` is what was made of `found`: nothing was left out, added or turned into another type on the way."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for name in sorted(found.keys() ^ wanted.keys()):
            verb = "lacks" if name in wanted else "has the unknown"
            raise CheckpointError(f"{path}: {where} {verb} {name!r:.60}; another version of strop may have written it")
        for name in found:
            check_same(found[name], wanted[name], path, f"{where}.{name}")
    elif isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        for i, (item, other) in enumerate(zip(found, wanted, strict=True)):
            check_same(item, other, path, f"{where}[{i}]")
    elif found != wanted or type_of(found) is not type_of(wanted):
        raise CheckpointError(f"{path}: {where} must be written as {shown(wanted)}, found {shown(found)}")


def type_of(value: object) -> type:
    """JSON has one kind of number: 1 and 1.0 are the same, True is neither."""
    return float if isinstance(value, int) and not isinstance(value, bool) else type(value)
