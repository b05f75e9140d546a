"""docs/architecture.md is so: its walk through one GRPO step is what a profiler sees, and its house is the layer test's."""

import gc
import re
import sys
from pathlib import Path

import pytest
from test_layers import HOUSE
from tiny_qwen2 import tiny_qwen2

import strop
from strop.algorithms.grpo import GRPO

SOURCE = Path(strop.__file__).parent
TEXT = (Path(__file__).resolve().parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
MOST_FILES, MOST_ARROWS = 28, 50  # of one step; a reader has to follow them
BOTH_WAYS = {("algorithms/grpo.py", "training/trainer.py")}  # an algorithm and the trainer it subclasses


def section(title):
    return re.split(r"^## ", TEXT.split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]


def file_of(frame):
    """The file of the package a frame runs in; None outside of it."""
    path = Path(frame.f_code.co_filename)
    return path.relative_to(SOURCE).as_posix() if path.is_relative_to(SOURCE) else None


@pytest.fixture(scope="module")
def walk():
    """Of one GRPO step, the second: the files in the order they are entered, and the arrows between two of them.

    An arrow comes from the nearest caller inside the package, through whatever torch and transformers do in between.
    """

    def reward_fn(completions):
        return [float(len(ids)) for ids in completions]

    options = {"group_size": 4, "max_new_tokens": 8, "kl_coef": 0.04}
    grpo = GRPO(model=tiny_qwen2(), reward_fn=reward_fn, **options)
    prompts = [[5, 6, 7], [8, 9]]
    grpo.train_step(prompts)
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
        grpo.train_step(prompts)
    finally:
        sys.setprofile(before)
        gc.enable()
    return list(files), arrows


def test_the_walk_names_every_file_in_its_order(walk):
    named = list(dict.fromkeys(re.findall(r"`([\w/]+\.py)`", section("One GRPO step, file by file"))))
    assert named == walk[0]


def test_a_step_is_short(walk):
    files, arrows = walk
    found = f"{len(files)} files, {len(arrows)} arrows"
    assert len(files) <= MOST_FILES, found
    assert len(arrows) <= MOST_ARROWS, found


def test_no_two_files_call_each_other(walk):
    _, arrows = walk
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
