"""Prints constraints for pip that select the lower bound of each dependency.

    python .ci/lower_bounds.py [torch==2.13.0 ...] > lower.txt
    pip install --constraint lower.txt .

An argument replaces the bound of its package, where the bound cannot be installed: torch's CPU
builds are not on PyPI. A dependency without a lower bound ends the run.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAME = re.compile(r"[A-Za-z0-9._-]+")
BOUND = re.compile(r">=\s*([^\s,;]+)")


class Unbounded(Exception):
    """A dependency without a lower bound, or a replacement of no dependency."""


def name_of(requirement: str) -> str:
    """Return the normalized name of a requirement's package."""
    found = NAME.match(requirement)
    if found is None:
        raise Unbounded(f"{requirement!r} is not a requirement")
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def lowest(requirement: str) -> str:
    """Return a requirement with `==` and its lower bound; its marker, if any, is kept."""
    versions, _, marker = requirement.partition(";")
    name, bound = NAME.match(versions), BOUND.search(versions)
    if name is None or bound is None:
        raise Unbounded(f"{requirement!r} has no lower bound")
    return f"{name[0]}=={bound[1]}" + (f"; {marker.strip()}" if marker else "")


def constraints(requirements: list[str], replaced: list[str]) -> list[str]:
    """Return one line for each requirement: its lower bound, or its replacement."""
    instead = {name_of(one): one for one in replaced}
    if unknown := instead.keys() - {name_of(one) for one in requirements}:
        raise Unbounded(f"not a dependency: {', '.join(sorted(unknown))}")
    return [instead.get(name_of(one)) or lowest(one) for one in requirements]


def main() -> int:
    """Print the constraints; return the exit status."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        requirements = tomllib.load(file)["project"]["dependencies"]
    try:
        print(*constraints(requirements, sys.argv[1:]), sep="\n")
    except Unbounded as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
