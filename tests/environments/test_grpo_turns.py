"""GRPO over several turns: the loss against a mask made by hand, whose merit a reward is, metrics, tools, rows."""

import pytest
import torch
from chat_templates import tokenizer
from games import Echo, OfIds
from steps import loss_on, step_lines
from test_tools import Counter
from tiny_models import PlainModel, llama, moe
from trained_models import tiny_moe, weights_of

from strop import GRPO
from strop.data.batch import RewardedTurn, Trajectory
from strop.environments.base import Environment, Turn
from strop.environments.credit import returns_of, turn_advantages
from strop.moe import MoEConfig, MoETransformer
from strop.rollout import Rollout

ROWS = [{"prompt": [5, 6, 7]}, {"prompt": [8, 9]}]


class Two(Environment):
    """Two turns, of which the first is rewarded for what was said."""

    def reset(self, row):
        self.count = 0
        return row["prompt"]

    def step(self, reply):
        self.count += 1
        return Turn([4, 2], reward=float(reply[0] % 5), done=self.count == 2)


def grpo(model, environment=Two, **options):
    known = {"kl_coef": 0.0, "max_new_tokens": 4, "group_size": 4, "learning_rate": 1e-3, "max_grad_norm": 0}
    return GRPO(model=model, environment=environment, **(known | options))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
@pytest.mark.parametrize("credit", ["trajectory", "turn"])
def test_loss_and_gradient_are_those_of_a_mask_made_by_hand(loss_type, credit):
    """float64: Σ weight · (−advantage · ratio) over drawn tokens, which stand in two places of every row."""
    model = PlainModel(eos_token_id=[0, 1, 2]).double()
    trainer = grpo(model, loss_type=loss_type, credit=credit, seed=3)
    rollout = step_lines(trainer, ROWS)
    result = loss_on(trainer, rollout)
    result.loss.backward()
    found = [param.grad.clone() for param in model.parameters()]

    model.zero_grad()
    wanted, num_tokens = 0.0, sum(line.num_loss_tokens for line in rollout)
    advantages = by_hand(rollout, credit)
    assert len({len(line.turns) for line in rollout}) >= 1
    assert any(len(line.turns) == 2 for line in rollout)
    for line, (first, second) in zip(rollout, advantages, strict=True):
        ids, start = line.ids_T, line.num_prompt
        logps_TV = model(ids[None])[0].log_softmax(-1)
        one = range(start, start + line.turns[0].num_tokens)
        two = range(len(ids) - line.turns[1].num_tokens, len(ids)) if len(line.turns) == 2 else []
        for places, advantage in ((one, first), (two, second)):
            for t in places:
                logp = logps_TV[t - 1, ids[t]]
                weight = 1 / num_tokens if loss_type == "dapo" else 1 / 8 / (len(one) + len(two))
                wanted = wanted - weight * advantage * (logp - logp.detach()).exp()
    wanted.backward()
    assert result.loss.item() == pytest.approx(wanted.item(), abs=1e-9)
    for gradient, param in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, param.grad, rtol=1e-6, atol=1e-8)
    assert max(gradient.abs().max() for gradient in found) > 1e-3


def test_gspo_counts_drawn_tokens_alone():
    """float64, with weights that have moved: s = exp(mean of log-ratios over the drawn tokens of all turns)."""
    model = PlainModel(eos_token_id=[0, 1, 2]).double()
    trainer = grpo(model, importance_level="sequence", clip_eps=0.9, seed=3)
    rollout = step_lines(trainer, ROWS)
    assert any(len(line.turns) == 2 for line in rollout)
    with torch.no_grad():
        for i, param in enumerate(model.parameters()):
            param += 0.02 * torch.sin(torch.arange(param.numel(), dtype=param.dtype) + i).view_as(param)
    result = loss_on(trainer, rollout)
    wanted, apart = 0.0, 0.0
    for line, (advantage, _) in zip(rollout, by_hand(rollout, "trajectory"), strict=True):
        drawn = line.loss_mask_T.nonzero().flatten()
        logps_TV = model(line.ids_T[None])[0].log_softmax(-1)
        ratios = logps_TV[drawn - 1, line.ids_T[drawn]] - line.rollout_logps_t
        wanted = wanted - advantage * ratios.mean().exp() / 8
        apart = apart - advantage * (ratios.sum() / (len(line) - 1)).exp() / 8  # what counting all tokens would give
    assert result.loss.item() == pytest.approx(wanted.item(), abs=1e-9)
    assert abs(wanted.item() - apart.item()) > 1e-4


