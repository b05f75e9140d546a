"""`Trainer`: the models, the optimiser, callbacks, loggers and one training step. train() is in `run.py`.

An algorithm defines how rows become a batch, and the loss of that batch:

    class MyAlgorithm(Trainer):
        Config = MyConfig                                    # a TrainerConfig
        def step_on(self, rows): return self.update([lambda: loss_of(part) for part in self.micro_batches(rows, lengths)])
        def train_step(self, rows): return self.run_step(self.step_on, rows)
"""

import contextlib
import inspect
import math
import os
import random
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeAlias, TypeVar

import torch

from strop import _trl
from strop._contexts import Phases, Settings, contained
from strop._install import missing
from strop._types import Json, State
from strop.config import OptimConfig, TrainerConfig
from strop.config.base import flat, option_names, unknown_option
from strop.data.batch import Trajectory, shared_prefixes, split
from strop.data.formats import PreparedRows, check_rows, prepared
from strop.data.inputs import check_tokenizer
from strop.data.tokenize import is_thread_safe
from strop.distributed import World, world
from strop.models import Policy, as_policy, load_model, one_thread, unwrapped
from strop.models.prepare import check_precision, prepared_model
from strop.models.scorer import as_scorer
from strop.ops.head import widest
from strop.training import checkpoint
from strop.training.callbacks import Callback
from strop.training.folder import remove_run
from strop.training.logging import Logger
from strop.training.memory import LACKS, raise_explained
from strop.training.optimizers import MakeOptimizer, make_optimizer
from strop.training.run import TrainingRun, checked_callbacks, checked_loggers
from strop.training.state import History, TrainState, rng_kept

if TYPE_CHECKING:
    from strop.moe import MoETransformer

    Model = torch.nn.Module | MoETransformer | Policy | str | Path

Row = TypeVar("Row")
Metrics: TypeAlias = (
    Json  # by name: numbers, tensors, and Mean, Sum, Largest, which `gather_metrics` reduces to numbers
)
LEAN_TOKENS = 4  # factor on micro_batch_tokens where a token needs a fraction of the memory: see `models.layers`
USERS_PHASES = ("reward",)  # phases that run the user's functions, with all of torch's threads
DROPOUT_PHASES = ("score", "forward")  # phases in which the model may apply dropout


class Update(Metrics):
    """The metrics of an optimiser step, numbers or tensors; `parts` holds the result of each loss function."""

    parts: list[Any]


