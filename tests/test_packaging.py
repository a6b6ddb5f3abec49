"""What `pyproject.toml` names is there, and what is there reaches the wheel."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import PurePath

import pytest

from tests.product_files import ROOMS, ROOT, matching

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOOLS = PROJECT["tool"]
DEMOS = ("models/demo/", "models/demo_vl/")


def modules():
    """Each module by its dotted name, packages included."""
    for path in (path for room in ROOMS for path in matching(f"{room}/**/*.py")):
        dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        name = dotted if dotted.startswith("nanoactor.") else f"nanoactor.{dotted}"
        yield name.removesuffix(".__init__")


OURS = [
    pattern
    for override in TOOLS["mypy"]["overrides"]
    for pattern in override["module"]
    if pattern.startswith("nanoactor.")
]


@pytest.mark.parametrize("pattern", OURS)
def test_an_override_of_mypys_matches_modules(pattern):
    wanted = re.compile(re.escape(pattern).replace(r"\.\*", r"(\..*)?"))
    assert any(wanted.fullmatch(name) for name in modules())


@pytest.mark.parametrize("pattern", TOOLS["mypy"]["exclude"])
def test_what_mypy_leaves_out_is_there(pattern):
    inside = [f"nanoactor/{p.relative_to(ROOT)}" for p in matching("models/**/*.py")]
    assert any(re.search(pattern, path) for path in inside)


@pytest.mark.parametrize("pattern", TOOLS["ruff"]["lint"]["per-file-ignores"])
def test_an_exception_of_ruffs_matches_files(pattern):
    matching(f"{pattern}/*.py" if pattern.endswith("**") else pattern)


@pytest.mark.parametrize(
    ("package", "pattern"),
    [(k, one) for k, found in TOOLS["setuptools"]["package-data"].items() for one in found],
)
def test_data_of_a_package_is_there(package, pattern):
    folder = package.replace(".", "/")
    room, _, rest = folder.removeprefix("nanoactor/").partition("/")
    matching(f"{room}/{rest}/{pattern}" if room in ROOMS[1:] else f"{folder}/{pattern}")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The names in a wheel that is built from a copy of the tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for room in ROOMS:
        ignored = shutil.ignore_patterns("__pycache__", "*.nbi", "*.nbc")
        shutil.copytree(ROOT / room, source / room, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, out], cwd=source, check=True, capture_output=True)
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def in_wheel(path):
    name = str(path.relative_to(ROOT))
    return name if name.startswith("nanoactor/") else f"nanoactor/{name}"


@pytest.mark.parametrize(
    "pattern",
    [
        "nanoactor/**/*.py",
        "runtime/**/*.py",
        "models/*.py",
        "models/[!d]*/**/*.py",
        "models/devices/**/*.py",
        "models/devices/**/*.cu",
        "models/devices/**/*.cuh",
        "models/demo*/*.json",
        "models/demo*/*.safetensors",
        "nanoactor/server/page.html",
        "nanoactor/py.typed",
    ],
)
def test_each_of_these_files_is_in_the_wheel(wheel, pattern):
    assert {in_wheel(path) for path in matching(pattern)} - wheel == set()


def test_what_trained_the_demos_is_not_in_the_wheel(wheel):
    inside = {name for name in wheel if name.startswith(tuple(f"nanoactor/{d}" for d in DEMOS))}
    assert {PurePath(name).suffix for name in inside} == {".json", ".safetensors", ".md"}


def test_nothing_else_is_in_the_wheel(wheel):
    assert {name.partition("/")[0].partition("-")[0] for name in wheel} == {"nanoactor"}
