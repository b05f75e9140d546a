"""`strop serve`: OpenAI's protocol over strop's engine. Answers are held against `generate`, number by number."""

import json
import re
import signal
import threading
import urllib.error
import urllib.request

import preloaded
import pytest
import torch
from tiny_models import llama
from tiny_tokenizers import CHATML, hugging_face
from tokenizers import decoders
from typer.testing import CliRunner

from strop.cli import app
from strop.models import as_policy
from strop.rollout import Sampling, decoding, generate, sampling_queue
from strop.rollout.openai_server import OpenAIServer
from strop.rollout.sampling import sampling_logps
from strop.rollout.sampling_queue import SamplingQueue, SamplingRequest
from strop.rollout.served_model import RequestError, ServedModel

PROMPT = [5, 6, 7]
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def tokenizer():
    return hugging_face()


@pytest.fixture(scope="module")
def policy(tokenizer):
    return as_policy(llama(eos_token_id=1, vocab_size=len(tokenizer), scale=4.0), tokenizer)


@pytest.fixture(scope="module")
def url(policy):
    served = ServedModel(policy, "tiny")
    server = OpenAIServer(served).start()
    yield server.url
    server.stop()
    served.close()


def ask(url, path, body=None, raw=False):
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
            return answer.status, text if raw else json.loads(text)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def events(text):
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line)["choices"][0] for line in lines[:-1]]


def test_models_and_health(url):
    assert ask(url, "/health") == (200, {})
    (model,) = ask(url, "/v1/models")[1]["data"]
    assert (model["id"], model["parent"], model["max_model_len"]) == ("tiny", None, 64)
    assert ask(url, "/v1/models/tiny") == (200, model)
    assert ask(url, "/v1/models/a/b")[0] == 404


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "seed": 4, "n": 3}]
)
def test_completions_are_those_of_generate(url, policy, options):
    body = {"prompt": PROMPT, "max_tokens": 12, "logprobs": 0, "return_token_ids": True, **options}
    status, answer = ask(url, "/v1/completions", body)
    names = {"temperature", "top_k", "top_p"} & options.keys()
    sampling = Sampling(max_new_tokens=12, **{name: options[name] for name in names})
    rollout = generate(policy, [PROMPT], sampling, num_samples=options.get("n", 1), seed=options.get("seed", 0))
    assert status == 200
    for choice, ids, logps, why in zip(
        answer["choices"], rollout.completion_ids, rollout.logps, rollout.finish_reasons, strict=True
    ):
        assert choice["token_ids"] == ids.tolist()
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(logps.tolist(), abs=1e-6)
        assert choice["finish_reason"] == {"eos": "stop", "length": "length"}[why]
        assert choice["text"] == policy.tokenizer.decode(ids, skip_special_tokens=True)
        assert choice["prompt_token_ids"] == PROMPT
    counted = sum(map(len, rollout.completion_ids))
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": counted, "total_tokens": 3 + counted}


