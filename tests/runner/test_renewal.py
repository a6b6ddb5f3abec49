"""A renewal does not wait for a device's thread that has failed."""

import threading
from types import SimpleNamespace

import pytest

from nanoactor.actors.runner import RunnerActor


class Context:
    """Takes what a thread hands to the loop, which a cut has retired, and does nothing with it."""

    def fail(self, error):
        raise AssertionError("the loop is retired")

    def call_soon(self, function, *arguments):
        pass


def broken(asynchronous):
    def launch(inputs):
        raise RuntimeError("CUDA error")

    actor = RunnerActor(SimpleNamespace(rank=0, engine=SimpleNamespace(plan_lead="eager")))
    actor.context = Context()
    executor = SimpleNamespace(
        asynchronous=asynchronous, launch=launch, reset=lambda: None, uncaptured=0
    )
    actor._executor = executor
    return actor, executor


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_devices_thread_has_failed(asynchronous):
    actor, executor = broken(asynchronous)
    actor._report_begin = lambda step: None
    assert not actor._launch_step(executor, 1, None)
    with pytest.raises(RuntimeError, match="CUDA error"):
        actor.reset()


def test_the_thread_that_collects_has_failed():
    """The device's own thread waits for it then, and must not for ever."""
    actor, executor = broken(asynchronous=True)

    def wait():
        raise RuntimeError("CUDA error")

    assert not actor._report_done(1, SimpleNamespace(wait=wait))
    serving = threading.Thread(target=actor._launch, args=(executor,), daemon=True)
    serving.start()
    with pytest.raises(RuntimeError, match="CUDA error"):
        actor.reset()
    actor._prepared.put(None)
    serving.join(60)
    assert not serving.is_alive()


def test_pixels_and_masks_from_before_are_forgotten():
    actor, _ = broken(asynchronous=True)
    actor._pixels.note_absent(7)
    masks = actor._masks
    actor._reset_steps()
    assert len(actor._pixels) == 0
    assert actor._masks is not masks
