"""Log-probs and losses from hidden states and LM head, in chunks: the logits [N, V] are never allocated as a whole.

Masked tokens are dropped first. The rest are processed in chunks: a block of tokens, or a block of tokens and a block
of the vocabulary. A matrix product writes the chunk's logits into a working memory of `workspace` bytes. The row
function overwrites them with their gradient, in some cases still to be multiplied by one factor per row. Further
products give the gradients of hidden states and weight.

Four functions, each with the fewest products:

    linear_logps         1 product, over blocks of the vocabulary; the statistics are updated from block to block
    linear_logps_bwd     3 products, over blocks of the vocabulary. Each block of the weight's gradient is written once;
                         the hidden states' gradient is summed in float32
    linear_logps_with_gradient
                         2 products, both in the forward, for a frozen head. The backward only multiplies each token's
                         gradient by a scalar. This is `linear_policy_terms` with the log-prob as the loss
    linear_policy_terms  3 products, 2 with a frozen head. A row's coefficient in the loss depends on that row only, so
                         the forward computes the gradients. It works on chunks of tokens and sums the weight's gradient
                         in float32. If all logits fit into the memory of that sum, it takes all tokens at once instead

Shapes: N tokens, H hidden, V vocabulary; n and v the tokens and the vocabulary of a chunk.
"""

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch

from strop.losses.rules import NLL, TokenRule, from_text, token_terms
from strop.ops.head import (
    IDS_MULTIPLE,
    TOKENS_MULTIPLE,
    CountedTokens,
    Gradients,
    Head,
    LogitChunks,
    Wanted,
    add_product,
    cut,
    empty_gradients,
    narrowed,
    no_view,
    product,
    round_up,
    slices,
    sums_in,
)
from strop.ops.library import constant_when_compiled, library_op
from strop.ops.rows import TokenValues, implementation

LossTerms = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # the loss, its policy and KL parts [2], log-probs [N]
MiB = 2**20
SCORE_WORKSPACE = 60 * MiB
TRAIN_WORKSPACE = {"cuda": 560 * MiB, "cpu": 64 * MiB}
_SCORE_TOKENS = 2048  # tokens per block: with fewer, reading the weight for each block takes too long
_PRODUCT_TILE = 128, 256  # ids and tokens that one multiprocessor computes at a time
_MOST_BLOCKS = 16  # with more blocks the products become too small
_FEWEST_TOKENS = 32  # tokens per chunk, frozen head: with fewer, reading the weight costs more than a third product


