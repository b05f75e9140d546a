"""Operators and their backends.

An operator is one contract with several implementations. The backend "torch" is its reference: plain torch, which runs
everywhere, and against which the other backends are tested. Each call chooses a backend by its arguments: the newest
registered backend that can run them. There is no fallback: an error inside the chosen backend reaches the caller.

A choice can be forced; then that backend runs or raises:

    with use_backend("torch"): ...              every operator
    with use_backend(logp="triton"): ...        one operator
    STROP_BACKEND=torch  or  logp=triton,grpo_loss=torch   in the environment; `use_backend` overrides it

Under torch.compile the choice is made at compile time.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import typing
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from strop.ops.library import constant_when_compiled

REFERENCE = "torch"
_DECIDING = ("logits", "policy_logits", "hidden")  # the first argument, whose device and dtype decide
_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None

Function = Callable[..., Any]  # has the signature of its operator
Usable = Callable[..., "bool | str"]
"""Called with the operator's own arguments: true where the backend can take them, else the reason why not."""


def _reason_against(condition: Usable, args: tuple[object, ...], kwargs: dict[str, object]) -> str | None:
    """Return the reason why the condition does not hold, or None if it holds."""
    usable = condition(*args, **kwargs)
    if isinstance(usable, str):
        return usable
    return None if usable else "its condition does not hold"


# ---- where the kernels run ----


def always(*args: object, **kwargs: object) -> bool:
    return True


def only_by_name(*args: object, **kwargs: object) -> str:
    return "it runs only where it is asked for by name"


def on_gpu(*args: object, **kwargs: object) -> bool | str:
    """Return True if the kernels can take an operator's logits or hidden states, else why not."""
    tensor = _first_floats(args, kwargs)
    if tensor is None:
        return True  # the backend then raises the error
    if not tensor.is_cuda:
        return f"the tensors are on {tensor.device}, it needs a GPU"
    return _cannot_take(tensor) or True


def on_gpu_or_interpreted(*args: object, **kwargs: object) -> bool | str:
    """Return True if the kernels can run on a GPU or in Triton's interpreter, else why not; for forced backends."""
    tensor = _first_floats(args, kwargs)
    if tensor is None or tensor.device.type != "cpu":
        return on_gpu(*args, **kwargs)
    if reason := _cannot_take(tensor):
        return reason
    if _interpreted():
        return True
    return "the tensors are on the CPU, where it runs only through Triton's interpreter (TRITON_INTERPRET=1)"


@constant_when_compiled
def _interpreted() -> bool:
    return importlib.import_module("strop.ops.rows.triton_rows").INTERPRETED


def _first_floats(args: tuple[object, ...], kwargs: dict[str, object]) -> torch.Tensor | None:
    if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
        return args[0]  # the usual case
    # Keywords have any order. Logits or hidden states decide, not float64 log-probs that precede them.
    values = (*args, *(kwargs.get(name) for name in _DECIDING), *kwargs.values())
    return next((value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()), None)


def _cannot_take(tensor: torch.Tensor) -> str:
    if not _TRITON_INSTALLED:
        return "Triton is not installed"
    return "float64 is computed by the reference" if tensor.dtype == torch.float64 else ""


# When strop's own backends are chosen automatically, and which arguments they accept when forced.
_CONDITIONS: dict[str, tuple[Usable, Usable]] = {
    "chunked": (always, always),
    "exact": (only_by_name, on_gpu_or_interpreted),
    "triton": (on_gpu, on_gpu_or_interpreted),
}


# ---- operators ----


@dataclass(frozen=True)
class Backend:
    name: str
    function: Function
    when: Usable
    by_name: Usable  # the condition when the backend is forced


@dataclass(frozen=True)
class Explanation:
    """The backend that a call would run, with a sentence about each backend."""

    op: str
    chosen: str
    reasons: dict[str, str]

    def __str__(self) -> str:
        width = max(map(len, self.reasons))
        lines = [f"  {name:{width}}  {reason}" for name, reason in self.reasons.items()]
        return "\n".join([f"{self.op}: {self.chosen}", *lines])


