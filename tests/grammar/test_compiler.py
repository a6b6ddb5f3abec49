"""Each kind of grammar allows the answers that it should, and no others."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoactor.errors import InvalidRequest
from nanoactor.grammar.compiler import (
    MAX_GBNF_CHARACTERS,
    MAX_GBNF_RULES,
    MAX_INTERSECTIONS,
    compile_grammar,
)
from nanoactor.grammar.lark_parts import text_without
from nanoactor.requests.grammar_spec import ToolFunction, ToolGrammar
from tests.grammar.vocabularies import accepts, byte_level, compiled, demo, spec

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer"}},
}
CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "x", "days": 3}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "other", "arguments": {"q": [1, 2]}}\n</tool_call>'
COMPACT = CALL.replace(": ", ":").replace(", ", ",")


@pytest.fixture(params=[byte_level, demo])
def vocabulary(request):
    """One with Qwen3's special tokens, one in which their texts are plain."""
    return request.param()


def check(vocabulary, grammar, good, bad):
    for text in good:
        assert accepts(vocabulary, grammar, text), text
    for text in bad:
        assert not accepts(vocabulary, grammar, text), text


def tools(required, parallel=True, answer="", form="hermes"):
    functions = (
        ToolFunction(name="get", parameters=json.dumps(CITY)),
        ToolFunction(name="other"),
        ToolFunction(name="void", parameters='{"properties": {}, "additionalProperties": false}'),
    )
    grammar = ToolGrammar(
        functions=functions, required=required, parallel=parallel, form=form, answer=answer
    )
    return msgspec.json.encode(grammar).decode()


FORMS = {
    "qwen3_coder": (
        [
            "<tool_call>\n<function=get>\n<parameter=city>\nx\ny <b>\n</parameter>\n"
            "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>\n<function=get>\n<parameter=city>\n\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>\n<function=void>\n</function>\n</tool_call>",
            "<tool_call>\n<function=other>\n<parameter=q>\n1\n</parameter>\n</function>\n"
            "</tool_call>\n"
            "<tool_call>\n<function=void>\n</function>\n</tool_call>",
        ],
        [
            "<tool_call>\n<function=get>\n</function>\n</tool_call>",
            "<tool_call>\n<function=nothing>\n</function>\n</tool_call>",
            "<tool_call>\n<function=get>\n<parameter=city>\nx\n</parameter>\n"
            "<parameter=days>\nmany\n</parameter>\n</function>\n</tool_call>",
            CALL,
        ],
    ),
    "llama3_json": (
        [
            '{"name": "get", "parameters": {"city": "x", "days": 3}}',
            '{"name": "void", "parameters": {}}; {"name": "other", "parameters": {"q": 1}}',
        ],
        [
            '{"name": "get", "arguments": {"city": "x"}}',
            '{"name": "get", "parameters": {}}',
            '{"name": "nothing", "parameters": {}}',
            "",
            CALL,
        ],
    ),
    "mistral": (
        [
            '[TOOL_CALLS][{"name": "get", "arguments": {"city": "x", "days": 3}}]',
            '[TOOL_CALLS][{"name": "void", "arguments": {}}, '
            '{"name": "other", "arguments": {"q": 1}}]',
        ],
        ["[TOOL_CALLS][]", '[{"name": "void", "arguments": {}}]', "", CALL],
    ),
    "mistral_args": (
        [
            '[TOOL_CALLS]get[ARGS]{"city": "x", "days": 3}',
            '[TOOL_CALLS]void[ARGS]{}[TOOL_CALLS]other[ARGS]{"q": 1}',
        ],
        ["[TOOL_CALLS]get[ARGS]{}", "[TOOL_CALLS]nothing[ARGS]{}", "void[ARGS]{}", CALL],
    ),
}
"""By form: what it allows of demanded calls, and what not."""


@pytest.mark.parametrize("form", FORMS)
def test_calls_in_other_forms(vocabulary, form):
    good, bad = FORMS[form]
    check(vocabulary, compiled(vocabulary, "tools", tools(True, form=form)), good, bad)
    one = compiled(vocabulary, "tools", tools(True, parallel=False, form=form))
    check(vocabulary, one, good[:1], [good[-1], *bad])
    free = compiled(vocabulary, "tools", tools(False, form=form))
    begun = [] if form == "llama3_json" else [f"I look.\n{good[0]}"]
    check(vocabulary, free, [*good, *begun, "No call.", ""], [good[0][:-1]])
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    answer = compiled(vocabulary, "tools", tools(True, answer=schema, form=form))
    check(vocabulary, answer, [*good, '{"a": 1}'], ['{"a": "x"}', "So."])


