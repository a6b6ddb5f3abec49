"""The version of the package, including the commit of a git checkout."""

from __future__ import annotations

import re
from pathlib import Path

from nanoactor import RELEASE

_HASH = re.compile(r"[0-9a-f]{40}")
_SHORT_HASH_DIGITS = 9


def version() -> str:
    """Return the release, for instance "0.2.0". In a git checkout, "+g" and the first digits of the
    commit's hash follow. Uncommitted changes are not shown."""
    commit = commit_of(Path(__file__).resolve().parents[2])
    return f"{RELEASE}+g{commit[:_SHORT_HASH_DIGITS]}" if commit else RELEASE


def commit_of(folder: Path) -> str | None:
    """Return the hash of the commit that is checked out in `folder`, or None if it is not the root
    of a git checkout. Reads files only, so git need not be installed."""
    try:
        root = _git_folder(folder / ".git")
        head = (root / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head if _HASH.fullmatch(head) else None
        return _resolve(root, head.removeprefix("ref: "))
    except (OSError, UnicodeDecodeError):
        return None


def _git_folder(path: Path) -> Path:
    """Return the folder that contains HEAD: `.git` itself or, in a worktree, the folder named in
    the file `.git`."""
    if path.is_dir():
        return path
    return path.parent / path.read_text().strip().removeprefix("gitdir: ")


def _resolve(root: Path, name: str) -> str | None:
    """Return the hash of a git reference, or None if it does not exist. References have their own
    file or a line in `packed-refs`. In a worktree, they are in the folder that `commondir`
    names."""
    commondir = root / "commondir"
    for folder in (root, root / commondir.read_text().strip() if commondir.exists() else root):
        if (folder / name).is_file():
            found = (folder / name).read_text().strip()
            return found if _HASH.fullmatch(found) else None
        if (packed := folder / "packed-refs").is_file():
            for line in packed.read_text().splitlines():
                digits, _, reference = line.partition(" ")
                if reference == name and _HASH.fullmatch(digits):
                    return digits
    return None
