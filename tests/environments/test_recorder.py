"""Agents over HTTP: what is trained on is what an environment's trajectory would be, id by id and bit by bit."""

import asyncio
import functools
import gc
import json
import os
import resource
import socket
import threading
import urllib.error
import urllib.request

import pytest
import torch
from chat_templates import tokenizer as of_template
from games import Echo, OfIds
from tiny_models import llama, moe
from tiny_tokenizers import CHATML, hugging_face
from trained_models import tiny_moe, weights_of

from strop import GRPO
from strop.data.batch import TokenBatch
from strop.environments import Environment, EnvironmentFailure, Player, Turn, TurnsConfig
from strop.environments.recorder import Episode, Recorder
from strop.models import as_policy
from strop.rewards import RewardError
from strop.rollout import Sampler, Sampling
from strop.rollout.sampling_queue import Ticket
from strop.rollout.served_model import ToolCall

pytest.importorskip("starlette")
ROWS = [{"prompt": "ab"}, {"prompt": "dab"}, {"prompt": "f"}]
SAMPLING = Sampling(max_new_tokens=12)
USER = {"role": "user", "content": "ab?"}


class Chatty(Environment):
    """Three turns of messages; the reward is the number of letters."""

    def reset(self, row):
        self.heard = []
        return [{"role": "system", "content": "say"}, {"role": "user", "content": row["prompt"]}]

    def step(self, reply):
        self.heard.append(reply)
        return Turn([{"role": "user", "content": f"cd{len(reply)}"}], reward=len(reply), done=len(self.heard) == 3)


def post(client, path, body, timeout=60):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {client.api_key}"}
    request = urllib.request.Request(client.base_url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{error.code}: {json.loads(error.read())['error']['message']}") from None


def chat(client, messages, **options):
    return post(client, "/chat/completions", {"model": "any", "messages": messages, **options})["choices"][0]


def chatting(row, client, environment=Chatty, **options):
    """Play an environment of messages."""
    game, total = environment(), 0.0
    messages = game.reset(row)
    while True:
        choice = chat(client, messages, **options)
        turn = game.step(choice["message"]["content"])
        total += turn.reward
        if turn.done or choice["finish_reason"] == "length":
            return total
        messages = [*messages, choice["message"], *turn.messages]


async def chatting_async(row, client):
    return await asyncio.to_thread(chatting, row, client)


def completing(row, client, environment=Echo):
    """Play an environment of texts."""
    game, total = environment(), 0.0
    text = game.reset(row)
    while True:
        choice = post(client, "/completions", {"prompt": text})["choices"][0]
        turn = game.step(choice["text"])
        total += turn.reward
        if turn.done or choice["finish_reason"] == "length":
            return total
        text += choice["text"] + turn.messages


def of_ids(row, client):
    game, ids, total = OfIds(), row["prompt"], 0.0
    game.reset(row)
    while True:
        choice = post(client, "/completions", {"prompt": ids, "return_token_ids": True})["choices"][0]
        said = choice["token_ids"]
        turn = game.step(said)
        total += turn.reward
        if turn.done or choice["finish_reason"] == "length":
            return total
        ids = ids + said + turn.messages


@functools.cache
def chat_tokenizer():
    return hugging_face()


class Letters:
    """One token a letter: a is 1. EOS is no text."""

    eos_token_id, pad_token_id = 3, 0
    chat_template = None

    def encode(self, text):
        return [ord(c) - 96 for c in text]

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(i + 96) for i in ids if not (skip_special_tokens and i in (0, 3)))


def play(made, kind, model, tokenizer, rows=ROWS, num_samples=2, seed=0, sampling=SAMPLING, **turns):
    policy = as_policy(model, tokenizer)
    return kind(made, Sampler(policy), policy, TurnsConfig(**turns))(rows, sampling, num_samples, seed)


def record(agent, model=None, tokenizer=None, **options):
    return play(agent, Recorder, model or chat_model(), tokenizer or chat_tokenizer(), **options)


ENDS = [0, 1, 2, 3, 4]  # of the chat tokenizer the special tokens


def chat_model():
    return llama(eos_token_id=ENDS, vocab_size=len(chat_tokenizer()), max_length=256)


