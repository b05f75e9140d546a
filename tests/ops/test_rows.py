"""The row kernels at their edges: sizes, misalignment, blocks of a vocabulary, −inf, layouts; both implementations."""

import math

import pytest
import torch
from yardstick import check, check_gradient, cut_off, eager_logps

from strop.losses import PolicyRule
from strop.ops import logp
from strop.ops.rows import TokenValues, fake_gradient, implementation

NAMES = ("torch", "triton")
every_implementation = pytest.mark.parametrize("name", NAMES)


def example(N, V, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(N, V, generator=generator) * 3).to(dtype)
    return logits, torch.randint(0, V, (N,), generator=generator)


def both_ways(rows, logits, ids, temperature=0.8, d_logp=1.0, d_entropy=0.5):
    """Log-probs, entropies and the gradient of d_logp·Σ logp + d_entropy·Σ H."""
    logps, stats, entropies = rows.logps(logits, ids, None, temperature, True)
    d_logps, d_entropies = torch.full_like(logps, d_logp), torch.full_like(logps, d_entropy)
    return logps, entropies, rows.logps_bwd(
        logits, ids, None, stats, entropies, d_logps, d_entropies, temperature, False
    )  # fmt: skip


def exact_and_eager(logits, ids, temperature=0.8, d_logp=1.0, d_entropy=0.5):
    results = []
    for dtype in (torch.float64, logits.dtype):
        x = logits.detach().to(dtype).contiguous().requires_grad_()
        logps, entropies = logp.reference(x, ids, temperature=temperature, entropy=True)
        ((d_logp * logps).sum() + d_entropy * entropies.sum()).backward()
        results.append((logps, entropies, x.grad))
    return results


def compare(rows, logits, ids, allowance=0.0, **options):
    found, (exact, eager) = both_ways(rows, logits, ids, **options), exact_and_eager(logits, ids, **options)
    check(found[0], exact[0], eager[0], "logp")
    check(found[1], exact[1], eager[1], "entropy")
    check_gradient(found[2], exact[2], eager[2], ids, allowance=allowance)


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("V", [1, 2, 3, 7, 8, 9, 64, 8003])
def test_vocabularies(name, V, dtype):
    logits, ids = example(2, V, dtype)
    compare(implementation(name), logits, ids, cut_off(name, dtype))


def test_a_vocabulary_of_50257():
    """Rows that begin at 0 and 1 from a boundary, ids in the first and the last edge."""
    logits, _ = example(2, 50257, torch.bfloat16)
    compare(implementation("triton"), logits, torch.tensor([50256, 0]), cut_off("triton", torch.bfloat16))


