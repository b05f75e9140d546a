"""The operators: strop against eager torch, torch.compile, Liger and the floors (see `strop.bench.loss_contenders`).

On a GPU in bfloat16 at the sizes of a training step; without one small sizes in float32 on the CPU, where `chunked` stands
against eager torch and memory is not measured. Tensors are made when a case is measured and freed with the last case
that uses them. A peer that does not run, or whose result is another one, is left out and the reason recorded.
"""

import dataclasses
import functools
import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from strop.bench import harness
from strop.bench import loss_contenders as peers
from strop.bench.harness import Case, Contender, GpuTimer, Method, WallGpuTimer
from strop.bench.loss_contenders import BETA, GROUP, Batch, Numbers
from strop.bench.text import duration, size
from strop.ops import grpo_loss, linear_dpo_loss, linear_grpo_loss, linear_logp, logp, ratio_kl

ON_GPU = True
FORWARD, BOTH, SCORE, FROZEN = "forward", "forward + backward", "score only", "forward + backward, frozen head"
GiB = 2**30
OPTIONS = {"samples_per_prompt": GROUP, "beta": BETA}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """logits: (B, T, V); heads: (B, T, H, V); kernels: Triton's run here, so Liger and the reading floors take part"""

    device: str
    dtype: torch.dtype
    logits: list[tuple[int, int, int]]
    small: tuple[int, int, int]
    heads: list[tuple[int, int, int, int]]
    copy_bytes: int
    kernels: bool
    compiled: bool
    head_rounds: int | None
    tolerance: float


ON_A_GPU = Sizes(
    device="cuda",
    dtype=torch.bfloat16,
    logits=[(32, 256, 32768), (32, 256, 50257), (32, 256, 131072)],
    small=(4, 64, 32768),
    heads=[(16, 256, 2048, 131072), (32, 256, 4096, 151936)],
    copy_bytes=4 * GiB,
    kernels=True,
    compiled=True,
    head_rounds=7,
    tolerance=0.05,
)
ON_A_CPU = Sizes(
    device="cpu",
    dtype=torch.float32,
    logits=[(4, 32, 8003)],
    small=(4, 8, 1009),
    heads=[(4, 64, 64, 8003)],
    copy_bytes=2**26,
    kernels=False,
    compiled=False,
    head_rounds=None,
    tolerance=1e-3,
)


