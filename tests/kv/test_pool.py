"""The block pool against a model of it: nobody's block is handed out twice or too early."""

from collections import Counter

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from nanoactor.errors import ProtocolBug
from nanoactor.kv.pool import BlockPool

CONTENTS = [bytes([i]) for i in range(6)]


class PoolMachine(RuleBasedStateMachine):
    """Random operations, each compared with lists and dictionaries that say the same plainly."""

    @initialize(blocks=st.integers(1, 6))
    def begin(self, blocks):
        self.pool = BlockPool(blocks)
        self.blocks = blocks
        self.references = Counter()
        self.free = set(range(blocks))
        self.cached = []  # least recently used first
        self.quarantine = []  # (fence, block) in the order of their release
        self.content = {}  # of block
        self.planned = self.completed = self.evictions = 0

    # -- what the model says ------------------------------------------------------------------

    def held(self):
        return sorted(+self.references)

    def holder_of(self, content):
        return next((b for b, c in self.content.items() if c == content), None)

    def pass_fences(self):
        waiting = []
        for fence, block in self.quarantine:
            if fence > self.completed:
                waiting.append((fence, block))
            elif block in self.content:
                self.cached.append(block)
            else:
                self.free.add(block)
        self.quarantine = waiting

    # -- operations ---------------------------------------------------------------------------

    @rule(content=st.sampled_from(CONTENTS))
    def allocate(self, content):
        """As for a new sequence: take a block, and index it once it is full."""
        if not self.free and not self.cached:
            with pytest.raises(ProtocolBug, match="no block is free or cached"):
                self.pool.allocate()
            return
        block = self.pool.allocate()
        if self.free:
            assert block in self.free
            self.free.remove(block)
        else:
            assert block == self.cached.pop(0)
            del self.content[block]
            self.evictions += 1
        self.references[block] = 1
        self.remember(block, content)

    @precondition(lambda self: self.held())
    @rule(data=st.data(), content=st.sampled_from(CONTENTS))
    def remember_another_content(self, data, content):
        self.remember(data.draw(st.sampled_from(self.held())), content)

    def remember(self, block, content):
        self.pool.remember(block, content)
        if self.holder_of(content) is None:
            self.content.setdefault(block, content)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def share(self, data):
        content = data.draw(st.sampled_from(sorted(self.content.values())))
        block = self.pool.find(content)
        assert block == self.holder_of(content)
        assert self.pool.share(block) == (self.references[block] > 0)
        self.references[block] += 1
        self.cached = [b for b in self.cached if b != block]
        self.quarantine = [entry for entry in self.quarantine if entry[1] != block]

    @precondition(lambda self: self.held())
    @rule(data=st.data(), steps=st.integers(0, 2))
    def release(self, data, steps):
        """Some references go, under the fence of the last step planned."""
        blocks = data.draw(st.lists(st.sampled_from(self.held()), min_size=1, unique=True))
        self.planned += steps
        self.give_back(blocks)

    def give_back(self, blocks):
        orphans = [block for block in blocks if self.references[block] == 1]
        assert self.pool.release(blocks, self.planned) == len(orphans)
        self.references.subtract(blocks)
        self.quarantine += [(self.planned, block) for block in orphans]
        self.pass_fences()

    @rule(steps=st.integers(0, 3))
    def complete(self, steps):
        step = min(self.completed + steps, self.planned)
        self.pool.complete(step)
        self.completed = step
        self.pass_fences()

    @rule(earlier=st.integers(0, 3))
    def completing_an_earlier_step_again_changes_nothing(self, earlier):
        self.pool.complete(max(0, self.completed - earlier))

    @precondition(lambda self: len(self.held()) < self.blocks)
    @rule(data=st.data())
    def release_what_nobody_holds(self, data):
        block = data.draw(st.sampled_from(sorted(set(range(self.blocks)) - set(self.held()))))
        with pytest.raises(ProtocolBug, match=f"block {block} is released but not held"):
            self.pool.release([block], self.planned)

    # -- what always holds --------------------------------------------------------------------

    @invariant()
    def books_agree(self):
        self.pool.check(dict(+self.references))
        assert self.pool.available == len(self.free) + len(self.cached)
        assert self.pool.evictions == self.evictions
        for content in CONTENTS:
            assert self.pool.find(content) == self.holder_of(content)

    def teardown(self):
        """In the end every block comes back once, the cached ones in order."""
        if not hasattr(self, "pool"):
            return
        for block in list((+self.references).elements()):
            self.give_back([block])
        self.complete(self.planned - self.completed)
        for _ in range(self.blocks):
            self.allocate(b"new")
        assert self.held() == list(range(self.blocks))
        self.allocate(b"new")  # raises, as it should


