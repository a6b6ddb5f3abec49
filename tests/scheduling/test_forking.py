"""Several answers to one prompt, event by event."""

import numpy as np
import pytest

from nanoactor.kv.hashing import block_hashes
from nanoactor.kv.manager import BlockManager
from nanoactor.messages import (
    Abort,
    Admit,
    Credits,
    Forks,
    Free,
    Match,
    Plan,
    RequestSpec,
    SampledTokens,
    Stopping,
    TextOptions,
    Tokens,
)
from nanoactor.models.columns import pack
from nanoactor.scheduling.config import SchedulerConfig
from nanoactor.scheduling.family import Family
from nanoactor.scheduling.plan_builder import _NO_ADMISSIONS
from nanoactor.scheduling.scheduler import Scheduler

SALT = b"0123456789abcdef"


def scheduler(**changes):
    values = dict(
        blocks=20, block_size=4, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64
    )
    return Scheduler(SchedulerConfig(**{**values, **changes}))


def admit(prompt, answers, uid=0, priority=0, **asked):
    tokens = np.array(prompt, np.int32)
    sampling = b"".join(pack({"seed": number}) for number in range(answers))
    options, stopping = TextOptions((), False, True, 0), Stopping(20, 0, (), ())
    spec = RequestSpec(priority, sampling, stopping, options, **asked)
    return Admit(uid, spec, tokens, len(tokens), block_hashes(tokens, 4, SALT))


def credited(matched=(), tainted=()):
    none, zeros = np.empty(0, np.int32), np.zeros(len(matched), np.int32)
    uids, bad = np.array(matched, np.int64), np.array(tainted, np.int64)
    return Credits(uids, zeros, zeros, none, none, None, 0, bad)


def of_kind(sent, kind):
    return [message for _, message in sent if isinstance(message, kind)]


