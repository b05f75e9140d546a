"""The losses suite in the documents. A contender that was not there has empty cells or no row."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import ratio
from benchmarks.text import Result, duration, left_out, provenance, size, table, times

OPERATORS = ("logp", "ratio_kl", "grpo_loss", "linear_logp", "linear_grpo_loss", "linear_dpo_loss", "linear_divergence")
PEERS = ("eager", "torch.compile", "Liger")
BOTH, SCORE, FROZEN = "forward + backward", "score only", "forward + backward, frozen head"
COLOURS = {"eager": "#dd8452", "torch.compile": "#8c8c8c", "Liger": "#55a868", "strop": "#c44e52"}
RL_KERNEL_MS = {32768: 2.40, 50257: 3.31, 131072: 5.60}  # grpo_loss forward + backward on an H200, measured once
CLOCKS = {"device": "", "loop": ", in a loop", "wall": ", from call to result"}
FLOORS = {  # what the floor of a row is
    ("logp", "forward"): "one read",
    ("logp", BOTH): "two reads, one write",
    ("ratio_kl", "forward"): "two reads",
    ("ratio_kl", BOTH): "three reads, one write",
    ("grpo_loss", "forward"): "two reads",
    ("grpo_loss", BOTH): "two reads, one write",
    ("linear_logp", SCORE): "one product",
    ("linear_logp", BOTH): "three products",
    ("linear_logp", FROZEN): "two products",
    ("linear_grpo_loss", BOTH): "three products",
    ("linear_grpo_loss", FROZEN): "two products",
    ("linear_dpo_loss", BOTH): "three products",
    ("linear_divergence", BOTH): "four products",
}


def losses_summary(result: Result) -> str:
    """For the README: the picture, and the rows of a training step."""
    shown = [c for c in _timed(result) if (c["labels"]["operator"], c["labels"]["way"]) in
             (("grpo_loss", BOTH), ("linear_grpo_loss", BOTH), ("linear_logp", SCORE)) and _by_device(c)]  # fmt: skip
    picture = "![The time of each implementation as a multiple of the floor](images/losses.png)\n\n"
    rows = []
    for case in shown:
        cells = [_time(case, name) for name in ("strop", *PEERS, "floor")]
        memory = [_memory(case, name) for name in ("strop", "eager")]
        rows.append([_work(case), *cells, *memory])
    header = ["", "strop", *PEERS, "floor", "strop: memory beyond the gradients", "eager: the same"]
    return picture + table(header, rows) + _where(result)


def losses_table(result: Result) -> str:
    """Every row: our time, how many times as long the others take, ours as a multiple of the floor."""
    bandwidth = _bytes_per_ns(result)
    rows = []
    for case in _timed(result):
        labels = case["labels"]
        cells = [times(case["ratios"][p]) if p in case["ratios"] else "" for p in PEERS]
        derived = f"{duration(labels['floor_bytes'] / bandwidth)}" if bandwidth and "floor_bytes" in labels else ""
        over = f"{_over(case, 'strop', 'floor')} {FLOORS[labels['operator'], labels['way']]}"
        rows.append([_work(case), _time(case, "strop"), *cells, over if "floor" in case["contenders"] else "", derived])
    header = [
        "work", "strop", *(f"faster than {p}" for p in PEERS), "strop takes, of its floor",
        "floor's bytes / measured copy bandwidth",
    ]  # fmt: skip
    copied = f"A copy in device memory moved {bandwidth:,.0f} GB/s in the same run.\n\n" if bandwidth else ""
    return copied + table(header, rows) + _left_out(result) + _where(result)


def losses_targets(result: Result) -> str:
    """What the operators are held to, and whether they are there."""
    words = {True: "yes", False: "**no**", None: "not measured"}
    rows = [[kind, what, bound, found, words[met]] for kind, what, bound, found, met in _targets(result)]
    return table(["", "what", "bound", "measured", "met"], rows)


def losses_accuracy(result: Result) -> str:
    """Errors against float64 on the same inputs."""
    rows = []
    for case in result["cases"]:
        for dtype, errors in case.get("errors", {}).items():
            for quantity, ours in errors["strop"].items():
                eager = errors["eager"][quantity]
                rows.append(
                    [
                        case["work"],
                        dtype,
                        quantity,
                        f"{ours:.2e}",
                        f"{eager:.2e}",
                        f"{ours / eager:.2f}×" if eager else "",
                    ]
                )
    return table(["", "dtype", "quantity", "strop", "eager", "strop's of eager's"], rows)


def _of_operator(name: str) -> Callable[[Result], str]:
    def render(result: Result) -> str:
        return _every_contender(result, name)

    render.__name__ = f"losses_{name}"
    render.__doc__ = f"Every contender of every row of {name}, with its memory."
    return render


OPERATOR_BLOCKS = [_of_operator(name) for name in OPERATORS]


def _every_contender(result: Result, operator: str) -> str:
    rows = []
    for case in _timed(result):
        if case["labels"]["operator"] != operator:
            continue
        for name, facts in case["contenders"].items():
            key = case["labels"]["operator"], case["labels"]["way"]
            if name == "floor":
                comparison = f"strop takes {_over(case, 'strop', 'floor')} of it"
            elif name.startswith("strop"):
                comparison = f"takes {_interval(case['ratios'][name])} of its time" if name in case["ratios"] else ""
            else:
                comparison = times(case["ratios"][name]) if name in case["ratios"] else ""
            shown = f"floor: {FLOORS[key]}" if name == "floor" else name
            inputs = size(facts["memory_beyond_inputs"]) if "memory_beyond_inputs" in facts else ""
            rows.append([_work(case), shown, duration(facts["median_ns"]), comparison, inputs, _memory(case, name)])
    header = ["work", "contender", "time", "strop is faster by", "memory beyond inputs", "beyond the gradients"]
    return table(header, rows) + _left_out(result, operator) + _where(result)


def losses_figure(result: Result, path: Path, metadata: dict[str, str]) -> None:
    """How many times the floor each implementation takes, for loss and gradient from logits and from hidden states."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {
        "grpo_loss": "from logits, of two reads and one write",
        "linear_grpo_loss": "from hidden states, of three products",
    }
    figure, both = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", gridspec_kw={"width_ratios": [3, 2]})
    for axes, (operator, title) in zip(both, panels.items(), strict=True):
        cases = [
            c
            for c in _timed(result)
            if c["labels"]["operator"] == operator and c["labels"]["way"] == BOTH and _by_device(c)
        ]
        names = [n for n in COLOURS if any(n in c["contenders"] for c in cases)]
        for k, name in enumerate(names):
            found = [
                (i, ratio(_samples(c, name), _samples(c, "floor")))
                for i, c in enumerate(cases)
                if {name, "floor"} <= set(c["contenders"])
            ]
            values = [r["value"] for _, r in found]
            errors = [
                [max(0.0, r["value"] - r["low"]) for _, r in found],
                [max(0.0, r["high"] - r["value"]) for _, r in found],
            ]
            places = [i + (k - (len(names) - 1) / 2) * 0.2 for i, _ in found]
            bars = axes.bar(places, values, 0.2, label=name, color=COLOURS[name], yerr=errors, error_kw={"lw": 0.8})
            axes.bar_label(bars, [f"{v:.2f}" if v < 10 else f"{v:.0f}" for v in values], fontsize=7, padding=1)
        axes.axhline(1, color="black", lw=1)
        axes.set_yscale("log")
        axes.set_yticks([1, 2, 5, 10, 20], ["1×", "2×", "5×", "10×", "20×"])
        axes.minorticks_off()
        axes.set_xticks(range(len(cases)), [_sizes(c).replace(", V", ",\nV") for c in cases], fontsize=8)
        axes.set_title(f"{operator}, {title}", loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    both[0].set_ylabel("time of forward and backward / floor")
    figure.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110, metadata=metadata)
    plt.close(figure)


