"""Trials that find out which ids a module takes, whether it is causal, and how it can be read. They leave it unchanged.

N tokens of S sequences, n of them in the loss; T tokens of a row; V vocabulary.
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
from strop.models.kinds import base_model, evaluating, is_peft, is_plain, of_config
from strop.ops.registry import on_gpu, on_gpu_or_interpreted

# config keys of models whose logits are not hidden @ weightᵀ + bias (Gemma 2, Cohere, Granite, Falcon-H1 …)
LOGITS_CHANGED_BY = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "logit_soft_cap")

SPAN = re.compile(r"window|chunk|block_size")  # in names of config fields that limit how far a token sees
LONG_SPAN = re.compile(r"window|chunk|block_size|floor_scale")  # the same, for fields that a trial shortens
LONGEST_SPAN = 256  # the longest span that a trial's rows exceed

FIRST_ROW = 3  # tokens of the first row of a trial, at most
ROUNDING = 2e-6  # kernels of float32 add up over several sequences what they then mask
TRIED = (1, 0, 1)  # ids in every vocabulary that cannot be confused with positions or token types


def known_ids(module: nn.Module, forward: Callable[[torch.Tensor], object], device: torch.device) -> int | None:
    """Return the size of the nn.Embedding that receives the ids; None if none is found.

    forward   calls the module on ids [S, T]
    """
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    ids_ST = torch.tensor([TRIED], device=device)
    sizes: list[int] = []

    def look(table: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        if arguments and torch.equal(arguments[0], ids_ST):
            sizes.append(table.num_embeddings)  # type: ignore[arg-type]

    hooks = [table.register_forward_pre_hook(look) for table in tables]
    try:
        # ignore errors on three tokens: the first real batch may have a shape that works
        with tried(module, device), contextlib.suppress(Exception):
            forward(ids_ST)
    finally:
        for hook in hooks:
            hook.remove()
    return min(sizes, default=None)


def looks_ahead(module: nn.Module, logits: Callable[[TokenBatch], torch.Tensor], batch: TokenBatch) -> bool | None:
    """Return whether the logits that predict a sequence's first loss token change with that token and later ones.

    The prompt may be read in both directions. The batch keeps its shape, which the module will read anyway. Return False
    also if the module's logits differ from call to call, because then nothing can be concluded. Return None if this batch
    cannot show it, because it has no completions or only one id.
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
        # repeat with this sequence alone, to rule out chance and other sequences
        as_it_is_V, changed_V = found([])[differs], found([sequences[differs]])[differs]
    return _is_same(as_it_is_SV[differs], as_it_is_V) and _is_same(changed_SV[differs], changed_V)


def _with_others(batch: TokenBatch, first: dict[int, int], known: list[int]) -> TokenBatch:
    """Return the batch with the ids replaced by other ones, from these tokens to the end of their sequences."""
    ids_N = batch.ids_N.clone()
    for sequence, n in first.items():
        start, end = int(batch.places_n[n]) + 1, int(batch.cu_seqlens[sequence + 1])
        ids_N[start:end] = known[1] if ids_N[start] == known[0] else known[0]
    return dataclasses.replace(batch, ids_N=ids_N)


def _is_same(one_V: torch.Tensor, other_V: torch.Tensor) -> bool:
    """Return whether logits are equal up to rounding. A causal convolution by FFT leaks that much into earlier tokens.

    Banned tokens, whose logits are far below all others, are left out of the comparison.
    """
    in_16_bits = one_V.dtype.itemsize < 4 or torch.is_autocast_enabled(one_V.device.type)
    one_N, other_N = (logits_V[one_V > one_V.max() - 1e3].float() for logits_V in (one_V, other_V))
    if not len(one_N):  # NaN
        return True
    return bool(((one_N - other_N).abs() <= (2e-2 if in_16_bits else 1e-4) * one_N.abs().max()).all())


