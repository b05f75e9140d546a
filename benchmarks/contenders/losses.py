"""What the operators are measured against: eager torch, Liger, and the floors that no implementation can go below.

Fairness, where it is a choice:

- Eager torch is what an author writes in ten lines: log_softmax and gather in float32, the group's advantages, the clipped
  surrogate, k3. torch.compile compiles that function, once for every shape.
- Liger is given advantages ready made. Its logits have one position more, as it asks for; they are tensors of their own. The
  reference's log-probs are by its own kernel. Its LM-head loss runs in chunks of one sequence (its default) and in a single
  one, with `compiled=False`: what it would compile is arithmetic on [B, T].
- Liger's fused linear cross-entropy is another loss with the same products and its gradient made in the forward too.
- A floor is measured, not derived: kernels that move the bytes, products of the full size.

Shapes: B sequences, T tokens, V the vocabulary, H hidden.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

BETA, CLIP = 0.04, 0.2
GROUP = 4


class Batch(NamedTuple):
    """Everything a policy loss needs besides logits."""

    ids_BT: torch.Tensor
    mask_BT: torch.Tensor
    old_BT: torch.Tensor
    ref_BT: torch.Tensor
    rewards_B: torch.Tensor


# ---- eager torch ------------------------------------------------------------------------------------------------------


def eager_logps(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    x = logits if logits.dtype == torch.float64 else logits.float()
    return x.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)


def eager_ratio_kl(
    policy_logits: torch.Tensor, ref_logits: torch.Tensor, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor]:
    logps = eager_logps(policy_logits, batch.ids_BT)
    with torch.no_grad():
        ref = eager_logps(ref_logits, batch.ids_BT)
    d = ref - logps
    return (logps - batch.old_BT).exp(), d.exp() - d - 1


def eager_advantages(rewards_B: torch.Tensor) -> torch.Tensor:
    grouped = rewards_B.view(-1, GROUP)
    return ((grouped - grouped.mean(1, keepdim=True)) / grouped.std(1, keepdim=True, unbiased=False)).view(-1)


def eager_policy_loss(logps: torch.Tensor, ref: torch.Tensor, batch: Batch) -> torch.Tensor:
    advantages = eager_advantages(batch.rewards_B)[:, None]
    ratio = (logps - batch.old_BT).exp()
    surrogate = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    d = ref - logps
    token_loss = BETA * (d.exp() - d - 1) - surrogate
    return ((token_loss * batch.mask_BT).sum(-1) / batch.mask_BT.sum(-1)).mean()


def eager_grpo_loss(policy_logits: torch.Tensor, ref_logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        ref = eager_logps(ref_logits, batch.ids_BT)
    return eager_policy_loss(eager_logps(policy_logits, batch.ids_BT), ref, batch)


def eager_linear_logps(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return eager_logps(hidden @ weight.T, ids)


def eager_linear_grpo_loss(hidden: torch.Tensor, weight: torch.Tensor, batch: Batch) -> torch.Tensor:
    return eager_policy_loss(eager_linear_logps(hidden, weight, batch.ids_BT), batch.ref_BT, batch)


def eager_linear_dpo_loss(hidden: torch.Tensor, weight: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The first half of the batch is chosen, the second rejected."""
    sums = (eager_linear_logps(hidden, weight, batch.ids_BT) * batch.mask_BT).sum(-1)
    chosen, rejected = (sums - (batch.ref_BT * batch.mask_BT).sum(-1)).chunk(2)
    return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()


def eager_linear_divergence(
    hidden: torch.Tensor, weight: torch.Tensor, teacher_hidden: torch.Tensor, teacher_weight: torch.Tensor
) -> torch.Tensor:
    """The reverse KL, Σ p·(log p − log q), of every token, and its mean."""
    log_p, log_q = ((h @ w.T).float().log_softmax(-1) for h, w in ((hidden, weight), (teacher_hidden, teacher_weight)))
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


# ---- Liger ------------------------------------------------------------------------------------------------------------


class Liger(NamedTuple):
    logps: Callable[..., Any]
    grpo_loss: Callable[..., Any]
    linear_logps: Callable[..., Any]
    linear_grpo_loss: Callable[..., Any]
    linear_cross_entropy: Callable[..., Any]