# ---- what is held to what ---------------------------------------------------------------------------------------------


def _targets(result: Result) -> Iterator[tuple[str, str, str, str, bool | None]]:
    """kind, what, bound, measured, met (None: not measured)"""
    cases = {
        (c["labels"]["operator"], c["labels"]["way"], c["labels"]["vocabulary"], c["labels"]["clock"]): c
        for c in _timed(result)
    }

    def case_of(operator: str, way: str, V: int, clock: str = "device") -> Any:
        return cases.get((operator, way, V, clock), {})

    def over(kind: str, operator: str, way: str, V: int, most: float, clock: str = "device") -> Any:
        case = case_of(operator, way, V, clock)
        what = f"{operator} {way}, V {V:,}{CLOCKS[clock]}, of {FLOORS[operator, way]}"
        return kind, what, f"≤ {most:g}×", *_compared(case, "strop", "floor", lambda value: value <= most)

    def faster(
        kind: str, operator: str, way: str, V: int, peer: str, least: float, ours: str = "strop", clock: str = "device"
    ) -> Any:
        by = f"{peer}'s time by {'ours' if ours == 'strop' else 'ours in place'}"
        what = f"{operator} {way}, V {V:,}{CLOCKS[clock]}: {by}"
        case = case_of(operator, way, V, clock)
        return kind, what, f"≥ {least:g}×", *_compared(case, peer, ours, lambda value: value >= least)

    def extra(kind: str, operator: str, way: str, V: int, most: int, measured: Callable[..., Any], beyond: str) -> Any:
        what, bound = f"{operator} {way}, V {V:,}: memory beyond {beyond}", f"≤ {most} MB"
        found = measured(case_of(operator, way, V), "strop")
        return kind, what, bound, *(("", None) if found is None else (f"{found / 1e6:.1f} MB", found <= most * 10**6))

    for V in (32768, 131072):
        yield over("must", "grpo_loss", "forward", V, 1.1)
    for V, least in ((32768, 2.0), (50257, 1.4), (131072, 1.1)):
        yield faster("must", "grpo_loss", BOTH, V, "Liger", least)
        yield faster("must", "grpo_loss", BOTH, V, "Liger in place", least, "strop in place")
        yield faster("must", "grpo_loss", BOTH, V, "Liger", least, clock="loop")
    for V, milliseconds in RL_KERNEL_MS.items():
        case = case_of("grpo_loss", BOTH, V)
        times = milliseconds * 1e6 / case["contenders"]["strop"]["median_ns"] if case else None
        what = f"grpo_loss {BOTH}, V {V:,}: {milliseconds} ms, RL-Kernel's in another run, by ours"
        yield "must", what, "≥ 2.5×", *(("", None) if times is None else (f"{times:.2f}×", times >= 2.5))
    for V in (32768, 50257, 131072):
        yield over("aim", "grpo_loss", BOTH, V, 1.2)
        for name in ("strop", "strop in place"):
            found = case_of("grpo_loss", BOTH, V).get("contenders", {}).get(name, {}).get("memory_beyond_gradients")
            what = f"grpo_loss {BOTH}{name.removeprefix('strop')}, V {V:,}: memory beyond the gradient"
            yield "must", what, "≤ 1 MB", *(("", None) if found is None else (size(found), found <= 10**6))
    for way in ("forward", BOTH):
        small = case_of("grpo_loss", way, 32768, "wall")
        what = f"grpo_loss {way}, 4×64 tokens, from call to result: eager's time by ours"
        yield "must", what, "≥ 1×", *_compared(small, "eager", "strop", lambda value: value >= 1)
    for V in (131072, 151936):
        yield faster("must", "linear_grpo_loss", BOTH, V, "torch.compile", 1.0)
        yield extra(
            "must", "linear_grpo_loss", BOTH, V, 600, _beyond_sums, "the gradients, the weight's in float32"
        )  # fmt: skip
        yield extra("must", "linear_logp", SCORE, V, 64, _beyond_inputs, "the inputs")
        for clock in ("device", "loop"):
            yield over("aim", "linear_grpo_loss", BOTH, V, 1.05, clock)
            yield over("must", "linear_logp", SCORE, V, 1.15, clock)
            yield over("must", "linear_grpo_loss", FROZEN, V, 1.1, clock)
    for case in result["cases"]:
        for dtype, errors in case.get("errors", {}).items():
            worst = max(errors["strop"][q] / errors["eager"][q] for q in errors["strop"] if errors["eager"][q])
            yield "must", f"{case['work']} in {dtype}: largest error by eager's", "≤ 2×", f"{worst:.2f}×", worst <= 2


