"""`strop serve`: OpenAI's protocol over strop's engine. Answers are held against `generate`, number by number."""

import json
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest
import torch
from tiny_models import llama
from tiny_tokenizers import hugging_face

from strop.models import as_policy
from strop.rollout import Sampling, generate
from strop.rollout.openai_server import OpenAIServer
from strop.rollout.served_model import RequestError, ServedModel

PROMPT = [5, 6, 7]


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
    command = [sys.executable, "-m", "strop", "serve", str(tmp_path), "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = next(line for line in process.stderr if "serving" in line)
            url = line.split(" at ")[1].strip()
            body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
            found = ask(url, "/v1/completions", body)[1]["choices"][0]["token_ids"]
            assert ask(url, "/collective_rpc", {"method": "reload_weights"})[0] == 404
            process.terminate()  # not SIGINT, which programs started in the background ignore
            assert process.wait(timeout=60) == -signal.SIGTERM
        finally:
            process.kill()
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