def chat_moe():
    return tiny_moe(eos_token_id=tuple(ENDS), vocab_size=len(chat_tokenizer()), max_seq_len=256)


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.ids_T.tolist() == other.ids_T.tolist()
        assert one.loss_mask_T.equal(other.loss_mask_T)
        assert one.rollout_logps_t.dtype == other.rollout_logps_t.dtype
        assert not one.others
        assert one.turns[0].reward == sum(turn.reward for turn in other.turns)
        for name in ("prompts", "completions", "conversations", "replies"):
            assert one.shown[name] == other.shown[name]


@pytest.mark.parametrize("agent", [chatting, chatting_async], ids=["threads", "asyncio"])
def test_an_environment_played_over_http_gives_the_same_bits(agent):
    model = chat_moe()
    wanted = play(Chatty, Player, model, chat_tokenizer(), num_samples=4)
    found = record(agent, model, num_samples=4)
    assert_same(found, wanted)
    assert all(a.equal(b) for a, b in zip(found.logps, wanted.logps, strict=True))
    assert len({tuple(one.ids_T.tolist()) for one in found}) == 12
    assert max(len(one.turns) for one in wanted) == 3


def test_on_a_hugging_face_model_ids_are_the_same_and_log_probs_differ_by_rounding():
    model = chat_model()
    wanted = play(Chatty, Player, model, chat_tokenizer(), num_samples=4)
    found = record(chatting, model, num_samples=4)
    assert_same(found, wanted)
    torch.testing.assert_close(torch.cat(found.logps), torch.cat(wanted.logps), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("environment", "agent", "tokenizer", "rows"),
    [(Echo, completing, Letters(), ROWS), (OfIds, of_ids, None, [{"prompt": [5, 6, 7]}, {"prompt": [8, 9]}])],
    ids=["text", "ids"],
)
def test_texts_and_ids_go_on_as_environments_do(environment, agent, tokenizer, rows):
    model = moe(eos_token_id=[0, 3], max_length=64)
    wanted = play(environment, Player, model, tokenizer, rows=rows, num_samples=4)
    policy = as_policy(model, tokenizer)
    recorder = Recorder(agent, Sampler(policy), policy, TurnsConfig())
    found = recorder(rows, SAMPLING, 4, 0)
    assert [one.ids_T.tolist() for one in found] == [one.ids_T.tolist() for one in wanted]
    assert all(a.equal(b) for a, b in zip(found.logps, wanted.logps, strict=True))
    assert max(len(one.turns) for one in wanted) > 1


def test_one_update_is_that_of_the_environment_bit_for_bit():
    weights, metrics = [], []
    for how in ({"environment": Chatty}, {"agent": chatting}):
        model = chat_moe()
        trainer = GRPO(
            model=model, tokenizer=chat_tokenizer(), group_size=4, kl_coef=0.1, max_new_tokens=12, learning_rate=1e-2,
            loss_type="dapo", seed=3, **how,
        )  # fmt: skip
        metrics.append(trainer.train_step(ROWS))
        weights.append(weights_of(trainer))
    for name in ("loss", "grad_norm", "mean_reward", "mean_kl", "completion/length", "ratio/max"):
        assert metrics[0][name] == metrics[1][name], name
    assert metrics[1]["reward/agent"] == metrics[0]["reward/environment"] == metrics[1]["reward/mean"]
    assert metrics[1]["agent/calls"] == metrics[0]["turns/mean"]
    assert weights[0].equal(weights[1])


# ---- sequences ----


def forgetting(row, client):
    """Two calls, then one that has forgotten them."""
    first = chat(client, [USER], max_tokens=3)["message"]
    chat(client, [USER, first, USER], max_tokens=2)
    chat(client, [{"role": "user", "content": "f"}], max_tokens=4)
    return {"length": 3.0, "right": 1.0}


def test_a_call_that_rewrites_history_begins_a_further_sequence():
    found = record(forgetting, rows=ROWS[:1], num_samples=3)
    for one in found:
        (other,) = one.others
        assert one.num_loss_tokens <= 4
        assert other.num_loss_tokens <= 5
        assert one.turns[0].reward == 4.0
        assert (one.info["agent/calls"], one.info["agent/sequences"]) == (3, 2)
        assert (one.info["agent/length"], one.info["agent/right"]) == (3.0, 1.0)
        text = chat_tokenizer().decode(other.ids_T)
        assert text.count("<|assistant|>") == 2
        policy = as_policy(chat_model())
        with torch.no_grad(), policy.evaluating():
            for part in (one, other):
                wanted = policy.logps(TokenBatch.of([part]))
                torch.testing.assert_close(part.rollout_logps_t, wanted, rtol=0, atol=2e-6)
    assert len({tuple(one.ids_T.tolist()) for one in found}) > 1


