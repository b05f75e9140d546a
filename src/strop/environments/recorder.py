"""A recording endpoint: any program that talks to an OpenAI-compatible address can be trained.

    async def run_agent(row, client):
        openai = AsyncOpenAI(base_url=client.base_url, api_key=client.api_key)
        ...                                     # any framework, any number of calls
        return reward                           # a number or {name: number}; or None, and reward_fn says it

    GRPO(model=model, tokenizer=tokenizer, agent=run_agent, group_size=8)

The endpoint writes down the ids of every call: those the model read, those it drew, and the log-probs of those it drew.
A call that continues an earlier call of the same agent is appended to its sequence, without encoding anything twice. Any
other call begins a further sequence of the same episode (`Trajectory.others`).

Three kinds of threads take part: agents run in a `Pool`, HTTP has a thread of its own, and the trainer's thread draws.
"""

import functools
import hashlib
import itertools
import json
import math
import numbers
import secrets
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from starlette.requests import Request

from strop._types import Json, Row, Tokenizer
from strop.config import TurnsConfig
from strop.data.batch import RewardedTurn, Trajectory
from strop.environments.dialogue import Chat, Dialogue
from strop.environments.play import GRACE, LINGER, EnvironmentFailure, shortened
from strop.environments.pool import Answer, Late, Pool
from strop.environments.tools import parser_of
from strop.models import Policy
from strop.rollout.cached_rows import CachedRows
from strop.rollout.generate import Rollout, Sampler
from strop.rollout.http_guard import bearer_key
from strop.rollout.openai_answers import chat_message, cut_at_stop
from strop.rollout.openai_requests import OpenAIRequest, parse_message
from strop.rollout.openai_server import OpenAIServer
from strop.rollout.sampling import Sampling
from strop.rollout.sampling_queue import OnPiece, QueueRow, SampledCompletion, SamplingQueue, Ticket
from strop.rollout.served_model import RequestError, ServedModel, ToolCall
from strop.rollout.server_sampler import ServerSampler

OF_TRAINER = ("temperature", "top_k", "top_p", "min_p")  # options whose value is always the trainer's


@dataclass(frozen=True)
class AgentClient:
    """Where the agent of one trajectory finds its model: `base_url`, which ends in /v1, and its own `api_key`."""

    base_url: str
    api_key: str = field(repr=False)


