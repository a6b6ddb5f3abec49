"""Print the requirements of a pyproject.toml, with those of the extras that are named.

python3 requirements.py pyproject.toml ray,ray-data
"""

import sys
import tomllib
from pathlib import Path


def requirements(path: Path, extras: list[str]) -> list[str]:
    """Return the requirements, one for each package that is named. Raises `SystemExit` if the
    project has no such extra."""
    project = tomllib.loads(path.read_text())["project"]
    known = project["optional-dependencies"]
    found: list[str] = list(project["dependencies"])
    for extra in extras:
        if extra not in known:
            sys.exit(f"{extra!r} is not one of the extras: {', '.join(known)}")
        found += known[extra]
    return found


if __name__ == "__main__":
    _, project_file, given = sys.argv
    names = [name.strip() for name in given.split(",") if name.strip()]
    print("\n".join(requirements(Path(project_file), names)))