def test_all_sequences_of_an_episode_have_its_advantage_and_weigh_as_one():
    """float64: the loss by hand, where an episode's tokens count as one sequence in the mean over sequences."""
    calls = iter(range(100))

    def rewarded(row, client):
        forgetting(row, client)
        return float(next(calls))

    model = chat_model().double()
    trainer = GRPO(
        model=model, tokenizer=chat_tokenizer(), agent=rewarded, group_size=4, kl_coef=0.0, max_new_tokens=6,
        learning_rate=1e-2, loss_type="grpo", max_grad_norm=0,
    )  # fmt: skip
    seen = []
    learn = trainer.learn
    trainer.learn = lambda trajectories, batch: (seen.extend(trajectories), learn(trajectories, batch))[1]
    metrics = trainer.train_step(ROWS[:2])
    assert len(seen) == 8
    wanted = 0.0
    for first in (0, 4):
        group = seen[first : first + 4]
        rewards = torch.tensor([one.reward for one in group], dtype=torch.float64)
        for one, advantage in zip(group, (rewards - rewards.mean()) / (rewards.std() + 1e-4), strict=True):
            parts = [one, *one.others]
            assert len(parts) == 2
            num = sum(part.num_loss_tokens for part in parts)
            for part in parts:
                torch.testing.assert_close(
                    part.advantages_t.double(), advantage.expand(part.num_loss_tokens), rtol=1e-6, atol=1e-7
                )
                assert part.weight == pytest.approx(1 / 8 / num)
                wanted -= advantage.item() * part.num_loss_tokens / num / 8
    assert metrics["loss"] == pytest.approx(wanted, abs=1e-7)
    assert metrics["completion/length"] == sum(p.num_loss_tokens for o in seen for p in (o, *o.others)) / 8


def test_calls_at_the_same_time_are_sequences_of_their_own_and_draw_differently():
    async def crowd(row, client):
        ask = functools.partial(asyncio.to_thread, chat, client)
        first = (await ask([USER]))["message"]
        both = await asyncio.gather(*(ask([USER, first, USER]) for _ in range(2)), ask([USER]), ask([USER]))
        return float(len({one["message"]["content"] for one in both}))

    (one,) = record(crowd, rows=ROWS[:1], num_samples=1)
    assert one.info["agent/calls"] == 5
    assert one.info["agent/sequences"] == 4
    assert one.turns[0].reward > 1


def test_templates_that_rewrite_turns_are_not_joined_unless_they_are_kept():
    thinking = CHATML.replace(
        "m['content'] }}", "(m['content'] if loop.last else m['content'].split('</think>')[-1]) }}"
    )
    tokenizer = hugging_face(template=thinking)
    (alone,) = record(chatting, chat_model(), tokenizer, rows=ROWS[:1], num_samples=1)
    calls = alone.info["agent/calls"]
    assert alone.info["agent/sequences"] == calls > 1
    (kept,) = record(chatting, chat_model(), tokenizer, rows=ROWS[:1], num_samples=1, rewritten_turns="keep")
    assert kept.info["agent/sequences"] == 1


@pytest.mark.parametrize("make", [chat_model, chat_moe])
def test_between_calls_the_engine_keeps_what_it_has_read(make):
    policy = as_policy(make(), chat_tokenizer())
    kept = []

    def agent(row, client):
        first = chat(client, [USER])["message"]
        kept.append(list(recorder.queue._cached.rows))
        return len(chat(client, [USER, first, USER])["message"]["content"])

    recorder = Recorder(agent, Sampler(policy), policy, TurnsConfig())
    recorder(ROWS[:1], SAMPLING, 1, 0)
    assert kept == [[-1]]
    assert not recorder.queue._cached.rows


# ---- options of calls ----


