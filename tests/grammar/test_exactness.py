"""A schema means what it says, or is refused: numbers, counts, classes of characters, formats."""

import json
import re
import warnings

import pytest

from nanoactor.errors import InvalidRequest
from nanoactor.grammar.classes import escape_classes
from nanoactor.grammar.formats import drop_unenforced, unenforced_formats
from nanoactor.grammar.jsonschema import parse_schema
from nanoactor.grammar.lark_text import check_lark

BIG = 2**53
REFUSED = [
    {"const": BIG + 1},
    {"const": 1e23},
    {"enum": [1, -BIG - 1]},
    {"const": {"a": [BIG + 1]}},
    {"minimum": BIG},
    {"maximum": -BIG},
    {"exclusiveMinimum": BIG},
    {"multipleOf": BIG},
    {"type": "object", "minProperties": 2},
    {"type": "object", "minProperties": 2, "required": ["a"]},
]
ACCEPTED = [
    {"const": BIG},
    {"enum": [-BIG, 0, 1.5, True, "9007199254740993"]},
    {"minimum": -BIG + 1, "maximum": BIG - 1},
    {"type": "object", "minProperties": 1},
    {"type": "object", "minProperties": 2, "required": ["a", "b"]},
]
PLACES = [
    lambda schema: schema,
    lambda schema: {"properties": {"a": schema}},
    lambda schema: {"anyOf": [{"type": "null"}, schema]},
    lambda schema: {"$ref": "#/$defs/x", "$defs": {"x": schema}},
    lambda schema: {"items": schema},
]


@pytest.mark.parametrize("place", PLACES)
def test_what_the_parser_would_round_or_count_wrongly_is_refused_wherever_it_stands(place):
    for schema in REFUSED:
        with pytest.raises(InvalidRequest, match="cannot be enforced"):
            parse_schema(json.dumps(place(schema)), "json")
    for schema in ACCEPTED:
        assert parse_schema(json.dumps(place(schema)), "json")


PATTERNS = [
    r"^[^a&&b]$",
    r"[a-z--m]",
    r"[[a]b]",
    r"[[:alpha:]]",
    r"[\[a\-\-b&]",
    r"a\[b[c]",
    r"[]a]",
    r"[+--]",
    r"[a-z]&&[--9]",
    r"[a~~a]",
    r"[\w.-]+@[a-z\d-]",
    r"[^\]]",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_classes_are_read_as_python_reads_them(pattern):
    plain = escape_classes(pattern)
    assert not re.search(r"(?<!\\)(&&|~~)(?=[^\[]*\])", plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python announces set operations
        for text in [chr(code) for code in range(32, 127)] + ["ab]", "a[bc", ":]"]:
            assert bool(re.search(pattern, text)) == bool(re.search(plain, text)), text
    schema = {"type": "string", "pattern": pattern, "patternProperties": {pattern: {}}}
    parsed = parse_schema(json.dumps(schema), "json")
    assert parsed["pattern"] == plain
    assert list(parsed["patternProperties"]) == [plain]


def test_operators_of_larks_notation_are_counted_where_they_are_code():
    code = 'start: "a&b" /x&[/&]y/ A // & comment\nA: /a/ & /b/ & /c/'
    check_lark(code, 2)
    with pytest.raises(InvalidRequest, match=r"2 intersections \('&'\)"):
        check_lark(code, 1)


def test_a_schema_in_larks_notation_is_checked_as_one_alone():
    check_lark('start: %json {"const": 5, "title": "}"} "a"', 0)
    check_lark('start: "%json {" // %json {"const": 1e23}', 0)
    with pytest.raises(InvalidRequest, match=r"%json.*const"):
        check_lark(f'start: %json {{"const": {BIG + 1}}}', 0)


def test_formats_that_cannot_be_enforced_are_named_and_left_out():
    inner = {"type": "string", "format": "byte"}
    schema = {
        "properties": {
            "a": {"type": "string", "format": "uuid"},
            "b": {"items": inner},
            "c": {"type": "integer", "format": "int64"},
        }
    }
    assert sorted(unenforced_formats(schema)) == ["byte", "int64"]
    drop_unenforced(schema)
    assert schema["properties"]["a"]["format"] == "uuid"
    assert "format" not in inner
