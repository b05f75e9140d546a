"""`strop demo`: a complete small run. A small model learns to sort: SFT until it is mediocre, then GRPO.

Problems, model and report are made on the spot. Only the SFT stage uses labels; GRPO sees prompts and whether its own
answers were right. Neither stage trains on the held-out problems.
"""

import importlib.util
import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import strop
from strop import tasks
from strop._install import missing
from strop._types import Json
from strop.callbacks import Callback
from strop.cli.options import number_option, option
from strop.report import Chart, Curve, Section, Tile, bar_section, draw_figure, load_run, sample_section, write_report
from strop.report.curves import percent
from strop.report.metrics import Metric

if TYPE_CHECKING:
    from strop.algorithms.best_of_n import BestOfN
    from strop.moe.torch import MoEForCausalLM
    from strop.training.state import History
    from strop.training.trainer import Trainer

MARK = "demo.json"  # marks a folder as written by this command
OWN = (MARK, "data", "sft", "grpo", "report.html")
LENGTH = 5  # digits to sort
NUM_TRAIN, NUM_LOOKED_AT, NUM_TEST, NUM_SHOWN = 10_000, 250, 500, 6
MEDIOCRE = 0.4  # share of training problems solved at which SFT ends
SAMPLES = 8  # for best-of-n
LEAD = (
    "A Mixture-of-Experts transformer, from random weights on a CPU. A short supervised stage leaves it mediocre; GRPO, which "
    "only sees whether an answer is right, makes it good. Held out are problems that neither stage was trained on and whose "
    "answers neither has seen."
)
UNDER_BARS = (
    "Greedy takes the likeliest token each time; sampled draws at temperature 1; best of 8 draws eight answers and lets the "
    "reward choose, which needs the right answer at hand and shows what the model can reach. A model unsure of itself, as "
    "after SFT, samples far worse than it answers greedily."
)
# Options of SFT and GRPO, found by experiments, which are in docs/log/2026.md.
SFT_OPTIONS: Json = {"batch_size": 64, "learning_rate": 1e-3, "warmup_steps": 20, "betas": (0.9, 0.95)}
GRPO_OPTIONS: Json = {
    "batch_size": 64, "group_size": 8, "learning_rate": 5e-4, "warmup_steps": 10, "schedule": "linear", "betas": (0.9, 0.99),
    "kl_coef": 0.01, "loss_type": "dapo", "eval_every": 25, "samples_every": 100,
}  # fmt: skip


@dataclass
class HeldOutScores:
    """Shares of held-out problems solved, and the greedy answers to the first of them."""

    greedy: float
    sampled: float
    best_of: float
    answers: list[str]
    rewards: list[float]


class Interrupted(Exception):
    """Ctrl-C was pressed; raised after the current step."""


def demo(
    output: Annotated[Path, option("Where everything goes; what an earlier demo left there is replaced.")] = Path("runs/demo"),
    seed: Annotated[int, number_option("Of the problems, the weights and the sampling.")] = 0,
    steps: Annotated[int, number_option("Steps of GRPO.", low=1)] = 400,
    sft_steps: Annotated[int, number_option("The most supervised steps.", low=1)] = 200,
    figure: Annotated[Path | None, option("Also draw the main curves as an image (needs matplotlib).")] = None,
) -> None:  # fmt: skip
    """Train a small model to sort digits, supervised and then with GRPO, and write a report. No GPU, no download, less than a minute."""
    console = Console(highlight=False)
    check_folder(output)
    if importlib.util.find_spec("torch") is None:
        raise missing("strop demo", "torch", "train")
    claim_folder(output, {"seed": seed, "steps": steps, "sft_steps": sft_steps, "strop": strop.__version__})
    try:
        from strop.models import one_thread  # only once torch is known to be installed

        with one_thread():
            Demo(console, output, seed, steps, sft_steps).run(figure)
    except Interrupted as stop:
        console.print(f"[yellow]{stop}[/]. What there is stays in {output}; strop demo begins anew.")
        raise typer.Exit(130) from None


