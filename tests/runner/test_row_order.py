"""Which of a step's chunks are computed as decode rows, and where their results stand."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoactor.messages import Forks, ScoredChunks, Step
from nanoactor.models.devices.cuda import CUDADevice
from nanoactor.models.kernels.decode_step.table import MOST_ROWS
from nanoactor.runner.batch import BatchTraits, HostBatch
from nanoactor.runner.row_order import RowOrder
from nanoactor.runner.warmup import admissions

SLOTS = 8
NONE = np.empty(0, np.int32)


def int32(*values):
    return np.array(values, np.int32)


COUNTS = st.integers(0, 4)


@given(COUNTS, COUNTS, COUNTS, COUNTS)
def test_results_are_told_in_their_order_wherever_rows_stand(prompts, resumed, decodes, late):
    standing = ["p"] * prompts + ["d"] * decodes + ["r"] * resumed + ["l"] * late
    places = RowOrder(prompts, resumed, decodes).places(np.arange(len(standing)))
    assert sorted(places) == [*range(len(standing))]
    told = [standing[place] for place in places]
    assert told == ["p"] * prompts + ["r"] * resumed + ["d"] * decodes + ["l"] * late
    for kind in "prdl":  # each in its own order
        own = [int(place) for place, of in zip(places, told, strict=True) if of == kind]
        assert own == sorted(own)


def step_of(chunks, *, joins=(), **others):
    """A step of chunks (slot, start, tokens, samples); all slots' outputs begin at 10. Slots from 6
    on are constrained."""
    slots, starts, counts, samples = (np.array(column) for column in zip(*chunks, strict=True))
    new = admissions(np.arange(SLOTS, dtype=np.int32))
    new = dataclasses.replace(
        new, prompt_lengths=np.full(SLOTS, 10, np.int32), constrained=int32(6, 7)
    )
    total = int(counts.sum())
    return Step(
        1,
        slots.astype(np.int32),
        starts.astype(np.int32),
        counts.astype(np.int32),
        samples.astype(np.bool_),
        np.arange(100, 100 + total, dtype=np.int32),
        int32(*joins),
        NONE,
        NONE,
        NONE,
        NONE,
        NONE,
        new,
        **others,
    )


def update_of(chunks, runs_from=1 << 30, **others):
    batch = HostBatch(SLOTS, 4, BatchTraits(fused_sampling="none", runs_as_rows_from=runs_from))
    return batch, batch.update(step_of(chunks, **others))


def test_the_newest_token_of_an_output_is_a_row_behind_the_decode_batch():
    chunks = [(2, 0, 10, True), (5, 14, 1, True), (0, 10, 1, True), (4, 11, 1, False)]
    chunks += [(6, 12, 1, False)]
    batch, update = update_of(chunks, joins=(1, 3))
    assert update.order == RowOrder(prompts=1, resumed=2, decodes=2)
    assert update.continued == 4
    state = np.full(batch.layout.size, -1, np.int64)
    state[update.indices] = update.values
    rows = batch.layout.rows
    assert state[rows : rows + 6].tolist() == [1, 3, 5, 0, 4, 6]
    for slot, start, token in ((5, 14, 110), (0, 10, 111), (4, 11, 112), (6, 12, 113)):
        (row,) = np.flatnonzero(state[rows : rows + 6] == slot)
        assert state[batch.layout.row_positions + row] == start
        assert state[batch.layout.row_token_ids + row] == token
        assert state[batch.layout.lengths + slot] == batch.lengths[slot] == start + 1
    assert update.prefill.sampling.tolist() == [2]
    assert update.deferred.continued_slots.tolist() == [6]
    # As they stand: the prompt, the decode batch, those that go on.
    (sampled,) = update.fallback
    assert sampled.slots.tolist() == [2, 1, 3, 5, 0]
    assert sampled.index.tolist() == [0, 1, 2, 3, 4]


SCORED = ScoredChunks(int32(0), int32(14), int32(1), int32(40))
FORKS = Forks(int32(0), int32(4), np.array([9]), NONE, NONE)


@pytest.mark.parametrize(
    ("chunk", "others"),
    [
        pytest.param((5, 9, 1, True), {}, id="the last of a prompt"),
        pytest.param((5, 14, 2, True), {}, id="two tokens"),
        pytest.param((5, 14, 1, True), {"scored": (SCORED,)}, id="one that is scored"),
        pytest.param((5, 14, 1, True), {"forks": (FORKS,)}, id="beside forks"),
    ],
)
def test_other_chunks_stay_chunks(chunk, others):
    _, update = update_of([chunk], **others)
    assert (update.continued, update.resumed) == (0, 0)
    assert update.prefill.rows.shape[1] == 1


def test_chunks_before_one_that_stays_stay_too():
    """The planner never has them in that order; results must follow the chunks'."""
    _, update = update_of([(5, 14, 1, True), (2, 0, 10, True), (0, 12, 1, True)])
    assert update.order == RowOrder(prompts=2, resumed=1, decodes=0)
    assert update.prefill.sampling.tolist() == [5, 2]