def test_text_is_encoded_once_and_several_prompts_are_answered(url, policy):
    body = {"prompt": ["abc", "d"], "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    first, second = ask(url, "/v1/completions", body)[1]["choices"]
    assert first["prompt_token_ids"] == policy.tokenizer.encode("abc")
    assert (first["index"], second["index"]) == (0, 1)
    alone = ask(url, "/v1/completions", {**body, "prompt": policy.tokenizer.encode("d")})[1]["choices"][0]
    assert alone["token_ids"] == second["token_ids"]


def test_prompt_logprobs_are_those_of_a_forward(url, policy):
    body = {"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 0}
    found = ask(url, "/v1/completions", body)[1]["choices"][0]["prompt_logprobs"]
    with torch.no_grad():
        logps_TV = policy.model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    assert found[0] is None
    wanted = [logps_TV[0, 6].item(), logps_TV[1, 7].item()]
    assert [found[1]["6"]["logprob"], found[2]["7"]["logprob"]] == pytest.approx(wanted, abs=1e-6)


def test_ids_and_texts_that_end_a_completion(url, policy):
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    whole = ask(url, "/v1/completions", body)[1]["choices"][0]
    ids = whole["token_ids"]
    assert len(ids) == 12
    end = next(i for i in range(2, 12) if ids[i] not in ids[:i])
    cut = ask(url, "/v1/completions", {**body, "stop_token_ids": [ids[end]]})[1]["choices"][0]
    assert (cut["token_ids"], cut["finish_reason"]) == (ids[: end + 1], "stop")
    word = policy.tokenizer.decode([ids[end]])
    cut = ask(url, "/v1/completions", {**body, "stop": word})[1]["choices"][0]
    assert cut["text"] == whole["text"].split(word)[0]
    assert cut["finish_reason"] == "stop"
    assert word in policy.tokenizer.decode(cut["token_ids"])
    assert word not in policy.tokenizer.decode(cut["token_ids"][:-1])


@pytest.mark.parametrize("stop", [None, "word"])
def test_streams_give_the_greedy_answer_in_pieces(url, policy, stop):
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    whole = ask(url, "/v1/completions", {**body, "return_token_ids": True})[1]["choices"][0]
    if stop:
        stop = whole["text"][6:10]
        body["stop"] = [stop]
        whole = ask(url, "/v1/completions", body)[1]["choices"][0]
    pieces = events(ask(url, "/v1/completions", {**body, "stream": True}, raw=True)[1])
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert [piece["finish_reason"] for piece in pieces][:-1] == [None] * (len(pieces) - 1)
    assert pieces[-1]["finish_reason"] == whole["finish_reason"]
    if not stop:
        assert [len(piece["token_ids"]) for piece in pieces] == [4, 8, 16, 12]
        assert [i for piece in pieces for i in piece["token_ids"]] == whole["token_ids"]


def test_chat_goes_through_the_template(url, policy):
    body = {"messages": [{"role": "user", "content": "ab?"}], "temperature": 0, "max_tokens": 9, "logprobs": True}
    (choice,) = ask(url, "/v1/chat/completions", body)[1]["choices"]
    prompt = policy.tokenizer.encode("<|user|>ab?<eos>\n<|assistant|>", add_special_tokens=False)
    rollout = generate(policy, [prompt], Sampling(max_new_tokens=9, temperature=0.0))
    text = policy.tokenizer.decode(rollout.completion_ids[0], skip_special_tokens=True)
    assert choice["message"] == {"role": "assistant", "content": text}
    found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert found == pytest.approx(rollout.logps[0].tolist(), abs=1e-6)
    pieces = events(ask(url, "/v1/chat/completions", {**body, "logprobs": None, "stream": True}, raw=True)[1])
    assert pieces[0]["delta"]["role"] == "assistant"
    assert "".join(piece["delta"]["content"] for piece in pieces) == text


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("/v1/completions", b"{", 400, "a body must be JSON"),
        ("/v1/completions", b"[]", 400, "a body must be an object, found list"),
        ("/v1/completions", {}, 400, "prompt must be a text, ids, or a list of these, found None"),
        ("/v1/completions", {"prompt": [99]}, 400, "must hold ids from 0 to"),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 64}, 400, "must have at most 0 tokens (the model reads 64"),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": "5"}, 400, "max_tokens must be a whole number, found '5'"),
        ("/v1/completions", {"prompt": PROMPT, "temperature": -1}, 400, "temperature must be finite and at least 0"),
        ("/v1/completions", {"prompt": PROMPT, "top_p": "x"}, 400, "top_p must be a number, found 'x'"),
        ("/v1/completions", {"prompt": PROMPT, "n": 0}, 400, "n must be at least 1, found 0"),
        ("/v1/completions", {"prompt": PROMPT, "n": 2, "stream": True}, 400, "n must be 1 in a stream, found 2"),
        ("/v1/completions", {"prompt": PROMPT, "stop": [3]}, 400, "stop must be a text or several, found [3]"),
        ("/v1/completions", {"prompt": PROMPT, "logprobs": 21}, 400, "logprobs must be from 0 to 20, found 21"),
        ("/v1/completions", {"prompt": PROMPT, "repetition_penalty": 1.2}, 400, "repetition_penalty must be 1, found 1.2"),
        ("/v1/completions", {"prompt": PROMPT, "model": "other"}, 404, "The model `other` does not exist."),
        ("/v1/completions", {"prompt": PROMPT, "structured_outputs": {"json": {}}}, 400, "structured_outputs must be left out"),
        ("/v1/completions", {"prompt": PROMPT, "min_tokens": 5}, 400, "min_tokens must be 0, found 5"),
        ("/v1/completions", {"prompt": PROMPT, "stream": "yes"}, 400, "stream must be true or false, found 'yes'"),
        ("/v1/completions", {"prompt": PROMPT, "response_format": {"type": "xml"}}, 400, "found 'xml'"),
        ("/v1/chat/completions", {"messages": HELLO, "tool_choice": "required"}, 400, "tools must be given for tool_choice 'required'"),
        ("/v1/chat/completions", {"messages": HELLO, "chat_template_kwargs": {"chat_template": "{% for i in range(99999) %}"}}, 400,
         "chat_template_kwargs must be an object without a chat_template"),
        ("/v1/chat/completions", {"messages": HELLO, "continue_final_message": True}, 400,
         "continue_final_message must be false where the last message's role is 'user'"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages: "),
        ("/v1/chat/completions", {"messages": "hello"}, 400, "messages must be a list of messages, found 'hello'"),
        ("/v1/embeddings", {}, 404, "POST /v1/embeddings is not served"),
        ("/collective_rpc", {"method": "reload_weights"}, 404, "POST /collective_rpc is not served"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/"}, 404, "is not served"),
    ],
)  # fmt: skip
def test_errors_are_openais(url, path, body, status, told):
    found, answer = ask(url, path, body)
    assert found == status
    assert told in answer["error"]["message"]
    assert answer["error"]["code"] == status


