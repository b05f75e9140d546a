"""Judges: a model behind a server scores and compares; answers are kept; numbers that are logged and no reward."""

import http.server
import json
import threading

import pytest
from tiny_models import Letters, moe
from trained_models import weights_of

from strop import GRPO, OnlineDPO
from strop.config import RewardCalls
from strop.rewards import (
    Judge,
    MetricsFunctions,
    PreferenceFunction,
    RewardError,
    RewardFunctions,
    async_calls,
    described,
)

TEXTS = {"completions": ["aaa", "b", "aaa"], "prompts": ["first", "second", "first"], "grade": [1, 2, 1]}
ROWS = [{"prompt": "ab"}, {"prompt": "dab"}, {"prompt": "f"}]


@pytest.fixture
def server():
    """A server whose `answer` (the question → the reply) decides; `asked` are the requests' bodies."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found.asked.append((self.path, self.headers.get("Authorization"), body))
            reply = found.answer(body["messages"][-1]["content"])
            status, said = reply if isinstance(reply, tuple) else (200, reply)
            usage = {"prompt_tokens": 10, "completion_tokens": 2}
            answer = {"choices": [{"message": {"content": said}}], "usage": usage} if status == 200 else said
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Transfer-Encoding", "chunked")  # as many servers do
            self.end_headers()
            for part in (data[:7], data[7:]):
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_):
            pass

    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.asked, found.url = [], f"http://127.0.0.1:{found.server_port}/v1"
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    monkeypatch.setattr(async_calls, "pause_before", lambda attempt: 0.0)


def of_length(question):
    """The number of letters of the answer."""
    return f"{len(question.split('# Answer')[1].split(chr(10))[1])}\n"


def test_a_completion_is_scored(server):
    server.answer = of_length
    judge = Judge(server.url, "wise", api_key="secret", max_tokens=3)
    rewards = RewardFunctions(judge)
    assert rewards(TEXTS).columns["judge"].tolist() == pytest.approx([0.3, 0.1, 0.3])
    path, key, body = max(server.asked, key=lambda asked: str(asked[2]).count("a"))
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert {**body, "messages": 0} == {"model": "wise", "temperature": 0.0, "max_tokens": 3, "messages": 0}
    assert "# Request\nfirst\n\n# Answer\naaa\n" in body["messages"][0]["content"]
    assert len(server.asked) == 2  # two completions are the same, asked at the same time
    wanted = {"requests": 2, "cached_answers": 0, "prompt_tokens": 20, "completion_tokens": 4}
    assert rewards.take_metrics() == {f"judge/{name}": value for name, value in wanted.items()}
    assert rewards.take_metrics()["judge/requests"] == 0


def test_prompts_and_parsers_of_ones_own(server):
    server.answer = lambda question: f"I think {question}, so <score>{len(question)}</score>"
    options = {"parse": lambda reply: float(reply.split("<score>")[1].split("<")[0])}
    text = Judge(server.url, "m", prompt="{grade}|{completion}|{prompt}", **options)
    assert RewardFunctions(text)(TEXTS).total_B.tolist() == [11, 10, 11]

    def messages(completion, **columns):
        return [{"role": "system", "content": "be kind"}, {"role": "user", "content": completion}]

    assert RewardFunctions(Judge(server.url, "m", prompt=messages, **options))(TEXTS).total_B.tolist() == [3, 1, 3]
    assert server.asked[-1][2]["messages"][0]["content"] == "be kind"


def test_a_conversation_is_read_as_text(server):
    server.answer = of_length
    rows = {"completions": ["ab"], "prompts": [[{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]]}
    RewardFunctions(Judge(server.url, "m"))(rows)
    assert "# Request\nsystem: x\nuser: y\n" in server.asked[0][2]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (lambda first, second: "A" if len(first) > len(second) else "B.", [0, 1, 0.5]),  # of equals the second, always
        (lambda first, second: "A", [0.5, 0.5, 0.5]),  # the first, whatever it is: it contradicts itself
        (lambda first, second: "tie" if len(first) > len(second) else "**b**", [0, 1, 0.5]),  # sure in one order alone
    ],
)
def test_a_pair_is_asked_in_both_orders(server, answer, wanted):
    def of_question(question):
        return answer(*(part.split("\n")[1] for part in question.split("# Answer ")[1:]))

    server.answer = of_question
    pairs = [("aaa", "b"), ("c", "dd"), ("e", "f")]
    assert PreferenceFunction(Judge(server.url, "m"))(pairs, {"prompts": ["p"] * 3}) == wanted
    assert len(server.asked) == 6


def test_answers_are_kept_by_content(server, tmp_path):
    server.answer = of_length

    def made(**options):
        return RewardFunctions(Judge(server.url, "m", cache=tmp_path / "judged", **options))

    assert made()(TEXTS).total_B.tolist() == made()(TEXTS).total_B.tolist()
    assert len(server.asked) == 2
    again = made(parse=float)  # another way to read what was answered
    assert again(TEXTS).total_B.tolist() == [3, 1, 3]
    assert again.take_metrics()["judge/cached_answers"] == 3
    assert len(server.asked) == 2
    made(max_tokens=2)(TEXTS)  # another request
    assert len(server.asked) == 4


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ("11", "a number from 0 to 10, found '11'"),
        ("8 or 9", "a number from 0 to 10, found '8 or 9'"),
        ((429, {"error": {"message": "slow down"}}), r"answers with 429: slow down"),
        ((500, "broken"), r"answers with 500: .?broken"),
        ((200, None), "must answer with a message"),
    ],
)
def test_a_reply_that_is_no_reward_fails(server, tmp_path, reply, says):
    server.answer = lambda question: reply
    judge = Judge(server.url, "m", cache=tmp_path)
    with pytest.raises(RewardError, match=rf"judge raised .*{says}"):
        RewardFunctions(judge)(TEXTS)
    assert not list(tmp_path.rglob("*.json"))  # nothing to be read again
    replies = iter([reply, reply, "7", "7"])
    server.answer = lambda question: next(replies)
    again = RewardFunctions(Judge(server.url, "m"), calls=RewardCalls(reward_retries=2))
    assert again({"completions": ["a"], "prompts": ["p"]}).total_B.tolist() == pytest.approx([0.7])


def test_nobody_answers():
    with pytest.raises(RewardError, match=r"judge raised (ConnectionRefused|OS)Error"):
        RewardFunctions(Judge("http://127.0.0.1:9/v1", "m"))(TEXTS)
    with pytest.raises(ValueError, match="url must begin with http"):
        Judge("file:///etc/passwd", "m")
    with pytest.raises(RewardError, match="a judge reads texts, which need a tokenizer"):
        RewardFunctions(Judge("http://127.0.0.1:9/v1", "m"))({"completions": [[1]], "prompts": [[2]]})


def test_another_question_is_another_reward():
    one, other = (
        described(Judge("http://127.0.0.1:9/v1", "m", prompt=text)) for text in ("{completion}?", "{completion}!")
    )
    assert one["name"] == other["name"] == "judge"
    assert one["sha256"] != other["sha256"]


def grpo(judge, **options):
    return GRPO(
        model=moe(max_length=64), tokenizer=Letters(), reward_fn=judge, group_size=4, kl_coef=0.0, max_new_tokens=6,
        learning_rate=1e-2, batch_size=2, seed=5, **options,
    )  # fmt: skip


def test_a_run_that_is_repeated_asks_nothing_twice(server, tmp_path):
    """A run that lost its last steps makes them again from the cache, bit for bit."""
    server.answer = of_length
    first, second = (grpo(Judge(server.url, "m", cache=tmp_path)) for _ in range(2))
    history = first.train(ROWS, num_steps=3)
    num_asked = len(server.asked)
    assert sum(history.values("judge/requests")) == num_asked > 3
    assert sum(history.values("judge/prompt_tokens")) == 10 * num_asked
    assert history.values("reward/judge") == history.values("reward/mean")
    again = second.train(ROWS, num_steps=3)
    assert len(server.asked) == num_asked
    assert sum(again.values("judge/prompt_tokens")) == 0
    assert sum(again.values("judge/cached_answers")) == 20
    assert weights_of(first).equal(weights_of(second))


def test_pairs_in_training(server):
    def shorter(question):
        first, second = (part.split("\n")[1] for part in question.split("# Answer ")[1:])
        return "A" if len(first) < len(second) else "B" if len(first) > len(second) else "tie"

    server.answer = shorter
    online = OnlineDPO(
        model=moe(max_length=64), tokenizer=Letters(), preference_fn=Judge(server.url, "m"), max_new_tokens=6, seed=1
    )
    metrics = online.train_step([row["prompt"] for row in ROWS] * 2)
    assert metrics["judge/requests"] == len(server.asked) == 12
    for kept, left in zip(online.samples[::2], online.samples[1::2], strict=True):
        by_length = len(kept["completion"]) < len(left["completion"])
        assert kept["preferred"] == by_length or len(kept["completion"]) == len(left["completion"])
    assert online.evaluate([{"prompt": "ab"}])["eval/judge/requests"] == 2


def test_a_model_of_ones_own_server_judges():
    pytest.importorskip("starlette")
    from tiny_models import llama
    from tiny_tokenizers import hugging_face

    from strop.models import as_policy
    from strop.rollout.openai_server import OpenAIServer
    from strop.rollout.served_model import ServedModel

    tokenizer = hugging_face()
    policy = as_policy(llama(eos_token_id=[0], vocab_size=len(tokenizer), max_length=256), tokenizer)
    served = ServedModel(policy, "wise")
    running = OpenAIServer(served).start()
    try:
        judge = Judge(
            f"{running.url}/v1", "wise", prompt="{completion}", parse=lambda reply: 1 + len(reply), max_tokens=5
        )
        rewards = RewardFunctions(judge)
        assert (rewards(TEXTS).total_B > 0).all()
        found = rewards.take_metrics()
        assert (found["judge/requests"], found["judge/cached_answers"]) == (2, 0)
        assert found["judge/prompt_tokens"] > 6
        assert 2 <= found["judge/completion_tokens"] <= 10
    finally:
        running.stop()
        served.close()


# ---- numbers that are no reward ----


def lengths(completions, prompts):
    sizes = [len(text) for text in completions]
    return {"length": sizes, "later": [None, *sizes[1:]]}


def test_numbers_are_logged_and_change_nothing():
    def reward(completions):
        return [float(len(text)) for text in completions]

    plain, logged = (
        grpo(reward),
        grpo(reward, metrics_fn=[lengths, lambda completions: {"one": [1] * len(completions)}]),
    )
    plain.train(ROWS, num_steps=2)
    history = logged.train(ROWS, num_steps=2)
    assert weights_of(plain).equal(weights_of(logged))
    texts = [sample["completion"] for sample in logged.samples]
    last = history.steps[-1]
    assert last["metrics/length"] == pytest.approx(sum(map(len, texts)) / len(texts))
    assert last["metrics/later"] == pytest.approx(sum(map(len, texts[1:])) / len(texts[1:]))
    assert last["metrics/one"] == 1
    assert "reward/lengths" not in last
    assert logged.evaluate(ROWS)["eval/metrics/one"] == 1


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda completions: [1] * 3, r"must return values by name, found \[1, 1, 1\]"),
        (lambda completions: {"a": [1]}, "must return one number for each of the 3 completions, found 1"),
        (lambda completions: {"a": ["x"] * 3}, "a must return numbers, found 'x'"),
        (lambda completions: {"a": [float("nan")] * 3}, "a must return finite numbers"),
        (lambda completions, answr: {}, "asks for 'answr', which is no column"),
        (lambda completions: 1 // 0, "raised ZeroDivisionError"),
    ],
)
def test_what_is_no_number_stops_the_run(function, says):
    with pytest.raises(RewardError, match=says):
        MetricsFunctions(function)(TEXTS)


def test_metrics_functions_are_checked():
    async def slow(completions):
        return {}

    for wrong in (slow, 3):
        with pytest.raises(TypeError, match="metrics_fn must be a plain function or several"):
            grpo(len, metrics_fn=wrong)
    with pytest.raises(RewardError, match=r"dataset\[1\] must have the column 'answer'"):
        grpo(lengths, metrics_fn=lambda completions, answer: {}).train([{"prompt": "a", "answer": 1}, {"prompt": "b"}])
