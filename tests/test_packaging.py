"""What `pyproject.toml` names is there, and what is there reaches the wheel."""

import dataclasses
import email
import email.message
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import PurePath

import pytest

import nanoactor
from nanoactor.api.version import commit_of
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


@dataclasses.dataclass
class Wheel:
    names: set[str]
    metadata: email.message.Message


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel that is built from a copy of the tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for room in ROOMS:
        ignored = shutil.ignore_patterns("__pycache__", "*.nbi", "*.nbc")
        shutil.copytree(ROOT / room, source / room, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, out], cwd=source, check=True, capture_output=True)
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
        return Wheel(set(archive.namelist()), metadata)


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
    assert {in_wheel(path) for path in matching(pattern)} - wheel.names == set()


def test_what_trained_the_demos_is_not_in_the_wheel(wheel):
    inside = {
        name for name in wheel.names if name.startswith(tuple(f"nanoactor/{d}" for d in DEMOS))
    }
    assert {PurePath(name).suffix for name in inside} == {".json", ".safetensors", ".md"}


def test_nothing_else_is_in_the_wheel(wheel):
    assert {name.partition("/")[0].partition("-")[0] for name in wheel.names} == {"nanoactor"}


def test_links_of_the_long_description_are_absolute(wheel):
    text = wheel.metadata.get_payload()
    targets = re.findall(r"\]\(([^)]+)\)", text)
    base = PROJECT["project"]["urls"]["Repository"]
    ours = [target for target in targets if target.startswith(base)]
    assert len(ours) > 30
    assert [one for one in targets if not re.match("https?://|#", one)] == []
    for target in ours:
        kind, _, rest = target.removeprefix(f"{base}/").partition("/")
        tag, _, path = rest.partition("/")
        assert tag == f"v{nanoactor.RELEASE}"
        image = PurePath(path.partition("#")[0]).suffix in {".png", ".svg"}
        assert (kind == "raw") == image
        assert (ROOT / path.partition("#")[0]).exists()


def test_the_version_is_written_once(wheel):
    assert wheel.metadata["Version"] == nanoactor.RELEASE
    assert nanoactor.__version__.partition("+")[0] == nanoactor.RELEASE
    assert "version" not in PROJECT["project"]


def git(folder, *words):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.invalid")
    command = ("git", *identity, *words)
    return subprocess.check_output(
        command, cwd=folder, text=True, stderr=subprocess.DEVNULL
    ).strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_version_of_a_checkout_names_its_commit(tmp_path):
    """On a branch, detached, with packed references, in a worktree; None without a commit."""
    repository, tree = tmp_path / "repository", tmp_path / "tree"
    repository.mkdir()
    assert commit_of(repository) is None
    git(repository, "init", "-q", "-b", "main")
    assert commit_of(repository) is None
    git(repository, "commit", "-q", "--allow-empty", "-m", "one")
    one = git(repository, "rev-parse", "HEAD")
    assert commit_of(repository) == one
    git(repository, "worktree", "add", "-q", "-b", "other", str(tree))
    git(tree, "commit", "-q", "--allow-empty", "-m", "two")
    two = git(tree, "rev-parse", "HEAD")
    git(repository, "checkout", "-q", "--detach")
    for _ in range(2):
        assert (commit_of(repository), commit_of(tree)) == (one, two)
        git(repository, "pack-refs", "--all")
        git(repository, "checkout", "-q", "main")


def script(name):
    found = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def releasing():
    return script("release")


def test_each_dependency_has_a_lower_bound():
    found = script("lower_bounds").constraints(PROJECT["project"]["dependencies"], [])
    assert len(found) == len(PROJECT["project"]["dependencies"])
    assert all(re.match(r"[\w.-]+==\d[\d.]*(; |$)", line) for line in found), found


def test_lower_bounds_keep_markers_and_can_be_replaced():
    bounds = script("lower_bounds")
    wanted = ["a_b>=1.2,<2", "c<9,>=3; sys_platform != 'win32'", "torch>=2.11"]
    found = ["a_b==1.2", "c==3; sys_platform != 'win32'", "torch==2.13.0"]
    assert bounds.constraints(wanted, ["torch==2.13.0"]) == found
    assert bounds.constraints(wanted, ["A.B==1.9"])[0] == "A.B==1.9"
    for requirements, replaced, named in (
        (["a", "b>=1"], [], "'a' has no lower bound"),
        (["a<2"], [], "'a<2' has no lower bound"),
        (["a>=1"], ["b==1"], "not a dependency: b"),
    ):
        with pytest.raises(bounds.Unbounded, match=named):
            bounds.constraints(requirements, replaced)


def test_a_release_needs_its_section_of_the_changelog(releasing):
    assert releasing.release() == nanoactor.RELEASE
    releasing.check_changelog(
        "1.2.3", "# Changelog\n\n## 1.2.3 - 2026-01-31\n\n## 1.2.2 - 2026-01-01\n"
    )
    for heading in ("Unreleased", "1.2.3", "1.2.3 (unreleased)", "1.2.4 - 2026-01-31"):
        with pytest.raises(releasing.Refused, match="begins with"):
            releasing.check_changelog("1.2.3", f"# Changelog\n\n## {heading}\n")


@pytest.mark.long
def test_a_dry_run_of_a_release(tmp_path):
    """In an environment of its own; it builds HEAD, not what is not committed."""
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    tools = PROJECT["project"]["optional-dependencies"]["release"]
    subprocess.run([python, "-m", "pip", "install", "-q", *tools], check=True)
    out = tmp_path / "dist"
    command = [python, ROOT / ".ci" / "release.py", "--dry-run", "--out", out]
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    version = nanoactor.RELEASE
    assert {path.name for path in out.iterdir()} == {
        f"nanoactor-{version}.tar.gz",
        f"nanoactor-{version}-py3-none-any.whl",
        f"nanoactor-{version}.cdx.json",
    }
