"""A number that changes with each commit, so that repeated runs cover more over time."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def commit_number() -> int:
    """The first 32 bits of HEAD; 0 outside a checkout."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(done.stdout[:8], 16)
