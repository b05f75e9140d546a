"""The compiled module: loaded if it is built, and configured from the environment; otherwise the reason.

STROP_NATIVE=0 disables it, STROP_ISA selects an instruction set, STROP_NUM_THREADS limits its threads.
"""

import importlib
import importlib.util
import inspect
import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from strop._checks import as_count

Function = TypeVar("Function", bound=Callable[..., Any])


def _load() -> tuple[ModuleType | None, str, bool]:
    """Return the module or None, its status in words, and whether it is built but fails to load."""
    if os.environ.get("STROP_NATIVE", "1") == "0":
        return None, "switched off by STROP_NATIVE=0", False
    if importlib.util.find_spec("strop._native") is None:
        return None, "not built; `pip install .` builds it with a C++ compiler", False
    try:
        return importlib.import_module("strop._native"), "built", False
    except ImportError as error:
        reason = f"does not load: {error}" + (f" ({error.__cause__})" if error.__cause__ else "")
        warnings.warn(f"strop's compiled module {reason}; NumPy is used instead", RuntimeWarning, stacklevel=2)
        return None, reason, True


native, native_status, native_is_broken = _load()


MOST_THREADS = 1024


def set_num_threads(count: int) -> None:
    """Set the number of threads of compiled functions, including the calling thread. Results do not depend on it."""
    count = as_count(count, "count", 1)
    if count > MOST_THREADS:
        raise ValueError(f"count must be from 1 to {MOST_THREADS}, found {count}")
    if native is None:
        warnings.warn(f"the compiled module is {native_status}: NumPy runs on one thread", RuntimeWarning, stacklevel=2)
    else:
        native.set_num_threads(count)


def get_num_threads() -> int:
    """Return the number of threads a compiled function may use; 1 without the compiled module."""
    return 1 if native is None else native.num_threads()


def _configure_from_environment() -> list[str]:
    """Apply the environment variables. Warn of invalid values, and return the warnings."""
    if native is None:
        return []
    wrong = []
    isa, threads = os.environ.get("STROP_ISA"), os.environ.get("STROP_NUM_THREADS")
    if isa and not native.set_isa(isa):
        known = ", ".join(native.available_isas())
        wrong.append(f"STROP_ISA must be one of {known}, found {isa!r}; using {native.isa()}")
    if threads and threads.isdecimal() and 1 <= int(threads) <= MOST_THREADS:
        native.set_num_threads(int(threads))
    elif threads:
        wanted = f"STROP_NUM_THREADS must be a whole number from 1 to {MOST_THREADS}, found {threads!r}"
        wrong.append(f"{wanted}; using {native.num_threads()}")
    for line in wrong:
        warnings.warn(line, RuntimeWarning, stacklevel=2)
    return wrong


environment_problems = _configure_from_environment()


def _entry_point(twin: Callable[..., object], behind: Callable[..., object] | None) -> Any:
    assert native is not None
    signature = inspect.signature(twin)
    bare = signature.replace(parameters=[p.replace(annotation=p.empty) for p in signature.parameters.values()])
    bare = bare.replace(return_annotation=signature.empty)
    doc = f"{twin.__name__}{bare}\n--\n\n{inspect.getdoc(twin)}"
    return native.entry_point(twin.__name__, behind, doc, "strop")


kernels: dict[str, Callable[..., Any]] = {}
"""Compiled primitives by name, for inputs already in plain form; empty without the compiled module."""


def compiled(twin: Function) -> Function:
    """Return the compiled function of the same name, with `twin` as its fallback; `twin` if nothing is compiled."""
    if native is None:
        return twin
    kernels[twin.__name__] = _entry_point(twin, None)
    return _entry_point(twin, twin)
