"""Reward and preference functions: called by parameter names, checked, weighted, and stopped after a timeout.

    def reward(completions, answer):                     # answer: a column of the dataset
        return [float(c.strip() == a) for c, a in zip(completions, answer)]

    rewards = RewardFunctions([reward, brevity], weights=[1.0, 0.1], timeout=30)
    found = rewards({"completions": [...], "prompts": [...], "answer": [...]})
    found.total_B, found.columns["reward"]

A function may have these parameters: completions and prompts (texts with a tokenizer, else 1-D tensors of ids),
completion_ids and prompt_ids (always tensors), and every column of the dataset. Each is a list with one entry per
completion; **kwargs receives all.

A reward that is missing, late, not a number or not finite raises a `RewardError` that names the function, the
completion's index and its prompt; so does an exception. There is no default reward, because the model would learn from
a silent zero.
"""

import contextlib
import ctypes
import functools
import hashlib
import inspect
import itertools
import math
import numbers
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any, TypeVar

import torch

from strop._checks import check_timeout, did_you_mean
from strop._types import Json, Row, Tokenizer
from strop.data.batch import Trajectory
from strop.data.formats import column_counts
from strop.data.inputs import RESERVED
from strop.distributed import World

Rows = Mapping[str, Sequence[Any]]

LARGEST = torch.finfo(torch.float32).max
METRICS = ("mean", "std", "zero_std_fraction", "resampled_fraction")  # reward/… of all functions together
Arguments = tuple[list[list[Any]], dict[str, list[Any]]]  # positional and keyword; each has one entry per completion


class RewardError(ValueError):
    """The error for a reward or preference function that fails or returns unusable values."""


@dataclass
class Rewards:
    """The rewards of several completions, in float32: total_B = Σ weight·column, and the columns by function name."""

    total_B: torch.Tensor
    columns: dict[str, torch.Tensor]

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], names: Sequence[str]) -> "Rewards":
        """Return the rewards stored in these trajectories, for functions with these names."""
        columns = {name: torch.tensor([one.rewards[name] for one in trajectories]).float() for name in names}
        return cls(torch.tensor([one.reward for one in trajectories]).float(), columns)

    @classmethod
    def joined(cls, parts: Sequence["Rewards"], names: Sequence[str]) -> "Rewards":
        """Return the parts concatenated."""
        none = torch.zeros(0)
        columns = {name: torch.cat([none, *(part.columns[name] for part in parts)]) for name in names}
        return cls(torch.cat([none, *(part.total_B for part in parts)]), columns)

    def fill(self, trajectories: Sequence[Trajectory]) -> None:
        """Fill `rewards` and `reward` of the trajectories."""
        columns = {name: column_B.tolist() for name, column_B in self.columns.items()}
        for i, (trajectory, total) in enumerate(zip(trajectories, self.total_B.tolist(), strict=True)):
            trajectory.rewards, trajectory.reward = {name: values[i] for name, values in columns.items()}, total

    def over(self, world: World) -> "Rewards":
        """Return the rewards of all processes."""
        return self if world.size == 1 else Rewards.joined(world.gathered(self), list(self.columns))

    @property
    def shown(self) -> dict[str, list[float]]:
        """The columns for `sample_table`: the total rewards and, with several functions, those of each."""
        each = {f"reward/{name}": column_B.tolist() for name, column_B in self.columns.items()}
        return {"reward": self.total_B.tolist()} | (each if len(each) > 1 else {})

    @property
    def metrics(self) -> dict[str, float]:
        total_B = self.total_B.double()
        found = {"reward/mean": total_B.mean().item(), "reward/std": total_B.std(correction=0).item()}
        return found | {f"reward/{name}": column.double().mean().item() for name, column in self.columns.items()}


