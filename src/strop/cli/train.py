"""`strop train sft|dpo|kto|reward|grpo|ppo|distill|online-dpo`: options are the fields of `JobConfig` and of the algorithm's config."""

import importlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from strop.cli.job import (
    JOB_FIELDS,
    JobConfig,
    job_part,
    load_data,
    load_environment,
    load_eval_data,
    load_function,
    load_model_and_tokenizer,
    load_rewards,
    load_task,
    load_tools,
)
from strop.cli.options import Option, options_of, parse_settings, read_config, with_options
from strop.config import option_names, unknown_option

ALGORITHMS = {
    # command: module, class, what it does
    "sft": ("sft", "SFT", "Imitate given completions."),
    "dpo": ("dpo", "DPO", "Learn from pairs which of two completions is the better one."),
    "kto": ("kto", "KTO", "Learn from single completions that are labelled desirable or not."),
    "reward": ("reward_model", "RewardModel", "Learn from pairs a number for completions, to be used as a reward."),
    "grpo": ("grpo", "GRPO", "Reinforcement learning from rewards compared within a group."),
    "ppo": ("ppo", "PPO", "Reinforcement learning with a critic."),
    "distill": (
        "distill",
        "Distill",
        "Learn a teacher's distribution on what the model itself writes; --ref-model is the teacher.",
    ),
    "online-dpo": (
        "online_dpo",
        "OnlineDPO",
        "DPO on pairs the model itself makes, judged by a reward or a preference.",
    ),
}
app = typer.Typer(no_args_is_help=True, help=f"Train a model: {', '.join(ALGORITHMS)}.", rich_markup_mode="rich")


def define_commands(arguments: Sequence[str]) -> None:
    """Commands with their options. torch is imported only for the algorithm that stands on the command line."""
    app.registered_commands.clear()
    for command, (_, _, about) in ALGORITHMS.items():
        make = _command if command in arguments and "train" in arguments else _stub
        app.command(command, help=f"{about} Options come from --config, then from the command line.", short_help=about)(
            make(command)
        )


def _stub(_: str) -> Any:
    def command() -> None:
        raise AssertionError("define_commands puts the whole command here before it is called")

    return command


