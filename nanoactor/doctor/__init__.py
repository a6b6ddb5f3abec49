"""`nanoactor doctor`: diagnoses this machine and suggests fixes.

A check is a function that inspects a `Machine` and yields findings.
"""

from nanoactor.doctor import ascend, checks
from nanoactor.doctor.finding import Finding
from nanoactor.doctor.machine import Machine

__all__ = ["Finding", "Machine", "examine"]


def examine(machine: Machine) -> list[Finding]:
    """Run all checks and return their findings. Checks on which others depend come first."""
    software = (checks.python, checks.torch, ascend.npu, checks.gpu, checks.visible_devices)
    host = (checks.network, checks.rings, checks.limits, checks.numa, checks.cpu)
    return [finding for check in (*software, *host) for finding in check(machine)]
