"""What the operators are given in the suite `losses`: tensors as a training step has them.

Shapes: B sequences, T tokens, V the vocabulary, H hidden, N = B·T.
"""

import functools
import gc
import sys
from collections.abc import Callable

import torch

from benchmarks.contenders import losses as peers
from benchmarks.contenders.losses import BETA, GROUP, Batch

OPTIONS = {"samples_per_prompt": GROUP, "beta": BETA}


class LogitsProblem:
    """A policy a little way from its reference and from the policy that sampled; every token counts."""

    def __init__(self, B: int, T: int, V: int, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        random = _Random(device, seed)
        self.policy = random.normal(B, T, V, dtype=dtype)
        self.ref = random.normal(B, T, V, dtype=dtype).mul_(0.1).add_(self.policy)
        ids_BT = random.ids(V, B, T)
        with torch.no_grad():
            logps, ref_logps = (_in_rows(peers.eager_logps, x, ids_BT) for x in (self.policy, self.ref))
        self.batch = random.batch(ids_BT, logps, ref_logps)
        self.advantages_B = peers.eager_advantages(self.batch.rewards_B)
        self.d_BT = random.normal(B, T)
        self.policy.requires_grad_()

    @functools.cached_property
    def gradient(self) -> torch.Tensor:
        """Memory for the floors to write."""
        return torch.empty_like(self.policy, requires_grad=False)

    @functools.cached_property
    def ref_with_one_more(self) -> torch.Tensor:
        return torch.cat([self.ref, self.ref[:, :1]], 1)

    def policy_with_one_more(self) -> torch.Tensor:
        return torch.cat([self.policy.detach(), self.policy.detach()[:, :1]], 1).requires_grad_()


class HeadProblem:
    """An LM head whose logits have variance 1."""

    def __init__(self, B: int, T: int, H: int, V: int, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        random = _Random(device, seed)
        self.hidden = random.normal(B, T, H, dtype=dtype)
        self.weight = random.normal(V, H, dtype=dtype).mul_(H**-0.5)
        ids_BT = random.ids(V, B, T)
        with torch.no_grad():
            logps = torch.stack([
                peers.eager_linear_logps(h, self.weight, ids) for h, ids in zip(self.hidden, ids_BT, strict=True)
            ])  # fmt: skip
        self.batch = random.batch(ids_BT, logps, logps + 0.1 * random.normal(B, T))
        self.advantages_B = peers.eager_advantages(self.batch.rewards_B)
        self.d_BT = random.normal(B, T)
        self.hidden.requires_grad_()
        self.weight.requires_grad_()

    @functools.cached_property
    def teacher(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and head of another model of the same size, a little way from this one."""
        random = _Random(str(self.hidden.device), 1)
        return tuple(  # type: ignore[return-value]
            one.detach() + 0.3 * one.detach().std() * random.normal(*one.shape, dtype=one.dtype)
            for one in (self.hidden, self.weight)
        )

    @functools.cached_property
    def logits_NV(self) -> torch.Tensor:
        """Memory for the floors to write."""
        B, T, _ = self.hidden.shape
        return torch.empty(B * T, len(self.weight), dtype=self.weight.dtype, device=self.weight.device)

    def products(self, number: int) -> Callable[[], None]:
        return peers.products(number, self.hidden.detach().flatten(0, 1), self.weight.detach(), self.logits_NV)


class _Random:
    def __init__(self, device: str, seed: int) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device = device

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device=self.device, generator=self.generator)

    def ids(self, V: int, *shape: int) -> torch.Tensor:
        return torch.randint(V, shape, device=self.device, generator=self.generator)

    def batch(self, ids_BT: torch.Tensor, logps_BT: torch.Tensor, ref_logps_BT: torch.Tensor) -> Batch:
        B, T = ids_BT.shape
        mask_BT = torch.ones(B, T, dtype=torch.bool, device=self.device)
        return Batch(ids_BT, mask_BT, logps_BT + 0.1 * self.normal(B, T), ref_logps_BT, self.normal(B))


def _in_rows(function: Callable[..., torch.Tensor], x_BTV: torch.Tensor, ids_BT: torch.Tensor) -> torch.Tensor:
    """Row by row, for the sake of memory."""
    return torch.stack([function(x, ids) for x, ids in zip(x_BTV, ids_BT, strict=True)])


def tidy() -> None:
    """Give back what the last problem took."""
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
