"""GGUF files: what is read from one is ordinary weights, and what is written to one is read back as it was."""

import copy

import pytest
import torch
from chat_templates import TEMPLATES, of_bytes

from strop.models import load_model
from strop.models.gguf import export_gguf
from strop.models.loading import _forget_quantization

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
KINDS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
}  # transformers takes 128 for Qwen3, whatever the file says


def tokenizer_of(kind):
    """Bytes and a few merges, cut into words as models of this kind do."""
    from tokenizers import Regex, pre_tokenizers

    template, special, eos, _ = TEMPLATES["smollm2" if kind == "llama" else "qwen"]
    tokenizer = copy.deepcopy(of_bytes(template, tuple(special), eos))  # of_bytes keeps what it makes
    if kind != "llama":
        rule = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(rule), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    return tokenizer


def model_of(kind, tokenizer, **changes):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(SIZES | {"vocab_size": len(tokenizer)} | KINDS[kind] | changes))
    config.eos_token_id = tokenizer.eos_token_id
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_read_back_as_it_was(kind, tied, tmp_path):
    tokenizer = tokenizer_of(kind)
    model = model_of(kind, tokenizer, tie_word_embeddings=tied)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.half().float())  # so that float16 loses nothing
            if param.ndim == 1:
                param.copy_(torch.randn_like(param))
    export_gguf(model, tokenizer, tmp_path / "model.gguf", "f16")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    again, found = load_model(tmp_path, gguf_file="model.gguf")
    ids = torch.tensor([tokenizer.encode("the inn, 12345 ü€", add_special_tokens=False)])
    assert torch.equal(again.state_dict()["model.embed_tokens.weight"], model.state_dict()["model.embed_tokens.weight"])
    torch.testing.assert_close(again(ids).logits, model(ids).logits)
    assert found.chat_template == tokenizer.chat_template
    assert (found.eos_token, found.bos_token) == (tokenizer.eos_token, tokenizer.bos_token)
    assert found.encode("<|im_start|>the€", add_special_tokens=False) == tokenizer.encode(
        "<|im_start|>the€", add_special_tokens=False
    )


def test_eight_bits_are_rounded_to_a_scale_for_32_numbers(tmp_path):
    tokenizer = tokenizer_of("llama")
    model = model_of("llama", tokenizer)
    export_gguf(model, tokenizer, tmp_path / "model.gguf", "q8_0")
    again, _ = load_model(tmp_path, gguf_file="model.gguf")
    for name, weight in model.state_dict().items():
        found = again.state_dict()[name]
        if weight.ndim < 2:
            assert torch.equal(found, weight)
        else:
            blocks = (found - weight).view(-1, 32), weight.view(-1, 32)
            largest = blocks[1].abs().amax(1, keepdim=True)
            assert (
                blocks[0].abs() <= largest / 127 * 0.51 + largest * 2**-11
            ).all()  # half a step, and the scale's own rounding
            assert not torch.equal(found, weight)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_parameters="),
        ({"attention_bias": True}, "attention_bias=True is read as False"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is read as 'silu'"),
    ],
    ids=["rope", "bias", "activation"],
)
def test_what_the_file_cannot_hold_is_refused_and_nothing_is_left(changes, match, tmp_path):
    tokenizer = tokenizer_of("llama")
    with pytest.raises(ValueError, match=match):
        export_gguf(model_of("llama", tokenizer, **changes), tokenizer, tmp_path / "model.gguf", "f16")
    assert not list(tmp_path.iterdir())


def test_other_architectures_and_tokenizers_are_refused(tmp_path):
    tokenizer = tokenizer_of("llama")
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=len(tokenizer))
    with pytest.raises(ValueError, match="must be of llama, qwen2, qwen3, found a gpt2"):
        export_gguf(transformers.GPT2LMHeadModel(config), tokenizer, tmp_path / "model.gguf", "f16")
    with pytest.raises(ValueError, match="gguf must have a fast tokenizer of transformers, found a NoneType"):
        export_gguf(model_of("llama", tokenizer), None, tmp_path / "model.gguf", "f16")
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel()]
    )
    with pytest.raises(ValueError, match="must have a name for the tokenizer's pre-tokenizer"):
        export_gguf(model_of("llama", tokenizer), tokenizer, tmp_path / "model.gguf", "f16")


def test_dequantised_weights_can_be_saved(tmp_path):
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