def _compared(case: dict[str, Any], a: str, b: str, holds: Callable[[float], bool]) -> tuple[str, bool | None]:
    if not {a, b} <= set(case.get("contenders", {})):
        return "", None
    found = ratio(_samples(case, a), _samples(case, b))
    return _interval(found, digits=4), holds(found["value"])  # enough to see on which side of its bound it is


# ---- parts ------------------------------------------------------------------------------------------------------------


def _timed(result: Result) -> list[dict[str, Any]]:
    return [case for case in result["cases"] if "strop" in case.get("contenders", {})]


def _by_device(case: dict[str, Any]) -> bool:
    return case["labels"]["clock"] == "device"


def _samples(case: dict[str, Any], name: str) -> list[float]:
    return case["contenders"][name]["samples_ns"]


def _time(case: dict[str, Any], name: str) -> str:
    return duration(case["contenders"][name]["median_ns"]) if name in case["contenders"] else ""


def _over(case: dict[str, Any], ours: str, floor: str) -> str:
    return _interval(ratio(_samples(case, ours), _samples(case, floor))) if floor in case["contenders"] else ""


def _interval(found: dict[str, Any], digits: int = 3) -> str:
    value, low, high = (f"{found[key]:.{digits}g}" for key in ("value", "low", "high"))
    return f"{value}× [{low}, {high}]"


