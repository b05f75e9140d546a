"""Checkpoints: everything needed to continue a run, written atomically. No pickle is ever read.

One process writes one safetensors file (`checkpoint_file`); several processes write a folder of them
(`checkpoint_folder`). Any number of processes can read both.

Tensors    model/<parameter>   optim/<parameter>/<key>   ref/<parameter>   rng/…   extra/…   tokenizer/<file> (its bytes)
Metadata   "strop": JSON with the format, the algorithm, its config, how to rebuild the model, the state, the rest

The extension does not matter: "dpo.pt" is a safetensors file too. A checkpoint is not trusted. Before anything is
changed, its bytes are checked against the checksums, its header against a schema (`checkpoint_header`), and the models
it describes against its tensors (`rebuild`).
"""

import functools
import math
import os
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from strop import checksums
from strop._types import Json, Tokenizer
from strop.distributed import ALONE, World, put, whole, world
from strop.models import base_model
from strop.training import checkpoint_folder, rebuild
from strop.training.checkpoint_file import FORMAT, Tensors, read, sums_of, write
from strop.training.checkpoint_folder import remove
from strop.training.checkpoint_header import CALLBACKS, CheckpointError, check, check_same, is_number, shown
from strop.training.rebuild import check_tensors, spec_of
from strop.training.state import TrainState, check_rng, get_rng, set_rng

if TYPE_CHECKING:
    from strop.training.trainer import Trainer

__all__ = ["FORMAT", "CheckpointError", "Saved", "load", "read", "remove", "save", "save_pretrained", "write"]

PARTS = ("model", "optim", "ref", "rng", "extra", "tokenizer")
HOW = ("fused", "foreach", "capturable")  # optimiser options that depend on the device and are not restored
_sums: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, int]] = weakref.WeakKeyDictionary()  # cache of `base_sum`


# ---- saving ----


def save(trainer: "Trainer", path: str | Path, extra: tuple[Tensors, dict[str, object]], base: bool = True) -> None:
    """Write the trainer's state and the algorithm's `extra` state to a file, or with several processes to a folder.

    base   False leaves out the frozen weights below an adapter and stores their checksum. Several processes always
           write them; one process never writes quantised ones.
    """
    from strop import __version__

    world, reference = trainer.world, trainer.reference_model
    weights = trainer.module.state_dict(keep_vars=True)  # must come first: it makes FSDP put its shards in place
    base = base and trainer.config.quantize is None
    left_out = set() if base or world.size > 1 else base_names(trainer.module)
    tensors = _under("model", {name: tensor for name, tensor in weights.items() if name not in left_out})
    if reference is not None:
        tensors |= _under("ref", reference.state_dict(keep_vars=True))
    optim_tensors, optim_values = optimizer_state(trainer)
    rng_tensors, rng_values = get_rng()
    rank = f"/{world.rank}" if world.size > 1 else ""
    tensors |= _under("optim", optim_tensors) | _under(f"extra{rank}", extra[0]) | _under(f"rng{rank}", rng_tensors)
    if world.is_first:
        tensors |= _under("tokenizer", rebuild.tokenizer_files(trainer.tokenizer))
    header: Json = {
        "version": __version__,
        "algorithm": trainer.name,
        "config": trainer.config.to_dict(),
        "model": rebuild.describe(trainer.module),
        "tokenizer": rebuild.tokenizer_kind(trainer.tokenizer),
        "state": trainer.state.to_dict(),
        "optim": optim_values,
        "callbacks": [[type(callback).__name__, callback.state_dict()] for callback in trainer.callbacks],
    }
    if left_out:
        header["base"] = base_sum(trainer.module)
    if reference is not None:
        header["ref"] = rebuild.describe(reference)
    if world.size == 1:
        write(path, tensors, header | {"rng": rng_values, "extra": extra[1]})
    else:
        header |= {"rng": world.gathered(rng_values), "extra": world.gathered(extra[1])}
        checkpoint_folder.write(Path(path), tensors, header, world)


def base_names(model: torch.nn.Module) -> set[str]:
    """Return the names of the frozen parameters below an adapter; none without an adapter."""
    if base_model(model) is model:
        return set()
    return {name for name, param in model.named_parameters(remove_duplicate=False) if not param.requires_grad}