class RewardFunctions:
    """One or several reward functions, whose rewards are added with weights.

    weights   one per function; None is 1 for each
    timeout   seconds for one call of one function; None waits forever. `time_limit` says what it can stop.
    find_failing   call a function that raised again, one completion at a time, so that the error names the failing one.
                   Off by default, because calls may cost money
    """

    def __init__(
        self,
        functions: Any,
        weights: Sequence[float] | None = None,
        timeout: float | None = None,
        find_failing: bool = False,
    ):
        self.functions = list(functions) if isinstance(functions, (list, tuple)) else [functions]
        if not self.functions:
            raise ValueError("reward_fn must be a function or several, found none")
        for function in self.functions:
            if not callable(function):
                raise TypeError(f"reward_fn must be a function or several, found {type(function).__name__}")
            _refuse_async(function, "reward_fn")
        self.weights = [1.0] * len(self.functions) if weights is None else _as_numbers(weights)
        if len(self.weights) != len(self.functions):
            wanted = f"one for each of the {len(self.functions)} functions"
            raise ValueError(f"reward_weights must be {wanted}, found {len(self.weights)}")
        if not all(map(math.isfinite, self.weights)):
            raise ValueError(f"reward_weights must be finite, found {self.weights}")
        self.timeout, self.find_failing = check_timeout(timeout), find_failing
        self.names = unique_names(self.functions)
        for name in self.names:
            if name in METRICS:
                why = f"reward/{name} is a metric of all functions together; give the function another __name__"
                raise ValueError(f"reward_fn must not be called {name!r}: {why}")

    def check(self, rows: Sequence[Row], name: str, besides: Sequence[str] = ()) -> None:
        """Raise if a function needs a column that not every row has. Called before anything is sampled.

        besides   more columns that the rollout adds
        """
        for function, called in zip(self.functions, self.names, strict=True):
            check_columns(function, called, ("completions", "completion_ids", *besides), rows, name)

    def __call__(self, rows: Rows, trajectories: Sequence[Trajectory] = ()) -> Rewards:
        total_B = torch.zeros(len(rows["completions"]), dtype=torch.float64)
        columns = {}
        if not len(total_B):  # a process without prompts calls no function
            return Rewards.joined([], self.names)
        for function, name, weight in zip(self.functions, self.names, self.weights, strict=True):
            column_B = torch.tensor(self._score(function, name, rows), dtype=torch.float64)
            total_B += weight * column_B
            columns[name] = column_B.float()
        return Rewards(total_B.float(), columns)

    def _score(self, function: Callable[..., object], name: str, rows: Rows) -> list[float]:
        given = arguments_for(function, name, rows)
        returned = call_checked(function, name, given, rows, self.timeout, self.find_failing)
        values = as_values(returned, len(rows["completions"]), f"reward function {name}", rows)
        return [as_reward(value, index, name, rows) for index, value in enumerate(values)]


def _as_numbers(weights: object) -> list[float]:
    if isinstance(weights, (list, tuple)) and all(isinstance(weight, numbers.Real) for weight in weights):
        return [float(weight) for weight in weights]
    raise TypeError(f"reward_weights must be numbers, one for each function, found {weights!r:.60}")


class PreferenceFunction:
    """A preference function: preference_fn(pairs) returns 0 for each pair (a, b) where a is better, 1 where b is.

    a and b are texts, or 1-D tensors of ids. The function may have further parameters: prompts, prompt_ids and the
    dataset's columns, with one entry per pair.
    """

    def __init__(self, function: object, timeout: float | None = None, find_failing: bool = False):
        if not callable(function):
            raise TypeError(f"preference_fn must be a function, found {type(function).__name__}")
        _refuse_async(function, "preference_fn")
        self.function, self.timeout, self.find_failing = function, check_timeout(timeout), find_failing
        self.name = unique_names([function])[0]

    def check(self, rows: Sequence[Row], name: str, besides: Sequence[str] = ()) -> None:
        """Raise if the function needs a column that not every row has; see `RewardFunctions.check`."""
        check_columns(self.function, self.name, ("pairs", *besides), rows, name)

    def __call__(self, pairs: Sequence[tuple[object, object]], columns: Rows | None = None) -> list[int]:
        if not pairs:
            return []
        rows = {**(columns or {}), "pairs": pairs}
        given = arguments_for(self.function, self.name, rows)
        returned = call_checked(self.function, self.name, given, rows, self.timeout, self.find_failing)
        values = as_values(returned, len(pairs), f"preference function {self.name}", rows)
        values = [_as_number(value) for value in values]
        for index, value in enumerate(values):
            if not isinstance(value, numbers.Real) or value not in (0, 1):
                found = f"found {value!r} {where(index, rows)}"
                raise RewardError(
                    f"preference function {self.name} must return 0 or 1 (the index of the better), {found}"
                )
        return [int(value) for value in values]


