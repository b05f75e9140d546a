"""`strop demo`: the primitives at work on one simulated GRPO rollout, with a short report."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

import strop
from strop import _compiled

PROMPTS, GROUP_SIZE, MAX_TOKENS, BIN_TOKENS = 64, 8, 512, 2048
BARS = " ▁▂▃▄▅▆▇█"


@dataclass
class Rollout:
    """P prompts with G completions each. Shapes: P prompts, G samples, B = P·G rows, T tokens."""

    rewards_PG: np.ndarray
    lengths_B: np.ndarray
    policy_BT: np.ndarray
    reference_BT: np.ndarray
    mask_BT: np.ndarray
    completions: list[np.ndarray]


def simulate(seed: int) -> Rollout:
    """Verifiable rewards (some prompts always solved, some never), log-probs a little way from the reference."""
    rng = np.random.default_rng(seed)
    solve_rate_P1 = rng.beta(0.6, 0.6, (PROMPTS, 1))
    rewards_PG = (rng.random((PROMPTS, GROUP_SIZE)) < solve_rate_P1).astype(np.float32)
    batch = PROMPTS * GROUP_SIZE
    lengths_B = np.clip(rng.lognormal(5.0, 0.6, batch), 8, MAX_TOKENS).astype(np.int64)
    policy_BT = -rng.exponential(0.8, (batch, MAX_TOKENS)).astype(np.float32)
    drift_BT = 0.05 * rng.standard_normal(policy_BT.shape).astype(np.float32)
    mask_BT = np.arange(MAX_TOKENS) < lengths_B[:, None]
    completions = [rng.integers(0, 32_000, n) for n in lengths_B]
    return Rollout(rewards_PG, lengths_B, policy_BT, policy_BT + drift_BT, mask_BT, completions)


def timed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, float]:
    """The result, and the least milliseconds of three calls."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        result = function(*args, **kwargs)
        seconds.append(time.perf_counter() - start)
    return result, 1e3 * min(seconds)


def histogram(values: np.ndarray, bins: int = 32) -> str:
    counts, _ = np.histogram(values, bins)
    return "".join(BARS[int(np.ceil(8 * c / max(counts.max(), 1)))] for c in counts)


def demo(seed: Annotated[int, typer.Option(help="Seed of the simulated rollout.")] = 0) -> None:
    """Advantages, KL and packing on a simulated rollout of 64 prompts with 8 completions each. No GPU, no download."""
    console = Console()
    engine = (
        "NumPy" if _compiled.native is None else f"C++, {_compiled.native.isa()}, {strop.get_num_threads()} threads"
    )
    console.print(Panel(f"[bold]strop {strop.__version__}[/]   primitives: {engine}   seed {seed}", expand=False))
    rollout = simulate(seed)
    console.print(_advantages(rollout), _kl(rollout), _packing(rollout), sep="\n")


def _report(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, min_width=78)
    table.add_column(style="bold", min_width=34)
    table.add_column()
    return table


def _advantages(rollout: Rollout) -> Table:
    advantages_PG, milliseconds = timed(strop.compute_batch_group_advantages, rollout.rewards_PG, ddof=1, eps=1e-4)
    silent = (advantages_PG == 0).all(axis=1)
    table = _report("1. Group-relative advantages")
    table.add_row("rewards", f"{PROMPTS} groups of {GROUP_SIZE}, mean {rollout.rewards_PG.mean():.3f}")
    table.add_row("groups without signal (all equal)", f"{silent.sum()} of {PROMPTS}: every advantage exactly 0")
    loudest = np.abs(advantages_PG).max(axis=1).argmax()
    table.add_row("rarest success or failure", f"reward {' '.join(f'{r:4.0f}' for r in rollout.rewards_PG[loudest])}")
    table.add_row("", f"adv.   {' '.join(f'{a:4.1f}' for a in advantages_PG[loudest])}")
    table.add_row("distribution where there is signal", histogram(advantages_PG[~silent]))
    table.add_row("time", f"{milliseconds:.4f} ms")
    return table


def _kl(rollout: Rollout) -> Table:
    args = (rollout.policy_BT, rollout.reference_BT)
    kl_B, milliseconds = timed(strop.compute_batch_token_kl_schulman, *args, mask=rollout.mask_BT)
    difference_BT = rollout.reference_BT - rollout.policy_BT
    naive_BT = np.exp(difference_BT) - difference_BT - 1
    smallest = np.unravel_index(np.where(rollout.mask_BT, np.abs(difference_BT), np.inf).argmin(), difference_BT.shape)
    d = float(difference_BT[smallest])
    table = _report("2. KL to the reference (k3: exp(d) − d − 1, d = reference − policy)")
    table.add_row("per token", f"{kl_B.sum() / rollout.mask_BT.sum():.6f} over {rollout.mask_BT.sum():,} tokens")
    table.add_row("per sequence, distribution", histogram(kl_B))
    exact = strop.compute_token_kl_schulman(rollout.policy_BT[smallest][None], rollout.reference_BT[smallest][None])
    table.add_row(
        f"nearest token, d = {d:.1e}",
        f"{exact:.3e} (subtracted in float32: {naive_BT[smallest]:.1e})",
    )
    table.add_row("time", f"{milliseconds:.4f} ms")
    return table


def _packing(rollout: Rollout) -> Table:
    bins, milliseconds = timed(strop.pack_sequences, rollout.lengths_B, BIN_TOKENS)
    batch, collate_milliseconds = timed(strop.collate_packed, rollout.completions, bins, pad_to=BIN_TOKENS)
    tokens = int(rollout.lengths_B.sum())
    recovered = all(
        np.array_equal(batch["input_ids"][batch["sequence_ids"] == i], c) for i, c in enumerate(rollout.completions)
    )
    table = _report(f"3. Packing {len(rollout.completions)} completions into rows of {BIN_TOKENS:,} tokens")
    table.add_row(
        "lengths", f"{rollout.lengths_B.min()} to {rollout.lengths_B.max()} {histogram(rollout.lengths_B, 24)}"
    )
    padded = len(rollout.completions) * int(rollout.lengths_B.max())
    table.add_row("padded to the longest", f"{padded:,} tokens, {1 - tokens / padded:.1%} of them padding")
    table.add_row(
        "packed",
        f"{batch['input_ids'].size:,} tokens in {len(bins)} rows, {1 - tokens / batch['input_ids'].size:.1%} padding",
    )
    table.add_row("every completion recovered", "yes" if recovered else "NO")
    table.add_row("time", f"{milliseconds:.4f} ms to pack, {collate_milliseconds:.4f} ms to collate")
    return table
