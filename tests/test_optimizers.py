"""Optimisers by name: what each one steps, and that a checkpoint has their states."""

import pytest
import torch
from torch import nn

from strop import PPO, SFT
from strop.cli.train import config_class, gather
from strop.config import OptimConfig
from strop.models.kinds import as_module
from strop.training.optimizers import hidden_matrices, keep_on_host, named_optimizer
from strop.training.trainer import make_optimizer
from tests.tiny_qwen2 import tiny_qwen2
from tests.trained_models import tiny_moe

ROWS = [{"prompt": [2 + i % 5, 3], "completion": [4 + i % 3, 5, 6]} for i in range(8)]


@pytest.fixture(params=["adamw", "adamw8bit", "muon", "sgd", "adafactor"])
def name(request):
    if request.param == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    return request.param


def weights(trainer):
    return torch.cat([param.detach().flatten() for param in trainer.module.parameters()])


@pytest.mark.parametrize("make", [tiny_qwen2, tiny_moe], ids=["qwen2", "moe"])
def test_a_resumed_run_goes_on_bit_for_bit(name, make, tmp_path):
    def run(output, steps, **more):
        sft = SFT(model=make(), optimizer=name, learning_rate=1e-2, batch_size=2, save_every=1)
        sft.train(ROWS, num_steps=steps, output_dir=tmp_path / output, progress=False, **more)
        return weights(sft)

    whole = run("whole", 4)
    run("half", 2)
    assert torch.equal(whole, run("half", 4, resume=True))
    assert not torch.allclose(whole, weights(SFT(model=make())), atol=1e-4)


def test_from_checkpoint_has_the_optimiser_by_its_name(name, tmp_path):
    sft = SFT(model=tiny_qwen2(), optimizer=name, learning_rate=1e-2)
    sft.train_step([[2, 3]], [[4, 5]])
    sft.save(tmp_path / "sft.pt")
    again = SFT.from_checkpoint(tmp_path / "sft.pt")
    assert (type(again.optimizer), again.config.optim.optimizer) == (type(sft.optimizer), name)
    for one in (sft, again):
        one.train_step([[5, 3]], [[4, 6]])
    assert torch.equal(weights(sft), weights(again))


@pytest.mark.parametrize("part_bytes", [1, 3000, 2**28])
def test_steps_in_parts_are_those_of_all_at_once(name, part_bytes):
    """With states in the host's memory; part sizes of one parameter, of a few and of all."""
    trainers = [SFT(model=tiny_qwen2(), optimizer=name, learning_rate=1e-2, weight_decay=0.1) for _ in range(2)]
    keep_on_host(trainers[1].optimizer, part_bytes)
    for row in ROWS[:3]:
        first, second = (one.train_step([row["prompt"]], [row["completion"]]) for one in trainers)
        assert first["loss"] == second["loss"]
    assert torch.equal(*map(weights, trainers))
    assert [len(group["params"]) for group in trainers[0].optimizer.param_groups] == [
        len(group["params"]) for group in trainers[1].optimizer.param_groups
    ]


def test_offload_optimizer_on_a_cpu_warns_and_is_refused_beside_pages():
    with pytest.warns(UserWarning, match="offload_optimizer has no effect"):
        SFT(model=tiny_qwen2(), offload_optimizer=True)
    with pytest.raises(ValueError, match="offload_optimizer must be False with paged_adamw8bit"):
        OptimConfig(optimizer="paged_adamw8bit", offload_optimizer=True)


def test_sgd_is_a_step_along_the_gradient():
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data = torch.tensor([[1.0, 2.0]])
    optimizer = make_optimizer(layer, OptimConfig(optimizer="sgd", learning_rate=0.5, weight_decay=0.1))
    layer.weight.grad = torch.tensor([[1.0, -1.0]])
    optimizer.step()
    torch.testing.assert_close(layer.weight.data, torch.tensor([[1 - 0.5 * (1 + 0.1), 2 - 0.5 * (-1 + 0.2)]]))


