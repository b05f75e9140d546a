"""PPO: its advantages and losses by hand, invariances, resume with either kind of critic, learning, and bad input."""

import copy

import pytest
import torch
from steps import advantages, lines_of, loss_on
from test_grpo import Table
from tiny_qwen2 import tiny_qwen2
from trained_models import Bigram, shifted, tiny_moe, weights_of, whole_and_resumed

from strop.algorithms.ppo import PPO, PPOConfig
from strop.algorithms.reward_model import ModelReward
from strop.rewards import RewardFunctions

PROMPTS = [[2, 3], [4, 5, 6], [7], [8, 9]]


def low_ids(completion_ids):
    """The share of tokens below 12."""
    return [(ids < 12).double().mean().item() for ids in completion_ids]


def classifier(**changes):
    return tiny_qwen2("ForSequenceClassification", num_labels=1, **changes)


def make_ppo(model=None, **options):
    model = tiny_qwen2() if model is None else model
    return PPO(
        model=model, reward_fn=low_ids, **{"max_new_tokens": 6, "learning_rate": 1e-2, "batch_size": 4, **options}
    )


class Values:
    """A critic of given numbers: value[row, t] at completion token t of the row whose prompt begins with its number."""

    scorer = "a stand-in"

    def __init__(self, values_BT):
        self.module = torch.nn.ParameterList([torch.nn.Parameter(values_BT)])

    def values(self, batch, head):
        starts = batch.cu_seqlens[:-1].long()
        rows_n = batch.ids_N[starts][batch.sequence_n]
        counted_n = batch.places_n + 1 - starts[batch.sequence_n] - 2
        return self.module[0][rows_n, counted_n]


def fixed(lengths=(3, 1), **options):
    """A trainer whose policy, sampler and critic give known numbers, and the rollout."""
    logps = torch.tensor([[-1.0, -0.5, -2.0], [-1.5, -1.0, -1.0]], dtype=torch.float64)
    values = torch.tensor([[0.2, 0.4, 0.1], [0.3, 0.0, 0.0]], dtype=torch.float64)
    ppo = PPO(model=Table(logps, 2), reward_fn=low_ids, critic=classifier(), max_new_tokens=3, **options)
    ppo.critic = Values(values)
    with torch.no_grad():  # the reference gives every token e^½ of the policy's probability
        if ppo.reference is not None:
            ppo.reference.policy.model.logps_BT.sub_(0.5)
    return ppo, lines_of(lengths, logps), values


# ---- by hand ----


def test_advantages_and_returns_by_hand():
    """kl_coef = 0.2 takes 0.2·½ = 0.1 off every token; γ = 1, λ = ½."""
    ppo, lines, _ = fixed(kl_coef=0.2, lam=0.5, whiten=False)
    advantages(ppo, lines, [1.0, -1.0])
    last = (1 - 0.1) - 0.1
    middle = (-0.1 + 0.1 - 0.4) + 0.5 * last
    first = (-0.1 + 0.4 - 0.2) + 0.5 * middle
    other = (-1 - 0.1) - 0.3
    assert lines[0].advantages_t.tolist() == pytest.approx([first, middle, last], abs=1e-9)
    assert lines[1].advantages_t.tolist() == pytest.approx([other])
    assert lines[0].returns_t.tolist() == pytest.approx([first + 0.2, middle + 0.4, last + 0.1])


def test_whitened_advantages_have_mean_0_and_std_1():
    ppo, lines, _ = fixed(kl_coef=0.2)
    advantages(ppo, lines, [1.0, -1.0])
    all_N = torch.cat([line.advantages_t for line in lines])
    assert all_N.mean().item() == pytest.approx(0, abs=1e-12)
    assert all_N.std(correction=0).item() == pytest.approx(1)


