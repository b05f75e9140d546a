"""A queue that samples for many callers at once: their rows are decoded together, a few tokens at a time.

    queue = SamplingQueue(policy)
    ticket = queue.submit(SamplingRequest(prompt=[5, 6, 7], sampling=Sampling(max_new_tokens=64), num_samples=4))
    completions = ticket.result()           # ticket.cancel() withdraws the request

One thread decodes. It takes all rows with the same sampling rule, lets the engine draw a piece of at most LONGEST_PIECE
tokens for each, removes rows that ended or were cancelled, and gives their places to waiting rows. The engine caches
rows from piece to piece. On a CPU, where prompts take long to read, a piece also reads at most READ_AT_ONCE new tokens. A
row's random numbers depend only on its request's seed, so it draws the same tokens as `generate` with that seed. Other
rows can only change the rounding of a matrix product.
"""

import collections
import concurrent.futures
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strop._checks import check_count
from strop.data.batch import TokenBatch, Trajectory
from strop.models import Policy
from strop.rollout.cached_rows import CachedRows
from strop.rollout.generate import CACHING, ENGINES, checked_prompts
from strop.rollout.grammar import Grammar, Matcher, bits_along, restricted
from strop.rollout.sampling import Sampling, row_bits, sampling_logps, uniforms_from

FIRST_PIECE, LONGEST_PIECE = 4, 16  # tokens of a row's first piece for a streaming caller; maximum of later pieces
LONGEST_PIECE_READ_AGAIN = 64  # maximum if the engine has no cache and reads a row again before each piece
MAX_WAITING_TOKENS = 1 << 25  # tokens of waiting prompts; a further request is refused
READ_AT_ONCE = 512  # maximum tokens of prompts read in one piece on a CPU
SHARE_OF_MEMORY = 0.4  # share of a CPU's free memory for the rows being drawn: they are copied from piece to piece
TOKENS_AT_FIRST = 4096  # maximum tokens of rows being drawn, until it is known how much memory a token takes
LOGITS_AT_ONCE = 1 << 26  # number of logits computed together for the most probable tokens


class QueueFull(RuntimeError):
    """The queue accepts no further request at present."""


@dataclass(frozen=True, kw_only=True)
class SamplingRequest:
    """A request for num_samples completions of one prompt.

    address        which of the seed's random numbers it uses, as in `generate`
    model          a name that the queue's `use_model` knows, such as an adapter's; None is its default
    ends           returns whether a completion with these ids ends here, such as at a stop text
    prompt_logps   also return the log-probs of the prompt's tokens, without the sampling rule
    num_top        also return this number of most probable tokens at each position of a completion, and of a scored prompt
    grammar        draw only tokens that it allows
    streams        the caller reads pieces as they come, so the first ones are short
    row            a number below 0 under which the engine keeps the cache, for a later request whose prompt begins with this
                   prompt and all of its completion, until `forget`
    """

    prompt: list[int]
    sampling: Sampling
    num_samples: int = 1
    seed: int = 0
    address: int = 0
    ignore_eos: bool = False
    model: str | None = None
    ends: Callable[[list[int]], bool] | None = None
    prompt_logps: bool = False
    num_top: int = 0
    grammar: Grammar | None = None
    streams: bool = False
    row: int | None = None

    @property
    def rule(self) -> Hashable:
        """The sampling rule. Rows of requests with equal rules can be decoded together."""
        return self.model, replace(self.sampling, max_new_tokens=1), self.ignore_eos


@dataclass(kw_only=True)
class SampledCompletion:
    """One completion of a request.

    logps     the log-prob of each token under the distribution it was drawn from
    reason    "eos"; "length" if max_new_tokens ended it; "stop" if the request's `ends` or `grammar` did
    top       if asked for, the most probable tokens at each position: (id, log-prob), the most probable first
    """

    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    reason: str = ""
    top: list[list[tuple[int, float]]] = field(default_factory=list)


OnPiece = Callable[[list[int], list[float], str], None]  # new ids, their log-probs, the reason or ""


