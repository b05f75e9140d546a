"""What only a trial tells of a module: which ids it takes, and whether it looks ahead. Leaves no trace in it.

B rows, T tokens, V vocabulary.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from strop.data.collate import SequenceBatch
from strop.models.kinds import evaluating

TRIED = (1, 0, 1)  # ids that every vocabulary has, and that are no positions and no kinds of tokens


def known_ids(module: nn.Module, forward: Callable[[SequenceBatch], Any], device: torch.device) -> int | None:
    """Ids are below this: the size of the nn.Embedding that is given them. None where there is none to be found."""
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    ids_BT = torch.tensor([TRIED], device=device)
    sizes: list[int] = []

    def look(table: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments and torch.equal(arguments[0], ids_BT):
            sizes.append(table.num_embeddings)  # type: ignore[arg-type]

    hooks = [table.register_forward_pre_hook(look) for table in tables]
    try:
        # what the module has against three tokens is no matter: the first real batch may have another shape
        with _tried(module, device), contextlib.suppress(Exception):
            forward(SequenceBatch(ids_BT, torch.ones_like(ids_BT), torch.ones_like(ids_BT)))
    finally:
        for hook in hooks:
            hook.remove()
    return min(sizes, default=None)


def looks_ahead(
    module: nn.Module, logits: Callable[[SequenceBatch], torch.Tensor], batch: SequenceBatch
) -> bool | None:
    """Whether the logits for a row's first token that counts change with that token and those behind it.

    The prompt before it may be read in both directions. The batch keeps its shape, which the module is about to take
    anyway. False also of a module that gives other logits each time it is asked: of that one nothing can be told.
    None: this batch cannot tell, for want of completions or of a second id that the module is known to take.
    """
    starts = _starts(batch)
    known = batch.input_ids_BT.unique().tolist()
    if not starts or len(known) < 2:
        return None
    rows, columns = list(starts), [start - 1 for start in starts.values()]

    def found(changed: list[int]) -> torch.Tensor:
        return logits(_with_others(batch, {row: starts[row] for row in changed}, known))[rows, columns].clone()

    with _tried(module, batch.input_ids_BT.device):
        as_it_is_RV, changed_RV = found([]), found(rows)
        differs = next((i for i in range(len(rows)) if not _is_same(as_it_is_RV[i], changed_RV[i])), None)
        if differs is None:
            return False
        # once more, this row alone: it is the row's own tokens, and neither chance nor another row
        as_it_is_V, changed_V = found([])[differs], found([rows[differs]])[differs]
    return _is_same(as_it_is_RV[differs], as_it_is_V) and _is_same(changed_RV[differs], changed_V)


def _starts(batch: SequenceBatch) -> dict[int, int]:
    """Of each row that has one, where its first token that counts stands. Column 0 is predicted by nothing."""
    rows_N, columns_N = batch.completion_mask_BT.bool()[:, 1:].nonzero().T.tolist()
    return {row: column + 1 for row, column in reversed(list(zip(rows_N, columns_N, strict=True)))}


def _with_others(batch: SequenceBatch, starts: dict[int, int], known: list[int]) -> SequenceBatch:
    """The batch with another id than the one that stands there from these places on."""
    ids_BT = batch.input_ids_BT.clone()
    for row, start in starts.items():
        ids_BT[row, start:] = known[1] if ids_BT[row, start] == known[0] else known[0]
    return dataclasses.replace(batch, input_ids_BT=ids_BT)


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
def _tried(module: nn.Module, device: torch.device) -> Iterator[None]:
    """In eval mode, without gradient, and with the random numbers put back."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad(), evaluating(module):
        yield
