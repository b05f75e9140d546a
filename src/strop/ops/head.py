"""Building blocks of `strop.ops.chunks`: the LM head, the tokens in the loss, their logits in chunks, products.

Shapes: N tokens, n of them in the loss or in a chunk, H hidden, V vocabulary, v ids of a block.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import torch

from strop._types import Context
from strop.ops import onednn
from strop.ops.rows import TokenValues

TOKENS_MULTIPLE, IDS_MULTIPLE = 512, 128  # chunks of tokens and blocks of the vocabulary are multiples of these
ROW_MULTIPLE = 8  # 16-bit logits per 16 bytes: rows of exact logits are aligned to 16 bytes

ALL = slice(None)


def computed_in(hidden: torch.Tensor) -> torch.dtype:
    """Return the dtype of matmuls with `hidden`: autocast's if it is on, else its own."""
    if hidden.dtype != torch.float64 and not hidden.is_meta and torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return hidden.dtype


def sums_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of log-probs, losses and sums over chunks, for matmuls in this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widest(device: torch.device) -> torch.dtype:
    """Return the dtype for sums: float64, or float32 on a device without float64 (Apple's)."""
    return torch.float32 if device.type == "mps" else torch.float64


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in the dtype for sums."""
    return tensor.to(widest(tensor.device))


def in_dtype(dtype: torch.dtype, *tensors: torch.Tensor | None) -> Any:
    """Return the tensors detached and in `dtype`, that of the policy's log-probs, so that the loss has it too."""
    return tuple(None if tensor is None else tensor.detach().to(dtype) for tensor in tensors)


class Head(NamedTuple):
    """The LM head, in the dtype of its matrix products.

    exact   use the batch-invariant product of `strop.ops.exact`, on whole rows
    """

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None
    exact: bool = False

    @classmethod
    def of(cls, dtype: torch.dtype, weight: torch.Tensor, bias: torch.Tensor | None, exact: bool = False) -> "Head":
        return cls(weight.to(dtype), None if bias is None else bias.to(dtype), exact)

    @property
    def V(self) -> int:
        return self.weight_VH.shape[0]

    @property
    def row(self) -> int:
        """Return the row stride of the logits, in elements."""
        return round_up(self.V, ROW_MULTIPLE) if self.exact else self.V

    def logits(self, hidden_nH: torch.Tensor, vocabulary: slice, memory: torch.Tensor) -> torch.Tensor:
        """Return hidden @ weightᵀ + bias for a slice of the vocabulary, written into `memory`."""
        if self.exact:
            from strop.ops.exact import product as exact_product  # needs Triton

            out_nV = memory[: len(hidden_nH) * self.row].view(len(hidden_nH), self.row)[:, : self.V]
            return exact_product(hidden_nH, self.weight_VH, self.bias_V, out=out_nV)
        weight_vH = self.weight_VH[vocabulary]
        out_nv = memory[: len(hidden_nH) * len(weight_vH)].view(len(hidden_nH), len(weight_vH))
        if self.bias_V is not None and not by_onednn(hidden_nH, weight_vH):
            return torch.addmm(self.bias_V[vocabulary], hidden_nH, weight_vH.T, out=out_nv)
        product(hidden_nH, weight_vH.T, out_nv)
        return out_nv if self.bias_V is None else out_nv.add_(self.bias_V[vocabulary])


class Wanted(NamedTuple):
    """The gradients that are asked for."""

    hidden: bool
    weight: bool
    bias: bool
    weight_dtype: torch.dtype  # the parameter's dtype; under autocast the head's is another

    @property
    def factors_can_wait(self) -> bool:
        """Return whether row factors can be applied after the matmuls. A bias gradient rules this out."""
        return (self.hidden or self.weight) and not self.bias


class Gradients(NamedTuple):
    """The gradients of a loss; those not asked for are empty."""

    hidden_NH: torch.Tensor
    weight_VH: torch.Tensor
    bias_V: torch.Tensor

    def with_bias_like(self, like: torch.Tensor) -> "Gradients":
        """Return the gradients with that of the bias in the dtype of this tensor; it was summed in a wider one."""
        return self._replace(bias_V=self.bias_V.to(like.dtype))


