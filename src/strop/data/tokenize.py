"""Token ids of rows: chat templates, the boundary of prompt and completion, EOS.

A prompt and its completion are tokenised once and apart, and their ids are put together, never their texts: so the
boundary lies in training where it lies when the model generates.

A tokenizer is Hugging Face's, or anything with encode(text) -> ids, decode(ids) -> text, eos_token_id, pad_token_id.
Conversations need one with a chat template. Without a tokenizer rows hold token ids, which pass through.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from strop._checks import is_conversation
from strop.data import templates
from strop.data.formats import CONTENT, detect_format, with_prompt

Ids = list[int]
Counts = list[bool]
Line = tuple[Ids, Counts]


def encode_prompt(prompt: Any, tokenizer: Any = None, row: Mapping[str, Any] | None = None) -> Ids:
    """Ids of a prompt a model is to go on from: text, messages (with the template's opening of the assistant's turn) or ids."""
    if isinstance(prompt, str):
        return encode_text(prompt, tokenizer, special_tokens=True)
    if is_conversation(prompt):
        return encode_text(templates.render_prompt(prompt, tokenizer, row), tokenizer)
    return _as_ids(prompt)


def encode_completion(
    prompt: Any,
    completion: Any,
    tokenizer: Any = None,
    row: Mapping[str, Any] | None = None,
    assistant_only: bool = True,
) -> Line:
    """Ids of what follows the prompt, to the end of the turn, and which of them count.

    Text ends with EOS. A conversation's completion is what the template renders beyond the prompt, up to and with the
    token that ends the turn; EOS is added only where the template ends it with nothing. Ids are taken as they are.
    assistant_only   where the completion has turns of others, those of the assistant alone count
    """
    if isinstance(completion, str):
        return _all_count(_with_eos(encode_text(completion, tokenizer), tokenizer))
    if not is_conversation(completion):
        return _all_count(_as_ids(completion))
    first, messages = len(prompt), [*prompt, *completion]
    if prompt[-1]["role"] == "assistant":  # begun in the prompt: one message for the template
        joined = {**prompt[-1], "content": prompt[-1]["content"] + completion[0]["content"]}
        first, messages = first - 1, [*prompt[:-1], joined, *completion[1:]]
    opening, *parts = templates.pieces(messages, first, tokenizer, row)
    _check_spoken(parts, completion, "the completion")
    before = templates.render_prompt(prompt, tokenizer, row)
    parts[0] = templates.following(before, opening + parts[0])
    ids, counts = _encode_turns(before, parts, messages, tokenizer, row)
    return (ids, counts) if assistant_only else _all_count(ids)


def encode_row(row: Mapping[str, Any], tokenizer: Any = None, assistant_only: bool = True) -> tuple[Ids, Ids, Counts]:
    """(prompt_ids, completion_ids, which of these count) of a row to imitate. Of language modelling the prompt is empty.

    assistant_only   of conversations the assistant's turns count; else every token
    """
    kind = detect_format(row)
    if kind == "prompt_completion":
        line = encode_completion(row["prompt"], row["completion"], tokenizer, row, assistant_only)
        return encode_prompt(row["prompt"], tokenizer, row), *line
    if kind != "language_modeling":
        raise ValueError(f"a row to imitate must be language_modeling or prompt_completion, found {kind}")
    if (messages := row.get("messages")) is not None:
        return [], *_encode_messages(messages, tokenizer, row, assistant_only)
    text = row["text"]
    if not isinstance(text, str):
        return [], *_all_count(_as_ids(text))
    return [], *_all_count(_with_eos(encode_text(text, tokenizer, special_tokens=True), tokenizer))


def encode_preference(row: Mapping[str, Any], tokenizer: Any = None) -> tuple[Ids, Line, Line]:
    """The prompt's ids, and of chosen and rejected the ids and which of them count."""
    if (kind := detect_format(row)) != "preference":
        raise ValueError(f"a row to prefer in must be preference, found {kind}")
    row = with_prompt(dict(row))
    prompt = row["prompt"]
    chosen, rejected = (encode_completion(prompt, row[name], tokenizer, row) for name in ("chosen", "rejected"))
    return encode_prompt(prompt, tokenizer, row), chosen, rejected


def _encode_messages(messages: Any, tokenizer: Any, row: Mapping[str, Any], assistant_only: bool) -> Line:
    if not assistant_only:
        return _all_count(encode_text(templates.render(messages, tokenizer, row), tokenizer))
    before, *parts = templates.pieces(messages, 0, tokenizer, row)
    _check_spoken(parts, messages, "messages")
    opening = encode_text(before, tokenizer)
    ids, counts = _encode_turns(before, parts, messages, tokenizer, row)
    return opening + ids, [False] * len(opening) + counts


def _check_spoken(parts: Sequence[str], messages: Any, name: str) -> None:
    if not parts:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise ValueError(f"{name} must have a turn of the assistant, found {roles}")


