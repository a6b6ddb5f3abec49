"""A renewal does not wait for a device's thread that has failed."""

import threading
from types import SimpleNamespace

import pytest

from nanoactor.actors.device_threads import DeviceThreads
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

    threads = DeviceThreads(None, on_done=None)
    threads.context = Context()
    threads._executor = SimpleNamespace(
        asynchronous=asynchronous, launch=launch, reset=lambda: None
    )
    return threads


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_devices_thread_has_failed(asynchronous):
    threads = broken(asynchronous)
    assert not threads.launch(1, None, yields_first_token=False)
    with pytest.raises(RuntimeError, match="CUDA error"):
        threads.reset()


def test_the_thread_that_collects_has_failed():
    """The device's own thread waits for it then, and must not for ever."""
    threads = broken(asynchronous=True)

    def wait():
        raise RuntimeError("CUDA error")

    assert not threads._report_done(1, SimpleNamespace(wait=wait), False)
    serving = threading.Thread(target=threads._run, daemon=True)
    serving.start()
    with pytest.raises(RuntimeError, match="CUDA error"):
        threads.reset()
    threads.stop()
    serving.join(60)
    assert not serving.is_alive()


def test_pixels_and_masks_from_before_are_forgotten():
    actor = RunnerActor(SimpleNamespace(rank=0, engine=SimpleNamespace(plan_lead="eager")))
    actor._side_inputs.pixels.note_absent(7)
    masks = actor._side_inputs.masks
    actor._reset_steps()
    assert len(actor._side_inputs.pixels) == 0
    assert actor._side_inputs.masks is not masks
