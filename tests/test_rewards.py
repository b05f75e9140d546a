"""Reward functions: what they are given, what they may return, how they are named, weighed and stopped."""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from strop.rewards import PreferenceFunction, RewardError, RewardFunctions, described

ROWS = {
    "completions": ["aa", "b", ""],
    "prompts": ["first", "second", "third"],
    "completion_ids": [[1, 1], [2], []],
    "prompt_ids": [[9], [8], [7]],
    "answer": ["aa", "x", ""],
}


def length(completions):
    return [len(c) for c in completions]


def right(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def scores(*functions, **options):
    return RewardFunctions(list(functions), **options)(ROWS)


# ---- what a function is given ----


def test_by_parameter_names():
    seen = {}

    def everything(prompts, completion_ids, prompt_ids, answer, missing=5):
        seen.update(
            prompts=prompts, completion_ids=completion_ids, prompt_ids=prompt_ids, answer=answer, missing=missing
        )
        return [0, 0, 0]

    scores(everything)
    assert seen == {name: ROWS[name] for name in ("prompts", "completion_ids", "prompt_ids", "answer")} | {"missing": 5}


def test_keywords_take_all():
    seen = {}

    def everything(completions, **columns):
        seen.update(columns)
        return [0] * len(completions)

    scores(everything)
    assert seen == {name: values for name, values in ROWS.items() if name != "completions"}


def test_a_single_parameter_of_any_name_is_the_completions():
    assert scores(lambda texts: [len(t) for t in texts]).total_B.tolist() == [2, 1, 0]
    assert scores(lambda completion_ids: [sum(i) for i in completion_ids]).total_B.tolist() == [2, 2, 0]


@pytest.mark.parametrize(
    "call", [lambda prompt: [0, 0, 0], lambda completions, anwser: [0, 0, 0], lambda answr: [0] * 3]
)
def test_a_misspelt_parameter_is_named(call):
    with pytest.raises(RewardError, match=r"asks for '(prompt|anwser|answr)'.*did you mean '(prompts|answer)'\?"):
        scores(call)


def test_objects_modules_and_partials():
    class Model(torch.nn.Module):
        def forward(self, completions, answer):
            return torch.tensor([float(c == a) for c, a in zip(completions, answer, strict=True)])

    assert scores(Model()).total_B.tolist() == [1, 0, 1]
    found = scores(functools.partial(right, answer=["b", "b", "b"]))
    assert found.total_B.tolist() == [0, 1, 0]  # what the partial binds, no column takes
    assert list(scores(Model(), right, right, lambda x: [0, 0, 0]).columns) == ["Model", "right", "right_2", "lambda"]


# ---- what it may return ----


def test_names_are_distinct():
    def f(completions):
        return [1.0 for _ in completions]

    def g(completions):
        return [2.0 for _ in completions]

    g.__name__ = "f_3"
    assert RewardFunctions([f, g, f, f]).names == ["f", "f_3", "f_2", "f_4"]


def test_weights_and_columns():
    found = scores(length, right, weights=[0.5, -2])
    assert found.total_B.tolist() == [0.5 * 2 - 2, 0.5, -2]
    assert {name: column.tolist() for name, column in found.columns.items()} == {
        "length": [2, 1, 0],
        "right": [1, 0, 1],
    }
    assert found.total_B.dtype == torch.float32


@pytest.mark.parametrize(
    "returned",
    [
        [1, 2, 3],
        (1.0, 2.0, 3.0),
        torch.tensor([1.0, 2.0, 3.0]),
        np.array([1, 2, 3]),
        [np.float32(1), torch.tensor(2.0), 3],
    ],
)
def test_lists_arrays_and_tensors(returned):
    assert scores(lambda completions: returned).total_B.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1, 2], "reward function bad must return one number for each of the 3 completions, found 2 (completion 2, prompt 'third')"),
        ([1, 2, 3, 4], "found 4 (completion 2"),
        (1.0, "must return a list of 3 numbers, found 1.0"),
        ("123", "must return a list of 3 numbers, found '123'"),
        (None, "must return a list of 3 numbers, found None"),
        ([1, None, 3], "must return numbers, found None (completion 1, prompt 'second')"),
        ([1, "2", 3], "must return numbers, found '2' (completion 1"),
        ([1, 2, float("nan")], "must return finite numbers, found nan (completion 2, prompt 'third')"),
        (torch.tensor([1, float("inf"), 3]), "must return finite numbers, found inf (completion 1"),
        ([1, 1e39, 3], "must return finite numbers, found 1e+39 (completion 1"),
        ([1, 10**400, 3], "must return finite numbers, found 10000000000000000000 (completion 1"),
        (torch.zeros(3, 1), "must return numbers, found [0.0] (completion 0"),
    ],
)  # fmt: skip
def test_bad_values_are_named(returned, message):
    def bad(completions):
        return returned

    with pytest.raises(RewardError, match=re.escape(message)):
        scores(right, bad)


