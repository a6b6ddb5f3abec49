"""Which answers have a free part, and which tokens end it."""

import dataclasses
import logging

import msgspec
import pytest

from nanoactor.grammar.freeing import FreeTextSplitter, split_free_text
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


@pytest.mark.parametrize("has_slot_state", [False, True])
def test_a_model_with_states_has_no_free_text(has_slot_state):
    """An end that thoughts refuse goes back to what the device has computed already."""
    grammar = GrammarSpec(kind="regex", value="a+", thoughts="open").to_text()
    text, free = FreeTextSplitter(has_slot_state, IDS.get).split(grammar)
    assert (free is None) == has_slot_state
    assert (text == grammar) == has_slot_state


def test_a_tag_is_looked_up_once_and_one_warning_says_that_it_is_no_token(caplog):
    asked = []
    splitter = FreeTextSplitter(False, asked.append)
    grammar = GrammarSpec(kind="regex", value="a+", thoughts="open").to_text()
    with caplog.at_level(logging.WARNING):
        assert [splitter.split(text) for text in (grammar, grammar, "")] == [
            (grammar, None),
            (grammar, None),
            ("", None),
        ]
    assert asked == ["</think>"]
    assert [record.name for record in caplog.records] == ["nanoactor.tokenizer"]