def base_sum(model: torch.nn.Module) -> int:
    """Return a checksum of the names, dtypes and values of the frozen weights below the adapter.

    It is cached until one of the weights changes.
    """
    params: Tensors = {name: model.get_parameter(name) for name in sorted(base_names(model))}
    state = tuple((name, id(param), param._version) for name, param in params.items())
    kept = _sums.get(model)
    if kept is None or kept[0] != state:
        sums = {name: sums_of({name: whole(param)})[name] for name, param in params.items()}  # one at a time in memory
        listed = [f"{name} {params[name].dtype} {value:08x}" for name, value in sums.items()]
        kept = _sums[model] = state, checksums.checksum("\n".join(listed).encode())
    return kept[1]


def optimizer_state(trainer: "Trainer") -> tuple[Tensors, Json]:
    """Return the optimiser's tensors, named <parameter>/<key>, and its numbers and group options as JSON."""
    names = {id(param): name for name, param in trainer.module.named_parameters()}
    tensors: Tensors = {}
    values: Json = {"params": {}, "groups": []}
    for group in trainer.optimizer.param_groups:
        values["groups"].append({key: value for key, value in group.items() if key != "params" and _is_plain(value)})
        for param in group["params"]:
            name = names[id(param)]
            for key, value in trainer.optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{name}/{key}"] = value
                elif _is_plain(value):
                    values["params"].setdefault(name, {})[key] = value
                else:
                    found = type(value).__name__
                    raise TypeError(f"optimizer state {key!r} must be a tensor or a number, found {found}")
    return tensors, values


# ---- loading ----


@dataclass
class Saved:
    """A checkpoint that was read and whose header is valid.

    tensors         all tensors; the large ones of a folder are on the meta device until `fill` reads them
    num_processes   number of processes that wrote it
    fill            fills tensors, given by name, with the saved values; this process may have shards of them
    """

    path: Path
    header: Json
    tensors: Tensors
    config: Any
    num_processes: int
    fill: Callable[[Tensors], None]

    def rebuilt(self, model: torch.nn.Module, ref_model: object, tokenizer: Tokenizer | None) -> Json:
        """Return arguments for the trainer's constructor: the given ones, and the others rebuilt from the file."""
        header, path = self.header, self.path
        if self.config.lora is not None:
            rebuild.check_lora(self.config.lora, self.below("model"), path)
        if tokenizer is None:
            tokenizer = rebuild.tokenizer_from(header["tokenizer"], self.below("tokenizer"), path)
        if model is None and "base" in header:
            adapters = header["model"].get("adapters", {}).values()
            named = [one["base_model_name_or_path"] for one in adapters if one.get("base_model_name_or_path")]
            raise CheckpointError(
                f"model must be given: {path} holds the adapter without the weights below it, which are those of "
                f"{shown(named[0]) if named else 'a ' + header['model']['class']}; from_checkpoint(path, model=…) takes a "
                f"name too"
            )
        if model is None:
            model = rebuild.model_from(header["model"], self.below("model"), path, "model", self.config.lora)
        if ref_model is None and "ref" in header and header["ref"]["kind"] != "plain":
            ref_model = rebuild.model_from(header["ref"], self.below("ref"), path, "ref_model")
        # without torchrun there is one process, which has all weights
        config = self.config if world().launched else self.config.changed({"shard": "none"})
        return {"model": model, "ref_model": ref_model, "tokenizer": tokenizer, "config": config}

    def put(self, trainer: "Trainer") -> None:
        """Restore the trainer to this state. All checks run before the first change."""
        header, path = self.header, self.path
        if odd := [name for name in self.tensors if name.partition("/")[0] not in PARTS]:
            raise CheckpointError(f"{path} must hold tensors of {', '.join(PARTS)}, found {shown(odd[0])}")
        left_out = base_names(trainer.module) if "base" in header else set()
        if "base" in header and base_sum(trainer.module) != header["base"]:
            raise CheckpointError(
                f"model must have the weights that the adapter of {path} was trained on, found others, or another dtype"
            )
        modules = {"model": trainer.module}
        if trainer.reference_model is not None:
            if "ref" not in header:
                raise CheckpointError(f"{path} holds no reference weights, but the trainer has a reference of its own")
            modules["ref"] = trainer.reference_model
        own = {part: module.state_dict() for part, module in modules.items()}
        own["model"] = {name: tensor for name, tensor in own["model"].items() if name not in left_out}
        for part in modules:
            specs = {name: spec_of(tensor) for name, tensor in own[part].items()}
            check_tensors(specs, self.below(part), path, "model" if part == "model" else "ref_model")
        groups = check_optimizer(trainer, self.below("optim"), header["optim"], path)
        rng = self.below("rng")
        try:
            check_rng(rng, header["rng"])
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from None
        callbacks = _matched(trainer, header["callbacks"], path)

        names = {param: name for name, param in trainer.module.named_parameters()}
        targets = {
            f"optim/{names[param]}/{key}": value
            for _, _, states in groups
            for param, state in states.items()
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        }
        for part in modules:
            targets |= _under(part, own[part])
        self.fill(targets)
        for part, module in modules.items():
            module.load_state_dict(own[part], strict=not left_out)
        for group, options, states in groups:
            group.update(options)
            trainer.optimizer.state.update(states)
        trainer.state, trainer.goes_on = TrainState(**header["state"]), True
        _take(path, "extra", lambda: trainer.load_extra_state(self.below("extra"), header["extra"]))
        for callback, state in callbacks:
            _take(path, type(callback).__name__, functools.partial(callback.load_state_dict, state))
        set_rng(rng, header["rng"])
        if trainer.world.rank >= self.num_processes:  # no process of this rank saved its generator
            torch.manual_seed(trainer.seed_of(trainer.state.step, "process", trainer.world.rank))

    def below(self, prefix: str) -> Tensors:
        """Return the tensors whose names begin with `prefix`/, by the rest of their names."""
        return {name.removeprefix(prefix + "/"): t for name, t in self.tensors.items() if name.startswith(prefix + "/")}


