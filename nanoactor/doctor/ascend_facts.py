"""Driver, device nodes and CANN, as files, the environment and npu-smi show them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from nanoactor.doctor.commands import Run
from nanoactor.doctor.files import below, children, first_match, text
from nanoactor.doctor.machine import CANN_LIBRARIES, MANAGERS, Ascend, Node, Smi

COMMAND_SECONDS = 10.0
_ASCEND = "/usr/local/Ascend"
_TOOLS = ("/usr/local/bin", "/usr/local/sbin")
_ILL = re.compile(r"\|\s*(Warning|Alarm|Critical|UNKNOWN)\s*\|", re.IGNORECASE)
_WELL = re.compile(r"\|\s*OK\s*\|")


def look_at_ascend(root: Path, environment: Mapping[str, str], run: Run) -> Ascend:
    """Read everything but what torch_npu says."""
    home = environment.get("ASCEND_HOME_PATH") or environment.get("ASCEND_TOOLKIT_HOME")
    opp = environment.get("ASCEND_OPP_PATH")
    named = [path for path in (home, opp) if path]
    npus = [f"/dev/{name}" for name in children(root / "dev", r"davinci\d+")]
    return Ascend(
        driver=_version(root, "driver"),
        firmware=_version(root, "firmware"),
        npus=tuple(_node(root, path) for path in npus),
        managers=tuple(_node(root, path) for path in MANAGERS),
        smi=_smi(root, environment, run),
        home=home,
        opp=opp,
        missing_directories=tuple(path for path in named if not below(root, path).is_dir()),
        missing_libraries=_missing_libraries(root, environment),
        cann=_cann_version(below(root, home)) if home else None,
        scripts=_scripts(root, environment),
    )


def _version(root: Path, what: str) -> str | None:
    """Of the driver or the firmware. None where the file is missing, "?" where it names none."""
    path = below(root, f"{_ASCEND}/{what}/version.info")
    if not path.is_file():
        return None
    said = text(path)
    package = first_match(said, r"(?i)^package_version\s*=\s*(.+)$")
    return package or first_match(said, r"(?i)^version\s*=\s*(.+)$") or "?"


def _node(root: Path, path: str) -> Node:
    # Not opened: that alone does something with a device.
    real = below(root, path)
    return Node(path, real.exists(), os.access(real, os.R_OK | os.W_OK))


def _smi(root: Path, environment: Mapping[str, str], run: Run) -> Smi | None:
    directories = [*environment.get("PATH", "").split(os.pathsep), *_TOOLS]
    tools = (below(root, f"{directory}/npu-smi") for directory in directories if directory)
    tool = next((path for path in tools if path.is_file()), None)
    if tool is None:
        return None
    outcome = run([str(tool), "info"], environment, COMMAND_SECONDS)
    lines = outcome.output.splitlines()
    ill = tuple(" ".join(line.strip("| ").split()) for line in lines if _ILL.search(line))
    return Smi(sum(bool(_WELL.search(line)) for line in lines), ill, outcome.trouble)


def _missing_libraries(root: Path, environment: Mapping[str, str]) -> tuple[str, ...]:
    paths = [path for path in environment.get("LD_LIBRARY_PATH", "").split(":") if path]
    return tuple(
        name
        for name in CANN_LIBRARIES
        if not any((below(root, path) / name).exists() for path in paths)
    )


def _cann_version(home: Path) -> str | None:
    """Packages differ in which of these files they have."""
    for directory in children(home, r".+-linux"):
        said = text(home / directory / "ascend_toolkit_install.info")
        if version := first_match(said, r"(?i)^version\s*=\s*(.+)$"):
            return version
    # Lines such as toolkit_running_version=[7.7.0.1:8.2.RC1]
    return first_match(text(home / "version.cfg"), r"_version\s*=\s*\[[^]\n]*?([^]:\n]+)\]")


def _scripts(root: Path, environment: Mapping[str, str]) -> tuple[str, ...]:
    homes = [_ASCEND]
    if user := environment.get("HOME"):
        homes.append(f"{user.rstrip('/')}/Ascend")
    found = []
    for home in homes:
        versions = children(below(root, home), r"cann-.+")
        for name in ("ascend-toolkit", "cann", *versions):
            script = f"{home}/{name}/set_env.sh"
            if below(root, script).is_file():
                found.append(script)
    return tuple(found)
