"""The block tables and the known tokens of all sequences that have a slot."""

from __future__ import annotations

import dataclasses

import numpy as np

from nanoactor.errors import ProtocolBug
from nanoactor.kv.computed import ComputedPositions
from nanoactor.kv.copies import PendingCopies
from nanoactor.kv.holding import Holding, SharedBlockCounts
from nanoactor.kv.pool import BlockPool
from nanoactor.messages.engine import Int32, KnownTokens
from nanoactor.messages.rows import Long, concatenate_ranges

_NOTHING_HELD = -1


class BlockTables:
    """The block table, the known tokens and the progress of each sequence that has a slot.

    The block manager changes them according to the turns (messages from the scheduler).
    `PrefixIndex` reads them to index full blocks, and `StepBinder` to complete plans to steps.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_seqs: int,
        max_model_len: int,
        has_slot_state: bool,
    ) -> None:
        """`has_slot_state` is True if layers keep state by slot, outside the blocks. Copies of slot
        states are then sent to the runners."""
        self.pool = pool
        self.block_size = block_size
        self.holdings: dict[int, Holding] = {}
        """By slot, the record of the blocks of the sequence that has the slot."""
        self.copies = PendingCopies(slots=has_slot_state)
        self.sharing = SharedBlockCounts(pool.blocks, max_seqs)
        self.turn = 0
        """Number of the turn that is being processed, for error messages."""
        # Arrays by slot, so that a step of hundreds of decode rows takes only a few operations.
        self.tokens = np.empty((max_seqs, max_model_len), np.int32)
        """Known tokens by slot, (max_seqs, max_model_len)."""
        self.known = np.full(max_seqs, _NOTHING_HELD)
        """Number of known tokens by slot; negative if the slot holds nothing."""
        self.capacity = np.zeros(max_seqs, np.int64)
        """Number of positions that each slot's blocks can hold; 0 if the slot holds nothing."""
        self.next_index = np.zeros(max_seqs, np.int64)
        """End position of each slot's first block that is not indexed yet."""
        self.computed = ComputedPositions(max_seqs)

    def holding(self, slot: int) -> Holding:
        """Return the record of the blocks of the sequence that has this slot. Raises `ProtocolBug`
        if there is none."""
        holding = self.holdings.get(slot)
        if holding is None:
            raise ProtocolBug(f"turn {self.turn} refers to slot {slot}, which no request holds")
        return holding

    def describe(self, slot: int) -> str:
        """Describe the state of a slot in use, for error messages."""
        holding = self.holdings[slot]
        return (
            f"request {holding.uid} in slot {slot}: {self.known[slot]} tokens known, "
            f"{holding.filled} filled, {len(holding.table)} blocks of {self.block_size}, "
            f"indexed to {self.next_index[slot] - self.block_size}"
        )

    def assign(self, slot: int, holding: Holding, tokens: Int32, indexed: int) -> None:
        """Assign a slot to a holding (the record of a sequence's blocks) with these known tokens
        (int32). The first `indexed` blocks of the holding are already indexed."""
        self.holdings[slot] = holding
        self.sharing.add(slot, holding.table)
        self.tokens[slot, : len(tokens)] = tokens
        self.known[slot] = len(tokens)
        self.computed.begin(slot)
        self.capacity[slot] = len(holding.table) * self.block_size
        self.next_index[slot] = (indexed + 1) * self.block_size

    def grow(self, slot: int) -> None:
        """Allocate one more block for a slot."""
        block = self.pool.allocate()
        self.holding(slot).table.append(block)
        self.sharing.add(slot, (block,))
        self.capacity[slot] += self.block_size

    def add_known(self, event: KnownTokens) -> Long:
        """Record newly known tokens. Return the number of tokens that were known before, for each
        of the event's slots."""
        slots, known = event.slots, self.known[event.slots]
        if len(known) and known.min() < 0:
            self.holding(int(slots[known < 0][0]))
        if len(event.counts):
            places = concatenate_ranges(known, event.counts)
            self.tokens[np.repeat(slots, event.counts), places] = event.token_ids
            self.known[slots] = known + event.counts
        else:
            self.tokens[slots, known] = event.token_ids
            self.known[slots] = known + 1
        if len(event.runs):
            starts = self.known[event.runs] - event.run_counts
            self.computed.discard(event.runs, starts.astype(np.int64))
        return known

    def copy(self, uid: int, slot: int, *, spare: bool) -> tuple[Holding, Int32]:
        """Copy a slot whose known tokens are all computed, for the sequence `uid`. The copy shares
        the full blocks; a partly filled block is copied to a new one. If `spare` is True, a new
        block is allocated in any case. Return the holding (record of the blocks) and the tokens of
        the copy."""
        source, known = self.holding(slot), int(self.known[slot])
        if source.filled != known:
            raise ProtocolBug(
                f"request {uid} copies a slot that is not computed: {self.describe(slot)}"
            )
        full, rest = divmod(known, self.block_size)
        table = source.table[:full]
        for block in table:
            self.pool.share(block)
        if rest or spare:
            table.append(self.pool.allocate())
        if rest:
            self.copies.copy_block(source.table[full], table[full])
        copy = dataclasses.replace(source, uid=uid, hashes=source.hashes[:full], table=table)
        copy.announced, copy.shareable = 0, min(source.shareable, full)
        copy.items = source.items.for_copy() if source.items is not None else None
        return copy, self.tokens[slot, :known].copy()

    def release(self, slot: int, fence: int) -> int:
        """Release all blocks of a slot; steps up to `fence` may still use them. Return the number
        of blocks that no slot holds any more."""
        table = self.holdings.pop(slot).table
        self.copies.drop_blocks(table)
        self.sharing.release(slot, table)
        self.capacity[slot], self.known[slot] = 0, _NOTHING_HELD
        return self.pool.release(table[::-1], fence)

    def clear(self) -> None:
        """Forget all sequences, without releasing their blocks."""
        self.holdings.clear()
        self.copies.clear()
        self.computed.clear()
        self.known[:], self.capacity[:] = _NOTHING_HELD, 0
        self.sharing = SharedBlockCounts(self.pool.blocks, len(self.known))
        self.turn = 0
