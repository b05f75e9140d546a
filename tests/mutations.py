"""Damage for the fuzz tests: random bytes, and changes to JSON that a program or a person could have made."""

import copy
import json

import torch
from safetensors.torch import save_file

from strop.training import checkpoint_file

DEEP = "DEEP"  # stands for a hundred thousand brackets in the text of JSON
JUNK = [
    None, True, False, 0, 1, -1, 2, 3, 7, 10**6, 2**31, 2**63, 2**70, 10**400, 0.5, -0.5, 1e-300, 1e308, 1e999, float("nan"),
    "", "x", "1", "1e-4", "nan", "a\nb", "\ud800", "../../x", "org/kernel", "strop.__main__:x", "cuda:7", [], [[]], [0], [1, 2],
    ["x"], {}, {"x": 1}, {"": {}}, DEEP,
]  # fmt: skip


def damaged(data, draw):
    """Bytes with a few of them flipped, cut, doubled, swapped, written over or put in; (kind, bytes)."""
    data = bytearray(data)
    kind = draw.choice(["bit", "bit", "bits", "cut", "cut front", "insert", "zeros", "swap", "double", "text", "noise"])
    at, size = draw.randrange(len(data)), draw.choice([1, 4, 8, 64, 512])
    if kind == "bit":
        data[at] ^= 1 << draw.randrange(8)
    elif kind == "bits":
        for _ in range(draw.randrange(2, 9)):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del data[at:]
    elif kind == "cut front":
        del data[: at // 2 + 1]
    elif kind == "insert":
        data[at:at] = draw.randbytes(size)
    elif kind == "zeros":
        data[at : at + size] = bytes(len(data[at : at + size]))
    elif kind == "swap":
        other = draw.randrange(len(data))
        data[at : at + size], data[other : other + size] = data[other : other + size], data[at : at + size]
    elif kind == "double":
        data[at:at] = data[at : at + size]
    elif kind == "text":
        word = draw.choice(
            [b"null", b"NaN", b"-1", b"1e999", b"[[", b"{}", b"\xff\xfe", b"\x00", b"true", b'"', b"\n", b"\\ud800"]
        )
        data[at : at + len(word)] = word
    else:
        data[at : at + size] = draw.randbytes(size)
    return kind, bytes(data)


def changed(tree, draw):
    """JSON with one change to it, in a random place; (kind and place, tree)."""
    tree = copy.deepcopy(tree)
    kind = draw.choice(["drop", "replace", "replace", "replace", "replace", "add", "swap", "wrap"])
    parent, key, path = _place(tree, draw)
    if kind == "drop":
        del parent[key]
    elif kind == "replace":
        parent[key] = draw.choice(JUNK)
    elif kind == "add":
        inside = parent[key] if isinstance(parent[key], (dict, list)) else parent
        if isinstance(inside, dict):
            inside[draw.choice(["x", "params", "__class__", "auto_map", "lora", "lr", ""])] = draw.choice(JUNK)
        else:
            inside.append(draw.choice(JUNK))
    elif kind == "swap":
        other, other_key, _ = _place(tree, draw)
        parent[key], other[other_key] = copy.deepcopy(other[other_key]), copy.deepcopy(parent[key])
    else:
        parent[key] = [parent[key]]
    return f"{kind} {'.'.join(map(str, path))}", tree


def _place(tree, draw):
    path, here = [], tree
    while True:
        key = draw.choice(list(here) if isinstance(here, dict) else range(len(here)))
        path.append(key)
        if not isinstance(here[key], (dict, list)) or not here[key] or draw.random() < 0.25:
            return here, key, path
        here = here[key]


def as_text(tree, draw=None):
    """JSON, of values that JSON does not have too; with `draw` now and then a name stands twice."""
    text = json.dumps(tree)
    text = text.replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000)
    if draw is not None and draw.random() < 0.05 and text.startswith("{"):
        name = draw.choice(list(tree)) if tree else "x"
        text = f'{{"{name}": 1, {text[1:]}' if tree else text
    return text


def write_with_checksums(path, text, tensors):
    """What somebody may write on purpose: any header, any tensors, and every checksum right."""
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    room = torch.zeros(4 * (len(tensors) + 1), dtype=torch.uint8)
    save_file({**tensors, checkpoint_file.CHECKSUMS: room}, path, metadata={"strop": text})
    checkpoint_file._seal(path, checkpoint_file.sums_of(tensors))
