"""Documents do not drift: their examples run, their links lead somewhere."""

import importlib
import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from tiny_models import llama
from tiny_tokenizers import hugging_face

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_run(path, capsys, tmp_path, monkeypatch):
    """The Python blocks of a page, one after another in one namespace and in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    namespace = {}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{path.name}, example {number}", "exec"), namespace)


def real_model_examples():
    """Blocks for people with a real model, `py` and not `python`: (page, block), those of strop."""
    blocks = [
        (p, b) for p in DOCUMENTS for b in re.findall(r"```py\n(.*?)```", p.read_text(encoding="utf-8"), re.DOTALL)
    ]
    return [(path, block) for path, block in blocks if block.startswith("# strop")]


@pytest.mark.parametrize("number", range(2))
def test_examples_with_real_models_run_on_a_tiny_one(number, tmp_path, monkeypatch):
    """With fewer, shorter steps, and a folder of a tiny Llama of that name in place of the Hub's."""
    path, block = real_model_examples()[number]
    monkeypatch.chdir(tmp_path)
    name = re.search(r'model="(.*?)"', block)[1]
    tokenizer = hugging_face()
    llama(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id).save_pretrained(tmp_path / name)
    tokenizer.save_pretrained(tmp_path / name)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 8)
    namespace = {
        "dataset": [{"prompt": "a"}, {"prompt": "b"}] * 4,
        "reward_len": lambda completions, **kwargs: [-abs(5 - len(completion)) for completion in completions],
    }
    short = block.replace("num_steps=100", "num_steps=1").replace("max_new_tokens=128", "max_new_tokens=4")
    exec(compile(short, str(path), "exec"), namespace)
    assert list(tmp_path.glob("runs/*/final"))


def test_every_example_with_a_real_model_is_run():
    assert len(real_model_examples()) == 2


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_the_tutorial_names_what_train_brings():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    tutorial = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    line = next(line for line in tutorial.splitlines() if "'.[train]'" in line)
    for package in extras["train"]:
        name = re.match(r"[\w-]+", package)[0]
        assert f" {name}" in line.replace(",", ""), name


def test_data_says_when_a_prompt_is_found_too_long():
    """tests/algorithms/test_grpo.py has that it is: dataset[3] is named before anything is sampled."""
    text = " ".join((ROOT / "docs" / "data.md").read_text(encoding="utf-8").split())
    assert "when it is sampled" not in text
    assert "Up to 1,000 rows are tokenised before the first step" in text
    assert "whether the prompt leaves room for `max_new_tokens`" in text


def test_no_page_is_lost():
    """Every page of docs is linked from another one."""
    linked = set()
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
            linked.add((path.parent / target).resolve())
    assert {p for p in DOCUMENTS if p.is_relative_to(ROOT / "docs")} <= linked


def test_the_site_has_every_page():
    """docs-site builds it; a page that is in no part of it would be found by search alone."""
    listed = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2])
    pages = {str(path.relative_to(ROOT / "docs")) for path in DOCUMENTS if path.is_relative_to(ROOT / "docs")}
    pages = {page for page in pages if not page.startswith("log/")}  # the log is outside the site's navigation
    assert pages == {page for page in listed if not page.startswith("project/")}
    assert len(set(listed)) == len(listed)


def test_the_reference_names_what_is_there():
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    for name in re.findall(r"`(strop\.[\w.]+)`", text):
        place, _, leaf = name.rpartition(".")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(place), leaf), name


def test_the_page_of_metrics_has_every_metric():
    """What the report draws and what the algorithms' pages name; its list of alarms is that of the report."""
    from strop.report.alarms import ALARMS
    from strop.report.metrics import METRICS

    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    explained = {
        name for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)
    }
    assert set(METRICS) <= explained
    for path in (ROOT / "docs/algorithms").glob("*.md"):
        for part in re.findall(r"## Metrics\n(.*?)(?:\n## |\Z)", path.read_text(encoding="utf-8"), re.DOTALL):
            named = {
                n for row in re.findall(r"^\| (`.*?) \|", part, re.MULTILINE) for n in re.findall(r"`([^`]+)`", row)
            }
            assert named <= explained, path.name
    listed = re.findall(r"^\| (.*?) \|", page.partition("## Alarms")[2], re.MULTILINE)[1:]
    assert listed == [*(alarm.title for alarm in ALARMS), "A value is not finite"]


