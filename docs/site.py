"""Hooks of the documentation site. The pages themselves stay plain Markdown that reads well in the repository too.

Links to files outside of docs are followed: Markdown becomes a page under project/, any other file a text under source/.
The page of the API gets its docstrings.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")


def _outside(page, target):
    """The path in the repository of what a page links to, where it is not in docs; `page` is its own path there."""
    if "://" in target or target.startswith("mailto:"):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    return None if path.startswith("docs/") or not (ROOT / path).exists() else path


def _place(path):
    return f"project/{Path(path).name}" if path.endswith(".md") else f"source/{path}.txt"


def _rewritten(text, page, place):
    """The links of a page of the repository, as they are on the site, where the page is at `place`."""

    def link(found):
        target, path = found[2], _outside(page, found[2])
        if path is None and page.startswith("docs/"):
            return found[0]
        if path is None and "://" in target:
            return found[0]
        inside = posixpath.normpath(posixpath.join(posixpath.dirname(page), target)).removeprefix("docs/")
        there = inside if path is None else _place(path)
        if path is not None and (ROOT / path).is_dir():
            return f"{found[1]}{posixpath.relpath('index.md', posixpath.dirname(place) or '.')})"
        anchor = found[3] if path is None or path.endswith(".md") else ")"
        return f"{found[1]}{posixpath.relpath(there, posixpath.dirname(place) or '.')}{anchor}"

    return LINK.sub(link, text)


def on_files(files, config):
    left = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    left += ["CONTRIBUTING.md", "CHANGELOG.md"]
    done = set()
    while left:
        page = left.pop()
        if page in done:
            continue
        done.add(page)
        text = (ROOT / page).read_text(encoding="utf-8")
        if not page.startswith("docs/"):
            content = _rewritten(text, page, _place(page))
            files.append(File.generated(config, _place(page), content=content))
        for target in {found[2] for found in LINK.finditer(text)}:
            path = _outside(page, target)
            if path is None or (ROOT / path).is_dir() or path in done:
                continue
            if path.endswith(".md"):
                left.append(path)
            else:
                done.add(path)
                files.append(File.generated(config, _place(path), content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown, page, config, files):
    if not page.file.src_uri.startswith("project/"):
        markdown = _rewritten(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)
    if page.file.src_uri == "reference.md":
        names = dict.fromkeys(re.findall(r"`(strop\.[\w.]+)`", markdown))
        markdown += "\n" + "\n".join(f"::: {_defined(name)}\n" for name in names)
    return markdown


def _defined(name):
    """Where a name of the table is defined: `strop.GRPO` is imported lazily, so its docstring has to be looked for."""
    source = (ROOT / "src/strop/__init__.py").read_text(encoding="utf-8")
    lazy = dict(re.findall(r"from (strop\.algorithms\.\w+) import (\w+) as", source))
    places = {leaf: place for place, leaf in lazy.items()}
    leaf = name.removeprefix("strop.")
    return f"{places[leaf]}.{leaf}" if leaf in places else name
