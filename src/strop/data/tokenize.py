"""Token ids of rows: chat templates, the boundary of prompt and completion, EOS.

A prompt and its completion are tokenised separately, and their ids are concatenated, never their texts. So the token
boundary in training is the same as in generation.

A tokenizer is Hugging Face's, or anything with encode(text) -> ids, decode(ids) -> text, eos_token_id, pad_token_id.
Conversations need one with a chat template. Without a tokenizer, rows hold token ids, which are used unchanged.

A function whose name ends in `_steps` is a generator that encodes one row: it yields texts and is sent their ids.
`encode_all` runs the generators of many rows together and encodes all their texts in one call, which is several times
faster than one call per text.
"""

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from strop._checks import is_conversation
from strop._types import Row, Tokenizer
from strop.data import templates
from strop.data.formats import CONTENT, detect_format, with_prompt
from strop.data.one_rendering import is_of_transformers

Ids = list[int]
LossMask = list[bool]
Line = tuple[Ids, LossMask]
Result = TypeVar("Result")


class Text(NamedTuple):
    """A text to encode. special_tokens   add the tokens that the tokenizer puts before a text (BOS)"""

    text: str
    special_tokens: bool = False


Steps = Generator[list[Text], list[Ids], Result]


class Encoder:
    """A tokenizer with the properties that every row needs, computed once for all rows of a call."""

    def __init__(self, tokenizer: Tokenizer | None):
        self.tokenizer = tokenizer

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        return turn_ends(self.tokenizer)

    @functools.cached_property
    def end(self) -> str:
        """The text that the chat template writes after the assistant's last words; empty for some templates."""
        return templates.turn_end(self.tokenizer).strip()

    @functools.cached_property
    def special(self) -> set[int]:
        return special_ids(self.tokenizer)


# ---- rows ----


def encode_prompt(prompt: object, tokenizer: Tokenizer | None = None, row: Row | None = None) -> Ids:
    """Return the ids of a prompt for generation: a text, messages (with the template's opening of the assistant's turn)
    or ids."""
    return _encode_one(_prompt_steps(prompt, Encoder(tokenizer), row), tokenizer)


def encode_row(row: Row, tokenizer: Tokenizer | None = None, assistant_only: bool = True) -> tuple[Ids, Ids, LossMask]:
    """Return (prompt_ids, completion_ids, the completion's loss mask) of an SFT row. For a plain text or `messages` the
    prompt is empty.

    assistant_only   in conversations only the assistant's turns are in the loss; else every token
    """
    return _encode_one(_row_steps(row, Encoder(tokenizer), assistant_only), tokenizer)


def encode_preference(row: Row, tokenizer: Tokenizer | None = None) -> tuple[Ids, Line, Line]:
    """Return the prompt's ids, and (ids, loss mask) of chosen and of rejected."""
    return _encode_one(_preference_steps(row, Encoder(tokenizer)), tokenizer)


def encode_prompts(rows: Iterable[tuple[object, Row | None]], tokenizer: Tokenizer, name: str) -> list[Ids]:
    """Return the ids of many prompts, each given with its row; errors call them name[0] and so on."""
    encoder = Encoder(tokenizer)
    return encode_all([_prompt_steps(prompt, encoder, row) for prompt, row in rows], tokenizer, name)


def encode_rows(
    rows: Sequence[Row], tokenizer: Tokenizer, name: str, assistant_only: bool = True
) -> list[tuple[Ids, Ids, LossMask]]:
    """Return the result of `encode_row` for each row; errors call them name[0] and so on."""
    encoder = Encoder(tokenizer)
    return encode_all([_row_steps(row, encoder, assistant_only) for row in rows], tokenizer, name)


def encode_preferences(rows: Sequence[Row], tokenizer: Tokenizer | None, name: str) -> list[tuple[Ids, Line, Line]]:
    """Return the result of `encode_preference` for each row; errors call them name[0] and so on."""
    encoder = Encoder(tokenizer)
    return encode_all([_preference_steps(row, encoder) for row in rows], tokenizer, name)


# ---- one row: generators that yield texts and are sent their ids ----


def _prompt_steps(prompt: object, encoder: Encoder, row: Row | None) -> Steps[Ids]:
    if isinstance(prompt, str):
        (ids,) = yield [Text(prompt, special_tokens=True)]
    elif is_conversation(prompt):
        (ids,) = yield [Text(templates.render_prompt(prompt, encoder.tokenizer, row))]
    else:
        ids = _as_ids(prompt)
    return ids


