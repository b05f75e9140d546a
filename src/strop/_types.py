"""Names for the types of values that many files pass on. Needs torch for the type checker alone."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, Union

from numpy.typing import ArrayLike

if TYPE_CHECKING:
    import torch

Array: TypeAlias = Union[ArrayLike, "torch.Tensor"]  # numbers: lists, arrays of NumPy, tensors
Json: TypeAlias = dict[str, Any]  # an object of a JSON or YAML file
Row: TypeAlias = Mapping[str, Any]  # a row of a dataset, whose columns hold anything


class Tokenizer(Protocol):
    """What strop asks of a tokenizer: one of transformers, or `strop.tasks.tokenizer.CharTokenizer`."""

    def __call__(self, text: str, /, *, add_special_tokens: bool = ...) -> Mapping[str, Any]: ...
    def decode(self, ids: Any, /, skip_special_tokens: bool = ...) -> str: ...
    def __len__(self) -> int: ...
