"""Separation of free text (reasoning, or text before a tool call) from the grammar that applies
after it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from nanoactor.grammar.check import parse_tools
from nanoactor.messages.engine import FreeText
from nanoactor.requests.grammar_spec import CALL_TAGS, CLOSE_TAG, OPEN_TAG, GrammarSpec

log = logging.getLogger("nanoactor.tokenizer")

_NO_TOKEN = -1


class FreeTextSplitter:
    """Separates free text from the grammars of requests to one model. Used by the tokenizer actor.

    If layers keep recurrent states outside the KV cache, grammars are returned unchanged, so that
    free text is sampled under masks. Without masks, a sequence that rejects the end of free text
    returns to a position that the device has already computed, and a recurrent state would include
    that position twice.
    """

    def __init__(self, has_slot_state: bool, id_of: Callable[[str], int | None]) -> None:
        """`has_slot_state` is True if layers keep recurrent states. `id_of` returns the id of a tag
        that is a single token, else None."""
        self._has_slot_state, self._find_id = has_slot_state, id_of
        self._tags: dict[str, int | None] = {}
        """Token ids of the tags that have been looked up; None for a tag that is not a single
        token."""

    def split(self, grammar: str) -> tuple[str, FreeText | None]:
        """Return a grammar without its leading free text, and the tokens that delimit that text, or
        None if no free text is removed. An empty grammar stays empty."""
        if not grammar or self._has_slot_state:
            return grammar, None
        return split_free_text(grammar, self._id_of)

    def _id_of(self, tag: str) -> int | None:
        if tag not in self._tags:
            id_ = self._tags[tag] = self._find_id(tag)
            if id_ is None:
                log.warning(
                    "%s is not a single token of this model, so text before it is sampled with "
                    "token masks, at a third of the speed",
                    tag,
                )
        return self._tags[tag]


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
