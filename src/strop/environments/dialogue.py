"""A conversation as token ids that are only appended: sampled ids never change, other messages are encoded once.

chat = Chat(tokenizer)                      # tests the chat template; one that rewrites earlier turns is refused
dialogue = chat.begin(first_messages)
dialogue.draw(ids, logps)                   # a turn of the model
dialogue.hear(messages)                     # the messages after it, with the template's own markers
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from strop._checks import is_conversation
from strop._types import Json, Row, Tokenizer
from strop.data import templates
from strop.data.batch import Trajectory, as_ids
from strop.data.tokenize import encode_prompt, encode_text, eos_ids, special_ids, turn_ends

USER = {"role": "user", "content": "?"}
RESULT = {"role": "tool", "name": "f", "content": "7315"}


class Chat:
    """The format in which a tokenizer writes conversations; `tools` are schemas for its template.

    rewritten_turns   "refuse" templates that rewrite earlier turns, or "keep" turns as they were sampled
    check_ids         a function that raises if the model lacks a token
    stop_ids          ids at which the model stops; special tokens among them end a turn, as the template's own end does
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        tools: Sequence[object] | None = None,
        rewritten_turns: str = "refuse",
        check_ids: Callable[[torch.Tensor, str], None] | None = None,
        stop_ids: Sequence[int] = (),
    ):
        self.tokenizer, self.check_ids = tokenizer, check_ids
        self.row = {"tools": list(tools)} if tools else {}
        self.has_template = getattr(tokenizer, "chat_template", None) is not None
        self.ends = turn_ends(tokenizer) if self.has_template else eos_ids(tokenizer)
        self.stops = {*self.ends, *special_ids(tokenizer).intersection(stop_ids)}
        if self.has_template and tools:
            templates.check_writes(RESULT, tokenizer, self.row)
        if self.has_template and rewritten_turns == "refuse":
            templates.check_append_only([USER], [RESULT if tools else USER], tokenizer, self.row)

    def begin(self, first: object, row: Row | None = None) -> "Dialogue":
        """Start a dialogue.

        first   messages, a text (a user message if there is a chat template), or token ids
        row     a row of the dataset, whose documents and chat_template_kwargs go to the template
        """
        if isinstance(first, str) and self.has_template:
            first = [{"role": "user", "content": first}]
        messages = _as_messages(first) if is_conversation(first) else first
        own = {name: row[name] for name in ("documents", "chat_template_kwargs") if name in row} if row else {}
        ids = encode_prompt(messages, self.tokenizer, self.row | own)
        if not ids:
            raise ValueError(f"the first messages must hold at least one token, found none in {first!r:.60}")
        return Dialogue(self, messages, self.checked(ids), self.row | own)

    def checked(self, ids: list[int]) -> list[int]:
        if self.check_ids is not None:
            self.check_ids(torch.tensor(ids), "messages")
        return ids

    def text(self, ids: Sequence[int], special_tokens: bool = False) -> Any:
        """Return the model's reply without the token that ends its turn: a text, or ids without a tokenizer."""
        said = list(ids[:-1] if ids and ids[-1] in self.stops else ids)
        if self.tokenizer is None:
            return said
        return self.tokenizer.decode(said, skip_special_tokens=not special_tokens)


@dataclass
class Dialogue:
    """A conversation and its tokens.

    first      the first messages, text or ids
    messages   the messages that followed
    row        further arguments of the chat template, such as tools
    ids        all tokens
    drawn      True for each token that the model sampled
    logps      log-probs of the sampled tokens
    spans      number of tokens the model sampled in each turn
    versions   version of the weights that sampled each turn, if versions are counted
    replies    the model's turns as text
    """

    chat: Chat
    first: Any
    ids: list[int]
    row: Row
    num_prompt: int = 0
    drawn: list[bool] = field(default_factory=list)
    logps: list[torch.Tensor] = field(default_factory=list)
    spans: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    messages: list[Json] = field(default_factory=list)
    replies: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.ids)
        self.drawn = [False] * len(self.ids)

    @property
    def is_chat(self) -> bool:
        return is_conversation(self.first)

    def draw(
        self, ids: Sequence[int], logps: torch.Tensor, special_tokens: bool = False, versions: Sequence[int] = ()
    ) -> Any:
        """Append a turn of the model; return its reply."""
        self.ids += ids
        self.drawn += [True] * len(ids)
        self.spans.append(len(ids))
        self.logps.append(logps)
        self.versions += versions
        said = self.chat.text(ids, special_tokens)
        self.replies.append(said)
        self.messages.append({"role": "assistant", "content": said})
        return said

    def hear(self, new: object, longest: float = math.inf) -> bool:
        """Append the messages, text or ids that the model reads next. If too long, append nothing and return False."""
        messages, ids = self.read(new)
        if len(self.ids) + len(ids) > longest:
            return False
        self.append(messages, ids)
        return True

    def read(self, new: object) -> tuple[list[Json], list[int]]:
        """Return what the model reads next as messages and as ids. Appends nothing."""
        messages = _as_messages(new) if is_conversation(new) else [{"role": "user", "content": new}]
        return messages, self.chat.checked(self._encoded(messages, new))

    def append(self, messages: Sequence[Json], ids: Sequence[int]) -> None:
        """Append what `read` returned."""
        self.ids += ids
        self.drawn += [False] * len(ids)
        self.messages += messages

    def _encoded(self, messages: list[dict[str, object]], new: object) -> list[int]:
        chat = self.chat
        if not self.is_chat:
            if is_conversation(new):
                raise TypeError(f"messages must be a {type(self.first).__name__} as the first were, found messages")
            return encode_text(new, chat.tokenizer) if isinstance(new, str) else as_ids(new, "messages").tolist()
        if not isinstance(messages[0]["content"], str) and not is_conversation(new):
            raise TypeError(f"messages must be messages or a text as the first were, found {new!r:.60}")
        ids = encode_text(templates.between(self.first, messages, chat.tokenizer, self.row), chat.tokenizer)
        last = self.ids[-1]  # if the model ended its turn, the template's end is already there
        return ids[1:] if last in chat.stops and (ids[0] == last or ids[0] in chat.ends) else ids

    def trajectory(self, finish: str) -> Trajectory:
        """Return the whole dialogue as a trajectory, with the columns for reward functions."""
        shown = {
            "prompts": self.first, "completions": self.replies[-1], "conversations": self.conversation(),
            "replies": self.messages,
        }  # fmt: skip
        ids_T, drawn_T = torch.tensor(self.ids), torch.tensor(self.drawn)
        known: Json = {"num_prompt": self.num_prompt, "shown": shown, "versions": tuple(self.versions)}
        return Trajectory(ids_T, drawn_T, torch.cat(self.logps), finish, **known)

    def conversation(self) -> list[Row]:
        """Return the whole dialogue as messages."""
        return [*(self.first if self.is_chat else [{"role": "user", "content": self.first}]), *self.messages]


def _as_messages(given: Sequence[Row]) -> list[Json]:
    for one in given:
        says = isinstance(one, Mapping) and (isinstance(one.get("content"), (str, list)) or one.get("tool_calls"))
        if not says or not isinstance(one.get("role"), str):
            raise TypeError(f"a message must have a role and a content, found {one!r:.60}")
    return [dict(one) for one in given]
