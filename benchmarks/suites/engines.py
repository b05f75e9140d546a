"""The MoE transformer: every engine against transformers' Mixtral, eager and compiled.

22 scenarios on five axes, and some more rows: decoding, the threads of NumPy's BLAS, and the share of a training step
that is matrix products, with the share that is the cost of making calls at all. What each contender is and where a
choice had to be made stands in `benchmarks.contenders.moe`.

FLOP counts are of matrix products only, a multiply-add being two; attention counts the keys a query may see; a backward
counts twice its forward. Softmax counts 5 and RMSNorm 4 for an element.
"""

import functools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import environment
from benchmarks.contenders import moe as moe_contenders
from benchmarks.contenders.moe import Call, StropContender, contenders
from benchmarks.harness import Case, Contender, Measurable, Method
from strop.moe import MoEConfig, MoETransformer
from strop.moe.model import initial_params

TINY = MoEConfig.preset("tiny", intermediate_dim=256, aux_loss_coef=0.0)  # 542,528 parameters
WIDE = MoEConfig.preset("small", aux_loss_coef=0.0)  # hidden 256
SMALLEST = MoEConfig(  # the same calls on almost no numbers
    hidden_dim=8, head_dim=2, intermediate_dim=8, vocab_size=8, aux_loss_coef=0.0
)
CONFIGS = {64: TINY, 256: WIDE, 8: SMALLEST}
FORWARD, TRAIN, DECODE = (2, 32), (2, 8), (64, 16)
NEW_TOKENS = 32
THREADS = 2
# some calls of a few milliseconds in a row: a single one right after another engine's finds that one's data in the caches
SAMPLE_SECONDS = 0.015
ROUNDS = {"cold": 3, "decode": 7}  # what takes seconds


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One row. The kind says what is called: forward, train, kernel, cold, decode."""

    axis: str
    name: str
    kind: str
    hidden: int = 64
    shape: tuple[int, int] = FORWARD
    workers: int = 0  # 0: the engine's own threads

    @property
    def work(self) -> str:
        return f"{self.axis}: {self.name}"


SCENARIOS = [
    Scenario(axis="memory", name="train step 2×8", kind="train", shape=TRAIN),
    *(Scenario(axis="memory", name=f"forward {b}×32, by batch", kind="forward", shape=(b, 32)) for b in (1, 2, 4, 8)),
    *(Scenario(axis="memory", name=f"forward 2×{t}, by length", kind="forward", shape=(2, t)) for t in (8, 16, 32, 64)),
    Scenario(axis="kernels", name="matmul 64×64×64", kind="matmul"),
    Scenario(axis="kernels", name="softmax 1000", kind="softmax"),
    Scenario(axis="kernels", name="RMSNorm 2×32×64", kind="rms_norm"),
    Scenario(axis="dispatch", name="warm, forward 1×1", kind="forward", shape=(1, 1)),
    Scenario(axis="dispatch", name="cold, new process to first forward 2×32", kind="cold"),
    *(
        Scenario(axis="parallel", name=f"inference 2×32, {w} worker{'s'[: w > 1]}", kind="forward", workers=w)
        for w in (1, 2, 4)
    ),
    *(
        Scenario(axis="parallel", name=f"training 2×8, {w} worker{'s'[: w > 1]}", kind="train", shape=TRAIN, workers=w)
        for w in (1, 2, 4)
    ),
    Scenario(axis="scale", name="hidden 256, forward 2×32", kind="forward", hidden=256),
    Scenario(axis="scale", name="hidden 256, train step 2×8", kind="train", hidden=256, shape=TRAIN),
]  # fmt: skip

EXTRA = [
    Scenario(axis="decode", name="hidden 64, batch 64, 32 tokens", kind="decode", shape=DECODE),
    Scenario(axis="decode", name="hidden 256, batch 64, 32 tokens", kind="decode", hidden=256, shape=DECODE),
]


def cases() -> list[Measurable]:
    moe_contenders.set_threads(THREADS)
    found: list[Measurable] = [Agreement(hidden=64), Agreement(hidden=256)]
    found += [case_of(scenario) for scenario in SCENARIOS + EXTRA]
    found.append(_blas_case())
    return found + [case for c in contenders() for hidden in (64, 256) if (case := _shares_case(c, hidden))]


def case_of(scenario: Scenario) -> Case:
    """The row's contenders: those that offer its work."""
    threads = 1 if scenario.workers else THREADS
    tokens, flops = _size(scenario)
    labels = {
        "axis": scenario.axis, "scenario": scenario.name, "hidden": scenario.hidden, "shape": list(scenario.shape),
        "workers": scenario.workers, "threads": threads, "dtype": "float32",
    }  # fmt: skip
    found = []
    for c in contenders():
        if scenario.kind == "cold":
            found.append(_cold_contender(c))
        elif call := call_of(scenario, c):
            alone = (__name__, scenario.work, c.name)
            found.append(Contender(name=c.name, function=call, expected=expected_of(scenario), alone=alone))
    return Case(
        work=scenario.work, labels=labels, contenders=found, tokens=tokens, flops=flops,
        collect=scenario.kind != "cold", warm_up=scenario.kind != "cold",
        rounds=ROUNDS.get(scenario.kind), sample_seconds=SAMPLE_SECONDS,
        setup=functools.partial(moe_contenders.set_threads, threads),
    )  # fmt: skip