def test_the_trainers_sampling_counts_and_an_agent_is_told():
    def cold(row, client):
        return chatting(row, client, temperature=0.1, top_p=0.5, max_tokens=100, seed=1)

    with pytest.warns(UserWarning, match="agent's temperature, top_p have no effect"):
        found = record(cold, num_samples=4)
    assert_same(found, record(chatting, num_samples=4))


def test_stop_ids_and_stop_texts_end_a_call():
    def stopped(row, client):
        ends = chat_tokenizer().convert_tokens_to_ids(list("aeiou"))
        chat(client, [USER], stop_token_ids=ends, max_tokens=40)
        chat(client, [{"role": "user", "content": "?"}], stop=["x", "y", "z", "0", "1"], max_tokens=40)
        return 1.0

    sampling = Sampling(max_new_tokens=40)
    for one in record(stopped, rows=ROWS[:1], num_samples=6, sampling=sampling):
        (other,) = one.others
        for part, ends in ((other, "aeiou"), (one, "xyz01")):
            text = chat_tokenizer().decode(part.completion_ids, skip_special_tokens=True)
            assert [place for place in range(len(text)) if text[place] in ends] in ([], [len(text) - 1])
            assert len(part.completion_ids) < 40
            assert len(part.rollout_logps_t) == len(part.completion_ids)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"n": 2}, "n must be 1"),
        ({"prompt_logprobs": 0}, "prompt_logprobs must be left out"),
        ({"ignore_eos": True}, "ignore_eos must be left out"),
        ({"echo": True}, "echo must be false in a chat"),
        ({"presence_penalty": 0.5}, "presence_penalty must be 0"),
        ({"messages": []}, "messages must be"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_the_fields_name(body, says):
    def agent(row, client):
        with pytest.raises(RuntimeError, match=f"400: {says}"):
            post(client, "/chat/completions", {"messages": [USER], **body})
        return len(chat(client, [USER])["message"]["content"])

    assert len(record(agent, rows=ROWS[:1])) == 2


# ---- failures ----


def raising(row, client):
    chat(client, [USER])
    if row["prompt"] == "dab":
        raise KeyError("lost")
    return 1.0


def test_an_agent_that_raises_stops_the_run_or_ends_its_trajectory():
    with pytest.raises(EnvironmentFailure, match=r"agent raising raised KeyError: 'lost' .*row {'prompt': 'dab'}"):
        record(raising)
    found = record(raising, on_error="end", error_reward=-2.0)
    assert [one.turns[0].reward for one in found] == [1.0, 1.0, -2.0, -2.0, 1.0, 1.0]
    assert found.metrics["agent/failed_fraction"] == pytest.approx(1 / 3)
    assert "lost" in found[2].failure


def test_of_a_group_of_errors_the_first_is_named():
    async def agent(row, client):
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(raising, {"prompt": "dab"}, client))

    with pytest.raises(EnvironmentFailure, match="agent agent raised KeyError: 'lost'"):
        record(agent, rows=ROWS[:1])


@pytest.mark.parametrize("says", ["x", float("nan"), {"right": None}, {3: 1.0}])
def test_what_is_no_reward_stops_the_run(says):
    def agent(row, client):
        chat(client, [USER])
        return says

    with pytest.raises(EnvironmentFailure, match="agent agent must return"):
        record(agent, rows=ROWS[:1])


def test_an_agent_without_a_call_stops_the_run_always():
    with pytest.raises(EnvironmentFailure, match="must call the model at least once"):
        record(lambda row, client: 1.0, on_error="end")


def test_without_a_reward_a_reward_function_says_it():
    def agent(row, client):
        chat(client, [USER])

    options = {"model": chat_model(), "tokenizer": chat_tokenizer(), "group_size": 2, "max_new_tokens": 4}
    with pytest.raises(RewardError, match="must return a reward without a reward_fn"):
        GRPO(agent=agent, **options).train_step(ROWS)

    def lengths(completions, prompts, conversations):
        assert all(prompt == [USER] for prompt in prompts)
        assert all(len(one) == 2 for one in conversations)
        return [float(len(text)) for text in completions]

    metrics = GRPO(agent=agent, reward_fn=lengths, **options).train_step(ROWS)
    assert metrics["reward/lengths"] == metrics["reward/mean"]
    assert metrics["reward/agent"] == 0


