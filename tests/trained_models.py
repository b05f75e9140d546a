"""Small models the trainers' tests train."""

import os
import signal

import torch

from strop.callbacks import Callback
from strop.moe import MoEConfig, MoETransformer


def tiny_moe(**changes):
    sizes = {"hidden_dim": 16, "num_layers": 1, "num_heads": 2, "head_dim": 8, "num_experts": 2, "intermediate_dim": 16}
    ids = {"vocab_size": 20, "max_seq_len": 32, "eos_token_id": 1, "pad_token_id": 0}
    return MoETransformer(MoEConfig(**{**sizes, **ids, **changes}))


class Bigram(torch.nn.Module):
    """A plain module that returns logits: they depend on the last token alone."""

    def __init__(self, vocab_size=20):
        super().__init__()
        self.table_VV = torch.nn.Parameter(torch.linspace(-1, 1, vocab_size**2).sin().reshape(vocab_size, vocab_size))

    def forward(self, input_ids):
        return self.table_VV[input_ids]


def shifted(model):
    """The model with other weights: a reference that differs from it."""
    params = model.parameters() if isinstance(model, torch.nn.Module) else map(torch.from_numpy, model.params.values())
    for index, param in enumerate(params):
        param.data.add_(0.05 * torch.sin(torch.arange(param.numel()) + index).reshape(param.shape))
    return model


def weights_of(trainer):
    return torch.cat([param.detach().flatten() for param in trainer.module.parameters()])


class SignalAt(Callback):
    """Sends this process a signal in the middle of a step."""

    def __init__(self, step, number=signal.SIGTERM):
        self.step, self.number = step, number

    def on_step_begin(self, trainer):
        if trainer.state.step == self.step - 1:
            os.kill(os.getpid(), self.number)


def whole_and_resumed(make, rows, folder, num_steps=5, **given):
    """Train in one go and with a stop after step 3, a checkpoint and another trainer; hold both against each other."""
    whole, half = make(), make()
    whole.train(rows, num_steps=num_steps)
    half.callbacks.append(SignalAt(3))
    assert half.train(rows, num_steps=num_steps).interrupted
    half.save(folder / "half.pt")
    torch.manual_seed(99)
    resumed = type(half).from_checkpoint(folder / "half.pt", **given)
    assert (resumed.state.step, resumed.config) == (3, half.config)
    history = resumed.train(rows, num_steps=num_steps)
    assert [entry["step"] for entry in history.steps] == list(range(4, num_steps + 1))
    assert resumed.state.epoch == whole.state.epoch
    assert torch.equal(weights_of(resumed), weights_of(whole))
    return whole, resumed
