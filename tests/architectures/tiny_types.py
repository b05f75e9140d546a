"""Tiny models of every type that transformers maps to a causal LM, made from the names of the fields of its config.

No type is named here, so that next year's are covered without an edit: a field's name says what small size it gets.
"""

import contextlib
import copy
import re
from collections.abc import Iterator
from typing import Any

import torch

VOCAB, POSITIONS, BOUNDARY, WINDOW, CHUNK = 64, 128, 16, 9, 11
LARGEST = 5_000_000  # weights

# pattern of a field's whole name → its size; the first that matches
SIZES: list[tuple[str, int]] = [
    (
        r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_target_positions|context_length|model_max_length",
        POSITIONS,
    ),
    (r"original_max_position_embeddings", BOUNDARY),
    (
        r"(attention_)?(sliding_)?window(_size)?|attention_window_size|local_attention|keep_window_size|sliding_window_size",
        WINDOW,
    ),
    (r"attention_chunk_size", CHUNK),
    (r".*vocab(_size.*)?", VOCAB),
    (
        r"hidden_size(_global)?|d_model|n_embd|emb_dim|embedding_dim|embedding_size|word_embed_proj_dim|attention_hidden_size|"
        r"dim_model_base|lru_width|input_embedding_size|output_embedding_size",
        64,
    ),
    (
        r".*(intermediate_size|ffn_dim|ffn_hidden_size|d_inner|dff|dim_ff|intermediate_size_mlp|feed_forward_size|n_inner)",
        48,
    ),
    (
        r"(num_|n_)?(hidden_layers|layers?|decoder_layers|encoder_layers|num_layers|blocks)|num_(en|de)coder_layers|"
        r"encoder_layers|decoder_layers",
        2,
    ),
    (r"(num_|n_)?(encoder_|decoder_|swa_)?(num_)?(attention_)?heads?|mamba_n(um)?_heads", 4),
    (r".*(num_key_value_heads|num_kv_heads)", 2),
    (r"num_query_groups", 2),
    (
        r"head_dim|swa_head_dim|kv_channels|dim_head|attention_head_size|v_head_dim|qk_nope_head_dim|linear_head_dim|"
        r"linear_(key|value)_head_dim|index_head_dim",
        16,
    ),
    (r"qk_rope_head_dim|rotary_dim|d_head", 16),
    (r"qk_head_dim", 32),
    (r"mamba_head_?dim|mamba_d_head", 32),
    (r"mamba_d_ssm", 128),
    (r".*layer_period", 2),
    (r".*layer_offset", 1),
    (r"image_size", 16),
    (r"(kv|q|o)_lora_rank", 8),
    (r"linear_num_key_heads|linear_num_heads", 2),
    (r"linear_num_value_heads|index_n_heads", 4),
    (r"(moe_)?(num|n)_(local_|routed_)?experts", 4),
    (r"(num_experts_per_tok(en)?|moe_k|moe_topk|topk)", 2),
    (r"n_group|topk_group|num_expert_group|n_groups", 1),
    (r"(mamba_)?d_state|mamba_d_state|state_size|ssm_state_size", 8),
    (r"mamba_chunk_size|chunk_size", 4),
    (r"query_pre_attn_scalar", 8),
    (r".*attn_chunk_length", 4),
    (r".*channels?", 16),
]
# fields that a model needs and its config leaves None, and fields that are on and fit no other sizes
GIVEN = {
    "num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1, "num_key_value_heads": 2, "head_dim": 16,
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 4,
    "clip_qkv": 8,
}  # fmt: skip