@contextlib.contextmanager
def tried(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Run a trial in eval mode and without gradient, and restore the RNG state afterwards."""
    rng = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with rng, torch.no_grad(), evaluating(module), warnings.catch_warnings():
        # torch warns once per process, at the first matmul in the backward thread, and then creates the context
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
        yield


def row_lengths(config: Any, longest: int | None) -> tuple[int, int, int]:
    """Return the lengths of a trial's rows: two of three exceed every window, chunk and block of up to 256 tokens."""
    fields = vars(config.get_text_config() if hasattr(config, "get_text_config") else config)
    spans = [size for name, size in fields.items() if type(size) is int and size <= LONGEST_SPAN and SPAN.search(name)]
    longest = longest or LONGEST_SPAN + 5
    span = max([2, *spans])
    return min(FIRST_ROW, longest), min(span + 3, longest), min(span + 5, longest)


@contextlib.contextmanager
def shortened(model: nn.Module) -> Iterator[bool]:
    """Shorten windows, chunks and blocks of more than 256 tokens to a few tokens, in configs and modules; restore them
    afterwards. Yield whether there are any. If so, short rows show what happens beyond them."""
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
    """Return the decoder and the LM head of a Hugging Face model, or the reason why they cannot be used."""
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
    if not is_plain(head.weight):
        return f"its head's weight is a {type(head.weight).__name__}"
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


def packing(
    read: Read, num_layers: int | None, wanted_NV: torch.Tensor, with_another: Read | None = None
) -> dict[int, Rule] | str:
    """Return the attention rule of each layer, or the reason why the model cannot read packed sequences.

    with_another   the same as `read` with other tokens in the first sequence, if the model is told where sequences end:
                   then layers without attention may keep them apart too, and the trial shows whether they do
    """
    try:
        _, rules = read(None)
        # a layer that did not call strop's attention, and was told of no sequences, has mixed them
        if with_another is None and (missing := (num_layers or 0) - len(rules)) > 0:
            return f"{missing} of its layers do not attend through transformers' interface"
        found_NV, _ = read(rules)
        another_NV = found_NV if with_another is None else with_another(rules)[0]
    except Unsupported as error:
        return str(error)
    except Exception as error:  # a foreign forward may raise anything; then packing is not used
        return f"its forward fails on packed sequences ({type(error).__name__}: {error})"
    if why := differs(found_NV, wanted_NV, "packed sequences"):
        return why
    if with_another is not None:
        beginning = slice(FIRST_ROW, 2 * FIRST_ROW)  # of the second row, where a state carried over shows most
        change = relative_error(another_NV[beginning], found_NV[beginning])
        if not change <= max(torch.finfo(found_NV.dtype).eps, ROUNDING):
            return f"a sequence changes the next one (relative error {change:.1e})"
    return rules


def differs(found_NV: torch.Tensor, wanted_NV: torch.Tensor, what: str) -> str | None:
    """Return how the logits of rows read together differ from those of each row alone; None if they do not."""
    error = relative_error(found_NV, wanted_NV)
    if error <= ALLOWED[wanted_NV.dtype].training:
        return None
    return f"its logits of {what} are not those of its rows (relative error {error:.1e})"


def attempted(read: Callable[[], torch.Tensor], wanted_NV: torch.Tensor, what: str) -> str | None:
    """Return how the logits from `read` differ, or its exception as text; None if they do not differ."""
    try:
        return differs(read(), wanted_NV, what)
    except Exception as error:  # whatever a foreign forward raises
        return f"its forward fails on {what} ({type(error).__name__}: {error})"


def fusing(model: torch.nn.Module, rules: dict[int, Rule], read: Callable[[], object], exact: bool = False) -> Any:
    """Return the fused decoder layers, or the reason why they are not fused. exact: see `models.exact`"""
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


# ---- rows whose results depend on the longest row of the call ----
#
# Longrope changes the frequencies of all rows of a call if one row is longer than a boundary. Dynamic rotary embeddings
# change them for every length beyond it. To find this, the model's rotary modules are called on the first two positions
# together with positions before and after each boundary in the config.

BOUNDARY = re.compile(r"max_position|max_seq_len|context_length")  # in names of fields of configs and modules


@dataclasses.dataclass(frozen=True)
class Rotation:
    """A call that a model makes to a rotary module, with the arguments it used."""

    module: nn.Module
    arguments: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]

    def __call__(self, *positions: int) -> list[torch.Tensor]:
        """Return the module's output for positions 0 and 1 when the given positions follow them."""
        device = next(self.module.buffers()).device

        def other(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if value.is_floating_point():
                return value.new_empty(1, 1, 1, device=device)
            return torch.tensor([0, 1, *positions], device=device).expand(*value.shape[:-1], -1)

        with torch.no_grad():
            found = self.module(*map(other, self.arguments), **{name: other(value) for name, value in self.named})
        return [one[..., :2, :].clone() for one in (found if isinstance(found, (tuple, list)) else [found])]

    def changes(self, *positions: int) -> bool:
        """Return whether these positions change the rotation of positions 0 and 1."""
        alone, beside = self(), self(*positions)
        self()  # reset: dynamic frequencies stay those of the longest row until a short row is read
        return not all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(alone, beside, strict=True))


