"""`doctor`: diagnose this machine and print fixes."""

from __future__ import annotations

from typing import Any

from nanoactor.doctor import Machine, examine
from nanoactor.doctor.finding import as_json, as_text


def doctor(args: Any) -> int:
    """Print what is found, and return the exit status: 1 where something is bad."""
    findings = examine(Machine())
    print(as_json(findings) if args.json else as_text(findings), flush=True)
    return int(any(finding.state == "bad" for finding in findings))
