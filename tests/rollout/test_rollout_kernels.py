"""The kernels of a decode step against torch, through Triton's interpreter."""

import os

import pytest
import torch

from strop.models.attention import Rule
from strop.rollout import Sampling, sampling_logps
from strop.rollout.sampling import draw
from strop.rollout.slots import CacheShape, Decode, Rows

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels on a CPU need TRITON_INTERPRET=1"
)


def random_rows(N, prefix_lengths, step, T):
    rows = Rows.empty(N, torch.device("cpu"))
    prefix = torch.tensor(prefix_lengths)
    rows.prefix_length_N.copy_(prefix)
    rows.prefix_start_N.copy_(prefix.cumsum(0) - prefix)
    rows.suffix_start_N.copy_(int(prefix.sum()) + T * torch.arange(N).flip(0))
    rows.step.fill_(step)
    return rows, int(prefix.sum()) + N * T


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    ("heads", "per_head", "dim", "rule"),
    [
        (2, 7, 64, Rule(0.125)), (1, 1, 16, Rule(0.25)), (3, 3, 20, Rule(0.3, window=9)),
        (2, 2, 8, Rule(0.5, softcap=1.5)), (1, 20, 16, Rule(0.2, window=3, softcap=2.0)),
    ],
)  # fmt: skip
def test_attention_kernel_is_attention(monkeypatch, heads, per_head, dim, rule, splits):
    """Rows without prefix, with a short and a long one; garbage in slots that are not theirs changes nothing."""
    from strop.rollout import launch

    monkeypatch.setattr(launch, "num_splits", lambda programs: splits)
    generator = torch.Generator().manual_seed(0)
    T, step = 12, 5
    rows, num_slots = random_rows(3, [0, 4, 150], step, T)
    shape = CacheShape(2, heads, dim, torch.float32)
    kv = torch.randn(2, 2, num_slots, heads, dim, generator=generator)
    for n in range(3):  # not written yet
        kv[:, :, rows.suffix_start_N[n] + step : rows.suffix_start_N[n] + T] = torch.nan
    q = torch.randn(3, heads * per_head, 1, dim, generator=generator)
    k, v = torch.randn(2, 3, heads, 1, dim, generator=generator)
    kernel_kv, table = kv.clone(), torch.zeros(6, dtype=torch.int64)
    table[:2] = torch.tensor([kernel_kv.data_ptr(), num_slots])
    wanted = Decode(kv, rows, longest=150 + step + 1).attend(q, k, v, 1, rule)
    found = launch.KernelDecode(table, rows, shape).attend(
        q, k.transpose(1, 2).contiguous().transpose(1, 2), v, 1, rule
    )
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kernel_kv, kv, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("V", [5, 4096, 8003])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.5), Sampling(temperature=0)])
def test_draw_kernel_is_draw(V, sampling):
    from strop.rollout.launch import pick

    N, T, step = 64, 3, 1
    generator = torch.Generator().manual_seed(V)
    logits = 3 * torch.randn(N, V, generator=generator)
    logits[:, 2] = logits[:, 4] = logits.amax(1)  # a tie, for greedy
    logits[1, :3], logits[2, -2:] = -torch.inf, -torch.inf
    uniforms = torch.rand(N, T, generator=generator)
    uniforms[2:4, step], uniforms[4, step] = 1 - 2**-24, 0.0
    tokens, logps = torch.zeros(N, T, dtype=torch.int64), torch.zeros(N, T)
    rows = Rows.empty(N, torch.device("cpu"))
    rows.row_N.copy_(torch.arange(N).flip(0))
    rows.step.fill_(step)
    table = torch.tensor([0, 0, uniforms.data_ptr(), tokens.data_ptr(), logps.data_ptr(), T])
    eos = torch.tensor([2, 7, -1, -1])
    pick(logits, rows, eos, table, 1 / (sampling.temperature or 1), sampling.greedy)
    wanted, wanted_logps = draw(logits, uniforms[rows.row_N, step], sampling)
    same = rows.token_N == wanted
    assert same.sum() >= N - 3  # float32 and float64 sums part ways at 1 − 2⁻²⁴, and where a number falls on a border
    torch.testing.assert_close(logps[rows.row_N, step][same], wanted_logps[same], rtol=1e-5, atol=1e-5)
    exact = sampling_logps(logits, sampling).gather(1, rows.token_N[:, None])[:, 0]
    torch.testing.assert_close(logps[rows.row_N, step], exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(tokens[rows.row_N, step], rows.token_N)
    assert (tokens[:, [0, 2]] == 0).all()
    assert torch.equal(rows.finished_N.bool(), (rows.token_N == 2) | (rows.token_N == 7))


@pytest.mark.parametrize("found", [torch.nan, -torch.inf])
@pytest.mark.parametrize("V", [5, 4100])
@pytest.mark.parametrize("greedy", [True, False])
def test_draw_kernel_gives_an_id_whatever_the_logits(found, V, greedy):
    """One beyond the vocabulary would end the process in the next step's embedding."""
    from strop.rollout.launch import pick

    rows = Rows.empty(2, torch.device("cpu"))
    rows.row_N[1] = 1
    uniforms, tokens, logps = torch.tensor([[0.0], [0.999]]), torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1)
    table = torch.tensor([0, 0, uniforms.data_ptr(), tokens.data_ptr(), logps.data_ptr(), 1])
    pick(torch.full((2, V), found), rows, torch.tensor([-1]), table, 1.0, greedy)
    assert ((rows.token_N >= 0) & (rows.token_N < V)).all()
    assert not logps.isfinite().any()
