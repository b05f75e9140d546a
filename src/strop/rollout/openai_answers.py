"""OpenAI's answers as data: completions of the sampling queue become JSON objects, whole or as pieces of a stream."""

import bisect
import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strop.rollout.openai_requests import Json, OpenAIRequest
from strop.rollout.sampling_queue import SampledCompletion, Ticket
from strop.rollout.served_model import ServedModel


def error_body(message: str, status: int) -> Json:
    """Return an error in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def answer_head(request: OpenAIRequest, served: ServedModel, kind: str) -> Json:
    """Return the first fields of every answer and of every event of a stream."""
    head = {"id": f"strop-{secrets.token_hex(8)}", "object": kind, "created": int(time.time())}
    return head | {"model": request.model or served.name, "choices": [], "usage": None}


def answer_body(
    request: OpenAIRequest,
    served: ServedModel,
    completions: list[list[SampledCompletion]],
    tickets: Sequence[Ticket],
) -> Json:
    """Return the answer to a request without a stream: completions and log-probs of each of its prompts."""
    choices: list[Json] = []
    for i, (prompt, answers, ticket) in enumerate(zip(request.prompts, completions, tickets, strict=True)):
        for completion in answers:
            cut = cut_at_stop(completion, request.stop, served)
            if request.chat:
                choice = _chat_choice(request, served, cut)
            else:
                choice = _text_choice(request, served, cut, i, ticket)
                logps = _prompt_logprobs(prompt, ticket.prompt_logps) if request.prompt_logprobs else None
                choice |= {"prompt_logprobs": logps} | ({"prompt_token_ids": prompt} if request.echo_ids else {})
            choices.append({"index": len(choices), **choice})
    usage = usage_of(request.prompts, [one for answers in completions for one in answers])
    head = answer_head(request, served, "chat.completion" if request.chat else "text_completion")
    return head | {"choices": choices, "usage": usage}


@dataclass(frozen=True)
class CutCompletion:
    """A completion up to its first stop text."""

    ids: list[int]
    logps: list[float]
    top: list[list[tuple[int, float]]]
    text: str
    finish_reason: str


def cut_at_stop(completion: SampledCompletion, stops: Sequence[str], served: ServedModel) -> CutCompletion:
    """Return the completion up to the first stop text: its text without EOS, and the ids that cover it."""
    ids, ended = completion.ids, completion.reason == "eos"
    text, reason = served.decode(ids[:-1] if ended else ids), "length" if completion.reason == "length" else "stop"
    num = len(ids)
    if places := [place for stop in stops if (place := text.find(stop)) >= 0]:
        text, reason = text[: min(places)], "stop"
        nums = range(1, len(ids) + 1)
        num = nums[bisect.bisect_left(nums, True, key=lambda n: any(stop in served.decode(ids[:n]) for stop in stops))]
    return CutCompletion(ids[:num], completion.logps[:num], completion.top[:num], text, reason)


def _text_choice(request: OpenAIRequest, served: ServedModel, cut: CutCompletion, i: int, ticket: Ticket) -> Json:
    """Return the choice of a completion of prompt i; with `echo` it begins with the prompt, whose first token has no log-prob."""
    ids, text, logps, top = cut.ids, cut.text, list[float | None](cut.logps), cut.top
    if request.echo:
        prompt, given = request.prompts[i], request.given[i]
        ids, text = (
            prompt + ids,
            (given if isinstance(given, str) else served.decode(prompt, special_tokens=True)) + text,
        )
        logps, top = [None, *ticket.prompt_logps, *logps], [[], *ticket.prompt_top, *top]
    logprobs = None
    if request.logprobs:
        # where two tokens have the same text, the more probable one counts
        tops = [{served.decode([token]): logp for token, logp in reversed(place)} or None for place in top]
        words = [served.decode([token]) for token in ids]
        logprobs = {"tokens": words, "token_logprobs": logps, "top_logprobs": tops if request.num_top else None}
    own = {"token_ids": cut.ids} if request.echo_ids else {}
    return {"text": text, "logprobs": logprobs, "finish_reason": cut.finish_reason, **own}


def _chat_choice(request: OpenAIRequest, served: ServedModel, cut: CutCompletion) -> Json:
    message, reason = chat_message(request, served, cut)
    logprobs = {"content": chat_logprobs(served, cut.ids, cut.logps, cut.top)} if request.logprobs else None
    ids = {"token_ids": cut.ids} if request.echo_ids else {}
    return {"message": message, "finish_reason": reason, "logprobs": logprobs, **ids}


def chat_message(request: OpenAIRequest, served: ServedModel, cut: CutCompletion) -> tuple[Json, str]:
    """Return the assistant's message, with the tool calls parsed from it, and its finish reason."""
    message: Json = {"role": "assistant", "content": cut.text}
    if not request.tools:
        return message, cut.finish_reason
    ended = bool(cut.ids) and cut.ids[-1] in served.policy.eos_ids
    reply = served.decode(cut.ids[:-1] if ended else cut.ids, special_tokens=True)
    calls, special = served.calls(reply, request.tools), getattr(served.policy.tokenizer, "all_special_tokens", ())
    if calls or served.call_format.name in ("harmony", "own"):  # whose replies have parts that are no content
        message |= served.call_format.message(reply, special)
    if not calls:
        return message, cut.finish_reason
    message["content"] = message["content"] or None
    message["tool_calls"] = [
        {"id": f"call_{secrets.token_hex(8)}", "type": "function",
         "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for call in calls
    ]  # fmt: skip
    return message, "tool_calls"


def chat_logprobs(
    served: ServedModel, ids: list[int], logps: list[float], top: list[list[tuple[int, float]]]
) -> list[Json]:
    """Return the entries of `logprobs.content`."""

    def entry(token: int, logp: float) -> Json:
        text = served.decode([token])
        return {"token": text, "logprob": logp, "bytes": list(text.encode("utf-8", "replace"))}

    tops = top or [[] for _ in ids]
    return [
        entry(token, logp) | {"top_logprobs": [entry(*pair) for pair in place]}
        for token, logp, place in zip(ids, logps, tops, strict=True)
    ]


def _prompt_logprobs(prompt: list[int], logps: list[float]) -> list[Json | None]:
    return [None, *({str(token): {"logprob": logp}} for token, logp in zip(prompt[1:], logps, strict=True))]


def usage_of(prompts: Sequence[list[int]], completions: Sequence[SampledCompletion]) -> Json:
    """Return the numbers of tokens read and drawn."""
    read, written = sum(map(len, prompts)), sum(len(one.ids) for one in completions)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


class StreamedText:
    """The text of a stream as it grows.

    Text that may still change is held back until the next piece: half a character, or a possible beginning of a stop
    text.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str]):
        self._decode, self._stops = decode, stops
        self.ids: list[int] = []
        self._num_sent = 0

    def add(self, ids: list[int], reason: str) -> tuple[str, str | None]:
        """Add a piece; return the new text, and OpenAI's finish_reason at the end.

        reason   why the completion ended, or ""
        """
        self.ids += ids
        text = self._decode(self.ids[:-1] if reason == "eos" else self.ids)
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        text = text[: min(places)] if places else text
        held = 0
        if not reason:
            held = max([len(text) - len(text.rstrip("\ufffd")), *(len(stop) - 1 for stop in self._stops)])
        new = text[self._num_sent : max(len(text) - held, self._num_sent)]
        self._num_sent += len(new)
        finish = None if not reason else "stop" if places or reason != "length" else "length"
        return new, finish
