"""The clock measures from the end of the step before: its buffers rest until then."""

from types import SimpleNamespace

import torch

from nanoactor.models.devices.portable import HostEvent
from nanoactor.runner.steps.step_buffers import BufferPool


def test_buffers_are_used_again_when_the_next_step_is_collected():
    device = SimpleNamespace(
        timed_event=HostEvent,
        empty_pinned=lambda *shape, dtype: torch.empty(shape, dtype=dtype),
        traits=SimpleNamespace(asynchronous=True),
    )
    pool = BufferPool(device, rows=4)

    def run():
        buffers = pool.take()
        buffers.begin.record()
        buffers.update = SimpleNamespace(counts=None, encoding=None, order=None)
        buffers.end.record()
        return buffers

    first, second = run(), run()
    assert second is not first
    pool.collect(first)
    third = run()
    assert third is not first, "the clock still needs its end"
    pool.collect(second)
    assert run() is first
    pool.collect(third)
    assert run() is second
