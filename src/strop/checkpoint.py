"""Checkpoints: one safetensors file with everything needed to go on, written atomically. No pickle is ever read.

Tensors    model/<parameter>   optim/<parameter>/<key>   ref/<parameter>   rng/…   extra/…   tokenizer/<file> (its bytes)
Metadata   "strop": JSON with the format, the algorithm, its config, how to rebuild the model, the state, the rest

The extension does not matter: "dpo.pt" is a safetensors file too.
"""

import contextlib
import json
import os
import shutil
import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from strop import rebuild
from strop.algorithms.state import TrainState, get_rng, set_rng

if TYPE_CHECKING:
    from strop.algorithms.trainer import Trainer

FORMAT = 1
HOW = ("fused", "foreach", "capturable")  # options of an optimiser that belong to the device it runs on, not to the run
Tensors = dict[str, torch.Tensor]
AnyTrainer = TypeVar("AnyTrainer", bound="Trainer")


class CheckpointError(ValueError):
    """A file that is no checkpoint, or not one for this trainer."""


# ---- saving ----


def save(trainer: "Trainer", path: str | Path) -> None:
    """Write the trainer's whole state to `path`."""
    from strop import __version__

    optim_tensors, optim_values = optimizer_state(trainer)
    extra_tensors, extra_values = trainer.extra_state()
    rng_tensors, rng_values = get_rng()
    tensors = {
        **_under("model", trainer.module.state_dict()),
        **_under("optim", optim_tensors),
        **_under("extra", extra_tensors),
        **_under("rng", rng_tensors),
        **_under("tokenizer", rebuild.tokenizer_files(trainer.tokenizer)),
    }
    header: dict[str, Any] = {
        "format": FORMAT,
        "version": __version__,
        "algorithm": trainer.name,
        "config": trainer.config.to_dict(),
        "model": rebuild.describe(trainer.module),
        "tokenizer": rebuild.tokenizer_class(trainer.tokenizer),
        "state": trainer.state.to_dict(),
        "optim": optim_values,
        "rng": rng_values,
        "extra": extra_values,
        "callbacks": [[type(callback).__name__, callback.state_dict()] for callback in trainer.callbacks],
    }
    if (reference := trainer.reference_model) is not None:
        tensors |= _under("ref", reference.state_dict())
        header["ref"] = rebuild.describe(reference)
    write(path, tensors, header)


def write(path: str | Path, tensors: Tensors, header: dict[str, Any]) -> None:
    """Beside the file first, then in its place: a kill at any moment leaves the old one or the new one, whole."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors, aliases = _without_shared(tensors)
    metadata = {"strop": json.dumps({**header, "aliases": aliases}, allow_nan=False)}
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            save_file(tensors, unfinished, metadata=metadata)
        except SafetensorError as error:  # a full disk, in most cases
            raise OSError(f"{path} could not be written: {error}") from error
        _flush(unfinished)
        os.replace(unfinished, path)
        _flush(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def optimizer_state(trainer: "Trainer") -> tuple[Tensors, dict[str, Any]]:
    """Tensors by parameter and key; numbers, and the groups' options, as JSON."""
    names = {id(param): name for name, param in trainer.module.named_parameters()}
    tensors: Tensors = {}
    values: dict[str, Any] = {"params": {}, "groups": []}
    for group in trainer.optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        values["groups"].append({key: value for key, value in options.items() if _is_plain(value)})
        for param in group["params"]:
            name = names[id(param)]
            for key, value in trainer.optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{name}/{key}"] = value
                elif _is_plain(value):
                    values["params"].setdefault(name, {})[key] = value
                else:
                    raise TypeError(
                        f"optimizer state {key!r} must be a tensor or a number, found {type(value).__name__}"
                    )
    return tensors, values


# ---- loading ----


def restore(cls: type["Trainer"], path: str | Path, model: Any, ref_model: Any, arguments: dict[str, Any]) -> "Trainer":
    """A new trainer of class `cls` in the state of the checkpoint."""
    header, tensors = read(path)
    check_algorithm(header, cls.__name__, path)
    arguments = dict(arguments)
    if arguments.get("tokenizer") is None:
        arguments["tokenizer"] = rebuild.tokenizer_from(header["tokenizer"], _below("tokenizer", tensors))
    config = cls.Config.from_options(header["config"])
    if model is None:
        with_adapter = config.lora is None  # else the constructor puts it on
        model = rebuild.model_from(header["model"], _below("model", tensors), path, "model", with_adapter=with_adapter)
    if ref_model is None and "ref" in header and header["ref"]["kind"] != "plain":
        ref_model = rebuild.model_from(header["ref"], _below("ref", tensors), path, "ref_model")
    trainer = cls(model=model, ref_model=ref_model, config=config, **arguments)
    _load(trainer, header, tensors, path)
    return trainer


