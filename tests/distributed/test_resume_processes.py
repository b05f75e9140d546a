"""A run that several processes began goes on with as many, with more, with fewer and with one, and so does one of one."""

import json
import shutil
from pathlib import Path

import preloaded
import pytest
import runs
import torch
from safetensors.torch import load_file
from test_equality import made_once
from tiny_models import llama
from transformers import AutoModelForCausalLM

from strop import GRPO, SFT
from strop.training.checkpoint import CheckpointError
from strop.training.logging import read_metrics

SHARDS = ["none", "full"]
CASES = [("sft", "none"), ("sft", "full"), ("grpo", "full")]  # the last with a reference
TIMES = ("time", "time/step", "tokens_per_second")


def launched(size, folder, plan):
    """Run a plan of runs.py in so many processes under torchrun, and return what they wrote to standard error."""
    out, err = preloaded.run("runs:main", folder, json.dumps(plan), num_processes=size, timeout=600)
    assert out.splitlines()[-1] == "done"
    return err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made_once(tmp_path_factory, "runs", make_runs)


def make_runs(folder):
    """All launches: what each does depends on the one before."""
    for case in ("sft", "grpo"):
        runs.train(case, "none", folder / f"{case}-1", 4, False)  # to its end, in one process
        runs.train(case, "none", folder / f"{case}-1-then", 3, False)
    plan = [["lora", shard, f"lora-{shard}-2", 2, False] for shard in SHARDS]
    plan += [["by-hand", shard] for shard in SHARDS]
    for case, shard in [*CASES, ("drop", "none"), ("drop", "full")]:
        name = f"{case}-{shard}-2"
        plan += [[case, shard, name, 4, False], [case, shard, f"{name}-then", 3, False]]
        plan += [["copy", f"{name}-then", f"{name}-then-{size}"] for size in (2, 4)]
        plan += [[case, shard, f"{name}-then-2", 4, True]]
    for case, shard in CASES:
        name = f"{case}-{shard}-1-then-2"
        plan += [["copy", f"{case}-1-then", name], [case, shard, name, 4, True]]
    launched(2, folder, plan)
    damaged = newest(folder / "sft-full-2-then-4")
    flip(damaged, "shard-00002-model-00001-of-00001.safetensors")
    plan = []
    for case, shard in CASES:
        plan += [[case, shard, f"{case}-{shard}-2-then-4", 4, True], [case, shard, f"{case}-{shard}-4-then", 3, False]]
    said = launched(4, folder, plan)
    assert said.count(f"{damaged} is damaged: the checksum of shard-00002") == 1  # and the one before was taken


def newest(run):
    return max((run / "checkpoints").iterdir())


def flip(checkpoint, name, place=-5):
    data = bytearray((checkpoint / name).read_bytes())
    data[place] ^= 1
    (checkpoint / name).write_bytes(data)


def weights_of(run):
    return load_file(run / "final" / "model.safetensors")


def apart(one, other):
    one, other = weights_of(one), weights_of(other)
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.mark.parametrize(("case", "shard"), [*CASES, ("drop", "none"), ("drop", "full")])
def test_resume_with_the_same_number_of_processes_is_bitwise_equal(case, shard, folder):
    through, resumed = folder / f"{case}-{shard}-2", folder / f"{case}-{shard}-2-then-2"
    assert apart(through, resumed) == 0
    one, other = (read_metrics(run / "metrics.jsonl") for run in (through, resumed))
    steps = [[e for e in entries if "loss" in e] for entries in (one, other)]
    assert [e["step"] for e in steps[0]] == [1, 2, 3, 4]
    for a, b in zip(*steps, strict=True):
        assert {k: v for k, v in a.items() if "time" not in k and k not in TIMES} == {
            k: v for k, v in b.items() if "time" not in k and k not in TIMES
        }


