"""How tokens and their logits are cut into pieces, and the memory they take."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example as such_as
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from yardstick import backend_fixture

from strop.ops import chunks, linear_grpo_loss, linear_logp, onednn, registry
from strop.ops.head import IDS_MULTIPLE, CountedTokens, Head, Wanted, cut, sums_in

H = 6
fast_backend = backend_fixture("linear_grpo_loss", fast=True)


@given(total=st.integers(0, 10_000), most=st.integers(0, 5000))
@such_as(total=4096, most=1536)
def test_cut(total, most):
    """One after another, none larger than allowed, no more of them than needed, whole multiples but for the last."""
    parts = cut(total, most, 512)
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(total))
    sizes = [part.stop - part.start for part in parts]
    unit = 512 if most >= 512 else 1
    assert all(0 < size <= max(most, 1) for size in sizes)
    assert len(sizes) == (min(total, 1) if total <= most else -(-total // max(most // unit * unit, 1)))
    assert all(size % unit == 0 for size in sizes[:-1])
    assert not sizes or max(sizes) - min(sizes[:-1] or sizes) <= unit


@pytest.mark.parametrize("multiprocessors", [1, 14, 132])
def test_a_block_is_never_empty(monkeypatch, multiprocessors):
    """Whatever the memory and the GPU, of which a slice may have few multiprocessors."""
    gpu = SimpleNamespace(multi_processor_count=multiprocessors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    for n, v in itertools.product((1, 300, 2048), (1, 128, 256, 300, 5000)):
        found = chunks._score_vocabulary(n, n * v, torch.device("cuda"))
        assert 1 <= found <= v


@given(
    n=st.integers(1, 300), H=st.integers(1, 80), V=st.integers(1, 2000), narrow=st.booleans(), wide=st.booleans(),
    workspace=st.integers(1, 10**6),
)  # fmt: skip
@such_as(n=1, H=2, V=257, narrow=False, wide=False, workspace=268)  # a short last block
def test_gradients_never_overwrite_logits_still_needed(n, H, V, narrow, wide, workspace):
    """And all of it lies in the float32 sum of the weight's gradient and the workspace."""
    dtype = torch.bfloat16 if narrow else torch.float32
    gradient = torch.float32 if wide else dtype
    head = Head(torch.empty(V, H, device="meta"), None)
    wanted = Wanted(True, True, False, gradient)
    plan = chunks._over_the_gradient(n, head, wanted, dtype, dtype.itemsize, workspace)
    if plan is None:
        return
    assert plan.room % 16 == 0
    assert plan.room + n * V * dtype.itemsize <= V * H * 4 + workspace
    for block in cut(V, plan.v, IDS_MULTIPLE):
        assert block.stop * H * gradient.itemsize <= plan.room + n * block.start * dtype.itemsize


@pytest.mark.parametrize("count", [0, 1, 40, 64])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("workspace", [2000, 20_000])
def test_tokens_that_do_not_count_take_no_memory(fast_backend, monkeypatch, count, frozen, workspace):
    """The logits lie in the workspace and the float32 sum of the weight's gradient, however few of many tokens count."""
    original, sizes = CountedTokens.workspace, []

    def noted(tokens, size):
        sizes.append(size * tokens.dtype.itemsize)
        return original(tokens, size)

    monkeypatch.setattr(CountedTokens, "workspace", noted)
    generator = torch.Generator().manual_seed(count)
    hidden, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((1, 64, H), (203, H)))
    mask = torch.randperm(64, generator=generator)[None] < count
    leaves = hidden.requires_grad_(), weight.requires_grad_(not frozen)
    linear_grpo_loss(
        *leaves, torch.zeros_like(mask).long(), None, None, mask, advantages=torch.ones(1), workspace=workspace
    )
    assert sum(sizes) <= workspace + (0 if frozen else weight.numel() * 4)


@pytest.fixture(params=["torch", "onednn"])
def copied_bytes(request, monkeypatch):
    """Compute products by torch, or by oneDNN where this machine has it; return the bytes of its results that are copied."""
    by_onednn = request.param == "onednn"
    if by_onednn and not onednn.has_onednn():
        pytest.skip("this torch or CPU has no products of oneDNN")
    monkeypatch.setattr(onednn, "is_faster", lambda: by_onednn)
    monkeypatch.setattr(onednn, "TEMPORARY_BYTES", 10_000)
    return 10_000 * by_onednn


class MostMemory(TorchDispatchMode):
    """The most bytes at a time of tensors that operations have made."""

    def __init__(self):
        super().__init__()
        self.bytes, self._made = 0, WeakIdKeyDictionary()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if isinstance(x, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self._made[x] = None
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in self._made}
        self.bytes = max(self.bytes, sum(storages.values()))
        return result


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [True, False])
def test_memory(dtype, frozen):
    """Of the row functions in torch: the gradients, the weight's in float32, and the workspace."""
    N, V, workspace = 200, 3000, 400_000
    hidden, weight = torch.randn(2, N // 2, 4, dtype=dtype), torch.randn(V, 4, dtype=dtype)
    leaves = hidden.requires_grad_(), weight.requires_grad_(not frozen)
    ids, mask = torch.zeros(2, N // 2).long(), torch.ones(2, N // 2)
    with registry.use_backend(linear_grpo_loss="chunked"), MostMemory() as most:
        linear_grpo_loss(*leaves, ids, None, None, mask, advantages=torch.ones(2), workspace=workspace)
    gradients = hidden.nbytes + (0 if frozen else weight.numel() * sums_in(dtype).itemsize)
    of_tokens = 20 * N * 8  # log-probs, terms, places, ...
    assert 0.7 * workspace < most.bytes <= workspace + gradients + of_tokens


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_memory_over_the_gradient(dtype, temperature, copied_bytes):
    """The same where the logits of all tokens lie over the weight's gradient: a block that is read and kept is copied."""
    N, V, H, workspace = 200, 3000, 100, 2_000_000
    hidden, weight = (torch.randn(*shape, dtype=dtype).requires_grad_() for shape in ((2, N // 2, H), (V, H)))
    ids, mask = torch.zeros(2, N // 2).long(), torch.ones(2, N // 2)
    with registry.use_backend(linear_grpo_loss="chunked"), MostMemory() as most:
        options = {"advantages": torch.ones(2), "temperature": temperature, "workspace": workspace}
        linear_grpo_loss(hidden, weight, ids, None, None, mask, **options)
    gradients = hidden.nbytes + weight.numel() * sums_in(dtype).itemsize
    assert most.bytes <= workspace + gradients + 20 * N * 8 + copied_bytes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("frozen", [True, False])
def test_memory_of_the_way_back_of_log_probs(dtype, entropy, frozen, copied_bytes):
    """The gradients, the hidden states' once more in float32, and the workspace; in bfloat16 a CPU's sum takes copies."""
    N, H, V, workspace = 60, 200, 3000, 400_000
    hidden, weight = torch.randn(N, H, dtype=dtype).requires_grad_(), torch.randn(V, H, dtype=dtype)
    weight.requires_grad_(not frozen)
    with registry.use_backend(linear_logp="chunked"):
        found = linear_logp(hidden, weight, torch.zeros(N).long(), entropy=entropy, workspace=workspace)
    total = sum(x.sum() for x in found) if entropy else found.sum()
    with MostMemory() as most:
        total.backward()
    gradients = hidden.nbytes + (0 if frozen else weight.nbytes) + N * H * sums_in(dtype).itemsize
    assert most.bytes <= workspace + gradients + 20 * N * 8 + copied_bytes
