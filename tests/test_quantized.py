"""Quantised bases: the numbers are those of LoRA on the dequantised base, in training, in rollouts, resumed and merged."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from strop import DPO, GRPO, SFT
from strop.config import LoRAConfig, Sampling
from strop.models import Policy, load_model
from strop.models.prepare import with_lora
from strop.models.quantized import (
    QuantizedLinear,
    check_differentiable,
    dequantize_and_merge,
    num_weights,
    quantization_of,
    quantize,
)
from strop.rollout import generate
from strop.training.checkpoint import CheckpointError
from tests.tiny_qwen2 import tiny_qwen2

ROWS = [{"prompt": [2 + i % 5, 3], "completion": [4 + i % 3, 5, 6]} for i in range(8)]
PAIRS = [{"prompt": [2, 3], "chosen": [4, 5], "rejected": [6, 7 + i]} for i in range(4)]
LORA = {"r": 2, "alpha": 4}


@pytest.fixture(params=["nf4", "int8"])
def method(request):
    if request.param == "nf4":
        pytest.importorskip("bitsandbytes")
    return request.param


def dequantized(model):
    """The same model with ordinary weights: the numbers of its quantised layers."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantizedLinear):
            plain = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            plain.weight, plain.bias = nn.Parameter(module.dequantized(), requires_grad=False), module.bias
            model.set_submodule(name, plain)
    return model


def loss_and_gradients(trainer, rows):
    trainer.run_step(lambda: trainer.step_on(trainer.prepare(rows)))
    return {name: param.detach().clone() for name, param in trainer.module.named_parameters() if param.requires_grad}


# ---- the layer ----


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 5), (64, 64), (7, 130), (33, 64)])
def test_weights_are_near_their_originals(rows, columns, method):
    torch.manual_seed(0)
    source = nn.Linear(columns, rows)
    layer = QuantizedLinear(source, method)
    error = (layer.dequantized() - source.weight).abs()
    if method == "int8":  # half a step of the row's scale
        assert (error <= source.weight.abs().amax(1, keepdim=True) / 254 * (1 + 1e-5)).all()
    else:  # half the widest gap between two of the 16 numbers, times the largest of the 64 neighbours
        assert (error <= 0.152 * source.weight.abs().max()).all()
        assert error.max() > 0 or rows * columns == 1
    assert layer.weight.dtype == (torch.uint8 if method == "nf4" else torch.int8)


def test_int8_by_hand():
    source = nn.Linear(2, 2, bias=False)
    source.weight.data = torch.tensor([[1.27, -0.634], [0.0, 0.0]])
    layer = QuantizedLinear(source, "int8")
    assert layer.weight.tolist() == [[127, -63], [0, 0]]
    torch.testing.assert_close(layer.dequantized(), torch.tensor([[1.27, -0.63], [0.0, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_and_gradient_are_those_of_the_dequantised_weight(dtype, method):
    torch.manual_seed(0)
    layer = QuantizedLinear(nn.Linear(70, 9).to(dtype), method)
    x = torch.randn(2, 3, 70, dtype=dtype, requires_grad=True)
    again = x.detach().clone().requires_grad_()
    wanted = nn.functional.linear(again, layer.dequantized(), layer.bias)
    for _ in range(2):  # once more after a forward without gradient, which must leave no trace
        found = layer(x)
        torch.testing.assert_close(found, wanted)
        (gradient,) = torch.autograd.grad(found.float().square().sum(), x)
        (wanted_gradient,) = torch.autograd.grad(wanted.float().square().sum(), again, retain_graph=True)
        torch.testing.assert_close(gradient, wanted_gradient)
        with torch.no_grad():
            layer.eval()(x)
        layer.train()


def test_under_autocast_the_product_is_in_bfloat16(method):
    layer = QuantizedLinear(nn.Linear(8, 4), method)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 8)).dtype == torch.bfloat16


# ---- a model ----


def test_all_linear_layers_but_the_head_are_quantised(method):
    model = tiny_qwen2()
    size = sum(param.numel() for param in model.parameters())
    quantize(model, method)
    plain = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    assert plain == ["lm_head"]
    assert quantization_of(model) == method
    assert num_weights(model) == size
    assert not any(p.requires_grad for n, p in model.named_parameters() if n.endswith(("proj.weight", "scales")))


@pytest.mark.parametrize(("trainer", "rows"), [(SFT, ROWS), (DPO, PAIRS)])
def test_training_equals_lora_on_the_dequantised_base(trainer, rows, method):
    base = tiny_qwen2()
    quantize(base, method)
    options = {"lora": LORA, "learning_rate": 1e-2, "batch_size": 4}
    ours = trainer(model=copy.deepcopy(base), quantize=method, **options)
    other = trainer(model=dequantized(base), **options)
    for step in range(3):
        batch = rows[:4] if step == 0 else rows[-4:]
        found, wanted = loss_and_gradients(ours, batch), loss_and_gradients(other, batch)
        for name, param in wanted.items():
            torch.testing.assert_close(
                found[name], param, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
            )
    assert any(bool(param.any()) for name, param in found.items() if ".lora_B." in name)


def test_gradients_are_the_same_before_and_after_a_rollout(method):
    """A forward without gradient changes nothing: bitsandbytes' own layers repack their weights there on a CPU."""
    grpo = GRPO(
        model=tiny_qwen2(), quantize=method, lora=LORA, reward_fn=lambda completions: [0.0] * len(completions),
        group_size=2, max_new_tokens=3,
    )  # fmt: skip
    ids = torch.tensor([[2, 3, 4, 5]])

    def gradients():
        grpo.module.zero_grad()
        grpo.module(ids).logits.square().sum().backward()
        return [param.grad.clone() for param in grpo.module.parameters() if param.grad is not None]

    before = gradients()
    grpo.run_step(lambda: grpo.step_on(grpo.prepare([{"prompt": [2, 3]}] * 2)))
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(), strict=True))