def test_fields_that_change_nothing_are_taken(url):
    body = {"prompt": PROMPT, "max_tokens": 2, "user": "me", "min_tokens": 0, "logit_bias": None, "unknown": None}
    assert ask(url, "/v1/completions", body)[0] == 200


def test_what_a_chat_says_to_the_template_is_heard(policy):
    tokenizer = hugging_face(template="{% if thinks %}a{% endif %}" + CHATML)
    served = ServedModel(as_policy(policy.model, tokenizer), "tiny")
    server = OpenAIServer(served).start()
    try:
        body = {"messages": HELLO, "max_tokens": 1}
        short, long = (
            ask(server.url, "/v1/chat/completions", {**body, "chat_template_kwargs": options})[1]["usage"][
                "prompt_tokens"
            ]
            for options in ({}, {"thinks": True})
        )
        assert long == short + 1
    finally:
        server.stop()
        served.close()


def test_requests_of_several_threads_take_turns(url, policy):
    answers = {}

    def work(seed):
        body = {"prompt": PROMPT, "max_tokens": 8, "seed": seed, "return_token_ids": True}
        answers[seed] = ask(url, "/v1/completions", body)[1]["choices"][0]["token_ids"]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(6):
        rollout = generate(policy, [PROMPT], Sampling(max_new_tokens=8), seed=seed)
        assert answers[seed] == rollout.completion_ids[0].tolist()


def test_the_command_serves_a_folder(tmp_path, policy):
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    process = preloaded.start("strop.cli:main", "serve", tmp_path, "--port", "0", "--device", "cpu")
    try:
        while "serving" not in process.errors():
            assert process.poll(0.05) is None, process.errors()
        url = re.search(r"serving.* at (\S+)", process.errors())[1]
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        found = ask(url, "/v1/completions", body)[1]["choices"][0]["token_ids"]
        assert ask(url, "/collective_rpc", {"method": "reload_weights"})[0] == 404
    finally:
        process.send_signal(signal.SIGTERM)  # not SIGINT, which programs started in the background ignore
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    rollout = generate(policy, [PROMPT], Sampling(max_new_tokens=8, temperature=0.0))
    assert found == rollout.completion_ids[0].tolist()


def weights_of(serving):
    return [one.clone() for one in serving.policy.model.state_dict().values()]


