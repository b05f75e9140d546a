"""`strop train ALGORITHM`: the options are the fields of `JobConfig` and of the algorithm's config."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import field, make_dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import typer

import strop
from strop import config as configs
from strop._install import missing
from strop._types import Json, Row
from strop.cli.job import (
    JobConfig,
    listed,
    load_data,
    load_eval_data,
    load_function,
    load_model_and_tokenizer,
    load_named,
    load_rewards,
    load_task,
)
from strop.cli.options import Option, option, options_of, parse_settings, read_config, with_options
from strop.config import Config, TrainerConfig

if TYPE_CHECKING:
    import torch

    from strop.callbacks import Callback
    from strop.training.logging import Logger
    from strop.training.state import History
    from strop.training.trainer import Trainer


class Command(NamedTuple):
    """An algorithm on the command line.

    algorithm   its class
    about       its description in the help
    arguments   its arguments besides the model: functions, environment, tools, agent, critic
    shown       the options that `strop init` shows, before those of all algorithms
    prompted    its rows need nothing but a prompt
    """

    algorithm: str
    about: str
    arguments: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    prompted: bool = False


OFFLINE = ("model", "data", "map")
SAMPLED = (*OFFLINE, "template", "chat", "reward", "max_new_tokens", "temperature")
ALGORITHMS = {
    "sft": Command("SFT", "Imitate given completions.", shown=OFFLINE),
    "dpo": Command("DPO", "Learn from pairs which of two completions is the better one.", shown=(*OFFLINE, "beta", "loss_type")),
    "kto": Command(
        "KTO", "Learn from single completions that are labelled desirable or not.",
        shown=(*OFFLINE, "beta", "loss_type", "desirable_weight", "undesirable_weight"),
    ),
    "reward": Command(
        "RewardModel", "Learn from pairs a number for completions, to be used as a reward.", shown=(*OFFLINE, "center_coef")
    ),
    "grpo": Command(
        "GRPO", "Reinforcement learning from rewards compared within a group.", ("reward", "environment", "tools", "agent"),
        (*SAMPLED, "group_size", "kl_coef", "loss_type", "inner_epochs", "mask_truncated"), prompted=True,
    ),
    "rloo": Command(
        "RLOO", "REINFORCE with the other completions of a prompt as baseline: GRPO with two other defaults.",
        ("reward", "environment", "tools", "agent"), (*SAMPLED, "group_size", "kl_coef", "inner_epochs"), prompted=True,
    ),
    "ppo": Command(
        "PPO", "Reinforcement learning with a critic.", ("reward", "critic"),
        (*SAMPLED, "critic", "critic_learning_rate", "kl_coef", "lam", "value_coef", "inner_epochs"), prompted=True,
    ),
    "distill": Command(
        "Distill", "Learn a teacher's distribution (--ref-model) on what the model itself writes.",
        shown=("model", "ref_model", *SAMPLED[1:5], "divergence", "on_policy", *SAMPLED[6:]), prompted=True,
    ),
    "online-dpo": Command(
        "OnlineDPO", "DPO on pairs that the model makes and a reward or preference judges.",
        ("reward", "preference", "environment", "tools"), (*SAMPLED, "preference", "beta"), prompted=True,
    ),
}  # fmt: skip
ConfigT = TypeVar("ConfigT", bound=Config)
HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    no_args_is_help=True,
    context_settings=HELP,
    help=f"Train a model: {', '.join(ALGORITHMS)}.",
    rich_markup_mode="rich",
)


def config_class(command: str) -> type[TrainerConfig]:
    """Return the config of a command's algorithm."""
    found: type[TrainerConfig] = getattr(configs, f"{ALGORITHMS[command].algorithm}Config")
    return found


def algorithm_class(command: str) -> Any:
    """Import and return a command's algorithm."""
    try:
        return getattr(strop, ALGORITHMS[command].algorithm)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        raise missing("training", error.name, "train") from None


# ---- options ----


