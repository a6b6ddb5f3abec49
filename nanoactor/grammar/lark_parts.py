"""Building blocks of grammars in llguidance's Lark dialect: literals, tags, text up to a tag, and
JSON."""

from __future__ import annotations

import json
import re
from typing import Any

from nanoactor.grammar.vocabulary import Vocabulary

# The gap between two JSON tokens: a line break with indentation, or one space. If longer gaps were
# allowed, a model could fill its answer with them.
_WHITESPACE = r"\n[ \t]{0,16}|[ ]"


def text_without(tag: str) -> str:
    """Return a regular expression that matches texts that do not contain a tag. The tag's first
    character must occur only once in the tag.

    The expression lists every way to deviate from the tag, because intersecting with a complement
    would take the parser ten times as long.
    """
    first, alternatives = escaped(tag[0]), []
    for length, expected in enumerate(tag[1:]):
        prefix = escaped(tag[1 : 1 + length])
        alternatives.append(f"{prefix}([^{first}{escaped(expected)}][^{first}]*)?")
    return f"[^{first}]*({first}({'|'.join(alternatives)}))*"


def text_until(rule: str, tag: str, vocabulary: Vocabulary) -> list[str]:
    """Return the Lark rules for free text up to and including a tag. `rule` is the name of the rule
    that matches the text and the tag."""
    text = text_without(tag)
    if vocabulary.special(tag) is None:
        # Lazy, so that the match stops at the end of the tag.
        return [f"{rule}[lazy]: /{text}{escaped(tag)}/"]
    name = f"{rule.upper()}_TEXT"
    return [f"{rule}: {name} {tag_rule(tag, vocabulary)}", f"{name}: /{text}/"]


def json_rule(schema: dict[str, Any] | bool, whitespace: bool) -> str:
    """Return a Lark expression for JSON that matches a schema. If `whitespace` is False, no
    whitespace between JSON tokens is allowed."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    # These options replace those that the schema may contain. `lenient` would ignore keywords that
    # the library does not implement.
    options: dict[str, Any] = {"whitespace_flexible": whitespace, "lenient": False}
    if whitespace:
        options["whitespace_pattern"] = _WHITESPACE
    return "%json " + json.dumps({**schema, "x-guidance": options})


def tag_rule(tag: str, vocabulary: Vocabulary) -> str:
    """Return a Lark expression for a tag: its special token if there is one, otherwise its text."""
    id_ = vocabulary.special(tag)
    return quoted(tag) if id_ is None else f"<[{id_}]>"


def quoted(text: str) -> str:
    """Return a text as a quoted string literal in Lark."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def escaped(text: str) -> str:
    """Return a text with special characters escaped, for use in a regular expression."""
    return re.sub(r"([^\w<> ])", r"\\\1", text)
