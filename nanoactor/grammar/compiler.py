"""A request's grammar in the notation of llguidance: its Lark, and JSON schemas within."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from nanoactor.errors import InvalidRequest
from nanoactor.grammar.check import check_spec, parse_choices, parse_parameters, parse_tools
from nanoactor.grammar.classes import with_plain_classes
from nanoactor.grammar.jsonschema import moved_schema, parse_schema, shorten
from nanoactor.grammar.lark_text import check_lark
from nanoactor.grammar.spec import CALL_TAG, CLOSE_TAG, OPEN_TAG, GrammarSpec, ToolGrammar
from nanoactor.grammar.vocabulary import Vocabulary

MAX_GBNF_RULES = 300
MAX_GBNF_CHARACTERS = 32 * 1024
"""Of EBNF, whose conversion takes time as the product of the two."""
MAX_INTERSECTIONS = 10
"""`&` in a grammar. The parser's time doubles with each that one terminal has."""

# One gap in JSON: a line break with its indentation, or a few spaces. A model that has nothing
# else to say could fill an answer with longer ones.
_GAP = r"\n[ \t]{0,16}|[ ]"
_ANSWER = "answer"


def compile_grammar(spec: GrammarSpec, vocabulary: Vocabulary) -> str:
    """Return the grammar's text for llguidance; raises `InvalidRequest` as `check_spec` does, and
    for EBNF that cannot be read. Other notations are read by the parser."""
    check_spec(spec)
    if spec.kind == "tools":
        tools = parse_tools(spec.value)
        begins_with_text = not tools.required and not spec.free
        body = _calls(tools, begins_with_text, spec.whitespace, vocabulary)
        thoughts = "none" if spec.free and not tools.required else spec.thoughts
    else:
        body, thoughts = _plain(spec), spec.thoughts
        begins_with_text = False
    rules = [
        "%llguidance {}",
        _beginning(thoughts, spec.free, begins_with_text, vocabulary),
        *body,
    ]
    grammars = [{"name": "start", "lark_grammar": "\n".join(rules)}]
    if spec.kind == "grammar":
        grammars.append({"name": _ANSWER, "lark_grammar": _lark(spec.value)})
    return json.dumps({"grammars": grammars})


def text_without(tag: str) -> str:
    """Return a regular expression for texts in which a tag does not occur: `<`, then no other `<`.

    Spelt out, as an intersection with a complement takes the parser ten times as long.
    """
    parts = []
    for length, expected in enumerate(tag[1:]):
        begun = _escaped(tag[1 : 1 + length])
        parts.append(f"{begun}([^<{_escaped(expected)}][^<]*)?")
    return f"[^<]*(<({'|'.join(parts)}))*"


def _plain(spec: GrammarSpec) -> list[str]:
    match spec.kind:
        case "json_schema":
            schema = parse_schema(spec.value, "json_schema")
            return [f"body: {_json(schema, spec.whitespace)}"]
        case "json_object":
            return [f"body: {_json({'type': 'object'}, spec.whitespace)}"]
        case "regex":
            return ["body: BODY", f"BODY: /{_regex(spec.value)}/"]
        case "choice":
            texts = (_quoted(text) for text in parse_choices(spec.value))
            return ["body: BODY", "BODY: " + "|".join(texts)]
        case _:
            return [f"body: @{_ANSWER}"]


def _beginning(thoughts: str, free: bool, text_follows: bool, vocabulary: Vocabulary) -> str:
    """Return the rules for what comes before the body; of `free` thoughts, their tags."""
    if thoughts == "none":
        return "start: body"
    opened = "thoughts body" if text_follows else "thoughts BREAKS body"
    start = f"start: {opened}" if thoughts == "open" else f"start: _open {opened} | body"
    return "\n".join(
        [
            start,
            "BREAKS: /\\n{0,4}/",
            f"_open: {_tag(OPEN_TAG, vocabulary)}",
            *(
                [f"thoughts: {_tag(CLOSE_TAG, vocabulary)}"]
                if free
                else _until("thoughts", CLOSE_TAG, vocabulary)
            ),
        ]
    )


