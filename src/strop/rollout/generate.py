"""Rollouts: prompts and sampling in; trajectories out, with log-probs and why each ended.

    rollout = generate(policy, prompts, Sampling(max_new_tokens=64), num_samples=8, seed=0)

One function serves every model. The policy's kind chooses the engine: `moe` (strop's own engine), `hf`
(a cache of slots and CUDA graphs, else transformers' generate) or `plain` (a module that only returns logits).
"""

import contextlib
import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from strop._checks import check_count
from strop._types import Array, Json
from strop.data.batch import Trajectory, as_ids, sampled
from strop.models import Policy
from strop.rollout import decoding, native, plain
from strop.rollout.cached_rows import CachedRows
from strop.rollout.sampling import Sampling, uniforms

# (policy, prompts, sampling, num_samples, uniforms_BT, eos_ids) → tokens and log-probs of every completion; one that
# ended with EOS includes it
Completions = tuple[list[torch.Tensor], ...]  # and the chosen experts, if asked for
ENGINES: dict[str, Callable[..., Completions]] = {
    "moe": native.complete,
    "hf": decoding.complete,
    "plain": plain.complete,
}

End = tuple[int, str | None, Mapping[str, float]]  # number of loss tokens, finish reason, numbers by name
ENDED = ("eos", "environment")  # finish reasons of completions that are not truncated
CACHING = ("hf", "moe")  # engines that cache rows; `plain` has nothing to cache


class Rollout(list[Trajectory]):
    """Completions of prompts, with a prompt's samples next to each other, and facts about the whole rollout.

    seconds   time spent generating
    engine    the engine that generated; for a slow one also why it was used

    A completion has at least one token, and includes its EOS if it ended with one. Log-probs are float32 (float64 for a
    float64 model), under the distribution each token was drawn from: temperature, top-k and top-p applied. Greedy:
    under softmax(logits).
    """

    def __init__(self, trajectories: Iterable[Trajectory] = (), seconds: float = 0.0, engine: str = ""):
        super().__init__(trajectories)
        self.seconds, self.engine = seconds, engine

    @property
    def prompt_ids(self) -> list[torch.Tensor]:
        return [one.prompt_ids for one in self]

    @property
    def completion_ids(self) -> list[torch.Tensor]:
        return [one.completion_ids for one in self]

    @property
    def logps(self) -> list[torch.Tensor]:
        return [one.rollout_logps_t for one in self if one.rollout_logps_t is not None]

    @property
    def finish_reasons(self) -> list[str]:
        return [str(one.finish) for one in self]

    @property
    def num_tokens(self) -> int:
        """The number of generated tokens."""
        return sum(one.num_loss_tokens for one in self)

    @property
    def metrics(self) -> dict[str, float]:
        return completion_metrics(ends_of(self))


def ends_of(trajectories: Sequence[Trajectory]) -> list[End]:
    """Return what `completion_metrics` needs about each trajectory, in a form that other processes can receive."""
    return [(sum(part.num_loss_tokens for part in (one, *one.others)), one.finish, one.info) for one in trajectories]


def completion_metrics(ends: Sequence[End]) -> dict[str, float]:
    """Return the mean length, the share that max_new_tokens cut, and the mean of every number in `info`."""
    length, cut = sum(length for length, *_ in ends), sum(why == "length" for _, why, _ in ends)
    found = {"completion/length": length / len(ends), "completion/truncated_fraction": cut / len(ends)}
    names = dict.fromkeys(name for *_, info in ends for name in info)
    return found | {name: sum(info.get(name, 0.0) for *_, info in ends) / len(ends) for name in names}


