"""Conversion of a request's grammar to the input of llguidance, the parser library: its dialect of
Lark, with embedded JSON schemas."""

from __future__ import annotations

import json
import re

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from nanoactor.errors import InvalidRequest
from nanoactor.grammar.calls import call_rules
from nanoactor.grammar.check import check_spec, parse_choices, parse_tools
from nanoactor.grammar.classes import escape_classes
from nanoactor.grammar.jsonschema import parse_schema, shorten
from nanoactor.grammar.lark_parts import json_rule, quoted, tag_rule, text_until
from nanoactor.grammar.lark_text import check_lark
from nanoactor.grammar.vocabulary import Vocabulary
from nanoactor.requests.grammar_spec import CLOSE_TAG, OPEN_TAG, GrammarSpec

MAX_GBNF_RULES = 300
MAX_GBNF_CHARACTERS = 32 * 1024
"""Maximum length of a grammar in EBNF, in characters. The conversion takes time proportional to the
number of rules times the length."""
MAX_INTERSECTIONS = 10
"""Maximum number of `&` operators in a grammar. Each `&` within one terminal doubles the parser's
time."""

_ANSWER = "answer"


def compile_grammar(spec: GrammarSpec, vocabulary: Vocabulary) -> str:
    """Convert a grammar specification to the JSON text that llguidance, the parser, reads. Raises
    `InvalidRequest` if `check_spec` rejects the grammar, if parsing could take too long, or if EBNF
    is malformed. The parser itself reports other syntax errors."""
    check_spec(spec)
    if spec.kind == "tools":
        tools = parse_tools(spec.value)
        begins_with_text = not tools.required and not spec.free
        body = call_rules(tools, begins_with_text, spec.whitespace, vocabulary)
        thoughts = "none" if spec.free and not tools.required else spec.thoughts
    else:
        body, thoughts = _body_rules(spec), spec.thoughts
        begins_with_text = False
    rules = [
        "%llguidance {}",
        _start_rules(thoughts, spec.free, begins_with_text, vocabulary),
        *body,
    ]
    grammars = [{"name": "start", "lark_grammar": "\n".join(rules)}]
    if spec.kind == "grammar":
        grammars.append({"name": _ANSWER, "lark_grammar": _to_lark(spec.value)})
    return json.dumps({"grammars": grammars})


def _body_rules(spec: GrammarSpec) -> list[str]:
    match spec.kind:
        case "json_schema":
            schema = parse_schema(spec.value, "json_schema")
            return [f"body: {json_rule(schema, spec.whitespace)}"]
        case "json_object":
            return [f"body: {json_rule({'type': 'object'}, spec.whitespace)}"]
        case "regex":
            return ["body: BODY", f"BODY: /{_regex_to_lark(spec.value)}/"]
        case "choice":
            texts = (quoted(text) for text in parse_choices(spec.value))
            return ["body: BODY", "BODY: " + "|".join(texts)]
        case _:
            return [f"body: @{_ANSWER}"]


def _start_rules(thoughts: str, free: bool, text_follows: bool, vocabulary: Vocabulary) -> str:
    """Return the Lark rules for `start`: the rule `body`, and before it the reasoning. `thoughts`
    is "none", "open" if the prompt has already opened the reasoning, or "optional". If `free` is
    True, the rules match only the tags of the reasoning, because the text between them is
    unconstrained. If `text_follows` is True, the body may begin with text, line breaks included."""
    if thoughts == "none":
        return "start: body"
    opened = "thoughts body" if text_follows else "thoughts BREAKS body"
    start = f"start: {opened}" if thoughts == "open" else f"start: _open {opened} | body"
    return "\n".join(
        [
            start,
            "BREAKS: /\\n{0,4}/",
            f"_open: {tag_rule(OPEN_TAG, vocabulary)}",
            *(
                [f"thoughts: {tag_rule(CLOSE_TAG, vocabulary)}"]
                if free
                else text_until("thoughts", CLOSE_TAG, vocabulary)
            ),
        ]
    )


def _regex_to_lark(pattern: str) -> str:
    # The pattern must match the whole answer, with or without anchors.
    return regex_to_lark(escape_classes(pattern), "d")


def _to_lark(text: str) -> str:
    """Convert a grammar in Lark or EBNF to Lark. Raises `InvalidRequest` if the parser could take
    too long, or if EBNF is malformed."""
    if not re.search(r"^[ \t]*root[ \t]*::=", text, re.MULTILINE):
        check_lark(text, MAX_INTERSECTIONS)
        return text
    rules = text.count("::=")
    if rules > MAX_GBNF_RULES or len(text) > MAX_GBNF_CHARACTERS:
        raise InvalidRequest(
            f"grammar has {rules} rules and {len(text)} characters of EBNF, but at most "
            f"{MAX_GBNF_RULES} and {MAX_GBNF_CHARACTERS} are allowed; a grammar in Lark's "
            "notation may have more"
        )
    try:
        return gbnf_to_lark(escape_classes(text, gbnf=True))
    except Exception as error:  # the library raises bare Exception
        raise InvalidRequest(f"grammar is not valid EBNF: {shorten(str(error))}") from None