class Recorder:
    """Plays agents with a policy, with the interface of a `Player`.

    agent     function(row, client), plain or async; returns a reward, several by name, or None
    sampler   samples, in this process or on servers
    """

    reward_name = "agent"

    def __init__(self, agent: Any, sampler: Sampler, policy: Policy, config: TurnsConfig):
        if not callable(agent):
            raise TypeError(f"agent must be a function(row, client), found a {type(agent).__name__}")
        self.make = self.agent = agent
        self.name = getattr(agent, "__name__", type(agent).__name__)
        self.sampler, self.policy, self.config = sampler, policy, config
        self.pool = Pool(config.agent_workers, config.environment_timeout)
        self.queue = TrainersQueue(policy, config.agent_workers)
        self.served = AnyName(policy, "policy", parse_calls=calls_parser(policy.tokenizer), queue=self.queue)
        limits = (limit for limit in (policy.max_length, config.max_tokens) if limit is not None)
        self.longest = min(limits, default=math.inf)  # the most tokens of a sequence
        self.without_effect: set[str] = set()  # options that agents gave in vain
        self._told: set[str] = set()
        self.numbers = itertools.count(-1, -1)  # of the rows whose caches are kept between calls
        self._chats: dict[str, tuple[Chat, bool]] = {}

    @property
    def is_remote(self) -> bool:
        """True if servers sample."""
        return isinstance(self.sampler, ServerSampler)

    @functools.cached_property
    def endpoint(self) -> "Endpoint":
        """The endpoint, started when it is first needed and stopped with this object."""
        endpoint = Endpoint(self.served)
        endpoint.start()
        weakref.finalize(self, endpoint.stop)
        return endpoint

    def __call__(
        self, rows: Sequence[Row], sampling: Sampling, num_samples: int, seed: int,
        addresses: Sequence[int] | None = None,
    ) -> Rollout:  # fmt: skip
        """Play num_samples episodes of each row, next to each other. addresses: see `generate`."""
        start, self.served.sampling, self.queue.sampler = time.perf_counter(), sampling, self.sampler
        episodes = [
            Episode(self, row, sampling, seed, address << 40 | sample << 16)
            for row, address in zip(rows, addresses or range(len(rows)), strict=True)
            for sample in range(num_samples)
        ]
        running: dict[Answer, int] = {}
        try:
            for i, episode in enumerate(episodes):
                running[self._begin(episode)] = i
            while running:
                self._draw(running, episodes)
                for answer in [answer for answer in running if answer.done()]:
                    i = running.pop(answer)
                    self._end(i, episodes[i], answer)
        finally:
            for episode in episodes:
                episode.close(self.endpoint)
            for answer in running:
                answer.stop()
            self.queue.sampler = None  # it may hold the trainer, which the endpoint's thread must not keep alive
        self._warn(sampling)
        name = f"{'server' if self.is_remote else self.policy.kind}, by its endpoint for agents"
        return Rollout([episode.trajectory() for episode in episodes], time.perf_counter() - start, name)

    def _begin(self, episode: "Episode") -> Answer:
        key = secrets.token_urlsafe(32)
        episode.key, self.endpoint.episodes[key] = key, episode
        answer = self.pool.submit(self.agent, dict(episode.row), AgentClient(f"{self.endpoint.url}/v1", key))
        answer.add_done_callback(lambda _: self.queue.wake())
        return answer

    def _draw(self, running: Mapping[Answer, int], episodes: Sequence["Episode"]) -> None:
        """Wait for calls of agents, or for agents that end, and draw a piece."""
        limit = self.config.environment_timeout
        patience = None if limit is None else limit + GRACE

        def is_awake() -> bool:
            return any(answer.done() for answer in running)

        if not self.queue.take_turn(is_awake, patience, linger=LINGER, expected=len(running)) and not is_awake():
            self.pool.forget_loop()  # every agent has a time limit, and none came back: all are late
            for answer in running:
                answer.settle(time.perf_counter(), error=Late())

    def _end(self, i: int, episode: "Episode", answer: Answer) -> None:
        """Take an agent's reward, or handle its failure."""
        episode.seconds = answer.seconds
        error, what, value = answer.exception(), "", None
        if isinstance(error, Late):
            what = (
                f"must return within environment_timeout={self.config.environment_timeout:g} seconds, found it running"
            )
        elif error is not None:
            while isinstance(error, BaseExceptionGroup):  # of tasks; the first one's error says more
                error = error.exceptions[0]
            what = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
        else:
            try:
                value = as_rewards(answer.result())
            except (TypeError, ValueError) as wrong:
                error, what = wrong, str(wrong)
        episode.close(self.endpoint)
        if episode.last is None and not what:
            what = "must call the model at least once, found no finished call"
        if what and (self.config.on_error == "raise" or episode.last is None):
            where = f"(trajectory {i}, calls {episode.num_calls}, row {shortened(episode.row)})"
            raise EnvironmentFailure(f"agent {self.name} {what} {where}") from error
        if what:
            episode.failure, value = what, {"": self.config.error_reward}
        episode.rewards = value

    def _warn(self, sampling: Sampling) -> None:
        """Warn once of options that agents gave in vain. Here, since a warning in HTTP's thread may be lost."""
        if names := [name for name in OF_TRAINER if name in self.without_effect - self._told]:
            self._told.update(names)
            own = ", ".join(f"{name}={getattr(sampling, name):g}" for name in names)
            has = "have" if len(names) > 1 else "has"
            warnings.warn(
                f"the agent's {', '.join(names)} {has} no effect: it draws with the trainer's, {own}", stacklevel=6
            )

    def chat_of(self, tools: Sequence[Json] | None) -> tuple[Chat, bool]:
        """Return the format of conversations with these tools, and whether calls of it can be joined."""
        key = json.dumps(tools, sort_keys=True)
        if key not in self._chats:
            if len(self._chats) >= 64:
                self._chats.clear()
            self._chats[key] = self._new_chat(tools)
        return self._chats[key]

    def _new_chat(self, tools: Sequence[Json] | None) -> tuple[Chat, bool]:
        make = functools.partial(
            Chat, self.policy.tokenizer, check_ids=self.policy.check_ids, stop_ids=self.policy.eos_ids
        )
        try:
            return make(tools, self.config.rewritten_turns), True
        except Exception:  # errors of many kinds: ours, the template's
            return make(None, "keep"), False


