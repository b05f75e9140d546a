"""Micro-batches under a budget of tokens, and what an OutOfMemoryError says and leaves behind."""

import copy
import weakref
from pathlib import Path

import pytest
import torch
from test_grpo import PROMPTS, count_low, make_grpo, weights
from tiny_models import PlainModel

from strop.algorithms.grpo import GRPO
from strop.algorithms.online_dpo import OnlineDPO
from strop.algorithms.sft import SFT
from strop.callbacks import Callback
from strop.data.batch import TokenBatch, split

# ---- micro-batches ----


def test_what_fits_stays_as_it_is():
    assert split("abc", [5, 1, 3]) == [["a", "b", "c"]]
    assert split("abc", [5, 1, 3], 3, 15, padded=True) == [["a", "b", "c"]]
    assert split("", []) == []


def test_parts_are_of_like_lengths_and_within_the_limits():
    assert split("abcd", [1, 5, 2, 4], num_tokens=10, padded=True) == [["b", "d"], ["c", "a"]]
    assert split("abcd", [1, 5, 2, 4], size=2, padded=True) == [["b", "d"], ["c", "a"]]
    assert split("abcde", [1] * 5, size=2, num_tokens=100, padded=True) == [["a", "b"], ["c", "d"], ["e"]]
    assert split("abc", [30, 2, 2], num_tokens=10, padded=True) == [["a"], ["b", "c"]]  # too long for any: alone


@pytest.mark.parametrize("padded", [False, True])
def test_parts_are_as_even_as_can_be(padded):
    """64 rows of 320 tokens under 16,384: not 51 and 13, but 32 and 32, which need less memory."""
    assert [len(part) for part in split(range(64), [320] * 64, num_tokens=16384, padded=padded)] == [32, 32]


@pytest.mark.parametrize("size", [0, 3])
def test_every_row_is_in_one_part(size):
    lengths = torch.randint(1, 50, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    parts = split(range(40), lengths, size, 120, padded=True)
    assert sorted(i for part in parts for i in part) == list(range(40))
    assert all(len(part) * max(lengths[i] for i in part) <= 120 for part in parts)
    assert all(len(part) <= (size or 40) for part in parts)
    padding = sum(len(part) * max(lengths[i] for i in part) for part in parts) - sum(lengths)
    assert padding < 0.2 * sum(lengths)


def test_an_update_looks_at_the_device_once(monkeypatch):
    """However many micro-batches: of a GPU every look is a wait."""
    looks = []
    for name in ("item", "tolist", "cpu", "__float__", "__bool__", "__int__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *a, o=original, n=name: looks.append(n) or o(self, *a), raising=True
        )
    grpo = make_grpo(PlainModel(), micro_batch_size=2, kl_coef=0.0)
    table = grpo.model.head.weight
    found = []
    for parts in (1, 6):
        looks.clear()
        grpo.update([lambda: table.square().sum()] * parts)
        found.append(list(looks))
    assert found[0] == found[1]
    assert found[0].count("tolist") == 1
    assert "item" not in found[0]


# ---- out of memory ----

TOLD = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.81 GiB of which 1.20 GiB is free. "
    "Including non-PyTorch memory, this process has 138.6 GiB memory in use.\nSee documentation"
)


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError(TOLD)


class Hungry(PlainModel):
    """Runs out of memory in one phase, told by what a phase does with a model."""

    fails_in = None

    def forward(self, tokens):
        logits = super().forward(tokens)
        learning = torch.is_grad_enabled()
        if self.fails_in == "backward" and learning:
            return FailsBackward.apply(logits)
        if self.fails_in == ("forward" if learning else "generate" if not self.training else ""):
            self.seen = weakref.ref(logits)
            raise torch.OutOfMemoryError(TOLD)
        return logits


def starve(trainer, phase):
    if phase == "score":
        trainer.reference.policy.model.fails_in = "generate"  # the reference is only ever scored with
    else:
        trainer.model.fails_in = phase


