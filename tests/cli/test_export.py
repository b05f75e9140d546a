"""strop export: a run as one file."""

import json

import pytest
import torch
from chat_templates import tokenizer as tokenizer_of

from strop.models import load_model

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")


def test_a_run_with_an_adapter_is_exported_merged(tmp_path, strop):
    peft = pytest.importorskip("peft")
    tokenizer = tokenizer_of("smollm2")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(tokenizer), **sizes)).eval()
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
        peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False),
    )
    adapted.save_pretrained(tmp_path / "run" / "final" / "adapter")
    tokenizer.save_pretrained(tmp_path / "run" / "final" / "adapter")
    (tmp_path / "run" / "run.json").write_text(json.dumps({"config": {}}))
    code, _, told = strop("export", str(tmp_path / "run"), "--gguf", "f16")
    assert code == 0, told
    assert "model-f16.gguf" in told
    again, _ = load_model(tmp_path / "run", gguf_file="model-f16.gguf")
    ids = torch.tensor([tokenizer.encode("the inn", add_special_tokens=False)])
    torch.testing.assert_close(again(ids).logits, adapted(ids).logits, atol=2e-3, rtol=1e-2)
    assert not torch.allclose(again(ids).logits, model(ids).logits, atol=2e-2)


def test_what_is_no_model_is_refused(tmp_path, strop):
    code, _, told = strop("export", str(tmp_path), "--gguf", "f16")
    assert code == 1
    assert str(tmp_path) in told
    code, _, told = strop("export", "moe:tiny", "--gguf", "f16", "--output", str(tmp_path / "x.gguf"))
    assert code == 1
    assert "gguf must be of llama, qwen2, qwen3, found a mixtral" in told
    code, _, told = strop("export", "moe:tiny", "--gguf", "q4_0")
    assert "gguf must be one of 'f16', 'q8_0', found 'q4_0'" in told
