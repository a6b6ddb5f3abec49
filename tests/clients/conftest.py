"""The scripted model, as a process of its own."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.scripted_process import scripted_server

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".clients" / "node_modules" / ".bin"


@pytest.fixture(scope="session")
def url(tmp_path_factory):
    """Where it listens."""
    with scripted_server(tmp_path_factory.mktemp("scripted") / "model") as url:
        yield url


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
