"""Tool calls through the server, in and out, with every chat template that TRL ships."""

import json

import pytest
from chat_templates import PEERS
from data.test_tool_calls import FILES, tokens_of, written
from tiny_models import llama

from strop.data.tool_calls import EXAMPLE, NAME, Call, call_format, example_tools
from strop.models import as_policy
from strop.rollout.openai_answers import CutCompletion, chat_message
from strop.rollout.openai_requests import parse_chat_request
from strop.rollout.served_model import ServedModel

pytestmark = pytest.mark.skipif(not PEERS.is_dir(), reason="make has not laid TRL's templates into this environment")
ASKED = [{"role": "user", "content": "?"}]
OTHERS = {"muse_glimmer", "deepseekv3"}  # no parser reads its calls; it writes calls, but no tools
WRITING = [name for name in FILES if name not in OTHERS and call_format(tokens_of(name)).example]
RESULT = {"role": "tool", "tool_call_id": "call00000", "name": NAME, "content": "13"}


@pytest.fixture(params=WRITING)
def served(request):
    tokens = tokens_of(request.param)
    model = llama(eos_token_id=tokens.eos_token_id, vocab_size=len(tokens), max_position_embeddings=8192)
    served = ServedModel(as_policy(model, tokens), "tiny")
    yield served
    served.close()


def answered(served, text):
    """The message and the finish reason of a completion with this text and EOS."""
    tokens = served.policy.tokenizer
    ids = [*tokens.encode(text, add_special_tokens=False), tokens.eos_token_id]
    asked = parse_chat_request({"messages": ASKED, "tools": example_tools()}, served)
    return chat_message(asked, served, CutCompletion(ids, [0.0] * len(ids), [], served.decode(ids[:-1]), "stop"))


def test_a_call_comes_in_openais_form_and_goes_back_as_the_template_writes_it(served):
    tokens, found = served.policy.tokenizer, served.call_format
    message, reason = answered(served, written(tokens, found, [Call(NAME, EXAMPLE)], example_tools()))
    assert reason == "tool_calls"
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (NAME, EXAMPLE)
    assert not message["content"] or "think" in message["content"]  # Qwen3's empty thinking
    call["id"] = RESULT["tool_call_id"]
    asked = parse_chat_request({"messages": [*ASKED, message, RESULT], "tools": example_tools()}, served)
    again = found.as_template_takes(asked.given[0])
    wanted = tokens.apply_chat_template(again, tools=example_tools(), tokenize=False, add_generation_prompt=True)
    assert served.decode(asked.prompts[0], special_tokens=True) == wanted
    assert "some words" in wanted


def test_a_text_is_a_text(served):
    message, reason = answered(served, "It is {3}.")
    assert (message.get("tool_calls"), reason) == (None, "stop")
    harmony = served.call_format.name == "harmony"  # without a channel it is for nobody to read
    assert message["content"] == ("" if harmony else "It is {3}.")


def test_past_calls_of_deepseek_are_texts_in_its_template():
    """The template joins the arguments to its text, so an object, as clients' calls are read, is an error in it."""
    tokens = tokens_of("deepseekv3")
    model = llama(eos_token_id=tokens.eos_token_id, vocab_size=len(tokens), max_position_embeddings=8192)
    served = ServedModel(as_policy(model, tokens), "tiny")
    try:
        call = {"id": "call00000", "type": "function", "function": {"name": NAME, "arguments": json.dumps(EXAMPLE)}}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        asked = parse_chat_request({"messages": [*ASKED, said, RESULT]}, served)
        text = served.decode(asked.prompts[0], special_tokens=True)
        assert f"<｜tool▁sep｜>{NAME}\n```json\n{json.dumps(EXAMPLE)}\n```" in text
        assert asked.given[0][1]["tool_calls"][0]["function"]["arguments"] == EXAMPLE
    finally:
        served.close()


def test_an_answer_of_gpt_oss_is_its_last_channel():
    tokens = tokens_of("gptoss")
    served = ServedModel(as_policy(llama(eos_token_id=tokens.eos_token_id, vocab_size=len(tokens)), tokens), "tiny")
    try:
        said = "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>It is 3."
        asked = parse_chat_request({"messages": ASKED, "tools": example_tools(), "max_tokens": 1}, served)
        ids = tokens.encode(said, add_special_tokens=False)
        message, reason = chat_message(asked, served, CutCompletion(ids, [], [], served.decode(ids), "stop"))
        assert (message["content"], message["reasoning_content"], reason) == ("It is 3.", "so", "stop")
    finally:
        served.close()


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_5_nothink", "gemma4"])
def test_words_before_a_call_stay(name):
    tokens = tokens_of(name)
    model = llama(eos_token_id=tokens.eos_token_id, vocab_size=len(tokens), max_position_embeddings=8192)
    served = ServedModel(as_policy(model, tokens), "tiny")
    try:
        text = written(tokens, served.call_format, [Call(NAME, EXAMPLE)], example_tools())
        message, reason = answered(served, f"I add.\n{text}")
        assert (message["content"], len(message["tool_calls"]), reason) == ("I add.", 1, "tool_calls")
    finally:
        served.close()
