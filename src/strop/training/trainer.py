"""`Trainer`: models, optimiser, one step. The run it is in, with its loop and its folder, is in `run.py`.

An algorithm says how rows become a batch and which loss that has:

    class MyAlgorithm(Trainer):
        Config = MyConfig                                    # a TrainerConfig
        def step_on(self, rows): return self.update([lambda: loss_of(part) for part in self.micro_batches(rows, lengths)])
        def train_step(self, rows): return self.run_step(lambda: self.step_on(rows))
"""

import contextlib
import inspect
import math
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch

from strop import _trl
from strop._contained import contained
from strop._install import missing
from strop._tensors import widest
from strop._types import Json, State
from strop.config import OptimConfig, TrainerConfig
from strop.config.base import option_names, unknown_option
from strop.data.batch import split
from strop.data.formats import PreparedRows, check_rows, prepared
from strop.data.inputs import check_tokenizer
from strop.data.tokenize import is_thread_safe
from strop.distributed import world
from strop.models import Policy, as_policy, load_model, one_thread, unwrapped
from strop.models.prepare import check_precision, prepared_model
from strop.models.scorer import as_scorer
from strop.training import checkpoint
from strop.training.callbacks import Callback
from strop.training.folder import flat, remove_run
from strop.training.logging import Logger
from strop.training.memory import LACKS, raise_explained
from strop.training.optimizers import keep_on_host, named_optimizer
from strop.training.run import (
    Metrics,
    Phases,
    TrainingRun,
    checked_callbacks,
    checked_loggers,
    gather_metrics,
    no_gradient,
    not_finite,
    on_host,
)
from strop.training.state import History, TrainState, rng_kept

if TYPE_CHECKING:
    from strop.moe import MoETransformer

    Model = torch.nn.Module | MoETransformer | Policy | str | Path

Row = TypeVar("Row")
MakeOptimizer = Callable[[list[Json]], torch.optim.Optimizer]
LEAN_TOKENS = 4  # times micro_batch_tokens, where a token takes a fraction of the memory: see `models.layers`
USERS_PHASES = ("reward",)  # functions of the user's run in them, with all of torch's threads
DROPOUT_PHASES = ("score", "forward")  # in which the model may draw


class Update(Metrics):
    """The metrics of an optimiser step, numbers or tensors; `parts` is what its loss functions returned, one each."""

    parts: list[Any]


