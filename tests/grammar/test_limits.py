"""Grammars made to cost time, memory or the process end in a refusal, or work.

Bounds on work, not on time: where one is missing, these tests do not end, or crash.
"""

import itertools
import json
import random
import string

import msgspec
import pytest

from nanoactor.errors import InvalidRequest
from nanoactor.requests.grammar_spec import ToolFunction, ToolGrammar
from tests.grammar.vocabularies import allowed, byte_level, compiled, demo


def object_of(properties, **more):
    return {"type": "object", "properties": properties, **more}


def chain(count, link):
    """Definitions that each lead to the next."""
    definitions = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{count}": {"type": "null"}}}


def rules(count, first):
    names = [f"{first}{i}" for i in range(count + 1)]
    lines = [f'{name}: "a" {after} | "b"' for name, after in itertools.pairwise(names)]
    return "\n".join([f"start: {names[0]}", *lines, f'{names[-1]}: "z"'])


def many_functions():
    parameters = json.dumps(object_of({f"a{i}": {"type": "string"} for i in range(6)}))
    functions = tuple(ToolFunction(name=f"f{i}", parameters=parameters) for i in range(512))
    return msgspec.json.encode(ToolGrammar(functions=functions, required=False)).decode()


PATTERNS = [f".*[a-{c}].{{{i + 5}}}[b-{c}]" for i, c in enumerate(string.ascii_lowercase[2:])]
SCHEMAS = {
    "60 objects deep": json.loads('{"properties":{"a":' * 30 + "{}" + "}}" * 30),
    "60 arrays deep": json.loads('{"type":"array","items":' * 60 + "{}" + "}" * 60),
    "10,000 properties": object_of({f"p{i}": {} for i in range(10_000)}),
    "1,000 optional properties": object_of({f"p{i}": {} for i in range(1000)}),
    "enum of 5,000": {"enum": [f"value {i}" for i in range(5000)]},
    "enum of 20,000 numbers": {"enum": list(range(20_000))},
    "anyOf of 1,000": {"anyOf": [object_of({f"k{i}": {}}) for i in range(1000)]},
    "anyOf of 400 recursive": {
        "anyOf": [{"type": "array", "items": {"$ref": "#"}, "maxItems": i} for i in range(1, 401)]
    },
    "allOf of anyOf": {
        "allOf": [
            {"anyOf": [object_of({f"k{i}_{j}": {"type": "string"}}) for j in range(10)]}
            for i in range(6)
        ]
    },
    "itself": {"$ref": "#"},
    "itself or text": {"anyOf": [{"$ref": "#"}, {"type": "string"}]},
    "itself and text": {"allOf": [{"$ref": "#"}, {"type": "string"}]},
    "each other": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    },
    "endless objects": object_of({"a": {"$ref": "#"}}, required=["a"]),
    "itself as items": {"type": "array", "items": {"$ref": "#"}},
    "chain of objects": chain(3000, lambda ref: object_of({"a": ref})),
    "chain of references": chain(4000, lambda ref: ref),
    "chain of allOf": chain(3000, lambda ref: {"allOf": [ref, {"type": "object"}]}),
    "chain of anyOf": chain(1000, lambda ref: {"anyOf": [ref, {"type": "array", "items": ref}]}),
    "doubling": chain(40, lambda ref: object_of({"a": ref, "b": ref})),
    "long text": {"type": "string", "minLength": 100_000},
    "longest text": {"type": "string", "maxLength": 2**63},
    "long array": {"type": "array", "minItems": 10**9, "maxItems": 10**9},
    "wide ranges": {"type": "integer", "minimum": -(10**20), "maximum": 10**20},
    "multiples": {"type": "integer", "multipleOf": 7919, "minimum": 0, "maximum": 10**15},
    "tiny multiples": {"type": "number", "multipleOf": 1e-300},
    "ambiguous pattern": {"type": "string", "pattern": "(a|a)*b"},
    "pattern (.*a){30}": {"type": "string", "pattern": "(.*a){30}"},
    "20 patterns": {"allOf": [{"type": "string", "pattern": one} for one in PATTERNS[:20]]},
    "8 patterns": {"allOf": [{"type": "string", "pattern": one} for one in PATTERNS[:8]]},
    "64 patternProperties": {"patternProperties": {f"^[a-z]*{i}x[a-z]*$": {} for i in range(64)}},
    "200 patternProperties": {"patternProperties": {f"^[a-z]*{i}x": {} for i in range(200)}},
}
EMPTY = {
    "false": False,
    "no values": {"enum": []},
    "no lengths": {"type": "string", "minLength": 5, "maxLength": 2},
    "no numbers": {"type": "integer", "minimum": 5, "maximum": 2},
    "no integer between": {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
    "no types": {"type": "string", "allOf": [{"type": "null"}]},
    "no property": object_of({"a": False}, required=["a"]),
    "no pattern": {"type": "string", "pattern": "^a$", "minLength": 2},
}
UNSUPPORTED = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "not": {"not": {"type": "null"}},
    "if": {"if": {}, "then": {}},
    "contains": object_of({"a": {"contains": {}}}),
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "propertyNames": {"items": {"propertyNames": {"pattern": "a"}}},
    "unevaluatedProperties": object_of({}, unevaluatedProperties=False),
}
REGEXES = {
    "ambiguous": "(a|a)*b",
    "repeated repetition": "(a{1,1000}){1,1000}",
    "(.*a){30}": "(.*a){30}",
    "many states": "(a|b)*a(a|b){40}",
    "many states of any": "(?s:.*)a(?s:.){25}",
    "long": "[a-z]{1,100000}",
    "words": "(\\w{1,30}\\s){1,3000}",
    "20,000 alternatives": "|".join(f"w{i}x*" for i in range(20_000)),
    "120 deep": "(" * 120 + "a" + ")*" * 120,
    "5,000 deep": "(" * 5000 + "a" + ")" * 5000,
    "nothing": "[^\\s\\S]",
}
GRAMMARS = {
    "left-recursive": 'start: e\ne: e "+" e | e e | "a" | "b"',
    "ambiguous": 'start: s\ns: s s s | s s | "a" | "aa" | "aaa"',
    "nullable": 'start: a a a a a a a a\na: "x"* | a a |',
    "itself": "start: a\na: a",
    "repetitions": 'start: ((("a"{0,1000}){0,1000}){0,1000}){0,1000}',
    "repeated rules": 'start: x{0,5000}\nx: y{0,5000}\ny: z{0,5000}\nz: "a" | "b" "c"',
    "chain of rules": rules(8000, "r"),
    "chain of terminals": rules(8000, "R"),
    "doubling rules": "start: a0\n"
    + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(40))
    + 'a40: "x"|',
    "doubling terminals": "start: A0\n"
    + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(40))
    + "A40: /x/",
    "8,000 terminals": "start: ("
    + "|".join(f"T{i}" for i in range(8000))
    + ")*\n"
    + "\n".join(f"T{i}: /[a-z]*{i}/" for i in range(8000)),
    "20,000 parentheses": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
    "complements": "start: A\nA: ~/(?s:.*)(foo|bar)[a-z]{20}(?s:.*)/ & ~/(a|b)*a(a|b){20}/",
    "intersections": "start: A\nA: " + " & ".join(f"/{one}.*/" for one in PATTERNS[:10]),
    "substrings": 'start: A\nA: %regex { "substring_chars": "' + "abcdefghij" * 20_000 + '" }',
    "3,000 schemas": "start: " + '%json {"type":"object"} ' * 3000,
    "left-recursive EBNF": 'root ::= root root | "a" |',
    "chain in EBNF": "root ::= a0\n"
    + "".join(f'a{i} ::= a{i + 1} "x"\n' for i in range(290))
    + 'a290 ::= "z"',
    "not a grammar": "\x00" * 1000,
}
CASES = [
    *(("json_schema", name, schema) for name, schema in SCHEMAS.items()),
    *(("regex", name, pattern) for name, pattern in REGEXES.items()),
    *(("grammar", name, grammar) for name, grammar in GRAMMARS.items()),
    ("choice", "10,000", [f"choice {i}" for i in range(10_000)]),
    ("choice", "long", ["x" * 100_000]),
    ("choice", "prefixes", ["a" * i for i in range(1, 700)]),
    ("tools", "512", many_functions()),
]


