"""The index of the examples has each of them, and each has a test."""

import json
import re

import pytest

from tests.product_files import ROOT, matching

FOLDER = ROOT / "examples"
INDEX = (FOLDER / "README.md").read_text()
PROGRAMS = [path.name for path in matching("examples/*.py")]
ELSEWHERE = {"ray_data.py"}
"""An example whose module has tests of its own, in tests/ray_serve."""


def test_the_index_has_every_example():
    linked = set(re.findall(r"^\| \[`[^`]+`\]\(([^)]+)\)", INDEX, re.M))
    shown = {*PROGRAMS, "notebook.ipynb", "several_gpus/README.md", "deploy/monitoring"}
    assert linked == shown
    first = {path.relative_to(FOLDER).parts[0] for path in matching("examples/**/*")}
    first -= {"__pycache__", ".ipynb_checkpoints"}
    helpers = {"README.md", "prompts.jsonl", "three-digits.png"}
    assert first == {one.split("/")[0] for one in shown} | helpers


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_command_of_the_index_is_that_of_the_example(name):
    (line,) = [line for line in INDEX.splitlines() if line.startswith(f"| [`{name}`]")]
    (command,) = re.findall(r"`(python examples/[^`]*)`", line)
    described = (FOLDER / name).read_text().split('"""')[1]
    assert re.search(rf"^    {re.escape(command)}(  .*)?$", described, re.M)


def test_every_example_has_a_test():
    tests = "".join(path.read_text() for path in matching("tests/examples/test_*.py"))
    for name in {*PROGRAMS, "notebook.ipynb", "start.sh"} - ELSEWHERE:
        assert re.search(rf'["/]{re.escape(name)}"', tests), name


def test_the_notebook_is_as_it_was_run():
    """Its outputs are those of one run, from top to bottom, without an error."""
    cells = json.loads((FOLDER / "notebook.ipynb").read_text())["cells"]
    codes = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in codes] == list(range(1, len(codes) + 1))
    kinds = [output["output_type"] for cell in codes for output in cell["outputs"]]
    assert set(kinds) == {"stream", "execute_result"}
