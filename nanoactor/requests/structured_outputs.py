"""Constraints on the form of an output, with the same names and semantics as in vLLM."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import msgspec

from nanoactor.errors import InvalidRequest
from nanoactor.requests.grammar_spec import (
    MAX_GRAMMAR_BYTES,
    GrammarSpec,
    Kind,
    Thoughts,
    ToolGrammar,
)

_UNSUPPORTED = {
    "whitespace_pattern": "JSON may have any whitespace between its tokens, or none with "
    "disable_any_whitespace",
    "structural_tag": "use tools in chats, or a grammar that contains the tags",
}
"""vLLM's fields that are always rejected, and what to use instead of each."""
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "tools")
_FLAGS = ("json_object", "disable_any_whitespace", "disable_additional_properties")


@dataclasses.dataclass(frozen=True)
class StructuredOutputsParams:
    """The form that an output must have. Exactly one of `json`, `regex`, `choice`, `grammar`,
    `json_object` and `tools` must be set.

    The constructor raises `InvalidRequest`, naming the invalid parameter.
    """

    json: Mapping[str, Any] | str | type[Any] | None = None
    """A JSON schema: a dict, JSON text, or a pydantic model class. After construction, always JSON
    text."""
    regex: str | None = None
    """A regular expression that the whole output must match."""
    choice: Sequence[str] | None = None
    """Texts, one of which must be the whole output."""
    grammar: str | None = None
    """A context-free grammar in Lark's notation or in EBNF."""
    json_object: bool = False
    """True to allow any JSON object."""
    disable_any_whitespace: bool = False
    """True to require compact JSON, without spaces or line breaks between tokens."""
    disable_additional_properties: bool = False
    """True to forbid properties that an object's schema does not name, unless the schema says
    otherwise. Schemas combined by `allOf`, `$ref`, `if` or `not` are unchanged."""
    whitespace_pattern: None = None
    """Not supported. Must be None."""
    structural_tag: None = None
    tools: ToolGrammar | None = None
    """Functions that the model may call or must call. Not in vLLM."""
    thoughts: Thoughts = "none"
    """Reasoning before the constrained output: "none", "open" if the prompt ends with an open
    `<think>`, or "optional" if the model may start it. Not in vLLM."""

    def __post_init__(self) -> None:
        """Check all values, and normalize `json` and `choice`."""
        self._check_constraints()
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.json is not None:
            text = _schema_text(self.json, self.disable_additional_properties)
            object.__setattr__(self, "json", text)
        elif self.disable_additional_properties:
            raise _error("disable_additional_properties can be set only together with json")

    def _check_constraints(self) -> None:
        """Check everything that needs no parsing of schemas. Raises `InvalidRequest` for the first
        error."""
        for name, instead in _UNSUPPORTED.items():
            if getattr(self, name) is not None:
                raise _error(f"{name} is not supported: {instead}")
        self._check_flags()
        if self.thoughts not in get_args(Thoughts):
            known = ", ".join(get_args(Thoughts))
            raise _error(f"thoughts must be one of {known}, got {self.thoughts!r:.100}")
        constraints = [name for name in _CONSTRAINTS if not _is_absent(getattr(self, name))]
        if len(constraints) != 1:
            found = ", ".join(constraints) or "none"
            raise _error(f"give exactly one of {', '.join(_CONSTRAINTS)}, got {found}")
        for name in ("regex", "grammar"):
            if name in constraints:
                _check_text(name, getattr(self, name))
        if "tools" in constraints and not isinstance(self.tools, ToolGrammar):
            raise _error(f"tools must be a ToolGrammar object, got {self.tools!r:.100}")

    def _check_flags(self) -> None:
        for name in _FLAGS:
            if getattr(self, name) is None:  # vLLM's own default
                object.__setattr__(self, name, False)
            if not isinstance(getattr(self, name), bool):
                raise _error(f"{name} must be true or false, got {getattr(self, name)!r:.100}")

    @classmethod
    def of(cls, given: Any) -> StructuredOutputsParams:
        """Create constraints from a mapping of field names to values. An instance is returned
        unchanged. Raises `InvalidRequest` for unknown fields."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise InvalidRequest(
                "structured_outputs must be a StructuredOutputsParams object or a dict, "
                f"got {given!r:.100}"
            )
        names = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in names:
                raise _error(
                    f"{name!r:.100} is not a known field; the fields are {', '.join(names)}"
                )
        return cls(**given)

    def spec(self) -> GrammarSpec:
        """Return the same constraint as a `GrammarSpec`, the form that is sent to the engine's
        processes."""
        kind, value = self._constraint()
        return GrammarSpec(
            kind=kind,
            value=value,
            thoughts=self.thoughts,
            whitespace=not self.disable_any_whitespace,
        )

    def _constraint(self) -> tuple[Kind, str]:
        if isinstance(self.json, str):
            return "json_schema", self.json
        if self.regex is not None:
            return "regex", self.regex
        if self.choice is not None:
            return "choice", json.dumps(self.choice, ensure_ascii=False)
        if self.grammar is not None:
            return "grammar", self.grammar
        if self.tools is not None:
            return "tools", msgspec.json.encode(self.tools, order="deterministic").decode()
        return "json_object", ""


def _is_absent(value: Any) -> bool:
    return value is None or value is False


def _error(text: str) -> InvalidRequest:
    return InvalidRequest(f"structured_outputs: {text}")


def _check_text(name: str, value: Any) -> None:
    """Raise `InvalidRequest` if a value is not a string, is empty, cannot be encoded or exceeds
    `MAX_GRAMMAR_BYTES`."""
    if not isinstance(value, str) or not value:
        raise _error(f"{name} must be a non-empty string, got {value!r:.100}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise _error(f"{name} must be valid Unicode: {error}") from None
    if size > MAX_GRAMMAR_BYTES:
        raise _error(f"{name} has {size} bytes, but at most {MAX_GRAMMAR_BYTES} are accepted")


def _choices(given: Any) -> tuple[str, ...]:
    if isinstance(given, str | bytes) or not isinstance(given, Sequence) or not given:
        raise _error(f"choice must be a non-empty list of strings, got {given!r:.100}")
    for text in given:
        _check_text("each choice", text)
    return tuple(dict.fromkeys(given))


def _schema_text(schema_or_model: Any, closed: bool) -> str:
    """Convert a schema to compact JSON text, keeping the order of properties: the output will have
    that order too. `closed` forbids properties that the schema does not name."""
    if isinstance(schema_or_model, str):
        _check_text("json", schema_or_model)
    elif isinstance(schema_or_model, type):
        if not hasattr(schema_or_model, "model_json_schema"):
            raise _error(
                "json must be a schema or a pydantic model, but the class "
                f"{schema_or_model.__name__} has no model_json_schema"
            )
        schema_or_model = schema_or_model.model_json_schema()
    try:
        # Always convert via text: a dict may contain types that JSON lacks, such as tuples.
        text = (
            schema_or_model
            if isinstance(schema_or_model, str)
            else json.dumps(schema_or_model, allow_nan=False)
        )
        schema = json.loads(text)
        if _is_too_deep(schema):  # Python versions differ in their own limit
            raise RecursionError
        if not isinstance(schema, dict):
            raise _error(f"json must be a schema (a JSON object), got {text:.100}")
        if closed:
            _close_objects(schema)
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise _error(f"json is not valid JSON: {error}") from None
    except RecursionError:
        raise _error("json is nested too deeply") from None
    _check_text("json", text)
    return text


def _is_too_deep(value: Any) -> bool:
    level, depth = [value], 0
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        if depth > _MAX_DEPTH:
            return True
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return False


_MAX_DEPTH = 500
"""Maximum nesting depth of a schema as text. The grammar's own limit is far lower."""
_COMBINATORS = {"allOf", "$ref", "$dynamicRef", "if", "dependentSchemas"}
_ADDITIONAL_KEYWORDS = {"additionalProperties", "unevaluatedProperties", "patternProperties"}
_SCHEMA_KEYWORDS = ("items", "additionalItems", "contains", "additionalProperties")
_SCHEMA_LIST_KEYWORDS = ("items", "prefixItems", "anyOf", "oneOf")
_SCHEMA_MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions")


def _close_objects(schema: Any) -> None:
    """Forbid unnamed properties, in place, in every object schema that neither allows nor forbids
    them."""
    if not isinstance(schema, dict):
        return
    for inner in _subschemas(schema):
        _close_objects(inner)
    is_object = schema.get("type") in ("object", ["object", "null"]) or "properties" in schema
    # Schemas that are combined with others would forbid each other's properties.
    if is_object and not schema.keys() & (_COMBINATORS | _ADDITIONAL_KEYWORDS):
        schema["additionalProperties"] = False


def _subschemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the direct subschemas of a schema."""
    yield from (schema[name] for name in _SCHEMA_KEYWORDS if name in schema)
    for name in _SCHEMA_LIST_KEYWORDS:
        if isinstance(found := schema.get(name), list):
            yield from found
    for name in _SCHEMA_MAP_KEYWORDS:
        if isinstance(found := schema.get(name), dict):
            yield from found.values()
