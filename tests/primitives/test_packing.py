"""Packing against a naive first-fit decreasing, and the collated batch token by token."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import strop

same_engine = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)


def naive_first_fit_decreasing(lengths, max_length):
    bins, room = [], []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for b, free in enumerate(room):
            if lengths[index] <= free:
                bins[b].append(index)
                room[b] -= lengths[index]
                break
        else:
            bins.append([index])
            room.append(max_length - lengths[index])
    return bins


def test_by_hand(engine):
    # 6+2, 5+3, 4+1: sorted 6 5 4 3 2 1
    assert strop.pack_sequences([3, 4, 5, 6, 1, 2], 8) == [[3, 5], [2, 0], [1, 4]]
    assert strop.pack_sequences([2, 2, 2], 4) == [[0, 1], [2]]  # ties in their order


@same_engine
@given(lengths=st.lists(st.integers(0, 20), max_size=80), max_length=st.integers(20, 60))
def test_is_first_fit_decreasing(engine, lengths, max_length):
    assert strop.pack_sequences(lengths, max_length) == naive_first_fit_decreasing(lengths, max_length)


def test_kinds_of_input(engine):
    expected = strop.pack_sequences([3, 1, 2], 4)
    for lengths in (
        np.array([3, 1, 2]),
        np.array([3, 1, 2], np.uint8),
        np.array([3, 9, 1, 9, 2, 9])[::2],
        (3, 1, 2),
        iter([3, 1, 2]),
    ):
        assert strop.pack_sequences(lengths, 4) == expected
    for sequences in ([[5, 6, 7], [8], [9, 9]], [np.arange(3), np.arange(1), np.arange(2)], ((0, 0, 0), (0,), (0, 0))):
        assert strop.pack_sequences(sequences, 4) == expected
    assert strop.pack_sequences(np.zeros((3, 2), int), 4) == [[0, 1], [2]]
    assert strop.pack_sequences([], 4) == []


PACK_MISTAKES = [
    (([1, 9, 3], 8), ValueError, "every length must be at most max_length=8, found 9 at index 1"),
    (([1, -1], 8), ValueError, "every length must be at least 0, found -1 at index 1"),
    (([1, 2], 0), ValueError, "max_length must be at least 1, found 0"),
    (([1, 2], 8.0), TypeError, "max_length must be an int, found float"),
    (([1.5, 2], 8), TypeError, "lengths must be integers, found float64"),
    (([[1, 2], 3], 8), TypeError, "sequences[1] must be a sequence of token ids, found int"),
    ((["ab", "c"], 8), TypeError, "sequences[0] must be a sequence of token ids, found str"),
    ((5, 8), TypeError, "lengths must be a sequence of integers or of sequences, found int"),
    (([{"input_ids": [1] * 7}], 8), TypeError, "sequences[0] must be a sequence of token ids, found dict"),
    (([np.zeros((1, 6), int)], 8), ValueError, "sequences[0] must be one-dimensional, found shape (1, 6)"),
    (([1], 2**63), ValueError, "max_length must be at least 1 and below 2**63, found 9223372036854775808"),
    ((np.array([2**63], np.uint64), 8), ValueError, "lengths must be below 2**63"),
    (([[1] * 9], 8), ValueError, "every length must be at most max_length=8, found 9 at index 0"),
]


@pytest.mark.parametrize(("args", "error", "message"), PACK_MISTAKES)
def test_pack_mistakes(engine, args, error, message):
    with pytest.raises(error) as raised:
        strop.pack_sequences(*args)
    assert message in str(raised.value)


def test_collate_by_hand(engine):
    batch = strop.collate_packed([[11, 12, 13], [21, 22], [31]], [[0, 2], [1]], pad_to=5, pad_id=7)
    assert list(batch) == ["input_ids", "position_ids", "cu_seqlens", "labels", "sequence_ids"]
    assert batch["input_ids"].tolist() == [[11, 12, 13, 31, 7], [21, 22, 7, 7, 7]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0], [0, 1, 0, 1, 2]]
    assert batch["labels"].tolist() == [[-100, 12, 13, -100, -100], [-100, 22, -100, -100, -100]]
    assert batch["sequence_ids"].tolist() == [[0, 0, 0, 2, -1], [1, 1, -1, -1, -1]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 4, 5, 7, 10]
    assert batch["cu_seqlens"].dtype == np.int32


def test_one_bin_has_no_padding(engine):
    batch = strop.collate_packed([[1, 2], [3]], [[0, 1]])
    assert batch["input_ids"].tolist() == [[1, 2, 3]]
    assert batch["cu_seqlens"].tolist() == [0, 2, 3]


@same_engine
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=30), extra=st.integers(0, 3), seed=st.integers(0, 99))
def test_every_sequence_is_recovered(engine, lengths, extra, seed):
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, 1000, n) for n in lengths]
    bins = strop.pack_sequences(sequences, 12)
    longest = max(sum(lengths[i] for i in b) for b in bins)
    batch = strop.collate_packed(sequences, bins, *([max(longest + extra, 1)] if extra else []))
    for i, sequence in enumerate(sequences):
        mine = batch["sequence_ids"] == i
        assert batch["input_ids"][mine].tolist() == sequence.tolist()
        assert batch["position_ids"][mine].tolist() == list(range(len(sequence)))
        assert batch["labels"][mine].tolist() == [-100, *sequence[1:]][: len(sequence)]
    padding = batch["sequence_ids"] == -1
    assert (batch["labels"][padding] == -100).all()
    assert (batch["input_ids"][padding] == 0).all()
    # segments of the flattened batch: each holds one sequence, or one row's padding
    flat, cu = batch["sequence_ids"].ravel(), batch["cu_seqlens"]
    assert (cu[0], cu[-1]) == (0, flat.size)
    assert all(len(set(flat[a:b])) <= 1 for a, b in itertools.pairwise(cu))
    assert len(cu) - 1 == len(sequences) + (padding.any(axis=1)).sum()


def test_collate_takes_any_array_of_integers(engine):
    unaligned = np.frombuffer(b"x" + np.array([1, 2, 3]).tobytes(), np.uint8)[1:].view(np.int64)
    assert not unaligned.flags.aligned
    expected = strop.collate_packed([[1, 2, 3]], [[0]])["input_ids"]
    for tokens in (
        unaligned,
        np.array([1, 2, 3], np.longlong),
        np.array([1, 2, 3], ">i8"),
        np.array([1, 9, 2, 9, 3])[::2],
    ):
        np.testing.assert_array_equal(strop.collate_packed([tokens], [[0]])["input_ids"], expected)
    np.testing.assert_array_equal(strop.collate_packed(iter([[1, 2, 3]]), iter([(0,)]))["input_ids"], expected)


def test_collate_empty(engine):
    batch = strop.collate_packed([], [])
    assert batch["input_ids"].shape == (0, 0)
    assert batch["cu_seqlens"].tolist() == [0]


COLLATE_MISTAKES = [
    (([[1, 2], [3]], [[0], [2]]), ValueError, "bins must hold indices from 0 to 1, found 2"),
    (([[1, 2], [3]], [[0], [-1]]), ValueError, "bins must hold indices from 0 to 1, found -1"),
    (([[1, 2], [3]], [[0, 1], [0]]), ValueError, "bins must hold each sequence once, found 0 2 times"),
    (([[1, 2], [3]], [[0, 1]], 2), ValueError, "pad_to must be at least the 3 tokens of bin 0, found 2"),
    (([[1, 2], [3]], [[0, 1]], 4.0), TypeError, "pad_to must be an int, found float"),
    (([[1.5, 2], [3]], [[0, 1]]), TypeError, "sequences[0] must be integers, found float64"),
    (([[[1, 2]], [3]], [[0, 1]]), ValueError, "sequences[0] must be one-dimensional, found shape (1, 2)"),
    (([[1, 2]], [0]), TypeError, "bins[0] must be a sequence of indices, found int"),
    (([[1, 2]], None), TypeError, "bins must be a sequence of sequences, found NoneType"),
    (([[1, 2]], [["a"]]), TypeError, "bins must be integers, found <U1"),
]


@pytest.mark.parametrize(("args", "error", "message"), COLLATE_MISTAKES)
def test_collate_mistakes(engine, args, error, message):
    with pytest.raises(error) as raised:
        strop.collate_packed(*args)
    assert message in str(raised.value)
