"""Judges: an OpenAI-compatible model that scores completions, or compares pairs of them.

judge = Judge("http://127.0.0.1:8000/v1", "my-judge", cache="judged")
GRPO(reward_fn=judge, …)              # one question for each completion
OnlineDPO(preference_fn=judge, …)     # two for each pair: in both orders
"""

import asyncio
import collections
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from strop._checks import is_conversation
from strop._types import Json
from strop.rewards.async_calls import post_json

SCORE = """Rate how well the answer meets the request, from 0 (useless) to 10 (perfect).

# Request
{prompt}

# Answer
{completion}

Reply with the number alone."""
COMPARE = """Which answer meets the request better?

# Request
{prompt}

# Answer A
{first}

# Answer B
{second}

Reply with A, B or tie alone."""


class Judge:
    """A reward function, and a preference function, that asks a model.

    url       the address of the server; it ends in /v1
    model     the model's name there
    prompt    a text with {prompt}, {completion} and columns of the dataset; of pairs with {first} and {second}. Or a function
              with such parameters that returns a text or messages. None asks for a number from 0 to 10, or for A, B or tie
    parse     the reply → the reward; of pairs → 0 (the first is better), 1 (the second is) or 0.5 (a tie). It raises for a
              reply that says neither. None reads what the default prompts ask for; a number from 0 to 10 becomes 0 to 1
    cache     a folder of answers by the content of their request, which is asked only once; None keeps none
    api_key   sent to the server
    options   further fields of the request, such as max_tokens; temperature is 0 without one

    A pair is asked in both orders. Where these contradict each other, the pair ties.
    """

    __name__ = "judge"

    def __init__(
        self, url: str, model: str, *, prompt: str | Callable[..., Any] | None = None,
        parse: Callable[[str], float] | None = None, cache: str | Path | None = None, api_key: str | None = None,
        **options: Any,
    ):  # fmt: skip
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, found {url!r}")
        self.url, self.model, self.prompt, self.parse, self._api_key = url.rstrip("/"), model, prompt, parse, api_key
        self.cache = None if cache is None else Path(cache).absolute()
        self.options = {"temperature": 0.0, **options}
        self._counts: collections.Counter[str] = collections.Counter()
        self._running: dict[object, asyncio.Future[str]] = {}

    @property
    def settings(self) -> object:
        """What decides its answers besides its code, for run.json."""
        return self.url, self.model, self.prompt if isinstance(self.prompt, str) else None, self.options

    def take_metrics(self) -> dict[str, float]:
        """Return the numbers of requests, cached answers and tokens since the last time."""
        counts, self._counts = self._counts, collections.Counter()
        return {name: counts[name] for name in ("requests", "cached_answers", "prompt_tokens", "completion_tokens")}

    async def __call__(self, prompt: Any, completion: Any = None, pair: Any = None, **columns: Any) -> float:
        """Return the reward of a completion, or which of a pair is better."""
        texts = {**columns, "prompt": _as_text(prompt)}
        if pair is None:
            texts["completion"] = _as_text(completion)
            return await self._judged(texts, SCORE, _number)
        first, second = map(_as_text, pair)
        forth, back = await asyncio.gather(
            self._judged({**texts, "first": first, "second": second}, COMPARE, _choice),
            self._judged({**texts, "first": second, "second": first}, COMPARE, _choice),
        )
        return 0.5 if forth == back else float(forth > back)

    async def _judged(self, texts: Mapping[str, Any], prompt: str, parse: Callable[[str], float]) -> float:
        template = prompt if self.prompt is None else self.prompt
        asked = template.format(**texts) if isinstance(template, str) else template(**texts)
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        body = {"model": self.model, "messages": messages, **self.options}
        key = hashlib.sha256(json.dumps([self.url, body], sort_keys=True).encode()).hexdigest()
        file = None if self.cache is None else self.cache / key[:2] / f"{key}.json"
        read = self.parse or parse
        if file is not None and file.is_file():
            self._counts["cached_answers"] += 1
            return read(json.loads(file.read_text(encoding="utf-8"))["reply"])
        reply = await self._reply((asyncio.get_running_loop(), key), body)
        value = read(reply)  # a reply that cannot be read is not kept
        if file is not None:
            _write(file, {"request": body, "reply": reply})
        return value

    async def _reply(self, key: object, body: Json) -> str:
        """Return the model's reply. Equal requests at the same time are one."""
        if key not in self._running:
            self._running[key] = asyncio.ensure_future(self._ask(body))
            self._running[key].add_done_callback(lambda _: self._running.pop(key))
        return await asyncio.shield(self._running[key])

    async def _ask(self, body: Json) -> str:
        answer = await post_json(f"{self.url}/chat/completions", body, self._api_key)
        self._counts["requests"] += 1
        for name in ("prompt_tokens", "completion_tokens"):
            self._counts[name] += (answer.get("usage") or {}).get(name, 0)
        try:
            reply = answer["choices"][0]["message"]["content"]
        except (KeyError, TypeError, IndexError):
            reply = None
        if not isinstance(reply, str):
            raise ValueError(f"{self.url} must answer with a message, found {json.dumps(answer):.200}")
        return reply


def _as_text(value: object) -> str:
    if isinstance(value, str):
        return value
    if is_conversation(value):
        return "\n".join(f"{one['role']}: {one.get('content') or ''}" for one in value)
    raise TypeError(f"a judge reads texts, which need a tokenizer, found {type(value).__name__}")


def _number(reply: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(?:\s*/\s*10)?\.?", reply.strip())
    if found is None or float(found[1]) > 10:
        raise ValueError(f"the judge must reply with a number from 0 to 10, found {reply!r:.200}")
    return float(found[1]) / 10


def _choice(reply: str) -> float:
    found = {"a": 0.0, "b": 1.0, "tie": 0.5}.get(reply.strip(" \n.*\"'").lower())
    if found is None:
        raise ValueError(f"the judge must reply with A, B or tie, found {reply!r:.200}")
    return found


def _write(file: Path, found: Json) -> None:
    """Write a file in one step, since several processes may share the folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as unfinished:
        json.dump(found, unfinished, ensure_ascii=False)
    os.replace(unfinished.name, file)
