"""Programs that check the files in examples/deploy, and readings of those files."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanoactor import EngineConfig, cli
from nanoactor.cli.options import given_values
from nanoactor.server.config import ServerConfig
from tests.product_files import ROOT

DEPLOY = ROOT / "examples" / "deploy"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
EXTRA = "pip install 'nanoactor[deploy]'"
EXIT_SECONDS = 10
"""What processes get to exit once requests have drained."""


def find(name: str) -> str | None:
    """Return the path of a program, from this environment or from PATH."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def needs(name: str, source: str = EXTRA) -> pytest.MarkDecorator:
    """Return a mark that skips a test on machines without a program."""
    return pytest.mark.skipif(find(name) is None, reason=f"{name} is not installed ({source})")


def run(name: str, *arguments: object, **options: Any) -> str:
    """Run a program and return its output. Fails with all that it said, if it fails."""
    program = find(name)
    assert program is not None
    command = [program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def served(arguments: list[str]) -> tuple[EngineConfig, ServerConfig]:
    """Return the options that `nanoactor` reads from a command line, as `serve` does."""
    assert arguments[0] == "serve"
    args = cli._parse(arguments)
    engine = EngineConfig(args.model, **given_values(args, EngineConfig))
    return engine, ServerConfig(**given_values(args, ServerConfig))


def seconds(text: str) -> float:
    """Return a duration such as "45s", "30min" or "1m30s" in seconds."""
    units = {"s": 1, "m": 60, "min": 60, "h": 3600}
    parts = re.findall(r"(\d+)(min|[smh])", text)
    assert "".join(number + unit for number, unit in parts) == text, text
    return sum(int(number) * units[unit] for number, unit in parts)


def image_environment() -> dict[str, str]:
    """Return the variables that all targets of the Dockerfile set."""
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text())
    stage = text.partition(" AS runtime\n")[2].partition("\nFROM ")[0]
    (line,) = re.findall(r"^ENV (.*)$", stage, re.MULTILINE)
    return dict(pair.split("=", 1) for pair in line.split())


def image_user() -> int:
    """Return the number of the images' user."""
    (number,) = set(re.findall(r"^USER (\d+):\d+$", DOCKERFILE.read_text(), re.MULTILINE)) - {"0"}
    return int(number)


def written_folders() -> list[str]:
    """Return the folders that the server writes to, in the images."""
    environment = image_environment()
    paths = [value for value in environment.values() if value.startswith(("/var", "/models"))]
    assert "/var/cache/nanoactor" in paths
    assert environment["HF_HOME"] in paths
    return [*paths, "/tmp"]


def is_within(path: str, folders: list[str]) -> bool:
    """Whether a path is one of these folders or in one of them."""
    return any(path == one or path.startswith(f"{one}/") for one in folders)