def check_folder(folder: Path) -> None:
    """Raise unless the folder is empty or has the mark, so that no other folder is ever removed."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"--output must be a folder, found the file {folder}")
    if folder.exists() and not (folder / MARK).is_file() and any(folder.iterdir()):
        raise FileExistsError(f"--output must be empty or hold an earlier demo, found other things in {folder}")


def claim_folder(folder: Path, about: Json) -> None:
    """Make the folder and write the mark into it; remove the files of an earlier demo."""
    for name in OWN:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / MARK, {**about, "finished": False})


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


class StopWhenMediocre(Callback):
    """Ends SFT by the score on training problems. Held-out problems are not used for this."""

    def __init__(self, task: tasks.Task, rows: list[dict[str, str]], every: int = 5):
        self.task, self.rows, self.every = task, rows, every

    def on_step_end(self, trainer: "Trainer", metrics: dict[str, float]) -> None:
        if trainer.state.step % self.every == 0:
            answered, _ = answer(trainer.policy.model, self.task, self.rows, n=1, temperature=0.0)
            if answered.rewards.mean() >= MEDIOCRE:
                trainer.stop(f"{answered.rewards.mean():.0%} of {len(self.rows)} training problems solved")


def answer(model: object, task: tasks.Task, rows: list[dict[str, str]], **options: Any) -> tuple["BestOfN", list[str]]:
    """Return a BestOfN with the rewards, and its best answer to each problem."""
    from strop.algorithms.best_of_n import BestOfN

    best = BestOfN(model=model, seed=0, **options_of(task), **options)
    return best, list(best.generate(rows))


def options_of(task: tasks.Task) -> Json:
    """Return the task's options for an algorithm that samples."""
    return {"tokenizer": task.tokenizer, "reward_fn": task.reward, "max_new_tokens": task.max_new_tokens}


