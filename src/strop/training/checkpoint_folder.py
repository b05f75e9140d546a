"""The folder of a checkpoint that several processes write at once, as torch.distributed.checkpoint has it.

shard-00001-….safetensors   the rows of the tensors that the first process wrote, and so on
header.json                 what the header of a single file has; of random numbers and `extra` one entry a process
checksums.json              of the others

All of it is written beside the place where it belongs, and renamed when it is complete.
"""

import contextlib
import json
import os
import shutil
from pathlib import Path

import torch

from strop import checksums
from strop._types import Json
from strop.checksums import of_file
from strop.distributed import World, load_tensors, save_tensors
from strop.training.checkpoint_file import (
    DTYPES,
    FORMAT,
    MOST_INDEX_BYTES,
    Tensors,
    flush_folder,
    loads,
    parse_header,
    read_index,
    with_aliases,
)
from strop.training.checkpoint_header import CheckpointError, check_header, is_whole

HEADER = "header.json"
OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"  # torch's names for where a shard begins
READ_AT_ONCE = ("rng", "extra", "tokenizer")  # parts of few bytes


# ---- writing ----


def write(path: Path, tensors: Tensors, header: Json, world: World) -> None:
    """Called by all processes, with what each has; the header is the first one's. A kill leaves the old one or none."""
    path = Path(path)
    unfinished = world.from_first(lambda: _begun(path))
    try:
        save_tensors(tensors, unfinished)
        mine = sorted(unfinished.glob(f"shard-{world.rank + 1:05d}-*"))
        sums = dict(world.concat([(file.name, f"{of_file(file):08x}") for file in mine]))
        world.from_first(lambda: _finish(unfinished, path, {"format": FORMAT, **header}, sums))
    finally:
        if world.is_first:
            shutil.rmtree(unfinished, ignore_errors=True)


def _begun(path: Path) -> Path:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    unfinished.mkdir(parents=True)
    return unfinished


def _finish(unfinished: Path, path: Path, header: Json, sums: dict[str, str]) -> None:
    text = json.dumps(header, allow_nan=False).encode()
    _write_file(unfinished / HEADER, text)
    sums[HEADER] = f"{checksums.checksum(text):08x}"
    _write_file(unfinished / checksums.FILE, json.dumps(sums, indent=1).encode())
    old = path.with_name(f".{path.name}.old")
    if path.exists():  # a folder cannot take another's place in one move: see `remove_unfinished`
        os.replace(path, old)
    os.replace(unfinished, path)
    with contextlib.suppress(OSError):  # some file systems cannot flush a folder
        flush_folder(path.parent)
    remove(old)


def remove(path: Path) -> None:
    """A checkpoint of either kind."""
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
    """Header and tensors, every checksum verified: each process verifies its part of the files.

    Large tensors are told by shape and dtype only, on the device meta; `fill` reads them.
    """
    names = _names(path)
    for name in sorted(names)[world.rank :: world.size]:
        found = f"{of_file(path / name):08x}"
        if found != names[name]:
            raise CheckpointError(f"{path} is damaged: the checksum of {name} must be {names[name]:.8}, found {found}")
    if (path / HEADER).stat().st_size > MOST_INDEX_BYTES:
        raise CheckpointError(f"{path} must have a header of at most {MOST_INDEX_BYTES} bytes, found more")
    header = parse_header(path, (path / HEADER).read_bytes().decode(errors="replace"))
    check_header(header, path, of_several=True)
    if not header["rng"] or len(header["rng"]) != len(header["extra"]):
        raise CheckpointError(f"{path}: rng and extra must have an entry for each process, found others")
    tensors = _tensors(path, sorted(names.keys() - {HEADER}))
    small = {
        name: torch.empty_like(tensor, device="cpu")
        for name, tensor in tensors.items()
        if not tensor.ndim or name.partition("/")[0] in READ_AT_ONCE
    }
    load_tensors(small, path)
    return header, with_aliases(header, tensors | small, path)


def fill(path: Path, aliases: dict[str, str], targets: Tensors) -> None:
    """Put the folder's numbers into these tensors, of which each process may have a shard."""
    load_tensors({name: tensor for name, tensor in targets.items() if name not in aliases}, path)
    for name in targets.keys() & aliases.keys():
        targets[name].copy_(targets[aliases[name]])


def _names(path: Path) -> dict[str, str]:
    """The files of the folder with their checksums: those that are listed, and no others."""
    listed = path / checksums.FILE
    try:
        sums = loads(listed.read_bytes()[: MOST_INDEX_BYTES + 1].decode())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is no checkpoint of strop: it has no {checksums.FILE}") from None
    except ValueError as error:
        raise CheckpointError(f"{listed} is damaged: {error}") from None
    if not isinstance(sums, dict) or not all(isinstance(value, str) for value in sums.values()) or HEADER not in sums:
        raise CheckpointError(f"{listed} must name {HEADER} and other files with their checksums, found something else")
    there = {file.name for file in path.iterdir() if file.is_file() and not file.is_symlink()} - {checksums.FILE}
    if apart := sorted(sums.keys() ^ there):
        where = "among its files" if apart[0] in there else f"in {checksums.FILE}"
        raise CheckpointError(
            f"{path} must have the files that {checksums.FILE} lists, found {apart[0]!r:.80} only {where}"
        )
    if odd := sorted(name for name in there if name != HEADER and not name.endswith(".safetensors")):
        raise CheckpointError(f"{path} must hold safetensors files, found {odd[0]!r:.80}")
    return sums


def _tensors(path: Path, names: list[str]) -> Tensors:
    """All tensors of the files, without memory. The shards of each must lie one behind the other, without a gap."""
    shards: dict[str, list[tuple[int, list[int], str]]] = {}
    for file in names:
        _, index, about = read_index(path / file)
        offsets = _offsets(path / file, about)
        for name, entry in index.items():
            begins, shape = offsets.get(name), entry["shape"]
            if begins is None or len(begins) != len(shape) or any(begins[1:]):
                raise CheckpointError(f"{path / file} must say at which row {name!r:.80} begins, found {begins!r:.40}")
            shards.setdefault(name, []).append((begins[0] if begins else 0, shape, entry["dtype"]))
    found: Tensors = {}
    for name, parts in shards.items():
        parts.sort()
        _, shape, dtype = parts[0]
        row = 0
        for begin, part, kind in parts:
            if begin != row or part[1:] != shape[1:] or kind != dtype or (not part and len(parts) > 1):
                raise CheckpointError(f"{path} must hold all rows of {name!r:.80} once, in one dtype, found others")
            row += part[0] if part else 0
        found[name] = torch.empty([row, *shape[1:]] if shape else [], dtype=DTYPES[dtype], device="meta")
    return found


def _offsets(file: Path, about: Json) -> dict[str, list[int]]:
    group, name = OFFSETS
    try:
        found = {key: entry[name] for key, entry in loads(about[group]).items()}
        if all(is_whole(n) and n >= 0 for begins in found.values() for n in begins):
            return found
    except (KeyError, TypeError, ValueError, AttributeError):
        pass
    raise CheckpointError(f"{file} must say where its shards begin, found something else")
