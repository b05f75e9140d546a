"""GRPO: TRL's values on a fixed rollout, invariances, the first update on-policy, every option, learning, bad input."""

import math
import warnings

import pytest
import torch
from steps import advantages, cut, fill, lines_of, loss_on, step_lines
from tiny_models import VOCAB, Letters, every_kind, llama, moe

from strop.algorithms.grpo import GRPO, GRPOConfig
from strop.losses import group_advantages
from strop.rewards import RewardError

PROMPTS = [[1, 2, 3], [4], [7, 8, 9, 10, 11], [12, 13]]


def count_fives(completions):
    return [float((ids == 5).sum()) for ids in completions]


def count_low(completions):
    """Gives every group a signal."""
    return [float((ids < 15).sum()) for ids in completions]


def sgd(groups):
    """The schedule gives its learning rate."""
    return torch.optim.SGD(groups)


def make_grpo(model, **options):
    defaults = {"reward_fn": count_low, "group_size": 4, "max_new_tokens": 6, "max_grad_norm": 0.0}
    if options.get("optimizer") is sgd:
        defaults["learning_rate"] = 0.5
    options = defaults | options
    return GRPO(model=model, **options)


def weights(model):
    return torch.cat([param.detach().flatten() for param in model.parameters()])


# ---- TRL's values ----


class Table(torch.nn.Module):
    """Gives token 0 the log-prob logps[row, t] at completion token t, whatever it reads but the row's first id."""

    def __init__(self, logps_BT, num_prompt):
        super().__init__()
        self.logps_BT, self.num_prompt = torch.nn.Parameter(logps_BT), num_prompt

    def forward(self, ids):
        logps = self.logps_BT[ids[:, 0]][:, : ids.shape[1] - self.num_prompt]
        before = logps.new_full((len(ids), self.num_prompt - 1), -1.0)
        logps = torch.cat([before, logps, logps.new_full((len(ids), 1), -1.0)], 1)
        others = torch.log1p(-logps.exp()) - math.log(VOCAB - 1)
        return torch.cat([logps[..., None], others[..., None].expand(-1, -1, VOCAB - 1)], -1)


def oracle_trainer(case, num_prompt=3):
    """A trainer, and the case as its experience. The ratio to 1 of the table's log-probs is that of the case."""
    logps, old, ref = (torch.tensor(case[k], dtype=torch.float64) for k in ("logp", "old_logp", "ref_logp"))
    lengths = [int(sum(row)) for row in case["mask"]]
    assert all(row == [1] * n + [0] * (len(row) - n) for row, n in zip(case["mask"], lengths, strict=True))
    grpo = make_grpo(
        Table(logps, num_prompt), kl_coef=case["beta"], loss_type=case["loss_type"], importance_level=case["level"],
        clip_eps=(case["eps_low"], case["eps_high"]), max_new_tokens=case["max_completion_length"],
    )  # fmt: skip
    lines = lines_of(lengths, old, num_prompt)
    values = torch.tensor(case["advantages"], dtype=torch.float64)
    fill(lines, old_logps_t=cut(old, lengths), advantages_t=[v.expand(n) for v, n in zip(values, lengths, strict=True)])
    if case["beta"]:
        fill(lines, ref_logps_t=cut(ref, lengths))
    return grpo, lines


def test_loss_of_a_fixed_rollout_is_trls(golden):
    assert len(golden["grpo"]) == 60
    for case in golden["grpo"]:
        grpo, lines = oracle_trainer(case)
        parts = sum(loss_on(grpo, [line], lines).loss.item() for line in reversed(lines))
        result = loss_on(grpo, lines)
        assert (result.loss.item(), parts) == pytest.approx((case["loss"], case["loss"]), abs=1e-9)
        if case["kl"] is not None:
            assert result.metrics["kl"].item() == pytest.approx(case["kl"], abs=1e-9)
        result.loss.backward()
        mask = torch.tensor(case["mask"]).bool()
        wanted = torch.tensor(case["grad"], dtype=torch.float64)
        torch.testing.assert_close(grpo.model.logps_BT.grad[mask], wanted[mask], rtol=0, atol=1e-9)
        assert grpo.model.logps_BT.grad[~mask].abs().sum() == 0


