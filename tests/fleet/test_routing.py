"""Which replica a request goes to, and what is known of their caches."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nanoactor.fleet.dispatch import Dispatch
from nanoactor.fleet.prefix_map import PrefixMap, block_keys
from nanoactor.fleet.routing import ReplicaState, Router
from nanoactor.fleet.wire import Hello, IndexUpdate, Load
from nanoactor.kv.hashing import block_hashes
from nanoactor.kv.index_changes import IndexChanges, IndexCopy
from tests.growth import growth

SALT, BLOCK = bytes(32), 16


def chain(*tokens):
    """Hashes of blocks that hold these, one each."""
    ids = np.repeat(np.array(tokens, np.int32), BLOCK)
    return block_hashes(ids, BLOCK, SALT).tobytes()


def place(name, router=None, known=b"", **load):
    hello = Hello("same", {"block_size": BLOCK, "num_blocks": 1000}, 8, 8)
    found = ReplicaState(name, hello)
    values = dict(running=0, waiting=0, waiting_tokens=0, free_blocks=1000, streams=0)
    values |= dict(token_seconds=1e-3, is_reserved=False)
    found.update_load(Load(**{**values, **load}), 0)
    if router is not None and known:
        router.prefixes.apply(name, IndexUpdate(False, b"", known), 0.0)
    return found


def test_a_prompt_goes_where_its_beginning_is():
    router = Router()
    prompt = chain(1, 2, 3, 4)
    places = [place("a", router, chain(1)), place("b", router, chain(1, 2, 3)), place("c")]
    for _ in range(5):
        assert router.choose(places, block_keys(prompt), 70, 0.0).name == "b"


def test_a_hot_replica_is_left_when_waiting_costs_more_than_computing():
    router = Router()
    prompt = block_keys(chain(*range(20)))
    hot = place("hot", router, chain(*range(20)), waiting_tokens=100)
    cold = place("cold")
    assert router.choose([hot, cold], prompt, 330, 0.0).name == "hot"
    hot = place("hot", waiting_tokens=400)
    assert router.choose([hot, cold], prompt, 330, 0.0).name == "cold"
    # ... and so is one that has no place to run.
    hot = place("hot", streams=8, running=8)
    assert router.choose([hot, cold], prompt, 330, 0.0).name == "cold"


def test_a_new_conversation_goes_where_the_cache_is_least_in_use():
    router = Router()
    used = place("used", router, b"".join(chain(*range(at, at + 5)) for at in range(0, 400, 5)))
    fresh = place("fresh", streams=1, running=1)
    assert router.choose([used, fresh], block_keys(chain(900, 901)), 40, 1.0).name == "fresh"
    # What was not wanted for long is only in the way.
    assert router.prefixes.blocks_in_use("used", 1.0) == 400
    assert router.prefixes.blocks_in_use("used", 61.0) == 0
    assert router.choose([used, fresh], block_keys(chain(900, 901)), 40, 61.0).name == "used"
    assert router.prefixes.known_blocks("used") == 400


def test_a_replica_that_seems_to_compute_for_nothing_does_not_get_everything():
    router = Router()
    places = [place(name, token_seconds=value) for name, value in (("a", 1e-12), ("b", 1e-4))]
    places += [place("c", token_seconds=0.0), place("d", token_seconds=2e-4)]
    for order in range(16):
        router.choose(places, [], 32, 0.0).note_sent(order + 1, 32)
    assert all(2 <= one.streams <= 8 for one in places), [one.streams for one in places]
    places = [place(name, token_seconds=1e-13) for name in "ab"]
    for order in range(8):
        router.choose(places, [], 32, 0.0).note_sent(order + 1, 32)
    assert [one.streams for one in places] == [4, 4]


def test_equal_ones_take_turns_and_what_was_sent_counts():
    router = Router()
    places = [place(name) for name in "abcd"]
    chosen = []
    for order in range(8):
        one = router.choose(places, [], 100, 0.0)
        one.note_sent(order + 1, 100)
        chosen.append(one.name)
    assert sorted(chosen) == sorted("abcdabcd")
    busy = next(one for one in places if one.name == chosen[0])
    assert busy.streams == 2
    load = Load(2, 0, 0, 1000, 2, 0.0, is_reserved=False)
    busy.update_load(load, 8)  # it has taken both
    assert busy.streams == 2


class Parted:
    """What a queue looks at."""

    def __init__(self, uid, tokens=16, moved=False, fingerprint="", priority=0):
        self.request, self.uid, self.priority, self.block_keys = self, uid, priority, []
        self.tokens, self.is_moved, self.fingerprint = tokens, moved, fingerprint
        self.refused_by = set()
        self.waiting_since = 0.0


def placed(dispatch, places):
    begun = []

    def begin(part, chosen):
        begun.append((part.uid, chosen.name))
        chosen.note_sent(len(begun), part.tokens)

    dispatch.assign(places, begin)
    return begun


def test_moved_streams_take_free_places_and_what_is_new_waits_behind_them():
    dispatch = Dispatch(Router())
    for uid in range(12):
        dispatch.add(Parted(uid, moved=True))
    dispatch.add(Parted(12))
    one, two = place("a", streams=3, running=3), place("b", streams=6, running=6)
    begun = placed(dispatch, [one, two])
    assert [uid for uid, _ in begun] == list(range(7))  # what both have free, the oldest first
    assert dispatch.waiting == 6
    assert one.free_slots == two.free_slots == 0
    begun = placed(dispatch, [place("c"), one])
    assert [uid for uid, _ in begun] == [7, 8, 9, 10, 11, 12]


def test_a_stream_goes_on_only_where_the_fingerprint_is_equal_and_blocks_nobody():
    dispatch = Dispatch(Router())
    dispatch.add(Parted(1, moved=True, fingerprint="other"))
    dispatch.add(Parted(2))
    assert placed(dispatch, [place("a")]) == [(2, "a")]
    assert dispatch.waiting == 1


def test_a_request_that_all_who_are_left_have_refused_asks_them_again():
    dispatch = Dispatch(Router())
    part = Parted(1)
    part.refused_by.add("a")
    dispatch.add(part)
    assert placed(dispatch, [place("a"), place("b", streams=16, running=8)]) == []
    assert placed(dispatch, [place("a")]) == []  # the other one has left
    assert placed(dispatch, [place("a")]) == [(1, "a")]


def test_new_requests_wait_only_where_moved_streams_do():
    dispatch = Dispatch(Router())
    dispatch.add(Parted(1, moved=True, fingerprint="other"))
    dispatch.add(Parted(2))
    old = place("old", streams=8, running=8)
    old.hello = Hello("other", old.hello.facts, 8, 8)
    assert placed(dispatch, [old, place("new")]) == [(2, "new")]


def test_patience_ends_only_where_no_replica_could_take_it():
    dispatch = Dispatch(Router())
    fits_none, fits_one = Parted(1, moved=True, fingerprint="other"), Parted(2)
    for part in (fits_none, fits_one):
        dispatch.add(part)
        part.waiting_since = 0.0
    dispatch.refresh_timeouts([place("a", is_reserved=True)], 500.0)
    assert dispatch.pop_expired(510.0) == [fits_none]
    assert dispatch.pop_expired(700.0) == [fits_one]


def test_many_blocks_that_were_not_wanted_lately_are_forgotten_at_once():
    def forget(count):
        known = PrefixMap()
        hashes = np.random.default_rng(1).bytes(16 * count)
        known.apply("a", IndexUpdate(False, b"", hashes), 0.0)
        assert known.blocks_in_use("a", 59.0) == count
        assert known.blocks_in_use("a", 61.0) == 0

    assert growth(lambda: forget(50_000), lambda: forget(200_000), 9) < 9


def test_blocks_are_room_too():
    dispatch = Dispatch(Router())
    dispatch.add(Parted(1, tokens=170, moved=True))
    full = place("a", streams=1, running=1, free_blocks=10)
    assert placed(dispatch, [full]) == []
    assert placed(dispatch, [place("a", free_blocks=10)]) == [(1, "a")]  # it is alone there


def test_a_full_replica_and_one_that_has_refused_are_left_alone():
    dispatch = Dispatch(Router())
    part = Parted(1)
    part.refused_by.add("b")
    dispatch.add(part)
    full = place("a", streams=16, running=8, waiting=8)
    assert placed(dispatch, [full, place("b")]) == []
    assert placed(dispatch, [full, place("b"), place("c")]) == [(1, "c")]


def test_a_map_of_prefixes_is_bounded_and_forgets_the_oldest():
    known = PrefixMap(max_blocks=4)
    known.apply("a", IndexUpdate(False, b"", chain(1, 2, 3)), 0.0)
    known.apply("a", IndexUpdate(False, b"", chain(5, 6)), 0.0)
    assert known.known_blocks("a") == 4
    assert known.cached_blocks("a", block_keys(chain(5, 6, 7))) == 2
    assert known.cached_blocks("a", block_keys(chain(1, 2, 3))) == 0
    known.forget("a")
    assert known.known_blocks("a") == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60), st.integers(1, 7))
def test_changes_of_an_index_make_it_however_they_merge(steps, most):
    """Random changes, taken at random moments, a few at a time."""
    draw = random.Random(len(steps))
    index, copy, changes = set(), IndexCopy(), IndexChanges()
    for is_there, number in steps:
        content = bytes([number]) * 16
        if is_there and content not in index:
            index.add(content)
            changes.remember(content)
        elif not is_there and content in index:
            index.remove(content)
            changes.forget(content)
        assert len(changes) <= len(index) + len(copy.contents) + 1
        if draw.random() < 0.3:
            events = changes.drain(most)
            if events is not None:
                copy.apply(events)
        if draw.random() < 0.05:
            changes.republish(index)
    while (events := changes.drain(most)) is not None:
        copy.apply(events)
    assert copy.contents == index
