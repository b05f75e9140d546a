"""Documents do not drift: their examples run, their links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_run(path, capsys):
    """The Python blocks of a page, one after another in one namespace."""
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    namespace = {}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{path.name}, example {number}", "exec"), namespace)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_no_page_is_lost():
    """Every page of docs is linked from another one."""
    linked = set()
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
            linked.add((path.parent / target).resolve())
    assert {p for p in DOCUMENTS if p.is_relative_to(ROOT / "docs")} <= linked
