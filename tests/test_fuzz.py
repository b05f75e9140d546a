"""A thousand damaged checkpoints, and as many damaged files beside them: each is refused in one line or read exactly.

Seeded: what was drawn once is drawn again. Each test prints its counts (pytest -s); STROP_FUZZ=10 draws ten times as much.
"""

import functools
import json
import math
import os
import random
import warnings
from collections import Counter

import pytest
import torch
from mutations import as_text, changed, damaged, write_with_checksums
from tiny_qwen2 import tiny_qwen2
from trained_models import tiny_moe

from strop.algorithms.sft import SFT
from strop.callbacks import EarlyStopping
from strop.report.lines import is_number
from strop.training import checkpoint
from strop.training.checkpoint import CheckpointError
from strop.training.state import seed_everything

FACTOR = int(os.environ.get("STROP_FUZZ", "1"))
MAKE = {
    "moe": lambda: SFT(model=tiny_moe(), callbacks=[EarlyStopping("loss")]),
    "hf": lambda: SFT(model=tiny_qwen2(num_hidden_layers=1), callbacks=[EarlyStopping("loss")]),
    "lora": lambda: SFT(model=tiny_qwen2(num_hidden_layers=1), lora={"r": 2}, callbacks=[EarlyStopping("loss")]),
}


def opened(path):
    return SFT.from_checkpoint(path, callbacks=[EarlyStopping("loss")])


@pytest.fixture
def no_flush(monkeypatch):
    """A thousand files need not reach the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)


@pytest.fixture
def saved(request, tmp_path, no_flush):
    """A checkpoint, as one that was loaded and saved again has it: transformers fills in some of its config."""
    path = tmp_path / "good.pt"
    trainer = MAKE[request.param]()
    seed_everything(0)
    trainer.train_step([[2, 3]], [[4, 1]])
    trainer.state.seconds = 1.0
    trainer.save(path)
    opened(path).save(path)
    return path


def comparable(header, original):
    """What a loaded trainer has of the header: not what only belonged to the writer (its version, its device's options)."""
    header = json.loads(json.dumps(header))
    for name in ("version", "extra", "aliases"):
        del header[name]
    known = [entry for entry in header["callbacks"] if entry[0] == "EarlyStopping"]
    header["callbacks"] = known[0] if known else ["EarlyStopping", EarlyStopping("loss").state_dict()]
    header["optim"]["groups"] = [
        {key: group.get(key, default) for key, default in own.items() if key not in checkpoint.HOW}
        for group, own in zip(header["optim"]["groups"], original["optim"]["groups"], strict=True)
    ]
    if not header["rng"]["numpy"][2]:
        header["rng"]["numpy"][3] = 0.0  # of a pair of normals the second, used already
    if header["model"]["kind"] == "hf":
        header["model"] = None  # transformers has defaults for everything
    return header


def difference(a, b, where=""):
    """Where two trees of JSON differ, or None. 1 and 1.0 are equal, True is neither."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return next((found for key in a if (found := difference(a[key], b[key], f"{where}.{key}"))), None)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return next(
            (found for i, pair in enumerate(zip(a, b, strict=True)) if (found := difference(*pair, f"{where}[{i}]"))),
            None,
        )
    equal = a == b and isinstance(a, bool) == isinstance(b, bool)
    return None if equal else f"{where}: {a!r:.200} and {b!r:.200}"


def same_tensors(a, b):
    bits = [{name: (t.dtype, t.shape, bytes(t.reshape(-1).view(torch.uint8))) for name, t in x.items()} for x in (a, b)]
    return bits[0] == bits[1]


def one_line(error, path):
    assert len(str(error).splitlines()) == 1, str(error)
    assert len(str(error)) < 800, str(error)
    assert path.name in str(error), str(error)
    return "refused"


def outcome(path, header, tensors, original):
    """ "refused" or "exact": a loaded trainer, saved again, is what the file says, bit for bit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer = opened(path)
        except CheckpointError as error:
            return one_line(error, path)
        trainer.save(path.with_name("again.pt"))
    again_header, again_tensors = checkpoint.read(path.with_name("again.pt"))
    assert same_tensors(tensors, again_tensors)
    assert difference(comparable(header, original), comparable(again_header, original)) is None
    return "exact"


def told(what, counts):
    print(f"\n{what}: " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())))