def load(trainer: "Trainer", path: str | Path) -> None:
    """Bring a trainer, made as the saved one was, into the state of the checkpoint."""
    header, tensors = read(path)
    check_algorithm(header, trainer.name, path)
    _load(trainer, header, tensors, path)


def _load(trainer: "Trainer", header: dict[str, Any], tensors: Tensors, path: str | Path) -> None:
    load_weights(trainer.module, _below("model", tensors), path, "model")
    if (reference := trainer.reference_model) is not None:
        if "ref" not in header:
            raise CheckpointError(f"{path} holds no reference weights, but the trainer has a reference of its own")
        load_weights(reference, _below("ref", tensors), path, "ref_model")
    load_optimizer(trainer, _below("optim", tensors), header["optim"], path)
    trainer.load_extra_state(_below("extra", tensors), header["extra"])
    trainer.state = TrainState(**header["state"])
    saved = list(header["callbacks"])
    for callback in trainer.callbacks:
        found = next((entry for entry in saved if entry[0] == type(callback).__name__), None)
        if found is not None:
            saved.remove(found)
            callback.load_state_dict(found[1])
    trainer.goes_on = True
    set_rng(_below("rng", tensors), header["rng"])


def load_weights(module: torch.nn.Module, weights: Tensors, path: str | Path, name: str) -> None:
    """Copy the weights into the module, whose names, shapes and dtypes must be theirs."""
    own = module.state_dict()
    if missing := sorted(own.keys() ^ weights.keys()):
        where = "the checkpoint" if missing[0] in weights else name
        raise CheckpointError(f"{path} must hold the weights of {name}, found {missing[0]!r} only in {where}")
    for key, weight in weights.items():
        if own[key].shape != weight.shape or own[key].dtype != weight.dtype:
            found, wanted = (f"{list(t.shape)} {t.dtype}" for t in (weight, own[key]))
            raise CheckpointError(f"{path} must hold {key!r} of {name} as {wanted}, found {found}")
    module.load_state_dict(weights)


def load_optimizer(trainer: "Trainer", tensors: Tensors, values: dict[str, Any], path: str | Path) -> None:
    names = {id(param): name for name, param in trainer.module.named_parameters()}
    groups = trainer.optimizer.param_groups
    if len(groups) != len(values["groups"]):
        raise CheckpointError(f"{path} must have {len(groups)} parameter groups, found {len(values['groups'])}")
    known = {names[id(param)] for group in groups for param in group["params"]}
    by_name: dict[str, dict[str, Any]] = {name: dict(entry) for name, entry in values["params"].items()}
    for key, tensor in tensors.items():
        name, _, leaf = key.rpartition("/")
        by_name.setdefault(name, {})[leaf] = tensor
    if extra := sorted(by_name.keys() - known):
        raise CheckpointError(f"{path} has optimiser state of {extra[0]!r}, which is not trained here")
    for group, options in zip(groups, values["groups"], strict=True):
        options = {key: value for key, value in options.items() if key not in HOW}
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in options.items()})
        moves_all = group.get("capturable") or group.get("fused")  # else torch keeps counts of steps on the CPU
        for param in group["params"]:
            entry = by_name.get(names[id(param)], {})
            trainer.optimizer.state[param] = {
                key: value.to(param.device) if isinstance(value, torch.Tensor) and (value.ndim or moves_all) else value
                for key, value in entry.items()
            }