class CountedTokens:
    """The tokens in the loss: those that the mask selects, or all N without a mask. A GPU mask is waited for."""

    def __init__(
        self, hidden_NH: torch.Tensor, mask_N: torch.Tensor | None, dtype: torch.dtype, rows: ModuleType
    ) -> None:
        self.hidden_NH, self.dtype, self.rows = hidden_NH, dtype, rows
        self.N = self.count = len(hidden_NH)
        self.places: torch.Tensor | None = None
        if mask_N is not None:
            places_n = mask_N.nonzero()[:, 0]
            self.count = len(places_n)
            self.places = None if self.count == self.N else places_n

    def hidden(self, part: slice = ALL) -> torch.Tensor:
        return self.take(self.hidden_NH, part).to(self.dtype)

    def take(self, values: torch.Tensor, part: slice = ALL, dim: int = 0) -> torch.Tensor:
        if self.places is not None:
            return values.index_select(dim, self.places[part])
        return values[part] if dim == 0 else values[:, part]

    def take_values(self, values: TokenValues, part: slice = ALL) -> TokenValues:
        """Return the values of a slice of these tokens, with mask None."""
        without_mask = values._replace(mask=None)
        return TokenValues._make(None if one is None else self.take(one, part) for one in without_mask)

    def put(self, values_nH: torch.Tensor, part: slice, out_NH: torch.Tensor) -> None:
        if self.places is None:
            out_NH[part] = values_nH
        else:
            out_NH.index_copy_(0, self.places[part], values_nH.to(out_NH.dtype))

    def put_product(
        self, a: torch.Tensor, b: torch.Tensor, factors_n: torch.Tensor | None, part: slice, out_NH: torch.Tensor
    ) -> None:
        """Multiply a @ b by one factor per row and write it to these tokens' rows of `out_NH`."""
        if factors_n is not None:
            product_nH = a.new_empty(len(a), b.shape[1], dtype=sums_in(a.dtype))
            product(a, b, product_nH)
            into = (out_NH[part], None) if self.places is None else (out_NH, self.places[part])
            self.rows.put_multiplied(product_nH, factors_n, *into)
        elif self.places is None and out_NH.dtype == a.dtype:
            product(a, b, out_NH[part])
        elif by_onednn(a, b):
            self.put(onednn.product(a, b.T), part, out_NH)
        else:
            self.put(torch.mm(a, b), part, out_NH)

    def multiplied(self, hidden_nH: torch.Tensor, factors_n: torch.Tensor | None) -> torch.Tensor:
        if factors_n is None:
            return hidden_nH
        out_nH = hidden_nH.new_empty(hidden_nH.shape)
        self.rows.put_multiplied(hidden_nH, factors_n, out_nH, None)
        return out_nH

    def workspace(self, size: int) -> torch.Tensor:
        return self.hidden_NH.new_empty(size, dtype=self.dtype)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Return [.., count] scattered to [.., N], with 0 at masked tokens."""
        if self.places is None:
            return values
        return values.new_zeros(*values.shape[:-1], self.N).index_copy_(-1, self.places, values)


def cut(total: int, most: int, multiple: int) -> list[slice]:
    """Return range(total) as the fewest nearly equal slices of at most `most` elements.

    Large slices are multiples of `multiple`. Products of other sizes leave multiprocessors idle or memory misaligned,
    and take up to 20 % longer.
    """
    if total <= most:
        return [slice(0, total)] if total else []
    size = -(-total // -(-total // max(most, 1)))
    if most >= multiple:
        size = min(round_up(size, multiple), most // multiple * multiple)
    return slices(total, size)


def slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class LogitChunks:
    """An iterator over the logits of at most n tokens at a time, all in the same memory."""

    def __init__(self, tokens: CountedTokens, head: Head, n: int) -> None:
        self._tokens, self._head = tokens, head
        self._memory = tokens.workspace(n * head.row)
        self.parts = cut(tokens.count, n, TOKENS_MULTIPLE)

    def __iter__(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield each chunk's slice of tokens, its hidden states and its logits."""
        for part in self.parts:
            hidden_nH = self._tokens.hidden(part)
            yield part, hidden_nH, self._head.logits(hidden_nH, ALL, self._memory)


def empty_gradients(tokens: CountedTokens, head: Head, wanted: Wanted) -> Gradients:
    """Return memory for the wanted gradients, with 0 where nothing will be written."""
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


def by_onednn(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether oneDNN computes the product of these matrices, into memory of its own."""
    return b.numel() >= onednn.FEWEST_WEIGHTS and onednn.takes(a)


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Write a @ b into `out`, which may be wider than the factors."""
    if by_onednn(a, b) and out.dtype == a.dtype:
        for rows in onednn.parts(out):
            out[rows] = onednn.product(a[rows], b.T)
    elif out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def add_product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Add a @ b to `out`, which may be wider than the factors."""
    if by_onednn(a, b) and out.dtype == a.dtype:
        for rows in onednn.parts(out):
            out[rows] += onednn.product(a[rows], b.T)
    elif out.dtype == a.dtype:
        out.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))


def narrowed(wide_VH: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix in another dtype. A narrower dtype reuses the same memory.

    Row i of the narrow matrix takes the place of row i/2 of the wide one. Rows k to 2k of the result overwrite wide
    rows k/2 to k, which are already converted, so each step doubles the number of converted rows.
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


def no_view(gradient: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the same memory that is not a view: autograd adds in place only to such gradients."""
    return gradient.data


def first_order(*gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients so that differentiating them raises an error: they were computed without a graph.

    torch's `once_differentiable` raises only if the incoming gradient has a graph. Otherwise a gradient penalty would
    silently be treated as a constant.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # enabled: create_graph=True
        return gradients
    return tuple(None if g is None else _NoSecondGradient.apply(g.detach().requires_grad_()) for g in gradients)


class _NoSecondGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> NoReturn:
        raise RuntimeError(
            "this backend has no gradient of its gradient; the reference has: with strop.ops.registry.use_backend('torch')"
        )