def call_of(scenario: Scenario, c: moe_contenders.Contender) -> Call | None:
    config, kind = CONFIGS[scenario.hidden], scenario.kind
    if kind in KERNELS:
        return c.kernel(kind, *KERNELS[kind].inputs())
    if kind == "decode":
        return c.generate(config, tokens_of(config, scenario.shape)[0], NEW_TOKENS)
    pairs = [tokens_of(config, scenario.shape, worker) for worker in range(max(scenario.workers, 1))]
    tokens, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if kind == "forward":
        return c.forward_by_workers(config, tokens) if scenario.workers else c.forward(config, tokens[0])
    if scenario.workers:
        return c.train_by_workers(config, tokens, targets)
    return c.train_step(config, tokens[0], targets[0])


def alone(work: str, name: str) -> Call:
    """For `benchmarks.alone`: the same call in a process that has nothing else."""
    scenario = next(s for s in SCENARIOS + EXTRA if s.work == work)
    c = moe_contenders.contender(name)
    c.set_threads(1 if scenario.workers else THREADS)
    call = call_of(scenario, c)
    assert call is not None, f"{name} does not offer {work}"
    return call


def tokens_of(config: MoEConfig, shape: tuple[int, int], worker: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens and the targets one further, the same for every contender."""
    rng = np.random.default_rng([worker, *shape])
    rows = rng.integers(0, config.vocab_size, (shape[0], shape[1] + 1))
    return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])


def expected_of(scenario: Scenario) -> Any:
    """The result in float64 by the reference; what comes out of a training step is the loss before it."""
    config, kind = CONFIGS[scenario.hidden], scenario.kind
    if kind in KERNELS:
        return KERNELS[kind].expected(*(array.astype(np.float64) for array in KERNELS[kind].inputs()))
    model = _exact_model(config)
    if kind == "decode":
        prompts_BT = tokens_of(config, scenario.shape)[0]
        return model.generate(prompts_BT, max_new_tokens=NEW_TOKENS, temperature=0).tokens_BT
    pairs = [tokens_of(config, scenario.shape, worker) for worker in range(max(scenario.workers, 1))]
    if kind == "train":
        return np.mean([model.loss_and_grads(*pair)[0] for pair in pairs])
    logits = [model.forward(tokens_BT) for tokens_BT, _ in pairs]
    return logits if scenario.workers else logits[0]


@functools.cache
def _exact_model(config: MoEConfig) -> MoETransformer:
    return MoETransformer(config, "numpy", params=initial_params(config, moe_contenders.SEED, np.float64))


# ---- sizes ------------------------------------------------------------------------------------------------------------


def forward_flops(config: MoEConfig, batch: int, seq_len: int) -> int:
    """Of the matrix products of a forward: 2·m·k·n each."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = 2 * config.hidden_dim * (2 * heads + 2 * kv_heads)  # q, k, v and o
    attention = 2 * 2 * heads * (seq_len + 1) / 2  # scores and context, on the keys that are visible
    router = 2 * config.hidden_dim * config.num_experts
    experts = config.top_k * 3 * 2 * config.hidden_dim * config.intermediate_dim
    head = 2 * config.hidden_dim * config.vocab_size
    return round(batch * seq_len * (config.num_layers * (projections + attention + router + experts) + head))


def _size(scenario: Scenario) -> tuple[int | None, int | None]:
    """Tokens and FLOPs of one call."""
    if scenario.kind in KERNELS:
        return None, KERNELS[scenario.kind].flops
    batch, seq_len = scenario.shape
    config, workers = CONFIGS[scenario.hidden], max(scenario.workers, 1)
    if scenario.kind == "cold":
        return batch * seq_len, None
    if scenario.kind == "decode":
        return batch * NEW_TOKENS, None
    flops = forward_flops(config, batch, seq_len) * (3 if scenario.kind == "train" else 1)
    return workers * batch * seq_len, workers * flops


@dataclass(frozen=True)
class Kernel:
    shapes: tuple[tuple[int, ...], ...]
    flops: int
    expected: Callable[..., np.ndarray]

    def inputs(self) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        return [rng.standard_normal(shape).astype(np.float32) for shape in self.shapes]


KERNELS = {
    "matmul": Kernel(((64, 64), (64, 64)), 2 * 64**3, np.matmul),
    "softmax": Kernel(((1000,),), 5 * 1000, lambda z: np.exp(z) / np.exp(z).sum()),
    "rms_norm": Kernel(
        ((2, 32, 64), (64,)), 4 * 2 * 32 * 64, lambda x, w: w * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    ),
}


# ---- rows of another kind ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Before anything is timed: logits, loss and every gradient of every contender against the reference in float64."""

    hidden: int

    @property
    def work(self) -> str:
        return f"agreement: hidden {self.hidden}"

    def measure(self, method: Method) -> dict[str, Any]:
        config = CONFIGS[self.hidden]
        tokens_BT, _ = tokens_of(config, FORWARD)
        want_BTV = _exact_model(config).forward(tokens_BT)
        want_loss, want_grads = _exact_model(config).loss_and_grads(*tokens_of(config, TRAIN))
        found = {}
        for c in contenders():
            logits_BTV = np.asarray(c.forward(config, tokens_BT)(), dtype=np.float64)
            loss, grads = c.loss_and_grads(config, *tokens_of(config, TRAIN))
            errors = [np.linalg.norm(grads[n] - want) / np.linalg.norm(want) for n, want in want_grads.items()]
            found[c.name] = {
                "logits": float(np.abs(logits_BTV - want_BTV).max()),
                "loss": abs(loss - want_loss) / want_loss,
                "gradients": float(max(errors)),
            }
            limits = {"logits": 1e-5, "loss": 1e-6, "gradients": 1e-4}
            for what, limit in limits.items():
                if not found[c.name][what] <= limit:
                    raise RuntimeError(
                        f"contender {c.name} does not do the same work at hidden {self.hidden}: its {what} differ by "
                        f"{found[c.name][what]:.2g}, at most {limit:g} is allowed"
                    )
        return {"work": self.work, "labels": {"axis": "agreement", "hidden": self.hidden}, "agreement": found}


def _cold_contender(c: moe_contenders.Contender) -> Contender:
    """A new process, from its start to its end, that builds the model and runs one forward."""
    peaks: list[float] = []
    program = (
        f"{c.cold_program}\n"
        "status = open('/proc/self/status', encoding='utf-8').read()\n"
        "print(float(abs(logits).sum()), status.split('VmHWM:')[1].split()[0])"
    )

    def start() -> float:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, encoding="utf-8", env=_cold_environment()
        )
        if done.returncode:
            raise RuntimeError(f"{c.name} failed in a new process: {done.stderr.strip().splitlines()[-1]}")
        total, kilobytes = done.stdout.split()
        if not np.isclose(float(total), expected, rtol=1e-4):
            raise RuntimeError(f"contender {c.name} does not do the same work: Σ|logits| is {total}, wanted {expected}")
        peaks.append(int(kilobytes) / 1024)
        return float(total)

    expected = np.abs(_exact_model(TINY).forward(np.arange(64).reshape(FORWARD))).sum()

    def notes() -> dict[str, Any]:
        return {"peak_rss_mb": round(float(np.median(peaks)), 1), "finite": True}  # each result was compared

    return Contender(name=c.name, function=start, notes=notes)


