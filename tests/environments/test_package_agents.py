"""Agents of other packages, against the real ones: MCP servers over stdio and HTTP, OpenEnv clients, verifiers.

`make test-agents` installs the packages; elsewhere these tests are skipped.
"""

import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from chat_templates import tokenizer
from tiny_models import llama

from strop import GRPO
from strop.environments import EnvironmentFailure, TurnsConfig
from strop.environments.package_agents import mcp_agent, openenv_agent, verifiers_agent
from strop.environments.recorder import Recorder
from strop.models import as_policy
from strop.rollout import Sampler, Sampling
from strop.rollout.served_model import ToolCall

SERVER = """
import os, sys
sys.path.append({packages!r})
from mcp.server import MCPServer
server = MCPServer("numbers")
@server.tool()
def add(a: int, b: int) -> str:
    "Add two numbers."
    return f"the sum is {a + b}"
@server.tool()
def who() -> str:
    "The server's process."
    return f"process {os.getpid()}"
@server.tool()
def fail() -> str:
    "Raise."
    raise RuntimeError("out of order")
if sys.argv[1:2] == ["http"]:
    import uvicorn
    uvicorn.run(server.streamable_http_app(), port=int(sys.argv[2]))
else:
    server.run("stdio")
"""


@pytest.fixture(scope="module")
def policy():
    tokens = tokenizer("qwen")
    return as_policy(llama(eos_token_id=tokens.eos_token_id, vocab_size=len(tokens), max_length=2000), tokens)


def record(policy, agent, calls=(), rows=({"prompt": "what?"},), num_samples=2):
    """Play the agent; the model's replies are taken for these calls."""
    recorder = Recorder(agent, Sampler(policy), policy, TurnsConfig(environment_timeout=60.0))
    recorder.served.parse_calls = lambda reply: list(calls)
    for one in (found := recorder(list(rows), Sampling(max_new_tokens=4), num_samples, 0)):
        one.turns = one.turns or []
    return found


def given_text(policy, one):
    return policy.tokenizer.decode(one.ids_T[~one.loss_mask_T])


def file_of(tmp_path):
    path = tmp_path / "server.py"
    packages = str(Path(__import__("mcp").__file__).parents[1])  # a server's process does not get PYTHONPATH
    path.write_text(SERVER.replace("{packages!r}", repr(packages)))
    return path


def test_tools_of_an_mcp_server_that_is_a_command(policy, tmp_path):
    pytest.importorskip("mcp")
    agent = mcp_agent([sys.executable, file_of(tmp_path)], max_calls=3)
    calls = [ToolCall("add", {"a": 2, "b": 3}), ToolCall("fail", {}), ToolCall("who", {}), ToolCall("other", {})]
    found = record(policy, agent, calls)
    processes = set()
    for one in found:
        text = given_text(policy, one)
        assert (one.info["agent/calls"], one.info["agent/sequences"]) == (3, 1)
        assert text.count("the sum is 5") == 2  # the third reply's results are not read
        assert text.count("error: Error executing tool fail") == text.count("error: there is no tool 'other'") == 2
        assert '"description": "Add two numbers."' in text
        processes |= {int(word.split()[0]) for word in text.split("process ")[1:] if word[0].isdigit()}
        assert not one.turns
    assert len(processes) == 2  # a server for each trajectory
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_tools_of_an_mcp_server_over_http(policy, tmp_path):
    pytest.importorskip("mcp")
    import subprocess

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = subprocess.Popen([sys.executable, str(file_of(tmp_path)), "http", str(port)], stderr=subprocess.DEVNULL)
    try:
        wait_for(port)
        agent = mcp_agent(f"http://127.0.0.1:{port}/mcp", max_calls=2)

        def right(completions):
            return [float(len(text)) for text in completions]

        recorded = record(policy, agent, [ToolCall("add", {"a": 20, "b": 3})])
        assert all("the sum is 23" in given_text(policy, one) for one in recorded)
        trainer = GRPO(
            model=policy.model, tokenizer=policy.tokenizer, agent=agent, reward_fn=right, group_size=2, max_new_tokens=4
        )
        assert trainer.train_step([{"prompt": "what?"}])["agent/calls"] == 1  # a reply of noise has no call
    finally:
        started.terminate()
        started.wait()


def test_an_environment_behind_an_openenv_client(policy):
    pytest.importorskip("openenv")
    import uvicorn
    from openenv.core import GenericEnvClient
    from openenv.core.env_server import Action, Environment, Observation, State
    from openenv.core.env_server.http_server import create_fastapi_app

    class Say(Action):
        text: str

    class Heard(Observation):
        text: str = ""

    closed = []

    class Count(Environment):
        """Rewards 1 for each of three turns."""

        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **options):
            self.turns = 0
            return Heard(text=f"begin {seed}")

        def step(self, action, timeout_s=None, **options):
            self.turns += 1
            return Heard(text=f"heard {len(action.text)}", reward=1.0, done=self.turns == 3)

        @property
        def state(self):
            return State(step_count=self.turns)

        def close(self):
            closed.append(self.turns)

    app = create_fastapi_app(Count, Say, Heard, max_concurrent_envs=8)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    threading.Thread(target=server.run, daemon=True).start()
    try:
        wait_for(port)
        agent = openenv_agent(
            lambda row: GenericEnvClient(base_url=f"http://127.0.0.1:{port}"), lambda reply: {"text": reply},
            lambda observation: observation["text"],
        )  # fmt: skip
        found = record(policy, agent, rows=[{"seed": 7}, {"seed": 8}])
        for one, seed in zip(found, (7, 7, 8, 8), strict=True):
            text = given_text(policy, one)
            assert f"begin {seed}" in text
            assert text.count("heard") == 2
            assert (one.turns[0].reward, one.info["agent/calls"], one.info["agent/sequences"]) == (3.0, 3, 1)
        deadline = time.monotonic() + 20
        while len(closed) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert closed[:4] == [3] * 4
    finally:
        server.should_exit = True


