"""A Qwen2 of a few thousand weights that come from a formula, so that every version of torch makes the same ones."""

import numpy as np
import torch

CONFIG = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "use_cache": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def tiny_qwen2(kind="ForCausalLM", **changes):
    import transformers

    model = getattr(transformers, f"Qwen2{kind}")(transformers.Qwen2Config(**{**CONFIG, **changes}))
    for index, (_, param) in enumerate(sorted(model.named_parameters())):
        wave = np.sin(np.arange(param.numel()) * 12.9898 + 78.233 * (index + 1)).reshape(param.shape)
        value = 1 + 0.1 * wave if param.ndim == 1 else 0.4 * wave
        param.data.copy_(torch.from_numpy(value))
    return model
