"""Routers of Hugging Face's Mixture-of-Experts models: which experts they choose, recorded and replayed.

A router (Mixtral's, Qwen2-MoE's, Qwen3-MoE's and those like them) is a module that gives of N tokens

    logits [N, E],  weights [N, k] = softmax(logits) at the k largest, in most models divided by their sum,  experts [N, k]

Hooks on it tell what it chose, or exchange that for what was chosen before. The weights of replayed experts come from the
router's logits as they are now, so the gradient reaches the router.

Shapes: N tokens, L layers with a router, E experts, k of them chosen by a token.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from strop.models.kinds import unwrapped
from strop.models.trial import tried

RECORDED = torch.int16  # what chosen experts are kept in
Within = Callable[[], contextlib.AbstractContextManager[object]]  # around a forward
NONE = -1  # in place of an expert where no choice was recorded


class Routers:
    """Of one model, in the order of its layers.

    normalises   whether the weights of the chosen experts are divided by their sum
    counts       [2] of every replay since they were last cleared: places (a token in a layer) where the router would
                 have chosen other experts, and all places with a record
    """

    def __init__(self, modules: Sequence[nn.Module], normalises: bool):
        self.modules, self.normalises = list(modules), normalises
        self.top_k: int = modules[0].top_k  # type: ignore[assignment]
        self.counts: list[torch.Tensor] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[Callable[[], torch.Tensor]]:
        """Within, the function given says which experts the latest forward chose: [N, L, k]."""
        chosen: list[Any] = [None] * len(self.modules)

        def keep(layer: int, output: Any) -> None:
            chosen[layer] = output[2].to(RECORDED)

        with self._hooked(keep):
            yield lambda: torch.stack(chosen, 1)

    def replay(self, chosen_NLk: torch.Tensor) -> "Replay":
        """For a forward of so many tokens; NONE where a token's router chooses by itself."""
        wanted = [len(self.modules), self.top_k]
        if list(chosen_NLk.shape[1:]) != wanted:
            raise ValueError(f"routing must be of shape [N, {wanted[0]}, {wanted[1]}], found {list(chosen_NLk.shape)}")
        return Replay(self, chosen_NLk)

    def weights(self, logits_NE: torch.Tensor, experts_Nk: torch.Tensor) -> torch.Tensor:
        """[N, k] of these experts, as the model weighs those that it chooses."""
        weights_Nk = logits_NE.softmax(-1, dtype=torch.float32).gather(-1, experts_Nk)
        return weights_Nk / weights_Nk.sum(-1, keepdim=True) if self.normalises else weights_Nk

    @contextlib.contextmanager
    def _hooked(self, hook: Callable[[int, object], object]) -> Iterator[None]:
        """hook   (layer, what its router gives) → what it is to give instead, or None"""

        def of_layer(layer: int, module: nn.Module, arguments: object, output: object) -> object:
            return hook(layer, output)

        handles = [
            module.register_forward_hook(functools.partial(of_layer, layer))
            for layer, module in enumerate(self.modules)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@dataclass
class Replay:
    """The experts of one forward, and of that forward computed again in the backward.

    changed   by layer, [N] whether the router would have chosen other experts than those recorded
    """

    routers: Routers
    chosen_NLk: torch.Tensor
    changed: dict[int, torch.Tensor] = field(default_factory=dict)
    _is_used: bool = False

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Within, the routers choose so. A checkpointed layer asks for it within the forward too."""
        if self._is_used:
            yield
            return
        self._is_used = True
        try:
            with self.routers._hooked(self._exchange):
                yield
        finally:
            self._is_used = False

    def count(self) -> None:
        """Into the routers' counts, after the forward."""
        places = (self.chosen_NLk[..., 0] != NONE).sum()
        self.routers.counts.append(torch.stack([torch.stack(list(self.changed.values())).sum(), places]))

    def _exchange(self, layer: int, output: Any) -> tuple[torch.Tensor, ...]:
        logits_NE, weights_Nk, own_Nk = output
        chosen_Nk = self.chosen_NLk[:, layer].to(own_Nk.dtype)
        if len(chosen_Nk) != len(own_Nk):
            raise ValueError(
                f"routing must have one entry for each of the {len(own_Nk)} tokens, found {len(chosen_Nk)}"
            )
        experts_Nk = torch.where(chosen_Nk == NONE, own_Nk, chosen_Nk)
        self.changed[layer] = (experts_Nk.sort(-1)[0] != own_Nk.sort(-1)[0]).any(-1)
        return logits_NE, self.routers.weights(logits_NE, experts_Nk).to(weights_Nk.dtype), experts_Nk


@contextlib.contextmanager
def replaying(routers: Routers | str, chosen_NLk: torch.Tensor, within: Within) -> Iterator[Within]:
    """Around a forward, which takes place in what is given here: `within`, and in it the routers choose these experts."""
    if isinstance(routers, str):
        raise ValueError(f"routing must be None: {routers}")
    replay = routers.replay(chosen_NLk)

    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with within(), replay.used():
            yield

    yield both
    replay.count()


# ---- which they are ----


def find_routers(policy: Any) -> Routers | str:
    """A policy's routers, or why there are none whose choices could be replayed."""
    if policy.kind == "moe":
        return "strop's own MoE routes alike in rollout and training, bit for bit"
    if policy.kind == "plain":
        return "it is no Hugging Face model"
    if policy.model is not unwrapped(policy.model):
        return "it is compiled"
    return routers_of(policy.model)


def routers_of(model: nn.Module) -> Routers | str:
    modules = [module for module in model.modules() if "Router" in type(module).__name__]
    if not modules:
        return "it has no routers as Mixtral and Qwen's MoE models have them"
    found = [_normalises(module) for module in modules]
    for module, normalises in zip(modules, found, strict=True):
        if isinstance(normalises, str):
            return f"its {type(module).__name__} {normalises}"
    if len({(normalises, module.top_k) for module, normalises in zip(modules, found, strict=True)}) > 1:
        return "its routers are of different kinds"
    return Routers(modules, found[0] is True)


def _normalises(router: torch.nn.Module) -> bool | str:
    """Whether it divides the weights of the chosen experts by their sum, found on a trial; or what else it does."""
    sizes: list[Any] = [getattr(router, name, None) for name in ("top_k", "num_experts", "hidden_dim")]
    weight = next(router.parameters(), None)
    if weight is None or not all(isinstance(size, int) for size in sizes):
        return "does not say top_k, num_experts and hidden_dim"
    top_k, num_experts, hidden_dim = sizes
    if num_experts > torch.iinfo(RECORDED).max:
        return f"has {num_experts} experts, more than are recorded"
    with tried(router, weight.device):
        states_NH = torch.randn(8, hidden_dim, generator=torch.Generator().manual_seed(0)).to(weight)
        try:
            output = router(states_NH)
        except TypeError as error:  # it asks for more than states
            return f"cannot be tried alone ({error})"
        shapes = [list(one.shape) for one in output] if isinstance(output, tuple) and len(output) == 3 else None
        if shapes != [[8, num_experts], [8, top_k], [8, top_k]]:
            return "does not give logits, weights and experts"
        logits_NE, weights_Nk, experts_Nk = output
        allowed = 1e-4 if weights_Nk.dtype.itemsize >= 4 else 2e-2
        for normalises in (True, False):
            wanted_Nk = Routers([router], normalises).weights(logits_NE, experts_Nk)
            if torch.allclose(weights_Nk.float(), wanted_Nk, rtol=allowed, atol=0.0):
                return normalises
    return "weighs experts by something else than the softmax of its logits"
