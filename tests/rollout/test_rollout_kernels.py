"""The kernels of a decode step against torch, through Triton's interpreter."""

import os

import pytest
import torch

from strop.models.attention import Rule
from strop.models.decoder_layers import ACTIVATIONS, RMSNorm
from strop.rollout import Sampling, sampling_logps
from strop.rollout.sampling import draw
from strop.rollout.slots import CacheShape, Decode, Rows

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels on a CPU need TRITON_INTERPRET=1"
)


NO_TILES = torch.zeros(2, 0, dtype=torch.int32)


def random_rows(N, prefix_lengths, step, T):
    rows = Rows.empty(N, torch.device("cpu"))
    prefix = torch.tensor(prefix_lengths)
    rows.prefix_length_N.copy_(prefix)
    rows.prefix_start_N.copy_(prefix.cumsum(0) - prefix)
    rows.suffix_start_N.copy_(int(prefix.sum()) + T * torch.arange(N).flip(0))
    rows.step_N.fill_(step)
    return rows, int(prefix.sum()) + N * T


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    ("heads", "per_head", "dim", "rule"),
    [
        (2, 7, 64, Rule(0.125)), (1, 1, 16, Rule(0.25)), (3, 3, 20, Rule(0.3, window=9)),
        (2, 2, 8, Rule(0.5, softcap=1.5)), (1, 20, 16, Rule(0.2, window=3, softcap=2.0)),
    ],
)  # fmt: skip
def test_attention_kernel_is_attention(heads, per_head, dim, rule, splits):
    """Rows without prefix, with a short and a long one; garbage in slots that are not theirs changes nothing."""
    from strop.rollout import launch

    generator = torch.Generator().manual_seed(0)
    T, step = 12, 5
    rows, num_slots = random_rows(3, [0, 4, 150], step, T)
    shape = CacheShape(2, heads, per_head, dim, torch.float32)
    kv = torch.randn(2, 2, num_slots, heads, dim, generator=generator)
    for n in range(3):  # not written yet
        kv[:, :, rows.suffix_start_N[n] + step : rows.suffix_start_N[n] + T] = torch.nan
    q = torch.randn(3, heads * per_head, 1, dim, generator=generator)
    k, v = torch.randn(2, 3, heads, 1, dim, generator=generator)
    kernel_kv, table = kv.clone(), torch.zeros(7, dtype=torch.int64)
    table[:2] = torch.tensor([kernel_kv.data_ptr(), num_slots])
    wanted = Decode(kv, rows, longest=150 + step + 1).attend(q, k, v, 1, rule)
    found = launch.KernelDecode(table, rows, shape, launch.Parts(splits), NO_TILES).attend(
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
    rows.step_N.fill_(step)
    table = torch.tensor([0, 0, uniforms.data_ptr(), tokens.data_ptr(), logps.data_ptr(), T])
    eos = torch.tensor([2, 7, -1, -1])
    pick(logits, rows, eos, table, 1 / (sampling.temperature or 1), sampling.greedy)
    wanted, wanted_logps = draw(logits, uniforms[rows.row_N, step], sampling)
    ended = (rows.token_N == 2) | (rows.token_N == 7)
    assert torch.equal(rows.finished_N.bool(), ended)
    assert torch.equal(rows.step_N, torch.where(ended, step, step + 1).int())
    same = rows.token_N == wanted
    assert same.sum() >= N - 3  # float32 and float64 sums part ways at 1 − 2⁻²⁴, and where a number falls on a border
    torch.testing.assert_close(logps[rows.row_N, step][same], wanted_logps[same], rtol=1e-5, atol=1e-5)
    exact = sampling_logps(logits, sampling).gather(1, rows.token_N[:, None])[:, 0]
    torch.testing.assert_close(logps[rows.row_N, step], exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(tokens[rows.row_N, step], rows.token_N)
    assert (tokens[:, [0, 2]] == 0).all()


def test_draw_kernel_leaves_rows_that_ended_and_ends_rows_for_their_length():
    from strop.rollout.launch import pick

    T = 3
    rows = Rows.empty(3, torch.device("cpu"))
    rows.row_N.copy_(torch.arange(3))
    rows.step_N.copy_(torch.tensor([2, 1, 1]))
    rows.finished_N[1] = 1
    uniforms, tokens, logps = torch.rand(3, T), torch.full((3, T), -7), torch.full((3, T), 5.0)
    table = torch.tensor([0, 0, uniforms.data_ptr(), tokens.data_ptr(), logps.data_ptr(), T])
    logits = torch.tensor([[0.0, 9.0, 0.0]] * 3)
    pick(logits, rows, torch.tensor([-1]), table, 1.0, True)
    assert tokens.tolist() == [[-7, -7, 1], [-7, -7, -7], [-7, 1, -7]]
    assert (logps != 5).tolist() == [[False, False, True], [False] * 3, [False, True, False]]
    assert rows.finished_N.tolist() == [1, 1, 0]
    assert rows.step_N.tolist() == [2, 1, 2]


# ---- between the products ----


def norm_of(size, offset=0, seed=0):
    return RMSNorm(torch.randn(size, generator=torch.Generator().manual_seed(seed)), 1e-5, offset)


@pytest.mark.parametrize("H", [1, 64, 65, 120])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("adds", [True, False])
def test_add_norm_kernel(H, offset, adds):
    from strop.rollout import launch

    generator = torch.Generator().manual_seed(H)
    x, update = torch.randn(2, 3, H, generator=generator)
    norm, total = norm_of(H, offset), x + update if adds else x.clone()
    found = launch.add_norm(x, update if adds else None, norm, torch.float32)
    wanted = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (norm.weight + offset)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x, total, rtol=0, atol=0)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("F", [1, 1024, 1027])
def test_gate_kernel(activation, F):
    from strop.rollout import launch

    gate, up = 3 * torch.randn(2, 3, F, generator=torch.Generator().manual_seed(F))
    found = launch.gated(torch.cat([gate, up], 1), activation)
    torch.testing.assert_close(found, ACTIVATIONS[activation](gate) * up, rtol=1e-5, atol=1e-5)


def rotated(x_NED, positions_N, rotation_TCD, norm=None):
    """By the definition: pairs (i, i + D/2) turned by an angle."""
    if norm is not None:
        x_NED = x_NED / (x_NED.square().mean(-1, keepdim=True) + norm.eps).sqrt() * (norm.weight + norm.offset)
    a, b = x_NED.chunk(2, -1)
    cos, sin = (rotation_TCD[positions_N, which, None, : a.shape[-1]] for which in (0, 1))
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def rotation_of(num, D):
    angles = torch.arange(num)[:, None] * torch.rand(D // 2, generator=torch.Generator().manual_seed(D))
    return torch.stack([torch.cat([angles.cos()] * 2, 1), torch.cat([angles.sin()] * 2, 1)], 1)


@pytest.mark.parametrize(("Q", "K", "D"), [(4, 2, 64), (3, 1, 20), (1, 1, 2)])
@pytest.mark.parametrize("norms", [None, (0, 0), (1, 1)])
def test_rotate_kernel(Q, K, D, norms):
    from strop.rollout import launch

    norms = norms and (norm_of(D, norms[0], 1), norm_of(D, norms[1], 2))
    qkv = torch.randn(3, Q + 2 * K, D, generator=torch.Generator().manual_seed(0))
    positions, rotation, before = torch.tensor([0, 5, 3]), rotation_of(6, D), qkv.clone()
    table = torch.tensor([0] * 6 + [rotation.data_ptr()])
    launch.rotate(qkv, positions, table, K, norms, False)
    q_norm, k_norm = norms or (None, None)
    wanted = torch.cat([rotated(before[:, :Q], positions, rotation, q_norm),
                        rotated(before[:, Q:-K], positions, rotation, k_norm), before[:, -K:]], 1)  # fmt: skip
    torch.testing.assert_close(qkv, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("normed", [False, True])
def test_attention_kernel_norms_and_rotates(splits, normed):
    """Query and key straight from the product: the same as with those rotated before, in output and cache."""
    from strop.rollout import launch

    K, R, D, T, step = 2, 3, 20, 12, 5
    rows, num_slots = random_rows(3, [0, 4, 150], step, T)
    generator = torch.Generator().manual_seed(1)
    norms = (norm_of(D, 0, 1), norm_of(D, 0, 2)) if normed else (None, None)
    kv = torch.randn(1, 2, num_slots, K, D, generator=generator)
    qkv = torch.randn(3, (R + 2) * K, D, generator=generator)
    rotation, positions = rotation_of(200, D), (rows.prefix_length_N + rows.step_N).long()
    q, k, v = qkv[:, : R * K], qkv[:, R * K : -K], qkv[:, -K:]
    turned = [rotated(q, positions, rotation, norms[0]), rotated(k, positions, rotation, norms[1]), v]
    kernel_kv, table = kv.clone(), torch.zeros(7, dtype=torch.int64)
    table[:2], table[6] = torch.tensor([kernel_kv.data_ptr(), num_slots]), rotation.data_ptr()
    rule = Rule(0.3)
    wanted = Decode(kv, rows, 156).attend(*(one[:, :, None] for one in turned), 0, rule)
    pass_ = launch.KernelDecode(table, rows, CacheShape(1, K, R, D, torch.float32), launch.Parts(splits), NO_TILES)
    found = pass_.attend_unrotated(*(one[:, :, None] for one in (q, k, v)), 0, rule, norms if normed else None, False)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kernel_kv, kv, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [(1, 1), (2, 4)])
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize(("K", "R", "D", "rule"), [(2, 3, 20, Rule(0.3)), (1, 1, 16, Rule(0.25, softcap=1.5))])
def test_prompts_read_together_are_those_read_by_each_row(splits, turns, K, R, D, rule):
    """Rows of three prompts at different steps, one prompt empty, in tiles of two rows; a spare row is in none."""
    from strop.rollout import launch

    T, lengths = 12, [0, 4, 4, 4, 150, 150]
    rows, num_slots = random_rows(6, lengths, 0, T)
    rows.step_N.copy_(torch.tensor([5, 0, 3, 7, 1, 5]))
    rows.prefix_start_N.copy_(torch.tensor([0, 0, 0, 0, 4, 4]))
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(1, 2, num_slots, K, D, generator=generator)
    q = torch.randn(6, K * R, 1, D, generator=generator)
    k, v = torch.randn(2, 6, K, 1, D, generator=generator)
    rotation, table = rotation_of(200, D), torch.zeros(7, dtype=torch.int64)
    tiles = launch.tiles_of([0, 1, 1, 1, 2, 2], 2)
    assert tiles == [(0, 1), (1, 2), (3, 1), (4, 2)]
    tiles_CN = torch.zeros(2, 6, dtype=torch.int32)
    tiles_CN[:, :4] = torch.tensor(tiles).T
    shape, caches, outs = CacheShape(1, K, R, D, torch.float32), [], []
    for parts in (launch.Parts(1), launch.Parts(1, *splits, 16, 5)):
        caches.append(kv.clone())
        table[:2], table[6] = torch.tensor([caches[-1].data_ptr(), num_slots]), rotation.data_ptr()
        pass_ = launch.KernelDecode(table, rows, shape, parts, tiles_CN)
        outs.append(pass_.attend_unrotated(q, k, v, 0, rule, None, False) if turns else pass_.attend(q, k, v, 0, rule))
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(caches[1], caches[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("rows", "prefix", "new", "prompts", "samples", "wanted"),
    [
        (64, 63, 256, 8, 8, (1,)), (1, 63, 256, 8, 8, (1,)),  # short: nothing to join
        (64, 4095, 512, 64, 1, (4,)), (1, 4095, 512, 1, 1, (16,)),  # nothing to share
        (64, 4095, 512, 8, 8, (4, 4, 16, 64, 16)), (512, 4095, 512, 64, 8, (1, 1, 4, 64, 128)),
        (2, 4095, 64, 8, 8, (16, 1, 16, 64, 2)),
    ],
)  # fmt: skip
def test_parts_of_a_step(rows, prefix, new, prompts, samples, wanted):
    from strop.rollout import launch

    shape = CacheShape(24, 2, 7, 64, torch.bfloat16)
    assert launch.parts_of(rows, shape, prefix, new, prompts, samples) == launch.Parts(*wanted)


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


def test_triton_can_be_started_before_a_kernel_is_there():
    """By names that Triton does not promise; the first rollout on a GPU calls them in a thread."""
    from triton.runtime import cache, driver

    assert len(cache.triton_key()) > 8
    assert "active" in dir(driver)  # asking for it needs a GPU
