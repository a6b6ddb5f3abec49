"""Separation of free text (reasoning, or text before a tool call) from the grammar that applies
after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from nanoactor.grammar.check import parse_tools
from nanoactor.messages.engine import FreeText
from nanoactor.requests.grammar_spec import CALL_TAGS, CLOSE_TAG, OPEN_TAG, GrammarSpec

_NO_TOKEN = -1


def split_free_text(text: str, id_of: Callable[[str], int | None]) -> tuple[str, FreeText | None]:
    """Separate a grammar from the unconstrained text before it: reasoning, or text before a tool
    call.

    `text` is a specification in the format of `GrammarSpec.to_text`. Return the specification of
    the part after the free text, and the token ids that delimit the free text. If there is no free
    text, or if no single token marks its end, return `text` unchanged, and None. `id_of` returns
    the id of a tag that is a single token, else None.
    """
    spec = GrammarSpec.of_text(text)
    tools = parse_tools(spec.value) if spec.kind == "tools" else None
    has_text = tools is not None and not tools.required
    tag = CALL_TAGS[tools.form] if tools is not None else ""
    if has_text and not tag:  # no tag marks the end of the text
        return text, None
    has_thoughts = spec.thoughts != "none"
    if not has_text and not has_thoughts:
        return text, None
    is_needed = {
        OPEN_TAG: spec.thoughts == "optional",
        CLOSE_TAG: has_thoughts,
        tag: has_text,
    }
    tag_ids = {tag: id_of(tag) if needed else _NO_TOKEN for tag, needed in is_needed.items()}
    ids = [id_ for id_ in tag_ids.values() if id_ is not None]
    if len(ids) < len(tag_ids):
        return text, None
    think, close, call = ids
    free = FreeText(spec.thoughts == "open", think, close, call)
    return dataclasses.replace(spec, free=True).to_text(), free
