"""The device's time on the host's clock: differences are exact, drift is taken back."""

import time

import pytest

from nanoactor.runner.timing.clock import DeviceClock


class At:
    """An event at a time of the device, in ns."""

    def __init__(self, ns):
        self.ns = ns

    def milliseconds_until(self, later):
        return (later.ns - self.ns) * 1e-6


@pytest.fixture
def host(monkeypatch):
    class Host:
        now = 5_000_000

    monkeypatch.setattr(time, "monotonic_ns", lambda: Host.now)
    return Host


def play(clock, host, steps, drift=1.0, late=60_000):
    """Steps of a millisecond on the device, whose clock goes `drift` times as fast."""
    found = []
    for number in range(steps):
        begin, end = 1_000_000 * number, 1_000_000 * (number + 1)
        host.now = 5_000_000 + end + late
        found.append((clock.step(At(begin * drift), At(end * drift)), begin + 5_000_000))
    return found


def test_times_are_exact_without_drift(host):
    for (begin, end), expected in play(DeviceClock(At(0)), host, 1000):
        assert begin == pytest.approx(expected, abs=31_000)
        assert abs(end - begin - 1_000_000) <= 1


@pytest.mark.parametrize("drift", [1.00002, 0.99998])
def test_a_long_pause_makes_no_step_longer(host, drift):
    clock = DeviceClock(At(0))
    play(clock, host, 10, drift)
    pause = 600_000_000_000
    for number in range(600):
        begin = pause + 5_000_000 * number
        host.now = 5_000_000 + begin + 5_000_000 + 60_000
        found = clock.step(At(begin * drift), At((begin + 5_000_000) * drift))
        assert found[1] - found[0] == pytest.approx(5_000_000, rel=1e-4)
        assert abs(found[1] - (host.now - 60_000)) < 200_000


@pytest.mark.parametrize("drift", [1.0001, 0.9999])
def test_drift_does_not_add_up(host, drift):
    found = play(DeviceClock(At(0)), host, 20_000, drift)
    for (begin, _), expected in found[1000:]:
        assert abs(begin - expected) < 100_000
    uncorrected = abs(20_000 * 1_000_000 * (drift - 1))
    assert uncorrected > 1_000_000


def test_nothing_ends_after_the_host_has_seen_it(host):
    clock = DeviceClock(At(0))
    for (_, end), _ in play(clock, host, 500, drift=1.001, late=0):
        assert end <= host.now
