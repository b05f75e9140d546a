"""Rollouts on every kind of model: greedy against generate, the distribution drawn from, log-probs, ends, bad input."""

import math

import numpy as np
import pytest
import torch
from tiny_models import batch_of, every_kind, llama, moe, plain, qwen2
from yardstick import clearly_greedy

from strop.data.batch import TokenBatch, Trajectory, sampled
from strop.models import as_policy
from strop.moe.sampling import sampling_logps as numpy_logps
from strop.rollout import Rollout, Sampling, draw, generate, sampling_logps
from strop.rollout.sampling import uniforms

PROMPTS = [[1, 2, 3], [7], [5, 6, 7, 8, 9, 10], [4, 4]]
RULES = [
    Sampling(),
    Sampling(temperature=0.6),
    Sampling(top_k=5),
    Sampling(top_p=0.7),
    Sampling(temperature=1.5, top_k=9, top_p=0.8),
]


# ---- greedy ----


@pytest.mark.parametrize("make", [llama, qwen2])
def test_greedy_equals_generate_row_by_row(make):
    """Ragged prompts in one batch against transformers' generate of each prompt alone, without any padding."""
    model = make(eos_token_id=3)
    found = generate(as_policy(model), PROMPTS, Sampling(max_new_tokens=12, temperature=0))
    for prompt, completion in zip(PROMPTS, found.completion_ids, strict=True):
        alone = clearly_greedy(model, torch.tensor([prompt]), max_new_tokens=12, pad_token_id=3)
        assert completion.tolist() == alone[0, len(prompt) :].tolist()


@every_kind
def test_greedy_is_the_argmax_of_a_fresh_forward(make):
    policy = as_policy(make())
    found = generate(policy, PROMPTS, Sampling(max_new_tokens=6, temperature=0))
    for line, completion in zip(found, found.completion_ids, strict=True):
        logits = policy.logits(TokenBatch.of([line]))
        chosen = logits.gather(-1, completion[:, None])[:, 0]
        torch.testing.assert_close(chosen, logits.amax(-1), rtol=1e-5, atol=1e-5)


# ---- sampling ----


@pytest.mark.parametrize("sampling", RULES)
def test_distribution_is_that_of_the_numpy_engine(sampling):
    logits = torch.randn(7, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    logits[0, 3] = logits[0, 4] = logits[0].max()  # a tie
    wanted = numpy_logps(logits.numpy(), temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
    np.testing.assert_allclose(sampling_logps(logits, sampling).numpy(), wanted, rtol=1e-12, atol=1e-12)


def test_draw_inverts_the_distribution():
    """p = (0.5, 0.25, 0.25): the token is the first whose cumulative probability exceeds the number."""
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25]])).expand(6, 3)
    tokens, logps = draw(logits, torch.tensor([0.0, 0.49, 0.51, 0.74, 0.76, 0.999999]), Sampling())
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2]
    assert logps.tolist() == pytest.approx([math.log(p) for p in (0.5, 0.5, 0.25, 0.25, 0.25, 0.25)])


@every_kind
@pytest.mark.parametrize("sampling", [Sampling(max_new_tokens=1), Sampling(max_new_tokens=1, temperature=0.7, top_k=6)])
def test_samples_follow_the_exact_distribution(make, sampling):
    """Chi-square of 2000 first tokens of a ragged batch against the distribution of a forward of the prompt alone."""
    policy, count = as_policy(make(scale=2.0)), 2000
    found = generate(policy, PROMPTS[:2], sampling, num_samples=count, seed=3)
    for index, prompt in enumerate(PROMPTS[:2]):
        logits = policy.logits(batch_of([(prompt, [0])])).double()
        wanted = sampling_logps(logits, sampling).exp()[0] * count
        tokens = torch.stack(found.completion_ids[index * count : (index + 1) * count])[:, 0]
        seen = torch.bincount(tokens, minlength=len(wanted)).double()
        assert seen[wanted == 0].sum() == 0
        rare = wanted < 5  # one cell for what is too rare to count alone
        wanted_cells = torch.cat([wanted[~rare], wanted[rare].sum()[None]])
        seen_cells = torch.cat([seen[~rare], seen[rare].sum()[None]])
        kept = wanted_cells > 0
        chi_square = ((seen_cells - wanted_cells)[kept].square() / wanted_cells[kept]).sum().item()
        freedom = int(kept.sum()) - 1
        assert freedom >= 4, "the test must be able to fail"
        assert chi_square < freedom + 4 * math.sqrt(2 * freedom)  # four standard deviations


