"""JSON mode of the server: replies match their schema, and are drawn from the model's distribution over what is allowed."""

import copy
import json
import re
import urllib.error
import urllib.request

import pytest
import torch
from chat_templates import PEERS, TEMPLATES, real_tokenizer
from chat_templates import tokenizer as tokenizer_of

from strop.data.batch import TokenBatch, Trajectory
from strop.models import as_policy
from strop.moe.torch import MoEForCausalLM
from strop.rollout import decoding, grammar, native, plain, transformers_generate
from strop.rollout.grammar import Grammars, allowed_bits, restricted
from strop.rollout.openai_requests import parse_chat_request, parse_text_request
from strop.rollout.openai_server import OpenAIServer
from strop.rollout.sampling import Sampling, uniforms
from strop.rollout.sampling_queue import SamplingQueue, SamplingRequest
from strop.rollout.served_model import RequestError, ServedModel
from strop.tasks import CharTokenizer
from tests.trained_models import tiny_moe

pytest.importorskip("llguidance")
transformers = pytest.importorskip("transformers")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob"]}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 200, "temperature": 0.7, "seed": 1}


@pytest.fixture(scope="module")
def policy():
    torch.manual_seed(0)
    tokenizer = tokenizer_of("smollm2")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer) + 3, max_position_embeddings=512, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return as_policy(model, tokenizer)


@pytest.fixture(scope="module")
def served(policy):
    model = ServedModel(policy, "tiny")
    yield model
    model.close()


def answers(served, asked):
    return [one for request in asked.sampling_requests(served) for one in served.queue.submit(request).result(60)]


def test_replies_match_their_schema(served):
    asked = parse_chat_request({**CHAT, "n": 6, "response_format": FORMAT}, served)
    found = answers(served, asked)
    assert len(found) == 6
    for one in found:
        reply = json.loads(served.decode(one.ids))
        assert reply.keys() == {"name", "old"}
        assert reply["name"] in ("ada", "bob")
        assert isinstance(reply["old"], bool)
        assert one.reason == "stop"
    assert len({served.decode(one.ids) for one in found}) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_of_a_schema_is_a_stop(caller, stream):
    _, url, _ = caller
    body = {
        **CHAT,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["ada"]}}},
        "stream": stream,
    }
    text = post(url, body)[1]
    pieces = (
        [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]] if stream else [json.loads(text)]
    )
    assert pieces[-1]["choices"][0]["finish_reason"] == "stop"


def test_any_object_is_json_mode(served):
    asked = parse_text_request(
        {"prompt": "a", "max_tokens": 40, "temperature": 0, "response_format": {"type": "json_object"}}, served
    )
    (one,) = answers(served, asked)
    assert served.decode(one.ids).lstrip().startswith("{")
    if one.reason != "length":
        assert isinstance(json.loads(served.decode(one.ids)), dict)


@pytest.mark.parametrize("temperature", [0, 1])
def test_log_probs_are_those_of_the_allowed_tokens(policy, temperature):
    """Every token's log-prob and the most probable ones, from a forward over the whole reply without what is not allowed."""
    grammar = Grammars(policy.tokenizer, policy.vocab_size, policy.eos_ids).of_schema(SCHEMA)
    queue = SamplingQueue(policy)
    sampling = Sampling(max_new_tokens=200, temperature=temperature)
    prompt = policy.tokenizer.encode("abc")
    asked = SamplingRequest(prompt=prompt, sampling=sampling, grammar=grammar, seed=5, num_top=3)
    (one,) = queue.submit(asked).result(60)
    queue.close()
    with torch.no_grad():
        logits_TV = policy.model(torch.tensor([prompt + one.ids])).logits[0, len(prompt) - 1 : -1]
    matcher = grammar.matcher()
    for token, logp, top, logits_V in zip(one.ids, one.logps, one.top, logits_TV, strict=True):
        allowed_V = restricted(torch.zeros(1, len(logits_V)), allowed_bits([matcher]))[0] == 0
        assert allowed_V[token]
        assert not allowed_V.all()
        wanted_V = logits_V.masked_fill(~allowed_V, -torch.inf).log_softmax(-1)
        assert logp == pytest.approx(wanted_V[token].item(), abs=1e-5)
        assert temperature or token == wanted_V.argmax()
        assert [id for id, _ in top] == wanted_V.topk(min(3, int(allowed_V.sum()))).indices.tolist()
        assert [logp for _, logp in top] == pytest.approx([wanted_V[id].item() for id, _ in top], abs=1e-5)
        matcher.take(token)
    assert matcher.ended


def longrope(tokenizer):
    """A model whose rotation is another one beyond 32 tokens: a row is continued there after it is read again."""
    config = transformers.Phi3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=512, original_max_position_embeddings=32, pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0, 5.0, 6.0, 7.0],
        },
    )  # fmt: skip
    return as_policy(transformers.Phi3ForCausalLM(config).eval(), tokenizer)


