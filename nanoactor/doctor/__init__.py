"""`nanoactor doctor`: diagnose this machine and print fixes.

A check is a function that takes a `Machine`, reads what it needs, and yields its findings.
"""

from nanoactor.doctor import ascend, checks
from nanoactor.doctor.finding import Finding
from nanoactor.doctor.machine import Machine

__all__ = ["Finding", "Machine", "examine"]


def examine(machine: Machine) -> list[Finding]:
    """Run all checks and return their findings; the checks on which others depend come first."""
    software = (checks.python, checks.torch, ascend.npu, checks.gpu, checks.visible_devices)
    host = (checks.network, checks.rings, checks.limits, checks.numa, checks.cpu)
    return [finding for check in (*software, *host) for finding in check(machine)]
