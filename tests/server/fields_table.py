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
        notes = [_note(field) if field is not None else "" for field in found]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {_joined(notes, cells)} |")
    return "\n".join(lines) + "\n"


def _joined(notes: list[str], cells: list[str]) -> str:
    """The notes of all routes. One that differs from another's is preceded by its routes, as is one
    for a field that some routes honour and others refuse."""
    by_note: dict[str, list[str]] = {}
    for route, note in zip(ROUTES, notes, strict=True):
        if note:
            by_note.setdefault(note, []).append(route)
    if len(by_note) < 2 and not {"honoured", "refused"} <= set(cells):
        return "".join(by_note)
    return "; ".join(f"{', '.join(routes)}: {note}" for note, routes in by_note.items())


def _note(field: Field) -> str:
    accepted = " and ".join(f"`{json.dumps(value)}`" for value in field.neutral)
    if not accepted or field.status != "refused":
        return field.note
    start = f"{accepted} {'is' if len(field.neutral) == 1 else 'are'} accepted"
    return f"{start}. {field.note[0].upper()}{field.note[1:]}" if field.note else start


if __name__ == "__main__":
    print(table(), end="")