def with_job(kind: type[Config]) -> type[Config]:
    """Return a config of two parts, the job and an algorithm's options. Names are looked for in both."""
    parts = (("job", JobConfig), ("options", kind))
    fields = [(name, part, field(default_factory=part, metadata={"inline": True})) for name, part in parts]
    return make_dataclass(kind.__name__.removesuffix("Config"), fields, bases=(Config,), frozen=True, kw_only=True)


def options_for(kind: type[Config]) -> list[Option]:
    """Return the options of a command: those of the job, then those of its algorithm."""
    return options_of(with_job(kind), kind.__name__.removesuffix("Config"))


def gather(
    kind: type[ConfigT], path: Path | None, settings: Sequence[str] = (), given: Row | None = None
) -> tuple[JobConfig, ConfigT]:
    """Return the job and the algorithm's config: the file's options, then --set, then those of the command line."""
    both: Any = with_job(kind)()
    layers = [(f"{path}: ", read_config(path))] if path is not None else []
    layers += [("--set ", parse_settings(settings, options_for(kind))), ("", dict(given or {}))]
    for where, options in layers:
        try:
            both = both.changed(options)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{where}{error}") from None
    return both.job, both.options


# ---- the commands ----


def _command(command: str) -> Callable[..., None]:
    def train(
        config: Annotated[Path | None, option("YAML file of options, flat or nested.")] = None,
        settings: Annotated[list[str] | None, option("name=value of any option, also nested.", "--set")] = None,
        quiet: Annotated[bool, option("Write nothing but errors and the run's folder.")] = False,
        dry_run: Annotated[bool, option("Check everything, take one step, say what it took, write nothing.")] = False,
        *,
        given: Json,
    ) -> None:
        job, options = gather(config_class(command), config, settings or (), given)
        if dry_run:
            try_out(command, job, options)
        else:
            run(command, job, options, quiet=quiet)

    return with_options(train, options_for(config_class(command)))


for _name, _entry in ALGORITHMS.items():
    in_full = f"{_entry.about} Options come from --config, then from the command line."
    app.command(_name, help=in_full, short_help=_entry.about)(_command(_name))


# ---- the run ----


def run(command: str, job: JobConfig, config: TrainerConfig, *, quiet: bool = False) -> Path:
    """Train and return the run folder. Ends the process with 130 or 143 after Ctrl-C or SIGTERM."""
    from strop.distributed import world
    from strop.training.folder import final_model, remove_run

    quiet = quiet or not world().is_first
    output = world().from_first(lambda: _output(command, job))
    writes_to = Path(os.path.abspath(output))  # a user's function may change the current directory
    trainer, rows, eval_rows = build(command, job, config)
    if job.overwrite:
        rows = trainer.prepared(rows)  # first, so that errors in the data remove no earlier run
        world().from_first(lambda: remove_run(writes_to))
    trainer.loggers = _loggers(job, config, writes_to, quiet) if world().is_first else []
    trainer.callbacks = _callbacks(job, writes_to, eval_rows)
    trainer.run.about = {"job": changed_options(job)}
    if not quiet:
        print(f"{command}: {len(rows):,} rows, {_size(trainer)}; run folder {output}", file=sys.stderr)
    try:
        history = trainer.train(
            rows, eval_dataset=eval_rows, output_dir=writes_to, resume=job.resume, allow_changes=job.allow_changes,
            progress=False if quiet else None,
        )  # fmt: skip
    finally:
        for logger in trainer.loggers:
            logger.close()
    if history.interrupted:
        if not quiet:
            print("the same command with --resume goes on from there", file=sys.stderr)
        raise typer.Exit(128 + (history.signal or 2))
    if not quiet:
        _tell(history, output, writes_to)
    if world().is_first:
        print(output)
        if job.push_to_hub is not None:
            final = final_model(writes_to)
            _push(trainer, job.push_to_hub, final, output / final.relative_to(writes_to))
    return output


