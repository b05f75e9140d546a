"""The engines by name. An engine is imported when it is first asked for."""

import contextlib
from collections.abc import Callable

from strop import _compiled
from strop._checks import check_choice
from strop.moe.engine import MoEEngine


class EngineUnavailable(RuntimeError):
    """The engine is known but cannot run here; the message says why and what to do."""


_LOADERS: dict[str, Callable[[], type[MoEEngine]]] = {}


def register_engine(name: str, loader: Callable[[], type[MoEEngine]]) -> None:
    """Make an engine known. `loader` runs at first use; it returns the class or raises EngineUnavailable."""
    _LOADERS[name] = loader


def engine_class(name: str) -> type[MoEEngine]:
    """Return the class of an engine, which is imported now."""
    check_choice(name, "engine", _LOADERS)
    return _LOADERS[name]()


def available_engines() -> list[str]:
    """Return the engines that run here; the numpy one always does."""
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
