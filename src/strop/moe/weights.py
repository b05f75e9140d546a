"""Checkpoints in Mixtral's own layout: config.json and model.safetensors, exchangeable with transformers.

In memory the experts of a layer are two arrays (`gate_up_proj`, `down_proj`). On disk each expert has three matrices:
w1 is the gate, w3 the up projection, w2 the down projection. Reading accepts both layouts, and shards with an index.

Shapes: E experts, D hidden, F intermediate.
"""

import functools
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import safetensors
from numpy.typing import DTypeLike
from safetensors.numpy import save_file

from strop import checksums
from strop._checks import as_count
from strop._types import Json
from strop.moe.config import MoEConfig

Arrays = dict[str, np.ndarray]
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
DISK_LAYER = ".block_sparse_moe."  # the name on disk of `.mlp.` in memory
# Mixtral's defaults for a config without these entries
DEFAULT_ROPE_THETA, DEFAULT_KV_HEADS, DEFAULT_BOS, DEFAULT_EOS = 1e6, 8, 1, 2


def save(folder: str | Path, config: MoEConfig, params: Arrays) -> None:
    """Write a checkpoint. Each file is written atomically, and other files of the folder stay.

    The weights are written first, so an interrupted save over a folder of the same config leaves a valid checkpoint.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"folder must be a directory, found a file: {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / checksums.FILE).unlink(missing_ok=True)  # the old checksums are invalid once files are overwritten
    dtype = params["model.norm.weight"].dtype
    text = json.dumps(to_mixtral(config, dtype), indent=2, sort_keys=True) + "\n"
    _write_atomically(folder / WEIGHTS, lambda path: save_file(_by_disk_name(params), path, metadata={"format": "pt"}))
    _write_atomically(folder / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))


def load(folder: str | Path, *, dtype: DTypeLike | None = None) -> tuple[MoEConfig, Arrays]:
    """Return the config and parameters of a Mixtral checkpoint, in the form of `config.parameter_shapes()`.

    dtype   float32 or float64; None keeps float64 and converts every other dtype to float32
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"folder must be a directory with {CONFIG} and {WEIGHTS}, found none at {folder}")
    checksums.verify(folder)
    config = from_mixtral(_read_json(folder / CONFIG))
    stored: Arrays = {}
    for file in _weight_files(folder):
        stored.update(_read_safetensors(file))
    head = stored.pop("lm_head.weight", None) if config.tie_embeddings else None
    if head is not None and not np.array_equal(head, stored.get("model.embed_tokens.weight", ())):
        raise ValueError(  # if a writer stored the tied matrix twice, both must be equal
            f"lm_head.weight in {folder} must equal model.embed_tokens.weight (tie_word_embeddings is true), found others"
        )
    by_disk_name = _by_disk_name_as(stored)
    sizes_only = {name: np.broadcast_to(np.float32(0), shape) for name, shape in config.parameter_shapes().items()}
    wanted = by_disk_name(sizes_only)
    check_names(stored.keys(), wanted.keys(), str(folder))
    for name, array in wanted.items():
        if stored[name].shape != array.shape:
            raise ValueError(f"{name} in {folder} must have the shape {array.shape}, found {stored[name].shape}")
    if dtype is None:
        dtype = np.float64 if all(array.dtype == np.float64 for array in stored.values()) else np.float32
    params = {name: np.empty(shape, dtype) for name, shape in config.parameter_shapes().items()}
    for name, array in by_disk_name(params).items():
        array[...] = stored[name]
    return config, params


def check_names(found: Iterable[str], wanted: Iterable[str], where: str) -> None:
    found, wanted = set(found), set(wanted)
    for kind, names in (("lacks", wanted - found), ("has the unknown", found - wanted)):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise ValueError(f"{where} {kind} tensor {sorted(names)[0]!r}{more}")


# ---- config.json ----


def to_mixtral(config: MoEConfig, dtype: DTypeLike = np.float32) -> Json:
    """Return config.json as transformers writes it. `strop_*` keys keep the separate RoPE settings."""
    eos = config.eos_token_id
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "dtype": np.dtype(dtype).name,
        **{theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rms_norm_eps": config.rms_norm_eps,
        "router_aux_loss_coef": config.aux_loss_coef,
        "output_router_logits": config.aux_loss_coef > 0,  # makes transformers add the auxiliary loss to the loss
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "pad_token_id": config.pad_token_id,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
        "initializer_range": 0.02,
        "use_cache": True,
        "strop_rope_base": config.rope_base,
        "strop_rope_alpha": config.rope_alpha,
    }


def from_mixtral(mixtral: Json) -> MoEConfig:
    """Return the MoEConfig for Mixtral's config.json; raise for features that strop does not support."""
    if (kind := mixtral.get("model_type")) != "mixtral":
        raise ValueError(f"model_type in {CONFIG} must be 'mixtral', found {kind!r}")
    _refuse_unknown_features(mixtral)
    try:
        sizes = {ours: mixtral[theirs] for ours, theirs in _FIELDS.items()}
    except KeyError as missing:
        raise ValueError(f"{CONFIG} lacks {missing}") from None
    heads = mixtral.get("num_key_value_heads", DEFAULT_KV_HEADS)
    head_dim = mixtral.get("head_dim")
    if head_dim is None:
        num_heads = as_count(sizes["num_heads"], "num_attention_heads", 1)
        head_dim = as_count(sizes["hidden_dim"], "hidden_size", 1) // num_heads
    eos = mixtral.get("eos_token_id", DEFAULT_EOS)
    return MoEConfig(
        **sizes,
        **_rope_fields(mixtral, head_dim),
        num_kv_heads=sizes["num_heads"] if heads is None else heads,
        head_dim=head_dim,
        rms_norm_eps=mixtral.get("rms_norm_eps", 1e-5),
        # transformers adds the auxiliary loss only if output_router_logits is set
        aux_loss_coef=mixtral.get("router_aux_loss_coef", 0.001) if mixtral.get("output_router_logits") else 0.0,
        tie_embeddings=mixtral.get("tie_word_embeddings", False),
        bos_token_id=mixtral.get("bos_token_id", DEFAULT_BOS),
        eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
        pad_token_id=mixtral.get("pad_token_id"),
    )


