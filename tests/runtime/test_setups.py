"""A set-up that raises in the background is a typed failure with its reason, and not a time-out."""

import asyncio
import pickle
import threading

import pytest

from nanoactor.runtime import children as children_module
from nanoactor.runtime import control
from nanoactor.runtime.errors import RuntimeFault, StartupFailed
from nanoactor.runtime.system import System
from nanoactor.runtime.wiring import Options
from tests.conftest import children, descriptors
from tests.runtime.test_system import Running, topology

LONG = 600.0
"""Seconds of the start's limit, for which nothing may wait."""


def start(shape=None):
    """Start a system that cannot; returns the error. It is closed, and nothing is left."""

    async def main():
        system = System(shape or topology(), Options(start_timeout=LONG), lambda error: None)
        try:
            await asyncio.wait_for(system.start(), 60)
        except TimeoutError:
            return "waited for the limit"
        except RuntimeFault as error:
            return error
        finally:
            await asyncio.wait_for(system.close(), 60)
        return None

    before = descriptors()
    found = asyncio.run(main())
    assert not children()
    assert descriptors() <= before
    return found


def test_a_supervisor_that_cannot_start(monkeypatch):
    begin = threading.Thread.start

    def refuse(thread):
        if thread.name == "nanoactor-supervisor":
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    error = start()
    assert isinstance(error, StartupFailed)
    assert "can't start new thread" in str(error)


class Unpicklable:
    """As a configuration: a plan with it cannot be sent."""

    def __reduce__(self):
        raise pickle.PicklingError("of this there is no copy")


def test_a_plan_that_cannot_be_sent():
    error = start(topology(config=Unpicklable()))
    assert isinstance(error, StartupFailed)
    assert "of this there is no copy" in str(error)


def test_a_word_of_a_child_that_cannot_be_read(monkeypatch):
    def fail(self, child):
        raise pickle.UnpicklingError("not in this language")

    monkeypatch.setattr(children_module.Children, "_receive", fail)
    error = start()
    assert isinstance(error, StartupFailed)
    assert "not in this language" in str(error)


class Secretive(Exception):
    """It may be pickled, and cannot be made again; nor can it say what it is."""

    picklable = True

    def __init__(self, one, two):
        super().__init__()

    def __str__(self):
        raise ValueError("no words")


def test_an_error_that_cannot_be_sent_or_read_is_told_by_its_class():
    failed = control.Failed.of("adder", Secretive(1, 2))
    assert failed.original() is None
    assert "adder failed: Secretive" in failed.summary


def test_a_look_of_the_watchdog_that_fails_is_not_its_last(monkeypatch, caplog):
    looks = []

    def cpu_seconds(self):
        looks.append(self.name)
        if len(looks) == 1:
            raise OSError(24, "Too many open files")
        return 0.0

    monkeypatch.setattr(children_module.ChildProcess, "cpu_seconds", cpu_seconds)

    async def main():
        async with Running(stall_timeout=1.0) as running:
            await running.until(lambda: len(looks) > 3)

    asyncio.run(main())
    assert "could not be inspected" in caplog.text


@pytest.mark.parametrize("where", ["glob", "read"])
def test_no_descriptor_for_a_look_at_children(monkeypatch, where):
    class Path:
        def __init__(self, text):
            self.text = text

        def glob(self, pattern):
            if where == "glob":
                raise OSError(24, "Too many open files")
            return [self]

        def read_text(self):
            raise OSError(24, "Too many open files")

    monkeypatch.setattr(children_module, "Path", Path)
    assert children_module._children_of(1) == []