def test_values_of_qwen3_coder_follow_their_types(vocabulary):
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["a", "b c"]},
            "at": {"$ref": "#/$defs/place"},
            "flag": {"type": "boolean"},
        },
        "required": ["kind", "at"],
        "$defs": {"place": {"type": "array", "items": {"type": "integer"}}},
    }
    function = ToolFunction(name="f", parameters=json.dumps(schema))
    grammar = ToolGrammar(functions=(function,), required=True, form="qwen3_coder")

    def call(**values):
        inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
        return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"

    check(
        vocabulary,
        compiled(vocabulary, "tools", msgspec.json.encode(grammar).decode()),
        [call(kind="a", at="[1, 2]"), call(kind="b c", at="[]", flag="true")],
        [
            call(kind="c", at="[]"),
            call(kind="a", at="1"),
            call(kind="a", at="[]", flag="yes"),
            call(at="[]"),
        ],
    )


def test_required_calls(vocabulary):
    check(
        vocabulary,
        compiled(vocabulary, "tools", tools(True)),
        [CALL, OTHER, COMPACT, f"{CALL}\n{OTHER}", f"{CALL}\n", f"{CALL}\n\n{CALL}\n{CALL}"],
        [
            "",
            f"x{CALL}",
            f"\n{CALL}",
            f"{CALL} ",
            f"{CALL}{CALL}",
            f"{CALL}\nx",
            CALL.replace("get", "gex"),
            CALL.replace("3", "true"),
            CALL.replace('"city": "x", ', ""),
            OTHER.replace('{"q": [1, 2]}', "[]"),
            OTHER.replace("other", "void"),
            CALL.replace("<tool_call>\n", "<tool_call>"),
            CALL.removesuffix("</tool_call>"),
        ],
    )


def test_a_single_call_is_the_end(vocabulary):
    grammar = compiled(vocabulary, "tools", tools(True, parallel=False), whitespace=False)
    check(vocabulary, grammar, [COMPACT], [CALL, f"{COMPACT}\n", f"{COMPACT}\n{COMPACT}"])


ANSWER = '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}'


def test_calls_or_an_answer_that_a_schema_describes(vocabulary):
    check(
        vocabulary,
        compiled(vocabulary, "tools", tools(True, answer=ANSWER)),
        [CALL, f"{CALL}\n{OTHER}", '{"city": "Oslo"}', '{"city":"a"}'],
        ["", "hello", f'{{"city": "a"}}\n{CALL}', f'{CALL}\n{{"city": "a"}}', "{}", "[]"],
    )
    for thoughts, before in (("open", "hm</think>\n\n"), ("optional", "<think>hm</think>")):
        check(
            vocabulary,
            compiled(vocabulary, "tools", tools(True, answer=ANSWER), thoughts=thoughts),
            [f"{before}{CALL}", before + '{"city": "Oslo"}'],
            [f"{before}hello", before, f'{before}{CALL}{{"city": "a"}}'],
        )
    for thoughts, before in (("open", "</think>\n"), ("optional", "<think></think>")):
        check(
            vocabulary,
            compiled(vocabulary, "tools", tools(True, answer=ANSWER), thoughts=thoughts, free=True),
            [f"{before}{CALL}", before + '{"city": "Oslo"}'],
            [f"{before}hello", before],
        )


def test_an_answers_schema_goes_with_calls_that_are_required(vocabulary):
    with pytest.raises(InvalidRequest, match="may be set only if `required` is true"):
        compiled(vocabulary, "tools", tools(False, answer=ANSWER))
    with pytest.raises(InvalidRequest, match="answer's schema"):
        compiled(vocabulary, "tools", tools(True, answer='{"minProperties": 2}'))


def test_calls_after_a_text(vocabulary):
    check(
        vocabulary,
        compiled(vocabulary, "tools", tools(False)),
        [
            "",
            "hello",
            "a <b </tool_cal <tool_call <<tool",
            CALL,
            f"Well:\n{CALL}\n{OTHER}",
            f"<{CALL}",
        ],
        [f"{CALL}\nhello", f"{CALL}hello", "hello <tool_call>", "hello <tool_call>\nx"],
    )


