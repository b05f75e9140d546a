"""How rows are read together: masks learned from transformers, and lengths at which a model's numbers change."""

import copy
import functools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, masking_utils

from strop.data.batch import TokenBatch, Trajectory
from strop.models import as_policy, trial
from strop.models.attention import (
    Packed,
    Rule,
    Span,
    Unsupported,
    attending,
    attention,
    attention_of_rows,
    current,
    seen_by,
)
from strop.models.rotations import boundaries_of, rotations
from strop.models.trial import shortened
from strop.rollout import Sampling, generate

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1}  # fmt: skip
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0, 5.0, 7.0, 9.0],
            "original_max_position_embeddings": 12, "partial_rotary_factor": 1.0}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def phi3(**changes):
    torch.manual_seed(0)
    fields = SIZES | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 12,
                      "max_position_embeddings": 64} | changes  # fmt: skip
    return Phi3ForCausalLM(Phi3Config(**fields)).double().eval()


def llama(**changes):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(SIZES | changes))).double().eval()


def rows_of(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 50, (length,), generator=generator) for length in lengths]


def alone(model, row):
    """Log-probs of a fresh copy, since dynamic frequencies stay those of the longest row."""
    return copy.deepcopy(model)(input_ids=row[None]).logits[0].log_softmax(-1)


# ---- masks ----


@pytest.mark.parametrize(
    ("function", "span"),
    [
        (masking_utils.causal_mask_function, None),
        (masking_utils.sliding_window_causal_mask_function(5), Span(window=5)),
        (masking_utils.chunked_causal_mask_function(7, torch.zeros(1)), Span(chunk=7)),
        (
            masking_utils.and_masks(
                masking_utils.sliding_window_causal_mask_function(5),
                masking_utils.packed_sequence_mask_function(torch.zeros(1, 3)),
            ),
            Span(window=5),
        ),
    ],
)
def test_which_keys_a_query_sees_is_read_from_the_mask_function(function, span):
    assert seen_by(mask_function=function) == span


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (masking_utils.bidirectional_mask_function, "bidirectional_mask_function"),
        (masking_utils.sliding_window_overlay(5), "not causal"),
        (masking_utils.or_masks(masking_utils.causal_mask_function), "or_mask"),
        (lambda batch, head, q, kv: kv <= q, "lambda"),
    ],
)
def test_an_unknown_mask_is_not_taken_for_a_causal_one(function, why):
    with pytest.raises(Unsupported, match=why):
        seen_by(mask_function=function)


def test_a_layer_that_attends_in_two_ways_is_unsupported():
    layer, q = llama().model.layers[0].self_attn, torch.zeros(1, 4, 3, 8)
    with attending(layer), current(Packed([3], torch.tensor([0, 3], dtype=torch.int32))):
        attention(layer, q, q, q, Span(window=2))
        with pytest.raises(Unsupported, match="two ways"):
            attention(layer, q, q, q, Span(chunk=2))


