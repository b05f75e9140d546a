"""Descriptions of models and tokenizers in a checkpoint, and how both are rebuilt from them.

`describe` returns plain JSON. For a Hugging Face model it holds the config (and the adapter's config), for the MoE its
MoEConfig, for a plain module only the class name, which the error message shows.

Only known things are rebuilt: classes of transformers and strop, listed attention implementations, and LoRA without
the options that name files or modules. Anything else must be passed in as an object; the error says how. A model is
first built on the meta device and compared with the tensors in the file, so a false description allocates no memory.
"""

import contextlib
import copy
import importlib.util
import json
import math
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from strop._install import missing
from strop._types import Json, Tokenizer
from strop.config import LoRAConfig
from strop.distributed import class_of
from strop.models import base_model, unwrapped
from strop.models.kinds import is_classifier
from strop.models.loading import ACCELERATORS, num_devices, without_bars
from strop.models.quantized import merge_adapters
from strop.training.checkpoint_header import CheckpointError, check_same, is_whole, shown

Tensors = dict[str, torch.Tensor]
Spec = tuple[Sequence[int], torch.dtype | None]  # a tensor's shape and dtype; None allows any dtype
DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}
# attention implementation → the package it needs: without it transformers may download a kernel from the Hub
ATTENTION = {
    None: None, "eager": None, "sdpa": None, "flex_attention": None, "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface", "flash_attention_4": "flash_attn",
}  # fmt: skip
CODE = ("auto_map", "trust_remote_code", "quantization_config", "custom_generate")  # forbidden in configs, at any level
LISTED = ("layer", "label")  # a config makes lists of the lengths that options with these words in their names give
LONGEST_LIST = 10_000
MOST_BUFFER_BYTES = 2**30  # of the buffers that a model computes itself and that are not in the file
LORA = (  # the LoRA options of peft that are numbers, layer names or switches; others can name files or modules
    "r", "lora_alpha", "target_modules", "exclude_modules", "lora_dropout", "fan_in_fan_out", "bias", "use_rslora",
    "modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
    "use_dora", "lora_bias", "target_parameters", "trainable_token_indices", "ensure_weight_tying", "task_type",
    "inference_mode",
)  # fmt: skip
LORA_MADE_ANEW = ("peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision")


def kind_of(model: torch.nn.Module) -> str:
    """Return the kind of the model below any adapter: "moe", "hf" or "plain"."""
    from strop.models import Policy

    return "hf" if is_classifier(model) else Policy(model).kind


def describe(model: torch.nn.Module) -> Json:
    """Return a JSON description from which `model_from` can rebuild the model."""
    kind = kind_of(model)
    about: Json = {"kind": kind, "class": class_of(base_model(model)).__name__}
    if kind == "moe":
        inner = unwrapped(model)
        about |= {
            "config": _moe_config(inner).to_dict(),
            "engine": inner.moe.engine.name,
            "dtype": _name(inner.dtype),
        }
    if kind == "hf":
        inner = base_model(model)
        about |= {"config": _written(inner.config), "dtype": _name(inner.dtype), "device": str(inner.device)}
        if class_of(inner).__module__.startswith("transformers."):
            about["config"].pop("auto_map", None)  # it names custom code, which a transformers class does not use
        about["attention"] = getattr(inner.config, "_attn_implementation", None)
        if getattr(inner, "generation_config", None) is not None:
            about["generation_config"] = _written(inner.generation_config)
        if inner is not model:
            about["adapters"] = {name: _as_json(c.to_dict()) for name, c in model.peft_config.items()}  # type: ignore[union-attr,operator]
    about["frozen"] = [name for name, param in model.named_parameters() if not param.requires_grad]
    return about