def test_prompt_tokens_never_count(golden):
    """The table reads nothing but the first id: other prompts, of other lengths, give the same loss."""
    case = golden["grpo"][1]
    losses = []
    for num_prompt, other in ((3, 1), (3, 29), (7, 2), (1, 0)):
        grpo, lines = oracle_trainer(case, num_prompt)
        for line in lines:
            line.prompt_ids[1:] = other
        losses.append(loss_on(grpo, lines).loss.item())
    assert losses == pytest.approx([case["loss"]] * 4, abs=1e-12)


# ---- invariances ----


@every_kind
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_micro_batches_change_nothing(make, loss_type):
    """16 completions of unequal lengths at once, one by one, in parts of 5 and of 20 tokens: the same gradient."""
    found, losses = [], []
    for size, tokens in ((0, 0), (1, 0), (5, 16384), (0, 20)):
        model = make(eos_token_id=[3, 6], scale=3.0)
        grpo = make_grpo(
            model, optimizer=sgd, micro_batch_size=size, micro_batch_tokens=tokens, loss_type=loss_type, kl_coef=0.3,
            entropy_coef=0.05, seed=2,
        )  # fmt: skip
        with torch.no_grad():  # away from the reference, so that the KL has a gradient
            for param in model.parameters():
                param.mul_(1.1)
        metrics = grpo.train_step(PROMPTS)
        assert metrics["reward/std"] > 0
        assert metrics["kl"] > 1e-4
        found.append(weights(model))
        losses.append(metrics["loss"])
    start = weights(make(eos_token_id=[3, 6], scale=3.0)) * 1.1
    moved = (found[0] - start).abs().max()
    assert moved > 1e-3
    for other in found[1:]:
        assert (found[0] - other).abs().max() < 1e-4 * moved
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)


@every_kind
def test_a_ragged_batch_has_the_loss_of_its_rows(make):
    grpo = make_grpo(make(eos_token_id=[3, 6], scale=3.0), kl_coef=0.3)
    lines = step_lines(grpo, [{"prompt": prompt} for prompt in PROMPTS])
    assert len({line.num_loss_tokens for line in lines}) > 2
    whole = loss_on(grpo, lines).loss.item()
    alone = sum(loss_on(grpo, [line], lines).loss.item() for line in lines)
    assert whole == pytest.approx(alone, abs=1e-6)
    assert loss_on(grpo, [lines[3], lines[9]], lines).loss.item() != pytest.approx(whole, abs=1e-4)


@every_kind
def test_padding_and_what_stands_behind_the_eos_never_count(make):
    """The pad id is any other token: it stands behind every EOS of the batch, and left of the prompts."""
    found = []
    for pad in (0, 17):
        model = make(eos_token_id=[3, 6])
        grpo = make_grpo(model, optimizer=sgd, kl_coef=0.1, pad_id=pad)
        type(grpo.policy).pad_id, before = property(lambda self, pad=pad: pad), type(grpo.policy).pad_id
        try:
            longest = max(map(len, PROMPTS))
            metrics = grpo.train_step(torch.tensor([[pad] * (longest - len(p)) + p for p in PROMPTS]))
        finally:
            type(grpo.policy).pad_id = before
        found.append((metrics["loss"], weights(model)))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-7)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=1e-6)


# ---- the first update ----


@pytest.mark.parametrize("tokens", [16384, 100])
def test_on_policy_ratio_is_exactly_one_on_the_native_engine(tokens):
    grpo = make_grpo(
        moe(eos_token_id=3), learning_rate=1e-2, group_size=16, max_new_tokens=12, micro_batch_tokens=tokens
    )
    for _ in range(5):
        metrics = grpo.train_step(PROMPTS)
        assert metrics["ratio/max"] == 1.0
        assert metrics["ratio/mean"] == 1.0
        assert metrics["mismatch_kl"] == 0.0
        assert metrics["mismatch_ratio_max"] == 1.0