def experts(tokenizer):
    return as_policy(MoEForCausalLM(tiny_moe(vocab_size=len(tokenizer), max_seq_len=512)), tokenizer)


WAYS = {
    "engine": (None, decoding.complete),
    "generate": (None, transformers_generate.complete),
    "generate by length": (None, transformers_generate.complete_by_length),
    "forwards": (None, plain.complete),
    "sides": (longrope, decoding.complete),
    "MoE": (experts, native.complete),
}


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("name", WAYS)
def test_every_engine_draws_from_the_allowed_tokens(policy, name, temperature):
    """Rows with two grammars and without one, side by side; log-probs are held against forwards."""
    make, complete = WAYS[name]
    policy = policy if make is None else make(policy.tokenizer)
    grammars = Grammars(policy.tokenizer, policy.vocab_size, policy.eos_ids)
    long, short = (grammars.of_schema({"enum": words}) for words in (["x" * 50, "y" * 40], ["abcdef"]))
    prompts = [torch.tensor(policy.tokenizer.encode(text)) for text in ("abc", "a longer one", "b", "abc")]
    matchers = [long.matcher(), None, short.matcher(), long.matcher()]
    sampling = Sampling(max_new_tokens=90, temperature=temperature)
    uniforms_BT = uniforms(3, range(4), 1, 90)
    eos_ids = policy.eos_ids
    with torch.no_grad():
        ids_B, logps_B = complete(policy, prompts, sampling, 1, uniforms_BT, eos_ids, matchers=matchers)
    assert policy.tokenizer.decode(ids_B[2], skip_special_tokens=True) == '"abcdef"'
    for row, (rules, matcher) in enumerate(zip((long, None, short, long), matchers, strict=True)):
        ids, follows = ids_B[row].tolist(), None if rules is None else rules.matcher()
        ends = (
            range(1, len(ids) + 1) if name == "sides" else [len(ids)]
        )  # a token's side is that of the row as it ended there
        with torch.no_grad():
            parts = [policy.logits(TokenBatch.of([Trajectory.of(prompts[row], ids_B[row][:end])])) for end in ends]
        logits_TV = (parts[0] if len(parts) == 1 else torch.stack([part[-1] for part in parts])).float()
        for token, logp, logits_V in zip(ids, logps_B[row].tolist(), logits_TV, strict=True):
            allowed_1V = logits_V[None] if follows is None else restricted(logits_V[None], allowed_bits([follows]))
            wanted_V = allowed_1V[0].log_softmax(-1)
            assert logp == pytest.approx(wanted_V[token].item(), abs=1e-4)
            if follows is not None:
                follows.take(token)
        if matcher is not None:
            assert matcher.num_tokens == len(ids)
            assert matcher.ended
            assert len(set(json.loads(policy.tokenizer.decode(ids, skip_special_tokens=True)))) in (1, 6)


def test_a_grammar_that_fails_ends_its_own_request_alone(served, monkeypatch):
    """llguidance has limits that a grammar may reach in the middle of a reply."""
    failing, fine, free = (
        parse_chat_request(body, served).sampling_requests(served)[0]
        for body in ({**CHAT, "response_format": FORMAT}, {**CHAT, "response_format": FORMAT, "seed": 2}, CHAT)
    )
    alone = [served.queue.submit(one).result(60)[0].ids for one in (fine, free)]
    take, broken = grammar.Matcher.take, []

    def breaks(self, token):
        take(self, token)
        if not broken or self is broken[0]:
            broken[:] = [self]
            self.error = "too complex"

    monkeypatch.setattr(grammar.Matcher, "take", breaks)
    pieces = []
    tickets = [served.queue.submit(failing, lambda *piece: pieces.append(piece))]
    tickets += [served.queue.submit(one) for one in (fine, free)]
    with pytest.raises(ValueError, match="too complex"):
        tickets[0].result(60)
    assert not pieces
    assert [one.result(60)[0].ids for one in tickets[1:]] == alone


def test_rows_with_and_without_a_grammar_draw_what_they_draw_alone(served):
    bodies = [{**CHAT, "response_format": FORMAT}, CHAT, {**CHAT, "response_format": FORMAT, "seed": 2}]
    alone = [answers(served, parse_chat_request(body, served))[0].ids for body in bodies]
    requests = [parse_chat_request(body, served).sampling_requests(served)[0] for body in bodies]
    tickets = [served.queue.submit(request) for request in requests]
    assert [ticket.result(60)[0].ids for ticket in tickets] == alone
    assert len({request.rule for request in requests}) == 1  # so that they are decoded together


