"""Conversations as ids that only grow, in the chat templates of well-known models."""

import copy

import pytest
import torch
from chat_templates import TEMPLATES, tokenizer

from strop.data import templates
from strop.environments import Chat
from strop.tasks import CharTokenizer

USER = {"role": "user", "content": "the inn?"}
TOOL = {"role": "tool", "content": "13"}
appending = pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "qwen3"])


def drawn(tokens, text):
    ids = tokens.encode(text, add_special_tokens=False)
    return ids, torch.zeros(len(ids))


@appending
@pytest.mark.parametrize("new", [[USER], [TOOL], [TOOL, TOOL], "and?"], ids=["user", "tool", "tools", "text"])
def test_three_turns_are_the_templates_text(name, new):
    """What the model read and drew, decoded, is what the template writes; ids are those of the parts."""
    tokens, end = tokenizer(name), TEMPLATES[name][3]
    space = " " if name == "mistral" else ""
    dialogue = Chat(tokens).begin([USER])
    messages = [USER]
    for said in ("ooh, all", "in", "the"):
        before = list(dialogue.ids)
        ids, logps = drawn(tokens, f"{space}{said}{end}")
        assert dialogue.draw(ids, logps).strip() == said
        assert dialogue.ids == before + ids
        dialogue.hear(new)
        messages += [
            {"role": "assistant", "content": said},
            *([{"role": "user", "content": new}] if new == "and?" else new),
        ]
    assert tokens.decode(dialogue.ids) == templates.render_prompt(messages, tokens)
    assert [tokens.decode(dialogue.ids[i]) for i in range(len(dialogue.ids)) if dialogue.drawn[i]] == [
        tokens.decode(i) for said in ("ooh, all", "in", "the") for i in drawn(tokens, f"{space}{said}{end}")[0]
    ]
    assert [message["role"] for message in dialogue.conversation()] == [message["role"] for message in messages]
    assert dialogue.spans == [len(drawn(tokens, f"{space}{said}{end}")[0]) for said in ("ooh, all", "in", "the")]


def test_ids_that_no_encoder_would_make_stay_as_drawn():
    """t, h, e one by one: encoding the text again would give one token, "the"."""
    tokens = tokenizer("qwen")
    letters = tokens.convert_tokens_to_ids(["t", "h", "e", "<|im_end|>"])
    assert tokens.encode("the") != letters[:3]
    dialogue = Chat(tokens).begin([USER])
    assert dialogue.draw(letters, torch.zeros(4)) == "the"
    dialogue.hear([USER])
    assert dialogue.ids[dialogue.num_prompt : dialogue.num_prompt + 4] == letters
    assert dialogue.drawn[dialogue.num_prompt :][:5] == [True, True, True, True, False]


def test_another_end_than_the_templates_takes_its_place():
    tokens = tokenizer("phi")
    dialogue = Chat(tokens).begin([USER])
    dialogue.draw(*drawn(tokens, "in<|endoftext|>"))
    dialogue.hear([USER])
    assert tokens.decode(dialogue.ids).endswith("in<|endoftext|>\n<|user|>\nthe inn?<|end|>\n<|assistant|>\n")


@pytest.mark.parametrize("end", ["<|python_tag|>", "<|eot_id|>", "<|begin_of_text|>"])
def test_any_special_token_at_which_the_model_stops_ends_its_turn(end):
    """As Llama's <|eom_id|> behind calls, which its tokenizer does not name: it is no word, and takes the end's place."""
    tokens = tokenizer("llama")
    stops = tokens.convert_tokens_to_ids(["<|python_tag|>", "<|begin_of_text|>", "e"])
    dialogue = Chat(tokens, stop_ids=stops).begin([USER])
    assert dialogue.draw(*drawn(tokens, f"in{end}"), special_tokens=True) == "in"
    dialogue.hear([TOOL])
    assert f"in{end}<|start_header_id|>ipython" in tokens.decode(dialogue.ids)
    assert dialogue.draw(*drawn(tokens, "e")) == "e"  # a letter is a word all the same


def test_where_the_next_turns_opening_ends_the_last_it_stands_once():
    """As in GLM: the model stops at the role that follows, or at EOS, which is no role."""
    tokens = with_template("{% for m in messages %}<|im_start|>{{ m.role + m.content }}{% endfor %}"
                           "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}")  # fmt: skip
    for end in ("<|im_start|>", "<|im_end|>"):
        dialogue = Chat(tokens, stop_ids=tokens.convert_tokens_to_ids(["<|im_start|>"])).begin([USER])
        assert dialogue.draw(*drawn(tokens, f"in{end}")) == "in"
        dialogue.hear([USER])
        opening = end + "user" if end == "<|im_start|>" else end + "<|im_start|>user"
        assert tokens.decode(dialogue.ids).endswith(f"assistantin{opening}the inn?<|im_start|>assistant")


def test_a_template_that_forgets_thinking_is_refused_or_kept_as_drawn():
    tokens = tokenizer("qwen3")
    with pytest.raises(ValueError, match=r"rewrites an earlier turn's thinking .* rewritten_turns=\"keep\""):
        Chat(tokens)
    dialogue = Chat(tokens, rewritten_turns="keep").begin([USER])
    dialogue.draw(*drawn(tokens, "<think>\nin\n</think>\n\nthe<|im_end|>"))
    dialogue.hear([USER])
    assert "<think>\nin\n</think>\n\nthe<|im_end|>\n<|im_start|>user\nthe inn?" in tokens.decode(dialogue.ids)


