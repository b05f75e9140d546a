"""A header, or a tensor, that does not fit is one kind of error, in one line, and changes nothing."""

import copy
import json
import struct

import pytest
import torch
from example_checkpoints import MOE, example, put_at, refused
from mutations import write_with_checksums
from tiny_qwen2 import tiny_qwen2
from trained_models import shifted, weights_of

from strop.algorithms.sft import SFT
from strop.callbacks import EarlyStopping
from strop.training import checkpoint
from strop.training.checkpoint import CheckpointError


@pytest.fixture
def moe_file(tmp_path):
    header, tensors = example("moe")
    checkpoint.write(tmp_path / "sft.pt", tensors, header)
    return tmp_path / "sft.pt", header, tensors


BAD_HEADERS = [
    ("state.step", "x", "state.step must be a whole number from 0 to 2⁵³, found 'x'"),
    ("state.step", -1, "state.step must be a whole number from 0"),
    ("state.step", True, "state.step must be a whole number from 0 to 2⁵³, found True"),
    ("state.step", 2**70, "state.step must be a whole number"),
    ("state.step", 1.0, "state.step must be a whole number"),
    ("state.seconds", -0.5, "state.seconds must be a number of at least 0, found -0.5"),
    ("state.seconds", 10**400, "state.seconds must be a number of at least 0, found a whole number of more than 40 digits"),
    ("state.position", 7, "state.position must be at most num_rows=0, found 7"),
    ("state.first_step", 7, "state.first_step must be at most step=1, found 7"),
    ("state.more", 7, "state must have no 'more', found one"),
    ("state", None, "state must be an object, found None"),
    ("config.optim.learning_rate", "1e-4", "config.optim.learning_rate must be 0.0001, found '1e-4'"),
    ("config.optim.learning_rate", "x", "config: .*learning_rate must be a number in plain decimal digits.*found 'x'"),
    ("config.optim.learning_rate", -1.0, "config: learning_rate must be finite and at least 0, found -1.0"),
    ("config.optim.learning_rate", True, "config"),
    ("config.run.batch_size", 0, "config: batch_size must be at least 1, found 0"),
    ("config.run.nonsense", 1, "config: .*nonsense"),
    ("config.batch_size", 1, "config"),
    ("config.run", 5, "config: run must be a RunConfig or a dict such as .*, found 5"),
    ("algorithm", "SFT\nx", "algorithm must be the name of a class"),
    ("algorithm", 5, "algorithm must be the name of a class, found 5"),
    ("model", {}, "model.kind must be one of plain, moe, hf, found None"),
    ("model.kind", "pickle", "model.kind must be one of plain, moe, hf, found 'pickle'"),
    ("model.kind", ["moe"], "model.kind must be one of plain, moe, hf, found a list of 1"),
    ("model.kind", "plain", "model must have no 'config'"),
    ("model.class", "Other", "it must be a MoEForCausalLM"),
    ("model.engine", "os", "engine must be one of"),
    ("model.dtype", "float16", "cannot be rebuilt"),
    ("model.frozen", ["nothing"], "frozen must name weights of model, found 'nothing'"),
    ("model.frozen", "x", "model.frozen must be a list, found 'x'"),
    ("model.config.top_k", 3, "top_k must be at most num_experts=2, found 3"),
    ("model.config.rope_base", "x", "rope_base must be a number"),
    ("optim.groups", [], "must have 2 parameter groups, found 0"),
    ("optim.groups", 5, "optim.groups must be a list, found 5"),
    ("optim.params", {"nothing": {}}, "has optimiser state of 'nothing', which is not trained here"),
    ("rng.python", [3, [], None], "rng must hold states that the generators take: ValueError: state vector is the wrong size"),
    ("rng.numpy", ["MT19937", 700, 0, 0.0], "rng.python and rng.numpy must be states of these generators"),
    ("rng.numpy", ["PCG64", 1, 0, 0.0], "rng must hold states that the generators take: ValueError: set_state can only be used with legacy MT19937"),
    ("callbacks", [["EarlyStopping", {"best": "x", "num_bad": 0}]], "the state of EarlyStopping.best must be a number or null"),
    ("callbacks", [["EarlyStopping", {}]], "the state of EarlyStopping must have 'best', found none"),
    ("callbacks", [5], r"callbacks\[0\] must be the name of a class and an object, found 5"),
    ("extra", [], r"extra must be an object, found a list of 0"),
    ("ref", {"kind": "x"}, "ref.kind must be one of"),
    ("more", 1, "the header must have no 'more', found one"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "value", "match"), BAD_HEADERS)
def test_a_malformed_header_is_one_error(place, value, match, moe_file):
    path, header, tensors = moe_file
    checkpoint.write(path, tensors, put_at(header, {place: value}))
    refused(path, match, callbacks=[EarlyStopping("loss")])


