"""Agents made of other packages, for `agent=`: MCP servers' tools, OpenEnv's clients, environments of `verifiers`.

    GRPO(model=model, tokenizer=tokenizer, agent=mcp_agent(["python", "server.py"]), reward_fn=reward_fn)
    GRPO(model=model, tokenizer=tokenizer, agent=openenv_agent(lambda row: EchoEnv("http://127.0.0.1:8000"), as_action))
    GRPO(model=model, tokenizer=tokenizer, agent=verifiers_agent("wordle"))

Connections, and servers that are commands, begin and end with the trajectory.
"""

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from strop._checks import is_conversation
from strop._install import missing
from strop._types import Json, Row
from strop.rewards.async_calls import post_json
from strop.tasks import split_of

Agent = Callable[[Row, Any], Any]


async def ask(client: Any, messages: Sequence[Json], **options: Any) -> Json:
    """Return the model's next message.

    client    what an agent is given: base_url and api_key
    options   further fields of the request, such as tools
    """
    body = {"model": "strop", "messages": messages, **options}
    answer = await post_json(f"{client.base_url}/chat/completions", body, client.api_key)
    message: Json = answer["choices"][0]["message"]
    return message


# ---- MCP ----


def mcp_agent(*servers: Any, max_calls: int = 8) -> Agent:
    """Return an agent whose tools are those of MCP servers. It ends with a reply without a call; reward_fn rewards it.

    servers     commands, such as ["python", "server.py"], addresses such as "http://127.0.0.1:8000/mcp", or whatever else
                `mcp.Client` takes
    max_calls   the most replies of the model
    """
    mcp = _package("mcp", "mcp")
    if not servers:
        raise ValueError("servers must be at least one MCP server, found none")

    async def agent(row: Row, client: Any) -> None:
        async with contextlib.AsyncExitStack() as stack:
            owners: dict[str, Any] = {}
            tools = []
            for server in servers:
                opened = await stack.enter_async_context(mcp.Client(_as_server(mcp, server)))
                for tool in await _tools_of(opened):
                    if tool.name in owners:
                        raise ValueError(f"tools of MCP servers must have different names, found {tool.name!r} twice")
                    owners[tool.name] = opened
                    about = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                    tools.append({"type": "function", "function": about})
            messages = _first_messages(row)
            for _ in range(max_calls):
                said = await ask(client, messages, tools=tools)
                messages.append(said)
                calls = said.get("tool_calls") or []
                for call in calls:
                    name = call["function"]["name"]
                    text = await _called(owners.get(name), name, json.loads(call["function"]["arguments"]))
                    messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": text})
                if not calls:
                    break

    agent.__name__ = "mcp_agent"
    return agent


def _as_server(mcp: ModuleType, server: Any) -> Any:
    if not isinstance(server, (list, tuple)):
        return server
    return mcp.StdioServerParameters(command=str(server[0]), args=[str(word) for word in server[1:]])


async def _tools_of(opened: Any) -> list[Any]:
    page = await opened.list_tools()
    found = list(page.tools)
    while page.next_cursor:
        page = await opened.list_tools(cursor=page.next_cursor)
        found += page.tools
    return found


async def _called(owner: Any, name: str, arguments: Json) -> str:
    """Return a tool's result as the model reads it. A call that fails has its error as the result."""
    if owner is None:
        return f"error: there is no tool {name!r}"
    try:
        result = await owner.call_tool(name, arguments)
    except Exception as error:  # of any kind: the server's, or of the call's arguments
        return f"error: {type(error).__name__}: {error}"
    text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
    return f"error: {text}" if result.is_error else text


# ---- OpenEnv ----


def openenv_agent(
    make: Callable[[Row], Any],
    as_action: Callable[[str], Any],
    as_text: Callable[[Any], str] = str,
    max_turns: int = 8,
) -> Agent:
    """Return an agent that plays an environment behind an OpenEnv client. Its reward is the sum of the environment's.

    make        row → client, such as EchoEnv("http://127.0.0.1:8000"). A row's `seed` goes to its reset
    as_action   the model's reply → an action of the environment
    as_text     an observation → what the model reads
    """
    _package("openenv", "openenv")

    async def agent(row: Row, client: Any) -> float:
        total, messages = 0.0, _first_messages(row) if "prompt" in row else []
        async with make(row) as environment:
            found = await environment.reset(**({"seed": row["seed"]} if "seed" in row else {}))
            for _ in range(max_turns):
                messages.append({"role": "user", "content": as_text(found.observation)})
                said = await ask(client, messages)
                messages.append(said)
                found = await environment.step(as_action(said["content"] or ""))
                total += float(found.reward or 0.0)
                if found.done:
                    break
        return total

    agent.__name__ = "openenv_agent"
    return agent


