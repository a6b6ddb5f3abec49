"""A grammar that is seen to be wrong is refused before anything is compiled."""

import json

import msgspec
import pytest

from nanoactor.errors import InvalidRequest
from nanoactor.grammar.check import MAX_CHOICES, MAX_FUNCTIONS, check_spec
from nanoactor.grammar.jsonschema import MAX_DEPTH, MAX_PROPERTIES
from nanoactor.requests.grammar_spec import MAX_GRAMMAR_BYTES, ToolFunction, ToolGrammar
from tests.grammar.schemas import schemas
from tests.grammar.vocabularies import spec


def tools(*functions, required=True):
    grammar = ToolGrammar(functions=functions, required=required)
    return spec("tools", msgspec.json.encode(grammar).decode())


def within(depth, innermost="{}"):
    """A schema of objects within each other, `depth` of them with the innermost."""
    return '{"not":' * (depth - 1) + innermost + "}" * (depth - 1)


@pytest.mark.parametrize(
    "good",
    [
        spec("json_object"),
        spec("json_schema", True),
        spec("json_schema", {}),
        spec("json_schema", within(MAX_DEPTH)),
        spec("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#"}}}),
        # No schemas: a property's name, and values.
        spec("json_schema", {"properties": {"$ref": {"type": "string"}}}),
        spec("json_schema", {"const": {"$ref": "https://example.com"}}),
        spec("json_schema", {"enum": [{"$ref": 5}], "default": {"$ref": 5}}),
        spec("choice", ["a"]),
        spec("choice", [str(i) for i in range(MAX_CHOICES)]),
        spec("regex", "a|b"),
        spec("grammar", 'start: "a"'),
        tools(ToolFunction(name="get_weather"), ToolFunction(name="größe.42/x-y")),
        tools(ToolFunction(name="f", parameters='{"type": ["object", "null"]}')),
    ],
)
def test_what_is_right_passes(good):
    check_spec(good)


