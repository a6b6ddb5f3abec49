"""Which of a step's rows are computed as decode rows, and where each stands on the device."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoactor.messages.rows import NO_ROWS, RowExpander, Want, compress_rows
from nanoactor.models.devices.cuda.device import PORTABLE_TRAITS, with_kernels
from nanoactor.models.devices.cuda.kernels.decode_step.table import MAX_ROWS
from nanoactor.runner.batch.batch import BatchTraits, HostBatch
from tests.runner.steps import DECODE, KEEP, SAMPLE, SCORE, introduced, rows_of, step_of

SLOTS = 8
JOIN = SAMPLE | DECODE


def decoding(*slots):
    return [(slot, 20, 1, JOIN) for slot in slots]


def update_of(*rows, runs_from=1 << 30, **others):
    """All slots' outputs begin at 10."""
    batch = HostBatch(SLOTS, 4, BatchTraits(fused_sampling="none", min_rows_for_runs=runs_from))
    return batch, batch.update(step_of(*rows, new=introduced(SLOTS, [10] * SLOTS), **others))


def state_of(batch, update, fill=-1):
    state = np.full(batch.layout.size, fill, np.int64)
    indices, values = update.inputs.changes
    state[indices] = values
    return state


def standing(batch, update):
    """(slot, position, token) of each decode row, a position of -1 being the slot's next."""
    layout, state = batch.layout, state_of(batch, update)
    columns = (layout.rows, layout.row_positions, layout.row_token_ids)
    return list(zip(*(state[at : at + update.decode_rows].tolist() for at in columns), strict=True))


# -- rows as they are sent ----------------------------------------------------------------

BATCHES = st.lists(st.sets(st.integers(0, SLOTS - 1)), min_size=1, max_size=8)


@given(BATCHES, st.data())
def test_rows_come_back_as_they_were_before_they_were_compressed(batches, data):
    """Of any course of decode batches, in any order of the rows that are sent."""
    expander, positions = RowExpander(SLOTS), np.full(SLOTS, 5)
    before = np.zeros(SLOTS, np.bool_)
    for batch in batches:
        now = np.isin(np.arange(SLOTS), [*batch])
        rest = sorted({*range(SLOTS)} - batch)
        each = [(slot, int(positions[slot]), 2, KEEP) for slot in rest]
        others = rows_of(*each) if each else NO_ROWS
        rows, leaves = compress_rows(before, now, positions, others)
        order = data.draw(st.permutations(range(len(rows))))
        found = expander.expand(rows.take(np.array(order, np.int64)), leaves)
        assert found.decode_slots.tolist() == sorted(batch)
        assert found.decode_starts.tolist() == positions[sorted(batch)].tolist()
        assert sorted(found.others.slots.tolist()) == rest
        positions[now] += 1
        positions[rest] += 2
        before = now


def test_a_steady_batch_is_sent_as_nothing():
    flags = np.array([True, False, True])
    rows, leaves = compress_rows(flags, flags, np.zeros(3), NO_ROWS)
    assert len(rows) == len(leaves) == 0


# -- rows on the device -------------------------------------------------------------------


def test_the_newest_token_of_an_output_is_a_row_behind_the_decode_batch():
    rows = [(2, 0, 10, SAMPLE), (5, 14, 1, SAMPLE), *decoding(1, 3), (4, 11, 1, Want(0))]
    batch, update = update_of(*rows, (6, 12, 1, KEEP), (0, 10, 1, SAMPLE))
    assert [(slot, at) for slot, at, _ in standing(batch, update)[:2]] == [(1, -1), (3, -1)]
    behind = [(5, 14, 110), (0, 10, 113), (4, 11, 111), (6, 12, 112)]
    assert standing(batch, update)[2:] == behind
    state = state_of(batch, update)
    for slot, position, _ in behind:
        assert state[batch.layout.lengths + slot] == position + 1
    assert update.prefill.sampling.tolist() == [2]
    assert update.inputs.kept.continued.tolist() == [6]
    # As they stand: the prompt, the decode batch, those that go on.
    (sampled,) = update.inputs.fallback
    assert sampled.slots.tolist() == [2, 1, 3, 5, 0]
    assert sampled.index.tolist() == [0, 1, 2, 3, 4]
    # Results are by row: the decode batch, then the others as they were sent.
    assert update.counts.tolist() == [1, 1, 1, 1, 0, 0, 1]
    assert sampled.slots[update.order].tolist() == [1, 3, 2, 5, 0]
    assert update.positions.tolist() == [10, 21, 21, 15, 11]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param((5, 9, 1, SAMPLE), id="the last of a prompt"),
        pytest.param((5, 14, 2, SAMPLE), id="two tokens"),
        pytest.param((5, 14, 1, SAMPLE | SCORE), id="one that is scored"),
    ],
)
def test_other_rows_are_chunks(row):
    _, update = update_of(row)
    assert update.continued == 0
    assert update.prefill.rows.shape[1] == 1