def test_a_reply_that_is_cut_says_so(served):
    (one,) = answers(served, parse_chat_request({**CHAT, "max_tokens": 3, "response_format": FORMAT}, served))
    assert (len(one.ids), one.reason) == (3, "length")


@pytest.mark.parametrize(
    ("found", "match"),
    [
        ("json", "must be of type"),
        ({"type": "xml"}, "found 'xml'"),
        ({"type": "json_schema"}, "json_schema with a schema"),
        ({"type": "json_schema", "json_schema": {"schema": 5}}, "json_schema with a schema"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}, "schema that can be followed"),
        ({"type": "json_schema", "json_schema": {"schema": {"$ref": "http://x/y"}}}, "schema that can be followed"),
    ],
)
def test_bad_formats_are_refused(served, found, match):
    with pytest.raises(ValueError, match=match):
        parse_chat_request({**CHAT, "response_format": found}, served)


def test_what_json_mode_cannot_do_is_refused(served):
    letters = ServedModel(as_policy(tiny_moe(), CharTokenizer("0123456789+= ")), "moe")
    try:
        with pytest.raises(ValueError, match="needs a fast tokenizer of transformers, found a CharTokenizer"):
            parse_text_request({"prompt": "1", "response_format": {"type": "json_object"}}, letters)
    finally:
        letters.close()


# ---- forced calls ----

TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {
        "type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}}, "required": ["a", "b"],
        "additionalProperties": False}}},
    {"type": "function", "function": {"name": "stop", "description": "Stop."}},
]  # fmt: skip
NAMED = {"type": "function", "function": {"name": "add"}}
ASKED = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 300, "seed": 1, "tools": TOOLS}
CALLS = {"qwen": tokenizer_of, "llama": tokenizer_of, "qwen2_5": real_tokenizer, "qwen3_instruct_2507": real_tokenizer,
         "llama3_1": real_tokenizer}  # fmt: skip


def tiny(tokenizer):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=4096, **sizes)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return as_policy(model, tokenizer)


def calling(tokenizer):
    return ServedModel(tiny(tokenizer), "tiny")


@pytest.fixture(scope="module", params=[name for name in CALLS if name in TEMPLATES or PEERS.is_dir()])
def caller(request):
    tokenizer = copy.deepcopy(CALLS[request.param](request.param))
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])  # single tokens, as in Qwen's own tokenizer
    served = calling(tokenizer)
    server = OpenAIServer(served).start()
    yield served, server.url, request.param.startswith("llama")
    server.stop()
    served.close()


def post(url, body):
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]["message"]


def check_call(function):
    arguments = json.loads(function["arguments"])
    if function["name"] == "stop":
        assert arguments == {}
        return
    assert function["name"] == "add"
    assert arguments.keys() == {"a", "b"}
    assert arguments["a"] in (1, 2)
    assert isinstance(arguments["b"], bool)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_is_a_call_whatever_the_model_is(caller, choice, stream):
    _, url, single = caller
    names = set()
    for seed in range(4):
        status, text = post(url, {**ASKED, "tool_choice": choice, "stream": stream, "seed": seed})
        assert status == 200, text
        if stream:
            pieces = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]
            assert all(not piece["choices"][0]["delta"].get("content") for piece in pieces)
            found = pieces[-1]["choices"][0]
            message = found["delta"]
            assert [call["index"] for call in message["tool_calls"]] == list(range(len(message["tool_calls"])))
        else:
            (found,) = json.loads(text)["choices"]
            message = found["message"]
        assert found["finish_reason"] == "tool_calls"
        assert not message["content"]
        for call in message["tool_calls"]:
            check_call(call["function"])
            names.add(call["function"]["name"])
        if single or choice == NAMED:
            assert len(message["tool_calls"]) == 1
    assert names <= ({"add", "stop"} if choice == "required" else {"add"})


def calls_in(served, completion):
    reply = served.decode(completion.ids, special_tokens=True)
    return served.calls(reply.removesuffix(served.policy.tokenizer.eos_token), TOOLS)


def test_several_calls_are_allowed_unless_told_otherwise(caller):
    served, _, single = caller
    found = {}
    for parallel in (True, False):
        body = {**ASKED, "tool_choice": "required", "parallel_tool_calls": parallel, "n": 24, "max_tokens": 3000}
        asked = parse_chat_request(body, served)
        replies = [calls_in(served, one) for one in answers(served, asked)]
        assert all(replies)
        found[parallel] = {len(calls) for calls in replies}
    assert found[False] == {1}
    assert max(found[True]) == 1 if single else max(found[True]) > 1


