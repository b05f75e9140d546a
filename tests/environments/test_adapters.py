"""Games of gymnasium and textarena as text, and the tool that runs Python."""

import pytest
from chat_templates import tokenizer

from strop.environments.adapters import Blackjack, FrozenLake, Taxi, textarena_game
from strop.environments.python_tool import python_tool
from strop.environments.tools import ToolBox


def test_frozen_lake_is_walked_in_words():
    pytest.importorskip("gymnasium")
    lake = FrozenLake()
    first = lake.reset({"seed": 0})
    assert first.endswith("Answer with one of: left, down, right, up.\n[S]FFF\nFHFH\nFFFH\nHFFG\n")
    for word in ("down", "I go Down.", "right", "down", "right"):
        turn = lake.step(word)
        assert (turn.reward, turn.done) == (0.0, False)
    assert "HF[F]G" in turn.messages
    won = lake.step("right")
    assert (won.reward, won.done) == (1.0, True)


def test_unknown_actions_get_an_answer():
    pytest.importorskip("gymnasium")
    lake = FrozenLake()
    lake.reset({"seed": 0})
    turn = lake.step("jump")
    assert (turn.info, turn.done, turn.reward) == ({"invalid": 1}, False, 0.0)
    assert turn.messages == "Answer with one of: left, down, right, up.\n"


def test_blackjack_and_taxi():
    pytest.importorskip("gymnasium")
    cards = Blackjack()
    assert "the dealer shows" in cards.reset({"seed": 1})
    assert cards.step("stick").done
    taxi = Taxi()
    assert "|" in taxi.reset({"seed": 1})
    assert taxi.step("pickup").reward in (-10.0, -1.0)


def test_the_same_seed_is_the_same_game():
    pytest.importorskip("gymnasium")
    assert Blackjack().reset({"seed": 5}) == Blackjack().reset({"seed": 5})
    train, test = (Blackjack.rows(split, 50) for split in ("train", "test"))
    assert not {row["seed"] for row in train} & {row["seed"] for row in test}


def test_textarena_says_only_what_is_new():
    pytest.importorskip("textarena")
    game = textarena_game("GuessTheNumber-v0")()
    assert "guess the number between 1 and 20" in game.reset({"seed": 3})
    turn = game.step("[10]")
    assert turn.messages.strip() in ("[GAME] The target number is lower.", "[GAME] The target number is higher.")
    for guess in range(1, 21):
        turn = game.step(f"[{guess}]")
        if turn.done:
            break
    assert turn.done
    assert -1 <= turn.reward <= 1


def test_a_package_that_is_missing_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ImportError, match=r"needs gymnasium; .*pip install .*\[games\]"):
        FrozenLake().reset({"seed": 0})


# ---- Python as a tool ----


@pytest.fixture(scope="module")
def python():
    return python_tool(seconds=20)


def test_what_is_printed_is_the_answer(python):
    assert python("print(6 * 7)\nprint('so')") == "42\nso"
    assert python("print('ü' * 9000)") == "ü" * 4000
    assert python("open('x', 'w').write('1'); print(open('x').read())") == "1"
    assert ToolBox([python], tokenizer("qwen")).tools[0]["function"]["name"] == "python"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("print(", "SyntaxError"),
        ("import socket; socket.socket()", "does not allow socket"),
        ("import subprocess; subprocess.run(['true'])", "does not allow subprocess"),
        ("import os; os.system('true')", "does not allow os.system"),
        ("open('/tmp/strop_tool_test', 'w')", "own folder only"),
        ("import os; os.symlink('a', 'b')", "does not allow os.symlink"),
        ("x = bytearray(4 << 30)", "MemoryError"),
        ("while True: print('x' * 10**6)", "must print less than 1 MB"),
    ],
)
def test_what_is_refused_is_said(python, code, error):
    with pytest.raises(RuntimeError, match=error):
        python(code)


def test_code_that_never_ends_is_stopped():
    with pytest.raises(TimeoutError, match="must end within 1 seconds, found it still running"):
        python_tool(seconds=1)("import time; time.sleep(60)")
    with pytest.raises((TimeoutError, RuntimeError), match=r"still running|too much time"):
        python_tool(seconds=1)("while True: pass")
