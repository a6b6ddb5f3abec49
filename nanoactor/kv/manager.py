"""The block manager's logic: block tables, prefix matches, and how plans become steps.

Events in, messages out; no I/O and no clock. It trusts the scheduler's credits, so it never
has to say no; where it would have to, an invariant is broken and the story is told.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Mapping

import numpy as np

from nanoactor.errors import ProtocolBug
from nanoactor.grammar.messages import KnownTokens
from nanoactor.kv.hashing import block_hash
from nanoactor.kv.holding import Answers, Holding, spread_doubt
from nanoactor.kv.items import HeldItems, ItemKeeper
from nanoactor.kv.leftovers import Leftovers
from nanoactor.kv.pool import BlockPool
from nanoactor.messages import (
    Credits,
    Fork,
    Forks,
    Free,
    Int32,
    Match,
    Plan,
    SampledTokens,
    Step,
)
from nanoactor.scores import ScoredChunks
from nanoactor.vision.messages import VisionStep
from nanoactor.vision.units import NO_ENCODER, EncoderLimits

_NOTHING_HELD = -1
_NO_EXTRAS: Mapping[int, bytes] = {}


class BlockManager:
    """Owns block tables, reference counts, the prefix index and the order of eviction."""

    def __init__(
        self,
        blocks: int,
        block_size: int,
        max_seqs: int,
        max_model_len: int,
        salt: bytes,
        prefix_caching: bool = True,
        encoder: EncoderLimits = NO_ENCODER,
    ) -> None:
        self.pool = BlockPool(blocks)
        self.items, self._encoder = ItemKeeper(encoder), encoder
        self._leftovers = Leftovers(self.pool, block_size)
        self._step = 0
        """The last step that was planned."""
        self._fresh: deque[tuple[int, int]] = deque()
        """(step, block) of what was indexed since the last step that is known to be done."""
        self._block_size = block_size
        self._salt = salt
        self._prefix_caching = prefix_caching
        self._holdings: dict[int, Holding] = {}
        self._left: deque[tuple[int, int, Holding]] = deque()
        """(fence, slot, what it held) of slots that were given up while steps had rows in them."""
        # By slot, as arrays: a step of hundreds of decodes costs a few operations.
        self._tokens = np.empty((max_seqs, max_model_len), np.int32)
        """Every token whose value is known."""
        self._known = np.full(max_seqs, _NOTHING_HELD)
        """How many these are; negative where a slot holds nothing."""
        self._planned = np.zeros(max_seqs, np.int64)
        """Positions computed by the steps planned so far, counted from 0."""
        self._room = np.zeros(max_seqs, np.int64)
        """Positions that its blocks hold; 0 where a slot holds nothing."""
        self._next_index = np.zeros(max_seqs, np.int64)
        """Where the first block ends whose content is not indexed, and was not when matched."""
        self._computed = np.zeros(max_seqs, np.int64)
        """Positions that steps which are known to be done have computed, once there is a token."""
        self._decoding = np.zeros(max_seqs, np.bool_)
        self._to_index: list[tuple[int, int]] = []
        """(slot, tokens complete) where a block has filled since the last `index`."""
        self._decoders = np.empty(0, np.int64)
        """The slots of the decode batch."""
        self._answers = Answers()
        self._forgotten = 0
        """The number of the latest order to forget the index."""
        self.prompt_tokens = 0
        """Tokens of all sequences matched, a preempted one's again each time it comes back."""
        self.hit_tokens = 0
        """How many of them were in the cache."""

    # -- matching -------------------------------------------------------------------------

    def match(self, event: Match) -> None:
        """Give a slot its blocks: cached ones for the longest known prefix, new ones else.

        At least one token is always left to compute, as it takes one to sample the next.
        """
        self.index()
        if event.slot in self._holdings:
            raise ProtocolBug(f"slot {event.slot} is matched but held by {self._story(event.slot)}")
        tokens = event.token_ids
        items = None
        if event.items is not None:
            items = HeldItems.of(event.items, len(tokens), self._block_size)
        extras = items.extras if items is not None else _NO_EXTRAS
        hashes = self._complete_hashes([bytes(row) for row in event.hashes], tokens, extras)
        table = self._find(event, hashes[: (len(tokens) - 1) // self._block_size])
        refund = sum(map(self.pool.share, table))
        hits = len(table)
        computed = hits * self._block_size
        most = min(len(tokens) - 1, event.most_hits)
        if hits not in extras and (
            begun := self._leftovers.take(hashes[:hits], tokens[computed:most])
        ):
            table.append(begun.block)
            computed += begun.positions
        table += [self.pool.allocate() for _ in range(event.blocks - len(table))]
        self._holdings[event.slot] = Holding(event.uid, hashes, table, items, extras)
        if items is None or event.items is None:
            self.items.match_nothing()
        else:
            self.items.match(items, event.items, computed)
        self._tokens[event.slot, : len(tokens)] = event.token_ids
        self._known[event.slot], self._planned[event.slot] = len(tokens), computed
        self._room[event.slot] = len(table) * self._block_size
        self._next_index[event.slot] = (hits + 1) * self._block_size
        self._computed[event.slot] = 0
        self.prompt_tokens += len(tokens)
        self.hit_tokens += computed
        self._answers.uids.append(event.uid)
        self._answers.hits.append(computed)
        self._answers.refunds.append(refund)

    def _find(self, event: Match, hashes: list[bytes]) -> list[int]:
        """Return the blocks that hold the longest known prefix, in the index or in the sibling."""
        sibling = self._holdings.get(event.sibling)
        lent: list[int] = []
        if sibling is not None and not sibling.distrusted:
            lent = sibling.table[: len(event.hashes)]
        found: list[int] = []
        for index, content in enumerate(hashes[: event.most_hits // self._block_size]):
            block = self.pool.find(content) if self._prefix_caching else None
            if block is None and index < len(lent):
                block = lent[index]
            if block is None:
                break
            found.append(block)
        return found

    def _complete_hashes(
        self, hashes: list[bytes], tokens: Int32, extras: Mapping[int, bytes]
    ) -> list[bytes]:
        """Add those of a continued sequence's output; its prompt's came with the request."""
        size = self._block_size
        for index in range(len(hashes), len(tokens) // size if self._prefix_caching else 0):
            block = tokens[index * size : (index + 1) * size]
            parent, extra = hashes[-1] if hashes else b"", extras.get(index, b"")
            hashes.append(block_hash(parent, block, self._salt, extra))
        return hashes

    # -- planning -------------------------------------------------------------------------

    def bind_blocks(self, plan: Plan) -> Step:
        """Turn a plan into a step: add block ids and the prompts' tokens."""
        self._step = plan.step
        prefill: list[int] = plan.slots.tolist()
        for slot in plan.grows.tolist():
            self._of(slot, plan.step).table.append(self.pool.allocate())
            self._room[slot] += self._block_size
        token_ids = self._bind_prefill(plan, prefill)
        forks = tuple(self._fork(plan, each) for each in plan.forks)
        vision = self._bind_items(plan, prefill)
        if len(plan.leaves) or len(plan.joins):
            self._decoding[plan.leaves] = False
            self._decoding[plan.joins] = True
            self._decoders = np.flatnonzero(self._decoding)
        self._advance_decoders(plan.step)
        changed = [*prefill, *(s for each in forks for s in each.slots.tolist())]
        slots, starts, counts, blocks = self._announce([*changed, *plan.grows.tolist()])
        return Step(
            step=plan.step,
            slots=plan.slots,
            starts=plan.starts,
            counts=plan.counts,
            samples=plan.samples,
            token_ids=token_ids,
            joins=plan.joins,
            leaves=plan.leaves,
            table_slots=slots,
            table_starts=starts,
            table_counts=counts,
            table_blocks=blocks,
            admissions=plan.admissions,
            vision=vision,
            scored=tuple(self._scored(plan, each) for each in plan.scored),
            forks=forks,
            deferred=plan.deferred,
        )

    def _scored(self, plan: Plan, scored: ScoredChunks) -> ScoredChunks:
        """Add the tokens that follow each scored position."""
        spans = zip(
            plan.slots[scored.rows].tolist(),
            scored.starts.tolist(),
            scored.counts.tolist(),
            strict=True,
        )
        targets = [self._tokens[slot, at + 1 : at + 1 + count] for slot, at, count in spans]
        return dataclasses.replace(scored, targets=np.concatenate(targets))

    def _fork(self, plan: Plan, forks: Forks) -> Forks:
        """Give each copy its source's full blocks by reference, and one of its own for the rest."""
        sources: list[int] = []
        copies: list[int] = []
        ends = (plan.starts + plan.counts)[forks.rows]
        for row, slot, uid, end in zip(
            forks.rows.tolist(),
            forks.slots.tolist(),
            forks.uids.tolist(),
            ends.tolist(),
            strict=True,
        ):
            source_slot = int(plan.slots[row])
            source, full = self._of(source_slot, plan.step), end // self._block_size
            if slot in self._holdings or end != self._known[source_slot]:
                raise ProtocolBug(f"step {plan.step} copies {self._story(source_slot)} to {slot}")
            table = source.table[:full]
            for block in table:
                self.pool.share(block)
            if end % self._block_size:
                table.append(self.pool.allocate())
                sources.append(source.table[full])
                copies.append(table[full])
            hashes = source.hashes[:full]
            items = source.items.behind() if source.items is not None else None
            copy = Holding(uid, hashes, table, items, source.extras, distrusted=source.distrusted)
            self._holdings[slot] = copy
            self._tokens[slot, :end] = self._tokens[source_slot, :end]
            self._known[slot] = self._planned[slot] = end
            self._computed[slot] = 0
            self._room[slot] = len(table) * self._block_size
            self._next_index[slot] = (full + 1) * self._block_size
        return dataclasses.replace(forks, sources=_int32(sources), copies=_int32(copies))

    def _bind_items(self, plan: Plan, slots: list[int]) -> tuple[VisionStep, ...]:
        held = [self._holdings[slot].items for slot in slots]
        chunks = list(zip(held, plan.starts.tolist(), plan.counts.tolist(), strict=True))
        bound = self.items.bind(plan.slices, chunks)
        for items, start, count in chunks:
            if items is not None:
                self.items.advance(items, start + count, plan.step)
        return bound

    def _advance_decoders(self, step: int) -> None:
        """One more position for every slot that decodes."""
        decoders = self._decoders
        planned = self._planned[decoders] + 1
        self._planned[decoders] = planned
        past = planned > self._room[decoders]
        if past.any():
            slot = int(decoders[past][0])
            self._of(slot, step)
            raise ProtocolBug(f"step {step} writes past the blocks of {self._story(slot)}")

    def _bind_prefill(self, plan: Plan, slots: list[int]) -> Int32:
        chunks: list[Int32] = []
        for slot, start, count in zip(
            slots, plan.starts.tolist(), plan.counts.tolist(), strict=True
        ):
            self._of(slot, plan.step)
            if self._planned[slot] != start or start + count > self._known[slot]:
                raise ProtocolBug(
                    f"step {plan.step} prefills {start}+{count} of {self._story(slot)}"
                )
            chunks.append(self._tokens[slot, start : start + count])
            self._planned[slot] = start + count
            self._index_full_blocks(slot, start + count)
        return np.concatenate(chunks) if chunks else _int32([])

    def _announce(self, slots: list[int]) -> tuple[Int32, Int32, Int32, Int32]:
        """The changes of these slots' block tables since the runners last heard of them."""
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
        return _int32(changed), _int32(starts), _int32(counts), _int32(blocks)

    # -- results --------------------------------------------------------------------------

    def record_tokens(self, event: SampledTokens) -> None:
        """A step is done: fences pass, tokens become known. What filled waits for `index`."""
        while self._left and self._left[0][0] < event.step:
            self._left.popleft()
        if len(event.failed):
            self._distrust(event)
        while self._fresh and self._fresh[0][0] <= event.step:
            self._fresh.popleft()
        self.pool.complete(event.step)
        self.items.cache.complete(event.step)
        slots = event.slots
        known = self._known[slots]
        if len(known) and known.min() < 0:
            self._of(int(slots[known < 0][0]), event.step)
        self._tokens[slots, known] = event.token_ids
        self._known[slots], self._computed[slots] = known + 1, known
        if not self._prefix_caching:
            return
        complete = np.minimum(self._known[slots], self._planned[slots])
        full = complete >= self._next_index[slots]
        if full.any():
            self._to_index += zip(slots[full].tolist(), complete[full].tolist(), strict=True)

    def note_known(self, event: KnownTokens) -> None:
        """Take tokens that no step has chosen; steps will compute them."""
        at = 0
        for slot, count in zip(event.slots.tolist(), event.counts.tolist(), strict=True):
            self._of(slot, -1)
            known = self._known[slot]
            self._tokens[slot, known : known + count] = event.token_ids[at : at + count]
            self._known[slot] += count
            at += count

    def fork(self, event: Fork) -> None:
        """Let slots become copies of others, as all of them are before."""
        self.index()
        slots, sources = event.slots.tolist(), event.sources.tolist()
        copies = [self._copy(self._of(s, -1).uid, at) for s, at in zip(slots, sources, strict=True)]
        old = [self._holdings[slot] for slot in slots]
        known = self._known[sources]
        self._tokens[slots, : known.max()] = self._tokens[sources, : known.max()]
        freed = 0
        for slot, copy, before, length in zip(slots, copies, old, known.tolist(), strict=True):
            self._holdings[slot] = copy
            computed = length // self._block_size * self._block_size
            self._known[slot], self._planned[slot] = length, computed
            self._computed[slot] = 0
            self._room[slot] = self._next_index[slot] = computed + self._block_size
            freed += self.pool.release(before.table[::-1], event.fence)
        self._answers.freed.append(freed)
        self._answers.fences.append(event.fence)

    def _copy(self, uid: int, slot: int) -> Holding:
        """Hold a computed slot's full blocks, and one for what follows."""
        source, known = self._of(slot, -1), int(self._known[slot])
        if self._planned[slot] != known or source.items is not None:
            raise ProtocolBug(f"request {uid} becomes a copy of {self._story(slot)}")
        table = source.table[: known // self._block_size]
        for block in table:
            self.pool.share(block)
        hashes = source.hashes[: len(table)]
        table.append(self.pool.allocate())
        return Holding(uid, hashes, table, distrusted=source.distrusted)

    def _distrust(self, event: SampledTokens) -> None:
        """Take what failing rows computed out of the index, and tell who has read it."""
        self.index()
        failing = []
        for slot, start in zip(event.failed.tolist(), event.failed_from.tolist(), strict=True):
            left = (holding for _, of, holding in self._left if of == slot)
            holding = next(left, None) or self._of(slot, event.step)
            failing.append((holding, start // self._block_size))
            if holding.items is not None:
                self.items.distrust(holding.items)
        # Those that were preempted meanwhile still take what steps under way bring them.
        every = (*self._holdings.values(), *(holding for _, _, holding in self._left))
        blocks, readers = spread_doubt(failing, every)
        self._answers.tainted += [holding.uid for holding in readers]
        self.pool.distrust(blocks)
        self._answers.settled += 1

    def forget_index(self, number: int) -> None:
        """Find nothing any more that was computed so far, nor what those that run now compute;
        unless that was done for this number."""
        if number <= self._forgotten:
            return
        self._forgotten = number
        for holding in self._holdings.values():
            holding.distrusted = True
        self.pool.forget_all()

    def index(self) -> None:
        """Index the blocks that results have filled.

        Hashing them can wait until the next step is on its way, but not past the next match, nor
        until a slot is given up.
        """
        for slot, complete in self._to_index:
            self._index_full_blocks(slot, complete)
        self._to_index.clear()

    def _index_full_blocks(self, slot: int, complete: int) -> None:
        """Index the blocks in which every token is known and is computed by a planned step.

        Steps run in the order of their numbers, so whoever matches the block reads it later.
        What a step computes past a sequence's end never becomes known, so it is left out.
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
                self._fresh.append((self._step, block))
            self._next_index[slot] = (index + 2) * size

    def free(self, event: Free) -> None:
        """Take back the blocks of slots that ended or were preempted."""
        self.index()
        freed = 0
        for slot in event.slots.tolist():
            self._of(slot, event.fence)
            holding = self._holdings.pop(slot)
            self._left.append((event.fence, slot, holding))
            self._room[slot], self._known[slot] = 0, _NOTHING_HELD
            self._decoding[slot] = False
            freed += self.pool.release(holding.table[::-1], event.fence)
            if holding.items is not None:
                self.items.free(holding.items, event.fence)
        self._decoders = np.flatnonzero(self._decoding)
        self._answers.freed.append(freed)
        self._answers.fences.append(event.fence)

    def take_credits(self) -> Credits | None:
        """All answers since the last call, as one message; None where there are none."""
        answers, self._answers = self._answers, Answers()
        encoder = self.items.take_credits()
        if not (answers.uids or answers.freed or answers.settled or encoder):
            return None
        return answers.message(encoder)

    # -- beginning anew -------------------------------------------------------------------

    def begin_anew(self) -> None:
        """Forget all sequences; the runners keep their memory, and compute nothing any more.

        The index keeps what is known to be computed. Blocks that are not full are found by whoever
        goes on with the same tokens. Steps are counted from 1 again.
        """
        for _, block in self._fresh:
            self.pool.forget(block)
        self._leftovers = Leftovers(self.pool, self._block_size)
        for slot, holding in self._holdings.items():
            if self._prefix_caching and not holding.distrusted:
                tokens = self._tokens[slot, : self._computed[slot]]
                self._complete_hashes(holding.hashes, tokens, holding.extras)
                self._leftovers.leave(holding, tokens)
            self.pool.release(holding.table[::-1], fence=0)
        self.pool.begin_anew()
        self.items = ItemKeeper(self._encoder)
        for queue in (self._fresh, self._left, self._to_index, self._holdings):
            queue.clear()
        self._known[:], self._decoding[:] = _NOTHING_HELD, False
        self._room[:] = 0
        self._step = 0
        self._decoders = np.empty(0, np.int64)
        self._answers = Answers()

    # -- looking on -----------------------------------------------------------------------

    def _of(self, slot: int, step: int) -> Holding:
        holding = self._holdings.get(slot)
        if holding is None:
            raise ProtocolBug(f"step {step} names slot {slot}, which holds nothing")
        return holding

    def _story(self, slot: int) -> str:
        h = self._holdings[slot]
        return (
            f"request {h.uid} in slot {slot}: {self._known[slot]} tokens known, "
            f"{self._planned[slot]} planned, {len(h.table)} blocks of {self._block_size}, "
            f"indexed to {self._next_index[slot] - self._block_size}"
        )

    def check(self) -> None:
        """Raise `ProtocolBug` unless every reference belongs to a table and is counted once."""
        self.pool.check(Counter(b for h in self._holdings.values() for b in h.table))
        self.items.check(h.items for h in self._holdings.values())

    @property
    def held(self) -> int:
        """Return how many slots hold blocks."""
        return len(self._holdings)


def _int32(values: list[int]) -> Int32:
    return np.array(values, np.int32)
