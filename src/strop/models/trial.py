"""The trial of a policy: which ids its model takes, whether it is causal, how it can be read. The model stays as it is.

N tokens of S sequences, n of them in the loss; T tokens of a row; V vocabulary.
"""

import contextlib
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear

from strop.data.batch import PaddedRows, TokenBatch, Trajectory
from strop.models.attention import Rule, Unsupported
from strop.models.decoder_layers import ALLOWED, relative_error
from strop.models.kinds import base_model, is_peft, is_plain, of_config
from strop.models.rotations import boundaries_of, rotations
from strop.ops.registry import on_gpu, on_gpu_or_interpreted

if TYPE_CHECKING:
    from strop.models.policy import Policy

Part = Callable[[Any], torch.Tensor]  # selects from the output of a forward

# config keys of models whose logits are not hidden @ weightᵀ + bias (Gemma 2, Cohere, Granite, Falcon-H1 …)
LOGITS_CHANGED_BY = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "logit_soft_cap")

SPAN = re.compile(r"window|chunk|block_size")  # in names of config fields that limit how far a token sees
LONG_SPAN = re.compile(r"window|chunk|block_size|floor_scale")  # the same, for fields that a trial shortens
LONGEST_SPAN = 256  # the longest span that a trial's rows exceed

FIRST_ROW = 3  # tokens of the first row of a trial, at most
ROUNDING = 2e-6  # kernels of float32 add up over several sequences what they then mask
TRIED = (1, 0, 1)  # ids in every vocabulary that cannot be confused with positions or token types