def begun(logic, prompt, answers):
    """Have a request's prompt planned to its end; returns the plan."""
    (match,) = of_kind(logic.handle(admit(prompt, answers)), Match)
    assert (match.uid, match.blocks) == (0, -(-len(prompt) // 4))
    (plan, *_) = of_kind(logic.handle(credited(matched=[0])), Plan)
    return plan


@pytest.mark.parametrize(("length", "each"), [(9, 1), (8, 0), (3, 1)])
def test_answers_begin_where_the_prompt_ends(length, each):
    logic = scheduler(depth=1)
    plan = begun(logic, range(length), 3)
    (forks,) = plan.forks
    assert forks.rows.tolist() == [0, 0]
    assert forks.uids.tolist() == [1, 2]
    assert logic.budget.credits == 20 - -(-length // 4) - 2 * each
    assert plan.admissions.slots.tolist() == [0, *forks.slots]


def test_those_without_a_slot_wait():
    logic = scheduler(max_num_seqs=2)
    plan = begun(logic, range(9), 5)
    assert plan.forks[0].uids.tolist() == [1]
    assert logic.figures()["waiting"] == 3
    assert logic.figures()["live"] == 5


def test_an_answer_follows_the_next_when_the_first_ends():
    logic = scheduler()
    logic.handle(admit(range(9), 3))
    sent = logic.handle(Abort(0))
    assert [match.uid for match in of_kind(sent, Match)] == [1]
    assert logic.figures()["live"] == 2


@pytest.mark.parametrize("length", [8, 9])
def test_who_has_the_blocks_of_a_tainted_answer_fails_with_it(length):
    """Also where the copies were planned after the taint was found, and it was not told yet."""
    logic = scheduler()
    begun(logic, range(length), 3)
    sent = logic.handle(credited(tainted=[0]))
    finishes = [finish for tokens in of_kind(sent, Tokens) for finish in tokens.finishes]
    assert {finish.uid: finish.reason for finish in finishes} == dict.fromkeys(range(3), "failed")


def test_so_do_copies_of_one_that_is_over():
    logic = scheduler()
    begun(logic, range(9), 3)
    logic.handle(Abort(0))
    sent = logic.handle(credited(tainted=[0]))
    finishes = [finish for tokens in of_kind(sent, Tokens) for finish in tokens.finishes]
    assert {finish.uid: finish.reason for finish in finishes} == {1: "failed", 2: "failed"}


class Member:
    """What a family knows of an answer."""

    def __init__(self, uid, slot, prompt_length, scheduled):
        self.uid, self.slot, self.lent = uid, slot, 0
        self.prompt_length, self.scheduled = prompt_length, scheduled


def test_what_others_hold_is_not_given_back():
    family = Family(range(3))
    first, second, third = (Member(uid, uid, 10, 10) for uid in range(3))
    family.lend(first, second, 2, 4)
    assert family.held_by_others(first) == family.held_by_others(second) == 2
    family.lend(second, third, 1, 4)
    assert family.held_by_others(third) == 1
    family.leave(first)
    assert [family.held_by_others(one) for one in (first, second, third)] == [0, 1, 1]
    family.leave(second)
    assert family.held_by_others(third) == 0


def test_who_holds_the_blocks_lends_them():
    family = Family(range(3))
    early, late, other = Member(0, 0, 10, 9), Member(1, 1, 10, 12), Member(7, 2, 10, 12)
    assert family.lender([early, other]) is None
    assert family.lender([early, late]) is late
    family.lend(late, early, 2, 4)
    assert family.lender([]) is late
    family.leave(late)
    late.slot = -1
    assert family.lender([late]) is None  # the one that holds them has not been through the prompt
    early.scheduled = 10
    assert family.lender([late]) is early


# -- the block manager --------------------------------------------------------------------


def int32(*values):
    return np.array(values, np.int32)


def planned(step, slot, start, count, last, **more):
    """A step with one chunk."""
    none = int32()
    flags = np.array([last], np.bool_)
    chunk = (int32(slot), int32(start), int32(count), flags)
    return Plan(step, *chunk, none, none, none, _NO_ADMISSIONS, **more)


def test_a_copy_of_what_is_bad_is_not_trusted():
    """The second prompt hits the first one's blocks, which turn out bad; then it is copied."""
    manager = BlockManager(20, 4, 4, 64, SALT)
    prompt = np.arange(14, dtype=np.int32)
    first, whole = prompt[:9], block_hashes(prompt, 4, SALT)
    manager.match(Match(0, 0, first, whole[:2], 3))
    manager.bind_blocks(planned(1, 0, 0, 9, True))
    manager.match(Match(1, 1, prompt, whole, 4))
    assert manager.take_credits().hits.tolist() == [0, 8]
    manager.record_tokens(SampledTokens(1, int32(), int32(), int32(0), int32(0)))
    assert manager.take_credits().tainted.tolist() == [0, 1]
    forks = Forks(int32(0), int32(2), np.array([2], np.int64), int32(), int32())
    step = manager.bind_blocks(planned(2, 1, 8, 6, True, forks=(forks,)))
    assert len(step.forks[0].copies) == 1
    manager.record_tokens(SampledTokens(2, int32(1, 2), int32(5, 5), int32(), int32()))
    # Its next tokens fill the copied block.
    none, flags = int32(), np.zeros(0, np.bool_)
    for number, token, joins in ((3, 6, int32(2)), (4, 7, none)):
        plan = Plan(number, none, none, none, flags, joins, none, none, _NO_ADMISSIONS)
        manager.bind_blocks(plan)
        manager.record_tokens(SampledTokens(number, int32(2), int32(token), none, none))
    manager.index()
    assert not manager.pool._index
    manager.check()


def test_a_copys_blocks_are_its_sources_and_come_back_once():
    manager = BlockManager(20, 4, 4, 64, SALT, prefix_caching=False)
    prompt = np.arange(10, dtype=np.int32)
    manager.match(Match(0, 0, prompt, block_hashes(prompt, 4, SALT), 3))
    forks = Forks(int32(0, 0), int32(1, 2), np.array([1, 2], np.int64), int32(), int32())
    step = manager.bind_blocks(planned(1, 0, 0, 10, True, forks=(forks,)))
    tables = [manager._holdings[slot].table for slot in range(3)]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    assert step.forks[0].sources.tolist() == [tables[0][2]] * 2
    assert step.forks[0].copies.tolist() == [tables[1][2], tables[2][2]]
    manager.check()
    # A sibling is found without the prefix cache: all full blocks but what must be computed.
    manager.match(Match(3, 3, prompt, block_hashes(prompt, 4, SALT), 3, sibling=1))
    assert manager._holdings[3].table[:2] == tables[0][:2]
    assert manager.take_credits().refunds.tolist() == [0, 2]
    for slot, freed in ((0, 1), (3, 1), (1, 1), (2, 3)):
        manager.free(Free(int32(slot), 1))
        assert manager.take_credits().freed.tolist() == [freed]
    manager.check()
