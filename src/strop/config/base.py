"""Options of the algorithms: frozen dataclasses that check themselves, nested, addressed flat or nested.

    DPOConfig.from_options({"beta": 0.2, "learning_rate": 1e-5, "run": {"batch_size": 4}, "optim.eps": 1e-6})

A name is looked for at the top first and then in the parts; every name stands in one place only. The defaults of a part
are those of the config it is in, so an algorithm may have its own learning rate.
"""

import dataclasses
import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from strop import _trl
from strop._checks import as_float, check_choice, check_count, check_number
from strop._types import Json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Value = TypeVar("Value")
IN_TEXT = "in plain decimal digits, without spaces or underscores"


# ---- fields that say what they may hold ----


def count(default: Value, low: int = 0, **metadata: str) -> Value:
    """Return a dataclass field for integers of at least `low`."""
    return _checked(default, lambda value, name: check_count(value, name, low), metadata)


def number(
    default: Value,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
    **metadata: str,
) -> Value:
    """Return a dataclass field for numbers within these bounds."""
    bounds = {"open_low": open_low, "open_high": open_high}
    return _checked(default, lambda value, name: check_number(value, name, low, high, **bounds), metadata)


def choice(default: Value, choices: Iterable[str | None]) -> Value:
    """Return a dataclass field for one of the choices."""
    return _checked(default, lambda value, name: check_choice(value, name, choices), {})


def _checked(default: Value, check: Callable[[object, str], None], metadata: Mapping[str, str]) -> Value:
    return dataclasses.field(default=default, metadata={**metadata, "check": check})


def check_fields(config: "DataclassInstance") -> None:
    """Raise if a field has an invalid value. None is valid if the field's type allows it."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        # a default of None is looked at first: torch's compiler cannot follow a look at types
        if value is None and (field.default is None or _allows_none(type(config), field.name)):
            continue
        if "check" in field.metadata:
            field.metadata["check"](value, field.name)


# ---- names and numbers in text ----


def parse_number(text: str) -> int | float | None:
    """Return the number in a text of plain decimal digits (12, -0.5, 1e-4); None for any other text.

    All options use this rule. int() and float() would also accept spaces, underscores, digits of other scripts and nan.
    """
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
        return None
    if re.search(r"[.eE]", text) or len(text) > 4000:  # Python reads no longer integers
        return float(text)
    return int(text)


def _from_text(name: str, text: str, kind: type) -> int | float:
    """Return the number in an option's text; raise if `kind` is int and it is not an integer."""
    found = parse_number(text)
    if found is None or (kind is int and isinstance(found, float)):
        wanted = "whole number" if kind is int else "number"
        raise TypeError(f"{name} must be a {wanted} {IN_TEXT}, found {text!r}")
    return found


def unknown_option(name: str, known: Iterable[str], of: str = "", config: type | None = None) -> str:
    """Return the error message for an unknown name, with the nearest known one."""
    if config is not None and (other := _set_by(config).get(name.rpartition(".")[2])):
        return f"{name!r} is no option{of}; {other!r} is what sets it"
    if told := _trl.hint(name.rpartition(".")[2], "" if config is None else config.__name__.removesuffix("Config")):
        return f"{name!r} is no option{of}; {told}"
    known = sorted(set(known))
    leaves = {leaf.rpartition(".")[2]: leaf for leaf in reversed(known)}
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    near = near or [leaves[leaf] for leaf in difflib.get_close_matches(name, list(leaves), n=1, cutoff=0.6)]
    hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"
    return f"{name!r} is no option{of}{hint}"


def without_use(rule: object, needed: Sequence[tuple[str, str]], types: Sequence[str]) -> list[str]:
    """Return a sentence for each changed option whose loss type is not used."""
    return [
        f"{name} has no effect: it is for loss_type={loss_type!r}, found {', '.join(types)}"
        for name, loss_type in needed
        if loss_type not in types and getattr(rule, name) != getattr(type(rule), name)
    ]