def _refuse_async(function: object, argument: str) -> None:
    """Raise for an async function: calling it returns a coroutine and no rewards."""
    inner = getattr(function, "func", function)  # functools.partial
    if inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__):
        name = unique_names([function])[0]
        hint = "async ones are not supported yet; a plain one may await others by asyncio.run(…)"
        raise TypeError(f"{argument} must be a plain function, found the async function {name}: {hint}")


# ---- calling ----


def judged(rows: Rows) -> str:
    """Return the column that the function judges: "completions", or "pairs" for a preference function."""
    return "completions" if "completions" in rows else "pairs"


def arguments_for(function: object, name: str, rows: Rows) -> Arguments:
    """Return the arguments for the function: the columns named by its parameters."""
    what = judged(rows)
    first = list(rows[what])
    bound = getattr(function, "keywords", {}) if isinstance(function, functools.partial) else {}
    rows = {column: values for column, values in rows.items() if column not in bound}
    parameters = _parameters(function)
    if not parameters:
        return [first], {}
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if not takes_all and len(required) <= 1 and not any(p.name in rows for p in by_name):
        _refuse_near_miss([*required, *by_name][:1], name, rows, what)
        return [first], {}
    for parameter in required:
        if parameter.name not in rows or parameter not in by_name:
            raise RewardError(_unknown_parameter(parameter.name, name, rows, what))
    wanted = list(rows) if takes_all else [p.name for p in by_name if p.name in rows]
    return [], {column: list(rows[column]) for column in wanted}


def check_columns(function: object, name: str, judged: Sequence[str], rows: Sequence[Row], where: str) -> None:
    """Raise if a row lacks a column that a function needs. A parameter with a default needs none; it is None then."""
    counts = column_counts(rows)
    columns = {column: None for column in counts if column not in RESERVED}
    given = dict.fromkeys((*judged, "prompts", "prompt_ids", *columns), ())
    _, by_name = arguments_for(function, name, given)
    needed = [p.name for p in _parameters(function) if p.default is p.empty and p.name in by_name and p.name in columns]
    for column in needed:
        if counts[column] < len(rows):
            i = next(i for i, row in enumerate(rows) if column not in row)
            hint = "give the parameter a default where it may be missing: it is None then"
            raise RewardError(
                f"{where}[{i}] must have the column {column!r}, which {name} asks for and other rows have; {hint}"
            )


def _parameters(function: Any) -> Sequence[inspect.Parameter]:
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        return list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):  # a builtin may have no signature
        return []


def _refuse_near_miss(parameters: Sequence[inspect.Parameter], name: str, rows: Rows, what: str) -> None:
    """Raise if a single parameter seems to be another column's misspelt name.

    A single parameter of any other name receives what is judged.
    """
    for parameter in parameters:
        if did_you_mean(parameter.name, [column for column in rows if column != what], cutoff=0.85):
            raise RewardError(_unknown_parameter(parameter.name, name, rows, what))


def _unknown_parameter(parameter: str, name: str, rows: Rows, what: str) -> str:
    hint = did_you_mean(parameter, rows, "{}", cutoff=0.75) or f"there are {', '.join(sorted(rows))}"
    kind = "reward" if what == "completions" else "preference"
    return f"{kind} function {name} asks for {parameter!r}, which is no column of the rows; {hint}"