def model_from(
    about: Json, weights: Tensors, path: str | Path, argument: str, lora: LoRAConfig | None = None
) -> torch.nn.Module:
    """Return the model of a description, in the dtypes of `weights`. The weights themselves are not loaded yet.

    lora   the trainer's option. If it is given, the trainer's constructor adds the adapter and this function does not.
    """
    if about["kind"] == "plain":
        raise CheckpointError(
            f"{argument} must be given: {path} holds the weights of a {about['class']}, a plain module, which cannot "
            f"be rebuilt; from_checkpoint(path, {argument}=…)"
        )
    for name in about["frozen"]:
        if name not in weights:
            raise CheckpointError(f"{path}: frozen must name weights of {argument}, found {shown(name)}")
    if about["kind"] == "moe":
        return _moe_from(about, weights, path, argument)
    if "adapters" in about and importlib.util.find_spec("peft") is None:
        raise missing("the checkpoint, which has adapters,", "peft", "train")
    with _explained(about["class"], path, argument), torch.random.fork_rng():
        with torch.device("meta"), at_most_parameters(2 * len(weights) + 16, path, argument):
            _check_sizes(_with_adapters(_hugging_face_from(about), about, lora), weights, path, argument)
        model = _hugging_face_from(about)
        if lora is None:
            model = _with_adapters(model, about, None)
            _set_dtypes_and_frozen(model, about["frozen"], weights)
        return _moved(model, about["device"], path)


def _set_dtypes_and_frozen(model: torch.nn.Module, frozen: Iterable[str], weights: Tensors) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in weights and tensor.is_floating_point() and weights[name].dtype in DTYPES.values():
            tensor.data = tensor.data.to(weights[name].dtype)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)


# ---- sizes ----


def spec_of(tensor: torch.Tensor) -> Spec:
    return tensor.shape, tensor.dtype


def check_tensors(specs: Mapping[str, Spec], found: Mapping[str, object], path: str | Path, name: str) -> None:
    """Raise a CheckpointError unless these are tensors of exactly these names, shapes and dtypes."""
    if apart := sorted(specs.keys() ^ found.keys()):
        where = "the checkpoint" if apart[0] in found else name
        raise CheckpointError(f"{path} must hold the tensors of {name}, found {apart[0]!r:.120} only in {where}")
    for key, (shape, dtype) in specs.items():
        own: Any = found[key]
        if not isinstance(own, torch.Tensor) or tuple(own.shape) != tuple(shape) or dtype not in (None, own.dtype):
            told = f"{list(own.shape)} {own.dtype}" if isinstance(own, torch.Tensor) else shown(own)
            wanted = f"{list(shape)}" if dtype is None else f"{list(shape)} {dtype}"
            raise CheckpointError(f"{path} must hold {key!r:.120} of {name} as {wanted}, found {told}")


def _check_sizes(trial: torch.nn.Module, weights: Tensors, path: str | Path, argument: str) -> None:
    """Raise unless the weights are those of `trial`, which is on the meta device: it has shapes and no memory."""
    own = trial.state_dict()
    check_tensors({name: (tensor.shape, None) for name, tensor in own.items()}, weights, path, argument)
    tables = sum(buffer.nbytes for name, buffer in trial.named_buffers() if name not in own)
    if tables > MOST_BUFFER_BYTES:
        raise CheckpointError(f"{path} describes a {argument} with tables of {tables:,} bytes, more than a model has")


