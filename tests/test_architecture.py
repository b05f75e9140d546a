"""docs/architecture.md is so: its walk through one GRPO step is what a profiler sees, and its house is the layer test's."""

import gc
import re
import sys
from pathlib import Path

import pytest
from environments.games import OfIds
from test_layers import HOUSE
from tiny_qwen2 import tiny_qwen2

import strop
from strop.algorithms.grpo import GRPO
from strop.algorithms.sft import SFT
from strop.config.policy_losses import clipped_surrogate
from strop.environments.dialogue import Dialogue

SOURCE = Path(strop.__file__).parent
TEXT = (Path(__file__).resolve().parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
MOST = {"warm": (20, 34), "first": (33, 79), "sft": (14, 23)}  # files and arrows of a step; a reader has to follow them
MOST_FRAMES = 14  # of the package, from `train_step` down to the formula of the loss
BOTH_WAYS = {("algorithms/on_policy.py", "training/trainer.py")}  # the algorithms' base and the trainer it subclasses
PROMPTS = [[5, 6, 7], [8, 9]]
COMPLETIONS = [[10, 1], [11, 12, 13]]


def section(title):
    return re.split(r"^## ", TEXT.split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]


def file_of(frame):
    """The file of the package a frame runs in; None outside of it."""
    path = Path(frame.f_code.co_filename)
    return path.relative_to(SOURCE).as_posix() if path.is_relative_to(SOURCE) else None


def new_grpo(**options):
    def reward_fn(completions):
        return [float(len(ids)) for ids in completions]

    known = {"group_size": 4, "max_new_tokens": 8, "kl_coef": 0.04, "batch_size": 2}
    return GRPO(model=tiny_qwen2(), reward_fn=reward_fn, **known, **options)


def walked(work):
    """The files that work() enters, in their order, and the arrows between two of them.

    An arrow comes from the nearest caller inside the package, through whatever torch and transformers do in between.
    """
    files, arrows, known = {}, set(), {}

    def of(frame):
        if frame.f_code not in known:
            known[frame.f_code] = file_of(frame)
        return known[frame.f_code]

    def see(frame, event, _):
        if event != "call" or (found := of(frame)) is None:
            return
        files[found] = None
        caller = frame.f_back
        while caller is not None and of(caller) is None:
            caller = caller.f_back
        if caller is not None and of(caller) != found:
            arrows.add((of(caller), found))

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # no destructor of another test runs in the step
    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return list(files), arrows


@pytest.fixture(scope="module")
def walks():
    """Of GRPO the second `train_step` and the first step of `train`; of SFT the second `train_step`."""
    warm, first, sft = new_grpo(), new_grpo(), SFT(model=tiny_qwen2(), batch_size=2)
    warm.train_step(PROMPTS)
    sft.train_step(PROMPTS, COMPLETIONS)
    rows = [{"prompt": prompt} for prompt in PROMPTS]
    return {
        "warm": walked(lambda: warm.train_step(PROMPTS)),
        "first": walked(lambda: first.train(rows, num_steps=1, progress=False)),
        "sft": walked(lambda: sft.train_step(PROMPTS, COMPLETIONS)),
    }


def named_in(part):
    return list(dict.fromkeys(re.findall(r"`([\w/]+\.py)`", part)))


def test_the_walk_names_every_file_in_its_order(walks):
    warm, first = section("One GRPO step, file by file").split("The first step of")
    assert named_in(warm) == walks["warm"][0]
    assert sorted(named_in(first)) == sorted({*walks["first"][0]} - {*walks["warm"][0]})


@pytest.mark.parametrize("which", MOST)
def test_a_step_is_short(walks, which):
    files, arrows = walks[which]
    found = f"{len(files)} files, {len(arrows)} arrows"
    assert len(files) <= MOST[which][0], found
    assert len(arrows) <= MOST[which][1], found


@pytest.mark.parametrize("environment", [None, OfIds], ids=["one turn", "turns"])
def test_trajectories_alone_carry_tokens_from_the_row_to_the_batch(environment, monkeypatch):
    """Every part of a step takes trajectories, in their order; what the loss reads is their TokenBatch.

    With the row itself these are three containers. A conversation with an environment is a fourth.
    """
    trainer, seen = new_grpo(environment=environment), []

    def watch(owner, name):
        inner = getattr(owner, name)

        def watched(given, *more, **options):
            kinds = {type(one).__name__ for one in given} if isinstance(given, list) else {type(given).__name__}
            seen.append((name, *kinds))
            return inner(given, *more, **options)

        setattr(owner, name, watched)

    for name in ("sample", "score", "reward", "advantages", "learn", "loss_on"):
        watch(trainer, name)
    watch(trainer.policy, "loss")
    conversations, draw = set(), Dialogue.draw
    monkeypatch.setattr(Dialogue, "draw", lambda self, *given: conversations.add("Dialogue") or draw(self, *given))
    trainer.run_step(trainer.step_on, trainer.prepare([{"prompt": prompt} for prompt in PROMPTS]))
    parts = [(name, "Trajectory") for name in ("sample", "score", "reward", "advantages", "learn", "loss_on")]
    assert seen == [*parts, ("loss", "TokenBatch")]
    assert conversations == (set() if environment is None else {"Dialogue"})


def test_the_formula_of_the_loss_is_near():
    """A reader who looks for the formula follows few calls from `train_step` down to it."""
    trainer, depths = new_grpo(), []
    trainer.train_step(PROMPTS)

    def see(frame, event, _):
        if event == "call" and frame.f_code is clipped_surrogate.__code__:
            caller, above = frame.f_back, []
            while caller is not None:
                above += [caller.f_code.co_qualname] if file_of(caller) else []
                caller = caller.f_back
            depths.append(above)

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        trainer.train_step(PROMPTS)
    finally:
        sys.setprofile(before)
    assert depths
    assert max(map(len, depths)) <= MOST_FRAMES, depths[0]


def test_no_two_files_call_each_other(walks):
    _, arrows = walks["warm"]
    assert {(a, b) for a, b in arrows if a < b and (b, a) in arrows} == BOTH_WAYS


def test_the_rooms_are_those_of_the_layer_test():
    """One row of the page's table for each of HOUSE's, in the same order."""
    rows = [line.split("|")[1] for line in section("The rooms").splitlines() if line.startswith("| `")]
    rooms = [[name.removesuffix(".py").removesuffix("/") for name in re.findall(r"`([^`]+)`", row)] for row in rows]
    assert rooms == [
        [room for room in row if room not in ("_native", "__main__")] for row in HOUSE if row != ["__main__"]
    ]


def test_every_file_the_page_names_exists():
    named = re.findall(r"`((?:[\w.]+/)*[\w]+\.(?:py|cpp|h|md))`", TEXT)
    places = (SOURCE, SOURCE.parents[1], SOURCE.parents[1] / "native")
    lost = [name for name in named if not any((place / name).is_file() for place in places)]
    assert named
    assert lost == []
