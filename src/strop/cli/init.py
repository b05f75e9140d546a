"""`strop init ALGORITHM`"""

import json
import textwrap
import typing
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from strop._checks import check_choice
from strop._types import Json
from strop.cli.options import Option
from strop.cli.train import ALGORITHMS, options_for

# what is worth changing, in the order it is thought about; "name: value" is given, the rest is commented out
SHARED = ("output", "learning_rate", "schedule", "warmup_steps", "batch_size", "micro_batch_tokens", "num_epochs", "num_steps", "max_length",
          "autocast", "gradient_checkpointing", "lora.r", "eval_data", "eval_every", "save_every", "seed", "log")  # fmt: skip
SAMPLED = ("model", "data", "map", "template", "chat", "reward", "max_new_tokens", "temperature")
WORTH = {
    "sft": ("model", "data", "map"),
    "dpo": ("model", "data", "map", "beta", "loss_type"),
    "kto": ("model", "data", "map", "beta", "loss_type", "desirable_weight", "undesirable_weight"),
    "reward": ("model", "data", "map", "center_coef"),
    "grpo": (*SAMPLED, "group_size", "kl_coef", "loss_type", "inner_epochs", "mask_truncated"),
    "ppo": (*SAMPLED, "critic", "critic_learning_rate", "kl_coef", "lam", "value_coef", "inner_epochs"),
    "distill": ("model", "ref_model", "data", "map", "template", "chat", "divergence", "on_policy", "max_new_tokens", "temperature"),
    "online-dpo": (*SAMPLED, "preference", "beta"),
}  # fmt: skip
GIVEN = {"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "data": "rows.jsonl", "reward": "rewards.py:reward"}
GIVEN_TOO = {"distill": {"ref_model": "HuggingFaceTB/SmolLM2-360M-Instruct"}}  # the teacher


def init(
    algorithm: Annotated[str, typer.Argument(help=f"{', '.join(ALGORITHMS)}.")],
    output: Annotated[
        Path | None, typer.Option(help="The file; by default ALGORITHM.yaml; - is standard output.")
    ] = None,
    schema: Annotated[
        bool, typer.Option(help="Also ALGORITHM.schema.json beside it: editors complete and check the file by it.")
    ] = False,
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
    for file in (path, beside) if schema else (path,):
        if file.exists():
            raise FileExistsError(f"{file} is there already: --output names another file")
    path.write_text(config_text(algorithm, beside.name if schema else None), encoding="utf-8")
    if schema:
        beside.write_text(json.dumps(json_schema(algorithm), indent=1) + "\n", encoding="utf-8")
    Console(stderr=True).print(f"strop train {algorithm} --config {path}", highlight=False)
    print(path)


def config_text(algorithm: str, schema: str | None = None) -> str:
    """The file: options with what they are and their defaults."""
    options = {option.path: option for option in options_for(algorithm)}
    lines = [
        f"# {ALGORITHMS[algorithm][2]}",
        f"# A commented-out option shows its default. All options: strop train {algorithm} -h",
        "",
    ]
    if schema is not None:
        lines.insert(0, f"# yaml-language-server: $schema={schema}")
    given = GIVEN | GIVEN_TOO.get(algorithm, {})
    for name in dict.fromkeys((*WORTH[algorithm], *SHARED)):
        if name not in options:
            continue
        option, part, leaf = options[name], *name.rpartition(".")[::2]
        if option.help:
            lines += textwrap.wrap(option.help, 110, initial_indent="# ", subsequent_indent="# ")
        value = given.get(name, option.default)
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
    """The JSON schema of a config file: options flat, or within their part."""
    properties: Json = {
        "model_options": {"type": "object", "description": "more about the model"},
        "task_options": {"type": "object", "description": "how hard the task is"},
    }
    for option in options_for(command):
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


def _schema_of(option: Option) -> Json:
    found: list[str] = []
    for kind in option.kinds:
        found.append("array" if typing.get_origin(kind) is tuple else JSON_TYPES[kind])
    about: Json = {"type": found[0] if len(found) == 1 else found}
    if option.help:
        about["description"] = option.help
    if option.default not in (None, "", ()):
        about["default"] = option.default
    return about
