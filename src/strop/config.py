"""Options of the algorithms: frozen dataclasses that check themselves, nested, addressed flat or nested.

    DPOConfig.from_options({"beta": 0.2, "learning_rate": 1e-5, "run": {"batch_size": 4}, "optim.eps": 1e-6})

A name is looked for at the top first and then in the parts; every name stands in one place only. The defaults of a part
are those of the config it is in, so an algorithm may have its own learning rate.
"""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Self

from strop import _trl
from strop._checks import as_float, check_choice, check_count, check_number

SCHEDULES = ("constant", "linear", "cosine")
AUTOCASTS = ("bf16", None)
SHARDS = ("none", "full")
IN_TEXT = "in plain decimal digits, without spaces or underscores"


# ---- names and numbers in text ----


def parse_number(text: str) -> int | float | None:
    """The number a text is, in plain decimal digits (12, -0.5, 1e-4); None where it is anything else.

    The one rule for numbers in options, from wherever they come. int() and float() take more than anybody means: spaces,
    underscores, digits of other scripts, nan.
    """
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
        return None
    if re.search(r"[.eE]", text) or len(text) > 4000:  # Python reads no longer integers
        return float(text)
    return int(text)


def _from_text(name: str, text: str, kind: type) -> int | float:
    """The number in an option's text, a whole one for int."""
    found = parse_number(text)
    if found is None or (kind is int and isinstance(found, float)):
        wanted = "whole number" if kind is int else "number"
        raise TypeError(f"{name} must be a {wanted} {IN_TEXT}, found {text!r}")
    return found


def unknown_option(name: str, known: Iterable[str], of: str = "", config: type | None = None) -> str:
    """The message for a name that is none of the known ones."""
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