def test_options_that_an_agent_cannot_have():
    with pytest.raises(ValueError, match="environment and tools must be None with an agent"):
        GRPO(model=chat_model(), agent=chatting, environment=Chatty)
    with pytest.raises(ValueError, match='credit must be "trajectory" with an agent'):
        GRPO(model=chat_model(), agent=chatting, credit="turn")
    with pytest.raises(TypeError, match=r"agent must be a function\(row, client\), found a int"):
        GRPO(model=chat_model(), agent=3)
    with pytest.warns(UserWarning, match="max_turns, turn_discount have no effect with an agent"):
        GRPO(model=chat_model(), agent=chatting, max_turns=3, turn_discount=0.5)


def test_late_agents_are_stopped_and_their_keys_end():
    clients = []

    async def hanging(row, client):
        clients.append(client)
        await asyncio.to_thread(chat, client, [USER])
        if row["prompt"] == "f":
            await asyncio.sleep(60)
        return 1.0

    found = record(hanging, on_error="end", environment_timeout=3.0)
    assert ["must return within" in one.failure for one in found] == [False] * 4 + [True] * 2
    for client in clients:
        with pytest.raises((RuntimeError, OSError), match=r"401|refused"):
            chat(client, [USER])


def test_an_agent_that_blocks_the_event_loop_is_late():
    import time

    async def blocking(row, client):
        chat(client, [USER])
        time.sleep(2.0)

    import strop.environments.recorder as module

    before, module.GRACE = module.GRACE, 0.2
    try:
        with pytest.raises(EnvironmentFailure, match=r"must return within environment_timeout=0\.5"):
            record(blocking, rows=ROWS[:1], environment_timeout=0.5)
    finally:
        module.GRACE = before


# ---- streams, tools, grammars ----


