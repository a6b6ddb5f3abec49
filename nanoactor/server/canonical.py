"""Canonical order of JSON members, so that equal tools and equal calls produce equal prompts.

In JSON, the order of an object's members has no meaning, but the prefix cache compares tokens. Some
clients change the order between two requests of a conversation. This module sorts members
uniformly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_KEYWORD_ORDER = ("$schema", "type", "title", "description", "enum", "properties", "required")
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Schema keywords whose value maps arbitrary names to schemas."""
_VALUE_KEYWORDS = ("default", "const", "examples", "enum", "required", "example")
"""Schema keywords whose value is not a schema."""


def canonical_schema(schema: Any) -> Any:
    """Return a JSON schema with its members in canonical order.

    Keywords have a fixed order. Properties that `required` lists come first, in the order of that
    list. Other properties follow, sorted by name.
    """
    if isinstance(schema, list):
        return [canonical_schema(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    canonical = {}
    for keyword in sorted(schema, key=_rank):
        value = schema[keyword]
        if keyword in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            names = _property_order(
                value, schema.get("required") if keyword == "properties" else ()
            )
            value = {name: canonical_schema(value[name]) for name in names}
        elif keyword in _VALUE_KEYWORDS:
            value = sort_members(value)
        else:
            value = canonical_schema(value)
        canonical[keyword] = value
    return canonical


def _rank(keyword: str) -> tuple[int, str]:
    return (
        _KEYWORD_ORDER.index(keyword) if keyword in _KEYWORD_ORDER else len(_KEYWORD_ORDER),
        keyword,
    )


def _property_order(members: Mapping[str, Any], first: Any) -> list[str]:
    required = first if isinstance(first, Sequence) and not isinstance(first, str) else ()
    named = [name for name in required if isinstance(name, str) and name in members]
    return [*dict.fromkeys(named), *sorted(members.keys() - set(named))]


def sort_members(value: Any) -> Any:
    """Return a JSON value in which the members of every object are sorted by name."""
    if isinstance(value, Mapping):
        return {name: sort_members(value[name]) for name in sorted(value)}
    return [sort_members(one) for one in value] if isinstance(value, list) else value


class ArgumentOrder:
    """Sorts the arguments of a function's calls in the order of the function's schema."""

    def __init__(self, schema: Any) -> None:
        """Store the schema, which must be in canonical order and must not change."""
        self._schema = schema
        self._positions: dict[int, dict[str, int]] = {}
        """Index of each property name in a schema's `properties`, by the `id` of that mapping.
        Cached, because a call may have many objects and a schema many properties."""

    def apply(self, arguments: Any) -> Any:
        """Return arguments with their members in the order of the schema. Members that the schema
        does not name follow, sorted by name."""
        return self._apply(arguments, self._schema)

    def _apply(self, value: Any, schema: Any) -> Any:
        schema_members = schema if isinstance(schema, Mapping) else {}
        if isinstance(value, list):
            return [self._apply(one, schema_members.get("items")) for one in value]
        if not isinstance(value, Mapping):
            return value
        members = schema_members.get("properties")
        members = members if isinstance(members, Mapping) else {}
        positions = self._positions_of(members)
        names = sorted(value, key=lambda name: (positions.get(name, len(positions)), name))
        return {name: self._apply(value[name], members.get(name)) for name in names}

    def _positions_of(self, members: Mapping[str, Any]) -> dict[str, int]:
        if not members:
            return {}
        if id(members) not in self._positions:
            self._positions[id(members)] = {name: at for at, name in enumerate(members)}
        return self._positions[id(members)]