def generate(
    policy: Policy,
    prompts: Sequence[Array],
    sampling: Sampling,
    *,
    num_samples: int = 1,
    seed: int | None = None,
    addresses: Sequence[int] | None = None,
    ignore_eos: bool = False,
    cached: CachedRows | None = None,
    record_routing: bool = False,
) -> Rollout:
    """Return num_samples completions of each prompt, with the weights as they are now.

    prompts      rows of token ids of any lengths, at least one token each
    seed         the same seed gives the same completions; None draws one from torch's generator. Apart from that draw,
                 the caller's generators do not change
    addresses    which of the seed's random numbers each prompt uses; None counts them from 0. A prompt draws the same
                 tokens whichever prompts are beside it
    ignore_eos   only sampling.stop_ids end a completion
    cached       the cache of rows that continue later; needs num_samples=1
    record_routing   record the chosen experts of a Mixture-of-Experts model, as `Trajectory.routing_TLk`
    """
    # skip the full checks for values a trainer passes; they were checked when its config was made
    if type(num_samples) is not int or num_samples < 1:
        check_count(num_samples, "num_samples", 1)
    if seed is not None and (type(seed) is not int or not 0 <= seed < 2**63):
        check_count(seed, "seed")
    ids = checked_prompts(policy, prompts, sampling)
    if seed is None:
        seed = int(torch.randint(2**63 - 1, ()))
    if record_routing and (isinstance(policy.routers, str) or cached is not None):
        why = policy.routers if isinstance(policy.routers, str) else "these rows go on later"
        raise ValueError(f"record_routing must be False: {why}")
    addresses = range(len(ids)) if addresses is None else addresses
    if len(addresses) != len(ids):
        raise ValueError(f"addresses must be one for each of the {len(ids)} prompts, found {len(addresses)}")
    eos_ids = tuple(dict.fromkeys((*(() if ignore_eos else policy.eos_ids), *sampling.stop_ids)))
    start = time.perf_counter()
    # never in inference mode: a later rollout or training step could not use its tensors
    with torch.inference_mode(False), torch.no_grad(), policy.evaluating():
        uniforms_BT = uniforms(seed, addresses, num_samples, sampling.max_new_tokens)
        further: Json = {"cached": cached} if cached is not None and policy.kind in CACHING else {}
        further |= {"routers": policy.routers} if record_routing else {}
        completion_ids, logps, *routing = ENGINES[policy.kind](
            policy, ids, sampling, num_samples, uniforms_BT, eos_ids, **further
        )
    seconds = time.perf_counter() - start
    _check_not_nan(logps)
    last = torch.stack([tokens[-1] for tokens in completion_ids]).tolist()
    trajectories = sampled([prompt for prompt in ids for _ in range(num_samples)], completion_ids, logps)
    for trajectory, token in zip(trajectories, last, strict=True):
        trajectory.finish = "eos" if token in eos_ids else "length"
    for trajectory, chosen_TLk in zip(trajectories, routing[0] if routing else (), strict=bool(routing)):
        trajectory.routing_TLk = chosen_TLk
    return Rollout(trajectories, seconds, decoding.description(policy) if policy.kind == "hf" else policy.kind)


def _check_not_nan(logps: Sequence[torch.Tensor]) -> None:
    """Raise if a log-prob is NaN: the weights are then NaN too, and the tokens mean nothing."""
    if torch.cat(list(logps)).isnan().any():
        index = next(i for i, row in enumerate(logps) if row.isnan().any())
        raise FloatingPointError(
            f"log-probs of completion {index} must be numbers, found NaN: are the model's weights?"
        )


def checked_prompts(
    policy: Policy, prompts: Sequence[Array], sampling: Sampling, name: str = "prompts"
) -> list[torch.Tensor]:
    """Return prompts as ids after a check that the model can read and complete them.

    Errors give `name` and the index.
    """
    if len(prompts) == 0:
        raise ValueError(f"{name} must hold at least one prompt, found none")
    ids = [as_ids(prompt, f"{name}[{index}]") for index, prompt in enumerate(prompts)]
    longest = policy.max_length
    for index, prompt in enumerate(ids):
        if not len(prompt):
            raise ValueError(f"{name}[{index}] must hold at least one token, found none")
        if longest is not None and len(prompt) + sampling.max_new_tokens > longest:
            raise ValueError(
                f"{name}[{index}] must have at most {max(longest - sampling.max_new_tokens, 0)} tokens (the model reads "
                f"{longest}, of which max_new_tokens={sampling.max_new_tokens}), found {len(prompt)}"
            )
        policy.check_ids(prompt, f"{name}[{index}]")
    return ids


@dataclass(eq=False)
class Captured:
    """The weights as they were at a step: `version`. A sampler says what `weights` holds."""

    weights: Any
    version: int | None = None

    @property
    def versions(self) -> tuple[int, ...]:
        """The version for `Trajectory.versions`."""
        return () if self.version is None else (self.version,)


