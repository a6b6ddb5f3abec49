"""Shared by all tests: stacks on a hang, no network, a watch for what is left behind."""

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
import time
import zlib
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import settings

from nanoactor.runtime.recovery import DIED
from tests.commit import commit_number

os.environ["HF_HUB_OFFLINE"] = "1"
# Read when PyTorch is loaded: its threads sleep while they wait, as those of an engine's processes.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# A shell's background job ignores SIGINT, one of nohup SIGHUP, and so would every process that a
# test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if sys.stderr is not None:  # a test's own program may have closed it
    faulthandler.enable()
# A busy machine is no counterexample; and CI tries the same examples each time.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_configure(config):
    """A machine with a GPU runs the same suite as one without, but for `-m gpu`.

    The kernels' tests then run in Triton's interpreter, which is chosen at its first import.
    """
    if "gpu" not in config.option.markexpr or "not gpu" in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(tryfirst=True)
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Draw the commit's share of the tests that are marked `drawn`; the others become `long`."""
    number = commit_number()
    for item in items:
        mark = item.get_closest_marker("drawn")
        if mark is not None and zlib.crc32(f"{number} {item.nodeid}".encode()) % mark.args[0]:
            item.add_marker(pytest.mark.long)


def pytest_runtest_setup():
    """PyTorch's threads wait for each other, which takes forever where others use the cores.

    Before each test and its fixtures, as a test that computes on two threads leaves two behind.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


class _Deaths(logging.Handler):
    """Collects what is said of processes that have died and are replaced."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.told = []

    def emit(self, record):
        if record.msg == DIED:
            self.told.append(record.getMessage())


@pytest.fixture(autouse=True)
def nobody_dies(request):
    """A crash that the engine makes good is still a crash."""
    deaths, log = _Deaths(), logging.getLogger("nanoactor.system")
    log.addHandler(deaths)
    try:
        yield
    finally:
        log.removeHandler(deaths)
    if "deadly" not in request.keywords:
        assert not deaths.told, deaths.told


_CRASHED: list[str] = []


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem):
    """A worker of xdist is gone, with the test that it ran."""
    _CRASHED.append(crashitem)


def pytest_sessionfinish(session):
    """A crash is no mere failure."""
    if _CRASHED:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


_OTHERS: set[int] = set()
"""Children that were there before the test: a fixture of the session owns them."""


def children() -> set[int]:
    """Process ids of the living children that the test has brought about."""
    return _children() - _OTHERS


def _children() -> set[int]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found |= {int(pid) for pid in (task / "children").read_text().split()}
        except OSError:
            continue
    return {pid for pid in found if state(pid) not in ("", "Z")}


def survivors(pids: Iterable[int], seconds: float = 10.0) -> list[int]:
    """Which of these processes are still there after so long."""
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if state(pid) not in ("", "Z")]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return left


def state(pid: int) -> str:
    """A process's state letter; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def descriptors() -> int:
    """How many file descriptors this process has open."""
    return len(os.listdir("/proc/self/fd")) - 1


def check_descriptors(before: int) -> None:
    """No more are open than before, once what no longer lives is collected and threads that close
    some have had their time."""
    deadline = time.monotonic() + 60
    while descriptors() > before:
        gc.collect()
        numbers = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        opened = sorted(os.readlink(path) for path in numbers if os.path.islink(path))
        assert time.monotonic() < deadline, "\n".join(opened)
        time.sleep(0.02)


def strangers() -> bool:
    """Whether other Python programs run on this machine, which may use /dev/shm as they like."""
    ours = os.getsid(0)
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                command = (process / "cmdline").read_bytes()
                if os.getsid(int(process.name)) != ours and b"python" in command:
                    return True
    return False


@pytest.fixture(autouse=True)
def others():
    """Whose children there are already: fixtures of a wider scope are set up first."""
    _OTHERS.clear()
    _OTHERS.update(_children())


@pytest.fixture(autouse=True)
def nothing_in_shared_memory():
    """Each test leaves /dev/shm as it found it; what a stranger leaves there nobody can tell."""
    before = set(os.listdir("/dev/shm"))
    yield
    deadline = time.monotonic() + 5
    while (left := set(os.listdir("/dev/shm")) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left or strangers()
