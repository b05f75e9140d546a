"""The operators: strop against eager torch, torch.compile, Liger and the floors (see `benchmarks.contenders.losses`).

On a GPU in bfloat16 at the sizes of a training step; without one small sizes in float32 on the CPU, where `chunked` stands
against eager torch and memory is not measured. Tensors are made when a case is measured and freed with the last case
that uses them. A peer that does not run, or whose result is another one, is left out and the reason recorded.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import harness
from benchmarks.contenders import losses as peers
from benchmarks.contenders.loss_accuracy import AccuracyOfHeads, AccuracyOfLogits, error_ratio
from benchmarks.contenders.loss_problems import OPTIONS, HeadProblem, LogitsProblem, tidy
from benchmarks.contenders.losses import Numbers
from benchmarks.gpu_timers import GpuTimer, LoopGpuTimer, WallGpuTimer
from benchmarks.harness import Case, Contender, Method
from benchmarks.text import duration, size
from strop.ops import grpo_loss, linear_divergence, linear_dpo_loss, linear_grpo_loss, linear_logp, logp, ratio_kl

ON_GPU = True
FORWARD, BOTH, SCORE, FROZEN = "forward", "forward + backward", "score only", "forward + backward, frozen head"
GiB = 2**30
CLOCKS = {  # how a row of the results is timed on a GPU
    "device": GpuTimer,
    "loop": LoopGpuTimer,
    "wall": WallGpuTimer,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """logits: (B, T, V); heads: (B, T, H, V); kernels: Triton's run here, so Liger and the reading floors take part

    head_seconds   of a sample: what large products take depends on how warm those before them left the GPU
    loop_seconds   the same of calls in a loop: enough of them that the first and the last do not show
    """

    device: str
    dtype: torch.dtype
    logits: list[tuple[int, int, int]]
    small: tuple[int, int, int]
    heads: list[tuple[int, int, int, int]]
    copy_bytes: int
    kernels: bool
    compiled: bool
    head_rounds: int | None
    head_seconds: float | None
    loop_seconds: float | None
    tolerance: float

    def timer(self, clock: str = "device") -> Callable[[Contender], harness.Timer] | None:
        return None if self.device == "cpu" else CLOCKS[clock]


ON_A_GPU = Sizes(
    device="cuda",
    dtype=torch.bfloat16,
    logits=[(32, 256, 32768), (32, 256, 50257), (32, 256, 131072)],
    small=(4, 64, 32768),
    heads=[(16, 256, 2048, 131072), (32, 256, 4096, 151936)],
    copy_bytes=4 * GiB,
    kernels=True,
    compiled=True,
    head_rounds=9,
    head_seconds=0.1,
    loop_seconds=0.05,
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
    head_seconds=None,
    loop_seconds=None,
    tolerance=1e-3,
)


def cases(sizes: Sizes | None = None) -> list[Any]:
    s = sizes or (ON_A_GPU if torch.cuda.is_available() else ON_A_CPU)
    found: list[Any] = [_copy(s), AccuracyOfLogits(s.device), AccuracyOfHeads(s.device)]
    for shape in s.logits:
        found += [_from_logits(s, shape, name, way) for name in LOGITS_BUILDERS for way in (FORWARD, BOTH)]
        if s.kernels:
            found.append(_from_logits(s, shape, "grpo_loss", BOTH, "loop"))
    found += [_from_logits(s, s.small, "grpo_loss", way, "wall") for way in (FORWARD, BOTH)]
    for head in s.heads:
        for name, way in HEAD_BUILDERS:
            if name not in AT_ONE_SIZE or head == s.heads[0]:
                found.append(_from_hidden(s, head, name, way))
        if s.kernels:
            found += [_from_hidden(s, head, name, way, "loop") for name, way in HEADS_IN_A_LOOP]
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossCase:
    """A case whose tensors and contenders are made when it is measured. The first contender is strop."""

    work: str
    labels: dict[str, Any]
    build: Callable[[], list[Contender]]
    clock: Callable[[Contender], harness.Timer] | None = None
    rounds: int | None = None
    sample_seconds: float | None = None

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
        case = Case(
            work=self.work, labels=labels, contenders=able, clock=self.clock, rounds=self.rounds,
            sample_seconds=self.sample_seconds,
        )  # fmt: skip
        try:
            return harness.measure(case, method)
        finally:
            del able, case
            tidy()


def _by(clock: str) -> str:
    return "" if clock == "device" else f", {clock} clock"


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


def _from_logits(s: Sizes, shape: tuple[int, int, int], name: str, way: str, clock: str = "device") -> LossCase:
    B, T, V = shape
    element = s.dtype.itemsize
    passes = {("logp", FORWARD): 1, ("logp", BOTH): 3, ("ratio_kl", FORWARD): 2, ("ratio_kl", BOTH): 4,
              ("grpo_loss", FORWARD): 2, ("grpo_loss", BOTH): 3}[name, way]  # fmt: skip
    labels = {
        "operator": name, "way": way, "shape": f"{B}×{T}", "vocabulary": V, "dtype": str(s.dtype).split(".")[1],
        "floor_bytes": passes * B * T * V * element, "clock": clock,
    }  # fmt: skip

    def build() -> list[Contender]:
        problem = _problem(LogitsProblem, id(s), B, T, V, s.device, s.dtype)
        found = LOGITS_BUILDERS[name](s, problem, way)
        # compiling once more takes long and would tell nothing new
        return found if clock == "device" else [c for c in found if c.name != "torch.compile"]

    work = f"{name} {way} {B}×{T}, V {V:,}{_by(clock)}"
    seconds = s.loop_seconds if clock == "loop" else None
    return LossCase(work=work, labels=labels, build=build, clock=s.timer(clock), sample_seconds=seconds)


def _ways(way: str, problem: LogitsProblem, d_values: Sequence[torch.Tensor] | None) -> Callable[..., Call]:
    """`call_of(function, logits, …)`: the forward, or with the gradient of the first argument."""
    if way == FORWARD:
        return forward_only
    return lambda function, logits, *args: with_gradients([logits], d_values, function, logits, *args)


def _logp_contenders(s: Sizes, p: LogitsProblem, way: str) -> list[Contender]:
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


def _ratio_kl_contenders(s: Sizes, p: LogitsProblem, way: str) -> list[Contender]:
    b = p.batch
    call_of = _ways(way, p, [p.d_BT, p.d_BT.flip(0)])
    eager = call_of(peers.eager_ratio_kl, p.policy, p.ref, b)
    build = Builder(s, Numbers(eager(), b.ids_BT))
    build.add("strop", call_of(ratio_kl, p.policy, p.ref, b.ids_BT, b.mask_BT, b.old_BT), [p.policy, p.ref])
    build.add("eager", eager, [p.policy, p.ref])
    if s.kernels:
        build.floor("floor", (lambda: peers.read(p.policy, p.ref)) if way == FORWARD else _read_read_read_write(p))
    return build.found


def _grpo_contenders(s: Sizes, p: LogitsProblem, way: str) -> list[Contender]:
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
    if s.compiled:
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


def _from_hidden(s: Sizes, shape: tuple[int, int, int, int], name: str, way: str, clock: str = "device") -> LossCase:
    B, T, H, V = shape
    labels = {
        "operator": name, "way": way, "shape": f"{B * T}", "hidden": H, "vocabulary": V, "dtype": str(s.dtype).split(".")[1],
        "clock": clock,
    }  # fmt: skip

    def build() -> list[Contender]:
        found = HEAD_BUILDERS[name, way](s, _problem(HeadProblem, id(s), B, T, H, V, s.device, s.dtype))
        return found if clock == "device" else [c for c in found if c.name in ("strop", "eager", "floor")]

    work = f"{name} {way} N {B * T:,}, H {H:,}, V {V:,}{_by(clock)}"
    return LossCase(
        work=work, labels=labels, build=build, clock=s.timer(clock), rounds=s.head_rounds, sample_seconds=s.head_seconds
    )


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


def _frozen_logp_contenders(s: Sizes, p: HeadProblem) -> list[Contender]:
    given, inputs = (p.hidden, p.weight.detach(), p.batch.ids_BT), [p.hidden]
    both = functools.partial(with_gradients, inputs, [p.d_BT])
    eager = both(peers.eager_linear_logps, *given)
    build = Builder(s, Numbers(eager()))
    build.add("strop", both(linear_logp, *given), inputs)
    build.add("eager", eager, inputs)
    build.floor("floor", p.products(2))
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


def _linear_divergence_contenders(s: Sizes, p: HeadProblem) -> list[Contender]:
    inputs, (teacher_hidden, teacher_weight) = [p.hidden, p.weight], p.teacher
    num_tokens = p.hidden.shape[0] * p.hidden.shape[1]
    weights_N = torch.full((num_tokens,), 1 / num_tokens, device=p.hidden.device)

    def ours() -> torch.Tensor:
        heads = p.hidden.flatten(0, 1), p.weight, teacher_hidden.flatten(0, 1), teacher_weight
        return linear_divergence(*heads, weights_N).loss

    both = functools.partial(with_gradients, inputs, None)
    given = p.hidden, p.weight, teacher_hidden, teacher_weight
    eager = both(peers.eager_linear_divergence, *given)
    build = Builder(s, Numbers(eager()))
    build.add("strop", both(ours), inputs)
    build.add("eager", eager, inputs)
    if s.compiled:
        build.add("torch.compile", both(torch.compile(peers.eager_linear_divergence, dynamic=False), *given), inputs)
    build.floor("floor", p.products(4))
    return build.found


HEAD_BUILDERS: dict[tuple[str, str], Callable[[Sizes, HeadProblem], list[Contender]]] = {
    ("linear_grpo_loss", BOTH): _linear_grpo_contenders,
    ("linear_grpo_loss", FROZEN): _frozen_contenders,
    ("linear_logp", SCORE): _score_contenders,
    ("linear_logp", BOTH): _linear_logp_contenders,
    ("linear_logp", FROZEN): _frozen_logp_contenders,
    ("linear_dpo_loss", BOTH): _linear_dpo_contenders,
    ("linear_divergence", BOTH): _linear_divergence_contenders,
}
AT_ONE_SIZE = {"linear_dpo_loss", "linear_divergence"}
# A GPU that rests before every call runs its products at a higher clock than one a training step keeps busy
HEADS_IN_A_LOOP = [("linear_grpo_loss", BOTH), ("linear_grpo_loss", FROZEN), ("linear_logp", SCORE)]


# ---- the device -------------------------------------------------------------------------------------------------------


def _copy(s: Sizes) -> LossCase:
    """What the memory gives: a copy, each byte read once and written once."""

    def build() -> list[Contender]:
        source = torch.zeros(s.copy_bytes, dtype=torch.uint8, device=s.device)
        target = torch.empty_like(source)
        return [Contender(name="copy", function=lambda: target.copy_(source))]

    labels = {"operator": "copy", "way": "device copy", "bytes": 2 * s.copy_bytes, "dtype": "bytes", "clock": "device"}
    return LossCase(work="device copy", labels=labels, build=build, clock=s.timer())


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
        way = labels["way"].replace("forward + backward", "f+b") + _by(labels["clock"])
        rows.append([f"{labels['operator']} {way} {sizes}", duration(ours["median_ns"]), *cells, floor, memory])
        rows += [[f"  without {name}: {reason}"] for name, reason in labels.get("left_out", {}).items()]
    for case in measured:
        for dtype, errors in case.get("errors", {}).items():
            worst = max(errors["strop"], key=lambda quantity: error_ratio(errors, quantity))
            rows.append(
                [f"error {dtype}: {worst}", f"{errors['strop'][worst]:.1e}", f"ours {error_ratio(errors, worst):.2f}×"]
            )
    return ["work", "strop", "eager", "compile", "Liger", "floor", "extra"], rows
