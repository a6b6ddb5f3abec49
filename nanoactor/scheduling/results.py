"""The results of a step against what was planned: rows that came to nothing are taken out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nanoactor.errors import ProtocolBug
from nanoactor.messages import Int32, StepDone
from nanoactor.scheduling.plan_builder import PlannedStep, as_int32
from nanoactor.scheduling.queues import RunningBatch
from nanoactor.scheduling.sequence import Sequence


class Results(NamedTuple):
    """A step's rows that have a token, and those that have none."""

    done: PlannedStep
    tokens: Int32
    failed: list[Sequence]
    """Their logits were not finite, ..."""
    failed_slots: Int32
    failed_from: Int32
    """... and what they computed from these positions on is bad."""
    choiceless: list[Sequence]


def check_due(due: PlannedStep | None, event: StepDone, running: RunningBatch) -> PlannedStep:
    """Return the oldest step in flight. Raises `ProtocolBug` where it is not the one done."""
    samplers = due.sampling if due else 0
    if due is None or due.step != event.step or samplers != len(event.token_ids):
        rows = running.rows(due) if due else []
        raise ProtocolBug(
            f"step {event.step} is reported done with {len(event.token_ids)} tokens; "
            f"{f'step {due.step}' if due else 'none'} was due with {samplers}: "
            + "; ".join(sequence.describe() for sequence in rows)
        )
    return due


_NO_SLOTS = as_int32(())


def split_rows(done: PlannedStep, event: StepDone, running: RunningBatch) -> Results:
    """Take out the rows that have no token."""
    tokens = event.token_ids.copy()
    if not len(event.failed) and not len(event.choiceless):
        return Results(done, tokens, [], _NO_SLOTS, _NO_SLOTS, [])
    last, decodes = done.last_chunks, done.decode_batch.slots
    rows = [(chunk.sequence, chunk.slot, chunk.start) for chunk in last]
    for sequence, slot in zip(running.owners(decodes), decodes.tolist(), strict=True):
        rows.append((sequence, slot, sequence.length - 1))
    rows += [(row.sequence, row.slot, row.sequence.length - 1) for row in done.deferred]
    failed = [rows[row] for row in event.failed.tolist()]
    kept = np.ones(len(tokens), np.bool_)
    kept[event.failed] = kept[event.choiceless] = False
    first = len(last) + len(decodes)
    rest = PlannedStep(
        done.step,
        [chunk for chunk, keep in zip(last, kept, strict=False) if keep],
        running.table.batch_of(decodes[kept[len(last) : first]]),
        deferred=[
            row
            for row, keep in zip(done.deferred, kept[-len(done.deferred) :], strict=False)
            if keep
        ],
    )
    return Results(
        rest,
        tokens[kept],
        [sequence for sequence, _, _ in failed],
        as_int32(slot for _, slot, _ in failed),
        as_int32(start for _, _, start in failed),
        [rows[row][0] for row in event.choiceless.tolist()],
    )
