"""Problems, splits and rewards of the built-in tasks."""

import subprocess
import sys

import pytest

from strop import tasks

ALL = tasks.available_tasks()


def solve(name, prompt):
    """Another way to the answer."""
    if name == "addition":
        a, b = prompt.removesuffix("=").split("+")
        return str(sum([int(a), int(b)]))
    if name == "sorting":
        digits = prompt.removesuffix(">")
        return "".join(d * digits.count(d) for d in "0123456789")
    text, closed = prompt.removesuffix(":"), ""
    while text:
        shorter = text
        for pair in ("()", "[]", "{}", "<>"):
            shorter = shorter.replace(pair, "")
        if shorter == text:
            closed += {"(": ")", "[": "]", "{": "}", "<": ">"}[text[-1]]
            text = text[:-1]
        else:
            text = shorter
    return closed


@pytest.mark.parametrize("name", ALL)
def test_answers_are_right_and_fit(name):
    task = tasks.get(name)
    for row in task.rows("train", 300, seed=3):
        assert row["answer"] == row["completion"] == solve(name, row["prompt"])
        assert 0 < len(task.tokenizer.encode(row["answer"])) < task.max_new_tokens
        assert task.tokenizer.decode(task.tokenizer.encode(row["prompt"])) == row["prompt"]


def test_problems_by_hand():
    assert [tasks.split_of(key) for key in ("1+2", "3+3")] == ["train", "test"]  # a problem stays where it is
    assert solve("brackets", "([]{<:") == ">})"
    first = tasks.get("addition", digits=1).rows("train", seed=0)
    assert len(first) == 91
    assert len(tasks.get("addition", digits=1).rows("test", seed=0)) == 9  # the other problems of the 100


def test_addition_in_another_form_is_the_same_problems():
    plain, spaced = tasks.get("addition"), tasks.get("addition", form="{a} + {b} =")
    assert plain.alphabet == "0123456789+="
    assert spaced.alphabet == "0123456789 +="
    for split in tasks.SPLITS:
        rows, others = plain.rows(split, 50), spaced.rows(split, 50)
        assert [r["prompt"].replace(" ", "") for r in others] == [r["prompt"] for r in rows]
        assert [r["answer"] for r in others] == [r["answer"] for r in rows]
    assert spaced.tokenizer.decode(spaced.tokenizer.encode("12 + 7 =")) == "12 + 7 ="


@pytest.mark.parametrize("name", ALL)
def test_splits_never_meet(name):
    task = tasks.get(name)
    train = {r["prompt"] for seed in range(3) for r in task.rows("train", 800, seed=seed)}
    test = {r["prompt"] for seed in range(3) for r in task.rows("test", 150, seed=seed)}
    assert not train & test
    assert len(test) > 150


def test_the_same_problem_in_other_words_is_in_the_same_split():
    addition = tasks.get("addition")
    train = {r["prompt"] for r in addition.rows("train", 3000)}
    for row in addition.rows("test", 300):
        a, b = row["prompt"].removesuffix("=").split("+")
        assert f"{b}+{a}=" not in train
    sorting = tasks.get("sorting", length=4)
    answers = {r["answer"] for r in sorting.rows("train", 3000)}
    assert not answers & {r["answer"] for r in sorting.rows("test", 300)}


@pytest.mark.parametrize("name", ALL)
def test_rows_are_different_and_repeat_with_the_seed(name):
    task = tasks.get(name)
    rows = task.rows("test", 60, seed=5)
    assert len({r["prompt"] for r in rows}) == 60
    assert rows == task.rows("test", 60, seed=5)
    assert rows[:20] == task.rows("test", 20, seed=5)
    assert rows != task.rows("test", 60, seed=6)


def test_options_set_how_hard_it_is():
    assert max(len(r["prompt"]) for r in tasks.get("addition", digits=3).rows(limit=200)) == len("999+999=")
    assert {len(r["prompt"]) for r in tasks.get("sorting", length=7).rows(limit=20)} == {8}
    assert max(len(r["prompt"]) for r in tasks.get("brackets", length=3).rows("train")) == 4
    assert tasks.get("sorting", length=7).max_new_tokens == 8


def test_rewards_are_exact():
    task = tasks.get("addition")
    completions = ["19", " 19\n", "1 9", "190", "019", "", "19 "]
    assert task.reward(completions, ["19"] * 7) == [1, 1, 0, 0, 0, 0, 1]
    assert task.reward(completions=[[{"role": "assistant", "content": "19"}]], answer=["19"]) == [1]
    with pytest.raises(ValueError, match=r"one answer per completion \(2\), found 1"):
        task.reward(["1", "2"], ["1"])
    with pytest.raises(TypeError, match=r"must be texts, found list: give the algorithm the task's tokenizer"):
        task.reward([[3, 4]], ["1"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: tasks.get("sortin"),
            "unknown task 'sortin' (did you mean 'sorting'?); there are addition, sorting, br",
        ),
        (lambda: tasks.get("zebra"), "unknown task 'zebra'; there are addition, sorting, brackets"),
        (lambda: tasks.get("sorting", lenght=3), "unknown option 'lenght' of task 'sorting' (did you mean 'length'?)"),
        (lambda: tasks.get("sorting", length=1), "length must be at least 2, found 1"),
        (lambda: tasks.get("addition", digits=19), "digits must be at most 18, found 19"),
        (
            lambda: tasks.get("addition", form="{a}+{c}"),
            "form must have {a} and {b} once each, found '{a}+{c}'",
        ),
        (lambda: tasks.get("sorting").rows("dev"), "split must be one of 'train', 'test', found 'dev'"),
        (lambda: tasks.get("sorting").rows("test", 0), "limit must be at least 1, found 0"),
        (lambda: tasks.get("addition", digits=1).rows("test", 10), "limit must be at most 9, all test problems of Add"),
        (lambda: tasks.get("reasoning_gym:leg_cunting"), "reasoning-gym"),
    ],
)
def test_errors_say_what_is_wrong(call, message):
    with pytest.raises((ValueError, ImportError)) as error:
        call()
    assert message in str(error.value)


def test_no_torch():
    program = "import sys, strop.tasks as t; t.get('sorting').rows('test', 5); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"


def test_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    task = tasks.get("reasoning_gym:leg_counting", max_animals=3)
    train, test = task.rows("train", 30), task.rows("test", 10)
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in test}
    assert task.rows("test", 10) == test
    answers = [r["answer"] for r in test]
    assert task.reward([f" {a}\n" for a in answers], [r["entry"] for r in test]) == [1.0] * 10
    assert task.reward(["no legs"], [test[0]["entry"]]) == [0.0]
