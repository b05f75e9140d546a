"""KTO: learn from single completions that are labelled desirable or not (arXiv 2402.01306); BCO and APO too.

    loss = unpaired_loss(log π(completion), log π_ref(completion), label, shift)

with the formulas of `strop.losses.unpaired_loss`. KTO's shift is β·KL(π ‖ π_ref), estimated on mismatched pairs: each
prompt of the batch with the completion of the row before it; the first prompt takes that of the last row. A batch of
one row has no such pair: its KL counts as 0.

B rows of a batch.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from strop._types import Array, Json, State, Texts
from strop.config import KTOConfig
from strop.data.batch import TokenBatch, Trajectory, on_device
from strop.data.formats import PreparedRows, at_place, check_rows
from strop.data.inputs import Ids, as_dicts, completion_rows, fit, is_written, prompt_rows
from strop.data.offline import Limits, as_array, as_label, unpaired_rows
from strop.data.tokenize import LossMask, encode_rows
from strop.losses import unpaired_loss
from strop.ops.head import widened
from strop.training.trainer import Mean, Metrics, Sum, Trainer, on_host


class KTO(Trainer):
    """Preference optimisation on labelled completions.

    kto = KTO(model=model, ref_model=ref, beta=0.1, learning_rate=1e-4)
    metrics = kto.train_step(prompt, completion, label)      # or kto.train(dataset)

    A dataset's rows have a prompt, a completion and a label. A row of a pair becomes two: its chosen completion with
    the label true, and its rejected one with the label false. A trajectory's label is in its `row`.
    """

    Config = KTOConfig
    config: KTOConfig
    formats = ("prompt_completion", "preference")

    def setup(self, ref_model: object) -> None:
        self.reference = self.policy.reference(ref_model)
        self._seen = torch.zeros(2, dtype=self.sum_dtype, device=self.policy.device)  # bco: sum and number of rewards

    def train_step(
        self, prompt: Texts, completion: Texts, label: object, *, prompt_mask: Array | None = None
    ) -> dict[str, float]:
        """Train on B completions with labels; return the metrics.

        prompt, completion   token ids (B, P) and (B, C), lists of ids, or with a tokenizer texts or conversations
        label                B booleans: True is desirable
        prompt_mask          (B, P), 0 at padding; without it the pad id at both ends of a prompt is padding
        """
        return self.run_step(lambda: self._step(self._trajectories(prompt, completion, label, prompt_mask)))

    def prepared(self, dataset: object, name: str = "dataset") -> PreparedRows:
        return super().prepared(unpaired_rows(dataset), name)

    def check_columns(self, rows: Sequence[Any], name: str) -> None:
        check_rows(rows, self.formats, where=name, what='KTO, with a column "label", true or false,')
        for i, row in enumerate(rows):
            try:
                if "chosen" not in row:
                    as_label(row.get("label"), f"{name}[{i}]")
            except TypeError as error:
                raise at_place(error, rows, i) from None

    def prepare(self, rows: Sequence[Any], name: str = "dataset") -> list[Trajectory]:
        """Return a trajectory for each labelled row, two for a pair."""
        self.check_columns(rows, name)
        rows, limits = unpaired_rows(rows), self._limits
        return [
            self._trajectory(as_array(prompt), as_array(completion), row["label"], f"{name}[{i}]", limits, loss_mask)
            for i, (row, (prompt, completion, loss_mask)) in enumerate(
                zip(rows, encode_rows(rows, self.tokenizer, name), strict=True)
            )
        ]

    def step_on(self, rows: list[Any]) -> dict[str, float]:
        return self._step(rows if isinstance(rows[0], Trajectory) else self.prepare(rows, "rows"))

    def evaluate_on(self, rows: list[Any]) -> dict[str, float]:
        mine, parts = self.share(len(rows)), []
        own = rows[mine.start : mine.stop]
        batches = self._batches(own, self.eval_batches)
        refs_B = self._scored(batches, self.reference)
        shift = self._shift(rows, mine, batches, refs_B, learns=False)
        for part, batch in batches:
            with self.autocast():
                parts.append(self._loss(batch, [own[i] for i in part], part, refs_B, shift, len(rows)))
        return {"loss": Sum(sum(on_host([part[0] for part in parts]))), **_metrics(parts, shift)}

    def extra_state(self) -> State:
        return {"seen": self._seen}, {}

    def load_extra_state(self, tensors: dict[str, torch.Tensor], values: Json) -> None:
        self._seen.copy_(tensors["seen"])

    # ---- inside ----

    def _step(self, trajectories: list[Trajectory]) -> dict[str, float]:
        mine = self.share(len(trajectories))
        own = trajectories[mine.start : mine.stop]
        batches = self._batches(own, self.micro_batches)
        with self.phase("score"):
            refs_B = self._scored(batches, self.reference)
            shift = self._shift(trajectories, mine, batches, refs_B, learns=True)
        update = self.update(
            functools.partial(self._loss, batch, [own[i] for i in part], part, refs_B, shift, len(trajectories))
            for part, batch in batches
        )
        self.count_tokens(sum(map(len, own)))
        return update | _metrics(update.parts, shift)

    def _shift(
        self, trajectories: Sequence[Trajectory], mine: range, batches: Sequence[tuple[list[int], TokenBatch]],
        refs_B: torch.Tensor, learns: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Return the value that rewards are compared with, 0-d, equal in all processes.

        trajectories   the whole batch; `mine` are this process's, as are batches and refs_B
        learns         True adds these rows to bco's mean
        """
        rule = self.config.loss
        if rule.loss_type == "kto" and len(trajectories) > 1:  # a single row has no mismatched pair
            mismatched = self._mismatched(trajectories)
            others = self._batches(mismatched[mine.start : mine.stop], self.eval_batches)
            ratios_B = self._scored(others, self.policy) - self._scored(others, self.reference)
            return rule.beta * (self.world.summed(ratios_B.sum()) / len(trajectories)).clamp(min=0)
        if rule.loss_type == "bco":
            if learns:
                rewards_B = widened(rule.beta * (self._scored(batches, self.policy) - refs_B))
                self._seen += self.world.summed(torch.stack([rewards_B.sum(), torch.ones_like(rewards_B).sum()]))
            return (self._seen[0] / self._seen[1].clamp(min=1)).to(refs_B.dtype)
        return refs_B.new_zeros(())

    def _mismatched(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return each prompt with the completion of the previous trajectory."""
        context = self.policy.max_length
        limit = context if self.config.max_length is None else self.config.max_length
        found = []
        for i, trajectory in enumerate(trajectories):
            (prompt, _, _), (_, other, counts) = _parted(trajectory), _parted(trajectories[i - 1])
            found.append(Trajectory.of(prompt, fit(prompt, other, limit, context, f"row {i}"), counts))
        return found

    def _batches(self, trajectories: Sequence[Trajectory], cut: Any) -> list[tuple[list[int], TokenBatch]]:
        """Return the micro-batches: indices of their trajectories, and their tokens."""
        parts = cut(range(len(trajectories)), [len(one) for one in trajectories], trajectories)
        return [(part, TokenBatch.of([trajectories[i] for i in part], self.policy.device)) for part in parts]

    @torch.no_grad()
    def _scored(self, batches: Sequence[tuple[list[int], TokenBatch]], scorer: Any) -> torch.Tensor:
        """Return [B], the log-probs of the trajectories, in their order."""
        with self.autocast():
            found = [batch.sums(scorer.logps(batch)) for _, batch in batches]
        if not found:  # a process without rows
            return torch.zeros(0, dtype=self.policy.loss_dtype, device=self.policy.device)
        order = torch.tensor([i for part, _ in batches for i in part]).long().argsort()
        return torch.cat(found)[on_device(order, found[0].device)]

    def _loss(
        self, batch: TokenBatch, trajectories: Sequence[Trajectory], part: list[int], refs_B: torch.Tensor,
        shift: torch.Tensor,
        num_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return the loss of these trajectories as their share of num_rows, their rewards and their labels.

        part   their indices among this process's trajectories
        """
        labels = on_device(torch.tensor([one.row["label"] for one in trajectories]).bool(), batch.device)
        refs = refs_B[on_device(torch.tensor(part).long(), refs_B.device)]
        logps = batch.sums(self.policy.logps(batch))
        return *unpaired_loss(self.config.loss, logps, refs, labels, shift, num_rows), labels

    @property
    def _limits(self) -> Limits:
        return Limits(self.policy.check_ids, self.policy.max_length, self.config.max_length)

    def _trajectories(
        self, prompt: Texts, completion: Texts, label: Any, prompt_mask: Array | None
    ) -> list[Trajectory]:
        """Return a trajectory for each row of `train_step`'s arguments."""
        label = label.tolist() if hasattr(label, "tolist") else label  # a tensor of torch or an array of NumPy
        if is_written(prompt, "prompt", prompt_mask):
            return self.prepare(as_dicts({"prompt": prompt, "completion": completion, "label": label}), "rows")
        padding, limits = self.policy.padding(self.config.pad_id), self._limits
        prompts = prompt_rows(prompt, "prompt", prompt_mask, *padding)
        completions = completion_rows(completion, "completion", len(prompts), *padding)
        rows = as_dicts({"prompt": prompts, "completion": completions, "label": label})
        return [
            self._trajectory(row["prompt"], row["completion"], row["label"], f"row {i}", limits)
            for i, row in enumerate(rows)
        ]

    def _trajectory(
        self, prompt: Ids, completion: Ids, label: object, where: str, limits: Limits, loss_mask: LossMask | None = None
    ) -> Trajectory:
        """Return the completion after its prompt, with its label. Raise if it has nothing to learn or does not fit."""
        label = as_label(label, where)
        for name, ids in (("the prompt", prompt), ("the completion", completion)):
            if not len(ids):
                raise ValueError(f"{where}: {name} must have at least one token, found none")
        for ids in (prompt, completion):
            limits.check(ids, where)
        trajectory = limits.trajectory(prompt, completion, where, loss_mask, row={"label": label})
        if not trajectory.num_loss_tokens:
            raise ValueError(f"{where}: a token of the completion must count, found none within max_length")
        return trajectory


def _parted(trajectory: Trajectory) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the prompt, the completion from its first loss token on, and the completion's loss mask."""
    start = int(trajectory.loss_mask_T.nonzero()[0])
    return trajectory.ids_T[:start], trajectory.ids_T[start:], trajectory.loss_mask_T[start:]


def _metrics(parts: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], shift: torch.Tensor) -> Metrics:
    """Return means over the completions of each label, on the device; a label without completions is left out."""
    if not parts:
        return {"rewards/shift": shift}
    rewards_B, labels_B = widened(torch.cat([part[1] for part in parts])), torch.cat([part[2] for part in parts])
    found: list[Any] = [(rewards_B.masked_fill(~these, 0.0).sum(), these.sum()) for these in (labels_B, ~labels_B)]
    return {"rewards/chosen": Mean(*found[0]), "rewards/rejected": Mean(*found[1]), "rewards/shift": shift}
