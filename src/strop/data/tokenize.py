"""Token ids of rows: chat templates, the boundary of prompt and completion, EOS.

A prompt and its completion are tokenised once and apart, and their ids are put together, never their texts: so the
boundary lies in training where it lies when the model generates.

A tokenizer is Hugging Face's, or anything with encode(text) -> ids, decode(ids) -> text, eos_token_id, pad_token_id.
Conversations need one with a chat template. Without a tokenizer rows hold token ids, which pass through.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from strop._checks import is_conversation
from strop.data.formats import CONTENT, detect_format, with_prompt

Ids = list[int]


def encode_prompt(prompt: Any, tokenizer: Any = None, row: Mapping[str, Any] | None = None) -> Ids:
    """Ids of a prompt a model is to go on from: text, messages (with the template's opening of the assistant's turn) or ids."""
    if isinstance(prompt, str):
        return _encode(prompt, tokenizer, special_tokens=True)
    if is_conversation(prompt):
        return _encode(render_prompt(prompt, tokenizer, row), tokenizer)
    return _as_ids(prompt)


def encode_completion(prompt: Any, completion: Any, tokenizer: Any = None, row: Mapping[str, Any] | None = None) -> Ids:
    """Ids of what follows the prompt, to the end of the turn.

    Text ends with EOS. A conversation's completion is what the template renders beyond the prompt, up to and with the
    token that ends the turn; EOS is added only where the template ends it with nothing. Ids are taken as they are.
    """
    if isinstance(completion, str):
        return _with_eos(_encode(completion, tokenizer), tokenizer)
    if is_conversation(completion):
        text = _rendered_completion(prompt, completion, tokenizer, row)
        ids = _until_last_eos(_encode(text, tokenizer), tokenizer)
        return _with_eos(ids, tokenizer) if _ends_with(text, completion[-1]["content"]) else ids
    return _as_ids(completion)


def encode_row(row: Mapping[str, Any], tokenizer: Any = None) -> tuple[Ids, Ids]:
    """(prompt_ids, completion_ids) of a row to imitate. Of language modelling the prompt is empty: all tokens count."""
    kind = detect_format(row)
    if kind == "prompt_completion":
        args = tokenizer, row
        return encode_prompt(row["prompt"], *args), encode_completion(row["prompt"], row["completion"], *args)
    if kind != "language_modeling":
        raise ValueError(f"a row to imitate must be language_modeling or prompt_completion, found {kind}")
    if row.get("messages") is not None:
        return [], _encode(_template(row["messages"], tokenizer, row), tokenizer)
    text = row["text"]
    return [], _with_eos(_encode(text, tokenizer, special_tokens=True), tokenizer) if isinstance(
        text, str
    ) else _as_ids(text)


def encode_preference(row: Mapping[str, Any], tokenizer: Any = None) -> tuple[Ids, Ids, Ids]:
    """(prompt_ids, chosen_ids, rejected_ids)."""
    if (kind := detect_format(row)) != "preference":
        raise ValueError(f"a row to prefer in must be preference, found {kind}")
    row = with_prompt(dict(row))
    prompt = row["prompt"]
    chosen, rejected = (encode_completion(prompt, row[name], tokenizer, row) for name in ("chosen", "rejected"))
    return encode_prompt(prompt, tokenizer, row), chosen, rejected


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


# ---- chat templates ----


def render_prompt(messages: Any, tokenizer: Any, row: Mapping[str, Any] | None = None) -> str:
    """The prompt's text: up to where the assistant speaks, or into its last message where that one is begun."""
    if messages[-1]["role"] == "assistant":
        return _template(messages, tokenizer, row, continue_final_message=True)
    return _template(messages, tokenizer, row, add_generation_prompt=True)


def _rendered_completion(prompt: Any, completion: Any, tokenizer: Any, row: Mapping[str, Any] | None) -> str:
    before = render_prompt(prompt, tokenizer, row)
    if prompt[-1]["role"] == "assistant":  # begun in the prompt: one message for the template
        joined = {**prompt[-1], "content": prompt[-1]["content"] + completion[0]["content"]}
        whole = _template([*prompt[:-1], joined, *completion[1:]], tokenizer, row)
    else:
        whole = _template([*prompt, *completion], tokenizer, row)
    if not whole.startswith(before):
        at = next(
            (i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), min(len(before), len(whole))
        )
        raise ValueError(
            "the chat template must render a prompt as the beginning of the conversation it opens; after "
            f"{before[max(at - 20, 0) : at]!r} the prompt has {before[at : at + 30]!r}, the conversation {whole[at : at + 30]!r}"
        )
    return whole[len(before) :]


def _ends_with(text: str, content: Any) -> bool:
    """Whether the template put nothing behind the message: no token ends its turn."""
    return isinstance(content, str) and text.rstrip().endswith(content.strip())


def _template(messages: Any, tokenizer: Any, row: Mapping[str, Any] | None, **options: Any) -> str:
    if getattr(tokenizer, "chat_template", None) is None:
        what = "there is no tokenizer" if tokenizer is None else f"{type(tokenizer).__name__} has none"
        raise ValueError(f"conversations need a tokenizer with a chat template, and {what}: set one or give texts")
    row = row or {}
    extra = {name: row[name] for name in ("tools", "documents") if row.get(name)}
    return tokenizer.apply_chat_template(
        list(messages), tokenize=False, **extra, **options, **(row.get("chat_template_kwargs") or {})
    )


# ---- ids ----


def _encode(text: str, tokenizer: Any, special_tokens: bool = False) -> Ids:
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


def eos_ids(tokenizer: Any) -> tuple[int, ...]:
    found = getattr(tokenizer, "eos_token_id", None)
    if found is None:
        return ()
    return tuple(found) if isinstance(found, (list, tuple)) else (found,)


def _with_eos(ids: Ids, tokenizer: Any) -> Ids:
    ends = eos_ids(tokenizer)
    return ids if not ends or (ids and ids[-1] in ends) else [*ids, ends[0]]


def _until_last_eos(ids: Ids, tokenizer: Any) -> Ids:
    """Without the white space some templates put behind the end of a turn: generation stops before it."""
    ends = eos_ids(tokenizer)
    last = max((i for i, token in enumerate(ids) if token in ends), default=None)
    if last is None or tokenizer.decode(ids[last + 1 :]).strip():
        return ids
    return ids[: last + 1]


def _as_ids(ids: Any) -> Ids:
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if isinstance(ids, Mapping) or not hasattr(ids, "__iter__") or not all(isinstance(i, int) for i in ids):
        raise TypeError(f"token ids must be a flat list of integers, found {ids!r:.80}")
    return list(ids)
