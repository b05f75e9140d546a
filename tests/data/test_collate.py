"""Batches of hand-written rows."""

import numpy as np
import pytest
import torch

from strop.data.collate import SequenceBatch, collate, collate_into_bins

ROWS = [([1, 2, 3], [4, 5]), ([6], [7, 8, 9, 10]), ([], [11, 12]), ([13, 14], [])]


def test_right_padded_batch_by_hand():
    batch = collate(ROWS, pad_id=99)
    assert batch.input_ids_BT.tolist() == [
        [1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10],
        [11, 12, 99, 99, 99],
        [13, 14, 99, 99, 99],
    ]
    assert batch.attention_mask_BT.int().tolist() == [[1] * 5, [1] * 5, [1, 1, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert batch.completion_mask_BT.int().tolist() == [
        [0, 0, 0, 1, 1],
        [0, 1, 1, 1, 1],
        [0, 1, 0, 0, 0],  # no prompt: the first token is not predicted by anything
        [0, 0, 0, 0, 0],
    ]
    assert batch.input_ids_BT.dtype == torch.int64
    assert batch.completion_mask_BT.dtype == batch.attention_mask_BT.dtype == torch.bool
    assert batch.position_ids_BT is None
    assert batch.sequence_ids_BT is None
    assert (len(batch), batch.num_tokens, batch.num_completion_tokens) == (4, 14, 7)
    assert batch.places_N.tolist() == [3, 4, 6, 7, 8, 9, 11]


def test_a_pad_id_that_is_a_real_token_is_still_counted_where_it_is_one():
    batch = collate([([5, 0], [0, 7]), ([1], [2])], pad_id=0)
    assert batch.attention_mask_BT.int().tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch.completion_mask_BT.int().tolist() == [[0, 0, 1, 1], [0, 1, 0, 0]]


def test_lists_arrays_and_tensors_give_the_same_batch():
    expected = collate(ROWS)
    for make in (np.array, torch.tensor, lambda ids: torch.tensor(ids, dtype=torch.int32)):
        found = collate([(make(p), make(c)) for p, c in ROWS])
        assert torch.equal(found.input_ids_BT, expected.input_ids_BT)
        assert torch.equal(found.completion_mask_BT, expected.completion_mask_BT)


def test_packed_batch_by_hand():
    batch = collate_into_bins(ROWS, max_length=7, pad_id=99)
    assert batch.input_ids_BT.tolist() == [[1, 2, 3, 4, 5, 11, 12], [6, 7, 8, 9, 10, 13, 14]]
    assert batch.sequence_ids_BT is not None
    assert batch.position_ids_BT is not None
    assert batch.sequence_ids_BT.tolist() == [[0] * 5 + [2] * 2, [1] * 5 + [3] * 2]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 3, 4, 0, 1]] * 2
    assert batch.completion_mask_BT.int().tolist() == [[0, 0, 0, 1, 1, 0, 1], [0, 1, 1, 1, 1, 0, 0]]
    assert batch.places_N.tolist() == [3, 4, 6, 8, 9, 10, 11]
    assert batch.is_packed


def test_padding_of_a_packed_batch_belongs_to_no_sequence():
    batch = collate_into_bins([([1], [2, 3]), ([4], [5])], max_length=4, pad_id=9)
    assert batch.input_ids_BT.tolist() == [[1, 2, 3], [4, 5, 9]]
    assert batch.sequence_ids_BT is not None
    assert batch.sequence_ids_BT.tolist() == [[0, 0, 0], [1, 1, -1]]
    assert batch.attention_mask_BT.int().tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.completion_mask_BT.int().tolist() == [[0, 1, 1], [0, 1, 0]]


def test_packing_counts_the_tokens_padding_counts():
    rows = [(list(range(i % 4)), list(range(1 + i % 7))) for i in range(50)]
    padded, packed = collate(rows), collate_into_bins(rows, max_length=32)
    assert packed.num_tokens == padded.num_tokens
    assert packed.num_completion_tokens == padded.num_completion_tokens
    assert len(packed) < len(padded)


def test_to_moves_every_tensor():
    batch = collate_into_bins(ROWS, 7).to("meta")
    assert isinstance(batch, SequenceBatch)
    assert {getattr(batch, name).device.type for name in batch.__dataclass_fields__} == {"meta"}
    assert collate(ROWS).to("meta").position_ids_BT is None


@pytest.mark.parametrize(
    ("rows", "error", "match"),
    [
        ([], ValueError, "rows must hold at least one row"),
        ([([], [])], ValueError, r"rows\[0\] must hold at least one token"),
        (
            [([1], [2]), ([[1]], [2])],
            ValueError,
            r"rows\[1\]: prompt_ids must be one-dimensional, found shape \[1, 1\]",
        ),
        ([([1], [0.5])], TypeError, r"rows\[0\]: completion_ids must hold integers, found torch.float32"),
        ([([1], [2], [3])], ValueError, r"rows\[0\] must be \(prompt_ids, completion_ids\), found 3 things"),
    ],
)
def test_bad_rows_are_named(rows, error, match):
    with pytest.raises(error, match=match):
        collate(rows)


def test_a_row_longer_than_a_bin_is_an_error():
    with pytest.raises(ValueError, match="at most max_length=3, found 4 at index 0"):
        collate_into_bins([([1, 2], [3, 4])], max_length=3)
