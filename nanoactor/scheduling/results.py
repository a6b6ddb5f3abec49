"""The results of a step by row, against what was planned."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nanoactor.errors import ProtocolBug
from nanoactor.messages import Int32, StepDone
from nanoactor.models.limits import NO_TOKEN
from nanoactor.scheduling.planned import PlannedRow, PlannedStep
from nanoactor.scheduling.queues import RunningBatch
from nanoactor.scheduling.sequence import Sequence
from nanoactor.scheduling.table import DecodeBatch


class Results(NamedTuple):
    """The rows of a step that wanted a token, by what became of them."""

    batch: DecodeBatch
    """Decode rows with a token."""
    tokens: Int32
    singles: list[tuple[PlannedRow, int]]
    """Other rows with theirs."""
    failed: list[tuple[Sequence, int, int]]
    """Rows whose logits were not finite: (sequence, slot, first position)."""
    choiceless: list[Sequence]
    """Sequences whose own rules leave no token."""


def check_due(due: PlannedStep | None, event: StepDone, running: RunningBatch) -> PlannedStep:
    """Return the oldest step in flight. Raises `ProtocolBug` where it is not the one done, or has
    other rows than the results."""
    right = due is not None and due.step == event.step and due.sampling == len(event.token_ids)
    if due is not None and right and np.array_equal(due.counts, event.counts):
        return due
    rows = running.rows(due) if due else []
    raise ProtocolBug(
        f"step {event.step} is reported done with {len(event.token_ids)} tokens of rows "
        f"{event.counts.tolist()}; "
        f"{f'step {due.step}' if due else 'none'} was due with {due.sampling if due else 0} of "
        f"{due.counts.tolist() if due else []}: "
        + "; ".join(sequence.describe() for sequence in rows)
    )


def split_rows(done: PlannedStep, event: StepDone, running: RunningBatch) -> Results:
    """Sort the rows by what became of them."""
    batch, decodes = done.decode_batch, len(done.decode_batch.slots)
    tokens = event.token_ids[:decodes].copy()
    sampling = [row for row in done.rows if row.samples]
    singles = list(zip(sampling, event.token_ids[decodes:].tolist(), strict=True))
    if event.token_ids.min(initial=0) >= 0:
        return Results(batch, tokens, singles, [], [])
    owners = running.owners(batch.slots)
    rows = [
        (sequence, slot, sequence.length - 1)
        for sequence, slot in zip(owners, batch.slots.tolist(), strict=True)
    ]
    rows += [(row.sequence, row.slot, row.start - row.is_choice) for row in sampling]
    codes = event.token_ids.tolist()
    kept = tokens >= 0
    return Results(
        running.table.batch_of(batch.slots[kept]),
        tokens[kept],
        [(row, token) for row, token in singles if token >= 0],
        failed=[row for row, code in zip(rows, codes, strict=True) if code == NO_TOKEN],
        choiceless=[
            row[0] for row, code in zip(rows, codes, strict=True) if code < 0 and code != NO_TOKEN
        ],
    )
