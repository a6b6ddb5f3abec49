"""Findings for people and for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from nanoactor.doctor.finding import Finding

_INDENT = 6


def as_text(findings: Sequence[Finding]) -> str:
    """A line for each, what mends it below, and a sum at the end."""
    width = max((len(finding.name) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<{_INDENT}}{finding.name:<{width}}  {finding.what}")
        if finding.mend:
            lines.append(f"{'':{_INDENT + width}}  -> {finding.mend}")
    return "\n".join([*lines, "", _sum(findings)])


def _sum(findings: Sequence[Finding]) -> str:
    bad = sum(finding.state == "bad" for finding in findings)
    notes = sum(finding.state == "note" for finding in findings)
    noted = f"{notes} note{'' if notes == 1 else 's'}"
    return f"{bad or 'nothing'} bad, {noted}"


def as_json(findings: Sequence[Finding]) -> str:
    """One object, on one line."""
    listed = [dataclasses.asdict(finding) for finding in findings]
    return json.dumps({"ok": is_well(findings), "findings": listed})


def is_well(findings: Sequence[Finding]) -> bool:
    """Whether nothing is bad."""
    return all(finding.state != "bad" for finding in findings)
