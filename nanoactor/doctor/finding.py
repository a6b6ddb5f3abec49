"""One line of the report."""

from __future__ import annotations

import dataclasses
from typing import Literal

State = Literal["ok", "note", "bad"]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Something that was looked at. What is bad keeps the engine, or its device, from working; a
    note costs speed, or may matter later."""

    name: str
    state: State
    what: str
    mend: str = ""
    """A command, or what to do; for notes and what is bad."""


def ok(name: str, what: str) -> Finding:
    """As it should be."""
    return Finding(name, "ok", what)


def note(name: str, what: str, mend: str) -> Finding:
    """Works, but could be better."""
    return Finding(name, "note", what, mend)


def bad(name: str, what: str, mend: str) -> Finding:
    """Does not work."""
    return Finding(name, "bad", what, mend)
