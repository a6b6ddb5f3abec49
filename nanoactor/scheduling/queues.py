"""The queue of waiting sequences, and the batch of running ones."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator

from nanoactor.scheduling.plan_builder import PlannedStep, PrefillChunk
from nanoactor.scheduling.sequence import Phase, Sequence
from nanoactor.scheduling.table import RunningTable, Slots


class WaitingQueue:
    """Sequences that wait for a slot, by priority.

    One that ends while it waits stays until it would come up, or until most of the queue has
    ended: to look for it would take longer.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        """Its first has not ended."""
        self._ended = 0

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._heap) - self._ended

    @property
    def head(self) -> Sequence | None:
        """The sequence that comes next; None where none waits."""
        return self._heap[0][1] if self._heap else None

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        heapq.heappush(self._heap, (sequence.priority_key, sequence))

    def pop(self) -> None:
        """Let the head go."""
        heapq.heappop(self._heap)
        self._drop_ended()

    def note_end(self) -> None:
        """Take notice that one of the sequences here has ended."""
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


class WaitingLine:
    """All that wait. Who waits for pages of the encoder cache is parked, with all behind that need
    some: pictures pass no pictures, and hold up no text."""

    def __init__(self) -> None:
        self._ready, self._parked = WaitingQueue(), WaitingQueue()

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._ready) + len(self._parked)

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        self._ready.push(sequence)

    def head(self, pages: int) -> Sequence | None:
        """Return who comes next, where so many pages may be spent; None where nobody may."""
        while (head := self._ready.head) is not None and head.pages:
            if not self._parked and head.pages <= pages:
                return head
            self._ready.pop()
            head.is_parked = True
            self._parked.push(head)
        parked = self._parked.head
        if parked is None or parked.pages > pages:
            return head
        return parked if head is None or parked.priority_key < head.priority_key else head

    def pop(self, sequence: Sequence) -> None:
        """Let go of the one that `head` returned."""
        (self._parked if sequence.is_parked else self._ready).pop()
        sequence.is_parked = False

    def note_end(self, sequence: Sequence) -> None:
        """Take notice that one of the sequences here has ended."""
        (self._parked if sequence.is_parked else self._ready).note_end()


