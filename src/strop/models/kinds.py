"""Predicates for the kinds of models, and access to wrapped models and their configs."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


def unwrapped(model: nn.Module) -> Any:
    """Return the module that torch.compile wrapped, or the module itself."""
    return getattr(model, "_orig_mod", model)


def base_model(model: Any) -> Any:
    """Return the Hugging Face model inside a peft model, or the model itself."""
    return model.get_base_model() if is_peft(model) else model


def has_adapter(model: nn.Module) -> bool:
    return is_peft(model) or bool(getattr(model, "_hf_peft_config_loaded", False))


@contextlib.contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    if is_peft(model):
        with model.disable_adapter():
            yield
        return
    model.disable_adapters()  # transformers' own way of holding an adapter
    try:
        yield
    finally:
        model.enable_adapters()


@contextlib.contextmanager
def replaced_forwards(forwards: dict[nn.Module, Callable[..., torch.Tensor]]) -> Iterator[None]:
    """Replace the forwards of these modules. In nested contexts the inner one applies; leaving it restores the outer one."""
    before: dict[nn.Module, Any] = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module, own in before.items():
            if own is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = own


def is_plain(weight: object) -> bool:
    """Return whether a weight is a tensor class of torch. Those of other libraries support few operators."""
    return type(weight).__module__.partition(".")[0] == "torch"


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the model's layers in order."""
    kinds = set(getattr(base_model(model), "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in kinds]
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return found or (list(lists[0]) if lists else [])


def as_module(model: object) -> nn.Module:
    from strop.moe import MoETransformer

    if isinstance(model, MoETransformer):
        from strop.moe.torch import MoEForCausalLM

        return MoEForCausalLM(model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module or a MoETransformer, found {type(model).__name__}")
    return model


def shares(one: nn.Module, other: nn.Module) -> bool:
    """Return whether the two modules share a parameter."""
    ours = {id(param) for param in one.parameters()}
    return any(id(param) in ours for param in other.parameters())


def is_moe(model: nn.Module) -> bool:
    # if the module was never imported, no model is of its class; importing it would load transformers
    module = sys.modules.get("strop.moe.torch")
    return module is not None and isinstance(model, module.MoEForCausalLM)


def is_peft(model: torch.nn.Module) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def is_hugging_face(model: torch.nn.Module) -> bool:
    wanted = ("config", "generate", "get_output_embeddings", "generation_config")
    return all(hasattr(base_model(model), name) for name in wanted)


def is_classifier(model: torch.nn.Module) -> bool:
    """Return whether the model is a sequence classifier of transformers."""
    inner = base_model(model)
    return hasattr(inner, "config") and type(inner).__name__.endswith("ForSequenceClassification")


def of_config(config: object, key: str) -> Any:
    """Return a config's value for the key; of a multimodal config that of its text part."""
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    return getattr(config, key, None)
