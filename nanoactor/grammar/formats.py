"""String formats in JSON schemas: which of them are enforced, and which are only annotations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nanoactor.grammar.jsonschema import reachable_schemas

ENFORCED = frozenset(
    (
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "unknown",
        "uri",
        "uuid",
    )
)
"""String formats that the parser implements; "unknown" allows any string. Only the form of dates is
checked: February 30 is accepted."""


def unenforced_formats(schema: dict[str, Any] | bool) -> Iterator[str]:
    """Yield the formats in a schema that are not enforced."""
    for part in reachable_schemas(schema):
        given = part.get("format")
        if isinstance(given, str) and not (given in ENFORCED and _may_be_text(part)):
            yield given


def drop_unenforced(schema: dict[str, Any]) -> None:
    """Remove the formats that the parser does not implement from a schema. In JSON Schema 2020-12,
    a format is only an annotation unless both sides have agreed to enforce it."""
    for part in list(reachable_schemas(schema)):
        given = part.get("format")
        if isinstance(given, str) and given not in ENFORCED:
            del part["format"]


def _may_be_text(part: dict[str, Any]) -> bool:
    types = part.get("type", "string")
    return types == "string" or (isinstance(types, list) and "string" in types)
