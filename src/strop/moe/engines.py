"""The registry of engines by name. An engine is imported at first use."""

import contextlib
from collections.abc import Callable

from strop import _compiled
from strop._checks import check_choice
from strop.moe.engine import MoEEngine


class EngineUnavailable(RuntimeError):
    """The error for a known engine that cannot run here; the message says why and what to do."""


_LOADERS: dict[str, Callable[[], type[MoEEngine]]] = {}


def register_engine(name: str, loader: Callable[[], type[MoEEngine]]) -> None:
    """Register an engine. `loader` runs at first use; it returns the class or raises EngineUnavailable."""
    _LOADERS[name] = loader


def engine_class(name: str) -> type[MoEEngine]:
    """Import the engine of this name and return its class."""
    check_choice(name, "engine", _LOADERS)
    return _LOADERS[name]()


def available_engines() -> list[str]:
    """Return the names of the engines that can run here; "numpy" always can."""
    names = []
    for name, loader in _LOADERS.items():
        with contextlib.suppress(EngineUnavailable):
            loader()
            names.append(name)
    return names


def _load_numpy() -> type[MoEEngine]:
    from strop.moe.reference.engine import NumpyEngine

    return NumpyEngine


def _load_native() -> type[MoEEngine]:
    if _compiled.native is None:
        raise EngineUnavailable(
            f"engine='native' needs the compiled module, which is {_compiled.native_status}; engine='numpy' runs without"
        )
    from strop.moe.native import NativeEngine

    return NativeEngine


register_engine("numpy", _load_numpy)
register_engine("native", _load_native)