def known_ids(policy: "Policy") -> int | None:
    """Return the size of the nn.Embedding that receives the ids; None if none is found."""
    tables = [part for part in policy.inner.modules() if isinstance(part, nn.Embedding)]
    ids_ST = torch.tensor([TRIED], device=policy.device)
    sizes: list[int] = []

    def look(table: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        if arguments and torch.equal(arguments[0], ids_ST):
            sizes.append(table.num_embeddings)  # type: ignore[arg-type]

    hooks = [table.register_forward_pre_hook(look) for table in tables]
    try:
        # ignore errors on three tokens: the first real batch may have a shape that works
        with tried(policy), contextlib.suppress(Exception):
            rows = PaddedRows(ids_ST, torch.ones_like(ids_ST, dtype=torch.bool), torch.arange(ids_ST.numel()))
            policy.call_rows(policy.inner, rows)
    finally:
        for hook in hooks:
            hook.remove()
    return min(sizes, default=None)


def looks_ahead(policy: "Policy", logits: Callable[[TokenBatch], torch.Tensor], batch: TokenBatch) -> bool | None:
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

    with tried(policy):
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
    return dataclasses.replace(batch, ids_N=ids_N, groups=[])


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
def tried(policy: "Policy") -> Iterator[None]:
    """Run a trial in eval mode and without gradient, and restore the RNG state afterwards."""
    rng = torch.random.fork_rng([policy.device] if policy.device.type == "cuda" else [])
    with rng, torch.no_grad(), policy.evaluating(), warnings.catch_warnings():
        # torch warns once per process, at the first matmul in the backward thread, and then creates the context
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
        yield


def trial_lengths(policy: "Policy", room: int = 0) -> tuple[int, int, int]:
    """Return the lengths of a trial's rows: two of three exceed every window, chunk and block of up to 256 tokens.

    room   for so many further tokens
    """
    config, longest = policy.config, policy.longest_together
    fields = vars(config.get_text_config() if hasattr(config, "get_text_config") else config)
    spans = [size for name, size in fields.items() if type(size) is int and size <= LONGEST_SPAN and SPAN.search(name)]
    longest = LONGEST_SPAN + 5 if longest is None else max(1, longest - room)
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


# ---- the trial of a policy ----


class TrialRows(NamedTuple):
    """The rows of a trial: all packed, the same with another first row, each alone, the longest twice; and the outputs
    of each alone."""

    batch: TokenBatch
    with_another: TokenBatch
    alone: list[TokenBatch]
    twice: TokenBatch
    wanted_NV: torch.Tensor


def try_out(policy: "Policy") -> None:
    """Fill in how the model can be read, found by a trial: only the outputs show what a forward computes."""
    policy.was_tried = True
    policy.no_hidden_because = policy.no_packing_because = policy.no_fusing_because = f"it is a {policy.kind!r} model"
    policy.no_sharing_because = policy.no_packing_because
    if policy.kind == "moe":
        policy.no_sharing_because = "strop's engine reads each row by itself"
    if policy.kind != "hf":
        return
    try:
        if policy.opaque is None:
            policy.opaque = set(not_differentiable(policy.model))
        with tried(policy):
            policy.fill_in_reading()
        if lost := {name: why for name, why in not_differentiable(policy.model).items() if name not in policy.opaque}:
            name, why = next(iter(lost.items()))
            raise ValueError(
                f"model must be differentiable after a forward without gradient, found that {name}, {why}; load it again "
                f'with quantize="nf4" or "int8"'
            )
    except BaseException:
        policy.was_tried = False  # so that every later call raises the same error
        raise


def try_language_model(policy: "Policy", logits: Part, last_hidden_state: Part) -> None:
    """Fill in how rows are read, whether the logits are hidden states times the head, and whether layers are fused.

    logits, last_hidden_state   return these parts of a forward's output
    """
    inner = policy.inner
    rows = try_reading(policy, inner, logits)
    policy.check_causality(rows.batch, lambda one: policy.read_padded(inner, one, logits)[one.places_n])
    found = decoder_and_head(inner)
    if not isinstance(found, str):
        decoder, head = found
        try:
            states = [policy.read_padded(decoder, one, last_hidden_state) for one in rows.alone]
            if policy.indexed:
                policy.read_packed(decoder, rows.batch, last_hidden_state, policy.rules)
            if not gives_logits(head, torch.cat(states), rows.wanted_NV):
                found = "its logits are not its hidden states times the head's weight"
        except Exception as error:  # a foreign forward may raise anything; then this way of reading is not used
            found = f"its decoder fails apart from its head ({type(error).__name__}: {error})"
    policy.no_hidden_because = found if isinstance(found, str) else None
    why = (
        None if policy.no_packing_because is None else f"it does not read packed sequences: {policy.no_packing_because}"
    )
    fused = why or fusing(
        inner, policy.rules, lambda: policy.read_packed(inner, rows.batch, logits, policy.rules)[0], policy.exact
    )
    policy.no_fusing_because = fused if isinstance(fused, str) else None
    policy.fused = None if isinstance(fused, str) else fused
    if policy.exact and (why := policy.no_fusing_because or policy.no_hidden_because):
        raise ValueError(f"exact must be False for this {type(inner).__name__}, found True: {why}")
    if policy.exact and policy.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:  # angles are a matmul
        raise ValueError("torch.backends.cuda.matmul.allow_tf32 must be False with exact, found True")
    if not isinstance(found, str):
        decoder, head = found
        if policy.model is not inner:  # compiled: compile the decoder with the same options
            decoder = policy.model.dynamo_ctx(decoder)  # type: ignore[operator]
        policy.head = decoder, head


def try_reading(policy: "Policy", module: nn.Module, part: Part) -> TrialRows:
    """Fill in how rows can be read together with the results they have alone; return the rows of the trial.

    module   the model or its decoder; `part` selects from its output
    """
    inner = policy.inner
    policy.modules = list(inner.modules())
    with rotations(inner) as calls:
        rows = _trial_rows(policy, module, part)
    with contextlib.suppress(Exception):  # rotary modules with unknown arguments cannot be tested
        policy.boundaries = boundaries_of(calls, policy.config)
    if policy.boundaries is not None:  # now with all rows on one side of the boundaries
        rows = _trial_rows(policy, module, part)
    policy.indexed = False
    found = _try_packing(policy, module, part, rows)
    if isinstance(found, str) and policy.model is inner:
        policy.indexed = True
        told = _try_packing(policy, module, part, rows)
        policy.indexed = not isinstance(told, str)
        found = f"{found}; told where they end, {told}" if isinstance(told, str) else told
    policy.no_packing_because, policy.no_padding_because = _try_together(policy, module, part, rows, found)
    policy.no_sharing_because = _try_sharing(policy, module, part, rows)
    rules = policy.rules
    with shortened(inner) as is_shorter:
        if is_shorter and (shorter := _shorter_rows(policy, module, part)) is not None:
            why = _try_together(policy, module, part, shorter, _try_packing(policy, module, part, shorter))
            policy.no_packing_because = policy.no_packing_because or why[0]
            policy.no_padding_because = policy.no_padding_because or why[1]
            policy.no_sharing_because = policy.no_sharing_because or _try_sharing(policy, module, part, shorter)
    policy.rules = rules
    return rows


def _shorter_rows(policy: "Policy", module: nn.Module, part: Part) -> TrialRows | None:
    """Return the rows of a trial; None if the model fails with shorter windows."""
    try:
        return _trial_rows(policy, module, part)
    except Exception:  # whatever a foreign forward raises
        return None


def _trial_rows(policy: "Policy", module: nn.Module, part: Part) -> TrialRows:
    lengths = trial_lengths(policy)
    ids = torch.arange(1, sum(lengths) + 1) % (policy.vocab_size or 13)
    trajectories = [Trajectory.of(row[:1], row[1:]) for row in ids.split(list(lengths))]
    alone = [TokenBatch.of([one], policy.device) for one in trajectories]
    wanted_NV = torch.cat([policy.read_padded(module, one, part) for one in alone])
    other_ids = [(ids[: lengths[0]] + 1) % (policy.vocab_size or 13), *ids[lengths[0] :].split(list(lengths[1:]))]
    return TrialRows(
        TokenBatch.of(trajectories, policy.device),
        TokenBatch.of([Trajectory.of(row[:1], row[1:]) for row in other_ids], policy.device),
        alone,
        TokenBatch.of([trajectories[-1], trajectories[-1]], policy.device),
        wanted_NV,
    )


def _try_packing(policy: "Policy", module: nn.Module, part: Part, rows: TrialRows) -> dict[int, Rule] | str:
    """Return the attention rules, or why rows cannot be packed."""
    if policy.model is not policy.inner:
        return "it is compiled, for shapes that do not change"
    if "position_ids" not in policy.arguments and not policy.indexed:
        return "its forward takes no position_ids"

    def read(batch: TokenBatch, rules: dict[int, Rule] | None) -> tuple[torch.Tensor, dict[int, Rule]]:
        return policy.read_packed(module, batch, part, rules)

    return packing(
        functools.partial(read, rows.batch),
        of_config(policy.config, "num_hidden_layers"),
        rows.wanted_NV,
        functools.partial(read, rows.with_another) if policy.indexed else None,
    )


def _try_together(
    policy: "Policy", module: nn.Module, part: Part, rows: TrialRows, found: dict[int, Rule] | str
) -> tuple[str | None, str | None]:
    """Fill in the attention rules. Return why rows cannot be packed and why they cannot be padded, or None for each.

    found   the result of `_try_packing`
    """
    if not isinstance(found, str):
        policy.rules = found
        return None, None
    no_padding = attempted(lambda: policy.read_padded(module, rows.batch, part), rows.wanted_NV, "padded rows")
    if no_padding is not None:
        why = attempted(
            lambda: policy.read_padded(module, rows.twice, part),
            rows.wanted_NV[-rows.alone[-1].num_tokens :].repeat(2, 1),
            "rows of one length",
        )
        if why is not None:
            name = type(policy.inner).__name__
            raise ValueError(f"model must read rows beside each other, found a {name}: {why}")
    return found, no_padding


def _try_sharing(policy: "Policy", module: nn.Module, part: Part, rows: TrialRows) -> str | None:
    """Return why a prefix that rows share is not read once, or None."""
    if policy.no_packing_because is not None:
        return f"it does not read packed sequences: {policy.no_packing_because}"
    if policy.indexed:
        return "it is told where sequences end, since layers of it may carry a state"
    if policy.exact:
        return "exact: the backward would sum the prefix's gradients in another order"
    if policy.share_prefixes == "never":
        return 'share_prefixes is "never"'
    if policy.share_prefixes == "auto" and policy.device.type != "cpu":
        return 'sharing has not been measured on a GPU: share_prefixes="always" turns it on'
    shared = rows.twice.with_prefixes([(rows.twice.lengths[0] // 2, [0, 1])])
    assert shared.prefixes is not None
    place_N = shared.prefixes.place_N
    return attempted(
        lambda: policy.read_packed(module, shared, part, policy.rules)[0][place_N],
        rows.wanted_NV[-rows.twice.lengths[0] :].repeat(2, 1),
        "a shared prefix",
    )


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
