"""Weights read from a GGUF file are ordinary weights: they can be saved."""

import pytest
import torch

from strop.models.loading import _forget_quantization


def test_dequantised_weights_can_be_saved(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=32, **sizes)
    model = transformers.LlamaForCausalLM(config)
    model.hf_quantizer, model.is_quantized = object(), True  # as from_pretrained(gguf_file=…) leaves it
    with pytest.raises((ValueError, AttributeError)):
        model.save_pretrained(tmp_path)
    _forget_quantization(model)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