class Ticket:
    """A request in the queue. `future` yields the completions, in the order of the samples.

    prompt_logps   if asked for, the log-prob of each token of the prompt but the first
    prompt_top     with these and num_top, the most probable tokens at each of their places
    on_piece       called by the queue's thread after each piece, for a request of one sample
    begun          the cache of the prompt's first tokens, for all samples, while it is read in parts
    in_parts       False if the engine does not cache rows that are read in parts
    """

    begun: Any = None
    in_parts = True

    def __init__(self, queue: "SamplingQueue", request: SamplingRequest, on_piece: OnPiece | None = None):
        self.request, self.on_piece, self._queue = request, on_piece, queue
        self.future: concurrent.futures.Future[list[SampledCompletion]] = concurrent.futures.Future()
        self.completions = [SampledCompletion() for _ in range(request.num_samples)]
        self.prompt_logps: list[float] = []
        self.prompt_top: list[list[tuple[int, float]]] = []
        self.num_waiting = self.num_left = request.num_samples
        self.row_bits_B = row_bits(request.seed, [request.address], request.num_samples)

    def result(self, timeout: float | None = None) -> list[SampledCompletion]:
        """Wait for the completions."""
        return self.future.result(timeout)

    def cancel(self) -> None:
        """Withdraw the request: its rows leave before the next piece. A finished request does not change."""
        if self.future.cancel():
            self._queue.wake()


@dataclass(eq=False)
class QueueRow:
    """One completion that is being drawn."""

    ticket: Ticket
    sample: int
    number: int
    piece: int
    last_turn: int = 0

    @functools.cached_property
    def matcher(self) -> Matcher | None:
        """The matcher that follows the completion in the request's grammar; None without one."""
        grammar = self.ticket.request.grammar
        return None if grammar is None else grammar.matcher()

    @property
    def completion(self) -> SampledCompletion:
        return self.ticket.completions[self.sample]

    @property
    def ids(self) -> list[int]:
        return self.ticket.request.prompt + self.completion.ids

    @property
    def num_left(self) -> int:
        return self.ticket.request.sampling.max_new_tokens - len(self.completion.ids)

    @property
    def room(self) -> int:
        """The number of tokens it can have at its end."""
        return len(self.ticket.request.prompt) + self.ticket.request.sampling.max_new_tokens


