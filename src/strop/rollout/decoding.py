"""Rollouts of Hugging Face models with a cache of slots; on a GPU every decode step is one replay of a CUDA graph.

    engine = Engine(policy)                     # Unsupported, with the reason, where the model's attention cannot be ours
    tokens, logps = engine.complete(prompts, sampling, num_samples, seed, eos_ids)

A rollout: the prompts are read once each into slots that all their samples share (slots.py). Then steps: the model on one
token of every row, attention over its slots, the draw, all on the device; the host asks now and then which rows have ended
and goes on with the rest as soon as they fit into half of the step's rows. The cache is freed at the end.

A graph is captured for a number of rows (see BUCKETS) and a way of sampling, with the addresses of the weights: training
changes these in place and the next rollout computes with what is there. Everything that differs between rollouts is read
from memory by the kernels, so lengths do not matter. Weights that moved make a new engine.

Under autocast over float32 weights the steps read 16-bit copies of the matrices, made anew for every rollout; else a step
would read twice the bytes and convert them, every time. Everything else is used in place.
"""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from strop.models import Policy, base_model, unwrapped
from strop.models.attention import Unsupported, attending, current
from strop.models.kinds import of_config
from strop.rollout import slots
from strop.rollout.sampling import Sampling, completion_lengths, draw, sampling_logps
from strop.rollout.slots import CacheShape, Decode, Prefill, Rows, Shapes

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # rows of a step; larger batches in several rounds
ASK_EVERY = 8  # steps between two looks at which rows have ended
PREFILL_TOKENS = 16384  # of prompts read together, padding included
SHARE_OF_MEMORY = 0.8  # of what is free, for a round's cache
MAX_SAMPLINGS = 2  # ways of sampling (training's, an evaluation's) whose graphs are kept


def bucket_of(num_rows: int) -> int:
    return next(size for size in BUCKETS if size >= num_rows)


@dataclass
class Round:
    """What the B rows decoded together need: their slots, their random numbers, and room for what they say.

    Each has room for one row more, the last, where the spare rows of a step write: nobody reads it.

    prefix_starts   the first slot of each prompt
    table           where all that is, for the kernels: see kernels.py
    """

    kv: torch.Tensor
    uniforms_BT: torch.Tensor
    tokens_BT: torch.Tensor
    logps_BT: torch.Tensor
    eos: torch.Tensor
    prefix_starts: list[int]
    longest_prefix: int

    def table(self) -> list[int]:
        addresses = [one.data_ptr() for one in (self.uniforms_BT, self.tokens_BT, self.logps_BT)]
        return [self.kv.data_ptr(), self.kv.shape[2], *addresses, self.tokens_BT.shape[1]]

    def make_spare(self, rows: Rows) -> None:
        """These rows only fill up a step: they are copies of one that goes on, and count as ended."""
        B, T = len(self.tokens_BT) - 1, self.tokens_BT.shape[1]
        rows.row_N[:] = B
        rows.suffix_start_N[:] = self.kv.shape[2] - T
        rows.finished_N[:] = 1