def test_a_copy_samples_after_its_source_and_has_its_length():
    rows = [(4, 0, 0, SAMPLE, 6), (3, 0, 9, Want(0)), (7, 0, 0, KEEP, 6), (6, 4, 6, SAMPLE)]
    batch, update = update_of(*rows)
    # After its 15 tokens in all, those of the first chunk first.
    assert update.prefill.ends.tolist() == [14, 14, 14]
    assert update.prefill.sampling.tolist() == [6, 4]
    assert update.inputs.kept.prompts.tolist() == [7]
    state = state_of(batch, update)
    assert [state[batch.layout.lengths + slot] for slot in (6, 4, 7)] == [10, 10, 10]
    assert update.counts.tolist() == [1, 0, 0, 1]
    assert update.prefill.sampling[update.order].tolist() == [4, 6]


RUNS = [(6, 20, 2, KEEP), (7, 12, 3, KEEP), (5, 14, 1, SAMPLE), (4, 11, 1, Want(0))]


def test_the_tokens_of_a_run_are_rows_of_which_the_last_is_kept():
    batch, update = update_of(*RUNS, *decoding(1), runs_from=1)
    assert update.prefill is None
    assert (update.decodes, update.resumed) == (1, 1)
    assert standing(batch, update)[1:] == [
        (5, 14, 105),
        (6, 20, 100),
        (7, 12, 102),
        (7, 13, 103),
        (4, 11, 106),
        (6, 21, 101),
        (7, 14, 104),
    ]
    assert update.inputs.kept.continued.tolist() == [6, 7]
    update = batch.update(step_of(number=2))
    assert update.decode_rows == 1
    state = state_of(batch, update, fill=-7)
    behind = slice(batch.layout.row_positions + 1, batch.layout.row_positions + 8)
    assert (state[behind] == -1).all(), "who decodes there next goes on where its slot is"


@pytest.mark.parametrize(
    ("runs_from", "joins", "rows", "prompts"),
    [
        pytest.param(8, (1,), RUNS, 0, id="as many rows as there must be"),
        pytest.param(9, (1,), RUNS, 2, id="fewer"),
        pytest.param(1, (1, 2), RUNS, 1, id="room for one run"),
        pytest.param(1, (0, 1, 2, 3), RUNS[1:], 1, id="room for none"),
        pytest.param(1, (), [(7, 12, 17, KEEP)], 1, id="a long run"),
        pytest.param(1, (), [(7, 9, 2, KEEP)], 1, id="a prompt"),
        pytest.param(1, (), [(5, 14, 2, SAMPLE)], 1, id="a free output"),
        pytest.param(1, (1,), [(6, 20, 2, KEEP | SCORE), *RUNS[1:]], 1, id="one is scored"),
    ],
)
def test_runs_are_rows_where_there_is_room(runs_from, joins, rows, prompts):
    _, update = update_of(*rows, *decoding(*joins), runs_from=runs_from)
    assert (update.prefill.rows.shape[1] if update.prefill else 0) == prompts
    assert update.decode_rows <= SLOTS
    if prompts == 2:
        assert update.continued == 2, "single tokens are rows all the same"


def test_steps_of_the_kernel_for_few_rows_have_no_two_of_a_sequence():
    """It reads the cache of a row while others still write theirs."""
    slots, sizes = MAX_ROWS + 8, set()
    for decodes in range(slots - 2):
        batch = HostBatch(
            slots, 4, BatchTraits(min_rows_for_runs=with_kernels(PORTABLE_TRAITS).min_rows_for_runs)
        )
        rows = [*decoding(*range(decodes)), (slots - 1, 12, 3, KEEP)]
        update = batch.update(step_of(*rows, new=introduced(slots, [10] * slots)))
        assert (update.prefill is None) == (update.decode_rows > decodes)
        if update.prefill is None:
            sizes.add(update.decode_rows)
    assert sizes == {*range(MAX_ROWS + 1, slots + 1)}