def test_references_of_a_functions_schema_stay_within_it(vocabulary):
    node = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    functions = tuple(ToolFunction(name=name, parameters=json.dumps(node)) for name in "ab")
    grammar = ToolGrammar(functions=functions, required=True)
    call = '<tool_call>\n{"name":"b","arguments":{"next":{"next":{}}}}\n</tool_call>'
    check(
        vocabulary,
        compiled(vocabulary, "tools", msgspec.json.encode(grammar).decode()),
        [call],
        [call.replace('{"next":{}}', '{"name":"b","arguments":{}}')],
    )


def test_thoughts_that_the_prompt_has_opened(vocabulary):
    check(
        vocabulary,
        compiled(vocabulary, "json_schema", CITY, thoughts="open"),
        [
            '</think>{"city":"a"}',
            'x\n<think> <b </thin></think>{"city":"a"}'
            if vocabulary is demo()
            else '</think>{"city":""}',
            'so: {"city": 5} ...\n</think>\n\n{"city":"a"}',
        ],
        ['{"city":"a"}', 'a</think>b</think>{"city":"a"}', "</think>", '</think> {"city":"a"}'],
    )


def test_thoughts_that_the_answer_may_have(vocabulary):
    check(
        vocabulary,
        compiled(vocabulary, "choice", ["yes", "no"], thoughts="optional"),
        ["yes", "<think>hm</think>no", "<think>\n\n</think>\n\nyes"],
        ["", "hm</think>no", "<think>no", "\nyes", "<think></think>"],
    )


def test_thoughts_before_a_text_and_calls(vocabulary):
    check(
        vocabulary,
        compiled(vocabulary, "tools", tools(False), thoughts="optional"),
        ["", "hello", CALL, f"<think>hm</think>\n\nhello\n{CALL}", "<think>hm</think>"],
        [f"<think>hm</think>{CALL}x"],
    )


def test_thoughts_before_a_users_grammar(vocabulary):
    grammar = 'start: x+\nx: "a" | "b" y\ny: /[0-9]/'
    check(
        vocabulary,
        compiled(vocabulary, "grammar", grammar, thoughts="open"),
        ["</think>aab1", "hm</think>\nb2"],
        ["aab1", "</think>", "</think>b"],
    )


def test_any_object(vocabulary):
    check(
        vocabulary,
        compiled(vocabulary, "json_object"),
        ["{}", '{"a": [1, null, {"b": "\\u0001é"}]}', '{\n  "a": 1,\n  "b": 2\n}'],
        ["", "[]", "1", "{", '{"a"}', "{} ", " {}"],
    )


def test_gaps_in_json_are_bounded(vocabulary):
    spaced = compiled(vocabulary, "json_object")
    indented = "{\n" + " " * 16 + '"a": 1}'
    good = ['{"a": 1}', '{ "a" : 1 }', '{\n\t\t"a": 1\n}', indented]
    bad = ['{"a":  1}', "{\n\n}", '{"a":\t1}', '{\r\n"a": 1}', indented.replace("{\n", "{\n ")]
    check(vocabulary, spaced, good, bad)
    compact = compiled(vocabulary, "json_object", whitespace=False)
    check(vocabulary, compact, ['{"a":1,"b":[1,2]}', '{"a":" "}'], ['{"a": 1}', "{ }", "{\n}"])


def test_schemas_that_are_booleans(vocabulary):
    check(vocabulary, compiled(vocabulary, "json_schema", True), ["{}", "[]", "null"], ["", "x"])
    with pytest.raises(InvalidRequest, match="no value can match the schema"):
        compiled(vocabulary, "json_schema", False)


def test_a_schema_cannot_set_the_librarys_options(vocabulary):
    options = {"lenient": True, "whitespace_flexible": False, "item_separator": ";"}
    schema = {"type": "array", "x-guidance": options}
    check(vocabulary, compiled(vocabulary, "json_schema", schema), ["[1, 2]"], ["[1;2]"])
    with pytest.raises(InvalidRequest, match="'uniqueItems'"):
        compiled(vocabulary, "json_schema", {**schema, "uniqueItems": True})