# ---- verifiers ----


def verifiers_agent(environment: Any, **arguments: Any) -> Agent:
    """Return an agent that plays an environment of `verifiers`, whose rewards are its own. `agent.rows` are its rows.

    environment   of verifiers 0.4: a taskset's name, an EnvConfig, or the fields of one, such as
                  {"taskset": {"id": "gsm8k-v1"}, "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}.
                  Before 0.4: an environment, or its name for load_environment
    arguments     of load_environment
    """
    verifiers = _package("verifiers", "verifiers")
    if isinstance(environment, str) and hasattr(verifiers, "load_environment"):
        environment = verifiers.load_environment(environment, **arguments)
    elif arguments:
        raise TypeError(f"verifiers_agent takes the environment alone here, found {', '.join(arguments)} too")
    agent = _older_environment(environment) if hasattr(environment, "run_rollout") else _taskset_agent(environment)
    agent.__name__ = "verifiers_agent"
    return agent


def _taskset_agent(environment: Any) -> Agent:
    """Return the agent of a taskset of verifiers 0.4 with its harness."""
    v1: Any = __import__("verifiers.v1").v1
    fields = {"taskset": {"id": environment}} if isinstance(environment, str) else environment
    config = v1.resolve_env_config(fields)
    taskset = v1.load_environment(config).taskset
    if not taskset.bounded:
        raise ValueError("the taskset must be finite, found one without an end")
    tasks = list(taskset)

    async def agent(row: Row, client: Any) -> dict[str, float]:
        name = f"STROP_API_KEY_{secrets.token_hex(8)}"  # where verifiers reads a key; programs do not inherit *API_KEY*
        os.environ[name] = client.api_key
        try:
            context = v1.ModelContext("strop", v1.EvalClientConfig(base_url=client.base_url, api_key_var=name))
            environment = v1.load_environment(config)  # with its own servers, which end with the trajectory
            async with environment.serving():
                episode = await environment.run_episode(tasks[row["task"]], context)
        finally:
            del os.environ[name]
        for failed in (*episode.traces, episode):
            if not failed.ok:
                raise RuntimeError(_told(failed.last_error))
        ours = [trace for trace in episode.traces if trace.agent.config.client.base_url == client.base_url]
        if idle := [trace.agent.name for trace in ours if not trace.agent.trainable]:
            raise ValueError(f"the seat {idle[0]} must have a client of its own, since it is not trained")
        rewards = [
            (name, reward.value / len(ours)) for trace in ours for name, reward in trace.rewards.items() if reward
        ]
        return {name: sum(value for other, value in rewards if other == name) for name, _ in rewards}

    def rows(split: str = "train", limit: int | None = None) -> list[Json]:
        """Return the tasks as rows; one in ten is held out."""
        return [{"task": i} for i, task in enumerate(tasks) if split_of(task.key) == split][:limit]

    agent.rows = rows  # type: ignore[attr-defined]
    return agent


def _older_environment(environment: Any) -> Agent:
    """Return the agent of an environment before verifiers 0.4."""
    from openai import AsyncOpenAI
    from verifiers.clients import OpenAIChatCompletionsClient, OpenAICompletionsClient

    if environment.requires_group_rollouts:
        raise ValueError("the environment must reward each rollout alone, found rewards of whole groups")
    wraps = OpenAIChatCompletionsClient if environment.message_type == "chat" else OpenAICompletionsClient

    async def agent(row: Row, client: Any) -> float:
        async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as openai:
            output = await environment.run_rollout({"example_id": 0, **row}, wraps(openai), "strop", {})
        if output.get("error") is not None:
            raise RuntimeError(_told(output["error"]))
        return float(output["reward"])

    def rows(split: str = "train", limit: int | None = None) -> list[Json]:
        """Return the environment's dataset, or for any other split than "train" that of its evaluation."""
        found = environment.get_dataset() if split == "train" else environment.get_eval_dataset()
        return list(found.select(range(min(limit, len(found)))) if limit else found)

    agent.rows = rows  # type: ignore[attr-defined]
    return agent


def _told(error: Any) -> str:
    return " ".join(str(getattr(error, "message", error)).split())[:500]


def _first_messages(row: Row) -> list[Json]:
    if (prompt := row.get("prompt")) is None:
        raise ValueError(f"the row must have a prompt, found the columns {', '.join(map(str, row)) or '(none)'}")
    return [dict(one) for one in prompt] if is_conversation(prompt) else [{"role": "user", "content": prompt}]


def _package(name: str, extra: str) -> ModuleType:
    try:
        return __import__(name)
    except ImportError as error:
        raise missing("this agent", str(error.name), extra) from None
