"""What the torch module refuses, and what trainers read of it."""

import subprocess
import sys

import numpy as np
import pytest
from moe_models import random_model, small_config

from strop.moe import MoEConfig, MoETransformer

torch = pytest.importorskip("torch")

from torch_models import IDS, MASK, module, same_tensor  # noqa: E402

from strop.moe.torch import MoEForCausalLM  # noqa: E402


@pytest.fixture
def model(moe_engine):
    return module(moe_engine)


# ---- refusals ----


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"input_ids": torch.tensor([[1, 11]])}, ValueError, r"input_ids must be from 0 to 10 .*found 11 at row 0, column 1"),
        ({"input_ids": torch.tensor([1, 2])}, ValueError, r"input_ids must have the shape \(batch, tokens\), found \(2,\)"),
        ({"input_ids": torch.ones(1, 2, dtype=torch.long, device="meta")}, TypeError, "input_ids must be on the CPU"),
        ({"attention_mask": MASK[:, :3]}, ValueError, r"attention_mask must have the shape \(2, 4\) of input_ids"),
        ({"attention_mask": MASK * 2}, ValueError, "attention_mask must hold only 0 and 1, found 2"),
        ({"labels": IDS[:, 1:]}, ValueError, r"labels must have the shape \(2, 4\) of input_ids, found \(2, 3\)"),
        ({"labels": IDS + 3}, ValueError, r"labels must be from 0 to 10 .*found 11 at row 1, column 3"),
        ({"labels": IDS.float()}, TypeError, "labels must be integers, found float32"),
        ({"position_ids": torch.arange(3)[None]}, ValueError, r"position_ids must have the shape \(2, 4\) .*or \(1, 4\)"),
        ({"logits_to_keep": -1}, ValueError, "logits_to_keep must be at least 0, found -1"),
        ({"inputs_embeds": torch.zeros(1)}, ValueError, "inputs_embeds must be None or False .*found Tensor"),
        ({"use_cache": True}, ValueError, "use_cache must be None or False .*found True"),
        ({"past_key_values": object()}, ValueError, "past_key_values must be None or False"),
        ({"token_type_ids": IDS}, TypeError, "unexpected keyword argument 'token_type_ids'"),
    ],
)  # fmt: skip
def test_forward_refuses(model, arguments, error, match):
    with pytest.raises(error, match=match):
        model(**{"input_ids": IDS, **arguments})


def test_forward_accepts_options_that_are_off(model):
    found = model(IDS, use_cache=False, past_key_values=None, output_attentions=False, output_hidden_states=False)
    same_tensor(found.logits, model(IDS).logits, model)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"num_beams": 4}, TypeError, "unexpected keyword argument 'num_beams'"),
        ({"repetition_penalty": 1.1}, TypeError, "unexpected keyword argument 'repetition_penalty'"),
        ({"input_ids": torch.tensor([[1, 11]])}, ValueError, "input_ids must be from 0 to 10 .*found 11"),
        ({"attention_mask": MASK[:1]}, ValueError, r"attention_mask must have the shape \(2, 4\) of input_ids"),
        ({"max_new_tokens": 21}, ValueError, "max_new_tokens must be at most 20 after a prompt of 4 tokens"),
        ({"eos_token_id": 11}, ValueError, "eos_token_id must be below vocab_size=11, found 11"),
        ({"do_sample": True, "temperature": 0.0}, ValueError, "temperature must be above 0 with do_sample=True, found 0"),
    ],
)  # fmt: skip
def test_generate_refuses(model, arguments, error, match):
    with pytest.raises(error, match=match):
        model.generate(**{"input_ids": IDS, "max_new_tokens": 2, **arguments})