def shrunk(config: Any) -> dict[str, Any]:
    """Return the fields that make this config's class small, with a layer of each of its types."""
    fields, changes = vars(config), {}
    for name, value in fields.items():
        if type(value) is int and value > 1 and not name.endswith("token_id"):
            size = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), value)
            changes[name] = min(size, value)
    for name in ("layer_types", "layers_block_type"):
        if isinstance(fields.get(name), (list, tuple)) or (name in fields and "conv_L_cache" in fields):
            kinds = list(dict.fromkeys(fields[name] or ["conv", "full_attention"]))
            kinds += {("mamba",): ["attention"], ("linear_attention",): ["full_attention"]}.get(tuple(kinds), [])
            each_twice = (
                "hybrid" in kinds or "num_kv_shared_layers" in fields
            )  # the second of each shares with the first
            changes[name] = kinds * 2 if each_twice else (kinds * 2)[: max(2, len(kinds))]
            if "num_kv_shared_layers" in fields:
                changes["num_kv_shared_layers"] = len(kinds)
            changes["num_hidden_layers"] = len(changes[name])
    if "attention_types" in fields:
        changes["attention_types"] = [[["global", "local"], 1]]
    if "attn_layer_indices" in fields:
        changes["attn_layer_indices"] = [1]
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:  # latent attention has keys of every head
        changes["num_key_value_heads"] = 4
    if "mamba_d_ssm" in fields:
        changes["mamba_d_head"] = changes["mamba_d_ssm"] // changes["mamba_n_heads"]
    if "mamba_expand" in fields and "mamba_headdim" in fields and "n_mamba_heads" in fields:
        changes["n_mamba_heads"] = fields["mamba_expand"] * changes["hidden_size"] // changes["mamba_headdim"]
    changes |= {name: size for name, size in GIVEN.items() if name in fields and fields[name] is None}
    if "state_size" in fields and "expand" in fields and "head_dim" in fields:
        changes["head_dim"] = 32
    if "attention_hidden_size" in fields and "attention_head_dim" in fields:  # of a hidden state beside its embedding
        wide = fields["attention_hidden_size"] // fields["hidden_size"] * changes["hidden_size"]
        changes |= {"attention_hidden_size": wide, "attention_head_dim": wide // changes["num_attention_heads"]}
        changes["num_key_value_heads"] = changes["num_attention_heads"]
    if "num_query_groups" in fields and fields["num_query_groups"] == fields.get("num_attention_heads"):
        changes["num_query_groups"] = changes["num_attention_heads"]
    for name, values in fields.items():  # one for each layer
        if isinstance(values, list) and len(values) == fields.get("num_hidden_layers") and name not in changes:
            changes[name] = [
                min(48, one) if type(one) is int else one for one in values[: changes["num_hidden_layers"]]
            ]
    if fields.get("rope_parameters") == {} and "layer_types" in changes:
        changes["rope_parameters"] = {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in changes["layer_types"]
        }
    if "languages" in fields:
        changes["default_language"] = fields["languages"][0]
    if "axial_pos_embds" in fields:
        changes["axial_pos_embds"] = False
    none = {name: None for name in ("eos_token_id",) if name in fields}
    return changes | none | {"pad_token_id": 0} | without_dropout(config)


def without_dropout(config: Any) -> dict[str, float]:
    return {
        name: 0.0
        for name, value in vars(config).items()
        if isinstance(value, float) and ("dropout" in name or "pdrop" in name or name.endswith("layerdrop"))
    }


def config_of(kind: str, changes: dict[str, Any]) -> Any:
    """The config of a tiny model; the changes are of its text part where it has several."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[kind]
    whole = config_class()
    text = text_of(whole)
    found = {name: getattr(whole, name, None) for name in type(whole).sub_configs}
    parts = {name: shrunk(part) | (changes if part is text else {}) for name, part in found.items() if part is not None}
    if text is not whole:
        return config_class(**parts)
    for name in parts:
        if "attn" in name:  # it is read there, and its own class does not have it
            parts[name] |= {"rope_theta": whole.rope_parameters["rope_theta"]}
    return config_class(**shrunk(whole) | parts | changes)


def text_of(config: Any) -> Any:
    """The part that is the causal LM's; an encoder and its decoder share one."""
    text = config.get_text_config(decoder=True)
    return text if any(getattr(config, name, None) is text for name in type(config).sub_configs) else config


def settings_of(kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and fields of the settings that change which keys are seen, how positions turn, or where the head is."""
    yield "default", {}
    text = text_of(config_of(kind, {}))
    fields = vars(text)
    if "tie_word_embeddings" in fields:
        yield "other head", {"tie_word_embeddings": not fields["tie_word_embeddings"]}
    if fields.get("is_decoder") is False:
        yield "decoder", {"is_decoder": True}
    if ("sliding_window" in fields and fields["sliding_window"] is None) or fields.get("use_sliding_window") is False:
        window: dict[str, Any] = {"sliding_window": WINDOW}
        if "use_sliding_window" in fields:
            window |= {"use_sliding_window": True, "max_window_layers": 0, "layer_types": None}
        yield "window", window
    rope = fields.get("rope_parameters")
    if isinstance(rope, dict) and "rope_type" in rope:
        base = {
            key: rope[key] for key in ("rope_theta", "partial_rotary_factor", "llama_4_scaling_beta") if key in rope
        }
        if "original_max_position_embeddings" in rope:
            base["original_max_position_embeddings"] = BOUNDARY
        yield "dynamic", {
            "rope_parameters": base | {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": BOUNDARY
        }  # fmt: skip
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        half = int(getattr(text, "qk_rope_head_dim", None) or size * rope.get("partial_rotary_factor", 1.0)) // 2
        yield "longrope", {
            "rope_parameters": base | {
                "rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * half, "long_factor": [4.0 + i for i in range(half)],
                "original_max_position_embeddings": BOUNDARY, "short_mscale": 1.0, "long_mscale": 1.2,
            }
        } | ({"original_max_position_embeddings": BOUNDARY} if "original_max_position_embeddings" in fields else {})  # fmt: skip


def model_of(kind: str, changes: dict[str, Any]) -> Any:
    """A tiny model in float64 and eval mode, whose weights make its logits differ clearly."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = config_of(kind, copy.deepcopy(changes))
        with contextlib.suppress(TypeError), torch.device("meta"):
            size = sum(param.numel() for param in AutoModelForCausalLM.from_config(config).parameters())
            if size > LARGEST:
                raise ValueError(f"its fields give {size} weights, which is not tiny")
        model = AutoModelForCausalLM.from_config(config).double().eval()
        with torch.no_grad():
            for name, param in model.named_parameters():
                if param.ndim == 2:
                    param.normal_(std=1.0 if "emb" in name else 1.5 * param.shape[-1] ** -0.5)
                elif param.ndim > 2:
                    param.normal_(std=0.3)
                elif "bias" in name:
                    param.normal_(std=0.2)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others know no float64
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    return model