def streamed(client, messages, **options):
    """The text of a streamed answer and the finish reason."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {client.api_key}"}
    body = json.dumps({"messages": messages, "stream": True, **options}).encode()
    request = urllib.request.Request(f"{client.base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = [line.removeprefix(b"data: ").strip() for line in answer if line.startswith(b"data: ")]
    assert lines.pop() == b"[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines]
    return "".join(one["delta"].get("content") or "" for one in choices), choices[-1]["finish_reason"]


def test_streams_are_recorded_as_whole_answers_are():
    def agent(row, client):
        game, total = Chatty(), 0.0
        messages = game.reset(row)
        while True:
            text, finish = streamed(client, messages)
            turn = game.step(text)
            total += turn.reward
            if turn.done or finish == "length":
                return total
            messages = [*messages, {"role": "assistant", "content": text}, *turn.messages]

    sampling = Sampling(max_new_tokens=40)
    model = chat_moe()
    found, wanted = (record(one, model, num_samples=3, sampling=sampling) for one in (agent, chatting))
    assert_same(found, wanted)
    assert any(len(one.completion_ids) > 40 for one in found)


ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}  # fmt: skip


def test_tool_calls_and_their_results_are_joined():
    tokens = of_template("qwen")
    policy = as_policy(llama(eos_token_id=tokens.eos_token_id, vocab_size=len(tokens), max_length=600), tokens)

    def agent(row, client):
        messages = [USER]
        for turn in range(3):
            message = chat(client, messages, tools=[ADD], tool_choice="auto")["message"]
            (call,) = message["tool_calls"]
            assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 7})
            result = {"role": "tool", "tool_call_id": call["id"], "content": f"result {turn}"}
            messages += [message, result, {**result, "content": "and"}]
        return 1.0

    recorder = Recorder(agent, Sampler(policy), policy, TurnsConfig())
    recorder.served.parse_calls = lambda reply: [ToolCall("add", {"a": 7})]
    for one in recorder(ROWS[:1], SAMPLING, 2, 0):
        assert (one.info["agent/calls"], one.info["agent/sequences"]) == (3, 1)
        text = tokens.decode(one.ids_T)
        given = tokens.decode(one.ids_T[~one.loss_mask_T])
        assert text.count("<tools>") == 1 or text.count('"name": "add"') == 1
        assert [given.count(f"<tool_response>\nresult {turn}\n</tool_response>") for turn in range(3)] == [1, 1, 0]
        assert given.count("<tool_response>\nand\n</tool_response>") == 2


def test_other_tools_begin_a_further_sequence():
    tokens = of_template("qwen")
    policy = as_policy(llama(eos_token_id=tokens.eos_token_id, vocab_size=len(tokens), max_length=600), tokens)

    def agent(row, client):
        first = chat(client, [USER], tools=[ADD])["message"]
        chat(client, [USER, first, USER])
        return 1.0

    recorder = Recorder(agent, Sampler(policy), policy, TurnsConfig())
    assert [one.info["agent/sequences"] for one in recorder(ROWS[:1], SAMPLING, 2, 0)] == [2, 2]


def test_json_mode_draws_by_its_grammar_and_trains_on_the_policys_own_log_probs():
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    tokens = of_template("qwen")
    model = llama(eos_token_id=tokens.eos_token_id, vocab_size=len(tokens), max_length=600)
    seen = []

    def agent(row, client):
        format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        said = json.loads(chat(client, [USER], response_format=format, max_tokens=60)["message"]["content"])
        return float(said["a"])

    trainer = GRPO(model=model, tokenizer=tokens, agent=agent, group_size=8, kl_coef=0.0, max_new_tokens=100, seed=1)
    learn = trainer.learn
    trainer.learn = lambda trajectories, batch: (seen.extend(trajectories), learn(trajectories, batch))[1]
    metrics = trainer.train_step(ROWS[:1])
    assert {one.reward for one in seen} == {1.0, 2.0}
    assert (metrics["ratio/mean"], metrics["ratio/max"]) == pytest.approx((1.0, 1.0), abs=1e-5)
    for one in seen:
        assert one.old_logps_t.sum() < one.rollout_logps_t.sum() - 10  # few tokens were allowed


# ---- hostile agents ----


def raw(client, data=b"{}", path="/chat/completions", **headers):
    """The status of a request as it is."""
    head = {"Content-Type": "application/json", "Authorization": f"Bearer {client.api_key}", **headers}
    try:
        with urllib.request.urlopen(urllib.request.Request(client.base_url + path, data, head), timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except (ConnectionError, urllib.error.URLError):  # the server closed the connection while it was written to
        return 413


def test_hostile_requests_are_refused_and_harm_nobody():
    body = json.dumps({"messages": [USER], "max_tokens": 2}).encode()

    def hostile(row, client):
        found = [
            raw(client, body, Authorization="Bearer other"), raw(client, body, Authorization="Basic eDp5"),
            raw(client, body, Host="evil.example"), raw(client, body, Origin="http://evil.example"),
            raw(client, body, **{"Content-Type": "text/plain"}), raw(client, b"{"), raw(client, b"[1]"),
            raw(client, b'{"messages": ' + b"[" * 100_000), raw(client, body, path="/embeddings"),
            raw(client, json.dumps({"messages": [{"role": "user", "content": "a" * 10_000_000}]}).encode()),
        ]  # fmt: skip
        assert found == [401, 401, 403, 403, 415, 400, 400, 400, 404, 413]
        assert raw(client, json.dumps({"messages": [{"role": "user", "content": "a" * 900_000}]}).encode()) == 400
        return chatting(row, client)

    found = record(hostile, num_samples=2)
    assert_same(found, record(chatting, num_samples=2))


def test_two_hundred_connections_and_answers_that_nobody_reads():
    def crowd(row, client):
        host, port = client.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        idle = [socket.create_connection((host, int(port)), timeout=20) for _ in range(200)]
        body = json.dumps({"messages": [USER], "stream": True, "max_tokens": 100}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {client.api_key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        for one in idle[:50]:
            one.sendall(head.encode() + body)
        for one in idle[:20]:
            assert one.recv(20).startswith(b"HTTP/1.1 200")
        for one in idle:  # in the middle of the stream, or before its beginning
            one.close()
        return chatting(row, client)

    found = record(crowd, rows=ROWS[:1], num_samples=1, sampling=Sampling(max_new_tokens=100))
    assert found[0].info["agent/calls"] >= 1
    lengths = {len(part.rollout_logps_t) == part.num_loss_tokens for one in found for part in (one, *one.others)}
    assert lengths == {True}


def test_a_thousand_episodes_leave_nothing_behind():
    """Memory, threads and descriptors after 1,000 episodes are those after 100."""
    policy = as_policy(chat_moe(), chat_tokenizer())

    async def both(row, client):
        await asyncio.to_thread(chat, client, [USER], max_tokens=2)
        return 1.0

    def once(row, client):
        chat(client, [USER], max_tokens=2)
        return 1.0

    recorders = [Recorder(agent, Sampler(policy), policy, TurnsConfig()) for agent in (both, once)]
    for recorder in recorders:
        recorder.pool.size = 50

    def held():
        gc.collect()
        objects = sum(type(one) in (Episode, Ticket, torch.Tensor) for one in gc.get_objects())
        return len(os.listdir("/proc/self/fd")), threading.active_count(), objects

    def episodes(number):
        for seed in range(number // 100):
            for recorder in recorders:
                assert len(recorder(ROWS[:1], SAMPLING, 50, seed)) == 50
                assert not recorder.endpoint.episodes

    episodes(200)
    before, memory = held(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    episodes(1000)
    after = held()
    assert all(now <= then + 5 for then, now in zip(before, after, strict=True)), (before, after)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 20_000  # kilobytes


def test_the_endpoint_stops_with_its_recorder():
    policy = as_policy(chat_moe(), chat_tokenizer())
    recorder = Recorder(chatting, Sampler(policy), policy, TurnsConfig())
    recorder(ROWS[:1], SAMPLING, 1, 0)
    url = recorder.endpoint.url
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{url}/v1/models", timeout=20)
    assert urllib.request.urlopen(f"{url}/health", timeout=20).status == 200
    del recorder
    gc.collect()
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(f"{url}/health", timeout=20)


# ---- runs ----


def test_a_run_that_is_resumed_goes_on_bit_for_bit(tmp_path):
    """Two steps, and one step with a checkpoint and another one; agents run in threads, in whatever order."""

    def trainer():
        return GRPO(
            model=chat_moe(), tokenizer=chat_tokenizer(), agent=chatting, group_size=4, kl_coef=0.0, max_new_tokens=12,
            learning_rate=1e-2, batch_size=2, seed=5,
        )  # fmt: skip

    whole, first = trainer(), trainer()
    whole.train(ROWS, num_steps=3)
    first.train(ROWS, num_steps=2)
    first.save(tmp_path / "grpo.pt")
    second = GRPO.from_checkpoint(tmp_path / "grpo.pt", tokenizer=chat_tokenizer(), agent=chatting)
    second.train(ROWS, num_steps=3)
    assert weights_of(second).equal(weights_of(whole))
    assert not weights_of(second).equal(weights_of(first))


def test_a_rollout_server_samples_for_agents(tmp_path):
    """The same conversations by another process's weights: recorded ids are those of the server."""
    from strop.rollout.openai_server import OpenAIServer
    from strop.rollout.served_model import ServedModel

    policy = as_policy(chat_model(), chat_tokenizer())
    served = ServedModel(policy, "policy", sync_folder=tmp_path)
    server = OpenAIServer(served, allow_sync=True).start()
    try:
        trainer = GRPO(
            model=chat_model(), tokenizer=chat_tokenizer(), agent=chatting, group_size=4, kl_coef=0.0, max_new_tokens=12,
            learning_rate=1e-2, rollout_server=server.url, sync_folder=str(tmp_path),
        )  # fmt: skip
        for _ in range(2):
            metrics = trainer.train_step(ROWS)
            assert metrics["agent/calls"] > 1
            assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-4)
            assert metrics["mismatch_kl"] < 1e-6
    finally:
        server.stop()
        served.close()


def test_the_endpoint_takes_the_openai_package():
    openai = pytest.importorskip("openai")

    async def agent(row, client):
        messages, total = Chatty().reset(row), 0.0
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as model:
            for turn in range(2):
                made = await model.chat.completions.create(
                    model="gpt-4o", messages=messages, max_completion_tokens=12, logprobs=True, top_logprobs=2
                )
                message = made.choices[0].message
                total += len(made.choices[0].logprobs.content)
                messages = [*messages, message.model_dump(), {"role": "user", "content": str(turn)}]
            stream = await model.chat.completions.create(model="gpt-4o", messages=messages, stream=True)
            async for piece in stream:
                total += len(piece.choices[0].delta.content or "")
        return total

    for one in record(agent, chat_moe(), rows=ROWS[:1]):
        assert (one.info["agent/calls"], one.info["agent/sequences"]) == (3, 1)