class Trainer:
    """The base of the algorithms.

    model       a causal LM of transformers (also with peft adapters), strop's MoE, a module that returns logits, or a name
                as `strop.models.load_model` takes it
    ref_model   the frozen reference; a copy of the model (or the base below its adapters) if not given
    device      "cpu", "cuda", "cuda:1", "mps", "xpu"; None loads a name onto CUDA where there is one, and leaves a module where it is
    config      the algorithm's Config; **options change single fields of it, flat: learning_rate=1e-4
    logger      one logger or several
    callbacks   one object of strop.callbacks or several
    optimizer   a name, as the option of the config has it, or a function that makes an optimiser of parameter groups
    """

    Config: ClassVar[type[TrainerConfig]] = TrainerConfig
    any_format = False  # whether a dataset's rows may have any columns
    # which formats a dataset's rows may have; where they are given, `prepare` gets parts of a large dataset
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
            # in float32, whatever the files hold: bfloat16 weights lose small updates; below an adapter they may stay
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
        self.tokenizer = self.policy.tokenizer
        self.module: torch.nn.Module = unwrapped(self.policy.model)  # without what torch.compile put around it
        check_precision(self.module)
        self.world.make_same(self.module)
        self.run = TrainingRun(logger, callbacks, self.world)
        self.phases = Phases(self.policy.device)  # of the present step
        self.sum_dtype = widest(self.policy.device)  # of metrics' sums over tokens
        self.samples: list[Json] = []  # of the last step: {"prompt", "completion", "reward", …}
        self.reference: Any = None
        self.environments: list[Any] = []  # and tools of the user: a resumed run asks whether they are the same
        self.doing = ""  # besides steps: "evaluating", "saving"
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
        """Called by the constructor when the policy is there: `self.reference = self.policy.reference(ref_model)`, or as
        here none."""
        if ref_model is not None:
            raise ValueError(
                f"ref_model must be None, found a {type(ref_model).__name__}: {self.name} has no reference"
            )

    def prepare(self, rows: Sequence[object], name: str = "dataset") -> Sequence[Any]:
        """Return a dataset's rows, checked, in the form `step_on` takes.

        train() calls it once with all rows, before step 1. If the class says which `formats` it takes, it is called with
        parts of a large dataset instead, ahead of the steps that need them and perhaps in a thread.
        """
        return rows

    def check_columns(self, rows: Sequence[object], name: str) -> None:
        """Raise if a row of the dataset lacks a column or has a wrong value: a quick pass over all rows before step 1."""
        check_rows(rows, self.formats, where=name, what=self.name)

    def step_on(self, rows: list[object]) -> dict[str, float]:
        """Train on these rows of the dataset; returns the metrics."""
        raise NotImplementedError(f"{self.name} has no step_on")

    def evaluate_on(self, rows: list[object]) -> dict[str, float]:
        """Metrics of these rows, without training."""
        raise NotImplementedError(f"{self.name} has no evaluate_on")

    def extra_state(self) -> State:
        """An algorithm's own state for the checkpoint: tensors by name, and plain JSON values."""
        return {}, {}

    def load_extra_state(self, tensors: dict[str, torch.Tensor], values: Json) -> None:
        """Take back what `extra_state` gave."""

    def update(self, losses: Iterable[Callable[[], Any]], *, has_signal: bool = False) -> Update:
        """Do one optimiser step on the sum of the losses, each made by its function just before its backward.

        has_signal   there is something to learn from (an advantage that is not 0), so that a gradient of exactly 0 is an
                     error: of the model's forward, or of a setting of torch's

        A function returns the loss, or a tuple with the loss first, as those of strop.losses do. What is not finite never
        reaches the weights. On a GPU the optimiser is told so there, and the step's end, which waits for the device anyway,
        raises; until then loss and norm are tensors.
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
                if loss.requires_grad:  # else nothing of this part counts, as when every token is masked
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
                    self.phases.wanted_norm, unfit = grad_norm, unfit / (grad_norm != 0)  # x/0 is not finite
                self.optimizer.found_inf = self.phases.note_unfit(unfit)  # type: ignore[attr-defined]
            else:
                update.update(zip(update, on_host([*update.values()]), strict=True))
                if not all(abs(value) < float("inf") for value in update.values()):
                    raise not_finite(update, self.state.step)
                if has_signal and not update["grad_norm"]:
                    raise no_gradient(self.state.step)
            learning_rate = self.set_learning_rate(self.optimizer, self.config.optim)
            self.state.updates += 1  # before it: one that fails halfway has changed weights
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)  # a rollout that follows has their memory
        update.parts, update["learning_rate"] = parts, learning_rate
        return update

    def run_step(self, work: Callable[[], Metrics]) -> dict[str, float]:
        """Do `work` as one training step: events, phase times, tokens per second, loggers."""
        return self.run.step(self, work)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds within as the metric time/<name>. Code of the user's within leaves torch's settings alone."""
        alone = (self.policy.kind == "moe" or self.policy.device.type == "cuda") and name not in USERS_PHASES
        with self.phases.phase(name), one_thread() if alone else contextlib.nullcontext():
            if self.config.run.dropout and name in DROPOUT_PHASES:
                with self._own_generator():
                    yield
            else:
                yield

    @contextlib.contextmanager
    def _own_generator(self) -> Iterator[None]:
        """Draw dropout from (seed, step, rank, number), whatever the user's functions did to torch's generators."""
        self.phases.num_draws += 1
        device = self.policy.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self.seed_of(self.state.step, "dropout", self.world.rank, self.phases.num_draws))
            yield

    def seed_of(self, *parts: object) -> int:
        """A seed from the run's, the step and whatever else: a resumed run draws what the other would have."""
        return random.Random("/".join(map(str, (self.config.run.seed, *parts)))).getrandbits(62)

    def share(self, num_rows: int) -> range:
        """Which of a batch's rows this process takes; alone all of them."""
        return range(num_rows) if self.world.size == 1 else self.world.share(num_rows)

    def of_all(self, items: list[Row]) -> list[Row]:
        """The items of all processes, in the order of the batch's rows."""
        return items if self.world.size == 1 else self.world.concat(items)

    def count_tokens(self, num_tokens: int) -> None:
        """So many more tokens in this step; gives tokens_per_second."""
        self.phases.num_tokens += int(num_tokens)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.config.run.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.policy.device.type, torch.bfloat16)

    def micro_batches(self, rows: Sequence[Row], lengths: Sequence[int], *, lean: bool = False) -> list[list[Row]]:
        """The rows in parts of at most micro_batch_size rows and micro_batch_tokens tokens.

        lengths   tokens of each row; of a pair those of both its completions
        lean      nothing is kept for a backward, so that more tokens have room
        """
        run = self.config.run
        num_tokens = run.micro_batch_tokens * (LEAN_TOKENS if lean or self.policy.fuses else 1)
        return self._as_many(split(rows, lengths, run.micro_batch_size, num_tokens, padded=self.policy.pads))

    def eval_batches(self, rows: Sequence[Row], lengths: Sequence[int]) -> list[list[Row]]:
        """The rows of a dataset, however many, in parts no larger than training has them."""
        run = self.config.run
        size = run.micro_batch_size or run.batch_size
        return self._as_many(split(rows, lengths, size, run.micro_batch_tokens, padded=self.policy.pads))

    def _as_many(self, parts: list[list[Row]]) -> list[list[Row]]:
        """With empty parts until there are as many as in every other process, where a forward needs all of them."""
        if self.policy.shards is None:
            return parts
        return parts + [[] for _ in range(max(self.world.gathered(len(parts))) - len(parts))]

    # ---- for users ----

    @property
    def model(self) -> torch.nn.Module:
        return self.policy.model

    @property
    def functions(self) -> list[Any]:
        """The user's functions it calls: rewards, preferences."""
        return []

    @property
    def reference_model(self) -> torch.nn.Module | None:
        """The reference's own weights; None without a reference, or where it is the base below the adapter."""
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
        """Train on a dataset: a list of dicts, a `datasets.Dataset`, or a file or name as `load_rows` takes them.

        A new run seeds the global random generators with config.run.seed. After from_checkpoint, or after an
        interruption, training continues where it was. Ctrl-C and SIGTERM end it after the current step, with a checkpoint.

        num_steps, num_epochs   when to end, instead of the config's
        output_dir              the run folder: metrics, samples, checkpoints, and at the end the model
        resume                  continue from the newest checkpoint in output_dir, or begin if there is none
        overwrite               remove a run that is in output_dir first, and nothing else there
        allow_changes           with resume=True: go on although reward functions, environment, chat template or rows
                                have changed since the run began
        progress                True shows a progress bar and tables of samples, False nothing; None shows them on a
                                terminal, and elsewhere a line now and then
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
        if overwrite and output is not None:
            dataset = self.prepared(dataset)  # first: one with a mistake in it costs no run
            self.world.from_first(lambda: remove_run(output))
        return self.run.train(
            self, dataset, eval_dataset, num_steps, num_epochs, output, resume, allow_changes, progress
        )

    def prepared(self, dataset: object, name: str = "dataset") -> PreparedRows:
        """Return a dataset's rows for train() and evaluate(), loaded and checked; they do not do so again.

        Up to 1,000 rows are tokenised here. Of more, only the columns are checked here: rows are tokenised in a thread
        shortly before the step that needs them.
        """
        return prepared(
            dataset,
            self.prepare,
            name,
            any_format=self.any_format,
            check=self.check_columns if self.formats and not self.any_format else None,
            with_thread=is_thread_safe(self.tokenizer),
        )

    def evaluate(self, dataset: object) -> dict[str, float]:
        """Metrics of a dataset, as eval/<metric>. Changes neither weights nor random numbers."""
        rows = list(self.prepared(dataset, "eval_dataset"))
        with contained(), self._doing("evaluating"), self.policy.evaluating(), torch.no_grad(), rng_kept():
            try:
                metrics, _ = gather_metrics(self.evaluate_on(rows), [], self.world)
            except LACKS as error:
                raise_explained(error, self, "evaluate")
        return {f"eval/{name}": float(value) for name, value in metrics.items()}

    def save(self, path: str | Path, *, base: bool = True) -> None:
        """Write everything needed to continue into one file, atomically; several processes together write a folder.

        base   False leaves out the frozen weights of a model with adapters; from_checkpoint then needs them as model=
        """
        with self._doing("saving"):
            checkpoint.save(self, path, self.extra_state(), base)
        self.fire("on_save", str(path))

    @classmethod
    def from_checkpoint(cls, path: str | Path, model: Any = None, ref_model: Any = None, **arguments: Any) -> Self:
        """The trainer as it was saved. Plain modules and functions (reward_fn, logger, …) have to be passed in again."""
        saved = checkpoint.load(path, cls)
        if "env_id" in arguments:
            del arguments["env_id"]
            warnings.warn("env_id has no effect: a trainer has no environment registry", stacklevel=2)
        trainer = cls(**(arguments | saved.rebuilt(model, ref_model, arguments.get("tokenizer"))))
        saved.put(trainer)
        return trainer

    def save_pretrained(self, folder: str | Path) -> None:
        """Write model and tokenizer as `AutoModelForCausalLM.from_pretrained` reads them; adapters are merged in."""
        checkpoint.save_pretrained(self, folder)

    def push_to_hub(self, repo_id: str, *, private: bool = True, folder: str | Path | None = None) -> str:
        """Upload the model to the Hub, with the user's own login; its address.

        folder   what to upload, such as the final/ of a run with its model card; None uploads what `save_pretrained` writes
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

    # ---- of the run ----

    @property
    def state(self) -> TrainState:
        return self.run.state

    @property
    def history(self) -> History:
        return self.run.history

    @property
    def callbacks(self) -> list[Any]:
        return self.run.callbacks

    @callbacks.setter
    def callbacks(self, callbacks: object) -> None:
        self.run.callbacks = checked_callbacks(callbacks)

    @property
    def loggers(self) -> list[Any]:
        return self.run.loggers

    @loggers.setter
    def loggers(self, loggers: object) -> None:
        self.run.loggers = checked_loggers(loggers)

    @property
    def goes_on(self) -> bool:
        """Whether the next train() continues the run; False begins a new one with the weights as they are."""
        return self.run.goes_on

    @goes_on.setter
    def goes_on(self, goes_on: bool) -> None:
        self.run.goes_on = goes_on

    def log(self, metrics: dict[str, float]) -> None:
        """Give metrics to every logger. A logger that fails stops the run."""
        self.run.log(metrics)

    def fire(self, event: str, *arguments: object) -> None:
        """Call every callback's method of this name."""
        self.run.fire(self, event, *arguments)

    def stop(self, reason: str) -> None:
        """End train() after the present step."""
        self.run.stop_reason = reason

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
        """Raise the error for an attribute that is not there, with a hint where it is one of TRL's trainers."""
        if name in _trl.METHODS:
            raise AttributeError(f"{type(self).__name__} has no {name}; {_trl.METHODS[name]}")
        return object.__getattribute__(self, name)  # raises again, also what a property of this name raised

    def _shard(self) -> None:
        if not self.world.launched:
            raise ValueError("shard must be 'none' without torchrun, which starts the processes, found 'full'")
        dtype = None if self.config.run.autocast is None else torch.bfloat16
        self.policy.shard(dtype)
        if self.reference_model is not None:
            self.reference.policy.shard(dtype)

    def set_learning_rate(self, optimizer: torch.optim.Optimizer, optim: OptimConfig) -> float:
        """That of the present step, into every group."""
        state = self.state
        total_steps = (state.total_steps or self.config.run.num_steps) - state.first_step
        learning_rate = learning_rate_at(state.step - state.first_step, total_steps, optim)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        return learning_rate