@pytest.mark.parametrize(("name", "schema"), schemas())
def test_usual_schemas_pass(name, schema):
    check_spec(spec("json_schema", schema))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (spec("regex", "a" * (MAX_GRAMMAR_BYTES + 1)), "regex has 262145 bytes of text; at most"),
        (spec("regex", "é" * (MAX_GRAMMAR_BYTES // 2 + 1)), "regex has 262146 bytes"),
        (spec("regex", "\ud800"), "regex contains an unpaired surrogate"),
        (spec("regex", " \n"), "regex is empty"),
        (spec("grammar", ""), "grammar is empty"),
        (spec("json_object", "{}"), "json_object does not accept a schema"),
        (spec("json_schema", ""), "json_schema is not valid JSON"),
        (spec("json_schema", "{,}"), "json_schema is not valid JSON"),
        (spec("json_schema", '{"minimum": NaN}'), "NaN is not a JSON value"),
        (spec("json_schema", '{"minimum": -Infinity}'), "-Infinity is not a JSON value"),
        (spec("json_schema", '{"minimum": 1e999}'), "the number 1e999 is too large"),
        (spec("json_schema", '{"minimum": ' + "1" * 5000 + "}"), "json_schema is not valid JSON"),
        (spec("json_schema", '{"const": "\\ud800"}'), "a string with an unpaired surrogate"),
        (spec("json_schema", '{"\\udc00": 1}'), "a string with an unpaired surrogate"),
        (spec("json_schema", "[]"), r"\(an object or a boolean\), not an array"),
        (spec("json_schema", "null"), r"\(an object or a boolean\), not null"),
        (spec("json_schema", "1"), r"\(an object or a boolean\), not a number"),
        (spec("json_schema", '"{}"'), r"\(an object or a boolean\), not a string"),
        (spec("json_schema", within(MAX_DEPTH + 1)), "more than 64 levels deep"),
        (spec("json_schema", within(20_000)), "more than 64 levels deep"),
        (spec("json_schema", "[" * 100_000), "more than 64 levels deep"),
        (spec("choice", "[" * 100_000), "more than 64 levels deep"),
        (spec("json_schema", {"$ref": 5}), r"\$ref must be a string, not a number"),
        (spec("json_schema", {"$ref": "https://x.y/z#/a"}), "not a pointer within the schema"),
        (spec("json_schema", {"$ref": "file:///etc/passwd"}), "not a pointer within the schema"),
        (spec("json_schema", {"$ref": "#anchor"}), "not a pointer within the schema"),
        (spec("json_schema", {"items": [{"$ref": "o"}]}), "'o' is not a pointer"),
        (
            spec("json_schema", {"properties": {"a": {"not": {"$ref": "o"}}}}),
            "'o' is not a pointer",
        ),
        (spec("json_schema", {"$defs": {"a": {"anyOf": [{"$ref": "o"}]}}}), "'o' is not a pointer"),
        # Where no keyword has a schema, but a reference leads.
        (
            spec("json_schema", {"$ref": "#/x/~1", "x": {"/": {"$ref": "o"}}}),
            "'o' is not a pointer",
        ),
        (
            spec("json_schema", {"$ref": "#/enum/0", "enum": [{"$ref": "o"}]}),
            "'o' is not a pointer",
        ),
        (
            spec("json_schema", {"properties": {f"p{i}": {} for i in range(MAX_PROPERTIES + 1)}}),
            "an object with 1001 properties; at most 1000",
        ),
        (
            spec("json_schema", {"items": {"patternProperties": {f"^{i}": {} for i in range(65)}}}),
            "65 patterns in patternProperties; at most 64",
        ),
        (
            spec("json_schema", {"allOf": [{"pattern": f"^{i}"} for i in range(9)]}),
            "match 9 patterns and formats; at most 8",
        ),
        (
            spec(
                "json_schema",
                {
                    "$ref": "#/$defs/many",
                    "format": "email",
                    "$defs": {"many": {"allOf": [{"pattern": f"^{i}"} for i in range(8)]}},
                },
            ),
            "match 9 patterns and formats; at most 8",
        ),
        (spec("choice", "[]"), "choice must be a non-empty list of strings"),
        (spec("choice", '"a"'), "choice must be a non-empty list of strings"),
        (spec("choice", ["a", 1]), r"choice\[1\] must be a non-empty string"),
        (spec("choice", [""]), r"choice\[0\] must be a non-empty string"),
        (spec("choice", ["a"] * (MAX_CHOICES + 1)), "choice has 10001 strings; at most 10000"),
        (spec("tools", "{}"), "tools cannot be parsed"),
        (spec("tools", '{"functions": ' + "[" * 100_000), "tools cannot be parsed"),
        (tools(), "tools must contain at least one function"),
        (tools(*(ToolFunction(name=f"f{i}") for i in range(MAX_FUNCTIONS + 1))), "513 functions"),
        (tools(ToolFunction(name="")), r"tools\[0\].name must have 1 to 256 characters, not 0"),
        (tools(ToolFunction(name="f" * 257)), "must have 1 to 256 characters, not 257"),
        (tools(ToolFunction(name="a"), ToolFunction(name="a")), "two functions named 'a'"),
        (tools(ToolFunction(name='a"b')), "it must not contain quotes"),
        (tools(ToolFunction(name="a\\b")), "it must not contain quotes"),
        (tools(ToolFunction(name="a\nb")), "it must not contain quotes"),
        (
            tools(ToolFunction(name="f", parameters="{")),
            "parameter schema of the function 'f' is not",
        ),
        (tools(ToolFunction(name="f", parameters="false")), "'f' must have the type 'object'"),
        (tools(ToolFunction(name="f", parameters='{"type":"array"}')), "'f' must have the type"),
        (tools(ToolFunction(name="f", parameters='{"$ref":"o"}')), "'o' is not a pointer"),
    ],
)
def test_what_is_wrong_is_named(bad, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        check_spec(bad)
    assert len(str(caught.value)) < 400


def test_patterns_of_different_strings_do_not_add_up():
    """Each of them is one automaton; only those of the same string are one together."""
    properties = {f"p{i}": {"type": "string", "pattern": f"^{i}"} for i in range(50)}
    branch = {"type": "object", "properties": properties}
    check_spec(spec("json_schema", {"anyOf": [branch, {"items": branch}], "allOf": [branch]}))


def test_a_schema_that_contains_itself_is_walked_once():
    node = {"pattern": "a", "properties": {"next": {"$ref": "#"}}, "items": {"$ref": "#/items"}}
    check_spec(spec("json_schema", node))
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(4000)}
    check_spec(spec("json_schema", json.dumps({"$ref": "#/$defs/d0", "$defs": chain})))
