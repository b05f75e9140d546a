"""Command-line options derived from config dataclasses, parsing of values, and config files."""

import dataclasses
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from strop._install import missing
from strop._types import Json
from strop.config.base import IN_TEXT, hints_of, options_in, parse_number, part_of

PANELS = {
    "job": "What is trained on what",
    "optim": "Optimiser",
    "run": "Run",
    "sampling": "Sampling",
    "server": "Rollout server (off unless an address is given)",
    "turns": "More than one turn (with an environment or tools)",
    "loss": "Loss",
    "lora": "LoRA (off unless one of these is given)",
}


@dataclasses.dataclass(frozen=True)
class Option:
    """One field of a config: `path` addresses it ("lora.r"), `flag` is its name on the command line."""

    path: str
    flag: str
    hint: object
    default: object
    help: str
    panel: str

    @property
    def parameter(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def is_switch(self) -> bool:
        return self.hint is bool

    @property
    def kinds(self) -> tuple[Any, ...]:
        return typing.get_args(self.hint) if isinstance(self.hint, types.UnionType) else (self.hint,)

    @property
    def is_list(self) -> bool:
        """True if the option takes one text or several, so it may be repeated."""
        return str in self.kinds and any(typing.get_origin(kind) is tuple for kind in self.kinds)

    def parse(self, value: object) -> object:
        """Return the command line's text parsed for the field's type. A text field keeps it, even if it looks like a number."""
        if isinstance(value, list):
            return tuple(value) if len(value) > 1 else value[0]
        if not isinstance(value, str):
            return value
        if str in self.kinds:
            return None if value.lower() == "none" and type(None) in self.kinds else value
        return parse_value(value)


def options_of(config: type, panel: str, prefix: str = "", base: object = None) -> list[Option]:
    """Return the options of all fields except dicts, which need --set, then those of nested configs."""
    found, nested, told = [], [], described(config)
    base = config() if base is None else base
    for field in options_in(config):
        value, hint = getattr(base, field.name), hints_of(config)[field.name]
        if (part := part_of(config, field.name)) is not None:
            inner = f"{field.name}." if value is None else ""
            nested += options_of(part, PANELS.get(field.name, panel), inner, value)
        elif typing.get_origin(hint) is not dict:
            path = prefix + field.name
            flag = "--" + path.replace(".", "-").replace("_", "-")
            found.append(Option(path, flag, hint, value, told.get(field.name, ""), panel))
    return found + nested


def described(config: type) -> dict[str, str]:
    """Return the description of each field from a config's docstring, whose lines are `name, other_name   description`."""
    found: dict[str, str] = {}
    names: list[str] = []
    for cls in reversed(config.__mro__):
        for line in inspect.cleandoc(cls.__dict__.get("__doc__") or "").splitlines():
            start = re.match(r"(\w+(?:, \w+)*) {2,}(\S.*)", line)
            if start:
                names = start[1].split(", ")
                found |= dict.fromkeys(names, start[2])
            elif line.startswith("   ") and names:
                found |= {name: f"{found[name]} {line.strip()}" for name in names}
            else:
                names = []
    return found


def with_options(function: Callable[..., None], options: Sequence[Option]) -> Callable[..., None]:
    """Return `function(own parameters, given)` as a command with these options. `given` has those that the user gave."""
    own = [p for p in inspect.signature(function).parameters.values() if p.name != "given"]
    by_parameter = {option.parameter: option for option in options}

    def command(**arguments: object) -> None:
        chosen = {name: value for name, value in arguments.items() if name in by_parameter and value not in (None, [])}
        given = {by_parameter[name].path: by_parameter[name].parse(value) for name, value in chosen.items()}
        function(**{p.name: arguments[p.name] for p in own}, given=given)

    parameters = [*own, *(_parameter(option) for option in options)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = function.__doc__
    return command


def _parameter(option: Option) -> inspect.Parameter:
    """Return the parameter of an option. None means "not given": then the config file or the default applies."""
    flag = f"{option.flag}/--no-{option.flag.removeprefix('--')}" if option.is_switch else option.flag
    default = "" if option.default in (None, "", ()) else f"[{_shown(option)}]"
    about = typer.Option(
        flag,
        help=f"{option.help} {default}".strip().replace("[", r"\["),
        rich_help_panel=option.panel,
        show_default=False,
        metavar=None if option.is_switch else _metavar(option),
    )
    kind = bool | None if option.is_switch else list[str] | None if option.is_list else str | None
    return inspect.Parameter(
        option.parameter, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, about]
    )


def _shown(option: Option) -> str:
    value = option.default
    if option.is_switch:
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _metavar(option: Option) -> str:
    kinds = [typing.get_origin(kind) or kind for kind in option.kinds if kind is not type(None)]
    return "text" if str in kinds else "|".join(dict.fromkeys("a,b,…" if k is tuple else k.__name__ for k in kinds))


def parse_value(text: str) -> object:
    """Return the value of a text: none, true, false, a number, a list (a,b or JSON), else the text itself."""
    word, named = text.strip(), {"none": None, "null": None, "true": True, "false": False}
    if word.lower() in named:
        return named[word.lower()]
    if (number := parse_number(text)) is not None:
        return number
    if word.startswith(("[", "{")):
        try:
            return json.loads(word)
        except json.JSONDecodeError:
            raise ValueError(f"{word!r} must be JSON where it begins with {word[0]}") from None
    if "," in word and " " not in word:
        return [parse_value(part) for part in word.split(",") if part]
    return text


def option(help: str, *flags: str, **more: Any) -> Any:
    """Return a typer option with this help."""
    return typer.Option(*flags, help=help, **more)


def number_option(help: str = "", *, low: float = 0, high: float = math.inf, whole: bool = True) -> object:
    """Return a typer option whose numbers are parsed by the rule of config files, not by Python's."""

    def parse(text: str | int | float) -> int | float:
        found = parse_number(text) if isinstance(text, str) else text  # not a str: a default
        if found is None or (whole and isinstance(found, float)) or not low <= found <= high:
            bounds = f"of at least {low:g}" + (f" and at most {high:g}" if high < math.inf else "")
            raise ValueError(f"{text!r} is no {'whole ' * whole}number {bounds} {IN_TEXT}")
        return found

    return typer.Option(help=help, parser=parse, metavar="<int>" if whole else "<float>")


def parse_settings(settings: Sequence[str], options: Sequence[Option] = ()) -> Json:
    """Return the options of --set, such as "optim.eps=1e-6", each parsed by the option of that name."""
    by_name = {option.path.rpartition(".")[2]: option for option in options}
    found: Json = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise ValueError(f"--set must be name=value, found {setting!r}")
        name = name.strip().replace("-", "_")
        option = by_name.get(name.rpartition(".")[2])
        found[name] = parse_value(value) if option is None else option.parse(value)
    return found


def read_config(path: Path) -> Json:
    """Return the options of a YAML (or JSON) file. A duplicate key is an error."""
    try:
        import yaml
    except ImportError:
        raise missing("a config file", "PyYAML", "train") from None

    class Loader(yaml.SafeLoader):
        def construct_object(self, node: object, deep: bool = False) -> object:
            try:
                return super().construct_object(node, deep)
            except (ValueError, KeyError, AttributeError):  # such as `!!bool x` or a date with month 13
                if not isinstance(node, yaml.ScalarNode):
                    raise
                kind = node.tag.rpartition(":")[2]
                told = f"{node.value!r:.60} is no {kind}"
                raise yaml.constructor.ConstructorError(None, None, told, node.start_mark) from None

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[object, object]:
            if not isinstance(node, yaml.MappingNode):
                return super().construct_mapping(node, deep)
            own = [key for key, _ in node.value if not key.tag.endswith(":merge")]  # not merged (`<<: *defaults`)
            keys = [self.construct_object(key, deep=True) for key in own]
            for i, key in enumerate(keys):
                if key in keys[:i]:
                    raise ValueError(f"{path}, line {own[i].start_mark.line + 1}: {key!r} is there twice")
            return super().construct_mapping(node, deep)

        def number(self, node: Any) -> Any:
            """Return a number parsed by strop's rule. YAML's rule also takes 1_000, 0x10, the octal 010, and 1:30 as 90."""
            found = parse_number(node.value)
            if found is None and self.resolve(yaml.ScalarNode, node.value, (True, False)) != node.tag:
                raise ValueError  # a tag such as `!!int` contradicts the text
            return node.value if found is None else found

    for kind in ("int", "float"):
        Loader.add_constructor(f"tag:yaml.org,2002:{kind}", Loader.number)
    if not path.is_file():
        raise FileNotFoundError(f"no such config file: {path}")
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8 text: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else path
        raise ValueError(
            f"{where}: not YAML: {' '.join(str(getattr(error, 'problem', None) or error).split())}"
        ) from None
    except RecursionError:
        raise ValueError(f"{path}: not YAML that can be read: it is nested too deeply") from None
    if not isinstance(found, Mapping):
        what = "nothing" if found is None else type(found).__name__
        raise ValueError(f"{path} must hold options (name: value), found {what}")
    return {str(key).replace("-", "_"): value for key, value in found.items()}
