"""Recording and replay of the experts that routers of Hugging Face's Mixture-of-Experts models choose.

A router (of Mixtral, Qwen2-MoE, Qwen3-MoE and similar models) is a module that returns for N tokens

    logits [N, E],  weights [N, k] = softmax(logits) at the k largest, in most models divided by their sum,  experts [N, k]

Forward hooks record the chosen experts or replace them by recorded ones. The weights of replayed experts are computed
from the router's current logits, so the gradient reaches the router.

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

RECORDED = torch.int16  # dtype of recorded expert ids
Within = Callable[[], contextlib.AbstractContextManager[object]]  # makes the context in which a forward runs
RouterOutput = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # logits, weights and experts
NONE = -1  # stands for an expert where no choice was recorded


class Routers:
    """The routers of one model, in the order of its layers.

    normalises   True if the weights of the chosen experts are divided by their sum
    counts       [2] for every replay since the list was last cleared: the number of (token, layer) pairs where the
                 router would have chosen other experts, and the number of pairs with a record
    """

    def __init__(self, modules: Sequence[nn.Module], normalises: bool):
        self.modules, self.normalises = list(modules), normalises
        self.top_k: int = modules[0].top_k  # type: ignore[assignment]
        self.counts: list[torch.Tensor] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[Callable[[], torch.Tensor]]:
        """Yield a function that returns the experts [N, L, k] of the latest forward."""
        chosen: dict[int, torch.Tensor] = {}

        def keep(layer: int, output: RouterOutput) -> None:
            chosen[layer] = output[2].to(RECORDED)

        with self._hooked(keep):
            yield lambda: torch.stack([chosen[layer] for layer in range(len(self.modules))], 1)

    def replay(self, chosen_NLk: torch.Tensor) -> "Replay":
        """Return the replay of these experts in a forward of N tokens. Where an entry is NONE, the router chooses."""
        wanted = [len(self.modules), self.top_k]
        if list(chosen_NLk.shape[1:]) != wanted:
            raise ValueError(f"routing must be of shape [N, {wanted[0]}, {wanted[1]}], found {list(chosen_NLk.shape)}")
        return Replay(self, chosen_NLk)

    def weights(self, logits_NE: torch.Tensor, experts_Nk: torch.Tensor) -> torch.Tensor:
        """Return the weights [N, k] of these experts, computed as the model does for its own choice."""
        weights_Nk = logits_NE.softmax(-1, dtype=torch.float32).gather(-1, experts_Nk)
        return weights_Nk / weights_Nk.sum(-1, keepdim=True) if self.normalises else weights_Nk

    @contextlib.contextmanager
    def _hooked(self, hook: Callable[[int, RouterOutput], object]) -> Iterator[None]:
        """Call the hook after every router. hook   (layer, router output) → another output, or None to keep it"""

        def of_layer(layer: int, module: nn.Module, arguments: object, output: RouterOutput) -> object:
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
    """The experts to use in one forward and in its recomputation during the backward.

    changed   layer → [N], True where the router would have chosen other experts than those recorded
    """

    routers: Routers
    chosen_NLk: torch.Tensor
    changed: dict[int, torch.Tensor] = field(default_factory=dict)
    _is_used: bool = False

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Make the routers return these experts. Contexts may nest: a checkpointed layer enters it inside the forward."""
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
        """Append to the routers' `counts`. Call it after the forward."""
        places = (self.chosen_NLk[..., 0] != NONE).sum()
        self.routers.counts.append(torch.stack([torch.stack(list(self.changed.values())).sum(), places]))

    def _exchange(self, layer: int, output: RouterOutput) -> RouterOutput:
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
    """Yield a context for one forward: `within`, and inside it the routers return these experts."""
    if isinstance(routers, str):
        raise ValueError(f"routing must be None: {routers}")
    replay = routers.replay(chosen_NLk)

    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with within(), replay.used():
            yield

    yield both
    replay.count()


# ---- finding the routers ----


def find_routers(policy: Any) -> Routers | str:
    """Return a policy's routers, or the reason why no choices can be replayed."""
    if policy.kind == "moe":
        return "strop's own MoE routes alike in rollout and training, bit for bit"
    if policy.kind == "plain":
        return "it is no Hugging Face model"
    if policy.model is not unwrapped(policy.model):
        return "it is compiled"
    with policy.evaluating():
        return _routers_of(policy.model)


def _routers_of(model: nn.Module) -> Routers | str:
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
    """Return whether the router divides the chosen experts' weights by their sum, found by a trial; or why it is unusable."""
    sizes: list[Any] = [getattr(router, name, None) for name in ("top_k", "num_experts", "hidden_dim")]
    weight = next(router.parameters(), None)
    if weight is None or not all(isinstance(size, int) for size in sizes):
        return "does not say top_k, num_experts and hidden_dim"
    top_k, num_experts, hidden_dim = sizes
    if num_experts > torch.iinfo(RECORDED).max:
        return f"has {num_experts} experts, more than are recorded"
    with torch.no_grad():
        states_NH = torch.randn(8, hidden_dim, generator=torch.Generator().manual_seed(0)).to(weight)
        try:
            output = router(states_NH)
        except TypeError as error:  # its forward takes more than the hidden states
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
