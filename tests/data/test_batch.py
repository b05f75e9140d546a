"""Trajectories and batches of hand-written rows."""

import numpy as np
import pytest
import torch

from strop.data.batch import TokenBatch, Trajectory, split

ROWS = [([1, 2, 3], [4, 5]), ([6], [7, 8, 9, 10]), ([], [11, 12]), ([13, 14], [])]


def batch_of(rows, **more):
    return TokenBatch.of([Trajectory.of(*row) for row in rows], **more)


def test_a_batch_by_hand():
    batch = batch_of(ROWS)
    assert batch.ids_N.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    assert batch.positions_N.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 5, 10, 12, 14]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.lengths == [5, 5, 2, 2]
    assert batch.targets_n.tolist() == [4, 5, 7, 8, 9, 10, 12]  # 11 is the first of its line: nothing predicts it
    assert batch.places_n.tolist() == [2, 3, 5, 6, 7, 8, 10]  # each the token before its target
    assert batch.sequence_n.tolist() == [0, 0, 1, 1, 1, 1, 2]
    assert batch.num_loss_tokens_S == [2, 4, 1, 0]
    assert (len(batch), batch.num_tokens, batch.num_loss_tokens) == (4, 14, 7)
    assert (batch.old_logps_n, batch.ref_logps_n, batch.advantages_n, batch.weights_n) == (None,) * 4


def test_right_padded_rows_by_hand():
    rows = batch_of(ROWS).padded(99)
    assert rows.ids_ST.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 99, 99, 99], [13, 14, 99, 99, 99]]
    assert rows.mask_ST.int().tolist() == [[1] * 5, [1] * 5, [1, 1, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert rows.index_N.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 15, 16]
    assert rows.ids_ST.dtype == torch.int64
    assert rows.mask_ST.dtype == torch.bool


def test_a_pad_id_that_is_a_real_token_is_still_counted_where_it_is_one():
    batch = batch_of([([5, 0], [0, 7]), ([1], [2])])
    assert batch.padded(0).mask_ST.int().tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch.targets_n.tolist() == [0, 7, 2]


def test_more_than_one_span_may_count():
    """A conversation: what was drawn counts, what came between does not."""
    line = Trajectory(torch.arange(8), torch.tensor([1, 0, 1, 1, 0, 0, 1, 0]).bool(), torch.tensor([0.1, 0.2, 0.3]))
    batch = TokenBatch.of([line, line])
    assert batch.targets_n.tolist() == [2, 3, 6, 2, 3, 6]
    assert batch.places_n.tolist() == [1, 2, 5, 9, 10, 13]
    assert line.loss_mask_T[0], "the trajectory itself is not changed"


def test_numbers_of_trajectories_go_to_their_tokens():
    batch = batch_of(ROWS, weights=[1.0, 2.0, 3.0, 4.0], advantages=[0.5, -1.0, 0.0, 9.0], dtype=torch.float64)
    assert batch.weights_n.tolist() == [1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 3.0]
    assert batch.advantages_n.tolist() == [0.5, 0.5, -1.0, -1.0, -1.0, -1.0, 0.0]
    assert batch.weights_n.dtype == torch.float64
    values_n = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    assert batch.sums(values_n).tolist() == [3.0, 18.0, 7.0, 0.0]
    assert [part.tolist() for part in batch.split(values_n)] == [[1, 2], [3, 4, 5, 6], [7], []]


def test_lists_arrays_and_tensors_give_the_same_batch():
    expected = batch_of(ROWS)
    for make in (np.array, torch.tensor, lambda ids: torch.tensor(ids, dtype=torch.int32)):
        found = batch_of([(make(p), make(c)) for p, c in ROWS])
        assert torch.equal(found.ids_N, expected.ids_N)
        assert torch.equal(found.places_n, expected.places_n)


def test_to_moves_every_tensor():
    batch = batch_of(ROWS, weights=[1.0] * 4).to("meta")
    assert isinstance(batch, TokenBatch)
    tensors = [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 7
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.ref_logps_n is None


@pytest.mark.parametrize(
    ("row", "error", "match"),
    [
        (([], []), ValueError, "a trajectory must hold at least one token"),
        (([[1]], [2]), ValueError, r"prompt_ids must be one-dimensional, found shape \[1, 1\]"),
        (([1], [0.5]), TypeError, "completion_ids must hold integers, found torch.float32"),
        (([1], "text"), TypeError, "completion_ids must hold token ids, found 'text'"),
    ],
)
def test_bad_rows_are_named(row, error, match):
    with pytest.raises(error, match=match):
        Trajectory.of(*row)


def test_an_empty_batch_is_one_token_that_does_not_count():
    """For a process without work, which runs the model beside the others all the same."""
    batch = TokenBatch.of([], weights=[], dtype=torch.float64)
    assert (batch.num_tokens, batch.num_loss_tokens, batch.num_loss_tokens_S) == (1, 0, [])
    assert batch.weights_n.dtype == torch.float64
    assert batch.sums(torch.zeros(0)).shape == (0,)


# ---- micro-batches ----


@pytest.mark.parametrize("padded", [False, True])
def test_parts_keep_to_their_limits_and_lose_nothing(padded):
    lengths = [3 + (7 * i) % 11 for i in range(40)]
    for size, num_tokens in ((0, 0), (7, 0), (0, 30), (2, 30), (0, 13)):
        parts = split(range(40), lengths, size, num_tokens, padded=padded)
        assert sorted(i for part in parts for i in part) == list(range(40))
        for part in parts:
            taken = len(part) * max(lengths[i] for i in part) if padded else sum(lengths[i] for i in part)
            assert len(part) <= (size or 40)
            assert not num_tokens or taken <= num_tokens
    assert split([], [], 3, 10, padded=padded) == []


def test_a_packed_part_counts_its_tokens_and_a_padded_one_its_rows():
    lengths = [10, 1, 1, 1, 1, 1, 1]
    assert split(range(7), lengths, 0, 16) == [[0, 1, 2, 3, 4, 5, 6]]
    assert len(split(range(7), lengths, 0, 16, padded=True)) == 2
    assert split(range(3), [40, 20, 20], 0, 16) == [[0], [1, 2]]  # longer than the limit, and still there
