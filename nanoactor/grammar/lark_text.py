"""Checks of grammars in Lark, which scan only as much of the syntax as they need."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from nanoactor.errors import InvalidRequest
from nanoactor.grammar.jsonschema import parse_schema

# A string, a regular expression on one line, a comment, `%json`, or any other single character.
_PIECES = re.compile(
    r'(?P<string>"(?:\\.|[^"\\\n])*"i?)'
    r"|(?P<regex>/(?![/*])(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n\[])+/[imslux]*)"
    r"|(?P<comment>//[^\n]*|\#[^\n]*)"
    r"|(?P<json>%json)"
    r"|(?P<code>.)",
    re.DOTALL,
)


def check_lark(text: str, max_intersections: int) -> None:
    """Raise `InvalidRequest` if a grammar has more than `max_intersections` `&` operators, or if
    `parse_schema` rejects a JSON schema embedded after `%json`."""
    intersections = 0
    for piece in _code_pieces(text):
        if piece == "&":
            intersections += 1
        elif len(piece) > 1:
            parse_schema(piece, "grammar: the schema after %json")
    if intersections > max_intersections:
        raise InvalidRequest(
            f"grammar has {intersections} intersections ('&'); at most {max_intersections} are "
            "allowed"
        )


def _code_pieces(text: str) -> Iterator[str]:
    """Yield each character outside strings, regular expressions and comments, and each embedded
    JSON schema as one piece."""
    at = 0
    while at < len(text):
        piece = _PIECES.match(text, at)
        assert piece is not None, "any character is a piece"
        at = piece.end()
        if piece.lastgroup == "json":
            begin = at + len(text[at:]) - len(text[at:].lstrip())
            end = _end_of_json(text, begin)
            if end is not None:
                yield text[begin:end]
                at = end
        elif piece.lastgroup == "code":
            yield piece[0]


def _end_of_json(text: str, begin: int) -> int | None:
    """Return the end index of the JSON value at `begin`; None if it is malformed, which the parser
    will report."""
    try:
        _, end = json.JSONDecoder().raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None
    return end