def _encode_turns(
    before: str, parts: Sequence[str], messages: Any, tokenizer: Any, row: Mapping[str, Any] | None
) -> Line:
    """Pieces behind the text `before` that each begin with a turn of the assistant: its tokens up to the one that ends it
    count, what follows does not. Generation ends there, so behind the assistant's last word nothing is left."""
    ends = turn_ends(tokenizer)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"][-len(parts) :]
    ids: Ids = []
    counts: Counts = []
    for i, part in zip(turns, parts, strict=True):
        found = encode_text(part, tokenizer)
        spoken = next((n + 1 for n, token in enumerate(found) if token in ends), None)
        if i + 1 == len(messages):
            found = found[:spoken]
            if _ends_with(part, messages[i].get("content")):
                found = _with_eos(found, tokenizer)
            spoken = len(found)
        elif spoken is None:
            alone = templates.following(before, templates.render(messages[: i + 1], tokenizer, row))
            spoken = _num_spoken(found, alone, tokenizer)
        ids += found
        counts += [n < spoken for n in range(len(found))]
        before += part
    return ids, counts


def _num_spoken(ids: Ids, alone: str, tokenizer: Any) -> int:
    """How many tokens are the assistant's where none of them ends its turn: those that stand there too when nothing
    follows (`alone`), and a special token behind them, as the one that opens the next turn ends this one."""
    said, special = encode_text(alone, tokenizer), special_ids(tokenizer)
    same = next((n for n, (a, b) in enumerate(zip(ids, said, strict=False)) if a != b), min(len(ids), len(said)))
    rest = tokenizer.decode([token for token in said[same:] if token not in special])
    if rest.strip():
        raise ValueError(
            f"the chat template must end the assistant's turns with a special token or leave them as they are when the "
            f"conversation goes on, found {alone[-60:]!r} changed from {rest[:30]!r} on"
        )
    return same + (same < len(ids) and ids[same] in special)


def turn_ends(tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a turn: EOS, and the special token the chat template puts behind an assistant's words."""
    text = templates.between([{"role": "user", "content": "?"}], [], tokenizer)
    first = [token for token in encode_text(text, tokenizer)[:1] if token in special_ids(tokenizer)]
    return tuple(dict.fromkeys((*eos_ids(tokenizer), *first)))


def special_ids(tokenizer: Any) -> set[int]:
    return {*getattr(tokenizer, "all_special_ids", ()), *getattr(tokenizer, "added_tokens_decoder", ())}


def _all_count(ids: Ids) -> Line:
    return ids, [True] * len(ids)


def _ends_with(text: str, content: Any) -> bool:
    """Whether the template put nothing behind the message: no token ends its turn."""
    return isinstance(content, str) and text.rstrip().endswith(content.strip())


def needs_tokenizer(row: Mapping[str, Any]) -> bool:
    """Whether anything of the row to be encoded is text."""
    return any(isinstance(row.get(name), str) or is_conversation(row.get(name)) for name in CONTENT)


@contextlib.contextmanager
def row_named(name: str) -> Iterator[None]:
    """Around the encoding of a row: what a tokenizer or a chat template has against it is said with the row's name."""
    try:
        yield
    except Exception as error:  # of many kinds: ours, jinja's, and tokenizers', which has no class for its own
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name}: {error}") from error


# ---- ids ----


def encode_text(text: str, tokenizer: Any, special_tokens: bool = False) -> Ids:
    """Of a text; `special_tokens`: with those a tokenizer puts before a text (BOS), without those it puts behind one."""
    if tokenizer is None:
        raise ValueError(
            f"text needs a tokenizer, found {text[:40]!r} and none: pass tokenizer=, or token ids for text"
        )
    if not _takes_special_tokens(getattr(tokenizer.encode, "__func__", tokenizer.encode)):
        return _as_ids(tokenizer.encode(text))
    ids = _as_ids(tokenizer.encode(text, add_special_tokens=False))
    if not special_tokens:
        return ids
    wrapped = _as_ids(tokenizer.encode(text, add_special_tokens=True))
    if not ids:
        return wrapped[:1]  # of an empty text the BOS
    num_before = next((n for n in range(len(wrapped) - len(ids) + 1) if wrapped[n : n + len(ids)] == ids), None)
    return wrapped if num_before is None else wrapped[: num_before + len(ids)]


@functools.lru_cache(maxsize=64)
def _takes_special_tokens(encode: Callable[..., Any]) -> bool:
    """Asked of every text; a signature takes longer than the encoding of a short one."""
    return "add_special_tokens" in inspect.signature(encode).parameters


def is_thread_safe(tokenizer: Any) -> bool:
    """Return whether two threads may use the tokenizer at once: known of transformers' fast ones, and where there is none."""
    return tokenizer is None or getattr(tokenizer, "is_fast", False) is True


def eos_ids(tokenizer: Any) -> tuple[int, ...]:
    found = getattr(tokenizer, "eos_token_id", None)
    if found is None:
        return ()
    return tuple(found) if isinstance(found, (list, tuple)) else (found,)


def _with_eos(ids: Ids, tokenizer: Any) -> Ids:
    ends = eos_ids(tokenizer)
    return ids if not ends or (ids and ids[-1] in ends) else [*ids, ends[0]]


def _as_ids(ids: Any) -> Ids:
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if isinstance(ids, Mapping) or not hasattr(ids, "__iter__") or not all(isinstance(i, int) for i in ids):
        raise TypeError(f"token ids must be a flat list of integers, found {ids!r:.80}")
    return list(ids)
