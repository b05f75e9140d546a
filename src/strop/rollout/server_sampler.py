"""A sampler on servers that receive the weights before each rollout."""

import contextlib
import copy
import functools
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

from strop._types import Array, Json, State
from strop.data.batch import TokenBatch, Trajectory, sampled
from strop.distributed import ALONE, World
from strop.models import Policy, unwrapped
from strop.models.kinds import is_peft
from strop.rollout.cached_rows import CachedRows
from strop.rollout.client import Completion, Pending, Server, ServerConfig, ServerError, Weights
from strop.rollout.generate import Rollout, Sampler, checked_prompts
from strop.rollout.sampling import Sampling

PROBE_LENGTH = 64
ROWS = ("prompt_ids", "completion_ids", "logps")  # the fields of an unfinished rollout in a checkpoint


class ServerSampler(Sampler):
    """A sampler on servers, with the policy's weights as they are when a rollout is begun.

    A rollout may be begun before it is asked for. It is stored under its seed until the next such rollout is asked
    for, since a step that failed asks again.

    save      writes the model into a folder that servers can read
    updates   returns the number of updates of the weights so far
    """

    def __init__(
        self, policy: Policy, config: ServerConfig, save: Callable[[Path], None], updates: Callable[[], int] = int,
        world: World = ALONE,
    ):  # fmt: skip
        super().__init__(policy)
        self._begun: dict[int, Callable[[], Rollout]] = {}
        if config.sync == "lora" and not is_peft(unwrapped(policy.model)):
            raise ValueError('sync must be "disk" for a model without a peft adapter, found "lora"')
        if policy.vocab_size is None:
            raise ValueError(f"rollout_server must be None: {type(policy.model).__name__} names no vocab_size")
        self.config, self._save, self._updates, self.world = config, save, updates, world
        self.servers = [Server(url, config) for url in config.urls]
        self.weights: Weights | None = None
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
        """Return num_samples completions of each prompt. A rollout that was begun with this seed is used."""
        if seed in self._begun:
            self._begun = {seed: self._begun[seed]}
            begun = self._begun[seed]()  # copies, since a step that failed may have filled fields
            return Rollout(map(copy.copy, begun), begun.seconds, begun.engine)
        for finish in self._begun.values():  # finish these first: the next rollout may have other weights
            finish()
        return self._begin(prompts, sampling, num_samples, seed, addresses)()

    def ahead(
        self, prompts: Sequence[Array], sampling: Sampling, num_samples: int, seed: int,
        addresses: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Begin the rollout that will be asked for with this seed."""
        if seed not in self._begun:
            self._begun[seed] = functools.cache(self._begin(prompts, sampling, num_samples, seed, addresses))

    def state(self) -> State:
        """Return the rollouts that were begun, after waiting for them.

        Failed ones are left out and begun anew after a resume.
        """
        tensors: dict[str, torch.Tensor] = {}
        values: Json = {}
        for seed, finish in self._begun.items():
            with contextlib.suppress(ServerError):
                rollout = finish()
                for name in ROWS:
                    rows = getattr(rollout, name)
                    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
                    none = torch.zeros(0, dtype=torch.int64)  # for a process without prompts
                    joined = torch.cat(rows) if rows else none
                    tensors |= {f"{seed}/{name}": joined, f"{seed}/{name}_lengths": lengths}
                values[str(seed)] = {"finish_reasons": rollout.finish_reasons, "engine": rollout.engine}
        return tensors, values

    def load_state(self, tensors: dict[str, torch.Tensor], values: Json) -> None:
        for seed, about in values.items():
            rows = [tensors[f"{seed}/{name}"].split(tensors[f"{seed}/{name}_lengths"].tolist()) for name in ROWS]
            trajectories = sampled(*rows)
            for trajectory, finish in zip(trajectories, about["finish_reasons"], strict=True):
                trajectory.finish = finish
            self._begun[int(seed)] = functools.partial(Rollout, trajectories, engine=about["engine"])

    def next_turn(
        self,
        prompts: Sequence[Array],
        sampling: Sampling,
        seed: int,
        addresses: Sequence[int],
        cached: CachedRows,
    ) -> Rollout:
        """Sample one turn of rows that continue later. The servers have their own caches."""
        return self(prompts, sampling, 1, seed, addresses)

    def _begin(
        self, prompts: Sequence[Array], sampling: Sampling, num_samples: int, seed: int,
        addresses: Sequence[int] | None,
    ) -> Callable[[], Rollout]:  # fmt: skip
        """Begin a rollout with the weights as they are now and return a function that waits for it.

        The first process sends the prompts of all processes, so that one client syncs the weights.
        """
        ids = checked_prompts(self.policy, prompts, sampling) if len(prompts) else []
        everyones = self.world.gathered((ids, list(addresses or range(len(ids)))))
        weights, start, pending = self._publish(), time.perf_counter(), None
        ends = list(dict.fromkeys((*self.policy.eos_ids, *sampling.stop_ids)))
        # servers refuse several greedy completions of a prompt, which would be equal
        num_asked, num_copies = (1, num_samples) if sampling.greedy else (num_samples, 1)
        if self.world.is_first:
            requests = [
                {"prompt": prompt.tolist(), "n": num_asked, "max_tokens": sampling.max_new_tokens,
                 "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p,
                 "stop_token_ids": ends, "seed": random.Random(f"{seed}/{address}").getrandbits(48)}
                for some_ids, some_addresses in everyones
                for address, prompt in zip(some_addresses, some_ids, strict=True)
            ]  # fmt: skip
            pending = Pending(self.servers, weights, requests, self.policy)
        counts = [len(some_ids) * num_asked for some_ids, _ in everyones]

        def finish() -> Rollout:
            pairs = [pair for pair in self._take(pending, counts) for _ in range(num_copies)]
            prompt_ids = [prompt for prompt in ids for _ in range(num_samples)]
            trajectories = sampled(prompt_ids, [tokens for tokens, _ in pairs], [logps for _, logps in pairs])
            for trajectory in trajectories:
                trajectory.finish = "eos" if trajectory.ids_T[-1].item() in ends else "length"
            urls = ", ".join(server.url for server in self.servers)
            return Rollout(trajectories, time.perf_counter() - start, f"server {urls}")

        return finish

    def _take(self, pending: Pending | None, counts: Sequence[int]) -> list[Completion]:
        """Return this process's share of the completions, which the first process received.

        An error of the first process is raised in all processes.

        counts   the number of completions of each process
        """
        found: Any = None
        if pending is not None:
            try:
                found = pending.result()
            except ServerError as error:
                found = error
        found = self.world.gathered(found)[0]
        if isinstance(found, ServerError):
            raise found
        first = sum(counts[: self.world.rank])
        return found[first : first + counts[self.world.rank]]

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Return an empty context: weights are gathered only for a sync."""
        yield

    def _publish(self) -> Weights:
        """Write the weights under a new name if they have changed since the last time."""
        probe, updates, before = self._probe(), self._updates(), self.weights
        logps = self._logps(probe)
        known = before is not None and updates == self._published and logps.equal(before.logps)
        if before is not None and self.world.gathered(known)[0]:  # the first decides, since all must do the same
            return before
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
            if before is not None:
                shutil.rmtree(before.folder, ignore_errors=True)
        return self.weights

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
    """Return the sampler of a trainer: this process, or the servers in its config."""
    if not config.urls:
        return Sampler(trainer.policy, records_routing)
    assert not records_routing
    return ServerSampler(trainer.policy, config, trainer.save_pretrained, lambda: trainer.state.updates, trainer.world)