_FIELDS = {
    "hidden_dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_experts": "num_local_experts",
    "top_k": "num_experts_per_tok",
    "intermediate_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
}


def _rope(mixtral: Json) -> Json:
    """Return the RoPE settings, under the older name if both exist, as transformers does."""
    rope = mixtral.get("rope_scaling") or mixtral.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters in {CONFIG} must be an object, found {type(rope).__name__}")
    return rope


def _rope_fields(mixtral: Json, head_dim: int) -> Json:
    theta = _rope(mixtral).get("rope_theta", mixtral.get("rope_theta", DEFAULT_ROPE_THETA))
    base, alpha = mixtral.get("strop_rope_base"), mixtral.get("strop_rope_alpha")
    if base is not None and alpha is not None:
        ours = MoEConfig(rope_base=base, rope_alpha=alpha, head_dim=head_dim)
        if ours.rope_theta == theta:  # otherwise theta was changed later, and theta wins
            return {"rope_base": base, "rope_alpha": alpha}
    return {"rope_base": theta}


def _refuse_unknown_features(mixtral: Json) -> None:
    window, longest = mixtral.get("sliding_window"), mixtral.get("max_position_embeddings", 0)
    rope = _rope(mixtral)
    refused = {
        "hidden_act": (mixtral.get("hidden_act", "silu"), "silu"),
        "sliding_window": (None if window is None or window >= longest else window, None),
        "attention_dropout": (mixtral.get("attention_dropout") or 0.0, 0.0),
        "router_jitter_noise": (mixtral.get("router_jitter_noise") or 0.0, 0.0),
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), 1.0),
        "quantization_config": (mixtral.get("quantization_config"), None),
    }
    for name, (found, wanted) in refused.items():
        if found != wanted:
            raise ValueError(f"{name} in {CONFIG} must be {wanted!r} (strop has no other), found {found!r}")


# ---- model.safetensors ----


def _by_disk_name(params: Arrays, layer: str = DISK_LAYER, fused: bool = False) -> Arrays:
    """Return views of the parameters by their names on disk, with separate names for each expert's matrices.

    layer   the file's name for the part of a block that has the experts
    fused   the file stores the experts of a layer as one array, as in memory
    """
    found: Arrays = {}
    for name, array in params.items():
        disk_name = name.replace(".mlp.", layer)
        stem, _, kind = disk_name.rpartition(".")
        if fused or ".experts." not in name:
            found[disk_name] = array
        elif kind == "gate_up_proj":
            for e, gate_up_2FD in enumerate(array):
                found[f"{stem}.{e}.w1.weight"], found[f"{stem}.{e}.w3.weight"] = np.split(gate_up_2FD, 2)
        else:
            found |= {f"{stem}.{e}.w2.weight": down_DF for e, down_DF in enumerate(array)}
    return found


def _by_disk_name_as(stored: Iterable[str]) -> Callable[[Arrays], Arrays]:
    """Return `_by_disk_name` with the options that match the names in a file."""
    stored = list(stored)
    fused = any(name.endswith("experts.gate_up_proj") for name in stored)
    layer = ".mlp." if any(".mlp." in name for name in stored) else DISK_LAYER
    return functools.partial(_by_disk_name, layer=layer, fused=fused)


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if not (folder / INDEX).exists():
        raise FileNotFoundError(f"folder must hold {WEIGHTS} or {INDEX}, found neither in {folder}")
    names = _read_json(folder / INDEX).get("weight_map", {}).values()
    files = [folder / name for name in dict.fromkeys(names)]
    for file in files:
        if not file.exists():
            raise FileNotFoundError(f"{INDEX} names {file.name}, found no such file in {folder}")
    return files


def _read_safetensors(file: Path) -> Arrays:
    try:
        tensors = safetensors.deserialize(file.read_bytes())
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file} is truncated or no safetensors file: {error}") from None
    return {name: _as_float(name, info, file) for name, info in tensors}


def _as_float(name: str, info: Json, file: Path) -> np.ndarray:
    if info["dtype"] == "BF16":  # NumPy has no bfloat16: its bits are the upper half of a float32
        array = (np.frombuffer(info["data"], "<u2").astype(np.uint32) << 16).view(np.float32)
    elif dtype := {"F16": "<f2", "F32": "<f4", "F64": "<f8"}.get(info["dtype"]):
        array = np.frombuffer(info["data"], dtype)
    else:
        raise TypeError(f"{name} in {file} must be BF16, F16, F32 or F64, found {info['dtype']}")
    return array.reshape(info["shape"])


def _read_json(file: Path) -> Json:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"folder must hold {file.name}, found none in {file.parent}") from None
    except ValueError as error:  # not JSON, or not text
        raise ValueError(f"{file} must be JSON, found an error: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, found {type(content).__name__}")
    return content


def _write_atomically(target: Path, write: Callable[[Path], object]) -> None:
    """Write a temporary file and rename it to the target; on an error remove it."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        write(partial)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
