"""One file for each kind of device."""

from __future__ import annotations

from nanoactor.models.device import Device
from nanoactor.models.errors import UnsupportedModel

KNOWN = ("cpu",)


def open_device(name: str) -> Device:
    """The device of this name; `UnsupportedModel` with the list of known ones otherwise."""
    if name == "cpu":
        from nanoactor.models.devices.cpu import CPUDevice

        return CPUDevice()
    raise UnsupportedModel(f"device {name!r} is not supported; known are {', '.join(KNOWN)}")
