"""Distill: a student learns a teacher's distribution, on what the student itself writes (GKD, arXiv 2306.13649).

A step: of each prompt the student samples a completion, or with the probability 1 − on_policy one of the dataset or the
teacher is taken; the teacher reads them; one update on the mean over their tokens of

    reverse_kl   KL(student ‖ teacher)        forward_kl   KL(teacher ‖ student)        jsd   the one between them, by beta

over the whole vocabulary (`strop.ops.linear_divergence`), or of the reverse KL at the sampled token alone

    sampled      policy gradient with the advantage log π_teacher − log π_old of each token
"""

import functools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch

from strop._tensors import on_host
from strop.config import DistillConfig
from strop.config.on_policy import BETAS
from strop.config.sampling import is_address
from strop.data.batch import TokenBatch, Trajectory, joined, on_device
from strop.data.inputs import Prompt, as_prompts, fit, prompts_of_dataset, reward_rows
from strop.data.tokenize import encode_completion, row_named
from strop.losses import PolicyRule
from strop.losses.divergence import divergence
from strop.ops import linear_divergence
from strop.rewards import sample_table
from strop.rollout import Rollout, checked_prompts, completion_metrics, generate
from strop.rollout.sampler import sampler
from strop.rollout.teacher import ServedTeacher
from strop.training.state import Mean
from strop.training.trainer import Trainer


class Lesson(NamedTuple):
    """A prompt, and the dataset's completion where it is needed, with which of its tokens count."""

    prompt: Prompt
    completion: torch.Tensor | None
    counts: list[bool] | None = None


class Distance(NamedTuple):
    """The loss of a micro-batch as its share, and the divergence of its tokens, [n]."""

    loss: torch.Tensor
    divergences_n: torch.Tensor


