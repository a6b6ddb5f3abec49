"""The parts of the build that pyproject.toml cannot express.

Links in the long description become absolute, and source archives of the same files and the same
`SOURCE_DATE_EPOCH` are equal byte for byte.
"""

from __future__ import annotations

import gzip
import os
import re
import tarfile
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)\[((?:[^\]\[]|\[[^\]]*\])*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def long_description(version: str) -> str:
    """Return README.md with links to the repository's files at the tag of this version."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        base = tomllib.load(file)["project"]["urls"]["Repository"]

    def absolute(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        text = LINK.sub(absolute, text)
        return f"{mark}[{text}]({base}/{'raw' if mark else 'blob'}/v{version}/{target})"

    return LINK.sub(absolute, (ROOT / "README.md").read_text(encoding="utf-8"))


class ReproducibleSdist(sdist):
    """An sdist whose archive depends only on the files, their names and `SOURCE_DATE_EPOCH`."""

    def make_archive(
        self,
        base_name: str,
        format: str,  # noqa: A002 - setuptools' name
        root_dir: str | os.PathLike[str] | None = None,
        base_dir: str | None = None,
        owner: str | None = None,
        group: str | None = None,
    ) -> str:
        """Write a tar.gz with sorted entries, one time for all, and no owners."""
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if epoch is None or format != "gztar" or base_dir is None:
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)

        def neutral(entry: tarfile.TarInfo) -> tarfile.TarInfo:
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = int(epoch), 0, 0, "", ""
            entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            return entry

        path = Path(root_dir or ".") / f"{base_name}.tar.gz"
        with (
            path.open("wb") as raw,
            gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=int(epoch)) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for name in sorted(Path(base_dir).rglob("*")):
                archive.add(name, recursive=False, filter=neutral)
        return str(path)


def release() -> str:
    """Return the version that pyproject.toml reads from nanoactor/__init__.py."""
    text = (ROOT / "nanoactor" / "__init__.py").read_text(encoding="utf-8")
    (found,) = re.findall(r'^RELEASE = "([^"]+)"$', text, re.M)
    return found


setup(
    cmdclass={"sdist": ReproducibleSdist},
    long_description=long_description(release()),
    long_description_content_type="text/markdown",
)
