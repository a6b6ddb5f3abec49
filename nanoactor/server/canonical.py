"""Canonical order of JSON members, so that equal tools and calls produce equal prompts.

The prefix cache compares tokens, whereas the order of an object's members has no meaning in JSON.
Some clients change that order between two turns of a conversation; this module makes it uniform.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_FIRST = ("$schema", "type", "title", "description", "enum", "properties", "required")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values map arbitrary names to schemas."""
_VALUES = ("default", "const", "examples", "enum", "required", "example")
"""Keywords whose values are not schemas."""


def ordered_schema(schema: Any) -> Any:
    """Return a JSON schema with its members in canonical order.

    Keywords get a fixed order. Properties in the list `required` come first, in the order of that
    list; the others follow, sorted by name. If all properties are required, the list determines
    their entire order.
    """
    if isinstance(schema, list):
        return [ordered_schema(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {}
    for keyword in sorted(schema, key=_rank):
        value = schema[keyword]
        if keyword in _BY_NAME and isinstance(value, Mapping):
            names = _names(value, schema.get("required") if keyword == "properties" else ())
            value = {name: ordered_schema(value[name]) for name in names}
        elif keyword in _VALUES:
            value = ordered(value)
        else:
            value = ordered_schema(value)
        found[keyword] = value
    return found


def _rank(keyword: str) -> tuple[int, str]:
    return (_FIRST.index(keyword) if keyword in _FIRST else len(_FIRST), keyword)


def _names(members: Mapping[str, Any], first: Any) -> list[str]:
    given = first if isinstance(first, Sequence) and not isinstance(first, str) else ()
    named = [name for name in given if isinstance(name, str) and name in members]
    return [*dict.fromkeys(named), *sorted(members.keys() - set(named))]


def ordered(value: Any) -> Any:
    """Return a JSON value with the members of its objects sorted by name."""
    if isinstance(value, Mapping):
        return {name: ordered(value[name]) for name in sorted(value)}
    return [ordered(one) for one in value] if isinstance(value, list) else value


class ArgumentOrder:
    """Puts the arguments of one function's calls in the order of the function's schema."""

    def __init__(self, schema: Any) -> None:
        """`schema` must already be ordered, and must not change."""
        self._schema = schema
        self._positions: dict[int, dict[str, int]] = {}
        """Position of each name in a schema's `properties`, by the `id` of that mapping. Computed
        only once, because a call may have many objects and a schema many properties."""

    def of(self, arguments: Any) -> Any:
        """Return the arguments of a call with their members in the order of the schema. Members
        that the schema does not name follow, sorted by name."""
        return self._ordered(arguments, self._schema)

    def _ordered(self, value: Any, schema: Any) -> Any:
        known = schema if isinstance(schema, Mapping) else {}
        if isinstance(value, list):
            return [self._ordered(one, known.get("items")) for one in value]
        if not isinstance(value, Mapping):
            return value
        members = known.get("properties")
        members = members if isinstance(members, Mapping) else {}
        positions = self._positions_of(members)
        names = sorted(value, key=lambda name: (positions.get(name, len(positions)), name))
        return {name: self._ordered(value[name], members.get(name)) for name in names}

    def _positions_of(self, members: Mapping[str, Any]) -> dict[str, int]:
        if not members:
            return {}
        if id(members) not in self._positions:
            self._positions[id(members)] = {name: at for at, name in enumerate(members)}
        return self._positions[id(members)]
