"""Resources by owner and rank, against a model that keeps all of their history."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nanoactor.errors import ProtocolBug
from nanoactor.scheduling.resources.rank_resources import RankResources

RANKS, PERIODS, OWNERS = 2, 3, (7, 8)
owners = st.sampled_from(OWNERS)


class Histories(RuleBasedStateMachine):
    """Requests, reports, withdrawals and drops in any order."""

    def __init__(self):
        super().__init__()
        self.resources = RankResources("mask", RANKS, PERIODS)
        self.newest, self.requested, self.since, self.ticks = {}, {}, {}, 0
        self.held = {owner: set() for owner in OWNERS}

    @rule(owner=owners, further=st.integers(1, 3))
    def request(self, owner, further):
        version = self.newest.get(owner, 0) + further
        self.resources.request(owner, version)
        self.newest[owner] = self.requested[owner] = version
        self.since[owner] = self.ticks

    @rule(owner=owners, rank=st.integers(0, RANKS - 1), further=st.integers(-1, 3))
    def report(self, owner, rank, further):
        version = self.newest.get(owner, 0) + further
        best = max((v for r, v in self.held[owner] if r == rank), default=0)
        replaces = best == self.requested.get(owner, -1)
        if owner in self.newest and (version <= best or further < 0 or replaces):
            with pytest.raises(ProtocolBug, match="was requested last"):
                self.resources.note_ready(rank, owner, version)
            return
        self.resources.note_ready(rank, owner, version)
        if owner in self.newest:
            self.held[owner].add((rank, version))

    @precondition(lambda self: self.newest)
    @rule(data=st.data())
    def withdraw(self, data):
        owner = data.draw(st.sampled_from(sorted(self.newest)))
        self.resources.withdraw(owner)
        self.requested.pop(owner, None)

    @rule(owner=owners)
    def drop(self, owner):
        self.resources.drop(owner)
        for facts in (self.newest, self.requested, self.since):
            facts.pop(owner, None)
        self.held[owner].clear()

    @rule()
    def tick(self):
        self.ticks += 1
        late = [o for o in self.requested if self.ticks - self.since[o] >= PERIODS]
        assert sorted(self.resources.tick()) == sorted(o for o in late if not self.ready(o))

    def ready(self, owner):
        """Whether the newest version of every rank is the one that is wanted."""
        version = self.requested.get(owner)
        best = {r: max(v for s, v in self.held[owner] if s == r) for r, _ in self.held[owner]}
        return version is not None and list(best.values()) == [version] * RANKS

    @invariant()
    def says_the_same(self):
        assert self.resources.missing == sum(not self.ready(owner) for owner in self.requested)
        for owner in OWNERS:
            assert (owner in self.resources) == (owner in self.newest)
            if owner in self.newest:
                assert self.resources.is_ready(owner) == self.ready(owner)
                assert self.resources.requested(owner) == self.requested.get(owner)


TestHistories = Histories.TestCase


@given(st.integers(0, 5))
def test_nothing_is_overdue_without_periods(ticks):
    resources = RankResources("pixels", ranks=1)
    resources.request(3)
    assert [resources.tick() for _ in range(ticks)] == [[]] * ticks


def test_a_version_is_wanted_once_and_reported_once():
    resources = RankResources("mask", ranks=2)
    resources.request(1, 5)
    resources.note_ready(0, 1, 5)
    with pytest.raises(ProtocolBug, match="requested twice"):
        resources.request(1, 5)
    with pytest.raises(
        ProtocolBug, match="rank 0 reported version 5 of the mask of 1; it held version 5"
    ):
        resources.note_ready(0, 1, 5)
    with pytest.raises(ProtocolBug, match="after their end"):
        resources.check_idle()
    resources.drop(1)
    resources.drop(1)
    resources.check_idle()