class Engine:
    """Completions of one model, on its device, under the autocast that is on."""

    def __init__(self, policy: Policy):
        self.model = base_model(unwrapped(policy.model))
        self.device = policy.device
        if devices := {param.device for param in self.model.parameters()} - {self.device}:
            raise Unsupported(f"its weights lie on several devices, {self.device} and {min(map(str, devices))}")
        self.autocast = _autocast_dtype(self.device)
        self.matrices = Matrices(self.model, self.autocast)
        self._keeps_logits = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        self._cache = slots.slot_cache()
        # None and not `_forward` itself: an engine that holds itself is not freed when it is let go
        self._compiled: Any = None
        if policy.model is not unwrapped(policy.model):  # the user wants it compiled
            self._compiled = torch.compile(self._forward)
        self.matrices.refresh()
        with self._ready():
            self.shape = _cache_shape(self.model, self.device, self._forward)
        # by our kernels; else attention and draw are torch's
        self.on_gpu = self.device.type == "cuda" and self.shape.dtype.itemsize <= 4
        self.why_no_graphs = None if self.on_gpu else f"{self.shape.dtype} on {self.device.type}"
        self._graphs: dict[Any, dict[int, Any]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.on_gpu else None
        self._rows: Rows | None = None
        self._table = torch.zeros(6, dtype=torch.int64, device=self.device)
        self._eos = torch.full((16,), -1, dtype=torch.int64, device=self.device)
        _check_against_forward(self, policy)

    @property
    def name(self) -> str:
        return "cuda graphs" if self.why_no_graphs is None else f"no cuda graphs: {self.why_no_graphs}"

    @property
    def num_graphs(self) -> int:
        return sum(map(len, self._graphs.values()))

    def complete(
        self, prompts: list[torch.Tensor], sampling: Sampling, num_samples: int, seed: int, eos_ids: tuple[int, ...]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Tokens and log-probs of every completion, as `strop.rollout.generate` wants them."""
        generator = torch.Generator().manual_seed(seed)
        total = len(prompts) * num_samples
        uniforms_BT = torch.rand(total, sampling.max_new_tokens, generator=generator)
        tokens: list[torch.Tensor] = []
        logps: list[torch.Tensor] = []
        rows = [index // num_samples for index in range(total)]
        self.matrices.refresh()
        with self._ready():
            for start in range(0, total, size := self._rows_of_a_round(prompts, sampling, total)):
                part = rows[start : start + size]
                made = self._round([prompts[i] for i in sorted(set(part))], part, sampling,
                                   uniforms_BT[start : start + size], eos_ids)  # fmt: skip
                for found_BT, out in zip(made, (tokens, logps), strict=True):
                    out += [row.clone() for row in found_BT]
        return tokens, logps

    # ---- a round ----

    def _rows_of_a_round(self, prompts: list[torch.Tensor], sampling: Sampling, total: int) -> int:
        if self.device.type != "cuda":
            return min(total, BUCKETS[-1])
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        free = torch.cuda.mem_get_info(self.device)[0] + cached
        slots_there = int(SHARE_OF_MEMORY * free) // self.shape.bytes_per_slot - sum(map(len, prompts))
        return max(1, min(total, BUCKETS[-1], slots_there // sampling.max_new_tokens - 1))

    def _round(
        self, prompts: list[torch.Tensor], owners: list[int], sampling: Sampling, uniforms_BT: torch.Tensor,
        eos_ids: tuple[int, ...],
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:  # fmt: skip
        """Rows decoded together: each belongs to a prompt, `owners` being numbers in the whole rollout, adjacent."""
        first = owners[0]
        owners = [owner - first for owner in owners]
        round_, rows = self._begin(prompts, owners, sampling, uniforms_BT, eos_ids)
        self._prefill(prompts, round_)
        self._decode(rows, round_, sampling)
        tokens_BT, logps_BT = round_.tokens_BT[:-1].cpu(), round_.logps_BT[:-1].cpu()
        lengths = completion_lengths(tokens_BT, eos_ids).tolist()
        return (
            [row[:length] for row, length in zip(tokens_BT, lengths, strict=True)],
            [row[:length] for row, length in zip(logps_BT, lengths, strict=True)],
        )

    def _begin(
        self, prompts: list[torch.Tensor], owners: list[int], sampling: Sampling, uniforms_BT: torch.Tensor,
        eos_ids: tuple[int, ...],
    ) -> tuple[Round, Rows]:  # fmt: skip
        device, T, B = self.device, sampling.max_new_tokens, len(owners)
        lengths_P = torch.tensor([len(prompt) - 1 for prompt in prompts])
        starts_P = lengths_P.cumsum(0) - lengths_P
        num_prefix = int(lengths_P.sum())
        shape = self.shape
        logps_dtype = torch.float64 if shape.dtype == torch.float64 else torch.float32
        round_ = Round(
            kv=torch.empty(shape.num_layers, 2, num_prefix + (B + 1) * T, shape.num_heads, shape.head_dim,
                           dtype=shape.dtype, device=device),
            uniforms_BT=torch.nn.functional.pad(uniforms_BT, (0, 0, 0, 1)).to(device),
            tokens_BT=torch.zeros(B + 1, T, dtype=torch.int64, device=device),
            logps_BT=torch.zeros(B + 1, T, dtype=logps_dtype, device=device),
            eos=torch.tensor(eos_ids, dtype=torch.int64, device=device),
            prefix_starts=starts_P.tolist(),
            longest_prefix=int(lengths_P.max()),
        )  # fmt: skip
        round_.kv[:, :, -T:] = 0.0  # a spare row made later reads there what none has written
        rows = self._rows_for(B)
        owners_B = torch.tensor(owners)
        columns = {
            "token_N": torch.stack([prompt[-1] for prompt in prompts])[owners_B],
            "row_N": torch.arange(B),
            "finished_N": torch.zeros(B),
            "prefix_start_N": starts_P[owners_B],
            "prefix_length_N": lengths_P[owners_B],
            "suffix_start_N": num_prefix + T * torch.arange(B),
        }
        for name, column in columns.items():
            target = getattr(rows, name)
            target[:B].copy_(column)
            target[B:] = target[:1]
        round_.make_spare(rows.after(B))
        rows.step.zero_()
        if self.on_gpu:
            self._table.copy_(torch.tensor(round_.table()))
            self._use_eos(eos_ids)
        return round_, rows

    def _rows_for(self, size: int) -> Rows:
        """Rows for a step of this size; on a GPU always in the same memory, where the graphs look for them."""
        if not self.on_gpu:
            return Rows.empty(size, self.device)
        if self._rows is None:
            self._rows = Rows.empty(BUCKETS[-1], self.device)
        return self._rows.first(bucket_of(size))

    def _use_eos(self, eos_ids: tuple[int, ...]) -> None:
        if len(eos_ids) > len(self._eos):  # another place: the graphs are not valid any more
            self._eos = torch.full((1 << len(eos_ids).bit_length(),), -1, dtype=torch.int64, device=self.device)
            self._graphs.clear()
        self._eos.fill_(-1)
        self._eos[: len(eos_ids)] = torch.tensor(eos_ids, dtype=torch.int64)

    def _prefill(self, prompts: list[torch.Tensor], round_: Round) -> None:
        order = sorted((i for i in range(len(prompts)) if len(prompts[i]) > 1), key=lambda i: len(prompts[i]))
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
            moved = [torch.cat(one).to(self.device) for one in (tokens, slots_)]
            positions_PT = torch.arange(longest, device=self.device).expand(len(part), -1)
            with current(Prefill(round_.kv, *moved)):
                self._forward(ids_PT.to(self.device), positions_PT)

    def _decode(self, rows: Rows, round_: Round, sampling: Sampling) -> None:
        num_steps = sampling.max_new_tokens
        for done in range(num_steps):
            self._step(rows, round_, sampling, done)
            if (done + 1) % ASK_EVERY or done + 1 == num_steps:
                continue
            going = (rows.finished_N == 0).nonzero().flatten()
            if not len(going):
                return
            smaller = bucket_of(len(going)) if self.on_gpu else len(going)
            if smaller <= len(rows) // 2:
                rows.keep(torch.cat([going, going[:1].expand(smaller - len(going))]))
                rows = rows.first(smaller)
                round_.make_spare(rows.after(len(going)))

    # ---- a step ----

    def _step(self, rows: Rows, round_: Round, sampling: Sampling, done: int) -> None:
        if self.why_no_graphs is None:
            self._replay(rows, sampling)
        elif self.on_gpu:
            self._step_on_gpu(rows, sampling)
        else:
            self._draw(self._decode_logits(rows, round_, done), rows, round_, sampling)
            rows.step += 1

    def _decode_logits(self, rows: Rows, round_: Round, done: int) -> torch.Tensor:
        """[N, V] of the rows' next tokens; `done` is their step, known to the host."""
        if self.on_gpu:
            return self._logits_on_gpu(rows)
        with current(Decode(round_.kv, rows, round_.longest_prefix + done + 1)):
            return self._logits(rows)

    def _logits_on_gpu(self, rows: Rows) -> torch.Tensor:
        from strop.rollout.launch import KernelDecode

        with current(KernelDecode(self._table, rows, self.shape)):
            return self._logits(rows)

    def _step_on_gpu(self, rows: Rows, sampling: Sampling) -> None:
        from strop.rollout.launch import pick

        logits_NV = self._logits_on_gpu(rows)
        if sampling.cuts:
            logits_NV, scale = sampling_logps(logits_NV, sampling), 1.0
        else:
            scale = 1.0 if sampling.greedy else 1 / sampling.temperature
        pick(logits_NV, rows, self._eos, self._table, scale, sampling.greedy)
        rows.step += 1

    def _logits(self, rows: Rows) -> torch.Tensor:
        positions_N = rows.prefix_length_N + rows.step
        forward = self._compiled or self._forward
        return forward(rows.token_N[:, None], positions_N[:, None].long())[:, -1]

    def _draw(self, logits_NV: torch.Tensor, rows: Rows, round_: Round, sampling: Sampling) -> None:
        step = int(rows.step)
        tokens_N, logps_N = draw(logits_NV, round_.uniforms_BT[rows.row_N, step], sampling)
        round_.tokens_BT[rows.row_N, step] = tokens_N
        round_.logps_BT[rows.row_N, step] = logps_N.to(round_.logps_BT.dtype)
        rows.token_N.copy_(tokens_N)
        rows.finished_N |= torch.isin(tokens_N, round_.eos).to(torch.int8)

    def _forward(self, ids_NT: torch.Tensor, positions_NT: torch.Tensor) -> torch.Tensor:
        """Logits of at least the last column."""
        options = {"logits_to_keep": 1} if self._keeps_logits else {}
        output = self.model(
            input_ids=ids_NT, position_ids=positions_NT, past_key_values=self._cache, use_cache=True, **options
        )
        return output.logits

    # ---- graphs ----

    def _replay(self, rows: Rows, sampling: Sampling) -> None:
        """A step as a graph; the first of its kind is taken step by step, which compiles its kernels, and then captured."""
        graphs = self._graphs_of(sampling)
        if len(rows) in graphs:
            graphs[len(rows)].replay()
            return
        self._step_on_gpu(rows, sampling)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                self._step_on_gpu(rows, sampling)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # it looks at values on the host, or allocates as capturing does not allow
            self.why_no_graphs = str(error).splitlines()[0]
            warnings.warn(f"decode steps cannot be captured as CUDA graphs: {self.why_no_graphs}", stacklevel=2)
        else:
            graphs[len(rows)] = graph

    def _graphs_of(self, sampling: Sampling) -> dict[int, Any]:
        rule = (sampling.temperature, sampling.top_k, sampling.top_p)
        graphs = self._graphs.pop(rule, {})
        self._graphs[rule] = graphs  # the latest used is the last
        for old in list(self._graphs)[:-MAX_SAMPLINGS]:
            del self._graphs[old]
        return graphs

    @contextlib.contextmanager
    def _ready(self) -> Iterator[None]:
        """The model as the engine calls it: attention by slots, 16-bit matrices, no compiled forward, no gradient.

        Autocast must not remember a converted weight: a graph would go on with it when the weight has changed.
        """
        compiled, self.model._compiled_call_impl = self.model._compiled_call_impl, None
        cast = torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None, cache_enabled=False)
        try:
            with torch.no_grad(), cast, attending(self.model), self.matrices.in_place():
                yield
        finally:
            self.model._compiled_call_impl = compiled


class Matrices:
    """16-bit copies of what autocast would convert in every step: the parameters of linear layers and of experts."""

    def __init__(self, model: Any, dtype: torch.dtype | None):
        self.places: list[tuple[dict[str, Any], str]] = []
        if dtype is not None:
            for module in model.modules():
                for name, param in module._parameters.items():
                    if param is not None and param.dtype == torch.float32 and _is_converted(module, param):
                        self.places.append((module._parameters, name))
        self.copies = [torch.empty_like(param, dtype=dtype, requires_grad=False) for param in self.originals]

    @property
    def originals(self) -> list[torch.Tensor]:
        """Asked for each time: a parameter may be another object over the same memory by now."""
        return [owner[name] for owner, name in self.places]

    def refresh(self) -> None:
        """Outside of `in_place`."""
        if self.copies:
            torch._foreach_copy_(self.copies, [param.detach() for param in self.originals])

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the model computes with the copies."""
        originals = self.originals
        for (owner, name), copy in zip(self.places, self.copies, strict=True):
            owner[name] = copy
        try:
            yield
        finally:
            for (owner, name), original in zip(self.places, originals, strict=True):
                owner[name] = original


def _is_converted(module: Any, param: torch.Tensor) -> bool:
    return isinstance(module, torch.nn.Linear) or (param.ndim >= 2 and not isinstance(module, torch.nn.Embedding))


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def signature(policy: Policy) -> Any:
    """Changes when an engine made before cannot be used any more: weights or buffers elsewhere, other adapters or another
    scaling of theirs, which a graph has as a number, other autocast.
    """
    model = unwrapped(policy.model)
    adapters = [
        (module.disable_adapters, tuple(module.merged_adapters), tuple(module.active_adapters), _scaling(module))
        for module in model.modules()
        if hasattr(module, "merged_adapters") and hasattr(module, "active_adapters")
    ]
    tensors = [(one.data_ptr(), one.dtype, one.shape) for one in (*model.parameters(), *model.buffers())]
    return _autocast_dtype(policy.device), adapters, tensors


def _scaling(adapted: Any) -> list[float]:
    scaling = getattr(adapted, "scaling", None)
    return [v for v in scaling.values() if isinstance(v, (int, float))] if isinstance(scaling, dict) else []


# ---- whether a model can be run so ----


def _cache_shape(model: Any, device: torch.device, forward: Callable[..., Any]) -> CacheShape:
    """From a forward of two tokens. What is not as it should be is a reason not to use the engine."""
    seen = Shapes()
    try:
        with current(seen):
            forward(torch.zeros(1, 2, dtype=torch.int64, device=device), torch.arange(2, device=device)[None])
    except (Unsupported, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a model does with a cache or with arguments it does not know
        raise Unsupported(f"its forward fails with a cache of slots ({type(error).__name__}: {error})") from error
    shapes = set(seen.seen.values())
    if sorted(seen.seen) != list(range(len(seen.seen))) or not shapes:
        raise Unsupported("its attention layers do not go through transformers' attention interface")
    if len(shapes) > 1:
        raise Unsupported("its layers have keys of different shapes")
    num_heads, key_dim, value_dim, dtype = shapes.pop()
    if key_dim != value_dim:
        raise Unsupported("its keys and values have different sizes")
    _check_windows(model, seen.windows)
    return CacheShape(len(seen.seen), num_heads, key_dim, dtype)


def _check_windows(model: Any, windows: dict[int, int]) -> None:
    """Some models have a window in their mask alone, which is not made here; a few tokens do not show it."""
    types = of_config(model.config, "layer_types") or ["sliding_attention"] * len(windows)
    if "chunked_attention" in types:
        raise Unsupported("its attention is in chunks")
    wanted = of_config(model.config, "sliding_window") or 0
    for layer, found in windows.items():
        if wanted and types[layer] == "sliding_attention" and not found:
            raise Unsupported("its attention is not told of its window")


PROBE = ([1, 2, 3, 4, 5], [3, 1], [2])
ERROR_ALLOWED = {
    torch.float64: 1e-6,
    torch.float32: 1e-3,
}  # relative; 0.1 in 16 bits, where experts may be chosen differently


def _check_against_forward(engine: "Engine", policy: Policy) -> None:
    """Two greedy steps of a few ragged prompts against plain forwards: the only way to know what a model does with positions."""
    size, longest = policy.vocab_size or 2, (policy.max_length or len(PROBE[0]) + 1) - 1
    prompts = [torch.tensor([i % size for i in prompt[:longest]]) for prompt in PROBE]
    sampling = Sampling(max_new_tokens=2, temperature=0.0)
    with engine._ready():
        round_, rows = engine._begin(prompts, list(range(len(prompts))), sampling, torch.zeros(len(prompts), 2), ())
        engine._prefill(prompts, round_)
        found = []
        for done in range(2):
            logits_NV = engine._decode_logits(rows, round_, done)
            found.append(logits_NV[: len(prompts)].float())
            engine._draw(logits_NV, rows, round_, sampling)
            rows.step += 1
    for i, prompt in enumerate(prompts):
        read = torch.cat([prompt, round_.tokens_BT[i, :1].cpu()]).to(engine.device)
        with torch.no_grad():
            wanted_TV = engine.model(input_ids=read[None], use_cache=False).logits[0, -2:].float()
        found_TV = torch.stack([one[i] for one in found])
        error = ((found_TV - wanted_TV).norm() / wanted_TV.norm()).item()
        if error > ERROR_ALLOWED.get(engine.shape.dtype, 0.1):
            raise Unsupported(
                f"its logits with a cache of slots are not those of its forward (relative error {error:.1e})"
            )