def as_rewards(value: object) -> dict[str, float] | None:
    """Return an agent's rewards by name after a check; a plain number has the name "", None stays None."""
    if value is None:
        return None
    found: Mapping[Any, Any] = value if isinstance(value, Mapping) else {"": value}
    plain = {name: one.item() if hasattr(one, "item") else one for name, one in found.items()}
    for name, one in plain.items():
        if not isinstance(name, str) or name in ("seconds", "calls", "sequences", "failed_fraction"):
            raise ValueError(f"must return rewards by names that are not reserved, found {name!r:.60}")
        if not isinstance(one, numbers.Real) or not math.isfinite(one):
            raise TypeError(f"must return a finite number, several by name, or None, found {value!r:.60}")
    return {name: float(one) for name, one in plain.items()}


def calls_parser(tokenizer: Tokenizer | None) -> Callable[[str], list[ToolCall]]:
    """Return a parser of tool calls for a served model. A reply with an invalid call has none: it is a text."""

    def parse_calls(reply: str) -> list[ToolCall]:
        calls = parser_of(tokenizer)(reply)
        return [] if any(call.error for call in calls) else [ToolCall(call.name, call.arguments) for call in calls]

    return parse_calls


# ---- one episode ----


@dataclass
class Conversation:
    """A sequence of an episode, to which calls are appended.

    heard    its messages in the form of `comparable`; empty for a text or ids
    text     all its text; "" for messages or ids
    finish   why its last call ended
    constrained   True if a grammar restricted one of its calls
    row      the engine's number of its cache
    busy     True while a call is being drawn
    """

    dialogue: Dialogue
    row: int
    heard: list[object] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    constrained: bool = False
    busy: bool = False

    def trajectory(self, finish: str) -> Trajectory:
        trajectory = self.dialogue.trajectory(finish)
        trajectory.constrained = self.constrained
        return trajectory

    def rest(self, asked: OpenAIRequest) -> Any:
        """Return what a request adds to this sequence; None if it does not continue it."""
        given, num_heard = asked.given[0], len(self.heard)
        if self.busy or not self.dialogue.spans or asked.row != self.dialogue.row:
            return None
        if asked.chat:
            continues = num_heard and len(given) > num_heard and [*map(comparable, given[:num_heard])] == self.heard
            return given[num_heard:] if continues and given[num_heard]["role"] != "assistant" else None
        if isinstance(given, str):
            rest = given[len(self.text) :] if self.text and given.startswith(self.text) else None
            return None if rest == "" and self.finish != "length" else rest
        ids = self.dialogue.ids
        continues = not self.text and not self.heard and given[: len(ids)] == ids
        return given[len(ids) :] if continues else None