CASES = {
    "generate": "sampling completions, step 1 (time/generate): 20.00 GiB asked for of 139.81 GiB, 1.20 GiB free; "
    "lower batch_size=8 or group_size=4 or max_new_tokens=6",
    "score": "scoring, step 1 (time/score): 20.00 GiB asked for of 139.81 GiB, 1.20 GiB free; "
    "lower micro_batch_tokens=6144, or set micro_batch_size",
    "forward": "the forward of an update, step 1 (time/forward): 20.00 GiB asked for of 139.81 GiB, 1.20 GiB free; "
    "lower micro_batch_tokens=6144, or set micro_batch_size",
    "backward": "the backward of an update, step 1 (time/backward): 20.00 GiB asked for of 139.81 GiB, 1.20 GiB free; "
    "lower micro_batch_tokens=6144, or set micro_batch_size",
}


@pytest.mark.parametrize("phase", CASES)
def test_the_message(phase):
    grpo = make_grpo(Hungry(), kl_coef=0.1, learning_rate=1e-2)
    before = weights(grpo.model)
    starve(grpo, phase)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        grpo.train_step(PROMPTS)
    assert str(caught.value) == f"out of memory in {CASES[phase]}"
    assert all(param.grad is None for param in grpo.model.parameters())
    if phase in ("generate", "forward"):
        assert grpo.model.seen() is None  # though the error is still held: what the step computed is free
    assert torch.equal(weights(grpo.model), before)
    starve(grpo, None)
    grpo.reference.policy.model.fails_in = None
    assert grpo.train_step(PROMPTS)["grad_norm"] > 0  # with less to do it goes on


def test_the_message_of_others():
    model = Hungry()
    online = OnlineDPO(model=model, preference_fn=lambda pairs: [0] * len(pairs), max_new_tokens=5)
    starve(online, "generate")
    with pytest.raises(torch.OutOfMemoryError, match=r"lower batch_size=8 or max_new_tokens=5$"):
        online.train_step(PROMPTS)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory in evaluation "):
        online.evaluate([{"prompt": p} for p in PROMPTS])
    from tiny_models import llama

    sft = SFT(model=llama(), micro_batch_tokens=7)
    sft.policy.hidden = lambda batch: (_ for _ in ()).throw(torch.OutOfMemoryError("no number here\nmore"))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        sft.train_step([[1, 2]], [[3]])
    assert str(caught.value).endswith(
        ": no number here; lower micro_batch_tokens=7, or set micro_batch_size, or set gradient_checkpointing=True, or "
        "train adapters: lora={'r': 16}"
    )


class StarveAt(Callback):
    """From the third step on."""

    def __init__(self, phase):
        self.phase = phase

    def on_step_begin(self, trainer):
        if trainer.state.step == 2:
            starve(trainer, self.phase)


ROWS = [{"prompt": [1 + i, 2]} for i in range(6)]


@pytest.mark.parametrize("phase", CASES)
def test_a_run_keeps_what_it_has_done(phase, tmp_path):
    """The checkpoint of the steps before is named, and going on from it gives the undisturbed run."""
    options = {"batch_size": 2, "kl_coef": 0.1, "learning_rate": 1e-2}
    starved = make_grpo(Hungry(), callbacks=[StarveAt(phase)], **options)
    with pytest.raises(torch.OutOfMemoryError, match=f"step 3 .time/{phase}.") as caught:
        starved.train(ROWS, num_steps=4, output_dir=tmp_path, progress=False)
    path = tmp_path / "checkpoints" / "step-00000002.safetensors"
    assert caught.value.__notes__ == [f"the run up to step 2 is in {path}; resume=True goes on from there"]
    resumed = make_grpo(Hungry(), **options)
    resumed.train(ROWS, num_steps=4, output_dir=tmp_path, resume=True, progress=False)
    whole = make_grpo(Hungry(), **options)
    whole.train(ROWS, num_steps=4, progress=False)
    assert torch.equal(weights(resumed.model), weights(whole.model))


