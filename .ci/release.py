"""Builds a release and checks it; publishes nothing.

    python .ci/release.py [--dry-run] [--out dist]

Needs the extra `release`. In order: the tree is clean and on `main`; CHANGELOG.md begins with the
version and its date; there is no such tag; two builds with the commit's time as SOURCE_DATE_EPOCH
are equal byte for byte; `twine check --strict` passes; the wheel's dependencies are listed in a
CycloneDX file. Prints the remaining steps. With `--dry-run`, an unclean tree, another branch and an
existing tag are reported but do not end the run.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


class Refused(Exception):
    """A condition for a release that does not hold."""


def output(*command: str | Path) -> str:
    """Run a command in the repository; returns what it prints."""
    return subprocess.run(
        command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE
    ).stdout.strip()


def release() -> str:
    """Return the version in nanoactor/__init__.py."""
    text = (ROOT / "nanoactor" / "__init__.py").read_text()
    (found,) = re.findall(r'^RELEASE = "([^"]+)"$', text, re.M)
    return found


def check_changelog(version: str, text: str) -> None:
    """Raise `Refused` unless the first section is this version's and has a date."""
    first = re.search(r"^## (.*)$", text, re.M)
    heading = first.group(1) if first else "nothing"
    if not re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", heading):
        raise Refused(
            f"CHANGELOG.md begins with {heading!r}; it must be '{version} - YYYY-MM-DD': the "
            "version in nanoactor/__init__.py, and the day of the release"
        )


def problems_of_tree(version: str) -> list[str]:
    """Return what is wrong with the checkout itself."""
    found = []
    if changed := output("git", "status", "--porcelain"):
        found.append(f"the tree has changes that are not committed:\n{changed}")
    if (branch := output("git", "rev-parse", "--abbrev-ref", "HEAD")) != "main":
        found.append(f"the branch is {branch}, not main")
    if output("git", "tag", "--list", f"v{version}"):
        found.append(f"the tag v{version} exists already: raise RELEASE in nanoactor/__init__.py")
    return found


def build(folder: Path, epoch: str) -> dict[str, str]:
    """Build the commit, sdist first and the wheel from it; returns a digest by file name."""
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        output("git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(source))
        subprocess.run(
            (sys.executable, "-m", "build", "--outdir", folder.resolve(), source),
            check=True,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"SOURCE_DATE_EPOCH": epoch},
        )
    paths = sorted(folder.glob("nanoactor-*"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def build_twice(out: Path) -> dict[str, str]:
    """Build into `out`, and again elsewhere; raise `Refused` unless both are equal."""
    epoch = output("git", "log", "-1", "--format=%ct")
    first = build(out, epoch)
    with tempfile.TemporaryDirectory() as name:
        second = build(Path(name), epoch)
    if first != second:
        raise Refused(f"two builds of one commit differ: {first} and {second}")
    return first


def write_bill_of_materials(version: str, out: Path) -> Path:
    """Write the packages of this environment, in which the release was tested, as CycloneDX."""
    path = out / f"nanoactor-{version}.cdx.json"
    tool = (sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible")
    output(*tool, "--pyproject", ROOT / "pyproject.toml", "--output-file", path, sys.executable)
    if not json.loads(path.read_text())["components"]:
        raise Refused(f"{path} lists no component")
    return path


def main() -> int:
    """Build and check; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    missing = [
        name for name in ("build", "cyclonedx_py", "twine") if not importlib.util.find_spec(name)
    ]
    if missing:
        print(f"not installed: {', '.join(missing)}; run: pip install -e '.[release]'")
        return 1
    version = release()
    try:
        check_changelog(version, (ROOT / "CHANGELOG.md").read_text())
        for problem in problems_of_tree(version):
            if not args.dry_run:
                raise Refused(problem)
            print(f"dry run: {problem}")
        args.out.mkdir(parents=True, exist_ok=True)
        digests = build_twice(args.out)
        output(
            sys.executable,
            "-m",
            "twine",
            "check",
            "--strict",
            *map(str, args.out.glob("nanoactor-*[lz]")),
        )
        bill = write_bill_of_materials(version, args.out)
    except Refused as reason:
        print(f"refused: {reason}")
        return 1
    for name, digest in digests.items():
        print(f"{digest}  {name}")
    print(f"packages of this environment: {bill}")
    print(f"next: git tag -s v{version}, push the tag, and upload both packages with twine")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