class SamplingQueue:
    """Draws completions for many callers, with the policy's weights as they are at each piece.

    max_batch    maximum number of rows decoded together; None is 64, and 256 on a GPU
    use_model    returns a context that yields the policy with the model of this name; None uses the policy as it is
    own_thread   draw in a thread of the queue; False draws in the thread that calls `take_turn`
    """

    def __init__(
        self,
        policy: Policy,
        max_batch: int | None = None,
        use_model: Callable[[str | None], contextlib.AbstractContextManager[Policy]] | None = None,
        own_thread: bool = True,
    ):
        self.max_batch = max_batch or (256 if policy.device.type == "cuda" else 64)
        check_count(self.max_batch, "max_batch", 1)
        self.policy = policy
        self._use_model = use_model or (lambda _: contextlib.nullcontext(self.policy))
        self._changed = threading.Condition()
        self._waiting: list[Ticket] = []
        self._active: list[QueueRow] = []
        self._calls: collections.deque[tuple[Callable[[], Any], concurrent.futures.Future[Any]]] = collections.deque()
        self._cached = CachedRows()
        self._longest_piece = LONGEST_PIECE
        self._num_rows = 0
        self._in_parts = own_thread and policy.device.type == "cpu" and policy.kind in CACHING
        self._max_tokens = TOKENS_AT_FIRST if self._in_parts else 2**62  # of all rows being drawn
        self._closed = False
        self.num_drawn = self.num_turns = 0  # tokens and pieces so far, including those of cancelled requests
        self._thread = threading.Thread(target=self._work, name="strop-sampling", daemon=True) if own_thread else None
        if self._thread is not None:
            self._thread.start()

    # ---- for callers, in any thread ----

    def submit(self, request: SamplingRequest, on_piece: OnPiece | None = None) -> Ticket:
        """Put a request into the queue. Raise ValueError if the prompt and its completion do not fit the policy."""
        checked_prompts(self.policy, [request.prompt], request.sampling, "prompt")
        ticket = Ticket(self, request, on_piece)
        with self._changed:
            self._check_open()
            if sum(len(one.request.prompt) for one in self._waiting) + len(request.prompt) > MAX_WAITING_TOKENS:
                raise QueueFull(f"prompts of more than {MAX_WAITING_TOKENS} tokens wait already; ask again later")
            self._waiting.append(ticket)
            self._changed.notify_all()
        return ticket

    def call(self, function: Callable[[], object]) -> Any:
        """Call the function in the queue's thread between requests, such as to change the weights; return its result.

        Rows that are being drawn are finished first. Waiting requests are drawn afterwards.
        """
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._changed:
            self._check_open()
            self._calls.append((function, future))
            self._changed.notify_all()
        return future.result()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the thread after its present piece. Unfinished requests fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the sampling queue is closed")

    # ---- the thread that draws ----

    def take_turn(
        self, is_awake: Callable[[], bool] = lambda: False, timeout: float | None = None, linger: float = 0.0,
        expected: int = 0,
    ) -> bool:  # fmt: skip
        """Wait for requests, then draw a piece or make a call; return False if there was nothing to do.

        is_awake   ends the waiting when it returns True; `wake` lets it be asked again
        linger     seconds to wait for each further request, if no row is being drawn, until there are `expected`
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._waiting or self._active or self._calls or is_awake(), timeout
            )
            if self._closed or not (self._waiting or self._active or self._calls):
                return False
            while not self._active and 0 < len(self._waiting) < expected:
                if not self._changed.wait(linger):
                    break
            self._remove_cancelled()
            if not self._calls:
                self._admit()
            call = self._calls.popleft() if self._calls and not self._active else None
        if call is not None:
            self._call(*call)
        elif self._active:
            self._draw_piece()
        return True

    def _work(self) -> None:
        while self.take_turn():
            pass
        for ticket in {*self._waiting, *(row.ticket for row in self._active)}:
            _fail(ticket.future, RuntimeError("the sampling queue was closed"))
        for _, future in self._calls:
            _fail(future, RuntimeError("the sampling queue was closed"))

    def _call(self, function: Callable[[], object], future: concurrent.futures.Future[object]) -> None:
        self._cached.rows.clear()
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    def _remove_cancelled(self) -> None:
        self._waiting = [ticket for ticket in self._waiting if not ticket.future.cancelled()]
        self._leave([row for row in self._active if row.ticket.future.cancelled()])

    def _admit(self) -> None:
        """Fill free places one row at a time, always from the request with the fewest rows being drawn.

        One row is always drawn. Others wait while there is no memory for them.
        """
        drawn = collections.Counter(row.ticket for row in self._active)
        num_tokens = sum(row.room for row in self._active)
        while self._waiting and len(self._active) < self.max_batch:
            ticket = min(self._waiting, key=lambda one: drawn[one])
            piece = FIRST_PIECE if ticket.request.streams else self._longest_piece
            sample = ticket.request.num_samples - ticket.num_waiting
            self._num_rows += 1
            number = self._num_rows if ticket.request.row is None else ticket.request.row
            row = QueueRow(ticket, sample, number, piece)
            num_tokens += row.room
            if self._active and num_tokens > self._max_tokens:
                return
            self._active.append(row)
            drawn[ticket] += 1
            ticket.num_waiting -= 1
            if not ticket.num_waiting:
                self._waiting.remove(ticket)

    def _leave(self, rows: Sequence[QueueRow]) -> None:
        if not rows:
            return
        for row in rows:
            if row.ticket.request.row is None or not row.completion.reason:
                self.forget(row.number)
        gone = {row.number for row in rows}
        self._active = [row for row in self._active if row.number not in gone]

    def forget(self, row: int) -> None:
        """Drop the cache of a row. Only for the thread that draws."""
        self._cached.rows.pop(row, None)

    def _draw_piece(self) -> None:
        """Draw a piece for the rows whose turn it is: those with the same rule as the row that has waited longest."""
        self.num_turns += 1
        rule = min(self._active, key=lambda row: row.last_turn).ticket.request.rule
        rows = [row for row in self._active if row.ticket.request.rule == rule]
        for row in rows:
            row.last_turn = self.num_turns
        try:
            ended = self._draw(rows)
        except Exception as error:  # the engine may raise anything: only these requests have failed
            self._give_up({row.ticket for row in rows}, error)
            if self._thread is None:  # the caller's thread draws, and hears of it
                raise
            return
        for row in ended:
            if row.completion.reason == "error" and row.matcher is not None:
                self._give_up({row.ticket}, ValueError(row.matcher.error))
        with self._changed:
            self._leave(ended)
        for row in ended:
            row.ticket.num_left -= 1
            if not row.ticket.num_left:
                with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was cancelled
                    row.ticket.future.set_result(row.ticket.completions)

    def _give_up(self, tickets: set[Ticket], error: Exception) -> None:
        with self._changed:
            self._waiting = [ticket for ticket in self._waiting if ticket not in tickets]
            self._leave([row for row in self._active if row.ticket in tickets])
        for ticket in tickets:
            _fail(ticket.future, error)

    def _draw(self, rows: list[QueueRow]) -> list[QueueRow]:
        """Draw a piece for each of these rows, which share one rule; return the rows that ended."""
        request = rows[0].ticket.request
        with (
            self._use_model(request.model) as policy,
            torch.inference_mode(False),
            torch.no_grad(),
            policy.evaluating(),
        ):
            if self._in_parts and not (rows := self._read_on(policy, rows)):
                return []
            prompts = [torch.tensor(row.ids) for row in rows]
            num_tokens = min(max(row.num_left for row in rows), *(row.piece for row in rows))
            if policy.max_length is not None:
                num_tokens = min(num_tokens, policy.max_length - max(map(len, prompts)))
            eos_ids = tuple(
                dict.fromkeys((*(() if request.ignore_eos else policy.eos_ids), *request.sampling.stop_ids))
            )
            bits_B = np.array([row.ticket.row_bits_B[row.sample] for row in rows])
            first_B = np.array([len(row.completion.ids) for row in rows])
            keeps = policy.kind in CACHING
            further: dict[str, Any] = {"cached": self._cached.of([row.number for row in rows])} if keeps else {}
            if any(matchers := [row.matcher for row in rows]):
                further["matchers"] = matchers
            sampling = replace(request.sampling, max_new_tokens=num_tokens)
            uniforms_BT = uniforms_from(bits_B, first_B, num_tokens)
            ids_B, logps_B = ENGINES[policy.kind](policy, prompts, sampling, 1, uniforms_BT, eos_ids, **further)
            if not keeps or rows[0].number not in self._cached.rows:
                self._longest_piece = LONGEST_PIECE_READ_AGAIN
            if self._max_tokens == TOKENS_AT_FIRST:
                num_bytes = self._cached.bytes_per_token(rows[0].number)
                self._max_tokens = int(SHARE_OF_MEMORY * free_memory() / 2 / num_bytes) if num_bytes else 2**62
            ended = []
            for row, ids, logps in zip(rows, ids_B, logps_B, strict=True):
                self._add(row, ids[: row.num_left].tolist(), logps[: row.num_left].tolist(), eos_ids)
                if row.completion.reason:
                    ended.append(row)
                    self._score(policy, row)
        return ended

    def _read_on(self, policy: Policy, rows: list[QueueRow]) -> list[QueueRow]:
        """Return the rows that can draw a piece now: their prompts have at most READ_AT_ONCE tokens to read in all.

        The first row with more tokens to read has a part of them read here. Between two parts others draw their
        pieces, and a client may leave.
        """
        ready: list[QueueRow] = []
        counted: set[Ticket] = set()
        part, room = None, READ_AT_ONCE
        for row in rows:
            ticket = row.ticket
            if ticket.begun is not None and not row.completion.ids:
                self._cached.rows[row.number] = ticket.begun
            unread = len(row.ids) - self._cached.num_tokens(row.number)
            if unread <= 2 or ticket in counted or not ticket.in_parts:  # its last two tokens are not in the cache
                ready.append(row)
            elif unread <= room and ticket.begun is None:
                room -= unread
                counted.add(ticket)  # its other samples have the same prompt, which is read once
                ready.append(row)
            elif part is None:
                part = row
        if part is not None:
            num_read = max(room, READ_AT_ONCE // 4)
            ids = torch.tensor(part.ids[: self._cached.num_tokens(part.number) + num_read])
            sampling, one = (
                Sampling(max_new_tokens=1),
                torch.zeros(1, 1, dtype=torch.float64),
            )  # what it draws is dropped
            ENGINES[policy.kind](policy, [ids], sampling, 1, one, (), cached=self._cached.of([part.number]))
            part.ticket.begun = self._cached.rows.pop(part.number, None)
            part.ticket.in_parts = part.ticket.begun is not None
        return ready

    def _add(self, row: QueueRow, ids: list[int], logps: list[float], eos_ids: Sequence[int]) -> None:
        completion, request = row.completion, row.ticket.request
        if any(logp != logp for logp in logps):
            raise FloatingPointError("log-probs must be numbers, found NaN: are the model's weights?")
        self.num_drawn += len(ids)
        completion.ids += ids
        completion.logps += logps
        row.piece = min(2 * row.piece, self._longest_piece)
        if row.matcher is not None and row.matcher.error:
            completion.reason = "error"
            return
        if ids[-1] in eos_ids:
            completion.reason = "eos"
        elif (request.ends is not None and request.ends(completion.ids)) or (
            row.matcher is not None and row.matcher.ended and row.matcher.num_tokens == len(completion.ids)
        ):
            completion.reason = "stop"
        elif row.num_left == 0:
            completion.reason = "length"
        if row.ticket.on_piece is not None:
            row.ticket.on_piece(ids, logps, completion.reason)

    def _score(self, policy: Policy, row: QueueRow) -> None:
        """Fill the other fields that the request asks for: the prompt's log-probs and the most probable tokens."""
        ticket, request = row.ticket, row.ticket.request
        prompt, ids = request.prompt, row.completion.ids
        if request.prompt_logps and not ticket.prompt_logps and len(prompt) > 1:
            # both from the same logits: readers compare them to see which token is the most probable
            if request.num_top:
                found = _tops(policy, prompt[:1], prompt[1:], Sampling(), request.num_top)
                ticket.prompt_logps, ticket.prompt_top = [list(one) for one in zip(*found, strict=True)]
            else:
                batch = TokenBatch.of([Trajectory.of(prompt[:1], prompt[1:])], policy.device)
                ticket.prompt_logps = policy.logps(batch).tolist()
        if request.num_top:
            row.completion.top += [
                top for _, top in _tops(policy, prompt, ids, request.sampling, request.num_top, request.grammar)
            ]


