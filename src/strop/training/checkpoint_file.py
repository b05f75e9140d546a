"""The single-file checkpoint: safetensors, with a JSON header in its metadata and a checksum of every part.

    8 bytes: length of the index | index: names, dtypes, shapes, offsets; the header as text | the tensors' bytes

The tensor `checksums` holds the checksums of the index and of the other tensors, in the order of their offsets.
"""

import contextlib
import json
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from strop._types import Json
from strop.checksums import checksum
from strop.distributed import whole
from strop.training.checkpoint_header import CheckpointError, check_header, loads

FORMAT = 2  # 1 had no checksums
CHECKSUMS = "checksums"
PICKLES = (
    b"PK\x03\x04",
    b"\x80\2\x8a",
    b"\x80\4\x95",
    b"\x80\5\x95",
)  # the first bytes of what torch.save and pickle write
Tensors = dict[str, torch.Tensor]


# ---- writing ----


def write(path: str | Path, tensors: Tensors, header: Json) -> None:
    """Write a checkpoint to a temporary file, then rename it. A kill leaves the old file or the new one, complete."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors, aliases = without_shared(tensors)
    tensors = {name: _on_host(tensor) for name, tensor in tensors.items()}
    metadata = {"strop": json.dumps({"format": FORMAT, **header, "aliases": aliases}, allow_nan=False)}
    room = torch.zeros(4 * (len(tensors) + 1), dtype=torch.uint8)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with ThreadPoolExecutor(1) as pool:  # computes the checksums while the file is written
                sums = pool.submit(sums_of, tensors)
                save_file({**tensors, CHECKSUMS: room}, unfinished, metadata=metadata)
                _seal(unfinished, sums.result())
        except (SafetensorError, OSError) as error:  # a full disk, in most cases
            raise OSError(f"{path} could not be written: {error}") from error
        os.replace(unfinished, path)
        flush_folder(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def without_shared(tensors: Tensors) -> tuple[Tensors, dict[str, str]]:
    """Return each tensor once, and a dict from the other names of tied weights to the name that was kept."""
    kept: Tensors = {}
    aliases: dict[str, str] = {}
    seen: dict[object, str] = {}
    for name, tensor in tensors.items():
        key: object = id(tensor)
        if not hasattr(tensor, "device_mesh") and tensor.numel():
            key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        if seen.setdefault(key, name) == name:
            kept[name] = tensor
        else:
            aliases[name] = seen[key]
    return kept, aliases


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor on the CPU; a view of a larger tensor is copied."""
    tensor = whole(tensor).detach().cpu().contiguous()
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


def sums_of(tensors: Tensors) -> dict[str, int]:
    return {name: checksum(_bytes_of(tensor)) for name, tensor in tensors.items()}


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()


def _seal(path: Path, sums: dict[str, int]) -> None:
    """Write the checksums into the file and flush it to the disk. They are those of the tensors in memory."""
    start, index = _index(path)
    found = [checksum(start), *(sums[name] for name in index if name != CHECKSUMS)]
    with path.open("r+b") as file:
        file.seek(len(start) + index[CHECKSUMS]["data_offsets"][0])
        file.write(struct.pack(f"<{len(found)}I", *found))
        file.flush()
        os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Flush a folder's directory entries to the disk, where the file system supports it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- reading ----


def read(path: str | Path) -> tuple[Json, Tensors]:
    """Return header and tensors of a checkpoint after verifying every checksum. Raise a CheckpointError if invalid."""
    path = Path(path)
    with opened(path) as file:
        about = (file.metadata() or {}).get("strop")
        if about is None:
            raise CheckpointError(f"{path} is a safetensors file, but not a checkpoint of strop")
        header = parse_header(path, about)
        start, index = _index(path)
        tensors = {name: file.get_tensor(name) for name in index}
    listed = _bytes_of(tensors.pop(CHECKSUMS, torch.empty(0))).tobytes()
    if len(listed) != 4 * len(index):  # `index` counts `checksums` itself, in whose place the header's is listed
        raise CheckpointError(f"{path} must hold {len(index)} checksums, found {len(listed) // 4}")
    found = {"its header": checksum(start)} | {f"{name!r:.120}": own for name, own in sums_of(tensors).items()}
    for (what, own), (wanted,) in zip(found.items(), struct.iter_unpack("<I", listed), strict=True):
        if own != wanted:
            raise CheckpointError(f"{path} is damaged: the checksum of {what} must be {wanted:08x}, found {own:08x}")
    check_header(header, path)
    return header, with_aliases(header, tensors, path)


def with_aliases(header: Json, tensors: Tensors, path: Path) -> Tensors:
    for alias, name in header["aliases"].items():
        if alias in tensors or name not in tensors:
            raise CheckpointError(f"{path}: aliases must be new names of tensors, found {alias!r:.60} for {name!r:.60}")
    return tensors | {alias: tensors[name] for alias, name in header["aliases"].items()}


def parse_header(path: Path, text: str) -> Json:
    """Return the header parsed from its text. Only its format number is checked here."""
    try:
        header = loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: its header is not JSON: {error}") from None
    written = header.get("format") if isinstance(header, dict) else None
    if written != FORMAT or isinstance(written, bool):
        raise CheckpointError(f"{path} must be of format {FORMAT}, found {written!r:.40}: another version wrote it")
    return header


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file. Errors of the library, now or while a tensor is read, become a CheckpointError."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, RuntimeError, TypeError, OverflowError) as error:  # the last three: impossible shapes
        with path.open("rb") as file:
            is_pickle = file.read(4).startswith(PICKLES)
        if is_pickle:
            what = "is a pickle, as torch.save writes it: strop reads only its own checkpoints, and never runs code from a file"
            raise CheckpointError(f"{path} {what}") from None
        told = " ".join(str(error).split())
        raise CheckpointError(f"{path} is cut off, damaged or no safetensors file: {told:.200}") from None


def _index(path: Path) -> tuple[bytes, Json]:
    """Return the bytes before the tensors, and the tensors' index entries sorted by offset. The index must be valid."""
    with path.open("rb") as file:
        start = file.read(8)
        start += file.read(struct.unpack("<Q", start)[0])
    entries = json.loads(start[8:])
    entries.pop("__metadata__", None)
    return start, dict(sorted(entries.items(), key=lambda item: item[1]["data_offsets"]))
