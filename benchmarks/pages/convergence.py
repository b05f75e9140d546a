"""The convergence suite in the documents: a table, a picture, and the same picture moving."""

import math
from pathlib import Path
from typing import Any

from benchmarks.pages.engines import COLOURS
from benchmarks.suites.convergence import NUM_SYMBOLS, largest_difference
from benchmarks.text import Result, origin, table

TITLES = {"memorise": "A fixed batch, memorised", "language": "A language, held-out loss"}
# Wide and pale below, narrow and dark above: all of them show where they lie on each other.
STYLES: dict[str, dict[str, Any]] = {
    "Mixtral compiled": {"lw": 9, "alpha": 0.35}, "Mixtral eager": {"lw": 6, "alpha": 0.5},
    "numpy": {"lw": 3, "alpha": 0.9}, "native": {"lw": 1.1, "ls": "--", "color": "black"},
}  # fmt: skip
NUM_FRAMES, FRAME_MILLISECONDS, LAST_FRAME_MILLISECONDS = 40, 70, 2500


def convergence_table(result: Result) -> str:
    """First and last loss of every engine, and how far apart the curves are at most."""
    rows = []
    for task, title in TITLES.items():
        curves = [case for case in result["cases"] if case["labels"]["task"] == task]
        for case in curves:
            first, last = case["losses"][0], case["losses"][-1]
            rows.append(
                [
                    title,
                    case["labels"]["engine"],
                    str(case["steps"][-1] + (task == "memorise")),
                    f"{first:.4f}",
                    f"{last:.4f}",
                ]
            )
        floor = f", entropy rate {curves[0]['entropy_rate']:.4f}" if "entropy_rate" in curves[0] else ""
        difference = largest_difference(result["cases"], task)
        rows.append(
            [title, "largest difference between any two curves, at any step", "", "", f"{difference:.1e}{floor}"]
        )
    return table(["task", "engine", "steps", "first loss", "last loss"], rows) + origin(result) + "\n"


def convergence_figure(result: Result, path: Path, metadata: dict[str, str]) -> None:
    figure, _ = _drawn(result)
    figure.savefig(path, dpi=110, metadata=metadata)
    _close(figure)


def convergence_animation(result: Result, path: Path, metadata: dict[str, str]) -> None:
    """The curves as they come, in a GIF of few colours. The axes are those of the whole from the start."""
    from PIL import Image

    figure, curves = _drawn(result)
    figure.set_dpi(80)
    figure.canvas.draw()
    figure.set_layout_engine("none")  # it stands; nothing moves but the curves
    frames = []
    for number in range(1, NUM_FRAMES + 1):
        for line, case in curves:
            count = max(1, math.ceil(number / NUM_FRAMES * len(case["steps"])))
            line.set_data(case["steps"][:count], case["losses"][:count])
        figure.canvas.draw()
        image = Image.frombytes("RGBA", figure.canvas.get_width_height(), bytes(figure.canvas.buffer_rgba()))
        frames.append(image.convert("RGB").quantize(64, dither=Image.Dither.NONE))
    _close(figure)
    durations = [FRAME_MILLISECONDS] * (NUM_FRAMES - 1) + [LAST_FRAME_MILLISECONDS]
    frames[0].save(
        path, save_all=True, append_images=frames[1:], duration=durations, loop=0, comment=metadata["Comment"].encode()
    )


def _drawn(result: Result) -> tuple[Any, list[tuple[Any, dict[str, Any]]]]:
    """The figure of both tasks, and each line with the curve it shows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn = []
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for axes, task in ((left, "memorise"), (right, "language")):
        curves = {c["labels"]["engine"]: c for c in result["cases"] if c["labels"]["task"] == task}
        for engine in [*(n for n in STYLES if n in curves), *(n for n in curves if n not in STYLES)]:
            case = curves[engine]
            style = {"color": COLOURS.get(engine, "#555555"), **STYLES.get(engine, {})}
            (line,) = axes.plot(case["steps"], case["losses"], label=engine, solid_capstyle="butt", **style)
            drawn.append((line, case))
        last = max(case["steps"][-1] for case in curves.values())
        axes.set_xlim(-0.01 * last, 1.01 * last)
        axes.set_xlabel("training step")
        axes.spines[["top", "right"]].set_visible(False)
        difference = largest_difference(result["cases"], task)
        axes.set_title(f"{TITLES[task]}\n", loc="left", fontsize=11)
        axes.text(0, 1.02, f"largest difference between curves: {difference:.1e}", transform=axes.transAxes, fontsize=9)
    left.set_ylabel("cross-entropy, nats a token")
    left.set_yscale("log")
    lowest = min(min(c["losses"]) for c in result["cases"] if c["labels"]["task"] == "memorise")
    left.set_ylim(lowest / 1.6, 12)
    left.set_yticks([t for t in (0.001, 0.01, 0.1, 1, 10) if t > lowest / 1.6], minor=False)
    left.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    left.legend(frameon=False, loc="lower left", handlelength=3)
    right.set_ylim(0, 7.4)
    rate = next(c["entropy_rate"] for c in result["cases"] if c["labels"]["task"] == "language")
    for height, text, above in (
        (rate, f"entropy rate of the language, {rate:.3f}: no model can do better", False),
        (math.log(NUM_SYMBOLS), f"knowing only its {NUM_SYMBOLS} symbols, {math.log(NUM_SYMBOLS):.3f}", True),
    ):
        right.axhline(height, color="#555555", lw=0.8, ls=":")
        right.text(0.99, height + (0.08 if above else -0.12), text, transform=right.get_yaxis_transform(), ha="right",
                   va="bottom" if above else "top", fontsize=8.5, color="#333333")  # fmt: skip
    return figure, drawn


def _close(figure: Any) -> None:
    import matplotlib.pyplot as plt

    plt.close(figure)
