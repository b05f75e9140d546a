"""Checkpoints for the tests to damage and change."""

import copy
import functools
import tempfile
from pathlib import Path

import pytest
from tiny_qwen2 import tiny_qwen2
from trained_models import tiny_moe

from strop.algorithms.sft import SFT
from strop.training import checkpoint
from strop.training.checkpoint import CheckpointError

MOE, QWEN2 = tiny_moe, functools.partial(tiny_qwen2, num_hidden_layers=1)


def saved(path, model, **options):
    sft = SFT(model=model, **options)
    sft.train_step([[2, 3]], [[4, 1]])
    sft.save(path)
    return checkpoint.read(path)


def with_lora_of_ones_own():
    import peft

    lora = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return {"model": peft.get_peft_model(QWEN2(), lora)}


MAKE = {
    "moe": lambda: {"model": MOE()},
    "hf": lambda: {"model": QWEN2()},
    "lora": lambda: {"model": QWEN2(), "lora": {"r": 2}},
    "own lora": with_lora_of_ones_own,
}


@functools.cache
def _example(kind):
    with tempfile.TemporaryDirectory() as folder:
        header, tensors = saved(Path(folder) / "sft.pt", **MAKE[kind]())
        return header, {name: tensor.clone() for name, tensor in tensors.items()}


def example(kind):
    """Header and tensors of a checkpoint, for a test to change."""
    header, tensors = _example(kind)
    return copy.deepcopy(header), dict(tensors)


def refused(path, match, **arguments):
    with pytest.raises(CheckpointError, match=match) as caught:
        SFT.from_checkpoint(path, **arguments)
    assert "\n" not in str(caught.value)


def put_at(about, changes):
    about = copy.deepcopy(about)
    for place, value in changes.items():
        *parents, leaf = place.split(".")
        inner = about
        for parent in parents:
            inner = inner[parent]
        inner[leaf] = value
    return about
