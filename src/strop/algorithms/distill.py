"""Distill: a student learns a teacher's distribution, on completions of its own (GKD, arXiv 2306.13649).

A step: the student samples a completion of each prompt; with probability 1 − on_policy the completion of the dataset or
of the teacher is taken instead. The teacher reads the completions. One update is made on the mean over their tokens of

    reverse_kl   KL(student ‖ teacher)        forward_kl   KL(teacher ‖ student)        jsd   between the two, by beta

over the whole vocabulary (`strop.ops.linear_divergence`), or of the reverse KL at the sampled token alone

    sampled      policy gradient with the advantage log π_teacher − log π_old of each token
"""

import functools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch

from strop._types import Array, Json, Texts
from strop.algorithms.on_policy import OnPolicy, WholeBatch
from strop.config import DistillConfig
from strop.config.on_policy import BETAS
from strop.config.sampling import is_address
from strop.data.batch import TokenBatch, Trajectory, joined, on_device
from strop.data.formats import column_counts
from strop.data.inputs import fit
from strop.data.tokenize import encode_row, row_named
from strop.losses import PolicyRule
from strop.losses.divergence import divergence
from strop.models import Policy
from strop.ops import linear_divergence
from strop.rewards import reward_columns, sample_table
from strop.rollout.generate import completion_metrics, generate
from strop.rollout.teacher import ServedTeacher
from strop.training.trainer import Mean, Metrics, on_host


class Distance(NamedTuple):
    """The loss of a micro-batch as its share of the batch's, and the divergence of its tokens, [n]."""

    loss: torch.Tensor
    divergences_n: torch.Tensor


