"""Best-of-N: sample n completions of each prompt and keep the one with the highest reward. Trains nothing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from strop._checks import check_count, check_timeout
from strop._types import Array, Json, Row, Texts
from strop.config import TurnsConfig
from strop.config.base import unknown_option
from strop.data.batch import Trajectory
from strop.data.inputs import as_prompts, as_rows, check_tokenizer
from strop.environments.credit import EnvironmentRewards
from strop.environments.setup import environment_rows, make_player
from strop.models import as_policy, load_model
from strop.rewards import RewardFunctions, reward_columns
from strop.rollout import Sampler, Sampling

SAMPLING = tuple(Sampling.__dataclass_fields__)


class BestOfN:
    """Best-of-N sampling: the completion with the highest reward is chosen.

    best = BestOfN(model=model, reward_fn=reward_fn, n=8, max_new_tokens=128)
    sequences = best.generate(prompts)          # ids (B, P + T), or texts for texts
    best.rewards                                # (B,) of the chosen; best.all_rewards (B, n)

    model, device    as for the algorithms
    environment, tools   for several turns. generate(rows) then returns the model's last reply in the best conversation
                     of each row, and `conversations` holds these conversations; an environment's rewards need no
                     reward_fn
    turns            a `TurnsConfig`, or a dict of its fields
    seed             seed of the first call; every further call draws anew. None: from torch's generator
    **sampling       fields of `Sampling`: max_new_tokens, temperature, top_k, top_p, stop_ids
    """

    def __init__(
        self,
        *,
        model: Any,
        reward_fn: Any = None,
        n: int = 8,
        environment: object = None,
        tools: object = None,
        turns: Any = None,
        tokenizer: Any = None,
        reward_weights: Any = None,
        reward_timeout: float | None = None,
        find_failing: bool = False,
        pad_id: int | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
        **sampling: Any,
    ):
        check_count(n, "n", low=1)
        for name, value in (("seed", seed), ("pad_id", pad_id)):
            if value is not None:
                check_count(value, name)
        check_tokenizer(tokenizer)
        check_timeout(reward_timeout, "reward_timeout")
        for name in sampling:
            if name not in SAMPLING:
                arguments = (
                    "n",
                    "environment",
                    "tools",
                    "turns",
                    "tokenizer",
                    "reward_weights",
                    "reward_timeout",
                    "find_failing",
                    "pad_id",
                    "seed",
                    "device",
                )
                raise ValueError(unknown_option(name, [*SAMPLING, *arguments], " of BestOfN"))
        if isinstance(model, (str, Path)):
            model, loaded = load_model(model, device=device, tokenizer=tokenizer)
            tokenizer = loaded if tokenizer is None else tokenizer
        self.policy = as_policy(model, tokenizer)
        if device is not None:
            self.policy.to(device)
        if reward_fn is None and environment is None:
            raise ValueError("BestOfN needs a reward_fn or an environment, found None")
        self.score: Any = None
        if reward_fn is not None:
            self.score = RewardFunctions(reward_fn, reward_weights, reward_timeout, find_failing)
        self.turns = turns if isinstance(turns, TurnsConfig) else TurnsConfig.from_options(turns or {})
        self.sampler = Sampler(self.policy)
        self.player = make_player(self.policy, self.sampler, environment, tools, self.turns)
        if self.player is not None:
            self.score = EnvironmentRewards(self.score, self.player)
        self.n, self.pad_id, self.sampling = n, pad_id, Sampling(**sampling)
        self._seeds = None if seed is None else torch.Generator().manual_seed(seed)
        self.rewards = torch.zeros(0)
        self.all_rewards = torch.zeros(0, n)
        self.columns: dict[str, torch.Tensor] = {}
        """Of each function, and of the environment, the rewards of all samples."""
        self.completion_ids: list[torch.Tensor] = []
        """Of the chosen, the EOS included."""
        self.conversations: list[list[Json]] = []
        self.all_completions: list[Any] = []
        """Of all samples, as reward functions see them."""

    def generate(
        self, prompts: Texts | Row, *, prompt_mask: Array | None = None, **columns: Any
    ) -> torch.Tensor | list[str]:
        """Return the best completion of each prompt.

        prompts   ids (B, P) or lists of ids: returns (B, P + T), the prompts as given (lists are padded on the left)
                  and the completions, followed by the pad id; texts, conversations or rows with a "prompt": returns the
                  completions' texts
        columns   columns for reward functions, with one entry per prompt
        """
        if isinstance(prompts, Mapping) and "input_ids" in prompts:  # a tokenizer's output
            prompt_mask = prompts.get("attention_mask") if prompt_mask is None else prompt_mask
            prompts = prompts["input_ids"]
        seed = self._seed()
        if self.player is not None:
            batch = environment_rows(prompts, columns, "prompts")
            trajectories: list[Trajectory] = self.player([prompt.row for prompt in batch], self.sampling, self.n, seed)
        else:
            padding = self.policy.padding(self.pad_id)
            batch = as_prompts(prompts, self.policy.tokenizer, padding, mask=prompt_mask, columns=columns)
            trajectories = self.sampler([prompt.ids_T for prompt in batch], self.sampling, self.n, seed)
            for i, trajectory in enumerate(trajectories):
                trajectory.row, trajectory.shown = batch[i // self.n].row, batch[i // self.n].shown
        given = reward_columns(trajectories, self.policy.tokenizer)
        scored = self.score(given, trajectories)
        self.all_completions = given["completions"]
        self.all_rewards, self.columns = scored.total_B.view(-1, self.n), scored.columns
        self.rewards, best_B = self.all_rewards.max(1)
        chosen = [row * self.n + index for row, index in enumerate(best_B.tolist())]
        self.completion_ids = [trajectories[i].completion_ids for i in chosen]
        if self.player is not None:
            self.conversations = [given["conversations"][i] for i in chosen]
        elif self.policy.tokenizer is None or _are_ids(prompts):
            return self._sequences(prompts, batch)
        return [given["completions"][i] for i in chosen]

    def _seed(self) -> int:
        return int(torch.randint(2**63 - 1 if self._seeds is None else 2**62, (), generator=self._seeds))

    def _sequences(self, prompts: Texts | Row, batch: list[Trajectory]) -> torch.Tensor:
        """Return [B, P + T], the prompts as given and the chosen completions, padded."""
        pad_id = self.policy.pad_id if self.pad_id is None else self.pad_id
        given = as_rows(prompts, "prompts") if isinstance(prompts, torch.Tensor) else [prompt.ids_T for prompt in batch]
        num_prompt, num_new = max(map(len, given)), max(map(len, self.completion_ids))
        rows = [
            torch.cat(
                [
                    pad(prompt, (num_prompt - len(prompt), 0), value=pad_id),
                    pad(completion, (0, num_new - len(completion)), value=pad_id),
                ]
            )
            for prompt, completion in zip(given, self.completion_ids, strict=True)
        ]
        return torch.stack(rows)


def _are_ids(prompts: Any) -> bool:
    if isinstance(prompts, torch.Tensor):
        return True
    first = (prompts["prompt"] if isinstance(prompts, Mapping) else prompts)[0]
    return isinstance(first, torch.Tensor) or (
        isinstance(first, (list, tuple)) and bool(first) and isinstance(first[0], int)
    )
