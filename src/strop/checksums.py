"""Checksums of the tensors in a checkpoint, and of the files in a model folder.

They detect damage: flipped bits, and blocks that were lost, moved or left from an older file. They do not detect a
deliberate change of a file together with its checksum.
"""

import json
import zlib
from pathlib import Path

import numpy as np

FILE = "checksums.json"
ROWS, COLUMNS = 64, 509  # COLUMNS is prime: sectors or pages swapped within a block fall on other columns
BLOCK = ROWS * COLUMNS * 8  # bytes


def checksum(data: "bytes | memoryview | np.ndarray", before: int = 0) -> int:
    """Return the CRC-32 of the bytes after each block of 64 rows of 64-bit words is replaced by Σ rows mod 2⁶⁴.

    A change within one row changes the sums, and this is five times as fast as a CRC-32 of all bytes.
    before   the checksum of whole blocks that come before these bytes
    """
    bytes_N = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    whole = len(bytes_N) // BLOCK * BLOCK
    blocks_NRC = bytes_N[:whole].view("<u8").reshape(-1, ROWS, COLUMNS)
    sums_NC = np.add.reduce(blocks_NRC, axis=1)
    return zlib.crc32(bytes_N[whole:].data, zlib.crc32(sums_NC.tobytes(), before))


def of_file(path: Path) -> int:
    found = 0
    with open(path, "rb") as file:
        while piece := file.read(128 * BLOCK):
            found = checksum(piece, found)
    return found


# ---- a folder ----


def write(folder: Path) -> None:
    """Write the checksums of the folder's files into it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != FILE)
    found = {path.relative_to(folder).as_posix(): f"{of_file(path):08x}" for path in files}
    (folder / FILE).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def listed(folder: Path) -> dict[str, str] | None:
    """Return the checksums that the folder lists, by file name; None if it has no list."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {name: value + "" for name, value in found.items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} must hold an object of file names and checksums, found something else") from None


def verify(folder: str | Path) -> None:
    """Raise a ValueError if the folder has checksums and a listed file does not match. Unlisted files are ignored."""
    folder = Path(folder)
    hint = f"it is damaged, or was changed on purpose: then delete {folder / FILE}"
    for name, value in (listed(folder) or {}).items():
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{folder / FILE} must name files of its folder, found {name!r:.80}; {hint}")
        if not path.is_file():
            raise ValueError(f"{folder} must hold the file {name!r} that its {FILE} lists, found none; {hint}")
        if (found := f"{of_file(path):08x}") != value:
            raise ValueError(f"{path} must have the checksum {value!r:.40}, found {found!r}: {hint}")
