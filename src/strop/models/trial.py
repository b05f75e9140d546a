"""What only a trial tells of a module: which ids it takes, whether it looks ahead, how it can be read. Leaves no trace in it.

N tokens of S sequences, n of them that count; T tokens of a row; V vocabulary.
"""

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from strop.data.batch import TokenBatch
from strop.models.attention import Rule, Unsupported
from strop.models.decoder_layers import ALLOWED, relative_error
from strop.models.kinds import base_model, evaluating, is_peft, of_config
from strop.ops.registry import on_gpu, on_gpu_or_interpreted

# config keys of models whose logits are not hidden @ weightᵀ + bias (Gemma 2, Cohere, Granite, Falcon-H1 …)
LOGITS_CHANGED_BY = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "logit_soft_cap")

SPAN = re.compile(r"window|chunk|block_size")  # in names of a config's fields: how far a token sees
LONG_SPAN = re.compile(r"window|chunk|block_size|floor_scale")  # the same, of those that a trial shortens
LONGEST_SPAN = 256  # of those that a trial's rows exceed

TRIED = (1, 0, 1)  # ids that every vocabulary has, and that are no positions and no kinds of tokens


def known_ids(module: nn.Module, forward: Callable[[torch.Tensor], object], device: torch.device) -> int | None:
    """Ids are below this: the size of the nn.Embedding that is given them. None where there is none to be found.

    forward   the module on ids [S, T]
    """
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    ids_ST = torch.tensor([TRIED], device=device)
    sizes: list[int] = []

    def look(table: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        if arguments and torch.equal(arguments[0], ids_ST):
            sizes.append(table.num_embeddings)  # type: ignore[arg-type]

    hooks = [table.register_forward_pre_hook(look) for table in tables]
    try:
        # what the module has against three tokens is no matter: the first real batch may have another shape
        with tried(module, device), contextlib.suppress(Exception):
            forward(ids_ST)
    finally:
        for hook in hooks:
            hook.remove()
    return min(sizes, default=None)


def looks_ahead(module: nn.Module, logits: Callable[[TokenBatch], torch.Tensor], batch: TokenBatch) -> bool | None:
    """Whether the logits for a sequence's first token that counts change with that token and those behind it.

    The prompt before it may be read in both directions. The batch keeps its shape, which the module is about to take
    anyway. False also of a module that gives other logits each time it is asked: of that one nothing can be told.
    None: this batch cannot tell, for want of completions or of a second id that the module is known to take.
    """
    first = {sequence: n for n, sequence in reversed(list(enumerate(batch.sequence_n.tolist())))}
    known = batch.ids_N.unique().tolist()
    if not first or len(known) < 2:
        return None
    sequences, places = list(first), list(first.values())

    def found(changed: list[int]) -> torch.Tensor:
        return logits(_with_others(batch, {one: first[one] for one in changed}, known))[places].clone()

    with tried(module, batch.ids_N.device):
        as_it_is_SV, changed_SV = found([]), found(sequences)
        differs = next((i for i in range(len(places)) if not _is_same(as_it_is_SV[i], changed_SV[i])), None)
        if differs is None:
            return False
        # once more, this sequence alone: it is its own tokens, and neither chance nor another sequence
        as_it_is_V, changed_V = found([])[differs], found([sequences[differs]])[differs]
    return _is_same(as_it_is_SV[differs], as_it_is_V) and _is_same(changed_SV[differs], changed_V)


def _with_others(batch: TokenBatch, first: dict[int, int], known: list[int]) -> TokenBatch:
    """The batch with another id than the one that stands there, from these tokens to the end of their sequences."""
    ids_N = batch.ids_N.clone()
    for sequence, n in first.items():
        start, end = int(batch.places_n[n]) + 1, int(batch.cu_seqlens[sequence + 1])
        ids_N[start:end] = known[1] if ids_N[start] == known[0] else known[0]
    return dataclasses.replace(batch, ids_N=ids_N)


def _is_same(one_V: torch.Tensor, other_V: torch.Tensor) -> bool:
    """Up to what rounding makes of it: a causal convolution by a Fourier transform leaks into earlier tokens that much.

    Banned tokens, far below all others, are no measure of what the others' logits are.
    """
    in_16_bits = one_V.dtype.itemsize < 4 or torch.is_autocast_enabled(one_V.device.type)
    one_N, other_N = (logits_V[one_V > one_V.max() - 1e3].float() for logits_V in (one_V, other_V))
    if not len(one_N):  # NaN
        return True
    return bool(((one_N - other_N).abs() <= (2e-2 if in_16_bits else 1e-4) * one_N.abs().max()).all())


@contextlib.contextmanager
def tried(module: nn.Module, device: torch.device) -> Iterator[None]:
    """In eval mode, without gradient, and with the random numbers put back."""
    rng = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with rng, torch.no_grad(), evaluating(module), warnings.catch_warnings():
        # torch says it once in a process, of the first product in the thread of backwards, and then does what is needed
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
        yield


def row_lengths(config: Any, longest: int | None) -> tuple[int, int, int]:
    """Return the lengths of a trial's rows: two of three exceed every window, chunk and block of up to 256 tokens."""
    fields = vars(config.get_text_config() if hasattr(config, "get_text_config") else config)
    spans = [size for name, size in fields.items() if type(size) is int and size <= LONGEST_SPAN and SPAN.search(name)]
    longest = longest or LONGEST_SPAN + 5
    span = max([2, *spans])
    return min(3, longest), min(span + 3, longest), min(span + 5, longest)


@contextlib.contextmanager
def shortened(model: nn.Module) -> Iterator[bool]:
    """Within, windows, chunks and blocks of more than 256 tokens are a few tokens long, in configs and modules; afterwards
    they are as before. Gives whether there are any: then short rows show what happens beyond them."""
    config = getattr(base_model(model), "config", None)
    configs = [config, *(getattr(config, name, None) for name in getattr(type(config), "sub_configs", ()))]
    owners: list[Any] = [one for one in configs if one is not None] + list(model.modules())
    holders = {id(vars(owner)): vars(owner) for owner in owners}
    long: list[tuple[Any, str, int]] = [
        (fields, name, size)
        for fields in holders.values()
        for name, size in fields.items()
        if type(size) is int and size > LONGEST_SPAN and LONG_SPAN.search(name)
    ]
    short = {size: 4 + 3 * i for i, size in enumerate(sorted({size for *_, size in long}))}
    try:
        for fields, name, size in long:
            fields[name] = short[size]
        yield bool(long)
    finally:
        for fields, name, size in long:
            fields[name] = size


# ---- how a Hugging Face model can be read ----


def decoder_and_head(model: Any) -> tuple[nn.Module, nn.Linear] | str:
    """The two parts of a Hugging Face model that give its logits, or why there are none to use."""
    if is_peft(model):
        if any(config.is_prompt_learning for config in model.peft_config.values()):
            return "its adapter adds tokens to the prompt"
        model = base_model(model)
    for key in LOGITS_CHANGED_BY:
        if of_config(model.config, key) not in (None, 1, 1.0, False):
            return f"its config has {key}"
    head, decoder = model.get_output_embeddings(), model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None or decoder is model:
        return "it has no decoder apart from its head"
    if type(head) is not nn.Linear:  # a subclass (LoRA on the head, quantised) does more than a product
        return f"its head is a {type(head).__name__}, not a torch.nn.Linear"
    if head._forward_hooks or head._forward_pre_hooks:
        return "its head has hooks"
    return decoder, head


def gives_logits(head: nn.Linear, states_NH: torch.Tensor, wanted_NV: torch.Tensor) -> bool:
    if states_NH.shape[-1] != head.in_features:
        return False
    found_NV = linear(states_NH, head.weight, head.bias)
    if wanted_NV.shape != found_NV.shape:
        return False
    eps = max(torch.finfo(wanted_NV.dtype).eps, torch.finfo(found_NV.dtype).eps)
    return bool((wanted_NV.float() - found_NV.float()).abs().max() <= 8 * eps * wanted_NV.float().abs().max())


Read = Callable[[dict[int, Rule] | None], tuple[torch.Tensor, dict[int, Rule]]]
"""Rules of attention, or None to learn them, → logits of packed sequences, and what each layer asked of attention."""


def packing(read: Read, num_layers: int | None, wanted_NV: torch.Tensor) -> dict[int, Rule] | str:
    """What each layer asks of attention, or why the model cannot read packed sequences."""
    try:
        _, rules = read(None)
        # one that did not attend here has mixed the sequences
        if (missing := (num_layers or 0) - len(rules)) > 0:
            return f"{missing} of its layers do not attend through transformers' interface"
        found_NV, _ = read(rules)
    except Unsupported as error:
        return str(error)
    except Exception as error:  # whatever a foreign forward raises, it is not to be read so
        return f"its forward fails on packed sequences ({type(error).__name__}: {error})"
    return differs(found_NV, wanted_NV, "packed sequences") or rules


def differs(found_NV: torch.Tensor, wanted_NV: torch.Tensor, what: str) -> str | None:
    """How the logits of the rows read in this way differ from those of each row alone; None where they do not."""
    error = relative_error(found_NV, wanted_NV)
    if error <= ALLOWED[wanted_NV.dtype].training:
        return None
    return f"its logits of {what} are not those of its rows (relative error {error:.1e})"


def attempted(read: Callable[[], torch.Tensor], wanted_NV: torch.Tensor, what: str) -> str | None:
    """The same of what `read` gives; an exception means that it cannot be read so."""
    try:
        return differs(read(), wanted_NV, what)
    except Exception as error:  # whatever a foreign forward raises
        return f"its forward fails on {what} ({type(error).__name__}: {error})"


def fusing(model: torch.nn.Module, rules: dict[int, Rule], read: Callable[[], object], exact: bool = False) -> Any:
    """The decoder layers in few kernels, or why they stay as they are. exact: see `models.exact`"""
    if (reason := (on_gpu_or_interpreted if exact else on_gpu)(next(model.parameters()))) is not True:
        return reason
    from strop.models.layers import fused  # imports Triton

    try:
        found = fused(model, rules, exact)
        return found.differs(read) or found
    except Unsupported as error:
        return str(error)
    except Exception as error:  # as above
        return f"its layers fail in that way ({type(error).__name__}: {error})"