def read(path: str | Path) -> tuple[dict[str, Any], Tensors]:
    """The header and the tensors of a checkpoint; a CheckpointError says what else the file is."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    header = read_header(path)
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    return header, tensors | {alias: tensors[name] for alias, name in header["aliases"].items()}


def read_header(path: str | Path) -> dict[str, Any]:
    """The JSON of a checkpoint, without its tensors."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    size = path.stat().st_size
    with path.open("rb") as file:  # 8 bytes: the length of the JSON that follows
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        raw = file.read(length) if 8 + length <= size else b""
    try:
        parsed = json.loads(raw)
        end = max((entry["data_offsets"][1] for name, entry in parsed.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path} {_what_else(start, size, raw)}") from None
    if "strop" not in parsed.get("__metadata__", {}):
        raise CheckpointError(f"{path} is a safetensors file, but not a checkpoint of strop")
    if 8 + length + end != size:
        raise CheckpointError(f"{path} is cut off: it must have {8 + length + end} bytes, found {size}")
    header = json.loads(parsed["__metadata__"]["strop"])
    if header["format"] != FORMAT:
        raise CheckpointError(f"{path} must be of format {FORMAT}, found {header['format']}: another version wrote it")
    return header


def _what_else(start: bytes, size: int, raw: bytes) -> str:
    """What a file without a readable header is; a length in its place has zeros in its upper bytes."""
    is_length = len(start) == 8 and start[5:] == bytes(3)
    is_zip, is_new = start[:4] == b"PK\x03\x04", start[:3] in (b"\x80\4\x95", b"\x80\5\x95")
    is_old = start[:2] in (b"\x80\2", b"\x80\3") and not is_length
    if is_zip or is_new or is_old:
        return "is a pickle, as torch.save writes it: strop reads only its own checkpoints, and never runs code from a file"
    if is_length and not raw and start != bytes(8):
        return f"is cut off within its header: it holds {size} bytes"
    return f"is no safetensors file: it holds {size} bytes and no checkpoint of strop"


# ---- a folder of checkpoints ----


def newest_good(folder: Path) -> Path | None:
    """The newest checkpoint of the folder that can be read; None if it has none at all."""
    import warnings

    paths = sorted(folder.glob("step-*.safetensors"), reverse=True)
    for path in paths:
        try:
            read_header(path)
        except CheckpointError as error:
            warnings.warn(f"{error}; taking the one before", stacklevel=2)
        else:
            return path
    if paths:  # to begin again would cut the run's metrics to nothing: for its owner to decide
        raise CheckpointError(
            f"none of the {len(paths)} checkpoints in {folder} can be read; without them a run begins anew"
        )
    return None


def remove_unfinished(run: Path) -> None:
    """What a kill left half written in a run folder, which would stay for ever and may be large."""
    for path in (run / "checkpoints").glob(".step-*.tmp"):
        path.unlink()
    for path in run.glob(".final.*"):
        shutil.rmtree(path)


def save_pretrained(trainer: "Trainer", folder: str | Path) -> None:
    """Model and tokenizer in a folder `AutoModelForCausalLM.from_pretrained` opens; written whole or not at all."""
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as made:
        inner = Path(made) / "model"
        rebuild.write_model(trainer.module, inner)
        if trainer.tokenizer is not None and hasattr(trainer.tokenizer, "save_pretrained"):
            trainer.tokenizer.save_pretrained(inner)
        folder.mkdir(exist_ok=True)
        for file in inner.iterdir():
            os.replace(file, folder / file.name)


# ---- small things ----


def check_algorithm(header: dict[str, Any], name: str, path: str | Path) -> None:
    """A CheckpointError if another algorithm wrote it."""
    if header["algorithm"] != name:
        raise CheckpointError(f"{path} must be a checkpoint of {name}, found one of {header['algorithm']}")


def _under(prefix: str, tensors: Tensors) -> Tensors:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def _below(prefix: str, tensors: Tensors) -> Tensors:
    return {name.removeprefix(prefix + "/"): t for name, t in tensors.items() if name.startswith(prefix + "/")}


def _without_shared(tensors: Tensors) -> tuple[Tensors, dict[str, str]]:
    """Each tensor once, on the CPU; `aliases` says which names (tied weights) are the same tensor."""
    kept: Tensors = {}
    aliases: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device))
        if tensor.numel() and key in seen:
            aliases[name] = seen[key]
            continue
        seen[key] = name
        kept[name] = tensor.detach().cpu().contiguous()
        if kept[name].untyped_storage().nbytes() != kept[name].nbytes:  # a view of something larger
            kept[name] = kept[name].clone()
    return kept, aliases


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _flush(path: Path) -> None:
    """To the disk itself: a file's content, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems cannot flush a folder
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