# ---- checkpoints: 450 + 350 + 100 + 60 + 40 ----


@pytest.mark.parametrize(("saved", "seed", "number"), [("moe", 1, 225), ("moe", 2, 225)], indirect=["saved"])
def test_bytes_of_a_checkpoint(saved, seed, number):
    """Flipped, cut, doubled, swapped, written over. Loaded is only what is the same file."""
    whole, (header, tensors) = saved.read_bytes(), checkpoint.read(saved)
    draw, counts = random.Random(seed), Counter()
    path = saved.with_name("damaged.pt")
    for _ in range(number * FACTOR):
        _, data = damaged(whole, draw)
        path.write_bytes(data)
        found = outcome(path, header, tensors, header)
        assert (found == "exact") == (data == whole)
        counts[found] += 1
    assert counts["refused"] > 0.9 * number * FACTOR
    told("bytes of a checkpoint", counts)


@pytest.mark.parametrize(
    ("saved", "seed", "number"), [("moe", 3, 175), ("moe", 4, 175), ("hf", 5, 60), ("lora", 6, 40)], indirect=["saved"]
)
def test_header_of_a_checkpoint(saved, seed, number):
    """Every checksum is right: what remains is the table, and what is made of the header."""
    header, tensors = checkpoint.read(saved)
    draw, counts = random.Random(seed), Counter()
    path = saved.with_name("changed.pt")
    for _ in range(number * FACTOR):
        _, tree = changed(header, draw)
        write_with_checksums(path, text := as_text(tree, draw), tensors)
        try:
            tree = json.loads(text)
        except (RecursionError, ValueError):
            tree = None  # and `outcome` fails if it is loaded all the same
        counts[outcome(path, tree, tensors, header)] += 1
    assert counts["refused"] > 0.6 * number * FACTOR
    assert counts["exact"] > 0
    told(f"header of a checkpoint, {path.parent.name}", counts)


@pytest.mark.parametrize("saved", ["moe"], indirect=True)
def test_tensors_of_a_checkpoint(saved):
    """Left out, renamed, of another shape or type, not finite; every checksum right."""
    header, tensors = checkpoint.read(saved)
    draw, counts = random.Random(7), Counter()
    path = saved.with_name("changed.pt")
    for _ in range(100 * FACTOR):
        name, others = draw.choice(list(tensors)), dict(tensors)
        tensor = others.pop(name)
        kind = draw.choice(["drop", "rename", "add", "dtype", "flat", "cut", "nan", "double"])
        other = draw.choice([name + "x", name.partition("/")[2], draw.choice(list(tensors)), "rng/cuda/0", "x/y"])
        new = {
            "drop": {},
            "rename": {other: tensor},
            "add": {name: tensor, other: tensor},
            "dtype": {name: tensor.to(draw.choice([torch.float64, torch.int32, torch.uint8, torch.bfloat16]))},
            "flat": {name: tensor.reshape(-1)},
            "cut": {name: tensor[:-1] if tensor.ndim else tensor},
            "nan": {name: tensor.double().mul(math.nan).to(tensor.dtype)},
            "double": {name: torch.cat([tensor, tensor]) if tensor.ndim else tensor[None]},
        }[kind]
        others |= new
        write_with_checksums(path, json.dumps(header), others)
        counts[outcome(path, header, others, header)] += 1
    assert counts["refused"] > 50 * FACTOR
    told("tensors of a checkpoint", counts)


# ---- the other files of a run, and what a user writes ----


