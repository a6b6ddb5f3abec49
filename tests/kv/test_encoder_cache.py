"""The cache of encoded images against a plain model: credits suffice, fences hold, the least
recently used goes first."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nanoactor.errors import ProtocolBug
from nanoactor.kv.encoder_cache import EncoderCache
from nanoactor.media.units import EncodeUnits

PAGES, PAGE_ROWS = 12, 4
KEYS = [bytes([n]) * 16 for n in range(8)]
ROWS = {key: 1 + 5 * n % 17 for n, key in enumerate(KEYS)}


def units(rows):
    """An image of so many rows."""
    return EncodeUnits(1, rows, 1)


class Cache(RuleBasedStateMachine):
    """Requests hold items as long as credits allow; steps complete in order."""

    def __init__(self):
        super().__init__()
        self.cache = EncoderCache(PAGES, PAGE_ROWS)
        self.credits = PAGES
        self.holders = Counter()
        self.step = self.done = 0
        self.fenced = []
        """(fence, item, pages) of what was let go."""
        self.used = []
        """Keys that nobody holds and no fence keeps, least recently used first."""

    @rule(key=st.sampled_from(KEYS))
    def acquire(self, key):
        pages = self.cache.pages_of(ROWS[key])
        if self.credits < pages:
            return
        self.credits -= pages
        free = len(self.cache._free)
        kept = {id(item): [*item.pages] for item in self.living()}
        item, refund = self.cache.acquire(key, units(ROWS[key]))
        assert item.key == key
        assert len(item.pages) == pages
        assert refund == (pages if self.holders[item] else 0)
        for other in self.living():
            assert other is item or not set(other.pages) & set(item.pages)
            assert kept[id(other)] == other.pages
        self.credits += refund
        self.holders[item] += 1
        others = [k for k in self.used if k != key]
        evicted = [k for k in others if k not in self.cache._idle]
        assert evicted == others[: len(evicted)]
        without_last = sum(self.cache.pages_of(ROWS[k]) for k in evicted[:-1])
        assert not evicted or free + without_last < pages, "one too many"
        self.used = others[len(evicted) :]

    def living(self):
        """Items whose pages nobody else may write to."""
        behind = [item for fence, item, _ in self.fenced if fence > self.done]
        return {id(item): item for item in [*+self.holders, *behind]}.values()

    @precondition(lambda self: +self.holders)
    @rule(data=st.data(), lag=st.integers(0, 2))
    def release(self, data, lag):
        item = data.draw(st.sampled_from(sorted(+self.holders, key=lambda i: i.key)))
        self.holders[item] -= 1
        fence = self.step + lag
        self.step = fence
        freed = self.cache.release(item, fence)
        assert freed == (0 if self.holders[item] else len(item.pages))
        if freed:
            self.fenced.append((fence, item, freed))
        self.settle()

    @rule(steps=st.integers(1, 3))
    def complete(self, steps):
        self.done += steps
        self.step = max(self.step, self.done)
        self.cache.complete(self.done)
        self.settle()

    def settle(self):
        """Credits come back behind their fence."""
        while self.fenced and self.fenced[0][0] <= self.done:
            _, item, pages = self.fenced.pop(0)
            self.credits += pages
            latest = all(other is not item for _, other, _ in self.fenced)
            if latest and not self.holders[item] and item.trusted:
                self.used = [*(k for k in self.used if k != item.key), item.key]

    @precondition(lambda self: +self.holders)
    @rule(data=st.data())
    def fail(self, data):
        """Who holds it lets go of it, as its requests have failed too."""
        item = data.draw(st.sampled_from(sorted(+self.holders, key=lambda i: i.key)))
        self.cache.distrust(item)
        assert self.cache._items.get(item.key) is not item

    @invariant()
    def the_books_agree(self):
        self.cache.check(PAGES, +self.holders)
        assert [*self.cache._idle] == self.used


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=75, stateful_step_count=60, deadline=None)


def test_a_second_request_finds_what_the_first_has_encoded():
    cache = EncoderCache(PAGES, PAGE_ROWS)
    first, _ = cache.acquire(KEYS[1], units(ROWS[KEYS[1]]))
    first.planned = 3
    cache.release(first, fence=5)
    cache.complete(5)
    again, refund = cache.acquire(KEYS[1], units(ROWS[KEYS[1]]))
    assert again is first
    assert (again.planned, refund, cache.hits) == (3, 0, 1)


def test_what_was_encoded_wrong_is_encoded_anew():
    cache = EncoderCache(PAGES, PAGE_ROWS)
    first, _ = cache.acquire(KEYS[1], units(ROWS[KEYS[1]]))
    first.planned = ROWS[KEYS[1]]
    cache.distrust(first)
    second, refund = cache.acquire(KEYS[1], units(ROWS[KEYS[1]]))
    assert second is not first
    assert (second.planned, refund) == (0, 0)
    assert not set(first.pages) & set(second.pages)


def test_such_bugs_of_the_scheduler_are_seen():
    cache = EncoderCache(2, PAGE_ROWS)
    item, _ = cache.acquire(KEYS[0], units(5))
    with pytest.raises(ProtocolBug, match="more credits"):
        cache.acquire(KEYS[1], units(1))
    with pytest.raises(ProtocolBug, match="rows=5.*, but a hold requests .*rows=4"):
        cache.acquire(KEYS[0], units(4))
    cache.release(item, 0)
    with pytest.raises(ProtocolBug, match="but not held"):
        cache.release(item, 0)
