"""A replica that starts leaves cores to others, and has them all once it serves."""

import os
import subprocess
import sys

import pytest

from nanoactor.ray_serve.starting import restricted_to_half_of_cores
from nanoactor.runner.timing.threads import usable_cores

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
ASKS = "import sys; sys.stdin.read()"


def cores_of(pid):
    return {frozenset(os.sched_getaffinity(int(task))) for task in os.listdir(f"/proc/{pid}/task")}


def test_a_start_takes_half_of_the_cores_and_gives_them_back():
    before, threads = os.sched_getaffinity(0), usable_cores()
    with restricted_to_half_of_cores():
        half = os.sched_getaffinity(0)
        assert 1 <= len(half) <= len(before) // 2
        assert usable_cores() == threads, "runners count all of them"
        child = subprocess.Popen([sys.executable, "-c", ASKS], stdin=subprocess.PIPE)
        assert cores_of(child.pid) == {frozenset(half)}
    try:
        assert cores_of(child.pid) == cores_of(os.getpid()) == {frozenset(before)}
        assert "NANOACTOR_CORES" not in os.environ
    finally:
        child.communicate(b"")


def test_a_start_that_fails_gives_them_back_too():
    before = os.sched_getaffinity(0)
    with pytest.raises(ValueError, match="no"), restricted_to_half_of_cores():
        raise ValueError("no")
    assert os.sched_getaffinity(0) == before
