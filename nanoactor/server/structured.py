"""Constraints on answers as requests ask for them, in OpenAI's fields and in vLLM's."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from nanoactor.errors import InvalidRequest
from nanoactor.grammar.check import check_spec
from nanoactor.requests.grammar_spec import CallForm, Thoughts, ToolGrammar
from nanoactor.requests.structured_outputs import StructuredOutputsParams
from nanoactor.server.errors import invalid


class JsonSchema(Struct, forbid_unknown_fields=True):
    """The schema that an answer must follow."""

    name: Annotated[str, Meta(description="Ignored, as the next two")]
    schema: dict[str, Any]
    description: str | None = None
    strict: Annotated[bool, Meta(description="Enforced in any case")] | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """The response format, as OpenAI's API defines it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: (
        Annotated[
            dict[str, Any],
            Meta(description="As llama.cpp and others have it: with either of the JSON types"),
        ]
        | None
    ) = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """The form of an answer in vLLM's words: exactly one of the first five."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: Annotated[str, Meta(description="Refused, as the next")] | None = None
    structural_tag: Any = None


_SCHEMA = "response_format.schema"
CLOSED = (ResponseFormat, JsonSchema, StructuredOutputs)
"""Objects in which an unknown member is refused, as it would change the output."""
_OURS = "structured_outputs"
"""The engine's parameter, with which its messages about constraints start."""
_OTHERS = Meta(description="SGLang's or llama.cpp's name of a member of structured_outputs")
_OLDER = Meta(description="Older name of a member of structured_outputs")


class Constrained(Struct, kw_only=True):
    """Fields that constrain the output; only one may be set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Annotated[dict[str, Any] | str, _OLDER] | None = None
    guided_regex: Annotated[str, _OLDER] | None = None
    guided_choice: Annotated[list[str], _OLDER] | None = None
    guided_grammar: Annotated[str, _OLDER] | None = None
    json_schema: Annotated[dict[str, Any] | str, _OTHERS] | None = None
    regex: Annotated[str, _OTHERS] | None = None
    ebnf: Annotated[str, _OTHERS] | None = None
    grammar: Annotated[str, _OTHERS] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Constraint:
    """The one constraint of an answer."""

    field: str
    """The request's field that asks for it."""
    values: dict[str, Any]
    """Arguments of `StructuredOutputsParams`."""
    thoughts: Thoughts = "none"
    """Reasoning mode before the constrained output."""

    @property
    def params(self) -> StructuredOutputsParams:
        """The constraint as the engine takes it. Raises `InvalidRequest`."""
        return StructuredOutputsParams(**self.values, thoughts=self.thoughts)

    def for_model(self, thoughts: Thoughts, form: CallForm) -> Constraint:
        """Return the constraint for a model that may reason first and writes calls in this form."""
        values = dict(self.values)
        if isinstance(tools := values.get("tools"), ToolGrammar):
            values["tools"] = dataclasses.replace(tools, form=form)
        return Constraint(self.field, values, thoughts)


@contextlib.contextmanager
def said_of(constraint: Constraint | None) -> Iterator[None]:
    """Rename the engine's parameter to the request's field in error messages."""
    try:
        yield
    except InvalidRequest as error:
        text = str(error)
        if constraint is None or not text.startswith(_OURS):
            raise
        raise invalid(constraint.field + text.removeprefix(_OURS), constraint.field) from None


def constraint_of(
    body: Constrained, calls: ToolGrammar | None = None, free_calls: ToolGrammar | None = None
) -> Constraint | None:
    """Return a request's constraint; raise `APIError` if it has several.

    `calls`: calls that the request demands or whose arguments it constrains; `free_calls`: calls
    that may replace content described by `response_format`. If calls are demanded, there is no
    content for `response_format` to describe, so it has no effect.
    """
    asked = _asked(body)
    first, second = [*asked, "", ""][:2]
    if second:
        raise invalid(f"{second}: the answer is constrained by {first} already", second)
    if calls is not None and (calls.required or not asked):
        if asked and first != "response_format":
            raise invalid(f"{first}: tool_choice demands calls, which have their own form", first)
        return Constraint("tools", {"tools": calls})
    if free_calls is not None and first == "response_format":
        answer = _checked_schema(asked[first])
        return Constraint("tools", {"tools": dataclasses.replace(free_calls, answer=answer)})
    return Constraint(first, asked[first]) if asked else None


def _checked_schema(values: dict[str, Any]) -> str:
    """Return the schema of `response_format` as text; errors name that field although the schema
    becomes part of the calls' grammar."""
    wanted = Constraint("response_format", values)
    with said_of(wanted):
        schema = wanted.params.json
        try:
            check_spec(wanted.params.spec())
        except InvalidRequest as error:
            raise InvalidRequest(f"{_OURS}: {error}") from None
    return schema if isinstance(schema, str) else '{"type":"object"}'


_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
"""By other names of constraints: ours."""


def _asked(body: Constrained) -> dict[str, dict[str, Any]]:
    """Return values of `StructuredOutputsParams` by the field that constrains the output. A
    constraint given under several names, as for servers of several versions, counts once."""
    found: dict[str, dict[str, Any]] = {}
    wanted = body.response_format
    if wanted is not None and (wanted.type != "text" or wanted.schema or wanted.json_schema):
        found["response_format"] = _of_format(wanted)
    if body.structured_outputs is not None:
        given = msgspec.structs.asdict(body.structured_outputs)
        found["structured_outputs"] = {k: value for k, value in given.items() if value is not None}
    for name, ours in _NAMES.items():
        if (value := getattr(body, name)) is not None:
            found[name] = {ours: value}
    once: dict[str, dict[str, Any]] = {}
    for name, values in found.items():
        if _plain(values) not in map(_plain, once.values()):
            once[name] = values
    return once


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return values with a schema that is text as the object that it is."""
    schema = values.get("json")
    if not isinstance(schema, str):
        return values
    try:
        return {**values, "json": msgspec.json.decode(schema)}
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return values


def _of_format(wanted: ResponseFormat) -> dict[str, Any]:
    if wanted.type == "text":
        raise invalid('a schema needs the type "json_schema"', "response_format.type")
    if None not in (wanted.json_schema, wanted.schema):
        raise invalid(
            "give either response_format.json_schema or only its schema, not both", _SCHEMA
        )
    if wanted.json_schema is not None and wanted.type == "json_schema":
        return {"json": wanted.json_schema.schema}
    if wanted.json_schema is not None:
        path = "response_format.json_schema"
        raise invalid(f'{path} requires the type "json_schema"', path)
    if wanted.schema is not None:
        return {"json": wanted.schema}
    if wanted.type == "json_object":
        return {"json_object": True}
    path = "response_format.json_schema"
    raise invalid(f'{path} is missing: the type "json_schema" needs it', path)
