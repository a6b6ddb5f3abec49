"""Which answers have a free part, and which tokens end it."""

import dataclasses

import msgspec
import pytest

from nanoactor.grammar.freeing import split_free_text
from nanoactor.messages.engine import FreeText
from nanoactor.requests.grammar_spec import GrammarSpec, ToolFunction, ToolGrammar

IDS = {"<think>": 7, "</think>": 8, "<tool_call>": 9}


def tools(required):
    grammar = ToolGrammar(functions=(ToolFunction(name="get"),), required=required)
    return msgspec.json.encode(grammar).decode()


@pytest.mark.parametrize(
    ("kind", "value", "thoughts", "free"),
    [
        ("regex", "a", "none", None),
        ("regex", "a", "open", FreeText(True, -1, 8, -1)),
        ("json_object", "", "optional", FreeText(False, 7, 8, -1)),
        ("tools", tools(True), "none", None),
        ("tools", tools(True), "open", FreeText(True, -1, 8, -1)),
        ("tools", tools(False), "none", FreeText(False, -1, -1, 9)),
        ("tools", tools(False), "open", FreeText(True, -1, 8, 9)),
        ("tools", tools(False), "optional", FreeText(False, 7, 8, 9)),
    ],
)
def test_what_is_free(kind, value, thoughts, free):
    spec = GrammarSpec(kind=kind, value=value, thoughts=thoughts, whitespace=False)
    text, found = split_free_text(spec.to_text(), IDS.get)
    assert (found and dataclasses.astuple(found)) == (free and dataclasses.astuple(free))
    told = GrammarSpec.of_text(text)
    assert told.free == (free is not None)
    assert (told.kind, told.value, told.thoughts) == (kind, value, thoughts)
    assert not told.whitespace


@pytest.mark.parametrize("missing", list(IDS))
def test_a_tag_that_is_no_token_is_the_grammars(missing):
    ids = {tag: id_ for tag, id_ in IDS.items() if tag != missing}
    text = GrammarSpec(kind="tools", value=tools(False), thoughts="optional").to_text()
    assert split_free_text(text, ids.get) == (text, None)
