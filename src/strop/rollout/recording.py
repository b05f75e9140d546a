"""Records of the experts that the tokens of a round chose, stored beside the cache.

The tokens of a prompt are recorded once, by slot, for all its samples. A row reads its prompt's last token and then its
drawn tokens, one per step. These are recorded by row and step, so it does not matter which slots the row had or when it
began. The last token a row draws is never read and has no record; it predicts nothing and nothing attends to it.

Shapes: S slots of prompts, B rows of the round, T steps, N rows of a step; L layers with a router, k experts of a
token.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from strop.models.routing import NONE, RECORDED, Routers
from strop.rollout.slots import Rows


@dataclass
class Record:
    """The experts chosen in a round.

    latest        returns the experts of the latest forward
    step_NLk      experts of the latest step; in the same memory in all rounds, since CUDA graphs write there
    prompts_SLk   experts of the prompts' tokens
    drawn_BTLk    experts of the rows' steps; one more row takes the reads of rows that have ended
    """

    latest: Callable[[], torch.Tensor]
    step_NLk: torch.Tensor
    prompts_SLk: torch.Tensor
    drawn_BTLk: torch.Tensor

    @classmethod
    def of(cls, latest: Callable[[], torch.Tensor], step_NLk: torch.Tensor, num_slots: int, B: int, T: int) -> "Record":
        def empty(*shape: int) -> torch.Tensor:
            return step_NLk.new_empty(*shape, *step_NLk.shape[1:])

        return cls(latest, step_NLk, empty(num_slots), empty(B + 1, T))

    def read_prompts(self, tokens_M: torch.Tensor, slots_M: torch.Tensor) -> None:
        """Store the experts of these tokens of the latest forward as those of the prompts in these slots."""
        self.prompts_SLk[slots_M] = self.latest()[tokens_M]

    def read_step(self, num_rows: int) -> None:
        """Copy the experts of the latest forward to step_NLk. This is part of a step, so a graph repeats it."""
        self.step_NLk[:num_rows] = self.latest()

    @contextlib.contextmanager
    def step(self, rows: Rows) -> Iterator[None]:
        """Store the experts of a step of these rows, at the end of this context."""
        ended_N = rows.finished_N != 0
        row_N, step_N = rows.row_N.masked_fill(ended_N, len(self.drawn_BTLk) - 1), rows.step_N.long()
        yield
        self.drawn_BTLk[row_N, step_N] = self.step_NLk[: len(rows)]

    def of_rows(
        self, prompts: Sequence[torch.Tensor], starts: Sequence[int], lengths: Sequence[int], num_samples: int
    ) -> list[torch.Tensor]:
        """Return [prompt and completion, L, k] of every row.

        starts    the first slot of each prompt
        lengths   the lengths of the completions
        """
        prompts_SLk, drawn_BTLk = self.prompts_SLk.cpu(), self.drawn_BTLk.cpu()
        unread_1Lk = drawn_BTLk.new_full((1, *drawn_BTLk.shape[2:]), NONE)
        found = []
        for row, length in enumerate(lengths):
            start, size = starts[row // num_samples], len(prompts[row // num_samples]) - 1
            found.append(torch.cat([prompts_SLk[start : start + size], drawn_BTLk[row, :length], unread_1Lk]))
        return found


def step_memory(routers: Routers, num_rows: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(num_rows, len(routers.modules), routers.top_k, dtype=RECORDED, device=device)