@pytest.mark.parametrize(
    "name",
    ["version", "algorithm", "config", "model", "tokenizer", "state", "optim", "rng", "extra", "callbacks"],
)
def test_nothing_may_be_missing(name, moe_file):
    path, header, tensors = moe_file
    del header[name]
    checkpoint.write(path, tensors, header)
    refused(path, f"the header must have '{name}', found none")


OPTIONS = [
    ("lr", "1e-4", r"optim.groups\[0\].lr must be as .* is, found '1e-4'"),
    ("lr", -1.0, r"optim.groups\[0\].lr must be as"),
    ("lr", None, r"optim.groups\[0\].lr must be as"),
    ("betas", [0.9], r"optim.groups\[0\].betas must be as"),
    ("betas", [0.9, "x"], r"optim.groups\[0\].betas must be as"),
    ("params", [], r"optim.groups\[0\] must have options of plain values, found 'params': a list of 0"),
    ("other", {"a": 1}, r"optim.groups\[0\] must have options of plain values, found 'other': an object of 1"),
    ("betas", {"a": 1}, r"optim.groups\[0\] must have options of plain values, found 'betas'"),
    ("amsgrad", 1, r"optim.groups\[0\].amsgrad must be as False is, found 1"),
    ("maximize", True, r"optim.groups\[0\].maximize must be as False is, found"),
    ("differentiable", True, r"optim.groups\[0\].differentiable must be as False is, found"),
    ("weight_decay", None, r"optim.groups\[0\].weight_decay must be as"),
    ("weight_decay", -3.0, r"optim.groups\[0\].weight_decay must be as"),
    ("eps", -5.0, r"optim.groups\[0\].eps must be as"),
    ("betas", [5.0, 5.0], r"optim.groups\[0\].betas must be as"),
]


@pytest.mark.parametrize(("name", "value", "match"), OPTIONS)
def test_options_of_the_optimiser(name, value, match, moe_file):
    path, header, tensors = moe_file
    header["optim"]["groups"][0][name] = value
    checkpoint.write(path, tensors, header)
    refused(path, match)


def test_a_value_beside_the_tensor_of_its_name(moe_file):
    path, header, tensors = moe_file
    header["optim"]["params"]["lm_head.weight"] = {"step": "x"}
    checkpoint.write(path, tensors, header)
    refused(path, "must hold 'step' of 'lm_head.weight' once, found a tensor and a value")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.int64])
def test_weights_are_of_floats(dtype, tmp_path):
    path = tmp_path / "sft.pt"
    SFT(model=tiny_qwen2()).save(path)
    header, tensors = checkpoint.read(path)
    name = next(name for name in tensors if name.startswith("model/"))
    checkpoint.write(path, {**tensors, name: tensors[name].to(dtype)}, header)
    refused(path, f"must hold '{name.removeprefix('model/')}' of model as .* torch.float32, found .* {dtype}")


def test_an_option_the_optimiser_gets_later(moe_file):
    """A scheduler of torch leaves initial_lr in the groups, and is made after the checkpoint is loaded."""
    path, header, tensors = moe_file
    header["optim"]["groups"][0]["initial_lr"] = 0.5
    checkpoint.write(path, tensors, header)
    assert SFT.from_checkpoint(path).optimizer.param_groups[0]["initial_lr"] == 0.5


