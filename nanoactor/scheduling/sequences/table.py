"""The running sequences' counters in arrays, so that a step of hundreds of rows takes few
operations."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from nanoactor.messages.engine import Int32

Slots = NDArray[np.int64]
"""Slot numbers, in ascending order."""


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The slots that decode in a step. Two batches of one table are the same if their versions are
    equal."""

    version: int
    slots: Slots
    members: NDArray[np.bool_]
    """True for each slot of the table that is in the batch; shape (slots,)."""


class ScheduledPositions:
    """The number of positions that the planned steps compute, by slot, and the latest decode batch.

    In most steps no sequence arrives, ends or needs a block, so that the decode batch stays the
    same. Such steps are only counted. Their positions are added to the array when the batch
    changes.
    """

    def __init__(self, slots: int) -> None:
        self._scheduled = np.zeros(slots, np.int64)
        """Number of scheduled positions by slot, not counting the steps in `_pending_steps`."""
        self._last_version = 0
        self._batch = DecodeBatch(0, np.empty(0, np.int64), np.zeros(slots, np.bool_))
        """The latest decode batch."""
        self._stable_steps = 0
        """Number of further steps in which `_batch` stays the same unless `interrupt` is called."""
        self._pending_steps = 0
        """Number of steps of `_batch` that are not added to `_scheduled` yet."""

    @property
    def by_slot(self) -> NDArray[np.int64]:
        """Number of scheduled positions by slot (int64). Read-only."""
        if not self._pending_steps:
            return self._scheduled
        return self._scheduled + self._pending_steps * self._batch.members

    def at(self, slot: int) -> int:
        """Return the number of scheduled positions of a slot."""
        scheduled = int(self._scheduled[slot])
        return scheduled + self._pending_steps if self._batch.members[slot] else scheduled

    def reset(self, slot: int, count: int) -> None:
        """Set the number of scheduled positions of a slot that the latest decode batch does not
        contain."""
        self._scheduled[slot] = count

    def add(self, slot: int, count: int) -> None:
        """Schedule `count` more positions of a slot."""
        self._scheduled[slot] += count

    def lower(self, slot: int, count: int) -> None:
        """Lower a slot's number of scheduled positions to at most `count`. The next decode batch is
        built anew."""
        self.end_batch()
        self._scheduled[slot] = min(int(self._scheduled[slot]), count)

    def interrupt(self) -> None:
        """Force the decode batch to be built anew for the next step."""
        self._stable_steps = 0

    def end_batch(self) -> None:
        """Add all counted steps of the latest decode batch to the array, because one of its slots
        is about to change. The next decode batch is built anew."""
        self._flush_pending()
        self._stable_steps = 0

    def decode_again(self) -> DecodeBatch | None:
        """Schedule the previous decode batch again, one position further; return None if it may
        differ."""
        if not self._stable_steps:
            self._flush_pending()
            return None
        self._stable_steps -= 1
        self._pending_steps += 1
        return self._batch

    def decode(self, slots: Slots, ends: NDArray[np.int64] | None) -> DecodeBatch:
        """Schedule one position of each of these slots and return the batch. Call after
        `decode_again` returned None.

        `ends` is the number of positions of each slot up to which the batch may stay the same; None
        if the batch may change in the next step.
        """
        scheduled = self._scheduled[slots] + 1
        self._scheduled[slots] = scheduled
        if not np.array_equal(slots, self._batch.slots):
            self._batch = self.batch_of(slots)
        self._stable_steps = 0
        if ends is not None:
            self._stable_steps = int((ends - scheduled).min())
        return self._batch

    def batch_of(self, slots: Slots) -> DecodeBatch:
        """Return a batch of these slots (ascending) with a new version."""
        self._last_version += 1
        members = np.zeros(len(self._scheduled), np.bool_)
        members[slots] = True
        return DecodeBatch(self._last_version, slots, members)

    def _flush_pending(self) -> None:
        if self._pending_steps:
            self._scheduled += self._pending_steps * self._batch.members
            self._pending_steps = 0


