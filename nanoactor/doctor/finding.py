"""Findings of the checks, and their output as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Literal

State = Literal["ok", "note", "bad"]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check. The state "bad" means that the engine or a device cannot work; "note"
    means that something costs speed or may matter later. Both come with a fix, which is a command
    or an instruction."""

    name: str
    state: State
    what: str
    fix: str = ""


def judge(
    name: str, is_ok: object, ok: str, problem: str, fix: str, state: State = "bad"
) -> Finding:
    """Create a finding with state "ok" and the text `ok` if `is_ok`. Otherwise, create one with
    `state`, the text `problem` and the fix."""
    return Finding(name, "ok", ok) if is_ok else Finding(name, state, problem, fix)


def as_text(findings: Sequence[Finding]) -> str:
    """Format findings as text: a line for each, its fix on the next line, and the number of
    problems at the end."""
    width = max((len(finding.name) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<6}{finding.name:<{width}}  {finding.what}")
        if finding.fix:
            lines.append(f"{'':{6 + width}}  -> {finding.fix}")
    states = [finding.state for finding in findings]
    bad, notes = states.count("bad"), states.count("note")
    summary = f"{bad or 'no'} problem{'s' * (bad != 1)}, {notes} note{'s' * (notes != 1)}"
    return "\n".join([*lines, "", summary])


def as_json(findings: Sequence[Finding]) -> str:
    """Format findings as one JSON object on a single line. Its field `ok` is false if a finding is
    "bad"."""
    entries = [{"name": f.name, "state": f.state, "what": f.what, "fix": f.fix} for f in findings]
    is_ok = all(finding.state != "bad" for finding in findings)
    return json.dumps({"ok": is_ok, "findings": entries})