def linear_logps(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    ids_N: torch.Tensor,
    mask_N: torch.Tensor | None,
    temperature: float,
    entropy: bool,
    rows: str,
    workspace: int | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probs [N], statistics [2, N], entropies [N] (empty unless `entropy` is set)."""
    head, of_rows = Head.of(dtype, weight_VH, bias_V, rows == "exact"), implementation(rows)
    tokens = CountedTokens(hidden_NH, mask_N, dtype, of_rows)
    logits_at_once = (workspace or SCORE_WORKSPACE) // of_rows.bytes_per_logit(dtype, entropy)
    n = max(1, min(tokens.count, _SCORE_TOKENS, logits_at_once // (head.row if head.exact else 1)))
    v = head.V if head.exact else min(head.V, _score_vocabulary(n, logits_at_once, hidden_NH.device))
    logps_n, stats_2n, entropies_n = (
        hidden_NH.new_empty(*lead, tokens.count, dtype=sums_in(dtype)) for lead in ((), (2,), (int(entropy),))
    )
    memory = tokens.workspace(n * (head.row if head.exact else v))
    for part in cut(tokens.count, n, IDS_MULTIPLE):
        hidden_nH, ids_n = tokens.hidden(part), tokens.take(ids_N, part)
        into = logps_n[part], stats_2n[:, part], entropies_n[:, part].reshape(-1)
        for number, block in enumerate(slices(head.V, v)):
            logits_nv = head.logits(hidden_nH, block, memory)
            where = block.start, head.V, number
            of_rows.logps(logits_nv, ids_n, None, temperature, entropy, into, where, in_place=True)
    return tokens.spread(logps_n), tokens.spread(stats_2n), tokens.spread(entropies_n).reshape(-1)


def _score_vocabulary(n: int, logits_at_once: int, device: torch.device) -> int:
    """Return the number of ids per block. On a GPU it keeps every multiprocessor busy until the product ends.

    A product of 7.03 tiles per multiprocessor takes as long as one of 8.
    """
    v = max(1, logits_at_once // n)
    if device.type != "cuda":
        return v
    tile_v, tile_n = _PRODUCT_TILE
    at_a_time = torch.cuda.get_device_properties(device).multi_processor_count
    tiles_along_n = -(-n // tile_n)
    rounds = v // tile_v * tiles_along_n // at_a_time
    tiles_along_v = rounds * at_a_time // tiles_along_n // 2 * 2  # an odd number of tiles is slower
    return tiles_along_v * tile_v or v  # 0 if the memory or the GPU is too small for full rounds


def linear_logps_bwd(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    ids_N: torch.Tensor,
    mask_N: torch.Tensor | None,
    stats_2N: torch.Tensor,
    entropies_N: torch.Tensor,
    d_logps_N: torch.Tensor,
    d_entropies_N: torch.Tensor | None,
    temperature: float,
    rows: str,
    workspace: int | None,
    dtype: torch.dtype,
    needed: Sequence[bool],
) -> Gradients:
    """Return the gradients of the inputs, given those of the log-probs and, if any, of the entropies."""
    head, of_rows = Head.of(dtype, weight_VH, bias_V), implementation(rows)
    tokens, wanted = CountedTokens(hidden_NH, mask_N, dtype, of_rows), Wanted._make((*needed, weight_VH.dtype))
    grads = empty_gradients(tokens, head, wanted)
    logit_bytes = of_rows.bytes_per_logit(dtype, d_entropies_N is not None)
    # on a CPU a float32 sum needs a float32 copy of the weight's block
    copy_bytes = 0 if hidden_NH.is_cuda or dtype.itemsize >= 4 else 4 * hidden_NH.shape[1]
    v = max(1, train_workspace(hidden_NH.device, workspace) // (max(tokens.count, 1) * logit_bytes + copy_bytes))
    hidden_nH, ids_n = tokens.hidden(), tokens.take(ids_N)
    stats_2n, d_logps_n = tokens.take(stats_2N, dim=1), tokens.take(d_logps_N)
    entropies_n = entropies_N if d_entropies_N is None else tokens.take(entropies_N)
    d_entropies_n = None if d_entropies_N is None else tokens.take(d_entropies_N)
    memory = tokens.workspace(tokens.count * min(v, head.V))
    d_hidden_nH = torch.zeros_like(hidden_nH, dtype=sums_in(dtype)) if wanted.hidden else None
    for block in cut(head.V, v, IDS_MULTIPLE):
        logits_nv = head.logits(hidden_nH, block, memory)
        of_rows.logps_bwd(
            logits_nv, ids_n, None, stats_2n, entropies_n, d_logps_n, d_entropies_n, temperature, True,
            (block.start, head.V),
        )  # fmt: skip
        if d_hidden_nH is not None:
            add_product(logits_nv, head.weight_VH[block], d_hidden_nH)
        if wanted.weight:
            product(logits_nv.T, hidden_nH, grads.weight_VH[block])
        if wanted.bias:
            grads.bias_V[block] = logits_nv.sum(0, dtype=sums_in(dtype))
    if d_hidden_nH is not None:
        tokens.put(d_hidden_nH, slice(0, tokens.count), grads.hidden_NH)
    return grads.with_bias_like(weight_VH if bias_V is None else bias_V)


def whole_rows_fit(device: torch.device, V: int, dtype: torch.dtype, rows: str, workspace: int | None) -> bool:
    """Return whether the workspace holds the logits of enough tokens to make `linear_logps_with_gradient` faster."""
    return train_workspace(device, workspace) >= _FEWEST_TOKENS * V * _bytes_per_logit(rows, dtype)


@constant_when_compiled
def _bytes_per_logit(rows: str, dtype: torch.dtype) -> int:
    return implementation(rows).bytes_per_logit(dtype)


def linear_logps_with_gradient(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    ids_N: torch.Tensor,
    mask_N: torch.Tensor | None,
    temperature: float,
    rows: str,
    workspace: int | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs [N] and d log-prob / d hidden [N, H] for a frozen head."""
    ones_N = hidden_NH.new_ones(len(hidden_NH), dtype=sums_in(dtype))
    values = TokenValues(ids_N, mask_N, None, None, ones_N, -ones_N)
    (*_, logps_N), gradients = linear_policy_terms(
        hidden_NH, weight_VH, bias_V, values, temperature, NLL(), rows, workspace, dtype, (True, False, False)
    )
    return logps_N, gradients.hidden_NH


def linear_policy_terms(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    values: TokenValues,
    temperature: float,
    rule: TokenRule,
    rows: str,
    workspace: int | None,
    dtype: torch.dtype,
    needed: Sequence[bool],
) -> tuple[LossTerms, Gradients]:
    """Return the loss, its policy and KL parts [2], the log-probs [N]; and the gradients of the loss.

    dtype    of the products
    needed   whether hidden states, weight and bias need a gradient
    """
    head, of_rows = Head.of(dtype, weight_VH, bias_V, rows == "exact"), implementation(rows)
    tokens, wanted = CountedTokens(hidden_NH, values.mask, dtype, of_rows), Wanted._make((*needed, weight_VH.dtype))
    bytes_given = train_workspace(hidden_NH.device, workspace)
    plan = _over_the_gradient(tokens.count, head, wanted, dtype, of_rows.bytes_per_logit(dtype, kept=True), bytes_given)
    if plan is not None and plan.v < head.V:
        results, grads = _policy_terms_in_blocks(tokens, head, plan, values, temperature, rule, of_rows, wanted)
        return results, grads.with_bias_like(weight_VH if bias_V is None else bias_V)
    n = _chunk_size(tokens, head, wanted, bytes_given) if plan is None else tokens.count
    chunks = LogitChunks(tokens, head, n)
    logps_n, terms_3n = (hidden_NH.new_empty(*lead, tokens.count, dtype=sums_in(dtype)) for lead in ((), (3,)))
    # with several chunks, sum the weight's gradient in float32 whatever its dtype
    weight_dtype = sums_in(dtype) if len(chunks.parts) > 1 else wanted.weight_dtype
    grads = empty_gradients(tokens, head, wanted._replace(weight_dtype=weight_dtype))
    for part, hidden_nH, logits_nV in chunks:
        into = logps_n[part], terms_3n[:, part]
        terms = of_rows.policy_terms(
            logits_nV, tokens.take_values(values, part), temperature, rule, any(wanted[:3]), True, into,
            wanted.factors_can_wait,
        )  # fmt: skip
        if wanted.hidden:
            tokens.put_product(logits_nV, head.weight_VH, terms.factors_N, part, grads.hidden_NH)
        if wanted.weight:
            hidden_nH = tokens.multiplied(hidden_nH, terms.factors_N)
            (add_product if part.start else product)(logits_nV.T, hidden_nH, grads.weight_VH)
        if wanted.bias:
            grads.bias_V.add_(logits_nV.sum(0, dtype=sums_in(dtype)))
    if wanted.weight:
        grads = grads._replace(weight_VH=no_view(narrowed(grads.weight_VH, wanted.weight_dtype)))
    results = *of_rows.sums(terms_3n), tokens.spread(logps_n)
    return results, grads.with_bias_like(weight_VH if bias_V is None else bias_V)


def _chunk_size(tokens: CountedTokens, head: Head, wanted: Wanted, workspace: int) -> int:
    """Return the number of tokens in the largest chunk.

    A chunk needs memory for its logits, and for float32 gradients if row factors are applied after the products.
    """
    logits_bytes = head.row * tokens.rows.bytes_per_logit(tokens.dtype)
    most = workspace // (logits_bytes + head.weight_VH.shape[1] * 4 * wanted.factors_can_wait)
    return max((part.stop - part.start for part in cut(tokens.count, most, TOKENS_MULTIPLE)), default=0)


class OverTheGradient(NamedTuple):
    """The placement of all logits in the memory of the weight's gradient, in blocks of v ids of the vocabulary:

    | room | logits of block 0 | logits of block 1 | …
    | gradient of block 0 | of block 1 | …                         overwrites logits that were already used
    """

    v: int
    room: int  # free bytes in front, so that no gradient overwrites logits that are still needed


def _over_the_gradient(
    n: int, head: Head, wanted: Wanted, dtype: torch.dtype, logit_bytes: int, workspace: int
) -> OverTheGradient | None:
    """Return the fewest blocks with which the logits of n tokens fit into the memory of the weight's gradient.

    That memory is the float32 sum plus the workspace. Return None if they do not fit, if the weight needs no gradient
    or if the row functions need copies of the logits.
    """
    H, V = head.weight_VH.shape[1], head.V
    if not wanted.weight or not n or logit_bytes != dtype.itemsize:
        return None
    row, gradient_row = n * logit_bytes, H * wanted.weight_dtype.itemsize  # bytes per id
    memory = V * H * sums_in(dtype).itemsize + workspace
    for number in range(1, _MOST_BLOCKS + 1):
        v = V if number == 1 else round_up(-(-V // number), IDS_MULTIPLE)
        done_before_last = (V - 1) // v * v
        # The gradient of block b must not reach the logits of block b, which begin at room + b·v·row. It is enough to
        # check the first block and the last two (the last may be shorter): in between the distance is linear in b.
        before_last = done_before_last * gradient_row - max(done_before_last - v, 0) * row
        room = round_up(max(v * gradient_row, before_last, V * gradient_row - done_before_last * row), 256)
        # memory for the float32 gradient of the hidden states; several blocks also need a packed copy of the states
        hidden = n * H * (4 * wanted.factors_can_wait if number == 1 else logit_bytes + sums_in(dtype).itemsize)
        if room + V * row + hidden <= memory:
            return OverTheGradient(v, room)
    return None


def _policy_terms_in_blocks(
    tokens: CountedTokens,
    head: Head,
    plan: OverTheGradient,
    values: TokenValues,
    temperature: float,
    rule: TokenRule,
    rows: ModuleType,
    wanted: Wanted,
) -> tuple[LossTerms, Gradients]:
    """Return the results of `linear_policy_terms`, computed for all tokens at once."""
    n, V, dtype, sums = tokens.count, head.V, tokens.dtype, sums_in(tokens.dtype)
    hidden_nH = tokens.hidden()
    memory = tokens.hidden_NH.new_empty(plan.room + n * V * dtype.itemsize, dtype=torch.uint8)
    logits = memory[plan.room :].view(dtype)
    blocks = [(block, logits[n * block.start : n * block.stop]) for block in cut(V, plan.v, IDS_MULTIPLE)]
    logps_n, stats_2n = (tokens.hidden_NH.new_empty(*lead, n, dtype=sums) for lead in ((), (2,)))
    values_n = tokens.take_values(values)
    for number, (block, piece) in enumerate(blocks):
        logits_nv = head.logits(hidden_nH, block, piece)
        rows.logps(
            logits_nv, values_n.ids, None, temperature, False, (logps_n, stats_2n, None), (block.start, V, number)
        )
    terms_3n, d_logps_n = token_terms(logps_n, *values_n[2:], rule)

    grads = empty_gradients(tokens, head, wanted._replace(weight=False))
    d_weight_VH = memory[: V * head.weight_VH.shape[1] * wanted.weight_dtype.itemsize].view(wanted.weight_dtype)
    d_weight_VH = d_weight_VH.view(head.weight_VH.shape)
    d_hidden_nH = torch.zeros_like(hidden_nH, dtype=sums) if wanted.hidden else None
    for block, piece in blocks:
        logits_nv = piece.view(n, block.stop - block.start)
        where = block.start, V
        rows.logps_bwd(logits_nv, values_n.ids, None, stats_2n, logps_n, d_logps_n, None, temperature, True, where)
        if d_hidden_nH is not None:
            add_product(logits_nv, head.weight_VH[block], d_hidden_nH)
        if wanted.bias:
            grads.bias_V[block] = logits_nv.sum(0, dtype=sums)
        product(logits_nv.T, hidden_nH, d_weight_VH[block])
    if d_hidden_nH is not None:
        tokens.put(d_hidden_nH, slice(0, n), grads.hidden_NH)
    return (*rows.sums(terms_3n), tokens.spread(logps_n)), grads._replace(weight_VH=no_view(d_weight_VH))


def train_workspace(device: torch.device, workspace: int | None) -> int:
    return workspace or TRAIN_WORKSPACE["cuda" if device.type == "cuda" else "cpu"]


# ---- as operators of torch.ops.strop, for compiled graphs ----


def _fake_logps(hidden_NH, weight, bias, ids_N, mask_N, temperature, entropy, rows, workspace, dtype):
    N = ids_N.shape[0]
    sizes = (N,), (2, N), (N if entropy else 0,)
    return tuple(hidden_NH.new_empty(size, dtype=sums_in(dtype)) for size in sizes)


logps_op = library_op(
    "linear_logp(Tensor hidden, Tensor weight, Tensor? bias, Tensor ids, Tensor? mask, float temperature, bool entropy, "
    "str rows, int? workspace, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    _fake_logps,
)(linear_logps)


def _fake_with_gradient(hidden_NH, weight, bias, ids_N, mask_N, temperature, rows, workspace, dtype):
    return hidden_NH.new_empty(ids_N.shape, dtype=sums_in(dtype)), hidden_NH.new_empty(hidden_NH.shape)


logps_with_gradient_op = library_op(
    "linear_logp_with_gradient(Tensor hidden, Tensor weight, Tensor? bias, Tensor ids, Tensor? mask, float temperature, "
    "str rows, int? workspace, ScalarType dtype) -> (Tensor, Tensor)",
    _fake_with_gradient,
)(linear_logps_with_gradient)


def fake_gradients(hidden_NH, weight, bias, dtype, wanted):
    """Return empty tensors with the gradients' shapes and dtypes; gradients not asked for have no elements."""
    return (
        hidden_NH.new_empty(hidden_NH.shape if wanted[0] else 0),
        weight.new_empty(weight.shape) if wanted[1] else weight.new_empty(0, dtype=dtype),
        (weight if bias is None else bias).new_empty(bias.shape if wanted[2] else 0),
    )


logps_bwd_op = library_op(
    "linear_logp_backward(Tensor hidden, Tensor weight, Tensor? bias, Tensor ids, Tensor? mask, Tensor stats, "
    "Tensor entropies, Tensor d_logps, Tensor? d_entropies, float temperature, str rows, int? workspace, "
    "ScalarType dtype, bool[] wanted) -> (Tensor, Tensor, Tensor)",
    lambda hidden_NH, weight, bias, *rest: fake_gradients(hidden_NH, weight, bias, *rest[-2:]),
)(linear_logps_bwd)


def _fake_terms(hidden_NH, weight, bias, ids_N, *rest):
    *_, dtype, wanted = rest
    make = functools.partial(hidden_NH.new_empty, dtype=sums_in(dtype))
    return make(()), make(2), make(ids_N.shape), *fake_gradients(hidden_NH, weight, bias, dtype, wanted)


@library_op(
    "linear_policy_loss(Tensor hidden, Tensor weight, Tensor? bias, Tensor ids, Tensor? mask, Tensor? old_logps, "
    "Tensor? ref_logps, Tensor advantages, Tensor weights, float temperature, str rule, str rows, int? workspace, "
    "ScalarType dtype, bool[] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_terms,
)
def policy_terms_op(hidden_NH, weight, bias, *rest):
    *values, temperature, rule, rows, workspace, dtype, wanted = rest
    settings = temperature, from_text(rule), rows, workspace, dtype, wanted
    results, gradients = linear_policy_terms(hidden_NH, weight, bias, TokenValues(*values), *settings)
    return *results, *gradients


def policy_terms_in_graph(hidden_NH, weight, bias, values, temperature, rule, *settings):
    """Return the results of `linear_policy_terms` by the operator, which takes text instead of objects."""
    found = policy_terms_op(hidden_NH, weight, bias, *values, temperature, rule.text, *settings)
    return found[:3], found[3:]
