"""The checkpoint folder that several processes write together, in the layout of torch.distributed.checkpoint.

shard-00001-….safetensors   the rows of the tensors that the first process wrote, and so on
header.json                 the header of a single-file checkpoint, but `rng` and `extra` have one entry per process
checksums.json              the checksums of all other files

The files are written to a temporary folder beside the final one, which is renamed when it is complete.
"""

import json
import os
import shutil
from pathlib import Path

import torch

from strop import checksums
from strop._types import Json
from strop.checksums import of_file
from strop.distributed import World, load_tensors, save_tensors, shards_in
from strop.training.checkpoint_file import (
    FORMAT,
    Tensors,
    flush_folder,
    opened,
    parse_header,
    with_aliases,
    without_shared,
)
from strop.training.checkpoint_header import CheckpointError, check_header

HEADER = "header.json"
READ_AT_ONCE = ("rng", "extra", "tokenizer")  # small parts


# ---- writing ----


def write(path: Path, tensors: Tensors, header: Json, world: World) -> None:
    """Write the folder; every process calls this with its own tensors. The first process's header is used.

    If a process is killed meanwhile, the old checkpoint is left, or none.
    """
    unfinished = path.with_name(f".{path.name}.{world.from_first(os.getpid)}.tmp")
    world.from_first(lambda: unfinished.mkdir(parents=True))
    tensors, aliases = without_shared(tensors)
    header = {"format": FORMAT, **header, "aliases": aliases}
    try:
        save_tensors({name: tensor.detach() for name, tensor in tensors.items()}, unfinished)
        mine = sorted(unfinished.glob(f"shard-{world.rank + 1:05d}-*"))
        sums = dict(world.concat([(file.name, f"{of_file(file):08x}") for file in mine]))
        world.from_first(lambda: _finish(unfinished, path, header, sums))
    finally:
        if world.is_first:
            shutil.rmtree(unfinished, ignore_errors=True)


def _finish(unfinished: Path, path: Path, header: Json, sums: dict[str, str]) -> None:
    text = json.dumps(header, allow_nan=False).encode()
    _write_file(unfinished / HEADER, text)
    sums[HEADER] = f"{checksums.checksum(text):08x}"
    _write_file(unfinished / checksums.FILE, json.dumps(sums, indent=1).encode())
    old = path.with_name(f".{path.name}.old")
    if path.exists():  # a rename cannot replace a folder that is not empty: see `remove_unfinished`
        os.replace(path, old)
    os.replace(unfinished, path)
    flush_folder(path.parent)
    remove(old)


def remove(path: Path) -> None:
    """Remove a checkpoint, whether it is a file or a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


# ---- reading ----


def read(path: Path, world: World) -> tuple[Json, Tensors]:
    """Return header and tensors after verifying the checksums. Each process verifies a part of the files.

    Large tensors are on the meta device, with shape and dtype only; `fill` reads their values.
    """
    sums = _sums(path)
    for name in sorted(sums)[world.rank :: world.size]:
        found = f"{of_file(path / name):08x}"
        if found != sums[name]:
            raise CheckpointError(f"{path} is damaged: the checksum of {name} must be {sums[name]:.8}, found {found}")
    header = parse_header(path, (path / HEADER).read_bytes().decode(errors="replace"))
    check_header(header, path, of_several=True)
    if not header["rng"] or len(header["rng"]) != len(header["extra"]):
        raise CheckpointError(f"{path}: rng and extra must have an entry for each process, found others")
    tensors = _tensors(path, sorted(sums.keys() - {HEADER}))
    small = {
        name: torch.empty_like(tensor, device="cpu")
        for name, tensor in tensors.items()
        if not tensor.ndim or name.partition("/")[0] in READ_AT_ONCE
    }
    load_tensors(small, path)
    return header, with_aliases(header, tensors | small, path)


def fill(path: Path, aliases: dict[str, str], targets: Tensors) -> None:
    """Fill these tensors with the values in the folder. A process may have only a shard of each."""
    load_tensors({name: tensor for name, tensor in targets.items() if name not in aliases}, path)
    for name in targets.keys() & aliases.keys():
        targets[name].copy_(targets[aliases[name]])


def _sums(path: Path) -> dict[str, str]:
    """Return the listed checksums by file name. Raise if the folder has other files than the listed ones."""
    try:
        sums = checksums.listed(path)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if sums is None or HEADER not in sums:
        raise CheckpointError(f"{path} is no checkpoint of strop: it has no {checksums.FILE} with a {HEADER}")
    there = {file.name for file in path.iterdir() if file.is_file() and not file.is_symlink()} - {checksums.FILE}
    for name in sorted(sums.keys() ^ there):
        where = "among its files" if name in there else f"in {checksums.FILE}"
        raise CheckpointError(
            f"{path} must have the files that {checksums.FILE} lists, found {name!r:.80} only {where}"
        )
    for name in sorted(there - {HEADER}):
        if not name.endswith(".safetensors"):
            raise CheckpointError(f"{path} must hold safetensors files, found {name!r:.80}")
    return sums


def _tensors(path: Path, names: list[str]) -> Tensors:
    """Return all tensors of the files, on the meta device. Raise unless every row is there once (torch does not)."""
    for name in names:
        with opened(path / name):
            pass
    try:
        shards = shards_in(path)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, RuntimeError) as error:
        raise CheckpointError(f"{path} must say where its shards begin, found {type(error).__name__} there") from None
    found: Tensors = {}
    for name, parts in shards.items():
        row, (_, shape, dtype) = 0, parts[0]
        for begins, own, kind in parts:
            begins_here = begins == (row, *[0] * (len(shape) - 1)) if shape else len(parts) == 1
            if not begins_here or own[1:] != shape[1:] or kind != dtype:
                raise CheckpointError(f"{path} must hold all rows of {name!r:.80} once, in one dtype, found others")
            row += own[0] if shape else 0
        found[name] = torch.empty([row, *shape[1:]] if shape else [], dtype=dtype, device="meta")
    return found
