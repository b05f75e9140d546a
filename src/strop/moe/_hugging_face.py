"""Arguments and results of a Hugging Face causal LM: transformers' types or substitutes, and checks of arguments.

Shapes: B rows, T columns.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from strop._types import Array, Json
from strop.moe import _inputs
from strop.moe.config import MoEConfig

IGNORE = -100  # the label of a position without a target
ABSENT = ("past_key_values", "inputs_embeds", "use_cache", "output_attentions", "output_hidden_states")


class PlainConfig(SimpleNamespace):
    """Mixtral's config as plain attributes."""

    def to_dict(self) -> Json:
        return dict(vars(self))


class PlainOutput(dict[str, Any]):
    """The result of a forward. Read it as `.logits`, `["logits"]` or by position among the values that are not None."""

    def __init__(self, **fields: object):
        super().__init__({name: value for name, value in fields.items() if value is not None})
        self.__dict__.update(fields)

    def __getitem__(self, key: str | int) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple[object, ...]:
        return tuple(self.values())


def _types() -> tuple[Any, Any]:
    try:
        from transformers import MixtralConfig
        from transformers.modeling_outputs import MoeCausalLMOutputWithPast
    except ModuleNotFoundError as error:
        if error.name != "transformers":  # transformers is installed but broken: raise its error
            raise
        return PlainConfig, PlainOutput
    return MixtralConfig, MoeCausalLMOutputWithPast


Config, Output = _types()


def refuse(arguments: Json) -> None:
    """Raise if an option of transformers' forward that the engine does not support is on."""
    for name, value in arguments.items():
        if name not in ABSENT:
            raise TypeError(f"forward() got an unexpected keyword argument {name!r}")
        if value is not None and value is not False:
            found = value if isinstance(value, bool) else type(value).__name__
            raise ValueError(f"{name} must be None or False (the engine has no such thing in forward), found {found}")


def check_positions(position_ids: Array, tokens_BT: np.ndarray, mask_BT: np.ndarray | None) -> None:
    """Raise unless positions rise by one per real token. They may start anywhere: RoPE depends on differences only."""
    positions_BT = _inputs.as_token_ids(position_ids, "position_ids")
    B, T = tokens_BT.shape
    if positions_BT.shape not in ((B, T), (1, T)):
        raise ValueError(
            f"position_ids must have the shape {(B, T)} of input_ids or {(1, T)}, found {positions_BT.shape}"
        )
    real_BT = np.ones((B, T), bool) if mask_BT is None else mask_BT
    start_BT = positions_BT - (real_BT.cumsum(1) - 1)  # the row's first position, according to each token
    first_B1 = real_BT.argmax(1)[:, None]
    wrong_BT = real_BT & (start_BT != np.take_along_axis(start_BT, first_B1, 1))
    if wrong_BT.any():
        row, column = (int(i) for i in np.argwhere(wrong_BT)[0])
        found = np.broadcast_to(positions_BT, (B, T))[row, column]
        raise ValueError(
            f"position_ids must rise by one from token to token of a row (packed rows are not supported), "
            f"found {found} at row {row}, column {column}"
        )


def targets_of(labels: Array, tokens_BT: np.ndarray, mask_BT: np.ndarray | None, config: MoEConfig) -> np.ndarray:
    """Return the labels shifted left by one, with −100 at the end and at padding, which predicts nothing."""
    labels_BT = _inputs.as_token_ids(labels, "labels")
    if labels_BT.shape != tokens_BT.shape:
        raise ValueError(f"labels must have the shape {tokens_BT.shape} of input_ids, found {labels_BT.shape}")
    _inputs.check_ids_in_range(labels_BT, "labels", config, labels_BT != IGNORE)
    targets_BT = np.full_like(labels_BT, IGNORE)
    targets_BT[:, :-1] = labels_BT[:, 1:]
    if mask_BT is not None:
        targets_BT[~mask_BT] = IGNORE
    return targets_BT


def token_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the ids as a tuple, given None, one id or several."""
    return () if value is None else tuple(np.atleast_1d(value).tolist())
