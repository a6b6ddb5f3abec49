"""The queue of prefills: the running sequences whose known tokens are not all computed yet."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections import Counter

from nanoactor.scheduling.sequences.sequence import Phase, Sequence
from nanoactor.scheduling.sequences.table import RunningTable
from nanoactor.scheduling.steps.planned import PlannedRow


class PrefillQueue:
    """Sequences with a slot (a place in the running batch) that have positions left to prefill, by
    priority. Each step takes its rows outside the decode batch from this queue."""

    def __init__(self, table: RunningTable, block_size: int) -> None:
        """`table` contains the counters of all sequences with a slot."""
        self._table, self._block_size = table, block_size
        self._sequences: list[Sequence] = []
        """The queued sequences, by priority."""
        self._first_block_counts: Counter[bytes] = Counter()
        """Number of queued sequences, by the hash of their first block. Sequences with different
        first blocks share no block."""
        self.version = 0
        """Counter that increases whenever the number of positions left to prefill may have
        decreased."""

    @property
    def num_left(self) -> int:
        """Total number of positions that could be prefilled now but are not planned yet."""
        return sum(s.prefill_end - s.scheduled for s in self._sequences)

    @property
    def running(self) -> list[Sequence]:
        """Running sequences with positions left to prefill, by priority."""
        return [s for s in self._sequences if s.phase is Phase.RUNNING]

    # -- changes --------------------------------------------------------------------------

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence that has just received a slot."""
        bisect.insort(self._sequences, sequence, key=lambda s: s.priority_key)
        self._first_block_counts[_first_block_hash(sequence)] += 1

    def push_again(self, sequence: Sequence) -> None:
        """Queue a sequence for prefilling its known tokens that no step computes yet. Does nothing
        if the sequence has no slot or is already queued."""
        if sequence.slot >= 0 and sequence not in self._sequences:
            self.push(sequence)

    def note_start(self) -> None:
        """Record that a sequence starts running, with some of its positions already computed."""
        self.version += 1

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence that loses its slot, if it is queued."""
        if sequence in self._sequences:
            self._sequences.remove(sequence)
            self._uncount(sequence)
        self.version += 1

    def _uncount(self, sequence: Sequence) -> None:
        first_hash = _first_block_hash(sequence)
        self._first_block_counts[first_hash] -= 1
        if not self._first_block_counts[first_hash]:
            del self._first_block_counts[first_hash]

    # -- rows of a step -------------------------------------------------------------------

    def choose_rows(self, budget: int, turn: int) -> list[PlannedRow]:
        """Return the rows of a step outside its decode batch, with at most `budget` positions in
        total. First comes at least one position of each sequence that never decodes and is past its
        prompt, then prompts follow by priority. `turn` is the number of the current turn (message
        to the block manager). Sequences that it admits may join the step."""
        stepwise = [s for s in self.running if s.continues and s.prefill_end > s.scheduled]
        rows: list[PlannedRow] = []
        for index, sequence in enumerate(stepwise):
            others = len(stepwise) - 1 - index
            rows += (found := self._next_row(sequence, budget - others))
            budget -= sum(row.length for row in found)
        for sequence in self._sequences:
            if budget <= 0:
                break
            if not sequence.continues and (
                sequence.phase is Phase.RUNNING or self._try_join(sequence, budget, turn)
            ):
                rows += (found := self._next_row(sequence, budget))
                budget -= sum(row.length for row in found)
        if rows:
            self.version += 1
            unfinished = [s.scheduled < s.target for s in self._sequences]
            for sequence in itertools.compress(self._sequences, map(operator.not_, unfinished)):
                self._uncount(sequence)
            self._sequences = [*itertools.compress(self._sequences, unfinished)]
        return rows

    def _try_join(self, sequence: Sequence, budget: int, turn: int) -> bool:
        """If possible, start a sequence in the step of the turn that admits it (number `turn`),
        without waiting for its prefix-cache lookup. The step must have room for all its tokens.
        Return True if the sequence was started."""
        fits = sequence.length <= budget and sequence.items is None and not sequence.resumed_to
        fits &= not sequence.is_constrained  # forced tokens may end it before its answer
        reads_nothing = sequence.is_prompt_read or not sequence.max_hits
        if self._table.admission_turns[sequence.slot] != turn or not fits or not reads_nothing:
            return False
        sequence.run()
        self._table.start(sequence.slot, 0)
        return True

    def _next_row(self, sequence: Sequence, budget: int) -> list[PlannedRow]:
        """Return a list with one row of at most `budget` positions of a sequence; empty if there is
        nothing to compute."""
        slot, start, reading = sequence.slot, sequence.scheduled, sequence.reading
        length = min(budget, sequence.prefill_end - start, self._max_row_length(sequence, start))
        if reading is not None:
            length = reading.clip(start, start + length) - start
        if not length:  # an image is not encoded yet, or there is no block
            return []
        self._table.prefill(slot, length)
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

    def will_compute_prefix_of(self, head: Sequence) -> bool:
        """Return True if a running prompt is about to compute a block that `head`, a waiting
        sequence, could share."""
        size = self._block_size
        shareable = min(len(head.hashes), (head.length - 1) // size)
        if not shareable or _first_block_hash(head) not in self._first_block_counts:
            return False
        for sequence in self._sequences:
            if sequence.prefill_end == sequence.scheduled:  # waits for an image
                continue
            block = sequence.scheduled // size
            shared = block < min(shareable, len(sequence.hashes))
            if shared and (sequence.hashes[block] == head.hashes[block]).all():
                return True
        return False


def _first_block_hash(sequence: Sequence) -> bytes:
    """Return the hash of a sequence's first block; empty if its tokens do not fill a block."""
    return sequence.hashes[0].tobytes() if len(sequence.hashes) else b""