def test_refused_weights_change_nothing(tmp_path):
    llama(num_hidden_layers=3, scale=2.0).save_pretrained(tmp_path)
    serving = ServedModel(as_policy(llama()), "tiny")
    before = weights_of(serving)
    with pytest.raises(
        RequestError, match=r"weights_path must hold the weights of tiny, found other ones at model\.layers\.2"
    ):
        serving.reload_weights(str(tmp_path))
    assert all(map(torch.equal, before, weights_of(serving)))


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("fault", ["no weights", "other layers"])
def test_an_adapter_that_does_not_load_leaves_the_model_as_it_was(fault, others, tmp_path):
    peft = pytest.importorskip("peft")

    def saved(name, model, **options):
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **options)
        peft.get_peft_model(model, config).save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    good, bad = saved("good", llama()), saved("bad", llama(num_hidden_layers=3))
    llama().save_pretrained(tmp_path / "base")
    if fault == "no weights":
        (tmp_path / "bad" / "adapter_model.safetensors").unlink()
    serving = ServedModel(as_policy(llama()), "tiny")
    if others:
        serving.load_adapter("good", good)
    before = weights_of(serving)
    with pytest.raises(RequestError, match="Loading lora bad failed: ") as caught:
        serving.load_adapter("bad", bad)
    assert caught.value.status == 404
    assert all(map(torch.equal, before, weights_of(serving)))
    if others:
        serving.unload_adapter("good")
    serving.reload_weights(str(tmp_path / "base"))
    serving.load_adapter("good", good)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": PROMPT, "stop_token_ids": 5}, "stop_token_ids must be a list, found 5"),
        ({"prompt": PROMPT, "stop": 5}, "stop must be a list, found 5"),
        ({"prompt": [3, True]}, "prompt must hold ids that are whole numbers"),
    ],
)
def test_requests_of_the_wrong_kind_name_what_is_wrong(url, body, says):
    status, answer = ask(url, "/v1/completions", body)
    assert status == 400
    assert says in answer["error"]["message"]


# ---- together ----


