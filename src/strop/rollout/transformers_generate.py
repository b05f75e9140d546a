"""Rollouts by transformers' generate, for models our own engine cannot run: the one place where prompts are padded on the left.

Nothing but `Sampling` shapes the distribution: the model's own generation_config (a repetition penalty, a top-k of 20 …)
is put aside, because log-probs of a distribution the policy does not have are no use to an algorithm.

Shapes: B rows, T tokens, V vocabulary.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from strop.models import Policy, base_model, unwrapped
from strop.rollout.sampling import Sampling, completion_lengths, sampling_logps


def complete(
    policy: Policy,
    prompts: list[torch.Tensor],
    sampling: Sampling,
    num_samples: int,
    seed: int,
    eos_ids: tuple[int, ...],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    from transformers import GenerationConfig, LogitsProcessorList

    ids_BT, mask_BT = (t.repeat_interleave(num_samples, 0) for t in left_padded(prompts, policy.pad_id))
    rules: dict[str, Any] = {"do_sample": False}
    if not sampling.greedy:  # the recorder gives the distribution; nothing is to be cut off it again
        rules = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=list(eos_ids) or None,
        pad_token_id=policy.pad_id,
        use_cache=True,
        **rules,
    )
    recorder = LogpRecorder(sampling)
    with as_generator(policy), seeded(seed, policy.device):
        output_BT = unwrapped(policy.model).generate(
            input_ids=ids_BT.to(policy.device),
            attention_mask=mask_BT.to(policy.device),
            generation_config=config,
            logits_processor=LogitsProcessorList([recorder]),
        )
    new_BT = output_BT[:, ids_BT.shape[1] :]
    logps_BT = recorder.logps(new_BT)
    lengths = completion_lengths(new_BT, eos_ids).tolist()
    new_BT, logps_BT = new_BT.cpu(), logps_BT.cpu()
    tokens = [row[:length].clone() for row, length in zip(new_BT, lengths, strict=True)]
    return tokens, [row[:length].clone() for row, length in zip(logps_BT, lengths, strict=True)]


class LogpRecorder:
    """A logits processor that makes the sampling distribution and keeps the log-probs of what was drawn from it.

    It holds one [B, V] at a time: the token of a step is known at the next one.
    """

    def __init__(self, sampling: Sampling):
        self.sampling = sampling
        self._pending_BV: torch.Tensor | None = None
        self._logps: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._take(input_ids[:, -1])
        self._pending_BV = sampling_logps(scores, self.sampling)
        return scores if self.sampling.greedy else self._pending_BV  # untouched, so that ties are broken as ever

    def logps(self, new_BT: torch.Tensor) -> torch.Tensor:
        """Of the tokens generated; meaningless behind a row's EOS."""
        if len(self._logps) < new_BT.shape[1]:
            self._take(new_BT[:, len(self._logps)])
        return torch.stack(self._logps[: new_BT.shape[1]], 1)

    def _take(self, tokens_B: torch.Tensor) -> None:
        if self._pending_BV is not None:
            self._logps.append(self._pending_BV.gather(-1, tokens_B[:, None])[:, 0])
            self._pending_BV = None


def left_padded(prompts: list[torch.Tensor], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids_BT and the mask of what is no padding."""
    longest = max(map(len, prompts))
    ids_BT = torch.stack([torch.nn.functional.pad(p, (longest - len(p), 0), value=pad_id) for p in prompts])
    lengths_B = torch.tensor([len(p) for p in prompts])
    return ids_BT, (torch.arange(longest) >= longest - lengths_B[:, None]).long()


@contextlib.contextmanager
def as_generator(policy: Policy) -> Iterator[None]:
    """The model with a blank generation_config, and not compiled: a compiled forward would be compiled for every length."""
    from transformers import GenerationConfig

    inner = base_model(unwrapped(policy.model))
    config, compiled = inner.generation_config, inner._compiled_call_impl
    inner.generation_config, inner._compiled_call_impl = GenerationConfig(), None
    try:
        yield
    finally:
        inner.generation_config, inner._compiled_call_impl = config, compiled


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """torch's generators started from the seed, and afterwards where they were."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