def test_an_exception_names_the_completion():
    def divides(completions):
        return [1 / len(c) for c in completions]

    line = divides.__code__.co_firstlineno + 1
    message = (
        f"divides raised ZeroDivisionError: division by zero at {__file__}, line {line} (completion 2, prompt 'third')"
    )
    with pytest.raises(RewardError, match=re.escape(message) + "$") as caught:
        scores(divides, find_failing=True)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def says_much(completions):
        raise RuntimeError("first line\n  second line")

    with pytest.raises(
        RewardError, match=r"RuntimeError: first line second line at .* \(completion 0, prompt 'first'\)"
    ):
        scores(says_much)


def test_a_failing_function_is_not_called_again_unless_that_is_wanted():
    """A judge may cost money."""
    calls = []

    def judge(completions):
        calls.append(len(completions))
        raise RuntimeError("over quota")

    message = (
        f"judge raised RuntimeError: over quota at {__file__}, line {judge.__code__.co_firstlineno + 2} "
        "(completion 0, prompt 'first'), the first of 3 completions; "
        "find_failing=True calls it again, one completion at a time, and names the one that fails"
    )
    with pytest.raises(RewardError, match=f"^{re.escape(message)}$"):
        scores(judge)
    assert calls == [3]
    with pytest.raises(RewardError, match=r"over quota at .* \(completion 0, prompt 'first'\)$"):
        scores(judge, find_failing=True)
    assert calls == [3, 3, 1]


def test_an_exception_of_the_batch_only():
    def needs_one(completions):
        if len(completions) > 1:
            raise RuntimeError("too many")
        return [0]

    with pytest.raises(RewardError, match=r"needs_one raised RuntimeError: too many .*no completion fails alone"):
        scores(needs_one, find_failing=True)


def test_an_exception_deeper_down_names_the_functions_own_line():
    def parses(completions):
        return [json.loads(c) for c in completions]

    line = parses.__code__.co_firstlineno + 1
    with pytest.raises(RewardError, match=rf"raised JSONDecodeError: .* at {re.escape(__file__)}, line {line} "):
        scores(parses)


def test_a_function_written_for_messages_is_told_of_texts():
    def of_trl(completions, **kwargs):
        return [float(len(completion[0]["content"])) for completion in completions]

    with pytest.raises(RewardError, match=r"raised TypeError.*; completions are texts here, .*completion in place of"):
        scores(of_trl)

    def with_another_mistake(completions):
        return [len(5) for _ in completions]

    with pytest.raises(RewardError, match="raised TypeError") as caught:
        scores(with_another_mistake)
    assert "texts here" not in str(caught.value)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completions, answer: None, None),
        (lambda completions, answers: None, "asks for 'answers', which is no column .*; did you mean 'answer'"),
        (
            lambda completions, hint: None,
            r"data\[1\] must have the column 'hint', which lambda asks for and other rows",
        ),
        (lambda completions, hint=None: None, None),
        (lambda completions, **kwargs: None, None),
        (lambda completions, prompt_ids, completion_ids, prompts: None, None),
        (lambda completions, prompt: None, "asks for 'prompt'"),
        (len, None),
    ],
)
def test_columns_are_looked_at_before_anything_is_sampled(function, message):
    rows = [{"prompt": "a", "answer": "b", "hint": "c"}, {"prompt": "a", "answer": "b"}]
    with contextlib.nullcontext() if message is None else pytest.raises(RewardError, match=message):
        RewardFunctions(function).check(rows, "data")