def load(path: str | Path, cls: type["Trainer"]) -> Saved:
    """Return the checkpoint at `path`, which must be one of this class of trainer."""
    return _of_class(cls, Path(path), *_contents(Path(path), world()))


def _contents(path: Path, world: World) -> tuple[Json, Tensors, int, Callable[[Tensors], None]]:
    """Return header, tensors, number of processes that wrote them, and `fill`. If one process fails, all fail."""
    if path.suffix or not path.is_dir():
        header, tensors = world.together(lambda: read(path), raises=CheckpointError)
        return header, tensors, 1, functools.partial(_fill, tensors)
    header, tensors = world.together(lambda: checkpoint_folder.read(path, world), raises=CheckpointError)
    num_processes = len(header["rng"])
    rank = world.rank if world.rank < num_processes else 0
    for part in ("rng", "extra"):  # keep the entries of this rank, renamed as in a single-file checkpoint
        header[part] = header[part][rank]
        every = {name: tensors.pop(name) for name in [*tensors] if name.startswith(f"{part}/")}
        own = f"{part}/{rank}/"
        tensors |= {f"{part}/{name.removeprefix(own)}": t for name, t in every.items() if name.startswith(own)}
    return header, tensors, num_processes, functools.partial(checkpoint_folder.fill, path, header["aliases"])


def _of_class(cls: type["Trainer"], path: Path, header: Json, tensors: Tensors, *more: Any) -> Saved:
    """Return the checkpoint with its config, in which every option must be present and of its own type."""
    if header["algorithm"] != cls.__name__:
        raise CheckpointError(f"{path} must be a checkpoint of {cls.__name__}, found one of {header['algorithm']:.80}")
    try:
        config = cls.Config.from_options(header["config"])
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: config: {error}") from None
    check_same(header["config"], config.to_dict(), path, "config")
    return Saved(path, header, tensors, config, *more)


def _fill(tensors: Tensors, targets: Tensors) -> None:
    for name, target in targets.items():
        put(target, tensors[name])


def _take(path: Path, what: str, take: Callable[[], object]) -> None:
    """Call `take`, which restores the state of a user's class; turn any error into a CheckpointError."""
    try:
        take()
    except Exception as error:
        raise CheckpointError(f"{path}: the state of {what} does not fit: {type(error).__name__}: {error}") from error


