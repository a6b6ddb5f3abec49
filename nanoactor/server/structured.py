"""Output constraints of requests, read from the fields that OpenAI's API, vLLM and other servers
define."""

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
    """The JSON schema that an answer must follow."""

    name: Annotated[str, Meta(description="Ignored, as is `description`")]
    schema: dict[str, Any]
    description: str | None = None
    strict: (
        Annotated[bool, Meta(description="The schema is enforced whatever the value")] | None
    ) = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """The response format, as OpenAI's API defines it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: (
        Annotated[
            dict[str, Any],
            Meta(
                description="Schema in the form of llama.cpp and others; both JSON types accept it"
            ),
        ]
        | None
    ) = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """The form of an answer, as vLLM defines it; exactly one of the first five members must be
    set."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: (
        Annotated[str, Meta(description="Rejected, as is `structural_tag`")] | None
    ) = None
    structural_tag: Any = None


_SCHEMA = "response_format.schema"
CLOSED = (ResponseFormat, JsonSchema, StructuredOutputs)
"""Structures whose unknown members are always refused, as they would change the output."""
_OURS = "structured_outputs"
"""Name of the engine's parameter; the engine's error messages about constraints start with it."""
_OTHERS = Meta(description="SGLang's or llama.cpp's name for a member of structured_outputs")
_OLDER = Meta(description="Older name for a member of structured_outputs")


class Constrained(Struct, kw_only=True):
    """Fields that constrain the output. If several are set, they must specify the same
    constraint."""

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
    """The constraint of an answer, which has at most one."""

    field: str
    """Name of the request's field that sets the constraint."""
    values: dict[str, Any]
    """Arguments of `StructuredOutputsParams`."""
    thoughts: Thoughts = "none"
    """Reasoning before the constrained output: none, opened by the prompt, or optional."""

    @property
    def params(self) -> StructuredOutputsParams:
        """Return the constraint as the engine's parameters. Raises `InvalidRequest` if it is
        invalid."""
        return StructuredOutputsParams(**self.values, thoughts=self.thoughts)

    def for_model(self, thoughts: Thoughts, form: CallForm) -> Constraint:
        """Return the constraint for a model with this reasoning mode and this form of calls."""
        values = dict(self.values)
        if isinstance(tools := values.get("tools"), ToolGrammar):
            values["tools"] = dataclasses.replace(tools, form=form)
        return Constraint(self.field, values, thoughts)


@contextlib.contextmanager
def said_of(constraint: Constraint | None) -> Iterator[None]:
    """Convert an `InvalidRequest` about the engine's parameter to an `APIError` that names the
    request's field instead."""
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

    `calls` are the calls that the request demands or whose arguments it constrains; `free_calls`
    are the calls that may replace content described by `response_format`. If calls are demanded,
    there is no content for `response_format` to describe, so it has no effect.
    """
    asked = _asked(body)
    first, second = [*asked, "", ""][:2]
    if second:
        raise invalid(
            f"{second} cannot be combined with {first}, which already constrains the answer", second
        )
    if calls is not None and (calls.required or not asked):
        if asked and first != "response_format":
            raise invalid(
                f"{first} cannot be combined with a tool_choice that requires calls, because "
                "calls have their own form",
                first,
            )
        return Constraint("tools", {"tools": calls})
    if free_calls is not None and first == "response_format":
        answer = _checked_schema(asked[first])
        return Constraint("tools", {"tools": dataclasses.replace(free_calls, answer=answer)})
    return Constraint(first, asked[first]) if asked else None


def _checked_schema(values: dict[str, Any]) -> str:
    """Return the schema of `response_format` as JSON text. Errors name that field, although the
    schema becomes part of the calls' grammar."""
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
"""Maps older names and other servers' names of constraints to ours."""


def _asked(body: Constrained) -> dict[str, dict[str, Any]]:
    """Return the arguments of `StructuredOutputsParams` by the request's field that sets them. A
    constraint that is given under several names, for servers of several versions, counts once."""
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
    """Return the arguments; if a schema is given as JSON text, it is decoded."""
    schema = values.get("json")
    if not isinstance(schema, str):
        return values
    try:
        return {**values, "json": msgspec.json.decode(schema)}
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return values


def _of_format(wanted: ResponseFormat) -> dict[str, Any]:
    if wanted.type == "text":
        raise invalid(
            'response_format: a schema requires the type "json_schema"', "response_format.type"
        )
    if None not in (wanted.json_schema, wanted.schema):
        raise invalid(
            "give either response_format.json_schema or response_format.schema, but not both",
            _SCHEMA,
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
    raise invalid(f'{path} is missing, but the type "json_schema" requires it', path)