@functools.cache
def liger() -> Liger | None:
    """Its functions, where it imports."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None

    def of(module: str, name: str) -> Any:
        return getattr(importlib.import_module(f"liger_kernel.{module}"), name)

    # an ImportError here ends the run: a Liger that is installed is wanted
    return Liger(
        logps=of("ops.grpo_loss", "fused_selective_log_softmax"),
        grpo_loss=of("transformers.grpo_loss", "triton_grpo_loss"),
        linear_logps=of("chunked_loss.fused_linear_ppo", "LigerFusedLinearPPOBase").chunk_forward,
        linear_grpo_loss=of("chunked_loss.grpo_loss", "LigerFusedLinearGRPOLoss"),
        linear_cross_entropy=of("transformers.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyLoss"),
    )


def liger_grpo_loss(
    policy_logits: torch.Tensor, ref_logits: torch.Tensor, batch: Batch, advantages_B: torch.Tensor, in_place: bool
) -> torch.Tensor:
    """policy_logits, ref_logits: [B, T + 1, V], the last position unused."""
    found = liger()
    assert found is not None
    ref_BT = found.logps(ref_logits, batch.ids_BT, temperature=1.0, mask=batch.mask_BT)
    loss, _ = found.grpo_loss(
        policy_logits, batch.old_BT, ref_BT, batch.ids_BT, advantages_B, batch.mask_BT,
        temperature=1.0, beta=BETA, eps_low=CLIP, eps_high=CLIP, inplace=in_place, loss_type="grpo", reduce=True,
    )  # fmt: skip
    return loss


def liger_linear_grpo_loss(
    hidden: torch.Tensor, weight: torch.Tensor, batch: Batch, advantages_B: torch.Tensor, sequences_at_once: int
) -> torch.Tensor:
    found = liger()
    assert found is not None
    module = found.linear_grpo_loss(
        beta=BETA, compiled=False, chunk_size=sequences_at_once, epsilon_low=CLIP, epsilon_high=CLIP, loss_type="grpo"
    )
    loss, _ = module(
        hidden, weight, batch.ids_BT, batch.mask_BT, advantages_B,
        ref_per_token_logps=batch.ref_BT, old_per_token_logps=batch.old_BT,
    )  # fmt: skip
    return loss


def liger_linear_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    found = liger()
    assert found is not None
    return found.linear_cross_entropy()(weight, hidden.flatten(0, -2), ids.flatten())


# ---- floors -----------------------------------------------------------------------------------------------------------


def read(*tensors: torch.Tensor) -> None:
    """Reads every element once."""
    from benchmarks.contenders.read_kernel import read_once

    for tensor in tensors:
        read_once(tensor)


def products(
    number: int, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, logits_NV: torch.Tensor
) -> Callable[[], None]:
    """The first of: the logits; the hidden states' gradient from them; the weight's; another model's logits. Back to
    back at full size."""
    d_hidden_NH, d_weight_VH = torch.empty_like(hidden_NH), torch.empty_like(weight_VH)
    calls = [
        lambda: torch.mm(hidden_NH, weight_VH.T, out=logits_NV),
        lambda: torch.mm(logits_NV, weight_VH, out=d_hidden_NH),
        lambda: torch.mm(logits_NV.T, hidden_NH, out=d_weight_VH),
        lambda: torch.mm(hidden_NH, weight_VH.T, out=logits_NV),
    ][:number]

    def run() -> None:
        for call in calls:
            call()

    return run


# ---- what of a result is compared -------------------------------------------------------------------------------------


class Numbers:
    """The loss or values, and of each gradient some entries, in units of the largest of each kind.

    So a gradient that is 0 where it should be small does not pass. chosen: ids whose entries in a gradient of logits are
    a kind of their own, the others being thousands of times smaller.
    """

    def __init__(self, expected: Any, chosen_BT: torch.Tensor | None = None, entries: int = 4096) -> None:
        self.chosen_BT, self.entries = chosen_BT, entries
        self.units = [block.abs().max().clamp(min=1e-30) for block in self._blocks(expected)]
        self.expected = self(expected)

    def __call__(self, result: Any) -> np.ndarray:
        blocks = self._blocks(result)
        assert len(blocks) == len(self.units), "another number of gradients than expected"
        scaled = [(block / unit).flatten() for block, unit in zip(blocks, self.units, strict=True)]
        return torch.cat(scaled).cpu().numpy()

    def _blocks(self, result: Any) -> list[torch.Tensor]:
        values, gradients = result
        blocks = [value.detach().double().reshape(-1) for value in values]
        for gradient in gradients:
            if self.chosen_BT is not None:
                T = self.chosen_BT.shape[1]
                gradient = gradient[:, :T]  # Liger's has a position more
                blocks.append(gradient.gather(-1, self.chosen_BT[..., None]).double())
                columns = torch.arange(1, gradient.shape[-1], max(1, gradient.shape[-1] // 61), device=gradient.device)
                gradient = gradient[..., columns].masked_fill(columns == self.chosen_BT[..., None], 0.0)
            flat = gradient.reshape(-1)
            blocks.append(flat[:: max(1, flat.numel() // self.entries)].double())
        return blocks


def peak_memory(call: Callable[[], Any], inputs: list[torch.Tensor]) -> dict[str, int]:
    """Bytes of GPU memory a call takes beside what is there before it.

    memory_beyond_inputs      at its peak
    memory_beyond_gradients   less the gradients it returns (none where they lie in an input's memory)
    """
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _, gradients = call() or ((), ())
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    given = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    new = [g for g in gradients if g.untyped_storage().data_ptr() not in given]
    return {
        "memory_beyond_inputs": peak,
        "memory_beyond_gradients": peak - sum(g.numel() * g.element_size() for g in new),
    }