def test_a_forced_call_is_what_the_template_writes(caller):
    """The forced text is the template's own rendering of the calls, except for blanks in the arguments."""
    served, _, _ = caller
    tokenizer = served.policy.tokenizer
    body = {**ASKED, "tool_choice": "required", "temperature": 1, "seed": 3}
    asked = parse_chat_request(body, served)
    (one,) = answers(served, asked)
    reply = tokenizer.decode(one.ids)
    calls = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls_in(served, one)
    ]
    options = {"tools": TOOLS, "tokenize": False}
    prompt = tokenizer.apply_chat_template(asked.given[0], add_generation_prompt=True, **options)
    assert served.decode(asked.prompts[0], special_tokens=True) == prompt
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    whole = tokenizer.apply_chat_template([*asked.given[0], said], **options)
    reply = reply.removesuffix(tokenizer.eos_token)
    assert re.sub(r"\s", "", whole).startswith(re.sub(r"\s", "", prompt + reply))
    added = [token for token in one.ids if token in tokenizer.added_tokens_decoder]
    again = [
        token for token in tokenizer.encode(reply, add_special_tokens=False) if token in tokenizer.added_tokens_decoder
    ]
    assert [token for token in added if token != tokenizer.eos_token_id] == again  # tags are single tokens


def test_a_forced_call_that_is_cut_is_text(caller):
    _, url, _ = caller
    status, text = post(url, {**ASKED, "tool_choice": NAMED, "max_tokens": 3})
    (found,) = json.loads(text)["choices"]
    assert (status, found["finish_reason"]) == (200, "length")
    assert "tool_calls" not in found["message"]


def test_forced_calls_and_free_text_are_decoded_together(caller):
    served, _, _ = caller
    bodies = [
        {**ASKED, "tool_choice": NAMED},
        ASKED,
        {**ASKED, "tool_choice": "required"},
        {**CHAT, "tool_choice": "none"},
    ]
    alone = [answers(served, parse_chat_request(body, served))[0].ids for body in bodies]
    requests = [parse_chat_request(body, served).sampling_requests(served)[0] for body in bodies]
    tickets = [served.queue.submit(request) for request in requests]
    assert [ticket.result(60)[0].ids for ticket in tickets] == alone


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tool_choice": "always"}, 'tool_choice must be "auto", "none", "required" or a function'),
        ({"tool_choice": 5}, "tool_choice must be"),
        ({"tool_choice": {}}, "with the name of one"),
        ({"tool_choice": {"type": "function", "function": "add"}}, "with the name of one"),
        ({"tool_choice": {"type": "custom", "function": {"name": "add"}}}, "must be of type function"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "must name one of the tools, found 'sub'"),
        ({"tool_choice": "required", "tools": None}, "tools must be given for tool_choice 'required'"),
        ({"tool_choice": NAMED, "tools": []}, "tools must be given"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "must be text where a call is forced"),
        ({"parallel_tool_calls": False}, "must be true where no call is forced"),
        ({"parallel_tool_calls": 0}, "must be true or false"),
        ({"tool_choice": "required", "messages": [{"role": "assistant", "content": "a"}]}, "last message is the assistant's"),
        ({"tool_choice": "required", "tools": [{"function": {"name": "a b"}}]}, "letters, digits and _.-"),
        ({"tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": 5}}]}, "that are a JSON schema"),
        ({"tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": {"type": "no"}}}]}, "can be followed"),
        (
            {"tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": {"$ref": "http://x/y"}}}]},
            "tools must have a schema that can be followed",
        ),
    ],
)  # fmt: skip
def test_forced_calls_that_cannot_be_are_refused(caller, changes, says):
    _, url, _ = caller
    status, told = post(url, {**ASKED, **changes})
    assert status == 400, told
    assert says in told


@pytest.mark.skipif(not PEERS.is_dir(), reason="make has not laid TRL's templates into this environment")
@pytest.mark.parametrize(
    ("name", "why"),
    [("glm4moe", "does not write the arguments of calls as JSON"), ("lfm2", "does not write calls")],
)
def test_a_format_without_a_grammar_is_refused_with_the_reason(name, why):
    served = calling(real_tokenizer(name))
    try:
        with pytest.raises(RequestError, match=f"tool_choice must be auto or none: the model's chat template {why}"):
            parse_chat_request({**ASKED, "tool_choice": "required"}, served)
    finally:
        served.close()


def test_tools_of_a_template_whose_calls_cannot_be_read_are_refused():
    tokenizer = copy.deepcopy(tokenizer_of("qwen"))
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "(call.function | tojson)", "call.function.name ~ call.function.arguments.items()"
    )
    other = calling(tokenizer)
    try:
        for choice in ("auto", "required"):
            with pytest.raises(
                RequestError, match="tools must be none: tool calls of this chat template cannot be read"
            ):
                parse_chat_request({**ASKED, "tool_choice": choice}, other)
        parse_chat_request({**ASKED, "tool_choice": "none"}, other)
    finally:
        other.close()