def test_rollout_log_probs_are_those_of_a_fresh_forward(method):
    model = tiny_qwen2()
    quantize(model, method)
    rollout = generate(Policy(model), [[2, 3], [4, 5, 6, 7]], Sampling(max_new_tokens=6), seed=0)
    for trajectory, prompt in zip(rollout, ([2, 3], [4, 5, 6, 7]), strict=True):
        ids = trajectory.ids_T[None]
        logps = dequantized(model)(ids).logits.log_softmax(-1)[0]
        wanted = logps[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(trajectory.rollout_logps_t, wanted, rtol=1e-4, atol=1e-4)


# ---- what is kept ----


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, method):
    def run(output, steps, **more):
        sft = SFT(model=tiny_qwen2(), quantize=method, lora=LORA, learning_rate=1e-2, batch_size=2, save_every=1)
        sft.train(ROWS, num_steps=steps, output_dir=tmp_path / output, **more)
        return [param for param in sft.module.parameters() if param.requires_grad]

    whole = run("whole", 4)
    run("half", 2)
    assert all(torch.equal(a, b) for a, b in zip(whole, run("half", 4, resume=True), strict=True))


def test_a_checkpoint_holds_the_adapter_and_names_the_base(tmp_path, method):
    make = {"quantize": method, "lora": LORA, "learning_rate": 1e-2}
    sft = SFT(model=tiny_qwen2(), **make)
    loss_and_gradients(sft, ROWS[:2])
    sft.save(tmp_path / "sft.pt")
    names = {name for name in load_file(tmp_path / "sft.pt") if name.startswith("model/")}
    assert names == {f"model/{name}" for name, param in sft.module.named_parameters() if param.requires_grad}
    again = SFT.from_checkpoint(tmp_path / "sft.pt", model=tiny_qwen2())
    assert quantization_of(again.module) == method
    first, second = (loss_and_gradients(one, ROWS[2:4]) for one in (sft, again))
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(CheckpointError, match="model must be given"):
        SFT.from_checkpoint(tmp_path / "sft.pt")
    other = tiny_qwen2()
    other.model.layers[0].mlp.up_proj.weight.data *= 1.01  # in the scales alone
    with pytest.raises(CheckpointError, match=r"model must have the weights that the adapter of .* was trained on"):
        SFT.from_checkpoint(tmp_path / "sft.pt", model=other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_model_is_the_dequantised_base_and_the_adapter_rounded_once(dtype, tmp_path, method):
    from transformers import AutoModelForCausalLM

    model = tiny_qwen2().to(dtype)
    sft = SFT(model=model, quantize=method, lora={**LORA, "merge": True}, learning_rate=1e-1, batch_size=2)
    sft.train(ROWS, num_steps=2, output_dir=tmp_path / "run")
    layer = sft.module.base_model.model.model.layers[0].self_attn.q_proj
    delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
    wanted = (layer.base_layer.dequantized(torch.float32) + delta).to(dtype)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final", dtype="auto")
    assert merged.dtype == dtype
    assert torch.equal(merged.model.layers[0].self_attn.q_proj.weight, wanted)
    assert isinstance(layer.base_layer, QuantizedLinear)  # the trained model is as it was
    if dtype == torch.float32:
        ids = torch.tensor([[2, 3, 4, 5]])
        torch.testing.assert_close(merged(ids).logits, sft.model(ids).logits, rtol=1e-4, atol=1e-4)
    assert (tmp_path / "run" / "final" / "adapter" / "adapter_config.json").exists()


def test_an_adapter_opens_on_a_base_that_is_quantised_again(tmp_path, method):
    tiny_qwen2().save_pretrained(tmp_path / "base")
    sft = SFT(model=tmp_path / "base", quantize=method, lora=LORA, learning_rate=1e-1, batch_size=2)
    sft.train(ROWS, num_steps=2, output_dir=tmp_path / "run")
    model, _ = load_model(tmp_path / "run" / "final" / "adapter", quantize=method)
    ids = torch.tensor([[2, 3, 4, 5]])
    torch.testing.assert_close(model(ids).logits, sft.model(ids).logits, rtol=1e-5, atol=1e-5)


# ---- what is refused ----


def test_without_lora_nothing_could_be_trained():
    with pytest.raises(ValueError, match="quantize must be None without lora"):
        SFT(model=tiny_qwen2(), quantize="int8")


def test_other_methods_and_models_are_refused(tmp_path):
    with pytest.raises(ValueError, match="quantize must be one of 'nf4', 'int8', None, found 'fp4'"):
        SFT(model=tiny_qwen2(), quantize="fp4", lora=LORA)
    with pytest.raises(ValueError, match="quantize must be None for strop's MoE"):
        load_model("moe:tiny", quantize="int8")
    with pytest.raises(ValueError, match="quantize must be None but for Hugging Face models"):
        SFT(model=nn.Linear(2, 2), quantize="int8", lora=LORA)
    model = tiny_qwen2()
    quantize(model, "int8")
    with pytest.raises(ValueError, match="quantize must be 'int8', as the model is quantised already, found 'nf4'"):
        SFT(model=model, quantize="nf4", lora=LORA)


class Opaque(torch.Tensor):
    """A weight of another library, whose product has no gradient."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if function is nn.functional.linear:
            raise NotImplementedError("no backward")
        return super().__torch_function__(function, types, arguments, options or {})


def test_a_head_without_a_gradient_is_refused_by_name():
    model = tiny_qwen2(tie_word_embeddings=False)
    check_differentiable(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().as_subclass(Opaque), requires_grad=False)
    with pytest.raises(ValueError, match=r"found that lm_head, a Linear whose weight is a .*, is not \(NotImplemented"):
        SFT(model=model, lora=LORA)


class Foreign(torch.Tensor):
    """A weight as torchao's: it knows the product of a linear layer, and few other operators."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if function in (
            torch.Tensor.t,
            torch.Tensor.new_empty,
            torch.Tensor.permute,
            torch._foreach_copy_,
            torch.matmul,
        ):
            raise NotImplementedError(function.__name__)
        return super().__torch_function__(function, types, arguments, options or {})