def _tops(
    policy: Policy, prompt: list[int], ids: list[int], sampling: Sampling, num_top: int, grammar: Grammar | None = None
) -> list[tuple[float, list[tuple[int, float]]]]:
    """Return each id's log-prob, and the most probable tokens at its place as (id, log-prob); of those a grammar allows."""
    matcher = None if grammar is None else grammar.matcher()
    found, size = [], max(1, LOGITS_AT_ONCE // (policy.vocab_size or 1 << 18))
    for first in range(0, len(ids), size):
        some = ids[first : first + size]
        logits_nV = policy.logits(TokenBatch.of([Trajectory.of(prompt + ids[:first], some)], policy.device))
        if matcher is not None:
            logits_nV = restricted(logits_nV, bits_along(matcher, some).to(policy.device))
        logps_nV = sampling_logps(logits_nV.float(), sampling)
        top = logps_nV.topk(min(num_top, logps_nV.shape[-1]), dim=-1)
        own = logps_nV[range(len(some)), some].tolist()
        for logp, *pairs in zip(own, top.indices.tolist(), top.values.tolist(), strict=True):
            found.append((logp, [pair for pair in zip(*pairs, strict=True) if pair[1] > -torch.inf]))
    return found


def free_memory() -> int:
    """Return the bytes of memory that this machine has free; half of all where it does not say."""
    try:
        line = next(
            line
            for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("MemAvailable")
        )
        return int(line.split()[1]) << 10
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _fail(future: concurrent.futures.Future[Any], error: Exception) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was cancelled
        future.set_exception(error)