def refusal(work, path, *errors):
    """What `work` returns, or None where it refused in one line that names the file."""
    try:
        return work()
    except errors as error:
        if type(error) not in errors:  # a subclass, as a UnicodeDecodeError is of ValueError
            raise
        one_line(error, path)
        return None


def texts(rows, draw, number):
    """Files of JSON lines: damaged bytes in turns with lines of changed JSON."""
    whole = "".join(json.dumps(row) + "\n" for row in rows).encode()
    for i in range(number * FACTOR):
        if i % 2:
            yield damaged(whole, draw)[1]
        else:
            lines = [json.dumps(row) for row in rows]
            at = draw.randrange(len(rows))
            lines[at] = as_text(changed(rows[at], draw)[1], draw)
            yield ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")


def parsed(data):
    """The lines as Python's json reads them, or None where it cannot; what a file says, if it says anything."""
    try:
        return [json.loads(line) for line in data.decode("utf-8-sig").split("\n") if line.strip()]
    except (ValueError, RecursionError):
        return None


DATA = {
    "preference": [{"prompt": f"What is {i}?", "chosen": f"it is {i}", "rejected": "no", "score": i / 7} for i in range(6)],
    "messages": [{"messages": [{"role": "user", "content": f"hé {i}"}, {"role": "assistant", "content": "ok"}]} for i in range(6)],
    "ids": [{"prompt": [1, 2, i], "completion": [3, i]} for i in range(6)],
}  # fmt: skip


@pytest.mark.parametrize("kind", DATA)
def test_data_files(kind, tmp_path):
    from strop.data.formats import load_rows

    path, counts = tmp_path / "data.jsonl", Counter()
    for data in texts(DATA[kind], random.Random(kind), 200):
        path.write_bytes(data)
        rows = refusal(lambda: load_rows(path), path, ValueError, TypeError)
        assert rows is None or repr(list(rows)) == repr(parsed(data))
        counts["refused" if rows is None else "exact"] += 1
    assert min(counts["refused"], counts["exact"]) > 0
    told(f"data, {kind}", counts)


CONFIG = """\
# a config as a user writes it
model: moe:tiny
data: rows.jsonl
learning_rate: 1e-4
sampling: {temperature: 0.7, top_p: 0.9}
run:
  batch_size: 4
  shuffle: true
stop_ids: [1, 2]
defaults: &defaults
  beta: 0.1
lora:
  <<: *defaults
  r: 8
"""


def test_configs(tmp_path):
    import yaml

    from strop.cli.options import read_config

    draw, path, counts = random.Random(0), tmp_path / "config.yaml", Counter()
    words = ["&a [*a]", "2001-13-45", "!!python/object/apply:os.mkdir [x]", "? [a]\n: 1", "- ", "\t", "*b", "!!int x"]
    words += ["{", "[" * 1200]
    for i in range(300 * FACTOR):
        data = damaged(CONFIG.encode(), draw)[1]
        if i % 2:
            lines = CONFIG.splitlines()
            at = draw.randrange(len(lines))
            lines[at] = (
                lines[at].partition(":")[0] + ": " + draw.choice(words) if draw.random() < 0.7 else draw.choice(words)
            )
            data = "\n".join(lines).encode()
        path.write_bytes(data)
        found = refusal(lambda: read_config(path), path, ValueError)
        if found is not None:
            wanted = yaml.safe_load(data.decode())
            assert repr(found) == repr({str(key).replace("-", "_"): value for key, value in wanted.items()})
        counts["refused" if found is None else "exact"] += 1
    assert min(counts["refused"], counts["exact"]) > 0
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]
    told("configs", counts)


METRICS = [
    {"step": i, "time": i / 2, "loss": 2.0 / i, "reward/mean": i / 9, "eval/loss": math.nan} for i in range(1, 9)
]
SAMPLES = [{"step": i, "prompt": f"p{i}", "completion": "né", "reward": 0.5} for i in (3, 6)]
ABOUT = {
    "algorithm": "SFT", "config": {"run": {"batch_size": 3}, "lora": None}, "model": {"class": "MoE", "num_parameters": 7},
    "num_rows": 10, "total_steps": 8, "versions": {"strop": "0.1.0"}, "started": "2024-01-01T00:00:00+0000",
}  # fmt: skip


