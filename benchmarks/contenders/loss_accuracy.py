"""How exact the operators are: strop and eager torch against float64 on the same inputs, for the suite `losses`."""

from abc import ABC, abstractmethod
from typing import Any

import torch

from benchmarks.contenders import losses as peers
from benchmarks.contenders.loss_problems import OPTIONS, HeadProblem, LogitsProblem, tidy
from benchmarks.contenders.losses import Batch
from benchmarks.harness import Method
from strop.ops import grpo_loss, linear_grpo_loss, linear_logp, logp


class Accuracy(ABC):
    """How far strop and eager torch are from float64 on the same inputs, in root mean squares over several batches.

    Values as they are; a gradient relative to the root mean square of the true one, for each kind of its entries.
    """

    work: str
    batches = 32

    def __init__(self, device: str) -> None:
        self.device = device
        self.small = device == "cpu"
        self.labels = {"operator": "accuracy", "way": self.work, "shape": self.shape}

    @property
    @abstractmethod
    def shape(self) -> str: ...

    @abstractmethod
    def results(self, dtype: torch.dtype, seed: int) -> dict[str, dict[str, torch.Tensor]]:
        """`truth` and the contenders, each with the same quantities."""

    def measure(self, method: Method) -> dict[str, Any]:
        errors = {str(dtype).split(".")[1]: self._errors(dtype) for dtype in (torch.float32, torch.bfloat16)}
        tidy()
        return {"work": self.work, "labels": {**self.labels, "batches": self.batches}, "errors": errors}

    def _errors(self, dtype: torch.dtype) -> dict[str, dict[str, float]]:
        squares: dict[tuple[str, str], list[float]] = {}  # of the error, of the truth
        for seed in range(self.batches):
            found = self.results(dtype, seed)
            truth = found.pop("truth")
            for name, quantities in found.items():
                for quantity, value in quantities.items():
                    both = squares.setdefault((name, quantity), [0.0, 0.0])
                    both[0] += (value.double() - truth[quantity]).square().mean().item()
                    both[1] += truth[quantity].square().mean().item()
        errors: dict[str, dict[str, float]] = {}
        for (name, quantity), (wrong, true) in squares.items():
            unit = true if "gradient" in quantity else self.batches
            errors.setdefault(name, {})[quantity] = float(f"{(wrong / unit) ** 0.5:.4g}")
        return errors


class AccuracyOfLogits(Accuracy):
    work = "accuracy of grpo_loss and logp"

    @property
    def shape(self) -> str:
        return f"4×16, V {self.vocabulary:,}"

    @property
    def vocabulary(self) -> int:
        return 1009 if self.small else 50257

    def results(self, dtype: torch.dtype, seed: int) -> dict[str, dict[str, torch.Tensor]]:
        p = LogitsProblem(4, 16, self.vocabulary, self.device, dtype, seed)
        b = p.batch

        def ours(logits: torch.Tensor, ref: torch.Tensor, batch: Batch) -> torch.Tensor:
            return grpo_loss(logits, ref, b.ids_BT, b.old_BT, b.rewards_B, b.mask_BT, **OPTIONS).loss

        def quantities(loss_of: Any, logps_of: Any, logits: torch.Tensor, ref: torch.Tensor, batch: Batch) -> Any:
            logits = logits.detach().requires_grad_()
            loss = loss_of(logits, ref, batch)
            (gradient,) = torch.autograd.grad(loss, logits)
            chosen = b.ids_BT[..., None]
            return {
                "logp": logps_of(logits, b.ids_BT).detach(),
                "loss": loss.detach(),
                "gradient, chosen token": gradient.gather(-1, chosen),
                "gradient, other tokens": gradient.scatter(-1, chosen, 0.0),
            }

        return {
            "truth": quantities(
                peers.eager_grpo_loss, peers.eager_logps, p.policy.double(), p.ref.double(), _double(b)
            ),
            "strop": quantities(ours, logp, p.policy, p.ref, b),
            "eager": quantities(peers.eager_grpo_loss, peers.eager_logps, p.policy, p.ref, b),
        }


class AccuracyOfHeads(Accuracy):
    work = "accuracy of linear_grpo_loss and linear_logp"

    @property
    def shape(self) -> str:
        B, T, H, V = self.head
        return f"N {B * T:,}, H {H:,}, V {V:,}, four chunks"

    @property
    def head(self) -> tuple[int, int, int, int]:
        # N is more than 2·H: fewer tokens would lie in the memory of the weight's gradient, all at once
        return (4, 32, 64, 1009) if self.small else (8, 64, 128, 32003)

    def results(self, dtype: torch.dtype, seed: int) -> dict[str, dict[str, torch.Tensor]]:
        p = HeadProblem(*self.head, self.device, dtype, seed)
        b = p.batch
        B, T, _, V = self.head
        per_logit = dtype.itemsize if self.device == "cuda" else dtype.itemsize + 12  # torch's rows take copies
        workspace = (B * T // 4) * V * per_logit

        def ours(hidden: torch.Tensor, weight: torch.Tensor, batch: Batch) -> torch.Tensor:
            return linear_grpo_loss(
                hidden, weight, b.ids_BT, b.old_BT, b.rewards_B, b.mask_BT, ref_logps=b.ref_BT, workspace=workspace,
                **OPTIONS,
            ).loss  # fmt: skip

        def quantities(loss_of: Any, logps_of: Any, hidden: torch.Tensor, weight: torch.Tensor, batch: Batch) -> Any:
            hidden, weight = (x.detach().requires_grad_() for x in (hidden, weight))
            loss = loss_of(hidden, weight, batch)
            d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
            return {
                "logp": logps_of(hidden, weight, b.ids_BT).detach(),
                "loss": loss.detach(),
                "gradient, hidden states": d_hidden,
                "gradient, weight": d_weight,
            }

        return {
            "truth": quantities(
                peers.eager_linear_grpo_loss, peers.eager_linear_logps, p.hidden.double(), p.weight.double(), _double(b)
            ),
            "strop": quantities(ours, linear_logp, p.hidden, p.weight, b),
            "eager": quantities(peers.eager_linear_grpo_loss, peers.eager_linear_logps, p.hidden, p.weight, b),
        }


def _double(batch: Batch) -> Batch:
    return Batch(*(x.double() if x.is_floating_point() else x for x in batch))


def error_ratio(errors: dict[str, dict[str, float]], quantity: str) -> float:
    """Our error as a multiple of eager torch's."""
    return errors["strop"][quantity] / max(errors["eager"][quantity], 1e-300)
