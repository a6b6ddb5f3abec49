"""Grammars for function calls, in each of the forms in which models write them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nanoactor.grammar.check import parse_parameters
from nanoactor.grammar.jsonschema import moved_schema, parse_schema
from nanoactor.grammar.lark_parts import json_rule, quoted, tag_rule, text_without, until
from nanoactor.grammar.vocabulary import Vocabulary
from nanoactor.requests.grammar_spec import CALL_TAGS, ToolFunction, ToolGrammar

_END_OF_PARAMETER = "</parameter>"
_IN_JSON = ("integer", "number", "boolean", "object", "array", "null")
"""Types of the parameters whose values are written as JSON."""
_DEFINITIONS = ("$defs", "definitions")


def call_rules(
    tools: ToolGrammar, after_text: bool, whitespace: bool, vocabulary: Vocabulary
) -> list[str]:
    """Return the rules of a sequence's `body`. `after_text` allows text instead of calls, and, if
    calls start with a tag, also before them."""
    match tools.form:
        case "llama3_json":
            calls, rules = _of_llama(tools, whitespace)
        case "mistral":
            calls, rules = _of_list(tools, whitespace)
        case "mistral_args":
            calls, rules = _by_name(tools, whitespace, vocabulary)
        case "qwen3_coder":
            calls, rules = _of_qwen_coder(tools, whitespace, vocabulary)
        case _:
            calls, rules = _of_hermes(tools, whitespace, vocabulary)
    tag = CALL_TAGS[tools.form]
    opening = f"{tag_rule(tag, vocabulary)} " if tag else ""
    if tools.answer:
        answer = json_rule(parse_schema(tools.answer, "the answer's schema"), whitespace)
        return [f"body: {opening}{calls} | reply", f"reply: {answer}", *rules]
    if not after_text:
        return [f"body: {opening}{calls}", *rules]
    if not tag:  # text and calls differ in their first character
        return [f"body: {calls} | TEXT", "TEXT: /([^{ \\n\\t](.|\\n)*)?/", *rules]
    return [
        f"body: opened {calls} | TEXT",
        f"TEXT: /{text_without(tag)}/",
        *until("opened", tag, vocabulary),
        *rules,
    ]


Rules = tuple[str, list[str]]
"""Expression for what follows the tag that opens the first call, and the rules that it refers
to."""


def _of_hermes(tools: ToolGrammar, whitespace: bool, vocabulary: Vocabulary) -> Rules:
    opening, closing = (tag_rule(tag, vocabulary) for tag in ("<tool_call>", "</tool_call>"))
    more = f"(BREAK {opening} call)* BREAK?" if tools.parallel else ""
    return f"call {more}", [
        f'call: "\\n" json "\\n" {closing}',
        f"json: {json_rule(_any_call(tools), whitespace)}",
        "BREAK: /\\n{1,2}/",
    ]


def _of_llama(tools: ToolGrammar, whitespace: bool) -> Rules:
    more = '("; " call)*' if tools.parallel else ""
    schema = _any_call(tools, arguments="parameters")
    return f"call {more}", [f"call: {json_rule(schema, whitespace)}"]


def _of_list(tools: ToolGrammar, whitespace: bool) -> Rules:
    schema = {"type": "array", "items": _any_call(tools, place="#/items"), "minItems": 1}
    schema |= {} if tools.parallel else {"maxItems": 1}
    return "calls", [f"calls: {json_rule(schema, whitespace)}"]


def _by_name(tools: ToolGrammar, whitespace: bool, vocabulary: Vocabulary) -> Rules:
    opening, behind = (tag_rule(tag, vocabulary) for tag in ("[TOOL_CALLS]", "[ARGS]"))
    more = f"({opening} call)*" if tools.parallel else ""
    rules = [
        f"call_{index}: {quoted(one.name)} {behind} json_{index}\n"
        f"json_{index}: {json_rule(parse_parameters(one), whitespace)}"
        for index, one in enumerate(tools.functions)
    ]
    return f"call {more}", [_any_of("call", len(tools.functions)), *rules]


def _of_qwen_coder(tools: ToolGrammar, whitespace: bool, vocabulary: Vocabulary) -> Rules:
    opening, closing = (tag_rule(tag, vocabulary) for tag in ("<tool_call>", "</tool_call>"))
    more = f"(BREAK {opening} call)* BREAK?" if tools.parallel else ""
    rules = [
        f'call: "\\n" function "\\n" {closing}',
        _any_of("function", len(tools.functions)),
        "BREAK: /\\n{1,2}/",
        *until("text", _END_OF_PARAMETER, vocabulary),
    ]
    for index, one in enumerate(tools.functions):
        rules += _function(index, one, whitespace)
    return f"call {more}", rules


def _function(index: int, function: ToolFunction, whitespace: bool) -> Iterator[str]:
    """Yield the rules of a call of one function, with its parameters in the order of its schema.
    Values are plain text or JSON. For a text, only `enum` and `const` of its schema are
    enforced."""
    schema = parse_parameters(function)
    begin = quoted(f"<function={function.name}>\n")
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        yield f'function_{index}: {begin} (any_{index})* "</function>"'
        yield f'any_{index}: "<parameter=" KEY_{index} ">\\n" text "\\n"'
        yield f"KEY_{index}: /[A-Za-z_][A-Za-z0-9_-]{{0,63}}/"
        return
    required = schema.get("required", ())
    names = []
    for number, (key, own) in enumerate(properties.items()):
        name = f"parameter_{index}_{number}"
        names.append(name if key in required else f"{name}?")
        head = quoted(f"<parameter={key}>\n")
        yield f'{name}: {head} {_value(own, schema, whitespace)} "\\n"'
    yield f'function_{index}: {begin} {" ".join(names)} "</function>"'


def _value(own: Any, schema: dict[str, Any], whitespace: bool) -> str:
    """Return the rule for a parameter's value, including the closing tag."""
    end = quoted(f"\n{_END_OF_PARAMETER}")
    defined: dict[str, Any] = {name: schema[name] for name in _DEFINITIONS if name in schema}
    place = own.get("$ref", "") if isinstance(own, dict) else ""
    for name in defined:
        own = schema[name].get(str(place).removeprefix(f"#/{name}/"), own)
    if not isinstance(own, dict):
        return "text"
    choices = own.get("enum", [own["const"]] if "const" in own else None)
    if isinstance(choices, list) and choices and all(isinstance(one, str) for one in choices):
        return f"({' | '.join(map(quoted, choices))}) {end}"
    if own.get("type") not in _IN_JSON:
        return "text"
    return f"({json_rule({**defined, **own}, whitespace)}) {end}"


def _any_of(rule: str, count: int) -> str:
    return f"{rule}: {' | '.join(f'{rule}_{index}' for index in range(count))}"


def _any_call(tools: ToolGrammar, arguments: str = "arguments", place: str = "#") -> dict[str, Any]:
    calls = []
    for position, function in enumerate(tools.functions):
        at = f"{place}/anyOf/{position}/properties/{arguments}"
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": function.name},
                    arguments: moved_schema(parse_parameters(function), at),
                },
                "required": ["name", arguments],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls}
