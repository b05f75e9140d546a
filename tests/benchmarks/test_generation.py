"""The suite `generation`: what its contenders make, what it records of a rollout, and what the page makes of it."""

import dataclasses

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from results import result_of  # noqa: E402

from benchmarks.contenders import generation as contenders  # noqa: E402
from benchmarks.contenders.generation import END, Failed, Made, Model, Workload  # noqa: E402
from benchmarks.harness import Method  # noqa: E402
from benchmarks.pages import generation as page  # noqa: E402 (after the skip)
from benchmarks.suites import generation  # noqa: E402
from strop.rollout.decoding import description  # noqa: E402

TINY = dataclasses.replace(contenders.TINY, shape=contenders.TINY.shape | {"vocab_size": 200, "hidden_size": 32})
FULL = Workload(model=TINY, num_prompts=2, num_samples=3, prompt_tokens=4, new_tokens=6)
VARIED = dataclasses.replace(FULL, num_prompts=8, num_samples=8, new_tokens=40, varied=True)


@pytest.fixture
def in_this_process(monkeypatch):
    """Contenders without their processes. `failing`: workloads that transformers cannot do."""
    failing, started = [], []

    class Local:
        def __init__(self, name, model, cache):
            self.name, (self.seconds, self.run) = name, contenders.CONTENDERS[name](model)
            self.open = True
            started.append(self)

        def start(self):
            return self.seconds

        def rollout(self, workload, seed):
            if self.name == "transformers" and workload in failing:
                raise Failed("OutOfMemoryError: too large")
            lengths = self.run(workload, seed)
            return Made(seconds=sum(lengths) / 1e4, lengths=lengths)  # as if 10,000 tokens a second

        def close(self):
            self.open = False

    monkeypatch.setattr(generation, "Side", Local)
    monkeypatch.setattr(contenders, "bandwidth", lambda device: 1e9)
    return started, failing


# ---- the contenders ----


@pytest.mark.parametrize("name", ["strop", "transformers", "fallback"])
def test_full_lengths_are_exact_and_varied_ones_have_the_mean_that_was_asked_for(name):
    _, run = contenders.CONTENDERS[name](TINY)
    assert run(FULL, 0) == [6] * 6
    lengths = [length for seed in range(2) for length in run(VARIED, seed)]
    assert len(lengths) == 2 * 64
    assert min(lengths) < 5
    assert max(lengths) == 40
    p = 1 / TINY.once_in
    expected = (1 - (1 - p) ** 40) / p  # of a geometric distribution that ends at 40
    assert sum(lengths) / len(lengths) == pytest.approx(expected, rel=0.3)


def test_end_has_its_probability_and_nothing_else_changed():
    model = contenders.make_model(TINY)
    ids = VARIED.prompts(7)
    with torch.no_grad():
        found = model(ids).logits.softmax(-1)[..., END].mean()
    assert float(found) == pytest.approx(1 / TINY.once_in, rel=0.5)
    torch.manual_seed(contenders.SEED)
    config = transformers.AutoConfig.for_model("qwen2", pad_token_id=contenders.PAD, **TINY.shape)
    before = transformers.AutoModelForCausalLM.from_config(config).get_output_embeddings().weight
    after = model.get_output_embeddings().weight
    changed = (before != after).any(-1).nonzero().flatten().tolist()
    assert changed == [END]


def test_log_probs_of_transformers_are_those_of_its_own_forward():
    model = contenders.make_model(TINY)
    recorder = contenders.Recorder()
    prompt = FULL.prompts(0)
    found = model.generate(
        prompt, max_new_tokens=5, do_sample=True, top_k=0, pad_token_id=0,
        logits_processor=transformers.LogitsProcessorList([recorder]),
    )  # fmt: skip
    recorder.take(found[:, -1])
    with torch.no_grad():
        logps = model(found).logits[:, 3:-1].log_softmax(-1).gather(-1, found[:, 4:, None])[..., 0]
    torch.testing.assert_close(torch.stack(recorder.logps, 1), logps, rtol=1e-4, atol=1e-5)


def test_prompts_are_others_in_each_rollout_and_never_end():
    first, second = FULL.prompts(0), FULL.prompts(1)
    assert first.shape == (2, 4)
    assert not torch.equal(first, second)
    assert torch.equal(first, FULL.prompts(0))
    assert int(VARIED.prompts(0).min()) > END


def test_weights_that_a_step_reads():
    """Two layers of attention (with biases of q, k, v), gated MLP and two norms each, the last norm, the LM head."""
    V, D, F, kv = 200, 32, 128, 16
    layer = 2 * D * D + D + 2 * (D * kv + kv) + 3 * D * F + 2 * D
    assert contenders.weight_bytes(TINY) == 4 * (2 * layer + D + V * D)
    untied = dataclasses.replace(TINY, shape=TINY.shape | {"tie_word_embeddings": False})
    assert contenders.weight_bytes(untied) == contenders.weight_bytes(TINY)  # of the table, a row a token


def test_a_contender_in_its_own_process(tmp_path):
    side = contenders.Side("transformers", TINY, str(tmp_path))
    found = side.rollout(FULL, 0)
    assert found.lengths == [6] * 6
    assert found.seconds > 0
    too_long = dataclasses.replace(FULL, new_tokens=0)
    with pytest.raises(Failed, match="max_new_tokens"):
        side.rollout(too_long, 0)
    assert side.rollout(FULL, 1).lengths == [6] * 6  # it goes on after an error
    side.close()
    assert side.process.returncode == 0
    with pytest.raises(Failed, match="KeyError: 'nobody'"):
        contenders.Side("nobody", TINY, str(tmp_path)).start()


# ---- the suite ----


