"""The queues of waiting sequences, and the batch of running ones."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator

import numpy as np

from nanoactor.scheduling.sequences.sequence import Phase, Sequence
from nanoactor.scheduling.sequences.table import RunningTable, Slots
from nanoactor.scheduling.steps.planned import PlannedStep
from nanoactor.scheduling.steps.prefills import PrefillQueue


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
    later sequences that need pages. Sequences with images therefore do not overtake each other,
    and do not delay sequences without images."""

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
        self.prefills = PrefillQueue(self.table, block_size)
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
        self._assign(sequence, slot, blocks)
        self.table.shared[slot] = blocks
        self.prefills.push(sequence)

    def enter_computed(self, sequence: Sequence, slot: int, blocks: int) -> None:
        """Assign a slot and `blocks` blocks to a sequence that starts as a copy, and add it to the
        batch. A planned step computes all its known tokens, so it has nothing to prefill."""
        self._assign(sequence, slot, blocks)
        self.table.shared[slot] = sequence.length // self._block_size
        self.table.start(slot, sequence.length)

    def _assign(self, sequence: Sequence, slot: int, blocks: int) -> None:
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
        sequence.assign_slot(slot)
        self._owners[slot] = sequence
        bisect.insort(self._sequences, sequence, key=lambda s: s.priority_key)

    def start(self, slot: int, computed: int) -> None:
        """Mark a slot's sequence as running; `computed` leading positions are already computed."""
        self.table.start(slot, computed)
        self.prefills.note_start()

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence from the batch. Its slot is released, and its known tokens are kept."""
        self._sequences.remove(sequence)
        self.prefills.leave(sequence)
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

    def rewind(self, sequence: Sequence) -> None:
        """Make a sequence continue after its newest known token, because it has switched between
        free text and its grammar. Whatever steps in flight compute beyond that token is ignored."""
        stepwise = sequence.is_stepwise
        self.table.rewind(sequence.slot, sequence.length - 1, stepwise=stepwise)
        if (sequence in self.stepwise) is not stepwise:
            (self.stepwise.append if stepwise else self.stepwise.remove)(sequence)
        self.prefills.push_again(sequence)
