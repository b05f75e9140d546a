"""`strop doctor`: show what is installed, what is active, why the rest is not, and what is broken."""

import importlib
import platform
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

import strop
from strop import _compiled
from strop.cli.options import option

if TYPE_CHECKING:
    from strop.ops.registry import Op

OPTIONAL = {
    "torch": "operators and algorithms",
    "triton": "GPU kernels",
    "transformers": "models and tokenizers",
    "peft": "LoRA",
    "datasets": "Hugging Face data sets",
    "gguf": "models in GGUF files, such as smollm2",
    "bitsandbytes": "--quantize nf4",
    "uvicorn": "strop serve",
    "llguidance": "JSON mode of strop serve",
    "tensorboard": "--log tensorboard",
    "trackio": "--log trackio",
    "wandb": "--log wandb",
    "scipy": "benchmarks",
    "matplotlib": "plots",
}
UNASKED = {"rlox": "a peer in the benchmarks"}  # listed only if they are installed


@dataclass(frozen=True)
class Finding:
    part: str
    status: str  # "ok", "absent" or "broken"
    detail: str


def findings(deep: bool = False) -> Iterator[Finding]:
    yield Finding("strop", "ok", strop.__version__)
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    old = int(np.__version__.split(".")[0]) < 2
    yield Finding("numpy", "broken" if old else "ok", np.__version__ + ("; 2.0 or newer is needed" if old else ""))
    yield compiled_module()
    for problem in _compiled.environment_problems:
        yield Finding("environment", "broken", problem)
    yield from packages(deep)
    yield python_tool()
    yield from operators()


def compiled_module() -> Finding:
    if _compiled.native is None:
        status = "broken" if _compiled.native_is_broken else "absent"
        return Finding("compiled module", status, f"{_compiled.native_status}; the primitives run in NumPy")
    if wrong := _self_check():
        return Finding("compiled module", "broken", f"{wrong} differs from its NumPy twin")
    isas = [f"[{name}]" if name == _compiled.native.isa() else name for name in _compiled.native.available_isas()]
    return Finding("compiled module", "ok", f"instruction set {' '.join(isas)}, {strop.get_num_threads()} threads")


def _self_check() -> str | None:
    """Return the name of a compiled primitive whose result differs from NumPy's; None if all agree."""
    from strop.primitives import advantages, kl

    p, q = np.linspace(-5, 0, 64).reshape(2, 32), np.linspace(0, -5, 64).reshape(2, 32)
    pairs = {
        "advantages": (strop.compute_batch_group_advantages(p), advantages._advantages_numpy(p, 0, 0.0, "group")),
        "token KL": (strop.compute_batch_token_kl(p, q), kl._sums_numpy(kl._token_kl_terms, p, q, None)),
        "k3 KL": (strop.compute_batch_token_kl_schulman(p, q), kl._sums_numpy(kl._schulman_terms, p, q, None)),
    }
    return next((name for name, (a, b) in pairs.items() if not np.allclose(a, b, rtol=1e-12)), None)


def python_tool() -> Finding:
    """Return which protections the kernel lacks for programs that `python_tool` runs."""
    try:
        from strop.environments import sandbox
    except ImportError:
        return Finding("Python tool", "absent", "environments need torch")
    lacking = sandbox.unprotected()
    told = f"protected less on this machine: {lacking}" if lacking else "the kernel limits files, processes and network"
    return Finding("Python tool", "absent" if lacking else "ok", told)


def packages(deep: bool) -> Iterator[Finding]:
    """Yield the state of each package. `deep` also imports each, which takes many seconds. torch is always imported."""
    for name, purpose in {**OPTIONAL, **UNASKED}.items():
        if name == "triton" and _is_cpu_build():
            continue
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name in OPTIONAL:
                yield Finding(name, "absent", f"not installed; needed for: {purpose}")
            continue
        try:
            if (deep and name in OPTIONAL) or name == "torch":
                importlib.import_module(name)
            yield Finding(name, "ok", f"{version}; {purpose}" if name in UNASKED else version)
        except Exception as error:
            yield Finding(name, "broken", f"{version} is installed but does not import: {error}")


