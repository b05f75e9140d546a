"""Rollouts of Hugging Face models with a cache of slots; on a GPU every decode step is one replay of a CUDA graph.

    engine = Engine(policy)                     # raises Unsupported, with the reason, if slots cannot replace its cache
    tokens, logps = engine.complete(prompts, sampling, num_samples, uniforms_BT, eos_ids)

A rollout: each prompt is read once into slots that all its samples share (slots.py). Then come the steps: the layers
(steps.py) on one token of every row, attention over the row's slots, and the draw, all on the device. The host asks
every few steps which rows have ended. Waiting rows take their places. When none waits, the step shrinks as soon as the
remaining rows fit into half of its size. The cache is freed at the end.

A graph is captured for each number of rows (see BUCKETS), division of attention into parts, and sampling rule. It holds
the addresses of the weights: training changes weights in place, so the next rollout uses the new values. Everything
that differs between rollouts is read from memory by the kernels, so lengths do not matter. Weights that moved need a
new engine.
"""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from strop.models import Policy, base_model, unwrapped
from strop.models.attention import Pass, Unsupported
from strop.models.routing import Routers
from strop.rollout import boundaries, checks, plain, transformers_generate
from strop.rollout.cached_rows import CachedRows, read_chunks, read_on, store
from strop.rollout.grammar import Matchers, allowed_bits, restricted, take
from strop.rollout.recording import Record, step_memory
from strop.rollout.sampling import Sampling, completion_lengths, draw, sampling_logps
from strop.rollout.slots import AsksForLength, Decode, Key, Prefill, Rows, States
from strop.rollout.steps import FusedLayers, OwnLayers, autocast_dtype, signature

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # numbers of rows in a step; more rows than the largest wait
ASK_EVERY = 8  # steps between two checks of which rows have ended
PREFILL_TOKENS = 16384  # maximum tokens of prompts read together, padding included
SHARE_OF_MEMORY = 0.8  # share of the free memory that the cache may take
MAX_SAMPLINGS = 2  # sampling rules (training's, an evaluation's) whose graphs are kept


def bucket_of(num_rows: int) -> int:
    return next(size for size in BUCKETS if size >= num_rows)


@dataclass
class Round:
    """The B rows of some prompts: slots for the rows decoded together, random numbers, and memory for the outputs.

    token_B, prefix_start_B, prefix_length_B   first token of each row to read, and the slots of its prompt
    longest                                    the most tokens of a row, its prompt included
    reach                                      the most tokens a row can have after the next step
    record                                     the chosen experts; None records none
    states                                     states of every prompt: see slots.py
    kept                                       states of every row without its last two tokens, if rows continue later
    matchers                                   of every row, if some have grammars; `restricted` is True in a step that
                                               may draw only the tokens of `Engine.allowed_NW`
    """

    kv: torch.Tensor
    uniforms_BT: torch.Tensor
    tokens_BT: torch.Tensor
    logps_BT: torch.Tensor
    eos: torch.Tensor
    token_B: torch.Tensor
    prefix_start_B: torch.Tensor
    prefix_length_B: torch.Tensor
    prefix_starts: list[int]
    num_samples: int
    longest: int
    reach: int
    states: dict[Key, torch.Tensor]
    record: Record | None = None
    kept: dict[Key, torch.Tensor] | None = None
    matchers: Matchers | None = None
    restricted: bool = False

    def table(self) -> list[int]:
        """Return the addresses and sizes that kernels read: see kernels.py."""
        addresses = [one.data_ptr() for one in (self.uniforms_BT, self.tokens_BT, self.logps_BT)]
        return [self.kv.data_ptr(), self.kv.shape[2], *addresses, self.tokens_BT.shape[1]]

    def recorded(self, rows: Rows) -> contextlib.AbstractContextManager[None]:
        """Return a context for a step of these rows.

        An ended row is read again and again, so its states are saved only before its end.
        """
        if self.kept is not None:
            row_N = rows.row_N.masked_fill(rows.finished_N != 0, len(self.tokens_BT))
            for key, kept in self.kept.items():
                kept.index_copy_(0, row_N, rows.states[key])
        return contextlib.nullcontext() if self.record is None else self.record.step(rows)

    def enter(self, rows: Rows, places: torch.Tensor, first: int) -> None:
        """Begin the round's rows from `first` on at these places of the step, in the slots of these places."""
        row_M = torch.arange(first, first + len(places), device=rows.row_N.device)
        rows.row_N[places] = row_M
        for name in ("token", "prefix_start", "prefix_length"):
            column_N = getattr(rows, f"{name}_N")
            column_N[places] = getattr(self, f"{name}_B")[row_M].to(column_N.dtype)
        self.enter_states(rows, places)
        rows.step_N[places] = 0
        rows.finished_N[places] = 0

    def enter_states(self, rows: Rows, places: torch.Tensor) -> None:
        """Set the states of the rows at these places to those of their prompts."""
        prompt_M = rows.row_N[places] // self.num_samples
        for key, states in self.states.items():
            rows.states[key][places] = states[prompt_M]

    def make_spare(self, rows: Rows) -> None:
        """Make these rows fill up a step: each has one token, in the last slot, and has ended."""
        rows.token_N[:] = self.token_B[0]
        rows.suffix_start_N[:] = self.kv.shape[2] - 1
        rows.finished_N[:] = 1
        for column in (rows.row_N, rows.prefix_start_N, rows.prefix_length_N, rows.step_N):
            column[:] = 0


