"""Access to the machine for checks: its files, its environment, and programs that may hang or
crash."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import Any

# By PCI vendor and class: accelerators and displays, but no audio and switch devices of a GPU.
_PCI_KINDS = {("0x19e5", "0x12"): "NPU", ("0x10de", "0x03"): "GPU"}
Run = Callable[[Sequence[str], Mapping[str, str], float], tuple[str, str]]


def run_command(command: Sequence[str], env: Mapping[str, str], seconds: float) -> tuple[str, str]:
    """Run a program for at most `seconds` seconds. Return its output, and an error text, which is
    empty if it exited with status 0."""
    try:
        process = Popen(  # noqa: S603
            command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=env, start_new_session=True
        )
    except OSError as error:
        return "", f"cannot be run: {error.strerror}"
    try:
        output, errors = process.communicate(timeout=seconds)
    except TimeoutExpired as timeout:
        return (timeout.output or b"").decode(errors="replace"), f"no answer within {seconds:g} s"
    finally:  # a process stuck in a driver stays alive
        with contextlib.suppress(OSError, TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=1.0)
    status, last_line = process.returncode, errors.decode(errors="replace").strip().split("\n")[-1]
    description = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
    return output.decode(errors="replace"), f"{description}: {last_line}".rstrip(
        ": "
    ) if status else ""


@dataclasses.dataclass(frozen=True)
class Machine:
    """The machine to check: this one, or a simulated one in tests. Nothing raises an error;
    whatever cannot be read is empty."""

    root: Path = Path("/")
    environment: Mapping[str, str] = dataclasses.field(default_factory=lambda: os.environ)
    run: Run = run_command
    python: tuple[int, ...] = sys.version_info[:3]

    def path(self, path: str) -> Path:
        """Return the location of an absolute path below `root`."""
        return self.root / path.lstrip("/")

    def files(self, pattern: str) -> list[str]:
        """Return the absolute paths that match a shell pattern, shorter paths first, so that
        `node10` follows `node9`."""
        paths = glob.glob(pattern.lstrip("/"), root_dir=self.root)
        return sorted((f"/{path}" for path in paths), key=lambda path: (len(path), path))

    def match(self, pattern: str, *paths: str) -> str:
        """Search files for a regular expression. Return its first group in the first file that
        matches, or an empty string."""
        for path in paths:
            with contextlib.suppress(OSError):
                text = self.path(path).read_text(errors="replace").strip()
                if match := re.search(pattern, text, re.MULTILINE | re.IGNORECASE):
                    return match[1].strip()
        return ""

    @functools.cached_property
    def probe(self) -> dict[str, Any]:
        """Report of `probe.py` about torch and the devices. "cut_short" is the reason why the
        report is incomplete, or empty."""
        # -P keeps modules in this directory from shadowing other modules of the same name.
        command = [sys.executable, "-P", str(Path(__file__).with_name("probe.py"))]
        environment = {**self.environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        # Importing torch from a cold disk can take half a minute, and each NPU takes some seconds.
        output, trouble = self.run(command, environment, 60.0)
        report: dict[str, Any] = {"cut_short": trouble}
        for line in output.splitlines():
            with contextlib.suppress(ValueError):  # libraries print other lines
                fact = json.loads(line)
                report |= fact if isinstance(fact, dict) else {}
        return report

    @functools.cached_property
    def pci(self) -> list[tuple[str, str, str]]:
        """Accelerators on the PCI bus, as (kind, PCI address, NUMA node). The kind is "NPU" or
        "GPU"; an unknown node is "?"."""
        devices = []
        for path in self.files("/sys/bus/pci/devices/*"):
            vendor, code = (self.match(r"(\w+)", f"{path}/{name}") for name in ("vendor", "class"))
            if kind := _PCI_KINDS.get((vendor, code[:4])):
                node = self.match(r"^(\d+)", f"{path}/numa_node") or "?"
                devices.append((kind, os.path.basename(path), node))
        return devices

    @functools.cached_property
    def expects_npu(self) -> bool:
        """True if an NPU is expected on this machine.

        Installed software is sufficient, because a container that was started without its devices
        has nothing else. The PCI bus is not considered, because a container sees the host's devices
        there.
        """
        files = map(self.files, ("/dev/davinci[0-9]*", "/usr/local/Ascend/driver/version.info"))
        software = self.cann_scripts or self.environment.get("ASCEND_HOME_PATH")
        return bool(any(files) or software or self.probe.get("torch_npu"))

    @property
    def cann_scripts(self) -> list[str]:
        """Paths of all CANN scripts named set_env.sh, with the usual location first."""
        homes = ("/usr/local/Ascend", f"{self.environment.get('HOME', '')}/Ascend")
        names = ("ascend-toolkit", "cann", "cann-*")
        patterns = [f"{home}/{name}/set_env.sh" for home in homes for name in names]
        return [script for pattern in patterns for script in self.files(pattern)]

    @functools.cached_property
    def has_gpu(self) -> bool:
        """True if there is an NVIDIA GPU, according to device files, the PCI bus or torch."""
        files = map(self.files, ("/dev/nvidia[0-9]*", "/proc/driver/nvidia/version"))
        on_bus = any(kind == "GPU" for kind, _, _ in self.pci)
        return any(files) or on_bus or bool(self.probe.get("gpus"))
