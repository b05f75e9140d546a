"""The torch module's parameters are the engine's memory, whatever is done to them."""

import copy
import io

import numpy as np
import pytest

from strop.moe import MoETransformer

torch = pytest.importorskip("torch")

from torch_models import IDS, module, same_tensor  # noqa: E402


@pytest.fixture
def model(moe_engine):
    return module(moe_engine)


def test_parameters_are_the_engines_memory(model):
    params = dict(model.named_parameters())
    assert list(params) == list(model.moe.config.parameter_shapes())
    for name, array in model.moe.params.items():
        assert params[name].data_ptr() == array.ctypes.data
        assert params[name].shape == array.shape
    assert model.num_parameters() == model.moe.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == model.moe.num_parameters() - 11 * 8


def test_optimizer_steps_reach_the_engine_and_generate(model):
    before = model(IDS).logits.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(IDS, labels=IDS).loss.backward()
    wanted = {name: param.detach() - 0.5 * param.grad for name, param in model.named_parameters()}
    optimizer.step()
    fresh = MoETransformer(
        model.moe.config, model.moe.engine.name, params={name: value.numpy() for name, value in wanted.items()}
    )
    after = model(IDS).logits
    assert (after - before).abs().max() > 0.1
    np.testing.assert_allclose(after.detach().numpy(), fresh.forward(IDS.numpy()), atol=1e-5)
    np.testing.assert_allclose(model.moe.forward(IDS.numpy()), fresh.forward(IDS.numpy()), atol=1e-5)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        assert model.generate(IDS, max_new_tokens=3)[:, 4:].tolist() == [[0] * 3] * 2  # all logits equal: the lowest id
        model.lm_head.weight[9] = model.model.norm.weight.new_ones(8)
        says_nine = (model(IDS).logits[:, -1, 9] > 0).tolist()
    assert (model.generate(IDS, max_new_tokens=1)[:, 4] == 9).tolist() == says_nine


def test_state_dict_round_trip_is_in_place(model):
    state = copy.deepcopy(model.state_dict())
    want = model(IDS).logits.detach()
    addresses = [param.data_ptr() for param in model.parameters()]
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    assert (model(IDS).logits - want).abs().max() > 0.1
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    same_tensor(model(IDS).logits, want, model)
    assert [param.data_ptr() for param in model.parameters()] == addresses
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = module(model.moe.engine.name, seed=5)
    other.load_state_dict(torch.load(file, weights_only=True))
    same_tensor(other(IDS).logits, want, other)


def copied(model, how):
    if how == "deepcopy":
        return copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_is_independent(moe_engine, how):
    model = module(moe_engine, tie_embeddings=True, aux_loss_coef=0.3)
    model.config.eos_token_id = 4
    model.lm_name = "mine"
    model.get_parameter("model.norm.weight").requires_grad_(False)
    model.eval()
    other = copied(model, how)
    want = model(IDS).logits.detach().clone()
    same_tensor(other(IDS).logits, want, other)
    assert (other.config.eos_token_id, other.lm_name, other.training) == (4, "mine", False)
    assert other.moe.engine.name == moe_engine
    assert not other.get_parameter("model.norm.weight").requires_grad
    assert other.get_output_embeddings() is other.get_input_embeddings()
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(0.5)
    assert (other(IDS).logits - want).abs().max() > 0.1
    same_tensor(other(IDS).logits, torch.from_numpy(other.moe.forward(IDS.numpy())), other)
    same_tensor(model(IDS).logits, want, model)
    other(IDS, labels=IDS).loss.backward()
    assert all(param.grad is None for param in model.parameters())


def test_moving_to_where_it_is_changes_nothing(model):
    moe, addresses = model.moe, [param.data_ptr() for param in model.parameters()]
    assert model.to("cpu").float().cpu().train().eval().to(torch.float32) is model
    assert model.moe is moe
    assert [param.data_ptr() for param in model.parameters()] == addresses


def test_double_is_a_new_engine_over_new_memory(float64_engine):
    model = module(float64_engine)
    single = model(IDS).logits
    single.sum().backward()
    assert model.double() is model
    assert model.dtype == torch.float64
    assert model.moe.dtype == np.float64
    assert {param.grad.dtype for param in model.parameters()} == {torch.float64}
    np.testing.assert_allclose(model(IDS).logits.detach(), single.detach(), atol=1e-5)
    test_parameters_are_the_engines_memory(model)
    model.zero_grad()
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    assert not model(IDS).logits.any()


def test_shared_memory_is_the_engines_too(model):
    want = model(IDS).logits
    assert model.share_memory() is model
    assert all(param.is_shared() for param in model.parameters())
    same_tensor(model(IDS).logits, want, model)
    test_parameters_are_the_engines_memory(model)


@pytest.mark.parametrize(
    "move",
    [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.to("meta"), lambda m: m.to("meta", torch.float32)],
)
def test_moves_the_engine_cannot_follow(model, move):
    want = model(IDS).logits
    with pytest.raises(TypeError, match=r"the model must stay on the CPU in torch.float32 or torch.float64 .*found a"):
        move(model)
    same_tensor(model(IDS).logits, want, model)


def test_parameters_with_other_memory_are_refused(model):
    param = model.get_parameter("model.layers.1.mlp.gate.weight")
    param.data = param.data.clone()
    match = "model.layers.1.mlp.gate.weight must share its memory with the engine"
    for call in (lambda: model(IDS), lambda: model.generate(IDS), lambda: model.save_pretrained("nowhere")):
        with pytest.raises(RuntimeError, match=match):
            call()
    with pytest.raises(RuntimeError, match="must share its memory"):
        torch.func.functional_call(module(), {"lm_head.weight": torch.zeros(11, 8)}, IDS)


def test_modules_and_parameters_cannot_be_replaced(model):
    with pytest.raises(TypeError, match="q_proj must not be set to a Linear"):
        model.model.layers[0].self_attn.q_proj = torch.nn.Linear(8, 16)
    with pytest.raises(TypeError, match="weight must not be set to a Parameter"):
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(11, 8))
    with pytest.raises(TypeError, match="must not be set to a Sealed"):
        model.model.layers[0] = model.model.layers[1]
    with pytest.raises(TypeError, match="must not be set to a ModuleDict"):
        torch.nn.utils.parametrize.register_parametrization(model.lm_head, "weight", torch.nn.Identity())
    with pytest.raises(TypeError, match="only holds parameters"):
        model.get_input_embeddings()(IDS)
    assert len(model.model.layers) == 2
