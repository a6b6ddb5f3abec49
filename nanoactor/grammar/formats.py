"""String formats in JSON schemas: those that are enforced, and those that are only annotations."""

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
"""String formats that the parser implements. "unknown" allows any string. For dates, only the form
is checked: February 30 is accepted."""


def unenforced_formats(schema: dict[str, Any] | bool) -> Iterator[str]:
    """Yield the formats in a schema that the parser will not enforce."""
    for subschema in reachable_schemas(schema):
        format_name = subschema.get("format")
        if isinstance(format_name, str) and not (
            format_name in ENFORCED and _may_be_string(subschema)
        ):
            yield format_name


def drop_unenforced(schema: dict[str, Any]) -> None:
    """Remove, in place, every format in a schema that the parser does not implement. In JSON Schema
    2020-12, a format is only an annotation unless both sides have agreed to enforce it."""
    for subschema in list(reachable_schemas(schema)):
        format_name = subschema.get("format")
        if isinstance(format_name, str) and format_name not in ENFORCED:
            del subschema["format"]


def _may_be_string(subschema: dict[str, Any]) -> bool:
    types = subschema.get("type", "string")
    return types == "string" or (isinstance(types, list) and "string" in types)
