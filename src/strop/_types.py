"""Type aliases and protocols that many files use. Only type checkers import torch here."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, Union

from numpy.typing import ArrayLike

if TYPE_CHECKING:
    import torch

Array: TypeAlias = Union[ArrayLike, "torch.Tensor"]  # numbers: lists, arrays of NumPy, tensors
Json: TypeAlias = dict[str, Any]  # an object of a JSON or YAML file
Row: TypeAlias = Mapping[str, Any]  # a row of a dataset; its columns may hold anything
Texts: TypeAlias = Union[Sequence[Any], "torch.Tensor"]  # texts, conversations or token ids, one a row
State: TypeAlias = tuple[dict[str, "torch.Tensor"], Json]  # state in a checkpoint: tensors by name, and JSON values


class Context(Protocol):
    """The `ctx` of a `torch.autograd.Function`: saved tensors, and whatever forward leaves on it for backward."""

    saved_tensors: tuple["torch.Tensor", ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: "torch.Tensor | None") -> None: ...
    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: object) -> None: ...


class Foreign(Protocol):
    """A model, module or config of another library, which alone knows its attributes."""

    def __getattr__(self, name: str) -> Any: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class Tokenizer(Protocol):
    """The interface of tokenizers: transformers' have it, and so has `strop.tasks.tokenizer.CharTokenizer`."""

    def encode(self, text: str, /, *, add_special_tokens: bool = ...) -> Sequence[int]: ...
    def __call__(self, text: str, /, *, add_special_tokens: bool = ...) -> Mapping[str, Any]: ...
    def decode(self, ids: Array, /, skip_special_tokens: bool = ...) -> str: ...
    def __len__(self) -> int: ...