class Distill(Trainer):
    """On-policy distillation.

    distill = Distill(model=student, teacher=teacher, learning_rate=1e-5, max_new_tokens=128)
    metrics = distill.train_step(prompts)          # or distill.train(dataset)

    teacher   a model, a folder or a name, with the student's vocabulary, or for "sampled" the address of a server; it stays
              as it is. The same as ref_model
    """

    Config = DistillConfig
    config: DistillConfig

    def __init__(self, *, teacher: Any = None, **arguments: Any):
        if teacher is not None and arguments.get("ref_model") is not None:
            raise ValueError("teacher must be given once, found it and a ref_model, which is the same")
        super().__init__(**(arguments if teacher is None else {**arguments, "ref_model": teacher}))
        self.sampler = sampler(self, self.config.server)

    @classmethod
    def from_checkpoint(cls, path: Any, model: Any = None, ref_model: Any = None, **arguments: Any) -> Self:
        """As of every trainer; a teacher is one of the checkpoint unless it is given, and by a server always given."""
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

    def train_step(self, prompts: Any, *, prompt_mask: Any = None) -> dict[str, float]:
        """One step on a batch of prompts, as `GRPO.train_step` takes them; rows may have a completion."""
        padding = self.policy.padding(self.config.pad_id)
        batch = as_prompts(prompts, self.policy.tokenizer, padding, mask=prompt_mask)
        lessons = [self._lesson(prompt, f"prompts[{i}]") for i, prompt in enumerate(batch)]
        return self.run_step(lambda: self._step(lessons))

    def prepare(self, rows: Sequence[Any], name: str = "dataset") -> list[Lesson]:
        padding = self.policy.padding(self.config.pad_id)
        prompts = prompts_of_dataset(rows, self.policy.tokenizer, padding, name, self.name)
        checked_prompts(self.policy, [prompt.ids for prompt in prompts], self.config.sampling, name)
        return [self._lesson(prompt, f"{name}[{i}]") for i, prompt in enumerate(prompts)]

    def step_on(self, rows: list[Any]) -> dict[str, float]:
        return self._step(rows if isinstance(rows[0], Lesson) else self.prepare(rows, "rows"))

    def evaluate_on(self, rows: list[Any]) -> dict[str, Any]:
        """The divergence on completions as a step has them."""
        mine, size, lines = self.share(len(rows)), self.config.run.batch_size, []
        most = -(-len(rows) // self.world.size)  # of a process: all sample equally often
        with self.sampler.ready():
            for start in range(mine.start, mine.start + most, size):
                found, _ = self._lines(rows[start : min(start + size, mine.stop)], "evaluation", start)
                lines += found
        num_tokens, sums = sum(line.num_loss_tokens for line in lines), []
        for part in self.eval_batches(lines, [len(line) for line in lines]):
            with self.autocast():
                sums.append(self._distance(part, num_tokens).divergences_n.double().sum())
        return {"distill/divergence": Mean(sum(on_host(sums)), num_tokens), **self._completions(lines)}

    def extra_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        return self.sampler.state()

    def load_extra_state(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        self.sampler.load_state(tensors, values)

    # ---- inside ----

    def _step(self, lessons: list[Lesson]) -> dict[str, float]:
        mine = self.share(len(lessons))
        with self.phase("generate"), self.sampler.ready():
            lines, num_own = self._lines(lessons[mine.start : mine.stop], self.state.step, mine.start)
        here, lengths = sum(line.num_loss_tokens for line in lines), [len(line) for line in lines]
        num_tokens = int(self.world.total(here))
        parts = self.micro_batches(lines, lengths)
        update = self.update(functools.partial(self._distance, part, num_tokens) for part in parts)
        self.count_tokens(sum(lengths))
        totals = [part.divergences_n.double().sum() for part in update.parts]
        metrics = {"distill/divergence": Mean(torch.stack(totals).sum(), here)} if totals else {}
        metrics |= {"distill/on_policy_fraction": Mean(num_own, len(lines))}
        return update | metrics | self._completions(lines)

    def _completions(self, lines: Sequence[Trajectory]) -> dict[str, float]:
        """Lengths of those of all processes, and how many were cut."""
        return completion_metrics(self.of_all([(line.num_loss_tokens, str(line.finish)) for line in lines]))

    def _lines(self, lessons: Sequence[Lesson], step: Any, start: int) -> tuple[list[Trajectory], int]:
        """A completion behind each prompt, and how many are the student's own. `start`: of the first in its batch."""
        config, addresses = self.config, range(start, start + len(lessons))
        draw = [random.Random(self.seed_of(step, "mix", address)).random() for address in addresses]
        own = [i for i, share in enumerate(draw) if share < config.on_policy]
        others = [i for i, share in enumerate(draw) if share >= config.on_policy]
        found: dict[int, Trajectory] = {}
        with self.autocast():
            if config.on_policy > 0:  # in all processes, also in one that has no row: they may share a server
                ids, places = [lessons[i].prompt.ids for i in own], [addresses[i] for i in own]
                rollout = self.sampler(ids, config.sampling, 1, self.seed_of(step), places)
                found |= zip(own, rollout.trajectories, strict=True)
                self.samples = self._table([lessons[i].prompt for i in own], rollout)
            if config.on_policy < 1 and config.off_policy == "teacher":
                places = [addresses[i] for i in others]
                ids = [lessons[i].prompt.ids for i in others]
                seed = self.seed_of(step, "teacher")
                with self.reference.policy.whole() as teacher:
                    if others:
                        rollout = generate(teacher, ids, config.sampling, seed=seed, addresses=places)
                        found |= zip(others, rollout.trajectories, strict=True)
        for i in others if config.off_policy == "dataset" else ():
            lesson = lessons[i]
            assert lesson.completion is not None
            found[i] = Trajectory.of(lesson.prompt.ids, lesson.completion, lesson.counts)
        return [found[i] for i in range(len(lessons))], len(own)

    def _table(self, prompts: list[Prompt], rollout: Rollout) -> list[dict[str, Any]]:
        return sample_table(reward_rows(prompts, rollout, self.policy.tokenizer))

    def _distance(self, lines: Sequence[Trajectory], num_tokens: int) -> Distance:
        weights = [1 / max(num_tokens, 1)] * len(lines)
        batch = TokenBatch.of(lines, self.policy.device, weights=weights, dtype=self.policy.loss_dtype)
        teacher = self.reference.policy
        longest, most = max(map(len, lines), default=0), None if teacher is None else teacher.max_length
        if most is not None and longest > most:
            raise ValueError(f"teacher must read rows of {longest} tokens, found one that reads {most}")
        if self.config.divergence == "sampled":
            return self._sampled(batch, lines)
        theirs = teacher.reading(lambda: self._teachers(teacher, batch))
        return self.policy.reading(lambda: self._divergence(batch, theirs))

    @torch.no_grad()
    def _teachers(self, teacher: Any, batch: TokenBatch) -> Any:
        """Hidden states and head, or where there are none the logits, on the student's device."""
        found = teacher.hidden(batch.to(teacher.device))
        if found is None:
            return teacher.logits(batch.to(teacher.device)).to(batch.device)
        if teacher.shards is not None:  # outside of here they are not whole
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

    def _sampled(self, batch: TokenBatch, lines: Sequence[Trajectory]) -> Distance:
        """A policy gradient, each token with its own advantage."""
        temperature = self.config.sampling.temperature
        old_n = joined([line.rollout_logps_t for line in lines if line.rollout_logps_t is not None])
        batch.old_logps_n = on_device(old_n.to(self.policy.loss_dtype), batch.device)
        teacher_n = self.reference.logps(batch, temperature=temperature).to(batch.old_logps_n.dtype)
        batch.advantages_n = teacher_n - batch.old_logps_n
        loss = self.policy.loss(batch, PolicyRule(loss_type="dapo"), temperature=temperature).loss
        return Distance(loss, -batch.advantages_n)

    def _lesson(self, prompt: Prompt, where: str) -> Lesson:
        if not self.config.from_dataset:
            return Lesson(prompt, None)
        completion = prompt.columns.get("completion")
        if completion is None:
            raise ValueError(f"{where} must have a completion where on_policy is below 1, found none")
        with row_named(where):
            found, counts = encode_completion(prompt.shown, completion, self.policy.tokenizer, prompt.columns)
        ids = torch.tensor(found).long()
        if not len(ids):
            raise ValueError(f"{where}: the completion must have at least one token, found none")
        self.policy.check_ids(ids, where)
        return Lesson(prompt, fit(prompt.ids, ids, None, self.policy.max_length, where), counts)