def test_what_is_recorded(in_this_process):
    full, varied = generation.cases([FULL, VARIED])
    found = full.measure(Method(rounds=3))
    assert list(found["contenders"]) == ["strop", "transformers", "fallback"]
    assert found["labels"]["left_out"] == contenders.left_out(TINY)
    facts = found["contenders"]["strop"]
    assert facts["samples_ns"] == [36 / 1e4 * 1e9] * 3
    assert (facts["generated_tokens"], facts["longest"], facts["tokens_per_second"]) == (36, 6, 10_000)
    limit = 6 * contenders.weight_bytes(TINY) / 1e9
    assert facts["share_of_limit"] == pytest.approx(limit / (36 / 1e4), abs=1e-4)
    assert facts["first_seconds"] == facts["first_seconds_cached"] == pytest.approx(36 / 1e4, abs=1e-3)
    assert "first_seconds_cached" not in found["contenders"]["transformers"]
    assert found["ratios"]["transformers"]["value"] == 1
    other = varied.measure(Method(rounds=3))["contenders"]["strop"]
    assert other["generated_tokens"] < 64 * 40
    assert "first_seconds" not in other  # the process has made rollouts before


def test_processes_are_shared_by_the_workloads_of_a_model_and_closed_after_them(in_this_process):
    started, _ = in_this_process
    other = dataclasses.replace(TINY, name="another")
    cases = generation.cases([FULL, VARIED, dataclasses.replace(FULL, model=other)])
    cases[0].measure(Method(rounds=3))
    assert [side.open for side in started] == [True, False, True, True]  # two of strop's: one for the kernels on disk
    cases[1].measure(Method(rounds=3))
    assert [side.open for side in started] == [False] * 4
    cases[2].measure(Method(rounds=3))
    assert len(started) == 8
    assert not any(side.open for side in started)


def test_a_peer_that_fails_is_left_out_and_why_is_told(in_this_process):
    _, failing = in_this_process
    full, varied = generation.cases([FULL, VARIED])
    failing.append(VARIED)
    assert "transformers" in full.measure(Method(rounds=3))["contenders"]
    found = varied.measure(Method(rounds=3))
    assert list(found["contenders"]) == ["strop", "fallback"]
    assert found["labels"]["left_out"]["transformers"] == "OutOfMemoryError: too large"


def test_the_page(in_this_process):
    measured = [case.measure(Method(rounds=3)) for case in generation.cases([FULL, VARIED])]
    measured[0]["labels"]["left_out"] = {"vLLM": "it is too large", "TRL": "it is not installed"}
    result = result_of(*measured, method={"rounds": 3, "confidence": 0.95})
    text = page.generation_table(result)
    line = (
        "| tiny Qwen2, 6 × 6 tokens after 4, float32 | transformers | 3.6 ms | no difference 1× [1, 1] | 36 | 10,000 |"
    )
    assert line in text
    assert "| 0.004 s; 0.004 s |" in text
    assert "| tiny Qwen2, 64 × at most 40 tokens after 4, float32 | strop |" in text
    assert "| vLLM | left out: it is too large |" in text
    assert "TRL" not in text
    assert "at 0.001 TB/s" in text
    assert "Medians of 3 rollouts of each side" in text
    assert "tiny" not in page.generation_summary(result)
    measured[0]["labels"]["model"] = "Qwen2-0.5B shape"
    short = page.generation_summary(result)
    assert "| Qwen2-0.5B shape, 6 × 6 tokens after 4, float32 | strop | 3.6 ms |  |" in short
    measured[0]["labels"]["model"] = "tiny Qwen2"
    families = page.families_table(result)
    assert "| Qwen2 | 3.6 ms | no difference 1× [1, 1] | no difference 1× [1, 1] |" in families
    assert "| Qwen2, varied lengths |" in families
    assert "6 rollouts of 6 tokens after 4" in families
    header, rows = generation.summary(measured)
    assert len(header) == len(rows[0]) == 7
    assert rows[0][-1] == "0.004 s"


def test_the_fallback_is_no_engine(in_this_process):
    policies = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contenders, "_rollouts_of", policies.append)
        contenders.fallback_rollouts(TINY)
    assert description(policies[0]) == "hf, transformers' generate: to measure it"


def test_workloads_on_a_cpu_are_a_tiny_model_of_each_family():
    names = {workload.model.name for workload in contenders.ON_A_CPU}
    assert names == {"tiny Qwen2", *(f"tiny {name}" for name, _ in contenders.FAMILIES.values())}
    assert {"tiny gpt-oss", "tiny DeepSeek V3", "tiny Llama 4", "tiny Qwen3-Next", "tiny Falcon-H1"} < names


def test_workloads_are_those_of_the_issue():
    shapes = [
        (w.model.name, w.num_prompts * w.num_samples, w.prompt_tokens, w.new_tokens, w.varied)
        for w in contenders.ON_A_GPU
    ]
    for name in ("Qwen2-0.5B shape", "SmolLM2-135M shape", "Qwen2-7B shape"):
        assert (name, 64, 64, 256, False) in shapes
        assert (name, 64, 64, 256, True) in shapes
    assert ("Qwen2-0.5B shape", 512, 64, 1024, True) in shapes
    assert ("Qwen2-0.5B shape", 64, 4096, 512, False) in shapes
    p = 1 / Model(name="", model_type="", shape={}).once_in
    assert (1 - (1 - p) ** 256) / p == pytest.approx(122, abs=2)
    billions = [
        contenders.weight_bytes(model) / 2e9 for model in (contenders.SMALL, contenders.SMALLEST, contenders.LARGE)
    ]
    assert billions == pytest.approx([0.494, 0.1345, 7.07], rel=0.01)