class RunningTable:
    """Counters and tokens of the running sequences, one row per slot. A row is valid while its slot
    is occupied."""

    def __init__(self, slots: int, max_model_len: int, block_size: int) -> None:
        self._block_size = block_size
        self.occupied = np.zeros(slots, np.bool_)
        self.running = np.zeros(slots, np.bool_)
        """True if the slot's sequence has started, with its prefix-cache lookup done or
        unnecessary; by slot."""
        self.stepwise = np.zeros(slots, np.bool_)
        """True if the slot's sequence never decodes, because its tokens are masked or chosen by its
        caller; by slot."""
        self.uids = np.zeros(slots, np.int64)
        self.prompts = np.zeros(slots, np.int64)
        """Prompt length by slot, which is also the index of the first output token."""
        self.limits = np.zeros(slots, np.int64)
        self.targets = np.zeros(slots, np.int64)
        self.known = np.zeros(slots, np.int64)
        self.capacity = np.zeros(slots, np.int64)
        """Number of positions that the slot's blocks can hold; by slot."""
        self.shared = np.zeros(slots, np.int64)
        """Number of the slot's blocks that other slots also hold, according to the latest answer;
        by slot."""
        self.admission_turns = np.zeros(slots, np.int64)
        """Number of the turn (message to the block manager) that assigned the slot to its sequence;
        by slot."""
        self.tokens = np.empty((slots, max_model_len), np.int32)
        """Known tokens by slot, (slots, max_model_len). Pages that are never written use no
        physical memory."""

        self.positions = ScheduledPositions(slots)
        self._columns: BatchColumns | None = None

    def enter(
        self,
        slot: int,
        *,
        uid: int,
        prompt_length: int,
        limit: int,
        tokens: Int32,
        blocks: int,
        stepwise: bool = False,
    ) -> None:
        """Assign a slot to a sequence whose known tokens all have to be prefilled.

        `tokens` are the known tokens (int32), `limit` is the maximum total number of tokens, and
        `blocks` is the number of blocks that the sequence holds. A `stepwise` sequence never
        decodes.
        """
        self.occupied[slot], self.running[slot] = True, False
        self.stepwise[slot] = stepwise
        self.uids[slot], self.prompts[slot], self.limits[slot] = uid, prompt_length, limit
        self.targets[slot] = self.known[slot] = len(tokens)
        self.capacity[slot] = blocks * self._block_size
        self.positions.reset(slot, 0)
        self.tokens[slot, : len(tokens)] = tokens

    def copy(self, slot: int, tokens: Int32, blocks: int) -> None:
        """Replace the content of a slot by a copy of another sequence: `tokens` (int32), which are
        all computed already, and `blocks` blocks. The slot must be one that never decodes."""
        self.targets[slot] = self.known[slot] = len(tokens)
        self.positions.reset(slot, len(tokens))
        self.tokens[slot, : len(tokens)] = tokens
        self.capacity[slot] = blocks * self._block_size

    def start(self, slot: int, computed: int) -> None:
        """Mark a slot as running after its prefix-cache lookup; `computed` leading positions are
        already computed."""
        self.running[slot] = True
        self.positions.reset(slot, computed)

    def note_shared(self, slots: Int32, shared: Int32, turn: int) -> None:
        """Record how many blocks each of these slots shares with other slots, as of turn number
        `turn` (a message to the block manager). Slots that were reassigned after that turn are
        ignored."""
        current = self.occupied[slots] & (self.admission_turns[slots] <= turn)
        self.shared[slots[current]] = shared[current]

    def leave(self, slot: int) -> None:
        """Release a slot, which may then be assigned to another sequence."""
        if self.stepwise[slot]:  # no decode batch contains it
            self.occupied[slot] = self.running[slot] = False
            return
        self.positions.end_batch()
        self.occupied[slot] = self.running[slot] = False
        self._columns = None

    def rewind(self, slot: int, length: int, *, stepwise: bool) -> None:
        """Make a slot recompute its positions from `length` to the last known token before it
        decodes or samples. Results of planned steps at these positions are overwritten. If
        `stepwise`, the slot does not decode after that either, as in `enter`."""
        self._columns = None
        self.positions.lower(slot, length)
        self.targets[slot] = self.known[slot]
        self.stepwise[slot] = stepwise

    # -- scheduled positions --------------------------------------------------------------

    def scheduled_at(self, slot: int) -> int:
        """Return the number of positions of a slot that the planned steps compute."""
        return self.positions.at(slot)

    def readiness(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return two bool arrays by slot: True for the slots that can decode now, and True for
        those that could decode if they had another block.

        A slot can decode if its prompt is computed and one more token fits within its limit.
        Position p samples token p + 1.
        """
        scheduled = self.positions.by_slot
        eligible = self.running & (scheduled >= self.targets) & (scheduled + 2 <= self.limits)
        eligible &= ~self.stepwise
        starving = eligible & (scheduled == self.capacity)
        return eligible ^ starving, starving

    @property
    def lacks_block(self) -> NDArray[np.bool_]:
        """True for each slot whose running sequence needs another block before it can prefill its
        next known token."""
        lacks: NDArray[np.bool_] = self.running & (self.positions.by_slot == self.capacity)
        return lacks & (self.capacity < self.targets)

    def blocks_at(self, slot: int) -> int:
        """Return the number of blocks that a slot holds."""
        return int(self.capacity[slot]) // self._block_size

    def grow(self, slots: list[int]) -> None:
        """Add one block to each of these slots."""
        self.capacity[slots] += self._block_size

    def prefill(self, slot: int, count: int) -> None:
        """Schedule `count` more prompt positions of a slot, which may then decode in the next
        step."""
        if not self.stepwise[slot]:
            self.positions.interrupt()
        self.positions.add(slot, count)

    def decode(self, slots: Slots, none_starving: bool) -> DecodeBatch:
        """Schedule one position of each of these slots and return the batch. Call after
        `positions.decode_again` returned None.

        `none_starving` is True if no sequence is left out for lack of a block.
        """
        ends = None
        if none_starving and len(slots):
            ends = np.minimum(self.capacity[slots], self.limits[slots] - 1)
        return self.positions.decode(slots, ends)

    # -- known tokens ---------------------------------------------------------------------

    def all_occupied(self, batch: DecodeBatch) -> bool:
        """Return True if all slots of a batch are still occupied."""
        if self._columns is not None and self._columns.version == batch.version:
            return True
        return bool(self.occupied[batch.slots].all())

    def append(self, batch: DecodeBatch, tokens: Int32) -> BatchColumns:
        """Append one token to each slot of a batch; return the batch's columns. All slots must be
        occupied."""
        columns = self._columns
        if columns is None or columns.version != batch.version:
            columns = self._columns = BatchColumns.of(self, batch)
        self.tokens[batch.slots, columns.known] = tokens
        columns.known = columns.known + 1
        self.known[batch.slots] = columns.known
        return columns

    def append_one(self, slot: int, token: int) -> None:
        """Append a token to one slot. If the slot never decodes, that token's position is computed
        next."""
        self.tokens[slot, self.known[slot]] = token
        self.known[slot] += 1
        if self.stepwise[slot]:
            self.targets[slot] = self.known[slot]
        else:
            self._columns = None


@dataclasses.dataclass(slots=True)
class BatchColumns:
    """Columns of the table (counters by slot) for the batch that last received tokens. They are
    cached because the next batch is usually the same.

    All slots of the batch are occupied; the columns are dropped when a sequence leaves one of them.
    """

    version: int
    known: Int32
    prompts: Int32
    limits: Int32
    uids: NDArray[np.int64]
    slots32: Int32

    @classmethod
    def of(cls, table: RunningTable, batch: DecodeBatch) -> BatchColumns:
        """Gather the columns of a batch from the table."""
        slots = batch.slots
        columns = (table.known, table.prompts, table.limits)
        known, prompts, limits = (column[slots].astype(np.int32) for column in columns)
        return cls(
            batch.version,
            known,
            prompts,
            limits,
            uids=table.uids[slots],
            slots32=slots.astype(np.int32),
        )

    @property
    def indices(self) -> Int32:
        """Index of each row's newest token in its output, (rows,)."""
        return self.known - self.prompts - np.int32(1)

    @property
    def at_limit(self) -> NDArray[np.bool_]:
        """True for each row that has reached its maximum length, (rows,)."""
        at_limit: NDArray[np.bool_] = self.known >= self.limits
        return at_limit
