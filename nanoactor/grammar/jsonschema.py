"""Parsing and checking of JSON schemas for structured outputs and tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

from nanoactor.errors import InvalidRequest
from nanoactor.grammar.classes import escape_classes
from nanoactor.grammar.numbers import check_numbers
from nanoactor.grammar.text_errors import shorten as shorten

MAX_DEPTH = 64
"""Maximum nesting depth of objects and arrays in a schema or another JSON text."""

MAX_LITERAL = 8192
"""Maximum length of a literal in a grammar, in characters. For each token, the parser scans the
rest of the literal, which takes 0.13 us per character."""
MAX_PROPERTIES = 1000
"""Maximum number of properties of one object. The parser's time grows quadratically with this
number."""
MAX_NAME_PATTERNS = 64
"""Maximum number of name patterns in all `patternProperties` of a schema. The parser compares each
pair of these patterns."""
MAX_PATTERNS_AT_ONCE = 8
"""Maximum number of patterns and formats that apply to the same string. Each one doubles the
parser's time."""

_SCHEMA_KEYWORDS = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_SCHEMA_LIST_KEYWORDS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_SCHEMA_MAP_KEYWORDS = (
    "$defs",
    "definitions",
    "dependencies",
    "dependentSchemas",
    "patternProperties",
    "properties",
)


def check_literal(text: str, field: str) -> None:
    """Raise `InvalidRequest`, naming `field`, if a literal has more than `MAX_LITERAL`
    characters."""
    if len(text) > MAX_LITERAL:
        raise InvalidRequest(
            f"{field} contains a literal of {len(text)} characters; at most {MAX_LITERAL} are "
            "allowed"
        )


def parse_json(text: str, field: str) -> Any:
    """Parse a JSON text and return its value. Raises `InvalidRequest`, naming `field`, if the text
    is malformed, is nested deeper than `MAX_DEPTH`, or contains NaN, a number beyond the range of
    binary64, or an unpaired surrogate."""
    try:
        value = json.loads(text, parse_constant=_reject_constant, parse_float=_parse_finite)
    except RecursionError:
        raise _too_deep(field) from None
    except ValueError as error:
        raise InvalidRequest(f"{field} is not valid JSON: {error}") from None
    _check_depth(value, field)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"{field} contains a string with an unpaired surrogate, which is not valid Unicode"
        ) from None
    return value


def parse_schema(text: str, field: str) -> dict[str, Any] | bool:
    """Parse a JSON schema and return it. Keywords that the parser would misread are rewritten.
    Raises `InvalidRequest`, naming `field`, for malformed JSON, a remote `$ref`, and constraints
    that the parser cannot enforce. Also rejects schemas that would take the parser too long without
    reaching its own limits."""
    schema = parse_json(text, field)
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(
            f"{field} must be a JSON schema (an object or a boolean), not {_type_name(schema)}"
        )
    name_patterns = 0
    for part in reachable_schemas(schema):
        properties = len(_if_dict(part.get("properties")))
        if properties > MAX_PROPERTIES:
            raise InvalidRequest(
                f"{field} has an object with {properties} properties; at most {MAX_PROPERTIES} "
                "are allowed"
            )
        for literal in _literals(part):
            check_literal(literal, field)
        check_numbers(part, field)
        _check_min_properties(part, field)
        name_patterns += len(_if_dict(part.get("patternProperties")))
        reference = part.get("$ref", "#")
        if not isinstance(reference, str):
            raise InvalidRequest(f"{field}: $ref must be a string, not {_type_name(reference)}")
        if reference != "#" and not reference.startswith("#/"):
            raise InvalidRequest(
                f"{field}: $ref {shorten(reference)!r} is not a pointer within the schema, "
                "such as '#/$defs/item'; references outside the schema are not supported"
            )
        _rewrite_keywords(part)
    if name_patterns > MAX_NAME_PATTERNS:
        raise InvalidRequest(
            f"{field} has {name_patterns} patterns in patternProperties; at most "
            f"{MAX_NAME_PATTERNS} are allowed"
        )
    if (pattern_count := _patterns_at_once(schema)) > MAX_PATTERNS_AT_ONCE:
        raise InvalidRequest(
            f"{field} combines schemas with allOf or $ref so that a string must match "
            f"{pattern_count} patterns and formats; at most {MAX_PATTERNS_AT_ONCE} are allowed"
        )
    return schema


def _rewrite_keywords(part: dict[str, Any]) -> None:
    """Rewrite, in place, keywords that the parser would misread. Subschemas are left unchanged."""
    # References are always pointers from the root, so ids must not change their base.
    part.pop("$id", None)
    part.pop("id", None)
    if isinstance(part.get("pattern"), str):
        part["pattern"] = escape_classes(part["pattern"])
    if isinstance(part.get("patternProperties"), dict):
        named = part["patternProperties"].items()
        part["patternProperties"] = {escape_classes(name): one for name, one in named}