class Trainer:
    """The base class of the algorithms.

    model       a causal LM of transformers (also with peft adapters), strop's MoE, a module that returns logits, or a name
                for `strop.models.load_model`
    ref_model   the frozen reference; by default a copy of the model (or the base below its adapters)
    device      "cpu", "cuda", "cuda:1", "mps", "xpu"; None loads a named model onto CUDA if available, and does not
                move a module
    config      the algorithm's Config; **options change single fields of it by name: learning_rate=1e-4
    logger      one logger or several
    callbacks   one object of strop.callbacks or several
    optimizer   a name, as in the config, or a function that takes parameter groups and returns an optimiser
    """

    Config: ClassVar[type[TrainerConfig]] = TrainerConfig
    any_format = False  # True if a dataset's rows may have any columns
    # the formats a dataset's rows may have; if set, `prepare` is called with parts of a large dataset
    formats: ClassVar[tuple[str, ...]] = ()
    scores: ClassVar[bool] = False  # the model is a sequence classifier with one label

    def __init__(
        self,
        *,
        model: "Model",
        ref_model: "Model | None" = None,
        tokenizer: Any = None,
        device: torch.device | str | None = None,
        config: TrainerConfig | None = None,
        logger: Logger | Sequence[Logger] | None = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        optimizer: MakeOptimizer | str | None = None,
        **options: Any,
    ):
        if isinstance(optimizer, str):
            options["optimizer"], optimizer = optimizer, None
        self.name = type(self).__name__
        self.config = self._make_config(config, options)
        for idle in self.config.without_effect():
            warnings.warn(idle, stacklevel=3)
        check_tokenizer(tokenizer)
        self.world = world()
        if self.world.size > 1:
            self.world.check_same(flat(self.config.to_dict()))
        if device is None and self.world.device is not None:
            device = self.world.device
        if isinstance(model, (str, Path)):
            # train in float32: bfloat16 weights lose small updates. Frozen weights below an adapter keep their dtype
            dtype = None if self.config.lora is not None else torch.float32
            model, loaded = load_model(
                model, dtype=dtype, device=device, scores=self.scores, tokenizer=tokenizer,
                quantize=self.config.quantize,
            )  # fmt: skip
            tokenizer = loaded if tokenizer is None else tokenizer
        read_as: Callable[..., Any] = as_scorer if self.scores else as_policy
        given = read_as(model)
        if device is not None:
            given.to(device)
        self.policy = read_as(prepared_model(given, self.config.run, self.config.lora, self.config.quantize), tokenizer)
        self.policy.set_sharing(self.config.run.share_prefixes)
        self.tokenizer = self.policy.tokenizer
        self.module: torch.nn.Module = unwrapped(self.policy.model)  # without the wrapper of torch.compile
        check_precision(self.module)
        self.world.make_same(self.module)
        self.loggers, self.callbacks = logger, callbacks
        self.state, self.history = TrainState(), History()  # the position in steps and data; the metrics of train()
        self.run = TrainingRun()
        self.goes_on = False  # the next train() continues the run: after from_checkpoint, or an interruption
        self.stop_reason: str | None = None  # why train() should end after the current step; None to continue
        self.settings = Settings()  # torch's settings, applied at every step
        self.phases = Phases(self.policy.device)  # of the current step
        self.sum_dtype = widest(self.policy.device)  # dtype of sums over tokens in metrics
        self.samples: list[Json] = []  # samples of the last step: {"prompt", "completion", "reward", …}
        self.reference: Any = None
        self.environments: list[Any] = []  # the user's environments and tools, for `sources_of`
        self.doing = ""  # "evaluating" or "saving", else ""
        self.setup(ref_model)
        if self.config.run.shard == "full":
            self._shard()
        self.optimizer = make_optimizer(self.module, self.config.optim, optimizer)

    def __repr__(self) -> str:
        """Return one line for a notebook: the algorithm, the model and the step."""
        total = f" of {self.state.total_steps:,}" if self.state.total_steps else ""
        return f"{self.name}({type(self.module).__name__}, step {self.state.step:,}{total})"

    # ---- for subclasses ----

    def setup(self, ref_model: object) -> None:
        """Set up what the algorithm needs, such as `self.reference = self.policy.reference(ref_model)`; here nothing.

        The constructor calls it once the policy exists.
        """
        if ref_model is not None:
            raise ValueError(
                f"ref_model must be None, found a {type(ref_model).__name__}: {self.name} has no reference"
            )

    def prepare(self, rows: Sequence[object], name: str = "dataset") -> Sequence[Any]:
        """Return a dataset's rows, checked and in the form that `step_on` takes.

        train() calls it once with all rows, before step 1. If the class sets `formats`, it is called with parts of a
        large dataset instead, shortly before the steps that need them and possibly in a thread.
        """
        return rows

    def check_columns(self, rows: Sequence[object], name: str) -> None:
        """Raise if a row lacks a column or has an invalid value. This quick check of all rows runs before step 1."""
        check_rows(rows, self.formats, where=name, what=self.name)

    def step_on(self, rows: list[object]) -> dict[str, float]:
        """Train on these rows of the dataset and return the metrics."""
        raise NotImplementedError(f"{self.name} has no step_on")

    def evaluate_on(self, rows: list[object]) -> dict[str, float]:
        """Return the metrics of these rows, without training on them."""
        raise NotImplementedError(f"{self.name} has no evaluate_on")

    def extra_state(self) -> State:
        """Return the algorithm's own state for checkpoints: tensors by name, and plain JSON values."""
        return {}, {}

    def load_extra_state(self, tensors: dict[str, torch.Tensor], values: Json) -> None:
        """Restore a state that `extra_state` returned."""

    def update(self, losses: Iterable[Callable[[], Any]], *, has_signal: bool = False) -> Update:
        """Do one optimiser step on the sum of the losses. Each function is called just before the backward of its loss.

        has_signal   there is something to learn (an advantage that is not 0), so a gradient of exactly 0 is an error

        A function returns the loss, or a tuple with the loss first, as those of strop.losses do. If the loss or the
        gradient norm is not finite, the weights are not changed. On a GPU the optimiser's kernel skips the update, and
        `run_step` raises at its end, where it waits for the device anyway. Until then loss and norm are tensors.
        """
        self.optimizer.zero_grad(set_to_none=True)
        parts, values, losses = [], [], list(losses)
        for number, loss_of in enumerate(losses, 1):
            if self.policy.shards is not None:
                self.policy.shards.sum_gradients_after(number == len(losses))
            with self.phase("forward"), self.autocast():
                parts.append(loss_of())
            loss = parts[-1][0] if isinstance(parts[-1], tuple) else parts[-1]
            with self.phase("backward"):
                if loss.requires_grad:  # False if every token of this part is masked
                    loss.backward()
            values.append(loss.detach())
        with self.phase("update"):
            params = [param for group in self.optimizer.param_groups for param in group["params"]]
            if self.policy.shards is None and self.world.size > 1:
                self.world.sum_gradients(params)
            limit = self.config.optim.max_grad_norm or float("inf")
            if self.policy.shards is not None:
                grad_norm = self.policy.shards.clip(params, limit, self.world)
            else:
                grad_norm = torch.nn.utils.clip_grad_norm_(params, limit)
            loss = torch.stack(values).sum() if values else torch.zeros_like(grad_norm)
            if self.world.size > 1:
                loss = self.world.summed(loss)
            update = Update(loss=loss, grad_norm=grad_norm)
            if can_skip(self.optimizer):
                unfit = loss + grad_norm
                if has_signal:
                    self.phases.wanted_norm, unfit = grad_norm, unfit / (grad_norm != 0)  # x/0 is inf or NaN
                self.optimizer.found_inf = self.phases.note_unfit(unfit)  # type: ignore[attr-defined]
            else:
                update.update(zip(update, on_host([*update.values()]), strict=True))
                if not all(abs(value) < float("inf") for value in update.values()):
                    raise not_finite(update, self.state.step)
                if has_signal and not update["grad_norm"]:
                    raise no_gradient(self.state.step)
            learning_rate = self.set_learning_rate(self.optimizer, self.config.optim)
            self.state.updates += 1  # counted before the step: one that fails halfway may have changed weights
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)  # frees the gradients' memory for the next rollout
        update.parts, update["learning_rate"] = parts, learning_rate
        return update

    def run_step(self, work: Callable[..., Metrics], *given: Any) -> dict[str, float]:
        """Run `work(*given)` as one training step, with events, phase times and loggers; return the metrics."""
        start, state = time.perf_counter(), self.state
        self.phases = phases = self.phases.anew()
        self.fire("on_step_begin")
        self.model.train()
        try:
            with contained():
                self.settings.apply()
                metrics = self._on_host(work(*given))
        except LACKS as error:
            raise_explained(error, self)
        times = phases.metrics()
        seconds = time.perf_counter() - start
        state.step += 1
        state.seconds += seconds
        num_tokens = int(metrics.pop("num_tokens"))
        state.num_tokens += num_tokens
        if num_tokens:
            metrics["tokens_per_second"] = num_tokens / seconds
        metrics |= times
        metrics["time/step"] = seconds
        log_every = self.config.run.log_every
        if log_every and state.step % log_every == 0:
            self.log(metrics)
        self.fire("on_step_end", metrics)
        return metrics

    def _on_host(self, metrics: Metrics) -> dict[str, float]:
        """Return the metrics as numbers; raise if an update was skipped. The only wait for the device in a step."""
        phases = self.phases
        metrics, skipped = gather_metrics({**metrics, "num_tokens": Sum(phases.num_tokens)}, phases.unfit, self.world)
        if any(skipped):
            self.state.updates -= int(sum(skipped))
            is_zero = phases.wanted_norm is not None and not phases.wanted_norm
            raise no_gradient(self.state.step) if is_zero else not_finite(metrics, self.state.step)
        return metrics

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time of this context as the metric time/<name>, and restore torch's settings at its end.

        Work of another thread, ahead of its step, is no part of the present one.
        """
        if threading.get_ident() != self.phases.thread:
            yield
            return
        alone = (self.policy.kind == "moe" or self.policy.device.type == "cuda") and name not in USERS_PHASES
        with self.phases.phase(name), one_thread() if alone else contextlib.nullcontext():
            if self.config.run.dropout and name in DROPOUT_PHASES:
                with self._own_generator():
                    yield
            else:
                yield

    @contextlib.contextmanager
    def _own_generator(self) -> Iterator[None]:
        """Seed dropout in this context from (seed, step, rank, number), so that user code cannot affect it."""
        self.phases.num_draws += 1
        device = self.policy.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self.seed_of(self.state.step, "dropout", self.world.rank, self.phases.num_draws))
            yield

    def seed_of(self, *parts: object) -> int:
        """Return a seed derived from the run's seed and these parts, so that a resumed run draws the same numbers."""
        return random.Random("/".join(map(str, (self.config.run.seed, *parts)))).getrandbits(62)

    def share(self, num_rows: int) -> range:
        """Return the indices of the batch's rows that this process takes: all of them without other processes."""
        return range(num_rows) if self.world.size == 1 else self.world.share(num_rows)

    def of_all(self, items: list[Row]) -> list[Row]:
        """Return the items of all processes, in the order of the batch's rows."""
        return items if self.world.size == 1 else self.world.concat(items)

    def count_tokens(self, num_tokens: int) -> None:
        """Add to the number of tokens in this step, from which tokens_per_second is computed."""
        self.phases.num_tokens += int(num_tokens)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.config.run.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.policy.device.type, torch.bfloat16)

    def micro_batches(
        self,
        rows: Sequence[Row],
        lengths: Sequence[int],
        trajectories: Sequence[Trajectory] = (),
        *,
        lean: bool = False,
    ) -> list[list[Row]]:
        """Return the rows in parts of at most micro_batch_size rows and micro_batch_tokens tokens.

        lengths        number of tokens of each row; for a pair, of both completions together
        trajectories   each row's trajectory, if the rows are not the trajectories themselves: those that share a prefix
                       stay together
        lean           no backward follows, so a part may have LEAN_TOKENS times as many tokens
        """
        run = self.config.run
        num_tokens = run.micro_batch_tokens * (LEAN_TOKENS if lean or self.policy.fuses else 1)
        return self._parts(rows, lengths, trajectories, run.micro_batch_size, num_tokens)

    def eval_batches(
        self, rows: Sequence[Row], lengths: Sequence[int], trajectories: Sequence[Trajectory] = ()
    ) -> list[list[Row]]:
        """Return the rows of a dataset in parts that are no larger than those of training."""
        run = self.config.run
        return self._parts(rows, lengths, trajectories, run.micro_batch_size or run.batch_size, run.micro_batch_tokens)

    def _parts(
        self,
        rows: Sequence[Row],
        lengths: Sequence[int],
        trajectories: Sequence[Trajectory],
        size: int,
        num_tokens: int,
    ) -> list[list[Row]]:
        known = trajectories or [row for row in rows if isinstance(row, Trajectory)]
        shares = known and self.shares_prefixes and all(one.routing_TLk is None for one in known)
        groups = shared_prefixes(known) if shares else ()
        return self._as_many(split(rows, lengths, size, num_tokens, padded=self.policy.pads, groups=groups))

    @property
    def shares_prefixes(self) -> bool:
        """True if all models that read a micro-batch read a prefix that several trajectories share once."""
        return all(reader.shares for reader in self.readers)

    @property
    def readers(self) -> list[Policy]:
        """The models that read the micro-batches."""
        reference = getattr(self.reference, "policy", None)  # None of a teacher on a server
        return [self.policy] if reference is None else [self.policy, reference]

    def _as_many(self, parts: list[list[Row]]) -> list[list[Row]]:
        """Return the parts, filled up with empty ones to the largest number in any process.

        With sharded weights every forward needs all processes.
        """
        if self.policy.shards is None:
            return parts
        return parts + [[] for _ in range(max(self.world.gathered(len(parts))) - len(parts))]

    # ---- for users ----

    @property
    def model(self) -> torch.nn.Module:
        return self.policy.model

    @property
    def functions(self) -> list[Any]:
        """The user's functions that this trainer calls: rewards, preferences."""
        return []

    @property
    def reference_model(self) -> torch.nn.Module | None:
        """The reference's own module; None if there is no reference, or if it is the base below the adapter."""
        return None if self.reference is None else self.reference.model

    def train(
        self,
        dataset: object,
        *,
        eval_dataset: object = None,
        num_steps: int | None = None,
        num_epochs: int | None = None,
        output_dir: str | Path | None = None,
        resume: bool = False,
        overwrite: bool = False,
        allow_changes: bool = False,
        progress: bool | None = None,
        **unknown: Any,
    ) -> History:
        """Train on a dataset: a list of dicts, a `datasets.Dataset`, or a file or name that `load_rows` accepts.

        A new run seeds the global random generators with config.run.seed. After from_checkpoint, or after an
        interruption, training continues where it stopped. Ctrl-C and SIGTERM end it after the current step, with a
        checkpoint if there is an output_dir.

        num_steps, num_epochs   when to end, instead of the config's values
        eval_dataset            held-out rows, or a dict of several by name, evaluated as eval/<name>/<metric>
        output_dir              the run folder: metrics, samples, checkpoints, and at the end the model
        resume                  continue from the newest checkpoint in output_dir, or begin if there is none
        overwrite               first remove the files of an earlier run in output_dir, and nothing else
        allow_changes           with resume=True: continue although reward functions, environment, chat template or rows
                                have changed since the run began
        progress                True shows a progress bar and tables of samples, False nothing; None shows them on a
                                terminal, and otherwise writes a line now and then
        """
        for name in unknown:
            raise TypeError(self._not_of_train(name))
        if resume and overwrite:
            raise ValueError("overwrite must be False with resume=True: one goes on with a run, the other removes it")
        if isinstance(dataset, (str, Path)):
            self.run.about["data"] = str(dataset)
        output = (
            None if output_dir is None else Path(os.path.abspath(output_dir))
        )  # a function may change the directory
        if resume and output is None:
            raise ValueError(
                "output_dir must be given with resume=True: its newest checkpoint is where the run goes on"
            )
        rows = self.prepared(dataset)  # before an old run is removed
        if overwrite and output is not None:
            self.world.from_first(lambda: remove_run(output))
        eval_rows = None if eval_dataset is None else self.prepared_sets(eval_dataset)
        return self.run.train(self, rows, eval_rows, num_steps, num_epochs, output, resume, allow_changes, progress)

    def prepared(self, dataset: object, name: str = "dataset") -> PreparedRows:
        """Return a dataset's rows, loaded and checked, so that train() and evaluate() need not do it again.

        A dataset of up to 1,000 rows is tokenised here. For a larger one only the columns are checked here, and rows
        are tokenised in a thread shortly before the step that needs them.
        """
        return prepared(
            dataset,
            self.prepare,
            name,
            any_format=self.any_format,
            check=self.check_columns if self.formats and not self.any_format else None,
            with_thread=is_thread_safe(self.tokenizer),
        )

    def prepared_sets(self, dataset: object) -> dict[str, PreparedRows]:
        """Return the prepared rows of each dataset of a dict, by its name; of a single dataset, under the empty name."""
        if not isinstance(dataset, dict):
            return {"": self.prepared(dataset, "eval_dataset")}
        names = [f"eval_dataset[{name!r}]" if name else "eval_dataset" for name in dataset]
        return {str(key): self.prepared(rows, name) for name, (key, rows) in zip(names, dataset.items(), strict=True)}

    def evaluate(self, dataset: object) -> dict[str, float]:
        """Return the metrics of a dataset, as eval/<metric>; of a dict of datasets, as eval/<name>/<metric>.

        Weights and random generators are not changed.
        """
        found: dict[str, float] = {}
        for name, rows in self.prepared_sets(dataset).items():
            prefix = f"eval/{name}/" if name else "eval/"
            found |= {f"{prefix}{metric}": value for metric, value in self._evaluated(list(rows)).items()}
        return found

    def _evaluated(self, rows: list[Any]) -> dict[str, float]:
        with contained(), self._doing("evaluating"), self.policy.evaluating(), torch.no_grad(), rng_kept():
            try:
                metrics, _ = gather_metrics(self.evaluate_on(rows), [], self.world)
            except LACKS as error:
                raise_explained(error, self, "evaluate")
        return {name: float(value) for name, value in metrics.items()}

    def save(self, path: str | Path, *, base: bool = True) -> None:
        """Write a checkpoint with everything needed to continue: a file, or with several processes a folder. Atomic.

        base   False leaves out the frozen weights below adapters; from_checkpoint(path, model=…) must then provide them
        """
        with self._doing("saving"):
            checkpoint.save(self, path, self.extra_state(), base)
        self.fire("on_save", str(path))

    @classmethod
    def from_checkpoint(cls, path: str | Path, model: Any = None, ref_model: Any = None, **arguments: Any) -> Self:
        """Return the trainer as it was saved. Plain modules and functions (reward_fn, …) must be passed in again."""
        saved = checkpoint.load(path, cls)
        if "env_id" in arguments:
            del arguments["env_id"]
            warnings.warn("env_id has no effect: a trainer has no environment registry", stacklevel=2)
        trainer = cls(**(arguments | saved.rebuilt(model, ref_model, arguments.get("tokenizer"))))
        saved.put(trainer)
        return trainer

    def save_pretrained(self, folder: str | Path) -> None:
        """Write model and tokenizer for `AutoModelForCausalLM.from_pretrained`, with adapters merged in."""
        checkpoint.save_pretrained(self, folder)

    def push_to_hub(self, repo_id: str, *, private: bool = True, folder: str | Path | None = None) -> str:
        """Upload the model to the Hub, with the user's login, and return its address.

        folder   the folder to upload, such as final/ of a run with its model card; None writes and uploads the model
        """
        try:
            from huggingface_hub import HfApi
        except ImportError:
            raise missing("push_to_hub", "huggingface_hub", "train") from None
        api = HfApi()
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as made:
            if folder is None:
                folder = Path(made) / "model"
                self.save_pretrained(folder)
            api.upload_folder(repo_id=repo_id, folder_path=str(folder), commit_message=f"{self.name} by strop")
        return str(address)

    # ---- callbacks and loggers ----

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks; called in every process."""
        return self._callbacks

    @callbacks.setter
    def callbacks(self, callbacks: object) -> None:
        self._callbacks = checked_callbacks(callbacks)

    @property
    def loggers(self) -> list[Any]:
        """The loggers; called in the first process."""
        return self._loggers

    @loggers.setter
    def loggers(self, loggers: object) -> None:
        self._loggers = checked_loggers(loggers)

    def log(self, metrics: dict[str, float]) -> None:
        """Pass metrics to every logger. An error in a logger stops the run."""
        timed = {"time": self.state.seconds, **metrics}
        with contained():
            for logger in self._loggers if self.world.rank == 0 else ():
                logger.log(timed, step=self.state.step)

    def fire(self, event: str, *arguments: object) -> None:
        """Call the method of this name on every callback."""
        for callback in list(self._callbacks):
            with contained():
                getattr(callback, event)(self, *arguments)

    def stop(self, reason: str) -> None:
        """End train() after the current step."""
        self.stop_reason = reason

    # ---- inside ----

    @contextlib.contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        before, self.doing = self.doing, what
        try:
            yield
        finally:
            self.doing = before

    def _make_config(self, config: object, options: Json) -> Any:
        if config is not None and not isinstance(config, self.Config):
            raise TypeError(f"config must be a {self.Config.__name__}, found {type(config).__name__}")
        makers = [cls.__init__ for cls in type(self).__mro__ if cls is not object]  # type: ignore[misc]
        arguments = [
            p.name for make in makers for p in inspect.signature(make).parameters.values() if p.kind == p.KEYWORD_ONLY
        ]
        known = option_names(self.Config)
        for option in options:
            if option not in known and "." not in option:
                raise ValueError(unknown_option(option, [*known, *arguments], f" of {self.name}", self.Config))
        return (config if config is not None else self.Config()).changed(options)

    def _not_of_train(self, name: str) -> str:
        """Return the message for an argument that train() does not have."""
        arguments = inspect.signature(Trainer.__init__).parameters
        if name in arguments or name in option_names(self.Config):
            return f"train has no argument {name!r}; it is one of {self.name}: {self.name}(model=…, {name}=…)"
        hint = _trl.hint(name, self.name)
        return f"train has no argument {name!r}" + (f"; {hint}" if hint else "")

    def __getattr__(self, name: str) -> Any:
        """Raise the AttributeError for a missing attribute, with a hint if TRL's trainers have it."""
        if name in _trl.METHODS:
            raise AttributeError(f"{type(self).__name__} has no {name}; {_trl.METHODS[name]}")
        return object.__getattribute__(self, name)  # raises again, including an error from a property of this name

    def _shard(self) -> None:
        if not self.world.launched:
            raise ValueError("shard must be 'none' without torchrun, which starts the processes, found 'full'")
        dtype = None if self.config.run.autocast is None else torch.bfloat16
        self.policy.shard(dtype)
        if self.reference_model is not None:
            self.reference.policy.shard(dtype)

    def set_learning_rate(self, optimizer: torch.optim.Optimizer, optim: OptimConfig) -> float:
        """Set the current step's learning rate in every parameter group, and return it."""
        state = self.state
        total_steps = (state.total_steps or self.config.run.num_steps) - state.first_step
        learning_rate = learning_rate_at(state.step - state.first_step, total_steps, optim)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        return learning_rate