@every_kind
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_ratio_is_1_and_the_kl_0_at_step_0(make, temperature):
    """The KL to the last bit on the native engine; elsewhere k3 of the rounding of log-probs, whose square it is."""
    grpo = make_grpo(make(scale=2.0), kl_coef=0.1, learning_rate=1e-2, temperature=temperature)
    metrics = grpo.train_step(PROMPTS)
    assert metrics["mismatch_ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["mismatch_kl"] < 1e-10
    assert metrics["kl"] == metrics["mean_kl"] == pytest.approx(0.0, abs=0.0 if make is moe else 1e-11)
    assert grpo.train_step(PROMPTS)["kl"] > 1e-7


def test_a_cut_distribution_has_its_old_log_probs_recomputed():
    """top-k moves the log-probs of sampling away from the policy's; the ratio stays 1, the mismatch is told."""
    metrics = make_grpo(moe(scale=2.0), top_k=5).train_step(PROMPTS)
    assert metrics["ratio/max"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["mismatch_kl"] > 0.1
    metrics = make_grpo(moe(scale=2.0), top_k=5, old_logps="rollout").train_step(PROMPTS)
    assert metrics["ratio/mean"] < 0.9
    assert metrics["mismatch_kl"] > 0.1


# ---- options ----


def test_inner_updates_over_shuffled_minibatches():
    grpo = make_grpo(moe(), inner_epochs=3, minibatch_size=5, learning_rate=1e-2, kl_coef=0.0)
    batches = list(grpo.minibatches(16))
    assert [len(b) for b in batches] == [5, 5, 5, 1] * 3
    passes = [[i for batch in batches[4 * n : 4 * n + 4] for i in batch] for n in range(3)]
    assert all(sorted(p) == list(range(16)) for p in passes)
    assert len({tuple(p) for p in passes}) == 3
    metrics = grpo.train_step(PROMPTS)
    assert grpo.state.updates == 12
    assert metrics["mismatch_ratio_max"] == 1.0  # of the first update
    assert metrics["ratio/max"] > 1.001  # of all of them
    assert list(grpo.minibatches(16)) != batches  # the next step has an order of its own


@every_kind
def test_every_step_and_every_seed_draws_anew(make):
    drawn = []
    for seed in (0, 0, 1):
        grpo = make_grpo(make(), learning_rate=0.0, seed=seed)
        steps = []
        for _ in range(2):
            grpo.train_step(PROMPTS)
            steps.append([sample["completion"] for sample in grpo.samples])
        assert steps[0] != steps[1]
        drawn.append(steps)
    assert drawn[0] == drawn[1] != drawn[2]


def test_clipping_is_counted_and_acts():
    metrics = make_grpo(moe(), inner_epochs=8, learning_rate=5e-2, clip_eps=0.1).train_step(PROMPTS)
    assert metrics["clip_fraction"] > 0.05


def test_truncated_completions_can_be_masked():
    """Without EOS every completion is truncated: nothing is learned. With it only those that ended count."""
    model = moe()
    before = weights(model)
    metrics = make_grpo(model, mask_truncated=True, learning_rate=1e-2).train_step(PROMPTS)
    assert metrics["completion/truncated_fraction"] == 1.0
    assert metrics["loss"] == 0.0
    assert torch.equal(before, weights(model))

    grpo = make_grpo(moe(eos_token_id=[3, 6]), mask_truncated=True)
    lines = fill(lines_of([2] * 4, torch.zeros(4, 2)), finish=["eos", "length"] * 2)
    batch = advantages(grpo, lines, [5.0, 2.0, 4.0, 0.0])
    assert grpo.loss_tokens(batch) == [2, 0, 2, 0]
    seen = []
    grpo.loss_on = lambda part, loss_on=grpo.loss_on: seen.append(part) or loss_on(part)
    grpo.learn(lines, batch)
    assert [[id(line) for line in part] for part in seen] == [[id(lines[0]), id(lines[2])]]
    assert [line.weight for line in seen[0]] == [1 / 4 / 2] * 2  # of all four sequences, two tokens each


def test_groups_without_signal_are_counted_and_sampled_again():
    calls = []

    def second_time_lucky(completions):
        """The first round all equal; then only the first prompt's group differs."""
        calls.append(len(completions))
        return [float(len(calls) > 1 and i < 4 and i % 2) for i in range(len(completions))]

    grpo = make_grpo(moe(), reward_fn=second_time_lucky)
    assert grpo.train_step(PROMPTS)["reward/zero_std_fraction"] == 1.0
    calls.clear()
    grpo = make_grpo(moe(), reward_fn=second_time_lucky, resample_rounds=2)
    metrics = grpo.train_step(PROMPTS)
    assert calls == [16, 16, 12]
    # the second round gave prompt 0 a signal, the third the first of the remaining three, which is prompt 1
    assert metrics["reward/zero_std_fraction"] == 0.5
    assert metrics["reward/resampled_fraction"] == 1.0
    assert [s["reward"] for s in grpo.samples] == [0, 1, 0, 1, 0, 1, 0, 1] + [0] * 8
    assert [s["prompt"] for s in grpo.samples[::4]] == PROMPTS


@pytest.mark.parametrize(
    ("scale", "ddof", "eps"), [("group", 1, 1e-4), ("batch", 1, 1e-4), ("none", 0, 0.0), ("group", 0, 0.0)]
)
def test_advantages(scale, ddof, eps):
    grpo = make_grpo(moe(), advantage_scale=scale, advantage_ddof=ddof, advantage_eps=eps, group_size=2)
    lines = lines_of([1] * 4, torch.zeros(4, 1), finish="length")
    rewards = torch.tensor([1.0, 3.0, 0.0, 0.0])
    advantages(grpo, lines, rewards)
    found = torch.cat([line.advantages_t for line in lines])
    wanted = group_advantages(rewards, samples_per_prompt=2, ddof=ddof, eps=eps, scale=scale)
    torch.testing.assert_close(found, wanted)
    if scale == "group" and ddof == 1:
        assert found.tolist() == pytest.approx([-1 / (2**0.5 + 1e-4), 1 / (2**0.5 + 1e-4), 0, 0])


def test_entropy_bonus_raises_the_entropy():
    def no_reward(completions):
        return [0.0] * len(completions)

    found = []
    for coefficient in (0.0, 1.0):
        grpo = make_grpo(moe(scale=4.0), reward_fn=no_reward, entropy_coef=coefficient, kl_coef=0.0, learning_rate=1e-2)
        metrics = [grpo.train_step(PROMPTS)["entropy"] for _ in range(10)]
        found.append(metrics[-1] - metrics[0])
    assert found[0] == pytest.approx(0.0, abs=0.2)
    assert found[1] > 0.4


class ThreeTokens(torch.nn.Module):
    """Draws tokens 0, 1, 2 with probabilities 1/2, 1/4, 1/4 whatever it has read."""

    def __init__(self):
        super().__init__()
        self.logits_V = torch.nn.Parameter(torch.tensor([0.5, 0.25, 0.25]).log())

    def forward(self, ids):
        return self.logits_V.expand(*ids.shape, 3)


def test_entropy_and_its_estimate_by_hand():
    drawn = []

    def keep(completions):
        drawn.extend(int(token) for ids in completions for token in ids)
        return [0.0] * len(completions)

    metrics = make_grpo(ThreeTokens(), reward_fn=keep, kl_coef=0.0).train_step([[0, 1]])
    bits = [1 if token == 0 else 2 for token in drawn]
    assert metrics["entropy"] == pytest.approx(1.5 * math.log(2), rel=1e-6)
    assert metrics["entropy_estimate"] == pytest.approx(math.log(2) * sum(bits) / len(bits), rel=1e-6)
    assert metrics["entropy_estimate"] != pytest.approx(metrics["entropy"], rel=1e-3)


@pytest.mark.parametrize(("make", "coefficient", "exact"), [(moe, 0.0, True), (llama, 0.0, False), (llama, 0.1, True)])
def test_entropy_is_there_only_where_it_is_exact(make, coefficient, exact):
    metrics = make_grpo(make(), entropy_coef=coefficient).train_step(PROMPTS)
    assert ("entropy" in metrics) is exact
    assert 0 < metrics["entropy_estimate"] < 2 * math.log(VOCAB)


def test_without_a_coefficient_there_is_no_reference():
    grpo = make_grpo(moe(), kl_coef=0.0)
    assert grpo.reference is None
    assert grpo.train_step(PROMPTS)["mean_kl"] == 0.0
    with pytest.warns(UserWarning, match="ref_model has no effect: kl_coef is 0"):
        make_grpo(moe(), ref_model="a name that is not even looked up", kl_coef=0.0)
    given = moe(seed=5)
    assert make_grpo(moe(), ref_model=given, kl_coef=0.1).reference.model is given


@pytest.mark.parametrize("options", [{}, {"importance_level": "sequence"}, {"entropy_coef": 0.1}, {"loss_type": "cispo"},
                                     {"loss_type": "dr_grpo", "delta": 3.0}, {"importance_cap": 1.2, "top_k": 9},
                                     {"kl_estimator": "k2", "temperature": 0.8}])  # fmt: skip
def test_from_hidden_states_and_from_logits_the_loss_is_the_same(options):
    found = []
    for fused in (True, False):
        model = llama(eos_token_id=3, scale=3.0)
        grpo = make_grpo(model, optimizer=sgd, kl_coef=0.2, inner_epochs=2, **options)
        if not fused:
            assert grpo.policy.packs  # tried by now
            grpo.policy.head, grpo.policy.no_hidden_because = None, "told so"  # as if the model had no head to use
        metrics = grpo.train_step(PROMPTS)
        assert (grpo.policy.head is not None) == fused
        names = ("loss", "kl", "clip_fraction", "ratio/max", "mismatch_kl")
        found.append(([metrics[name] for name in names], weights(model)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4, abs=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-6)


def test_several_rewards_with_weights():
    def length(completion_ids):
        return [len(c) for c in completion_ids]

    grpo = make_grpo(moe(eos_token_id=[3, 6]), reward_fn=[count_fives, length], reward_weights=(2.0, -0.5))
    metrics = grpo.train_step(PROMPTS)
    assert metrics["reward/mean"] == metrics["mean_reward"]
    assert metrics["reward/mean"] == pytest.approx(2 * metrics["reward/count_fives"] - 0.5 * metrics["reward/length"])
    assert metrics["reward/length"] == metrics["completion/length"]


def test_lora_trains_the_adapter_only_and_compares_with_the_base():
    pytest.importorskip("peft")
    model = llama(scale=3.0)
    before = {name: param.clone() for name, param in model.named_parameters()}
    grpo = make_grpo(model, lora={"r": 2}, learning_rate=1e-2, kl_coef=0.1)
    assert grpo.reference.kind == "adapter off"
    first = grpo.train_step(PROMPTS)
    assert first["kl"] == pytest.approx(0.0, abs=1e-11)
    assert grpo.train_step(PROMPTS)["kl"] > 1e-8
    after = {n.replace("base_model.model.", "").replace(".base_layer", ""): p for n, p in grpo.model.named_parameters()}
    assert all(torch.equal(param, after[name]) for name, param in before.items())


def test_bf16_autocast_and_gradient_checkpointing():
    model = llama(scale=3.0)
    grpo = make_grpo(model, autocast="bf16", gradient_checkpointing=True, learning_rate=1e-2)
    before = weights(model)
    metrics = grpo.train_step(PROMPTS)
    assert metrics["mismatch_kl"] < 1e-2
    assert metrics["ratio/max"] < 1.5
    assert (before - weights(model)).abs().max() > 1e-3
    assert model.dtype == torch.float32


# ---- prompts ----


def test_the_same_prompts_in_every_form():
    """Ids with padding at either side, with a mask, lists, texts, rows: the same step."""
    left = torch.tensor([[0, 0, 1, 2], [4, 5, 6, 7]])
    right = torch.tensor([[1, 2, 0, 0], [4, 5, 6, 7]])
    masked = torch.tensor([[9, 9, 1, 2], [4, 5, 6, 7]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    forms = [
        (left, {}),
        (left.numpy(), {}),
        (right, {}),
        (masked, {"prompt_mask": mask}),
        ({"input_ids": masked, "attention_mask": mask}, {}),
        ([[1, 2], [4, 5, 6, 7]], {}),
        ([torch.tensor([1, 2]), torch.tensor([4, 5, 6, 7])], {}),
        (["ab", "defg"], {}),
        ([{"prompt": "ab"}, {"prompt": "defg"}], {}),
        ({"prompt": ["ab", "defg"], "other": [1, 2]}, {}),
    ]
    seen = []

    def reward(completions, prompts, prompt_ids):
        seen.append((completions, prompts, [ids.tolist() for ids in prompt_ids]))
        return [len(c) for c in completions]

    found = []
    for prompts, options in forms:
        grpo = make_grpo(moe(eos_token_id=3), tokenizer=Letters(), reward_fn=reward)
        found.append(grpo.train_step(prompts, **options)["loss"])
    assert found == pytest.approx([found[0]] * len(forms), abs=1e-6)
    assert all(one == seen[0] for one in seen)
    completions, prompts, prompt_ids = seen[0]
    assert prompts == ["ab"] * 4 + ["defg"] * 4
    assert prompt_ids == [[1, 2]] * 4 + [[4, 5, 6, 7]] * 4
    assert all(isinstance(c, str) and chr(3 + 96) not in c for c in completions)


def test_conversations_and_columns():
    seen = {}

    def reward(completions, prompts, prompt_ids, answer):
        seen.update(prompts=prompts, prompt_ids=[ids.tolist() for ids in prompt_ids], answer=answer)
        return [0.0] * len(completions)

    talk = [[{"role": "user", "content": "ab"}], [{"role": "user", "content": "d"}]]
    grpo = make_grpo(moe(), tokenizer=Letters(), reward_fn=reward, group_size=2)
    grpo.train_step(talk, answer=[7, 8])
    assert seen["prompts"] == [talk[0], talk[0], talk[1], talk[1]]
    assert seen["prompt_ids"] == [[1, 2, 26]] * 2 + [[4, 26]] * 2
    assert seen["answer"] == [7, 7, 8, 8]
    grpo.train_step([{"prompt": talk[0], "answer": 1}, {"prompt": "d", "answer": 2}])
    assert seen["answer"] == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("prompts", "columns", "error", "message"),
    [
        ("ab", {}, TypeError, "prompts must be a batch, found a single text"),
        ([{"role": "user", "content": "a"}], {}, TypeError, "found a single conversation"),
        ({"question": ["a"]}, {}, ValueError, "prompts must have 'prompt' or 'input_ids', found question"),
        ([{"question": "a"}], {}, ValueError, r"prompts\[0\] must have a column 'prompt', found question"),
        ([{"prompt": None}], {}, TypeError, r"prompts\[0\]\['prompt'\] must be a text, .* token ids, found null"),
        (torch.tensor([[0, 0], [0, 1]]), {}, ValueError, r"prompts\[0\] must hold at least one token besides padding"),
        (["ab", "c"], {"answer": [1]}, ValueError, "answer must have one entry for each of the 2 prompts, found 1"),
        ([[1, 2]] * 2, {"answer": "xy"}, ValueError, "answer must have one entry"),
        ([[1, 2]], {"answer": 5}, ValueError, "found int"),
        ([[1, 2]], {"completions": ["x"]}, ValueError, "completions must not be a column"),
        ([[1, 2]], {"prompt_mask": [[1]]}, ValueError, r"the mask of prompts\[0\] must have shape \[2\], found \[1\]"),
        ([[1, 2]], {"prompt_mask": 3}, ValueError, "the mask of prompts must have 1 rows, found int"),
        (["ab"], {"prompt_mask": [[1, 1]]}, ValueError, "prompt_mask must be None for prompts that are not ids"),
        (None, {}, TypeError, "prompts must be token ids, .* found NoneType"),
        ([None], {}, TypeError, r"prompts\[0\] must hold token ids, found None"),
        ([["ab"]], {}, TypeError, r"prompts\[0\] must hold token ids, found \['ab'\]"),
        (["ab", ""], {}, ValueError, r"prompts\[1\] must hold at least one token"),
        ([[1] * 60], {}, ValueError, r"prompts\[0\] must have at most 58 tokens \(the model reads 64"),
    ],
)
def test_bad_prompts(prompts, columns, error, message):
    grpo = make_grpo(moe(), tokenizer=Letters())
    with pytest.raises(error, match=message):
        grpo.train_step(prompts, **columns)
    assert grpo.state.step == 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1] * 61, r"dataset\[3\] must have at most 60 tokens .*max_new_tokens=4.*found 61"),
        ([1, 30], r"dataset\[3\] must hold ids from 0 to 29, found 30"),
        ([], r"dataset\[3\] must hold at least one token"),
    ],
)
def test_a_dataset_is_checked_before_the_first_step(prompt, message):
    grpo = GRPO(model=moe(), reward_fn=lambda completions: 1 / 0, max_new_tokens=4, batch_size=1)
    rows = [{"prompt": [1, 2]}] * 3 + [{"prompt": prompt}]
    with pytest.raises(ValueError, match=message):
        grpo.train(rows, num_steps=1)
    with pytest.raises(ValueError, match=message.replace("dataset", "eval_dataset")):
        grpo.train(rows[:3], eval_dataset=rows, num_steps=1)


