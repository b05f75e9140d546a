"""The LM head and a row function without memory for the logits [N, V] beside the gradients'.

Tokens that do not count are dropped first. The rest go through in chunks: a matrix product makes the logits of some
tokens, or of some tokens for some of the vocabulary, in a piece of working memory; the row function reads them and
writes their gradient in the same place; matrix products take it on to the hidden states and the weight. The working
memory is what `workspace` says, whatever N and V are.

Four ways, each with the fewest products:

    linear_logps         1 product: blocks of the vocabulary, statistics joined from block to block
    linear_logps_bwd     3 products: blocks of the vocabulary, so the weight's gradient is final block by block, and the
                         hidden states' is summed in float32
    linear_logps_with_gradient
                         2 products, both in the forward: what comes back for a token is only a factor of its gradient, if
                         the head is frozen. Chunks of tokens
    linear_policy_terms  3 products, 2 with a frozen head: the loss's coefficient needs only its row, so the gradients are
                         made in the forward. Chunks of tokens, the weight's gradient summed in float32; or, where all
                         logits fit into the memory of that sum, all tokens at once and nothing to sum

Shapes: N tokens, H hidden, V vocabulary; n and v the tokens and the vocabulary of a chunk.
"""

import functools
import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import torch

from strop.ops.library import constant_when_compiled
from strop.ops.rows import OnItsWay, TokenLoss, implementation
from strop.ops.rows.torch_rows import token_terms

MiB = 2**20
SCORE_WORKSPACE = 60 * MiB
TRAIN_WORKSPACE = {"cuda": 560 * MiB, "cpu": 64 * MiB}
_SCORE_TOKENS = 2048  # tokens of a block: enough that reading the weight again for the next ones does not show
_PRODUCT_TILE = 128, 256  # of the vocabulary and of tokens: what a multiprocessor computes at a time
_MOST_BLOCKS = 16  # more, and the products become too small
_FROZEN_TOKENS = 1536  # of a frozen head's chunk: larger products are no quicker (a trained one has a sum to visit)
_FEWEST_TOKENS = 32  # of such a chunk: with fewer, reading the weight for each takes longer than a third product
_TOKENS_AHEAD = 768  # whose product keeps a GPU busy for as long as the host takes after it has waited

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

    @property
    def only_hidden(self) -> bool:
        return self.hidden and not self.weight and not self.bias


class Gradients(NamedTuple):
    """Those not asked for are empty."""

    hidden_NH: torch.Tensor
    weight_VH: torch.Tensor
    bias_V: torch.Tensor


