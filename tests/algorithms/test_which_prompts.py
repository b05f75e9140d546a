"""Which rows a step takes: prompts that fill a batch up, and a curriculum; both go on exactly after an interruption."""

from pathlib import Path

import pytest
import torch
from test_resume import FailAt, Failure
from trained_models import tiny_moe, weights_of

from strop.algorithms.grpo import GRPO
from strop.algorithms.sft import SFT
from strop.training.state import difficulty_of, epoch_order

ROWS = [{"prompt": [2 + i, 3], "number": i, "hard": (i * 5) % 12} for i in range(12)]
SEEN = []


def only_every_third(completion_ids, number):
    """Rewards that differ for the rows 0, 3, 6 and 9 alone."""
    SEEN.extend(number[::4])
    return [float(ids.sum()) if n % 3 == 0 else 0.5 for ids, n in zip(completion_ids, number, strict=True)]


def grpo(reward=only_every_third, **options):
    return GRPO(model=tiny_moe(), reward_fn=reward, batch_size=2, group_size=4, max_new_tokens=3, learning_rate=1e-2,
                shuffle=False, **options)  # fmt: skip


def test_further_prompts_take_the_places_of_those_without_signal():
    SEEN.clear()
    trainer = grpo(fill_batch=True)
    history = trainer.train(ROWS, num_steps=2)
    assert SEEN == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [one["reward/further_prompts"] for one in history.steps] == [2, 4]
    assert [one["reward/zero_std_fraction"] for one in history.steps] == [0, 0]
    assert [one["reward/resampled_fraction"] for one in history.steps] == [0.5, 1.0]
    assert (trainer.state.epoch, trainer.state.position) == (0, 10)


def test_fill_rounds_is_the_cap():
    def nothing(completion_ids):
        return [0.0] * len(completion_ids)

    trainer = grpo(nothing, fill_batch=True, fill_rounds=3, resample_rounds=1)
    history = trainer.train(ROWS, num_steps=1)
    assert history.steps[0]["reward/further_prompts"] == 6
    assert (history.steps[0]["reward/zero_std_fraction"], trainer.state.position) == (1.0, 8)
    trainer.train(ROWS, num_steps=1)
    assert (trainer.state.epoch, trainer.state.position) == (0, 8), "a new run begins with the first rows"
    outside = trainer.train_step([[2, 3], [4, 3]])
    assert outside["reward/further_prompts"] == 0, "outside train() there are no further prompts"


@pytest.mark.parametrize("options", [{"fill_batch": True}, {"curriculum": "hard"}])
def test_a_run_that_was_interrupted_takes_the_same_prompts(options, tmp_path):
    whole = grpo(**options)
    SEEN.clear()
    whole.train(ROWS, num_steps=5)
    wanted = list(SEEN)
    SEEN.clear()
    failing = grpo(**options, callbacks=[FailAt(3, "end")])
    with pytest.raises(Failure):
        failing.train(ROWS, num_steps=5, output_dir=tmp_path)
    again = grpo(**options)
    again.train(ROWS, num_steps=5, output_dir=tmp_path, resume=True)
    assert wanted == SEEN
    assert torch.equal(weights_of(again), weights_of(whole))


def test_fill_batch_and_prompts_sampled_ahead_exclude_each_other():
    with pytest.raises(ValueError, match="fill_batch must be False with max_staleness"):
        grpo(fill_batch=True, max_staleness=1, rollout_server="http://localhost:1")
    with pytest.warns(UserWarning, match="fill_rounds has no effect"):
        grpo(fill_rounds=2)


# ---- a curriculum ----


def test_easy_rows_come_first_in_every_epoch():
    SEEN.clear()
    grpo(curriculum="hard").train(ROWS, num_epochs=2)
    by_difficulty = sorted(range(12), key=lambda i: ROWS[i]["hard"])
    assert by_difficulty * 2 == SEEN


def test_rows_of_equal_difficulty_keep_the_shuffled_order():
    rows = [{"prompt": [2 + i, 3], "completion": [4, 1], "level": i % 2} for i in range(10)]
    trainer = SFT(model=tiny_moe(), batch_size=5, curriculum="level")
    taken = []
    trainer.step_on = lambda batch, step=trainer.step_on: (
        taken.extend(int(one.ids_T[0]) - 2 for one in batch) or step(batch)
    )
    trainer.train(rows, num_epochs=2)
    for epoch in range(2):
        order = [i for level in (0, 1) for i in epoch_order(10, 0, epoch, True) if i % 2 == level]
        assert taken[10 * epoch : 10 * epoch + 10] == order


def test_difficulty_by_a_function_of_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def backwards(row):\n    return -row['number']\n")
    SEEN.clear()
    grpo(curriculum="mine.py:backwards").train(ROWS, num_steps=2, output_dir="run")
    assert SEEN == [11, 10, 9, 8]
    Path("mine.py").write_text("def backwards(row):\n    return row['number']\n")
    with pytest.raises(ValueError, match="curriculum backwards"):
        grpo(curriculum="mine.py:backwards").train(ROWS, num_steps=4, output_dir="run", resume=True)


@pytest.mark.parametrize("value", ["easy", None, float("nan"), True])
def test_difficulty_must_be_a_number(value):
    class Rows(list):
        before = ({"hard": 1}, {"hard": value})

    with pytest.raises(ValueError, match=r"curriculum needs a number for each row, found .* of rows\[1\] in 'hard'"):
        difficulty_of(Rows(), "hard")
