"""What the scheduler and the block manager do in situations chosen one by one.

The random ones are in `tests/simulation`, which plays all actors against each other.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoactor.errors import ProtocolBug
from nanoactor.messages import (
    Abort,
    Admit,
    Match,
    Plan,
    RequestSpec,
    StepDone,
    StepWanted,
    Stopping,
    TextOptions,
    Tokens,
)
from nanoactor.models.columns import pack
from nanoactor.scheduling.config import SchedulerConfig
from nanoactor.scheduling.edges import TEXT
from nanoactor.scheduling.ids import SeenNumbers
from nanoactor.scheduling.scheduler import Scheduler
from tests.scheduling.simulation import Simulation


def config(**changes):
    values = dict(
        blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64
    )
    return SchedulerConfig(**{**values, **changes})


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_one_block_more_than_one_sequence_needs(depth, chunk):
    shape = config(blocks=17, depth=depth, max_num_seqs=1, max_num_batched_tokens=chunk)
    simulation = Simulation(shape)
    simulation.request(list(range(63)), max_tokens=50, stop_ids=())
    simulation.request([1], max_tokens=63, stop_ids=())
    simulation.drain()


def test_a_prefix_that_is_cached_is_not_computed_again():
    simulation = Simulation(config(blocks=200, max_model_len=200, max_num_batched_tokens=256))
    prompt = [i % 50 for i in range(100)]
    simulation.request(prompt, max_tokens=1)
    simulation.drain()
    assert simulation.scheduler.statistics.prefill_tokens == 100
    simulation.request([*prompt, 3, 4], max_tokens=1)
    simulation.drain()
    assert simulation.scheduler.statistics.prefill_tokens == 102
    simulation.request(prompt, max_tokens=1)  # a full hit: the last block is computed again
    simulation.drain()
    assert simulation.scheduler.statistics.prefill_tokens == 106
    assert simulation.finished[2].cached_tokens == 96


def test_a_prefix_that_is_still_being_computed_is_shared():
    simulation = Simulation(config(max_num_batched_tokens=8, depth=1))
    prompt = list(range(40))
    simulation.request(prompt, max_tokens=1)
    while simulation.scheduler.statistics.prefill_tokens < 24:
        simulation.step()
    simulation.request(prompt, max_tokens=1)
    simulation.drain()
    assert simulation.finished[1].cached_tokens >= 24


def test_requests_that_arrive_together_compute_their_prefix_once():
    simulation = Simulation(config(blocks=200, max_num_batched_tokens=256))
    prompt = list(range(40))
    for tail in ([], [1], [2, 3, 4]):
        simulation.request([*prompt, *tail], max_tokens=1)
    simulation.drain()
    # The last token of the first prompt is no full block's; the others share nine or ten blocks.
    assert simulation.scheduler.statistics.prefill_tokens == 40 + 1 + 3
    assert [simulation.finished[uid].cached_tokens for uid in range(3)] == [0, 40, 40]


def test_nobody_waits_for_a_prefix_whose_owner_is_gone():
    simulation = Simulation(config(blocks=200, max_num_batched_tokens=8, depth=1))
    first = simulation.request(list(range(40)), max_tokens=1)
    while simulation.scheduler.statistics.prefill_tokens < 16:
        simulation.step()
    simulation.request(list(range(40)), max_tokens=1)
    simulation.deliver("to_s")
    assert len(simulation.scheduler._waiting) == 1
    simulation.abort(first)
    assert len(simulation.scheduler._waiting) == 0
    simulation.drain()
    assert simulation.finished[1].cached_tokens >= 16


def test_without_a_prefix_cache_nobody_waits_for_a_prefix():
    simulation = Simulation(config(blocks=200, max_num_batched_tokens=256, prefix_caching=False))
    for _ in range(2):
        simulation.request(list(range(40)), max_tokens=1)
    simulation.deliver("to_s")
    simulation.deliver("to_s")
    assert len(simulation.scheduler._waiting) == 0
    simulation.drain()


def test_an_output_is_a_prefix_for_the_next_turn():
    simulation = Simulation(config(blocks=64))
    uid = simulation.request(list(range(10)), max_tokens=14, stop_ids=())
    simulation.drain()
    turn = [*range(10), *simulation.outputs[uid], 1, 2]
    simulation.request(turn, max_tokens=1)
    simulation.drain()
    assert simulation.finished[1].cached_tokens == 20  # of 23 computed, in blocks of 4


def test_the_least_recently_used_chain_is_evicted_children_first():
    simulation = Simulation(config(blocks=16, max_num_seqs=1))
    first, second = list(range(17)), list(range(20, 37))
    for prompt in (first, second, first):
        simulation.request(prompt, max_tokens=1)
        simulation.drain()
    simulation.request(list(range(40, 50)) * 4, max_tokens=1)  # evicts two of the second's
    simulation.drain()
    before = simulation.manager.hit_tokens
    simulation.request(first, max_tokens=1)
    simulation.drain()
    assert simulation.manager.hit_tokens - before == 16
    before = simulation.manager.hit_tokens
    simulation.request(second, max_tokens=1)
    simulation.drain()
    assert simulation.manager.hit_tokens - before == 4  # its first block is the last to go


def test_decoding_sequences_are_in_every_step_beside_a_long_prompt():
    simulation = Simulation(config(max_num_batched_tokens=10, blocks=100, depth=1))
    simulation.request([1, 2, 3], max_tokens=40, stop_ids=())
    while not simulation.outputs.get(0):
        simulation.step()
    before = len(simulation.outputs[0])
    simulation.request(list(range(50)), max_tokens=1)
    while 1 not in simulation.finished:
        simulation.step()
    assert simulation.scheduler.statistics.mixed_steps >= 5
    assert len(simulation.outputs[0]) - before >= 5
    simulation.drain()


def test_the_youngest_is_preempted_and_comes_back():
    simulation = Simulation(config(blocks=16, max_num_seqs=2, max_model_len=60))
    for _ in range(2):
        simulation.request(list(range(20)), max_tokens=35, stop_ids=())
        for _ in range(10):
            simulation.step()
    simulation.drain()
    assert simulation.finished[0].preemptions == 0
    assert simulation.finished[1].preemptions > 0


def test_a_preempted_sequence_waits_for_its_results_whatever_room_there_is():
    simulation = Simulation(config(blocks=64, depth=2))
    uid = simulation.request(list(range(10)), max_tokens=30, stop_ids=())
    while len(simulation.outputs.get(uid, ())) < 3:
        simulation.step()
    scheduler = simulation.scheduler
    victim = scheduler.live[uid]
    while not scheduler._in_flight or not scheduler._in_flight[-1].has_row(victim.slot):
        simulation.step()
    scheduler._preempt(victim)
    known = len(victim.tokens)
    assert not any(isinstance(m, Match) for _, m in route(simulation, StepWanted(0)))
    while victim.last_step > scheduler._completed:
        simulation.step()
    assert len(victim.tokens) > known  # the steps in flight still brought it their tokens
    simulation.drain()


def route(simulation, message):
    """What an event leads to; it goes on its way as usual."""
    before = len(simulation.edges["to_b"])
    simulation.scheduler_gets(message)
    return [("blocks", m) for m in list(simulation.edges["to_b"])[before:]]


def test_a_lower_priority_number_goes_first():
    simulation = Simulation(config(max_num_seqs=1))
    running = simulation.request([1, 2], max_tokens=30, stop_ids=())
    for _ in range(10):
        simulation.step()
    late = simulation.request([1, 3], max_tokens=3, priority=5)
    early = simulation.request([1, 4], max_tokens=3, priority=1)
    simulation.drain()
    assert list(simulation.finished) == [running, early, late]


def test_nobody_is_passed_by_more_later_requests_than_the_priority_window():
    simulation = Simulation(config(max_num_seqs=1, priority_window=3))
    running = simulation.request([1, 2], max_tokens=30, stop_ids=())
    for _ in range(10):
        simulation.step()
    patient = simulation.request([1, 3], max_tokens=3, priority=1)
    eager = [simulation.request([1, number], max_tokens=3) for number in range(4, 10)]
    while simulation.edges["to_s"]:
        simulation.deliver("to_s")
    simulation.drain()
    assert list(simulation.finished) == [running, *eager[:2], patient, *eager[2:]]


def test_no_more_than_depth_steps_are_planned_before_a_free_is_answered():
    simulation = Simulation(config(depth=2))
    uid = simulation.request(list(range(8)), max_tokens=50, stop_ids=())
    simulation.request(list(range(9, 12)), max_tokens=50, stop_ids=())
    while len(simulation.outputs.get(uid, ())) < 4:
        simulation.step()
    simulation.abort(uid)
    at = simulation.scheduler.statistics.steps
    while others := [n for n in ("to_b", "to_r", "done") if simulation.edges[n]]:
        simulation.deliver(others[0])  # everything but the block manager's answer
    assert simulation.scheduler.statistics.steps == at + 2
    simulation.drain()


def test_who_starves_longest_is_fed_first():
    """Five sequences need a block each, and blocks come back one by one."""
    simulation = Simulation(config(depth=1, blocks=64))
    for _ in range(5):
        simulation.request([1], max_tokens=50, stop_ids=())
    scheduler = simulation.scheduler
    simulation.drain_until(lambda: scheduler._table.demand()[0].sum() == 5)
    one, two, three, four, five = scheduler._running
    budget = scheduler.budget
    budget._fenced_blocks.append((1_000, 9))  # so nobody is preempted
    scheduler._planned, budget._credits = 9, 1
    assert scheduler._feed([two, four]) == [two]
    scheduler._planned, budget._credits = 10, 2
    assert scheduler._feed([one, two, four, five]) == [four, one]
    scheduler._planned, budget._credits = 11, 1
    assert scheduler._feed([three, two, five]) == [two]


@pytest.mark.parametrize("moment", range(40))
def test_an_abort_at_any_moment_ends_the_request_once(moment):
    simulation = Simulation(config(depth=2), seed=moment)
    uid = simulation.uid
    if moment == 0:
        simulation.abort(uid)
    assert simulation.request(list(range(20)), max_tokens=20, stop_ids=()) == uid
    other = simulation.request(list(range(15)), max_tokens=20)
    for _ in range(moment):
        simulation.step()
    for _ in range(3):
        simulation.abort(uid)
    aborted = uid not in simulation.finished or simulation.finished[uid].reason == "abort"
    simulation.drain()
    assert simulation.finished[uid].reason == ("abort" if aborted else "length")
    told = simulation.outputs.get(uid, [])
    assert told == simulation.expected[uid][: len(told)]
    assert simulation.outputs[other] == simulation.expected[other]


def test_an_abort_frees_its_blocks_within_depth_plus_one_steps():
    simulation = Simulation(config(depth=2))
    uid = simulation.request(list(range(20)), max_tokens=40, stop_ids=())
    simulation.request([9, 8, 7], max_tokens=40, stop_ids=())
    while len(simulation.outputs.get(uid, ())) < 5:
        simulation.step()
    simulation.abort(uid)
    at = simulation.scheduler.statistics.steps
    assert simulation.finished[uid].reason == "abort"
    held = simulation.config.blocks - simulation.scheduler.budget.credits
    while simulation.config.blocks - simulation.scheduler.budget.credits > held - 5:
        simulation.step()
    assert simulation.scheduler.statistics.steps - at <= 3
    simulation.drain()


def test_a_plan_in_which_nothing_changes_is_small():
    from nanoactor.runtime.codec import encode

    simulation = Simulation(config(max_num_seqs=8, block_size=64, max_model_len=64, blocks=64))
    for number in range(8):
        simulation.request([number, 1, 2], max_tokens=40, stop_ids=())
    sizes = []
    while simulation.step():
        for message in simulation.edges["to_r"]:
            sizes.append(len(encode(message).meta))
    assert min(sizes) < 120


def steps_until_it_joins(lead, seed):
    """How many steps after the last completed one a request is first planned."""
    simulation = Simulation(config(depth=2, plan_lead=lead), seed)
    scheduler = simulation.scheduler
    simulation.request([1, 2], max_tokens=50, stop_ids=())
    while scheduler.statistics.steps < 6:
        simulation.step()
    uid = simulation.request([3, 4], max_tokens=2)
    simulation.deliver("to_s")
    completed = scheduler._completed
    while not any(
        c.sequence.uid == uid for planned in scheduler._in_flight for c in planned.chunks
    ):
        simulation.step()
    return scheduler._in_flight[-1].step - completed


def test_late_planning_lets_a_new_request_join_earlier():
    joins = {lead: [steps_until_it_joins(lead, s) for s in range(30)] for lead in ("eager", "late")}
    assert sum(joins["late"]) < sum(joins["eager"])


def test_a_tombstone_swallows_its_admission():
    simulation = Simulation(config())
    for message in [Abort(2), Abort(2)]:
        simulation.scheduler_gets(message)
    for number in range(3):
        simulation.request([number])
    simulation.drain()
    assert simulation.finished[2].reason == "abort"
    assert 2 not in simulation.opened


@given(st.permutations(range(50)))
def test_seen_numbers_are_remembered_in_bounded_memory(order):
    seen = SeenNumbers()
    for count, number in enumerate(order):
        assert number not in seen
        seen.add(number)
        assert number in seen
        assert len(seen) <= count + 1
    assert len(seen) == 0
    assert 49 in seen
    assert 50 not in seen


@given(st.sets(st.integers(0, 60)), st.integers(0, 60), st.sets(st.integers(0, 80)))
def test_who_lives_behind_a_death_is_told_from_who_is_over(arrived, below, living):
    """In whatever order: requests may arrive before it is told who is to come."""
    living = {number for number in living if number < below}
    arrived &= living
    seen = SeenNumbers()
    for number in sorted(arrived):
        seen.add(number)
    seen.fill(below, living)
    for number in range(below):
        assert (number in seen) == (number not in living or number in arrived)
    for number in living - arrived:
        seen.add(number)
    assert all(number in seen for number in range(below))
    assert len(seen) == 0


@pytest.mark.parametrize(
    ("output", "reason", "stop_reason"),
    [
        ([5, 7], "stop", None),
        ([5, 9], "stop", 9),
        ([5, 6, 8], "length", None),
        ([7, 5], None, None),
    ],
)
def test_an_answer_that_goes_on_behind_its_end_ends_at_once(output, reason, stop_reason):
    scheduler = Scheduler(config(depth=2))
    stopping = Stopping(max_tokens=3, min_tokens=0, eos_ids=(7,), stop_ids=(9,))
    spec = RequestSpec(0, pack({"temperature": 0.0}), stopping, TextOptions((), False, True, 0))
    tokens = np.array([1, 2, *output], np.int32)
    admit = Admit(0, spec, tokens, prompt_length=2, hashes=np.empty((0, 16), np.uint8))
    sent = [message for edge, message in scheduler.handle(admit) if edge == TEXT]
    ends = [
        finish for message in sent if isinstance(message, Tokens) for finish in message.finishes
    ]
    assert [(end.reason, end.stop_reason) for end in ends] == [(reason, stop_reason)] * bool(reason)
    assert bool(scheduler.live) == (reason is None)


def test_the_plan_leaves_before_the_tokens_are_forwarded():
    simulation = Simulation(config(depth=1))
    simulation.request([1, 2], max_tokens=5, stop_ids=())
    while not simulation.edges["done"]:
        simulation.step()
    out = simulation.scheduler.handle(simulation.edges["done"].popleft())
    kinds = [type(message).__name__ for _, message in out]
    assert kinds.index("Plan") < kinds.index("Tokens")
    assert any(isinstance(message, Plan) for _, message in out)


def test_requests_that_end_while_they_wait_are_forgotten():
    simulation = Simulation(config(max_num_seqs=1))
    simulation.request([1, 2], max_tokens=30, stop_ids=())
    for _ in range(10):
        simulation.step()
    for _ in range(500):
        simulation.abort(simulation.request(list(range(40)), priority=1))
        while simulation.edges["to_s"]:
            simulation.deliver("to_s")
    assert len(simulation.scheduler._waiting._ready._heap) < 10
    simulation.drain()


def test_a_result_that_was_not_due_tells_the_story_of_its_sequences():
    simulation = Simulation(config(depth=1))
    simulation.request([1, 2, 3], max_tokens=5, stop_ids=())
    while not simulation.edges["done"]:
        simulation.step()
    none = np.zeros(0, np.int32)
    wrong = StepDone(1, np.zeros(2, np.int32), 0.0, 0, none, [], none)
    with pytest.raises(ProtocolBug, match=r"was due with 1: request 0 \(running, slot 0\)"):
        simulation.scheduler.handle(wrong)
