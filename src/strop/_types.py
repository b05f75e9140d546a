"""Names for the types of values that many files pass on. Needs torch for the type checker alone."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from numpy.typing import ArrayLike

if TYPE_CHECKING:
    import torch

Array: TypeAlias = Union[ArrayLike, "torch.Tensor"]  # numbers: lists, arrays of NumPy, tensors
Json: TypeAlias = dict[str, Any]  # an object of a JSON or YAML file
Row: TypeAlias = Mapping[str, Any]  # a row of a dataset, whose columns hold anything