def call_checked(
    function: object, name: str, given: Arguments, rows: Rows, timeout: float | None, find_failing: bool
) -> Sequence[Any]:
    """Call the function and return its result; raise a RewardError if it raises or exceeds the timeout."""
    what = judged(rows)
    try:
        return _call(function, given, timeout)
    except OutOfTime:
        wanted = f"return within timeout={timeout:g} seconds for {len(rows[what])} {what}"
        raise RewardError(f"{name} must {wanted}, found it still running {where(0, rows)}") from None
    except Exception as error:
        index, one = None, what.removesuffix("s")
        about = f"find_failing=True calls it again, one {one} at a time, and names the one that fails"
        if find_failing:
            index, about = _first_failing(function, given, len(rows[what]), timeout), f"no {one} fails alone"
        hint = "" if index is not None else f", the first of {len(rows[what])} {what}; {about}"
        said = f"{type(error).__name__}: {' '.join(str(error).split())}{_line_of(error, function)}"  # on one line
        told = f"{name} raised {said} {where(index or 0, rows)}{hint}{_of_messages(error, given)}"
        raise RewardError(told) from error


def _line_of(error: Exception, function: Any) -> str:
    """Return the place of the error: the last traceback line in the function's own file, else the last line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = getattr(getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None), "co_filename", None)
    frame = [*frames[-1:], *(frame for frame in frames if frame.filename == own)][-1]
    return f" at {frame.filename}, line {frame.lineno}"


def _of_messages(error: Exception, given: Arguments) -> str:
    """Return a hint if the function, as one written for TRL, indexes a completion as a list of messages; else ""."""
    texts = given[1].get("completions") or (given[0] or [[]])[0]
    indexed = isinstance(error, TypeError) and "indices must be" in str(error)
    if not indexed or not texts or not isinstance(texts[0], str):
        return ""
    return "; completions are texts here, also of conversations: completion in place of completion[0]['content']"


def _call(function: Any, given: Arguments, timeout: float | None) -> Any:
    work = functools.partial(function, *given[0], **given[1])
    return work() if timeout is None else time_limit(work, timeout)


def _first_failing(
    function: object, given: Arguments, num_rows: int, timeout: float | None, patience: float = 5.0
) -> int | None:
    """Return the index of the first completion for which the function raises when called with it alone, or None."""
    end = time.monotonic() + patience
    for index in range(num_rows):
        left = end - time.monotonic()
        if left <= 0:
            return None
        try:
            alone = [[v[index]] for v in given[0]], {name: [v[index]] for name, v in given[1].items()}
            _call(function, alone, min(left, timeout or left))
        except OutOfTime:
            return None
        except Exception:
            return index
    return None


# ---- columns and sample tables ----


def reward_columns(trajectories: Sequence[Trajectory], tokenizer: Tokenizer | None) -> dict[str, list[Any]]:
    """Return the columns for reward functions, with one entry per trajectory.

    Ids are copies, so a function that changes them in place does not change the training data.
    """
    prompt_ids, completion_ids = _copies(trajectories)
    prompts, completions = _copies(trajectories) if tokenizer is None else (prompt_ids, completion_ids)
    names = trajectories[0].shown if trajectories else ()
    shown = {name: [one.shown[name] for one in trajectories] for name in names}
    if tokenizer is not None and "completions" not in shown:
        completions = [tokenizer.decode(ids.tolist(), skip_special_tokens=True) for ids in completion_ids]
    columns: dict[str, list[Any]] = {
        "completions": completions, "prompts": prompts, "completion_ids": completion_ids, "prompt_ids": prompt_ids,
    }  # fmt: skip
    for name, values in shown.items():
        columns[name] = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
    names = dict.fromkeys(name for one in trajectories for name in one.row)
    return columns | {name: [one.row.get(name) for one in trajectories] for name in names}


def _copies(trajectories: Sequence[Trajectory]) -> tuple[list[Any], list[Any]]:
    """Return copies of the prompts' ids and of the completions' ids."""
    if not trajectories:
        return [], []
    lengths = [length for one in trajectories for length in (one.num_prompt, len(one) - one.num_prompt)]
    pieces = torch.cat([one.ids_T for one in trajectories]).split(lengths)
    return list(pieces[::2]), list(pieces[1::2])


def sample_table(rows: Mapping[str, Sequence[object]], **columns: Sequence[Any]) -> list[Json]:
    """Return rows for `Trainer.samples`: prompt, completion and these columns, with ids as lists.

    With several turns, the completion is all messages after the prompt.
    """
    prompts, completions = (
        [value.tolist() if isinstance(value, torch.Tensor) else value for value in rows[name]]
        for name in ("prompts", "replies" if "replies" in rows else "completions")
    )
    pairs = zip(prompts, completions, strict=True)
    return [
        {"prompt": prompt, "completion": completion, **{name: values[i] for name, values in columns.items()}}
        for i, (prompt, completion) in enumerate(pairs)
    ]


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


# ---- checking ----


def as_values(returned: object, wanted: int, who: str, rows: Rows) -> list[Any]:
    """Return a function's result as a list; raise unless it has one value per row."""
    if isinstance(returned, torch.Tensor) or hasattr(returned, "tolist"):
        returned = returned.tolist()
    if isinstance(returned, (str, bytes, Mapping)) or not hasattr(returned, "__iter__"):
        raise RewardError(f"{who} must return a list of {wanted} numbers, found {returned!r:.60}")
    values = list(returned)
    if len(values) != wanted:
        found = f"found {len(values)} {where(min(len(values), wanted - 1), rows)}"
        raise RewardError(f"{who} must return one number for each of the {wanted} {judged(rows)}, {found}")
    return values