# ---- configs ----


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What every config can do."""

    def __post_init__(self) -> None:
        """Every field is of its kind; what it may be beyond that, the configs below say."""
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            part = part_of(type(self), name)
            if part is None:
                _as_hinted(name, value, _hints(type(self))[name])
            elif not isinstance(value, part) and not (value is None and _allows_none(type(self), name)):
                raise TypeError(
                    f"{name} must be a {part.__name__}, found {value!r:.60}; {type(self).__name__}.from_options takes dicts"
                )

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None = None, **more: Any) -> Self:
        """The config with these options; an unknown one is an error that names the nearest known one."""
        return cls().changed({**(options or {}), **more})

    def changed(self, options: Mapping[str, Any] | None = None, **more: Any) -> Self:
        """A copy with these options changed, flat ("batch_size"), nested ({"run": {…}}) or dotted ("run.batch_size")."""
        tree: dict[str, Any] = {}
        for name, value in {**(options or {}), **more}.items():
            path = _path_of(type(self), str(name))
            if path is None:
                raise ValueError(
                    unknown_option(str(name), option_names(type(self)), f" of {type(self).__name__}", type(self))
                )
            _put(tree, path, value, str(name))
        return _with(self, tree, "")

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, as JSON and YAML hold them; `from_options` takes them back."""
        return _plain(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig(Config):
    """AdamW and its schedule.

    learning_rate       the highest learning rate, after the warm-up
    weight_decay        weight decay of matrices; norms and biases have none
    betas, eps          AdamW's own
    max_grad_norm       a larger gradient is scaled down to this norm; 0 is off
    warmup_steps        the learning rate rises linearly over this many steps
    schedule            the learning rate after the warm-up: constant, or linear or cosine down to min_learning_rate
    min_learning_rate   the learning rate at the last step of a linear or cosine schedule
    """

    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    schedule: str = "constant"
    min_learning_rate: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("learning_rate", "weight_decay", "max_grad_norm", "min_learning_rate"):
            check_number(getattr(self, name), name, low=0.0)
        check_number(self.eps, "eps", low=0.0, open_low=True)
        if not isinstance(self.betas, (tuple, list)):
            raise TypeError(f"betas must be two numbers, found {self.betas!r}")
        if len(self.betas) != 2:
            raise ValueError(f"betas must be two numbers, found {self.betas}")
        for beta in self.betas:
            check_number(beta, "betas", 0, 1, open_high=True)
        object.__setattr__(self, "betas", tuple(map(float, self.betas)))  # torch refuses (0.9, 0)
        check_count(self.warmup_steps, "warmup_steps")
        check_choice(self.schedule, "schedule", SCHEDULES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """How a run goes, whatever the algorithm. `*_every` counts steps; 0 is off.

    batch_size              rows of the dataset in one step
    micro_batch_size        the most sequences (or pairs) in one forward pass; 0 is no limit. Changes memory, not the result
    micro_batch_tokens      the most tokens in one forward pass, padding included; 0 is no limit. Four times as many in
                            scoring and in fused layers, which need less memory. Changes memory, not the result
    num_steps               training ends after this many steps; 0 lets num_epochs decide
    num_epochs              training ends after this many passes over the data, if num_steps is 0
    seed                    seed of the data's order, of sampling and of the first LoRA weights
    shuffle                 every epoch has the rows in another order
    autocast                "bf16" computes forward passes in bfloat16 and keeps weights in float32; None is off
    shard                   under torchrun: "none" keeps all weights in every process, "full" a shard in each
    gradient_checkpointing  compute activations again in the backward pass: less memory, more time
    compile                 torch.compile the model
    dropout                 False turns the model's dropout off, so that policy and reference are the same function
    log_every               log metrics every so many steps
    eval_every              evaluate every so many steps, besides before the first and after the last
    save_every              write a checkpoint every so many steps, besides at the end
    keep_checkpoints        how many of the newest checkpoints are kept; 0 keeps all
    samples_every           show samples on a terminal and write them to the run folder every so many steps
    """

    batch_size: int = 8
    micro_batch_size: int = 0
    micro_batch_tokens: int = 6144
    num_steps: int = 0
    num_epochs: int = 1
    seed: int = 0
    shuffle: bool = True
    autocast: str | None = None
    shard: str = "none"
    gradient_checkpointing: bool = False
    compile: bool = False
    dropout: bool = False
    log_every: int = 1
    eval_every: int = 0
    save_every: int = 0
    keep_checkpoints: int = 2
    samples_every: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self.batch_size, "batch_size", low=1)
        for name in ("micro_batch_size", "micro_batch_tokens", "num_steps", "log_every", "eval_every", "save_every"):
            check_count(getattr(self, name), name)
        for name in ("num_epochs", "seed", "keep_checkpoints", "samples_every"):
            check_count(getattr(self, name), name)
        check_choice(self.autocast, "autocast", AUTOCASTS)
        check_choice(self.shard, "shard", SHARDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAConfig(Config):
    """Low-rank adapters through peft.

    r                the rank, which is the size of the adapters
    alpha            adapters are scaled by alpha / r
    target_modules   names of the linear layers to adapt, or "all-linear"
    merge            write the whole model, with the adapters merged in, to final/ besides final/adapter
    """

    r: int = 16
    alpha: float = 32.0
    target_modules: str | tuple[str, ...] = "all-linear"
    merge: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self.r, "r", low=1)
        check_number(self.alpha, "alpha", low=0.0, open_low=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerConfig(Config):
    """The parts every algorithm has. `lora` is off unless given: lora={"r": 16}."""

    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    run: RunConfig = dataclasses.field(default_factory=RunConfig)
    lora: LoRAConfig | None = None


# ---- the tree of names ----


def options_in(config: Any) -> list[dataclasses.Field[Any]]:
    """The fields that are options; one with "set_by" in its metadata is set by another option."""
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
    """Every name `from_options` takes flat: the fields at the top and those of the parts (of optional ones dotted)."""
    names = []
    for field in options_in(config):
        part = part_of(config, field.name)
        names.append(field.name)
        if part is not None:
            optional = _allows_none(config, field.name)
            names += [f"{field.name}.{inner}" if optional else inner for inner in option_names(part)]
    return names


def part_of(config: type, name: str) -> type | None:
    """The dataclass of a nested field, or None for a plain one."""
    hint = _hints(config)[name]
    for candidate in (hint, *typing.get_args(hint)):
        if isinstance(candidate, type) and dataclasses.is_dataclass(candidate):
            return candidate
    return None


def _hints(config: type) -> dict[str, Any]:
    return typing.get_type_hints(config)


def _allows_none(config: type, name: str) -> bool:
    return type(None) in typing.get_args(_hints(config)[name])


def _path_of(config: type, name: str) -> list[str] | None:
    head, _, rest = name.partition(".")
    fields = {field.name for field in options_in(config)}
    if head in fields:
        if not rest:
            return [head]
        part = part_of(config, head)
        inner = None if part is None else _path_of(part, rest)
        return None if inner is None else [head, *inner]
    for field in fields if not rest else ():
        part = part_of(config, field)
        if part is not None and not _allows_none(config, field) and (inner := _path_of(part, name)) is not None:
            return [field, *inner]
    return None


def _put(tree: dict[str, Any], path: list[str], value: Any, name: str) -> None:
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


def _with(config: Any, tree: Mapping[str, Any], prefix: str) -> Any:
    """`config` with the tree's values in place of its own."""
    values = {}
    names = [field.name for field in options_in(config)]
    for name, value in tree.items():
        if name not in names:
            raise ValueError(unknown_option(prefix + name, [prefix + known for known in names], "", type(config)))
        part = part_of(type(config), name)
        if part is None:
            values[name] = _as_hinted(prefix + name, value, _hints(type(config))[name])
        elif isinstance(value, Mapping):
            base = getattr(config, name)
            values[name] = _with(part() if base is None else base, value, f"{prefix}{name}.")
        elif isinstance(value, part) or (value is None and _allows_none(type(config), name)):
            values[name] = value
        else:
            raise TypeError(f"{prefix}{name} must be a {part.__name__} or a dict, found {type(value).__name__}")
    return dataclasses.replace(config, **values)


def _as_hinted(name: str, value: Any, hint: Any) -> Any:
    """Numbers and tuples as the field wants them: YAML reads 1e-4 as text, and JSON knows no tuples."""
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


def _as_tuple(name: str, values: list[Any] | tuple[Any, ...], kind: type) -> tuple[Any, ...]:
    in_text = (int, float)
    return tuple(_from_text(name, v, kind) if isinstance(v, str) and kind in in_text else v for v in values)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in options_in(value)}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
