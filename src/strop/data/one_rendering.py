"""Rendering of a conversation in one call, with a mark before each message, if the chat template allows it.

In general the start of an assistant's turn in the text is found by also rendering the messages before it. But many templates
write messages in order, and the text of a message depends only on it, on earlier messages and on the options. With these
templates the text before a turn is a prefix of the conversation's text, so one rendering is enough. The template's source
shows whether it is of this kind. For other templates, and for rows with tools or template options, `templates.pieces`
renders each prefix.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MARK = "\ue123"  # in the private use area: no template writes it
PLAIN = {"role", "content"}


class MarkedTemplate(NamedTuple):
    """A compiled template that writes MARK before each message and after the last, and the opening of a turn."""

    compiled: Any
    special_tokens: Mapping[str, str]
    opening: str

    def pieces(self, messages: Sequence[Mapping[str, object]], first: int) -> list[str] | None:
        """Return the text cut at the starts of the assistant's turns, from messages[first] on. Return None if the messages
        need several renderings, or if a turn does not begin with the template's opening."""
        if not all(_is_plain(message) for message in messages):
            return None
        parts = _marked(self.compiled, messages, self.special_tokens).split(MARK)
        if len(parts) != len(messages) + 2:
            return None
        begins = [i + 1 for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
        if not begins or begins[0] == 1 or not all(parts[i].startswith(self.opening) for i in begins):
            return None
        ends = [*begins[1:], len(parts)]
        spoken = ["".join(parts[start:end]) for start, end in zip(begins, ends, strict=True)]
        size = len(self.opening)
        turns = [text[size:] + self.opening for text in spoken[:-1]] + [spoken[-1][size:]]
        return ["".join(parts[: begins[0]]) + self.opening, *turns]


def marked_template(tokenizer: Any) -> MarkedTemplate | None:
    """Return the tokenizer's chat template with marks; None if its conversations need several renderings."""
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str) or not is_of_transformers(tokenizer, "apply_chat_template"):
        return None
    special = {name: value for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    return _compiled(template, tuple(special.items()))


def is_of_transformers(tokenizer: object, name: str) -> bool:
    """Return whether the tokenizer's method of this name is transformers' own and not overridden."""
    method = getattr(type(tokenizer), name, None)
    return getattr(method, "__module__", "") in (
        "transformers.tokenization_utils_base",
        "transformers.tokenization_utils_fast",
        "transformers.tokenization_utils_tokenizers",
    )


@functools.lru_cache(maxsize=8)
def _compiled(template: str, special_tokens: tuple[tuple[str, str], ...]) -> MarkedTemplate | None:
    from jinja2 import TemplateError, nodes

    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template
    except ImportError:  # it is not public: another version of transformers may have another name for it
        return None
    try:
        environment = _compile_jinja_template(template).environment
        tree = environment.parse(template)
        if not _writes_one_after_another(tree):
            return None
        at = next(i for i, node in enumerate(tree.body) if isinstance(node, nodes.For))
        mark = nodes.Output([nodes.TemplateData(MARK)]).set_environment(environment)
        tree.body[at].body.insert(0, mark)
        tree.body.insert(at + 1, mark)
        compiled = environment.template_class.from_code(environment, environment.compile(tree), environment.globals)
        probe = [{"role": "user", "content": "?"}]
        texts = [_marked(compiled, probe, dict(special_tokens), add_generation_prompt=opens) for opens in (False, True)]
        openings = [text.rpartition(MARK)[2] for text in texts]
    except TemplateError:  # for example a template that refuses the probe
        return None
    if openings[0] or MARK in template:  # text after the last message would also come before the opening
        return None
    return MarkedTemplate(compiled, dict(special_tokens), openings[1])


def _marked(
    compiled: Any, messages: Sequence[object], special_tokens: Mapping[str, str], *, add_generation_prompt: bool = False
) -> str:
    given = {"messages": list(messages), "tools": None, "documents": None, **special_tokens}
    return str(compiled.render(add_generation_prompt=add_generation_prompt, **given))


def _is_plain(message: object) -> bool:
    if type(message) is not dict or message.keys() != PLAIN:
        return False
    return all(type(value) is str and MARK not in value for value in message.values())


def _writes_one_after_another(tree: Any) -> bool:
    """Return whether the template is one loop over the messages, in which no message sees a later one.

    Before and in the loop nothing may depend on the number of messages or on add_generation_prompt. After the loop only the
    opening may follow, which depends on no message.
    """
    from jinja2 import nodes

    loops = [node for node in tree.body if isinstance(node, nodes.For) and _is_name(node.iter, "messages")]
    if len(loops) != 1 or loops[0].test is not None or loops[0].recursive or loops[0].else_:
        return False
    (loop,) = loops
    at = tree.body.index(loop)
    before, after = tree.body[:at], tree.body[at + 1 :]
    foreign = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block)
    if any(tree.find(kind) for kind in foreign) or not isinstance(loop.target, nodes.Name):
        return False
    items = [node for node in tree.find_all(nodes.Getitem) if isinstance(node.arg, nodes.Const)]
    first = [node.node for node in items if node.arg.value == 0]
    known = [node.node for node in tree.find_all(nodes.Getattr) if node.attr in ("first", "index", "index0")]
    for name in tree.find_all(nodes.Name):
        allowed = {"messages": [*first, loop.iter], "loop": known}.get(name.name)
        if allowed is not None and not any(name is one for one in allowed):
            return False
    if any(_uses(node, ("add_generation_prompt",)) for node in (*before, loop)):
        return False
    stored = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    return not any(_uses(node, (*stored, "messages")) or list(node.find_all(nodes.Call)) for node in after)


def _is_name(node: object, name: str) -> bool:
    from jinja2 import nodes

    return isinstance(node, nodes.Name) and node.name == name


def _uses(node: Any, names: Sequence[str]) -> bool:
    from jinja2 import nodes

    return any(one.name in names for one in [node, *node.find_all(nodes.Name)] if isinstance(one, nodes.Name))
