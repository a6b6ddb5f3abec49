"""Checks of a request's grammar that need no parser. They run in the user's process."""

from __future__ import annotations

from typing import Any

import msgspec

from nanoactor.errors import InvalidRequest
from nanoactor.grammar.jsonschema import check_literal, parse_json, parse_schema, shorten
from nanoactor.requests.grammar_spec import (
    MAX_GRAMMAR_BYTES,
    GrammarSpec,
    ToolFunction,
    ToolGrammar,
)

MAX_CHOICES = 10_000
"""Maximum number of texts in a grammar of kind "choice"."""
MAX_FUNCTIONS = 512
"""Maximum number of functions in a grammar of kind "tools"."""
MAX_NAME = 256
"""Maximum length of a function's name, in characters."""

_IN_PLACE_APPLICATORS = {"$ref", "allOf", "anyOf", "oneOf"}


def check_spec(spec: GrammarSpec) -> None:
    """Raise `InvalidRequest` if a grammar has errors that can be found without compiling it."""
    try:
        size = len(spec.value.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"{spec.kind} contains an unpaired surrogate, which is not valid Unicode"
        ) from None
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"{spec.kind} has {size} bytes of text; at most {MAX_GRAMMAR_BYTES} are allowed"
        )
    match spec.kind:
        case "json_schema":
            parse_schema(spec.value, "json_schema")
        case "json_object":
            if spec.value:
                raise InvalidRequest(
                    "json_object does not accept a schema; use json_schema instead"
                )
        case "choice":
            parse_choices(spec.value)
        case "tools":
            parse_tools(spec.value)
        case "regex" | "grammar":
            if not spec.value.strip():
                raise InvalidRequest(f"{spec.kind} is empty; leave it out to allow any answer")


def parse_choices(text: str) -> list[str]:
    """Parse the value of a "choice" grammar, a JSON list, and return the texts to choose from.
    Raises `InvalidRequest` if the list is empty or malformed."""
    choices = parse_json(text, "choice")
    if not isinstance(choices, list) or not choices:
        raise InvalidRequest("choice must be a non-empty list of strings")
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(
            f"choice has {len(choices)} strings; at most {MAX_CHOICES} are allowed"
        )
    for position, one in enumerate(choices):
        if not isinstance(one, str) or not one:
            raise InvalidRequest(f"choice[{position}] must be a non-empty string")
        check_literal(one, f"choice[{position}]")
    return choices


def parse_tools(text: str) -> ToolGrammar:
    """Parse the value of a "tools" grammar (JSON) and return the functions that may be called.
    Raises `InvalidRequest` if they are invalid, for example if a function's name would need
    escaping in JSON or its parameters are not described by an object schema."""
    try:
        tools = msgspec.json.decode(text, type=ToolGrammar)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"tools cannot be parsed: {error}") from None
    if not tools.functions:
        raise InvalidRequest(
            "tools must contain at least one function; omit tools if there are none"
        )
    if len(tools.functions) > MAX_FUNCTIONS:
        raise InvalidRequest(
            f"tools has {len(tools.functions)} functions; at most {MAX_FUNCTIONS} are allowed"
        )
    names: set[str] = set()
    for position, function in enumerate(tools.functions):
        _check_name(function.name, f"tools[{position}].name")
        if function.name in names:
            raise InvalidRequest(
                f"tools has two functions named {function.name!r}; names must be unique"
            )
        names.add(function.name)
        parse_parameters(function)
    if tools.answer and not tools.required:
        raise InvalidRequest(
            "tools: `answer`, a schema for an answer without calls, may be set only if `required` "
            "is true"
        )
    if tools.answer:
        parse_schema(tools.answer, "the answer's schema")
    return tools


def parse_parameters(function: ToolFunction) -> dict[str, Any]:
    """Return the JSON schema of a function's arguments. Raises `InvalidRequest` unless it describes
    an object."""
    field = f"the parameter schema of the function {shorten(function.name)!r}"
    schema = parse_schema(function.parameters, field) if function.parameters else True
    if schema is False or (isinstance(schema, dict) and not _may_be_object(schema)):
        raise InvalidRequest(f"{field} must have the type 'object'")
    if schema is True:
        return {"type": "object"}
    # In addition to an in-place applicator, `type` would be one more constraint that the parser
    # must intersect with each subschema of the applicator.
    return schema if set(schema) & _IN_PLACE_APPLICATORS else {**schema, "type": "object"}


def _may_be_object(schema: dict[str, Any]) -> bool:
    types = schema.get("type", "object")
    return types == "object" or (isinstance(types, list) and "object" in types)


def _check_name(name: str, field: str) -> None:
    if not name or len(name) > MAX_NAME:
        raise InvalidRequest(f"{field} must have 1 to {MAX_NAME} characters, not {len(name)}")
    if not name.isprintable() or set(name) & set('"\\'):
        raise InvalidRequest(
            f"{field} is {shorten(name)!r}, but it must not contain quotes, backslashes or "
            "control characters (a valid name is 'get_weather')"
        )
