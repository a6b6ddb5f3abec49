"""`doctor`: what of this machine is right, what is not, and what mends it."""

from __future__ import annotations

from typing import Any

from nanoactor.doctor import examine, look
from nanoactor.doctor.report import as_json, as_text, is_well


def doctor(args: Any) -> int:
    """Print the findings. Returns the exit status: 1 where something is bad."""
    findings = examine(look())
    print(as_json(findings) if args.json else as_text(findings), flush=True)
    return 0 if is_well(findings) else 1
