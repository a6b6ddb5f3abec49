"""The scripted model, as a process of its own."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".clients" / "node_modules" / ".bin"


@pytest.fixture(scope="session")
def url(tmp_path_factory):
    """Where it listens."""
    model = tmp_path_factory.mktemp("scripted") / "model"
    command = [sys.executable, "-m", "tests.clients.scripted_model", str(model), "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield re.search(r"http://\S+", process.stdout.readline())[0]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        process.stdout.close()


@pytest.fixture
def run(url, tmp_path):
    """Runs a program of `.clients` with a home and a folder of its own; returns what it writes."""

    def ran(*command, **environment):
        if not (BIN / command[0]).exists():
            pytest.skip(f"{command[0]} is not installed: make test-clients")
        folder, home = tmp_path / "work", tmp_path / "home"
        folder.mkdir(exist_ok=True)
        home.mkdir(exist_ok=True)
        (folder / "README.md").write_text("A folder.\n")
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            [str(BIN / command[0]), *command[1:]],
            cwd=folder,
            env={"HOME": str(home), "PATH": path, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    return ran
