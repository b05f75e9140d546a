"""Reward and preference functions: called by parameter names, checked, weighted, and stopped after a timeout.

    def reward(completions, answer):                     # answer: a column of the dataset
        return [float(c.strip() == a) for c, a in zip(completions, answer)]

    rewards = RewardFunctions([reward, brevity], weights=[1.0, 0.1], timeout=30)
    found = rewards({"completions": [...], "prompts": [...], "answer": [...]})
    found.total_B, found.columns["reward"]

A function may have these parameters: completions and prompts (texts with a tokenizer, else 1-D tensors of ids),
completion_ids and prompt_ids (always tensors), and every column of the dataset. Each is a list with one entry per
completion; **kwargs receives all.

An `async def` function runs at the same time as the others. With a parameter `completion` in place of `completions` it is
called once for each completion, several at the same time; its other parameters are one entry each, `prompt` among them.

A reward that is missing, late, not a number or not finite raises a `RewardError` that names the function, the
completion's index and its prompt; so does an exception. There is no default reward, because the model would learn from
a silent zero. With on_reward_error="leave_out" the completions of a call that failed have the reward NaN, which stands for
none, and are left out of the loss.
"""

import concurrent.futures
import contextlib
import ctypes
import functools
import inspect
import itertools
import math
import numbers
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import torch

from strop._checks import check_timeout, did_you_mean
from strop._types import Json, Row, Tokenizer
from strop.config import RewardCalls
from strop.data.batch import Trajectory
from strop.data.formats import column_counts
from strop.data.inputs import RESERVED
from strop.distributed import World
from strop.rewards import async_calls

Rows = Mapping[str, Sequence[Any]]

LARGEST = torch.finfo(torch.float32).max
METRICS = (
    "mean",
    "std",
    "zero_std_fraction",
    "resampled_fraction",
    "failed_fraction",
)  # reward/… of all functions together
Arguments = tuple[list[list[Any]], dict[str, list[Any]]]  # positional and keyword; each has one entry per completion
FAILED = object()  # the value of a completion or pair whose call failed, where such are left out of the loss
GRACE = 5.0  # seconds that the event loop may be late


class RewardError(ValueError):
    """The error for a reward or preference function that fails or returns unusable values."""


@dataclass
class Rewards:
    """The rewards of several completions, in float32: total_B = Σ weight·column, and the columns by function name.

    A completion whose reward failed has NaN, and counts in no metric.
    """

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
    def shown(self) -> dict[str, list[float | None]]:
        """The columns for `sample_table`: the total rewards and, with several functions, those of each; None if failed."""
        each = {f"reward/{name}": column_B.tolist() for name, column_B in self.columns.items()}
        found = {"reward": self.total_B.tolist()} | (each if len(each) > 1 else {})
        return {name: [None if math.isnan(value) else value for value in values] for name, values in found.items()}

    @property
    def metrics(self) -> dict[str, float]:
        total_B = self.total_B[~self.failed_B].double()
        found = {"reward/mean": total_B.mean().item(), "reward/std": total_B.std(correction=0).item()}
        found |= {f"reward/{name}": column.double().nanmean().item() for name, column in self.columns.items()}
        return found | ({"reward/failed_fraction": self.failed_B.double().mean().item()} if self.failed_B.any() else {})

    @property
    def failed_B(self) -> torch.Tensor:
        """True for completions whose reward failed."""
        return self.total_B.isnan()

    @property
    def mean(self) -> float:
        return self.total_B.double().nanmean().item()


