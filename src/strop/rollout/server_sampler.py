"""A sampler on servers that receive the weights before a rollout."""

import contextlib
import random
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from strop._types import Array
from strop.data.batch import TokenBatch, Trajectory, sampled
from strop.distributed import ALONE, World
from strop.models import Policy, unwrapped
from strop.models.kinds import is_peft
from strop.rollout.cached_rows import CachedRows
from strop.rollout.client import Pending, Server, ServerConfig, ServerPool, Weights
from strop.rollout.generate import Captured, CopySampler, Rollout, Sampler, checked_prompts
from strop.rollout.sampling import Sampling

PROBE_LENGTH = 64


class ServerSampler(Sampler):
    """A sampler on servers, with the weights that were captured last.

    Inside `ready`, and after `use`, these weights are kept; elsewhere every rollout captures the present ones. In several
    processes all must call `capture` and `ready`; only the first samples.

    save      writes the model into a folder that servers can read
    updates   returns the number of updates of the weights so far
    """

    def __init__(
        self, policy: Policy, config: ServerConfig, save: Callable[[Path], None], updates: Callable[[], int] = int,
        world: World = ALONE,
    ):  # fmt: skip
        super().__init__(policy)
        if config.sync == "lora" and not is_peft(unwrapped(policy.model)):
            raise ValueError('sync must be "disk" for a model without a peft adapter, found "lora"')
        if policy.vocab_size is None:
            raise ValueError(f"rollout_server must be None: {type(policy.model).__name__} names no vocab_size")
        self.config, self._save, self._updates, self.world = config, save, updates, world
        self.pool = ServerPool([Server(url, config) for url in config.urls])
        self.weights: Weights | None = None  # the last ones written
        made = tempfile.mkdtemp(prefix="strop-sync-") if config.sync_folder is None and world.is_first else None
        if made is not None:
            weakref.finalize(self, shutil.rmtree, made, ignore_errors=True)
        folder, self._run = world.gathered((config.sync_folder or made, secrets.token_hex(4)))[0]
        assert folder is not None  # the first process has made one
        self._folder, self._number, self._published = Path(folder), 0, -1

    def __call__(
        self, prompts: Sequence[Array], sampling: Sampling, num_samples: int, seed: int,
        addresses: Sequence[int] | None = None,
    ) -> Rollout:  # fmt: skip
        """Return num_samples completions of each prompt."""
        if not len(prompts):
            return Rollout()
        with self.ready() if self.held is None else contextlib.nullcontext():
            return self._sample(prompts, sampling, num_samples, seed, addresses or range(len(prompts)))

    def next_turn(
        self, prompts: Sequence[Array], sampling: Sampling, seed: int, addresses: Sequence[int], cached: CachedRows
    ) -> Rollout:
        """Sample one turn of rows that continue later. The servers have their own caches."""
        return self(prompts, sampling, 1, seed, addresses)

    def _sample(
        self, prompts: Sequence[Array], sampling: Sampling, num_samples: int, seed: int, addresses: Sequence[int]
    ) -> Rollout:
        ids, start = checked_prompts(self.policy, prompts, sampling), time.perf_counter()
        ends = list(dict.fromkeys((*self.policy.eos_ids, *sampling.stop_ids)))
        # servers refuse several greedy completions of a prompt, which would be equal
        num_asked, num_copies = (1, num_samples) if sampling.greedy else (num_samples, 1)
        requests = [
            {"prompt": prompt.tolist(), "n": num_asked, "max_tokens": sampling.max_new_tokens,
             "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p,
             "stop_token_ids": ends, "seed": random.Random(f"{seed}/{address}").getrandbits(48)}
            for address, prompt in zip(addresses, ids, strict=True)
        ]  # fmt: skip
        found = self.pool.run(Pending(requests, self.policy, self._present))
        completions = [pair for answers, _ in found for pair in answers for _ in range(num_copies)]
        versions = [captured.versions for _, captured in found for _ in range(num_samples)]
        prompt_ids = [prompt for prompt in ids for _ in range(num_samples)]
        trajectories = sampled(prompt_ids, [tokens for tokens, _ in completions], [logps for _, logps in completions])
        for trajectory, drawn_with in zip(trajectories, versions, strict=True):
            trajectory.versions = drawn_with
            trajectory.finish = "eos" if trajectory.ids_T[-1].item() in ends else "length"
        urls = ", ".join(server.url for server in self.pool.servers)
        return Rollout(trajectories, time.perf_counter() - start, f"server {urls}")

    def _present(self) -> Captured:
        assert self.held is not None
        return self.held

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Return a context for rollouts with the present weights."""
        self.held = self.capture()
        try:
            yield
        finally:
            self.held = None

    def capture(self, version: int | None = None) -> Captured:
        """Write the weights under a new name if they have changed since the last time; return them."""
        probe, updates, before = self._probe(), self._updates(), self.weights
        logps = self._logps(probe)
        known = before is not None and updates == self._published and logps.equal(before.logps)
        if before is not None and self.world.gathered(known)[0]:  # the first decides, since all must do the same
            return Captured(before, version)
        self._number += 1
        name = f"strop-{self._run}-{self._number}"
        folder = (self._folder / name).absolute()
        unfinished = folder.with_name(f".{name}")
        if self.world.is_first:
            folder.parent.mkdir(parents=True, exist_ok=True)
        if self.config.sync == "lora":
            with self.policy.whole() as policy:
                if self.world.is_first:
                    unwrapped(policy.model).save_pretrained(unfinished, save_embedding_layers=False)
        else:
            self._save(unfinished)
        self.weights = Weights(name, folder, probe, logps, None if before is None else before.baseline)
        self._published = updates
        if self.world.is_first:
            unfinished.rename(folder)
            weakref.finalize(self.weights, shutil.rmtree, folder, ignore_errors=True)  # when no rollout needs them
        return Captured(self.weights, version)

    def _probe(self) -> list[int]:
        """Return random tokens. Their log-probs are far from 0, so a change of the weights shows."""
        longest = self.policy.max_length
        length = PROBE_LENGTH if longest is None else min(PROBE_LENGTH, longest - 1)
        return random.Random(0).choices(range(self.policy.vocab_size or 1), k=length)

    @torch.no_grad()
    def _logps(self, probe: list[int]) -> torch.Tensor:
        with self.policy.evaluating():
            batch = TokenBatch.of([Trajectory.of(probe[:1], probe[1:])], self.policy.device)
            return self.policy.logps(batch).cpu().double()


def make_sampler(trainer: Any, config: ServerConfig, records_routing: bool = False) -> Sampler:
    """Return the sampler of a trainer: servers, or this process with the policy, or with a copy of it to sample ahead."""
    if config.urls:
        assert not records_routing
        save, world = trainer.save_pretrained, trainer.world
        return ServerSampler(trainer.policy, config, save, lambda: trainer.state.updates, world)
    if config.max_staleness:
        return CopySampler(trainer.policy, config.rollout_device, records_routing)
    return Sampler(trainer.policy, records_routing)