def _cold_environment() -> dict[str, str]:
    threads = {"OPENBLAS_NUM_THREADS": moe_contenders.BLAS_THREADS, "STROP_NUM_THREADS": THREADS}
    return environment() | {name: str(count) for name, count in threads.items()}


def _blas_case() -> Case:
    """The reference with one BLAS thread and with two, which is why it runs with one."""
    from threadpoolctl import ThreadpoolController

    pools = ThreadpoolController().select(user_api="blas")
    step = StropContender("numpy").train_step(TINY, *tokens_of(TINY, TRAIN))

    def with_threads(count: int) -> Call:
        def call() -> float:
            with pools.limit(limits=count):
                return step()

        return call

    found = [Contender(name=f"{n} BLAS thread{'s'[: n > 1]}", function=with_threads(n)) for n in (1, 2)]
    labels = {"axis": "blas", "scenario": "numpy, train step 2×8", "hidden": 64, "dtype": "float32"}
    return Case(work="blas: numpy, train step 2×8", labels=labels, contenders=found, collect=True, setup=_threads)


def _shares_case(c: moe_contenders.Contender, hidden: int) -> Case | None:
    """A training step; its matrix products alone; the same calls on a model with next to no numbers in it."""
    config = CONFIGS[hidden]
    batch = tokens_of(config, TRAIN)
    products = c.products(config, *batch)
    found = [Contender(name="step", function=c.train_step(config, *batch))]
    if products is not None:
        found.append(Contender(name="products", function=products))
    found.append(Contender(name="calls", function=c.train_step(SMALLEST, *tokens_of(SMALLEST, TRAIN))))
    labels = {"axis": "shares", "scenario": f"train step 2×8, hidden {hidden}", "engine": c.name, "hidden": hidden}
    work = f"shares: {c.name}, hidden {hidden}"
    return Case(work=work, labels=labels | {"dtype": "float32"}, contenders=found, setup=_threads)


def _threads() -> None:
    moe_contenders.set_threads(THREADS)