class Engine:
    """Completions of one model, on its device, under the current autocast."""

    def __init__(self, policy: Policy):
        self.model = base_model(unwrapped(policy.model))
        self.device, self.exact = policy.device, policy.exact
        if devices := {param.device for param in self.model.parameters()} - {self.device}:
            raise Unsupported(f"its weights lie on several devices, {self.device} and {min(map(str, devices))}")
        getting_ready = _get_ready(self.device)
        self._graphs: dict[Any, dict[Any, Any]] = {}
        self._rows: Rows | None = None
        self.table = torch.zeros(7, dtype=torch.int64, device=self.device)
        self.eos = torch.full((16,), -1, dtype=torch.int64, device=self.device)
        self._chosen_NLk: torch.Tensor | None = None
        self.tiles_CN = torch.zeros(2, BUCKETS[-1], dtype=torch.int32, device=self.device)
        self.allowed_NW: torch.Tensor | None = None  # a bit for each token that a row of the step may draw
        self._flags = (
            torch.empty(BUCKETS[-1], dtype=torch.int8, pin_memory=True) if policy.device.type == "cuda" else None
        )
        compiled = policy.model is not unwrapped(policy.model)  # the user compiled the model
        own = OwnLayers(self.model, self.device, autocast_dtype(self.device), compiled, policy.products())
        ids = checks.probe(policy)[0]
        try:
            seen = checks.states_of(own, ids, self.device)
        except AsksForLength:
            own.in_one_row = True
            seen = checks.states_of(own, ids, self.device)
        self.shape, self.rules = checks.cache_shape(seen), list(seen.rules.values())
        self.states: States = seen.states  # states of one row
        self.continues = True  # False if several tokens cannot be read after a state
        self.dtypes = {self.shape.dtype, *(one.dtype for one in self.states.by_key.values())}
        own.rules = seen.rules
        if self.states.by_key:
            own.places = {layer: place for place, layer in enumerate(sorted(seen.shapes))}
        # True: our kernels compute attention and draw; False: torch does
        on_gpu = self.device.type == "cuda" and self.shape.dtype.itemsize <= 4
        self.on_gpu = on_gpu or self.exact  # exact: training has found that the kernels run, possibly interpreted
        self.why_no_graphs = None if on_gpu else f"{self.shape.dtype} on {self.device.type}"
        self._pool: Any = None  # memory that the graphs share
        self.compiled_tiles: set[int] = set()  # whose kernels are compiled: see compiling.py
        self.compiling: threading.Thread | None = None
        getting_ready()
        self.layers: FusedLayers | OwnLayers = own
        self.why_own: str | None = None
        try:
            self.layers = self._fused()(self.model, self.shape, seen.rules, self.table, self.on_gpu)
            self.layers.refresh(len(ids))
            if self.on_gpu and not self.exact:
                from strop.rollout.compiling import compile_step  # Triton

                compile_step(self, self.layers, ids)
            checks.check_states(checks.states_of(self.layers, ids, self.device), seen)
            checks.check_against_forward(self, policy)
        except Unsupported as error:
            if self.exact:
                raise
            self.layers, self.why_own = own, str(error)
            try:
                checks.check_against_forward(self, policy)
            except Unsupported:
                if not self.states.by_key:
                    raise
                self.continues = False
                checks.check_against_forward(self, policy)

    def _fused(self) -> type[FusedLayers]:
        if not self.exact:
            return FusedLayers
        from strop.rollout.exact import ExactLayers  # Triton

        return ExactLayers

    @property
    def name(self) -> str:
        layers = "exact layers" if self.exact else "fused layers" if self.why_own is None else "its own layers"
        graphs = "cuda graphs" if self.why_no_graphs is None else f"no cuda graphs: {self.why_no_graphs}"
        return f"{layers}, {graphs}"

    @property
    def num_graphs(self) -> int:
        return sum(map(len, self._graphs.values()))

    def complete(
        self,
        prompts: list[torch.Tensor],
        sampling: Sampling,
        num_samples: int,
        uniforms_BT: torch.Tensor,
        eos_ids: tuple[int, ...],
        cached: CachedRows | None = None,
        routers: Routers | None = None,
        matchers: Matchers | None = None,
    ) -> tuple[list[torch.Tensor], ...]:
        """Return tokens and log-probs of every completion, as `strop.rollout.generate` expects; with routers,
        the chosen experts too. `matchers` are those of the completions, if some have grammars.
        """
        taken = [0 if one is None else one.num_tokens for one in matchers or ()]
        T = sampling.max_new_tokens
        uniforms_BT = uniforms_BT.float().clamp(max=1 - 2**-24)  # rounded, but below 1
        tokens: list[torch.Tensor] = []
        logps: list[torch.Tensor] = []
        routing: list[torch.Tensor] = []
        recording = contextlib.nullcontext() if routers is None else routers.recording()
        self.layers.refresh(max(map(len, prompts)) + T)
        with self.layers.ready(), recording as latest:
            for first, end, lanes in self._rounds(prompts, num_samples, T):
                some = prompts[first:end], num_samples, lanes, sampling
                uniforms = uniforms_BT[first * num_samples : end * num_samples]
                round_, rows = self.begin(*some, uniforms, eos_ids)
                if routers is not None:
                    self._begin_record(round_, some[0], routers, latest)
                if matchers is not None:
                    round_.matchers = matchers[first * num_samples : end * num_samples]
                if cached is None:
                    self._prefill(prompts[first:end], round_)
                else:
                    read_on(self, prompts[first:end], round_, cached.part(first, end), PREFILL_TOKENS)
                    round_.kept = self.states.empty(len(uniforms) + 1) if self.continues else {}
                self._decode(rows, round_, sampling)
                tokens_BT, logps_BT = round_.tokens_BT.cpu(), round_.logps_BT.cpu()
                lengths_B = completion_lengths(tokens_BT, eos_ids)
                for row, matcher in enumerate(round_.matchers or ()):
                    if matcher is not None:
                        lengths_B[row] = matcher.num_tokens - taken[first * num_samples + row]
                if round_.record is not None:
                    lengths = lengths_B.tolist()
                    routing += round_.record.of_rows(prompts[first:end], round_.prefix_starts, lengths, num_samples)
                if (
                    cached is not None
                    and self.continues
                    and lanes == end - first
                    and round_.kv.shape[2] < self._num_slots() // 3
                ):
                    store(prompts[first:end], lengths_B.tolist(), round_, cached.part(first, end), T)
                del round_  # free its memory before the next round allocates a cache
                there_BT = torch.arange(T) < lengths_B[:, None]
                tokens += tokens_BT[there_BT].split(lengths_B.tolist())
                logps += logps_BT[there_BT].split(lengths_B.tolist())
        return (tokens, logps) if routers is None else (tokens, logps, routing)

    def _begin_record(self, round_: Round, prompts: list[torch.Tensor], routers: Routers, latest: Any) -> None:
        """Record the experts of the round's tokens from now on. `latest` is what `routers.recording` yields."""
        if self._chosen_NLk is None:
            self._chosen_NLk = step_memory(routers, BUCKETS[-1], self.device)
        num_slots = sum(len(prompt) - 1 for prompt in prompts)
        round_.record = Record.of(latest, self._chosen_NLk, num_slots, *round_.tokens_BT.shape)

    # ---- a round ----

    def _rounds(self, prompts: list[torch.Tensor], num_samples: int, T: int) -> Iterator[tuple[int, int, int]]:
        """Yield (first prompt, end, rows decoded together) of each round; mostly there is one.

        Prompts take at most half of the memory. Rows that do not fit into the rest wait for others to end.
        """
        num_slots, of_states = self._num_slots(), self.states.num_bytes // max(1, self.shape.bytes_per_slot)
        first = 0
        while first < len(prompts):
            end, prefix = first, 0
            while end < len(prompts) and (end == first or prefix + len(prompts[end]) <= num_slots // 2):
                prefix += len(prompts[end]) + of_states
                end += 1
            lanes = min((end - first) * num_samples, BUCKETS[-1], (num_slots - prefix) // (T + of_states))
            yield first, end, max(1, lanes)
            first = end

    def _num_slots(self) -> int:
        """Return the number of slots that fit into memory."""
        if self.device.type != "cuda":
            return 2**62
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        free = torch.cuda.mem_get_info(self.device)[0] + cached
        return int(SHARE_OF_MEMORY * free) // max(1, self.shape.bytes_per_slot)

    def begin(
        self, prompts: list[torch.Tensor], num_samples: int, lanes: int, sampling: Sampling, uniforms_BT: torch.Tensor,
        eos_ids: tuple[int, ...],
    ) -> tuple[Round, Rows]:  # fmt: skip
        """Return the round, and the first `lanes` of its rows, ready to decode."""
        device, T, B, shape = self.device, sampling.max_new_tokens, len(uniforms_BT), self.shape
        lengths_P = torch.tensor([len(prompt) - 1 for prompt in prompts])
        starts_P = lengths_P.cumsum(0) - lengths_P
        num_prefix, longest = int(lengths_P.sum()), int(lengths_P.max()) + T
        columns_B = torch.stack([torch.stack([prompt[-1] for prompt in prompts]), starts_P, lengths_P])
        token_B, prefix_start_B, prefix_length_B = columns_B.repeat_interleave(num_samples, 1).to(device)
        logps_dtype = torch.float64 if shape.dtype == torch.float64 else torch.float32
        round_ = Round(
            kv=torch.empty(shape.num_layers, 2, num_prefix + lanes * T + 1, shape.num_heads, shape.head_dim,
                           dtype=shape.dtype, device=device),
            uniforms_BT=uniforms_BT.to(device),
            tokens_BT=torch.zeros(B, T, dtype=torch.int64, device=device),
            logps_BT=torch.zeros(B, T, dtype=logps_dtype, device=device),
            eos=torch.tensor(eos_ids, dtype=torch.int64, device=device),
            token_B=token_B, prefix_start_B=prefix_start_B, prefix_length_B=prefix_length_B,
            prefix_starts=starts_P.tolist(), num_samples=num_samples, longest=longest, reach=longest,
            states=self.states.empty(len(prompts)),
        )  # fmt: skip
        rows = self._rows_for(lanes)
        rows.suffix_start_N[:lanes] = num_prefix + T * torch.arange(lanes, device=device)
        round_.enter(rows, torch.arange(lanes, device=device), 0)
        round_.make_spare(rows.after(lanes))
        if T > 1 and isinstance(self.layers, FusedLayers) and not self.on_gpu:
            self.layers.pack(lanes)  # takes as long as a step
        if self.on_gpu:
            self.table[:6] = torch.tensor(round_.table())
            self._use_eos(eos_ids)
        return round_, rows

    def _rows_for(self, size: int) -> Rows:
        """Return rows for a step of this size; on a GPU always in the same memory, which the graphs read."""
        if not self.on_gpu:
            return Rows.empty(size, self.device, self.states)
        if self._rows is None:
            self._rows = Rows.empty(BUCKETS[-1], self.device)
        size = bucket_of(size)
        if self.states.by_key and size > min(map(len, self._rows.states.values()), default=0):
            self._graphs.clear()  # graphs hold the addresses of the old states
            self._rows.states = self.states.empty(size)
        return self._rows.first(size)

    def _use_eos(self, eos_ids: tuple[int, ...]) -> None:
        if len(eos_ids) > len(self.eos):  # its address changes, so the graphs are invalid
            self.eos = torch.full((1 << len(eos_ids).bit_length(),), -1, dtype=torch.int64, device=self.device)
            self._graphs.clear()
        self.eos.fill_(-1)
        self.eos[: len(eos_ids)] = torch.tensor(eos_ids, dtype=torch.int64)

    def _prefill(self, prompts: list[torch.Tensor], round_: Round, skip: Collection[int] = ()) -> None:
        if self.states.by_key:
            read_chunks(self, prompts, round_, {i: 0 for i in range(len(prompts)) if i not in skip}, PREFILL_TOKENS)
            return
        there = [i for i in range(len(prompts)) if len(prompts[i]) > 1 and i not in skip]
        order = sorted(there, key=lambda i: len(prompts[i]))
        while order:
            longest = len(prompts[order[-1]]) - 1
            part = order[-max(1, PREFILL_TOKENS // longest) :]
            order = order[: -len(part)]
            ids_PT = torch.zeros(len(part), longest, dtype=torch.int64)
            tokens, slots_ = [], []
            for p, i in enumerate(part):
                length = len(prompts[i]) - 1
                ids_PT[p, :length] = prompts[i][:-1]
                tokens.append(torch.arange(length) + p * longest)
                slots_.append(torch.arange(length) + round_.prefix_starts[i])
            tokens_M, slots_M = (torch.cat(one).to(self.device) for one in (tokens, slots_))
            positions_PT = torch.arange(longest, device=self.device).expand(len(part), -1)
            ends = torch.arange(len(part) + 1, dtype=torch.int32, device=self.device) * longest
            by_kernel = self.on_gpu and self.shape.dtype.itemsize == 2
            prefill: Pass = Prefill(round_.kv, tokens_M, slots_M, ends if by_kernel else None)
            if self.exact:
                new = [len(prompts[i]) - 1 for i in part]
                prefill = self.reading([round_.prefix_starts[i] for i in part], [0] * len(part), new)
            self.layers.read(prefill, ids_PT.to(self.device), positions_PT, with_logits=False)
            if round_.record is not None:
                round_.record.read_prompts(tokens_M, slots_M)

    def reading(self, starts: Sequence[int], have: Sequence[int], new: Sequence[int]) -> Pass:
        """Return the exact pass that reads `new` tokens of rows.

        The rows' slots begin at `starts` and hold `have` tokens.
        """
        from strop.rollout.exact import Slotted

        return Slotted.prompts(self.table, starts, have, new)

    def _decode(self, rows: Rows, round_: Round, sampling: Sampling) -> None:
        """Decode until all rows have ended.

        The first `live` places hold real rows. row_L are these rows; begun_L is the step at which each began.
        """
        B, T = round_.tokens_BT.shape
        live = entered = int((rows.finished_N == 0).sum())
        row_L, begun_L = torch.arange(live), torch.zeros(live, dtype=torch.int64)
        round_.enter_states(rows, row_L.to(self.device))
        self._tile(rows, round_, row_L)
        oldest = done = 0
        while True:
            left = oldest + T - done  # steps of the row that began first
            num_steps = min(ASK_EVERY, left)
            goes_on_L = self._steps(num_steps, rows, round_, sampling, wait=num_steps == left)[:live] == 0
            done += num_steps
            free = (~goes_on_L).nonzero().flatten()[: B - entered]
            if len(free):
                round_.enter(rows, free.to(self.device), entered)
                row_L[free] = torch.arange(entered, entered + len(free))
                begun_L[free], goes_on_L[free] = done, True
                entered += len(free)
            kept = goes_on_L.nonzero().flatten()
            if not len(kept):
                return
            smaller = bucket_of(len(kept)) if self.on_gpu else len(kept)
            if smaller <= len(rows) // 2 or len(free):
                if smaller > len(rows) // 2:
                    kept, smaller = torch.arange(live), len(rows)
                kept = kept[(row_L[kept] // round_.num_samples).argsort(stable=True)]  # a prompt's rows are neighbours
                rows.keep(kept.to(self.device))
                rows, live = rows.first(smaller), len(kept)
                round_.make_spare(rows.after(live))
                row_L, begun_L, goes_on_L = row_L[kept], begun_L[kept], goes_on_L[kept]
                self._tile(rows, round_, row_L)
            oldest = int(begun_L[goes_on_L].min())

    def _tile(self, rows: Rows, round_: Round, row_L: torch.Tensor) -> None:
        """Write the tiles for the kernels: which rows read their prompt together."""
        if not self.on_gpu or not (parts := self.parts(rows, round_)).of_prompt:
            return
        from strop.rollout.launch import tiles_of

        tiles = tiles_of((row_L // round_.num_samples).tolist(), parts.tile // self.shape.per_head)
        tiles_CN = torch.zeros(self.tiles_CN.shape, dtype=torch.int32)
        tiles_CN[:, : len(tiles)] = torch.tensor(tiles).T
        self.tiles_CN.copy_(tiles_CN)

    def parts(self, rows: Rows, round_: Round, longest: int | None = None) -> Any:
        """Return how attention is divided. longest: tokens of the longest prompt; None is the round's."""
        from strop.rollout.launch import Parts, parts_of

        if self.exact:  # exact attention is always computed the same way
            return Parts()

        T = round_.tokens_BT.shape[1]
        prefix = round_.longest - T if longest is None else longest
        return parts_of(len(rows), self.shape, prefix, T, len(round_.prefix_starts), round_.num_samples)

    def _steps(self, num_steps: int, rows: Rows, round_: Round, sampling: Sampling, *, wait: bool) -> torch.Tensor:
        """Run num_steps steps and return which rows have ended, as 1.

        Without `wait` the flags are those before the last step, so that the device has work while the host looks.
        """
        if not self.on_gpu:
            round_.reach = int((rows.prefix_length_N + rows.step_N).max()) + 1
        for _ in range(num_steps - 1):
            self._step(rows, round_, sampling)
        if wait or self._flags is None:
            self._step(rows, round_, sampling)
            return rows.finished_N.cpu()
        flags = self._flags[: len(rows)].copy_(rows.finished_N, non_blocking=True)
        copied = torch.cuda.current_stream(self.device).record_event()
        self._step(rows, round_, sampling)
        copied.synchronize()
        return flags

    # ---- a step ----

    def _step(self, rows: Rows, round_: Round, sampling: Sampling) -> None:
        matchers = None if round_.matchers is None else self._allow(rows, round_)
        with round_.recorded(rows):
            self._bare_step(rows, round_, sampling)
        if matchers is not None:
            rows.finished_N[take(matchers, rows.token_N.tolist())] = 1

    def _allow(self, rows: Rows, round_: Round) -> Matchers:
        """Set `allowed_NW` and `round_.restricted` for a step; return the matchers of its rows that have not ended."""
        assert round_.matchers is not None
        places = zip(rows.row_N.tolist(), rows.finished_N.tolist(), strict=True)
        matchers = [None if finished else round_.matchers[row] for row, finished in places]
        round_.restricted = any(matchers)
        if round_.restricted:
            bits_NW = allowed_bits(matchers)
            if self.allowed_NW is None:  # always in the same memory, which the graphs read
                shape = (BUCKETS[-1], bits_NW.shape[1])
                self.allowed_NW = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self.allowed_NW[: len(bits_NW)] = bits_NW
        return matchers

    def _bare_step(self, rows: Rows, round_: Round, sampling: Sampling) -> None:
        if self.why_no_graphs is None:
            self._replay(rows, round_, sampling)
        elif self.on_gpu:
            self._step_on_gpu(rows, round_, sampling)
        else:
            self._draw(self._decode_logits(rows, round_), rows, round_, sampling)

    def _decode_logits(self, rows: Rows, round_: Round) -> torch.Tensor:
        """Return [N, V], the logits of the rows' next tokens."""
        if self.on_gpu:
            return self._logits_on_gpu(rows, round_)
        return self._logits(rows, round_, Decode(round_.kv, rows, round_.reach))

    def _logits_on_gpu(self, rows: Rows, round_: Round) -> torch.Tensor:
        if self.exact:
            from strop.rollout.exact import Slotted

            return self._logits(rows, round_, Slotted.decode(self.table, rows))
        from strop.rollout.launch import KernelDecode

        parts = self.parts(rows, round_)
        return self._logits(rows, round_, KernelDecode(self.table, rows, self.shape, parts, self.tiles_CN))

    def _step_on_gpu(self, rows: Rows, round_: Round, sampling: Sampling) -> None:
        from strop.rollout import exact
        from strop.rollout.launch import pick

        logits_NV = self._logits_on_gpu(rows, round_)
        if self.exact and not sampling.cuts and not round_.restricted:
            exact.pick(logits_NV, rows, self.eos, self.table, sampling.temperature)
            return
        if sampling.cuts:
            logits_NV, scale = sampling_logps(logits_NV, sampling), 1.0
        else:
            scale = 1.0 if sampling.greedy else 1 / sampling.temperature
        pick(logits_NV, rows, self.eos, self.table, scale, sampling.greedy)

    def _logits(self, rows: Rows, round_: Round, pass_: Pass) -> torch.Tensor:
        positions_N = (rows.prefix_length_N + rows.step_N).long()
        pass_.states = States(rows.states)
        logits_NV = self.layers.read(pass_, rows.token_N[:, None], positions_N[:, None])
        if round_.record is not None:
            round_.record.read_step(len(rows))
        if round_.restricted:
            assert self.allowed_NW is not None
            logits_NV = restricted(logits_NV, self.allowed_NW[: len(rows)])
        return logits_NV

    def _draw(self, logits_NV: torch.Tensor, rows: Rows, round_: Round, sampling: Sampling) -> None:
        """Draw as `launch.pick` does, in torch. Outputs are 0 until written, so rows that have ended add nothing."""
        at, going_N = (rows.row_N, rows.step_N.long()), rows.finished_N == 0
        tokens_N, logps_N = draw(logits_NV, round_.uniforms_BT[at], sampling)
        for into_BT, drawn_N in ((round_.tokens_BT, tokens_N), (round_.logps_BT, logps_N.to(round_.logps_BT.dtype))):
            into_BT.index_put_(at, torch.where(going_N, drawn_N, 0), accumulate=True)
        goes_on_N = going_N & ~torch.isin(tokens_N, round_.eos) & (rows.step_N + 1 < round_.tokens_BT.shape[1])
        rows.token_N.copy_(tokens_N)
        rows.finished_N.copy_(~goes_on_N)
        rows.step_N += goes_on_N
        round_.reach = min(round_.reach + 1, round_.longest)

    # ---- graphs ----

    def _replay(self, rows: Rows, round_: Round, sampling: Sampling) -> None:
        """Run a step as a graph.

        The first step of a kind runs without one, which compiles its kernels; then it is captured.
        """
        graphs = self._graphs_of(sampling)
        kind = len(rows), self.parts(rows, round_), round_.record is not None, round_.restricted
        if kind in graphs:
            graphs[kind].replay()
            return
        self._step_on_gpu(rows, round_, sampling)
        torch.cuda.synchronize(self.device)
        if not self.num_graphs:  # a pool is freed with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                self._step_on_gpu(rows, round_, sampling)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # the model reads values on the host, or allocates while capturing
            self.why_no_graphs = str(error).splitlines()[0]
            warnings.warn(f"decode steps cannot be captured as CUDA graphs: {self.why_no_graphs}", stacklevel=2)
        else:
            graphs[kind] = graph
            if not self.exact:
                from strop.rollout.compiling import compile_long_prompts

                compile_long_prompts(self, rows, round_)

    def _graphs_of(self, sampling: Sampling) -> dict[Any, Any]:
        rule = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        graphs = self._graphs.pop(rule, {})
        self._graphs[rule] = graphs  # the most recently used is last
        for old in list(self._graphs)[:-MAX_SAMPLINGS]:
            del self._graphs[old]
        return graphs


def _get_ready(device: torch.device) -> Callable[[], None]:
    """Start Triton in a thread beside the model's first forward, since it takes a second.

    Return a function that waits for it.
    """
    if device.type != "cuda":
        return lambda: None

    def start() -> None:
        from triton.runtime import cache, driver

        torch.cuda.set_device(device)
        driver.active.get_current_target()  # builds and loads the CUDA driver interface
        cache.triton_key()  # hashes Triton's source, for the names of kernels on disk

    thread = threading.Thread(target=start)
    thread.start()
    return thread.join


# ---- the engine of a policy ----


@dataclass(frozen=True)
class Fallback:
    """A slower engine for a model that `Engine` cannot run, and the reason."""

    name: str
    complete: Callable[..., tuple[list[torch.Tensor], ...]]
    why: str


FALLBACKS = {  # the fastest first; each is checked on prompts of unequal lengths
    "transformers' generate": transformers_generate.complete,
    "transformers' generate, prompts of one length together": transformers_generate.complete_by_length,
    "a forward of the whole row for each token": plain.complete,
}

_turn = threading.RLock()
"""Held during a rollout: it changes the model's attention, and a graph being captured bears no other thread's work beside it."""


def complete(
    policy: Policy,
    prompts: list[torch.Tensor],
    sampling: Sampling,
    num_samples: int,
    uniforms_BT: torch.Tensor,
    eos_ids: tuple[int, ...],
    cached: CachedRows | None = None,
    routers: Routers | None = None,
    matchers: Matchers | None = None,
) -> tuple[list[torch.Tensor], ...]:
    with _turn:
        engine = engine_of(policy)
        if policy.boundaries is not None and not boundaries.stays(policy.boundaries, prompts, sampling.max_new_tokens):
            if routers is not None:
                raise ValueError(
                    f"replay_routing must be False: rows of {max(map(len, prompts)) + sampling.max_new_tokens} tokens are "
                    f"beyond a length at which this {type(policy.model).__name__} takes other rotations, where experts are "
                    f"not recorded"
                )
            with_cache = engine.complete  # rows of earlier turns may be of another side, so they are read again
            if isinstance(engine, Engine):
                with_cache = functools.partial(_by_engine, engine)
            return boundaries.complete(
                with_cache, policy, prompts, sampling, num_samples, uniforms_BT, eos_ids, matchers
            )
        if isinstance(engine, Engine):
            return engine.complete(prompts, sampling, num_samples, uniforms_BT, eos_ids, cached, routers, matchers)
        if routers is not None:
            raise ValueError(
                f"replay_routing must be False: rollouts of this {type(policy.model).__name__} go through "
                f"{engine.name}, where the experts chosen are not recorded: {engine.why}"
            )
        return engine.complete(policy, prompts, sampling, num_samples, uniforms_BT, eos_ids, matchers=matchers)


def _by_engine(
    engine: Engine, policy: Policy, prompts: list[torch.Tensor], *request: Any, **further: Any
) -> tuple[list[torch.Tensor], ...]:
    """Complete with the engine.

    Beyond a boundary, models with states use whole forwards: the engine would read the first part of a prompt on
    another side.
    """
    assert policy.boundaries is not None
    if engine.states.by_key and policy.boundaries.side(len(prompts[0])) != policy.boundaries.side(1):
        return plain.complete(policy, prompts, *request, **further)
    return engine.complete(prompts, *request, **further)


def engine_of(policy: Policy) -> Engine | Fallback:
    """Return the engine for the weights at their present addresses, or its fallback. A fallback warns once."""
    if policy.rollout_engine is None:
        policy.check_reading()
    now = signature(policy.model, policy.boundaries)
    if policy.rollout_engine is None or policy.rollout_engine[0] != now:
        policy.rollout_engine = None  # free its memory first
        engine: Engine | Fallback
        try:
            engine = Engine(policy)
        except Unsupported as error:
            if policy.exact:
                found = type(policy.model).__name__
                raise ValueError(f"exact must be False for this {found}, found True: in a rollout {error}") from None
            engine = _fallback(policy, str(error))
            warnings.warn(
                f"rollouts of this {type(policy.model).__name__} go through {engine.name}, which is slower: {engine.why}",
                stacklevel=2,
            )
        policy.rollout_engine = now, engine
    return policy.rollout_engine[1]


def _fallback(policy: Policy, why: str) -> Fallback:
    """Return the fastest fallback whose log-probs agree with the model's own forward.

    Raise ValueError if there is none.
    """
    for name, complete_ in FALLBACKS.items():
        try:
            with policy.evaluating():
                checks.check_completions(complete_, policy)
                checks.check_beyond_windows(complete_, policy)
        except Unsupported as error:
            why += f"; by {name}: {error}"
        else:
            return Fallback(name, complete_, why)
    raise ValueError(f"model must be one that a rollout can run, found a {type(policy.model).__name__}: {why}")


def description(policy: Policy) -> str:
    """Return the name of the engine of this model's latest rollout."""
    _, engine = policy.rollout_engine or (None, None)
    if isinstance(engine, Fallback):
        return f"hf, {engine.name}: {engine.why}"
    return f"hf, {'none yet' if engine is None else engine.name}"