def by_hand(rollout, credit):
    """(first, second) advantages of each trajectory, in float32 as rewards are, then double."""

    def scaled(values):
        values = torch.tensor(values, dtype=torch.float64)
        return ((values - values.mean()) / (values.std() + 1e-4)).float().double().tolist()

    found = []
    for group in (range(4), range(4, 8)):
        if credit == "trajectory":
            found += [
                (value, value) for value in scaled([sum(turn.reward for turn in rollout[i].turns) for i in group])
            ]
            continue
        firsts = scaled([sum(turn.reward for turn in rollout[i].turns) for i in group])
        there = [i for i in group if len(rollout[i].turns) == 2]
        seconds = [0.0] if len(there) == 1 else scaled([rollout[i].turns[1].reward for i in there]) if there else []
        late = dict(zip(there, seconds, strict=True))
        found += [(first, late.get(i, 0.0)) for i, first in zip(group, firsts, strict=True)]
    return found


def test_on_the_moe_the_first_ratio_is_exactly_1_over_all_turns():
    trainer = grpo(tiny_moe(max_seq_len=64), OfIds)
    metrics = trainer.train_step(ROWS)
    assert metrics["turns/mean"] > 1
    assert (metrics["mismatch_kl"], metrics["mismatch_ratio_max"]) == (0.0, 1.0)
    assert (metrics["ratio/mean"], metrics["ratio/max"]) == (1.0, 1.0)


@pytest.mark.parametrize("make", [lambda: moe(eos_token_id=3), lambda: llama(eos_token_id=3)], ids=["moe", "llama"])
def test_micro_batches_change_nothing(make):
    whole, cut = (grpo(make(), OfIds, micro_batch_size=size) for size in (0, 3))
    assert whole.train_step(ROWS)["loss"] == pytest.approx(cut.train_step(ROWS)["loss"], abs=1e-5)
    torch.testing.assert_close(weights_of(whole), weights_of(cut), rtol=0, atol=1e-4)


def test_metrics_of_a_step():
    metrics = grpo(moe(eos_token_id=list(range(30))), OfIds).train_step(ROWS)
    assert metrics["turns/mean"] == metrics["completion/length"] == 3
    assert metrics["turns/given_tokens"] == 6
    assert metrics["reward/mean"] == metrics["reward/environment"] == 3
    for name in ("turns/truncated_fraction", "environment/failed_fraction", "completion/truncated_fraction"):
        assert metrics[name] == 0


def test_reward_functions_are_added_and_see_the_conversation():
    seen = {}

    def judge(completions, conversations, environments, level):
        seen.update(completions=completions, conversations=conversations, level=level)
        return [environment.count / 2 for environment in environments]

    class Cards(OfIds):
        held = ("ace",)  # a name of its own

    trainer = grpo(moe(eos_token_id=list(range(30))), Cards, reward_fn=judge)
    metrics = trainer.train_step([{"prompt": [5, 6], "level": 1}])
    assert metrics["reward/environment"] == 3
    assert metrics["reward/judge"] == 1.5
    assert metrics["reward/mean"] == 4.5
    assert seen["level"] == [1] * 4
    assert [message["role"] for message in seen["conversations"][0]] == ["user"] + ["assistant", "user"] * 2 + [
        "assistant"
    ]
    assert seen["completions"][0] == seen["conversations"][0][-1]["content"]
    assert trainer.samples[0]["completion"] == seen["conversations"][0][1:]


def test_truncated_trajectories_can_count_for_nothing():
    trainer = grpo(moe(eos_token_id=list(range(30))), OfIds, max_turns=2, mask_truncated=True)
    before = weights_of(trainer)
    metrics = trainer.train_step(ROWS)
    assert metrics["turns/truncated_fraction"] == 1
    assert weights_of(trainer).equal(before)


# ---- credit ----


def played(*rewards, totals=None):
    """Trajectories with these rewards of turns, the first of which has one token, the second two, …"""
    totals = [sum(turns) for turns in rewards] if totals is None else totals
    return [
        Trajectory.of([1], [2], turns=[RewardedTurn(t + 1, reward) for t, reward in enumerate(turns)], reward=total)
        for turns, total in zip(rewards, totals, strict=True)
    ]


def test_discounted_rewards():
    turns = played([1.0, 0.0, 4.0])[0].turns
    assert returns_of(turns, 1.0) == [5.0, 4.0, 4.0]
    assert returns_of(turns, 0.5) == [2.0, 2.0, 4.0]
    assert returns_of(turns, 0.0) == [1.0, 0.0, 4.0]


