"""Work on a thread: in its order; whatever it raises is told, and nothing behind the end."""

import queue
import threading

import pytest

from nanoactor.runtime.native import NativePanic
from nanoactor.runtime.worker_thread import WorkerThread


class Panic(BaseException):
    """As of an extension in Rust."""


def panic():
    raise Panic("limit")


def test_results_and_whatever_is_raised_come_in_the_order_of_the_work():
    thread, told = WorkerThread("work"), queue.SimpleQueue()
    for work in (lambda: 1, panic, lambda: 1 / 0, lambda: 2):
        thread.put(work, told.put)
    found = [told.get(timeout=60) for _ in range(4)]
    assert (found[0], found[3]) == (1, 2), "a panic does not end the thread"
    assert isinstance(found[1], NativePanic)
    assert isinstance(found[2], ZeroDivisionError)
    thread.close()


def test_nothing_is_told_behind_the_end():
    thread, told = WorkerThread("work"), []
    begun, go_on = threading.Event(), threading.Event()
    thread.put(lambda: (begun.set(), go_on.wait(60)), told.append)
    thread.put(lambda: 2, told.append)
    assert begun.wait(60)
    threading.Timer(0.05, go_on.set).start()
    thread.close()
    assert not told


def test_a_thread_that_cannot_be_had_is_told(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        WorkerThread("work").put(lambda: 1, print)
