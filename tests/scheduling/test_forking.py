"""Several answers to one prompt, event by event."""

import dataclasses

import numpy as np
import pytest

from nanoactor.kv.hashing import block_hashes
from nanoactor.kv.holding import SharedBlockCounts
from nanoactor.kv.manager import BlockManager
from nanoactor.messages.engine import Abort, Admission, Failures, Forks, KnownTokens, Plan, Turn
from nanoactor.messages.rows import Rows, Want
from nanoactor.scheduling.steps.turns import _NO_ADMISSIONS
from tests.scheduling.events import (
    NONE,
    SALT,
    admit,
    answered,
    begun,
    copies_of,
    finishes,
    int32,
    scheduler,
    turn_of,
)


@pytest.mark.parametrize(("length", "each"), [(9, 1), (8, 0), (3, 1)])
def test_answers_begin_where_the_prompt_ends(length, each):
    logic = scheduler(depth=1)
    turn = begun(logic, range(length), 3)
    assert copies_of(turn) == [(1, 0), (2, 0)]
    assert logic.budget.credits == 20 - -(-length // 4) - 2 * each
    assert turn.plan.admissions.uids.tolist() == [0, 1, 2]


def test_those_without_a_slot_wait():
    logic = scheduler(max_num_seqs=2)
    assert copies_of(begun(logic, range(9), 5)) == [(1, 0)]
    assert logic.figures()["waiting"] == 3
    assert logic.figures()["live"] == 5


def test_an_answer_follows_the_next_when_the_first_ends():
    logic = scheduler(max_num_batched_tokens=8)  # too few for the prompt to begin at once
    turn = turn_of(logic.handle(admit(range(9), 3)))
    assert turn.plan is None
    turn = turn_of(logic.handle(Abort(0)))
    assert [admission.uid for admission in turn.admissions] == [1]
    assert logic.figures()["live"] == 2


def test_tainted_answers_fail():
    logic = scheduler()
    turn = begun(logic, range(9), 3)
    sent = logic.handle(answered(turn, tainted=[0, 2]))
    assert finishes(sent) == dict.fromkeys((0, 2), "failed")


# -- the block manager --------------------------------------------------------------------


class Turns:
    """Turns for a block manager, one after the other."""

    def __init__(self, **changes):
        self.manager = BlockManager(20, 4, 4, 64, SALT, **changes)
        self.number = 0

    def take(self, done=0, fence=0, **parts):
        self.number += 1
        empty = dict(failures=None, forks=None, known=None, frees=NONE, drop_pixels=None)
        empty |= dict(forget_index=0, admissions=(), plan=None, drop_masks=None)
        return self.manager.apply_turn(Turn(self.number, 0, done, fence, **(empty | parts)))


def admission(uid, slot, prompt, request=None):
    blocks = -(-len(prompt) // 4)
    first = uid if request is None else request
    return Admission(uid, slot, first, prompt, block_hashes(prompt, 4, SALT), blocks)


def planned(step, slot, start, count, copies=()):
    """A step with one row that samples, and its copies: (slot, uid)."""
    slots = int32(slot, *(of for of, _ in copies))
    starts, counts = int32(*[start] * len(slots)), int32(count, *[0] * len(copies))
    sources = int32(-1, *[slot] * len(copies)) if copies else NONE
    rows = Rows(slots, starts, counts, np.full(len(slots), Want.SAMPLE, np.uint8), sources)
    uids = np.array([uid for _, uid in copies], np.int64)
    new = dataclasses.replace(_NO_ADMISSIONS, slots=slots[1:], uids=uids)
    return Plan(step, rows, NONE, NONE, new)


def decoding(step, slot, start):
    """A step in which a slot begins to decode."""
    wants = np.array([Want.SAMPLE | Want.DECODE], np.uint8)
    rows = Rows(int32(slot), int32(start), int32(1), wants, NONE)
    return Plan(step, rows, NONE, NONE, _NO_ADMISSIONS)


def test_a_copy_of_what_is_bad_is_tainted_and_not_trusted():
    """The second prompt finds the first one's blocks, which turn out bad; then it is copied."""
    turns = Turns()
    manager, prompt = turns.manager, np.arange(14, dtype=np.int32)
    turns.take(admissions=(admission(0, 0, prompt[:9]),), plan=planned(1, 0, 0, 9))
    turns.take(admissions=(admission(1, 1, prompt),))
    assert manager.take_answer().hits.tolist() == [0, 8]
    turns.take(done=1, failures=Failures(int32(0), int32(0)))
    assert manager.take_answer().tainted.tolist() == [0, 1]
    turns.take(plan=planned(2, 1, 8, 6, copies=[(2, 2)]))
    assert manager.take_answer().tainted.tolist() == [2]
    step = turns.take(
        done=2,
        known=KnownTokens(int32(1, 2), NONE, int32(5, 5), NONE, NONE),
        plan=decoding(3, 2, 14),
    )
    assert len(step.copies.sources) == 1
    # Its next tokens fill the copied block.
    for done in (3, 4):
        turns.take(done=done, known=KnownTokens(int32(2), NONE, int32(6), NONE, NONE))
    manager.index.update()
    assert not manager.pool._index
    manager.check()


def test_what_decode_rows_compute_in_the_place_of_forced_tokens_does_not_survive():
    """Two decode rows are in flight when a token comes to be known and two more are forced: the
    first row computes the known token, the second one some other token in a forced one's place."""
    turns = Turns()
    manager, prompt = turns.manager, np.arange(6, dtype=np.int32)
    turns.take(admissions=(admission(0, 0, prompt),), plan=planned(1, 0, 0, 6))
    turns.take(plan=decoding(2, 0, 6))
    turns.take(plan=decoding(3, 0, 7))
    forced = KnownTokens(int32(0), int32(3), int32(50, 51, 52), int32(0), int32(2))
    turns.take(done=1, known=forced)
    turns.take(done=3)
    manager.restart()
    manager.check()
    tokens = np.concatenate((prompt, int32(50, 51, 52, 53)))
    turns.number = 0
    turns.take(admissions=(admission(1, 0, tokens),))
    assert manager.take_answer().hits.tolist() == [7]


def test_a_copys_blocks_are_its_sources_and_come_back_once():
    turns = Turns(prefix_caching=False)
    manager, prompt = turns.manager, np.arange(10, dtype=np.int32)
    plan = planned(1, 0, 0, 10, copies=[(1, 1), (2, 2)])
    turns.take(admissions=(admission(0, 0, prompt),), plan=plan)
    tables = [manager.tables.holdings[slot].table for slot in range(3)]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    answer = manager.take_answer()
    assert (answer.slots.tolist(), answer.shared.tolist()) == ([0, 1, 2], [2, 2, 2])
    # Another answer is found without the prefix cache: all full blocks but what must be computed.
    step = turns.take(admissions=(admission(3, 3, prompt, request=0),), plan=decoding(2, 1, 9))
    assert step.copies.sources.tolist() == [tables[0][2]] * 2
    assert step.copies.targets.tolist() == [tables[1][2], tables[2][2]]
    assert manager.tables.holdings[3].table[:2] == tables[0][:2]
    assert manager.take_answer().refunds.tolist() == [2]
    manager.check()
    for slot, freed in ((0, 1), (3, 1), (1, 1), (2, 3)):
        turns.take(frees=int32(slot), fence=2)
        answer = manager.take_answer()
        assert (answer.fences.tolist(), answer.freed.tolist()) == ([2], [freed])
    manager.check()


def test_copies_of_slots_are_told_where_layers_keep_states_of_them():
    """Copies of a prompt's row come with the step behind it, forks of a turn with the next step."""
    turns = Turns(has_slot_state=True)
    manager, prompt = turns.manager, np.arange(6, dtype=np.int32)
    plan = planned(1, 0, 0, 6, copies=[(1, 1)])
    step = turns.take(admissions=(admission(0, 0, prompt),), plan=plan)
    assert step.slot_copies is None
    step = turns.take(done=1, admissions=(admission(2, 2, prompt),), plan=planned(2, 2, 0, 6))
    assert (step.slot_copies.sources.tolist(), step.slot_copies.targets.tolist()) == ([0], [1])
    turns.take(done=2, forks=Forks(int32(0, 2), int32(2, 0)))
    step = turns.take(done=2, admissions=(admission(3, 3, prompt),), plan=planned(3, 3, 0, 6))
    assert step.slot_copies is not None
    pairs = zip(step.slot_copies.sources.tolist(), step.slot_copies.targets.tolist(), strict=True)
    assert sorted(pairs) == [(0, 2), (2, 0)]
    manager.check()


def test_no_answer_is_found_where_layers_keep_states_of_slots():
    """Not in the index, not in another answer to the request."""
    turns = Turns(has_slot_state=True)
    manager, prompt = turns.manager, np.arange(10, dtype=np.int32)
    turns.take(admissions=(admission(0, 0, prompt),), plan=planned(1, 0, 0, 10))
    turns.take(done=1, admissions=(admission(1, 1, prompt, request=0),))
    assert manager.take_answer().hits.tolist() == [0, 0]
    manager.check()


def test_the_last_holder_of_a_block_is_known_without_a_search():
    sharing = SharedBlockCounts(blocks=4, slots=8)
    for slot in (5, 3, 6):
        sharing.add(slot, (0, 1))
    sharing.add(6, (2,))
    assert sharing.drain_changed() == ([3, 5, 6], [2, 2, 2])
    sharing.release(5, (0, 1))
    assert sharing.drain_changed() == ([], [])
    sharing.release(3, (0, 1))
    assert sharing.drain_changed() == ([6], [0])
    sharing.release(6, (0, 1, 2))
    assert sharing.drain_changed() == ([], [])
