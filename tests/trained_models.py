"""Small models the trainers' tests train."""

import torch

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
