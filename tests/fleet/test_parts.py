"""Parts of requests: which of them run, and which wait for which replicas."""

from types import SimpleNamespace

from nanoactor.fleet import wire
from nanoactor.fleet.part_queue import PartQueue
from nanoactor.fleet.replica import Replica
from nanoactor.fleet.routing import Router
from nanoactor.fleet.streams import Streams


class Link:
    """A link that keeps what is sent."""

    def __init__(self, name):
        self.replica, self.is_leaving, self.is_closed, self.sent = name, False, False, []

    def send(self, order):
        self.sent.append(order)


def replica(name, waiting=8):
    return Replica(Link(name), wire.Hello("same", {"block_size": 16, "num_blocks": 99}, 1, waiting))


class Part:
    """A part of a request of its own."""

    def __init__(self, uid, is_moved=False):
        self.request = SimpleNamespace(uid=uid, priority=0, block_keys=(), tokens_sent=0)
        self.is_moved, self.tokens, self.fingerprint, self.refused_by = is_moved, 16, "", set()


def test_a_stream_ends_once():
    streams, one, part = Streams(), replica("one"), Part(0)
    numbers = [streams.new_number(), streams.new_number()]
    assert numbers == [1, 2]
    streams.add(part, one, 2)
    assert one.parts == {2: part}
    assert len(streams) == 1
    assert streams.end(one, 1) is None
    assert streams.end(one, 2) is part
    assert streams.end(one, 2) is None
    assert streams.abort(part) is None
    assert not one.parts
    assert not streams
    assert not one.link.sent


def test_an_abort_reaches_the_replica_that_runs_it():
    streams, one, other, part = Streams(), replica("one"), replica("other"), Part(0)
    streams.add(Part(1), other, 7)
    streams.add(part, one, 7)
    assert streams.abort(part) is one
    assert one.link.sent == [wire.Abort(7)]
    assert not other.link.sent
    assert len(streams) == 1


def queue_of(*names):
    """(a queue, its replicas, and what it has begun)."""
    replicas, begun = {name: replica(name) for name in names}, []

    def begin(part, replica, *, is_alone=False):
        begun.append((part, replica.name, is_alone))

    return PartQueue(Router(), replicas, begin), replicas, begun


def test_who_is_refused_everywhere_waits_no_more():
    queue, replicas, begun = queue_of("a", "b")
    part, moved = Part(0), Part(1, is_moved=True)
    assert queue.add_refused(part, replicas["a"])
    queue.advance()
    assert begun == [(part, "b", False)]
    assert not queue.add_refused(part, replicas["b"])
    assert queue.waiting == 0
    for name in "ab":  # it ran before, so it waits for room
        assert queue.add_refused(moved, replicas[name])
    assert queue.waiting == 1


def test_a_suspect_runs_alone_on_a_replica_that_gets_nothing_else():
    queue, replicas, begun = queue_of("a", "b")
    suspect, other = Part(0), Part(1)
    for _ in range(2):  # it was there at two deaths
        dying = replica("dying")
        dying.parts[1] = suspect
        queue.trials.note_death(dying)
    queue.add(suspect)
    queue.advance()
    (reserved,) = (one for one in replicas.values() if one.link.sent)
    assert reserved.link.sent == [wire.Reserve(is_wanted=True)]
    assert reserved not in [*queue.usable_replicas()]
    queue.add(other)
    queue.advance()
    assert begun == [(other, "b" if reserved.name == "a" else "a", False)]
    queue.trials.on_report(reserved, is_vacant=True)
    assert begun[1:] == [(suspect, reserved.name, True)]
    assert queue.waiting == 0


def test_a_closed_queue_begins_nothing():
    queue, _, begun = queue_of("a")
    queue.add(Part(0))
    queue.close()
    queue.advance()
    assert queue.waiting == 1
    assert not begun
