"""`strop init`: config files and JSON schemas that are made from the configs."""

import json
from pathlib import Path

import pytest
import yaml

from strop.cli import init
from strop.cli.train import ALGORITHMS, algorithm_class, config_class, gather

COMMANDS = list(ALGORITHMS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_shows_the_config_its_algorithm_takes(command):
    assert config_class(command) is algorithm_class(command).Config


@pytest.mark.parametrize("command", COMMANDS)
def test_a_config_file_of_init_is_read_and_changes_nothing(command, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(init.config_text(command), encoding="utf-8")
    job, config = gather(config_class(command), path)
    assert config == config_class(command)()
    assert job.model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    every = "\n".join(
        line.removeprefix("# ") if _is_option(line) else line for line in path.read_text(encoding="utf-8").splitlines()
    )
    path.write_text(every, encoding="utf-8")
    _, config = gather(config_class(command), path)  # with every line in force: the defaults, but for the adapter
    assert config.changed(lora=None) == config_class(command)()
    assert (config.lora is not None) == ("lora" in yaml.safe_load(every))


def _is_option(line):
    name = line.removeprefix("# ").partition(":")[0]
    return line.startswith("# ") and name.replace("_", "a").isalnum() and not line.startswith("# yaml")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_schema_takes_what_strop_takes(command, tmp_path):
    schema = init.json_schema(command)
    options = yaml.safe_load(init.config_text(command))
    assert problems(schema, options) == []
    assert problems(schema, {**options, "lora": {"r": 8}, "model_options": {"x": 1}, "learning_rate": 1e-4}) == []
    assert problems(schema, {"learning_rat": 1}) == ["learning_rat"]
    assert problems(schema, {"batch_size": "many"}) == ["batch_size"]
    assert problems(schema, {"lora": {"rank": 1}}) == ["rank"]


def problems(schema, value):
    """What a validator complains about, for the few words of JSON schema that are used."""
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}
    kinds["null"] = type(None)
    found = []
    for name, item in value.items():
        about = schema.get("properties", {}).get(name)
        if about is None:
            found += [name] if schema.get("additionalProperties") is False else []
            continue
        types = [about["type"]] if isinstance(about["type"], str) else about["type"]
        if not any(isinstance(item, kinds[kind]) for kind in types):
            found.append(name)
        elif isinstance(item, dict):
            found += problems(about, item)
    return found


def test_init_writes_files_and_overwrites_none(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    init.init("grpo", None, schema=True)
    assert capsys.readouterr().out == "grpo.yaml\n"
    assert (
        Path("grpo.yaml").read_text(encoding="utf-8").startswith("# yaml-language-server: $schema=grpo.schema.json\n")
    )
    assert json.loads(Path("grpo.schema.json").read_text(encoding="utf-8"))["title"] == "strop train grpo"
    with pytest.raises(FileExistsError, match=r"grpo\.yaml is there already: --output names another file"):
        init.init("grpo")
    with pytest.raises(ValueError, match=r"algorithm must be one of 'sft', 'dpo', .*; did you mean 'grpo'"):
        init.init("gpro")
    init.init("sft", Path("-"))
    assert capsys.readouterr().out == init.config_text("sft") + "\n"
    assert not Path("-").exists()
