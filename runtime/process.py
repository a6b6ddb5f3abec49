"""The first steps of a child process, and its exit codes. This module imports as little as
possible, because every child imports it first."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from nanoactor.runtime.errors import UnsupportedPlatform

GROUP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""Signals that terminals and service managers send to every process of a group. Child processes
ignore them."""
EXIT_ORPHANED = 70
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def interpreter() -> str:
    """Return the path of the Python interpreter with which child processes are started.

    Raises `UnsupportedPlatform` if there is none, for example in a frozen program, where
    `sys.executable` would start the program itself again.
    """
    if getattr(sys, "frozen", False):
        raise UnsupportedPlatform(
            "this program is frozen into a bundle (by PyInstaller, for example), so there is "
            "no Python interpreter to start the engine's processes with; run it from a Python "
            "environment, or let it connect to a separate `nanoactor serve`"
        )
    if not sys.executable:
        raise UnsupportedPlatform(
            "sys.executable is empty, as in a program that embeds Python; before the engine "
            "starts, set it to the path of this environment's Python interpreter"
        )
    return sys.executable


def working_directory() -> str | None:
    """Return the working directory for a child process: None to inherit this process's directory,
    or "/" if that directory was deleted.

    A deployment that swaps directories may delete it, and some libraries exit if it does not exist.
    """
    try:
        os.getcwd()
    except OSError:
        return "/"
    return None


def ignore_group_signals() -> None:
    """Ignore the signals that are sent to the whole process group. Only the parent reacts to them,
    and may let the child finish its work."""
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)


def occupy_standard_descriptors() -> None:
    """Open /dev/null for each of the descriptors 0 to 2 that is closed.

    Without this, the next ring or socket could become descriptor 2, and text printed to standard
    error would be written into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def die_with_parent(parent: int, name: str) -> None:
    """Make the kernel kill this process when the parent's thread that started it ends, and set the
    process name to `na:` and the node's name.

    Exits with `EXIT_ORPHANED` if the parent, whose process id is `parent`, has already ended.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(_PR_SET_NAME, f"na:{name}"[:15].encode(), 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the call above took effect
        os._exit(EXIT_ORPHANED)