def _pair_steps(
    prompt: object, completion: object, encoder: Encoder, row: Row | None
) -> Steps[tuple[Ids, Ids, LossMask]]:
    """Return the ids of a prompt, and the ids and loss mask of its completion.

    A text ends with EOS. A conversation's completion is the template's text after the prompt, up to and including the token
    that ends the turn; EOS is added only if the template writes nothing there. Ids are used unchanged.
    """
    if is_conversation(prompt) and is_conversation(completion):
        return (yield from _conversation_steps(prompt, completion, encoder, row))
    if isinstance(completion, str):
        (ids,) = yield [Text(completion)]
        ids = _with_eos(ids, encoder.tokenizer)
    else:
        ids = _as_ids(completion)
    prompt_ids = yield from _prompt_steps(prompt, encoder, row)
    return prompt_ids, ids, [True] * len(ids)


def _conversation_steps(
    prompt: Sequence[Row], completion: Sequence[Row], encoder: Encoder, row: Row | None
) -> Steps[tuple[Ids, Ids, LossMask]]:
    """Return the prompt's ids, and the ids and loss mask of the completion's messages."""
    first, messages = len(prompt), [*prompt, *completion]
    begun = prompt[-1]["role"] == "assistant"  # the prompt has begun the turn: join both to one message
    if begun:
        joined = {**prompt[-1], "content": prompt[-1]["content"] + completion[0]["content"]}
        first, messages = first - 1, [*prompt[:-1], joined, *completion[1:]]
    before, parts = templates.pieces(messages, first, encoder.tokenizer, row)
    _check_spoken(parts, completion, "the completion")
    if begun or completion[0]["role"] != "assistant":
        opening, before = before, templates.render_prompt(prompt, encoder.tokenizer, row)
        parts[0] = parts[0]._replace(text=templates.following(before, opening + parts[0].text))
    return (yield from _turns_steps(before, parts, messages, encoder, row))


def _row_steps(row: Row, encoder: Encoder, assistant_only: bool) -> Steps[tuple[Ids, Ids, LossMask]]:
    kind = detect_format(row)
    if kind == "prompt_completion":
        prompt_ids, ids, loss_mask = yield from _pair_steps(row["prompt"], row["completion"], encoder, row)
        return prompt_ids, ids, loss_mask if assistant_only else [True] * len(ids)
    if kind != "language_modeling":
        raise ValueError(f"a row to imitate must be language_modeling or prompt_completion, found {kind}")
    if (messages := row.get("messages")) is not None:
        counted = yield from _messages_steps(messages, encoder, row, assistant_only)
        return [], *counted
    text = row["text"]
    if not isinstance(text, str):
        return [], *_all_count(_as_ids(text))
    (ids,) = yield [Text(text, special_tokens=True)]
    return [], *_all_count(_with_eos(ids, encoder.tokenizer))


def _preference_steps(row: Row, encoder: Encoder) -> Steps[tuple[Ids, Line, Line]]:
    if (kind := detect_format(row)) != "preference":
        raise ValueError(f"a row to prefer in must be preference, found {kind}")
    row = with_prompt(dict(row))
    pairs = []
    for name in ("chosen", "rejected"):
        pairs.append((yield from _pair_steps(row["prompt"], row[name], encoder, row)))
    shared = min((pair[0] for pair in pairs), key=len)
    lines = []
    for (prompt_ids, ids, loss_mask), name in zip(pairs, ("chosen", "rejected"), strict=True):
        if prompt_ids[: len(shared)] != shared:
            raise ValueError(f"the chat template must open chosen and rejected alike, found another prompt for {name}")
        more = prompt_ids[len(shared) :]  # opened for only one of them, such as <think>: not in the loss
        lines.append((more + ids, [False] * len(more) + loss_mask))
    return shared, lines[0], lines[1]


def _messages_steps(messages: Sequence[Row], encoder: Encoder, row: Row, assistant_only: bool) -> Steps[Line]:
    if not assistant_only:
        (ids,) = yield [Text(templates.render(messages, encoder.tokenizer, row))]
        return _all_count(ids)
    before, parts = templates.pieces(messages, 0, encoder.tokenizer, row)
    _check_spoken(parts, messages, "messages")
    opening, ids, loss_mask = yield from _turns_steps(before, parts, messages, encoder, row)
    return opening + ids, [False] * len(opening) + loss_mask


def _check_spoken(parts: Sequence[templates.Piece], messages: Sequence[Row], name: str) -> None:
    if not parts:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise ValueError(f"{name} must have a turn of the assistant, found {roles}")