def write_run(folder):
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(ABOUT))
    for name, rows in (("metrics.jsonl", METRICS), ("samples.jsonl", SAMPLES)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def numbers_of(rows):
    """Every metric's values by step, the last line of a step counting; None is not a number, texts are left out."""
    found = {}
    for row in rows:
        for name, value in row.items():
            if name not in ("step", "time") and (value is None or is_number(value)):
                found.setdefault(name, {})[row["step"]] = math.nan if value is None else float(value)
    return {name: repr(sorted(values.items())) for name, values in found.items()}


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "run.json"])
def test_report_of_a_damaged_run(name, tmp_path):
    """A page, or one line that names the file and what is wrong with it; lines that are whole are read as they are."""
    from strop.report import write_report
    from strop.report.runs import load_run

    folder, draw, counts = tmp_path / "run", random.Random(name), Counter()
    write_run(folder)
    rows = {"metrics.jsonl": METRICS, "samples.jsonl": SAMPLES, "run.json": [ABOUT]}[name]
    for data in texts(rows, draw, 100):
        (folder / name).write_bytes(data)
        page = refusal(lambda: write_report([folder], tmp_path / "report.html"), folder / name, ValueError)
        if page is not None and name != "run.json":
            run = load_run(folder)
            rows_there = parsed(data if not run.notes else data.rpartition(b"\n")[0])
            if name == "samples.jsonl":
                assert repr(run.samples) == repr(rows_there)
            else:
                pairs = {name: zip(*map(list, run.columns.series(name)), strict=True) for name in run.columns.names}
                there = {
                    name: repr([(int(step), float(value)) for step, value in both]) for name, both in pairs.items()
                }
                assert there == numbers_of(rows_there)
        counts["refused" if page is None else "exact"] += 1
    assert min(counts["refused"], counts["exact"]) > 0
    told(f"report, {name}", counts)


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "run.json"])
@pytest.mark.filterwarnings("ignore:.*reports will lack the others")  # where steps were cut off
def test_resume_of_a_damaged_run(name, tmp_path, no_flush):
    """It goes on, and keeps every line up to its checkpoint; or it refuses and leaves the file as it is."""
    rows = [{"prompt": [2, 3], "completion": [4 + i, 1]} for i in range(4)]
    options = {"batch_size": 2, "learning_rate": 1e-2}
    SFT(model=tiny_moe(), **options).train(rows, num_steps=3, output_dir=tmp_path / "run")
    folder, draw, counts = tmp_path / "run", random.Random(name), Counter()
    (folder / "samples.jsonl").write_text(
        "".join(json.dumps({**row, "step": i + 1}) + "\n" for i, row in enumerate(SAMPLES))
    )
    files = {file: (folder / file).read_bytes() for file in ("metrics.jsonl", "samples.jsonl", "run.json")}
    whole = [json.loads(files[name])] if name == "run.json" else parsed(files[name])
    for data in texts(whole, draw, 30):
        for file, content in files.items():
            (folder / file).write_bytes(content)
        (folder / name).write_bytes(data)
        go_on = functools.partial(SFT(model=tiny_moe(), **options).train, rows, num_steps=3, resume=True)
        done = refusal(lambda go_on=go_on: go_on(output_dir=folder), folder / name, ValueError)
        if done is None:
            assert (folder / name).read_bytes() == data
        elif name != "run.json":
            lines = parsed(data.rpartition(b"\n")[0])
            assert repr(parsed((folder / name).read_bytes())) == repr([row for row in lines if row["step"] <= 3])
        counts["refused" if done is None else "exact"] += 1
    assert min(counts["refused"], counts["exact"]) > 0
    told(f"resume, {name}", counts)