@contextlib.contextmanager
def at_most_parameters(most: int, path: str | Path, argument: str) -> Iterator[None]:
    """Raise a CheckpointError inside this context as soon as a model registers more than `most` parameters."""
    count, own = 0, threading.get_ident()

    def look(module: torch.nn.Module, name: str, param: torch.nn.Parameter) -> None:
        nonlocal count
        count += threading.get_ident() == own  # the hook is called for modules of all threads
        if count > most and threading.get_ident() == own:
            raise CheckpointError(f"{path} describes a {argument} of more tensors than it holds")

    handle = torch.nn.modules.module.register_module_parameter_registration_hook(look)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _explained(what: str, path: str | Path, argument: str) -> Iterator[None]:
    """Turn any error, caused by invalid values in the file, into a CheckpointError that names the argument to give."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        told = " ".join(str(error).split())
        raise CheckpointError(
            f"{argument} must be given: the {what} of {path} cannot be rebuilt: {type(error).__name__}: {told:.300}; "
            f"from_checkpoint(path, {argument}=…)"
        ) from error


def write_model(model: torch.nn.Module, folder: Path, *, is_copy: bool = False, merged: bool = True) -> None:
    """Write the model to a folder that `AutoModelForCausalLM.from_pretrained` can read; for a plain module its weights.

    is_copy   the model is a temporary copy, so adapters can be merged in place
    merged    False writes only the adapters, in peft's format
    """
    inner = unwrapped(model)
    if base_model(inner) is not inner and merged:
        # merge a copy: merging and unmerging in place would change the last bits of the weights
        inner = merge_adapters(inner if is_copy else copy.deepcopy(inner))
    if hasattr(inner, "save_pretrained"):
        with without_bars() if "transformers" in sys.modules else contextlib.nullcontext():
            inner.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)  # peft's template; a run writes its own model card (`card`)
        return
    from safetensors.torch import save_model

    folder.mkdir(parents=True, exist_ok=True)
    save_model(inner, str(folder / "model.safetensors"))


def _moe_config(model: Any) -> Any:
    from dataclasses import replace

    ids = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return replace(model.moe.config, **ids)


def _moe_from(about: Json, weights: Tensors, path: str | Path, argument: str) -> torch.nn.Module:
    from strop.moe import MoEConfig, MoETransformer
    from strop.moe.engines import engine_class
    from strop.moe.torch import NUMPY_DTYPES, MoEForCausalLM

    with _explained(about["class"], path, argument):
        config = MoEConfig(**about["config"])
        check_same(about["config"], _as_json(config.to_dict()), path, f"the config of {argument}")
        if config.num_layers > len(weights):
            raise CheckpointError(f"{path} describes a {argument} of more tensors than it holds")
        specs = {name: (shape, None) for name, shape in config.parameter_shapes().items()}
        check_tensors(specs, weights, path, argument)
        engine_class(about["engine"])  # raises unless it names an engine of strop
        dtype = NUMPY_DTYPES[DTYPES[about["dtype"]]]
        model = MoEForCausalLM(MoETransformer(config, about["engine"], dtype=dtype))
        if type(model).__name__ != about["class"]:
            raise ValueError(f"it must be a {type(model).__name__}")
        _set_dtypes_and_frozen(model, about["frozen"], {})
    return model


def _hugging_face_from(about: Json) -> Any:
    """Return the model with new weights, made with the current default device and random generators."""
    import transformers

    _check_config(about["config"])
    name = about["attention"]
    if name not in ATTENTION:
        raise ValueError(f"its attention must be one of {', '.join(map(str, ATTENTION))}, found {shown(name)}")
    if (package := ATTENTION[name]) is not None and importlib.util.find_spec(package) is None:
        raise ValueError(f"its attention, {name}, needs the package {package}")
    if about["dtype"] not in DTYPES:
        raise ValueError(f"its dtype must be one of {', '.join(DTYPES)}, found {shown(about['dtype'])}")
    config = transformers.AutoConfig.for_model(**_with_floats(about["config"]))
    scores = about["class"].endswith("ForSequenceClassification")
    auto = transformers.AutoModelForSequenceClassification if scores else transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=DTYPES[about["dtype"]], attn_implementation=name, trust_remote_code=False)
    if type(model).__name__ != about["class"]:
        raise ValueError(f"transformers makes a {type(model).__name__} of its config")
    if "generation_config" in about:
        _check_config(about["generation_config"])
        model.generation_config = transformers.GenerationConfig.from_dict(about["generation_config"])
    return model


def _check_config(config: Any) -> None:
    """Raise a ValueError if a config, at any level, names code or asks for lists that are too long."""
    for name, value in config.items() if isinstance(config, dict) else enumerate(config):
        if isinstance(value, (dict, list)):
            _check_config(value)
        if value is not None and (name in CODE or str(name).endswith("_implementation")):
            raise ValueError(f"its config must have no {name!r}: what it names is not run, fetched or asked about")
        if is_whole(value) and value > LONGEST_LIST and any(word in str(name) for word in LISTED):
            raise ValueError(f"its config must have a {name!r:.60} of at most {LONGEST_LIST}, found {shown(value)}")


def _moved(model: torch.nn.Module, device: str, path: str | Path) -> Any:
    """Return the model on its original device, else on the first device of that type, else on the CPU."""
    where = torch.device(device)
    if where.type not in ACCELERATORS:
        return model
    count = num_devices(where.type)
    if not count:
        warnings.warn(f"{path} was written on {device:.20}, which is not here: going on on the CPU", stacklevel=4)
        return model
    return model.to(where if (where.index or 0) < count else where.type)


# ---- adapters ----


def check_lora(lora: LoRAConfig, weights: Tensors, path: str | Path) -> None:
    """Raise unless the file holds adapter weights of the rank that the option `lora` has."""
    ranks = {weight.shape[:1] for name, weight in weights.items() if ".lora_A." in name or ".lora_embedding_A." in name}
    if ranks != {(lora.r,)}:
        found = ", ".join(str(list(rank)) for rank in sorted(ranks)) or "none"
        raise CheckpointError(f"{path} must hold adapters of rank {shown(lora.r)} as config.lora.r says, found {found}")


def _with_adapters(model: torch.nn.Module, about: Json, lora: LoRAConfig | None) -> Any:
    """Return the model with the adapter of the trainer's option `lora`, or with the adapters of the description."""
    if lora is not None:
        from strop.models.prepare import with_lora

        return with_lora(model, lora, seed=0)
    if "adapters" not in about:
        return model
    import peft

    made: Any = model
    for number, (name, values) in enumerate(about["adapters"].items()):
        if values.get("peft_type") != "LORA":
            raise ValueError(f"its adapter must be of the type LORA, found {shown(values.get('peft_type'))}")
        defaults = _as_json(peft.LoraConfig().to_dict())
        for option, value in values.items():
            if option not in (*LORA, *LORA_MADE_ANEW) and value != defaults.get(option, ...):
                raise ValueError(f"its adapter must have no {option!r:.60}, found {shown(value)}")
        config = peft.LoraConfig(**{option: values[option] for option in LORA if option in values})
        if number == 0:
            made = peft.get_peft_model(model, config, adapter_name=name)
        else:
            made.add_adapter(name, config)
    return made