def _matched(trainer: "Trainer", saved: list[Any], path: Path) -> list[tuple[Any, Json]]:
    """Return pairs of a trainer's callback and the saved state of one with the same class name, each used once."""
    left, found = list(saved), []
    for callback in trainer.callbacks:
        name = type(callback).__name__
        entry = next((entry for entry in left if entry[0] == name), None)
        if entry is None:
            continue
        left.remove(entry)
        if type(callback).__module__ == "strop.training.callbacks" and name in CALLBACKS:
            check(entry[1], CALLBACKS[name], path, f"the state of {name}")
        found.append((callback, entry[1]))
    return found


# ---- the optimiser ----


def check_optimizer(
    trainer: "Trainer", tensors: Tensors, values: Json, path: Path
) -> list[tuple[Json, Json, dict[Any, Json]]]:
    """Return, for each group of the optimiser: the group, its saved options, and unfilled states of its parameters."""
    names = {id(param): name for name, param in trainer.module.named_parameters()}
    groups = trainer.optimizer.param_groups
    if len(groups) != len(values["groups"]):
        raise CheckpointError(f"{path} must have {len(groups)} parameter groups, found {len(values['groups'])}")
    entries: dict[str, Json] = {name: dict(entry) for name, entry in values["params"].items()}
    for key, tensor in tensors.items():
        name, _, leaf = key.rpartition("/")
        if leaf in entries.setdefault(name, {}):
            raise CheckpointError(f"{path} must hold {leaf!r:.40} of {name!r:.80} once, found a tensor and a value")
        entries[name][leaf] = tensor
    found = []
    for number, (group, options) in enumerate(zip(groups, values["groups"], strict=True)):
        options = _checked_options(group, options, path, f"optim.groups[{number}]")
        states = {}
        for param in group["params"]:
            entry = entries.pop(name := names[id(param)], {})
            if entry and isinstance(trainer.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
                _check_adam(entry, param, bool(options.get("amsgrad")), path, f"the optimiser's state of {name!r:.80}")
            states[param] = {
                key: _room(value, param, group, trainer.optimizer) if isinstance(value, torch.Tensor) else value
                for key, value in entry.items()
            }
        found.append((group, options, states))
    if entries:
        raise CheckpointError(f"{path} has optimiser state of {min(entries)!r:.80}, which is not trained here")
    return found


def _room(value: torch.Tensor, param: torch.Tensor, group: Json, optimizer: Any) -> torch.Tensor:
    """Return a tensor to hold the optimiser's saved `value`: sharded as the parameter if it has the parameter's shape,
    and in paged memory if the optimiser uses it."""
    if value.shape == param.shape:
        if getattr(optimizer, "is_paged", False):  # an optimiser of bitsandbytes
            return optimizer.get_state_buffer(param, dtype=value.dtype)
        return torch.zeros_like(param.detach(), dtype=value.dtype)
    moves_all = group.get("capturable") or group.get("fused")  # otherwise torch keeps step counts on the CPU
    return torch.zeros(value.shape, dtype=value.dtype, device=param.device if value.ndim or moves_all else "cpu")


def _checked_options(group: Json, options: Json, path: Path, where: str) -> Json:
    """Return a group's saved options, except those of the device. Raise unless they are plain and fit the group."""
    taken = {key: value for key, value in options.items() if key not in HOW}
    for key, value in taken.items():
        if key == "params" or not _is_plain(value):
            raise CheckpointError(
                f"{path}: {where} must have options of plain values, found {key!r:.60}: {shown(value)}"
            )
        # an option that the group lacks may belong to a scheduler that the user creates later
        if key in group and not _fits(value, group[key], below=1.0 if key == "betas" else math.inf):
            raise CheckpointError(f"{path}: {where}.{key} must be as {group[key]!r:.40} is, found {shown(value)}")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in taken.items()}


def _fits(value: Any, own: Any, below: float) -> bool:
    """Return whether `value` fits the group's `own` value.

    A number must be below `below`, and not negative unless `own` is. Lists are compared by item, others by equality.
    """
    if isinstance(own, (list, tuple)):
        same_length = isinstance(value, list) and len(value) == len(own)
        return same_length and all(_fits(a, b, below) for a, b in zip(value, own, strict=True))
    if not is_number(own):
        return value == own and type(value) is type(own)
    return is_number(value) and (0 <= value < below or own < 0)


