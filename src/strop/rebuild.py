"""What a checkpoint says of its model and tokenizer, so that both can be made again without their source.

`describe` gives plain JSON: of a Hugging Face model its config (and that of its adapter), of the MoE its MoEConfig, of a
plain module only its class, for the error that asks for it.
"""

import copy
import enum
import importlib
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from strop.models import base_model, unwrapped

Tensors = dict[str, torch.Tensor]


def kind_of(model: torch.nn.Module) -> str:
    """ "moe", "hf" or "plain"; an adapter does not change it."""
    from strop.models import Policy

    return Policy(model).kind


def describe(model: torch.nn.Module) -> dict[str, Any]:
    """How to make the model again."""
    kind = kind_of(model)
    about: dict[str, Any] = {"kind": kind, "class": type(base_model(model)).__name__}
    if kind == "moe":
        inner = unwrapped(model)
        about |= {
            "config": _moe_config(inner).to_dict(),
            "engine": inner.moe.engine.name,
            "dtype": _name(inner.dtype),
        }
    if kind == "hf":
        inner = base_model(model)
        about |= {"config": _json_dict(inner.config), "dtype": _name(inner.dtype), "device": str(inner.device)}
        about["attention"] = getattr(inner.config, "_attn_implementation", None)
        if inner.generation_config is not None:
            about["generation_config"] = _json_dict(inner.generation_config)
        if inner is not model:
            about["adapters"] = {name: _plain(c.to_dict()) for name, c in model.peft_config.items()}  # type: ignore[union-attr,operator]
    about["frozen"] = [name for name, param in model.named_parameters() if not param.requires_grad]
    return about


def model_from(
    about: dict[str, Any], weights: Tensors, path: Any, argument: str, *, with_adapter: bool = True
) -> torch.nn.Module:
    """The model of a description, its weights still to be loaded, in the dtypes of `weights`."""
    if about["kind"] == "plain":
        raise ValueError(
            f"{argument} must be given: {path} holds the weights of a {about['class']}, a plain module, which cannot "
            f"be rebuilt; from_checkpoint(path, {argument}=…)"
        )
    if about["kind"] == "moe":
        return _moe_from(about)
    model = _hugging_face_from(about, path, argument)
    if with_adapter and "adapters" in about:
        model = _with_adapters(model, about["adapters"])
    if with_adapter or "adapters" not in about:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in weights and weights[name].dtype != tensor.dtype:
                tensor.data = tensor.data.to(weights[name].dtype)
        for name in about["frozen"]:
            model.get_parameter(name).requires_grad_(False)
    return model


def write_model(model: torch.nn.Module, folder: Path) -> None:
    """The model in a folder, as `AutoModelForCausalLM.from_pretrained` reads it; a plain module as its weights."""
    inner = unwrapped(model)
    if base_model(inner) is not inner:
        # of a copy: merging and taking apart again would change the weights in their last bits
        inner = copy.deepcopy(inner).merge_and_unload()
    if hasattr(inner, "save_pretrained"):
        inner.save_pretrained(folder)
        return
    from safetensors.torch import save_model

    folder.mkdir(parents=True, exist_ok=True)
    save_model(inner, str(folder / "model.safetensors"))


def _moe_config(model: Any) -> Any:
    from dataclasses import replace

    ids = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return replace(model.moe.config, **ids)


def _moe_from(about: dict[str, Any]) -> torch.nn.Module:
    from strop.moe import MoEConfig, MoETransformer
    from strop.moe.torch import NUMPY_DTYPES, MoEForCausalLM

    dtype = NUMPY_DTYPES[getattr(torch, about["dtype"])]
    return MoEForCausalLM(MoETransformer(MoEConfig(**about["config"]), about["engine"], dtype=dtype))


def _hugging_face_from(about: dict[str, Any], path: Any, argument: str) -> Any:
    import transformers

    with torch.random.fork_rng():
        try:
            config = transformers.AutoConfig.for_model(**about["config"])
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, about["dtype"]), attn_implementation=about["attention"]
            )
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"{argument} must be given: transformers cannot rebuild the {about['class']} of {path}: {error}"
            ) from None
    if type(model).__name__ != about["class"]:
        raise ValueError(
            f"{argument} must be given: {path} holds a {about['class']}, and transformers rebuilds its config as a "
            f"{type(model).__name__}"
        )
    if "generation_config" in about:
        model.generation_config = transformers.GenerationConfig.from_dict(about["generation_config"])
    if about["device"].startswith("cuda"):
        if torch.cuda.is_available():
            return model.to(about["device"])
        warnings.warn(f"{path} was written on {about['device']}, which is not here: going on on the CPU", stacklevel=4)
    return model


def _with_adapters(model: Any, adapters: dict[str, Any]) -> Any:
    try:
        import peft
    except ImportError:
        raise ImportError('the checkpoint has adapters of peft: pip install "strop[train]"') from None
    with torch.random.fork_rng():
        made: Any = None
        for name, values in adapters.items():
            config = peft.PeftConfig.from_peft_type(**values)
            if made is None:
                made = peft.get_peft_model(model, config, adapter_name=name)
            else:
                made.add_adapter(name, config)
    return made


# ---- tokenizers ----


def tokenizer_class(tokenizer: Any) -> str | None:
    """Where its class is; None for none, or for one without save_pretrained, which is passed in again."""
    if tokenizer is None or not hasattr(tokenizer, "save_pretrained"):
        return None
    return f"{type(tokenizer).__module__}:{type(tokenizer).__qualname__}"


def tokenizer_files(tokenizer: Any) -> Tensors:
    """The files `save_pretrained` writes, as bytes."""
    if tokenizer_class(tokenizer) is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file() and path.stat().st_size)
        return {
            str(path.relative_to(folder)): torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            for path in files
        }


def tokenizer_from(where: str | None, files: Tensors) -> Any:
    """The tokenizer again. Classes outside strop are transformers' affair, which opens its own and no others."""
    if where is None:
        return None
    module, _, name = where.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        for file, content in files.items():
            path = (Path(folder) / file).resolve()
            if not path.is_relative_to(Path(folder).resolve()):
                raise ValueError(f"the checkpoint's tokenizer must lie in one folder, found the file {file!r}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.numpy().tobytes())
        if module.partition(".")[0] == "strop":
            return getattr(importlib.import_module(module), name).from_pretrained(folder)
        import transformers

        return transformers.AutoTokenizer.from_pretrained(folder)


# ---- JSON ----


def _json_dict(config: Any) -> dict[str, Any]:
    return _plain(config.to_dict())


def _plain(value: Any) -> Any:
    """As JSON has it; dtypes by name, enumerations by value, sets as lists."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(item) for item in value)
    if isinstance(value, torch.dtype):
        return _name(value)
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
