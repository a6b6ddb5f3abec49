"""Output constraints of requests, read from the fields of OpenAI's API, vLLM and other servers."""

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
    """A JSON schema that the answer must match."""

    name: Annotated[str, Meta(description="Ignored, as is `description`")]
    schema: dict[str, Any]
    description: str | None = None
    strict: (
        Annotated[bool, Meta(description="The schema is enforced whatever the value")] | None
    ) = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """The required format of the answer, as in OpenAI's API."""

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
    """The required form of the answer, as in vLLM. Exactly one of the first five members must be
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


_FORMAT_SCHEMA = "response_format.schema"
STRICT_STRUCTS = (ResponseFormat, JsonSchema, StructuredOutputs)
"""Classes whose unknown members are always rejected, because they would change the output."""
_ENGINE_PARAMETER = "structured_outputs"
"""Name of the engine's parameter for output constraints. The engine's error messages about
constraints start with it."""
_OTHER_NAME = Meta(description="SGLang's or llama.cpp's name for a member of structured_outputs")
_OLDER_NAME = Meta(description="Older name for a member of structured_outputs")


class Constrained(Struct, kw_only=True):
    """Fields that constrain the output. If a request sets several of them, they must specify the
    same constraint."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Annotated[dict[str, Any] | str, _OLDER_NAME] | None = None
    guided_regex: Annotated[str, _OLDER_NAME] | None = None
    guided_choice: Annotated[list[str], _OLDER_NAME] | None = None
    guided_grammar: Annotated[str, _OLDER_NAME] | None = None
    json_schema: Annotated[dict[str, Any] | str, _OTHER_NAME] | None = None
    regex: Annotated[str, _OTHER_NAME] | None = None
    ebnf: Annotated[str, _OTHER_NAME] | None = None
    grammar: Annotated[str, _OTHER_NAME] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Constraint:
    """The output constraint of a request. A request has at most one."""

    field: str
    """Name of the request field that sets the constraint."""
    values: dict[str, Any]
    """Arguments for `StructuredOutputsParams`."""
    thoughts: Thoughts = "none"
    """Reasoning before the constrained output: "none", "open" (started by the prompt) or
    "optional"."""

    @property
    def params(self) -> StructuredOutputsParams:
        """The constraint as a parameter of the engine. Raises `InvalidRequest` if it is invalid."""
        return StructuredOutputsParams(**self.values, thoughts=self.thoughts)

    def for_model(self, thoughts: Thoughts, form: CallForm) -> Constraint:
        """Return a copy of the constraint, adapted to a model. `thoughts` says whether reasoning
        precedes the constrained output, and `form` is the syntax of the model's tool calls."""
        values = dict(self.values)
        if isinstance(tools := values.get("tools"), ToolGrammar):
            values["tools"] = dataclasses.replace(tools, form=form)
        return Constraint(self.field, values, thoughts)


@contextlib.contextmanager
def errors_name_field(constraint: Constraint | None) -> Iterator[None]:
    """Convert an `InvalidRequest` about the engine's parameter `structured_outputs`, raised in this
    context, to an `APIError` that names the request's own field."""
    try:
        yield
    except InvalidRequest as error:
        text = str(error)
        if constraint is None or not text.startswith(_ENGINE_PARAMETER):
            raise
        raise invalid(
            constraint.field + text.removeprefix(_ENGINE_PARAMETER), constraint.field
        ) from None


def constraint_of(
    body: Constrained, calls: ToolGrammar | None = None, free_calls: ToolGrammar | None = None
) -> Constraint | None:
    """Return the constraint of a request, or None. Raises `APIError` if the request has several.

    `calls` are tool calls that the request demands, or whose arguments it constrains. `free_calls`
    are calls that the model may make instead of an answer in `response_format`. If calls are
    demanded, `response_format` has no effect, because there is no other content.
    """
    requested = _requested_constraints(body)
    first, second = [*requested, "", ""][:2]
    if second:
        raise invalid(
            f"{second} cannot be combined with {first}, which already constrains the answer", second
        )
    if calls is not None and (calls.required or not requested):
        if requested and first != "response_format":
            raise invalid(
                f"{first} cannot be combined with a tool_choice that requires calls, because "
                "the answer then consists only of calls",
                first,
            )
        return Constraint("tools", {"tools": calls})
    if free_calls is not None and first == "response_format":
        answer = _checked_schema(requested[first])
        return Constraint("tools", {"tools": dataclasses.replace(free_calls, answer=answer)})
    return Constraint(first, requested[first]) if requested else None


def _checked_schema(values: dict[str, Any]) -> str:
    """Check the schema in `values`, the arguments from `response_format`, and return it as JSON
    text. Errors name `response_format`, although the schema becomes a part of the grammar for
    calls."""
    constraint = Constraint("response_format", values)
    with errors_name_field(constraint):
        schema = constraint.params.json
        try:
            check_spec(constraint.params.spec())
        except InvalidRequest as error:
            raise InvalidRequest(f"{_ENGINE_PARAMETER}: {error}") from None
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
"""Older names, and names of other servers, mapped to the members of `StructuredOutputs`."""


def _requested_constraints(body: Constrained) -> dict[str, dict[str, Any]]:
    """Return the arguments for `StructuredOutputsParams`, by the request field that sets them. If
    several fields set the same constraint, only the first is returned."""
    by_field: dict[str, dict[str, Any]] = {}
    response_format = body.response_format
    if response_format is not None and (
        response_format.type != "text" or response_format.schema or response_format.json_schema
    ):
        by_field["response_format"] = _format_arguments(response_format)
    if body.structured_outputs is not None:
        members = msgspec.structs.asdict(body.structured_outputs)
        by_field["structured_outputs"] = {
            k: value for k, value in members.items() if value is not None
        }
    for name, ours in _NAMES.items():
        if (value := getattr(body, name)) is not None:
            by_field[name] = {ours: value}
    distinct: dict[str, dict[str, Any]] = {}
    for name, values in by_field.items():
        if _with_decoded_schema(values) not in map(_with_decoded_schema, distinct.values()):
            distinct[name] = values
    return distinct


def _with_decoded_schema(values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments. If the schema is JSON text, it is decoded, so that schemas can be
    compared."""
    schema = values.get("json")
    if not isinstance(schema, str):
        return values
    try:
        return {**values, "json": msgspec.json.decode(schema)}
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return values


def _format_arguments(response_format: ResponseFormat) -> dict[str, Any]:
    if response_format.type == "text":
        raise invalid(
            'response_format: a schema requires the type "json_schema"', "response_format.type"
        )
    if None not in (response_format.json_schema, response_format.schema):
        raise invalid(
            "give either response_format.json_schema or response_format.schema, but not both",
            _FORMAT_SCHEMA,
        )
    if response_format.json_schema is not None and response_format.type == "json_schema":
        return {"json": response_format.json_schema.schema}
    if response_format.json_schema is not None:
        path = "response_format.json_schema"
        raise invalid(f'{path} requires the type "json_schema"', path)
    if response_format.schema is not None:
        return {"json": response_format.schema}
    if response_format.type == "json_object":
        return {"json_object": True}
    path = "response_format.json_schema"
    raise invalid(f'{path} is missing, but the type "json_schema" requires it', path)
