"""Options of rollouts: how tokens are drawn, which servers sample, and conversations of several turns."""

import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass

from strop._checks import COLDEST, check_choice, check_count, check_number
from strop.config.base import Config

SYNCS = ("disk", "lora")
ON_ERROR = ("raise", "end")
CREDIT = ("trajectory", "turn")
REWRITTEN = ("refuse", "keep")


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

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_count(self.max_new_tokens, "max_new_tokens", low=1)
        check_number(self.temperature, "temperature", low=0.0)
        if 0 < self.temperature < COLDEST:
            raise ValueError(
                f"temperature must be 0, which is greedy, or at least {COLDEST:.2g}, found {self.temperature}"
            )
        check_count(self.top_k, "top_k")
        check_number(self.top_p, "top_p", low=0.0, high=1.0, open_low=True)
        check_number(self.min_p, "min_p", low=0.0, high=1.0)
        if not isinstance(self.stop_ids, Sequence) or isinstance(self.stop_ids, str):
            raise TypeError(f"stop_ids must be token ids, found {type(self.stop_ids).__name__}")
        for one in self.stop_ids:
            check_count(one, "stop_ids")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def cuts(self) -> bool:
        """Whether some tokens cannot be drawn, so that the distribution is not the policy's at this temperature."""
        return bool(self.top_k) or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, kw_only=True)
class ServerConfig(Config):
    """Who samples, where it is not this process.

    rollout_server    address of an OpenAI-compatible server, or of several with the same model; None samples here
    sync              how weights reach the server: "disk" writes them into a folder, "lora" sends the adapter alone
    sync_folder       the folder for sync=disk, which the server must see too; None is a temporary folder of this machine
    sync_tolerance    how far a server's log-probs may be from the trainer's after a sync, root mean square
    max_staleness     1 samples the next step's completions while this one trains: they are one step older; 0 waits
    server_requests   how many prompts one server works on at a time
    server_timeout    give up a server that fails or is silent after so many seconds
    server_start_timeout   give up a server that has never answered, and where nobody listens, after so many seconds
    """

    rollout_server: str | tuple[str, ...] | None = None
    sync: str = "disk"
    sync_folder: str | None = None
    sync_tolerance: float = 0.3
    max_staleness: int = 0
    server_requests: int = 32
    server_timeout: float = 300.0
    server_start_timeout: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for url in self.urls:
            if not is_address(url):
                raise ValueError(f"rollout_server must be like http://127.0.0.1:8000, found {url!r}")
        check_choice(self.sync, "sync", SYNCS)
        check_number(self.sync_tolerance, "sync_tolerance", low=0.0, open_low=True)
        check_count(self.max_staleness, "max_staleness")
        if self.max_staleness > 1:
            raise ValueError(f"max_staleness must be 0 or 1, found {self.max_staleness}")
        if self.max_staleness and not self.urls:
            raise ValueError("max_staleness must be 0 without a rollout_server, found 1")
        check_count(self.server_requests, "server_requests", low=1)
        check_number(self.server_timeout, "server_timeout", low=0.0, open_low=True)
        check_number(self.server_start_timeout, "server_start_timeout", low=0.0, open_low=True)

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
    environment_timeout   seconds for one call of an environment; None waits forever
    on_error              an environment that raises or is late stops the run ("raise"), or ends its trajectory ("end")
    error_reward          reward of a turn that failed, with on_error="end"
    rewritten_turns       chat templates that rewrite earlier turns: "refuse" them, or "keep" the turns as they were drawn
    """

    max_turns: int = 8
    max_tokens: int | None = None
    turn_discount: float = 1.0
    credit: str = "trajectory"
    environment_workers: int = 16
    environment_timeout: float | None = None
    on_error: str = "raise"
    error_reward: float = 0.0
    rewritten_turns: str = "refuse"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self.max_turns, "max_turns", low=1)
        if self.max_tokens is not None:
            check_count(self.max_tokens, "max_tokens", low=2)
        check_number(self.turn_discount, "turn_discount", low=0.0, high=1.0)
        check_choice(self.credit, "credit", CREDIT)
        check_count(self.environment_workers, "environment_workers", low=1)
        if self.environment_timeout is not None:
            check_number(self.environment_timeout, "environment_timeout", 0, open_low=True)
        check_choice(self.on_error, "on_error", ON_ERROR)
        check_number(self.error_reward, "error_reward")
        check_choice(self.rewritten_turns, "rewritten_turns", REWRITTEN)
