"""Files of the project, for tests that look at sources: a pattern that matches nothing fails."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("nanoactor", "models", "runtime")


def matching(pattern):
    """Return the files, sorted, that a pattern matches; links to rooms are not followed."""
    found = sorted(path for path in ROOT.glob(pattern) if path.is_file() and not is_linked(path))
    assert found, f"{pattern} matches no file: it names what has moved, or was never there"
    return found


def is_linked(path):
    """Whether a path leads through one of the links from `nanoactor/` to the other rooms."""
    parts = path.relative_to(ROOT).parts if path.is_relative_to(ROOT) else ()
    return (
        len(parts) > 1 and parts[0] == "nanoactor" and (ROOT / "nanoactor" / parts[1]).is_symlink()
    )