def _check_min_properties(part: dict[str, Any], field: str) -> None:
    """Raise `InvalidRequest` if `minProperties` is above 1 and exceeds the number of required
    names. The parser cannot enforce such a minimum, because it counts a duplicate name as two
    properties."""
    min_properties, required = part.get("minProperties", 0), part.get("required")
    if type(min_properties) is int and min_properties > max(
        1, len(set(map(str, _if_list(required))))
    ):
        raise InvalidRequest(
            f"{field}: minProperties {min_properties} cannot be enforced unless at least as "
            "many properties are listed in required"
        )


def _literals(part: dict[str, Any]) -> Iterator[str]:
    """Yield the literal texts of one schema: values, names, and patterns (which may be mostly
    literal)."""
    stack: list[Any] = [part.get("const"), part.get("enum"), part.get("pattern")]
    stack += [list(_if_dict(part.get("properties"))), part.get("required")]
    while stack:
        one = stack.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, list):
            stack += one
        elif isinstance(one, dict):
            stack += [*one, *one.values()]


def reachable_schemas(schema: dict[str, Any] | bool) -> Iterator[dict[str, Any]]:
    """Yield a schema and all of its subschemas, each once, including the targets of local `$ref`s.
    Values, such as those of `const` and `enum`, are not schemas."""
    stack: list[Any] = [schema]
    seen: set[int] = set()
    while stack:
        part = stack.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        stack += _children(schema, part)


def rebase_schema(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """Return a copy of a schema for embedding in another schema at the JSON pointer `place`, such
    as `#/items`. References in the copy are prefixed with `place`."""
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    # List all subschemas before changing any, because finding them requires the original
    # references.
    for part in list(reachable_schemas(copy)):
        reference = part.get("$ref")
        if isinstance(reference, str):
            part["$ref"] = place + reference.removeprefix("#")
    return copy


def _children(root: Any, part: dict[str, Any]) -> list[Any]:
    """Return the direct subschemas of `part`, and the target of its `$ref`; `root` is the whole
    schema."""
    return [
        *(part[key] for key in _SCHEMA_KEYWORDS if key in part),
        *(one for key in _SCHEMA_LIST_KEYWORDS for one in _if_list(part.get(key))),
        *(one for key in _SCHEMA_MAP_KEYWORDS for one in _if_dict(part.get(key)).values()),
        _resolve_reference(root, part.get("$ref")),
    ]


def _patterns_at_once(root: dict[str, Any] | bool) -> int:
    """Return an upper bound on the number of patterns and formats that apply to the same string."""
    bounds: dict[int, int] = {}
    visited: set[int] = set()
    stack: list[Any] = [root]
    while stack:
        part = stack[-1]
        if not isinstance(part, dict) or id(part) in bounds:
            stack.pop()
        elif id(part) in visited:
            stack.pop()
            bounds[id(part)] = _bound(root, part, bounds)
        else:
            visited.add(id(part))
            stack += [
                child
                for child in _children(root, part)
                if isinstance(child, dict) and id(child) not in visited
            ]
    return bounds.get(id(root), 0)


def _bound(root: Any, part: dict[str, Any], bounds: dict[int, int]) -> int:
    """Return an upper bound on the number of patterns and formats that apply to the same string
    within `part`. `bounds` contains the bounds of its subschemas, by object id; a recursive
    subschema counts as 0."""

    def max_bound(children: Iterable[Any]) -> int:
        return max((bounds.get(id(child), 0) for child in children), default=0)

    own = ("pattern" in part) + ("format" in part)
    # A property may be listed by name and also match a name pattern.
    property_bound = max_bound(_if_dict(part.get("properties")).values())
    property_bound += max_bound(_if_dict(part.get("patternProperties")).values())
    property_bound += max_bound([part.get("additionalProperties")])
    items = [part.get("items"), *_if_list(part.get("items")), *_if_list(part.get("prefixItems"))]
    return (
        max(own, property_bound, max_bound([*items, part.get("additionalItems")]))
        + sum(bounds.get(id(child), 0) for child in _if_list(part.get("allOf")))
        + max_bound(_if_list(part.get("anyOf")))
        + max_bound(_if_list(part.get("oneOf")))
        + max_bound([_resolve_reference(root, part.get("$ref"))])
    )


def _resolve_reference(schema: Any, reference: object) -> Any:
    """Return the target of a local reference in `schema`, the whole schema; None if it does not
    exist."""
    if not isinstance(reference, str):
        return None
    for name in reference.split("/")[1:]:
        key = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and key.isdecimal() and int(key) < len(schema):
            schema = schema[int(key)]
        elif isinstance(schema, dict) and key in schema:
            schema = schema[key]
        else:
            return None
    return schema


def _check_depth(value: Any, field: str) -> None:
    level, depth = [value], 0
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep(field)
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]


def _too_deep(field: str) -> InvalidRequest:
    return InvalidRequest(
        f"{field} nests objects or arrays more than {MAX_DEPTH} levels deep; use $defs and $ref"
    )


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _parse_finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"the number {shorten(text, 30)} is too large")
    return number


def _type_name(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def _if_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _if_dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
