"""The file of a checkpoint: safetensors, with a JSON header in its metadata and a checksum of every part.

    8 bytes: length of the index | index: names, dtypes, shapes, places; the header as text | the tensors' bytes

One of the tensors, `checksums`, holds those of the index and of the other tensors, in the order of their places.
"""

import contextlib
import json
import math
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from strop._types import Json
from strop.checksums import checksum
from strop.training.checkpoint_header import CheckpointError, check_header

FORMAT = 2  # 1 had no checksums
CHECKSUMS = "checksums"
MOST_INDEX_BYTES = 100_000_000  # safetensors' own limit
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
Tensors = dict[str, torch.Tensor]
Index = dict[str, Json]


# ---- writing ----


def write(path: str | Path, tensors: Tensors, header: Json) -> None:
    """Beside the file first, then in its place: a kill at any moment leaves the old one or the new one, whole."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors, aliases = _without_shared(tensors)
    metadata = {"strop": json.dumps({"format": FORMAT, **header, "aliases": aliases}, allow_nan=False)}
    room = torch.zeros(4 * (len(tensors) + 1), dtype=torch.uint8)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with ThreadPoolExecutor(1) as pool:  # the sums are made while the file is written
                sums = pool.submit(sums_of, tensors)
                save_file({**tensors, CHECKSUMS: room}, unfinished, metadata=metadata)
                _seal(unfinished, sums.result())
        except (SafetensorError, OSError) as error:  # a full disk, in most cases
            raise OSError(f"{path} could not be written: {error}") from error
        os.replace(unfinished, path)
        with contextlib.suppress(OSError):  # some file systems cannot flush a folder
            flush_folder(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def sums_of(tensors: Tensors) -> dict[str, int]:
    return {name: checksum(_bytes_of(tensor)) for name, tensor in tensors.items()}


def _seal(path: Path, sums: dict[str, int]) -> None:
    """Fill in the checksums of what was meant to be written, and bring the file to the disk."""
    start, index, _ = read_index(path)
    found = [checksum(start), *(sums[name] for name in _summed(index))]
    with path.open("r+b") as file:
        file.seek(len(start) + index[CHECKSUMS]["data_offsets"][0])
        file.write(struct.pack(f"<{len(found)}I", *found))
        file.flush()
        os.fsync(file.fileno())


def _without_shared(tensors: Tensors) -> tuple[Tensors, dict[str, str]]:
    """Each tensor once, on the CPU; `aliases` says which names (tied weights) are the same tensor."""
    kept: Tensors = {}
    aliases: dict[str, str] = {}
    seen: dict[object, str] = {}
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


def flush_folder(path: Path) -> None:
    """A folder's list of names to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- reading ----