class Demo:
    """The stages of the demo, in order, with their console output and times.

    scores   scores before and after GRPO
    """

    def __init__(self, console: Console, folder: Path, seed: int, steps: int, sft_steps: int):
        self.console, self.folder = console, folder
        self.seed, self.steps, self.sft_steps = seed, steps, sft_steps
        self.seconds: dict[str, float] = {}
        self.task = tasks.get("sorting", length=LENGTH)
        self.train: list[dict[str, str]] = []
        self.test: list[dict[str, str]] = []
        self.sft_ended = ""
        self.scores: list[HeldOutScores] = []

    def run(self, figure: Path | None) -> None:
        title = f"[bold]strop {strop.__version__}[/]   a model learns to sort {LENGTH} digits   seed {self.seed}"
        self.console.print(Panel(title, expand=False))
        with self.stage("Data"):
            self.make_data()
        with self.stage("Supervised"):
            model = self.make_model()
            self.supervise(model)
            self.score(model)
            self.say(f"solves [bold]{self.scores[0].greedy:.1%}[/] of the held-out problems")
        with self.stage("GRPO"):
            self.reinforce(model)
        with self.stage("Comparison"):
            self.score(model)
        self.write_results(figure)
        self.console.print(self.table())
        total = sum(self.seconds.values())
        self.console.print(f"{total:.0f} seconds. Report: [bold]{self.folder / 'report.html'}[/]", soft_wrap=True)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.console.print(f"[bold cyan]{len(self.seconds) + 1}. {name}[/]")
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start

    def say(self, text: str) -> None:
        self.console.print(f"   {text}", soft_wrap=True)

    # ---- the stages ----

    def make_data(self) -> None:
        self.train = self.task.rows("train", NUM_TRAIN, seed=self.seed)
        self.test = self.task.rows("test", NUM_TEST, seed=self.seed)
        folder = self.folder / "data"
        folder.mkdir()
        for name, rows in (("train", self.train), ("test", self.test)):
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        shown = next(row for row in self.test if row["prompt"][:LENGTH] != row["answer"])
        self.say(f"{NUM_TRAIN:,} problems to train on, {NUM_TEST} held out: {shown['prompt']} → {shown['answer']}")

    def make_model(self) -> "MoEForCausalLM":
        from strop.moe import MoEConfig, MoETransformer
        from strop.moe.torch import MoEForCausalLM

        tokenizer = self.task.tokenizer
        ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        config = MoEConfig.preset("tiny", vocab_size=len(tokenizer), max_seq_len=32, **ids)
        model = MoEForCausalLM(MoETransformer(config, seed=self.seed))
        sizes = f"{model.num_parameters():,} parameters, {config.num_experts} experts, {config.top_k} active"
        self.say(f"a Mixture-of-Experts transformer, random weights: {sizes}")
        return model

    def supervise(self, model: "MoEForCausalLM") -> None:
        from strop.algorithms.sft import SFT

        rows, looked_at = self.train[NUM_LOOKED_AT:], self.train[:NUM_LOOKED_AT]
        enough = StopWhenMediocre(self.task, looked_at)
        sft = SFT(model=model, tokenizer=self.task.tokenizer, seed=self.seed, callbacks=[enough], **SFT_OPTIONS)
        history = sft.train(rows, num_steps=self.sft_steps, output_dir=self.folder / "sft", progress=_bar())
        self.check(history, "the supervised stage")
        loss = history.values("loss")
        self.sft_ended = f"stopped at {history.stop_reason}" if history.stop_reason else "the limit given"
        self.say(f"{len(loss)} steps on right answers, loss {loss[0]:.2f} → {loss[-1]:.2f}; {self.sft_ended}")

    def reinforce(self, model: "MoEForCausalLM") -> None:
        from strop.algorithms.grpo import GRPO

        group = f"{GRPO_OPTIONS['batch_size']} prompts × {GRPO_OPTIONS['group_size']} answers"
        self.say(f"{self.steps} steps of {group}; the only teacher: was it right?")
        grpo = GRPO(model=model, seed=self.seed, **options_of(self.task), **GRPO_OPTIONS)
        prompts = [{name: row[name] for name in ("prompt", "answer")} for row in self.train]  # without the completions
        where: Json = {"output_dir": self.folder / "grpo", "progress": _bar()}
        history = grpo.train(prompts, eval_dataset=self.test, num_steps=self.steps, **where)
        self.check(history, "GRPO")
        reward = history.values("reward/mean")
        self.say(f"reward {reward[0]:.2f} → {reward[-1]:.2f}, KL to the start {history.values('kl')[-1]:.2f}")

    def check(self, history: "History", stage: str) -> None:
        if history.interrupted:
            raise Interrupted(f"Interrupted in {stage} after step {history.steps[-1]['step'] if history.steps else 0}")

    def score(self, model: "MoEForCausalLM") -> None:
        """Append the current model's scores to `scores`."""
        greedy, answers = answer(model, self.task, self.test, n=1, temperature=0.0)
        several, _ = answer(model, self.task, self.test, n=SAMPLES)
        first, sampled, best = (one.mean().item() for one in (greedy.rewards, several.all_rewards, several.rewards))
        shown = answers[:NUM_SHOWN], greedy.rewards[:NUM_SHOWN].tolist()
        self.scores.append(HeldOutScores(first, sampled, best, *shown))

    # ---- output ----

    def comparison(self) -> dict[str, dict[str, float]]:
        """Return the share solved after each stage, for each way to sample an answer."""
        sft, grpo = self.scores
        names = {"greedy": "greedy", "sampled": "sampled", f"best of {SAMPLES}": "best_of"}
        pairs = {shown: (getattr(sft, name), getattr(grpo, name)) for shown, name in names.items()}
        return {shown: {"after SFT": before, "after GRPO": after} for shown, (before, after) in pairs.items()}

    def table(self) -> Table:
        table = Table(title=f"{NUM_TEST} held-out problems solved", title_justify="left")
        for name in ("", "after SFT", "after GRPO"):
            table.add_column(name, justify="right" if name else "left")
        for name, shares in self.comparison().items():
            was, now = shares.values()
            table.add_row(name, f"{was:.1%}", Text(f"{now:.1%}", style="bold"))
        return table

    def write_results(self, figure: Path | None) -> None:
        """Write the report, the numbers and, if asked for, the main curves as an image."""
        comparison, bars = self.comparison(), "Held-out problems solved"
        grpo = load_run(self.folder / "grpo")
        grpo.columns.rename("eval/reward/mean", "eval/accuracy")  # the reward is 1 for a right answer, else 0
        grpo.hidden |= {"eval/reward/std", "eval/reward/reward", "reward/reward"}  # repeat others
        tiles = [
            Tile(f"Solved, {name}", percent(shares["after GRPO"]), percent(shares["after SFT"]), "of held-out problems")
            for name, shares in comparison.items()
        ]
        stages = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in self.seconds.items() if seconds >= 0.5)
        tiles.append(Tile("Time", f"{sum(self.seconds.values()):.0f} s", detail=stages))
        sections = [bar_section(bars, comparison, under=UNDER_BARS), self._samples(), self._supervised()]
        title = "strop demo: a model learns to sort"
        write_report(
            [grpo], self.folder / "report.html", title=title, lead=LEAD, headline=tiles, extra_sections=sections
        )
        if figure is not None:
            draw_figure([grpo], figure, bars=(bars, comparison))
        about = json.loads((self.folder / MARK).read_text(encoding="utf-8"))
        task = {"digits": LENGTH, "num_held_out": NUM_TEST, "best_of": SAMPLES}
        before, after = map(asdict, self.scores)
        found = {"task": task, "before": before, "after": after, "seconds": self.seconds}
        write_json(self.folder / MARK, {**about, "finished": True, **found})

    def _samples(self) -> Section:
        before, after = self.scores
        shown = [
            {
                "prompt": f"{row['prompt']} (right: {row['answer']})",
                "before": before.answers[i], "reward_before": before.rewards[i],
                "after": after.answers[i], "reward_after": after.rewards[i],
            }
            for i, row in enumerate(self.test[: len(before.answers)])
        ]  # fmt: skip
        under = f"The first {len(shown)} held-out problems, greedy."
        return sample_section("Answers before and after GRPO", shown, under=under)

    def _supervised(self) -> Section:
        run = load_run(self.folder / "sft")
        loss = run.series("loss")
        chart = Chart(Metric("Loss, SFT", "nats per token", from_zero=True), [Curve("SFT", loss.steps, loss.values)])
        under = f"{run.num_steps} steps on right answers; {self.sft_ended}."
        return Section("The supervised stage", under=under, charts=[chart])


def _bar() -> bool:
    """Return whether to show progress bars: on a terminal only, since the demo names its stages itself."""
    return sys.stderr.isatty()