def _is_cpu_build() -> bool:
    """Return whether torch is installed in a build without a GPU that Triton supports."""
    try:
        import torch
    except ImportError:
        return False
    return torch.version.cuda is None and torch.version.hip is None


def operators() -> Iterator[Finding]:
    try:
        import torch

        from strop.models.loading import num_devices
        from strop.ops import onednn, registry
    except ImportError:
        yield Finding("operators", "absent", "they need torch")
        return
    other = next((kind for kind in ("mps", "xpu") if num_devices(kind)), None)
    if torch.cuda.is_available():
        yield Finding("gpu", "ok", f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
    elif other is not None:
        told = "torch's own operators, none of strop's kernels; strop is not tested on it"
        yield Finding("gpu", "ok", f"--device {other}: {told}")
    else:
        sees_none = f"torch is built for CUDA {torch.version.cuda}, but sees no device"
        yield Finding("gpu", "absent", sees_none if torch.version.cuda else "torch is a CPU build")
    by = "oneDNN, which is faster than MKL on this CPU" if onednn.is_faster() else "torch's own"
    yield Finding(
        "float32 products", "ok", f"{by}; rollouts: {'packed by oneDNN' if onednn.has_onednn() else 'the same'}"
    )
    for name in registry.ops():
        yield _operator(registry.get_op(name))


def _operator(op: "Op") -> Finding:
    listed = ", ".join(op.backends())
    try:
        forced = op.forced()
    except ValueError as error:
        return Finding(f"operator {op.name}", "broken", f"STROP_BACKEND: {error}")
    if forced and forced[0] not in op.backends():
        return Finding(f"operator {op.name}", "broken", f"{forced[1]} asks for {forced[0]!r}; there are {listed}")
    if not forced and _is_cpu_build():
        listed = ", ".join(
            name for name in op.backends() if name not in ("triton", "exact")
        )  # both are kernels of Triton
    return Finding(f"operator {op.name}", "ok", listed + (f"; {forced[1]} asks for {forced[0]}" if forced else ""))


def of_model(name: str) -> Iterator[Finding]:
    """Yield how strop reads rows and runs rollouts with a model, and why not faster."""
    from strop.models import as_policy
    from strop.models.loading import load_model
    from strop.rollout import Sampling, generate

    try:
        policy = as_policy(*load_model(name))
        policy.check_reading()
        why = policy.no_packing_because
        told = "packed: sequences one after the other, without padding" if why is None else f"padded: {why}"
        if policy.no_padding_because is not None:
            told += f"; only rows of one length together: {policy.no_padding_because}"
        if policy.boundaries is not None:
            told += f"; {policy.boundaries.in_words}"
        yield Finding("training", "ok", told)
        why = policy.no_sharing_because
        yield Finding("shared prefixes", "ok", "are read once" if why is None else f"are read by each sequence: {why}")
        yield Finding(
            "loss", "ok", f"from all logits: {why}" if (why := policy.no_hidden_because) else "from hidden states"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the reason is shown below
            rollout = generate(policy, [[1]], Sampling(max_new_tokens=1, temperature=0.0))
        yield Finding("rollouts", "ok", rollout.engine)
    except ValueError as error:  # a model that strop refuses
        yield Finding("model", "broken", str(error))


def doctor(
    deep: Annotated[bool, option("Also import every package: slower, and finds broken ones.")] = False,
    model: Annotated[str | None, option("Say how this model is trained and sampled from, and why not faster.")] = None,
) -> None:
    """Show what is installed and active. Exits with 1 when something is broken, not when it is merely absent."""
    table = Table("part", "status", "detail", title="strop doctor")
    colours = {"ok": "green", "absent": "yellow", "broken": "bold red"}
    found = list(findings(deep) if model is None else of_model(model))
    for finding in found:
        detail = finding.detail.replace("[", r"\[")
        table.add_row(finding.part, f"[{colours[finding.status]}]{finding.status}[/]", detail)
    Console().print(table)
    broken = [f.part for f in found if f.status == "broken"]
    if broken:
        print(f"broken: {', '.join(broken)}")
        raise typer.Exit(1)