def test_the_loss_by_hand():
    """On policy −mean of A, and ½·value_coef·mean of the larger error; a value beyond the clip has no gradient inside it."""
    ppo, lines, _ = fixed(kl_coef=0.0, lam=1.0, whiten=False, value_coef=0.5, value_clip=0.1)
    advantages(ppo, lines, [1.0, -1.0])
    assert torch.cat([line.returns_t for line in lines]).tolist() == pytest.approx([1, 1, 1, -1])
    with torch.no_grad():
        ppo.critic.module[0].add_(torch.tensor([[0.05, 0.3, 0.0], [-0.3, 0.0, 0.0]]))
    result = loss_on(ppo, lines)
    policy = -sum((1 - v) for v in (0.2, 0.4, 0.1)) - (-1 - 0.3)
    errors = [(1 - 0.25) ** 2, (1 - 0.5) ** 2, (1 - 0.1) ** 2, (-1 - 0.2) ** 2]  # the second and fourth are held
    assert result.policy_loss.item() == pytest.approx(policy / 4)
    assert result.loss.item() == pytest.approx(policy / 4 + 0.5 * sum(errors) / 4 / 2)
    result.loss.backward()
    gradient = ppo.critic.module[0].grad
    wanted = [0.5 * (0.25 - 1) / 4, 0.0, 0.5 * (0.1 - 1) / 4]
    assert gradient[0].tolist() == pytest.approx(wanted)
    assert gradient[1, 0].item() == 0.0
    assert ppo.model.logps_BT.grad[0].tolist() == pytest.approx([-(1 - v) / 4 for v in (0.2, 0.4, 0.1)])


def test_explained_variance_by_hand():
    """Returns 1, 1, 1, −1 have the variance ¾."""
    ppo, lines, _ = fixed(kl_coef=0.0, lam=1.0)
    advantages(ppo, lines, [1.0, -1.0])
    left = torch.tensor([0.8, 0.6, 0.9, -1.3], dtype=torch.float64).var(correction=0).item()
    metrics = ppo._value_metrics(lines)
    assert metrics["value/explained_variance"] == pytest.approx(1 - left / 0.75)
    assert metrics["value/mean"] == pytest.approx(0.25)


@pytest.mark.parametrize("critic", [None, classifier], ids=["head", "model"])
def test_the_gradient_is_that_of_plain_torch(critic):
    """A whole step in float64 against transformers' own forward, one completion at a time: the policy's and the critic's."""
    made = None if critic is None else critic().double()
    ppo = make_ppo(tiny_qwen2().double(), critic=made, kl_coef=0.1, gamma=0.9, lam=0.8, value_coef=0.3, inner_epochs=1,
                   temperature=0.7, max_grad_norm=0.0, ref_model=shifted(tiny_qwen2().double()), old_logps="recompute")  # fmt: skip
    ppo.rewards = RewardFunctions(lambda completion_ids: [len(ids) / 2 for ids in completion_ids])
    torch.nn.init.normal_(getattr(ppo.critic.module, "score", ppo.critic.module).weight)
    model, head, reference = (copy.deepcopy(m) for m in (ppo.model, ppo.critic.module, ppo.reference.model))
    rollout, found = ppo.sampler([torch.tensor(p) for p in PROMPTS], ppo.config.sampling, 1, ppo.seed_of(0, 0)), {}

    def keep(optimizer, *_):
        found.update({id(p): p.grad.clone() for group in optimizer.param_groups for p in group["params"]})

    for one in (ppo.optimizer, ppo.critic_optimizer):
        one.register_step_pre_hook(keep)
    ppo.train_step(PROMPTS)
    gradients = [[found[id(p)] for p in module.parameters()] for module in (ppo.model, ppo.critic.module)]

    def read(policy, i):
        prompt, completion = rollout.prompt_ids[i], rollout.completion_ids[i]
        ids, places = torch.cat([prompt, completion])[None], slice(len(prompt) - 1, -1)
        output = policy(ids, output_hidden_states=True)
        states = output.hidden_states[-1][0] if critic is None else head.model(ids).last_hidden_state[0]
        logps = (output.logits[0, places] / 0.7).log_softmax(-1).gather(1, completion[:, None])[:, 0]
        return logps, (head if critic is None else head.score)(states[places])[:, 0]

    rows, advantages, returns = range(len(PROMPTS)), [], []
    with torch.no_grad():
        for i in rows:
            (logps, values), (ref_logps, _) = read(model, i), read(reference, i)
            rewards, gae, behind = -0.1 * (logps - ref_logps), torch.zeros_like(values), (0.0, 0.0)
            rewards[-1] += len(logps) / 2
            for t in reversed(range(len(logps))):
                gae[t] = rewards[t] + 0.9 * behind[0] - values[t] + 0.72 * behind[1]
                behind = values[t], gae[t]
            advantages.append(gae)
            returns.append(gae + values)
    every = torch.cat(advantages)
    loss = 0.0
    for i in rows:
        logps, values = read(model, i)
        wanted = (advantages[i] - every.mean()) / (every.std(correction=0) + 1e-8)
        ratio = (logps - logps.detach()).exp()
        loss = loss + (-(ratio * wanted).sum() + 0.3 / 2 * (values - returns[i]).square().sum()) / len(every)
    loss.backward()
    for module, own in zip((model, head), gradients, strict=True):
        for wanted, gradient in zip(module.parameters(), own, strict=True):
            torch.testing.assert_close(gradient, wanted.grad, rtol=1e-9, atol=1e-10)