def test_each_turn_is_compared_with_the_same_turn_of_the_group():
    some = played([0.0, 2.0], [0.0, 4.0], [3.0], [1.0, 1.0])
    options = {"scale": "none", "ddof": 1, "eps": 0.0}
    found = [a.tolist() for a in turn_advantages(some, 2, 1.0, **options)]
    # first turns: 2 and 4, then 3 and 2; second turns: 2 and 4; the last has nobody beside it
    assert found == [[-1, -1, -1], [1, 1, 1], [0.5], [-0.5, 0, 0]]
    some = played([0.0, 2.0], [0.0, 4.0], [3.0], [1.0, 1.0], totals=[0.0, 0.0, 3.0, 1.0])
    discounted = [a.tolist() for a in turn_advantages(some, 2, 0.0, **options)]
    assert discounted == [[0, -1, -1], [0, 1, 1], [1], [-1, 0, 0]]


def test_rewards_of_functions_count_at_the_last_turn():
    some = played([0.0, 0.0], [0.0, 0.0], totals=[1.0, 3.0])
    found = turn_advantages(some, 2, 0.5, scale="none", ddof=1, eps=0.0)
    # reward_fn gave 1 and 3; half of it reaches the first turn
    assert [a.tolist() for a in found] == [[-0.5, -1, -1], [0.5, 1, 1]]


def test_turns_are_scaled_by_their_group():
    some = played([1.0], [3.0], [0.0], [8.0])
    found = turn_advantages(some, 2, 1.0, scale="group", ddof=1, eps=0.0)
    assert [a.item() for a in found] == pytest.approx([-(0.5**0.5), 0.5**0.5] * 2)


# ---- tools, rows, faults ----


def double(x: int) -> int:
    """Double a number.

    Args:
        x: it
    """
    return 2 * x


class Scripted:
    """A sampler that says what it is told, turn by turn."""

    def __init__(self, tokens, says):
        self.tokens, self.says, self.turns = tokens, says, 0

    def next_turn(self, prompts, sampling, seed, addresses, cached):
        ids = torch.tensor(self.tokens.encode(self.says[self.turns], add_special_tokens=False))
        self.turns += 1
        return Rollout(
            Trajectory.of(prompt, ids, rollout_logps_t=torch.zeros(len(ids)), finish="eos") for prompt in prompts
        )


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("qwen", '<tool_call>\n{"name": "double", "arguments": {"x": 21}}\n</tool_call><|im_end|>'),
        ("smollm2", '<tool_call>\n{"name": "double", "arguments": {"x": 21}}\n</tool_call><|im_end|>'),
        ("llama", '{"name": "double", "parameters": {"x": 21}}<|eot_id|>'),
        ("llama", '{"name": "double", "parameters": {"x": 21}}<|begin_of_text|>'),  # at which this model stops too
    ],
)
def test_a_tool_is_called_and_answers_in_the_templates_words(name, call):
    tokens = tokenizer(name)
    model = llama(vocab_size=len(tokens), max_length=1024, eos_token_id=[tokens.eos_token_id, tokens.bos_token_id])
    trainer = GRPO(
        model=model, tokenizer=tokens, tools=[double], reward_fn=lambda completions: [float("42" in c) for c in completions],
        max_new_tokens=80, group_size=2, kl_coef=0.0, max_turns=4,
    )  # fmt: skip
    trainer.player.sampler = Scripted(tokens, [call, f"It is 42.{tokens.eos_token}"])
    metrics = trainer.train_step([{"prompt": "Double 21."}])
    assert metrics["reward/mean"] == 1
    assert (metrics["environment/tool_calls"], metrics["environment/failed_calls"], metrics["turns/mean"]) == (1, 0, 2)
    roles = [message["role"] for message in trainer.samples[0]["completion"]]
    assert roles == ["assistant", "tool", "assistant"]
    assert trainer.samples[0]["completion"][1]["content"] == "42"


def test_one_function_is_a_tool_too():
    tokens = tokenizer("qwen")
    model = llama(vocab_size=len(tokens), max_length=1024)
    trainer = GRPO(model=model, tokenizer=tokens, tools=double, reward_fn=lambda completions: [0.0] * len(completions))
    assert [tool["function"]["name"] for tool in trainer.player.make.tools] == ["double"]


