"""The running sequences' counters as arrays, so that a step of hundreds costs a few operations."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nanoactor.messages import Int32

if TYPE_CHECKING:
    from nanoactor.scheduling.sequence import Sequence

Slots = NDArray[np.int64]
"""Slot numbers, ascending."""


class RunningTable:
    """One row for each slot. A row means something while its slot is held."""

    def __init__(self, slots: int, max_model_len: int, block_size: int) -> None:
        self._block_size = block_size
        self.owners: list[Sequence | None] = [None] * slots
        """Who holds, or held last, each slot: results in flight still find whose they are."""
        self.held = np.zeros(slots, np.bool_)
        self.running = np.zeros(slots, np.bool_)
        """Held, and its match is answered."""
        self.uids = np.zeros(slots, np.int64)
        self.prompts = np.zeros(slots, np.int64)
        """Length of the prompt: where output begins."""
        self.limits = np.zeros(slots, np.int64)
        self.targets = np.zeros(slots, np.int64)
        self.scheduled = np.zeros(slots, np.int64)
        self.known = np.zeros(slots, np.int64)
        self.room = np.zeros(slots, np.int64)
        """Positions that its blocks hold."""
        self.last_steps = np.zeros(slots, np.int64)
        """The last planned step with a row of it."""
        self.tokens = np.empty((slots, max_model_len), np.int32)
        """Every known token; memory that is never written costs nothing."""

        self._decode_batch: Slots = np.empty(0, np.int64)
        """The slots of the latest decode set, ..."""
        self._steady = 0
        """... how many more steps it stays as it is unless something happens, ..."""
        self._ahead = 0
        """... and how many steps of it stand in neither of these arrays yet: their last is ..."""
        self._ahead_step = 0
        self._taking = _Taking.of(self, self._decode_batch)

    def enter(self, sequence: Sequence, slot: int, blocks: int) -> None:
        """A sequence takes a slot; all of its known tokens are to be prefilled."""
        self.settle()
        tokens = sequence.tokens
        self.owners[slot] = sequence
        self.held[slot], self.running[slot] = True, False
        self.uids[slot], self.prompts[slot] = sequence.uid, sequence.prompt_length
        self.limits[slot], self.targets[slot] = sequence.limit, len(tokens)
        self.scheduled[slot], self.known[slot] = 0, len(tokens)
        self.room[slot], self.last_steps[slot] = blocks * self._block_size, 0
        self.tokens[slot, : len(tokens)] = tokens

    def leave(self, slot: int) -> None:
        """Its sequence gives the slot up."""
        self.settle()
        self._steady = 0
        self.held[slot] = self.running[slot] = False
        self.forget_columns()

    def forget_columns(self) -> None:
        """What is known of a slot has changed otherwise than by `take`."""
        self._taking = _Taking.of(self, np.empty(0, np.int64))

    def settle(self) -> None:
        """Write down what steady steps have added."""
        if self._ahead:
            self.scheduled[self._decode_batch] += self._ahead
            self.last_steps[self._decode_batch] = self._ahead_step
            self._ahead = 0

    def prefill(self, slot: int, count: int) -> None:
        """A step computes so many more positions of a prompt; it may decode in the next."""
        self._steady = 0
        self.scheduled[slot] += count

    def decodable(self) -> NDArray[np.bool_]:
        """By slot: may one more token be asked for? Position p samples token p + 1."""
        self.settle()
        prefilled = self.running & (self.scheduled >= self.targets)
        return prefilled & (self.scheduled + 2 <= self.limits)

    def at_block_end(self) -> NDArray[np.bool_]:
        """By slot: does the next position need one more block?"""
        full: NDArray[np.bool_] = self.scheduled == self.room
        return full

    def decode_again(self, step: int) -> Slots | None:
        """The decode set of the step before, one position further; None where it may differ.

        Most steps are such: nobody comes, ends or needs a block.
        """
        if not self._steady:
            return None
        self._steady -= 1
        self._ahead += 1
        self._ahead_step = step
        return self._decode_batch

    def decode(self, slots: Slots, step: int, all_fed: bool) -> None:
        """These slots decode in a step; `all_fed` where nobody else wants to."""
        self.settle()
        self._steady = 0
        scheduled = self.scheduled[slots] + 1
        self.scheduled[slots] = scheduled
        self.last_steps[slots] = step
        if not np.array_equal(slots, self._decode_batch):
            self._decode_batch = slots
        if all_fed and len(slots):
            ends = np.minimum(self.room[slots], self.limits[slots] - 1)
            self._steady = int((ends - scheduled).min())

    @property
    def decode_batch(self) -> Slots:
        """The latest decode set, the same object as long as it does not change."""
        return self._decode_batch

    def all_held(self, slots: Slots) -> bool:
        """Whether all of these still belong to whom they did when they were planned."""
        if self._taking.slots is slots:
            return self._taking.all_held
        return bool(self.held[slots].all())

    def take(self, slots: Slots, tokens: Int32) -> _Taking:
        """Append a token to each of these, all held; what is known of them then."""
        taking = self._taking
        if taking.slots is not slots:
            taking = self._taking = _Taking.of(self, slots)
        self.tokens[slots, taking.known] = tokens
        taking.known = taking.known + 1
        self.known[slots] = taking.known
        return taking


@dataclasses.dataclass(slots=True)
class _Taking:
    """Columns of the slots that took tokens last, kept because the next step has the same."""

    slots: Slots
    known: Int32
    prompts: Int32
    limits: Int32
    uids: NDArray[np.int64]
    slots32: Int32
    all_held: bool

    @classmethod
    def of(cls, table: RunningTable, slots: Slots) -> _Taking:
        columns = (table.known, table.prompts, table.limits)
        known, prompts, limits = (column[slots].astype(np.int32) for column in columns)
        held = bool(table.held[slots].all())
        return cls(slots, known, prompts, limits, table.uids[slots], slots.astype(np.int32), held)

    @property
    def indices(self) -> Int32:
        """Of the newest tokens in their outputs."""
        return self.known - self.prompts - np.int32(1)

    @property
    def full(self) -> NDArray[np.bool_]:
        """Which of them have reached their limit."""
        full: NDArray[np.bool_] = self.known >= self.limits
        return full
