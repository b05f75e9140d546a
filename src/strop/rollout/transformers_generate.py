"""Rollouts by transformers' generate, for models our own engine cannot run. Only here are prompts padded on the left.

Only `Sampling` shapes the distribution. The model's own generation_config (a repetition penalty, a top-k of 20 …) is
not used, because algorithms need log-probs of the policy's own distribution.

Shapes: B rows, T tokens, V vocabulary.
"""

import contextlib
from collections.abc import Iterator

import torch

from strop.models import Policy, base_model, unwrapped
from strop.rollout.grammar import Matcher, Matchers, allowed_bits, restricted, take
from strop.rollout.sampling import Sampling, completion_lengths, draw


def complete(
    policy: Policy,
    prompts: list[torch.Tensor],
    sampling: Sampling,
    num_samples: int,
    uniforms_BT: torch.Tensor,
    eos_ids: tuple[int, ...],
    matchers: Matchers | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    from transformers import GenerationConfig, LogitsProcessorList

    ids_BT, mask_BT = (t.repeat_interleave(num_samples, 0) for t in left_padded(prompts, policy.pad_id))
    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=list(eos_ids) or None,
        pad_token_id=policy.pad_id,
        use_cache=True,
        do_sample=False,  # `Draws` leaves one token to choose
    )
    draws = Draws(sampling, uniforms_BT, matchers, eos_ids)
    with as_generator(policy):
        output_BT = unwrapped(policy.model).generate(
            input_ids=ids_BT.to(policy.device),
            attention_mask=mask_BT.to(policy.device),
            generation_config=config,
            logits_processor=LogitsProcessorList([draws]),
        )
    new_BT = output_BT[:, ids_BT.shape[1] :]
    lengths_B = completion_lengths(new_BT, eos_ids)
    lengths = lengths_B.minimum(draws.lengths_B.to(lengths_B.device)).tolist()
    new_BT, logps_BT = new_BT.cpu(), torch.stack(draws.logps, 1).cpu()
    tokens = [row[:length].clone() for row, length in zip(new_BT, lengths, strict=True)]
    return tokens, [row[:length].clone() for row, length in zip(logps_BT, lengths, strict=True)]


def complete_by_length(
    policy: Policy,
    prompts: list[torch.Tensor],
    sampling: Sampling,
    num_samples: int,
    uniforms_BT: torch.Tensor,
    eos_ids: tuple[int, ...],
    matchers: Matchers | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Complete prompts of equal length together, without padding, for models that padding changes."""
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(index)
    rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for indices in by_length.values():
        places = [index * num_samples + sample for index in indices for sample in range(num_samples)]
        some = [prompts[index] for index in indices]
        further = None if matchers is None else [matchers[place] for place in places]
        found = complete(policy, some, sampling, num_samples, uniforms_BT[places], eos_ids, further)
        rows |= zip(places, zip(*found, strict=True), strict=True)
    tokens, logps = zip(*(rows[place] for place in range(len(rows))), strict=True)
    return list(tokens), list(logps)


class Draws:
    """A logits processor that draws each row's token with the row's own random number and masks all other tokens.

    logps       [B] of every step; they have no meaning after a row's EOS
    lengths_B   the step at which a row's grammar ended; a large number if none did
    """

    def __init__(
        self,
        sampling: Sampling,
        uniforms_BT: torch.Tensor,
        matchers: Matchers | None = None,
        eos_ids: tuple[int, ...] = (),
    ):
        self.sampling, self.uniforms_BT, self.eos_ids = sampling, uniforms_BT, eos_ids
        self.logps: list[torch.Tensor] = []
        self.matchers: list[Matcher | None] = list(matchers or [None] * len(uniforms_BT))
        self.lengths_B = torch.full((len(uniforms_BT),), 2**62)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if any(self.matchers):
            scores = restricted(scores, allowed_bits(self.matchers).to(scores.device))
        uniforms_B = self.uniforms_BT[:, len(self.logps)].to(scores.device)
        tokens_B, logps_B = draw(scores, uniforms_B, self.sampling)
        self.logps.append(logps_B)
        if self.eos_ids:  # rows whose grammar has ended need no further step
            tokens_B[self.lengths_B.to(scores.device) < len(self.logps)] = self.eos_ids[0]
        for row in take(self.matchers, tokens_B.tolist()) if any(self.matchers) else ():
            self.lengths_B[row], self.matchers[row] = len(self.logps), None
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens_B[:, None], 0.0)


def left_padded(prompts: list[torch.Tensor], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids_BT and the mask of the real tokens."""
    longest = max(map(len, prompts))
    ids_BT = torch.stack([torch.nn.functional.pad(p, (longest - len(p), 0), value=pad_id) for p in prompts])
    lengths_B = torch.tensor([len(p) for p in prompts])
    return ids_BT, (torch.arange(longest) >= longest - lengths_B[:, None]).long()


@contextlib.contextmanager
def as_generator(policy: Policy) -> Iterator[None]:
    """Blank the model's generation_config, and its compiled forward, which would be compiled for every length."""
    from transformers import GenerationConfig

    inner = base_model(unwrapped(policy.model))
    config, compiled = inner.generation_config, inner._compiled_call_impl
    inner.generation_config, inner._compiled_call_impl = GenerationConfig(), None
    try:
        yield
    finally:
        inner.generation_config, inner._compiled_call_impl = config, compiled