@pytest.mark.parametrize(
    ("name", "new", "match"),
    [
        ("optim/lm_head.weight/exp_avg", None, "found 'exp_avg' only in the optimiser's state of 'lm_head.weight'"),
        ("optim/lm_head.weight/other", torch.ones(2), "of the optimiser's state of 'lm_head.weight', found 'other' only in the checkpoint"),
        ("optim/lm_head.weight/exp_avg", torch.ones(2), r"must hold 'exp_avg' of .* 'lm_head.weight' as \[20, 16\] .*found \[2\]"),
        ("optim/lm_head.weight/step", torch.tensor(float("nan")), "finite count of steps"),
        ("optim/lm_head.weight/step", torch.tensor(3), "must hold 'step'"),
        ("model/lm_head.weight", None, "found 'lm_head.weight' only in model"),
        ("model/lm_head.weight", torch.ones(20, 16).double(), "must hold 'lm_head.weight' of model as .* torch.float32, found .* torch.float64"),
        ("rng/torch", None, "rng must hold the states of torch, numpy"),
        ("rng/torch", torch.ones(5056, dtype=torch.uint8), "rng must hold states that the generators take: RuntimeError"),
        ("rng/torch", torch.ones(7, dtype=torch.uint8), "rng must hold states that the generators take: RuntimeError"),
        ("rng/numpy", torch.full((624,), -1), "rng/numpy must be a state of numpy's generator"),
        ("rng/numpy", torch.ones(3, dtype=torch.int64), "rng must hold states that the generators take: IndexError"),
        ("rng/cuda/0", torch.ones(3), "rng/cuda/0 must be bytes"),
        ("other/x", torch.ones(3), "must hold tensors of model, optim, .*found 'other/x'"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(name, new, match, moe_file):
    path, header, tensors = moe_file
    tensors = {key: tensor for key, tensor in tensors.items() if key != name} | ({} if new is None else {name: new})
    checkpoint.write(path, tensors, header)
    refused(path, match)


def test_the_text_of_a_header(moe_file):
    """What json.loads lets pass and JSON does not have; bytes that are no text; nesting without end."""
    path, header, tensors = moe_file
    text = json.dumps(header)
    for bad, match in (
        (text.replace('"step": 1', '"step": NaN'), "state.step must be a whole number from 0 to 2⁵³, found nan"),
        (
            text.replace('"seconds": ', '"seconds": 1e999, "old": '),
            "state.seconds must be a number of at least 0, found inf",
        ),
        (text.replace('"step": 1', '"step": 1, "step": 1'), "a name stands twice"),
        ("[" * 200_000, "nested too deeply"),
        (text.replace('"extra": {}', '"extra": {"a": ' + "[" * 50 + "]" * 50 + "}"), "at most 20 levels"),
        ("7", "must be of format 2, found None"),
        ("", "its header is not JSON"),
    ):
        assert bad != text
        write_with_checksums(path, bad, tensors)
        refused(path, match)


@pytest.mark.parametrize("shape", [[2**63, 0], [0, 10**30], [0, -1], [0, 1.0], [True, 0], "x", 0, [[]]])
def test_shapes_that_no_tensor_has(shape, moe_file):
    """Of no bytes, so that only the shape is wrong."""
    path, _, _ = moe_file
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    index = json.loads(data[8 : 8 + length])
    index["extra/x"] = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    text = json.dumps(index).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    refused(path, "damaged or no safetensors file")


def test_two_places_of_one_tensor(moe_file):
    path, header, tensors = moe_file
    kept = {name: tensor for name, tensor in tensors.items() if name != "model/lm_head.weight"}
    for aliases, match in (
        (
            {"model/lm_head.weight": "nothing"},
            "aliases must be new names of tensors, found 'model/lm_head.weight' for 'nothing'",
        ),
        ({"model/model.norm.weight": "rng/torch"}, "aliases must be new names"),
        ({"model/lm_head.weight": "checksums"}, "aliases must be new names"),
        ({"model/lm_head.weight": 5}, "aliases.'model/lm_head.weight' must be a text, found 5"),
    ):
        write_with_checksums(path, json.dumps({**header, "aliases": aliases}), kept)
        refused(path, match)


def test_a_refused_checkpoint_changes_nothing(moe_file):
    """The last check of all fails: weights, optimiser, state and generators are as before."""
    path, header, tensors = moe_file
    tensors["rng/numpy"] = torch.ones(3, dtype=torch.int64)
    sft = SFT(model=shifted(MOE()))
    sft.train_step([[5, 6]], [[7, 1]])
    sft.train_step([[5, 6]], [[7, 1]])
    before = weights_of(sft).clone(), copy.deepcopy(sft.optimizer.state_dict()), copy.deepcopy(sft.state)
    random_state = torch.get_rng_state()
    with pytest.raises(CheckpointError, match="rng must hold"):
        checkpoint.Saved(path, header, tensors, sft.config, 1, pytest.fail).put(sft)
    assert torch.equal(weights_of(sft), before[0])
    assert sft.state == before[2]
    assert sft.optimizer.state_dict()["param_groups"] == before[1]["param_groups"]
    for index, state in before[1]["state"].items():
        assert all(torch.equal(sft.optimizer.state_dict()["state"][index][key], value) for key, value in state.items())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_callback_of_ones_own_that_cannot_take_its_state(moe_file):
    class Mine(EarlyStopping):
        def load_state_dict(self, state):
            self.best = state["nothing"]

    path, header, tensors = moe_file
    checkpoint.write(path, tensors, {**header, "callbacks": [["Mine", {"a": 1}]]})
    refused(path, "the state of Mine does not fit: KeyError: 'nothing'", callbacks=[Mine("loss")])


def test_frozen_weights_of_the_moe_stay_frozen(tmp_path):
    """As those of a Hugging Face model do; they were trained after from_checkpoint."""
    sft = SFT(model=MOE())
    sft.module.get_parameter("lm_head.weight").requires_grad_(False)
    sft = SFT(model=sft.module, learning_rate=1e-2)
    sft.train_step([[2, 3]], [[4, 1]])
    sft.save(tmp_path / "sft.pt")
    again = SFT.from_checkpoint(tmp_path / "sft.pt")
    assert [name for name, p in again.module.named_parameters() if not p.requires_grad] == ["lm_head.weight"]