class Sampler:
    """`generate` for a trainer: in this process, with the policy as it is at each call.

    records_routing   True if rollouts record the chosen experts
    held              the weights it samples with, where they are not simply those of the policy
    """

    def __init__(self, policy: Policy, records_routing: bool = False):
        self.policy, self.records_routing = policy, records_routing
        self.held: Captured | None = None
        self._whole: Policy | None = None

    def capture(self, version: int | None = None) -> Captured:
        """Return the weights as they are now, for `use`. All processes must call this."""
        raise NotImplementedError(f"{type(self).__name__} samples with the weights as they are")

    def use(self, captured: Captured) -> None:
        """Sample with these weights from now on."""
        self.held = captured

    def offer(self, captured: Captured) -> None:
        """Let the thread that samples take up these weights, also between the turns of a conversation."""
        self.use(captured)

    def take_up(self) -> bool:
        """Take up the weights that were offered; return whether they are others."""
        return False

    @property
    def present(self) -> Policy:
        """The policy that samples: the gathered weights inside `ready`."""
        return self._whole or self.policy

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Return a context for rollouts.

        Sharded weights are gathered in all processes at its start and freed at its end.
        """
        with self.policy.whole() as self._whole:
            yield
        self._whole = None

    def __call__(
        self, prompts: Sequence[Array], sampling: Sampling, num_samples: int, seed: int,
        addresses: Sequence[int] | None = None,
    ) -> Rollout:  # fmt: skip
        """Return num_samples completions of each prompt.

        The result is empty without prompts: a process has none if there are fewer prompts than processes.
        """
        if not len(prompts):
            return Rollout()
        return generate(
            self.present,
            prompts,
            sampling,
            num_samples=num_samples,
            seed=seed,
            addresses=addresses,
            record_routing=self.records_routing,
        )

    def next_turn(
        self, prompts: Sequence[Array], sampling: Sampling, seed: int, addresses: Sequence[int], cached: CachedRows
    ) -> Rollout:
        """Sample one turn of rows that continue later."""
        return generate(self.present, prompts, sampling, seed=seed, addresses=addresses, cached=cached)


class CopySampler(Sampler):
    """A sampler on a copy of the policy, so that one thread can sample while another one trains.

    device   the copy's; None is the policy's own
    """

    def __init__(self, policy: Policy, device: str | None = None, records_routing: bool = False):
        with policy.whole() as whole, torch.no_grad():
            copied = Policy(copy.deepcopy(whole.inner), policy.tokenizer)
        copied.model.requires_grad_(False)
        for param in copied.model.parameters():
            param.grad = None
        copied.to(device or policy.device)
        super().__init__(copied, records_routing)
        self.trained = policy
        self._offered: Captured | None = None
        self._names = [name for name, param in policy.inner.named_parameters() if param.requires_grad]

    def capture(self, version: int | None = None) -> Captured:
        """Return copies of the trained weights on the copy's device."""
        with torch.no_grad(), self.trained.whole() as whole:
            params = dict(whole.inner.named_parameters())
            tensors = {name: params[name].detach().to(self.policy.device, copy=True) for name in self._names}
        return Captured(tensors, version)

    def use(self, captured: Captured) -> None:
        """Write these weights into the copy and free them."""
        if captured is self.held:
            return
        assert captured.weights is not None, "weights are used in the order in which they were captured"
        params = dict(self.policy.inner.named_parameters())
        with torch.no_grad():
            for name, tensor in captured.weights.items():
                params[name].copy_(tensor)
        captured.weights, self.held = None, captured

    def offer(self, captured: Captured) -> None:
        self._offered = captured

    def take_up(self) -> bool:
        captured = self._offered
        if captured is None or captured is self.held:
            return False
        self.use(captured)
        return True

    def __call__(
        self, prompts: Sequence[Array], sampling: Sampling, num_samples: int, seed: int,
        addresses: Sequence[int] | None = None,
    ) -> Rollout:  # fmt: skip
        return self._noted(super().__call__(prompts, sampling, num_samples, seed, addresses))

    def next_turn(
        self, prompts: Sequence[Array], sampling: Sampling, seed: int, addresses: Sequence[int], cached: CachedRows
    ) -> Rollout:
        if self.take_up():
            cached.rows.clear()  # of the weights before
        return self._noted(super().next_turn(prompts, sampling, seed, addresses, cached))

    def _noted(self, rollout: Rollout) -> Rollout:
        """Return the rollout with the version of the weights in every trajectory."""
        for trajectory in rollout:
            trajectory.versions = () if self.held is None else self.held.versions
        return rollout