@pytest.mark.parametrize(("case", "shard"), CASES)
@pytest.mark.parametrize("how", ["2", "1-then-2", "2-then-4", "4-then-1"])
def test_resume_with_another_number_of_processes_is_equal_to_rounding(case, shard, how, folder):
    run = folder / f"{case}-{shard}-{how}"
    if how == "4-then-1":
        shutil.copytree(folder / f"{case}-{shard}-4-then", run)
        runs.train(case, "none", run, 4, True)
    assert apart(run, folder / f"{case}-1") < 1e-9
    assert json.loads((run / "run.json").read_text())["num_processes"] == int(how[-1])


@pytest.mark.parametrize("shard", SHARDS)
def test_each_process_has_random_numbers_of_its_own_and_weights_are_written_once(shard, folder):
    checkpoint = newest(folder / f"drop-{shard}-2")
    files = [load_file(path) for path in sorted(checkpoint.glob("*.safetensors"))]
    assert len(files) == 2
    assert not torch.equal(files[0]["rng/0/torch"], files[1]["rng/1/torch"])
    assert torch.equal(files[0]["rng/0/numpy"], files[1]["rng/1/numpy"])
    rows = [file["model/embed.weight"].shape[0] for file in files if "model/embed.weight" in file]
    assert rows == ([15, 15] if shard == "full" else [30])


def test_only_the_first_process_writes(folder):
    run = folder / "grpo-full-2"
    assert [entry["step"] for entry in read_metrics(run / "metrics.jsonl")] == [0, 1, 2, 3, 4, 4]
    assert {entry["step"] for entry in read_metrics(run / "samples.jsonl")} == {1, 2, 3, 4}
    about = json.loads((run / "run.json").read_text())
    assert (about["num_processes"], about["config"]["run"]["shard"]) == (2, "full")
    assert about["model"]["class"] == "Qwen2ForCausalLM"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000003", "step-00000004"]
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoints", "final", "metrics.jsonl", "run.json", "samples.jsonl",
    ]  # fmt: skip


def test_final_is_an_ordinary_folder_with_adapters_merged_in(folder):
    plain, adapted = folder / "sft-full-2" / "final", folder / "lora-full-2" / "final"
    model = AutoModelForCausalLM.from_pretrained(plain)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert torch.equal(model.model.embed_tokens.weight, weights_of(folder / "sft-full-2")["model.embed_tokens.weight"])
    assert not any("lora" in name for name in load_file(adapted / "model.safetensors"))
    assert all("lora" in name for name in load_file(adapted / "adapter" / "adapter_model.safetensors"))
    assert apart(folder / "lora-full-2", folder / "lora-none-2") < 1e-12