class Tokens:
    """The tokens that count, out of N. How many they are is asked for at once and waited for when it is first needed."""

    def __init__(
        self, hidden_NH: torch.Tensor, mask_N: torch.Tensor | None, dtype: torch.dtype, rows: ModuleType
    ) -> None:
        self.hidden_NH, self.dtype, self.rows = hidden_NH, dtype, rows
        self.N = len(hidden_NH)
        self._places_N: torch.Tensor | None = None
        self._count: OnItsWay | None = None
        if mask_N is not None:
            self._places_N, self._count = rows.places(mask_N)

    @functools.cached_property
    def count(self) -> int:
        return self.N if self._count is None else self._count.wait()

    @functools.cached_property
    def places(self) -> torch.Tensor | None:
        """[count]; None where all tokens count."""
        return None if self._places_N is None or self.count == self.N else self._places_N[: self.count]

    @property
    def has_to_wait(self) -> bool:
        """For the number of tokens that count."""
        return self._count is not None and self._count.takes_time

    @property
    def at_most(self) -> int:
        """That count, as far as can be told without waiting."""
        return self.N if self.has_to_wait else self.count

    def first_hidden(self, number: int) -> torch.Tensor:
        """Of the first `number` that count, without waiting; whatever, where there are fewer."""
        if self._places_N is None:
            return self.hidden_NH[:number].to(self.dtype)
        return self.hidden_NH.index_select(0, self._places_N[:number]).to(self.dtype)

    def hidden(self, part: slice = ALL) -> torch.Tensor:
        return self.take(self.hidden_NH, part).to(self.dtype)

    def take(self, values: torch.Tensor, part: slice = ALL, dim: int = 0) -> torch.Tensor:
        if self.places is not None:
            return values.index_select(dim, self.places[part])
        return values[part] if dim == 0 else values[:, part]

    def take_optional(self, values: torch.Tensor | None, part: slice = ALL) -> torch.Tensor | None:
        return None if values is None else self.take(values, part)

    def put(self, values_nH: torch.Tensor, part: slice, out_NH: torch.Tensor) -> None:
        if self.places is None:
            out_NH[part] = values_nH
        else:
            out_NH.index_copy_(0, self.places[part], values_nH.to(out_NH.dtype))

    def put_product(
        self, a: torch.Tensor, b: torch.Tensor, factors_n: torch.Tensor | None, part: slice, out_NH: torch.Tensor
    ) -> None:
        """The rows of a @ b, times their factors; in their place at once where nothing lies between them."""
        if factors_n is not None:
            product_nH = a.new_empty(len(a), b.shape[1], dtype=sums_in(a.dtype))
            _product(a, b, product_nH)
            into = (out_NH[part], None) if self.places is None else (out_NH, self.places[part])
            self.rows.put_multiplied(product_nH, factors_n, *into)
        elif self.places is None and out_NH.dtype == a.dtype:
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
    yield from _slices(total, size)


