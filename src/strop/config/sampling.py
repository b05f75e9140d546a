"""Options of rollouts: how tokens are drawn, which servers sample, and conversations of several turns."""

import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from strop._checks import COLDEST, check_count
from strop.config.base import Config, check_fields, choice, count, number


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options of a rollout.

    max_new_tokens   the most tokens of a completion
    temperature      sample from softmax(logits / temperature); 0 is greedy
    top_k            sample only from the k most probable tokens; 0 is all
    top_p            sample only from the most probable tokens whose probabilities add up to top_p; 1 is all
    min_p            sample only tokens at least min_p times as probable as the most probable one; 0 is all
    stop_ids         token ids that end a completion, besides the model's and the tokenizer's EOS
    """

    max_new_tokens: int = count(128, low=1)
    temperature: float = number(1.0, 0)
    top_k: int = count(0)
    top_p: float = number(1.0, 0, 1, open_low=True)
    min_p: float = number(0.0, 0, 1)
    stop_ids: tuple[int, ...] = ()
    greedy: ClassVar[bool]  # whether the most probable token is always taken
    cuts: ClassVar[
        bool
    ]  # whether some tokens cannot be drawn: the distribution is not the policy's at this temperature

    def __post_init__(self) -> None:
        check_fields(self)
        if 0 < self.temperature < COLDEST:
            wanted = f"0, which is greedy, or at least {COLDEST:.2g}"
            raise ValueError(f"temperature must be {wanted}, found {self.temperature}")
        if not isinstance(self.stop_ids, Sequence) or isinstance(self.stop_ids, str):
            raise TypeError(f"stop_ids must be token ids, found {type(self.stop_ids).__name__}")
        for one in self.stop_ids:
            check_count(one, "stop_ids")
        object.__setattr__(self, "greedy", self.temperature == 0)
        object.__setattr__(self, "cuts", bool(self.top_k) or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True, kw_only=True)
class ServerConfig(Config):
    """Who samples, and how far ahead of training.

    rollout_server    address of an OpenAI-compatible server, or of several with the same model; None samples here
    sync              how weights reach the server: "disk" writes them into a folder, "lora" sends the adapter alone
    sync_folder       the folder for sync=disk, which the server must see too; None is a temporary folder of this machine
    sync_tolerance    how far a server's log-probs may be from the trainer's after a sync, root mean square
    max_staleness     sample ahead of training: completions may be of weights so many steps older; 0 samples and trains in turns
    order             of what was sampled ahead: "deterministic" trains on the same completions however long each takes,
                      "throughput" on those that are ready first, so that runs differ
    rollout_device    with max_staleness, without rollout_server: the device of the copy of the model that samples ahead, such
                      as "cuda:1"; None is the model's own
    server_requests   how many prompts one server works on at a time
    server_timeout    give up a server that fails or is silent after so many seconds
    server_start_timeout   give up a server that has never answered, and where nobody listens, after so many seconds
    """

    rollout_server: str | tuple[str, ...] | None = None
    sync: str = choice("disk", ("disk", "lora"))
    sync_folder: str | None = None
    sync_tolerance: float = number(0.3, 0, open_low=True)
    max_staleness: int = count(0)
    order: str = choice("deterministic", ("deterministic", "throughput"))
    rollout_device: str | None = None
    server_requests: int = count(32, low=1)
    server_timeout: float = number(300.0, 0, open_low=True)
    server_start_timeout: float = number(5.0, 0, open_low=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for url in self.urls:
            if not is_address(url):
                raise ValueError(f"rollout_server must be like http://127.0.0.1:8000, found {url!r}")
        if self.order != "deterministic" and not self.max_staleness:
            raise ValueError(f'order must be "deterministic" without max_staleness, found {self.order!r}')
        if self.rollout_device is not None and (self.urls or not self.max_staleness):
            why = "with a rollout_server" if self.urls else "without max_staleness"
            raise ValueError(f"rollout_device must be None {why}, found {self.rollout_device!r}")

    @property
    def urls(self) -> tuple[str, ...]:
        given = self.rollout_server or ()
        return tuple(given) if isinstance(given, (tuple, list)) else (given,)


def is_address(url: object) -> bool:
    """Return whether this is the address of a server."""
    try:
        parts = urllib.parse.urlsplit(url if isinstance(url, str) else "")
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        return False


@dataclass(frozen=True, kw_only=True)
class TurnsConfig(Config):
    """Options of more than one turn. max_new_tokens counts the tokens of one turn.

    max_turns             the most turns of the model
    max_tokens            the most tokens of a trajectory, prompt included; None is the model's context
    turn_discount         γ: a reward k turns later counts γ^k
    credit                "trajectory": the drawn tokens of a trajectory share one advantage, of its discounted rewards;
                          "turn": each turn has its own, of the rewards from it on, compared with the group's same turn
    environment_workers   how many environments are called at the same time
    environment_timeout   seconds for one call of an environment, or for a whole agent; None waits forever
    agent_workers         how many agents run at the same time
    on_error              an environment that raises or is late stops the run ("raise"), or ends its trajectory ("end")
    error_reward          reward of a turn that failed, with on_error="end"
    rewritten_turns       chat templates that rewrite earlier turns: "refuse" them, or "keep" the turns as they were drawn
    """

    max_turns: int = count(8, low=1)
    max_tokens: int | None = count(None, low=2)
    turn_discount: float = number(1.0, 0, 1)
    credit: str = choice("trajectory", ("trajectory", "turn"))
    environment_workers: int = count(16, low=1)
    environment_timeout: float | None = number(None, 0, open_low=True)
    agent_workers: int = count(256, low=1)
    on_error: str = choice("raise", ("raise", "end"))
    error_reward: float = number(0.0)
    rewritten_turns: str = choice("refuse", ("refuse", "keep"))


@dataclass(frozen=True, kw_only=True)
class RewardCalls(Config):
    """How reward and preference functions are called.

    reward_retries       how often a call that raised or was late is made again, after 0.5 s, 1 s, 2 s …
    reward_concurrency   calls of one async function at the same time, if it is called once for each completion
    on_reward_error      a call that fails stops the run ("raise"), or its completions are left out of the loss ("leave_out")
    """

    reward_retries: int = count(0)
    reward_concurrency: int = count(64, low=1)
    on_reward_error: str = choice("raise", ("raise", "leave_out"))