def test_moments_of_8_bits_take_a_byte():
    pytest.importorskip("bitsandbytes")
    layer = nn.Linear(64, 64)
    optimizer = make_optimizer(layer, OptimConfig(optimizer="adamw8bit"))
    layer(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    assert [optimizer.state[layer.weight][key].dtype for key in ("state1", "state2")] == [torch.uint8] * 2
    assert optimizer.state[layer.bias]["state1"].dtype == torch.float32  # fewer than 4,096 numbers


def test_muon_steps_hidden_matrices_and_adamw_the_rest():
    def gradients(model):
        for number, param in enumerate(model.parameters()):
            param.grad = torch.sin(torch.arange(param.numel()) + number).reshape(param.shape)
        return dict(model.named_parameters())

    model, other = tiny_qwen2(), tiny_qwen2()
    ours, theirs = gradients(model), gradients(other)
    hidden = [name for name, param in model.named_parameters() if id(param) in hidden_matrices(model)]
    assert hidden == [name for name in ours if name.endswith("proj.weight")]
    moe = as_module(tiny_moe())
    moes = [name for name, param in moe.named_parameters() if id(param) in hidden_matrices(moe)]
    assert moes == [n for n, p in moe.named_parameters() if p.ndim == 2 and "embed" not in n and "head" not in n]
    config = OptimConfig(optimizer="muon", learning_rate=1e-2, weight_decay=0.1)
    optimizer = make_optimizer(model, config)
    rest = [param for name, param in theirs.items() if name not in hidden]
    decayed = [{"params": [p for p in rest if p.ndim == 2], "weight_decay": 0.1}]
    expected = [
        torch.optim.Muon([theirs[n] for n in hidden], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([*decayed, {"params": [p for p in rest if p.ndim < 2]}], lr=1e-2, weight_decay=0.0),
    ]
    for _ in range(2):
        optimizer.step()
        for one in expected:
            one.step()
    for key, param in ours.items():
        torch.testing.assert_close(param, theirs[key], rtol=1e-5, atol=1e-6)
    assert "momentum_buffer" in optimizer.state[ours[hidden[0]]]
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


def test_the_schedule_reaches_every_group_of_muon():
    sft = SFT(model=tiny_qwen2(), optimizer="muon", learning_rate=1e-2, warmup_steps=2)
    sft.train_step([[2, 3]], [[4, 5]])
    assert {group["lr"] for part in sft.optimizer.parts for group in part.param_groups} == {5e-3}


def test_muon_of_a_model_without_hidden_matrices_is_adamw():
    table = nn.Embedding(5, 3)
    optimizer = make_optimizer(table, OptimConfig(optimizer="muon"))
    table.weight.grad = torch.ones(5, 3)
    before = table.weight.detach().clone()
    optimizer.step()
    assert [type(part) for part in optimizer.parts] == [torch.optim.AdamW]
    torch.testing.assert_close(table.weight.detach(), before - 1e-5, rtol=0, atol=1e-7)


def test_a_critic_has_the_same_optimiser():
    ppo = PPO(model=tiny_qwen2(), optimizer="sgd", reward_fn=lambda completions: [0.0] * len(completions))
    assert isinstance(ppo.critic_optimizer, torch.optim.SGD)


def test_from_a_file_and_from_the_command_line(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("optimizer: muon\n")
    assert gather(config_class("sft"), path)[1].optim.optimizer == "muon"
    assert gather(config_class("sft"), path, (), {"optimizer": "sgd"})[1].optim.optimizer == "sgd"


def test_pages_need_cuda():
    pytest.importorskip("bitsandbytes")
    with pytest.raises(ValueError, match='optimizer must be "adamw8bit" without CUDA'):
        SFT(model=tiny_qwen2(), optimizer="paged_adamw8bit")


def test_a_function_still_makes_any_other():
    made = SFT(model=tiny_qwen2(), optimizer=torch.optim.RMSprop).optimizer
    assert isinstance(made, torch.optim.RMSprop)
    layer = nn.Linear(2, 2)
    assert isinstance(named_optimizer(layer, [{"params": [layer.weight]}], OptimConfig()), torch.optim.AdamW)