def test_ids_within_a_schema_do_not_move_its_references(vocabulary):
    inner = {"$id": "https://example.com/inner", "type": "array", "items": {"$ref": "#/$defs/n"}}
    schema = {"$id": "https://example.com/s", "allOf": [inner], "$defs": {"n": {"type": "null"}}}
    check(vocabulary, compiled(vocabulary, "json_schema", schema), ["[null]", "[]"], ["[1]"])


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("[a-z]+/\\d", ["ab/5"], ["ab/", "/5", "ab/5x", "ab/٣"]),
        ("^ab|c$", ["ab", "c"], ["abc", "^ab"]),
        ("a\nb|\\n", ["a\nb", "\n"], ["ab"]),
        ("(a|b)*", ["", "abba"], ["c"]),
        ("é{2}", ["éé"], ["é"]),
        (".", ["x", "漢"], ["\n", ""]),
    ],
)
def test_regular_expressions_match_the_whole_answer(vocabulary, pattern, good, bad):
    check(vocabulary, compiled(vocabulary, "regex", pattern), good, bad)


def test_choices_as_they_are(vocabulary):
    choices = [
        "a",
        "ab",
        'q"\\/\n',
        "é\U0001f600",
        "\x00",
        "\x07\x7f\x85\u2028",
        "${x}|(a)*",
        "e\u0301",
    ]
    grammar = compiled(vocabulary, "choice", choices)
    check(vocabulary, grammar, choices, ["", "b", "aab", "é", "\x07", "(a)", "\xe9"])


@given(choices=st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=5))
def test_any_texts_can_be_choices(choices):
    grammar = compiled(byte_level(), "choice", choices)
    for text in choices:
        assert accepts(byte_level(), grammar, text)
    assert accepts(byte_level(), grammar, choices[0] + "x") == (choices[0] + "x" in choices)


@given(text=st.text("</think>ab\n", max_size=12))
def test_text_without_a_tag_is_all_other_text(text):
    grammar = compiled(demo(), "regex", text_without("</think>"))
    assert accepts(demo(), grammar, text) == ("</think>" not in text)
    tagged = f"{text[:6]}</think>{text[6:]}"
    assert not accepts(demo(), grammar, tagged)


EBNF = r"""
# A list of names and numbers.
root   ::= "[" (item ("," " "? item)*)? "]"
item   ::= name | number-like
name   ::= [A-Z] [a-z]* "\n"?
number-like ::= [0-9]+ ("." [0-9]{2})?
"""


def test_ebnf(vocabulary):
    check(
        vocabulary,
        compiled(vocabulary, "grammar", EBNF),
        ["[]", "[Ab,1]", "[1.25, Z, 3]", "[Ab\n]"],
        ["", "[", "[a]", "[1.2]", "[1,  2]"],
    )


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("root ::= missing", "not valid EBNF: Rule 'missing' not found"),
        ('root ::= "a', "not valid EBNF: Unexpected end of input"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "not valid EBNF: maximum recursion depth"),
        ('root ::= "a"\n' * (MAX_GBNF_RULES + 1), "301 rules and 3913 characters of EBNF"),
        ("root ::= " + "a" * MAX_GBNF_CHARACTERS, "1 rules and 32777 characters of EBNF"),
        ("start: A\nA: /a/" + " & /a/" * (MAX_INTERSECTIONS + 1), "11 intersections"),
    ],
)
def test_grammars_that_are_refused_before_they_are_parsed(grammar, message):
    with pytest.raises(InvalidRequest, match=message):
        compile_grammar(spec("grammar", grammar), demo())


def test_ampersands_in_strings_are_no_intersections(vocabulary):
    grammar = compiled(vocabulary, "grammar", "start: " + ' "&&" "\\"&"' * 20)
    check(vocabulary, grammar, ['&&"&' * 20], ["&"])


def test_behind_free_thoughts_the_grammar_begins_with_their_end(vocabulary):
    check(
        vocabulary,
        compiled(vocabulary, "json_schema", CITY, thoughts="open", free=True),
        ['</think>{"city":"a"}', '</think>\n\n{"city":"a"}'],
        ['{"city":"a"}', 'so</think>{"city":"a"}', "</think>"],
    )
    check(
        vocabulary,
        compiled(vocabulary, "choice", ["yes", "no"], thoughts="optional", free=True),
        ["yes", "<think></think>no", "<think></think>\n\nyes"],
        ["<think>hm</think>no", "</think>no", "<think>no"],
    )
    for thoughts in ("none", "open", "optional"):
        check(
            vocabulary,
            compiled(vocabulary, "tools", tools(False), thoughts=thoughts, free=True),
            [CALL, f"{CALL}\n{OTHER}"],
            ["", f"</think>{CALL}", f"so {CALL}", f"<think></think>{CALL}"],
        )
    check(
        vocabulary,
        compiled(vocabulary, "tools", tools(True), thoughts="open", free=True),
        [f"</think>\n{CALL}"],
        [CALL, "</think>so"],
    )
