"""Docstrings as Markdown, for the API page of the site. In the source they are aligned columns and bare examples:

    name      what it is, which may go on
              in the next line

becomes a list, and a paragraph that begins with an assignment becomes a block of Python.
"""

import re

import griffe

FIELD = re.compile(r"^(\S(?:.*?\S)?) {2,}(\S.*)$")
CODE = re.compile(r"^(?:\w+(?:, \w+)* = |from |import |with |class |def )\S.*[()\[]")


class Columns(griffe.Extension):
    def on_object(self, *, obj, **_):
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text):
    """The same docstring; every paragraph is a list, code, or left as it is."""
    return "\n\n".join(map(_paragraph, re.split(r"\n\s*\n", text)))


def _paragraph(text):
    lines = text.split("\n")
    if CODE.match(lines[0]):
        return "\n".join(["```python", *lines, "```"])
    if not FIELD.match(lines[0]):
        return text
    items = []
    for line in lines:
        found = FIELD.match(line)
        if found:
            items.append(f"- `{found[1]}`: {found[2]}")
        else:
            items[-1] += f" {line.strip()}"
    return "\n".join(items)
