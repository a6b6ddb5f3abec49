"""Constrained rows of a step: hidden states that are kept by slot, and choices made from them."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from nanoactor.messages import Admissions, Int32, Step
from nanoactor.runner.ruled_rows import NO_ROWS, Long
from nanoactor.runner.sampling_table import SampledRows


@dataclasses.dataclass(frozen=True, slots=True)
class DeferredRows:
    """The work of a step on constrained rows, behind its layers and in this order."""

    prompt_slots: Long
    """The slots in which the last of `Prefill.ends` leave what later choices need, ..."""
    continued_slots: Long
    """... and those of the rows behind the decode batch, which leave theirs."""
    choices: tuple[SampledRows, ...]
    """Rows that choose a token from what their slots have, a few at a time; `index` are slots."""

    @property
    def slots(self) -> Long:
        """Those that choose, in the order of the step's results."""
        return np.concatenate([NO_ROWS, *(part.slots for part in self.choices)])

    @property
    def size(self) -> int:
        """At most so many int32 numbers travel to the device."""
        words = 2 * (len(self.prompt_slots) + len(self.continued_slots)) + 8
        return words + sum(part.size for part in self.choices)


class Continued(NamedTuple):
    """Chunks of one token each that continue constrained outputs."""

    slots: Long
    starts: Long
    """The position of each."""
    token_ids: Int32


class ConstrainedSlots:
    """By slot on the runner's host: who chooses under masks."""

    def __init__(self, max_num_seqs: int) -> None:
        self._flags = np.zeros(max_num_seqs, np.bool_)
        self._outputs = np.zeros(max_num_seqs, np.int32)
        """Where the output begins."""
        self.any = False
        """Whether there has ever been one: else no step looks."""

    def admit(self, new: Admissions) -> None:
        """Take new sequences."""
        if not self.any and not len(new.constrained):
            return
        self.any = True
        self._flags[new.slots] = False
        self._flags[new.slots[new.constrained]] = True
        self._outputs[new.slots] = new.prompt_lengths

    def among(self, slots: Int32) -> Long:
        """Select the rows of these slots that are constrained."""
        return np.flatnonzero(self._flags[slots]) if self.any else NO_ROWS

    def split(self, step: Step) -> tuple[Step, Continued]:
        """Take the chunks of one token that end a step's list and continue an output out of it:
        they can attend as the decode batch does. Pictures stand in prompts alone, so a step with
        some is left as it is."""
        slots, token_ids = step.slots, step.token_ids
        if not self.any or step.vision:
            return step, Continued(NO_ROWS, NO_ROWS, token_ids[:0])
        continues = self._flags[slots] & (step.counts == 1) & (step.starts >= self._outputs[slots])
        for scored in step.scored:
            continues[scored.rows] = False
        rest = len(slots) - int(np.argmin(np.append(continues[::-1], False)))
        last = len(token_ids) - (len(slots) - rest)
        continued = Continued(
            slots[rest:].astype(np.int64),
            step.starts[rest:].astype(np.int64),
            token_ids[last:].copy(),
        )
        step = dataclasses.replace(
            step,
            slots=slots[:rest],
            starts=step.starts[:rest],
            counts=step.counts[:rest],
            samples=step.samples[:rest],
            token_ids=token_ids[:last],
        )
        return step, continued