class Episode:
    """What one agent asked, and what it was answered.

    rewards     the agent's rewards by name; None if it gave none
    last        the conversation of its last call
    """

    def __init__(self, recorder: Recorder, row: Row, sampling: Sampling, seed: int, address: int):
        self.recorder, self.row, self.sampling, self.seed, self.address = recorder, row, sampling, seed, address
        self.key, self.failure, self.seconds, self.num_calls = "", "", 0.0, 0
        self.rewards: dict[str, float] | None = None
        self.conversations: list[Conversation] = []
        self.last: Conversation | None = None
        self.tickets: set[Ticket] = set()
        self._asked_before: Counter[bytes] = Counter()

    def close(self, endpoint: "Endpoint") -> None:
        """Withdraw the key and the calls that are being drawn. Further calls are refused."""
        endpoint.episodes.pop(self.key, None)
        for ticket in list(self.tickets):
            ticket.cancel()
        for conversation in self.conversations:
            self.recorder.queue.forget(conversation.row)

    def submit(self, asked: OpenAIRequest, on_piece: OnPiece | None = None) -> Ticket:
        """Put a call into the queue, and write it down when it has been drawn. Called by the endpoint's thread."""
        self._check(asked)
        conversation, messages, new = self._continued(asked) or (self._new(asked), [], [])
        dialogue = conversation.dialogue
        prompt = dialogue.ids + new
        if (room := self.recorder.longest - len(prompt)) < 1:
            raise RequestError(f"messages must have at most {self.recorder.longest - 1} tokens, found {len(prompt)}")
        if conversation not in self.conversations:
            self.conversations.append(conversation)
        ends = dialogue.chat.ends if asked.chat else ()
        sampling = replace(
            self.sampling,
            max_new_tokens=int(min(asked.sampling.max_new_tokens, self.sampling.max_new_tokens, room)),
            stop_ids=tuple(dict.fromkeys((*self.sampling.stop_ids, *asked.sampling.stop_ids, *ends))),
        )
        (request,) = asked.sampling_requests(self.recorder.served)
        address = self._address(conversation, prompt)
        request = replace(
            request, prompt=prompt, sampling=sampling, seed=self.seed, address=address, model=None, row=conversation.row
        )
        drawn = SampledCompletion()

        def heard(ids: list[int], logps: list[float], reason: str) -> None:
            drawn.ids += ids
            drawn.logps += logps
            drawn.reason = reason
            if reason:
                self._record(conversation, asked, drawn, messages, new)
            if on_piece is not None:
                on_piece(ids, logps, reason)

        def unless_drawn(future: Any) -> None:
            self.tickets.discard(ticket)
            if future.cancelled() or future.exception() is not None:
                conversation.busy = False
                if not dialogue.spans and conversation in self.conversations:
                    self.conversations.remove(conversation)

        conversation.busy = True
        ticket = self.recorder.queue.submit(request, heard)
        self.tickets.add(ticket)
        ticket.future.add_done_callback(unless_drawn)
        return ticket

    def _check(self, asked: OpenAIRequest) -> None:
        """Raise for a request that cannot be trained on."""
        if asked.n != 1 or len(asked.prompts) != 1:
            raise RequestError(f"n must be 1, and the prompt one, in training, found {asked.n * len(asked.prompts)}")
        for name in ("prompt_logprobs", "ignore_eos", "echo"):
            if getattr(asked, name):
                raise RequestError(f"{name} must be left out in training")
        if asked.grammar is not None and self.recorder.is_remote:
            raise RequestError("response_format must be text with a rollout_server, found another")
        given = {name for name in OF_TRAINER if getattr(asked.sampling, name) != getattr(self.sampling, name)}
        self.recorder.without_effect |= given

    def _continued(self, asked: OpenAIRequest) -> tuple[Conversation, list[Json], list[int]] | None:
        """Return the conversation that a request continues, and what it adds, as messages and ids; None if there is none."""
        _, joins = self.recorder.chat_of(asked.row.get("tools"))
        for conversation in sorted(self.conversations, key=lambda one: -len(one.dialogue.ids)):
            rest = conversation.rest(asked) if joins or not asked.chat else None
            if rest is None:
                continue
            try:
                return conversation, *(conversation.dialogue.read(rest) if rest else ([], []))
            except Exception:  # the template's refusal, of any kind: the request begins anew, as the template writes it
                continue
        return None

    def _new(self, asked: OpenAIRequest) -> Conversation:
        chat, _ = self.recorder.chat_of(asked.row.get("tools"))
        return Conversation(
            Dialogue(chat, asked.given[0], list(asked.prompts[0]), asked.row), next(self.recorder.numbers)
        )

    def _address(self, conversation: Conversation, prompt: list[int]) -> int:
        """Return which random numbers a call draws with.

        In the first conversation those of an environment's turns. In others they also depend on the prompt, and on how
        often it was asked, so that calls that run at the same time draw the same in whatever order they arrive.
        """
        address = self.address + len(conversation.dialogue.spans)
        if conversation is self.conversations[0]:
            return address
        digest = hashlib.blake2b(json.dumps([address, prompt]).encode(), digest_size=7).digest()
        self._asked_before[digest] += 1
        return int.from_bytes(digest, "big") + self._asked_before[digest]

    def _record(
        self, conversation: Conversation, asked: OpenAIRequest, drawn: SampledCompletion, messages: list[Json], new: list[int]
    ) -> None:  # fmt: skip
        """Append a call to its conversation. Called by the trainer's thread, before the agent has the whole answer."""
        served, dialogue = self.recorder.served, conversation.dialogue
        sent = cut_at_stop(drawn, asked.stop, served)
        reason = drawn.reason
        if len(sent.ids) < len(drawn.ids):  # the engine drew beyond the stop text
            reason = "stop"
            self.recorder.queue.forget(conversation.row)
        whole = cut_at_stop(SampledCompletion(ids=sent.ids, logps=sent.logps, reason=reason), (), served)
        dialogue.append(messages, new)
        logps = torch.tensor(sent.logps, dtype=self.recorder.policy.loss_dtype)
        dialogue.draw(sent.ids, logps, versions=self.recorder.queue.versions)
        if asked.chat:
            said, _ = chat_message(asked, served, whole)
            conversation.heard = [*map(comparable, asked.given[0]), comparable(parse_message(said, "message"))]
        elif isinstance(asked.given[0], str):
            conversation.text = asked.given[0] + whole.text
        conversation.constrained |= asked.grammar is not None
        self.num_calls += 1
        self.last, conversation.finish, conversation.busy = conversation, reason, False

    def trajectory(self) -> Trajectory:
        """Return the sequence of the last call, with all others of the episode and its numbers for metrics."""
        assert self.last is not None
        finish = "length" if self.last.finish == "length" else "environment"
        parts = [one.trajectory(finish) for one in self.conversations if one.dialogue.spans and one is not self.last]
        trajectory = self.last.trajectory(finish)
        trajectory.row, trajectory.failure, trajectory.others = self.row, self.failure, parts
        every = [trajectory, *parts]
        num_drawn = sum(one.num_loss_tokens for one in every)
        if self.rewards is not None:
            trajectory.turns = [RewardedTurn(num_drawn, sum(self.rewards.values()))]
        trajectory.info = {
            "agent/calls": self.num_calls,
            "agent/sequences": len(every),
            "agent/given_tokens": sum(len(one) - one.num_prompt for one in every) - num_drawn,
            "agent/seconds": self.seconds,
            "agent/failed_fraction": float(bool(self.failure)),
            **{f"agent/{name}": value for name, value in (self.rewards or {}).items() if name},
        }
        return trajectory