TASKSET = """
import verifiers.v1 as vf
from openai import AsyncOpenAI

class Data(vf.TaskData):
    secret: int

class Count(vf.Task[Data, vf.State]):
    @vf.reward
    async def turns(self, task, trace) -> float:
        return trace.num_turns / 10
    @vf.reward(weight=2.0)
    async def secret(self, task) -> float:
        if task.secret == 7:
            raise RuntimeError("out of order")
        return task.secret

class Counting(vf.Taskset[Count, vf.TasksetConfig]):
    def load(self):
        for secret in range(12):
            yield Count(Data(prompt=f"begin {secret}", secret=secret), self.config.task)

class Loop(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False
    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for turn in range(3):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages, temperature=0.1)
                messages += [answer.choices[0].message, {"role": "user", "content": f"heard {turn}"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

__all__ = ["Counting", "Loop"]
"""


@pytest.fixture
def counting(tmp_path, monkeypatch):
    """Fields of a taskset and a harness of verifiers 0.4, in a module of their own."""
    verifiers = pytest.importorskip("verifiers")
    if hasattr(verifiers, "load_environment"):
        pytest.skip("verifiers is older")
    (tmp_path / "counting_v1.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    return {"taskset": {"id": "counting-v1"}, "agent": {"runtime": {"type": "subprocess"}}}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_taskset_of_verifiers_and_its_harness(policy, counting):
    agent = verifiers_agent(counting)
    train, test = agent.rows("train"), agent.rows("test")
    assert sorted(row["task"] for row in (*train, *test)) == [*range(12)]
    assert agent.rows("train", 2) == train[:2]
    before = dict(os.environ)
    found = record(policy, agent, rows=[{"task": 3}, {"task": 5}])
    for one, task in zip(found, (3, 3, 5, 5), strict=True):
        text = given_text(policy, one)
        assert f"begin {task}" in text
        assert text.count("heard") == 2
        assert (one.info["agent/calls"], one.info["agent/sequences"]) == (3, 1)
        assert one.turns[0].reward == pytest.approx(0.3 + 2 * task)
        assert (one.info["agent/turns"], one.info["agent/secret"]) == (pytest.approx(0.3), 2 * task)
    assert dict(os.environ) == before  # no key stays behind
    with pytest.raises(EnvironmentFailure, match=r"agent verifiers_agent raised RuntimeError: .*out of order"):
        record(policy, agent, rows=[{"task": 7}])
    trainer = GRPO(model=policy.model, tokenizer=policy.tokenizer, agent=agent, group_size=2, max_new_tokens=4)
    assert trainer.train_step([{"task": 0}, {"task": 4}])["reward/mean"] == pytest.approx(4.3)
    with pytest.raises(TypeError, match="takes the environment alone here, found seed too"):
        verifiers_agent(counting, seed=1)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_an_older_environment_of_verifiers(policy, tmp_path, monkeypatch):
    vf = pytest.importorskip("verifiers")
    if not hasattr(vf, "load_environment"):
        pytest.skip("verifiers is newer")
    (tmp_path / "older_count.py").write_text("""
import verifiers as vf
from datasets import Dataset

class Count(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **options):
        if state["info"]["fails"]:
            raise vf.Error("out of order")
        return [{"role": "user", "content": f"heard {len(state['trajectory'])}"}]

def load_environment(num_turns=2, group=False):
    async def turns(state, answer):
        return len(state["trajectory"]) + float(answer)

    async def of_group(states):
        return [0.0 for _ in states]

    rows = [{"question": f"begin {i}", "answer": str(i), "info": {"fails": i == 4}} for i in range(5)]
    data = Dataset.from_list(rows)
    rubric = vf.Rubric(funcs=[of_group if group else turns], weights=[0.5])
    return Count(dataset=data, eval_dataset=data.select([0]), rubric=rubric, max_turns=num_turns)
""")
    monkeypatch.syspath_prepend(str(tmp_path))
    agent = verifiers_agent("older-count", num_turns=3)
    rows = agent.rows("train", 3)
    assert (len(agent.rows()), len(rows), len(agent.rows("test"))) == (5, 3, 1)
    for one, number in zip(record(policy, agent, rows=rows), (0, 0, 1, 1, 2, 2), strict=True):
        text = given_text(policy, one)
        assert f"begin {number}" in text
        assert text.count("heard") == 2
        assert (one.info["agent/calls"], one.info["agent/sequences"]) == (3, 1)
        assert one.turns[0].reward == (3 + number) / 2
    with pytest.raises(EnvironmentFailure, match=r"agent verifiers_agent raised RuntimeError: .*out of order"):
        record(policy, agent, rows=agent.rows()[4:])
    trainer = GRPO(model=policy.model, tokenizer=policy.tokenizer, agent=agent, group_size=2, max_new_tokens=4)
    assert trainer.train_step(agent.rows()[:2])["reward/mean"] == 1.75
    with pytest.raises(ValueError, match="must reward each rollout alone"):
        verifiers_agent("older-count", group=True)


def wait_for(port):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ImportError, match=r"this agent needs mcp; .*\[mcp\]"):
        mcp_agent("http://127.0.0.1:1/mcp")
