"""`strop init ALGORITHM`"""

import copy
import json
import textwrap
import typing
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from strop._checks import check_choice
from strop._types import Json
from strop.cli.options import Option, option
from strop.cli.train import ALGORITHMS, config_class, options_for

# options that users often change, in a sensible order; "name: value" is set, the others are commented out
SHARED = ("output", "learning_rate", "schedule", "warmup_steps", "batch_size", "micro_batch_tokens", "num_epochs", "num_steps", "max_length",
          "autocast", "gradient_checkpointing", "lora.r", "eval_data", "eval_every", "save_every", "seed", "log")  # fmt: skip
GIVEN = {"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "data": "rows.jsonl", "reward": "rewards.py:reward"}
GIVEN_TOO = {"distill": {"ref_model": "HuggingFaceTB/SmolLM2-360M-Instruct"}}  # the teacher


def init(
    algorithm: Annotated[str, typer.Argument(help=f"{', '.join(ALGORITHMS)}.")],
    output: Annotated[Path | None, option("The file; by default ALGORITHM.yaml; - is standard output.")] = None,
    schema: Annotated[bool, option("Also write ALGORITHM.schema.json, by which editors complete the file.")] = False,
) -> None:
    """Write a commented config file with what is worth changing, for strop train ALGORITHM --config FILE."""
    check_choice(algorithm, "algorithm", tuple(ALGORITHMS))
    if str(output) == "-":
        if schema:
            raise ValueError("schema needs a file to lie beside, found --output -")
        print(config_text(algorithm))
        return
    path = output or Path(f"{algorithm}.yaml")
    beside = path.with_name(f"{algorithm}.schema.json")
    texts = {path: config_text(algorithm, beside.name if schema else None)}
    if schema:
        texts[beside] = json.dumps(json_schema(algorithm), indent=1) + "\n"
    for file in texts:
        if file.exists():
            raise FileExistsError(f"{file} is there already: --output names another file")
    for file, text in texts.items():
        file.write_text(text, encoding="utf-8")
    Console(stderr=True).print(f"strop train {algorithm} --config {path}", highlight=False)
    print(path)


def config_text(algorithm: str, schema: str | None = None) -> str:
    """Return the file's text: options with their descriptions and defaults."""
    options = {one.path: one for one in options_for(config_class(algorithm))}
    lines = [] if schema is None else [f"# yaml-language-server: $schema={schema}"]
    lines += [f"# {ALGORITHMS[algorithm].about}"]
    lines += [f"# A commented-out option shows its default. All options: strop train {algorithm} -h", ""]
    given = GIVEN | GIVEN_TOO.get(algorithm, {})
    for name in dict.fromkeys((*ALGORITHMS[algorithm].shown, *SHARED)):
        if name not in options:
            continue
        part, _, leaf = name.rpartition(".")
        lines += textwrap.wrap(options[name].help, 110, initial_indent="# ", subsequent_indent="# ")
        value = given.get(name, options[name].default)
        line = f"{part}: {{{leaf}: {_yaml(value)}}}" if part else f"{leaf}: {_yaml(value)}"
        lines += [line if name in given else f"# {line}", ""]
    return "\n".join(lines)


def _yaml(value: object) -> str:
    if isinstance(value, str) and value and all(c.isalnum() or c in "-_./" for c in value):
        return value
    return json.dumps(value)


# ---- for editors ----

JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def json_schema(command: str) -> Json:
    """Return the JSON schema of a config file. Options are at the top level or in their section."""
    described = dict.fromkeys(("optim", "run", "sampling", "server", "loss"), "its options stand flat, or in here")
    described |= {"model_options": "more about the model", "task_options": "how hard the task is"}
    properties: Json = {name: {"type": "object", "description": text} for name, text in described.items()}
    empty = {"type": ["object", "null"], "properties": {}, "additionalProperties": False}
    for one in options_for(config_class(command)):
        part, _, leaf = one.path.rpartition(".")
        inner = properties.setdefault(part, copy.deepcopy(empty))["properties"] if part else properties
        inner[leaf] = _schema_of(one)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"strop train {command}",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _schema_of(one: Option) -> Json:
    found = ["array" if typing.get_origin(kind) is tuple else JSON_TYPES[kind] for kind in one.kinds]
    about = {"type": found[0] if len(found) == 1 else found, "description": one.help, "default": one.default}
    return {name: value for name, value in about.items() if value not in (None, "", ())}