# ---- the optimiser and its schedule ----


def make_optimizer(
    module: torch.nn.Module, config: OptimConfig, make: MakeOptimizer | None = None
) -> torch.optim.Optimizer:
    """Return the optimiser that the config names, or what `make` makes of the parameter groups.

    The schedule sets the learning rate of either. Norms and biases (parameters of fewer than two dimensions) have no weight
    decay.
    """
    params = [param for param in module.parameters() if param.requires_grad]
    if not params:
        raise ValueError("model must have parameters that require a gradient, found none")
    matrices = [param for param in params if param.ndim >= 2]
    others = [param for param in params if param.ndim < 2]
    groups = [
        {"params": group, "weight_decay": decay}
        for group, decay in ((matrices, config.weight_decay), (others, 0.0))
        if group
    ]
    if make is not None and not callable(make):
        raise TypeError(f"optimizer must make one of parameter groups, as torch.optim.SGD does, found {make!r:.60}")
    optimizer = named_optimizer(module, groups, config) if make is None else make(groups)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must return a torch.optim.Optimizer, found {type(optimizer).__name__}")
    if config.offload_optimizer and all(param.device.type == "cpu" for param in params):
        warnings.warn("offload_optimizer has no effect: the model is in the host's memory already", stacklevel=3)
    elif config.offload_optimizer:
        keep_on_host(optimizer)
    return optimizer


def can_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimiser's kernel leaves everything as it is where `found_inf` on the device is 1, as AMP has it do."""
    on_gpu = all(param.is_cuda for group in optimizer.param_groups for param in group["params"])
    return on_gpu and type(optimizer) is torch.optim.AdamW and all(group["fused"] for group in optimizer.param_groups)


def learning_rate_at(step: int, total_steps: int, config: OptimConfig) -> float:
    """The learning rate of step `step`, counted from 0.

    warm-up:  lr·(step + 1)/warmup_steps
    then, with p the share of the remaining steps that is done:
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
