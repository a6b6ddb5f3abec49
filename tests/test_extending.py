"""The walk-throughs of docs/extending.md name the files that the code names."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOC = (ROOT / "docs" / "extending.md").read_text()
WALKS = {
    "A sampling parameter": r"\bmin_ps?\b",
    "A model family": r"\bLLAMA\b",
    "A device": r"(?i)\bcuda\b",
    "A message": r"\bStepWanted\b",
}
NEEDED = {
    "nanoactor/params.py",
    "models/columns.py",
    "models/sampling.py",
    "nanoactor/runner/sampling_table.py",
}
KERNEL = "models/kernels/decode_step"
# Train the demo models, on whatever there is.
APART = {
    "models/demo/train.py",
    *(f"models/demo_vl/{name}.py" for name in ("ablate", "evaluate", "train")),
}
# One kernel in parts, of which the walk names the folder.
APART |= {f"{KERNEL}/{p.name}" for p in (ROOT / KERNEL).glob("*.py")}


def listed(title):
    """The files in a walk-through's table."""
    section = DOC.split(f"## {title}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


def naming(pattern):
    """Product files in which something stands."""
    paths = [*(ROOT / "models").rglob("*.py"), *(ROOT / "runtime").rglob("*.py")]
    paths += [
        path
        for path in (ROOT / "nanoactor").rglob("*.py")
        if path.relative_to(ROOT).parts[1] not in ("models", "runtime")
    ]
    found = {str(p.relative_to(ROOT)) for p in paths if re.search(pattern, p.read_text())}
    return found - APART


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_through_lists_the_files_that_name_its_example(title):
    assert listed(title) == naming(WALKS[title])


def test_a_sampling_parameter_touches_four_files_and_the_fused_samplers_that_shall_know_it():
    fused = {path for path in listed("A sampling parameter") if path not in NEEDED}
    assert listed("A sampling parameter") - fused == NEEDED
    assert all(path.rpartition("/")[2].endswith("sampling.py") for path in fused)
    assert len(fused) <= 4  # NVIDIA GPUs have two, one for rows with a top-k


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w/]+\.py)`", DOC))))
def test_every_file_that_is_named_exists(path):
    assert (ROOT / path).is_file()