def test_options_without_effect_say_so(model):
    with pytest.warns(UserWarning, match="temperature, top_p without effect: do_sample=False is greedy"):
        model.generate(IDS, max_new_tokens=1, temperature=0.7, top_p=0.5)
    model.generate(IDS, max_new_tokens=1, temperature=0.0, top_k=0)  # says the same as greedy
    with pytest.warns(UserWarning, match="gradient checkpointing has no effect"):
        model.gradient_checkpointing_enable()
    assert not model.is_gradient_checkpointing
    model.gradient_checkpointing_disable()


def test_wrong_construction():
    with pytest.raises(TypeError, match="moe must be a MoETransformer, found MoEConfig"):
        MoEForCausalLM(small_config())
    moe = random_model(small_config(), dtype=np.float32)
    moe.params["model.norm.weight"].flags.writeable = False
    with pytest.raises(ValueError, match=r"moe.params\['model.norm.weight'\] must be writable"):
        MoEForCausalLM(moe)


def test_wrong_loading(model, tmp_path):
    state = model.state_dict()
    with pytest.raises(ValueError, match="assign must be False"):
        model.load_state_dict(state, assign=True)
    with pytest.raises(RuntimeError, match=r"Missing key.*model.norm.weight"):
        model.load_state_dict({name: value for name, value in state.items() if name != "model.norm.weight"})
    with pytest.raises(RuntimeError, match=r"size mismatch for model.norm.weight"):
        model.load_state_dict({**state, "model.norm.weight": torch.ones(9)})
    tied = module(model.moe.engine.name, tie_embeddings=True)
    with pytest.raises(ValueError, match=r"lm_head.weight in state_dict must equal model.embed_tokens.weight"):
        tied.load_state_dict({**tied.state_dict(), "lm_head.weight": torch.zeros(11, 8)})
    with pytest.raises(TypeError, match=r"dtype must be torch.float32 or torch.float64, found torch.bfloat16"):
        MoEForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with pytest.raises(FileNotFoundError):
        MoEForCausalLM.from_pretrained(tmp_path / "nothing", engine="numpy")


# ---- what trainers read ----


def test_attributes_that_trainers_read():
    config = MoEConfig(eos_token_id=2, pad_token_id=0)
    model = MoEForCausalLM(MoETransformer(config, "numpy"))
    assert model.config.model_type == "mixtral"
    assert (model.config.vocab_size, model.config.hidden_size, model.config.max_position_embeddings) == (1000, 64, 512)
    assert (model.config.eos_token_id, model.config.pad_token_id) == (2, 0)
    assert model.config.to_dict()["num_local_experts"] == 4
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    assert model.get_input_embeddings().weight.shape == (1000, 64)
    assert model.get_output_embeddings().weight is model.lm_head.weight
    assert model.training
    assert "engine='numpy'" in repr(model)


WITHOUT_TRANSFORMERS = """
import sys
sys.modules["transformers"] = None  # as if it were not installed
import torch
from strop.moe import MoEConfig, MoETransformer
from strop.moe.torch import MoEForCausalLM
model = MoEForCausalLM(MoETransformer(MoEConfig(vocab_size=9, eos_token_id=(1, 2)), "numpy"))
ids = torch.tensor([[1, 2, 3]])
out = model(ids, labels=ids)
assert list(out) == ["loss", "aux_loss", "logits"] and out["logits"] is out.logits is out[2]
assert out.to_tuple()[0] is out.loss
assert model(ids, labels=ids, return_dict=False)[0] == out.loss
assert model(ids, output_router_logits=False).loss is None
assert model.config.eos_token_id == [1, 2] and model.config.to_dict()["vocab_size"] == 9
out.loss.backward()
model.generate(ids, max_new_tokens=2)
model.save_pretrained(sys.argv[1])
assert MoEForCausalLM.from_pretrained(sys.argv[1], engine="numpy").moe.config == model.moe.config
"""


def test_transformers_is_not_needed(tmp_path):
    subprocess.run([sys.executable, "-c", WITHOUT_TRANSFORMERS, tmp_path], check=True)


def test_strop_moe_does_not_import_torch():
    code = "import sys, strop.moe; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