def _until(rule: str, tag: str, vocabulary: Vocabulary) -> list[str]:
    """Return the rules for free text up to a tag, with it."""
    text = text_without(tag)
    if vocabulary.special(tag) is None:
        # Lazy, so that the text ends where the tag does.
        return [f"{rule}[lazy]: /{text}{_escaped(tag)}/"]
    name = f"{rule.upper()}_TEXT"
    return [f"{rule}: {name} {_tag(tag, vocabulary)}", f"{name}: /{text}/"]


def _calls(
    tools: ToolGrammar, after_text: bool, whitespace: bool, vocabulary: Vocabulary
) -> list[str]:
    opening, closing = (_tag(tag, vocabulary) for tag in (CALL_TAG, "</tool_call>"))
    more = f"(BREAK {opening} call)* BREAK?" if tools.parallel else ""
    rules = [
        f'call: "\\n" json "\\n" {closing}',
        f"json: {_json(_any_call(tools), whitespace)}",
        "BREAK: /\\n{1,2}/",
    ]
    if tools.answer:
        answer = _json(parse_schema(tools.answer, "the answer's schema"), whitespace)
        return [f"body: {opening} call {more} | reply", f"reply: {answer}", *rules]
    if not after_text:
        return [f"body: {opening} call {more}", *rules]
    return [
        f"body: opened call {more} | TEXT",
        f"TEXT: /{text_without(CALL_TAG)}/",
        *_until("opened", CALL_TAG, vocabulary),
        *rules,
    ]


def _any_call(tools: ToolGrammar) -> dict[str, Any]:
    calls = []
    for position, function in enumerate(tools.functions):
        place = f"#/anyOf/{position}/properties/arguments"
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": function.name},
                    "arguments": moved_schema(parse_parameters(function), place),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls}


def _json(schema: dict[str, Any] | bool, whitespace: bool) -> str:
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    # The library's own options, which a schema may not set: they include one that ignores what
    # the library does not implement.
    options: dict[str, Any] = {"whitespace_flexible": whitespace, "lenient": False}
    if whitespace:
        options["whitespace_pattern"] = _GAP
    return "%json " + json.dumps({**schema, "x-guidance": options})


def _regex(pattern: str) -> str:
    # The whole answer matches, with or without anchors.
    return regex_to_lark(with_plain_classes(pattern), "d")


def _lark(text: str) -> str:
    """Return a grammar as Lark; raises `InvalidRequest` where it could take the parser too long,
    and for EBNF that is malformed."""
    if not re.search(r"^[ \t]*root[ \t]*::=", text, re.MULTILINE):
        check_lark(text, MAX_INTERSECTIONS)
        return text
    rules = text.count("::=")
    if rules > MAX_GBNF_RULES or len(text) > MAX_GBNF_CHARACTERS:
        raise InvalidRequest(
            f"grammar has {rules} rules and {len(text)} characters of EBNF; at most "
            f"{MAX_GBNF_RULES} and {MAX_GBNF_CHARACTERS} are allowed, more in Lark's notation"
        )
    try:
        return gbnf_to_lark(with_plain_classes(text, gbnf=True))
    except Exception as error:  # the library raises bare Exception
        raise InvalidRequest(f"grammar is not valid EBNF: {shorten(str(error))}") from None


def _tag(tag: str, vocabulary: Vocabulary) -> str:
    id_ = vocabulary.special(tag)
    return _quoted(tag) if id_ is None else f"<[{id_}]>"


def _quoted(text: str) -> str:
    return json.dumps(text).replace("\x7f", "\\u007f")


def _escaped(text: str) -> str:
    return re.sub(r"([^\w<> ])", r"\\\1", text)
