"""The suite `step`: what it records of a step, and what the page makes of it."""

import dataclasses

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from results import result_of  # noqa: E402

from benchmarks.contenders import step as step_contenders  # noqa: E402
from benchmarks.contenders.step import Workload  # noqa: E402
from benchmarks.contenders.step_profile import after_generation, busy  # noqa: E402
from benchmarks.harness import Method  # noqa: E402
from benchmarks.pages import step as page  # noqa: E402 (after the skip)
from benchmarks.suites import step  # noqa: E402
from strop.rollout import generate  # noqa: E402

TINY = Workload(
    name="tiny", model_type="moe", num_prompts=2, group_size=3, prompt_tokens=4, new_tokens=5,
    shape={"vocab_size": 40, "hidden_dim": 16, "num_heads": 2, "head_dim": 8, "intermediate_dim": 16},
)  # fmt: skip


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setattr(step_contenders, "trl_installed", lambda: False)
    (case,) = step.cases([TINY])
    return case.measure(Method(rounds=3))


def test_a_step_tells_its_phases_and_tokens(measured):
    facts = measured["contenders"]["strop"]
    assert len(facts["samples_ns"]) == 3 * (step.STEPS_PER_TURN - 1)
    assert set(page.PHASES) == set(facts["phases_ns"])
    assert sum(facts["phases_ns"].values()) <= 1.2 * facts["median_ns"]
    assert 6 <= facts["generated_tokens"] <= 2 * 3 * 5
    assert measured["labels"]["left_out"] == {"TRL": "it is not installed"}


def test_the_price_of_exact_is_a_side_of_its_own(monkeypatch):
    monkeypatch.setattr(step_contenders, "trl_installed", lambda: False)
    (case,) = step.cases([dataclasses.replace(TINY, beside=step_contenders.EXACT)])
    measured = case.measure(Method(rounds=3))
    assert list(measured["contenders"]) == ["strop", "strop, exact"]
    assert measured["ratios"]["strop, exact"]["value"] > 0


def test_the_models_of_both_sides_have_the_same_weights(tmp_path):
    ours = step_contenders.moe_model(TINY)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(step_contenders._saved_model(TINY, str(tmp_path)))
    prompts = TINY.prompts()
    torch.testing.assert_close(
        theirs(prompts).logits, torch.from_numpy(ours.forward(prompts.numpy())), rtol=1e-4, atol=1e-5
    )
    tokenizer = step_contenders._word_tokenizer(TINY.vocab_size)
    assert tokenizer("t7 t39 t2").input_ids == [7, 39, 2]


def test_the_page(measured):
    measured["contenders"]["TRL"] = {
        **measured["contenders"]["strop"],
        "phases_ns": {"generate": 1e6},
        "peak_bytes": 3e9,
    }
    measured["ratios"]["TRL"] = {"value": 5.0, "low": 4.0, "high": 6.0, "verdict": "faster"}
    result = result_of(measured, method={"rounds": 3, "confidence": 0.95})
    text = page.step_table(result)
    assert "| tiny, 6 × 5 tokens, float32 | TRL |" in text
    assert "| 5× [4, 6] | generate " in text
    assert "commit 012345678;" in text
    assert "left out" not in text  # TRL is not installed where a case lacks it
    short = page.step_summary(result)
    assert "| tiny, 6 × 5 tokens, float32 | TRL |" in short
    assert "| 5× [4, 6] | 3 GB |" in short
    assert "Medians of 6 steps of each side" in short


def test_the_price_of_exact_on_the_page(measured):
    both = {"strop": measured["contenders"]["strop"] | {"median_ns": 2e8, "phases_ns": {"generate": 1.5e8}},
            "strop, exact": measured["contenders"]["strop"] | {"median_ns": 3e8, "phases_ns": {"generate": 2e8}}}  # fmt: skip
    case = measured | {"contenders": both, "ratios": {"strop, exact": {"value": 1.5, "low": 1.4, "high": 1.6}}}
    text = page.exact_table(result_of(case))
    assert "| 200 ms | 300 ms | 1.5× [1.4, 1.6] | generate 150 ms, rest 50 ms | generate 200 ms, rest 100 ms |" in text


def test_the_profile_on_the_page(measured):
    measured["contenders"]["strop"]["training"] = {
        "median_ns": 2e8, "busy_ns": 1.8e8, "profiled_ns": 2.4e8, "busy_share": 0.75, "kernels": 2306, "waits": 1,
    }  # fmt: skip
    text = page.step_training({"cases": [measured]})
    assert "| tiny, 6 × 5 tokens, float32 | 200 ms | 2,306 | 180 ms | 75% of 240 ms | 1 |" in text


def test_lengths_that_vary_have_the_mean_that_was_asked_for():
    """The chance of an end is that of the mean, at every token alike, and lengths follow from it."""
    workload = Workload(
        name="tiny", model_type="qwen2", num_prompts=16, group_size=32, prompt_tokens=4, new_tokens=32, mean_tokens=12,
        shape=step_contenders.TINY_QWEN2,
    )  # fmt: skip
    grpo = step_contenders.strop_trainer(workload)
    lengths = [len(ids) for ids in generate(grpo.policy, list(workload.prompts()), grpo.config.sampling, num_samples=32,
                                            seed=0).completion_ids]  # fmt: skip
    assert sum(lengths) / len(lengths) == pytest.approx(12, abs=1.6)  # four deviations of the mean of 512
    assert max(lengths) == 32
    assert len(set(lengths)) >= 30


def test_the_workloads_that_are_measured():
    full, varied, _, short, *others = step_contenders.ON_A_GPU
    exact = [workload for workload in others if workload.beside == step_contenders.EXACT]
    assert [workload.dtype for workload in exact] == [torch.bfloat16] * 2
    shared = [workload for workload in others if workload not in exact]
    assert [workload.beside[1] for workload in shared] == [{"share_prefixes": "always"}] * 4
    assert (varied.mean_tokens, varied.new_tokens, varied.shape) == (96, 256, full.shape)
    assert (short.num_completions, short.new_tokens, short.dtype, short.autocast) == (128, 16, torch.float32, True)
    assert full.dtype == torch.bfloat16
    assert [workload.name for workload in step_contenders.ON_A_CPU][:2] == ["tiny MoE", "tiny Qwen2"]


def test_what_spans_cover_together():
    assert busy([(5, 9), (0, 2), (1, 3), (6, 7)]) == 7
    assert busy([]) == 0


def test_something_is_done_between_generation_and_the_rest():
    grpo = step_contenders.strop_trainer(TINY)
    seen = []
    with after_generation(grpo, lambda: seen.append(grpo.state.updates)):
        grpo.train_step(TINY.prompts())
    assert seen == [0]
    assert grpo.state.updates == 1
    assert "draw" not in vars(grpo)