# ---- the schedule, and errors of an update ----


def can_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimiser's kernel skips the update if `found_inf` on the device is 1, as AMP uses it."""
    on_gpu = all(param.is_cuda for group in optimizer.param_groups for param in group["params"])
    return on_gpu and type(optimizer) is torch.optim.AdamW and all(group["fused"] for group in optimizer.param_groups)


def learning_rate_at(step: int, total_steps: int, config: OptimConfig) -> float:
    """Return the learning rate of a step, counted from 0.

    warm-up:  lr·(step + 1)/warmup_steps
    then, with p the fraction of the remaining steps that are done:
    linear    min + (lr − min)·(1 − p)          cosine    min + (lr − min)·(1 + cos πp)/2
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    if total_steps < 1:
        raise ValueError(f"num_steps must be given for schedule={config.schedule!r}, which ends there, found 0")
    done = min((step - config.warmup_steps) / max(total_steps - config.warmup_steps, 1), 1.0)
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.min_learning_rate + (config.learning_rate - config.min_learning_rate) * left


def not_finite(found: "Metrics", step: int) -> FloatingPointError:
    return FloatingPointError(
        f"loss {found.get('loss')} and gradient norm {found.get('grad_norm')} must be finite; the weights are those of "
        f"step {step}, before this update"
    )


def no_gradient(step: int) -> RuntimeError:
    """Return the error for a gradient of exactly 0 although an advantage is not 0."""
    return RuntimeError(
        "the gradient must not be exactly 0 for all parameters while an advantage is not 0: the model's forward may run "
        "without gradients (no_grad, detach), or give every token it sampled the probability 1; the weights are those of "
        f"step {step}, before this update"
    )


# ---- metrics of several processes ----


class Mean(NamedTuple):
    """A mean over the processes: Σ total / Σ number; left out if Σ number is 0."""

    total: Any
    number: float


class Sum(NamedTuple):
    value: Any


class Largest(NamedTuple):
    value: Any


KINDS = (Mean, Sum, Largest)


def on_host(values: Sequence[torch.Tensor]) -> list[float]:
    """Return one-element tensors as floats, with a single wait for the device."""
    if not values:
        return []
    return torch.cat([value.detach().reshape(1).to(values[0].device) for value in values]).tolist()


def gather_metrics(
    metrics: Mapping[str, object], extra: list[torch.Tensor], world: World
) -> tuple[dict[str, float], list[float]]:
    """Return the metrics of all processes as numbers, and `extra` as floats, with a single wait for the device.

    A plain number or tensor is the same in every process. It is ignored if another process has a Mean, Sum or Largest
    of that name.
    """
    flat = {(name, i): value for name, metric in metrics.items() for i, value in enumerate(_values(metric))}
    tensors = {key: value for key, value in flat.items() if isinstance(value, torch.Tensor)}
    values = on_host([*tensors.values(), *extra])
    flat |= zip(tensors, values, strict=False)
    here = {
        name: type(metric)(*(flat[name, i] for i in range(len(metric)))) if isinstance(metric, KINDS) else flat[name, 0]
        for name, metric in metrics.items()
    }
    everywhere = world.gathered(here) if world.size > 1 else [here]
    names = dict.fromkeys(name for one in everywhere for name in one)
    found = {name: _combined([one[name] for one in everywhere if name in one]) for name in names}
    return {name: value for name, value in found.items() if value is not None}, values[len(tensors) :]


def _values(metric: object) -> tuple[Any, ...]:
    return metric if isinstance(metric, KINDS) else (metric,)


def _combined(parts: list[Any]) -> Any:
    parts = [part for part in parts if isinstance(part, KINDS)] or parts
    if isinstance(parts[0], Largest):
        return max(part.value for part in parts)
    if isinstance(parts[0], Sum):
        return sum(part.value for part in parts)
    if not isinstance(parts[0], Mean):
        return parts[0]
    number = sum(part.number for part in parts)
    return sum(part.total for part in parts) / number if number else None