def test_a_column_that_some_rows_lack_is_none_there():
    """Also in a batch none of whose rows has it: what a function gets must not hang on the shuffling."""
    seen = []

    def reward(completions, answer=None):
        seen.extend(answer[::2])
        return [0.0 for _ in completions]

    grpo = GRPO(model=moe(), reward_fn=reward, max_new_tokens=2, batch_size=1, group_size=2, shuffle=False)
    grpo.train([{"prompt": [1], "answer": 5}, {"prompt": [2]}], num_epochs=1)
    assert seen == [5, None]


def test_a_bad_reward_stops_the_step_and_leaves_the_weights():
    def fails(completions):
        return [1.0 if i != 6 else float("nan") for i in range(len(completions))]

    model = moe()
    before = weights(model)
    with pytest.raises(
        RewardError, match=r"fails must return finite numbers, found nan \(completion 6, prompt \[4\]\)"
    ):
        make_grpo(model, reward_fn=fails).train_step(PROMPTS)
    assert torch.equal(before, weights(model))
    with pytest.raises(ValueError, match="GRPO needs a reward_fn"):
        GRPO(model=model)


# ---- configuration ----


def test_config_round_trips():
    config = GRPOConfig.from_options(
        {"clip_eps": [0.2, 0.28], "max_new_tokens": 7, "reward_weights": [1, 2], "seed": 3}
    )
    assert config.loss.clip == (0.2, 0.28)
    assert config.sampling.max_new_tokens == 7
    assert GRPOConfig.from_options(config.to_dict()) == config
    assert GRPOConfig.from_options({"loss_type": "cispo"}).loss.clip == (0.2, 5.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 1}, "group_size must be at least 2"),
        ({"groupsize": 4}, "'groupsize' is no option.*did you mean 'group_size'"),
        ({"kl_coef": -1.0}, "kl_coef must be finite and at least 0"),
        ({"loss_type": "dapoo"}, "loss_type must be one of.*did you mean 'dapo'"),
        ({"advantage_scale": "std"}, "advantage_scale must be one of"),
        ({"advantage_ddof": 8}, "advantage_ddof must be below group_size=8"),
        ({"temperature": 0.0}, "temperature must be above 0: greedy completions"),
        ({"old_logps": "vllm"}, "old_logps must be one of"),
        ({"reward_timeout": -1.0}, "reward_timeout must be finite and above 0"),
        ({"clip_eps": 0.2, "loss_type": "cispo"}, "clip_eps must be a pair"),
        ({"importance_cap": 0.5}, "importance_cap must be finite and at least 1"),
        (
            {"importance_cap": 2.0, "old_logps": "rollout"},
            'old_logps must be "auto" or "recompute" with importance_cap',
        ),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        GRPOConfig.from_options(options)


