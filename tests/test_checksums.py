"""Damage is found: in checkpoints, and in the folder of a model."""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from example_checkpoints import MOE, QWEN2, example, refused
from trained_models import shifted, weights_of

from strop import checksums
from strop.algorithms.sft import SFT
from strop.models import load_model
from strop.moe import MoETransformer
from strop.tasks import CharTokenizer
from strop.training import checkpoint
from strop.training.checkpoint import CheckpointError

ROWS = [{"prompt": [2 + i % 7, 3], "completion": [4 + i, 1]} for i in range(6)]


@pytest.fixture
def moe_file(tmp_path):
    header, tensors = example("moe")
    checkpoint.write(tmp_path / "sft.pt", tensors, header)
    return tmp_path / "sft.pt", header, tensors


# ---- checkpoints ----


def test_the_checksum_by_hand():
    """The CRC-32 of the sums of 64 rows of 509 words, then of what is left: in Python's own numbers."""
    import zlib

    data = random.Random(0).randbytes(2 * checksums.BLOCK + 1001)
    words = np.frombuffer(data, "<u8", 2 * 64 * 509).tolist()
    sums = b""
    for block in range(2):
        for column in range(509):
            total = sum(words[block * 64 * 509 + row * 509 + column] for row in range(64))
            sums += (total % 2**64).to_bytes(8, "little")
    want = zlib.crc32(sums + data[2 * checksums.BLOCK :])
    assert checksums.checksum(data) == want
    assert checksums.checksum(b"123456789") == 0xCBF43926  # of CRC-32's own definition
    assert checksums.checksum(b"") == 0


def test_a_checksum_finds_flips_and_blocks_that_changed_places():
    data = np.frombuffer(random.Random(1).randbytes(checksums.BLOCK + 4096), np.uint8)
    want, draw = checksums.checksum(data), random.Random(2)
    for _ in range(300):
        other = data.copy()
        other[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        assert checksums.checksum(other) != want
    for size in (512, 4096):  # a sector, a page: all pairs of the first with another
        for place in range(size, len(data) - size, size):
            other = data.copy()
            other[:size], other[place : place + size] = data[place : place + size], data[:size]
            assert checksums.checksum(other) != want


def test_every_flipped_bit_of_a_checkpoint_is_found(moe_file):
    """In the length, the index, the header, the checksums, the tensors: 400 places of one file."""
    path, _, tensors = moe_file
    whole, draw = path.read_bytes(), random.Random(0)
    places = [*range(8), *(draw.randrange(len(whole)) for _ in range(392))]
    for place in places:
        data = bytearray(whole)
        data[place] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"sft\.pt "):
            checkpoint.read(path)
    path.write_bytes(whole)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in checkpoint.read(path)[1].items())


def test_the_damaged_tensor_is_named(moe_file):
    path, _, tensors = moe_file
    whole = bytearray(path.read_bytes())
    place = bytes(whole).index(tensors["optim/lm_head.weight/exp_avg"].numpy().tobytes())
    whole[place + 5] ^= 8
    path.write_bytes(whole)
    refused(path, r"sft\.pt is damaged: the checksum of 'optim/lm_head.weight/exp_avg' must be \w{8}, found \w{8}")


def test_resume_goes_on_from_the_newest_checkpoint_that_is_whole(tmp_path):
    """A bit of the newest is flipped, deep in its tensors: the result is that of the undisturbed run."""
    options = {"batch_size": 2, "learning_rate": 1e-2, "save_every": 2, "keep_checkpoints": 0}
    SFT(model=MOE(), **options).train(ROWS, num_steps=6, output_dir=tmp_path)
    for step in (4, 6):
        path = tmp_path / "checkpoints" / f"step-0000000{step}.safetensors"
        data = bytearray(path.read_bytes())
        data[-5000] ^= 1
        path.write_bytes(data)
    again = SFT(model=MOE(), **options)
    with (
        pytest.warns(
            UserWarning, match=r"step-00000006\.safetensors is damaged: the checksum .*; taking the one before"
        ),
        pytest.warns(
            UserWarning, match=r"step-00000004\.safetensors is damaged: the checksum .*; taking the one before"
        ),
    ):
        history = again.train(ROWS, num_steps=8, output_dir=tmp_path, resume=True)
    assert [entry["step"] for entry in history.steps] == list(range(1, 9))
    whole = SFT(model=MOE(), **options)
    whole.train(ROWS, num_steps=8)
    assert torch.equal(weights_of(again), weights_of(whole))