class RunningBatch:
    """Sequences that run or are being matched; their counters stand in `table`."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.table = RunningTable(max_num_seqs, max_model_len, block_size)
        self._block_size = block_size
        self._sequences: list[Sequence] = []
        """By priority."""
        self._prefills: list[Sequence] = []
        """Those of them that have positions left to prefill."""
        self.stepwise: list[Sequence] = []
        """Those of them that never decode: they choose under masks, or their callers do."""
        self._owners: dict[int, Sequence] = {}
        """Who holds, or held last, each slot: results in flight still find whose they are."""

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Go through them by priority."""
        return iter(self._sequences)

    @property
    def youngest(self) -> Sequence:
        """The one to preempt first."""
        return self._sequences[-1]

    @property
    def left_to_prefill(self) -> int:
        """Positions of prompts that could be computed, and that no planned step computes yet."""
        return sum(s.reach - s.scheduled for s in self._prefills)

    @property
    def prefilling(self) -> list[Sequence]:
        """Those whose match is answered and that have positions left to prefill, by priority."""
        return [s for s in self._prefills if s.phase is Phase.RUNNING]

    def owners(self, slots: Slots) -> list[Sequence]:
        """Return who holds, or held last, each of these slots."""
        return [self._owners[slot] for slot in slots.tolist()]

    def rows(self, planned: PlannedStep) -> list[Sequence]:
        """Return all sequences with a row in a step that is planned and not done."""
        return [
            *(chunk.sequence for chunk in planned.beginners),
            *self.owners(planned.decode_batch.slots),
            *(choice.sequence for choice in planned.deferred),
        ]

    def enter(self, sequence: Sequence, slot: int, blocks: int) -> None:
        """Give a sequence a slot and so many blocks."""
        self.table.enter(
            slot,
            uid=sequence.uid,
            prompt_length=sequence.prompt_length,
            limit=sequence.limit,
            tokens=sequence.kept,
            blocks=blocks,
            constrained=sequence.is_stepwise,
        )
        if sequence.is_stepwise:
            self.stepwise.append(sequence)
        sequence.slot, sequence.shared = slot, 0
        sequence.introduced = False
        self._owners[slot] = sequence
        for sequences in (self._sequences, self._prefills):
            bisect.insort(sequences, sequence, key=lambda s: s.priority_key)

    def enter_computed(self, sequence: Sequence, slot: int, blocks: int) -> None:
        """Give a slot and blocks to a sequence of which a planned step computes all that is
        known."""
        self.enter(sequence, slot, blocks)
        self._prefills.remove(sequence)
        self.table.start(slot, sequence.length)

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence's slot and blocks; it keeps the tokens that are known."""
        self._sequences.remove(sequence)
        if sequence in self._prefills:
            self._prefills.remove(sequence)
        if sequence.is_stepwise:
            self.stepwise.remove(sequence)
        sequence.kept = sequence.tokens.copy()
        self.table.leave(sequence.slot)
        sequence.slot, sequence.starved_since = -1, 0

    @property
    def starving(self) -> list[Sequence]:
        """Those that never decode, and need a block."""
        return [sequence for sequence in self.stepwise if sequence.is_starving]

    @property
    def constrained(self) -> list[Sequence]:
        """Those that choose under masks."""
        return [sequence for sequence in self.stepwise if sequence.is_constrained]

    def resume(self, sequence: Sequence) -> None:
        """Have the positions of new tokens be computed, of a sequence that never decodes."""
        if sequence.slot >= 0 and sequence not in self._prefills:
            bisect.insort(self._prefills, sequence, key=lambda s: s.priority_key)

    def choose_chunks(self, budget: int) -> list[PrefillChunk]:
        """Have a step compute at most `budget` positions: of outputs that never decode, at least
        one of each, then of prompts, by priority; in the order of `PrefillChunk.place`."""
        continued = [s for s in self.prefilling if s.continues and s.reach > s.scheduled]
        outputs: list[PrefillChunk] = []
        for index, sequence in enumerate(continued):
            others = len(continued) - 1 - index
            outputs += (chunk := self._chunk(sequence, budget - others))
            budget -= sum(each.length for each in chunk)
        prompts: list[PrefillChunk] = []
        for sequence in self._prefills:
            if budget <= 0:
                break
            if not sequence.continues:
                prompts += (chunk := self._chunk(sequence, budget))
                budget -= sum(each.length for each in chunk)
        if prompts or outputs:
            self._prefills = [s for s in self._prefills if s.scheduled < s.target]
        return sorted(prompts + outputs, key=lambda chunk: chunk.place)

    def _chunk(self, sequence: Sequence, most: int) -> list[PrefillChunk]:
        """Have a step compute so many positions of a sequence at most, if it can compute any."""
        if sequence.phase is not Phase.RUNNING:
            return []
        slot, start = sequence.slot, sequence.scheduled
        length = min(most, sequence.reach - start, self._at_once(sequence, start))
        if not length:  # a picture is not encoded yet, or there is no block
            return []
        self.table.prefill(slot, length)
        is_last = start + length == sequence.target
        scores = sequence.score_before(start + length)
        return [PrefillChunk(sequence, slot, start, length, is_last, scores)]

    def _at_once(self, sequence: Sequence, start: int) -> int:
        """Return how many positions from here on one step may compute. Where an output resumes
        behind a death, the tokens that its last block lacks are computed one by one, as they were
        at first: in bfloat16 a chunk would round differently."""
        left = sequence.target - max(start, sequence.prompt_length)
        resumes = sequence.target == sequence.resumed_to and not sequence.is_stepwise
        # A block that is full when the stream breaks lacks all of its tokens: its last must be run.
        if not resumes or left > self._block_size:
            return sequence.target - start
        return max(1, sequence.prompt_length - start)

    def is_about_to_compute_for(self, head: Sequence) -> bool:
        """Tell whether the next block of a prompt under way is one that `head` could share."""
        size = self._block_size
        useful = min(len(head.hashes), (head.length - 1) // size)
        for sequence in self._prefills:
            if sequence.reach == sequence.scheduled:  # it waits for a picture: no telling how long
                continue
            block = sequence.scheduled // size
            shared = block < min(useful, len(sequence.hashes))
            if shared and (sequence.hashes[block] == head.hashes[block]).all():
                return True
        return False