@contextlib.contextmanager
def rotations(model: nn.Module) -> Iterator[list[Rotation]]:
    """Yield a list; on exit, add to it the calls that the model made to its rotary modules."""
    found: dict[tuple[int, str], Rotation] = {}
    result: list[Rotation] = []

    def look(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        options = [value for value in (*arguments, *named.values()) if not isinstance(value, torch.Tensor)]
        found.setdefault((id(module), repr(options)), Rotation(module, arguments, tuple(named.items())))

    modules = [one for one in model.modules() if any(name.endswith("inv_freq") for name in one._buffers)]
    hooks = [one.register_forward_pre_hook(look, with_kwargs=True) for one in modules]
    try:
        yield result
    finally:
        for hook in hooks:
            hook.remove()
        result += found.values()


@dataclasses.dataclass(frozen=True)
class Sides:
    """The rule for rows that may be read together: those on the same side of all boundaries.

    boundaries   a row is beyond a boundary if it has more tokens
    apart        rows with more tokens than this are read only with rows of equal length; None if there is no such limit
    rotations    the rotary calls that depend on the longest row
    """

    boundaries: tuple[int, ...]
    apart: int | None
    rotations: tuple[Rotation, ...]

    @property
    def told(self) -> str:
        """The rule in words."""
        beyond = [f"rows on the same side of {boundary} tokens together" for boundary in self.boundaries]
        equal = [] if self.apart is None else [f"rows of more than {self.apart} tokens with rows of equal length"]
        return ", ".join(beyond + equal) + ": its rotation depends on the longest row of a call"

    def side(self, length: int) -> int:
        """Return a group number: rows whose lengths have the same number can be read together."""
        if self.apart is not None and length > self.apart:
            return length
        return -sum(length > boundary for boundary in self.boundaries)

    def steps(self, length: int) -> int | None:
        """Return how many tokens a row of this length can be extended by with a KV cache; None if there is no limit.

        It is 0 if the cache would belong to another side, or if every length has its own frequencies.
        """
        if self.apart is not None and length > self.apart:
            return 0
        if any(length == boundary + 1 for boundary in self.boundaries):
            return 0  # a cache without the last token would belong to the side before the boundary
        ahead = [boundary for boundary in (*self.boundaries, self.apart) if boundary is not None and boundary >= length]
        return min(ahead) + 1 - length if ahead else None

    def forget(self) -> None:
        """Reset the rotary modules, because dynamic frequencies depend on the previous call."""
        for rotation in self.rotations if self.apart is not None else ():
            rotation()


def sides(rotations: list[Rotation], config: object) -> Sides | None:
    """Return the `Sides` of rotations that change with the longest row of a call; None if none changes."""
    boundaries: set[int] = set()
    apart: int | None = None
    for rotation in rotations:
        lengths = sorted(_lengths(config) | _lengths_in(vars(rotation.module)))
        if not lengths or not rotation.changes(4 * lengths[-1]):
            continue
        # positions count from 0: position L belongs to a row of L + 1 tokens
        first = next((L for L in lengths if rotation.changes(L) and not rotation.changes(L - 1)), 0)
        alike = first and all(torch.equal(a, b) for a, b in zip(rotation(first), rotation(4 * first), strict=True))
        rotation()
        if alike:
            boundaries.add(first)
        else:
            apart = min(first, first if apart is None else apart)
    return Sides(tuple(sorted(boundaries)), apart, tuple(rotations)) if boundaries or apart is not None else None


def _lengths(config: Any) -> set[int]:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return _lengths_in(vars(text))


def _lengths_in(fields: dict[str, Any]) -> set[int]:
    found = {size for name, size in fields.items() if type(size) is int and size > 2 and BOUNDARY.search(str(name))}
    for value in fields.values():
        found |= _lengths_in(value) if type(value) is dict else set()
    return found


# ---- layers through which no gradient passes ----


def not_differentiable(model: Any) -> dict[str, str]:
    """Return layer name → reason, for linear layers that pass no gradient. Only weights that are not plain are tested."""
    found = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(module, nn.Linear) or weight is None or hasattr(module, "base_dtype"):
            continue  # the last is our own `QuantizedLinear`
        if type(weight) in (nn.Parameter, torch.Tensor) and weight.is_floating_point():
            continue
        x = torch.ones(1, module.in_features, dtype=_compute_dtype(model), device=weight.device, requires_grad=True)
        try:
            with torch.enable_grad():
                (gradient,) = torch.autograd.grad(module(x).float().sum(), x)
            why = "" if bool(gradient.any()) else "its gradient is 0"
        except Exception as error:  # a foreign class may raise anything
            why = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        if why:
            found[name] = f"a {type(module).__name__} whose weight is a {type(weight).__name__}, is not ({why})"
    return found


def _compute_dtype(model: Any) -> torch.dtype:
    found = getattr(model, "dtype", None)
    return found if isinstance(found, torch.dtype) and found.is_floating_point else torch.float32
