"""The layers on numbers done by hand."""

import math

import numpy as np
import pytest

from strop.moe.reference.attention import attend
from strop.moe.reference.aux_loss import aux_loss, aux_loss_bwd
from strop.moe.reference.cross_entropy import cross_entropy, cross_entropy_bwd
from strop.moe.reference.embedding import embedding, embedding_bwd
from strop.moe.reference.layout import layout_of
from strop.moe.reference.moe import moe
from strop.moe.reference.rms_norm import rms_norm, rms_norm_bwd
from strop.moe.reference.rope import rope, rope_angles, rope_bwd, rope_frequencies
from strop.moe.reference.router import route
from strop.moe.reference.softmax import softmax
from strop.moe.reference.swiglu import sigmoid, swiglu


def test_embedding_adds_up_repeated_tokens():
    table = np.arange(8.0).reshape(4, 2)
    x, saved = embedding(np.array([2, 0, 2]), table)
    assert x.tolist() == [[4, 5], [0, 1], [4, 5]]
    assert embedding_bwd(np.array([[1.0, 2], [3, 4], [5, 6]]), saved).tolist() == [[3, 4], [0, 0], [6, 8], [0, 0]]


def test_rms_norm_by_hand():
    y, saved = rms_norm(np.array([[3.0, 4.0]]), np.array([2.0, 1.0]), eps=0.0)
    r = 1 / math.sqrt(12.5)
    assert y[0] == pytest.approx([6 * r, 4 * r], rel=1e-15)
    dx, dw = rms_norm_bwd(np.array([[1.0, 0.0]]), saved)
    assert dw == pytest.approx([3 * r, 0])
    # y₀ = 2·x₀·r: dy₀/dx₀ = 2r − 2·x₀²·r³/2, dy₀/dx₁ = −2·x₀·x₁·r³/2
    assert dx[0] == pytest.approx([2 * r - 9 * r**3, -12 * r**3])


def test_softmax_is_stable_and_bans_minus_infinity():
    assert softmax(np.array([1000.0, 1000.0, -np.inf])).tolist() == [0.5, 0.5, 0.0]


def test_sigmoid_does_not_overflow():
    values = sigmoid(np.array([-1e4, -1.0, 0.0, 1.0, 1e4]))
    assert values == pytest.approx([0, 1 / (1 + math.e), 0.5, 1 / (1 + 1 / math.e), 1], abs=1e-15)


def test_swiglu_by_hand():
    h, _ = swiglu(np.array([[0.0, 1.0]]), np.array([[5.0, 2.0]]))
    assert h[0] == pytest.approx([0.0, 2 / (1 + math.exp(-1))])


def test_rope_turns_pairs_half_a_head_apart():
    assert rope_frequencies(4, 100.0) == pytest.approx([1.0, 0.1])
    angles = rope_angles(np.array([0, 2]), 4, 100.0, np.float64)
    x = np.array([[[1.0, 2.0, 3.0, 4.0]], [[1.0, 2.0, 3.0, 4.0]]])
    y = rope(x, *angles)
    assert y[0].tolist() == x[0].tolist()  # position 0 does not turn
    c, s, c1, s1 = math.cos(2), math.sin(2), math.cos(0.2), math.sin(0.2)
    assert y[1, 0] == pytest.approx([c - 3 * s, 2 * c1 - 4 * s1, 3 * c + s, 4 * c1 + 2 * s1])
    assert rope_bwd(y, *angles) == pytest.approx(x)  # the backward is the inverse


def test_rope_scores_depend_on_distance_only():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, 8))
    scores = []
    for shift in (0, 5, 90):
        turned = [rope(x, *rope_angles(np.array([p + shift]), 8, 1e4, np.float64)) for x, p in ((q, 7), (k, 3))]
        scores.append((turned[0] * turned[1]).sum())
    assert scores == pytest.approx([scores[0]] * 3)


