"""JSON mode of the server: replies match their schema, and are drawn from the model's distribution over what is allowed."""

import json

import pytest
import torch
from chat_templates import tokenizer as tokenizer_of

from strop.models import as_policy
from strop.rollout.grammar import Grammars, allowed_bits, restricted
from strop.rollout.openai_requests import parse_chat_request, parse_text_request
from strop.rollout.sampling import Sampling
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
    """Every token's log-prob, from a forward over the whole reply with what is not allowed left out."""
    grammar = Grammars(policy.tokenizer, policy.vocab_size, policy.eos_ids).of_schema(SCHEMA)
    queue = SamplingQueue(policy)
    sampling = Sampling(max_new_tokens=200, temperature=temperature)
    prompt = policy.tokenizer.encode("abc")
    (one,) = queue.submit(SamplingRequest(prompt=prompt, sampling=sampling, grammar=grammar, seed=5)).result(60)
    queue.close()
    with torch.no_grad():
        logits_TV = policy.model(torch.tensor([prompt + one.ids])).logits[0, len(prompt) - 1 : -1]
    matcher = grammar.matcher()
    for token, logp, logits_V in zip(one.ids, one.logps, logits_TV, strict=True):
        allowed_V = restricted(torch.zeros(1, len(logits_V)), allowed_bits([matcher]))[0] == 0
        assert allowed_V[token]
        assert not allowed_V.all()
        wanted_V = logits_V.masked_fill(~allowed_V, -torch.inf).log_softmax(-1)
        assert logp == pytest.approx(wanted_V[token].item(), abs=1e-5)
        assert temperature or token == wanted_V.argmax()
        matcher.take(token)
    assert matcher.ended


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
    with pytest.raises(RequestError, match="top_logprobs must be 0 with response_format"):
        parse_chat_request({**CHAT, "logprobs": True, "top_logprobs": 2, "response_format": FORMAT}, served)
    letters = ServedModel(as_policy(tiny_moe(), CharTokenizer("0123456789+= ")), "moe")
    try:
        with pytest.raises(ValueError, match="needs a fast tokenizer of transformers, found a CharTokenizer"):
            parse_text_request({"prompt": "1", "response_format": {"type": "json_object"}}, letters)
    finally:
        letters.close()
