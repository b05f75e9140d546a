"""Export to one GGUF file: weights, configuration, tokenizer and chat template, for llama.cpp and compatible programs.

The architectures are Llama and Qwen, for which GGUF stores every tensor as one tensor. What the file cannot hold is
refused: transformers reads configuration and tokenizer back from the written file, and both must equal the model's.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strop._install import missing
from strop._types import Json, Tokenizer

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # name in transformers: name in GGUF
NUMERIC = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
           "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "vocab_size", "max_position_embeddings", "hidden_act",
           "attention_bias", "mlp_bias", "layer_types", "sliding_window")  # fmt: skip
PRE_TOKENIZERS = {  # text in the pre-tokenizer's JSON: its name in GGUF
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|": "llama-bpe",
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}|": "qwen2",
}
CHECKED_TEXT = "The cat's 12345 naïve  cats\n\n\t{x: 1}; <b>€ 你好</b>"


def export_gguf(model: Any, tokenizer: Tokenizer | None, path: Path, kind: str) -> None:
    """Write a Hugging Face model and its tokenizer to `path`; matrices as f16 or q8_0, vectors in float32."""
    gguf = _gguf()
    config = getattr(model, "config", None)
    kind_of_model = getattr(config, "model_type", type(model).__name__)
    if config is None or (architecture := ARCHITECTURES.get(kind_of_model)) is None:
        raise ValueError(f"gguf must be of {', '.join(ARCHITECTURES)}, found a {kind_of_model}")
    architectures = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[architecture], config.num_hidden_layers)
    with _replacing(path) as new:
        writer = gguf.GGUFWriter(new, architecture, use_temp_file=True)  # tensors wait on disk, not in memory
        _add_config(writer, config, kind)
        _add_tokenizer(writer, tokenizer, config.vocab_size)
        tied = config.tie_word_embeddings
        for name, tensor in model.state_dict().items():
            if tied and name == "lm_head.weight":
                continue
            stem, _, suffix = name.rpartition(".")
            if (found := names.get_name(stem)) is None:
                raise ValueError(f"gguf must have a name for every tensor, found {name}, for which it has none")
            values = tensor.detach().float().cpu()
            if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
                heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
                values = _interleaved(values, heads)
            _add_tensor(writer, f"{found}.{suffix}", values.numpy(), kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        _check(new, config, tokenizer)


def _add_config(writer: Any, config: Any, kind: str) -> None:
    gguf = _gguf()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(Path(config._name_or_path).name or config.model_type)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if kind == "f16" else gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add_tokenizer(writer: Any, tokenizer: Any, vocab_size: int) -> None:
    """Write a byte-level BPE tokenizer: its tokens, merges, special tokens and chat template."""
    gguf = _gguf()
    with tempfile.TemporaryDirectory() as folder:
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise ValueError(f"gguf must have a fast tokenizer of transformers, found a {type(tokenizer).__name__}")
        tokenizer.save_pretrained(folder)
        described = json.loads((Path(folder) / "tokenizer.json").read_text(encoding="utf-8"))
        if described["model"]["type"] != "BPE" or "ByteLevel" not in json.dumps(described["pre_tokenizer"]):
            raise ValueError(f"gguf must have a byte-level BPE tokenizer, found {described['model']['type']}")
        special = gguf.SpecialVocab(folder, load_merges=True)
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [gguf.TokenType.UNUSED] * vocab_size
    for token, i in tokenizer.get_vocab().items():
        tokens[i], types[i] = token, gguf.TokenType.NORMAL
    for i, added in tokenizer.added_tokens_decoder.items():
        types[i] = gguf.TokenType.CONTROL if added.special else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(described["pre_tokenizer"]))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special.special_token_ids = {  # the tokenizer's current ids, which may differ from those in its files
        kind: found
        for kind in ("bos", "eos", "unk", "pad")
        if isinstance(found := getattr(tokenizer, f"{kind}_token_id", None), int)
    }
    special.add_to_gguf(writer, quiet=True)


def _pre_tokenizer(described: Json) -> str:
    """Return GGUF's name for the pre-tokenizer."""
    text = json.dumps(described, ensure_ascii=False)
    known = [name for part, name in PRE_TOKENIZERS.items() if json.dumps(part, ensure_ascii=False)[1:-1] in text]
    if known:
        return known[0]
    parts = described.get("pretokenizers", [described])
    kinds = [part["type"] for part in parts]
    if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"]:
        return "smollm"
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    raise ValueError(f"gguf must have a name for the tokenizer's pre-tokenizer, found {text:.200}")


def _interleaved(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return the rows in GGUF's order for Llama, whose rotation pairs neighbouring rows instead of a head's two halves."""
    halves = values.view(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _add_tensor(writer: Any, name: str, values: np.ndarray, kind: str) -> None:
    gguf = _gguf()
    if values.ndim < 2:
        writer.add_tensor(name, values)
        return
    stored = gguf.GGMLQuantizationType.F16
    if kind == "q8_0" and values.shape[-1] % 32 == 0:  # 32 numbers share a scale
        stored = gguf.GGMLQuantizationType.Q8_0
    elif np.abs(values).max() > np.finfo(np.float16).max:
        raise ValueError(f"gguf must hold numbers of float16, found larger ones in {name}")
    writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)


def _check(path: Path, config: Any, tokenizer: Any) -> None:
    """Raise a ValueError if transformers reads another configuration or tokenizer from the file."""
    from transformers import AutoConfig, AutoTokenizer

    read = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    for name in NUMERIC:
        there, here = (_plain(getattr(one, name, None)) for one in (read, config))
        if there != here:
            raise ValueError(
                f"gguf must hold the model's configuration, found that {name}={here!r} is read as {there!r}"
            )
    found = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ids, again = (one.encode(CHECKED_TEXT, add_special_tokens=False) for one in (tokenizer, found))
    if ids != again:
        raise ValueError(
            f"gguf must hold the tokenizer, found that {CHECKED_TEXT!r} is read as {again} and not as {ids}"
        )


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(np.float32(value))  # GGUF stores float32
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items() if one is not None}
    return value


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, and rename it to `path` if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.stem}-{os.getpid()}.gguf")
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise missing("strop export --gguf", "gguf", "gguf") from None
    return gguf