# ---- configs ----


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What every config can do."""

    def __post_init__(self) -> None:
        """Raise if a field has the wrong type or an invalid value."""
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            part = part_of(type(self), name)
            if part is None:
                _as_hinted(name, value, hints_of(type(self))[name])  # type: ignore[arg-type]
            elif not isinstance(value, part) and not (value is None and _allows_none(type(self), name)):
                hint = f"{type(self).__name__}.from_options takes dicts"
                raise TypeError(f"{name} must be a {part.__name__}, found {value!r:.60}; {hint}")
        check_fields(self)

    @classmethod
    def from_options(cls, options: Mapping[str, object] | None = None, **more: object) -> Self:
        """Return a config with these options. An unknown name raises an error that suggests the nearest known one."""
        return cls().changed({**(options or {}), **more})

    def changed(self, options: Mapping[str, object] | None = None, **more: object) -> Self:
        """Return a copy with these options: flat ("batch_size"), nested ({"run": {…}}) or dotted ("run.batch_size")."""
        tree: Json = {}
        for name, value in {**(options or {}), **more}.items():
            path = _path_of(type(self), str(name))
            if path is None:
                of = f" of {type(self).__name__}"
                raise ValueError(unknown_option(str(name), option_names(type(self)), of, type(self)))
            _put(tree, path, value, str(name))
        return _with(self, tree, "")

    def to_dict(self) -> Json:
        """Return the options as a nested dict for JSON or YAML, which `from_options` accepts."""
        return _plain(self)


def flat(tree: Json, prefix: str = "") -> Json:
    """Return the values of a nested dict by their dotted names: {"optim": {"eps": 1}} becomes {"optim.eps": 1}."""
    found: Json = {}
    for name, value in tree.items():
        inner = isinstance(value, dict) and value
        found |= flat(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return found


# ---- the tree of names ----


def options_in(config: "DataclassInstance | type[DataclassInstance]") -> list[dataclasses.Field[object]]:
    """Return the fields that are options, without those that another option sets ("set_by" in the metadata)."""
    return [field for field in dataclasses.fields(config) if "set_by" not in field.metadata]


def _set_by(config: type) -> dict[str, str]:
    found: dict[str, str] = {}
    for field in dataclasses.fields(config):
        part = part_of(config, field.name)
        found |= _set_by(part) if part is not None else {}
        if "set_by" in field.metadata:
            found[field.name] = field.metadata["set_by"]
    return found


def option_names(config: type) -> list[str]:
    """Return all flat names that `from_options` accepts: fields of the config and its parts (dotted if optional)."""
    names = []
    for field in options_in(config):
        part = part_of(config, field.name)
        names.append(field.name)
        if part is not None:
            optional = _allows_none(config, field.name)
            names += [f"{field.name}.{inner}" if optional else inner for inner in option_names(part)]
    return names


def part_of(config: type, name: str) -> type | None:
    """Return the dataclass of a nested field, or None for a plain one."""
    hint = hints_of(config)[name]
    for candidate in (hint, *typing.get_args(hint)):
        if isinstance(candidate, type) and dataclasses.is_dataclass(candidate):
            return candidate
    return None


@functools.cache
def hints_of(config: type) -> dict[str, object]:
    """Return the type of each field."""
    return typing.get_type_hints(config)


def _allows_none(config: type, name: str) -> bool:
    return type(None) in typing.get_args(hints_of(config)[name])


def _path_of(config: type, name: str) -> list[str] | None:
    head, _, rest = name.partition(".")
    fields = {field.name for field in options_in(config)}
    if head in fields:
        if not rest:
            return [head]
        part = part_of(config, head)
        if part is None:
            return [head, rest] if typing.get_origin(hints_of(config)[head]) is dict else None
        inner = _path_of(part, rest)
        return None if inner is None else [head, *inner]
    for field in fields:
        part = part_of(config, field)
        if part is not None and not _allows_none(config, field) and (inner := _path_of(part, name)) is not None:
            return [field, *inner]
    return None


def _put(tree: Json, path: list[str], value: object, name: str) -> None:
    *parts, leaf = path
    for part in parts:
        below = tree.setdefault(part, {})
        if dataclasses.is_dataclass(below):
            below = tree[part] = {field.name: getattr(below, field.name) for field in dataclasses.fields(below)}
        tree = below
    if isinstance(value, Mapping) and isinstance(tree.get(leaf), dict):
        for inner, inner_value in value.items():
            _put(tree[leaf], [inner], inner_value, f"{name}.{inner}")
    elif leaf in tree and tree[leaf] != value:
        raise ValueError(f"{name} must be given once, found {tree[leaf]!r} and {value!r}")
    else:
        tree[leaf] = dict(value) if isinstance(value, Mapping) else value


def _with(config: Any, tree: Mapping[str, object], prefix: str) -> Any:
    """Return a copy of `config` with the values of the tree."""
    values = {}
    fields = {field.name: field for field in options_in(config)}
    for name, value in tree.items():
        if name not in fields:
            raise ValueError(unknown_option(prefix + name, [prefix + known for known in fields], "", type(config)))
        part = part_of(type(config), name)
        if part is None and isinstance(value, dict):
            value = {**getattr(config, name), **value}
        if part is None:
            values[name] = _as_hinted(prefix + name, value, hints_of(type(config))[name])  # type: ignore[arg-type]
        elif isinstance(value, Mapping):
            base, inline = getattr(config, name), "inline" in fields[name].metadata
            values[name] = _with(part() if base is None else base, value, prefix if inline else f"{prefix}{name}.")
        elif isinstance(value, part) or (value is None and _allows_none(type(config), name)):
            values[name] = value
        else:
            first = options_in(part)[0].name
            wanted = f"a {part.__name__} or a dict such as {{{first!r}: {getattr(part(), first)!r}}}"
            raise TypeError(f"{prefix}{name} must be {wanted}, found {value!r:.60}")
    return dataclasses.replace(config, **values)


def _as_hinted(name: str, value: object, hint: object) -> object:
    """Return the value converted to the field's type: YAML reads 1e-4 as text, and JSON has no tuples."""
    kinds = set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
    tuples = [kind for kind in kinds if typing.get_origin(kind) is tuple]
    if isinstance(value, str) and str not in kinds and kinds & {int, float}:
        value = _from_text(name, value, float if float in kinds else int)
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        value = as_float(value)
    if tuples and isinstance(value, (list, tuple)):
        return _as_tuple(name, value, typing.get_args(tuples[0])[0])
    plain = tuple(kind for kind in kinds if isinstance(kind, type) and typing.get_origin(kind) is None)
    wrong_bool = isinstance(value, bool) and bool not in kinds
    if len(plain) + len(tuples) == len(kinds) and tuples and not isinstance(value, (tuple, *plain)):
        if any(Ellipsis in typing.get_args(kind) for kind in tuples):
            return _as_tuple(name, [value], typing.get_args(tuples[0])[0])  # --stop-ids 5: a list of one
        raise TypeError(f"{name} must be a list, found {value!r}")
    if len(plain) == len(kinds) and (not isinstance(value, plain) or wrong_bool):
        wanted = " or ".join(sorted("None" if kind is type(None) else kind.__name__ for kind in plain))
        raise TypeError(f"{name} must be {wanted}, found {value!r}")
    return value


def _as_tuple(name: str, values: Iterable[object], kind: type) -> tuple[object, ...]:
    in_text = (int, float)
    return tuple(_from_text(name, v, kind) if isinstance(v, str) and kind in in_text else v for v in values)


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in options_in(value)}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