def test_a_judges_columns_are_looked_at_too():
    with pytest.raises(RewardError, match="preference function lambda asks for 'answer', which is no column"):
        PreferenceFunction(lambda pairs, answer: None).check([{"prompt": "a"}], "data")


def test_each_functions_score_is_shown_where_there_are_several():
    def length(completions):
        return [len(c) for c in completions]

    def one(completions):
        return [1.0] * len(completions)

    rows = {"completions": ["ab", "c"], "prompts": ["p", "q"]}
    assert RewardFunctions(length)(rows).shown == {"reward": [2.0, 1.0]}
    both = RewardFunctions([length, one], weights=[1, 0.5])(rows).shown
    assert both == {"reward": [2.5, 1.5], "reward/length": [2.0, 1.0], "reward/one": [1.0, 1.0]}


def test_long_prompts_are_shortened():
    with pytest.raises(RewardError) as caught:
        RewardFunctions(lambda completions: [None])({"completions": ["a"], "prompts": ["x" * 5000]})
    assert len(str(caught.value)) < 250


def mean(completions):
    return [0.0 for _ in completions]


@pytest.mark.parametrize(
    ("functions", "options", "error", "message"),
    [
        ([], {}, ValueError, "found none"),
        (["f"], {}, TypeError, "found str"),
        ([length], {"weights": [1, 2]}, ValueError, "one for each of the 1 functions, found 2"),
        ([length], {"weights": [float("nan")]}, ValueError, "reward_weights must be finite"),
        ([length], {"timeout": 0}, ValueError, "timeout must be finite and above 0"),
        ([length], {"weights": "a"}, TypeError, "reward_weights must be numbers, one for each function, found 'a'"),
        ([length], {"weights": 2.0}, TypeError, "reward_weights must be numbers, one for each function, found 2.0"),
        ([mean], {}, ValueError, "reward_fn must not be called 'mean': reward/mean is a metric of all functions"),
    ],
)
def test_bad_functions(functions, options, error, message):
    with pytest.raises(error, match=message):
        RewardFunctions(functions, **options)


# ---- time ----


def loops(completions):
    while True:
        with contextlib.suppress(Exception):  # what it does with its own errors must not save it
            sum(range(1000))


def sleeps(completions):
    time.sleep(60)


@pytest.mark.parametrize("hangs", [loops, sleeps])
def test_a_hanging_reward_is_stopped(hangs):
    before = signal.getsignal(signal.SIGALRM)
    start = time.monotonic()
    message = rf"{hangs.__name__} must return within timeout=0\.2 seconds for 3 completions.*prompt 'first'"
    with pytest.raises(RewardError, match=message):
        scores(hangs, timeout=0.2)
    assert time.monotonic() - start < 30
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_hanging_reward_is_stopped_in_another_thread():
    caught = []

    def work():
        try:
            scores(loops, timeout=0.2)
        except RewardError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert len(caught) == 1
    assert not [t for t in threading.enumerate() if t.name == "reward"], "the loop must have ended"


def test_in_time_nothing_changes():
    assert scores(length, timeout=10).total_B.tolist() == [2, 1, 0]
    found = []
    thread = threading.Thread(target=lambda: found.append(scores(length, timeout=10)))
    thread.start()
    thread.join()
    assert found[0].total_B.tolist() == [2, 1, 0]


def test_somebody_elses_alarm_goes_on():
    rang = []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.4)
        scores(length, timeout=10)
        assert not rang
        until = time.monotonic() + 30
        while not rang and time.monotonic() < until:
            time.sleep(0.01)
        assert rang == [1]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---- preferences ----

PAIRS = [("aa", "b"), ("", "b")]
PROMPTS = {"prompts": ["p", "q"]}