def test_a_class_as_trl_wants_it_is_an_environment():
    tokens = tokenizer("qwen")
    trainer = GRPO(
        model=llama(vocab_size=len(tokens), max_length=1024), tokenizer=tokens, environment=Counter,
        reward_fn=lambda environments: [float(one.count) for one in environments], max_new_tokens=80, group_size=2,
        kl_coef=0.0,
    )  # fmt: skip
    says = ['<tool_call>{"name": "increment", "arguments": {"by": 2}}</tool_call><|im_end|>', "Done.<|im_end|>"]
    trainer.player.sampler = Scripted(tokens, says)
    assert trainer.train_step([{"prompt": "Count.", "start": 3}])["reward/mean"] == 5


class Rewarded(Counter):
    """Its methods are tools, but for its own reward; the first message is its own too."""

    def reset(self, start: int = 0, **row) -> str:
        return super().reset(start).strip()

    def get_reward(self):
        return self.count / 2

    @property
    def never(self):
        raise AssertionError("a property is no tool and is not asked")


class Empty(Rewarded):
    def __len__(self):
        return 0


class RewardedLater(Rewarded):
    async def get_reward(self):
        return self.count / 2


@pytest.mark.parametrize(
    "environment", [Rewarded, lambda: Rewarded(), RewardedLater, Empty], ids=["class", "function", "async", "falsy"]
)
def test_its_own_reward_is_given_once_at_the_end(environment):
    tokens = tokenizer("qwen")
    trainer = GRPO(
        model=llama(vocab_size=len(tokens), max_length=1024), tokenizer=tokens, environment=environment,
        max_new_tokens=80, group_size=2, kl_coef=0.0,
    )  # fmt: skip
    says = ['<tool_call>{"name": "increment", "arguments": {"by": 2}}</tool_call><|im_end|>', "Done.<|im_end|>"]
    trainer.player.sampler = Scripted(tokens, says)
    metrics = trainer.train_step([{"start": 3}])
    assert metrics["reward/mean"] == 2.5
    assert metrics[f"reward/{trainer.player.name}"] == 2.5
    assert trainer.samples[0]["prompt"] == [{"role": "user", "content": "It is 3."}]


def test_tools_without_any_reward_are_refused():
    tokens = tokenizer("qwen")
    model = llama(vocab_size=len(tokens), max_length=1024)
    with pytest.raises(
        ValueError, match=r"reward_fn must be given: Counter has tools and no get_reward\(\), found None"
    ):
        GRPO(model=model, tokenizer=tokens, environment=Counter)
    with pytest.raises(TypeError, match="Empty must have methods that are tools, found"):
        GRPO(model=model, tokenizer=tokens, environment=type("Empty", (), {"reset": lambda self, **row: None}))


def test_rows_need_no_prompt_where_the_environment_has_none(tmp_path):
    class Secret(OfIds):
        def reset(self, row):
            self.count = 0
            return [row["secret"], 5]

    trainer = grpo(moe(eos_token_id=3), Secret, batch_size=2)
    rows = [{"secret": i} for i in range(4)]
    history = trainer.train(rows, eval_dataset=rows, num_steps=2, output_dir=tmp_path / "run")
    assert len(history.steps) == 2
    assert history.evaluations[-1]["eval/turns/mean"] >= 1


def test_columns_that_functions_ask_for_are_looked_for_before_the_first_rollout():
    """And rows that lack one are named, where it was None in silence."""
    from strop import OnlineDPO
    from strop.rewards import RewardError

    def judge(completions, environments, prompt, answer):
        raise AssertionError("not asked")

    def prefers(pairs, conversations, answer):
        raise AssertionError("not asked")

    rows = [{"prompt": [5], "answer": 1}, {"prompt": [6]}]
    for trainer in (
        grpo(moe(eos_token_id=3), OfIds, reward_fn=judge),
        OnlineDPO(model=moe(eos_token_id=3), environment=OfIds, preference_fn=prefers, max_new_tokens=4),
    ):
        with pytest.raises(RewardError, match=r"dataset\[1\] must have the column 'answer'"):
            trainer.prepare(rows)
        with pytest.raises(RewardError, match="asks for 'answer'"):
            trainer.prepare(rows[1:])
        assert len(trainer.prepare(rows[:1])) == 1


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="prompts must hold at least one row, found none"):
        grpo(moe(eos_token_id=3)).train_step([])


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path):
    def trained(steps, folder, resume=False):
        trainer = grpo(moe(eos_token_id=3), OfIds, batch_size=2, save_every=1)
        trainer.train(ROWS * 2, num_steps=steps, output_dir=folder, resume=resume)
        return weights_of(trainer)

    whole = trained(3, tmp_path / "whole")
    trained(2, tmp_path / "parts")
    assert trained(3, tmp_path / "parts", resume=True).equal(whole)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"environment": None}, "GRPO needs a reward_fn, an environment or an agent"),
        ({"tools": [double], "reward_fn": len}, "give environment or tools, found both"),
        ({"max_turns": 0}, "max_turns must be at least 1, found 0"),
        ({"turn_discount": 1.5}, "turn_discount must be"),
        ({"credit": "token"}, "credit must be one of 'trajectory', 'turn'"),
        ({"on_error": "skip"}, "on_error must be one of 'raise', 'end'"),
    ],
)
def test_wrong_options(options, match):
    with pytest.raises(ValueError, match=match):
        grpo(moe(eos_token_id=3), **({"environment": Echo} | options))


