"""Grammars for function calls, in each of the formats that models use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nanoactor.grammar.check import parse_parameters
from nanoactor.grammar.jsonschema import parse_schema, rebase_schema
from nanoactor.grammar.lark_parts import json_rule, quoted, tag_rule, text_until, text_without
from nanoactor.grammar.vocabulary import Vocabulary
from nanoactor.requests.grammar_spec import CALL_TAGS, ToolFunction, ToolGrammar

_PARAMETER_END_TAG = "</parameter>"
_JSON_TYPES = ("integer", "number", "boolean", "object", "array", "null")
"""JSON Schema types of parameters whose values Qwen3-Coder's format writes as JSON. Values of other
parameters are plain text."""
_DEFINITIONS = ("$defs", "definitions")


def call_rules(
    tools: ToolGrammar, after_text: bool, whitespace: bool, vocabulary: Vocabulary
) -> list[str]:
    """Return the Lark rules that define `body`, which matches function calls. If `after_text` is
    True, plain text may take the place of the calls, and may also precede them if the format starts
    calls with a tag. `whitespace` allows whitespace between JSON tokens."""
    match tools.form:
        case "llama3_json":
            calls, rules = _llama_rules(tools, whitespace)
        case "mistral":
            calls, rules = _mistral_rules(tools, whitespace)
        case "mistral_args":
            calls, rules = _mistral_args_rules(tools, whitespace, vocabulary)
        case "qwen3_coder":
            calls, rules = _qwen_coder_rules(tools, whitespace, vocabulary)
        case _:
            calls, rules = _hermes_rules(tools, whitespace, vocabulary)
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
        *text_until("opened", tag, vocabulary),
        *rules,
    ]


Rules = tuple[str, list[str]]
"""Expression for what follows the tag of the first call, and the Lark rules to which it refers."""


def _hermes_rules(tools: ToolGrammar, whitespace: bool, vocabulary: Vocabulary) -> Rules:
    opening, closing = (tag_rule(tag, vocabulary) for tag in ("<tool_call>", "</tool_call>"))
    more_calls = f"(BREAK {opening} call)* BREAK?" if tools.parallel else ""
    return f"call {more_calls}", [
        f'call: "\\n" json "\\n" {closing}',
        f"json: {json_rule(_call_schema(tools), whitespace)}",
        "BREAK: /\\n{1,2}/",
    ]


def _llama_rules(tools: ToolGrammar, whitespace: bool) -> Rules:
    more_calls = '("; " call)*' if tools.parallel else ""
    schema = _call_schema(tools, arguments="parameters")
    return f"call {more_calls}", [f"call: {json_rule(schema, whitespace)}"]


def _mistral_rules(tools: ToolGrammar, whitespace: bool) -> Rules:
    schema = {"type": "array", "items": _call_schema(tools, place="#/items"), "minItems": 1}
    schema |= {} if tools.parallel else {"maxItems": 1}
    return "calls", [f"calls: {json_rule(schema, whitespace)}"]


def _mistral_args_rules(tools: ToolGrammar, whitespace: bool, vocabulary: Vocabulary) -> Rules:
    opening, args_tag = (tag_rule(tag, vocabulary) for tag in ("[TOOL_CALLS]", "[ARGS]"))
    more_calls = f"({opening} call)*" if tools.parallel else ""
    rules = [
        f"call_{index}: {quoted(function.name)} {args_tag} json_{index}\n"
        f"json_{index}: {json_rule(parse_parameters(function), whitespace)}"
        for index, function in enumerate(tools.functions)
    ]
    return f"call {more_calls}", [_alternatives("call", len(tools.functions)), *rules]


def _qwen_coder_rules(tools: ToolGrammar, whitespace: bool, vocabulary: Vocabulary) -> Rules:
    opening, closing = (tag_rule(tag, vocabulary) for tag in ("<tool_call>", "</tool_call>"))
    more_calls = f"(BREAK {opening} call)* BREAK?" if tools.parallel else ""
    rules = [
        f'call: "\\n" function "\\n" {closing}',
        _alternatives("function", len(tools.functions)),
        "BREAK: /\\n{1,2}/",
        *text_until("text", _PARAMETER_END_TAG, vocabulary),
    ]
    for index, function in enumerate(tools.functions):
        rules += _function_rules(index, function, whitespace)
    return f"call {more_calls}", rules


def _function_rules(index: int, function: ToolFunction, whitespace: bool) -> Iterator[str]:
    """Yield the Lark rules for a call of one function in Qwen3-Coder's format, with parameters in
    the order of the function's schema. `index` makes the rules' names unique. For values that are
    plain text, only `enum` and `const` are enforced."""
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
    for number, (key, property_schema) in enumerate(properties.items()):
        name = f"parameter_{index}_{number}"
        names.append(name if key in required else f"{name}?")
        head = quoted(f"<parameter={key}>\n")
        yield f'{name}: {head} {_value_rule(property_schema, schema, whitespace)} "\\n"'
    yield f'function_{index}: {begin} {" ".join(names)} "</function>"'


def _value_rule(property_schema: Any, schema: dict[str, Any], whitespace: bool) -> str:
    """Return the Lark expression for a parameter's value, including the closing tag."""
    end = quoted(f"\n{_PARAMETER_END_TAG}")
    definitions: dict[str, Any] = {name: schema[name] for name in _DEFINITIONS if name in schema}
    reference = property_schema.get("$ref", "") if isinstance(property_schema, dict) else ""
    for name in definitions:
        property_schema = schema[name].get(
            str(reference).removeprefix(f"#/{name}/"), property_schema
        )
    if not isinstance(property_schema, dict):
        return "text"
    choices = property_schema.get(
        "enum", [property_schema["const"]] if "const" in property_schema else None
    )
    if isinstance(choices, list) and choices and all(isinstance(one, str) for one in choices):
        return f"({' | '.join(map(quoted, choices))}) {end}"
    if property_schema.get("type") not in _JSON_TYPES:
        return "text"
    return f"({json_rule({**definitions, **property_schema}, whitespace)}) {end}"


def _alternatives(rule: str, count: int) -> str:
    return f"{rule}: {' | '.join(f'{rule}_{index}' for index in range(count))}"


def _call_schema(
    tools: ToolGrammar, arguments: str = "arguments", place: str = "#"
) -> dict[str, Any]:
    calls = []
    for position, function in enumerate(tools.functions):
        pointer = f"{place}/anyOf/{position}/properties/{arguments}"
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": function.name},
                    arguments: rebase_schema(parse_parameters(function), pointer),
                },
                "required": ["name", arguments],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls}
