"""The LM head and a row function without ever holding the logits [N, V].

Tokens that do not count are dropped first. The rest go through in chunks: a matrix product makes the logits of some
tokens, or of some tokens for some of the vocabulary, in a piece of working memory; the row function reads them and
writes their gradient in the same place; matrix products take it on to the hidden states and the weight. The working
memory is what `workspace` says, whatever N and V are.

Three ways, each with the fewest products:

    linear_logps         1 product: blocks of the vocabulary, statistics joined from block to block
    linear_logps_bwd     3 products: blocks of the vocabulary, so the weight's gradient is final block by block, and the
                         hidden states' is summed in float32
    linear_policy_terms  3 products, 2 with a frozen head: chunks of tokens; the loss's coefficient needs only its row, so
                         the gradients are made in the forward; the weight's is summed in float32

Shapes: N tokens, H hidden, V vocabulary; n and v the tokens and the vocabulary of a chunk.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import torch

from strop.ops.rows import TokenLoss

MiB = 2**20
SCORE_WORKSPACE = 60 * MiB
TRAIN_WORKSPACE = {"cuda": 596 * MiB, "cpu": 64 * MiB}
_SCORE_TOKENS = 2048  # tokens of a block: enough that reading the weight again for the next ones does not show


ALL = slice(None)


class Head(NamedTuple):
    """The LM head in the dtype it is computed in."""

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None

    @property
    def V(self) -> int:
        return self.weight_VH.shape[0]

    def logits(self, hidden_nH: torch.Tensor, vocabulary: slice, memory: torch.Tensor) -> torch.Tensor:
        """hidden @ weightᵀ + bias for a part of the vocabulary, in the given memory."""
        weight_vH = self.weight_VH[vocabulary]
        out_nv = memory[: len(hidden_nH) * len(weight_vH)].view(len(hidden_nH), len(weight_vH))
        if self.bias_V is None:
            return torch.mm(hidden_nH, weight_vH.T, out=out_nv)
        return torch.addmm(self.bias_V[vocabulary], hidden_nH, weight_vH.T, out=out_nv)


class Wanted(NamedTuple):
    """Whose gradient is asked for."""

    hidden: bool
    weight: bool
    bias: bool
    weight_dtype: torch.dtype  # of the parameter, which under autocast is not the head's


class Gradients(NamedTuple):
    """Those not asked for are empty."""

    hidden_NH: torch.Tensor
    weight_VH: torch.Tensor
    bias_V: torch.Tensor


class Tokens:
    """The tokens that count, out of N."""

    def __init__(self, hidden_NH: torch.Tensor, mask_N: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.hidden_NH, self.dtype = hidden_NH, dtype
        self.N = len(hidden_NH)
        self.places = None if mask_N is None else mask_N.nonzero().squeeze(-1)
        self.count = self.N if self.places is None else len(self.places)
        if self.count == self.N:
            self.places = None

    def hidden(self, part: slice = ALL) -> torch.Tensor:
        return self.take(self.hidden_NH, part).to(self.dtype)

    def take(self, values: torch.Tensor, part: slice = ALL, dim: int = 0) -> torch.Tensor:
        if self.places is not None:
            return values.index_select(dim, self.places[part])
        return values[part] if dim == 0 else values[:, part]

    def take_optional(self, values: torch.Tensor | None, part: slice) -> torch.Tensor | None:
        return None if values is None else self.take(values, part)

    def put(self, values_nH: torch.Tensor, part: slice, out_NH: torch.Tensor) -> None:
        if self.places is None:
            out_NH[part] = values_nH
        else:
            out_NH.index_copy_(0, self.places[part], values_nH.to(out_NH.dtype))

    def put_product(self, a: torch.Tensor, b: torch.Tensor, part: slice, out_NH: torch.Tensor) -> None:
        """The rows of a @ b; in their place at once where nothing lies between them."""
        if self.places is None and out_NH.dtype == a.dtype:
            torch.mm(a, b, out=out_NH[part])
        else:
            self.put(torch.mm(a, b), part, out_NH)

    def workspace(self, size: int) -> torch.Tensor:
        return self.hidden_NH.new_empty(size, dtype=self.dtype)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """[.., count] → [.., N], 0 where a token does not count."""
        if self.places is None:
            return values
        return values.new_zeros(*values.shape[:-1], self.N).index_copy_(-1, self.places, values)


def _chunks(total: int, most: int) -> Iterator[slice]:
    """The fewest chunks of at most `most`, as equal as can be in multiples of 128: others leave products misaligned."""
    if not total:
        return
    count = -(-total // max(most, 1))
    size = -(-total // count)
    if most >= 128:
        size = min(-(-size // 128), most // 128) * 128
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def linear_logps(
    hidden_NH: torch.Tensor,
    head: Head,
    ids_N: torch.Tensor,
    mask_N: torch.Tensor | None,
    temperature: float,
    entropy: bool,
    rows: ModuleType,
    workspace: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs [N], statistics [2, N], entropies [N] (empty unless asked for)."""
    tokens = Tokens(hidden_NH, mask_N, head.weight_VH.dtype)
    logits_at_once = (workspace or SCORE_WORKSPACE) // rows.bytes_per_logit(tokens.dtype)
    n = max(1, min(tokens.count, _SCORE_TOKENS, logits_at_once))
    v = min(head.V, max(1, logits_at_once // n))
    logps_n, stats_2n, entropies_n = (
        hidden_NH.new_empty(*lead, tokens.count, dtype=sums_in(tokens.dtype)) for lead in ((), (2,), (int(entropy),))
    )
    memory = tokens.workspace(n * v)
    for part in _chunks(tokens.count, n):
        hidden_nH, ids_n = tokens.hidden(part), tokens.take(ids_N, part)
        into = logps_n[part], stats_2n[:, part], entropies_n[:, part].reshape(-1)
        for number, block in enumerate(_chunks(head.V, v)):
            logits_nv = head.logits(hidden_nH, block, memory)
            rows.logps(logits_nv, ids_n, None, temperature, entropy, into, (block.start, head.V, number))
    return tokens.spread(logps_n), tokens.spread(stats_2n), tokens.spread(entropies_n).reshape(-1)


def _empty_gradients(tokens: Tokens, head: Head, wanted: Wanted) -> Gradients:
    """Memory for what is wanted. 0 where a token does not count; the weight's is written whole, unless nothing counts."""
    hidden_NH, weight_VH = tokens.hidden_NH, head.weight_VH
    whole = tokens.places is None and tokens.count > 0
    return Gradients(
        (hidden_NH.new_empty if whole else hidden_NH.new_zeros)(hidden_NH.shape)
        if wanted.hidden
        else hidden_NH.new_empty(0),
        (weight_VH.new_empty if tokens.count else weight_VH.new_zeros)(weight_VH.shape, dtype=wanted.weight_dtype)
        if wanted.weight
        else weight_VH.new_empty(0),
        torch.zeros_like(weight_VH[:, 0], dtype=sums_in(tokens.dtype)) if wanted.bias else weight_VH.new_empty(0),
    )


def linear_logps_bwd(
    hidden_NH: torch.Tensor,
    head: Head,
    ids_N: torch.Tensor,
    mask_N: torch.Tensor | None,
    stats_2N: torch.Tensor,
    entropies_N: torch.Tensor,
    d_logps_N: torch.Tensor,
    d_entropies_N: torch.Tensor | None,
    temperature: float,
    rows: ModuleType,
    workspace: int | None,
    wanted: Wanted,
) -> Gradients:
    tokens = Tokens(hidden_NH, mask_N, head.weight_VH.dtype)
    grads = _empty_gradients(tokens, head, wanted)
    v = max(1, _train_logits(rows, tokens, workspace) // max(tokens.count, 1))
    hidden_nH, ids_n = tokens.hidden(), tokens.take(ids_N)
    stats_2n, d_logps_n = tokens.take(stats_2N, dim=1), tokens.take(d_logps_N)
    entropies_n = entropies_N if d_entropies_N is None else tokens.take(entropies_N)
    d_entropies_n = None if d_entropies_N is None else tokens.take(d_entropies_N)
    memory = tokens.workspace(tokens.count * min(v, head.V))
    d_hidden_nH = torch.zeros_like(hidden_nH, dtype=sums_in(tokens.dtype)) if wanted.hidden else None
    for block in _chunks(head.V, v):
        logits_nv = head.logits(hidden_nH, block, memory)
        rows.logps_bwd(
            logits_nv, ids_n, None, stats_2n, entropies_n, d_logps_n, d_entropies_n, temperature, True,
            (block.start, head.V),
        )  # fmt: skip
        if d_hidden_nH is not None:
            _add_product(logits_nv, head.weight_VH[block], d_hidden_nH)
        if wanted.weight:
            _product(logits_nv.T, hidden_nH, grads.weight_VH[block])
        if wanted.bias:
            grads.bias_V[block] = logits_nv.sum(0, dtype=sums_in(tokens.dtype))
    if d_hidden_nH is not None:
        tokens.put(d_hidden_nH, slice(0, tokens.count), grads.hidden_NH)
    return grads


def linear_policy_terms(
    hidden_NH: torch.Tensor,
    head: Head,
    ids_N: torch.Tensor,
    mask_N: torch.Tensor,
    old_logps_N: torch.Tensor | None,
    ref_logps_N: torch.Tensor | None,
    advantages_N: torch.Tensor,
    weights_N: torch.Tensor,
    temperature: float,
    loss: TokenLoss,
    rows: ModuleType,
    workspace: int | None,
    wanted: Wanted,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Gradients]:
    """The loss, its policy's and KL's parts [2], log-probs [N], and the gradients of the loss."""
    tokens = Tokens(hidden_NH, mask_N, head.weight_VH.dtype)
    n = max(1, _train_logits(rows, tokens, workspace) // head.V)
    parts = list(_chunks(tokens.count, n))
    # over several chunks the weight's gradient is summed in float32, whatever its own dtype
    weight_dtype = sums_in(tokens.dtype) if len(parts) > 1 else wanted.weight_dtype
    grads = _empty_gradients(tokens, head, wanted._replace(weight_dtype=weight_dtype))
    memory = tokens.workspace(max((part.stop - part.start for part in parts), default=0) * head.V)
    logps_n = hidden_NH.new_empty(tokens.count, dtype=sums_in(tokens.dtype))
    total, policy_and_kl = logps_n.new_zeros(()), logps_n.new_zeros(2)
    for number, part in enumerate(parts):
        hidden_nH = tokens.hidden(part)
        logits_nV = head.logits(hidden_nH, slice(0, head.V), memory)
        terms = rows.policy_terms(
            logits_nV, tokens.take(ids_N, part), None, tokens.take_optional(old_logps_N, part),
            tokens.take_optional(ref_logps_N, part), tokens.take(advantages_N, part), tokens.take(weights_N, part),
            temperature, loss, any(wanted[:3]), True,
        )  # fmt: skip
        logps_n[part] = terms.logps_N
        total += terms.total
        policy_and_kl += terms.policy_and_kl
        if wanted.hidden:
            tokens.put_product(logits_nV, head.weight_VH, part, grads.hidden_NH)
        if wanted.weight:
            (_add_product if number else _product)(logits_nV.T, hidden_nH, grads.weight_VH)
        if wanted.bias:
            grads.bias_V.add_(logits_nV.sum(0, dtype=sums_in(tokens.dtype)))
    if wanted.weight:
        grads = grads._replace(weight_VH=_narrowed(grads.weight_VH, wanted.weight_dtype))
    return total, policy_and_kl, tokens.spread(logps_n), grads


def _train_logits(rows: ModuleType, tokens: Tokens, workspace: int | None) -> int:
    """How many logits the working memory holds."""
    default = TRAIN_WORKSPACE["cuda" if tokens.hidden_NH.is_cuda else "cpu"]
    return (workspace or default) // rows.bytes_per_logit(tokens.dtype)


def sums_in(dtype: torch.dtype) -> torch.dtype:
    """What log-probs, losses and sums over chunks are held in, for products in this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out = a @ b, also where out is wider than the factors."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def _add_product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out += a @ b, also where out is wider than the factors."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))


def _narrowed(wide_VH: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The matrix in another dtype; a narrower one in the same memory, so that no second matrix is needed.

    Row i of the narrow matrix lies where row i/2 of the wide one lay. Rows k to 2k of the result overwrite wide rows
    k/2 to k, which are done with, so each step doubles what is converted.
    """
    if dtype == wide_VH.dtype:
        return wide_VH
    assert dtype.itemsize * 2 == wide_VH.dtype.itemsize
    V, H = wide_VH.shape
    narrow_VH = wide_VH.view(dtype).view(-1)[: V * H].view(V, H)
    narrow_VH[:1].copy_(wide_VH[:1].clone())
    done = 1
    while done < V:
        step = slice(done, min(2 * done, V))
        narrow_VH[step].copy_(wide_VH[step])
        done = step.stop
    return narrow_VH
