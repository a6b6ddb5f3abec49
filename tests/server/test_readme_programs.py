"""The README's programs run as they are written, from the root of a checkout."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from nanoactor import SamplingParams

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text().partition("### As a server")[0]
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def run(command):
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=280
    )
    return done.stdout


@pytest.mark.parametrize("program", PROGRAMS, ids=["asynchronous", "blocking", "images"])
def test_a_program_runs(program):
    said = run([sys.executable, "-c", program])
    assert said.strip()
    if "three-digits" in program:
        assert said.strip() == "079"


def test_the_image_on_the_command_line():
    line = next(line for line in TEXT.splitlines() if "--image" in line)
    assert (
        line
        == '$ nanoactor generate demo-vl --image examples/three-digits.png "read: " --temperature 0'
    )
    command = ["generate", "demo-vl", "--image", "examples/three-digits.png", "read: "]
    assert "079" in run([sys.executable, "-m", "nanoactor", *command, "--temperature", "0"])


def test_the_parameters_of_structured_outputs_are_parameters():
    page = (ROOT / "docs" / "structured_outputs.md").read_text()
    first, program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert run([sys.executable, "-c", first]).strip() in ("yes", "no")
    given = {"SamplingParams": SamplingParams, "SCHEMA": {"type": "object"}}
    exec(program, given)
    assert program.count("SamplingParams(max_tokens=None, ") == 5
