"""The block manager's logic: how each part of a turn changes the blocks that sequences hold.

The manager receives turns (messages with the scheduler's decisions) and returns steps and answers.
It does no I/O and reads no clock. It relies on the scheduler to count the free blocks, so an
allocation fails only if an invariant is broken. Error messages about a slot describe the slot's
state.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Mapping

from nanoactor.errors import ProtocolBug
from nanoactor.kv.binding import StepBinder
from nanoactor.kv.holding import AnswerBuilder, Holding, propagate_taint
from nanoactor.kv.items import HeldItems, ItemManager
from nanoactor.kv.pool import BlockPool
from nanoactor.kv.prefix_index import PrefixIndex
from nanoactor.kv.tables import BlockTables
from nanoactor.media.units import NO_ENCODER, EncoderLimits
from nanoactor.messages.engine import (
    Admission,
    Answer,
    Failures,
    Forks,
    Int32,
    KnownTokens,
    Step,
    Turn,
)

_NO_EXTRAS: Mapping[int, bytes] = {}


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
    """Assigns the blocks of the KV cache to sequences, and completes the scheduler's plans to
    steps. `apply_turn` processes one message from the scheduler, and `take_answer` returns the
    replies."""

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
        self.pool = BlockPool(blocks)
        self.items = ItemManager(encoder)
        self.tables = BlockTables(self.pool, block_size, max_seqs, max_model_len, has_slot_state)
        self.index = PrefixIndex(self.tables, salt, prefix_caching and not has_slot_state)
        self._binder = StepBinder(self.tables, self.index, self.items)
        self._block_size = block_size
        self._turn = 0
        """Number of the last processed turn (message from the scheduler)."""
        self._released: deque[tuple[int, int, Holding]] = deque()
        """(last step that may use it, slot, record of its blocks) of each released slot in which
        steps in flight may have rows."""
        self._admitted: set[int] = set()
        """Slots of the sequences admitted by the current turn (message from the scheduler)."""
        self._answers = AnswerBuilder()
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
        self._turn = self.tables.turn = turn.number
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
            self.index.forget_all(turn.forget_index)
        for admission in turn.admissions:
            self._admit(admission)
        if turn.plan is None:
            return None
        return self._binder.bind(turn.plan, self._admitted, self._answers)

    # -- admission ------------------------------------------------------------------------

    def _admit(self, event: Admission) -> None:
        """Allocate blocks for a slot: cached ones for the longest known prefix, then new ones.

        At least one token is always left to compute, because sampling the next token requires its
        hidden state.
        """
        self.index.update()
        slot, tables = event.slot, self.tables
        if slot in tables.holdings:
            raise ProtocolBug(
                f"slot {slot} is assigned to a request, but is still held by "
                f"{tables.describe(slot)}"
            )
        tokens = event.token_ids
        items = None
        if event.items is not None:
            items = HeldItems.of(event.items, len(tokens), self._block_size)
        extras = items.extras if items is not None else _NO_EXTRAS
        hashes = self.index.complete_hashes([bytes(row) for row in event.hashes], tokens, extras)
        max_hits = 0 if tables.copies.has_slots else event.max_hits
        usable = hashes[: (len(tokens) - 1) // self._block_size]
        table = self.index.find(usable[: max_hits // self._block_size], event.request)
        refund = sum(map(self.pool.share, table))
        hits = len(table)
        computed = hits * self._block_size
        max_cached = min(len(tokens) - 1, max_hits)
        if hits not in extras and (
            partial := self.index.leftovers.claim(hashes[:hits], tokens[computed:max_cached])
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
        tables.assign(slot, holding, tokens, indexed=hits)
        self.hits.note(len(tokens), computed)
        self._answers.add_admission(event.uid, computed, refund)
        self._admitted.add(slot)

    # -- results --------------------------------------------------------------------------

    def _complete(self, step: int) -> None:
        """Record that all steps up to `step` are done. Release slots, blocks and items that waited
        for them."""
        while self._released and self._released[0][0] < step:
            self._released.popleft()
        self.index.complete(step)
        self.tables.computed.complete(step)
        self.pool.complete(step)
        self.items.cache.complete(step)

    def _record_known(self, event: KnownTokens) -> None:
        """Record newly known tokens, and queue newly filled blocks to be indexed. Planned steps
        compute all of a sequence's known tokens but the newest."""
        known = self.tables.add_known(event)
        self.index.queue_full_blocks(event.slots, known)

    def _fork(self, event: Forks, fence: int) -> None:
        """Make slots copies of other slots. All sources are read as they were before this call.
        Steps up to `fence` may still use the blocks that the copies had before."""
        self.index.update()
        tables, slots = self.tables, event.slots.tolist()
        pairs = zip(slots, event.sources.tolist(), strict=True)
        copies = [tables.copy(tables.holding(at).uid, source, spare=True) for at, source in pairs]
        tables.copies.copy_slots(slots, event.sources.tolist())
        for slot, (copy, tokens) in zip(slots, copies, strict=True):
            self._release(slot, fence)
            tables.assign(slot, copy, tokens, indexed=len(copy.hashes))
            self._answers.add_copy(copy)

    def _distrust(self, event: Failures) -> None:
        """Remove the blocks of failed rows from the index, and report the sequences that have read
        them."""
        self.index.update()
        failed = []
        for slot, start in zip(event.slots.tolist(), event.starts.tolist(), strict=True):
            released = (
                holding for _, released_slot, holding in self._released if released_slot == slot
            )
            holding = next(released, None) or self.tables.holding(slot)
            failed.append((holding, max(start, holding.cached) // self._block_size))
            if holding.items is not None:
                self.items.distrust(holding.items)
        # A sequence preempted in the meantime still receives its results from steps in flight.
        released_holdings = (holding for _, _, holding in self._released)
        holdings = (*self.tables.holdings.values(), *released_holdings)
        blocks, readers = propagate_taint(failed, holdings)
        self._answers.tainted += [holding.uid for holding in readers]
        self.pool.distrust(blocks)
        self._answers.is_due = True

    def _free(self, slots: Int32, fence: int) -> None:
        """Release the blocks of slots whose sequences have ended or were preempted. Steps up to
        `fence` may still use them."""
        self.index.update()
        for slot in slots.tolist():
            holding = self.tables.holding(slot)
            self._release(slot, fence)
            self._released.append((fence, slot, holding))
            if holding.items is not None:
                self.items.free(holding.items, fence)

    def _release(self, slot: int, fence: int) -> None:
        self._answers.add_freed(fence, self.tables.release(slot, fence))
        self._answers.is_due = True

    def take_answer(self) -> Answer | None:
        """Return all results since the last call as one `Answer`; None if the scheduler is not
        waiting for one and no encoder pages were released."""
        encoder = self.items.pop_credits()
        if not self._answers.is_due and encoder is None:
            return None
        answers, self._answers = self._answers, AnswerBuilder()
        return answers.message(self._turn, self.tables.sharing.drain_changed(), encoder)

    # -- restart --------------------------------------------------------------------------

    def restart(self) -> None:
        """Forget all sequences after a restart in which the runners kept their memory.

        Nothing is in flight on the runners. The index keeps the blocks that are known to be
        computed. Partly filled blocks are kept for sequences that continue with the same tokens.
        Turns and steps are counted from 1 again.
        """
        self.index.restart()
        for slot, holding in self.tables.holdings.items():
            self.index.keep(slot, holding)
            self.pool.release(holding.table[::-1], fence=0)
        self.pool.restart()
        self.tables.clear()
        self.items = ItemManager(self.items.limits)
        self._binder = StepBinder(self.tables, self.index, self.items)
        self._released.clear()
        self._turn = 0
        self._answers = AnswerBuilder()

    # -- inspection -----------------------------------------------------------------------

    def check(self) -> None:
        """Raise `ProtocolBug` unless the reference counts of all blocks and encoder-cache items
        match what the slots hold."""
        holdings = self.tables.holdings.values()
        self.pool.check(Counter(block for holding in holdings for block in holding.table))
        self.items.check(holding.items for holding in holdings)

    @property
    def num_held_slots(self) -> int:
        """Number of slots that hold blocks."""
        return len(self.tables.holdings)
