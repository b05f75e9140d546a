"""Chat templates as text: a conversation cut where the assistant's turns begin, and what a template writes between turns.

A conversation's ids are put together from pieces that are encoded apart, one from the beginning of an assistant's turn to
the beginning of the next: so the boundary lies in training where it lies when the model generates.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from strop._types import Row, Tokenizer
from strop.data.one_rendering import marked_template

Message = Row
OPTIONS = ("tools", "documents", "chat_template_kwargs")  # columns of a row that the template gets
SPOKEN = "§"  # stands for what the assistant says, once or more: what no template and no message has


def render(messages: Sequence[Message], tokenizer: Any, row: Row | None = None, **options: Any) -> str:
    """The template's text. A row may have tools and documents, and options of its template."""
    if getattr(tokenizer, "chat_template", None) is None:
        what = "there is no tokenizer" if tokenizer is None else f"{type(tokenizer).__name__} has none"
        raise ValueError(f"conversations need a tokenizer with a chat template, and {what}: set one or give texts")
    row = row or {}
    extra = {name: row[name] for name in ("tools", "documents") if row.get(name)}
    return tokenizer.apply_chat_template(
        list(messages), tokenize=False, **extra, **options, **(row.get("chat_template_kwargs") or {})
    )


def render_prompt(messages: Any, tokenizer: Tokenizer | None, row: Row | None = None) -> str:
    """The prompt's text: up to where the assistant speaks, or into its last message where that one is begun."""
    if messages and messages[-1]["role"] == "assistant":
        return render(messages, tokenizer, row, continue_final_message=True)
    return render(messages, tokenizer, row, add_generation_prompt=True)


def following(before: str, whole: str, what: str = "the conversation it opens") -> str:
    """What stands behind `before` in `whole`; an error where it does not begin so."""
    if whole.startswith(before):
        return whole[len(before) :]
    pairs = enumerate(zip(before, whole, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(before), len(whole)))
    raise ValueError(
        f"the chat template must render a prompt as the beginning of {what}; after {before[max(at - 20, 0) : at]!r} the "
        f"prompt has {before[at : at + 30]!r}, the conversation {whole[at : at + 30]!r}"
    )


def pieces(messages: Sequence[Message], first: int, tokenizer: Tokenizer | None, row: Row | None = None) -> list[str]:
    """Return the conversation's text, cut where the assistant's turns begin, from that of messages[first] on."""
    marked = None if any((row or {}).get(name) for name in OPTIONS) else marked_template(tokenizer)
    if marked is not None and (found := marked.pieces(messages, first)) is not None:
        return found
    whole = render(messages, tokenizer, row)
    begins = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    prompts = [render(messages[:i], tokenizer, row, add_generation_prompt=True) for i in begins]
    cuts = [0, *(len(whole) - len(following(prompt, whole)) for prompt in prompts), len(whole)]
    found = [whole[start:end] for start, end in itertools.pairwise(cuts)]
    for i, text in zip(begins, found[1:], strict=True):
        for call in messages[i].get("tool_calls") or ():
            if (name := (call.get("function") or call).get("name", "")) not in text:
                raise ValueError(
                    f"the chat template must write tool_calls, and leaves out {name!r} of messages[{i}]; calls may also be "
                    f"written into the content"
                )
    return found


def between(
    before: Sequence[Message], new: Sequence[Message], tokenizer: Tokenizer | None, row: Row | None = None
) -> str:
    """What stands between an assistant's words, which answer `before`, and its next turn: the end of its turn, the new
    messages, and the opening of the next. Without new messages only the end of its turn."""
    texts = "".join(str(message) for message in (*before, *new))
    spoken = next(mark for n in itertools.count(1) if (mark := SPOKEN * n) not in texts)  # people write of §§ too
    said = {"role": "assistant", "content": spoken}
    whole = render([*before, said, *new], tokenizer, row, add_generation_prompt=bool(new))
    if whole.count(spoken) != 1:
        raise ValueError(
            f"the chat template must write what the assistant says once, found it {whole.count(spoken)} times: "
            f"{whole[-80:]!r}"
        )
    return whole.partition(spoken)[2]


def check_writes(message: Message, tokenizer: Tokenizer | None, row: Row | None = None) -> None:
    """Raise if the template has no words for such a message behind a turn of the assistant's, or leaves it out."""
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
    """Raise if earlier turns look otherwise once the conversation goes on: tried with plain words, and with thinking."""
    for says, what in (
        (SPOKEN, "earlier turns"),
        (f"<think>\n{SPOKEN}\n</think>\n\n{SPOKEN}", "an earlier turn's thinking"),
    ):
        begun = [*before, {"role": "assistant", "content": says}]
        shorter, longer = (render(some, tokenizer, row) for some in (begun, [*begun, *new]))
        opened = render_prompt(before, tokenizer, row)
        shorter = shorter[: shorter.rindex(SPOKEN) + 1]  # some put an EOS behind a conversation's last turn
        for was in (shorter, opened):
            if longer.startswith(was):
                continue
            at = next((i for i, (a, b) in enumerate(zip(was, longer, strict=False)) if a != b), len(longer))
            raise ValueError(
                f"the chat template must leave earlier turns as they were drawn, and rewrites {what} when the "
                f"conversation goes on: {was[max(at - 20, 0) : at + 30]!r} becomes "
                f'{longer[max(at - 20, 0) : at + 30]!r}; rewritten_turns="keep" trains and plays with turns as drawn'
            )