def test_after_an_inner_update_the_newest_checkpoint_is_named(tmp_path):
    class SecondUpdate(Callback):
        def on_step_begin(self, trainer):
            updates = trainer.state.updates

            def loss_on(*arguments, **options):
                if trainer.state.updates == updates + 1 and trainer.state.step == 2:
                    raise torch.OutOfMemoryError(TOLD)
                return GRPO.loss_on(trainer, *arguments, **options)

            trainer.loss_on = loss_on

    options = {"batch_size": 2, "inner_epochs": 2, "callbacks": [SecondUpdate()]}
    for save_every, note in ((0, "there is no earlier one: see save_every"), (1, "goes on from the newest, ")):
        folder = tmp_path / str(save_every)
        grpo = make_grpo(Hungry(), save_every=save_every, **copy.copy(options))
        with pytest.raises(torch.OutOfMemoryError) as caught:
            grpo.train(ROWS, num_steps=4, output_dir=folder, progress=False)
        assert "the step may have changed weights" in caught.value.__notes__[0]
        assert note in caught.value.__notes__[0]
    assert caught.value.__notes__[0].endswith(str(Path("checkpoints") / "step-00000002.safetensors"))


def test_with_nothing_to_score_nothing_is_collated(monkeypatch):
    """The log-probs of sampling are there: without a reference a step makes batches for its update alone."""
    made = []
    for kl_coef, old_logps in ((0.0, "rollout"), (0.1, "rollout"), (0.0, "recompute")):
        grpo = make_grpo(PlainModel(), kl_coef=kl_coef, old_logps=old_logps)
        lines = grpo.draw(grpo.prepare([{"prompt": p} for p in PROMPTS]), range(len(PROMPTS)), 0)
        of = TokenBatch.of
        with monkeypatch.context() as patch:
            patch.setattr(TokenBatch, "of", lambda lines, *more, of=of: made.append(len(lines)) or of(lines, *more))
            made.clear()
            grpo.score(lines)
        assert sum(made) == (len(lines) if kl_coef or old_logps == "recompute" else 0)
        assert all((line.ref_logps_t is not None) == (kl_coef > 0) for line in lines)
        for line in lines:
            torch.testing.assert_close(line.old_logps_t, line.rollout_logps_t, rtol=1e-5, atol=1e-5)


def test_the_rewards_of_a_step_come_after_its_scores_unless_it_samples_again():
    """On a GPU the host then runs them while the reference computes."""
    for rounds, wanted in ((0, ["generate", "score", "reward"]), (1, ["generate", "reward", "score"])):
        grpo = make_grpo(PlainModel(), reward_fn=count_low, resample_rounds=rounds, kl_coef=0.1)
        order, phase = [], grpo.phase
        grpo.phase = lambda name, order=order, phase=phase: order.append(name) or phase(name)
        grpo.train_step(PROMPTS)
        assert order[:3] == wanted


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:124] data. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
                "4398046511104 bytes. Error code 12 (Cannot allocate memory)"
            ),
            "4398046511104 bytes asked for",
        ),
        (MemoryError("Unable to allocate 4.00 TiB for an array with shape (1, 2)"), "4.00 TiB asked for"),
        (MemoryError(), "nothing tells how much was asked for"),
    ],
)
def test_a_lack_of_memory_on_a_cpu_is_told_alike(error, told):
    sft = SFT(model=PlainModel(), micro_batch_tokens=7)
    sft.policy.logps = lambda batch, **__: (_ for _ in ()).throw(error)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        sft.train_step([[1, 2]], [[3]])
    assert str(caught.value).startswith(
        f"out of memory in the forward of an update, step 1 (time/forward): {told}; lower"
    )


def test_another_error_stays_as_it_is():
    sft = SFT(model=PlainModel())
    sft.policy.logps = lambda batch, **__: (_ for _ in ()).throw(RuntimeError("something else"))
    with pytest.raises(RuntimeError, match=r"^something else$"):
        sft.train_step([[1, 2]], [[3]])


def test_the_real_thing_on_a_cpu():
    sft = SFT(model=PlainModel())
    sft.policy.logps = lambda batch, **__: torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(torch.OutOfMemoryError, match=f": {2**60} bytes asked for; lower "):
        sft.train_step([[1, 2]], [[3]])