def algorithm_class(command: str) -> Any:
    module, name, _ = ALGORITHMS[command]
    try:
        return getattr(importlib.import_module(f"strop.algorithms.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        raise ImportError(f'training needs {error.name}: pip install "strop[train]"') from None


def _command(command: str) -> Any:
    algorithm = algorithm_class(command)

    def train(
        config: Annotated[Path | None, typer.Option(help="YAML file of options, flat or nested.")] = None,
        settings: Annotated[
            list[str] | None, typer.Option("--set", help="name=value of any option, also of nested ones.")
        ] = None,
        quiet: Annotated[bool, typer.Option(help="Write nothing but errors and the run's folder.")] = False,
        *,
        given: dict[str, Any],
    ) -> None:
        job, options = gather(algorithm.Config, config, settings or (), given)
        run(command, job, options, quiet=quiet)

    return with_options(train, all_options(algorithm.Config))


# ---- options ----


def all_options(config_class: Any) -> list[Option]:
    name = config_class.__name__.removesuffix("Config")
    return [*options_of(JobConfig, "What is trained on what"), *options_of(config_class, name)]


def gather(
    config_class: Any, path: Path | None, settings: Sequence[str] = (), given: Mapping[str, Any] | None = None
) -> tuple[JobConfig, Any]:
    """The job and the algorithm's config: the file's options, then --set, then those of the command line."""
    job, config = JobConfig(), config_class()
    layers = [(f"{path}: ", read_config(path))] if path is not None else []
    layers += [("--set ", parse_settings(settings, all_options(config_class))), ("", dict(given or {}))]
    for where, options in layers:
        try:
            _check_known(config_class, options)
            job = job.changed(job_part(job, options))
            config = config.changed({k: v for k, v in options.items() if k.partition(".")[0] not in JOB_FIELDS})
        except (ValueError, TypeError) as error:
            raise type(error)(f"{where}{error}") from None
    return job, config


def _check_known(config_class: Any, options: Mapping[str, Any]) -> None:
    known = [*JOB_FIELDS, *option_names(config_class)]
    for name in options:
        head = name.partition(".")[0]
        if head not in known and name not in known:
            raise ValueError(
                unknown_option(name, known, f" of {config_class.__name__.removesuffix('Config')}", config_class)
            )


# ---- the run ----


def run(command: str, job: JobConfig, config: Any, *, quiet: bool = False) -> Path:
    """Train as told; the run folder. Ends the process with 130 or 143 after Ctrl-C or SIGTERM."""
    from strop.distributed import world

    quiet = quiet or not world().is_first
    output = world().from_first(lambda: _output(command, job))
    trainer, rows, eval_rows = build(command, job, config)
    trainer.loggers = _loggers(job, config, output, quiet) if world().is_first else []
    trainer.run.about = {"job": told(job)}
    if not quiet:
        print(f"{command}: {len(rows):,} rows, {_size(trainer)}; run folder {output}", file=sys.stderr)
    history = trainer.train(
        rows, eval_dataset=eval_rows, output_dir=output, resume=job.resume, progress=False if quiet else None
    )
    if history.interrupted:
        if not quiet:
            print("the same command with --resume goes on from there", file=sys.stderr)
        raise typer.Exit(128 + (history.signal or 2))
    if not quiet:
        _tell(history, output)
    if world().is_first:
        print(output)
    return output


def _output(command: str, job: JobConfig) -> Path:
    """The run folder, which may be there if it is resumed."""
    output = Path(job.output or f"runs/{command}-{time.strftime('%Y%m%d-%H%M%S')}")
    if job.resume and job.output is None:
        raise ValueError("--resume needs --output, the folder of the run to go on with")
    if output.exists() and not output.is_dir():
        raise NotADirectoryError(f"output must be a folder, found the file {output}")
    if (output / "run.json").exists() and not job.resume:
        raise ValueError(f"{output} holds a run already: --resume goes on with it, --output names another folder")
    return output


def build(command: str, job: JobConfig, config: Any) -> tuple[Any, Sequence[Any], Sequence[Any] | None]:
    """The trainer, its rows, and the held-out ones."""
    task = load_task(job)
    rows, eval_rows = load_data(job, task), load_eval_data(job, task)
    functions = _functions(command, job, task)
    make = algorithm_class(command)
    model, tokenizer = load_model_and_tokenizer(job, task, scores=make.scores)
    return (
        make(model=model, ref_model=_ref_model(job), tokenizer=tokenizer, config=config, **functions),
        rows,
        eval_rows,
    )


def told(job: JobConfig) -> dict[str, Any]:
    """What the job says beyond its defaults."""
    plain, default = job.to_dict(), JobConfig().to_dict()
    return {name: value for name, value in plain.items() if value != default[name]}


def _functions(command: str, job: JobConfig, task: Any) -> dict[str, Any]:
    """reward_fn and preference_fn, for the algorithms that generate."""
    for name in () if command in ("grpo", "online-dpo") else ("environment", "tools"):
        if getattr(job, name) is not None:
            raise ValueError(f"{name} must not be given: {command} has none")
    if command not in ("grpo", "ppo", "online-dpo"):
        for name in ("reward", "preference"):
            if getattr(job, name) is not None:
                raise ValueError(f"{name} must not be given: {command} has none")
        return {}
    if job.preference is not None:
        if command != "online-dpo":
            raise ValueError(f"preference must not be given: {command} has rewards")
        return {"preference_fn": load_function(job.preference, "preference")}
    rewards = load_rewards(job, task)
    found: dict[str, Any] = {"critic": job.critic}
    if command != "ppo":
        found = {"environment": load_environment(job), "tools": load_tools(job)}
    if not rewards and found.get("environment") is None:
        raise ValueError(
            f"{command} needs a reward: --reward file.py:function, a --task that has one, or an --environment"
        )
    return found | {"reward_fn": (rewards if len(rewards) > 1 else rewards[0]) if rewards else None}


def _ref_model(job: JobConfig) -> Any:
    if job.ref_model is None:
        return None
    from strop.models import load_model

    return load_model(job.ref_model, dtype=job.dtype, device=job.device)[0]


def _loggers(job: JobConfig, config: Any, output: Path, quiet: bool) -> list[Any]:
    from strop._checks import check_choice
    from strop.logging import ConsoleLogger, TensorBoardLogger, WandbLogger

    names = [job.log] if isinstance(job.log, str) else list(job.log or ())
    made: list[Any] = []
    for name in names:
        check_choice(name, "log", ("tensorboard", "wandb"))
        made.append(
            TensorBoardLogger(output / "tensorboard") if name == "tensorboard" else WandbLogger(name=output.name)
        )
    if not quiet and not sys.stderr.isatty():  # a terminal has the progress bar
        made.append(ConsoleLogger(max(1, config.run.log_every), file=sys.stderr))
    return made


def _size(trainer: Any) -> str:
    from strop.distributed import class_of

    count = sum(parameter.numel() for parameter in trainer.module.parameters())
    processes = f", in {trainer.world.size} processes" if trainer.world.size > 1 else ""
    return f"{class_of(trainer.module).__name__} of {count:,} parameters{processes}"


def _tell(history: Any, output: Path) -> None:
    """The first and the last of what was measured, and how to look at it."""
    evaluations = [e for e in history.evaluations if len(e) > 1]
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        for name in [n for n in last if n.startswith("eval/")]:
            print(f"{name}: {first.get(name, float('nan')):.4g} → {last[name]:.4g}", file=sys.stderr)
    if history.stop_reason:
        print(f"stopped: {history.stop_reason}", file=sys.stderr)
    print(f"model: {output / 'final'}\nlook at it: strop report {output}", file=sys.stderr)
