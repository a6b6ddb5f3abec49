"""Classes of characters in patterns. ECMAScript and Python read some characters as literals in them
that the parser, which uses Rust's expressions, reads as operators: `[`, `&&`, `--` and `~~`."""

from __future__ import annotations

import re

# A class, with its content in the second group; or something else in which none starts.
_CLASS = re.compile(r"\\.|(\[\^?)(\]?(?:\\.|[^\]\\])*)\]", re.DOTALL)
_GBNF_CLASS = re.compile(r'"(?:\\.|[^"\\\n])*"|#[^\n]*|(\[\^?)(\]?(?:\\.|[^\]\\])*)\]', re.DOTALL)
_ATOM = re.compile(r"\\.|[^\\]", re.DOTALL)
_SPECIAL = frozenset("[&~-")


def with_plain_classes(pattern: str, gbnf: bool = False) -> str:
    """Return a pattern in whose classes the characters named above are escaped. `gbnf`: it is a
    grammar in EBNF."""
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
        if at + 1 < len(atoms) and atoms[at] == "-":  # a range, up to what follows
            parts += ["-", _escaped(atoms[at + 1])]
            at += 2
    return "".join(parts) + "]"


def _escaped(atom: str) -> str:
    return f"\\{atom}" if atom in _SPECIAL else atom
