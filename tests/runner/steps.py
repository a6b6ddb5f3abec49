"""Steps made by hand for runners."""

import dataclasses

import numpy as np

from nanoactor.messages.engine import Step
from nanoactor.messages.rows import Rows, Want
from nanoactor.runner.steps.warmup import admissions

SAMPLE, KEEP, SCORE, DECODE = Want.SAMPLE, Want.KEEP, Want.SCORE, Want.DECODE
NONE = np.empty(0, np.int32)
NOBODY = admissions(NONE)


def int32(*values):
    return np.array(values, np.int32)


def rows_of(*rows):
    """Rows of (slot, start, count, wants), and the slot of the source for a copy."""
    slots, starts, counts, wants, sources = zip(*((*row, -1)[:5] for row in rows), strict=True)
    return Rows(
        int32(*slots), int32(*starts), int32(*counts), np.array(wants, np.uint8), int32(*sources)
    )


def step_of(*rows, number=1, leaves=(), token_ids=None, new=NOBODY, **others):
    """A step of such rows; tokens count from 100 if they are not given."""
    made = rows_of(*rows) if rows else Rows(NONE, NONE, NONE, NONE.astype(np.uint8), NONE)
    if token_ids is None:
        token_ids = np.arange(100, 100 + int(made.ids.sum()), dtype=np.int32)
    tables = dict(table_slots=NONE, table_starts=NONE, table_counts=NONE, table_blocks=NONE)
    return Step(number, made, int32(*leaves), token_ids, **(tables | others), admissions=new)


def introduced(slots, prompt_lengths, **more):
    """Sequences in so many slots, whose outputs begin at these positions."""
    new = admissions(np.arange(slots, dtype=np.int32))
    return dataclasses.replace(new, prompt_lengths=int32(*prompt_lengths), **more)


def permuted(step, order):
    """The same step with its rows in a different order."""
    ids = np.split(step.token_ids, np.cumsum(step.rows.ids)[:-1])
    token_ids = np.concatenate([ids[row] for row in order])
    return dataclasses.replace(step, rows=step.rows.take(np.array(order)), token_ids=token_ids)