TestPoolAgainstItsModel = PoolMachine.TestCase
TestPoolAgainstItsModel.settings = settings(
    max_examples=125,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


# -- the same, told as stories ------------------------------------------------------------------


def filled(blocks):
    """A pool whose blocks are all held, block i with the content bytes([i])."""
    pool = BlockPool(blocks)
    held = [pool.allocate() for _ in range(blocks)]
    for block in held:
        pool.remember(block, bytes([block]))
    return pool, held


def test_a_quarantined_block_is_handed_out_only_once_its_step_is_done():
    pool, held = filled(3)
    pool.complete(4)
    assert pool.release(held, 7) == 3
    for step in (4, 5, 6):
        pool.complete(step)
        assert pool.available == 0
        with pytest.raises(ProtocolBug, match="no block"):
            pool.allocate()
    pool.complete(7)
    assert pool.available == 3


def test_a_fence_that_has_passed_already_does_not_hold_back():
    pool, held = filled(2)
    pool.complete(9)
    assert pool.release(held, 9) == 2
    assert pool.available == 2


def test_a_shared_block_waits_for_the_fence_of_its_last_holder():
    pool, (block,) = filled(1)
    pool.release([block], 3)
    assert not pool.share(block)  # from quarantine: its content is still good
    pool.complete(3)
    assert pool.available == 0
    assert pool.share(block)
    assert pool.release([block], 5) == 0
    assert pool.release([block], 6) == 1
    pool.complete(5)
    assert pool.available == 0
    pool.complete(6)
    assert pool.available == 1


def test_blocks_are_evicted_in_the_order_of_their_release():
    pool, held = filled(5)
    pool.release([held[3], held[1]], 1)
    pool.release([held[4], held[0], held[2]], 2)
    pool.complete(2)
    assert [pool.allocate() for _ in range(5)] == [held[i] for i in (3, 1, 4, 0, 2)]
    assert pool.evictions == 5


def test_blocks_without_content_are_handed_out_before_cached_ones():
    pool = BlockPool(3)
    held = [pool.allocate() for _ in range(3)]
    pool.remember(held[0], b"a")
    pool.release(held, 0)
    assert {pool.allocate(), pool.allocate()} == {held[1], held[2]}
    assert pool.find(b"a") == held[0]
    assert pool.evictions == 0


def test_use_makes_a_block_the_last_to_be_evicted():
    pool, held = filled(3)
    pool.release(held, 1)
    pool.complete(1)
    pool.share(held[0])
    pool.release([held[0]], 1)
    assert [pool.allocate() for _ in range(3)] == [held[1], held[2], held[0]]


def test_use_under_the_same_fence_makes_a_block_the_last_to_be_evicted():
    pool, held = filled(3)
    pool.release(held, 1)
    pool.share(held[0])  # by a request that is aborted before any step is planned
    pool.release([held[0]], 1)
    pool.complete(1)
    assert [pool.allocate() for _ in range(3)] == [held[1], held[2], held[0]]


def test_the_first_block_of_a_content_keeps_its_name():
    pool, (first, second) = filled(2)
    pool.remember(second, bytes([first]))
    assert pool.find(bytes([first])) == first
    assert pool.find(bytes([second])) == second
    twin = BlockPool(2)
    a, b = twin.allocate(), twin.allocate()
    twin.remember(a, b"same")
    twin.remember(b, b"same")
    twin.release([a, b], 0)
    assert twin.find(b"same") == a
    assert twin.allocate() == b  # it has no name of its own, so it is free


def test_releasing_a_block_twice_raises():
    pool, held = filled(2)
    pool.release([held[0]], 1)
    with pytest.raises(ProtocolBug, match=f"block {held[0]} is released but not held"):
        pool.release([held[0]], 1)
    with pytest.raises(ProtocolBug, match=f"block {held[1]} is released"):
        pool.release([held[1], held[1]], 1)


def test_an_empty_pool_has_nothing_to_hand_out():
    with pytest.raises(ProtocolBug, match="more credits were spent than exist"):
        BlockPool(0).allocate()


def test_the_check_finds_references_without_users_and_users_without_references():
    pool, held = filled(2)
    pool.check({held[0]: 1, held[1]: 1})
    for users in ({}, {held[0]: 1}, {held[0]: 2, held[1]: 1}):
        with pytest.raises(ProtocolBug, match="references"):
            pool.check(users)
    pool.release([held[1]], 1)
    with pytest.raises(ProtocolBug, match=f"block {held[1]} has 0 references, but 1 users"):
        pool.check({held[0]: 1, held[1]: 1})
    pool.check({held[0]: 1})
