"""Prints the table of fields for docs/server.md: `python -m tests.server.fields_table`."""

import json

from nanoactor.server.fields import Field, route_fields

ROUTES = ("chat", "completions", "responses", "messages")


def table() -> str:
    """For docs/server.md."""
    lines = [f"| field | {' | '.join(ROUTES)} | |", "| --- " * (len(ROUTES) + 2) + "|"]
    by_route = [route_fields(route) for route in ROUTES]
    for name in sorted({name for fields in by_route for name in fields}):
        found = [fields.get(name) for fields in by_route]
        cells = [field.status if field is not None else "ignored" for field in found]
        notes = [_note(field) for field in found if field is not None]
        note = "; ".join(dict.fromkeys(note for note in notes if note))
        lines.append(f"| `{name}` | {' | '.join(cells)} | {note} |")
    return "\n".join(lines) + "\n"


def _note(field: Field) -> str:
    accepted = ", ".join(f"`{json.dumps(value)}`" for value in field.neutral)
    parts = [f"except for {accepted}"] if accepted and field.status == "refused" else []
    return ", ".join([*parts, field.note] if field.note else parts)


if __name__ == "__main__":
    print(table(), end="")
