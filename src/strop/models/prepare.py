"""Preparation of a model for training: adapters, no dropout, gradient checkpointing, compilation."""

import codecs
import difflib
import locale
import logging
import platform
import re
import warnings
from typing import Any

import torch

from strop._install import missing
from strop.config import LoRAConfig, RunConfig
from strop.models import quantized
from strop.models.kinds import is_classifier
from strop.models.policy import Policy
from strop.models.quantized import quantization_of


def prepared_model(
    policy: Policy, run: RunConfig, lora: LoRAConfig | None, quantize: str | None = None
) -> torch.nn.Module:
    """Return the policy's model with quantisation, adapters, dropout, checkpointing and compilation as configured."""
    model: Any = policy.model
    if quantize is not None and (found := quantization_of(model)) is None:
        quantized.quantize(model, quantize)
    elif quantize is not None and found != quantize:
        raise ValueError(f"quantize must be {found!r}, as the model is quantised already, found {quantize!r}")
    if policy.kind != "moe":
        quantized.check_differentiable(model)
    if lora is not None:
        if policy.kind != "hf":
            raise ValueError(f"lora must be None but for Hugging Face models, found a {type(model).__name__}")
        model = with_lora(model, lora, run.seed)
    if policy.kind != "moe":
        warn_of_slow_bf16(policy.device, run.autocast, getattr(model, "dtype", None))
    if policy.kind == "moe" and (run.autocast or run.compile):
        warnings.warn("autocast and compile have no effect on the MoE: its engine computes in float32", stacklevel=4)
        return model
    if not run.dropout:
        turn_dropout_off(model)
    if run.gradient_checkpointing:
        if not hasattr(model, "gradient_checkpointing_enable"):
            raise ValueError(
                f"gradient_checkpointing must be False: {type(model).__name__} has no gradient_checkpointing_enable"
            )
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return _compiled(model) if run.compile else model


def with_lora(model: torch.nn.Module, config: LoRAConfig, seed: int) -> torch.nn.Module:
    """Return the model with a new adapter as a LoRAConfig describes it."""
    # peft imports bitsandbytes if installed, which warns of missing kernels that an unquantised model does not need
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        import peft
    except ImportError:
        raise missing("lora", "peft", "train") from None
    if isinstance(model, peft.PeftModel):
        raise ValueError("lora must be None: the model has peft adapters already")
    targets = _targets(model, config.target_modules)
    task = "SEQ_CLS" if is_classifier(model) else "CAUSAL_LM"
    lora = peft.LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft takes any number
        target_modules=targets,
        task_type=task,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return peft.get_peft_model(model, lora)


def _targets(model: torch.nn.Module, asked: str | tuple[str, ...]) -> str | list[str]:
    """Return the target modules in peft's form: a list of names, or a regular expression for full names.

    A string of word characters is one name, or several separated by commas. Raise a ValueError if a name matches no module.
    """
    if isinstance(asked, str) and re.fullmatch(r"[\w,]+", asked):
        asked = tuple(asked.split(","))
    if asked == "all-linear":
        return asked
    names = [name for name, _ in model.named_modules() if name]
    linear = dict.fromkeys(n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear))
    if isinstance(asked, str):
        if not any(re.fullmatch(asked, name) for name in names):
            raise ValueError(
                f"target_modules must match names of modules, found the pattern {asked!r}, which matches none"
            )
        return asked
    for target in asked:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            near = difflib.get_close_matches(target, linear, n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise ValueError(
                f"target_modules must be names of the model's modules, found {target!r}{hint}; "
                f"its linear layers are {', '.join(linear)}"
            )
    return list(asked)


def warn_of_slow_bf16(device: torch.device, autocast: str | None, dtype: torch.dtype | None) -> None:
    """Warn if bfloat16 runs on a CPU without bf16 instructions: it is correct, but several times slower than float32."""
    if device.type != "cpu" or (autocast != "bf16" and dtype != torch.bfloat16):
        return
    knows = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)  # private in torch; without it, do not warn
    if platform.machine() in ("x86_64", "AMD64") and not knows():
        what = 'autocast="bf16"' if autocast else "a model in bfloat16"
        warnings.warn(f"{what} is slow here: this CPU has no instructions for it; float32 is faster", stacklevel=5)


def turn_dropout_off(model: torch.nn.Module) -> None:
    """Set every dropout probability of the model to 0, also those stored as float attributes of modules.

    Examples are attention_dropout in most models of transformers, dropout and layerdrop in OPT and similar ones.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("dropout" in name or name == "layerdrop"):
                setattr(module, name, 0.0)


def check_precision(model: torch.nn.Module) -> None:
    """Raise a TypeError if trainable weights are float16; warn if they are bfloat16."""
    for name, param in model.named_parameters():
        if param.requires_grad and param.dtype == torch.float16:
            raise TypeError(
                f"{name} must not be trained in float16: AdamW's eps of 1e-8 and small gradients are 0 there, so that weights "
                f'stay as they are or become infinite; load the model in float32 and use autocast="bf16"'
            )
        if param.requires_grad and param.dtype == torch.bfloat16:
            warnings.warn(
                f"{name} is trained in {param.dtype}, which loses updates below about 1/256 of a weight; "
                f'load the model in float32 and use autocast="bf16"',
                stacklevel=4,
            )
            return


def _compiled(model: torch.nn.Module) -> torch.nn.Module:
    encoding = locale.getencoding()
    if codecs.lookup(encoding).name == "ascii":  # torch could not read its own templates, which are UTF-8
        raise ValueError(
            f"compile must be False where the locale knows ASCII alone, found {encoding}; set PYTHONUTF8=1"
        )
    return torch.compile(model)  # type: ignore[return-value]