def _token_chunks(total: int, most: int) -> list[slice]:
    """The fewest chunks of at most `most`, as equal as can be in multiples of 512: products of others take up to 20 % longer."""
    if total <= most:
        return [slice(0, total)] if total else []
    unit = 512 if most >= 512 else 1
    units = -(-total // unit)
    count = -(-units // max(most // unit, 1))
    ends = [min(-(-units * number // count) * unit, total) for number in range(count + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def _slices(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


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
    tokens = Tokens(hidden_NH, mask_N, head.weight_VH.dtype, rows)
    logits_at_once = (workspace or SCORE_WORKSPACE) // rows.bytes_per_logit(tokens.dtype)
    n = max(1, min(tokens.count, _SCORE_TOKENS, logits_at_once))
    v = min(head.V, _score_vocabulary(n, logits_at_once, hidden_NH.device))
    logps_n, stats_2n, entropies_n = (
        hidden_NH.new_empty(*lead, tokens.count, dtype=sums_in(tokens.dtype)) for lead in ((), (2,), (int(entropy),))
    )
    memory = tokens.workspace(n * v)
    for part in _chunks(tokens.count, n):
        hidden_nH, ids_n = tokens.hidden(part), tokens.take(ids_N, part)
        into = logps_n[part], stats_2n[:, part], entropies_n[:, part].reshape(-1)
        for number, block in enumerate(_slices(head.V, v)):
            logits_nv = head.logits(hidden_nH, block, memory)
            rows.logps(logits_nv, ids_n, None, temperature, entropy, into, (block.start, head.V, number))
    return tokens.spread(logps_n), tokens.spread(stats_2n), tokens.spread(entropies_n).reshape(-1)


def _score_vocabulary(n: int, logits_at_once: int, device: torch.device) -> int:
    """The vocabulary of a block. On a GPU such that the product keeps every multiprocessor busy to its end.

    A product of 7.03 tiles for each multiprocessor takes as long as one of 8.
    """
    v = max(1, logits_at_once // n)
    if device.type != "cuda":
        return v
    tile_v, tile_n = _PRODUCT_TILE
    at_a_time = torch.cuda.get_device_properties(device).multi_processor_count
    tiles_along_n = -(-n // tile_n)
    rounds = v // tile_v * tiles_along_n // at_a_time
    tiles_along_v = rounds * at_a_time // tiles_along_n // 2 * 2  # odd numbers of tiles take longer
    return tiles_along_v * tile_v or v  # 0 where the memory, or the GPU, is too small for full rounds


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
    tokens = Tokens(hidden_NH, mask_N, head.weight_VH.dtype, rows)
    grads = _empty_gradients(tokens, head, wanted)
    logits_at_once = _train_workspace(tokens, workspace) // rows.bytes_per_logit(tokens.dtype)
    v = max(1, logits_at_once // max(tokens.count, 1))
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


def whole_rows_fit(device: torch.device, V: int, dtype: torch.dtype, rows: str, workspace: int | None) -> bool:
    """Whether the workspace holds the logits of enough tokens for `linear_logps_with_gradient` to be worth it."""
    return _workspace_on(device, workspace) >= _FEWEST_TOKENS * V * _bytes_per_logit(rows, dtype)


@constant_when_compiled
def _bytes_per_logit(rows: str, dtype: torch.dtype) -> int:
    return implementation(rows).bytes_per_logit(dtype)


def linear_logps_with_gradient(
    hidden_NH: torch.Tensor,
    head: Head,
    ids_N: torch.Tensor,
    mask_N: torch.Tensor | None,
    temperature: float,
    rows: ModuleType,
    workspace: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [N] and d log-prob / d hidden [N, H], of a frozen head."""
    tokens = Tokens(hidden_NH, mask_N, head.weight_VH.dtype, rows)
    wanted = Wanted(hidden=True, weight=False, bias=False, weight_dtype=tokens.dtype)
    room = rows.bytes_per_logit(tokens.dtype), _train_workspace(tokens, workspace)
    chunks = LogitChunks(tokens, head, _chunk_size(tokens.at_most, head, wanted, *room))
    logps_n = hidden_NH.new_empty(tokens.count, dtype=sums_in(tokens.dtype))
    grads = _empty_gradients(tokens, head, wanted)
    for part, _, logits_nV in chunks:
        ids_n = tokens.take(ids_N, part)
        found_n, stats_2n, _ = rows.logps(logits_nV, ids_n, None, temperature, False)
        logps_n[part] = found_n
        rows.logps_bwd(
            logits_nV, ids_n, None, stats_2n, found_n, torch.ones_like(found_n), None, temperature, True
        )  # fmt: skip
        tokens.put_product(logits_nV, head.weight_VH, None, part, grads.hidden_NH)
    return tokens.spread(logps_n), grads.hidden_NH


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
    tokens = Tokens(hidden_NH, mask_N, head.weight_VH.dtype, rows)
    per_token = ids_N, old_logps_N, ref_logps_N, advantages_N, weights_N
    room = rows.bytes_per_logit(tokens.dtype), _train_workspace(tokens, workspace)
    at_most, plan = _plan(tokens, head, wanted, *room)
    if plan is not None and plan.v < head.V:
        return _policy_terms_in_blocks(tokens, head, plan, per_token, temperature, loss, rows, wanted)
    chunks = LogitChunks(tokens, head, _chunk_size(at_most, head, wanted, *room) if plan is None else at_most)
    logps_n, terms_3n = (hidden_NH.new_empty(*lead, tokens.count, dtype=sums_in(tokens.dtype)) for lead in ((), (3,)))
    grads = None
    for part, hidden_nH, logits_nV in chunks:
        first = grads is None
        if grads is None:  # not before: the device is waiting for the first product
            # over several chunks the weight's gradient is summed in float32, whatever its own dtype
            weight_dtype = sums_in(tokens.dtype) if len(chunks.parts) > 1 else wanted.weight_dtype
            grads = _empty_gradients(tokens, head, wanted._replace(weight_dtype=weight_dtype))
        ids_n, old_n, ref_n, advantages_n, weights_n = (tokens.take_optional(values, part) for values in per_token)
        terms = rows.policy_terms(
            logits_nV, ids_n, None, old_n, ref_n, advantages_n, weights_n, temperature, loss, any(wanted[:3]), True,
            (logps_n[part], terms_3n[:, part]), wanted.only_hidden,
        )  # fmt: skip
        if wanted.hidden:
            tokens.put_product(logits_nV, head.weight_VH, terms.factors_N, part, grads.hidden_NH)
        if wanted.weight:
            (_product if first else _add_product)(logits_nV.T, hidden_nH, grads.weight_VH)
        if wanted.bias:
            grads.bias_V.add_(logits_nV.sum(0, dtype=sums_in(tokens.dtype)))
    if grads is None:  # no token counts
        grads = _empty_gradients(tokens, head, wanted)
    if wanted.weight:
        grads = grads._replace(weight_VH=_narrowed(grads.weight_VH, wanted.weight_dtype))
    return *rows.sums(terms_3n), tokens.spread(logps_n), grads


def _chunk_size(num_tokens: int, head: Head, wanted: Wanted, logit_bytes: int, workspace: int) -> int:
    """Tokens of the largest chunk: their logits and, for factors to be multiplied with, their gradients in float32."""
    most = workspace // (head.V * logit_bytes + head.weight_VH.shape[1] * 4 * wanted.only_hidden)
    parts = _token_chunks(num_tokens, most if wanted.weight else min(most, _FROZEN_TOKENS))
    return max((part.stop - part.start for part in parts), default=0)


class LogitChunks:
    """Logits of some tokens at a time, n of them or fewer, all in the same memory.

    Where the number of tokens that count is on its way, the first product does not wait for it.
    """

    def __init__(self, tokens: Tokens, head: Head, n: int) -> None:
        self._tokens, self._head = tokens, head
        self._memory = tokens.workspace(n * head.V)
        self._ahead = min(n, _TOKENS_AHEAD) if tokens.has_to_wait else 0
        if self._ahead:
            head.logits(tokens.first_hidden(self._ahead), ALL, self._memory)
        self.parts = _token_chunks(tokens.count, n)

    def __iter__(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """The tokens' numbers, their hidden states, their logits."""
        V, there = self._head.V, self._ahead
        for part in self.parts:
            hidden_nH = self._tokens.hidden(part)
            if there < len(hidden_nH):
                self._head.logits(hidden_nH[there:], ALL, self._memory[there * V :])
            there = 0
            yield part, hidden_nH, self._memory[: len(hidden_nH) * V].view(-1, V)


class OverTheGradient(NamedTuple):
    """How the logits of all tokens lie in the memory of the weight's gradient, in blocks of v of the vocabulary:

    | room | logits of block 0 | logits of block 1 | …             each overwritten, once it is done with, by
    | gradient of block 0 | of block 1 | …                         the gradients of the blocks after it
    """

    v: int
    room: int  # bytes, so that no gradient reaches logits that are still needed


def _plan(
    tokens: Tokens, head: Head, wanted: Wanted, logit_bytes: int, workspace: int
) -> tuple[int, OverTheGradient | None]:
    """For how many tokens there is memory to be, and how they lie over the gradient.

    All of them, rather than wait for the number that count; unless those might do with fewer blocks.
    """
    given = head, wanted, tokens.dtype, logit_bytes, workspace
    plan = _over_the_gradient(tokens.at_most, *given)
    if wanted.weight and (plan is None or plan.v < head.V):
        return tokens.count, _over_the_gradient(tokens.count, *given)
    return tokens.at_most, plan


def _over_the_gradient(
    n: int, head: Head, wanted: Wanted, dtype: torch.dtype, logit_bytes: int, workspace: int
) -> OverTheGradient | None:
    """The fewest blocks with which the logits of n tokens fit into the float32 sum of the weight's gradient and the workspace.

    None where they do not, where there is no such gradient, and where the row functions need copies of the logits.
    """
    H, V = head.weight_VH.shape[1], head.V
    if not wanted.weight or not n or logit_bytes != dtype.itemsize:
        return None
    row, gradient_row = n * logit_bytes, H * wanted.weight_dtype.itemsize  # bytes of one id
    memory = V * H * sums_in(dtype).itemsize + workspace
    for number in range(1, _MOST_BLOCKS + 1):
        v = V if number == 1 else _round_up(-(-V // number), 128)
        done_before_last = (V - 1) // v * v
        # the gradient of block b must end where its logits begin, at room + b·v·row: it does if it does for the first
        # block, the last, and, since the last may be shorter, the one before it (between them it is linear in b)
        before_last = done_before_last * gradient_row - max(done_before_last - v, 0) * row
        room = _round_up(max(v * gradient_row, before_last, V * gradient_row - done_before_last * row), 256)
        # several blocks also need the hidden states in one piece and a float32 sum of their gradient
        hidden = 0 if number == 1 else n * H * (logit_bytes + sums_in(dtype).itemsize)
        if room + V * row + hidden <= memory:
            return OverTheGradient(v, room)
    return None


def _policy_terms_in_blocks(
    tokens: Tokens,
    head: Head,
    plan: OverTheGradient,
    per_token: tuple[torch.Tensor | None, ...],
    temperature: float,
    loss: TokenLoss,
    rows: ModuleType,
    wanted: Wanted,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Gradients]:
    """As `linear_policy_terms`, all tokens at once."""
    n, V, dtype, sums = tokens.count, head.V, tokens.dtype, sums_in(tokens.dtype)
    hidden_nH = tokens.hidden()
    memory = tokens.hidden_NH.new_empty(plan.room + n * V * dtype.itemsize, dtype=torch.uint8)
    logits = memory[plan.room :].view(dtype)
    blocks = [(block, logits[n * block.start : n * block.stop]) for block in _chunks(V, plan.v)]
    logps_n, stats_2n = (tokens.hidden_NH.new_empty(*lead, n, dtype=sums) for lead in ((), (2,)))
    ids_n, old_n, ref_n, advantages_n, weights_n = (tokens.take_optional(values) for values in per_token)
    assert advantages_n is not None
    assert weights_n is not None
    for number, (block, piece) in enumerate(blocks):
        logits_nv = head.logits(hidden_nH, block, piece)
        rows.logps(logits_nv, ids_n, None, temperature, False, (logps_n, stats_2n, None), (block.start, V, number))
    terms_3n, d_logps_n = token_terms(logps_n, old_n, ref_n, advantages_n, weights_n, loss)

    grads = _empty_gradients(tokens, head, wanted._replace(weight=False))
    d_weight_VH = memory[: V * head.weight_VH.shape[1] * wanted.weight_dtype.itemsize].view(wanted.weight_dtype)
    d_weight_VH = d_weight_VH.view(head.weight_VH.shape)
    d_hidden_nH = torch.zeros_like(hidden_nH, dtype=sums) if wanted.hidden else None
    for block, piece in blocks:
        logits_nv = piece.view(n, block.stop - block.start)
        where = block.start, V
        rows.logps_bwd(logits_nv, ids_n, None, stats_2n, logps_n, d_logps_n, None, temperature, True, where)
        if d_hidden_nH is not None:
            _add_product(logits_nv, head.weight_VH[block], d_hidden_nH)
        if wanted.bias:
            grads.bias_V[block] = logits_nv.sum(0, dtype=sums)
        _product(logits_nv.T, hidden_nH, d_weight_VH[block])
    if d_hidden_nH is not None:
        tokens.put(d_hidden_nH, slice(0, n), grads.hidden_NH)
    return *rows.sums(terms_3n), tokens.spread(logps_n), grads._replace(weight_VH=d_weight_VH)


def _train_workspace(tokens: Tokens, workspace: int | None) -> int:
    return _workspace_on(tokens.hidden_NH.device, workspace)


def _workspace_on(device: torch.device, workspace: int | None) -> int:
    return workspace or TRAIN_WORKSPACE["cuda" if device.type == "cuda" else "cpu"]


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
