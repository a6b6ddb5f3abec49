"""Preemption: the youngest running sequences give up their slots and blocks if older ones need
blocks and too few are free."""

from __future__ import annotations

from collections.abc import Callable

from nanoactor.scheduling.resources.room import Room
from nanoactor.scheduling.sequences.sequence import Sequence
from nanoactor.scheduling.statistics import SchedulerStatistics
from nanoactor.scheduling.steps.pipeline import Pipeline


class BlockGrants:
    """Grants blocks to the running sequences that need another one, and preempts sequences if there
    are too few. The scheduler calls it when it chooses the sequences that decode in a step."""

    def __init__(
        self,
        room: Room,
        pipeline: Pipeline,
        statistics: SchedulerStatistics,
        release_slot: Callable[[Sequence], None],
        *,
        depth: int,
    ) -> None:
        """`release_slot` releases the slot of a preempted sequence. `depth` is the number of steps
        by which a preemption may be delayed."""
        self._room, self._pipeline, self._statistics = room, pipeline, statistics
        self._release_slot, self._depth = release_slot, depth
        self._preempted_at = 0
        """Number of the first step planned after the latest preemption."""

    def grant(self, starving: list[Sequence]) -> list[Sequence]:
        """Grant one more block to as many of these sequences as possible, in the order in which
        they ran out of blocks. Return those that received one; the others skip this step. Preempts
        the youngest running sequences if there are too few blocks."""
        step, budget = self._pipeline.planned + 1, self._room.budget
        self._preempt_for(starving)
        queue = [s for s in starving if s.slot >= 0]  # the others have just been preempted
        queue.sort(key=lambda s: (s.starved_since or step, s.priority_key))
        granted, denied = queue[: budget.credits], queue[budget.credits :]
        budget.debit(len(granted))
        self._room.running.table.grow([sequence.slot for sequence in granted])
        for sequence in granted:
            sequence.record_starved(0)
        for sequence in denied:
            sequence.record_starved(step)
        return granted

    def _preempt_for(self, starving: list[Sequence]) -> None:
        """Preempt the youngest sequences until a block is, or will be, available for each sequence
        in `starving`.

        Nothing is preempted if the free blocks suffice, including those that become free after the
        steps in flight. If the block manager has not yet reported all freed blocks, preemption is
        delayed by up to `depth` steps.
        """
        running, budget, step = self._room.running, self._room.budget, self._pipeline.planned + 1
        missing = len(starving) - budget.credits - budget.pending
        since = max(self._preempted_at, min(s.starved_since or step for s in starving))
        answered = budget.oldest_unanswered is None
        if missing <= 0 or (step < since + self._depth and not answered):
            return
        while missing > 0 and len(running) > 1:
            victim = running.youngest
            missing -= max(1, victim.num_freeable_blocks) + (victim in starving)
            self.preempt(victim)
        self._preempted_at = step

    def preempt(self, victim: Sequence) -> None:
        """Preempt a sequence: release its slot and queue it again. If it can continue only after
        its caller has chosen its next token, it is not queued until then. The sequence still
        receives its tokens from steps in flight, and can be admitted again once they have
        arrived."""
        self._statistics.preemptions += 1
        victim.note_preemption(self._pipeline.last_step_with(victim.slot))
        is_computed = victim.is_computed
        self._release_slot(victim)
        if is_computed:
            victim.hold()
        else:
            self._room.waiting.push(victim)
