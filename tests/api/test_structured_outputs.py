"""The form that an answer shall have, as a user gives it and as the engine's actors get it."""

import dataclasses
import json
import random
import string

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoactor import EngineConfig, SamplingParams, StructuredOutputsParams
from nanoactor.admission.request_builder import RequestBuilder
from nanoactor.errors import InvalidRequest
from nanoactor.model_files.files import read_model_files
from nanoactor.requests.grammar_spec import (
    MAX_GRAMMAR_BYTES,
    GrammarSpec,
    ToolFunction,
    ToolGrammar,
)

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
TOOLS = ToolGrammar(functions=(ToolFunction(name="f"),), required=True)


class Person:
    """As a pydantic model is."""

    @staticmethod
    def model_json_schema():
        return SCHEMA


SPECS = [
    (dict(json=SCHEMA), "json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
    (dict(json=json.dumps(SCHEMA, indent=4)), "json_schema", json.dumps(SCHEMA).replace(" ", "")),
    (dict(json=Person), "json_schema", json.dumps(SCHEMA).replace(" ", "")),
    (dict(json={"const": "é\n"}), "json_schema", '{"const":"é\\n"}'),
    (dict(regex=r"\d+"), "regex", r"\d+"),
    (dict(choice=["yes", "é", "yes"]), "choice", '["yes", "é"]'),
    (dict(choice=("yes",)), "choice", '["yes"]'),
    (dict(grammar='start: "a"'), "grammar", 'start: "a"'),
    (dict(json_object=True), "json_object", ""),
    (dict(json_object=False, regex="a"), "regex", "a"),
    (dict(tools=TOOLS), "tools", msgspec.json.encode(TOOLS, order="deterministic").decode()),
]


@pytest.mark.parametrize(("values", "kind", "value"), SPECS, ids=[str(s[0])[:30] for s in SPECS])
def test_each_constraint_becomes_a_specification(values, kind, value):
    spec = StructuredOutputsParams(**values).spec()
    assert spec == GrammarSpec(kind=kind, value=value)
    assert StructuredOutputsParams.of(values).spec() == spec
    assert SamplingParams(structured_outputs=values).structured_outputs.spec() == spec


def test_the_order_of_properties_is_kept():
    spec = StructuredOutputsParams(json=SCHEMA).spec()
    assert list(json.loads(spec.value)["properties"]) == ["b", "a"]


def test_thoughts_and_white_space_are_told():
    made = StructuredOutputsParams(json_object=True, thoughts="open", disable_any_whitespace=True)
    assert made.spec() == GrammarSpec(kind="json_object", thoughts="open", whitespace=False)


WRONG = [
    (dict(), "exactly one of json, .*, got none"),
    (dict(regex="a", choice=["a"]), "exactly one .* got regex, choice"),
    (dict(json=SCHEMA, json_object=True), "exactly one"),
    (dict(json_object=False), "exactly one"),
    (dict(regex=""), "regex must be a non-empty string"),
    (dict(regex=5), "regex must be a non-empty string"),
    (dict(grammar=b"a"), "grammar must be a non-empty string"),
    (dict(grammar="\ud800"), "valid Unicode"),
    (dict(regex="x" * (MAX_GRAMMAR_BYTES + 1)), f"at most {MAX_GRAMMAR_BYTES}"),
    (dict(choice=[]), "choice must be a non-empty list"),
    (dict(choice="yes"), "choice must be a non-empty list"),
    (dict(choice=5), "choice must be a non-empty list"),
    (dict(choice=[""]), "each choice must be a non-empty string"),
    (dict(choice=["a", 1]), "each choice must be a non-empty string"),
    (dict(json="{"), "json is not valid JSON"),
    (dict(json=""), "json must be a non-empty string"),
    (dict(json="[]"), "json must be a schema"),
    (dict(json=5), "json must be a schema"),
    (dict(json={"const": {1}}), "json is not valid JSON"),
    (dict(json={"const": float("nan")}), "json is not valid JSON"),
    (dict(json='{"const": 1e999}'), "json is not valid JSON"),
    (dict(json={"const": "\ud800"}), "valid Unicode"),
    (dict(json='{"items":' * 9000 + "{}" + "}" * 9000), "nested too deeply"),
    (dict(json=int), "class int has no model_json_schema"),
    (dict(json_object=1), "json_object must be true or false"),
    (dict(regex="a", disable_additional_properties=True), "only together with json"),
    (dict(json=SCHEMA, whitespace_pattern=" "), "whitespace_pattern is not supported: .*compact|"),
    (dict(structural_tag="{}"), "structural_tag is not supported: use tools"),
    (dict(regex="a", thoughts="some"), "thoughts must be one of none, open, optional"),
    (dict(tools={"functions": []}), "tools must be a ToolGrammar"),
    (dict(pattern="a"), "'pattern' is not a known field; the fields are json, regex"),
]


@pytest.mark.parametrize(("values", "words"), WRONG, ids=[str(w[0])[:30] for w in WRONG])
def test_what_is_wrong_is_said_by_name(values, words):
    with pytest.raises(InvalidRequest, match=f"^structured_outputs: .*({words})"):
        StructuredOutputsParams.of(values)


def test_parameters_are_frozen_and_hashable():
    schema = {"type": "object", "properties": {"a": {}}}
    made = StructuredOutputsParams(json=schema)
    schema["properties"]["b"] = {}
    assert made.json == '{"type":"object","properties":{"a":{}}}'
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.json = "{}"
    choices = [StructuredOutputsParams(choice=given) for given in (["a"], ("a",), ["b"])]
    assert len({made, *choices}) == 3
    assert dataclasses.replace(made, thoughts="open").json == made.json
    assert len({SamplingParams(structured_outputs=one) for one in choices}) == 2


def closed(schema):
    made = StructuredOutputsParams(json=schema, disable_additional_properties=True)
    return json.loads(made.json)


def test_objects_that_do_not_say_may_have_no_other_properties():
    inner = {"type": ["object", "null"], "properties": {"x": {}}}
    shut = {**inner, "additionalProperties": False}
    parts = dict(properties={"a": inner}, items=inner, prefixItems=[inner], anyOf=[inner])
    assert closed({"$defs": {"d": inner}, **parts}) == {
        "$defs": {"d": shut},
        "properties": {"a": shut},
        "items": shut,
        "prefixItems": [shut],
        "anyOf": [shut],
        "additionalProperties": False,
    }
    assert closed({"type": "object"}) == {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "additionalProperties": True},
        {"properties": {}, "additionalProperties": {"type": "string"}},
        {"properties": {}, "allOf": [{"properties": {"a": {}}}]},
        {"type": "string"},
        {"const": {"properties": {"type": "object"}}},
        {"type": "object", "patternProperties": {"^a": {"type": "string"}}},
        {"enum": [{"type": "object"}], "not": {"type": "object"}},
        {"items": True, "properties": 5, "additionalProperties": False},
    ],
    ids=str,
)
def test_what_an_object_says_and_what_is_no_object_stays(schema):
    assert closed(schema) == schema


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(string.printable),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "properties", "items", "anyOf", "$defs", "allOf", "a"]),
            inner,
            max_size=4,
        )
    ),
)