def comparable(message: Row) -> object:
    """Return what of a message the template may write, to compare what was heard with what is said to have been."""
    calls = [(call["function"]["name"], call["function"].get("arguments")) for call in message.get("tool_calls") or ()]
    return message["role"], message.get("content") or "", message.get("name"), calls


# ---- HTTP, and the queue behind it ----


class Endpoint(OpenAIServer):
    """The server of agents on this machine. Each key belongs to one episode and ends with it."""

    def __init__(self, served: ServedModel):
        self.episodes: dict[str, Episode] = {}
        super().__init__(served)

    def key_check(self, api_key: str | None) -> Callable[[str], bool]:
        return lambda key: key in self.episodes

    def submit(self, request: Request, asked: OpenAIRequest, on_piece: OnPiece | None = None) -> list[Ticket]:
        episode = self.episodes.get(bearer_key(request.headers.get("authorization", "")) or "")
        if episode is None:
            raise RequestError("the API key is of an episode that has ended", 401)
        return [episode.submit(asked, on_piece)]


class AnyName(ServedModel):
    """A served model that answers to every name: programs name the model that they were written for."""

    def check_name(self, name: object) -> None:
        if name is not None and not isinstance(name, str):
            raise RequestError(f"model must be a text, found {name!r:.80}")


class TrainersQueue(SamplingQueue):
    """A sampling queue that draws in the trainer's thread, in this process or on servers.

    sampler    the trainer's, during a rollout
    versions   version of the weights of the piece drawn last; empty if versions are not counted
    """

    def __init__(self, policy: Policy, max_batch: int):
        super().__init__(policy, max_batch, own_thread=False)
        self.sampler: Sampler | None = None
        self.versions: tuple[int, ...] = ()

    def _draw(self, rows: list[QueueRow]) -> list[QueueRow]:
        assert self.sampler is not None
        self.policy = self.sampler.present
        if not isinstance(self.sampler, ServerSampler):
            self.versions = () if self.sampler.held is None else self.sampler.held.versions
            return super()._draw(rows)
        prompts = [torch.tensor(row.ids) for row in rows]
        requests = [row.ticket.request for row in rows]
        sampling = replace(requests[0].sampling, max_new_tokens=max(row.num_left for row in rows))
        drawn = self.sampler.next_turn(
            prompts, sampling, requests[0].seed, [one.address for one in requests], CachedRows()
        )
        ends = (*self.policy.eos_ids, *sampling.stop_ids)
        for row, trajectory, ids, logps in zip(rows, drawn, drawn.completion_ids, drawn.logps, strict=True):
            self.versions = trajectory.versions
            self._add(row, ids[: row.num_left].tolist(), logps[: row.num_left].tolist(), ends)
        return rows