def test_a_new_head_expects_nothing():
    metrics = make_ppo(inner_epochs=1, kl_coef=0.0, lam=1.0).train_step(PROMPTS)
    assert metrics["value/mean"] == 0.0
    assert metrics["ratio/max"] == pytest.approx(1.0, abs=1e-4)


# ---- invariances ----

CRITICS = {"head": lambda: None, "model": classifier}


@pytest.mark.parametrize("critic", CRITICS)
def test_micro_batches_change_nothing(critic):
    after = []
    for size, tokens in ((0, 0), (1, 0), (3, 16384), (0, 20)):
        ppo = make_ppo(critic=CRITICS[critic](), micro_batch_size=size, micro_batch_tokens=tokens, minibatch_size=3)
        ppo.train_step(PROMPTS)
        metrics = ppo.train_step(PROMPTS)
        names = ("loss", "grad_norm", "value/loss", "value/mean", "value/explained_variance", "kl")
        after.append([metrics[name] for name in names])
    for other in after[1:]:
        torch.testing.assert_close(other, after[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("critic", CRITICS)
def test_ragged_completions_are_their_rows(critic):
    """The loss of a batch, with weights of the whole, is the sum of its completions' losses."""
    ppo = make_ppo(critic=CRITICS[critic](), whiten=False)
    ppo.train_step(PROMPTS)  # so that the head is not 0
    lines = ppo.draw(ppo.prepare([{"prompt": p} for p in PROMPTS]), range(4), 0)
    advantages(ppo, lines, [1.0, 0.0, 0.5, -1.0])
    whole = loss_on(ppo, lines).loss
    alone = [loss_on(ppo, [line], lines).loss for line in lines]
    torch.testing.assert_close(whole, sum(alone), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("critic", CRITICS)
def test_a_run_that_goes_on_is_the_whole_run(critic, tmp_path):
    rows = [{"prompt": p} for p in PROMPTS * 2]
    make = lambda: make_ppo(critic=CRITICS[critic](), critic_learning_rate=1e-2, minibatch_size=2)  # noqa: E731
    whole, resumed = whole_and_resumed(make, rows, tmp_path, reward_fn=low_ids, critic=CRITICS[critic]())
    of_critic = [torch.cat([p.flatten() for p in one.critic.module.parameters()]) for one in (resumed, whole)]
    assert torch.equal(*of_critic)
    assert not torch.equal(of_critic[0], torch.cat([p.flatten() for p in make().critic.module.parameters()]))


# ---- learning ----


@pytest.mark.parametrize(("make", "critic"), [(tiny_qwen2, None), (tiny_moe, classifier)], ids=["head", "model"])
def test_it_learns(make, critic):
    ppo = make_ppo(
        make(), critic=None if critic is None else critic(), learning_rate=1e-2, critic_learning_rate=1e-2, batch_size=16,
        value_coef=0.5, inner_epochs=2, kl_coef=0.01,
    )  # fmt: skip
    rows = [{"prompt": [i % 10 + 2, i % 7 + 3]} for i in range(64)]
    history = ppo.train(rows, num_steps=20)
    reward = history.values("reward/mean")
    assert sum(reward[-3:]) / 3 > sum(reward[:3]) / 3 + 0.25


@pytest.mark.parametrize("critic", CRITICS)
def test_the_critic_learns_what_to_expect(critic):
    """Of a policy that stays as it is: with λ = 1 the returns are the rewards, which half the prompt decides."""
    ppo = make_ppo(
        critic=CRITICS[critic](), learning_rate=0.0, critic_learning_rate=3e-2 if critic == "head" else 5e-3, kl_coef=0.0,
        lam=1.0, value_clip=None, inner_epochs=8, batch_size=16,
    )  # fmt: skip
    ppo.rewards = RewardFunctions(lambda prompt_ids: [float(ids[0] < 7) for ids in prompt_ids])
    rows = [{"prompt": [i % 10 + 2, i % 7 + 3]} for i in range(64)]
    explained = ppo.train(rows, num_steps=20).values("value/explained_variance")
    assert explained[0] < 0.1
    # a line through sixteen features that do not change can tell less
    assert sum(explained[-3:]) / 3 > (0.1 if critic == "head" else 0.5)


def test_the_critic_learns_at_its_own_rate():
    ppo = make_ppo(learning_rate=1e-2, critic_learning_rate=0.0, warmup_steps=4)
    before = ppo.critic.module.weight.clone()
    ppo.train_step(PROMPTS)
    assert torch.equal(ppo.critic.module.weight, before)
    ppo = make_ppo(learning_rate=1e-2, critic_learning_rate=4e-2, warmup_steps=4)
    ppo.train_step(PROMPTS)
    assert ppo.critic_optimizer.param_groups[0]["lr"] == pytest.approx(1e-2)  # a quarter of it, as of the policy's
    assert not torch.equal(ppo.critic.module.weight, before)


def test_what_is_not_finite_changes_nothing():
    ppo = make_ppo()
    ppo.rewards = RewardFunctions(lambda completions: [1e30] * len(completions))
    before = weights_of(ppo)
    with pytest.raises(FloatingPointError, match="must be finite"):
        ppo.train_step(PROMPTS)
    assert torch.equal(weights_of(ppo), before)
    assert (ppo.critic.module.weight == 0).all()


def test_a_critic_of_its_own_is_made_ready_as_the_policy_is():
    critic = classifier(attention_dropout=0.5).train()
    ppo = make_ppo(critic=critic, gradient_checkpointing=True)
    assert critic.is_gradient_checkpointing
    lines, found = ppo.sampler([[2, 3], [4]], ppo.config.sampling, 1, 0), []
    for _ in range(2):
        ppo.score(lines)
        found.append(torch.cat([line.values_t for line in lines]))
    assert torch.equal(*found)  # no dropout


def test_a_checkpoint_says_which_critic_it_needs(tmp_path):
    ppo = make_ppo(critic=classifier())
    ppo.train_step(PROMPTS)
    ppo.save(tmp_path / "ppo.safetensors")
    with pytest.raises(ValueError, match="critic must be of the kind that was saved"):
        PPO.from_checkpoint(tmp_path / "ppo.safetensors", reward_fn=low_ids)


# ---- bad input ----

REWARD = ModelReward(classifier())


def sharing():
    model, critic = tiny_qwen2(), classifier()
    critic.model = model.model
    return make_ppo(model, critic=critic)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PPOConfig(gamma=1.1), ValueError, "gamma must be at least 0 and at most 1, found 1.1"),
        (lambda: PPOConfig(lam=-0.1), ValueError, "lam must be at least 0 and at most 1, found -0.1"),
        (lambda: PPOConfig(value_clip=0.0), ValueError, "value_clip must be finite and above 0, found 0.0"),
        (lambda: PPOConfig(value_coef=-1.0), ValueError, "value_coef must be finite and at least 0"),
        (lambda: PPOConfig(inner_epochs=0), ValueError, "inner_epochs must be at least 1, found 0"),
        (lambda: PPO(model=tiny_moe(), reward_fn=low_ids), ValueError, "critic must be given: there is no head to put on"),
        (lambda: PPO(model=Bigram(), reward_fn=low_ids), ValueError, "critic must be given"),
        (lambda: PPO(model=tiny_qwen2(), reward_fn=low_ids, critic=tiny_qwen2()), TypeError, "critic must be a ForSequenceClassification"),
        (lambda: PPO(model=tiny_qwen2(), reward_fn=low_ids, critic=classifier(vocab_size=20)), ValueError, "critic must know the model's 32"),
        (lambda: PPO(model=tiny_qwen2(), reward_fn=REWARD, critic=REWARD.policy.model), ValueError, "critic must not be the model that gives"),
        (lambda: PPOConfig.from_options(temperature=0.0), ValueError, "temperature must be above 0"),
        (sharing, ValueError, "critic must not share parameters with model"),
        (lambda: PPO(model=tiny_qwen2()), ValueError, "PPO needs a reward_fn, found none"),
    ],
)  # fmt: skip
def test_mistakes(make, error, message):
    with pytest.raises(error) as raised:
        make()
    assert message in str(raised.value)


def test_the_rule_has_no_kl_of_its_own():
    """The reward takes it off every token."""
    assert PPOConfig().rule.beta == 0.0


def test_a_critic_that_looks_ahead_is_refused():
    critic = classifier()
    for module in critic.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    ppo = make_ppo(tiny_qwen2(), critic=critic)
    with pytest.raises(ValueError, match="model must be causal, found that the logits Qwen2ForSequenceClassification"):
        ppo.train_step([[2, 3], [4, 5]])
