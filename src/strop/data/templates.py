"""Text of chat templates: a conversation cut at the starts of the assistant's turns, and the text between turns.

The pieces of a conversation are tokenised separately and their ids are concatenated. A piece extends from the start of one
assistant's turn to the start of the next. So the token boundary in training is the same as in generation.
"""

import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from strop._types import Row, Tokenizer
from strop.data.one_rendering import is_of_transformers, marked_template

Message = Row
OPTIONS = ("tools", "documents", "chat_template_kwargs")  # columns of a row that are passed to the template
SPOKEN = "§"  # placeholder for an assistant's words, repeated until no text contains it

GENERATION = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")


def render(messages: Sequence[Message], tokenizer: Any, row: Row | None = None, **options: Any) -> str:
    """Return the template's text. A row may have tools and documents, and options of its template."""
    if getattr(tokenizer, "chat_template", None) is None:
        what = "there is no tokenizer" if tokenizer is None else f"{type(tokenizer).__name__} has none"
        raise ValueError(f"conversations need a tokenizer with a chat template, and {what}: set one or give texts")
    row = row or {}
    extra = {name: row[name] for name in ("tools", "documents") if row.get(name)}
    extra |= {**options, **(row.get("chat_template_kwargs") or {})}
    return tokenizer.apply_chat_template(list(messages), tokenize=False, **extra)


def render_prompt(messages: Sequence[Message], tokenizer: Tokenizer | None, row: Row | None = None) -> str:
    """Return the prompt's text with the opening of the assistant's turn, or with the beginning of its unfinished turn."""
    if messages and messages[-1]["role"] == "assistant":
        return render(messages, tokenizer, row, continue_final_message=True)
    return render(messages, tokenizer, row, add_generation_prompt=True)


def following(before: str, whole: str, what: str = "the conversation it opens") -> str:
    """Return the rest of `whole` after `before`. Raise a ValueError if `whole` does not begin with `before`."""
    if whole.startswith(before):
        return whole[len(before) :]
    at = num_shared(before, whole)
    found = f"the prompt has {before[at : at + 30]!r}, the conversation {whole[at : at + 30]!r}"
    after = f"after {before[max(at - 20, 0) : at]!r} {found}"
    raise ValueError(f"the chat template must render a prompt as the beginning of {what}; {after}")


def num_shared(*texts: str) -> int:
    """Return the length of the texts' common prefix."""
    return sum(1 for _ in itertools.takewhile(lambda found: len(set(found)) == 1, zip(*texts, strict=False)))


class Piece(NamedTuple):
    """A turn of the assistant, and the text from its end to the next turn of the assistant."""

    text: str
    rest: str | None = None  # None: `text` has both, and its tokens show where the turn ends


def pieces(
    messages: Sequence[Message], first: int, tokenizer: Tokenizer | None, row: Row | None = None
) -> tuple[str, list[Piece]]:
    """Return the conversation's text cut at the starts of the assistant's turns from messages[first] on: the text before
    the first of these turns, and the turns."""
    opening, turns = _cut(messages, first, tokenizer, row)
    speakers = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    texts = (
        [turn.text for turn in turns]
        if len(turns) == len(speakers)
        else ["".join(turn.text for turn in turns)] * len(speakers)
    )
    for i, text in zip(speakers, texts, strict=True):
        for call in messages[i].get("tool_calls") or ():
            if (name := (call.get("function") or call).get("name", "")) not in text:
                raise ValueError(
                    f"the chat template must write tool_calls, and leaves out {name!r} of messages[{i}]; calls may also be "
                    f"written into the content"
                )
    return opening, turns


def _cut(
    messages: Sequence[Message], first: int, tokenizer: Tokenizer | None, row: Row | None
) -> tuple[str, list[Piece]]:
    if (spans := generation_spans(messages, tokenizer, row)) is not None:
        text, found = spans
        earlier = any(message["role"] == "assistant" for message in messages[:first])
        num_earlier = len((generation_spans(messages[:first], tokenizer, row) or ("", []))[1]) if earlier else 0
        found = found[num_earlier:]
        bounds = itertools.pairwise([*found, (len(text), len(text))])
        turns = [Piece(text[start:end], text[end:after]) for (start, end), (after, _) in bounds]
        return text[: found[0][0] if found else None], turns
    marked = None if any((row or {}).get(name) for name in OPTIONS) else marked_template(tokenizer)
    if marked is not None and (parts := marked.pieces(messages, first)) is not None:
        return parts[0], list(map(Piece, parts[1:]))
    whole = render(messages, tokenizer, row)
    begins = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    cuts = [0, *(_turn_start(messages, i, whole, tokenizer, row) for i in begins), len(whole)]
    opening, *texts = [whole[start:end] for start, end in itertools.pairwise(cuts)]
    return opening, list(map(Piece, texts))


def _turn_start(messages: Sequence[Message], i: int, whole: str, tokenizer: Tokenizer | None, row: Row | None) -> int:
    """Return the index in the conversation's text at which the turn messages[i] begins, right after its prompt.

    Some prompts open more than the conversation contains, such as `<think>`. Then the turn begins where three texts diverge:
    the prompt, the conversation, and the conversation with other words in this turn.
    """
    prompt = render(messages[:i], tokenizer, row, add_generation_prompt=True)
    if whole.startswith(prompt):
        return len(prompt)
    other = [*messages[:i], {**messages[i], "content": SPOKEN}, *messages[i + 1 :]]
    start = num_shared(prompt, whole, render(other, tokenizer, row))
    history = render(messages[:i], tokenizer, row)
    if start < len(history) or not prompt.startswith(history):
        following(prompt, whole)  # raises
    return start


