"""Who counts as stalled: time and CPU time are the test's own."""

import pytest

from nanoactor.runtime.stall import StallDetector

TIMEOUT = 10.0


class Played:
    """A detector over nodes `a` and `b` that are asked once a second."""

    def __init__(self):
        self.detector = StallDetector(("a", "b"), TIMEOUT)
        self.now = 100.0
        self.cpu = dict.fromkeys("ab", 0.0)
        self.stall = None
        self.detector.tick(self.now, dict(self.cpu))

    def ticks(self, count, answer="ab", seconds=1.0, progress=None, **cpu):
        for _ in range(count):
            self.now += seconds
            for node, used in cpu.items():
                self.cpu[node] += used
            for node in answer:
                self.detector.record_reply(node, (progress or {}).get(node, {}))
            self.stall = self.stall or self.detector.tick(self.now, dict(self.cpu))
        return self.stall


def test_nodes_that_answer_never_stall():
    assert Played().ticks(1000) is None


def test_a_silent_node_is_named_before_the_timeout_and_not_long_before():
    played = Played()
    assert played.ticks(6, answer="a") is None
    stall = played.ticks(3, answer="a")
    assert stall.node == "b"
    assert "has not answered for" in stall.symptom


def test_who_has_been_silent_for_longer_is_the_culprit():
    played = Played()
    played.ticks(2, answer="b")
    assert played.ticks(8, answer="").node == "a"


def test_an_answer_begins_the_silence_anew():
    played = Played()
    for _ in range(20):
        assert played.ticks(6, answer="a") is None
        assert played.ticks(1) is None


@pytest.mark.parametrize("pause", [TIMEOUT, 3600.0])
def test_a_pause_of_the_watcher_itself_is_nobodys_fault(pause):
    """Ctrl-Z of the whole group, a suspended machine, a user's program that blocks the loop."""
    played = Played()
    for _ in range(50):
        assert played.ticks(1, answer="", seconds=pause) is None
        assert played.ticks(1) is None


def test_a_node_that_computes_has_ten_times_as_long():
    played = Played()
    assert played.ticks(60, answer="a", b=0.9) is None
    assert played.ticks(20, answer="a", b=0.9).node == "b"


def test_a_node_that_computed_and_then_sleeps_stalls():
    played = Played()
    assert played.ticks(20, answer="a", b=0.9) is None
    assert played.ticks(8, answer="a").node == "b"


def test_work_that_outlasts_what_its_actor_expects_is_a_stall():
    played = Played()
    told = {"b": {"runner": (7, 20.0)}}
    assert played.ticks(26, progress=told) is None
    stall = played.ticks(3, progress=told)
    assert stall.node == "b"
    assert "actor runner has worked on the same task" in stall.symptom


def test_work_that_moves_on_is_none():
    played = Played()
    for step in range(100):
        assert played.ticks(6, progress={"b": {"runner": (step, 0.0)}}) is None


def test_work_that_was_done_meanwhile_is_none():
    played = Played()
    assert played.ticks(6, progress={"b": {"runner": (7, 0.0)}}) is None
    assert played.ticks(6, progress={"b": {}}) is None
    assert played.ticks(6, progress={"b": {"runner": (7, 0.0)}}) is None


def test_what_a_silent_node_told_before_is_not_held_against_it():
    played = Played()
    played.ticks(1, progress={"b": {"runner": (7, 0.0)}})
    assert played.ticks(60, answer="a", b=0.9) is None


def test_rest_forgets():
    played = Played()
    played.ticks(6, answer="a", progress={"a": {"runner": (7, 0.0)}})
    played.detector.reset()
    assert played.ticks(6, answer="a") is None


@pytest.mark.parametrize(
    ("own", "share", "stalls"), [(True, 1.0, False), (True, 0.0, True), (False, 1.0, True)]
)
def test_work_that_the_processor_does_has_the_patience_of_silence(own, share, stalls):
    """A compilation that a step waits for, say; what another device does takes no time of it."""
    played = Played()
    told = {"b": {"runner": (7, 0.0, own)}}
    assert bool(played.ticks(40, progress=told, b=share)) == stalls
    assert bool(played.ticks(60, progress=told, b=share)), "ten times as long, and not for ever"
