"""The README's examples run as they are written."""

import json
import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(kind):
    section = README.partition("### As a server")[2].partition("\n### ")[0]
    return re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL)


def test_curl(demo_server):
    command = next(block for block in blocks("console") if "curl" in block).removeprefix("$ ")
    command = command.replace("http://127.0.0.1:8000", demo_server.url)
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=True, timeout=60)
    message = json.loads(done.stdout)["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert message["content"]


def test_openai(demo_server, tmp_path):
    (program,) = blocks("python")
    assert "http://127.0.0.1:8000" in program
    path = tmp_path / "example.py"
    path.write_text(program.replace("http://127.0.0.1:8000", demo_server.url))
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip()
    assert done.stderr == ""