def test_rows_decoded_together_are_those_decoded_alone(policy):
    """Requests of three sampling rules and of several lengths, submitted at once."""
    settings = [{"temperature": 0.0}, {"temperature": 0.8, "top_k": 9}, {}]
    asked = [
        SamplingRequest(
            prompt=[*PROMPT, number], sampling=Sampling(max_new_tokens=5 + 6 * (number % 5), **settings[number % 3]),
            num_samples=1 + number % 2, seed=number,
        )
        for number in range(12)
    ]  # fmt: skip
    queue = SamplingQueue(policy)
    try:
        for request, ticket in [(one, queue.submit(one)) for one in asked]:
            rollout = generate(
                policy, [request.prompt], request.sampling, num_samples=request.num_samples, seed=request.seed
            )
            found = ticket.result(60)
            assert [one.ids for one in found] == [ids.tolist() for ids in rollout.completion_ids]
            for one, logps in zip(found, rollout.logps, strict=True):
                assert one.logps == pytest.approx(logps.tolist(), abs=1e-5)
        pieces_alone = sum(-(-len(one.ids) // 16) for request in asked for one in queue.submit(request).result(60))
        assert queue.num_turns < 12 + pieces_alone
        queue.call(lambda: None)
        assert not queue._cached.rows
    finally:
        queue.close()


def test_long_prompts_are_read_in_parts_between_which_others_draw(monkeypatch, policy):
    """Of three prompts that are read in parts, one is withdrawn. A short one is answered before they are read."""
    monkeypatch.setattr(sampling_queue, "READ_AT_ONCE", 8)
    complete, num_read, queue = sampling_queue.ENGINES["hf"], [], SamplingQueue(policy, own_thread=False)
    queue._in_parts = True

    def counted(policy, prompts, *request, cached):
        num_read.append(sum({tuple(ids): len(ids) - cached.num_tokens(row) for ids, row in zip(
            map(torch.Tensor.tolist, prompts), cached.now, strict=True) if len(ids) - cached.num_tokens(row) > 2}.values()))  # fmt: skip
        return complete(policy, prompts, *request, cached=cached)

    monkeypatch.setitem(sampling_queue.ENGINES, "hf", counted)
    sampling = Sampling(max_new_tokens=12, temperature=0.0)
    prompts = [[3 + (number * i) % 9 for i in range(45)] for number in (1, 2, 4)]
    long, gone, other = (queue.submit(SamplingRequest(prompt=ids, sampling=sampling, num_samples=2)) for ids in prompts)
    short = queue.submit(SamplingRequest(prompt=PROMPT, sampling=sampling))
    for _ in range(4):
        queue.take_turn(timeout=0)
    assert short.future.done()
    assert not long.completions[0].ids
    gone.cancel()
    while queue._active or queue._waiting:
        queue.take_turn(timeout=0)
    monkeypatch.undo()  # for `generate`
    assert max(num_read) <= 8 + 2
    assert sum(num_read) <= 2 * 45 + 30  # each prompt once, the other's first parts, and the short one
    for ticket, ids in ((long, prompts[0]), (other, prompts[2]), (short, PROMPT)):
        wanted = generate(policy, [ids], sampling).completion_ids[0].tolist()
        assert all(one.ids == wanted for one in ticket.result(0))
    assert not queue._cached.rows


def test_an_engine_that_caches_nothing_reads_long_prompts_at_once(monkeypatch, policy):
    monkeypatch.setattr(sampling_queue, "READ_AT_ONCE", 8)
    complete = sampling_queue.ENGINES["hf"]
    monkeypatch.setitem(sampling_queue.ENGINES, "hf", lambda *request, cached: complete(*request))
    queue, sampling = SamplingQueue(policy, own_thread=False), Sampling(max_new_tokens=4, temperature=0.0)
    queue._in_parts = True
    ticket = queue.submit(SamplingRequest(prompt=[3] * 30, sampling=sampling))
    for _ in range(3):
        queue.take_turn(timeout=0)
    monkeypatch.undo()
    assert ticket.result(0)[0].ids == generate(policy, [[3] * 30], sampling).completion_ids[0].tolist()


def test_rows_wait_for_memory(monkeypatch, policy):
    """At most so many tokens are held as there is memory for; the rest waits, and is drawn all the same."""
    num_bytes = 2 * decoding.engine_of(policy).shape.bytes_per_slot  # a piece copies them
    monkeypatch.setattr(sampling_queue, "free_memory", lambda: 130 * num_bytes / sampling_queue.SHARE_OF_MEMORY)
    monkeypatch.setattr(sampling_queue, "TOKENS_AT_FIRST", 50)
    queue = SamplingQueue(policy, own_thread=False)
    queue._in_parts, queue._max_tokens, held = True, 50, []
    sampling = Sampling(max_new_tokens=40)
    tickets = [queue.submit(SamplingRequest(prompt=[3] * 20, sampling=sampling, ignore_eos=True)) for _ in range(9)]
    while queue.take_turn(timeout=0):
        held.append(sum(row.room for row in queue._active))
    assert max(held) == 2 * 60 > held[0]
    assert all(len(ticket.result(0)[0].ids) == 40 for ticket in tickets)
    monkeypatch.undo()
    assert 1e6 < sampling_queue.free_memory() < 1e14


def test_calls_between_requests_see_no_row(policy):
    queue = SamplingQueue(policy)
    try:
        tickets = [queue.submit(SamplingRequest(prompt=PROMPT, sampling=Sampling(max_new_tokens=40))) for _ in range(3)]
        assert queue.call(lambda: len(queue._active)) == 0
        for ticket in tickets:
            ticket.result(60)
        with pytest.raises(ZeroDivisionError):
            queue.call(lambda: 1 / 0)
    finally:
        queue.close()
    with pytest.raises(RuntimeError, match="the sampling queue is closed"):
        queue.submit(tickets[0].request)


def test_an_engine_that_fails_fails_its_requests_alone(policy, monkeypatch):
    monkeypatch.setitem(sampling_queue.ENGINES, "hf", lambda *args, **options: 1 / 0)
    queue = SamplingQueue(policy)
    try:
        request = SamplingRequest(prompt=PROMPT, sampling=Sampling(max_new_tokens=4))
        with pytest.raises(ZeroDivisionError):
            queue.submit(request).result(60)
        monkeypatch.undo()
        assert len(queue.submit(request).result(60)[0].ids) >= 1
    finally:
        queue.close()


# ---- fields ----


def test_top_logprobs_are_the_most_probable_of_the_distribution(url, policy):
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0.7, "top_k": 3, "seed": 1, "logprobs": 5,
            "return_token_ids": True}  # fmt: skip
    choice = ask(url, "/v1/completions", body)[1]["choices"][0]
    tops = choice["logprobs"]["top_logprobs"]
    with torch.no_grad():
        logits_TV = policy.model(torch.tensor([PROMPT + choice["token_ids"]])).logits[0]
    wanted_TV = sampling_logps(logits_TV[2:-1], Sampling(temperature=0.7, top_k=3))
    for top, wanted_V, logp in zip(tops, wanted_TV, choice["logprobs"]["token_logprobs"], strict=True):
        values = wanted_V.topk(3).values.tolist()
        assert sorted(top.values(), reverse=True) == pytest.approx(values, abs=1e-5)
        assert any(logp == pytest.approx(value, abs=1e-5) for value in values)
    chat = {"messages": [{"role": "user", "content": "ab?"}], "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    content = ask(url, "/v1/chat/completions", chat)[1]["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(content)


@pytest.mark.parametrize("size", [1 << 26, 70])  # all places together, and one after the other
def test_echo_gives_the_prompt_with_its_log_probs(url, policy, monkeypatch, size):
    """Those of the model whatever the temperature; the most probable token's equals its own, bit for bit."""
    monkeypatch.setattr(sampling_queue, "LOGITS_AT_ONCE", size)
    body = {"prompt": [PROMPT, [9, 8, 7, 6, 5]], "max_tokens": 3, "logprobs": 2, "echo": True, "temperature": 0.5,
            "seed": 3, "ignore_eos": True, "return_token_ids": True}  # fmt: skip
    plain = ask(url, "/v1/completions", {**body, "echo": False})[1]["choices"]
    for prompt, choice, alone in zip(
        body["prompt"], ask(url, "/v1/completions", body)[1]["choices"], plain, strict=True
    ):
        found, n = choice["logprobs"], len(prompt)
        ids = prompt + choice["token_ids"]
        assert choice["token_ids"] == alone["token_ids"]
        assert choice["text"] == policy.tokenizer.decode(prompt) + alone["text"]  # special tokens too
        assert found["tokens"] == [policy.tokenizer.decode([token], skip_special_tokens=True) for token in ids]
        with torch.no_grad():
            logps_TV = policy.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        wanted = [logps_TV[i, ids[i + 1]].item() for i in range(n - 1)]
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        assert found["token_logprobs"][1:n] == pytest.approx(wanted, abs=1e-5)
        assert found["tokens"][n:] == alone["logprobs"]["tokens"]
        assert found["token_logprobs"][n:] == pytest.approx(alone["logprobs"]["token_logprobs"], abs=1e-5)
        assert [*map(list, found["top_logprobs"][n:])] == [*map(list, alone["logprobs"]["top_logprobs"])]
        for i, top in enumerate(found["top_logprobs"][1:n]):
            assert sorted(top.values(), reverse=True) == pytest.approx(logps_TV[i].topk(2).values.tolist(), abs=1e-5)
    likely = [5, policy.model(torch.tensor([[5]])).logits[0, -1].argmax().item()]
    (choice,) = ask(url, "/v1/completions", {**body, "prompt": likely})[1]["choices"]
    assert choice["logprobs"]["token_logprobs"][1] == max(choice["logprobs"]["top_logprobs"][1].values())


def test_echo_of_a_text_is_the_text(url, policy):
    body = {"prompt": "abc", "max_tokens": 2, "echo": True, "temperature": 0}
    (choice,) = ask(url, "/v1/completions", body)[1]["choices"]
    (alone,) = ask(url, "/v1/completions", {**body, "echo": False})[1]["choices"]
    assert (choice["text"], choice["logprobs"]) == ("abc" + alone["text"], None)
    (choice,) = ask(url, "/v1/completions", {**body, "prompt": [5], "logprobs": 0})[1]["choices"]  # nothing before it
    assert choice["logprobs"]["token_logprobs"][0] is choice["logprobs"]["top_logprobs"] is None
    for path, more in (("completions", {"stream": True}), ("chat/completions", {"messages": HELLO})):
        status, answer = ask(url, f"/v1/{path}", {**body, **more})
        assert (status, answer["error"]["message"][:18]) == (400, "echo must be false")


def test_min_p_leaves_out_improbable_tokens(url, policy):
    body = {"prompt": PROMPT, "max_tokens": 8, "min_p": 0.3, "seed": 2, "return_token_ids": True, "logprobs": 0}
    choice = ask(url, "/v1/completions", body)[1]["choices"][0]
    rollout = generate(policy, [PROMPT], Sampling(max_new_tokens=8, min_p=0.3), seed=2)
    assert choice["token_ids"] == rollout.completion_ids[0].tolist()
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(rollout.logps[0].tolist(), abs=1e-5)


def test_min_p_by_hand():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    found = sampling_logps(logits, Sampling(min_p=0.3)).exp()[0]  # at least 0.15
    torch.testing.assert_close(found, torch.tensor([0.5, 0.3, 0.15, 0.0]) / 0.95)
    found = sampling_logps(logits, Sampling(min_p=0.5, top_k=3)).exp()[0]
    torch.testing.assert_close(found, torch.tensor([0.5, 0.3, 0.0, 0.0]) / 0.8)


def test_a_stream_draws_what_the_request_without_one_draws(url):
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "ab"}]}], "max_tokens": 30, "seed": 3}
    whole = ask(url, "/v1/chat/completions", body)[1]
    stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
    lines = ask(url, "/v1/chat/completions", stream, raw=True)[1].split("\n\n")
    found = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in found[:-1])
    assert text == whole["choices"][0]["message"]["content"]
    assert found[-1]["usage"] == whole["usage"]
    assert found[-1]["choices"] == []


