"""The running sequences' counters as arrays, so that a step of hundreds costs a few operations."""

from __future__ import annotations

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

    def enter(self, sequence: Sequence, slot: int, blocks: int) -> None:
        """A sequence takes a slot; all of its known tokens are to be prefilled."""
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
        self.held[slot] = self.running[slot] = False

    def decodable(self) -> NDArray[np.bool_]:
        """By slot: may one more token be asked for? Position p samples token p + 1."""
        prefilled = self.running & (self.scheduled >= self.targets)
        return prefilled & (self.scheduled + 2 <= self.limits)

    def at_block_end(self) -> NDArray[np.bool_]:
        """By slot: does the next position need one more block?"""
        full: NDArray[np.bool_] = self.scheduled == self.room
        return full

    def take(self, slots: Slots, tokens: Int32) -> Int32:
        """Append a token to each of these; returns the tokens' indices in the outputs."""
        known = self.known[slots]
        self.tokens[slots, known] = tokens
        self.known[slots] = known + 1
        return (known - self.prompts[slots]).astype(np.int32)
