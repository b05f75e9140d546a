"""Who samples for a trainer: this process, or servers, which are brought the weights first."""

import random
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from strop.data.batch import TokenBatch, Trajectory
from strop.models import Policy, unwrapped
from strop.models.kinds import is_peft
from strop.rollout import Rollout, Sampler, Sampling, checked_prompts
from strop.rollout.kept import Kept
from strop.rollout.server import Pending, Server, ServerConfig, ServerError, Weights

PROBE_LENGTH = 64


class Served(Sampler):
    """The same by servers, with the policy's weights as they are when a rollout is begun.

    save      writes the model into a folder that servers can read
    updates   how many the weights have had
    """

    FAILURES = (ServerError,)

    def __init__(
        self, policy: Policy, config: ServerConfig, save: Callable[[Path], None], updates: Callable[[], int] = int
    ):
        super().__init__(policy)
        if config.sync == "lora" and not is_peft(unwrapped(policy.model)):
            raise ValueError('sync must be "disk" for a model without a peft adapter, found "lora"')
        if policy.vocab_size is None:
            raise ValueError(f"rollout_server must be None: {type(policy.model).__name__} names no vocab_size")
        self.config, self._save, self._updates = config, save, updates
        self.servers = [Server(url, config) for url in config.urls]
        self.weights: Weights | None = None
        self._folder = Path(config.sync_folder or tempfile.mkdtemp(prefix="strop-sync-"))
        if config.sync_folder is None:
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._run, self._number, self._published = secrets.token_hex(4), 0, -1

    def go_on(
        self, prompts: Sequence[Any], sampling: Sampling, seed: int, addresses: Sequence[int], kept: Kept
    ) -> Rollout:
        """The servers have caches of their own."""
        return self(prompts, sampling, 1, seed, addresses)

    def _begin(
        self, prompts: Sequence[Any], sampling: Sampling, num_samples: int, seed: int,
        addresses: Sequence[int] | None,
    ) -> Callable[[], Rollout]:  # fmt: skip
        ids = checked_prompts(self.policy, prompts, sampling)
        start = time.perf_counter()
        weights = self._publish()
        ends = list(dict.fromkeys((*self.policy.eos_ids, *sampling.stop_ids)))
        requests = [
            {"prompt": prompt.tolist(), "n": 1 if sampling.greedy else num_samples, "max_tokens": sampling.max_new_tokens,
             "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p, "stop_token_ids": ends,
             "seed": random.Random(f"{seed}/{address}").getrandbits(48)}
            for address, prompt in zip(addresses or range(len(ids)), ids, strict=True)
        ]  # fmt: skip
        pending = Pending(self.servers, weights, requests, self.policy)

        def finish() -> Rollout:
            pairs = pending.result()
            if sampling.greedy:  # servers refuse several of them, which are all the same
                pairs = [pair for pair in pairs for _ in range(num_samples)]
            completion_ids, logps = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            reasons = ["eos" if tokens[-1].item() in ends else "length" for tokens in completion_ids]
            prompt_ids = [prompt for prompt in ids for _ in range(num_samples)]
            urls = ", ".join(server.url for server in self.servers)
            return Rollout(prompt_ids, completion_ids, logps, reasons, time.perf_counter() - start, f"server {urls}")

        return finish

    def _publish(self) -> Weights:
        """Write the weights under a new name, if they are not those of the last time."""
        probe, updates, before = self._probe(), self._updates(), self.weights
        logps = self._logps(probe)
        if before is not None and updates == self._published and logps.equal(before.logps):
            return before
        self._number += 1
        name = f"strop-{self._run}-{self._number}"
        folder = (self._folder / name).absolute()
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = folder.with_name(f".{name}")
        if self.config.sync == "lora":
            unwrapped(self.policy.model).save_pretrained(unfinished, save_embedding_layers=False)
        else:
            self._save(unfinished)
        unfinished.rename(folder)
        self.weights = Weights(name, folder, probe, logps, None if before is None else before.baseline)
        self._published = updates
        if before is not None:
            shutil.rmtree(before.folder, ignore_errors=True)
        return self.weights

    def _probe(self) -> list[int]:
        """Tokens that no text has: their log-probs are far from 0, where a change of the weights shows."""
        longest = self.policy.max_length
        length = PROBE_LENGTH if longest is None else min(PROBE_LENGTH, longest - 1)
        return random.Random(0).choices(range(self.policy.vocab_size or 1), k=length)

    @torch.no_grad()
    def _logps(self, probe: list[int]) -> torch.Tensor:
        with self.policy.evaluating():
            batch = TokenBatch.of([Trajectory.of(probe[:1], probe[1:])], self.policy.device)
            return self.policy.logps(batch).cpu().double()


def sampler(trainer: Any, config: ServerConfig) -> Sampler:
    """Of a trainer: here, or by the servers its config names."""
    if not config.urls:
        return Sampler(trainer.policy)
    return Served(trainer.policy, config, trainer.save_pretrained, lambda: trainer.state.updates)
