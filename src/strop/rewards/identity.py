"""Names of user functions, and hashes of their code, for run.json."""

import hashlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any

from strop.rewards.functions import unique_names


def described(function: Callable[..., object]) -> dict[str, str]:
    """Return a function's name, its file if it has one, and the SHA-256 of the file or of its code, for run.json."""
    inner = inspect.unwrap(getattr(function, "func", function))
    place = inner if hasattr(inner, "__code__") or inspect.isclass(inner) else type(inner)
    found = {"name": unique_names([function])[0]}
    try:
        file = Path(inspect.getsourcefile(place) or "")
        code = file.read_bytes()
        found["file"] = str(file)
    except (TypeError, OSError):  # a builtin, or a notebook's cell
        code = "\n".join(_code_without_file(place, {})).encode()
    if (settings := getattr(function, "settings", None)) is not None:  # a judge's
        code += repr(settings).encode()
    return found | ({"sha256": hashlib.sha256(code).hexdigest()} if code else {})


def _code_without_file(function: Any, known: dict[int, object]) -> Iterator[str]:
    """Yield the code of a function or class that has no file, and that of the functions and classes it names."""
    if isinstance(function, type):
        members = [getattr(value, "__func__", value) for value in vars(function).values()]
    elif isinstance(function, FunctionType) and not Path(function.__code__.co_filename).is_file():
        names = _names_of(function.__code__)
        members = [function.__globals__[name] for name in names if name in function.__globals__]
        members += [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    else:
        return
    if id(function) in known:
        return
    known[id(function)] = function
    if isinstance(function, FunctionType):
        try:
            yield inspect.getsource(function)
        except OSError:
            yield repr(_constant(function.__code__))
    for member in members:
        yield from _code_without_file(inspect.unwrap(member) if callable(member) else member, known)


def _names_of(code: CodeType) -> list[str]:
    inner = [name for value in code.co_consts if isinstance(value, CodeType) for name in _names_of(value)]
    return list(dict.fromkeys([*code.co_names, *inner]))


def _constant(value: object) -> object:
    """Return a constant in a form whose repr is the same in every process: code by its content, sets in order."""
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, value.co_varnames, [_constant(one) for one in value.co_consts]
    if isinstance(value, frozenset):
        return sorted(map(repr, value))
    return [_constant(one) for one in value] if isinstance(value, tuple) else value