@pytest.mark.parametrize("shard", SHARDS)
def test_by_hand(shard, folder):
    one, other = (load_file(folder / f"{name}-{shard}" / "model.safetensors") for name in ("one", "other"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    alone = SFT.from_checkpoint(folder / f"by-hand-{shard}")  # in one process
    assert alone.config.run.shard == "none"
    assert alone.state.step == 1
    assert not list(folder.glob(".by-hand*"))


# ---- a folder may come from anywhere ----


@pytest.fixture
def copied(folder, tmp_path):
    return Path(shutil.copytree(newest(folder / "grpo-full-2"), tmp_path / "copied"))


def reseal(path):
    """Checksums that are right, as somebody would write them who changed the files on purpose."""
    from strop import checksums

    (path / checksums.FILE).unlink()
    checksums.write(path)


def change_header(path, change):
    header = json.loads((path / "header.json").read_text())
    change(header)
    (path / "header.json").write_text(json.dumps(header))
    reseal(path)


def change_shard(path, number, change, offsets=lambda about: None):
    from safetensors import safe_open
    from safetensors.torch import save_file

    file = sorted(path.glob("shard-*"))[number]
    with safe_open(file, "pt") as opened:
        about, tensors = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    begins = json.loads(about["DCP_SHARDING_INFO"])
    change(tensors)
    offsets(begins)
    save_file(tensors, file, about | {"DCP_SHARDING_INFO": json.dumps(begins)})
    reseal(path)


HEAD = "model/lm_head.weight"


def cut(name):
    return lambda tensors: tensors.update({name: tensors[name][:-1].clone()})


REFUSED = {
    "a flipped bit": (lambda p: flip(p, "shard-00001-model-00001-of-00001.safetensors"), "the checksum of shard-00001"),
    "a flipped header": (lambda p: flip(p, "header.json"), "the checksum of header.json"),
    "no checksums": (lambda p: (p / "checksums.json").unlink(), "it has no checksums.json"),
    "a lost shard": (lambda p: sorted(p.glob("shard-*"))[1].unlink(), "only in checksums.json"),
    "one file more": (lambda p: (p / "x.safetensors").write_bytes(b""), "'x.safetensors' only among its files"),
    "a pickle": (
        lambda p: ((p / "a.pt").write_bytes(b"\x80\4\x95"), reseal(p)),
        "must hold safetensors files, found 'a.pt'",
    ),
    "a pickle of torch": (
        lambda p: (sorted(p.glob("shard-*"))[0].write_bytes(b"PK\3\4" + bytes(99)), reseal(p)),
        "is a pickle",
    ),
    "a lost shard, resealed": (
        lambda p: (sorted(p.glob("shard-*"))[1].unlink(), reseal(p)),
        "must",
    ),
    "a gap": (lambda p: change_shard(p, 0, cut(HEAD)), f"all rows of '{HEAD}' once"),
    "rows twice": (
        lambda p: change_shard(p, 1, lambda t: None, lambda about: about[HEAD].update(saved_offsets=[0, 0])),
        f"all rows of '{HEAD}' once",
    ),
    "a negative row": (
        lambda p: change_shard(p, 0, lambda t: None, lambda about: about[HEAD].update(saved_offsets=[-1, 0])),
        f"all rows of '{HEAD}' once",
    ),
    "no offsets": (lambda p: change_shard(p, 0, lambda t: None, dict.clear), "where its shards begin"),
    "a column": (
        lambda p: change_shard(p, 0, lambda t: None, lambda about: about[HEAD].update(saved_offsets=[0, 1])),
        f"all rows of '{HEAD}' once",
    ),
    "too few rows": (lambda p: change_shard(p, 1, cut(HEAD)), "must hold 'lm_head.weight' of model as"),
    "another dtype": (
        lambda p: [change_shard(p, i, lambda t: t.update({HEAD: t[HEAD].float()})) for i in (0, 1)],
        "of 'lm_head.weight' as [30, 16] torch.float32, found [30, 16] torch.float64",
    ),
    "two dtypes": (lambda p: change_shard(p, 0, lambda t: t.update({HEAD: t[HEAD].float()})), "in one dtype"),
    "one rng": (lambda p: change_header(p, lambda h: h["rng"].pop()), "an entry for each process"),
    "rng of a file": (lambda p: change_header(p, lambda h: h.update(rng=h["rng"][0])), "rng must be a list"),
    "an unknown name": (lambda p: change_header(p, lambda h: h.update(colour=1)), "must have no 'colour'"),
    "another algorithm": (lambda p: change_header(p, lambda h: h.update(algorithm="DPO")), "found one of DPO"),
    "no rng of a process": (
        lambda p: change_shard(p, 0, lambda t: t.pop("rng/0/torch")),
        "rng must hold the states of torch",
    ),
}


@pytest.mark.parametrize("how", REFUSED)
def test_a_wrong_folder_is_refused_and_changes_nothing(how, copied):
    spoil, says = REFUSED[how]
    spoil(copied)
    with pytest.raises(CheckpointError) as caught:
        GRPO.from_checkpoint(copied, reward_fn=runs.reward)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_leftovers_of_a_kill_are_repaired(folder, tmp_path):
    """Between the two renames of a folder that takes another's place, and in the middle of writing one."""
    run = Path(shutil.copytree(folder / "sft-none-2", tmp_path / "run"))
    last = newest(run)
    last.rename(last.with_name(f".{last.name}.old"))
    (run / "checkpoints" / ".step-00000099.12.tmp").mkdir()
    trainer = runs.train("sft", "none", run, 4, True)
    assert trainer.state.step == 4
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000004.safetensors"]


def test_another_model_is_refused(folder):
    with pytest.raises(CheckpointError, match="must hold"):
        SFT.from_checkpoint(newest(folder / "sft-full-2"), model=llama(eos_token_id=3).double())