@every_kind
@pytest.mark.parametrize("sampling", RULES)
def test_logps_equal_a_fresh_forward(make, sampling):
    policy = as_policy(make(eos_token_id=3, scale=6.0))
    sampling = Sampling(max_new_tokens=7, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
    found = generate(policy, PROMPTS, sampling, num_samples=3, seed=1)
    for line, completion, logps in zip(found, found.completion_ids, found.logps, strict=True):
        logits = policy.logits(TokenBatch.of([line]))
        wanted = sampling_logps(logits, sampling).gather(-1, completion[:, None])[:, 0]
        torch.testing.assert_close(logps, wanted, rtol=1e-5, atol=1e-5)


def test_native_logps_are_those_of_the_training_forward_bit_for_bit():
    policy = as_policy(moe(eos_token_id=3))
    found = generate(policy, PROMPTS, Sampling(max_new_tokens=9), num_samples=8, seed=1)
    assert torch.equal(policy.logps(TokenBatch.of(found)), torch.cat(found.logps))


# ---- order, seeds, modes ----


@every_kind
def test_samples_of_a_prompt_are_adjacent_and_seeds_repeat(make):
    policy = as_policy(make())
    before = torch.random.get_rng_state()
    first, again, other = (
        generate(policy, PROMPTS[:2], Sampling(max_new_tokens=8), num_samples=3, seed=seed) for seed in (5, 5, 6)
    )
    assert torch.equal(before, torch.random.get_rng_state())
    assert [p.tolist() for p in first.prompt_ids] == [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3
    as_lists = [[c.tolist() for c in r.completion_ids] for r in (first, again, other)]
    assert as_lists[0] == as_lists[1] != as_lists[2]
    assert len({tuple(c) for c in as_lists[0]}) > 1
    assert first.num_tokens == 48
    assert len(first) == 6


@every_kind
def test_what_a_prompt_draws_has_an_address(make):
    """Alone, in another order or beside other prompts: the same tokens, if it keeps its address."""
    policy = as_policy(make())
    how = {"sampling": Sampling(max_new_tokens=5), "num_samples": 3, "seed": 7}
    together = generate(policy, PROMPTS, **how).completion_ids
    turned = generate(policy, [PROMPTS[2], PROMPTS[0]], addresses=[2, 0], **how).completion_ids
    assert [ids.tolist() for ids in turned] == [ids.tolist() for ids in together[6:9] + together[:3]]
    moved = generate(policy, PROMPTS, addresses=[4, 5, 6, 7], **how).completion_ids
    assert [ids.tolist() for ids in moved] != [ids.tolist() for ids in together]
    with pytest.raises(ValueError, match="addresses must be one for each of the 4 prompts, found 1"):
        generate(policy, PROMPTS, addresses=[0], **how)


def test_uniforms_are_uniform_and_independent():
    """Chi-square in 64 cells, and correlations of neighbours in tokens, samples, prompts and seeds."""
    found = torch.stack([uniforms(seed, range(64), 16, 64).view(64, 16, 64) for seed in (0, 1, 2**62)])
    assert found.min() >= 0
    assert found.max() < 1
    counts = torch.histc(found.float(), 64, 0, 1)
    expected = found.numel() / 64
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert 30 < chi_square < 110  # 63 degrees of freedom: 1e-4 on either side
    for dim in range(4):
        size = found.shape[dim] - 1
        near, next_ = found.narrow(dim, 0, size).flatten(), found.narrow(dim, 1, size).flatten()
        correlation = torch.corrcoef(torch.stack([near, next_]))[0, 1].item()
        assert abs(correlation) < 5 / math.sqrt(near.numel())


@every_kind
def test_without_a_seed_torch_repeats_it(make):
    policy = as_policy(make())
    completions = []
    for _ in range(2):
        torch.manual_seed(11)
        completions.append([generate(policy, [[1, 2]], Sampling(max_new_tokens=8)).completion_ids[0] for _ in range(2)])
    assert torch.equal(completions[0][0], completions[1][0])
    assert torch.equal(completions[0][1], completions[1][1])
    assert not torch.equal(completions[0][0], completions[0][1])


@every_kind
def test_eval_mode_during_generation_and_the_mode_restored(make):
    model = make()
    model.train()
    kept = list(model.modules())[-1]
    kept.training = False
    seen = []
    if type(model).__name__ != "MoEForCausalLM":
        model.register_forward_pre_hook(lambda module, *_: seen.append(module.training))
    generate(as_policy(model), [[1, 2]], Sampling(max_new_tokens=2))
    assert True not in seen
    assert model.training
    assert not kept.training


def test_new_weights_are_used_at_once():
    model = moe()
    policy = as_policy(model)
    with torch.no_grad():
        model.get_parameter("lm_head.weight").zero_()
    found = generate(policy, [[1, 2]], Sampling(max_new_tokens=4))
    assert found.logps[0].tolist() == pytest.approx([-math.log(30)] * 4)


# ---- ends ----


class Scripted(torch.nn.Module):
    """Says the tokens of a script, whatever it reads: token t is script[t]."""

    def __init__(self, script, vocab_size=10):
        super().__init__()
        self.script, self.vocab_size = script, vocab_size

    def forward(self, x):
        logits = torch.full((*x.shape, self.vocab_size), -50.0)
        for t in range(x.shape[1]):
            logits[:, t, self.script[min(t + 1, len(self.script) - 1)]] = 50.0
        return logits


@pytest.mark.parametrize(
    ("script", "completion", "reason"),
    [([0, 4, 5, 2, 6], [4, 5, 2], "eos"), ([0, 2, 5], [2], "eos"), ([0, 4, 5, 6, 7, 8], [4, 5, 6, 7], "length")],
)
def test_completion_ends_with_the_first_eos(script, completion, reason):
    """EOS at once is an empty completion: nothing but the EOS."""
    found = generate(as_policy(Scripted(script)), [[1]], Sampling(max_new_tokens=4, stop_ids=(2, 9)))
    assert found.completion_ids[0].tolist() == completion
    assert found.finish_reasons == [reason]


@every_kind
def test_nothing_follows_an_eos(make):
    """EOS is a token in three: rows end at different moments, with pad = EOS."""
    model = make(eos_token_id=[3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    found = generate(as_policy(model), PROMPTS, Sampling(max_new_tokens=6), num_samples=8, seed=0)
    eos = set(range(3, 13))
    for completion, logps, reason in zip(found.completion_ids, found.logps, found.finish_reasons, strict=True):
        assert len(completion) == len(logps)
        assert not eos & set(completion[:-1].tolist())
        assert (int(completion[-1]) in eos) == (reason == "eos")
        assert reason == "eos" or len(completion) == 6
    assert {"eos", "length"} == set(found.finish_reasons)
    assert len({len(c) for c in found.completion_ids}) > 2


def test_the_models_generation_config_shapes_nothing():
    """A repetition penalty and a top-k of 1 in the model's own config, which stays as it is."""
    model = llama()
    plain_run = generate(as_policy(model), PROMPTS, Sampling(max_new_tokens=8), seed=0)
    model.generation_config.update(repetition_penalty=5.0, top_k=1, do_sample=True)
    penalised = generate(as_policy(model), PROMPTS, Sampling(max_new_tokens=8), seed=0)
    assert [c.tolist() for c in plain_run.completion_ids] == [c.tolist() for c in penalised.completion_ids]
    assert model.generation_config.repetition_penalty == 5.0


# ---- bad input ----


@every_kind
def test_prompt_longer_than_the_context_is_named(make):
    policy = as_policy(make(max_length=16))
    if policy.max_length is None:
        pytest.skip("a plain module does not say what it reads")
    with pytest.raises(ValueError, match=r"prompts\[1\] must have at most 6 tokens \(the model reads 16.*found 7"):
        generate(policy, [[1], list(range(7))], Sampling(max_new_tokens=10))
    generate(policy, [[1], list(range(6))], Sampling(max_new_tokens=10))


@pytest.mark.parametrize("make", [llama, moe])
def test_ids_outside_the_vocabulary_are_named(make):
    with pytest.raises(ValueError, match=r"prompts\[1\] must hold ids from 0 to 29, found 30"):
        generate(as_policy(make()), [[1], [2, 30]], Sampling(max_new_tokens=2))
    with pytest.raises(ValueError, match=r"prompts\[0\] must hold ids from 0 to 29, found -1"):
        generate(as_policy(make()), [[1, -1]], Sampling(max_new_tokens=2))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "at least one prompt"),
        ([[1], []], r"prompts\[1\] must hold at least one token"),
        ([[[1]]], r"prompts\[0\]"),
    ],
)
def test_bad_prompts(prompts, message):
    with pytest.raises(ValueError, match=message):
        generate(as_policy(plain()), prompts, Sampling())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, found 0"),
        ({"temperature": -1.0}, "temperature must be finite and at least 0"),
        ({"temperature": 1e-39}, "temperature must be 0, which is greedy, or at least 1.2e-38, found 1e-39"),
        ({"top_k": -1}, "top_k must be at least 0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p"),
    ],
)
def test_bad_sampling(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


def test_sampled_trajectories_are_those_made_one_by_one():
    """One concatenation for all of them: the same ids, masks and lengths."""
    prompts, completions = [[1, 2, 3], [4], [5, 6]], [[7], [8, 9, 10], [11, 12]]
    logps = [torch.rand(len(ids)) for ids in completions]
    found = sampled(list(map(torch.tensor, prompts)), list(map(torch.tensor, completions)), logps)
    for line, prompt, completion, logps_t in zip(found, prompts, completions, logps, strict=True):
        wanted = Trajectory.of(prompt, completion, rollout_logps_t=logps_t)
        assert torch.equal(line.ids_T, wanted.ids_T)
        assert torch.equal(line.loss_mask_T, wanted.loss_mask_T)
        assert line.num_prompt == wanted.num_prompt == len(prompt)
        assert line.completion_ids.tolist() == completion
        assert line.rollout_logps_t is logps_t
    assert sampled([], [], []) == []


def test_a_rollout_is_its_trajectories_and_their_columns():
    lines = sampled(
        [torch.tensor([i]) for i in range(3)], [torch.tensor([i, i]) for i in range(3)], [torch.zeros(2)] * 3
    )
    for line, finish in zip(lines, ["eos", "length", "eos"], strict=True):
        line.finish = finish
    rollout = Rollout(lines, seconds=1.0, engine="mine")
    assert list(rollout) == lines
    assert [p.item() for p in rollout.prompt_ids] == [0, 1, 2]
    assert [c.tolist() for c in rollout.completion_ids] == [[i, i] for i in range(3)]
    assert rollout.finish_reasons == ["eos", "length", "eos"]
    assert [len(logps) for logps in rollout.logps] == [2] * 3
    assert (rollout.num_tokens, rollout.seconds, rollout.engine) == (6, 1.0, "mine")
    assert rollout.metrics == {"completion/length": 2.0, "completion/truncated_fraction": 1 / 3}


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"num_samples": 1.5}, TypeError, "num_samples must be an int, found float"),
        ({"num_samples": True}, TypeError, "num_samples must be an int, found bool"),
        ({"num_samples": 0}, ValueError, "num_samples must be at least 1, found 0"),
        ({"seed": "x"}, TypeError, "seed must be an int, found str"),
        ({"seed": -1}, ValueError, "seed must be at least 0, found -1"),
        ({"seed": 2**80}, ValueError, "seed must be at least 0 and below 2\\*\\*63"),
    ],
)
def test_how_many_and_which_are_checked(options, error, says):
    with pytest.raises(error, match=says):
        generate(as_policy(plain()), [[1, 2]], Sampling(max_new_tokens=1), **options)
