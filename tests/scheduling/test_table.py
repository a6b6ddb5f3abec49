"""The table of counters against plain ones: most steps write no row, and nobody can tell."""

import sys
from types import SimpleNamespace

import numpy as np
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanoactor.scheduling.sequences.table import RunningTable, ScheduledPositions

SLOTS, LENGTH, BLOCK = 5, 40, 4


class TableMachine(RuleBasedStateMachine):
    """Sequences enter, decode, get their tokens a few steps later, and leave."""

    @initialize()
    def begin(self):
        self.table = RunningTable(SLOTS, LENGTH, BLOCK)
        self.rows = {}
        """By slot that is held: the counters of its sequence."""
        self.in_flight = []
        """(decode batch, its rows) whose tokens are to come."""
        self.versions = {0: ()}
        """The slots of each version of a decode batch."""
        self.uid = 0

    def rows_of(self, batch):
        return [self.rows[slot] for slot in batch.slots.tolist()]

    # -- operations ---------------------------------------------------------------------------

    @rule(data=st.data(), length=st.integers(1, 9), limit=st.integers(11, LENGTH))
    def enter(self, data, length, limit):
        busy = {slot for batch, _ in self.in_flight for slot in batch.slots.tolist()}
        free = sorted(set(range(SLOTS)) - self.rows.keys() - busy)
        if not free:
            return
        slot, blocks = data.draw(st.sampled_from(free)), -(-length // BLOCK)
        tokens = np.arange(length, dtype=np.int32)
        self.table.enter(
            slot, uid=self.uid, prompt_length=length, limit=limit, tokens=tokens, blocks=blocks
        )
        assert not np.logical_or(*self.table.readiness())[slot]
        self.table.start(slot, 0)
        assert not np.logical_or(*self.table.readiness())[slot]
        self.table.prefill(slot, length)
        self.rows[slot] = SimpleNamespace(
            uid=self.uid,
            prompt=length,
            limit=limit,
            room=blocks * BLOCK,
            scheduled=length,
            tokens=tokens.tolist(),
        )
        self.uid += 1

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def leave(self, data):
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        self.table.leave(slot)
        del self.rows[slot]

    @rule(feed=st.booleans())
    def decode(self, feed):
        """As the scheduler does: the same batch where it must be, else a new one."""
        batch = self.table.positions.decode_again()
        if batch is None:
            hungry = np.flatnonzero(self.table.readiness()[1]).tolist() if feed else []
            self.table.grow(hungry)
            for slot in hungry:
                self.rows[slot].room += BLOCK
            ready, starving = self.table.readiness()
            batch = self.table.decode(np.flatnonzero(ready), none_starving=not starving.any())
        able = [s for s, row in self.rows.items() if row.scheduled + 2 <= row.limit]
        assert batch.slots.tolist() == sorted(
            slot for slot in able if self.rows[slot].scheduled < self.rows[slot].room
        )
        assert np.flatnonzero(batch.members).tolist() == batch.slots.tolist()
        assert self.versions.setdefault(batch.version, tuple(batch.slots)) == tuple(batch.slots)
        for row in self.rows_of(batch):
            row.scheduled += 1
        self.in_flight.append((batch, self.rows_of(batch)))

    @precondition(lambda self: self.in_flight)
    @rule(token=st.integers(0, 99))
    def tokens_come(self, token):
        batch, rows = self.in_flight.pop(0)
        held = np.array([row in self.rows.values() for row in rows], np.bool_)
        assert self.table.all_occupied(batch) == held.all()
        if not held.all():
            batch = self.table.positions.batch_of(batch.slots[held])
        tokens = np.arange(token, token + len(batch.slots), dtype=np.int32)
        columns = self.table.append(batch, tokens)
        rows = self.rows_of(batch)
        for row, new in zip(rows, tokens.tolist(), strict=True):
            row.tokens.append(new)
        assert columns.uids.tolist() == [row.uid for row in rows]
        assert columns.slots32.tolist() == batch.slots.tolist()
        assert columns.indices.tolist() == [len(row.tokens) - row.prompt - 1 for row in rows]
        assert columns.at_limit.tolist() == [len(row.tokens) >= row.limit for row in rows]

    @precondition(lambda self: self.rows and not self.in_flight)
    @rule(data=st.data(), token=st.integers(0, 99))
    def one_token_comes(self, data, token):
        """As for a row that ends a prompt."""
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        if len(self.rows[slot].tokens) < LENGTH:
            self.table.append_one(slot, token)
            self.rows[slot].tokens.append(token)

    # -- what always holds --------------------------------------------------------------------

    @invariant()
    def every_row_says_what_happened_and_to_ask_changes_nothing(self):
        before = self.counters()
        self.check_rows()
        assert self.counters() == before

    def counters(self):
        of = self.table.positions
        return of._scheduled.tolist(), of._pending_steps, of._stable_steps

    def check_rows(self):
        assert np.flatnonzero(self.table.occupied).tolist() == sorted(self.rows)
        for slot, row in self.rows.items():
            assert self.table.positions.by_slot[slot] == row.scheduled
            assert self.table.scheduled_at(slot) == row.scheduled
            known = self.table.known[slot]
            assert self.table.tokens[slot, :known].tolist() == row.tokens
        able = [s for s, row in self.rows.items() if row.scheduled + 2 <= row.limit]
        full = [s for s in able if self.rows[s].scheduled == self.rows[s].room]
        ready, starving = (np.flatnonzero(slots).tolist() for slots in self.table.readiness())
        assert sorted(ready + starving) == sorted(able)
        assert starving == sorted(full)


TestTableAgainstPlainCounters = TableMachine.TestCase
TestTableAgainstPlainCounters.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


def running(table, slot, length, limit):
    """Have a sequence run whose prompt is computed."""
    blocks = -(-length // BLOCK)
    tokens = np.zeros(length, np.int32)
    table.enter(slot, uid=slot, prompt_length=length, limit=limit, tokens=tokens, blocks=blocks)
    table.start(slot, 0)
    table.prefill(slot, length)


def test_a_batch_is_the_same_until_a_block_is_full_or_a_limit_is_reached():
    table = RunningTable(SLOTS, LENGTH, BLOCK)
    running(table, 0, 1, LENGTH)
    running(table, 3, 1, 4)
    assert table.positions.decode_again() is None
    first = table.decode(np.array([0, 3]), none_starving=True)
    assert table.positions.decode_again() is first
    assert table.positions.decode_again() is None  # the second may have 4 tokens: positions 0, 1, 2
    assert table.positions.by_slot.tolist() == [3, 0, 0, 3, 0]
    assert np.flatnonzero(table.readiness()[0]).tolist() == [0]
    second = table.decode(np.array([0]), none_starving=True)
    assert second.version != first.version
    assert table.positions.decode_again() is None  # its block is full
    assert np.flatnonzero(table.readiness()[1]).tolist() == [0]


def test_a_batch_is_not_steady_while_somebody_starves():
    table = RunningTable(SLOTS, LENGTH, BLOCK)
    running(table, 0, 1, LENGTH)
    table.decode(np.array([0]), none_starving=False)
    assert table.positions.decode_again() is None


def test_constrained_slots_come_go_and_grow_without_a_look_at_the_decode_batch():
    table = RunningTable(SLOTS, LENGTH, BLOCK)

    def enter(slot, stepwise):
        tokens = np.zeros(2, np.int32)
        table.enter(
            slot,
            uid=slot,
            prompt_length=2,
            limit=LENGTH,
            tokens=tokens,
            blocks=5,
            stepwise=stepwise,
        )
        table.start(slot, 0)
        table.prefill(slot, 2)

    for slot in (0, 1):
        enter(slot, stepwise=False)
    assert table.positions.decode_again() is None
    batch = table.decode(np.array([0, 1]), none_starving=True)
    table.append(batch, np.array([5, 6], np.int32))
    columns = table._columns
    enter(3, stepwise=True)
    assert table.positions.decode_again() is batch
    table.append_one(3, 7)
    assert table.targets[3] == table.known[3] == 3
    table.prefill(3, 1)
    assert table.positions.decode_again() is batch
    ready, starving = table.readiness()
    assert np.flatnonzero(ready).tolist() == [0, 1]
    assert not starving.any()
    table.leave(3)
    assert table.positions.decode_again() is batch
    assert table._columns is columns
    assert table.positions.by_slot[:2].tolist() == [6, 6]


def test_what_is_planned_too_far_is_lowered_by_a_result():
    """Three tokens are planned ahead, one of them was right: the next step goes on behind it."""
    table = RunningTable(2, 64, 4)
    for slot in range(2):
        table.enter(
            slot, uid=slot, prompt_length=3, limit=40, tokens=np.arange(3, dtype=np.int32), blocks=3
        )
        table.start(slot, 3)
    slots = np.arange(2)
    batch = table.decode(slots, none_starving=True)
    for _ in range(2):
        assert table.positions.decode_again() is batch
    assert table.positions.by_slot.tolist() == [6, 6]
    table.append(batch, np.array([7, 8], np.int32))
    table.rewind(0, 3, stepwise=False)
    assert table.positions.by_slot.tolist() == [3, 6]
    assert table.positions.decode_again() is None
    ready, starving = table.readiness()
    assert (ready.tolist(), starving.tolist()) == ([False, True], [False, False])
    table.prefill(0, 1)  # the position of the one that was right
    ready, _ = table.readiness()
    assert ready.tolist() == [True, True]
    assert table.decode(slots, none_starving=True) is batch
    assert table.positions.by_slot.tolist() == [5, 7]


def test_what_others_share_is_told_of_the_sequence_that_had_the_slot():
    """An answer that is under way while a slot is given anew says nothing of its new sequence."""
    table, tokens = RunningTable(3, 64, 4), np.arange(3, dtype=np.int32)
    for slot in (0, 1):
        table.enter(slot, uid=slot, prompt_length=3, limit=40, tokens=tokens, blocks=3)
        table.admission_turns[slot] = 5 + slot
    everyone = np.arange(3, dtype=np.int32)
    table.note_shared(everyone, everyone + np.int32(1), turn=5)
    assert table.shared.tolist() == [1, 0, 0]
    table.note_shared(everyone, everyone + np.int32(2), turn=6)
    assert table.shared.tolist() == [2, 3, 0]


def test_a_step_of_a_thousand_rows_takes_a_few_array_operations():
    """And a steady one none: counted, not timed."""
    table = RunningTable(1024, 64, 16)
    for slot in range(1024):
        tokens = np.arange(3, dtype=np.int32)
        table.enter(slot, uid=slot, prompt_length=3, limit=40, tokens=tokens, blocks=4)
        table.start(slot, 3)
    calls = []

    def counted(frame, event, argument):
        if event == "c_call" and getattr(argument, "__module__", "") in ("numpy", None):
            calls.append(argument)

    sys.setprofile(counted)
    try:
        ready, starving = table.readiness()
        batch = table.decode(np.flatnonzero(ready), none_starving=not starving.any())
        changed = len(calls)
        assert table.positions.decode_again() is batch
        steady = len(calls) - changed
        table.append(batch, np.zeros(1024, np.int32))
    finally:
        sys.setprofile(None)
    assert steady == 0
    assert len(calls) < 60


def test_positions_of_a_steady_batch_are_counted_and_added_when_it_ends():
    positions = ScheduledPositions(3)
    positions.reset(0, 4)
    positions.add(2, 5)
    batch = positions.decode(np.array([0, 2]), np.array([7, 9]))
    for _ in range(2):
        assert positions.decode_again() is batch
    assert positions.decode_again() is None  # the first has reached its end
    assert positions.by_slot.tolist() == [7, 0, 8]
    assert positions.decode(np.array([0, 2]), np.array([9, 9])) is batch
    positions.end_batch()
    assert positions.decode_again() is None
    positions.lower(2, 3)
    assert [positions.at(slot) for slot in range(3)] == [8, 0, 3]