class RewardFunctions:
    """One or several reward functions, whose rewards are added with weights.

    weights   one per function; None is 1 for each
    timeout   seconds for one call of one function; None waits forever. `time_limit` says what it can stop.
    find_failing   call a function that raised again, one completion at a time, so that the error names the failing one.
                   Off by default, because calls may cost money
    calls     what happens when a call fails, and how many calls of an async function run at the same time
    """

    def __init__(
        self,
        functions: Any,
        weights: Sequence[float] | None = None,
        timeout: float | None = None,
        find_failing: bool = False,
        calls: RewardCalls | None = None,
    ):
        self.functions = list(functions) if isinstance(functions, (list, tuple)) else [functions]
        if not self.functions:
            raise ValueError("reward_fn must be a function or several, found none")
        for function in self.functions:
            if not callable(function):
                raise TypeError(f"reward_fn must be a function or several, found {type(function).__name__}")
        self.weights = [1.0] * len(self.functions) if weights is None else _as_numbers(weights)
        if len(self.weights) != len(self.functions):
            wanted = f"one for each of the {len(self.functions)} functions"
            raise ValueError(f"reward_weights must be {wanted}, found {len(self.weights)}")
        if not all(map(math.isfinite, self.weights)):
            raise ValueError(f"reward_weights must be finite, found {self.weights}")
        self.caller = Caller(check_timeout(timeout), find_failing, calls or RewardCalls())
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

    def take_metrics(self) -> dict[str, float]:
        """Return the functions' own numbers since the last time, such as a judge's tokens."""
        return _taken_metrics(self.functions, self.names)

    def __call__(self, rows: Rows, trajectories: Sequence[Trajectory] = ()) -> Rewards:
        total_B = torch.zeros(len(rows["completions"]), dtype=torch.float64)
        columns = {}
        if not len(total_B):  # a process without prompts calls no function
            return Rewards.joined([], self.names)
        found = self.caller.call_all(list(zip(self.functions, self.names, strict=True)), rows)
        for name, weight, values in zip(self.names, self.weights, found, strict=True):
            rewards = [as_reward(value, index, f"reward function {name}", rows) for index, value in enumerate(values)]
            column_B = torch.tensor(rewards, dtype=torch.float64)
            total_B += weight * column_B
            columns[name] = column_B.float()
        if total_B.isnan().all():
            raise RewardError(f"no completion has a reward: {self.caller.last_failure}")
        return Rewards(total_B.float(), columns)


def _as_numbers(weights: object) -> list[float]:
    if isinstance(weights, (list, tuple)) and all(isinstance(weight, numbers.Real) for weight in weights):
        return [float(weight) for weight in weights]
    raise TypeError(f"reward_weights must be numbers, one for each function, found {weights!r:.60}")


class PreferenceFunction:
    """A preference function: preference_fn(pairs) returns 0 for each pair (a, b) where a is better, 1 where b is, 0.5 for a tie.

    A tie is left out of the loss. a and b are texts, or 1-D tensors of ids. The function may have further parameters: prompts, prompt_ids and the
    dataset's columns, with one entry per pair.
    """

    def __init__(
        self,
        function: object,
        timeout: float | None = None,
        find_failing: bool = False,
        calls: RewardCalls | None = None,
    ):
        if not callable(function):
            raise TypeError(f"preference_fn must be a function, found {type(function).__name__}")
        self.function, self.caller = function, Caller(check_timeout(timeout), find_failing, calls or RewardCalls())
        self.name = unique_names([function])[0]

    def check(self, rows: Sequence[Row], name: str, besides: Sequence[str] = ()) -> None:
        """Raise if the function needs a column that not every row has; see `RewardFunctions.check`."""
        check_columns(self.function, self.name, ("pairs", *besides), rows, name)

    def take_metrics(self) -> dict[str, float]:
        """Return the function's own numbers since the last time, such as a judge's tokens."""
        return _taken_metrics([self.function], [self.name])

    def __call__(self, pairs: Sequence[tuple[object, object]], columns: Rows | None = None) -> list[float]:
        """Return the function's value for each pair; NaN if its call failed and failures are left out."""
        if not pairs:
            return []
        rows = {**(columns or {}), "pairs": pairs}
        (values,) = self.caller.call_all([(self.function, self.name)], rows)
        if all(value is FAILED for value in values):
            raise RewardError(f"no pair has a preference: {self.caller.last_failure}")
        return [self._preference(value, index, rows) for index, value in enumerate(values)]

    def _preference(self, value: object, index: int, rows: Rows) -> float:
        if value is FAILED:
            return math.nan
        value = _as_number(value)
        if not isinstance(value, numbers.Real) or value not in (0, 0.5, 1):
            raise RewardError(
                f"preference function {self.name} must return 0 or 1 (the index of the better) or 0.5 (a tie), "
                f"found {value!r} {where(index, rows)}"
            )
        return float(value)


def _taken_metrics(functions: Sequence[Any], names: Sequence[str]) -> dict[str, float]:
    """Return what `take_metrics()` of each function that has it returns, under the function's name."""
    own = [
        (name, function) for name, function in zip(names, functions, strict=True) if hasattr(function, "take_metrics")
    ]
    return {f"{name}/{key}": value for name, function in own for key, value in function.take_metrics().items()}