@pytest.mark.parametrize("rule", [Rule(0.3, chunk=4), Rule(0.3, chunk=4, softcap=2.0), Rule(0.3, window=3, chunk=4)])
def test_chunks_begin_at_the_start_of_each_packed_sequence(rule):
    generator = torch.Generator().manual_seed(0)
    lengths = [9, 3, 14]
    q = torch.randn(1, 4, sum(lengths), 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(1, 2, sum(lengths), 8, generator=generator, dtype=torch.float64) for _ in range(2))
    ends = torch.tensor([0, 9, 12, 26], dtype=torch.int32)
    found = Packed(lengths, ends).attend(q, k, v, 0, rule)

    scores = (q @ k.repeat_interleave(2, 1).mT) * rule.scaling
    scores = rule.softcap * (scores / rule.softcap).tanh() if rule.softcap else scores
    position = torch.cat([torch.arange(length) for length in lengths])
    whose = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    i, j = position[:, None], position[None]
    sees = (whose[:, None] == whose) & (j <= i) & (i // 4 == j // 4) & (j > i - (rule.window or 99))
    wanted = scores.masked_fill(~sees, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(found, wanted.transpose(1, 2))
    torch.testing.assert_close(
        attention_of_rows(q[:, :, :9], k[:, :, :9], v[:, :, :9], rule), wanted.transpose(1, 2)[:, :9]
    )


def test_long_windows_are_short_during_a_trial_and_afterwards_as_before():
    model = phi3(sliding_window=4000)
    model.model.layers[0].self_attn.sliding_window = 4000
    with shortened(model) as is_shorter:
        assert is_shorter
        assert model.config.sliding_window == model.model.layers[0].self_attn.sliding_window == 4
    assert model.config.sliding_window == model.model.layers[0].self_attn.sliding_window == 4000
    with shortened(phi3(sliding_window=200)) as is_shorter:
        assert not is_shorter


def llama4(**changes):
    """Layers without rotation scale their queries by the position in the call, in steps of floor_scale tokens."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    torch.manual_seed(0)
    fields = SIZES | {"head_dim": 8, "intermediate_size_mlp": 32, "num_local_experts": 2, "no_rope_layers": [1, 0],
                      "attention_chunk_size": 8192} | changes  # fmt: skip
    return Llama4ForCausalLM(Llama4TextConfig(**fields)).double().eval()


def test_what_happens_only_beyond_8192_tokens_is_seen_in_a_trial():
    far = as_policy(llama4(floor_scale=8192, attn_scale=5.0))
    assert not far.packs, "packed rows have other positions"
    near = as_policy(llama4(attn_temperature_tuning=False))
    assert near.packs
    steep = as_policy(llama4(floor_scale=2, attn_scale=5.0))
    found = generate(steep, [[2, 3, 4], [5]], Sampling(max_new_tokens=3))
    assert "its own layers" in found.engine, "its cache says where each token is"
    torch.testing.assert_close(torch.cat(found.logps), steep.logps(TokenBatch.of(list(found))))


# ---- lengths ----


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (phi3, ((12,), None)),
        (functools.partial(llama, rope_parameters=DYNAMIC, max_position_embeddings=16), ((), 16)),
        (llama, None),
    ],
    ids=["longrope", "dynamic", "default"],
)
def test_the_length_is_found_at_which_a_rotation_depends_on_the_longest_row(model, wanted):
    model = model()
    with rotations(model) as calls:
        model(input_ids=torch.tensor([[1, 2, 3]]))
    found = boundaries_of(calls, model.config)
    assert (found and (found.lengths, found.apart)) == wanted


@pytest.mark.parametrize(
    "model", [phi3, functools.partial(llama, rope_parameters=DYNAMIC, max_position_embeddings=16)],
    ids=["longrope", "dynamic"],
)  # fmt: skip
@pytest.mark.parametrize("packs", [True, False], ids=["packed", "padded"])
def test_rows_of_both_sides_have_the_losses_and_gradients_of_each_alone(model, packs, monkeypatch):
    model, rows = model(), rows_of(12, 30, 5, 17, 13, 30, 16)
    wanted = [alone(model, row)[:-1].gather(1, row[1:, None])[:, 0] for row in rows]
    policy = as_policy(copy.deepcopy(model))
    if not packs:
        monkeypatch.setattr(trial.Trial, "packing", lambda *_: "of a test")
    logps_n = policy.logps(TokenBatch.of([Trajectory.of(row[:1], row[1:]) for row in rows]))
    assert policy.packs == packs
    torch.testing.assert_close(logps_n, torch.cat(wanted), rtol=0, atol=1e-9)
    logps_n.sum().backward()
    fresh = copy.deepcopy(model)
    for row in rows:
        one = copy.deepcopy(model)
        alone_logps = one(input_ids=row[None]).logits[0].log_softmax(-1)[:-1].gather(1, row[1:, None])
        alone_logps.sum().backward()
        for param, gradient in zip(fresh.parameters(), one.parameters(), strict=True):
            param.grad = gradient.grad if param.grad is None else param.grad + gradient.grad
    for param, found in zip(fresh.parameters(), policy.model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, param.grad, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("length", [1, 5, 11, 12, 13, 14, 20])
def test_a_rollout_that_crosses_the_boundary_has_the_log_probs_of_whole_forwards(length):
    model, (prompt, other) = phi3(), rows_of(length, 3)
    found = generate(
        as_policy(copy.deepcopy(model)), [prompt, other], Sampling(max_new_tokens=14), num_samples=2, seed=3
    )
    assert "own layers" in found.engine
    with torch.no_grad():
        for one in found:
            start = one.num_prompt
            wanted = [alone(model, one.ids_T[:end])[-1, one.ids_T[end]] for end in range(start, len(one))]
            torch.testing.assert_close(one.rollout_logps_t, torch.stack(wanted), rtol=0, atol=1e-6)
    assert [len(one) - one.num_prompt for one in found] == [14] * 4


def test_rows_that_cross_a_boundary_draw_what_they_draw_alone():
    policy, prompts = as_policy(phi3()), rows_of(5, 11, 20)
    sampling = Sampling(max_new_tokens=10, stop_ids=(7, 8, 9))
    together = generate(policy, prompts, sampling, num_samples=3, seed=5)
    for index, prompt in enumerate(prompts):
        by_itself = generate(policy, [prompt], sampling, num_samples=3, seed=5, addresses=[index])
        for one, other in zip(by_itself, together[3 * index :], strict=False):
            assert one.completion_ids.tolist() == other.completion_ids.tolist()
            assert one.finish == other.finish
