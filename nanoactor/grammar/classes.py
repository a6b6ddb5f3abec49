"""Character classes in regular expressions. Inside a class, ECMAScript and Python read `[`, `&&`,
`--` and `~~` as literals, but the parser, which uses Rust's syntax, reads them as operators."""

from __future__ import annotations

import re

# A class, with its content in the second group; or a piece of text in which no class starts.
_CLASS = re.compile(r"\\.|(\[\^?)(\]?(?:\\.|[^\]\\])*)\]", re.DOTALL)
_GBNF_CLASS = re.compile(r'"(?:\\.|[^"\\\n])*"|#[^\n]*|(\[\^?)(\]?(?:\\.|[^\]\\])*)\]', re.DOTALL)
_ATOM = re.compile(r"\\.|[^\\]", re.DOTALL)
_SPECIAL = frozenset("[&~-")


def with_plain_classes(pattern: str, gbnf: bool = False) -> str:
    """Return `pattern` with the characters of the operators above escaped in its classes. `gbnf`
    means that `pattern` is a grammar in EBNF."""
    return (_GBNF_CLASS if gbnf else _CLASS).sub(_plain, pattern)


def _plain(found: re.Match[str]) -> str:
    begin, inside = found[1], found[2]
    if begin is None:
        return found[0]
    atoms = _ATOM.findall(inside)
    parts, at = [begin], 0
    while at < len(atoms):
        parts.append(_escaped(atoms[at]))
        at += 1
        if at + 1 < len(atoms) and atoms[at] == "-":  # a range; its end follows
            parts += ["-", _escaped(atoms[at + 1])]
            at += 2
    return "".join(parts) + "]"


def _escaped(atom: str) -> str:
    return f"\\{atom}" if atom in _SPECIAL else atom