@pytest.mark.parametrize(("kind", "name", "value"), CASES, ids=lambda one: str(one)[:30])
def test_hostile_grammars_end_in_a_refusal_or_work(kind, name, value):
    vocabulary, chance, refusal = demo(), random.Random(name), ""
    try:
        matcher = compiled(vocabulary, kind, value).matcher()
        for _ in range(60):
            inside = allowed(matcher, vocabulary)
            token = chance.choice(inside)
            if token in vocabulary.eos_ids:
                break
            matcher.consume([token])
    except InvalidRequest as error:
        refusal = str(error)
    assert len(refusal) < 400
    assert "non-verbose" not in refusal
    assert "\n" not in refusal


@pytest.mark.parametrize(
    "name", ["10,000 properties", "20 patterns", "itself", "each other", "200 patternProperties"]
)
def test_what_must_not_be_compiled_is_refused(name):
    with pytest.raises(InvalidRequest):
        compiled(byte_level(), "json_schema", SCHEMAS[name])


@pytest.mark.parametrize("name", ["enum of 5,000", "itself as items", "chain of objects"])
def test_what_is_large_but_harmless_works(name):
    assert allowed(compiled(demo(), "json_schema", SCHEMAS[name]).matcher(), demo())


@pytest.mark.parametrize("name", EMPTY)
def test_a_schema_without_values_is_refused(name):
    with pytest.raises(InvalidRequest, match="no value can match|no token may follow"):
        compiled(byte_level(), "json_schema", EMPTY[name])


