"""Results of a step, grouped by outcome and checked against the plan."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from typing import NamedTuple

import numpy as np

from nanoactor.errors import ProtocolBug
from nanoactor.messages.engine import Int32, StepDone
from nanoactor.messages.pooling import Float32, StepVectors
from nanoactor.models.limits import FROZEN, NO_TOKEN, NOTHING_ALLOWED
from nanoactor.scheduling.sequences.sequence import Sequence
from nanoactor.scheduling.sequences.table import DecodeBatch
from nanoactor.scheduling.steps.planned import PlannedRow, PlannedStep
from nanoactor.scheduling.steps.queues import RunningBatch


class Results(NamedTuple):
    """The rows of a step that should have yielded a token or a vector, grouped by outcome."""

    batch: DecodeBatch
    """The decode rows that yielded a token; `tokens` has one token (int32) for each."""
    tokens: Int32
    singles: list[tuple[PlannedRow, int]]
    """(row, token) of each row outside the decode batch that yielded a token."""
    failed: list[tuple[Sequence, int, int]]
    """(sequence, slot, first position) of each row with non-finite logits or vectors."""
    choiceless: list[Sequence]
    """Sequences whose rules leave no token to sample."""
    frozen: int = 0
    """Number of decode rows without a token. The device stops decoding a slot (freezes it) when it
    samples a token that ends the sequence or its free text."""
    pooled: Sequence_[tuple[PlannedRow, Float32]] = ()
    """(row, vector) of each pooling row with a finite vector."""


def check_due(due: PlannedStep | None, event: StepDone, running: RunningBatch) -> PlannedStep:
    """Return `due`, the oldest step in flight. Raises `ProtocolBug` if `event` reports another
    step, or if its results do not match the step's rows."""
    matches = due is not None and due.step == event.step and due.num_sampled == len(event.token_ids)
    if due is not None and matches and _has_vectors(due, event):
        is_decode_only = not due.rows and not len(event.counts)
        if is_decode_only or np.array_equal(due.counts, event.counts):
            return due
    rows = running.sequences_in(due) if due else []
    raise ProtocolBug(
        f"step {event.step} is reported done with {len(event.token_ids)} tokens of rows "
        f"{event.counts.tolist()}; "
        f"{f'step {due.step}' if due else 'none'} was due with {due.num_sampled if due else 0} of "
        f"{due.counts.tolist() if due else []}: "
        + "; ".join(sequence.describe() for sequence in rows)
    )


def _has_vectors(due: PlannedStep, event: StepDone) -> bool:
    """Return True if the event has vectors for exactly the step's pooling rows."""
    found: list[int] = [] if event.vectors is None else event.vectors.rows.tolist()
    if not found and not due.rows:
        return True
    first = len(due.decode_batch.slots)
    return found == [number for number, row in enumerate(due.rows, first) if row.pools]


def split_rows(done: PlannedStep, event: StepDone, running: RunningBatch) -> Results:
    """Group a step's rows by outcome. Raises `ProtocolBug` if the device has stopped decoding a
    sequence that, according to the scheduler, still decodes."""
    batch, num_decodes = done.decode_batch, len(done.decode_batch.slots)
    tokens = event.token_ids[:num_decodes].copy()
    sampling = [row for row in done.rows if row.samples]
    singles = list(zip(sampling, event.token_ids[num_decodes:].tolist(), strict=True))
    pooled, non_finite = _split_pooled(done, event.vectors)
    if event.token_ids.min(initial=0) >= 0:
        return Results(batch, tokens, singles, non_finite, [], pooled=pooled)
    yielded = tokens >= 0
    slots, codes = batch.slots[~yielded], tokens[~yielded].tolist()
    owners = zip(running.owners(slots), slots.tolist(), codes, strict=True)
    coded = [((sequence, slot, sequence.length - 1), code) for sequence, slot, code in owners]
    coded += [
        ((row.sequence, row.slot, row.start - row.is_choice), code)
        for row, code in singles
        if code < 0
    ]
    frozen = [sequence for (sequence, _, _), code in coded if code == FROZEN]
    for sequence in frozen:
        if sequence.accepts_step(done.step):
            raise ProtocolBug(f"step {done.step} froze the slot of {sequence.describe()}")
    return Results(
        running.table.positions.batch_of(batch.slots[yielded]),
        tokens[yielded],
        [(row, token) for row, token in singles if token >= 0],
        failed=[*non_finite, *(row for row, code in coded if code == NO_TOKEN)],
        choiceless=[row[0] for row, code in coded if code == NOTHING_ALLOWED],
        frozen=len(frozen),
        pooled=pooled,
    )


def _split_pooled(
    done: PlannedStep, vectors: StepVectors | None
) -> tuple[list[tuple[PlannedRow, Float32]], list[tuple[Sequence, int, int]]]:
    """Return (row, vector) of the pooling rows with finite vectors, and the others in the format of
    `Results.failed`."""
    if vectors is None:
        return [], []
    rows, values = [row for row in done.rows if row.pools], vectors.values.copy()
    finite_rows = [bool(np.isfinite(vector).all()) for vector in values]
    triples = list(zip(rows, values, finite_rows, strict=True))
    return (
        [(row, vector) for row, vector, finite in triples if finite],
        [(row.sequence, row.slot, row.start) for row, _, finite in triples if not finite],
    )
