"""Whatever arrives, in whatever order messages interleave: the reference's tokens, and an end."""

import random

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from nanoactor.errors import ProtocolBug
from nanoactor.messages import Abort, Match, Plan, StepDone, StepWanted
from nanoactor.scheduling.scheduler import SchedulerConfig
from nanoactor.scheduling.seen import SeenNumbers
from tests.scheduling.simulation import EOS, Simulation


def config(**changes):
    values = dict(
        blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64
    )
    return SchedulerConfig(**{**values, **changes})


def storm(simulation, requests, aborts=True, stops=True):
    """Random arrivals with shared prefixes, among random deliveries."""
    rng = simulation.rng
    stems = [[rng.randrange(50) for _ in range(40)] for _ in range(3)]
    live = []
    for _ in range(requests):
        stem = rng.choice(stems)[: rng.randrange(0, 40)]
        prompt = stem + [rng.randrange(50) for _ in range(rng.randrange(1, 12))]
        limit = simulation.config.max_model_len
        kind = rng.random()
        if kind < 0.05:
            live.append(simulation.reject())
        else:
            live.append(
                simulation.request(
                    prompt[: limit - 1],
                    max_tokens=rng.randrange(1, 40),
                    stop_ids=(EOS,) if rng.random() < 0.7 else (),
                    min_tokens=rng.choice([0, 0, 5]) if kind < 0.5 else 0,
                    priority=rng.choice([0, 0, 0, 1]),
                    stop=rng.randrange(10) if stops and rng.random() < 0.1 else None,
                )
            )
        if aborts and rng.random() < 0.25:
            # Some overtake their own admission, some come long after the end.
            simulation.abort(rng.choice(live[-3:] if rng.random() < 0.5 else live))
        for _ in range(rng.randrange(0, 30)):
            simulation.step()
    simulation.drain()


shapes = st.builds(
    config,
    blocks=st.sampled_from([16, 17, 24, 64]),
    block_size=st.sampled_from([4, 5]),
    max_num_seqs=st.sampled_from([1, 2, 8]),
    max_num_batched_tokens=st.sampled_from([8, 9, 32, 200]),
    depth=st.sampled_from([1, 2, 3]),
    plan_lead=st.sampled_from(["eager", "late"]),
)


@settings(max_examples=120, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(shapes, st.integers(0, 2**32))
def test_every_schedule_gives_the_reference_tokens(shape, seed):
    storm(Simulation(shape, seed), requests=25)


def test_the_storms_reach_what_they_are_about():
    """Preemptions, hits, mixed steps, overruns, aborts, sitting out: all happen, many times."""
    total = dict(preemptions=0, mixed_steps=0, overruns=0, aborted=0, sat_out=0, hits=0, evicted=0)
    for seed in range(12):
        simulation = Simulation(config(blocks=20, depth=2), seed)
        storm(simulation, requests=40)
        for name in total:
            total[name] += getattr(simulation.scheduler.statistics, name, 0)
        total["hits"] += simulation.manager.hit_tokens
        total["evicted"] += simulation.manager.pool.evictions
    assert min(total.values()) > 20, total


@pytest.mark.long
def test_a_million_tokens_of_storms():
    tokens, seed = 0, 10_000
    while tokens < 1_000_000:
        rng = random.Random(seed)
        shape = config(
            blocks=rng.choice([16, 20, 40, 200]),
            max_num_seqs=rng.choice([1, 3, 8, 32]),
            max_num_batched_tokens=rng.choice([32, 64, 256]),
            depth=rng.choice([1, 2, 3]),
            plan_lead=rng.choice(["eager", "late"]),
        )
        simulation = Simulation(shape, seed)
        storm(simulation, requests=60)
        statistics = simulation.scheduler.statistics
        tokens += statistics.prefill_tokens + statistics.decode_tokens
        seed += 1


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
    while not victim.in_flight:
        simulation.step()
    scheduler._preempt(victim)
    known = len(victim.tokens)
    assert not any(isinstance(m, Match) for _, m in route(simulation, StepWanted(0)))
    while victim.in_flight:
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
    steps = simulation.scheduler.statistics.steps
    simulation.drain()
    assert simulation.finished[uid].reason in ("abort", "length")
    assert simulation.outputs[other] == simulation.expected[other]
    assert steps >= 0


def test_an_abort_frees_its_blocks_within_depth_plus_one_steps():
    simulation = Simulation(config(depth=2))
    uid = simulation.request(list(range(20)), max_tokens=40, stop_ids=())
    simulation.request([9, 8, 7], max_tokens=40, stop_ids=())
    while len(simulation.outputs.get(uid, ())) < 5:
        simulation.step()
    simulation.abort(uid)
    at = simulation.scheduler.statistics.steps
    assert simulation.finished[uid].reason == "abort"
    held = simulation.config.blocks - simulation.scheduler.credits
    while simulation.config.blocks - simulation.scheduler.credits > held - 5:
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


def test_late_planning_lets_a_new_request_join_the_very_next_step():
    steps = {}
    for lead in ("eager", "late"):
        simulation = Simulation(config(depth=2, plan_lead=lead))
        simulation.request([1, 2], max_tokens=30, stop_ids=())
        planned = []
        while simulation.scheduler.statistics.steps < 6:
            simulation.step()
        simulation.request([3, 4], max_tokens=2)
        before = simulation.scheduler.statistics.steps
        simulation.deliver("to_s")
        while (
            not any(isinstance(m, Match) for m in simulation.edges["to_b"])
            and 1 not in simulation.finished
        ):
            simulation.step()
        simulation.drain()
        steps[lead] = before
        assert not planned
    assert steps["late"] <= steps["eager"]


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
    assert len(simulation.scheduler._waiting) < 10
    simulation.drain()


def test_a_result_that_was_not_due_tells_the_story_of_its_sequences():
    simulation = Simulation(config(depth=1))
    simulation.request([1, 2, 3], max_tokens=5, stop_ids=())
    while not simulation.edges["done"]:
        simulation.step()
    wrong = StepDone(1, np.zeros(2, np.int32), 0.0)
    with pytest.raises(ProtocolBug, match=r"was due with 1: request 0 \(running, slot 0\)"):
        simulation.scheduler.handle(wrong)