class MetricsFunctions:
    """One or several functions whose numbers are logged and are no reward.

    Each has parameters as a reward function and returns {name: values}, one value for each completion; None is no value.
    """

    def __init__(self, functions: Any, timeout: float | None = None):
        self.functions = list(functions) if isinstance(functions, (list, tuple)) else [functions]
        for function in self.functions:
            if not callable(function) or is_async(function):
                raise TypeError(f"metrics_fn must be a plain function or several, found {function!r:.60}")
        self.timeout, self.names = check_timeout(timeout), unique_names(self.functions)

    def check(self, rows: Sequence[Row], name: str, besides: Sequence[str] = ()) -> None:
        """Raise if a function needs a column that not every row has; see `RewardFunctions.check`."""
        for function, called in zip(self.functions, self.names, strict=True):
            check_columns(function, called, ("completions", "completion_ids", *besides), rows, name)

    def __call__(self, rows: Rows) -> dict[str, tuple[float, int]]:
        """Return the sum and the number of each metric's values."""
        found: dict[str, tuple[float, int]] = {}
        for function, called in zip(self.functions, self.names, strict=True):
            given = arguments_for(function, called, rows)
            returned: Any = call_checked(function, called, given, rows, self.timeout, find_failing=False)
            if not isinstance(returned, Mapping):
                raise RewardError(f"metrics function {called} must return values by name, found {returned!r:.60}")
            for name, values in returned.items():
                who = f"metrics function {called}, {name}"
                listed = as_values(values, len(rows["completions"]), who, rows)
                known = [as_reward(value, i, who, rows) for i, value in enumerate(listed) if value is not None]
                found[str(name)] = sum(known), len(known)
        return found


# ---- calling ----


SINGULAR = {"completions": "completion", "prompts": "prompt", "pairs": "pair"}  # in functions called once for each row


def judged(rows: Rows) -> str:
    """Return the column that the function judges: "completions", or "pairs" for a preference function."""
    return next(name for name in ("completions", "completion", "pairs", "pair") if name in rows)


def is_async(function: Any) -> bool:
    """Return whether calling this function returns a coroutine."""
    inner = getattr(function, "func", function)  # functools.partial
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def takes_one(function: object) -> bool:
    """Return whether this is an async function that is called once for each completion or pair."""
    return is_async(function) and any(p.name in ("completion", "pair") for p in _parameters(function))


def rows_for(function: object, rows: Rows) -> Rows:
    """Return the columns under the names that the function's parameters have."""
    if not takes_one(function):
        return rows
    return {SINGULAR.get(column, column): values for column, values in rows.items()}


def arguments_for(function: object, name: str, rows: Rows) -> Arguments:
    """Return the arguments for the function: the columns named by its parameters."""
    rows = rows_for(function, rows)
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
    kind = "preference" if what.startswith("pair") else "reward"
    return f"{kind} function {name} asks for {parameter!r}, which is no column of the rows; {hint}"


