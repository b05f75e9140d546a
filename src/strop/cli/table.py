"""Options of every training command without torch: `options.json`, which is written from the configs and tested to be as they are.

Help, tab completion, `strop init` and the JSON schema for editors read it: torch alone takes seconds to import.
`train.write_table` writes it anew.
"""

import json
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.cli.options import Option

FILE = Path(__file__).with_name("options.json")
JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def table_options(command: str) -> list[Option]:
    """The options of a command, as `train.all_options` derives them."""
    rows = json.loads(FILE.read_text(encoding="utf-8"))[command]
    annotations = {row["path"]: row["hint"] for row in rows}
    hints = typing.get_type_hints(type("Options", (), {"__annotations__": annotations}))
    return [_option(row, hints[row["path"]]) for row in rows]


def _option(row: Mapping[str, Any], hint: Any) -> Option:
    default = tuple(row["default"]) if isinstance(row["default"], list) else row["default"]
    return Option(row["path"], row["flag"], hint, default, row["help"], row["panel"])


def row_of(option: Option) -> dict[str, Any]:
    hint = option.hint.__name__ if type(option.hint) is type else str(option.hint)
    return {
        "path": option.path,
        "flag": option.flag,
        "hint": hint,
        "default": option.default,
        "help": option.help,
        "panel": option.panel,
    }


def written(options: Mapping[str, Sequence[Option]]) -> str:
    """The file's text: one option a line, so that a change is seen as one."""
    parts = []
    for command, found in options.items():
        rows = ",\n".join("  " + json.dumps(row_of(option), ensure_ascii=False) for option in found)
        parts.append(f'"{command}": [\n{rows}\n]')
    return "{\n" + ",\n".join(parts) + "\n}\n"


# ---- for editors ----


def json_schema(command: str) -> dict[str, Any]:
    """The JSON schema of a config file: options flat, or within their part."""
    properties: dict[str, Any] = {
        "model_options": {"type": "object", "description": "more about the model"},
        "task_options": {"type": "object", "description": "how hard the task is"},
    }
    for option in table_options(command):
        part, _, leaf = option.path.rpartition(".")
        about = _schema_of(option)
        if part:
            inner = properties.setdefault(
                part, {"type": ["object", "null"], "properties": {}, "additionalProperties": False}
            )
            inner["properties"][leaf] = about
        else:
            properties[option.path] = about
    for part in ("optim", "run", "sampling", "server", "loss"):
        properties.setdefault(part, {"type": "object", "description": "its options stand flat, or in here"})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"strop train {command}",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _schema_of(option: Option) -> dict[str, Any]:
    found: list[str] = []
    for kind in option.kinds:
        found.append("array" if typing.get_origin(kind) is tuple else JSON_TYPES[kind])
    about: dict[str, Any] = {"type": found[0] if len(found) == 1 else found}
    if option.help:
        about["description"] = option.help
    if option.default not in (None, "", ()):
        about["default"] = option.default
    return about
