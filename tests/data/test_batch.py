"""Trajectories and batches of hand-written rows."""

import numpy as np
import pytest
import torch

from strop.data import batch as batch_file
from strop.data.batch import TokenBatch, Trajectory, shared_prefixes, split

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


# ---- prefixes that stand once ----


@pytest.fixture
def any_saving(monkeypatch):
    """A prefix of two tokens is worth reading once."""
    for name, least in {"LEAST_SHARED": 2, "LEAST_SAVED": 1, "LEAST_SAVED_FRACTION": 0.0}.items():
        monkeypatch.setattr(batch_file, name, least)


def groups_of(*rows):
    return [(length, sorted(which)) for length, which in shared_prefixes([Trajectory.of([], row) for row in rows])]


def test_groups_save_the_most_tokens(any_saving):
    assert groups_of([1, 2, 3, 4, 5], [1, 2, 3, 9], [7, 8, 9], [1, 2, 3, 4, 6]) == [(3, [0, 1, 3])]  # 6 tokens, not 4
    assert groups_of([1, 2, 3, 4, 5, 6, 7], [1, 2, 9], [1, 2, 3, 4, 5, 6, 8]) == [(6, [0, 2])]  # 6, not 2 · 2
    system = [1, 2]  # a system prompt of all, and prompts of two groups
    one, other = [*system, 3, 4, 5, 6], [*system, 7, 8, 9]
    assert groups_of([*one, 1], [*other, 1], [*one, 2, 2], [*other, 2]) == [(6, [0, 2]), (5, [1, 3])]
    large = [300, 2, 70000]  # bytes in the machine's order would not be sorted as the ids are
    assert groups_of([*large, 1], [256, 2, 1], [*large, 2], [255, 2, 1], [*large, 3]) == [(3, [0, 2, 4])]


def test_every_row_keeps_a_token_of_its_own(any_saving):
    assert groups_of([1, 2, 3, 4], [1, 2, 3, 4]) == [(3, [0, 1])]
    assert groups_of([1, 2, 3, 4, 5], [1, 2, 3]) == [(2, [0, 1])]


def test_few_tokens_are_not_worth_it():
    prompt = list(range(100))
    assert groups_of([*prompt, 1], [*prompt, 2]) == [(100, [0, 1])]
    assert groups_of([*prompt[:90], 1], [*prompt[:90], 2]) == []  # 90 tokens
    assert groups_of(*([*prompt[:31], i, i] for i in range(9))) == []  # a prefix of 31 tokens
    assert groups_of([*prompt, 1], [*prompt, 2], [999] * 700) == []  # a ninth of all


def test_a_batch_whose_prefixes_stand_once_by_hand(any_saving):
    rows = [([5, 6, 7], [1, 2]), ([8], [9, 9]), ([5, 6, 7], [3]), ([5, 6, 7], [4])]
    batch = batch_of(rows)
    assert batch.groups == [(3, [0, 2, 3])]
    once = batch.with_prefixes(batch.groups)
    assert once.ids_N.tolist() == [5, 6, 7, 3, 4, 1, 2, 8, 9, 9]  # the prefix, what follows it, the others
    assert once.positions_N.tolist() == [0, 1, 2, 3, 3, 3, 4, 0, 1, 2]
    assert once.lengths == [3, 1, 1, 2, 3]
    assert once.cu_seqlens.tolist() == [0, 3, 4, 5, 7, 10]
    assert once.targets_n.tolist() == batch.targets_n.tolist() == [1, 2, 9, 9, 3, 4]
    assert once.places_n.tolist() == [2, 5, 7, 8, 2, 2]  # one state predicts three first tokens
    assert once.prefixes.lengths == [(3, 4)]
    assert once.ids_N[once.prefixes.place_N].tolist() == batch.ids_N.tolist()
    assert batch.ids_N[once.prefixes.token_M].tolist() == once.ids_N.tolist()
    assert once.prefixes.alone is batch
    some, _ = batch.only([3, 1, 0])
    assert some.groups == [(3, [2, 0])]
    assert batch.only([1, 2])[0].groups == []


def test_recorded_routing_is_of_every_token(any_saving):
    rows = [Trajectory.of([5, 6, 7], [i]) for i in range(3)]
    for row in rows:
        row.routing_TLk = torch.zeros(4, 1, 2, dtype=torch.int16)
    assert TokenBatch.of(rows).groups == []


def test_groups_stay_together_where_they_fit():
    lengths, groups = [14, 12, 13, 25, 12, 14, 13, 12], [(10, [0, 2, 4, 6]), (10, [1, 5])]
    assert split(range(8), lengths, groups=groups) == [[0, 2, 4, 6, 1, 5, 3, 7]]

    def num_read(part):
        return sum(lengths[i] for i in part) - sum(
            length * (len(here) - 1) for length, rows in groups if (here := [i for i in rows if i in part])
        )

    for num_tokens in (26, 23, 13, 5):
        parts = split(range(8), lengths, 0, num_tokens, groups=groups)
        assert sorted(i for part in parts for i in part) == list(range(8))
        assert max(map(num_read, parts)) <= max(num_tokens, *lengths), parts  # as without groups
        together = [{*part} for part in parts]
        assert any({1, 5} <= part for part in together) == (num_tokens >= 16)
        assert any({0, 2, 4, 6} <= part for part in together) == (num_tokens >= 22)
    assert max(map(len, split(range(8), lengths, 3, 0, groups=groups))) == 3
    assert sorted(map(sorted, split(range(8), lengths, 2, 26, groups=groups))) == [[0, 2], [1, 5], [3], [4, 6], [7]]
