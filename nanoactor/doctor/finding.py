"""Findings of checks, and their reports for people and for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Literal

State = Literal["ok", "note", "bad"]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check. A "bad" finding keeps the engine or its device from working; a "note"
    costs speed or may matter later. Both have a fix: a command, or what to do."""

    name: str
    state: State
    what: str
    fix: str = ""


def judge(
    name: str, is_ok: object, ok: str, problem: str, fix: str, state: State = "bad"
) -> Finding:
    """Return an "ok" finding that says `ok` if `is_ok`, else a finding of this state that says
    `problem` and has the fix."""
    return Finding(name, "ok", ok) if is_ok else Finding(name, state, problem, fix)


def as_text(findings: Sequence[Finding]) -> str:
    """Return a line for each finding with its fix below it, and the counts at the end."""
    width = max((len(finding.name) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<6}{finding.name:<{width}}  {finding.what}")
        if finding.fix:
            lines.append(f"{'':{6 + width}}  -> {finding.fix}")
    states = [finding.state for finding in findings]
    bad, notes = states.count("bad"), states.count("note")
    return "\n".join([*lines, "", f"{bad or 'nothing'} bad, {notes} note{'s' * (notes != 1)}"])


def as_json(findings: Sequence[Finding]) -> str:
    """Return one JSON object on one line, in which the key "fix" of each finding holds its fix."""
    entries = [{"name": f.name, "state": f.state, "what": f.what, "fix": f.fix} for f in findings]
    is_ok = all(finding.state != "bad" for finding in findings)
    return json.dumps({"ok": is_ok, "findings": entries})
