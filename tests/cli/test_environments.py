"""`strop train` and `strop generate` with environments and tools by name."""

import json
import sys
from pathlib import Path

import pytest

from strop.cli import main

ROOT = Path(__file__).resolve().parents[2]
GUESS = f"{ROOT}/examples/environments/guess.py:GuessANumber"


def run(*words):
    before, sys.argv = sys.argv, ["strop", *map(str, words)]
    try:
        main()
    except SystemExit as end:
        return end.code or 0
    finally:
        sys.argv = before
    return 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of two steps of examples/guess.yaml."""
    folder = tmp_path_factory.mktemp("guess") / "run"
    config = ROOT / "examples/guess.yaml"
    few = ["--num-steps", "2", "--eval-every", "2", "--batch-size", "4", "--quiet"]
    assert run("train", "grpo", "--config", config, "--environment", GUESS, "--output", folder, *few) == 0
    return folder


def test_a_run_by_name_needs_no_data(folder):
    told = json.loads((folder / "run.json").read_text())
    assert told["job"]["environment"] == GUESS
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert any("eval/environment/found" in line for line in lines)
    assert any(line.get("turns/mean", 0) >= 1 for line in lines)


def test_generate_shows_conversations(folder, capsys):
    words = ["generate", "--model", folder / "final", "--environment", GUESS, "--num-rows", 2, "--max-new-tokens", 1]
    assert run(*words, "--json") == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(answers) == 2
    assert [message["role"] for message in answers[0]["conversation"]][:2] == ["user", "assistant"]
    assert all(0 <= answer["reward"] <= 1 for answer in answers)
    assert run(*words) == 0
    assert "assistant: " in capsys.readouterr().out


def test_eval_plays(folder, capsys):
    """The same conversations as training's own evaluation: greedy, on held-out rows."""
    words = ["eval", folder / "final", "--environment", GUESS, "--num-rows", 40, "--batch-size", 16]
    assert run(*words, "--max-new-tokens", 1, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_rows"], list(found["rewards"])) == (40, ["environment"])
    assert run("generate", "--model", folder / "final", "--environment", GUESS, "--num-rows", 40, "--json") == 0
    rewards = [json.loads(line)["reward"] for line in capsys.readouterr().out.splitlines()]
    assert found["rewards"]["environment"]["mean"] == sum(rewards) / 40
    assert run(*words, "--max-turns", 1) == 0
    assert "] right, of 40" in capsys.readouterr().out


TOOLS = """
def mul(a: int) -> int:
    '''M.

    Args:
        a: a
    '''
    return a

class Silent:
    def reset(self, **row):
        self.count = 0

    def add(self, by: int) -> int:
        '''Add.

        Args:
            by: so many
        '''
        self.count += by
        return self.count

class Counter(Silent):
    def get_reward(self):
        return 0.5

def short(completions):
    return [float(len(text) < 9) for text in completions]

def longer(pairs, prompts):
    raise KeyError(f"asked of {len(pairs[0])} conversations")
"""


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    """A tiny Llama that has a chat template, a context of 400 tokens, and a file of tools."""
    from chat_templates import tokenizer
    from tiny_models import llama

    folder, tokens = tmp_path_factory.mktemp("chat"), tokenizer("qwen")
    llama(vocab_size=len(tokens), max_length=400, eos_token_id=tokens.eos_token_id).save_pretrained(folder)
    tokens.save_pretrained(folder)
    (folder / "mine.py").write_text(TOOLS)
    (folder / "rows.jsonl").write_text('{"prompt": "1?"}\n{"prompt": "2?"}\n')
    return folder


def test_eval_with_tools_and_with_methods_that_are_tools(chatting, capsys):
    """The columns are those that reward: functions and get_reward."""
    rows = ["--data", chatting / "rows.jsonl", "--split", "train", "--num-rows", 2, "--json"]
    mine = f"{chatting}/mine.py:"
    assert run("eval", chatting, *rows, "--tools", mine + "mul", "--reward", mine + "short") == 0
    assert list(json.loads(capsys.readouterr().out)["rewards"]) == ["short"]
    assert run("eval", chatting, *rows, "--environment", mine + "Counter", "--reward", mine + "short") == 0
    found = json.loads(capsys.readouterr().out)["rewards"]
    assert (list(found), found["Counter"]["mean"]) == (["short", "Counter"], 0.5)


def test_generate_needs_no_reward(chatting, capsys):
    rows = ["--data", chatting / "rows.jsonl", "--num-rows", 2, "--json"]
    silent = ["generate", "--model", chatting, *rows, "--environment", f"{chatting}/mine.py:Silent"]
    assert run(*silent) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert run(*silent, "--best-of", 2) == 1
    assert "reward_fn must be given: Silent has tools and no get_reward()" in capsys.readouterr().err


def test_generate_says_that_a_model_ended_at_once(chatting, capsys, monkeypatch):
    monkeypatch.setattr("strop.algorithms.best_of_n.BestOfN.generate", lambda self, rows: [""] * len(rows))
    for options, said in (((), "at once; it has a chat template: --chat\n"), (("--chat",), "at once\n")):
        assert run("generate", "--model", chatting, "--prompt", "a", *options) == 0
        assert capsys.readouterr().err.endswith(f"strop: the model ended every completion {said}")


def test_a_preference_is_asked_of_conversations(capsys, tmp_path, chatting):
    words = ["train", "online-dpo", "--model", "moe:tiny", "--environment", GUESS, "--max-new-tokens", 1, "--quiet"]
    words += ["--preference", f"{chatting}/mine.py:longer", "--num-steps", 1, "--output", tmp_path / "run"]
    assert run(*words) == 1
    assert "asked of 2 conversations" in capsys.readouterr().err


def test_sft_refuses_an_environment(tmp_path, capsys):
    assert run("train", "sft", "--model", "moe:tiny", "--task", "sorting", "--environment", GUESS) == 1
    assert "environment must not be given: sft has none" in capsys.readouterr().err


def test_an_agent_by_name(tmp_path, capsys):
    """Rows and tokenizer come from the function's attributes; eval files of an environment are refused beside it."""
    (tmp_path / "agent.py").write_text(
        f"import json, sys, urllib.request\nsys.path.insert(0, {str(ROOT / 'examples/environments')!r})\n"
        "from guess import GuessANumber\n"
        "def play(row, client):\n"
        "    body = json.dumps({'prompt': '2D?'}).encode()\n"
        "    head = {'Content-Type': 'application/json', 'Authorization': 'Bearer ' + client.api_key}\n"
        "    with urllib.request.urlopen(urllib.request.Request(client.base_url + '/completions', body, head)) as answer:\n"
        "        return {'long': float(len(json.load(answer)['choices'][0]['text']))}\n"
        "play.rows, play.tokenizer = GuessANumber.rows, GuessANumber.tokenizer\n"
    )
    agent = f"{tmp_path / 'agent.py'}:play"
    few = ["--num-steps", 2, "--eval-every", 2, "--batch-size", 2, "--group-size", 2, "--max-new-tokens", 2, "--quiet"]
    words = ["train", "grpo", "--model", "moe:tiny", "--agent", agent, "--output", tmp_path / "run", *few]
    assert run(*words) == 0
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert any("eval/agent/long" in line for line in lines)
    assert run(*words, "--environment", GUESS, "--overwrite") != 0
    assert "environment and tools must be None with an agent" in capsys.readouterr().err
    assert run("train", "online-dpo", "--model", "moe:tiny", "--agent", agent) != 0
    assert "agent must not be given: online-dpo has none" in capsys.readouterr().err