def _as_number(value: object) -> Any:
    """Return a 0-d tensor or NumPy number as a Python number, any other value unchanged."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value


def as_reward(value: object, index: int, name: str, rows: Rows) -> float:
    value = _as_number(value)
    if not isinstance(value, numbers.Real):
        raise RewardError(f"reward function {name} must return numbers, found {value!r:.60} {where(index, rows)}")
    size: Any = abs(value)
    if not size <= LARGEST:  # rewards are stored in float32
        found = f"found {value!s:.20} {where(index, rows)}"
        raise RewardError(f"reward function {name} must return finite numbers, {found}")
    return float(value)


def where(index: int, rows: Rows) -> str:
    """Return the text that names a completion or pair in errors: its index and its shortened prompt."""
    prompts = rows.get("prompts")
    shown = "" if not prompts else f", prompt {_shortened(prompts[index])}"
    return f"({judged(rows).removesuffix('s')} {index}{shown})"


def _shortened(prompt: object, length: int = 80) -> str:
    text = repr(prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt)
    return text if len(text) <= length else f"{text[: length - 20]} … {text[-16:]}"


def unique_names(functions: Sequence[object]) -> list[str]:
    names: list[str] = []
    for function in functions:
        inner = getattr(function, "func", function)  # functools.partial
        name = getattr(inner, "__name__", type(inner).__name__).strip("<>")
        others = (f"{name}_{number}" for number in itertools.count(2))
        names.append(next(other for other in (name, *itertools.islice(others, len(names))) if other not in names))
    return names


# ---- time ----


class OutOfTime(BaseException):
    """The exception raised inside a late function; no `Exception`, so that `except Exception` does not catch it."""


Result = TypeVar("Result")


def time_limit(work: Callable[[], Result], seconds: float) -> Result:
    """Return work(); raise OutOfTime after this many seconds.

    In the main thread the alarm signal interrupts Python code (an endless loop), waiting (sleep, a socket) and regular
    expressions. Elsewhere `work` runs in a new thread, in which OutOfTime is raised. This stops Python code; a thread
    that waits in C is abandoned. Neither stops C code that never checks for signals, such as one huge product of
    integers. Run foreign code in a separate process.
    """
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
        with _alarm(seconds):
            return work()
    return _in_a_thread(work, seconds)


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def late(_number: int, _frame: FrameType | None) -> None:
        raise OutOfTime

    start = time.monotonic()
    handler = signal.signal(signal.SIGALRM, late)
    # repeat after the first, because a bare `except:` may catch one
    before, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
    try:
        try:
            yield
        finally:  # an alarm during this line raises here, inside the outer try, which still restores the handler
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, handler)
        if before:  # restart the alarm that was set before
            signal.setitimer(signal.ITIMER_REAL, max(before - (time.monotonic() - start), 1e-3), interval)


def _in_a_thread(work: Callable[[], Result], seconds: float) -> Result:
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, daemon=True, name="reward")
    thread.start()
    thread.join(seconds)
    if not thread.is_alive():
        return future.result()
    for _ in range(20):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(OutOfTime))
        thread.join(0.05)
        if not thread.is_alive():
            break
    raise OutOfTime