def read(path: str | Path) -> tuple[Json, Tensors]:
    """The header and the tensors of a checkpoint, every checksum verified; a CheckpointError says what else it is."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    start, index, about = read_index(path)
    if not isinstance(about.get("strop"), str):
        raise CheckpointError(f"{path} is a safetensors file, but not a checkpoint of strop")
    header = parse_header(path, about["strop"])
    sums = _read_sums(path, start, index)
    _compare("its header", checksum(start), sums["header"], path)
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    del tensors[CHECKSUMS]
    for name in _summed(index):
        _compare(f"{name!r:.120}", checksum(_bytes_of(tensors[name])), sums[name], path)
    check_header(header, path)
    return header, with_aliases(header, tensors, path)


def with_aliases(header: Json, tensors: Tensors, path: Path) -> Tensors:
    for alias, name in header["aliases"].items():
        if alias in tensors or name not in tensors:
            raise CheckpointError(f"{path}: aliases must be new names of tensors, found {alias!r:.60} for {name!r:.60}")
    return tensors | {alias: tensors[name] for alias, name in header["aliases"].items()}


def parse_header(path: Path, text: str) -> Json:
    try:
        header = loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: its header is not JSON: {error}") from None
    written = header.get("format") if isinstance(header, dict) else None
    if written != FORMAT or isinstance(written, bool):
        raise CheckpointError(f"{path} must be of format {FORMAT}, found {written!r:.40}: another version wrote it")
    return header


def read_index(path: Path) -> tuple[bytes, Index, Json]:
    """The bytes before the tensors, the tensors' entries in the order of their places, the metadata."""
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    size = path.stat().st_size
    with path.open("rb") as file:  # 8 bytes: the length of the JSON that follows
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        raw = file.read(length) if length <= min(size - 8, MOST_INDEX_BYTES) else b""
    try:
        parsed = loads(raw.decode())
        about = parsed.pop("__metadata__", {})
        index = dict(sorted(parsed.items(), key=lambda item: item[1]["data_offsets"]))
        ends = [0, *(_end_of(entry) for entry in index.values())]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path} {_what_else(start, size, raw)}") from None
    if not isinstance(about, dict):
        raise CheckpointError(f"{path} is damaged: its metadata must be an object")
    if 8 + length + ends[-1] != size:
        raise CheckpointError(f"{path} is cut off: it must have {8 + length + ends[-1]} bytes, found {size}")
    if [entry["data_offsets"][0] for entry in index.values()] != ends[:-1]:
        raise CheckpointError(f"{path} is damaged: its tensors must lie one behind the other")
    return start + raw, index, about


def _end_of(entry: Json) -> int:
    """Where a tensor ends; a ValueError if its entry does not agree with itself."""
    begin, end = entry["data_offsets"]
    numbers = [begin, end, *entry["shape"]]
    if any(isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < 2**62 for n in numbers):
        raise ValueError("places and shapes must be whole numbers")
    if end - begin != DTYPES[entry["dtype"]].itemsize * math.prod(entry["shape"]):
        raise ValueError("a tensor must have the bytes of its shape")
    return end


def _summed(index: Index) -> list[str]:
    return [name for name in index if name != CHECKSUMS]


def _read_sums(path: Path, start: bytes, index: Index) -> dict[str, int]:
    begin, end = index.get(CHECKSUMS, {"data_offsets": (0, 0)})["data_offsets"]
    if end - begin != 4 * len(index):  # of the header, in place of its own
        raise CheckpointError(f"{path} must hold {len(index)} checksums, found {(end - begin) // 4}")
    with path.open("rb") as file:
        file.seek(len(start) + begin)
        return dict(
            zip(("header", *_summed(index)), struct.unpack(f"<{len(index)}I", file.read(end - begin)), strict=True)
        )


def _compare(what: str, found: int, wanted: int, path: Path) -> None:
    if found != wanted:
        raise CheckpointError(f"{path} is damaged: the checksum of {what} must be {wanted:08x}, found {found:08x}")


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()


def _what_else(start: bytes, size: int, raw: bytes) -> str:
    """What a file without a readable index is; a length in its place has zeros in its upper bytes."""
    is_length = len(start) == 8 and start[5:] == bytes(3)
    is_zip, is_new = start[:4] == b"PK\x03\x04", start[:3] in (b"\x80\4\x95", b"\x80\5\x95")
    is_old = start[:2] in (b"\x80\2", b"\x80\3") and not is_length
    if is_zip or is_new or is_old:
        return "is a pickle, as torch.save writes it: strop reads only its own checkpoints, and never runs code from a file"
    if is_length and not raw and start != bytes(8):
        return f"is cut off within its header: it holds {size} bytes"
    return f"is no safetensors file: it holds {size} bytes and no checkpoint of strop"


def loads(text: str) -> Any:
    """JSON as the standard has it: no NaN, no name twice in an object. A ValueError for everything else."""

    def once(pairs: list[tuple[str, object]]) -> Json:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name stands twice in an object")
        return found

    def never(word: str) -> Any:
        raise ValueError(f"{word} is no number of JSON")

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=never)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