def _check_adam(entry: Json, param: torch.Tensor, amsgrad: bool, path: Path, name: str) -> None:
    """Raise unless the entry has a step count and the moments, each in the parameter's shape."""
    step = entry.get("step")
    counts = step.dtype if isinstance(step, torch.Tensor) and step.is_floating_point() else torch.float32
    moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if amsgrad else 2]
    specs = {"step": (torch.Size(), counts), **dict.fromkeys(moments, spec_of(param))}
    check_tensors(specs, entry, path, name)
    if not 0 <= float(entry["step"]) < math.inf:
        raise CheckpointError(f"{path} must hold a finite count of steps in {name}, found {float(entry['step'])}")


# ---- a folder of checkpoints ----


def all_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, files and folders, oldest first."""
    found = [path for path in folder.glob("step-*") if path.suffix == ".safetensors" or path.is_dir()]
    return sorted(found, key=lambda path: (path.stem, path.lstat().st_mtime))


def newest_good(folder: Path, cls: type["Trainer"], world: World) -> Saved | None:
    """Return the newest undamaged checkpoint in the folder; None if the folder has no checkpoint."""
    paths = world.from_first(lambda: all_in(folder)[::-1])
    for path in paths:
        try:
            found = _contents(path, world)
        except (CheckpointError, OSError) as error:
            if world.is_first:
                warnings.warn(f"{error}; taking the one before", stacklevel=2)
        else:
            return _of_class(cls, path, *found)
    if paths:  # beginning again would delete the run's metrics, so the user must decide
        raise CheckpointError(
            f"none of the {len(paths)} checkpoints in {folder} can be read; without them a run begins anew"
        )
    return None


def is_whole(path: Path) -> bool:
    """Return whether a checkpoint's bytes match its checksums and its header is valid."""
    try:
        _contents(path, ALONE)
    except (CheckpointError, OSError):
        return False
    return True


def stamp(path: Path) -> tuple[int, ...]:
    """Return sizes and times of a checkpoint's files, to detect changes without reading them."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return tuple(n for file in files if file.exists() for n in (file.stat().st_size, file.stat().st_mtime_ns))


def remove_unfinished(run: Path) -> None:
    """Remove the partly written files that a killed process left in a run folder; put back a replaced checkpoint."""
    for path in (run / "checkpoints").glob(".step-*.tmp"):
        remove(path)
    for path in (run / "checkpoints").glob(".step-*.old"):  # an old checkpoint folder whose replacement was interrupted
        name = path.with_name(path.name.removeprefix(".").removesuffix(".old"))
        if name.exists():
            remove(path)
        else:
            os.replace(path, name)
    for path in run.glob(".final.*"):
        shutil.rmtree(path)


def save_final(trainer: "Trainer", folder: Path) -> None:
    """Write the final model. Adapters go to folder/adapter in peft's format; lora.merge adds the merged model."""
    adapted = base_model(trainer.module) is not trainer.module
    if adapted:
        save_pretrained(trainer, folder / "adapter", merged=False)
    if not adapted or (trainer.config.lora is not None and trainer.config.lora.merge):
        save_pretrained(trainer, folder)


def save_pretrained(trainer: "Trainer", folder: str | Path, merged: bool = True) -> None:
    """Write model and tokenizer to a folder for `AutoModelForCausalLM.from_pretrained`, with checksums of its files.

    Sharded weights are gathered one by one into the host memory of the first process, which writes them.
    merged   False writes only the adapters, in peft's format
    """
    shards, world = trainer.policy.shards, trainer.world
    module = trainer.module if shards is None else shards.on_host(world.is_first)
    world.from_first(lambda: _write_pretrained(module, shards is not None, trainer.tokenizer, Path(folder), merged))


def _write_pretrained(
    module: torch.nn.Module, is_copy: bool, tokenizer: Tokenizer | None, folder: Path, merged: bool
) -> None:
    """Write the files to a temporary folder, then move them into place, checksums first.

    If a kill leaves a mixture of old and new files, the checksums do not match them.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as made:
        inner = Path(made) / "model"
        rebuild.write_model(module, inner, is_copy=is_copy, merged=merged)
        if tokenizer is not None and hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(inner)
        checksums.write(inner)
        folder.mkdir(exist_ok=True)
        for file in sorted(inner.iterdir(), key=lambda file: file.name != checksums.FILE):
            os.replace(file, folder / file.name)


# ---- small things ----


def _under(prefix: str, tensors: Tensors) -> Tensors:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