def _turns_steps(
    before: str, parts: Sequence[templates.Piece], messages: Sequence[Row], encoder: Encoder, row: Row | None
) -> Steps[tuple[Ids, Ids, LossMask]]:
    """Return the ids of the text `before`, the ids of the pieces after it, and the pieces' loss mask.

    Each piece begins with a turn of the assistant. Its tokens up to the one that ends the turn are in the loss, the rest is
    not. Generation ends at that token, so nothing follows it in the assistant's last turn.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"][-len(parts) :]
    ids: Ids = []
    loss_mask: LossMask = []
    texts = [before, *(text for part in parts for text in (part.text, part.rest or ""))]
    opening, *encoded = yield [Text(text) for text in texts]
    for n, (part, found, rest) in enumerate(zip(parts, encoded[::2], encoded[1::2], strict=True)):
        last = n + 1 == len(parts) and messages[-1]["role"] == "assistant"
        spoken: int | None = len(found)
        if part.rest is None:
            spoken = min((found.index(end) + 1 for end in encoder.ends if end in found), default=None)
        if last:
            found, rest = found[:spoken], []
            if not encoder.end:
                found = _with_eos(found, encoder.tokenizer)
            spoken = len(found)
        elif spoken is None:
            alone = templates.following(before, templates.render(messages[: turns[n] + 1], encoder.tokenizer, row))
            (said,) = yield [Text(alone)]
            spoken = _num_spoken(found, said, alone, encoder)
        ids += found + rest
        loss_mask += [True] * spoken + [False] * (len(found) + len(rest) - spoken)
        before += part.text + (part.rest or "")
    return opening, ids, loss_mask


def _num_spoken(ids: Ids, said: Ids, alone: str, encoder: Encoder) -> int:
    """Return the number of the assistant's tokens if no known token ends its turn.

    These are the tokens that are the same if nothing follows (`said`, the ids of the text `alone`), and a special token
    after them: the token that opens the next turn also ends this one.
    """
    assert encoder.tokenizer is not None  # it has rendered the conversation
    special = encoder.special
    same = next((n for n, (a, b) in enumerate(zip(ids, said, strict=False)) if a != b), min(len(ids), len(said)))
    rest = encoder.tokenizer.decode([token for token in said[same:] if token not in special])
    if rest.strip():
        raise ValueError(
            f"the chat template must end the assistant's turns with a special token or leave them as they are when the "
            f"conversation goes on, found {alone[-60:]!r} changed from {rest[:30]!r} on"
        )
    return same + (same < len(ids) and ids[same] in special)


def turn_ends(tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the ids that end a turn: EOS, and the last of the special tokens that the chat template writes right after an
    assistant's words, whether or not the conversation continues."""
    user = {"role": "user", "content": "?"}
    alone, special = templates.turn_end(tokenizer), special_ids(tokenizer)
    with contextlib.suppress(Exception):  # a template may refuse to go on
        alone = alone[: templates.num_shared(alone, templates.turn_end(tokenizer, [user]))] or alone
    run = list(itertools.takewhile(special.__contains__, encode_text(alone, tokenizer)))
    return tuple(dict.fromkeys((*eos_ids(tokenizer), *run[-1:])))


def special_ids(tokenizer: Tokenizer | None) -> set[int]:
    return {*getattr(tokenizer, "all_special_ids", ()), *getattr(tokenizer, "added_tokens_decoder", ())}


def _all_count(ids: Ids) -> Line:
    return ids, [True] * len(ids)


def needs_tokenizer(row: Row) -> bool:
    """Return whether the row has text to encode."""
    return any(isinstance(row.get(name), str) or is_conversation(row.get(name)) for name in CONTENT)


@contextlib.contextmanager
def row_named(name: str) -> Iterator[None]:
    """Add the row's name to any error that a tokenizer or a chat template raises."""
    try:
        yield
    except Exception as error:  # of many kinds: ours, jinja's, and tokenizers', which has no class for its own
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name}: {error}") from error


# ---- many rows, whose texts are encoded together ----


def encode_all(rows: Sequence[Steps[Result]], tokenizer: Tokenizer | None, name: str) -> list[Result]:
    """Return the results of the rows; the error of row i names it name[i]."""
    results: dict[int, Result] = {}
    answers: dict[int, list[Ids] | None] = dict.fromkeys(range(len(rows)))
    while answers:
        asked: dict[int, list[Text]] = {}
        for i, ids in answers.items():
            with row_named(f"{name}[{i}]"):
                try:
                    asked[i] = rows[i].send(ids) if ids is not None else next(rows[i])
                except StopIteration as end:
                    results[i] = end.value
        answers = _answers(asked, tokenizer, name)
    return [results[i] for i in range(len(rows))]


