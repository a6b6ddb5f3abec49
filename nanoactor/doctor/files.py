"""Files that may be missing or closed to us, which is an answer, too."""

from __future__ import annotations

import os
import re
from pathlib import Path


def text(path: Path) -> str:
    """What it says; nothing where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def children(directory: Path, pattern: str) -> list[str]:
    """Names in a directory that match as a whole, numbers in their order."""
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    found = [name for name in names if re.fullmatch(pattern, name)]
    return sorted(found, key=lambda name: (len(name), name))


def first_match(where: str, pattern: str) -> str | None:
    """The first group of the first match."""
    found = re.search(pattern, where, re.MULTILINE)
    return found.group(1).strip() if found else None


def below(root: Path, path: str) -> Path:
    """An absolute path, as seen from a root."""
    return root / path.lstrip("/")
