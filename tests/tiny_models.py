"""Tiny models of every kind, made the same way in every run. V = 30."""

import pytest
import torch

from strop.data.batch import TokenBatch, Trajectory
from strop.moe import MoEConfig, MoETransformer
from strop.moe.torch import MoEForCausalLM

VOCAB = 30


def batch_of(rows, device="cpu"):
    """Rows of (prompt, completion) as a TokenBatch."""
    return TokenBatch.of([Trajectory.of(*row) for row in rows], device)


def read_padded(policy):
    """The policy, reading padded rows though its model could read packed ones."""
    assert policy.packs
    policy.no_packing_because = "told so"
    return policy


def moe(eos_token_id=None, scale=1.0, max_length=64, seed=0, **changes):
    """scale multiplies the head: larger is farther from uniform."""
    eos = tuple(eos_token_id) if isinstance(eos_token_id, list) else eos_token_id
    config = MoEConfig(
        vocab_size=VOCAB, hidden_dim=16, num_layers=2, num_heads=2, head_dim=8, intermediate_dim=16,
        max_seq_len=max_length, eos_token_id=eos, **changes,
    )  # fmt: skip
    model = MoEForCausalLM(MoETransformer(config, seed=seed))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(4 * scale)
    return model


def llama(eos_token_id=None, scale=1.0, max_length=64, seed=0, **changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    return _hugging_face(LlamaForCausalLM, LlamaConfig, eos_token_id, scale, max_length, seed, changes)


def qwen2(eos_token_id=None, scale=1.0, max_length=64, seed=0, **changes):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return _hugging_face(Qwen2ForCausalLM, Qwen2Config, eos_token_id, scale, max_length, seed, changes)


def mixtral(eos_token_id=None, scale=1.0, max_length=64, seed=0, **changes):
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2} | changes
    return _hugging_face(MixtralForCausalLM, MixtralConfig, eos_token_id, scale, max_length, seed, experts)


def _hugging_face(model_class, config_class, eos_token_id, scale, max_length, seed, changes):
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": max_length, "initializer_range": 0.2,
        "bos_token_id": None, "eos_token_id": eos_token_id, "pad_token_id": None,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config_class(**(sizes | changes)))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(scale / 2)
    return model.eval()


class PlainModel(torch.nn.Module):
    """Causal, and knows neither masks nor caches: each token sees the running mean of what came before."""

    def __init__(self, eos_token_id=None, scale=1.0, seed=0, hidden=16):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = torch.nn.Embedding(VOCAB, hidden)
            self.mix = torch.nn.Linear(2 * hidden, hidden)
            self.head = torch.nn.Linear(hidden, VOCAB)
        with torch.no_grad():
            self.head.weight.mul_(2 * scale)
        if eos_token_id is not None:
            self.config = type("Config", (), {"eos_token_id": eos_token_id})()

    def forward(self, tokens):
        x = self.embed(tokens)
        mean = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return self.head(torch.tanh(self.mix(torch.cat([x, mean], -1))))


def plain(eos_token_id=None, scale=1.0, max_length=None, seed=0):
    return PlainModel(eos_token_id, scale, seed)


class Letters:
    """One token a letter: a is 1."""

    eos_token_id, pad_token_id = 3, 0
    chat_template = "letters"

    def encode(self, text):
        return [ord(c) - 96 for c in text]

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(i + 96) for i in ids if not (skip_special_tokens and i in (0, 3)))

    def apply_chat_template(self, messages, tokenize=False, add_generation_prompt=False):
        return "".join(m["content"] for m in messages) + ("z" if add_generation_prompt else "")


KINDS = {"moe": moe, "llama": llama, "plain": plain}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