def _answers(asked: Mapping[int, list[Text]], tokenizer: Tokenizer | None, name: str) -> dict[int, list[Ids] | None]:
    """Return the ids of the texts that each row has yielded."""
    plain = [one.text for texts in asked.values() for one in texts if not one.special_tokens]
    encode = fast_encoding(tokenizer)
    if encode is None:
        return {i: _encoded(texts, tokenizer, f"{name}[{i}]") for i, texts in asked.items()}
    found = iter(encode(plain))
    return {
        i: [_encode_text(one, tokenizer) if one.special_tokens else next(found) for one in texts]
        for i, texts in asked.items()
    }


def _encoded(texts: Sequence[Text], tokenizer: Tokenizer | None, name: str) -> list[Ids]:
    with row_named(name):
        return [_encode_text(one, tokenizer) for one in texts]


def _encode_text(one: Text, tokenizer: Tokenizer | None) -> Ids:
    return encode_text(one.text, tokenizer, one.special_tokens)


def _encode_one(steps: Steps[Result], tokenizer: Tokenizer | None) -> Result:
    """Return the result of one row."""
    try:
        texts = next(steps)
        while True:
            texts = steps.send([_encode_text(one, tokenizer) for one in texts])
    except StopIteration as end:
        return end.value


def fast_encoding(tokenizer: Tokenizer | None) -> Callable[[Sequence[str]], list[Ids]] | None:
    """Return a function that encodes many texts at once, equal to encode(text, add_special_tokens=False) for each. Return
    None if the tokenizer is not known to have one."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    encode = getattr(backend, "encode_batch_fast", None)
    own = ("encode", "_encode_plus", "_batch_encode_plus", "__call__", "encode_batch")  # a subclass may do otherwise
    if encode is None or any(not is_of_transformers(tokenizer, name) for name in own if hasattr(tokenizer, name)):
        return None
    if backend.truncation or backend.padding or getattr(tokenizer, "split_special_tokens", False):
        return None
    return lambda texts: [found.ids for found in encode(list(texts), add_special_tokens=False)]


# ---- ids ----


def encode_text(text: str, tokenizer: Tokenizer | None, special_tokens: bool = False) -> Ids:
    """Return the ids of a text. With `special_tokens` add those that the tokenizer puts before it (BOS), not after it."""
    if tokenizer is None:
        found = f"found {text[:40]!r} and none"
        raise ValueError(f"text needs a tokenizer, {found}: pass tokenizer=, or token ids for text")
    if not _takes_special_tokens(getattr(tokenizer.encode, "__func__", tokenizer.encode)):
        return _as_ids(tokenizer.encode(text))
    ids = _as_ids(tokenizer.encode(text, add_special_tokens=False))
    if not special_tokens:
        return ids
    wrapped = _as_ids(tokenizer.encode(text, add_special_tokens=True))
    if not ids:
        return wrapped[:1]  # an empty text has only BOS
    num_before = next((n for n in range(len(wrapped) - len(ids) + 1) if wrapped[n : n + len(ids)] == ids), None)
    return wrapped if num_before is None else wrapped[: num_before + len(ids)]


@functools.lru_cache(maxsize=64)
def _takes_special_tokens(encode: Callable[..., object]) -> bool:
    """Return whether `encode` takes the option. Cached: reading a signature takes longer than encoding a short text."""
    return "add_special_tokens" in inspect.signature(encode).parameters


def is_thread_safe(tokenizer: Tokenizer | None) -> bool:
    """Return whether the tokenizer is thread-safe. True for transformers' fast tokenizers and for None."""
    return tokenizer is None or getattr(tokenizer, "is_fast", False) is True


def eos_ids(tokenizer: Tokenizer | None) -> tuple[int, ...]:
    found = getattr(tokenizer, "eos_token_id", None)
    if found is None:
        return ()
    return tuple(found) if isinstance(found, (list, tuple)) else (found,)


def _with_eos(ids: Ids, tokenizer: Tokenizer | None) -> Ids:
    ends = eos_ids(tokenizer)
    return ids if not ends or (ids and ids[-1] in ends) else [*ids, ends[0]]


def _as_ids(ids: object) -> Ids:
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if isinstance(ids, Mapping) or not hasattr(ids, "__iter__") or not all(isinstance(i, int) for i in ids):
        raise TypeError(f"token ids must be a flat list of integers, found {ids!r:.80}")
    return list(ids)