def cases(sizes: Sizes | None = None) -> list[Any]:
    s = sizes or (ON_A_GPU if torch.cuda.is_available() else ON_A_CPU)
    found: list[Any] = [_copy(s), AccuracyOfLogits(s), AccuracyOfHeads(s)]
    for shape in s.logits:
        found += [_from_logits(s, shape, name, way) for name in LOGITS_BUILDERS for way in (FORWARD, BOTH)]
    found += [_from_logits(s, s.small, "grpo_loss", way, small=True) for way in (FORWARD, BOTH)]
    for head in s.heads:
        for name, way in HEAD_BUILDERS:
            if name != "linear_dpo_loss" or head == s.heads[0]:
                found.append(_from_hidden(s, head, name, way))
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossCase:
    """A case whose tensors and contenders are made when it is measured. The first contender is strop."""

    work: str
    labels: dict[str, Any]
    build: Callable[[], list[Contender]]
    clock: Callable[[Contender], harness.Timer] | None = None
    rounds: int | None = None

    def measure(self, method: Method) -> dict[str, Any]:
        able, left_out = [], {}
        for contender in self.build():
            try:
                contender.check()
            except Exception as error:  # a peer's failure is a fact about the peer; ours ends the run
                if contender.name.startswith("strop"):
                    raise
                left_out[contender.name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                continue
            able.append(dataclasses.replace(contender, expected=None))  # in place there is no second check
        labels = {**self.labels, **({"left_out": left_out} if left_out else {})}
        case = Case(work=self.work, labels=labels, contenders=able, clock=self.clock, rounds=self.rounds)
        try:
            return harness.measure(case, method)
        finally:
            del able, case
            _tidy()


def _tidy() -> None:
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@functools.lru_cache(maxsize=1)
def _problem(make: Callable[..., Any], sizes_id: int, *shape: Any) -> Any:
    """The tensors of the shape at hand; those of the one before are freed."""
    return make(*shape)


# ---- what a contender does --------------------------------------------------------------------------------------------


Call = Callable[[], tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]  # values, gradients


def forward_only(function: Callable[..., Any], *args: Any) -> Call:
    def call() -> Any:
        with torch.no_grad():
            return _as_tuple(function(*args)), ()

    return call


def with_gradients(
    inputs: Sequence[torch.Tensor], d_values: Sequence[torch.Tensor] | None, function: Callable[..., Any], *args: Any
) -> Call:
    def call() -> Any:
        values = _as_tuple(function(*args))
        return values, torch.autograd.grad(values, inputs, d_values)

    return call


def _as_tuple(values: Any) -> tuple[torch.Tensor, ...]:
    return tuple(values) if isinstance(values, tuple) else (values,)


class Builder:
    """Contenders that must all give the same numbers."""

    def __init__(self, sizes: Sizes, numbers: Numbers) -> None:
        self.sizes, self.numbers = sizes, numbers
        self.found: list[Contender] = []
        self.liger = peers.liger() if sizes.kernels else None

    def add(self, name: str, call: Call, inputs: Sequence[torch.Tensor], numbers: Numbers | None = None) -> None:
        numbers = numbers or self.numbers
        self.found.append(
            Contender(
                name=name, function=call, read=numbers, expected=numbers.expected, tolerance=self.sizes.tolerance,
                notes=self._notes(call, inputs),
            )
        )  # fmt: skip

    def floor(self, name: str, call: Callable[[], Any]) -> None:
        self.found.append(Contender(name=name, function=call))

    def _notes(self, call: Call, inputs: Sequence[torch.Tensor]) -> Callable[[], dict[str, Any]] | None:
        return (lambda: peers.peak_memory(call, list(inputs))) if self.sizes.device == "cuda" else None


# ---- from logits ------------------------------------------------------------------------------------------------------


class LogitsProblem:
    """A policy a little way from its reference and from the policy that sampled; every token counts."""

    def __init__(self, B: int, T: int, V: int, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        random = _Random(device, seed)
        self.policy = random.normal(B, T, V, dtype=dtype)
        self.ref = random.normal(B, T, V, dtype=dtype).mul_(0.1).add_(self.policy)
        ids_BT = random.ids(V, B, T)
        with torch.no_grad():
            logps, ref_logps = (_in_rows(peers.eager_logps, x, ids_BT) for x in (self.policy, self.ref))
        self.batch = random.batch(ids_BT, logps, ref_logps)
        self.advantages_B = peers.eager_advantages(self.batch.rewards_B)
        self.d_BT = random.normal(B, T)
        self.policy.requires_grad_()

    @functools.cached_property
    def gradient(self) -> torch.Tensor:
        """Memory for the floors to write."""
        return torch.empty_like(self.policy, requires_grad=False)

    @functools.cached_property
    def ref_with_one_more(self) -> torch.Tensor:
        return torch.cat([self.ref, self.ref[:, :1]], 1)

    def policy_with_one_more(self) -> torch.Tensor:
        return torch.cat([self.policy.detach(), self.policy.detach()[:, :1]], 1).requires_grad_()


class _Random:
    def __init__(self, device: str, seed: int) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device = device

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device=self.device, generator=self.generator)

    def ids(self, V: int, *shape: int) -> torch.Tensor:
        return torch.randint(V, shape, device=self.device, generator=self.generator)

    def batch(self, ids_BT: torch.Tensor, logps_BT: torch.Tensor, ref_logps_BT: torch.Tensor) -> Batch:
        B, T = ids_BT.shape
        mask_BT = torch.ones(B, T, dtype=torch.bool, device=self.device)
        return Batch(ids_BT, mask_BT, logps_BT + 0.1 * self.normal(B, T), ref_logps_BT, self.normal(B))


def _in_rows(function: Callable[..., torch.Tensor], x_BTV: torch.Tensor, ids_BT: torch.Tensor) -> torch.Tensor:
    """Row by row, for the sake of memory."""
    return torch.stack([function(x, ids) for x, ids in zip(x_BTV, ids_BT, strict=True)])


def _from_logits(s: Sizes, shape: tuple[int, int, int], name: str, way: str, small: bool = False) -> LossCase:
    B, T, V = shape
    element = s.dtype.itemsize
    passes = {("logp", FORWARD): 1, ("logp", BOTH): 3, ("ratio_kl", FORWARD): 2, ("ratio_kl", BOTH): 4,
              ("grpo_loss", FORWARD): 2, ("grpo_loss", BOTH): 3}[name, way]  # fmt: skip
    labels = {
        "operator": name, "way": way, "shape": f"{B}×{T}", "vocabulary": V, "dtype": str(s.dtype).split(".")[1],
        "floor_bytes": passes * B * T * V * element, "clock": "wall" if small else "device",
    }  # fmt: skip

    def build() -> list[Contender]:
        problem = _problem(LogitsProblem, id(s), B, T, V, s.device, s.dtype)
        return LOGITS_BUILDERS[name](s, problem, way, small)

    clock = None if s.device == "cpu" else WallGpuTimer if small else GpuTimer
    work = f"{name} {way} {B}×{T}, V {V:,}" + (", wall clock" if small else "")
    return LossCase(work=work, labels=labels, build=build, clock=clock)


def _ways(way: str, problem: LogitsProblem, d_values: Sequence[torch.Tensor] | None) -> Callable[..., Call]:
    """`call_of(function, logits, …)`: the forward, or with the gradient of the first argument."""
    if way == FORWARD:
        return forward_only
    return lambda function, logits, *args: with_gradients([logits], d_values, function, logits, *args)


def _logp_contenders(s: Sizes, p: LogitsProblem, way: str, small: bool) -> list[Contender]:
    ids = p.batch.ids_BT
    call_of = _ways(way, p, [p.d_BT])
    eager = call_of(peers.eager_logps, p.policy, ids)
    build = Builder(s, Numbers(eager(), ids))
    build.add("strop", call_of(logp, p.policy, ids), [p.policy])
    build.add("eager", eager, [p.policy])
    if (liger := build.liger) and way == FORWARD:
        x = p.policy_with_one_more().detach()
        build.add("Liger", forward_only(lambda: liger.logps(x, ids, temperature=1.0)), [x])
    if s.kernels:
        build.floor("floor", (lambda: peers.read(p.policy)) if way == FORWARD else _read_read_write(p))
    return build.found


def _ratio_kl_contenders(s: Sizes, p: LogitsProblem, way: str, small: bool) -> list[Contender]:
    b = p.batch
    call_of = _ways(way, p, [p.d_BT, p.d_BT.flip(0)])
    eager = call_of(peers.eager_ratio_kl, p.policy, p.ref, b)
    build = Builder(s, Numbers(eager(), b.ids_BT))
    build.add("strop", call_of(ratio_kl, p.policy, p.ref, b.ids_BT, b.mask_BT, b.old_BT), [p.policy, p.ref])
    build.add("eager", eager, [p.policy, p.ref])
    if s.kernels:
        build.floor("floor", (lambda: peers.read(p.policy, p.ref)) if way == FORWARD else _read_read_read_write(p))
    return build.found


def _grpo_contenders(s: Sizes, p: LogitsProblem, way: str, small: bool) -> list[Contender]:
    b = p.batch
    call_of = _ways(way, p, None)

    def ours(logits: torch.Tensor, in_place: bool) -> torch.Tensor:
        return grpo_loss(
            logits, p.ref, b.ids_BT, b.old_BT, b.rewards_B, b.mask_BT, in_place=in_place, **OPTIONS
        ).loss  # fmt: skip

    eager = call_of(peers.eager_grpo_loss, p.policy, p.ref, b)
    build = Builder(s, Numbers(eager(), b.ids_BT))
    build.add("strop", call_of(ours, p.policy, False), [p.policy])
    if way == BOTH and s.kernels:
        overwritten = p.policy.detach().clone().requires_grad_()
        build.add("strop in place", call_of(ours, overwritten, True), [overwritten])
    build.add("eager", eager, [p.policy])
    if s.compiled and not small:
        compiled = torch.compile(peers.eager_grpo_loss, dynamic=False)
        build.add("torch.compile", call_of(compiled, p.policy, p.ref, b), [p.policy])
    if build.liger:
        for name, in_place in (("Liger", False), ("Liger in place", True))[: 1 if way == FORWARD else 2]:
            x = p.policy_with_one_more()
            integers = b._replace(mask_BT=b.mask_BT.long())
            build.add(
                name, call_of(peers.liger_grpo_loss, x, p.ref_with_one_more, integers, p.advantages_B, in_place), [x]
            )
    if s.kernels:
        build.floor("floor", (lambda: peers.read(p.policy, p.ref)) if way == FORWARD else _read_read_write(p))
    return build.found


def _read_read_write(p: LogitsProblem) -> Callable[[], Any]:
    """Two tensors read, one written: torch's own addition."""
    policy, ref, gradient = p.policy.detach(), p.ref, p.gradient
    return lambda: torch.add(policy, ref, out=gradient)


def _read_read_read_write(p: LogitsProblem) -> Callable[[], Any]:
    """With the policy's logits once more: the way back comes when all log-probs are known."""
    last = _read_read_write(p)

    def call() -> None:
        peers.read(p.policy)
        last()

    return call


LOGITS_BUILDERS = {"grpo_loss": _grpo_contenders, "logp": _logp_contenders, "ratio_kl": _ratio_kl_contenders}


# ---- from hidden states -----------------------------------------------------------------------------------------------


class HeadProblem:
    """An LM head whose logits have variance 1."""

    def __init__(self, B: int, T: int, H: int, V: int, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        random = _Random(device, seed)
        self.hidden = random.normal(B, T, H, dtype=dtype)
        self.weight = random.normal(V, H, dtype=dtype).mul_(H**-0.5)
        ids_BT = random.ids(V, B, T)
        with torch.no_grad():
            logps = torch.stack([
                peers.eager_linear_logps(h, self.weight, ids) for h, ids in zip(self.hidden, ids_BT, strict=True)
            ])  # fmt: skip
        self.batch = random.batch(ids_BT, logps, logps + 0.1 * random.normal(B, T))
        self.advantages_B = peers.eager_advantages(self.batch.rewards_B)
        self.d_BT = random.normal(B, T)
        self.hidden.requires_grad_()
        self.weight.requires_grad_()

    @functools.cached_property
    def logits_NV(self) -> torch.Tensor:
        """Memory for the floors to write."""
        B, T, _ = self.hidden.shape
        return torch.empty(B * T, len(self.weight), dtype=self.weight.dtype, device=self.weight.device)

    def products(self, number: int) -> Callable[[], None]:
        return peers.products(number, self.hidden.detach().flatten(0, 1), self.weight.detach(), self.logits_NV)


def _from_hidden(s: Sizes, shape: tuple[int, int, int, int], name: str, way: str) -> LossCase:
    B, T, H, V = shape
    labels = {
        "operator": name, "way": way, "shape": f"{B * T}", "hidden": H, "vocabulary": V, "dtype": str(s.dtype).split(".")[1],
        "clock": "device",
    }  # fmt: skip

    def build() -> list[Contender]:
        return HEAD_BUILDERS[name, way](s, _problem(HeadProblem, id(s), B, T, H, V, s.device, s.dtype))

    clock = None if s.device == "cpu" else GpuTimer
    work = f"{name} {way} N {B * T:,}, H {H:,}, V {V:,}"
    return LossCase(work=work, labels=labels, build=build, clock=clock, rounds=s.head_rounds)


def _linear_grpo_contenders(s: Sizes, p: HeadProblem) -> list[Contender]:
    b, inputs = p.batch, [p.hidden, p.weight]

    def ours(workspace: int | None) -> torch.Tensor:
        return linear_grpo_loss(
            p.hidden, p.weight, b.ids_BT, b.old_BT, b.rewards_B, b.mask_BT, ref_logps=b.ref_BT, workspace=workspace,
            **OPTIONS,
        ).loss  # fmt: skip

    both = functools.partial(with_gradients, inputs, None)
    eager = both(peers.eager_linear_grpo_loss, p.hidden, p.weight, b)
    build = Builder(s, Numbers(eager()))
    build.add("strop", both(ours, None), inputs)
    build.add("strop, 1 GiB", both(ours, GiB), inputs)
    build.add("eager", eager, inputs)
    if s.compiled:
        build.add(
            "torch.compile",
            both(torch.compile(peers.eager_linear_grpo_loss, dynamic=False), p.hidden, p.weight, b),
            inputs,
        )
    if build.liger:
        for name, sequences in (("Liger", 1), ("Liger, one chunk", len(b.ids_BT))):
            call = both(peers.liger_linear_grpo_loss, p.hidden, p.weight, b, p.advantages_B, sequences)
            build.add(name, call, inputs)
        other = Numbers(both(lambda: -peers.eager_linear_logps(p.hidden, p.weight, b.ids_BT).mean())())
        call = both(peers.liger_linear_cross_entropy, p.hidden, p.weight, b.ids_BT)
        build.add("Liger cross-entropy", call, inputs, other)
    build.floor("floor", p.products(3))
    return build.found


def _frozen_contenders(s: Sizes, p: HeadProblem) -> list[Contender]:
    b, inputs, frozen = p.batch, [p.hidden], p.weight.detach()

    def ours() -> torch.Tensor:
        return linear_grpo_loss(
            p.hidden, frozen, b.ids_BT, b.old_BT, b.rewards_B, b.mask_BT, ref_logps=b.ref_BT, **OPTIONS
        ).loss  # fmt: skip

    both = functools.partial(with_gradients, inputs, None)
    eager = both(peers.eager_linear_grpo_loss, p.hidden, frozen, b)
    build = Builder(s, Numbers(eager()))
    build.add("strop", both(ours), inputs)
    build.add("eager", eager, inputs)
    build.floor("floor", p.products(2))
    return build.found


def _score_contenders(s: Sizes, p: HeadProblem) -> list[Contender]:
    given = p.hidden, p.weight, p.batch.ids_BT
    eager = forward_only(peers.eager_linear_logps, *given)
    build = Builder(s, Numbers(eager()))
    build.add("strop", forward_only(linear_logp, *given), given)
    build.add("eager", eager, given)
    if s.compiled:
        build.add("torch.compile", forward_only(torch.compile(peers.eager_linear_logps, dynamic=False), *given), given)
    if liger := build.liger:
        build.add("Liger", forward_only(liger.linear_logps, *given), given)
    build.floor("floor", p.products(1))
    return build.found


def _linear_logp_contenders(s: Sizes, p: HeadProblem) -> list[Contender]:
    given, inputs = (p.hidden, p.weight, p.batch.ids_BT), [p.hidden, p.weight]
    both = functools.partial(with_gradients, inputs, [p.d_BT])
    eager = both(peers.eager_linear_logps, *given)
    build = Builder(s, Numbers(eager()))
    build.add("strop", both(linear_logp, *given), inputs)
    build.add("eager", eager, inputs)
    if liger := build.liger:
        build.add("Liger", both(liger.linear_logps, *given), inputs)
    build.floor("floor", p.products(3))
    return build.found


def _linear_dpo_contenders(s: Sizes, p: HeadProblem) -> list[Contender]:
    b, inputs = p.batch, [p.hidden, p.weight]

    def ours() -> torch.Tensor:
        return linear_dpo_loss(p.hidden, p.weight, b.ids_BT, b.mask_BT, ref_logps=b.ref_BT, beta=0.1).loss

    both = functools.partial(with_gradients, inputs, None)
    eager = both(peers.eager_linear_dpo_loss, p.hidden, p.weight, b)
    build = Builder(s, Numbers(eager()))
    build.add("strop", both(ours), inputs)
    build.add("eager", eager, inputs)
    build.floor("floor", p.products(3))
    return build.found


HEAD_BUILDERS: dict[tuple[str, str], Callable[[Sizes, HeadProblem], list[Contender]]] = {
    ("linear_grpo_loss", BOTH): _linear_grpo_contenders,
    ("linear_grpo_loss", FROZEN): _frozen_contenders,
    ("linear_logp", SCORE): _score_contenders,
    ("linear_logp", BOTH): _linear_logp_contenders,
    ("linear_dpo_loss", BOTH): _linear_dpo_contenders,
}


# ---- the device, and the errors ---------------------------------------------------------------------------------------


def _copy(s: Sizes) -> LossCase:
    """What the memory gives: a copy, each byte read once and written once."""

    def build() -> list[Contender]:
        source = torch.zeros(s.copy_bytes, dtype=torch.uint8, device=s.device)
        target = torch.empty_like(source)
        return [Contender(name="copy", function=lambda: target.copy_(source))]

    labels = {"operator": "copy", "way": "device copy", "bytes": 2 * s.copy_bytes, "dtype": "bytes", "clock": "device"}
    return LossCase(work="device copy", labels=labels, build=build, clock=GpuTimer if s.device == "cuda" else None)


class Accuracy:
    """How far strop and eager torch are from float64 on the same inputs, in root mean squares over several batches.

    Values as they are; a gradient relative to the root mean square of the true one, for each kind of its entries.
    """

    work: str
    batches = 32

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.small = sizes.device == "cpu"
        self.labels = {"operator": "accuracy", "way": self.work, "shape": self.shape}

    @property
    def shape(self) -> str:
        raise NotImplementedError

    def results(self, dtype: torch.dtype, seed: int) -> dict[str, dict[str, torch.Tensor]]:
        """`truth` and the contenders, each with the same quantities."""
        raise NotImplementedError

    def measure(self, method: Method) -> dict[str, Any]:
        errors = {str(dtype).split(".")[1]: self._errors(dtype) for dtype in (torch.float32, torch.bfloat16)}
        _tidy()
        return {"work": self.work, "labels": {**self.labels, "batches": self.batches}, "errors": errors}

    def _errors(self, dtype: torch.dtype) -> dict[str, dict[str, float]]:
        squares: dict[tuple[str, str], list[float]] = {}  # of the error, of the truth
        for seed in range(self.batches):
            found = self.results(dtype, seed)
            truth = found.pop("truth")
            for name, quantities in found.items():
                for quantity, value in quantities.items():
                    both = squares.setdefault((name, quantity), [0.0, 0.0])
                    both[0] += (value.double() - truth[quantity]).square().mean().item()
                    both[1] += truth[quantity].square().mean().item()
        errors: dict[str, dict[str, float]] = {}
        for (name, quantity), (wrong, true) in squares.items():
            unit = true if "gradient" in quantity else self.batches
            errors.setdefault(name, {})[quantity] = float(f"{(wrong / unit) ** 0.5:.4g}")
        return errors


class AccuracyOfLogits(Accuracy):
    work = "accuracy of grpo_loss and logp"

    @property
    def shape(self) -> str:
        return f"4×16, V {self.vocabulary:,}"

    @property
    def vocabulary(self) -> int:
        return 1009 if self.small else 50257

    def results(self, dtype: torch.dtype, seed: int) -> dict[str, dict[str, torch.Tensor]]:
        p = LogitsProblem(4, 16, self.vocabulary, self.sizes.device, dtype, seed)
        b = p.batch

        def ours(logits: torch.Tensor, ref: torch.Tensor, batch: Batch) -> torch.Tensor:
            return grpo_loss(logits, ref, b.ids_BT, b.old_BT, b.rewards_B, b.mask_BT, **OPTIONS).loss

        def quantities(loss_of: Any, logps_of: Any, logits: torch.Tensor, ref: torch.Tensor, batch: Batch) -> Any:
            logits = logits.detach().requires_grad_()
            loss = loss_of(logits, ref, batch)
            (gradient,) = torch.autograd.grad(loss, logits)
            chosen = b.ids_BT[..., None]
            return {
                "logp": logps_of(logits, b.ids_BT).detach(),
                "loss": loss.detach(),
                "gradient, chosen token": gradient.gather(-1, chosen),
                "gradient, other tokens": gradient.scatter(-1, chosen, 0.0),
            }

        return {
            "truth": quantities(
                peers.eager_grpo_loss, peers.eager_logps, p.policy.double(), p.ref.double(), _double(b)
            ),
            "strop": quantities(ours, logp, p.policy, p.ref, b),
            "eager": quantities(peers.eager_grpo_loss, peers.eager_logps, p.policy, p.ref, b),
        }


class AccuracyOfHeads(Accuracy):
    work = "accuracy of linear_grpo_loss and linear_logp"

    @property
    def shape(self) -> str:
        B, T, H, V = self.head
        return f"N {B * T:,}, H {H:,}, V {V:,}, four chunks"

    @property
    def head(self) -> tuple[int, int, int, int]:
        # N is more than 2·H: fewer tokens would lie in the memory of the weight's gradient, all at once
        return (4, 32, 64, 1009) if self.small else (8, 64, 128, 32003)

    def results(self, dtype: torch.dtype, seed: int) -> dict[str, dict[str, torch.Tensor]]:
        p = HeadProblem(*self.head, self.sizes.device, dtype, seed)
        b = p.batch
        B, T, _, V = self.head
        per_logit = dtype.itemsize if self.sizes.device == "cuda" else dtype.itemsize + 12  # torch's rows take copies
        workspace = (B * T // 4) * V * per_logit

        def ours(hidden: torch.Tensor, weight: torch.Tensor, batch: Batch) -> torch.Tensor:
            return linear_grpo_loss(
                hidden, weight, b.ids_BT, b.old_BT, b.rewards_B, b.mask_BT, ref_logps=b.ref_BT, workspace=workspace,
                **OPTIONS,
            ).loss  # fmt: skip

        def quantities(loss_of: Any, logps_of: Any, hidden: torch.Tensor, weight: torch.Tensor, batch: Batch) -> Any:
            hidden, weight = (x.detach().requires_grad_() for x in (hidden, weight))
            loss = loss_of(hidden, weight, batch)
            d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
            return {
                "logp": logps_of(hidden, weight, b.ids_BT).detach(),
                "loss": loss.detach(),
                "gradient, hidden states": d_hidden,
                "gradient, weight": d_weight,
            }

        return {
            "truth": quantities(
                peers.eager_linear_grpo_loss, peers.eager_linear_logps, p.hidden.double(), p.weight.double(), _double(b)
            ),
            "strop": quantities(ours, linear_logp, p.hidden, p.weight, b),
            "eager": quantities(peers.eager_linear_grpo_loss, peers.eager_linear_logps, p.hidden, p.weight, b),
        }


def _double(batch: Batch) -> Batch:
    return Batch(*(x.double() if x.is_floating_point() else x for x in batch))


# ---- the command line -------------------------------------------------------------------------------------------------


def summary(measured: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Our time, how many times as long the others take, ours over the floor, our memory beyond the gradients'."""
    rows = []
    for case in measured:
        if "strop" not in case.get("contenders", ()):
            continue
        ratios, ours, labels = case["ratios"], case["contenders"]["strop"], case["labels"]
        cells = [f"{ratios[p]['value']:.2f}×" if p in ratios else "" for p in ("eager", "torch.compile", "Liger")]
        floor = f"{1 / ratios['floor']['value']:.3f}×" if "floor" in ratios else ""
        memory = size(ours["memory_beyond_gradients"]) if "memory_beyond_gradients" in ours else ""
        sizes = "·".join(str(labels[key]) for key in ("shape", "hidden", "vocabulary") if key in labels)
        way = labels["way"].replace("forward + backward", "f+b")
        rows.append([f"{labels['operator']} {way} {sizes}", duration(ours["median_ns"]), *cells, floor, memory])
        rows += [[f"  without {name}: {reason}"] for name, reason in labels.get("left_out", {}).items()]
    for case in measured:
        for dtype, errors in case.get("errors", {}).items():
            worst = max(errors["strop"], key=lambda quantity: error_ratio(errors, quantity))
            rows.append(
                [f"error {dtype}: {worst}", f"{errors['strop'][worst]:.1e}", f"ours {error_ratio(errors, worst):.2f}×"]
            )
    return ["work", "strop", "eager", "compile", "Liger", "floor", "extra"], rows


def error_ratio(errors: dict[str, dict[str, float]], quantity: str) -> float:
    """Our error as a multiple of eager torch's."""
    return errors["strop"][quantity] / max(errors["eager"][quantity], 1e-300)
