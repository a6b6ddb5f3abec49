"""Binding of plans to blocks: conversion of the scheduler's plans into the steps that the runners
compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Set

import numpy as np

from nanoactor.errors import ProtocolBug
from nanoactor.kv.holding import AnswerBuilder
from nanoactor.kv.items import ItemManager
from nanoactor.kv.prefix_index import PrefixIndex
from nanoactor.kv.tables import BlockTables
from nanoactor.messages.engine import Int32, Plan, Step
from nanoactor.messages.rows import NO_ROWS, RowExpander, Rows, StepRows
from nanoactor.messages.vision import VisionStep

_NOTHING: Int32 = np.empty(0, np.int32)
_UNCHANGED = {f"table_{name}": _NOTHING for name in ("slots", "starts", "counts", "blocks")}


class StepBinder:
    """Converts plans into steps, in order: adds block table entries, known token ids, copies, and
    the work on images and videos. The block manager creates a new one at each restart."""

    def __init__(self, tables: BlockTables, index: PrefixIndex, items: ItemManager) -> None:
        self._tables, self._index, self._items = tables, index, items
        self._rows = RowExpander(len(tables.known))

    def bind(self, plan: Plan, admitted: Set[int], answers: AnswerBuilder) -> Step:
        """Convert a plan into a step by adding block ids and the token ids known to the host.
        `admitted` are the slots of the sequences admitted by the same turn (message from the
        scheduler). `answers` collects the content of the next answer to the scheduler."""
        self._index.step = plan.step
        for slot in plan.grows.tolist():
            self._tables.grow(slot)
        copies, slot_copies = self._tables.copies.drain()
        rows_to_send = self._skip_hits(plan.rows, admitted) if admitted else plan.rows
        rows = self._rows.expand(rows_to_send, plan.leaves)
        computing, token_ids = NO_ROWS, _NOTHING
        if len(others := rows.others):
            computing = others.take(others.counts > 0)
            token_ids = self._bind_tokens(plan.step, computing)
            if len(copying := others.take(others.copies)):
                self._bind_copies(plan, copying, answers)
        self._note_ends(plan.step, rows, computing)
        vision = self._bind_items(plan, computing)
        slots = computing.slots, plan.admissions.slots, plan.grows
        changed = dict.fromkeys(slot for part in slots if len(part) for slot in part.tolist())
        return Step(
            plan.step,
            rows_to_send,
            plan.leaves,
            token_ids,
            **(self._announce(changed) if changed else _UNCHANGED),
            admissions=plan.admissions,
            copies=copies,
            slot_copies=slot_copies,
            vision=vision,
        )

    def _skip_hits(self, rows: Rows, admitted: Set[int]) -> Rows:
        """Return the rows without the positions that newly admitted sequences found in the prefix
        cache."""
        starts, counts = rows.starts.copy(), rows.counts.copy()
        for row, slot in enumerate(rows.slots.tolist()):
            if slot in admitted and counts[row]:
                starts[row] = self._tables.holdings[slot].cached
                counts[row] -= starts[row]
        return dataclasses.replace(rows, starts=starts, counts=counts)

    def _note_ends(self, step: int, rows: StepRows, computing: Rows) -> None:
        """Record the end of the positions that a step computes in each slot. Raises `ProtocolBug`
        if a slot has too few blocks for them."""
        tables = self._tables
        slots, ends = rows.decode_slots, rows.decode_starts + 1
        if len(computing):
            tables.computed.discard(computing.slots, computing.starts.astype(np.int64))
            slots = np.concatenate((slots, computing.slots))
            ends = np.concatenate((ends, computing.starts + computing.counts))
        is_past = ends > tables.capacity[slots]
        if is_past.any():
            slot = int(slots[is_past][0])
            tables.holding(slot)
            raise ProtocolBug(f"step {step} writes past the blocks of {tables.describe(slot)}")
        tables.computed.plan(step, slots, ends)

    def _bind_tokens(self, step: int, rows: Rows) -> Int32:
        """Return the token ids of all rows, concatenated, and index the blocks that are full after
        these rows. A row that yields prompt log-probabilities (`Want.SCORE`) also needs the token
        after its last position."""
        tables = self._tables
        chunks: list[Int32] = []
        columns = (rows.slots, rows.starts, rows.counts, rows.ids)
        for slot, start, count, ids in zip(*(c.tolist() for c in columns), strict=True):
            end = start + count
            if end > tables.known[slot]:
                tables.holding(slot)
                description = tables.describe(slot)
                raise ProtocolBug(
                    f"step {step} computes unknown tokens, {start}+{count}, of {description}"
                )
            chunk = tables.tokens[slot, start : start + ids]
            if end == tables.known[slot] and ids > count:  # no known token follows the row
                chunk = np.append(chunk[:count], np.int32(0))
            chunks.append(chunk)
            tables.holdings[slot].filled = end
            self._index.index_full_blocks(slot, end)
        return np.concatenate(chunks) if chunks else _NOTHING

    def _bind_copies(self, plan: Plan, rows: Rows, answers: AnswerBuilder) -> None:
        """Start new sequences as copies of sequences whose known tokens are all computed by this
        step."""
        tables = self._tables
        uids = dict(zip(plan.admissions.slots.tolist(), plan.admissions.uids.tolist(), strict=True))
        for slot, source in zip(rows.slots.tolist(), rows.sources.tolist(), strict=True):
            if slot in tables.holdings:
                raise ProtocolBug(
                    f"step {plan.step} copies slot {source} to a slot in use: "
                    f"{tables.describe(slot)}"
                )
            copy, tokens = tables.copy(uids[slot], source, spare=False)
            answers.add_copy(copy)
            tables.assign(slot, copy, tokens, indexed=len(copy.hashes))
        tables.copies.copy_slots(rows.slots.tolist(), rows.sources.tolist())

    def _bind_items(self, plan: Plan, rows: Rows) -> VisionStep | None:
        if plan.slices is None and not len(rows):
            return None
        held = [self._tables.holdings[slot].items for slot in rows.slots.tolist()]
        chunks = list(zip(held, rows.starts.tolist(), rows.counts.tolist(), strict=True))
        bound = self._items.bind(plan.slices, chunks)
        for items, start, count in chunks:
            if items is not None:
                self._items.advance(items, start + count, plan.step)
        return bound

    def _announce(self, slots: Iterable[int]) -> dict[str, Int32]:
        """Return the block table entries of these slots that were not sent to the runners yet, as
        fields of `Step`."""
        changed, starts, counts = [], [], []
        blocks: list[int] = []
        for slot in slots:
            holding = self._tables.holdings[slot]
            new = holding.table[holding.announced :]
            if new:
                changed.append(slot)
                starts.append(holding.announced)
                counts.append(len(new))
                blocks += new
                holding.announced = len(holding.table)
        columns = {"slots": changed, "starts": starts, "counts": counts, "blocks": blocks}
        return {f"table_{name}": _int32(values) for name, values in columns.items()}


def _int32(values: Iterable[int]) -> Int32:
    return np.array(list(values), np.int32)
