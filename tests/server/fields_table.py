"""Prints the table of fields for docs/server.md: `python -m tests.server.fields_table`."""

import json

from nanoactor.server.fields import Field, of_route


def table() -> str:
    """For docs/server.md."""
    lines = ["| field | chat | completions | |", "| --- | --- | --- | --- |"]
    chat, text = of_route("chat"), of_route("completions")
    names = sorted({*chat, *text})
    for name in names:
        pair = (chat.get(name), text.get(name))
        notes = [_note(field) for field in pair if field is not None]
        cells = [field.status if field is not None else "ignored" for field in pair]
        note = "; ".join(dict.fromkeys(note for note in notes if note))
        lines.append(f"| `{name}` | {cells[0]} | {cells[1]} | {note} |")
    return "\n".join(lines) + "\n"


def _note(field: Field) -> str:
    accepted = ", ".join(f"`{json.dumps(value)}`" for value in field.neutral)
    parts = [f"except for {accepted}"] if accepted and field.status == "refused" else []
    return ", ".join([*parts, field.note] if field.note else parts)


if __name__ == "__main__":
    print(table(), end="")
