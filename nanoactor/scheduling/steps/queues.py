"""The queues of waiting sequences, and the batch of running ones."""

from __future__ import annotations

import bisect
import heapq
import itertools
import operator
from collections import Counter
from collections.abc import Iterator

import numpy as np

from nanoactor.scheduling.sequences.sequence import Phase, Sequence
from nanoactor.scheduling.sequences.table import RunningTable, Slots
from nanoactor.scheduling.steps.planned import PlannedRow, PlannedStep


class WaitingQueue:
    """Heap of sequences that wait for a slot (a place in the running batch), by priority.

    A sequence that ends while it waits is not removed at once, because finding it would take too
    long. Ended sequences are removed at the head, or when they are more than half of all entries.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        """Heap of (priority key, sequence). The first sequence has not ended."""
        self._ended = 0

    def __len__(self) -> int:
        """Return the number of waiting sequences, without those that have ended."""
        return len(self._heap) - self._ended

    @property
    def head(self) -> Sequence | None:
        """The sequence with the highest priority; None if the queue is empty."""
        return self._heap[0][1] if self._heap else None

    def push(self, sequence: Sequence) -> None:
        """Add a sequence to the queue."""
        heapq.heappush(self._heap, (sequence.priority_key, sequence))

    def pop(self) -> None:
        """Remove the sequence at the head of the queue."""
        heapq.heappop(self._heap)
        self._drop_ended()

    def note_end(self) -> None:
        """Record that one of the sequences in the queue has ended."""
        self._ended += 1
        if 2 * self._ended > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].phase is not Phase.FINISHED]
            heapq.heapify(self._heap)
            self._ended = 0
        self._drop_ended()

    def _drop_ended(self) -> None:
        while self._heap and self._heap[0][1].phase is Phase.FINISHED:
            heapq.heappop(self._heap)
            self._ended -= 1


class WaitingQueues:
    """All waiting sequences. A sequence that waits for encoder-cache pages is *parked*, as are all
    later sequences that need pages. Sequences with pictures therefore do not overtake each other,
    and do not delay sequences without pictures."""

    def __init__(self) -> None:
        self._ready, self._parked = WaitingQueue(), WaitingQueue()
        self._parked_uids: set[int] = set()

    def __len__(self) -> int:
        """Return the number of waiting sequences."""
        return len(self._ready) + len(self._parked)

    def push(self, sequence: Sequence) -> None:
        """Mark a sequence as waiting and add it to the queue."""
        sequence.wait()
        self._ready.push(sequence)

    def head(self, pages: int) -> Sequence | None:
        """Return the first sequence that can be admitted if `pages` encoder-cache pages are
        available, or None."""
        while (head := self._ready.head) is not None and head.pages:
            if not self._parked and head.pages <= pages:
                return head
            self._ready.pop()
            self._parked.push(head)
            self._parked_uids.add(head.uid)
        parked = self._parked.head
        if parked is None or parked.pages > pages:
            return head
        return parked if head is None or parked.priority_key < head.priority_key else head

    def pop(self, sequence: Sequence) -> None:
        """Remove `sequence`, which must be the one that `head` returned last."""
        self._queue_of(sequence).pop()

    def note_end(self, sequence: Sequence) -> None:
        """Record that a waiting sequence has ended."""
        self._queue_of(sequence).note_end()

    def is_parked(self, sequence: Sequence) -> bool:
        """Return True if a sequence is waiting for encoder-cache pages."""
        return sequence.uid in self._parked_uids

    def _queue_of(self, sequence: Sequence) -> WaitingQueue:
        """Return the queue that contains a sequence that is about to leave it. The sequence no
        longer counts as waiting for encoder-cache pages."""
        if sequence.uid not in self._parked_uids:
            return self._ready
        self._parked_uids.remove(sequence.uid)
        return self._parked


class RunningBatch:
    """Sequences that have a slot: they run, or wait for their prefix-cache lookup. Their counters
    are in `table`."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.table = RunningTable(max_num_seqs, max_model_len, block_size)
        self._block_size = block_size
        self._sequences: list[Sequence] = []
        """All sequences of the batch, by priority."""
        self._prefills: list[Sequence] = []
        """Sequences with positions left to prefill, by priority."""
        self._first_block_counts: Counter[bytes] = Counter()
        """Number of sequences in `_prefills`, by the hash of their first block. Sequences with
        different first blocks share no block."""
        self.prefill_version = 0
        """Counter that increases whenever the number of positions left to prefill may have
        decreased."""
        self.stepwise: list[Sequence] = []
        """Sequences that never decode: those under a grammar, and those whose callers choose their
        tokens."""
        self._owners: dict[int, Sequence] = {}
        """Current or last sequence of each slot; results in flight belong to it."""

    def __len__(self) -> int:
        """Return the number of sequences with a slot."""
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the sequences, highest priority first."""
        return iter(self._sequences)

    @property
    def youngest(self) -> Sequence:
        """The sequence with the lowest priority, which is preempted first."""
        return self._sequences[-1]

    @property
    def left_to_prefill(self) -> int:
        """Total number of positions that could be prefilled now but are not planned yet."""
        return sum(s.prefill_end - s.scheduled for s in self._prefills)

    @property
    def prefilling(self) -> list[Sequence]:
        """Running sequences with positions left to prefill, by priority."""
        return [s for s in self._prefills if s.phase is Phase.RUNNING]

    def owners(self, slots: Slots) -> list[Sequence]:
        """Return the current or last sequence of each slot."""
        return [self._owners[slot] for slot in slots.tolist()]

    def sequences_in(self, planned: PlannedStep) -> list[Sequence]:
        """Return all sequences with a row in a planned step, decode rows first. The step must be in
        flight."""
        decoding = self.owners(planned.decode_batch.slots)
        return [*decoding, *(row.sequence for row in planned.rows)]

    def enter(self, sequence: Sequence, slot: int, blocks: int) -> None:
        """Assign a slot and `blocks` blocks to a sequence and add it to the batch."""
        self.table.enter(
            slot,
            uid=sequence.uid,
            prompt_length=sequence.prompt_length,
            limit=sequence.limit,
            tokens=sequence.saved_tokens,
            blocks=blocks,
            stepwise=sequence.is_stepwise,
        )
        if sequence.is_stepwise:
            self.stepwise.append(sequence)
        self.table.shared[slot] = blocks
        sequence.assign_slot(slot)
        self._owners[slot] = sequence
        bisect.insort(self._sequences, sequence, key=lambda s: s.priority_key)
        self._add_prefill(sequence)

    def _add_prefill(self, sequence: Sequence) -> None:
        bisect.insort(self._prefills, sequence, key=lambda s: s.priority_key)
        self._first_block_counts[_first_block_hash(sequence)] += 1

    def _note_prefilled(self, sequence: Sequence) -> None:
        first_hash = _first_block_hash(sequence)
        self._first_block_counts[first_hash] -= 1
        if not self._first_block_counts[first_hash]:
            del self._first_block_counts[first_hash]

    def start(self, slot: int, computed: int) -> None:
        """Mark a slot's sequence as running; `computed` leading positions are already computed."""
        self.table.start(slot, computed)
        self.prefill_version += 1

    def enter_computed(self, sequence: Sequence, slot: int, blocks: int) -> None:
        """Assign a slot and `blocks` blocks to a sequence that starts as a copy, and add it to the
        batch. A planned step computes all its known tokens, so it has nothing to prefill."""
        self.enter(sequence, slot, blocks)
        self.table.shared[slot] = sequence.length // self._block_size
        self._prefills.remove(sequence)
        self._note_prefilled(sequence)
        self.table.start(slot, sequence.length)

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence from the batch. Its slot is released, and its known tokens are kept."""
        self._sequences.remove(sequence)
        if sequence in self._prefills:
            self._prefills.remove(sequence)
            self._note_prefilled(sequence)
        self.prefill_version += 1
        if sequence in self.stepwise:
            self.stepwise.remove(sequence)
        slot = sequence.slot
        sequence.release_slot()
        self.table.leave(slot)

    @property
    def starving(self) -> list[Sequence]:
        """Running sequences that need another block before they can prefill their next known
        token."""
        return self.owners(np.flatnonzero(self.table.lacks_block))

    @property
    def constrained(self) -> list[Sequence]:
        """Sequences of the batch that sample under a grammar's masks."""
        return [sequence for sequence in self.stepwise if sequence.is_constrained]

    def queue_prefill(self, sequence: Sequence) -> None:
        """Queue a sequence for prefilling its known tokens that no step computes yet. Does nothing
        if the sequence has no slot."""
        if sequence.slot >= 0 and sequence not in self._prefills:
            self._add_prefill(sequence)

    def choose_rows(self, budget: int, turn: int) -> list[PlannedRow]:
        """Return the rows of a step outside its decode batch, with at most `budget` positions in
        total. First comes at least one position of each sequence that never decodes and is past its
        prompt, then prompts follow by priority. `turn` is the number of the current turn (message
        to the block manager). Sequences that it admits may join the step."""
        stepwise = [s for s in self.prefilling if s.continues and s.prefill_end > s.scheduled]
        rows: list[PlannedRow] = []
        for index, sequence in enumerate(stepwise):
            others = len(stepwise) - 1 - index
            rows += (found := self._next_row(sequence, budget - others))
            budget -= sum(row.length for row in found)
        for sequence in self._prefills:
            if budget <= 0:
                break
            if not sequence.continues and (
                sequence.phase is Phase.RUNNING or self._try_join(sequence, budget, turn)
            ):
                rows += (found := self._next_row(sequence, budget))
                budget -= sum(row.length for row in found)
        if rows:
            self.prefill_version += 1
            unfinished = [s.scheduled < s.target for s in self._prefills]
            for sequence in itertools.compress(self._prefills, map(operator.not_, unfinished)):
                self._note_prefilled(sequence)
            self._prefills = [*itertools.compress(self._prefills, unfinished)]
        return rows

    def _try_join(self, sequence: Sequence, budget: int, turn: int) -> bool:
        """If possible, start a sequence in the step of the turn that admits it (number `turn`),
        without waiting for its prefix-cache lookup. The step must have room for all its tokens.
        Return True if the sequence was started."""
        fits = sequence.length <= budget and sequence.items is None and not sequence.resumed_to
        fits &= not sequence.is_constrained  # forced tokens may end it before its answer
        reads_nothing = sequence.is_prompt_read or not sequence.max_hits
        if self.table.admission_turns[sequence.slot] != turn or not fits or not reads_nothing:
            return False
        sequence.run()
        self.table.start(sequence.slot, 0)
        return True

    def _next_row(self, sequence: Sequence, budget: int) -> list[PlannedRow]:
        """Return a list with one row of at most `budget` positions of a sequence; empty if there is
        nothing to compute."""
        slot, start, reading = sequence.slot, sequence.scheduled, sequence.reading
        length = min(budget, sequence.prefill_end - start, self._max_row_length(sequence, start))
        if reading is not None:
            length = reading.clip(start, start + length) - start
        if not length:  # a picture is not encoded yet, or there is no block
            return []
        self.table.prefill(slot, length)
        wants = 0 if reading is None else reading.read_row(start, start + length)
        if start + length == sequence.target:
            wants |= sequence.last_want
        return [PlannedRow(sequence, slot, start, length, wants)]

    def _max_row_length(self, sequence: Sequence, start: int) -> int:
        """Return the maximum number of positions from `start` on that one step may compute. When an
        output resumes after a restart, the missing tokens of its last block are computed one by
        one, as they were originally. A chunk would round differently in bfloat16."""
        left = sequence.target - max(start, sequence.prompt_length)
        resumes = sequence.target == sequence.resumed_to and not sequence.is_stepwise
        # If the last block was full, all its tokens are missing, because the last token must be
        # recomputed.
        if not resumes or left > self._block_size:
            return sequence.target - start
        return max(1, sequence.prompt_length - start)

    def rewind(self, sequence: Sequence) -> None:
        """Make a sequence continue after its newest known token, because it has switched between
        free text and its grammar. Whatever steps in flight compute beyond that token is ignored."""
        stepwise = sequence.is_stepwise
        self.table.rewind(sequence.slot, sequence.length - 1, stepwise=stepwise)
        if (sequence in self.stepwise) is not stepwise:
            (self.stepwise.append if stepwise else self.stepwise.remove)(sequence)
        self.queue_prefill(sequence)

    def will_compute_prefix_of(self, head: Sequence) -> bool:
        """Return True if a running prompt is about to compute a block that `head`, a waiting
        sequence, could share."""
        size = self._block_size
        shareable = min(len(head.hashes), (head.length - 1) // size)
        if not shareable or _first_block_hash(head) not in self._first_block_counts:
            return False
        for sequence in self._prefills:
            if sequence.prefill_end == sequence.scheduled:  # waits for a picture
                continue
            block = sequence.scheduled // size
            shared = block < min(shareable, len(sequence.hashes))
            if shared and (sequence.hashes[block] == head.hashes[block]).all():
                return True
        return False


def _first_block_hash(sequence: Sequence) -> bytes:
    """Return the hash of a sequence's first block; empty if its tokens do not fill a block."""
    return sequence.hashes[0].tobytes() if len(sequence.hashes) else b""
