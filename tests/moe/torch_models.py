"""The torch module over a small model, and its gradients: what its tests share."""

import numpy as np
import pytest
from moe_models import random_model, same, small_config

torch = pytest.importorskip("torch")

from strop.moe.torch import MoEForCausalLM  # noqa: E402
from strop.moe.weights import to_mixtral  # noqa: E402

IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
MASK = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])


def module(engine="numpy", *, dtype=np.float32, seed=0, std=0.4, **changes):
    return MoEForCausalLM(random_model(small_config(**changes), engine, seed=seed, dtype=dtype, std=std))


def mixtral_of(moe):
    """transformers' model with the same weights; its eager paths, which add nothing of their own."""
    import transformers

    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig(**to_mixtral(moe.config), **eager))
    state = {name: torch.from_numpy(param.copy()) for name, param in moe.params.items()}
    if moe.config.tie_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    mixtral.load_state_dict(state)
    return mixtral.float().eval()


def grads(model):
    return {name: param.grad.numpy().copy() for name, param in model.named_parameters()}


def relative_error(found, wanted):
    return np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-6)


def same_tensor(found, wanted, model):
    same(found.detach().numpy(), wanted.detach().numpy(), model.moe.engine.name)


def assert_same_grads(found, wanted, tolerance=1e-4):
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert relative_error(found[name], wanted[name]) <= tolerance, name