@pytest.mark.parametrize(("dtype", "per"), [(torch.bfloat16, 8), (torch.float32, 4)])
@pytest.mark.parametrize("V", [5, 8, 1031])
def test_every_misalignment(dtype, per, V):
    """A tensor that starts anywhere between two 16-byte boundaries: the same bits as a copy of its own."""
    rows = implementation("triton")
    logits, ids = example(2, V, dtype)
    expected = both_ways(rows, logits, ids)
    for start in range(per):
        shifted = torch.full((logits.numel() + per,), torch.nan, dtype=dtype)[start : start + logits.numel()].view(2, V)
        shifted.copy_(logits)
        assert shifted.data_ptr() % 16 == start * dtype.itemsize
        found = both_ways(rows, shifted, ids)
        torch.testing.assert_close(found[:2], expected[:2], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found[2], expected[2], rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_misaligned_rows_write_only_their_own_memory():
    rows = implementation("triton")
    logits, ids = example(4, 13, torch.bfloat16)
    memory = torch.full((logits.numel() + 16,), 7.0, dtype=torch.bfloat16)
    view = memory[3 : 3 + logits.numel()].view(4, 13).copy_(logits)
    logps, stats, _ = rows.logps(view, ids, None, 1.0, False)
    rows.logps_bwd(view, ids, None, stats, logps, torch.ones(4), None, 1.0, True)
    assert (memory[:3] == 7).all()
    assert (memory[3 + logits.numel() :] == 7).all()
    assert view.float().sum(-1).abs().max() < 0.1


@every_implementation
@pytest.mark.parametrize("sizes", [[4, 5], [8, 1], [3] * 3])
@pytest.mark.parametrize("banned", [None, slice(0, 4), slice(4, 9), slice(1, 8)])
def test_blocks_of_a_vocabulary_add_up_to_the_whole(name, sizes, banned):
    """Also where a block, the first or the last, is all −inf."""
    rows = implementation(name)
    logits, ids = example(3, 9)[0], torch.tensor([0, 4, 8])
    if banned is not None:
        logits[:, banned] = -torch.inf
    expected_logps, expected_stats, expected_entropies = rows.logps(logits, ids, None, 0.7, True)
    into = torch.empty(3), torch.empty(2, 3), torch.empty(3)
    start = 0
    for number, size in enumerate(sizes):
        rows.logps(logits[:, start : start + size].contiguous(), ids, None, 0.7, True, into, (start, 9, number))
        start += size
    torch.testing.assert_close(into[0], expected_logps)
    torch.testing.assert_close(into[2], expected_entropies)
    torch.testing.assert_close(into[1].sum(0), expected_stats.sum(0))
    d_logps, d_entropies = torch.ones(3), torch.full((3,), 0.3)
    whole = rows.logps_bwd(logits, ids, None, into[1], into[2], d_logps, d_entropies, 0.7, False)
    start = 0
    for size in sizes:
        part = logits[:, start : start + size].contiguous()
        rows.logps_bwd(part, ids, None, into[1], into[2], d_logps, d_entropies, 0.7, True, (start, 9))
        torch.testing.assert_close(part, whole[:, start : start + size], equal_nan=True)
        start += size


@every_implementation
def test_ids_outside_the_vocabulary_give_nan_in_their_row_only(name):
    logits, _ = example(4, 8)
    ids = torch.tensor([8, -1, 2**40, 3])
    logps, entropies, gradient = both_ways(implementation(name), logits, ids)
    assert logps.isnan().tolist() == [True, True, True, False]
    assert gradient.isnan().all(-1).tolist() == gradient.isnan().any(-1).tolist() == [True, True, True, False]
    assert entropies.isfinite().all()
    into = torch.empty(4), torch.empty(2, 4), torch.empty(4)
    for number in range(
        2
    ):  # an id beyond the first block is not outside the vocabulary, and one outside is not found later
        half = logits[:, 4 * number : 4 * number + 4].contiguous()
        implementation(name).logps(half, ids, None, 0.8, True, into, (4 * number, 8, number))
    torch.testing.assert_close(into[0], logps, equal_nan=True)


@every_implementation
def test_a_row_of_nothing_but_banned_tokens_is_nan(name):
    logits, ids = example(2, 9)
    logits[0] = -torch.inf
    logps, entropies, _ = both_ways(implementation(name), logits, ids)
    assert logps.isnan().tolist() == entropies.isnan().tolist() == [True, False]


@every_implementation
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_inf_logits_are_nan(name, value):
    logits, ids = example(2, 70)
    logits[0, 60] = value
    logps, entropies, gradient = both_ways(implementation(name), logits, ids)
    assert logps.isnan().tolist() == entropies.isnan().tolist() == [True, False]
    assert gradient[0].isnan().all()
    assert gradient[1].isfinite().all()


@every_implementation
def test_entropy_by_hand(name):
    logits = torch.full((3, 16), -torch.inf)
    logits[0] = 5.0
    logits[1, :4] = -3.0
    logits[2, 11] = 0.0
    _, entropies, gradient = both_ways(
        implementation(name), logits, torch.tensor([0, 0, 11]), d_logp=0.0, d_entropy=1.0
    )
    assert entropies.tolist() == pytest.approx([math.log(16), math.log(4), 0.0], abs=1e-6)
    assert gradient.abs().max() < 1e-6  # each is the greatest entropy there is on its tokens


@every_implementation
def test_flat_and_peaked_rows(name):
    for scale in (1e-4, 1.0, 60.0, 3e4):
        logits, ids = example(4, 201, seed=3)
        compare(implementation(name), logits * scale, ids, temperature=1.0)


ROWS = {  # what the base of the exponentials, a guess from a few elements, meets
    "flat": lambda x, ids: x * 0.01,
    "usual": lambda x, ids: x,
    "a peak nobody expects": lambda x, ids: x.index_fill(1, torch.tensor([x.shape[1] // 2]), 90.0),
    "each tile higher": lambda x, ids: x + torch.arange(x.shape[1]) * (300 / x.shape[1]),
    "each tile lower": lambda x, ids: x - torch.arange(x.shape[1]) * (300 / x.shape[1]),
    "a banned beginning": lambda x, ids: x.index_fill(1, torch.arange(x.shape[1] // 2), -torch.inf).scatter(1, ids[:, None], 1.0),
    "only the target": lambda x, ids: torch.full_like(x, -torch.inf).scatter(1, ids[:, None], 2.0),
    "far from zero": lambda x, ids: x * 0.1 - 3e4,
}  # fmt: skip


def factored(logits, ids, temperature, advantages):
    """Log-probs and the gradient, its factors multiplied in."""
    loss = PolicyRule()
    tokens = TokenValues(ids, None, None, None, advantages, torch.ones_like(advantages))
    terms = implementation("triton").policy_terms(logits, tokens, temperature, loss, True, True, None, True)
    return terms.logps_N, terms.d_logits.float() * terms.factors_N[:, None]


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("V", [1, 8, 9, 1031, 8003, 20011])
@pytest.mark.parametrize("temperature", [1.0, 0.05])
def test_a_gradient_stored_apart_from_its_row_factors(kind, V, temperature):
    """Exponentials over a base that is not the maximum, in one visit: as exact as eager torch."""
    logits, ids = example(3, V)
    logits = ROWS[kind](logits, ids).bfloat16()
    advantages = torch.tensor([1.0, -0.5, 3.0])
    (exact, _, d_exact), (eager, _, d_eager) = exact_and_eager(logits, ids, temperature, -advantages, 0.0)
    found, d_found = factored(logits, ids, temperature, advantages)
    check(found, exact, eager, "logp")
    rounding = cut_off("triton", torch.bfloat16)
    check_gradient(d_found, d_exact, d_eager, ids, coefficient=3 / temperature, allowance=rounding)


def test_row_factors_of_invalid_rows_are_nan():
    logits, ids = example(5, 3000)
    logits[0, 2000], logits[1, 2000], logits[2], ids[3] = torch.nan, torch.inf, -torch.inf, 3000
    logps, gradient = factored(logits.bfloat16(), ids, 1.0, torch.ones(5))
    assert logps.isnan().tolist() == [True, True, True, True, False]
    assert gradient.isnan().all(-1).tolist() == [True, True, True, True, False]


def test_exponentials_are_written_inside_their_row_only():
    logits, ids = example(4, 13, torch.bfloat16)
    memory = torch.full((logits.numel() + 16,), 7.0, dtype=torch.bfloat16)
    view = memory[3 : 3 + logits.numel()].view(4, 13).copy_(logits)
    expected = factored(logits.clone(), ids, 1.0, torch.ones(4))
    torch.testing.assert_close(factored(view, ids, 1.0, torch.ones(4)), expected, rtol=0.01, atol=1e-6)
    assert (memory[:3] == 7).all()
    assert (memory[3 + logits.numel() :] == 7).all()


def test_float16_has_no_row_factors():
    logits, ids = example(2, 9, torch.float16)
    loss = PolicyRule()
    ones = torch.ones(2)
    tokens = TokenValues(ids, None, None, None, ones, ones)
    terms = implementation("triton").policy_terms(logits, tokens, 1.0, loss, True, True, None, True)
    assert terms.factors_N is None


@pytest.mark.parametrize("H", [1, 6, 1030])
def test_rows_are_scattered_to_their_places(H):
    values, factors = torch.randn(3, H), torch.tensor([2.0, 0.0, -0.5])
    for places in (None, torch.tensor([4, 0, 2])):
        out = torch.full((5, H), 7.0, dtype=torch.bfloat16)
        implementation("triton").put_multiplied(values, factors, out, places)
        expected = torch.full((5, H), 7.0).index_copy(
            0, torch.arange(3) if places is None else places, values * factors[:, None]
        )
        torch.testing.assert_close(out, expected.bfloat16(), rtol=cut_off("triton", torch.bfloat16), atol=0)


LAYOUTS = {
    "next token": lambda x: x[:, :-1],
    "every second": lambda x: x[:, ::2],
    "sequences and tokens swapped": lambda x: x.transpose(0, 1),
    "vocabulary first": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "part of the vocabulary": lambda x: x[..., 3:40],
    "expanded": lambda x: x[:, :1].expand(-1, 3, -1),
    "one sequence": lambda x: x[:1, 1:],
    "four dimensions": lambda x: x.view(2, 4, 2, 22)[:, :-1, :1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    """Any layout gives what its copy gives, and the layout of the gradient is foretold to a compiler."""
    rows = implementation("triton")
    x = LAYOUTS[layout](example(8, 44)[0].view(2, 4, 44))
    N, V = x.numel() // x.shape[-1], x.shape[-1]
    ids = torch.arange(N) % V
    expected, expected_entropies, expected_gradient = both_ways(rows, x.contiguous(), ids)
    found, entropies, gradient = both_ways(rows, x, ids)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(entropies, expected_entropies)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-6)
    assert gradient.stride() == fake_gradient(x).stride()


def test_ids_and_masks_may_have_strides():
    rows = implementation("triton")
    logits, _ = example(5, 9)
    ids, mask = torch.arange(10)[::2] % 9, torch.tensor([1, 0, 1, 0, 0, 0, 1, 0, 0, 0]).bool()[::2]
    found = rows.logps(logits, ids, mask, 1.0, False)[0]
    torch.testing.assert_close(found, torch.where(mask, eager_logps(logits, ids), 0.0))


@pytest.mark.parametrize("holes", [False, True])
def test_scaling_by_a_factor_on_the_device(holes):
    rows = implementation("triton")
    base = torch.randn(2, 4, 7)
    before = base.clone()
    view = base[:, :-1] if holes else base
    rows.scale_(view, torch.tensor(1.0))
    assert torch.equal(base, before)
    rows.scale_(view, torch.tensor(3.0))
    assert torch.equal(view, 3 * before[:, : view.shape[1]])
    assert torch.equal(base[:, view.shape[1] :], before[:, view.shape[1] :])
    rows.scale_(base[:0], torch.tensor(3.0))