_ops: dict[str, "Op"] = {}
REGISTERED_BY_USER: set[str] = set()  # operators with a backend added through `register`
FORCED: ContextVar[dict[str | None, str]] = ContextVar("strop_forced_backends", default={})  # noqa: B039 (never mutated)


class Op:
    """An operator. Call it as the function it was made from, without its backend parameter if it has one."""

    def __init__(self, function: Function, own: dict[str, object]) -> None:
        self.name = function.__name__
        functools.update_wrapper(self, function)
        functions: dict[str, Function] = {name: functools.partial(function, how) for name, how in own.items()}
        self.reference = functions.pop(REFERENCE, function)
        self.signature = self.__signature__ = inspect.signature(self.reference)
        gathered = [p.annotation for p in self.signature.parameters.values() if p.kind is p.VAR_KEYWORD]
        self._options = {name for one in gathered for kinds in typing.get_args(one) for name in kinds.__annotations__}
        self._backends = {REFERENCE: Backend(REFERENCE, self.reference, always, always)}
        self._backends |= {name: Backend(name, made, *_CONDITIONS[name]) for name, made in functions.items()}

    def __call__(self, *args: object, **kwargs: object) -> Any:
        try:
            return self._choose(args, kwargs).function(*args, **kwargs)
        except TypeError:
            self._bind(args, kwargs)  # for wrong arguments, raise the operator's own TypeError
            raise

    def __reduce__(self) -> tuple[object, ...]:
        return get_op, (self.name,)  # operators are unique by name: a copy or pickle is the same object

    def __repr__(self) -> str:
        return f"<operator {self.name}: {', '.join(self.backends())}>"

    def backends(self) -> list[str]:
        """Return the backends' names in the order they are tried: the newest first, the reference last."""
        return list(reversed(self._backends))

    def backend(self, name: str, *, when: Usable = always, replace: bool = False) -> Callable[[Function], Function]:
        """Register a function as this operator's backend `name` (decorator); `when` says whether it can run.

        The function has the operator's parameters. It may collect the keyword-only ones in **options.
        """

        def add(function: Function) -> Function:
            if name == REFERENCE:
                raise ValueError(f"the reference {name!r} of {self.name} is what others are tested against and stays")
            if name in self._backends and not replace:
                raise ValueError(f"{self.name} has a backend {name!r} already; replace=True replaces it")
            given = inspect.signature(function)
            gathers = any(p.kind is p.VAR_KEYWORD for p in given.parameters.values())
            wanted, found = _bare(self.signature, gathers), _bare(given, gathers)
            if wanted != found:
                raise ValueError(f"a backend of {self.name} must take {wanted}, found {found}")
            self._backends[name] = Backend(name, function, when, when)
            return function

        return add

    def _bind(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from None
        if self._options and (unknown := kwargs.keys() - self.signature.parameters.keys() - self._options):
            raise TypeError(f"{self.name}: got an unexpected keyword argument {min(unknown)!r}")

    def explain(self, *args: object, **kwargs: object) -> Explanation:
        self._bind(args, kwargs)
        forced, chosen = self.forced(), self._choose(args, kwargs).name
        reasons = {}
        for name in self.backends():
            if name == chosen:
                reasons[name] = f"chosen: asked for by {forced[1]}" if forced else "chosen: the first that can run"
            elif reason := _reason_against(self._backends[name].when, args, kwargs):
                reasons[name] = f"cannot run: {reason}"
            else:
                why = f"{forced[1]} asks for {chosen}" if forced else f"{chosen} comes first"
                reasons[name] = f"not chosen: {why}"
        return Explanation(self.name, chosen, reasons)

    def forced(self) -> tuple[str, str] | None:
        """Return the forced backend and what forces it, or None."""
        return _forced_choice(self.name)

    def _choose(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Backend:
        if (forced := self.forced()) is None:
            return next(one for one in reversed(self._backends.values()) if not _reason_against(one.when, args, kwargs))
        name, source = forced
        if name not in self._backends:
            raise ValueError(f"{source} asks for backend {name!r}; {self.name} has {_listed(self.backends())}")
        if reason := _reason_against(self._backends[name].by_name, args, kwargs):
            raise RuntimeError(f"{source} asks for backend {name!r} of {self.name}, which cannot run: {reason}")
        return self._backends[name]


@constant_when_compiled  # under torch.compile the choice is made at compile time
def _forced_choice(op_name: str) -> tuple[str, str] | None:
    for choices, source in ((FORCED.get(), "use_backend"), (_from_environment(), "STROP_BACKEND")):
        if name := choices.get(op_name) or choices.get(None):
            return name, source
    return None


def _bare(signature: inspect.Signature, positional_only: bool = False) -> str:
    """Return the parameters' names, kinds and defaults as text, without annotations; of all, or of positional ones."""
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    if positional_only:
        parameters = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def op(reference: Function) -> Op:
    """Make an operator of a torch function, which becomes its reference (decorator)."""
    return _add(Op(reference, {}))


def op_with_backends(**own: object) -> Callable[[Function], Op]:
    """Make an operator with several backends of one function (decorator).

    own   backend name → the first argument the function gets from that backend; "torch" is the reference
    """
    return lambda function: _add(Op(function, own))


def _add(made: Op) -> Op:
    if made.name in _ops:
        raise ValueError(f"an operator {made.name!r} exists already")
    _ops[made.name] = made
    return made


def register(name: str, backend: str, function: Function, *, when: Usable = always, replace: bool = False) -> None:
    """Add a backend to an existing operator: `register("logp", "mine", my_logp, when=on_my_device)`."""
    get_op(name).backend(backend, when=when, replace=replace)(function)
    REGISTERED_BY_USER.add(name)


def get_op(name: str) -> Op:
    if name not in _ops:
        raise ValueError(f"unknown operator {name!r}; there are {_listed(_ops)}")
    return _ops[name]


def ops() -> list[str]:
    """Return the names of all operators."""
    return sorted(_ops)


def backends(name: str) -> list[str]:
    """Return the names of the operator's backends in the order they are tried."""
    return get_op(name).backends()


def explain(name: str, *args: object, **kwargs: object) -> Explanation:
    """Return which backend the operator would choose for these arguments, and why not the others."""
    return get_op(name).explain(*args, **kwargs)


@contextlib.contextmanager
def use_backend(backend: str | None = None, /, **per_op: str) -> Iterator[None]:
    """Force a backend within the block, for all operators or by operator name. Inner blocks override outer ones."""
    if backend is not None:
        known = {name for one in _ops.values() for name in one.backends()}
        if backend not in known:
            raise ValueError(f"unknown backend {backend!r}; there are {_listed(known)}")
    for name, wanted in per_op.items():
        if wanted not in backends(name):
            raise ValueError(f"unknown backend {wanted!r}; {name} has {_listed(backends(name))}")
    choices: dict[str | None, str] = dict(FORCED.get()) if backend is None else {None: backend}
    choices |= per_op  # type: ignore[arg-type]  # a str is a str | None
    token = FORCED.set(choices)
    try:
        yield
    finally:
        FORCED.reset(token)


@functools.lru_cache(maxsize=8)
def _parse(setting: str) -> dict[str | None, str]:
    choices: dict[str | None, str] = {}
    for part in filter(None, (p.strip() for p in setting.split(","))):
        left, separator, right = (piece.strip() for piece in part.partition("="))
        name, backend = (left, right) if separator else (None, left)
        if not backend or name == "" or name in choices:
            raise ValueError(f"STROP_BACKEND must be a backend or op=backend,op=backend, found {setting!r}")
        if name is not None and name not in _ops:
            raise ValueError(f"STROP_BACKEND names an unknown operator {name!r}; there are {_listed(_ops)}")
        choices[name] = backend
    return choices


def _from_environment() -> dict[str | None, str]:
    return _parse(os.environ.get("STROP_BACKEND", ""))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
