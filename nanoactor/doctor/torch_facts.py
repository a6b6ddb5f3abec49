"""Runs the probe and takes what it says."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoactor.doctor.commands import Run
from nanoactor.doctor.machine import Device, TorchFacts

PROBE_SECONDS = 60.0
"""torch alone may take half a minute to import from a cold disk, and each NPU some seconds."""
_PROBE = Path(__file__).with_name("probe.py")
_FIELDS = {field.name for field in dataclasses.fields(TorchFacts)}
_DEVICE_FIELDS = {field.name for field in dataclasses.fields(Device)}


def look_at_torch(environment: Mapping[str, str], run: Run) -> TorchFacts:
    """What the probe has said until its end, or until it was ended."""
    # -P: no module of this directory may stand in for another of the same name.
    command = [sys.executable, "-P", str(_PROBE)]
    quiet = {**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    outcome = run(command, quiet, PROBE_SECONDS)
    said: dict[str, Any] = {"cut_short": outcome.trouble}
    for line in outcome.output.splitlines():
        said |= _facts(line)
    for name in ("cuda_devices", "npu_devices"):
        said[name] = tuple(_device(device) for device in said.get(name, ()))
    return TorchFacts(**said)


def _facts(line: str) -> dict[str, Any]:
    """Libraries print as well: what is no object of ours is skipped."""
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    if not isinstance(said, dict):
        return {}
    return {name: value for name, value in said.items() if name in _FIELDS}


def _device(said: dict[str, Any]) -> Device:
    return Device(**{name: value for name, value in said.items() if name in _DEVICE_FIELDS})