def test_layers_and_a_head_with_weights_of_another_library_are_trained_and_sampled():
    plain, model = (tiny_qwen2(tie_word_embeddings=False).eval() for _ in range(2))
    model.load_state_dict(plain.state_dict())
    for module in model.modules():
        if type(module) is nn.Linear:
            module.weight = nn.Parameter(module.weight.detach().as_subclass(Foreign), requires_grad=False)
    policy, sampling = Policy(model), Sampling(max_new_tokens=4)
    found, wanted = (generate(one, [[2, 3], [4]], sampling, seed=1) for one in (policy, Policy(plain)))
    assert policy.no_hidden_because == "its head's weight is a Foreign"
    for one, other in zip(found, wanted, strict=True):
        assert one.completion_ids.tolist() == other.completion_ids.tolist()
        torch.testing.assert_close(one.rollout_logps_t, other.rollout_logps_t, rtol=1e-4, atol=1e-5)
    SFT(model=model, lora=LORA, batch_size=2).train(ROWS[:2], num_steps=1)


class Packing(nn.Linear):
    """As bitsandbytes' 4-bit layer on a CPU: without gradients it packs its weight, after which it has none."""

    def __init__(self, source, modes=(False,)):
        super().__init__(source.in_features, source.out_features, source.bias is not None)
        self.exact, self.bias, self.modes, self.packed = source.weight.detach(), source.bias, modes, False
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.uint8), requires_grad=False)

    def forward(self, x):
        self.packed |= self.training in self.modes and not x.requires_grad
        y = nn.functional.linear(x, self.exact, self.bias)
        return y.detach() if self.packed else y


def with_packing(**options):
    model = tiny_qwen2().eval()
    projection = model.model.layers[1].mlp.gate_proj
    model.set_submodule("model.layers.1.mlp.gate_proj", Packing(projection, **options))
    return model.eval()


def test_layers_that_pack_their_weights_for_inference_are_not_packed_by_trials_and_rollouts():
    model = with_packing()
    policy = Policy(model)
    generate(policy, [[2, 3], [4]], Sampling(max_new_tokens=3))
    assert policy.packs
    layer = model.model.layers[1].mlp.gate_proj
    assert not layer.packed
    assert not layer.training, "as it was"
    model(torch.tensor([[2, 3]])).logits.sum().backward()
    with torch.no_grad():
        model(torch.tensor([[2, 3]]))
    assert layer.packed, "by a forward of somebody else"


def test_a_model_whose_gradients_a_trial_loses_is_refused():
    policy = Policy(with_packing(modes=(False, True)))
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"after a forward without gradient, found that model\.layers\.1\.mlp\.gate_proj"
        ):
            policy.check_reading()


def test_merging_leaves_adapters_of_other_layers_to_peft():
    model = tiny_qwen2()
    quantize(model, "int8")
    adapted = with_lora(model, LoRAConfig(r=2, target_modules=("q_proj", "lm_head")), 0)
    dequantize_and_merge(adapted)
    assert quantization_of(adapted) is None
    assert type(adapted.base_model.model.lm_head).__module__.startswith("peft.")