def _work(case: dict[str, Any]) -> str:
    return f"`{case['labels']['operator']}` {case['labels']['way']}, {_sizes(case)}{CLOCKS[case['labels']['clock']]}"


def _sizes(case: dict[str, Any]) -> str:
    labels = case["labels"]
    hidden = f" tokens, H {labels['hidden']:,}" if "hidden" in labels else ""
    return f"{labels['shape']}{hidden}, V {labels['vocabulary']:,}"


def _beyond_inputs(case: dict[str, Any], name: str) -> int | None:
    return case.get("contenders", {}).get(name, {}).get("memory_beyond_inputs")


def _beyond_sums(case: dict[str, Any], name: str) -> int | None:
    """Memory beyond the gradients, that of the weight counted in float32 where it is summed over chunks."""
    beyond = case.get("contenders", {}).get(name, {}).get("memory_beyond_gradients")
    labels = case.get("labels", {})
    if (
        beyond is None
        or labels["operator"] != "linear_grpo_loss"
        or labels["way"] != BOTH
        or labels["dtype"] not in ("bfloat16", "float16")
    ):
        return beyond
    return beyond - labels["hidden"] * labels["vocabulary"] * 2


def _memory(case: dict[str, Any], name: str) -> str:
    """Beyond the gradients that are returned and, where we sum in float32, beyond that sum."""
    beyond, summed = case["contenders"].get(name, {}).get("memory_beyond_gradients"), _beyond_sums(case, name)
    if beyond is None or summed is None:
        return ""
    return (
        f"{size(beyond)}; {size(summed)} beyond a float32 sum" if name == "strop" and summed < beyond else size(beyond)
    )


def _bytes_per_ns(result: Result) -> float | None:
    for case in result["cases"]:
        if case["labels"].get("operator") == "copy":
            return case["labels"]["bytes"] / case["contenders"]["copy"]["median_ns"]
    return None


def _left_out(result: Result, operator: str | None = None) -> str:
    lines = [
        f"{name} was left out of {_work(case)}: {reason}."
        for case in _timed(result)
        if operator in (None, case["labels"]["operator"])
        for name, reason in left_out(case).items()
    ]
    return "".join(f"\n{line}\n" for line in lines)


def _where(result: Result) -> str:
    rounds = sorted({len(c["contenders"]["strop"]["samples_ns"]) for c in _timed(result)})
    fewer = f" The rows from hidden states have {rounds[0]} rounds." if len(rounds) > 1 else ""
    return provenance(result).rstrip("\n") + fewer + "\n"