def test_attention_sees_no_future_and_shares_key_heads():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((2, 3, 4, 6)), rng.standard_normal((2, 3, 2, 6)), rng.standard_normal((2, 3, 2, 6))
    context, _ = attend(q, k, v, np.zeros(2, int))
    for b in range(2):
        for t in range(3):
            for head in range(4):
                keys, values = k[b, : t + 1, head // 2], v[b, : t + 1, head // 2]
                want = softmax(keys @ q[b, t, head] / math.sqrt(6)) @ values
                assert context[b, t, head] == pytest.approx(want)


def test_router_by_hand():
    # logits are x itself: probabilities 1/10 of (1, 2, 3, 4)
    x = np.log(np.array([[1.0, 2, 3, 4], [4, 3, 2, 1]]))
    weights, experts, p, _ = route(x, np.eye(4), 2)
    assert p == pytest.approx(np.array([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]]))
    assert experts.tolist() == [[3, 2], [0, 1]]
    assert weights == pytest.approx(np.array([[4 / 7, 3 / 7]] * 2))


def test_router_ties_go_to_the_lower_expert():
    weights, experts, _, _ = route(np.zeros((3, 2)), np.zeros((5, 2)), 3)
    assert experts.tolist() == [[0, 1, 2]] * 3
    assert weights == pytest.approx(np.full((3, 3), 1 / 3))


def test_moe_is_the_weighted_sum_of_its_experts():
    rng = np.random.default_rng(0)
    x, router = rng.standard_normal((7, 4)), rng.standard_normal((5, 4))
    gate_up, down = rng.standard_normal((5, 6, 4)), rng.standard_normal((5, 4, 3))
    y, (p, experts), _ = moe(x, router, gate_up, down, 2)
    for n in range(7):
        want = 0
        for e in experts[n]:
            gate, up = gate_up[e, :3] @ x[n], gate_up[e, 3:] @ x[n]
            want += p[n, e] / p[n, experts[n]].sum() * (down[e] @ (gate / (1 + np.exp(-gate)) * up))
        assert y[n] == pytest.approx(want)


def test_auxiliary_loss_by_hand():
    # two layers, two tokens, top-1 of 2: layer 0 sends both to expert 0, layer 1 one to each
    p = [np.array([[0.9, 0.1], [0.7, 0.3]]), np.array([[0.6, 0.4], [0.2, 0.8]])]
    chosen = [np.array([[0], [0]]), np.array([[0], [1]])]
    loss, saved = aux_loss(p, chosen)
    # f = (3/4, 1/4), P = (0.6, 0.4): 2·(0.45 + 0.1)
    assert loss == pytest.approx(1.1)
    assert aux_loss_bwd(3.0, saved) == pytest.approx([3 * 2 * 0.75 / 4, 3 * 2 * 0.25 / 4])


def test_balanced_routing_has_auxiliary_loss_k():
    p = [np.full((4, 4), 0.25)]
    assert aux_loss(p, [np.array([[0, 1], [2, 3], [0, 1], [2, 3]])])[0] == pytest.approx(2.0)


def test_cross_entropy_by_hand_ignores_what_does_not_count():
    logits = np.log(np.array([[1.0, 3.0], [1.0, 1.0], [7.0, 9.0]]))
    counts = np.array([True, True, False])
    loss, saved = cross_entropy(logits, np.array([1, 0, -100]), counts)
    assert loss == pytest.approx((math.log(4 / 3) + math.log(2)) / 2)
    assert cross_entropy_bwd(saved) == pytest.approx(np.array([[0.125, -0.125], [-0.25, 0.25], [0, 0]]))


def test_cross_entropy_of_nothing_is_zero():
    loss, saved = cross_entropy(np.ones((2, 3)), np.array([-100, -100]), np.zeros(2, bool))
    assert loss == 0
    assert not cross_entropy_bwd(saved).any()


def test_layout_by_hand():
    layout = layout_of(np.array([1, 3]), np.array([5, 0]))
    assert layout.rows_N.tolist() == [0, 1, 1, 1]
    assert layout.positions_N.tolist() == [5, 0, 1, 2]
    grid = layout.grid(np.array([1, 2, 3, 4]))
    assert grid.tolist() == [[1, 0, 0], [2, 3, 4]]
    assert layout.flat(grid).tolist() == [1, 2, 3, 4]