def _output(command: str, job: JobConfig) -> Path:
    """Return the run folder. Raise if it cannot be written, or if it exists without resume or overwrite."""
    from strop.training.folder import check_usable

    output = Path(job.output or f"runs/{command}-{time.strftime('%Y%m%d-%H%M%S')}")
    if job.resume and job.output is None:
        raise ValueError("--resume needs --output, the folder of the run to go on with")
    if output.exists() and not output.is_dir():
        raise NotADirectoryError(f"output must be a folder, found the file {output}")
    if job.resume and job.overwrite:
        raise ValueError("--resume goes on with a run and --overwrite removes it: give one of them")
    if (output / "run.json").exists() and not job.resume and not job.overwrite:
        ways = "--resume goes on with it, --overwrite removes it, --output names another folder"
        raise ValueError(f"{output} holds a run already: {ways}")
    check_usable(output)  # before a model is loaded
    return output


def try_out(command: str, job: JobConfig, config: TrainerConfig) -> None:
    """Take one step and evaluate one batch; print their time and memory and estimate the run's. Nothing is written."""
    from strop.data.formats import Prepared
    from strop.training.state import epoch_order

    trainer, rows, eval_rows = build(command, job, config)
    rows, run = trainer.prepared(rows), config.run
    if run.batch_size > len(rows):
        raise ValueError(f"batch_size must be at most the number of rows, {len(rows)}, found {run.batch_size}")
    order = epoch_order(len(rows), run.seed, 0, run.shuffle)
    metrics = trainer.run_step(lambda: trainer.step_on([rows[i] for i in order[: run.batch_size]]))
    steps = run.num_steps or run.num_epochs * -(-len(rows) // run.batch_size)
    seconds = metrics["time/step"]
    phases = {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}
    shares = ", ".join(f"{name} {value:.3g} s" for name, value in phases.items() if name != "step")
    lines = [
        f"{command}: {len(rows):,} rows, {_size(trainer)}, on {trainer.policy.device}",
        f"a step: {seconds:.3g} s ({shares}); the first is slower than the others",
        f"{steps:,} steps: about {timedelta(seconds=round(steps * seconds))}, without evaluations",
        f"memory at its peak: {_peak_memory(trainer.policy.device) / 1e9:.2f} GB",
    ]
    if eval_rows is not None:
        sets = trainer.prepared_sets(eval_rows)
        found = trainer.evaluate({name: Prepared(rows[: run.batch_size]) for name, rows in sets.items()})
        of_batch = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
        lines.append(f"held out: {sum(map(len, sets.values())):,} rows; of a batch {of_batch}")
    if trainer.world.is_first:
        print("\n".join([*lines, "nothing was written"]))


def _peak_memory(device: "torch.device") -> float:
    """Return the peak memory in bytes, of the GPU or of the process."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def build(
    command: str, job: JobConfig, config: TrainerConfig
) -> tuple["Trainer", Sequence[object], Sequence[object] | dict[str, Sequence[Json]] | None]:
    """Return the trainer, its rows, and the held-out rows."""
    task = load_task(job)
    rows, eval_rows = load_data(job, task), load_eval_data(job, task)
    functions = _functions(command, job, task)
    make = algorithm_class(command)
    model, tokenizer = load_model_and_tokenizer(job, task, make.scores, config.quantize)
    trainer = make(model=model, ref_model=_ref_model(job), tokenizer=tokenizer, config=config, **functions)
    return trainer, rows, eval_rows


def changed_options(job: JobConfig) -> Json:
    """Return the job's options that differ from their defaults."""
    plain, default = job.to_dict(), JobConfig().to_dict()
    return {name: value for name, value in plain.items() if value != default[name]}


def _functions(command: str, job: JobConfig, task: object) -> Json:
    """Return the trainer's arguments besides the model: functions, environment, tools, agent, critic."""
    takes = ALGORITHMS[command].arguments
    for name in ("environment", "tools", "agent", "critic", "reward", "preference", "metrics"):
        if ("reward" if name == "metrics" else name) not in takes and getattr(job, name) is not None:
            has = "rewards" if name == "preference" and "reward" in takes else "none"
            raise ValueError(f"{name} must not be given: {command} has {has}")
    found: Json = {name: load_named(job, name) for name in ("environment", "tools", "agent") if name in takes}
    if "critic" in takes:
        found["critic"] = job.critic
    if job.metrics is not None:
        found["metrics_fn"] = [load_function(name, "metrics") for name in listed(job.metrics)]
    if job.preference is not None:
        return found | {"preference_fn": load_function(job.preference, "preference")}
    if "reward" not in takes:
        return found
    rewards = load_rewards(job, task)
    if not rewards and found.get("environment") is None and found.get("agent") is None:
        ways = "--reward file.py:function, a --task that has one, or an --environment"
        raise ValueError(f"{command} needs a reward: {ways}")
    return found | {"reward_fn": (rewards if len(rewards) > 1 else rewards[0]) if rewards else None}


def _ref_model(job: JobConfig) -> Any:
    from strop.config.sampling import is_address
    from strop.models import load_model

    if job.ref_model is None or is_address(job.ref_model):
        return job.ref_model

    return load_model(job.ref_model, dtype=job.dtype, device=job.device)[0]


def _callbacks(job: JobConfig, output: Path, eval_rows: object) -> list["Callback"]:
    from strop.callbacks import BestCheckpoint, EarlyStopping

    if job.best is None:
        return []
    if eval_rows is None:
        raise ValueError("best needs held-out rows: --eval-data, or a --task's")
    stopping = [EarlyStopping(job.best, job.patience)] if job.patience else []
    return [BestCheckpoint(output / "checkpoints", job.best), *stopping]


def _loggers(job: JobConfig, config: TrainerConfig, output: Path, quiet: bool) -> list["Logger"]:
    from strop._checks import check_choice
    from strop.logging import ConsoleLogger, TensorBoardLogger, TrackioLogger, WandbLogger

    made: list[Logger] = []
    for name in listed(job.log):
        check_choice(name, "log", ("tensorboard", "trackio", "wandb"))
        if name == "tensorboard":
            made.append(TensorBoardLogger(output / "tensorboard"))
        else:
            made.append((TrackioLogger if name == "trackio" else WandbLogger)(name=output.name))
    if not quiet and not sys.stderr.isatty():  # on a terminal there is a progress bar
        made.append(ConsoleLogger(max(1, config.run.log_every), file=sys.stderr))
    return made


def _size(trainer: "Trainer") -> str:
    from strop.distributed import class_of
    from strop.models.quantized import num_weights

    count = num_weights(trainer.module)
    trained = sum(parameter.numel() for parameter in trainer.module.parameters() if parameter.requires_grad)
    share = f", {trained:,} trained ({trained / count:.2%})" if trained < count else ""
    processes = f", in {trainer.world.size} processes" if trainer.world.size > 1 else ""
    return f"{class_of(trainer.module).__name__} of {count:,} parameters{share}{processes}"


def _tell(history: "History", output: Path, place: Path) -> None:
    """Print the first and the last evaluation, the model's folder, and the command that shows the report."""
    from strop.training.folder import final_model

    evaluations = [e for e in history.evaluations if len(e) > 1]
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        for name in [n for n in last if n.startswith("eval/")]:
            print(f"{name}: {first.get(name, float('nan')):.4g} → {last[name]:.4g}", file=sys.stderr)
    if history.stop_reason:
        print(f"stopped: {history.stop_reason}", file=sys.stderr)
    print(
        f"model: {output / final_model(place).relative_to(place)}\nlook at it: strop report {output}", file=sys.stderr
    )


def _push(trainer: "Trainer", repo_id: str, folder: Path, shown: Path) -> None:
    """Upload a folder; errors name it `shown`."""
    try:
        address = trainer.push_to_hub(repo_id, folder=folder)
    except Exception as error:  # of many kinds: no network, no login, no right to the name
        why = f"{repo_id} could not be uploaded: {' '.join(str(error).split()):.200}"
        again = f"To try again: hf upload {repo_id} {shown}"
        raise RuntimeError(f"the run is complete and its model is in {shown}, but {why}. {again}") from error
    print(f"pushed to {address}", file=sys.stderr)