# ---- tokenizers ----


def tokenizer_kind(tokenizer: Tokenizer | None) -> str | None:
    """Return "strop" or "transformers", which can be rebuilt, else the class name; None if there is no tokenizer."""
    from strop.tasks import CharTokenizer

    if tokenizer is None or type(tokenizer) is CharTokenizer:
        return None if tokenizer is None else "strop"
    ours = type(tokenizer).__module__.startswith("transformers.") and hasattr(tokenizer, "save_pretrained")
    return "transformers" if ours else type(tokenizer).__name__


def tokenizer_files(tokenizer: Any) -> Tensors:
    """Return the files that `save_pretrained` writes, each as a tensor of bytes."""
    if tokenizer_kind(tokenizer) not in ("strop", "transformers"):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file() and path.stat().st_size)
        return {
            str(path.relative_to(folder)): torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            for path in files
        }


def tokenizer_from(kind: str | None, files: Tensors, path: str | Path) -> Any:
    """Return the rebuilt tokenizer, strop's or transformers'. No code from the file is run."""
    if kind is None:
        return None
    with _explained("tokenizer", path, "tokenizer"), tempfile.TemporaryDirectory() as folder:
        if kind not in ("strop", "transformers"):
            raise ValueError(f"it must be strop's or transformers', found a {shown(kind)}")
        for name, content in files.items():
            _put_file(Path(folder).resolve(), name, content)
        if kind == "strop":
            from strop.tasks import CharTokenizer

            return CharTokenizer.from_pretrained(folder)
        import transformers

        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def _put_file(folder: Path, name: str, content: torch.Tensor) -> None:
    """Write one file of the tokenizer into the folder. Raise if it would lie outside the folder or names code."""
    file = (folder / name).resolve()
    if file == folder or not file.is_relative_to(folder) or content.dtype != torch.uint8 or content.ndim != 1:
        raise ValueError(f"its files must lie in one folder, as bytes, found {shown(name)}")
    data = content.numpy().tobytes()
    if name.endswith("config.json"):
        _check_config(json.loads(data))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)


# ---- JSON ----


def _written(config: Any) -> Json:
    """Return a config of transformers as it writes it to a file, with all its values."""
    return json.loads(config.to_json_string(use_diff=False))


def _as_json(value: object) -> Any:
    """Return the value as it is read back from JSON. Sets become sorted lists."""
    return json.loads(
        json.dumps(value, default=lambda one: sorted(one) if isinstance(one, (set, frozenset)) else str(one))
    )


def _with_floats(value: object) -> Any:
    """Return a copy of what `_written` returned, with infinity and NaN as floats again."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}[value["__float__"]]
        return {key: _with_floats(item) for key, item in value.items()}
    return [_with_floats(item) for item in value] if isinstance(value, list) else value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