@given(st.dictionaries(st.sampled_from(["type", "properties", "items", "$defs"]), JSON))
def test_closing_objects_twice_is_closing_them_once(schema):
    assert closed(closed(schema)) == closed(schema)


# -- on the way to the engine -------------------------------------------------------------


@pytest.fixture(scope="module")
def demo():
    return read_model_files(EngineConfig("demo"))


def built(files, values, **options):
    builder = RequestBuilder(EngineConfig("demo", **options), files, random.Random(0))
    params = SamplingParams(structured_outputs=values)
    return builder.build({"prompt_token_ids": [1]}, params)[0]


def test_a_request_carries_its_grammar_as_text(demo):
    assert built(demo, None).spec.grammar == ""
    for values, *_ in SPECS:
        made = StructuredOutputsParams(**values)
        assert GrammarSpec.of_text(built(demo, made).spec.grammar) == made.spec()
        assert built(demo, made).spec.grammar == built(demo, values).spec.grammar


def test_a_grammar_needs_a_tokenizer(demo):
    with pytest.raises(InvalidRequest, match=r"^structured_outputs requires a tokenizer"):
        built(demo, {"regex": "a"}, skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (dict(json={"$ref": "http://example.org/schema"}), "ref"),
        (
            dict(tools=dataclasses.replace(TOOLS, functions=())),
            "tools must contain at least one function",
        ),
        (dict(regex="  "), "regex is empty"),
    ],
    ids=str,
)
def test_what_needs_no_parser_is_refused_at_once(demo, values, words):
    with pytest.raises(InvalidRequest, match=f"^structured_outputs: .*{words}"):
        built(demo, StructuredOutputsParams(**values))


def test_a_grammar_that_is_too_long_as_text_is_refused(demo):
    quotes = {"choice": ['"' * 4000 + str(number) for number in range(MAX_GRAMMAR_BYTES // 8000)]}
    with pytest.raises(
        InvalidRequest, match=rf"^structured_outputs: .* at most {MAX_GRAMMAR_BYTES}"
    ):
        built(demo, quotes)
