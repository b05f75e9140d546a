"""Loading of functions and classes by name: file.py:function, or package.module:function."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from strop._checks import did_you_mean
from strop._contexts import contained


def load_function(name: str, what: str) -> Callable[..., object]:
    """Return the function with a name such as file.py:function or package.module:function."""
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function:
        raise ValueError(f"{what} must be file.py:function or package.module:function, found {name!r}")
    with contained():
        module = _module_of_file(Path(place), what) if place.endswith(".py") else _module_named(place, what)
    if not hasattr(module, function):
        public = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        hint = did_you_mean(function, public) or f"; it has {', '.join(public) or 'no function'}"
        raise ValueError(f"{place} has no function {function!r}{hint}")
    found = getattr(module, function)
    if not callable(found):
        raise TypeError(f"{what} {name} must be a function, found {type(found).__name__}")
    return found


def _module_of_file(path: Path, what: str) -> ModuleType:
    """Import a file, which may import modules beside it, and return its module.

    The file's folder is first in sys.path during the import, as for `python file.py`, and last afterwards. Imports
    inside its functions then still find modules there, without hiding modules from other code.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such file for {what}: {path}")
    spec = importlib.util.spec_from_file_location(f"strop_user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look there
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise ImportError(f"{what}: {path} cannot be imported: {_failure(error, folder)}") from error
    finally:
        sys.path.remove(folder)
    if folder not in sys.path:
        sys.path.append(folder)
    return module


def _module_named(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            hint = f"a file is given with its ending, {name}.py:…"
            raise ValueError(f"{what}: no module {name!r} ({error}); {hint}") from None
        raise ImportError(f"{what}: {name} cannot be imported: {_failure(error)}") from error


def _failure(error: BaseException, folder: str | None = None) -> str:
    """Return where and why an import failed, preferring a line in the folder's own files."""
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__) if f.filename[:1] != "<"]
    frames = [frame for frame in frames if str(Path(frame[0]).resolve().parent) == folder] or frames
    file, line = frames[-1]
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        file, line = error.filename, error.lineno
    said = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return f"{Path(file).name}, line {line}: {type(error).__name__}: {said}"