def test_preferences():
    longer = PreferenceFunction(lambda pairs: [int(len(b) > len(a)) for a, b in pairs])
    assert longer(PAIRS) == [0, 1]
    assert PreferenceFunction(lambda pairs: torch.tensor([True, False]))(PAIRS) == [1, 0]
    assert PreferenceFunction(lambda pairs: [torch.tensor(True), torch.tensor(0)])(PAIRS) == [1, 0]
    assert PreferenceFunction(lambda pairs: [np.True_, np.int64(0)])(PAIRS) == [1, 0]


def test_a_judge_asks_for_columns_by_name():
    columns = {**PROMPTS, "answer": ["aa", "b"], "pairs": "a column of the dataset gives way"}

    def judge(pairs, answer, prompts):
        assert (pairs, answer, prompts) == (PAIRS, ["aa", "b"], ["p", "q"])
        return [int(b == wanted) for (_, b), wanted in zip(pairs, answer, strict=True)]

    assert PreferenceFunction(judge)(PAIRS, columns) == [0, 1]
    assert PreferenceFunction(lambda pairs, **rest: [len(rest), 0])(PAIRS, PROMPTS) == [1, 0]
    with pytest.raises(RewardError, match=r"preference function .* asks for 'answers'.*did you mean 'answer'"):
        PreferenceFunction(lambda pairs, answers: [0, 0])(PAIRS, columns)
    with pytest.raises(RewardError, match=r"asks for 'batch', which is no column of the rows; there are answer, pairs"):
        PreferenceFunction(lambda batch, **rest: [0, 0])(PAIRS, columns)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([0], "must return one number for each of the 2 pairs, found 1 (pair 1, prompt 'q')"),
        ([0, 2], "must return 0 or 1 (the index of the better) or 0.5 (a tie), found 2 (pair 1, prompt 'q')"),
        ([0.7, 1], "found 0.7 (pair 0, prompt 'p')"),
        ([None, 1], "found None"),
    ],
)
def test_bad_preferences(returned, message):
    with pytest.raises(RewardError, match=re.escape(message)):
        PreferenceFunction(lambda pairs: returned)(PAIRS, PROMPTS)


def test_a_preference_exception_names_the_pair():
    with pytest.raises(RewardError, match=r"lambda raised ZeroDivisionError.*\(pair 1, prompt 'q'\)"):
        PreferenceFunction(lambda pairs: [0 // len(a) for a, _ in pairs], find_failing=True)(PAIRS, PROMPTS)


# ---- code without a file ----


def of_notebook(text, name="reward"):
    """Return a function of a program that is in no file, as a cell of a notebook."""
    exec(text, names := {"__name__": "notebook"})
    return names[name]


SCORED = """
def score(c): return {0} * len(c) if c in {{'a', 'b', 'c'}} else 0.0
def reward(completions): return [score(c) for c in completions]
class Judge:
    def __call__(self, completions): return reward(completions)
judge = Judge()
"""


@pytest.mark.parametrize("name", ["reward", "judge"])
def test_a_function_without_a_file_has_a_hash_of_its_code_and_of_what_it_calls(name):
    first, same, other = (described(of_notebook(SCORED.format(n), name)) for n in (1.0, 1.0, 2.0))
    assert first.keys() == {"name", "sha256"}
    assert first == same
    assert first["sha256"] != other["sha256"]


def test_the_hash_of_code_is_the_same_in_every_process():
    show = f"from strop.rewards import described\n{SCORED.format(1.0)}\nprint(described(reward)['sha256'])"
    found = set()
    for seed in ("1", "2", "3"):  # of Python's hashes, by which sets are ordered
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        found.add(subprocess.run([sys.executable, "-c", show], env=environment, capture_output=True, text=True).stdout)
    assert len(found) == 1
    assert len(found.pop().strip()) == 64


def test_functions_that_call_each_other_have_a_hash():
    text = "def a(x): return b(x)\ndef b(x): return a(x)\ndef reward(completions): return a(completions)"
    assert len(described(of_notebook(text))["sha256"]) == 64
    assert described(len) == {"name": "len"}
