"""Documents follow their JSON; a block that differs is found."""

import json
from pathlib import Path

import pytest
from results import result_of

from benchmarks import report, text
from benchmarks.pages import landing, primitives

ROOT = Path(__file__).resolve().parents[2]


def result(**ratios):
    case = {
        "work": "advantages 16×4", "labels": {"primitive": "advantages", "shape": "16×4", "dtype": "float64"},
        "contenders": {"strop": {"median_ns": 251.3, "samples_ns": [251.3]}, "numpy": {"median_ns": 806.67, "samples_ns": [806.67]}},
        "ratios": ratios or {"numpy": {"value": 3.21, "low": 3.0, "high": 3.5, "verdict": "faster"}},
    }  # fmt: skip
    return result_of(case)


def test_documents_of_this_repository_are_in_step():
    assert report.drifted(ROOT) == []


def test_the_promised_blocks_are_there():
    blocks = {(p.name, m["renderer"]) for p in report.documents(ROOT) for m in report.BLOCK.finditer(p.read_text())}
    assert {
        ("README.md", "landing_table"),
        ("benchmarks.md", "primitives_table"),
        ("moe.md", "engines_table"),
    } <= blocks


def test_a_changed_number_is_found_and_mended(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "FIGURES", {})
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- generated: primitives_table r.json -->\n<!-- end generated -->\nafter\n")
    assert report.drifted(tmp_path) == []  # without a result the block stays empty
    (tmp_path / "r.json").write_text(json.dumps(result()))
    assert report.drifted(tmp_path) == ["README.md"]
    assert report.write(tmp_path) == ["README.md"]
    written = readme.read_text()
    assert "| advantages 16×4 | float64 | 251 ns | 3.21× [3, 3.5] |" in written
    assert written.startswith("before\n")
    assert written.endswith("after\n")
    assert report.drifted(tmp_path) == []
    readme.write_text(written.replace("3.21×", "9.99×"))
    assert report.drifted(tmp_path) == ["README.md"]


def test_slower_is_as_visible_as_faster():
    slower = {"value": 0.5, "low": 0.4, "high": 0.6, "verdict": "slower"}
    same = {"value": 1.01, "low": 0.9, "high": 1.1, "verdict": "same"}
    page = primitives.primitives_table(result(numpy=slower, torch=same))
    assert "**slower** 0.5× [0.4, 0.6]" in page
    assert "no difference 1.01× [0.9, 1.1]" in page


@pytest.mark.parametrize(("ns", "words"), [(12.34, "12.3 ns"), (1500, "1.5 µs"), (2.5e6, "2.5 ms"), (3.2e9, "3.2 s")])
def test_durations(ns, words):
    assert text.duration(ns) == words


def test_mistakes_in_marks():
    with pytest.raises(ValueError, match=r"unknown renderer 'nope'; there are .*primitives_summary, primitives_table"):
        report.filled("<!-- generated: nope r.json -->\n<!-- end generated -->", ROOT)
    for mark in (
        "<!-- generated: x r.json -->\n",
        "<!--generated: x r.json -->\n<!-- end generated -->",
        "<!-- Generated: x r -->",
    ):
        with pytest.raises(ValueError, match="not closed by"):
            report.filled(mark, ROOT)


def test_command_line(capsys):
    assert report.main(["--wrong"]) == 2
    assert "usage:" in capsys.readouterr().err
    assert report.main(["--check"]) == 0


def test_the_front_page_compares_with_the_libraries_people_know():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = next(m["body"] for m in report.BLOCK.finditer(text) if m["renderer"] == "landing_table")
    assert "| TRL, transformers generation |" in block
    assert "| Liger, its loss function |" in block
    found = json.loads((ROOT / "benchmarks/results/step-h200.json").read_text())["cases"][0]
    assert f"{found['ratios']['TRL']['value']:.3g}×" in block
    assert "none (NumPy)" not in text


def test_trl_with_vllm_is_computed_from_its_own_step_and_the_recorded_generation():
    """By hand: a step of 6 s, of which 5.5 s are generation, leaves 0.5 s; 1.29 to 1.47 s more over strop's 0.5 s."""
    labels = {"model": "Qwen2-0.5B shape", "completions": 64, "new_tokens": 256, "prompt_tokens": 64}
    trl = {"median_ns": 6e9, "phases_ns": {"generate": 5.5e9}}
    case = {"labels": labels, "contenders": {"strop": {"median_ns": 0.5e9}, "TRL": trl}}
    row = landing._computed_row("a step", case)
    assert row == ["a step", "500 ms", "TRL, vLLM generation, computed", "1.79 to 1.97 s", "3.58 to 3.94×"]
    assert landing._computed_row("a step", case | {"labels": labels | {"new_tokens": 16}}) is None
    assert landing._computed_row("a step", case | {"contenders": {"strop": {"median_ns": 1}}}) is None
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("| TRL, vLLM generation, computed |") == 1
    assert "Computed: vLLM's recorded rollout plus what TRL's own step took besides generation" in text


def test_pages_list_nothing_that_was_only_not_installed():
    for path in report.documents(ROOT):
        assert "left out: it is not installed" not in path.read_text(encoding="utf-8"), path
    assert "left out: it would take minutes" in (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")


def test_what_was_recorded_is_told_from_what_was_measured():
    """A peer's recorded range stands beside strop's median, and its ratio has no interval."""
    case = {"work": "generation, Qwen2-7B shape, 64 × 256 after 64", "contenders": {"strop": {"median_ns": 1.2e9}}}
    row = landing._recorded_row("a rollout", case)
    assert row == ["a rollout", "1.2 s", "vLLM 0.24, recorded", "1.44 to 1.48 s", "1.2 to 1.23×"]
    assert landing._recorded_row("a rollout", case | {"work": "another"}) is None
    works = {
        case["work"] for case in json.loads((ROOT / "benchmarks/results/generation-h200.json").read_text())["cases"]
    }
    assert set(landing.RECORDED["seconds"]) <= works
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("| vLLM 0.24, recorded |") == 2
    assert "Recorded: vLLM ran apart" in text
