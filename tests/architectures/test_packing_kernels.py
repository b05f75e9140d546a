"""Packed training of layers with recurrent states: by kernels that are told where sequences end, else padded."""

import importlib
import inspect
import itertools

import pytest
import torch
from tiny_types import model_of

from strop.data.batch import TokenBatch, Trajectory
from strop.models import as_policy

FUNCTIONS = {  # of transformers, with the axis of the tokens; kernels of other packages take their places on a GPU
    "causal_conv1d_fn": -1,
    "torch_chunk_gated_delta_rule": 1,
    "mamba2_chunk_scan": 1,
}
kinds = pytest.mark.parametrize("kind", ["qwen3_next", "granitemoehybrid", "falcon_h1"])


def told(function, axis, leak=0.0):
    """The function on each sequence alone, as a kernel that is told of them; leak: how much of all is added."""
    plain = inspect.unwrap(function)

    def kernel(x, *given, seq_idx=None, cu_seqlens=None, cu_seq_lens_q=None, **options):
        if seq_idx is None and cu_seqlens is None:
            return plain(x, *given, **options)
        ends = [0, *(torch.unique_consecutive(seq_idx[0], return_counts=True)[1].cumsum(0) if cu_seqlens is None
                     else cu_seqlens[1:]).tolist()]  # fmt: skip
        num = x.shape[axis]

        def part(value, first, end):
            has_tokens = isinstance(value, torch.Tensor) and value.ndim > 2 and value.shape[axis] == num
            return value.narrow(axis, first, end - first) if has_tokens else value

        found = []
        for first, end in itertools.pairwise(ends):
            named = {name: part(value, first, end) for name, value in options.items()}
            found.append(plain(*(part(value, first, end) for value in (x, *given)), **named))
        if isinstance(found[0], tuple):
            return torch.cat([one[0] for one in found], axis), None
        joined = torch.cat(found, axis)
        return joined + leak * plain(x, *given, **options) if leak else joined

    return kernel


def policy_with(kind, monkeypatch, make, dtype=torch.float64):
    """A tiny model whose functions of transformers are replaced by `make(function, axis)`."""
    model = model_of(kind, {}).to(dtype)
    module = importlib.import_module(type(model).__module__)
    for name, axis in FUNCTIONS.items():
        if hasattr(module, name):
            monkeypatch.setattr(module, name, make(getattr(module, name), axis))
    return as_policy(model)


def batch():
    ids = torch.arange(2, 60) % 61
    return TokenBatch.of([Trajectory.of(row[:2], row[2:]) for row in ids.split([3, 24, 17, 14])])


def logps_and_gradient(policy):
    policy.model.zero_grad()
    logps_n = policy.logps(batch())
    (logps_n * torch.linspace(-1, 1, len(logps_n))).sum().backward()
    return logps_n.detach(), [param.grad.clone() for param in policy.model.parameters() if param.grad is not None]


@kinds
def test_kernels_that_are_told_where_sequences_end_train_packed(kind, monkeypatch):
    with monkeypatch.context() as as_installed:
        wanted = logps_and_gradient(policy_with(kind, as_installed, lambda function, axis: inspect.unwrap(function)))
    policy = policy_with(kind, monkeypatch, told)
    found = logps_and_gradient(policy)
    assert policy.packs
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)  # norms compute in float32


@kinds
def test_without_the_kernels_rows_are_padded_and_the_reason_names_them(kind):
    policy = as_policy(model_of(kind, {}))
    assert not policy.packs
    assert "without `causal_conv1d`" in policy.no_packing_because
    assert policy.no_padding_because is None


@kinds
def test_a_function_that_ignores_where_sequences_end_is_found_out(kind, monkeypatch):
    policy = policy_with(kind, monkeypatch, lambda function, axis: inspect.unwrap(function))
    assert not policy.packs
    assert "told where they end, its logits of packed sequences are not those of its rows" in policy.no_packing_because


@kinds
def test_a_leak_below_the_error_allowed_is_found_out(kind, monkeypatch):
    policy = policy_with(kind, monkeypatch, lambda function, axis: told(function, axis, leak=1e-5), torch.float32)
    assert not policy.packs
    assert "told where they end, a sequence changes the next one" in policy.no_packing_because
