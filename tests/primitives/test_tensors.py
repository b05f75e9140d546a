"""CPU tensors go in and come out, sharing memory; what cannot go in says why."""

import numpy as np
import pytest

import strop

torch = pytest.importorskip("torch")


def test_advantages_of_tensors(engine):
    for dtype in (torch.float32, torch.float64):
        rewards = torch.randn(6, 4, dtype=dtype)
        found = strop.compute_batch_group_advantages(rewards)
        assert isinstance(found, torch.Tensor)
        assert found.dtype == dtype
        expected = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True, correction=0)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(strop.compute_group_advantages(rewards[0]), expected[0])
        torch.testing.assert_close(strop.compute_batch_group_advantages(rewards.T.contiguous().T), expected)


def test_kl_of_tensors(engine):
    p, q = torch.randn(2, 3, 5).double()
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
    d = q - p
    expected = ((d.exp() - d - 1) * mask).sum(1)
    for m in (mask, mask.bool(), mask.numpy()):
        found = strop.compute_batch_token_kl_schulman(p, q, mask=m)
        assert isinstance(found, torch.Tensor)
        torch.testing.assert_close(found, expected)
    assert strop.compute_token_kl_schulman(p, q, mask) == pytest.approx(expected.sum().item())
    assert isinstance(strop.compute_batch_token_kl(p.numpy(), q), np.ndarray)  # the result is what log_p is


def test_input_tensors_are_not_copied(monkeypatch):
    seen = []
    from strop.primitives import kl

    original = kl._inputs

    def spy(*args):
        seen.extend(original(*args)[:2])
        return original(*args)

    monkeypatch.setattr(kl, "_inputs", spy)
    p, q = torch.randn(2, 4, 8)
    strop.compute_token_kl(p, q)
    assert [a.ctypes.data for a in seen] == [p.data_ptr(), q.data_ptr()]


def test_packed_tensors(engine):
    sequences = [torch.tensor([1, 2, 3]), torch.tensor([4])]
    bins = strop.pack_sequences(sequences, 4)
    assert bins == [[0, 1]]
    assert strop.pack_sequences(torch.tensor([3, 1]), 4) == bins
    assert strop.pack_sequences([torch.tensor(3), torch.tensor(1)], 4) == bins
    with pytest.raises(ValueError, match=r"sequences\[0\] must be one-dimensional, found shape \(1, 6\)"):
        strop.pack_sequences([torch.zeros(1, 6, dtype=torch.long)], 8)
    batch = strop.collate_packed(sequences, bins)
    assert {k: v.dtype for k, v in batch.items()} == {
        k: torch.int32 if k == "cu_seqlens" else torch.int64 for k in batch
    }
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4]]


def test_unsupported_tensors_are_refused(engine):
    x = torch.randn(4)
    with pytest.raises(TypeError, match=r"log_q requires a gradient.*pass log_q\.detach\(\)"):
        strop.compute_token_kl(x, x.clone().requires_grad_())
    with pytest.raises(TypeError, match=r"log_p must be a dense tensor of a dtype NumPy knows, found torch\.bfloat16"):
        strop.compute_token_kl(x.bfloat16(), x.bfloat16())
    with pytest.raises(TypeError, match="rewards must be on the CPU, found a tensor on meta"):
        strop.compute_group_advantages(torch.empty(4, device="meta"))