# ---- learning, evaluation, checkpoints ----


@every_kind
def test_learns(make):
    grpo = make_grpo(make(), reward_fn=count_fives, kl_coef=0.01, learning_rate=2e-2, group_size=8)
    before = grpo.train_step(PROMPTS)["mean_reward"]
    rewards = [grpo.train_step(PROMPTS)["mean_reward"] for _ in range(30)]
    assert before < 1
    assert sum(rewards[-5:]) / 5 > 3


def test_evaluation_is_greedy_and_changes_nothing():
    model = moe(eos_token_id=3)
    grpo = make_grpo(model, batch_size=1)
    before, rng = weights(model), torch.random.get_rng_state()
    first, again = (grpo.evaluate([{"prompt": p} for p in PROMPTS]) for _ in range(2))
    assert first == pytest.approx(again)
    assert set(first) >= {"eval/reward/mean", "eval/reward/std", "eval/reward/count_low", "eval/completion/length"}
    assert torch.equal(before, weights(model))
    assert torch.equal(rng, torch.random.get_rng_state())


@pytest.mark.parametrize("make", [moe, llama])
def test_a_saved_run_goes_on_bit_for_bit(make, tmp_path):
    options = {"learning_rate": 1e-2, "inner_epochs": 2, "minibatch_size": 6, "kl_coef": 0.1, "seed": 4,
               "micro_batch_tokens": 30}  # fmt: skip
    whole = make_grpo(make(), **options)
    wanted = [whole.train_step(PROMPTS)["loss"] for _ in range(4)]
    half = make_grpo(make(), **options)
    found = [half.train_step(PROMPTS)["loss"] for _ in range(2)]
    half.save(tmp_path / "grpo.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = GRPO.from_checkpoint(tmp_path / "grpo.pt", reward_fn=count_low)
    assert other.config == half.config
    found += [other.train_step(PROMPTS)["loss"] for _ in range(2)]
    assert found == wanted
    assert torch.equal(weights(whole.model), weights(other.model))


def test_train_on_a_dataset(tmp_path):
    def right(completions, answer):
        return [float(ids[0] == a) for ids, a in zip(completions, answer, strict=True)]

    rows = [{"prompt": [1, i], "answer": 5 + i % 2} for i in range(8)]
    grpo = make_grpo(
        moe(), reward_fn=right, learning_rate=2e-2, kl_coef=0.0, batch_size=4, group_size=8, max_new_tokens=2
    )
    history = grpo.train(rows, num_steps=40, output_dir=tmp_path, progress=False)
    rewards = history.values("reward/mean")
    assert len(rewards) == 40
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3
    assert (tmp_path / "samples.jsonl").read_text().count("completion") > 0


def test_a_missing_column_is_found_before_the_first_rollout(monkeypatch):
    grpo = make_grpo(moe(), reward_fn=lambda completions, answer: [0.0] * len(completions))
    monkeypatch.setattr(grpo, "sampler", None)  # nothing may be sampled
    with pytest.raises(ValueError, match="asks for 'answer', which is no column of the rows"):
        grpo.train([{"prompt": [2, 3], "label": 1}] * 8, num_steps=1)
