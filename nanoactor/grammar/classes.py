"""Escaping of character classes in regular expressions. Inside a class, ECMAScript and Python read
`[`, `&&`, `--` and `~~` as literals, but the parser, which uses Rust's syntax, reads them as
operators."""

from __future__ import annotations

import re

# Matches a class, whose content is the second group, or a piece of text in which no class begins.
_CLASS = re.compile(r"\\.|(\[\^?)(\]?(?:\\.|[^\]\\])*)\]", re.DOTALL)
_GBNF_CLASS = re.compile(r'"(?:\\.|[^"\\\n])*"|#[^\n]*|(\[\^?)(\]?(?:\\.|[^\]\\])*)\]', re.DOTALL)
_ATOM = re.compile(r"\\.|[^\\]", re.DOTALL)
_OPERATORS = frozenset("[&~-")


def escape_classes(pattern: str, gbnf: bool = False) -> str:
    """Return `pattern` with `[`, `&`, `~` and literal `-` escaped inside character classes, so that
    Rust's syntax reads them as literals. If `gbnf` is True, `pattern` is a whole grammar in GBNF
    (llama.cpp's form of EBNF) instead of a regular expression."""
    return (_GBNF_CLASS if gbnf else _CLASS).sub(_escape_class, pattern)


def _escape_class(match: re.Match[str]) -> str:
    opening, content = match[1], match[2]
    if opening is None:
        return match[0]
    atoms = _ATOM.findall(content)
    parts, index = [opening], 0
    while index < len(atoms):
        parts.append(_escape_atom(atoms[index]))
        index += 1
        if index + 1 < len(atoms) and atoms[index] == "-":  # a range; its end follows
            parts += ["-", _escape_atom(atoms[index + 1])]
            index += 2
    return "".join(parts) + "]"


def _escape_atom(atom: str) -> str:
    return f"\\{atom}" if atom in _OPERATORS else atom