# ---- the folder of a model ----


def written(folder, kind, tokenizer=None):
    sft = SFT(model=MOE() if kind == "moe" else QWEN2(), tokenizer=tokenizer)
    sft.save_pretrained(folder)
    return sft


@pytest.mark.parametrize("kind", ["moe", "hf"])
def test_a_flipped_bit_of_a_final_folder_is_found(kind, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "final"
    sft = written(folder, kind, CharTokenizer("abc"))
    listed = json.loads((folder / "checksums.json").read_text())
    assert listed.keys() == {file.name for file in folder.iterdir()} - {"checksums.json"}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= listed.keys()
    model, tokenizer = load_model(folder)
    assert tokenizer.encode("cab") == CharTokenizer("abc").encode("cab")
    opened = AutoModelForCausalLM.from_pretrained(folder)  # which looks at none of this
    ids = torch.tensor([[2, 3, 4]])
    torch.testing.assert_close(opened(ids).logits, sft.model(ids).logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(ids).logits, sft.model(ids).logits, rtol=1e-4, atol=1e-4)
    for name in listed:
        whole = (folder / name).read_bytes()
        data = bytearray(whole)
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data)
        match = f"{name} must have the checksum .*damaged, or was changed on purpose: then delete .*checksums.json"
        with pytest.raises(ValueError, match=match):
            load_model(folder)
        (folder / name).write_bytes(whole)


def test_a_final_folder_changed_on_purpose(tmp_path):
    """The error says what to do, and that does it."""
    written(tmp_path, "hf")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    (tmp_path / "notes.txt").write_text("a file beside them is nobody's business")
    with pytest.raises(ValueError, match=r"delete .*checksums\.json"):
        load_model(tmp_path)
    (tmp_path / "checksums.json").unlink()
    assert load_model(tmp_path)[0].config.max_position_embeddings == 128
    (tmp_path / "checksums.json").write_text("[]")
    with pytest.raises(ValueError, match=r"checksums\.json must hold an object"):
        load_model(tmp_path)


def test_strops_own_moe_is_verified_and_saved_over(tmp_path):
    sft = written(tmp_path, "moe")
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text() + "\n")
    with pytest.raises(ValueError, match=r"config\.json must have the checksum"):
        MoETransformer.load(tmp_path)
    sft.module.moe.save(tmp_path)  # other files now, of which the old checksums say nothing
    assert MoETransformer.load(tmp_path).config == sft.module.moe.config


def test_a_folder_half_old_and_half_new_is_found(tmp_path, monkeypatch):
    """Killed while the files were put in their places: whichever came last, the folder does not agree with itself."""
    whole = os.replace
    for survived in (1, 2):
        folder = tmp_path / str(survived)
        written(folder, "moe")
        count = 0

        def replace(source, target):
            nonlocal count
            if Path(target).parent == folder:  # noqa: B023
                count += 1
                if count > survived:  # noqa: B023
                    raise KeyboardInterrupt
            whole(source, target)

        other = SFT(model=shifted(MOE()))
        other.module.config.eos_token_id = 2
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint.os, "replace", replace)
            with pytest.raises(KeyboardInterrupt):
                other.save_pretrained(folder)
        with pytest.raises(ValueError, match="must have the checksum"):
            load_model(folder)


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_resume_passes_over_what_is_no_file(kind, tmp_path):
    options = {"batch_size": 2, "learning_rate": 1e-2, "save_every": 2, "keep_checkpoints": 0}
    SFT(model=MOE(), **options).train(ROWS, num_steps=2, output_dir=tmp_path)
    odd = tmp_path / "checkpoints" / "step-00000009.safetensors"
    odd.mkdir() if kind == "folder" else odd.symlink_to(tmp_path / "nowhere")
    again = SFT(model=MOE(), **options)
    with pytest.warns(UserWarning, match=r"no checkpoint at .*step-00000009\.safetensors; taking the one before"):
        history = again.train(ROWS, num_steps=4, output_dir=tmp_path, resume=True)
    assert [entry["step"] for entry in history.steps] == [1, 2, 3, 4]


def test_checksums_name_files_of_their_folder(tmp_path):
    (tmp_path / "outside").write_text("secret")
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("../outside", str(tmp_path / "outside")):
        (folder / "checksums.json").write_text(json.dumps({name: "00000000"}))
        with pytest.raises(ValueError, match=r"checksums\.json must name files of its folder, found"):
            checksums.verify(folder)