def opened_beyond(tokenizer: Tokenizer | None) -> str:
    """Return what the generation prompt opens beyond a conversation's text, such as `<think>`."""
    user, said = {"role": "user", "content": "?"}, {"role": "assistant", "content": SPOKEN}
    prompt, whole = render_prompt([user], tokenizer), render([user, said], tokenizer)
    return prompt[num_shared(prompt, whole) :]


def generation_spans(
    messages: Sequence[Message], tokenizer: Any, row: Row | None = None
) -> tuple[str, list[tuple[int, int]]] | None:
    """Return the conversation's text and the (start, end) of each of the assistant's parts by the template's own marks,
    `{% generation %}`; None if the template has none.

    Marks around blanks after the token that ends a turn are ignored, because generation stops at that token.
    """
    if not is_of_transformers(tokenizer, "apply_chat_template") or not isinstance(tokenizer.chat_template, str):
        return None
    if not GENERATION.search(tokenizer.chat_template):
        return None
    from transformers.utils.chat_template_utils import render_jinja_template

    row = row or {}
    options: dict[str, Any] = {name: row.get(name) or None for name in ("tools", "documents")}
    options |= {**tokenizer.special_tokens_map, **(row.get("chat_template_kwargs") or {})}
    found: Any = render_jinja_template(
        [[dict(message) for message in messages]],
        chat_template=tokenizer.chat_template,
        return_assistant_tokens_mask=True,
        **options,
    )
    (text,), (spans,) = found
    special = tuple(str(token) for token in tokenizer.added_tokens_decoder.values())
    bare = [start + len(text[start:end].rstrip()) for start, end in spans]
    return text, [
        (start, short if text[start:short].endswith(special) else end)
        for (start, end), short in zip(spans, bare, strict=True)
    ]


def between(
    before: Sequence[Message], new: Sequence[Message], tokenizer: Tokenizer | None, row: Row | None = None
) -> str:
    """Return the text between an assistant's answer to `before` and its next turn: the end of its turn, the new messages,
    and the opening of the next. Without new messages only the end of its turn."""
    texts = "".join(str(message) for message in (*before, *new))
    spoken = next(mark for n in itertools.count(1) if (mark := SPOKEN * n) not in texts)  # a text may contain § itself
    said = {"role": "assistant", "content": spoken}
    whole = render([*before, said, *new], tokenizer, row, add_generation_prompt=bool(new))
    if whole.count(spoken) != 1:
        found = f"found it {whole.count(spoken)} times: {whole[-80:]!r}"
        raise ValueError(f"the chat template must write what the assistant says once, {found}")
    return whole.partition(spoken)[2]


def turn_end(tokenizer: Tokenizer | None, new: Sequence[Message] = ()) -> str:
    """Return what the template writes behind the answer to a plain question, with a system message if it asks for one."""
    user, system = {"role": "user", "content": "?"}, {"role": "system", "content": "?"}
    try:
        return between([user], new, tokenizer)
    except Exception:  # a template's own refusal, of any kind
        return between([system, user], new, tokenizer)


def check_writes(message: Message, tokenizer: Tokenizer | None, row: Row | None = None) -> None:
    """Raise a ValueError if the template fails on such a message after an assistant's turn, or leaves it out."""
    why = "is left out"
    try:
        if message["content"] in between([{"role": "user", "content": "?"}], [message], tokenizer, row):
            return
    except Exception as error:  # a template's own, of any kind
        why = f"raises {type(error).__name__}: {error}"
    raise ValueError(
        f"the chat template must write a message of the role {message['role']} behind what the assistant says, and it "
        f"{why}; an environment of your own can say the same as a message of the user"
    )


def check_append_only(
    before: Sequence[Message], new: Sequence[Message], tokenizer: Tokenizer | None, row: Row | None = None
) -> None:
    """Raise a ValueError if later messages change how earlier turns are rendered, tried with plain words and thinking."""
    for says, what in (
        (SPOKEN, "earlier turns"),
        (f"<think>\n{SPOKEN}\n</think>\n\n{SPOKEN}", "an earlier turn's thinking"),
    ):
        begun = [*before, {"role": "assistant", "content": says}]
        shorter, longer = (render(some, tokenizer, row) for some in (begun, [*begun, *new]))
        opened = render_prompt(before, tokenizer, row)
        shorter = shorter[: shorter.rindex(SPOKEN) + 1]  # some put an EOS after a conversation's last turn
        for was in (shorter, opened):
            if longer.startswith(was):
                continue
            at = num_shared(was, longer)
            raise ValueError(
                f"the chat template must leave earlier turns as they were drawn, and rewrites {what} when the "
                f"conversation goes on: {was[max(at - 20, 0) : at + 30]!r} becomes "
                f'{longer[max(at - 20, 0) : at + 30]!r}; rewritten_turns="keep" trains and plays with turns as drawn'
            )