def equations():
    """The links of the equation-to-code table: row, name, file."""
    text = (ROOT / "docs/moe.md").read_text(encoding="utf-8").split("## Equations and code")[1].split("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ") and "](" in line]
    return [
        (row.split("|")[1].strip(), name, target)
        for row in rows
        for name, target in re.findall(r"\[`(\w+)`\]\(([^)]+)\)", row)
    ]


def is_defined(name, path):
    """A Python function of that name, or a C++ one with its body; a declaration or a call is not enough."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return re.search(rf"^ *def {name}\(", text, re.MULTILINE) is not None
    definition = rf"^(?:[\w:<>,*&\s]+[\s*&:])?{name}\([^;{{]*\)(?: const)?(?: noexcept)? \{{"
    return re.search(definition, text, re.MULTILINE) is not None


@pytest.mark.parametrize(("row", "name", "target"), equations())
def test_equations_lead_to_their_code(row, name, target):
    path = ROOT / "docs" / target
    assert path.exists(), f"{row}: no file {target}"
    assert is_defined(name, path), f"{row}: {name} is not defined in {target}"


def test_equations_are_complete():
    """Every formula that was promised, and the backward of every layer the reference has."""
    promised = ("embedding, RMSNorm, linear, SiLU, SwiGLU, softmax, RoPE rotation, RoPE frequencies, NTK-aware scaling, attention, "
                "causal mask, MoE combine, router, auxiliary loss, cross-entropy, its gradient, AdamW, clipping, warm-up, cosine, "
                "temperature, top-p")  # fmt: skip
    assert set(promised.split(", ")) <= {row for row, _, _ in equations()}
    linked = {name for _, name, _ in equations()}
    reference = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "src/strop/moe/reference").glob("*.py"))
    assert set(re.findall(r"^def (\w+_bwd)\(", reference, re.MULTILINE)) <= linked


@pytest.mark.parametrize(
    ("text", "name", "found"),
    [
        ("template <class T>\nvoid rope(size_t n, T* x) {\n}", "rope", True),
        ("inline VecOf<T> sigmoid(VecOf<T> x) {", "sigmoid", True),
        ("std::shared_ptr<std::vector<T>> Engine<T>::rope_table(size_t n) {", "rope_table", True),
        ("void f(const Config& c,\n       Arena& a) {", "f", True),
        ("void rope(size_t n, T* x);", "rope", False),
        ("    rope(n, x);\n    if (x) {", "rope", False),
        ("void rope_angles(size_t n) {", "rope", False),
    ],
)  # fmt: skip
def test_a_definition_is_told_from_a_call(text, name, found, tmp_path):
    path = tmp_path / "a.cpp"
    path.write_text(text)
    assert is_defined(name, path) is found


def pinned(path):
    """Return the versions that a file of requirements names, by package."""
    found = re.findall(r"^([A-Za-z][\w.-]*)([<>=]=[^ ;\n]+)", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def test_ci_installs_packages_of_known_hashes():
    """In the versions of constraints.txt, all that .[dev] names, but what differs by machine and index."""
    wanted, hashed = pinned("constraints.txt"), pinned(".ci/hashes.txt")
    assert hashed == {name: wanted.get(name) for name in hashed}
    text = (ROOT / ".ci" / "hashes.txt").read_text(encoding="utf-8")
    blocks = re.split(r"\n(?=[a-z])", text)
    assert len(blocks) == len(hashed)
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}\b", block) for block in blocks)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    names = re.search(r"\[(.*)\]", extras["dev"][0])[1].split(",")
    needed = [line for name in (*names, "dev") for line in extras[name] if not line.startswith("strop")]
    assert {canonicalize_name(Requirement(line).name) for line in needed} - hashed.keys() == {"torch", "triton"}
    assert "HASHES=.ci/hashes.txt" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_both_builds_of_torch_can_be_installed():
    """torch's CUDA build of this version wants triton 3.7.1 exactly; its CPU build wants none."""
    wanted = pinned("constraints.txt")
    assert wanted["torch"] == "==2.13.0"  # of another version look up what it requires
    assert SpecifierSet(wanted["triton"]).contains("3.7.1")
