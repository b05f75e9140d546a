"""The compiled module: loaded where it is built, configured from the environment, and the reason where it is not.

STROP_NATIVE=0 leaves it out, STROP_ISA names an instruction set, STROP_NUM_THREADS bounds its threads.
"""

import inspect
import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def _load() -> tuple[ModuleType | None, str, bool]:
    """The module or None, why, and whether that is a fault rather than a choice."""
    if os.environ.get("STROP_NATIVE", "1") == "0":
        return None, "switched off by STROP_NATIVE=0", False
    try:
        from strop import _native  # type: ignore[attr-defined]
    except ImportError as error:
        if error.name == "strop._native" or "cannot import name '_native'" in str(error):
            return None, "not built; `pip install .` builds it with a C++ compiler", False
        warnings.warn(
            f"strop's compiled module does not load, NumPy is used instead: {error}", RuntimeWarning, stacklevel=2
        )
        return None, f"does not load: {error}", True
    return _native, "built", False


native, native_status, native_is_broken = _load()


def set_num_threads(count: int) -> None:
    """Let every compiled function use up to `count` threads, the calling one among them. Results do not depend on it."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"count must be an int, found {type(count).__name__}")
    if not 1 <= count <= 1024:
        raise ValueError(f"count must be from 1 to 1024, found {count}")
    if native is None:
        warnings.warn(f"the compiled module is {native_status}: NumPy runs on one thread", RuntimeWarning, stacklevel=2)
    else:
        native.set_num_threads(count)


def get_num_threads() -> int:
    """The number of threads a compiled function may use; 1 without the compiled module."""
    return 1 if native is None else native.num_threads()


def _configure_from_environment() -> None:
    if native is None:
        return
    if (isa := os.environ.get("STROP_ISA")) and not native.set_isa(isa):
        raise ValueError(f"STROP_ISA must be one of {', '.join(native.available_isas())}, found {isa!r}")
    if threads := os.environ.get("STROP_NUM_THREADS"):
        if not threads.isdecimal() or not 1 <= int(threads) <= 1024:
            raise ValueError(f"STROP_NUM_THREADS must be a whole number from 1 to 1024, found {threads!r}")
        native.set_num_threads(int(threads))


_configure_from_environment()


def _entry_point(twin: Callable[..., Any], behind: Callable[..., Any] | None) -> Any:
    assert native is not None
    signature = inspect.signature(twin)
    bare = signature.replace(
        parameters=[p.replace(annotation=p.empty) for p in signature.parameters.values()],
        return_annotation=signature.empty,
    )
    doc = f"{twin.__name__}{bare}\n--\n\n{inspect.getdoc(twin)}"
    return native.entry_point(twin.__name__, behind, doc, "strop")


kernels: dict[str, Callable[..., Any]] = {}
"""Compiled primitives by name, for inputs already in plain form; empty without the compiled module."""


def compiled(twin: Function) -> Function:
    """The compiled function of the twin's name with the twin behind it, or the twin where nothing is compiled."""
    if native is None:
        return twin
    kernels[twin.__name__] = _entry_point(twin, None)
    return _entry_point(twin, twin)