def test_the_engine_in_numpy_plays_too():
    config = MoEConfig(
        vocab_size=20, hidden_dim=16, num_layers=1, num_heads=2, head_dim=8, eos_token_id=1, max_seq_len=64
    )
    metrics = [grpo(MoETransformer(config, engine), OfIds).train_step(ROWS) for engine in ("native", "numpy")]
    assert metrics[0]["turns/mean"] == metrics[1]["turns/mean"]


# ---- other algorithms ----


def test_online_dpo_learns_from_pairs_of_conversations():
    """Its loss is that of DPO over the drawn tokens of both: log 2 before the first update, and the better one gains."""
    from strop import OnlineDPO

    model = moe(eos_token_id=list(range(0, 30, 2)))
    trainer = OnlineDPO(model=model, environment=OfIds, max_new_tokens=4, learning_rate=1e-2, batch_size=2)
    metrics = trainer.train_step(ROWS)
    assert metrics["loss"] == pytest.approx(torch.log(torch.tensor(2.0)).item(), abs=1e-6)
    assert metrics["turns/mean"] > 1
    assert metrics["reward/environment"] == metrics["reward/mean"]
    lines = step_lines(trainer, ROWS)
    drawn = [int(line.loss_mask_T.sum()) for line in lines]
    assert drawn == [sum(turn.num_tokens for turn in line.turns) for line in lines]
    assert [len(line) for line in lines] != [line.num_prompt + n for line, n in zip(lines, drawn, strict=True)]
    assert trainer.evaluate(ROWS)["eval/turns/mean"] >= 1


def test_online_dpo_with_a_preference_over_conversations():
    from strop import OnlineDPO

    def longer(pairs, level, conversations, environments, prompt):
        for (a, b), (first, second) in zip(pairs, conversations, strict=True):
            assert (first[-1]["content"], second[-1]["content"]) == (a, b)
        assert [(one.count > 0, other.count > 0) for one, other in environments] == [(True, True)] * 2
        assert prompt == [[5, 6, 7], [8, 9]]
        return [int(len(b) > len(a)) for a, b in pairs]

    trainer = OnlineDPO(model=moe(eos_token_id=3), environment=OfIds, preference_fn=longer, max_new_tokens=4)
    assert trainer.train_step(ROWS, level=[1, 2])["preference/tied_fraction"] == 0


def test_options_without_effect_are_told():
    from strop import OnlineDPO

    with pytest.warns(UserWarning, match="max_turns, credit have no effect without an environment, tools or an agent"):
        GRPO(model=moe(), reward_fn=len, max_turns=3, credit="turn")
    with pytest.warns(UserWarning, match="credit has no effect: a pair is of whole trajectories"):
        OnlineDPO(model=moe(), environment=OfIds, credit="turn")
    with pytest.warns(UserWarning, match="max_length has no effect with an environment: max_tokens"):
        OnlineDPO(model=moe(), environment=OfIds, max_length=9)


def test_best_of_n_keeps_the_best_conversation():
    from strop import BestOfN

    best = BestOfN(model=moe(eos_token_id=list(range(0, 30, 2))), environment=OfIds, n=6, seed=0, max_new_tokens=4)
    said = best.generate(ROWS)
    assert best.all_rewards.shape == (2, 6)
    assert best.rewards.tolist() == best.all_rewards.amax(1).tolist()
    assert best.all_rewards.std() > 0
    for reward, conversation, last in zip(best.rewards, best.conversations, said, strict=True):
        replies = [message["content"] for message in conversation if message["role"] == "assistant"]
        assert replies[-1] == last
        assert sum(map(len, replies)) == reward
    with pytest.raises(ValueError, match="BestOfN needs a reward_fn or an environment"):
        BestOfN(model=moe())
