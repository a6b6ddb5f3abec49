"""Formats of strings in JSON schemas: which are enforced, and which can only be an annotation."""

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
"""Formats of strings that the parser knows; the last asks for nothing. Dates are checked for their
form: the 30th of February has one."""


def unenforced_formats(schema: dict[str, Any] | bool) -> Iterator[str]:
    """Yield the formats in a schema that are not enforced."""
    for part in reachable_schemas(schema):
        given = part.get("format")
        if isinstance(given, str) and not (given in ENFORCED and _may_be_text(part)):
            yield given


def drop_unenforced(schema: dict[str, Any]) -> None:
    """Take the formats that the parser does not know out of a schema: in JSON Schema 2020-12 a
    format is an annotation, unless both sides have agreed on more."""
    for part in list(reachable_schemas(schema)):
        given = part.get("format")
        if isinstance(given, str) and given not in ENFORCED:
            del part["format"]


def _may_be_text(part: dict[str, Any]) -> bool:
    types = part.get("type", "string")
    return types == "string" or (isinstance(types, list) and "string" in types)
