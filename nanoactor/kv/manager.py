"""The block manager's logic: block tables, prefix cache hits, and conversion of plans into steps.

The manager receives turns (messages with the scheduler's decisions) and returns steps and answers.
It does no I/O and reads no clock. It relies on the scheduler to count the free blocks, so an
allocation fails only if an invariant is broken. Error messages about a slot describe the slot's
state.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Iterable, Mapping

import numpy as np

from nanoactor.errors import ProtocolBug
from nanoactor.kv.copies import PendingCopies
from nanoactor.kv.hashing import block_hash
from nanoactor.kv.holding import AnswerBuilder, Holding, SharedBlockCounts, propagate_taint
from nanoactor.kv.items import HeldItems, ItemManager
from nanoactor.kv.leftovers import Leftovers
from nanoactor.kv.pool import BlockPool
from nanoactor.media.units import NO_ENCODER, EncoderLimits
from nanoactor.messages.engine import (
    Admission,
    Answer,
    Failures,
    Forks,
    Int32,
    KnownTokens,
    Plan,
    Step,
    Turn,
)
from nanoactor.messages.rows import NO_ROWS, Long, RowExpander, Rows, StepRows, concatenate_ranges
from nanoactor.messages.vision import VisionStep

_NOTHING_HELD = -1
_NO_EXTRAS: Mapping[int, bytes] = {}
_NOTHING: Int32 = np.empty(0, np.int32)
_UNCHANGED = {f"table_{name}": _NOTHING for name in ("slots", "starts", "counts", "blocks")}


@dataclasses.dataclass(slots=True)
class PrefixHits:
    """Counts of prefix cache hits since the engine started."""

    prompt_tokens: int = 0
    """Number of tokens of all admitted sequences. A preempted sequence counts again when it is
    admitted again."""
    hit_tokens: int = 0
    """Number of these tokens that were found in the prefix cache."""

    def note(self, prompt_tokens: int, hit_tokens: int) -> None:
        """Count an admitted sequence with `prompt_tokens` tokens, of which `hit_tokens` are already
        computed."""
        self.prompt_tokens += prompt_tokens
        self.hit_tokens += hit_tokens


class BlockManager:
    """Owns the block tables, reference counts, prefix index and eviction order of the KV cache.
    `apply_turn` processes one message from the scheduler, and `take_answer` returns the replies."""

    def __init__(
        self,
        blocks: int,
        block_size: int,
        max_seqs: int,
        max_model_len: int,
        salt: bytes,
        prefix_caching: bool = True,
        encoder: EncoderLimits = NO_ENCODER,
        has_slot_state: bool = False,
    ) -> None:
        """`has_slot_state` is True if layers keep state by slot, outside the blocks. Prefix caching
        is then off, and copies of slot states are sent to the runners."""
        prefix_caching = prefix_caching and not has_slot_state
        self.pool = BlockPool(blocks)
        self.items = ItemManager(encoder)
        self._leftovers = Leftovers(self.pool, block_size)
        self._sharing = SharedBlockCounts(blocks, max_seqs)
        self._rows = RowExpander(max_seqs)
        self._turn = self._step = 0
        """Number of the last processed turn (message from the scheduler), and of the last planned
        step."""
        self._recently_indexed: deque[tuple[int, int]] = deque()
        """Recently indexed blocks as (step, block). `step` was the last planned step when the block
        was indexed; the entry is kept until that step is known to be done."""
        self._block_size = block_size
        self._salt = salt
        self._prefix_caching = prefix_caching
        self._holdings: dict[int, Holding] = {}
        self._released: deque[tuple[int, int, Holding]] = deque()
        """(last step that may use it, slot, record of its blocks) of each released slot in which
        steps in flight may have rows."""
        self._copies = PendingCopies(slots=has_slot_state)
        # Arrays by slot, so that a step of hundreds of decode rows takes only a few operations.
        self._tokens = np.empty((max_seqs, max_model_len), np.int32)
        """Known tokens by slot, (max_seqs, max_model_len)."""
        self._known = np.full(max_seqs, _NOTHING_HELD)
        """Number of known tokens by slot; negative if the slot holds nothing."""
        self._capacity = np.zeros(max_seqs, np.int64)
        """Number of positions that each slot's blocks can hold; 0 if the slot holds nothing."""
        self._next_index = np.zeros(max_seqs, np.int64)
        """End position of each slot's first block that is not indexed yet."""
        self._computed = np.zeros(max_seqs, np.int64)
        """Number of positions by slot that are computed by steps known to be done."""
        self._in_flight: deque[tuple[int, Long, Long]] = deque()
        """(step, slots, end position of each slot) of each step that is not known to be done."""
        self._admitted: set[int] = set()
        """Slots of the sequences admitted by the current turn (message from the scheduler)."""
        self._to_index: list[tuple[int, int]] = []
        """(slot, number of tokens whose positions are computed) of each slot in which a block has
        filled up since the last call of `index`."""
        self._answers = AnswerBuilder()
        self._forget_number = 0
        """Number of the last executed order to clear the index."""
        self.hits = PrefixHits()

    def apply_turn(self, turn: Turn) -> Step | None:
        """Process a turn (all scheduler decisions that follow from one event). Return its step;
        None if the turn plans no step.

        Raises `ProtocolBug` if a turn is out of order or contradicts what the slots hold.
        """
        if turn.number != self._turn + 1:
            raise ProtocolBug(
                f"turn {turn.number} arrived after turn {self._turn}, but turns must be consecutive"
            )
        self._turn = turn.number
        self._admitted.clear()
        self._complete(turn.done)
        if turn.failures is not None:
            self._distrust(turn.failures)
        if turn.forks is not None:
            self._fork(turn.forks, turn.fence)
        if turn.known is not None:
            self._record_known(turn.known)
        if len(turn.frees):
            self._free(turn.frees, turn.fence)
        if turn.drop_pixels is not None:
            self.items.drop(turn.drop_pixels)
        if turn.forget_index:
            self._forget_index(turn.forget_index)
        for admission in turn.admissions:
            self._admit(admission)
        return None if turn.plan is None else self._bind(turn.plan)

    # -- admission ------------------------------------------------------------------------

    def _admit(self, event: Admission) -> None:
        """Allocate blocks for a slot: cached ones for the longest known prefix, then new ones.

        At least one token is always left to compute, because sampling the next token requires its
        hidden state.
        """
        self.index()
        slot = event.slot
        if slot in self._holdings:
            raise ProtocolBug(
                f"slot {slot} is assigned to a request, but is still held by {self._describe(slot)}"
            )
        tokens = event.token_ids
        items = None
        if event.items is not None:
            items = HeldItems.of(event.items, len(tokens), self._block_size)
        extras = items.extras if items is not None else _NO_EXTRAS
        hashes = self._complete_hashes([bytes(row) for row in event.hashes], tokens, extras)
        table = self._find_prefix(event, hashes[: (len(tokens) - 1) // self._block_size])
        refund = sum(map(self.pool.share, table))
        hits = len(table)
        computed = hits * self._block_size
        max_cached = min(len(tokens) - 1, self._max_hits(event))
        if hits not in extras and (
            partial := self._leftovers.claim(hashes[:hits], tokens[computed:max_cached])
        ):
            table.append(partial.block)
            computed += partial.positions
        table += [self.pool.allocate() for _ in range(event.blocks - len(table))]
        holding = Holding(event.uid, hashes, table, items, extras, event.request)
        holding.shareable, holding.cached, holding.filled = len(event.hashes), computed, computed
        if items is None:
            self.items.match_no_items()
        else:
            assert event.items is not None
            self.items.match(items, event.items, computed)
        self._assign_slot(slot, holding, tokens, indexed=hits)
        self.hits.note(len(tokens), computed)
        self._answers.uids.append(event.uid)
        self._answers.hits.append(computed)
        self._answers.refunds.append(refund)
        self._answers.is_due = True
        self._admitted.add(slot)

    def _assign_slot(self, slot: int, holding: Holding, tokens: Int32, indexed: int) -> None:
        """Assign a slot to a holding (the record of a sequence's blocks) with these known tokens
        (int32). The first `indexed` blocks of the holding are already indexed."""
        self._holdings[slot] = holding
        self._sharing.add(slot, holding.table)
        self._tokens[slot, : len(tokens)] = tokens
        self._known[slot], self._computed[slot] = len(tokens), 0
        self._capacity[slot] = len(holding.table) * self._block_size
        self._next_index[slot] = (indexed + 1) * self._block_size

    def _find_prefix(self, event: Admission, hashes: list[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix: from the index or, without prefix caching,
        from another sequence of the same request."""
        hashes = hashes[: self._max_hits(event) // self._block_size]
        if not self._prefix_caching:
            return self._lent_blocks(event.request)[: len(hashes)]
        found: list[int] = []
        for content in hashes:
            if (block := self.pool.find(content)) is None:
                break
            found.append(block)
        return found

    def _max_hits(self, event: Admission) -> int:
        return 0 if self._copies.has_slots else event.max_hits

    def _lent_blocks(self, request: int) -> list[int]:
        """Return the full prompt blocks of a sequence of the request that has computed them; an
        empty list if there is none. `request` is the uid of the request's first sequence."""
        size = self._block_size
        for holding in self._holdings.values():
            if holding.request == request and holding.filled >= holding.shareable * size:
                return [] if holding.distrusted else holding.table[: holding.shareable]
        return []

    def _complete_hashes(
        self, hashes: list[bytes], tokens: Int32, extras: Mapping[int, bytes]
    ) -> list[bytes]:
        """Append the hashes of full blocks that are missing from `hashes`, and return `hashes`. An
        admission only contains the hashes of the prompt's blocks."""
        size = self._block_size
        for index in range(len(hashes), len(tokens) // size if self._prefix_caching else 0):
            block = tokens[index * size : (index + 1) * size]
            parent, extra = hashes[-1] if hashes else b"", extras.get(index, b"")
            hashes.append(block_hash(parent, block, self._salt, extra))
        return hashes

    # -- planning -------------------------------------------------------------------------

    def _bind(self, plan: Plan) -> Step:
        """Convert a plan into a step by adding block ids and the token ids known to the host."""
        self._step = plan.step
        for slot in plan.grows.tolist():
            block = self.pool.allocate()
            self._holding(slot).table.append(block)
            self._sharing.add(slot, (block,))
            self._capacity[slot] += self._block_size
        copies, slot_copies = self._copies.drain()
        rows_to_send = self._skip_hits(plan.rows) if self._admitted else plan.rows
        rows = self._rows.expand(rows_to_send, plan.leaves)
        computing, token_ids = NO_ROWS, _NOTHING
        if len(others := rows.others):
            computing = others.take(others.counts > 0)
            token_ids = self._bind_tokens(computing)
            if len(copying := others.take(others.copies)):
                self._bind_copies(plan, copying)
        self._note_ends(rows, computing)
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

    def _skip_hits(self, rows: Rows) -> Rows:
        """Return the rows without the positions that sequences admitted by this turn (message from
        the scheduler) found in the prefix cache."""
        starts, counts = rows.starts.copy(), rows.counts.copy()
        for row, slot in enumerate(rows.slots.tolist()):
            if slot in self._admitted and counts[row]:
                starts[row] = self._holdings[slot].cached
                counts[row] -= starts[row]
        return dataclasses.replace(rows, starts=starts, counts=counts)

    def _note_ends(self, rows: StepRows, computing: Rows) -> None:
        """Record the end of the positions that a step computes in each slot. Raises `ProtocolBug`
        if a slot has too few blocks for them."""
        slots, ends = rows.decode_slots, rows.decode_starts + 1
        if len(computing):
            self._discard_ends(computing.slots, computing.starts.astype(np.int64))
            slots = np.concatenate((slots, computing.slots))
            ends = np.concatenate((ends, computing.starts + computing.counts))
        is_past = ends > self._capacity[slots]
        if is_past.any():
            slot = int(slots[is_past][0])
            self._holding(slot)
            raise ProtocolBug(f"step {self._step} writes past the blocks of {self._describe(slot)}")
        self._in_flight.append((self._step, slots, ends))

    def _discard_ends(self, slots: Int32, starts: Long) -> None:
        """Treat positions of these slots from `starts` on as not computed, because the steps in
        flight compute them from tokens that differ from the known ones."""
        limits = np.full(len(self._known), np.iinfo(np.int64).max)
        limits[slots] = starts
        np.minimum(self._computed, limits, out=self._computed)
        for _, computed, ends in self._in_flight:
            np.minimum(ends, limits[computed], out=ends)

    def _bind_tokens(self, rows: Rows) -> Int32:
        """Return the token ids of all rows, concatenated, and index the blocks that are full after
        these rows. A row that yields prompt log-probabilities (`Want.SCORE`) also needs the token
        after its last position."""
        chunks: list[Int32] = []
        columns = (rows.slots, rows.starts, rows.counts, rows.ids)
        for slot, start, count, ids in zip(*(c.tolist() for c in columns), strict=True):
            end = start + count
            if end > self._known[slot]:
                self._holding(slot)
                description = self._describe(slot)
                raise ProtocolBug(
                    f"step {self._step} computes unknown tokens, {start}+{count}, of {description}"
                )
            chunk = self._tokens[slot, start : start + ids]
            if end == self._known[slot] and ids > count:  # no known token follows the row
                chunk = np.append(chunk[:count], np.int32(0))
            chunks.append(chunk)
            self._holdings[slot].filled = end
            self._index_full_blocks(slot, end)
        return np.concatenate(chunks) if chunks else _NOTHING

    def _bind_copies(self, plan: Plan, rows: Rows) -> None:
        """Start new sequences as copies of sequences whose known tokens are all computed by this
        step."""
        uids = dict(zip(plan.admissions.slots.tolist(), plan.admissions.uids.tolist(), strict=True))
        for slot, source in zip(rows.slots.tolist(), rows.sources.tolist(), strict=True):
            if slot in self._holdings:
                raise ProtocolBug(
                    f"step {plan.step} copies slot {source} to a slot in use: "
                    f"{self._describe(slot)}"
                )
            copy, tokens = self._copy(uids[slot], source, spare=False)
            self._assign_slot(slot, copy, tokens, indexed=len(copy.hashes))
        self._copies.copy_slots(rows.slots.tolist(), rows.sources.tolist())

    def _copy(self, uid: int, slot: int, *, spare: bool) -> tuple[Holding, Int32]:
        """Copy a slot whose known tokens are all computed, for the sequence `uid`. The copy shares
        the full blocks; a partly filled block is copied to a new one. If `spare` is True, a new
        block is allocated in any case. Return the holding (record of the blocks) and the tokens of
        the copy."""
        source, known = self._holding(slot), int(self._known[slot])
        if source.filled != known:
            raise ProtocolBug(
                f"request {uid} copies a slot that is not computed: {self._describe(slot)}"
            )
        full, rest = divmod(known, self._block_size)
        table = source.table[:full]
        for block in table:
            self.pool.share(block)
        if rest or spare:
            table.append(self.pool.allocate())
        if rest:
            self._copies.copy_block(source.table[full], table[full])
        if source.tainted:
            self._answers.tainted.append(uid)
        copy = dataclasses.replace(source, uid=uid, hashes=source.hashes[:full], table=table)
        copy.announced, copy.shareable = 0, min(source.shareable, full)
        copy.items = source.items.for_copy() if source.items is not None else None
        self._answers.is_due = True
        return copy, self._tokens[slot, :known].copy()

    def _bind_items(self, plan: Plan, rows: Rows) -> VisionStep | None:
        if plan.slices is None and not len(rows):
            return None
        held = [self._holdings[slot].items for slot in rows.slots.tolist()]
        chunks = list(zip(held, rows.starts.tolist(), rows.counts.tolist(), strict=True))
        bound = self.items.bind(plan.slices, chunks)
        for items, start, count in chunks:
            if items is not None:
                self.items.advance(items, start + count, plan.step)
        return bound

    def _announce(self, slots: Iterable[int]) -> dict[str, Int32]:
        """Return the block table entries of these slots that were not sent to the runners yet, as
        fields of `Step`."""
        changed, starts, counts = [], [], []
        blocks: list[int] = []
        for slot in slots:
            holding = self._holdings[slot]
            new = holding.table[holding.announced :]
            if new:
                changed.append(slot)
                starts.append(holding.announced)
                counts.append(len(new))
                blocks += new
                holding.announced = len(holding.table)
        columns = {"slots": changed, "starts": starts, "counts": counts, "blocks": blocks}
        return {f"table_{name}": _int32(values) for name, values in columns.items()}

    # -- results --------------------------------------------------------------------------

    def _complete(self, step: int) -> None:
        """Record that all steps up to `step` are done. Release slots, blocks and items that waited
        for them."""
        while self._released and self._released[0][0] < step:
            self._released.popleft()
        while self._recently_indexed and self._recently_indexed[0][0] <= step:
            self._recently_indexed.popleft()
        while self._in_flight and self._in_flight[0][0] <= step:
            _, slots, ends = self._in_flight.popleft()
            self._computed[slots] = ends
        self.pool.complete(step)
        self.items.cache.complete(step)

    def _record_known(self, event: KnownTokens) -> None:
        """Record newly known tokens, and queue newly filled blocks for `index`. Planned steps
        compute all of a sequence's known tokens but the newest."""
        slots, known = event.slots, self._known[event.slots]
        if len(known) and known.min() < 0:
            self._holding(int(slots[known < 0][0]))
        if len(event.counts):
            places = concatenate_ranges(known, event.counts)
            self._tokens[np.repeat(slots, event.counts), places] = event.token_ids
            self._known[slots] = known + event.counts
        else:
            self._tokens[slots, known] = event.token_ids
            self._known[slots] = known + 1
        if len(event.runs):
            starts = self._known[event.runs] - event.run_counts
            self._discard_ends(event.runs, starts.astype(np.int64))
        full = known >= self._next_index[slots]
        if self._prefix_caching and full.any():
            self._to_index += zip(slots[full].tolist(), known[full].tolist(), strict=True)

    def _fork(self, event: Forks, fence: int) -> None:
        """Make slots copies of other slots. All sources are read as they were before this call.
        Steps up to `fence` may still use the blocks that the copies had before."""
        self.index()
        slots = event.slots.tolist()
        pairs = zip(slots, event.sources.tolist(), strict=True)
        copies = [self._copy(self._holding(slot).uid, source, spare=True) for slot, source in pairs]
        self._copies.copy_slots(slots, event.sources.tolist())
        for slot, (copy, tokens) in zip(slots, copies, strict=True):
            self._release(slot, fence)
            self._assign_slot(slot, copy, tokens, indexed=len(copy.hashes))

    def _distrust(self, event: Failures) -> None:
        """Remove the blocks of failed rows from the index, and report the sequences that have read
        them."""
        self.index()
        failed = []
        for slot, start in zip(event.slots.tolist(), event.starts.tolist(), strict=True):
            released = (
                holding for _, released_slot, holding in self._released if released_slot == slot
            )
            holding = next(released, None) or self._holding(slot)
            failed.append((holding, max(start, holding.cached) // self._block_size))
            if holding.items is not None:
                self.items.distrust(holding.items)
        # A sequence preempted in the meantime still receives its results from steps in flight.
        holdings = (*self._holdings.values(), *(holding for _, _, holding in self._released))
        blocks, readers = propagate_taint(failed, holdings)
        self._answers.tainted += [holding.uid for holding in readers]
        self.pool.distrust(blocks)
        self._answers.is_due = True

    def _forget_index(self, number: int) -> None:
        """Clear the index, and do not index blocks of the current sequences any more. An order that
        was already executed is ignored."""
        if number <= self._forget_number:
            return
        self._forget_number = number
        for holding in self._holdings.values():
            holding.distrusted = True
        self.pool.forget_all()

    def index(self) -> None:
        """Index the blocks that known tokens have filled since the last call.

        The hashing may be done after the next step has been sent, but it must be done before the
        next admission and before a slot is released.
        """
        for slot, complete in self._to_index:
            self._index_full_blocks(slot, complete)
        self._to_index.clear()

    def _index_full_blocks(self, slot: int, complete: int) -> None:
        """Index the blocks in which every token is known and every position is computed by a
        planned step.

        Steps run in order, so a sequence that finds such a block reads it only after it is
        computed. Tokens that a step samples past the end of a sequence never become known, so their
        blocks are not indexed.
        """
        if not self._prefix_caching:
            return
        holding, size = self._holdings[slot], self._block_size
        if holding.distrusted:
            return
        for index in range(int(self._next_index[slot]) // size - 1, complete // size):
            if index == len(holding.hashes):
                tokens = self._tokens[slot, : (index + 1) * size]
                self._complete_hashes(holding.hashes, tokens, holding.extras)
            block = holding.table[index]
            if self.pool.remember(block, holding.hashes[index]):
                self._recently_indexed.append((self._step, block))
            self._next_index[slot] = (index + 2) * size

    def _free(self, slots: Int32, fence: int) -> None:
        """Release the blocks of slots whose sequences have ended or were preempted. Steps up to
        `fence` may still use them."""
        self.index()
        for slot in slots.tolist():
            holding = self._holding(slot)
            self._release(slot, fence)
            self._released.append((fence, slot, holding))
            self._capacity[slot], self._known[slot] = 0, _NOTHING_HELD
            if holding.items is not None:
                self.items.free(holding.items, fence)

    def _release(self, slot: int, fence: int) -> None:
        """Release all blocks of a slot; steps up to `fence` may still use them."""
        table = self._holdings.pop(slot).table
        self._copies.drop_blocks(table)
        self._sharing.release(slot, table)
        self._answers.add_freed(fence, self.pool.release(table[::-1], fence))
        self._answers.is_due = True

    def take_answer(self) -> Answer | None:
        """Return all results since the last call as one `Answer`; None if the scheduler is not
        waiting for one and no encoder pages were released."""
        encoder = self.items.pop_credits()
        if not self._answers.is_due and encoder is None:
            return None
        answers, self._answers = self._answers, AnswerBuilder()
        return answers.message(self._turn, self._sharing.drain_changed(), encoder)

    # -- restart --------------------------------------------------------------------------

    def restart(self) -> None:
        """Forget all sequences after a restart in which the runners kept their memory.

        Nothing is in flight on the runners. The index keeps the blocks that are known to be
        computed. Partly filled blocks are kept for sequences that continue with the same tokens.
        Turns and steps are counted from 1 again.
        """
        for _, block in self._recently_indexed:
            self.pool.forget(block)
        self._leftovers = Leftovers(self.pool, self._block_size)
        for slot, holding in self._holdings.items():
            if self._prefix_caching and not holding.distrusted:
                computed = min(self._computed[slot], self._known[slot])
                tokens = self._tokens[slot, :computed]
                self._complete_hashes(holding.hashes, tokens, holding.extras)
                self._leftovers.add(holding, tokens)
            self.pool.release(holding.table[::-1], fence=0)
        self.pool.restart()
        self.items = ItemManager(self.items.limits)
        for queue in (
            self._recently_indexed,
            self._released,
            self._to_index,
            self._holdings,
            self._copies,
        ):
            queue.clear()
        self._in_flight.clear()
        self._known[:], self._capacity[:], self._computed[:] = _NOTHING_HELD, 0, 0
        self._turn = self._step = 0
        blocks, slots = self.pool.blocks, len(self._known)
        self._sharing, self._rows = SharedBlockCounts(blocks, slots), RowExpander(slots)
        self._answers = AnswerBuilder()

    # -- inspection -----------------------------------------------------------------------

    def _holding(self, slot: int) -> Holding:
        holding = self._holdings.get(slot)
        if holding is None:
            raise ProtocolBug(f"turn {self._turn} refers to slot {slot}, which no request holds")
        return holding

    def _describe(self, slot: int) -> str:
        holding = self._holdings[slot]
        return (
            f"request {holding.uid} in slot {slot}: {self._known[slot]} tokens known, "
            f"{holding.filled} filled, {len(holding.table)} blocks of {self._block_size}, "
            f"indexed to {self._next_index[slot] - self._block_size}"
        )

    def check(self) -> None:
        """Raise `ProtocolBug` unless the reference counts of all blocks and encoder-cache items
        match what the slots hold."""
        self.pool.check(Counter(b for h in self._holdings.values() for b in h.table))
        self.items.check(h.items for h in self._holdings.values())

    @property
    def num_held_slots(self) -> int:
        """Number of slots that hold blocks."""
        return len(self._holdings)


def _int32(values: Iterable[int]) -> Int32:
    return np.array(list(values), np.int32)