def test_text_without_a_template_follows_as_it_is():
    tokens = CharTokenizer("0123456789<>?")
    dialogue = Chat(tokens).begin("?")
    assert dialogue.draw([*tokens.encode("7"), 1], torch.zeros(2)) == "7"
    dialogue.hear("<")
    assert tokens.decode(dialogue.ids) == "?7<eos><"
    assert dialogue.drawn == [False, True, True, False]
    with pytest.raises(TypeError, match="messages must be a str as the first were, found messages"):
        dialogue.hear([USER])


@pytest.mark.parametrize(
    ("new", "match"),
    [
        ([5, 6], r"must be messages or a text as the first were, found \[5, 6\]"),
        ([{"role": "user"}], "a message must have a role and a content, found {'role': 'user'}"),
        ([{"content": "?"}], "must have a role and a content"),
        ([{"role": "user", "content": None}], "must have a role and a content"),
        ([USER, "?"], "must have a role and a content, found '\\?'"),
    ],
)
def test_what_is_no_message_is_not_written_into_the_conversation(new, match):
    tokens = tokenizer("qwen")
    dialogue = Chat(tokens).begin([USER])
    dialogue.draw(*drawn(tokens, "in<|im_end|>"))
    with pytest.raises(TypeError, match=match):
        dialogue.hear(new)
    if new != [5, 6]:
        with pytest.raises(TypeError, match=match):
            Chat(tokens).begin(new)


def test_ids_without_a_tokenizer():
    dialogue = Chat(None).begin([5, 6])
    assert dialogue.draw([7, 8], torch.zeros(2)) == [7, 8]
    dialogue.hear([9])
    assert dialogue.ids == [5, 6, 7, 8, 9]


def test_messages_that_do_not_fit_are_left_out():
    tokens = CharTokenizer("0123456789<>?")
    dialogue = Chat(tokens).begin("?")
    dialogue.draw([2, 1], torch.zeros(2))
    assert not dialogue.hear("<<", longest=4)
    assert (dialogue.ids, len(dialogue.messages)) == ([14, 2, 1], 1)
    assert dialogue.hear("<", longest=4)


def test_tools_stand_in_the_prompt():
    for name in ("qwen", "llama"):
        assert '"description": "Adds."' in tokenizer(name).decode(Chat(tokenizer(name), [ADD]).begin([USER]).ids)


def test_a_rows_own_options_are_the_templates_in_every_turn():
    tokens = with_template(
        "{% for m in messages %}"
        + ONE
        + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{{ '' if thinks else 'No thinking.' }}{% endif %}"
    )
    for row, quiet in (({}, "No thinking."), ({"chat_template_kwargs": {"thinks": True}, "x": 1}, "")):
        dialogue = Chat(tokens, rewritten_turns="keep").begin([USER], row)
        dialogue.draw(*drawn(tokens, "in<|im_end|>"))
        dialogue.hear([USER])
        turn = f"<|im_start|>user\nthe inn?<|im_end|>\n<|im_start|>assistant\n{quiet}"
        assert tokens.decode(dialogue.ids) == f"{turn}in<|im_end|>\n{turn}"


def test_with_a_template_a_text_is_a_message_of_the_users():
    tokens = tokenizer("qwen")
    assert Chat(tokens).begin("the inn?").ids == Chat(tokens).begin([USER]).ids


@pytest.mark.parametrize("text", ["§ 5 of the law", "§", "§§ and §§§"])
def test_people_may_write_the_sign_that_stands_for_the_models_words(text):
    tokens = tokenizer("qwen")
    said = {"role": "user", "content": text}
    dialogue = Chat(tokens).begin([said])
    dialogue.draw(*drawn(tokens, "in § 3<|im_end|>"))
    dialogue.hear([said])
    messages = [said, {"role": "assistant", "content": "in § 3"}, said]
    assert tokens.decode(dialogue.ids) == templates.render_prompt(messages, tokens)


def with_template(template):
    tokens = copy.deepcopy(tokenizer("qwen"))
    tokens.chat_template = template
    return tokens


ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
ONE = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (
            "{% for m in messages %}{% if m.role != 'tool' or loop.previtem.tool_calls %}" + ONE + "{% endif %}{% endfor %}",
            "the role tool behind what the assistant says, and it is left out",
        ),
        (
            "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('roles must alternate') }}{% endif %}"
            + ONE + "{% endfor %}",
            "raises TemplateError: roles must alternate",
        ),
    ],
    ids=["left out", "raises"],
)  # fmt: skip
def test_a_template_without_words_for_results_is_refused(template, why):
    """The model would never see what a tool answered."""
    tokens = with_template(template + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    Chat(tokens)
    with pytest.raises(ValueError, match=why):
        Chat(tokens, [ADD])


def test_templates_that_open_turns_in_another_way_are_refused():
    """As templates do that begin a turn with thinking and leave it out of earlier turns."""
    tokens = with_template(
        "{% for m in messages %}"
        + ONE
        + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    with pytest.raises(ValueError, match=r"assistant\\n<think>\\n' becomes '.*assistant\\n§"):
        Chat(tokens)