def rows_of(batch, update):
    """(slot, position, token) of each row, a position of -1 being the slot's next."""
    layout, state = batch.layout, np.full(batch.layout.size, -1, np.int64)
    state[update.indices] = update.values
    columns = (layout.rows, layout.row_positions, layout.row_token_ids)
    return list(zip(*(state[at : at + update.decode_rows].tolist() for at in columns), strict=True))


RUNS = [(6, 20, 2, False), (7, 12, 3, False), (5, 14, 1, True), (4, 11, 1, False)]


def test_the_tokens_of_a_run_are_rows_of_which_the_last_is_kept():
    batch, update = update_of(RUNS, joins=(1,), runs_from=1)
    assert update.prefill is None
    assert update.order == RowOrder(prompts=0, resumed=1, decodes=1)
    assert rows_of(batch, update)[1:] == [
        (5, 14, 105),
        (6, 20, 100),
        (7, 12, 102),
        (7, 13, 103),
        (4, 11, 106),
        (6, 21, 101),
        (7, 14, 104),
    ]
    assert update.deferred.continued_slots.tolist() == [6, 7]
    assert batch.lengths[[4, 5, 6, 7]].tolist() == [12, 15, 22, 15]
    following = dataclasses.replace(
        step_of([(0, 0, 1, False)]), slots=NONE, starts=NONE, counts=NONE, token_ids=NONE
    )
    following = dataclasses.replace(following, samples=NONE.astype(bool), admissions=NOBODY)
    update = batch.update(following)
    assert update.decode_rows == 1
    state = np.full(batch.layout.size, -7, np.int64)
    state[update.indices] = update.values
    behind = slice(batch.layout.row_positions + 1, batch.layout.row_positions + 8)
    assert (state[behind] == -1).all(), "who decodes there next goes on where its slot is"


NOBODY = admissions(NONE)


@pytest.mark.parametrize(
    ("runs_from", "joins", "chunks", "prompts"),
    [
        pytest.param(8, (1,), RUNS, 0, id="as many rows as there must be"),
        pytest.param(9, (1,), RUNS, 2, id="fewer"),
        pytest.param(1, (1, 2), RUNS, 1, id="room for one run"),
        pytest.param(1, (0, 1, 2, 3), RUNS[1:], 1, id="room for none"),
        pytest.param(1, (), [(7, 12, 17, False)], 1, id="a long run"),
        pytest.param(1, (), [(7, 9, 2, False)], 1, id="a prompt"),
        pytest.param(1, (), [(5, 14, 2, True)], 1, id="a free output"),
    ],
)
def test_runs_are_rows_where_there_is_room(runs_from, joins, chunks, prompts):
    _, update = update_of(chunks, joins=joins, runs_from=runs_from)
    assert (update.prefill.rows.shape[1] if update.prefill else 0) == prompts
    assert update.decode_rows <= SLOTS
    if prompts == 2:
        assert update.continued == 2, "single tokens are rows all the same"


def test_a_run_that_is_scored_stays_a_chunk():
    scored = ScoredChunks(int32(0), int32(20), int32(2), int32(40, 41))
    _, update = update_of(RUNS, joins=(1,), runs_from=1, scored=(scored,))
    assert update.prefill.rows[0].tolist() == [6]


def test_steps_of_the_kernel_for_few_rows_have_no_two_of_a_sequence():
    """It reads the cache of a row while others still write theirs."""
    slots, sizes = MOST_ROWS + 8, set()
    for decodes in range(slots - 2):
        traits = BatchTraits(runs_as_rows_from=CUDADevice.runs_as_rows_from)
        batch = HostBatch(slots, 4, traits)
        new = admissions(np.arange(slots, dtype=np.int32))
        new = dataclasses.replace(
            new, prompt_lengths=np.full(slots, 10, np.int32), constrained=int32(slots - 1)
        )
        step = step_of([(slots - 1, 12, 3, False)], joins=range(decodes))
        update = batch.update(dataclasses.replace(step, admissions=new))
        assert (update.prefill is None) == (update.decode_rows > decodes)
        if update.prefill is None:
            sizes.add(update.decode_rows)
    assert sizes == {*range(MOST_ROWS + 1, slots + 1)}