@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_an_unsupported_keyword_is_named(keyword):
    with pytest.raises(InvalidRequest, match=f"the keywords .*'{keyword}'.* are not supported"):
        compiled(byte_level(), "json_schema", UNSUPPORTED[keyword])


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("json_schema", {"type": "strin"}, "^json_schema: Invalid type: strin$"),
        ("json_schema", {"format": "ipv5"}, "^json_schema: the format 'ipv5' is not supported"),
        ("json_schema", {"type": "string", "pattern": "(?=a)"}, "look-ahead and look-behind"),
        ("json_schema", {"type": "string", "pattern": "("}, "unclosed group$"),
        (
            "json_schema",
            {"$ref": "#/$defs/x"},
            "^json_schema: Pointer '/\\$defs/x' does not exist$",
        ),
        (
            "json_schema",
            {"oneOf": [{"minimum": 1}, {"maximum": 5}]},
            "alternatives are mutually exclusive",
        ),
        ("json_schema", {"minLength": -1}, "^json_schema: Expected positive integer for 'minLen"),
        (
            "regex",
            "(a",
            "^regex: a regular expression is malformed or not supported: unclosed group$",
        ),
        ("regex", "(a)\\1", "backreferences are not supported$"),
        ("grammar", "start: limit", '^grammar: at 1\\(8\\): unknown name: "limit"$'),
        ("grammar", "start: @other", "^grammar: unknown grammar @other$"),
        ("grammar", "start: <think>", '^grammar: at 1\\(8\\): unknown special token: "<think>"$'),
        ("grammar", "hello", "^grammar: 1\\(6\\): Expected token ':'"),
    ],
)
def test_a_refusal_says_what_is_wrong(kind, value, message):
    with pytest.raises(InvalidRequest, match=message):
        compiled(demo(), kind, value)