class Distill(OnPolicy):
    """On-policy distillation.

    distill = Distill(model=student, teacher=teacher, learning_rate=1e-5, max_new_tokens=128)
    metrics = distill.train_step(prompts)          # or distill.train(dataset)

    teacher   a model, a folder or a name, with the student's vocabulary, or for "sampled" the address of a server. Its
              weights do not change. Another name for ref_model
    """

    Config = DistillConfig
    config: DistillConfig

    def __init__(self, *, teacher: object = None, **arguments: Any):
        if teacher is not None and arguments.get("ref_model") is not None:
            raise ValueError("teacher must be given once, found it and a ref_model, which is the same")
        super().__init__(**(arguments if teacher is None else {**arguments, "ref_model": teacher}))

    @classmethod
    def from_checkpoint(cls, path: Any, model: Any = None, ref_model: Any = None, **arguments: Any) -> Self:
        """Resume as every trainer does. The teacher is the checkpoint's unless given; one on a server must be given."""
        return super().from_checkpoint(path, model, arguments.pop("teacher", ref_model), **arguments)

    def setup(self, ref_model: Any) -> None:
        if ref_model is None:
            raise ValueError("Distill needs a teacher, found None")
        if is_address(ref_model):
            self._setup_served(ref_model)
            return
        self.reference = self.policy.reference(ref_model, "teacher")
        sizes = self.policy.vocab_size, self.reference.policy.vocab_size
        if None not in sizes and sizes[0] != sizes[1] and self.config.divergence != "sampled":
            raise ValueError(f"teacher must have the student's vocabulary of {sizes[0]} tokens, found {sizes[1]}")

    def _setup_served(self, address: str) -> None:
        config = self.config
        for name, wanted, found in (
            ("divergence", "sampled", config.divergence), ("temperature", 1.0, config.sampling.temperature),
        ):  # fmt: skip
            if found != wanted:
                raise ValueError(
                    f"{name} must be {wanted!r} with a server as teacher, which gives the log-probs of single tokens, "
                    f"found {found!r}"
                )
        self.reference = ServedTeacher(address, config.server)

    def train_step(self, prompts: Texts, *, prompt_mask: Array | None = None) -> dict[str, float]:  # type: ignore[override]
        """Train on a batch of prompts, as `GRPO.train_step` takes them; rows may have a completion.

        Return the metrics.
        """
        return super().train_step(prompts, prompt_mask=prompt_mask)

    def check_columns(self, rows: Sequence[Any], name: str) -> None:
        super().check_columns(rows, name)
        if self.config.from_dataset and column_counts(rows).get("completion", 0) < len(rows):
            i = next(i for i, row in enumerate(rows) if "completion" not in row)
            raise ValueError(f"{name}[{i}] must have a completion where on_policy is below 1, found none")

    def checked(self, prompts: list[Trajectory], name: str) -> list[Trajectory]:
        """Return the prompts, with the dataset's completions if off-policy rows use them."""
        if not self.config.from_dataset:
            return prompts
        return [self._with_completion(prompt, f"{name}[{i}]") for i, prompt in enumerate(prompts)]

    def evaluate_on(self, rows: list[Any]) -> Metrics:
        """Return the mean divergence on completions made as in a training step."""
        trajectories: list[Trajectory] = []
        with self.sampling():
            for part in self.parts_of_all(len(rows), self.config.run.batch_size):
                trajectories += self._mixed([rows[i] for i in part], part, "evaluation")[0]
        num_tokens, sums = sum(one.num_loss_tokens for one in trajectories), []
        for some in self.eval_batches(trajectories, [len(one) for one in trajectories]):
            with self.autocast():
                sums.append(self.loss_on(some, num_tokens).divergences_n.sum(dtype=self.sum_dtype))
        metrics = completion_metrics(self.whole_batch(trajectories, 0).ends)
        return {"distill/divergence": Mean(sum(on_host(sums)), num_tokens), **metrics}

    # ---- a step ----

    def sample(
        self, prompts: Sequence[Trajectory], addresses: Sequence[int], step: int
    ) -> tuple[list[Trajectory], Metrics]:
        """Return a completion of each prompt, the student's or another, and the student's share as a metric."""
        with self.phase("generate"):
            trajectories, num_own = self._mixed(prompts, addresses, step)
        return trajectories, {"distill/on_policy_fraction": Mean(num_own, len(trajectories))}

    def _mixed(
        self, prompts: Sequence[Trajectory], addresses: Sequence[int], step: object
    ) -> tuple[list[Trajectory], int]:
        config = self.config
        draw = [random.Random(self.seed_of(step, "mix", address)).random() for address in addresses]
        own = [i for i, share in enumerate(draw) if share < config.on_policy]
        others = [i for i, share in enumerate(draw) if share >= config.on_policy]
        trajectories = list(prompts)  # rows of `others` keep the dataset's completions, if they have any
        with self.autocast():
            if config.on_policy > 0:  # in all processes, also in one without rows: they may share a server
                places = [addresses[i] for i in own]
                found = self.complete([prompts[i] for i in own], config.sampling, 1, self.seed_of(step), places)
                for i, trajectory in zip(own, found, strict=True):
                    trajectories[i] = trajectory
            if config.on_policy < 1 and config.off_policy == "teacher":
                places, ids = [addresses[i] for i in others], [prompts[i].prompt_ids for i in others]
                with self.reference.policy.whole() as reference:
                    if others:
                        seed = self.seed_of(step, "teacher")
                        found = generate(reference, ids, config.sampling, seed=seed, addresses=places)
                        for i, trajectory in zip(others, found, strict=True):
                            trajectory.rollout_logps_t = None  # not the student's
                            trajectories[i] = trajectory
        return trajectories, len(own)

    def reward(self, trajectories: Sequence[Trajectory]) -> list[Json]:
        """Return the student's completions as samples, and {} for others. There are no rewards."""
        own = [one for one in trajectories if one.rollout_logps_t is not None]
        table = iter(sample_table(reward_columns(own, self.policy.tokenizer)))
        return [{} if one.rollout_logps_t is None else next(table) for one in trajectories]

    def learn(self, trajectories: Sequence[Trajectory], batch: WholeBatch) -> Metrics:
        """Update the weights once; return the metrics."""
        here, lengths = sum(one.num_loss_tokens for one in trajectories), [len(one) for one in trajectories]
        num_tokens = sum(length for length, *_ in batch.ends)
        parts = self.micro_batches(trajectories, lengths)
        update = self.update(functools.partial(self.loss_on, part, num_tokens) for part in parts)
        self.count_tokens(sum(lengths))
        totals = [part.divergences_n.sum(dtype=self.sum_dtype) for part in update.parts]
        return update | ({"distill/divergence": Mean(torch.stack(totals).sum(), here)} if totals else {})

    def loss_on(self, trajectories: Sequence[Trajectory], num_tokens: int) -> Distance:
        """Return the loss of these trajectories, as their share of a batch with num_tokens tokens."""
        weights = [1 / max(num_tokens, 1)] * len(trajectories)
        batch = TokenBatch.of(trajectories, self.policy.device, weights=weights, dtype=self.policy.loss_dtype)
        reference = self.reference.policy
        longest, most = max(map(len, trajectories), default=0), None if reference is None else reference.max_length
        if most is not None and longest > most:
            raise ValueError(f"teacher must read rows of {longest} tokens, found one that reads {most}")
        if self.config.divergence == "sampled":
            return self._sampled(batch, trajectories)
        theirs = reference.reading(lambda: self._reference_states(reference, batch))
        return self.policy.reading(lambda: self._divergence(batch, theirs))

    @torch.no_grad()
    def _reference_states(self, reference: Policy, batch: TokenBatch) -> object:
        """Return the teacher's hidden states and head, or its logits if it has none, on the student's device."""
        found: Any = reference.hidden(batch.to(reference.device))
        if found is None:
            return reference.logits(batch.to(reference.device)).to(batch.device)
        if reference.shards is not None:  # the gathered weights are freed after this call, so copy them
            found = tuple(None if x is None else x.clone() for x in found)
        return tuple(None if x is None else x.detach().to(batch.device) for x in found)

    def _divergence(self, batch: TokenBatch, theirs: Any) -> Distance:
        beta, weights_n = BETAS.get(self.config.divergence, self.config.beta), batch.weights_n
        assert weights_n is not None
        ours = self.policy.hidden(batch) if isinstance(theirs, tuple) else None
        if ours is not None:
            biases = {"bias": ours[2], "teacher_bias": theirs[2]}
            return Distance(*linear_divergence(*ours[:2], *theirs[:2], weights_n, beta=beta, **biases))
        self.policy.check_causality(batch)
        if isinstance(theirs, tuple):
            theirs = torch.nn.functional.linear(*theirs)
        logps_nV, teacher_nV = (
            logits.to(self.policy.loss_dtype).log_softmax(-1) for logits in (self.policy.logits(batch), theirs)
        )
        found_n = divergence(logps_nV, teacher_nV, beta)
        return Distance((weights_n * found_n).sum(), found_n.detach())

    def _sampled(self, batch: TokenBatch, trajectories: Sequence[Trajectory]) -> Distance:
        """Return a policy-gradient loss in which each token has its own advantage."""
        temperature = self.config.sampling.temperature
        old_n = joined([one.rollout_logps_t for one in trajectories if one.rollout_logps_t is not None])
        batch.old_logps_n = on_device(old_n.to(self.policy.loss_dtype), batch.device)
        teacher_n = self.reference.logps(batch, temperature=temperature).to(batch.old_logps_n.dtype)
        batch.advantages_n = teacher_n - batch.old_logps_n
        loss = self.policy.loss(batch, PolicyRule(loss_type="dapo"), temperature=temperature).loss
        return Distance(loss, -batch.advantages_n)

    def _with_completion(self, prompt: Trajectory, where: str) -> Trajectory:
        """Return the prompt with its row's completion."""
        completion = prompt.row.get("completion")
        if completion is None:
            raise ValueError(f"{where} must have a completion where on_policy is below 1, found none")
        shown = prompt.shown.get("prompts", prompt.ids_T)
        with row_named(where):
            shown_ids, found, counts = encode_row({**prompt.row, "prompt": shown}, self.policy.tokenizer)
        ids, read_T = torch.tensor(found).long(), prompt.ids_T
        if shown_ids[-len(read_T) :] != read_T.tolist():  # a template that adds more for a model to continue
            read_T = torch.tensor(shown_ids).long()
        if not len(ids):
            raise ValueError(f"{where}: the completion must have at least one token, found none")
        self.policy.check_ids(ids, where)
        ids = fit(read_T, ids, None, self.policy.max_length, where)
        return Trajectory.of(read_T, ids, counts, row=prompt.row, shown=prompt.shown)