class Caller:
    """Calls functions with limits. Async functions run at the same time as all others; plain ones one after another.

    timeout        seconds for one call; None waits forever
    find_failing   call a plain function that raised again, one completion at a time, to name the one that fails
    last_failure   the error of the last call that failed and was left out
    """

    def __init__(self, timeout: float | None, find_failing: bool, calls: RewardCalls):
        self.timeout, self.find_failing, self.calls = timeout, find_failing, calls
        self.last_failure: RewardError | None = None

    def call_all(self, functions: Sequence[tuple[Any, str]], rows: Rows) -> list[list[Any]]:
        """Return what each function, given with its name, says of the rows: one value a row, FAILED if it is left out."""
        begun = {i: self._begin(*functions[i], rows) for i in range(len(functions)) if is_async(functions[i][0])}
        try:
            found = {i: self._call(*functions[i], rows) for i in range(len(functions)) if i not in begun}
            found |= {i: self._end(future, *functions[i], rows) for i, future in begun.items()}
        finally:
            for future in begun.values():
                future.cancel()
        return [found[i] for i in range(len(functions))]

    def _call(self, function: Any, name: str, rows: Rows) -> list[Any]:
        given, num_rows = arguments_for(function, name, rows), len(rows[judged(rows)])
        for attempt in range(self.calls.reward_retries + 1):
            if attempt:
                time.sleep(async_calls.pause_before(attempt))
            try:
                returned = call_checked(function, name, given, rows, self.timeout, self.find_failing)
                break
            except RewardError as error:
                failure = error
        else:
            return [self._failed(failure)] * num_rows
        return as_values(returned, num_rows, kind_of(name, rows), rows)

    def _failed(self, error: RewardError) -> object:
        """Return FAILED, or raise the error unless failures are left out."""
        if self.calls.on_reward_error == "raise":
            raise error
        if self.last_failure is None:
            warnings.warn(f"{error}; it is left out of the loss, and so are further ones", stacklevel=2)
        self.last_failure = error
        return FAILED

    def _begin(self, function: Any, name: str, rows: Rows) -> Future[list[Any]]:
        """Begin the calls of an async function: one of all rows, or one for each."""
        args, named = arguments_for(function, name, rows)
        calls = [functools.partial(function, *args, **named)]
        if takes_one(function):
            of_each = ({column: values[i] for column, values in named.items()} for i in range(len(rows[judged(rows)])))
            calls = [functools.partial(function, **one) for one in of_each]
        options = self.calls
        return async_calls.begin(
            calls, at_once=options.reward_concurrency, timeout=self.timeout, retries=options.reward_retries,
            stops=options.on_reward_error == "raise",
        )  # fmt: skip

    def _end(self, future: Future[list[Any]], function: Any, name: str, rows: Rows) -> list[Any]:
        """Return the values of begun calls. One that never awaits blocks the loop, which is then given up."""
        num_rows, patience = len(rows[judged(rows)]), None
        if self.timeout is not None:
            rounds = -(-num_rows // self.calls.reward_concurrency)
            pauses = map(async_calls.pause_before, range(self.calls.reward_retries + 1))
            patience = rounds * sum(self.timeout + pause for pause in pauses) + GRACE
        try:
            found = future.result(patience)
        except async_calls.FailedCall as failure:
            raise self._explained(failure, function, name, rows) from failure.error
        except concurrent.futures.TimeoutError:
            async_calls.event_loop.give_up()
            wanted = f"return within timeout={self.timeout:g} seconds"
            raise RewardError(
                f"{name} must {wanted}, found that it blocks all other async calls: it must await what takes long"
            ) from None
        values = [
            self._failed(self._explained(one, function, name, rows)) if isinstance(one, async_calls.FailedCall) else one
            for one in found
        ]
        if takes_one(function):
            return values
        (returned,) = values
        return [FAILED] * num_rows if returned is FAILED else as_values(returned, num_rows, kind_of(name, rows), rows)

    def _explained(self, failure: "async_calls.FailedCall", function: Any, name: str, rows: Rows) -> RewardError:
        error, place = failure.error, where(failure.index, rows)
        if error is None:
            wanted = f"return within timeout={self.timeout:g} seconds"
            return RewardError(f"{name} must {wanted}, found it still running {place}")
        said = f"{type(error).__name__}: {' '.join(str(error).split())}{_line_of(error, function)}"
        return RewardError(f"{name} raised {said} {place}")


def kind_of(name: str, rows: Rows) -> str:
    return f"{'preference' if judged(rows) == 'pairs' else 'reward'} function {name}"


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
    lengths = [length for one in trajectories for length in (one.num_prompt, one.ids_T.size(0) - one.num_prompt)]
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


# ---- checking ----


def _as_number(value: object) -> Any:
    """Return a 0-d tensor or NumPy number as a Python number, any other value unchanged."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value


def as_reward(value: object, index: int, name: str, rows: Rows) -> float:
    if value is FAILED:
        return math.nan
    value = _as_number(value)
    if not isinstance(value, numbers.Real):
        raise RewardError(f"{name} must return numbers, found {value!r:.60} {where(index, rows)}")
    size: Any = abs(value)
    if not size <= LARGEST:  # rewards are stored in float32
        found = f"found {value!s:.20} {where(index, rows)}"
        raise RewardError(f"{name} must return finite numbers, {found}")
    return float(value)


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


Result = TypeVar("Result")


class OutOfTime(BaseException):
    """The exception raised inside a late function; no `Exception`, so that `except Exception` does not catch it."""


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