TOOLS_TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}


def serve_scripted(text, template):
    """A server whose model says this text."""
    tokenizer = hugging_face(template=template)
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()  # no blanks between tokens
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "{", "}", '"', "/"])
    policy = as_policy(llama(eos_token_id=1, vocab_size=len(tokenizer), max_position_embeddings=1024), tokenizer)
    ids = [*tokenizer.encode(text, add_special_tokens=False), 1]

    def complete(policy, prompts, sampling, num_samples, uniforms_BT, eos_ids, cached=None):
        said = len(prompts[0]) - complete.num_prompt
        row = torch.tensor(ids[said : said + sampling.max_new_tokens])
        return [row], [torch.zeros(len(row))]

    return ServedModel(policy, "tiny"), complete


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_come_in_openais_form(monkeypatch, stream):
    text = 'so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    served, complete = serve_scripted(text, TOOLS_TEMPLATE)
    monkeypatch.setitem(sampling_queue.ENGINES, "hf", complete)
    messages = [{"role": "user", "content": "1+1"}]
    tokenizer = served.policy.tokenizer
    prompt = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    complete.num_prompt = len(tokenizer.encode(prompt, add_special_tokens=False))
    server = OpenAIServer(served).start()
    try:
        body = {"messages": messages, "tools": [TOOL], "max_tokens": 200, "stream": stream}
        if stream:
            pieces = events(ask(server.url, "/v1/chat/completions", body, raw=True)[1])
            message, reason = pieces[-1]["delta"], pieces[-1]["finish_reason"]
            assert message["tool_calls"][0]["index"] == 0
        else:
            choice = ask(server.url, "/v1/chat/completions", body)[1]["choices"][0]
            message, reason = choice["message"], choice["finish_reason"]
        (call,) = message["tool_calls"]
        assert (call["type"], call["function"]["name"]) == ("function", "add")
        assert json.loads(call["function"]["arguments"]) == {"a": 1}
        assert (message["content"], reason) == ("so", "tool_calls")
    finally:
        server.stop()
        served.close()


def test_tools_that_the_template_does_not_write_are_refused(policy):
    served = ServedModel(policy, "tiny")
    server = OpenAIServer(served).start()
    try:
        body = {"messages": [{"role": "user", "content": "ab"}], "tools": [TOOL], "max_tokens": 2}
        status, answer = ask(server.url, "/v1/chat/completions", body)
        assert status == 400
        assert "the model's chat template does not write them" in answer["error"]["message"]
        assert ask(server.url, "/v1/chat/completions", {**body, "tool_choice": "none"})[0] == 200
    finally:
        server.stop()
        served.close()


def test_the_command_needs_a_key_before_it_loads_a_model():
    found = CliRunner().invoke(app, ["serve", "no-such-model", "--host", "0.0.0.0"], env={"STROP_API_KEY": None})
    assert found.exit_code != 0
    assert "api_key must be given where other machines can ask" in str(found.exception)
