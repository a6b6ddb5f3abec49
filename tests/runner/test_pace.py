"""When steps are asked for, and how long a device is busy."""

import pytest

from nanoactor.runner.timing.pace import DeviceTime, StepRequests


def test_a_step_is_asked_for_once_and_not_when_it_is_here():
    requests = StepRequests()
    assert requests.request(3, received=2, now=1.0)
    assert not requests.request(3, received=2, now=1.1)
    assert not requests.request(4, received=4, now=1.2)
    requests.reset()
    assert requests.request(3, received=2, now=1.3)


def test_it_is_asked_for_so_early_that_it_is_prepared_before_the_device_is_free():
    requests, step = StepRequests(), 1
    for step in range(1, 100):
        requests.request(step, step - 1, now=float(step))
        requests.note_prepared(step, now=step + 0.004)
        requests.note_prepared(step + 1, now=step + 9.0)  # was not asked for
        requests.note_done(0.020)
    assert requests.delay == pytest.approx(0.020 - 0.004 - 0.0005, rel=1e-3)


def test_a_device_is_idle_between_its_steps_but_not_before_the_first():
    time = DeviceTime()
    time.note(100, 130)
    time.note(140, 150)
    time.note(150, 160)
    assert (time.busy, time.idle, time.free_at) == (50, 10, 160)
