"""The engines there are, by name. Each is imported at its first use."""

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
    check_choice(name, "engine", _LOADERS)
    return _LOADERS[name]()


def available_engines() -> list[str]:
    """The engines that run here; the numpy one always does."""
    names = []
    for name, loader in _LOADERS.items():
        try:
            loader()
        except EngineUnavailable:
            continue
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
    try:
        from strop.moe.native import NativeEngine
    except ModuleNotFoundError as error:
        if error.name != "strop.moe.native":
            raise
        raise EngineUnavailable("engine='native' is not part of this build; engine='numpy' runs without") from None
    return NativeEngine


register_engine("numpy", _load_numpy)
register_engine("native", _load_native)
