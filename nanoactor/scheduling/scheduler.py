"""The scheduler's logic: admission, batching, preemption, termination.

It maps events to messages. It does no I/O, reads no clock and knows no block ids, and it looks at
token values only to see whether they end a sequence or its free text. It is based on three ideas:

*The host knows lengths, the device knows tokens.* Step N+1 is planned while step N runs: the length
of each sequence is known in advance, and the sampled token stays on the device.

*Credits, not queries.* Blocks are spent from a count that the scheduler keeps, the `BlockBudget`.
An admission debits the blocks of a whole prompt; the blocks that the prefix cache saves are
refunded.

*Fences.* Resources freed while steps are in flight become available only when those steps are done.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from nanoactor.messages.engine import (
    Abort,
    Admit,
    Answer,
    Int32,
    Reject,
    StepDone,
    StepWanted,
    Stop,
)
from nanoactor.messages.orders import ForgetIndex, Pause
from nanoactor.messages.resuming import Resume
from nanoactor.scheduling.config import SchedulerConfig
from nanoactor.scheduling.edges import BLOCKS, TEXT, Send
from nanoactor.scheduling.features.constraints import Constraints
from nanoactor.scheduling.features.feature import Features
from nanoactor.scheduling.features.forking import Forking
from nanoactor.scheduling.features.holding import HeldAnswers
from nanoactor.scheduling.features.items import Pictures
from nanoactor.scheduling.features.pooling import Pooling
from nanoactor.scheduling.resources.budget import BlockBudget
from nanoactor.scheduling.resources.room import Room
from nanoactor.scheduling.sequences import ends
from nanoactor.scheduling.sequences.ends import End
from nanoactor.scheduling.sequences.sequence import Phase, Sequence
from nanoactor.scheduling.sequences.table import DecodeBatch
from nanoactor.scheduling.statistics import SchedulerStatistics
from nanoactor.scheduling.steps.arrivals import Arrivals
from nanoactor.scheduling.steps.depth import PipelineDepth
from nanoactor.scheduling.steps.output import OutputBuffer
from nanoactor.scheduling.steps.planned import PlannedRow, PlannedStep
from nanoactor.scheduling.steps.queues import RunningBatch, WaitingLine
from nanoactor.scheduling.steps.results import Results, check_due, split_rows
from nanoactor.scheduling.steps.turns import TurnBuilder
from nanoactor.scheduling.steps.unanswered import Unanswered

_NO_SLOTS = np.empty(0, np.int64)


class Scheduler:
    """Decides what runs. `handle` processes one event and returns the messages to send."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.statistics = SchedulerStatistics()
        self.budget = BlockBudget(config.blocks, config.max_num_seqs)
        self.live: dict[int, Sequence] = {}
        self._running = RunningBatch(config.max_num_seqs, config.max_model_len, config.block_size)
        self._output = OutputBuffer(self._running, self.statistics)
        self._turn = TurnBuilder(self._running.table)
        self.items = Pictures(config.encoder)
        self.constraints = Constraints(
            self._running, self._lower, ranks=config.ranks, jumps=config.jump_forward
        )
        places = self.budget, self._running, WaitingLine()
        self._room = Room(*places, self._pages, self._reserve, config.block_size)
        self.holds = HeldAnswers(self.live, self._room, self._turn, self._give_up_slot)
        forking = Forking(self._room, self._note_admission)
        pooling = Pooling(config.pooling, self._output)
        self._features = Features(self.items, self.constraints, self.holds, forking, pooling)
        self.arrivals = Arrivals(self._output, self.statistics)
        self._planned = self._completed = self._preempted_at = self._wanted = 0
        """The last steps that were planned, completed, preceded by a preemption, and requested."""
        self._in_flight: deque[PlannedStep] = deque()
        self._depth = PipelineDepth(config.depth, config.max_depth)
        self._unanswered = Unanswered()
        self._full = -1
        """The running batch's `progress` when its prompts last filled the next step; else -1."""
        self._turns: list[Send] = []
        self._out: list[Send] = []

    def handle(self, event: Any) -> list[Send]:
        """Process one event and return the messages to send, turns before all others."""
        if type(event) is StepDone and self._unanswered.hold_back(event):
            return []
        may_go_on = self._process(event)
        if self._unanswered.held_back:
            for results in self._unanswered.release():
                may_go_on = self._process(results)
        while may_go_on:  # each additional step is a separate event and turn
            may_go_on = self._process(None)
        turns, out = self._turns, self._out
        self._turns, self._out = [], []
        return [*turns, *out]

    def _process(self, event: Any) -> bool:
        """Process one event, or none; return True if one more step may be planned."""
        before = self._planned
        if event is not None:
            self._handle(event)
        for forced in self._features.frequent["forced"]:
            for sequence, run in forced():
                self._jump(sequence, run)
        if self._may_plan():
            self._plan()
        else:
            self._admit_waiting()
        self._make_way()
        may_go_on = self._planned > before and self._may_plan()
        self._send_turn(fence=before)
        if (tokens := self._output.flush(self._completed)) is not None:
            self._out.append((TEXT, tokens))
        return may_go_on

    def _handle(self, event: Any) -> None:
        feature = self._features.owners.get(type(event))
        if feature is None:
            self.HANDLERS[type(event)](self, event)
        else:
            for sequence, end in feature.HANDLERS[type(event)](feature, event):
                self._fail(sequence, end)

    def _send_turn(self, fence: int) -> None:
        """Queue the messages that result from an event, turns first, because steps wait for
        them."""
        for flush in self._features.frequent["flush"]:
            self._out += flush(self._turn)
        if self._turn.gives_up:
            self.budget.expect(self._turn.number, fence)
        # With late planning, the block manager should have no tokens left to record before a plan.
        may_wait = bool(self._in_flight) and self.config.plan_lead == "eager"
        turn = self._turn.take(self._completed, fence, may_wait=may_wait)
        if turn is not None:
            self._turns.append((BLOCKS, turn))

    # -- requests arrive and end ----------------------------------------------------------

    def _on_admit(self, event: Admit) -> None:
        answers = Sequence.answers(event, self._running.table, self.config)
        living, opened = self.arrivals.admit(event, answers)
        self.live |= {sequence.uid: sequence for sequence in living}
        self._out += opened
        for feature in self._features:
            feature.arrive(living)
        for sequence in living:
            if (end := sequence.end_restored()) is not None:  # the end was never reported
                self._end(sequence, end)

    def _on_abort(self, event: Abort) -> None:
        if self.arrivals.overtaken(event):
            return
        if (sequence := self.live.get(event.uid)) is not None:
            self.statistics.count_abort()
            self._end(sequence, End("abort"))

    def _on_stop(self, event: Stop) -> None:
        for uid in event.uids.tolist():
            if (sequence := self.live.get(uid)) is not None:
                self._end(sequence, End("stop"))

    def _fail(self, sequence: Sequence, end: End) -> None:
        if sequence.phase is Phase.FINISHED:
            self.statistics.count_overrun()
            return
        self.statistics.failed += end.reason == "failed"
        self._end(sequence, end)

    def _end(self, sequence: Sequence, end: End) -> None:
        """End a sequence, whatever the reason. Its results in flight are dropped."""
        self.statistics.finished += 1
        self._output.stop_ids.remove(sequence.watched_ids)
        self._output.finish(sequence.uid, end, sequence)
        waits = sequence.phase is Phase.WAITING
        sequence.finish()
        del self.live[sequence.uid]
        if waits:
            self._room.waiting.note_end(sequence)
        elif sequence.slot >= 0:
            self._give_up_slot(sequence)
        for feature in self._features:
            feature.close(sequence)

    # -- blocks and slots -----------------------------------------------------------------

    def _give_up_slot(self, sequence: Sequence) -> None:
        self._turn.free(sequence.slot)
        self.budget.give_up_slot(sequence.slot, fence=self._planned)
        for feature in self._features:
            feature.leave(sequence)
        self._running.leave(sequence)

    def _on_answer(self, event: Answer) -> None:
        self._unanswered.note_answer(event.turn)
        self.budget.refund(int(event.refunds.sum()))
        found = zip(event.uids.tolist(), event.hits.tolist(), strict=True)
        admitted = [self._answer_admission(uid, hit) for uid, hit in found]
        for feature in self._features:
            feature.answer(event, admitted)
        self._running.table.share(event.slots, event.shared, event.turn)
        freed = zip(event.fences.tolist(), event.freed.tolist(), strict=True)
        self.budget.answer(event.turn, freed)
        for uid in event.tainted.tolist():
            if (sequence := self.live.get(uid)) is not None:
                self._fail(sequence, ends.TAINTED)

    def _answer_admission(self, uid: int, hit: int) -> Sequence | None:
        """Process the answer to the oldest admission; return the sequence if it starts running
        now."""
        entry = self._unanswered.pop(uid)
        sequence = entry.sequence
        sequence.history.note_match(min(hit, sequence.prompt_length))
        if entry.step:
            self.statistics.take_back(hit)
        slot = sequence.slot
        if (
            slot < 0 or self._running.table.admitted[slot] != entry.turn
        ):  # the sequence has given up that slot
            return None
        self._running.table.shared[slot] = 0
        if sequence.phase is not Phase.MATCHING:
            return None
        sequence.run()
        self._running.start(slot, hit)
        return sequence

    def _admit_waiting(self) -> None:
        """Admit sequences from the head of the queue while the next step has budget for them."""
        if not self._room.waiting or self._running.progress == self._full:
            return
        tokens = self.config.max_num_batched_tokens - self._running.left_to_prefill
        while self.budget.free_slots and tokens > 0:
            if (head := self._room.head) is None:
                return
            need = -(-head.length // self.config.block_size)
            # A preempted sequence can be admitted once all its results are in: known == scheduled.
            if head.last_step > self._completed or self.budget.credits < need + self._reserve():
                return
            # Waiting pays off: a block is indexed as soon as the step that computes it is planned.
            hits = self.config.prefix_caching and head.is_read
            if hits and self._running.is_about_to_compute_for(head):
                return
            self._room.waiting.pop(head)
            self._admit(head, need)
            tokens -= head.target
        if tokens <= 0:
            self._full = self._running.progress

    def _reserve(self) -> int:
        """Return the number of credits that admissions leave to sequences that need a block now.

        Without this reserve, a preempted sequence would take back the blocks that it had to give
        up. A few more credits, up to one for each running sequence, keep the next preemption from
        following immediately.
        """
        if not len(self._running):
            return 0
        _, starving = self._running.table.demand()
        needed = int(np.count_nonzero(starving)) + len(self._running.starving)
        return needed + min(len(self._running), self.config.blocks // 64)

    def _pages(self) -> int:
        """Return the number of pages of the encoder cache that admissions may spend."""
        return self.items.budget.credits

    def _make_way(self) -> None:
        """Release the slot of a held sequence if another sequence waits and nothing is in flight.
        The number of freed blocks is known before the next slot is released."""
        under_way = self._in_flight or self.budget.oldest_unanswered is not None
        if under_way or self._room.head is None:
            return
        found = [yielding() for yielding in self._features.frequent["yielding"]]
        if (sequence := next(filter(None, found), None)) is not None:
            self._give_up_slot(sequence)
            sequence.hold()

    def _admit(self, sequence: Sequence, need: int) -> None:
        self.budget.debit(need)
        self._running.enter(sequence, self.budget.take_slot(), need)
        self._unanswered.admit(self._turn.number, sequence)
        self._turn.admit(sequence, need)
        self._note_admission(sequence)

    def _note_admission(self, sequence: Sequence) -> None:
        self._running.table.admitted[sequence.slot] = self._turn.number
        for feature in self._features:
            feature.admit(sequence, self._turn.number)

    def _feed(self, starving: list[Sequence]) -> list[Sequence]:
        """Give one more block to each of these sequences; return those that got one.

        The others skip this step. The sequence that has waited longest goes first, so that each is
        passed over at most once.
        """
        step = self._planned + 1
        self._make_room(starving)
        queue = [s for s in starving if s.slot >= 0]  # the others have just been preempted
        queue.sort(key=lambda s: (s.starved_since or step, s.priority_key))
        fed, unfed = queue[: self.budget.credits], queue[self.budget.credits :]
        self.budget.debit(len(fed))
        self._running.table.grow([sequence.slot for sequence in fed])
        for sequence in fed:
            sequence.starve(0)
        for sequence in unfed:
            sequence.starve(step)
        return fed

    def _make_room(self, starving: list[Sequence]) -> None:
        """Preempt the youngest sequences until there is, or will be, a block for each starving one.

        No sequence is preempted while pending credits suffice or, for at most `depth` steps, while
        an outstanding answer may return more credits.
        """
        step = self._planned + 1
        missing = len(starving) - self.budget.credits - self.budget.pending
        since = max(self._preempted_at, min(s.starved_since or step for s in starving))
        answered = self.budget.oldest_unanswered is None
        if missing <= 0 or (step < since + self.config.depth and not answered):
            return
        while missing > 0 and len(self._running) > 1:
            victim = self._running.youngest
            missing -= max(1, victim.gives_back) + (victim in starving)
            self._preempt(victim)
        self._preempted_at = step

    def _preempt(self, victim: Sequence) -> None:
        """Preempt a sequence: queue it again, or hold it if its caller decides what is computed
        next. It still gets its tokens from steps in flight, and can be admitted again once they
        have arrived."""
        self.statistics.preemptions += 1
        rows_in = [p.step for p in self._in_flight if p.has_row(victim.slot)]
        victim.note_preemption(max(rows_in, default=0))
        is_computed = victim.is_computed
        self._give_up_slot(victim)
        if is_computed:
            victim.hold()
        else:
            self._room.waiting.push(victim)

    def _lower(self, sequence: Sequence) -> None:
        self._output.void(sequence, self._planned)
        if sequence.slot >= 0:
            self._running.lower(sequence)

    # -- steps ----------------------------------------------------------------------------

    def _may_plan(self) -> bool:
        if not self._depth.has_room(self._in_flight, stepwise=bool(self._running.stepwise)):
            return False
        # The number of freed blocks must be known within `depth` steps, however slow the edge is.
        unanswered = self.budget.oldest_unanswered
        if unanswered is not None and self._planned >= unanswered + self.config.depth:
            return False
        at_once = self.config.plan_lead == "eager" or not self._in_flight
        return at_once or self._wanted > self._planned

    def _on_step_wanted(self, event: StepWanted) -> None:
        self._wanted = max(self._wanted, event.step)

    def _plan(self) -> None:
        """Plan one step: every sequence that decodes, then prompts within the remaining budget.
        Sequences are admitted between the two, so that newly admitted ones are not preempted
        immediately."""
        decode_batch, grown, sitting_out = self._choose_decodes()
        self._admit_waiting()
        decodes, turn = len(decode_batch.slots), self._turn.number
        prefilling = self._running.prefilling
        found = [feature.encode(prefilling) for feature in self._features if prefilling]
        slices = next((slices for slices in found if slices is not None), None)
        rows = self._running.choose_rows(self.config.max_num_batched_tokens - decodes, turn)
        others: list[PlannedRow] = []
        if rows or self._running.stepwise:
            others = [row for f in self._features for row in f.choose(self._planned + 1, rows)]
        if not decodes and not rows and slices is None and not others:
            return
        self._planned += 1
        if rows:
            self._unanswered.ride(turn, self._planned, {row.sequence.uid for row in rows})
        rows += others
        planned = PlannedStep(self._planned, decode_batch, rows, encodes=slices is not None)
        self._in_flight.append(planned)
        self._turn.plan(planned, grown, slices)
        self.statistics.count_step(planned.positions, decodes, sitting_out)

    def _choose_decodes(self) -> tuple[DecodeBatch, list[Sequence], int]:
        """Return the decode batch, the sequences that get another block, and the number of
        sequences that skip this step."""
        table = self._running.table
        if not len(self._running):
            return table.decode(_NO_SLOTS, all_fed=True), [], 0
        others = self._running.starving
        if others:
            table.interrupt()
        if (same := table.decode_again()) is not None:
            return same, [], 0
        grown: list[Sequence] = []
        ready, starving = table.demand()
        if others or starving.any():
            grown = self._feed([*self._running.owners(np.flatnonzero(starving)), *others])
            ready, starving = table.demand()
        sitting_out = int(np.count_nonzero(starving)) + len(self._running.starving)
        batch = table.decode(np.flatnonzero(ready), all_fed=not starving.any())
        return batch, grown, sitting_out

    # -- results --------------------------------------------------------------------------

    def _on_step_done(self, event: StepDone) -> None:
        due = self._in_flight.popleft() if self._in_flight else None
        planned = check_due(due, event, self._running)
        planned.note_begin(event.began)
        self._depth.note(planned, event.seconds)
        self._completed = event.step
        self.budget.complete(event.step)
        for note_done in self._features.frequent["note_done"]:
            note_done(event.step)
        self.statistics.device_seconds += event.seconds
        results = split_rows(planned, event, self._running)
        for sequence, slot, start in results.failed:
            self._turn.fail(slot, start)
            self._unanswered.doubt(self._turn.number)
            self._fail(sequence, ends.NOT_FINITE)
        for sequence in (s for s in results.choiceless if event.step > s.void_until):
            self._fail(sequence, ends.choiceless(sequence.is_constrained))
        self._output.take_scores(planned, event)
        for take_results in self._features.frequent["take_results"]:
            for sequence, end in take_results(results, event.step):
                self._end(sequence, end)
        self._take_tokens(results)

    def _take_tokens(self, results: Results) -> None:
        known, candidates = self._output.take(results)
        for sequence in candidates:
            if (end := sequence.end_reached()) is not None:
                self._end(sequence, end)
                continue
            for go_on in self._features.frequent["go_on"]:
                go_on(sequence)
        if refused := self._output.take_refused():
            for note_refused in self._features.frequent["note_refused"]:
                note_refused(refused)
        if rows := [row for row, _ in results.singles]:
            for note_results in self._features.frequent["note_results"]:
                note_results(rows)
        for slots, tokens in known:
            self._turn.know(slots, tokens)

    def _jump(self, sequence: Sequence, run: Int32) -> None:
        """Append forced tokens, up to and including one that ends the sequence."""
        slot = sequence.slot
        known, end = self._output.append_run(sequence, run)
        self._turn.know_run(slot, known)
        self._running.resume(sequence)
        if end is not None:
            self._end(sequence, end)

    # -- inspection -----------------------------------------------------------------------

    def uids_of(self, slots: Int32) -> list[int]:
        """Return the uid of the sequence in each of these slots."""
        return list(map(int, self._running.table.uids[slots]))

    @property
    def is_waiting(self) -> bool:
        """Return True if there are live sequences and planning is not paused, but neither a step
        nor a feature's request that they depend on is in flight."""
        idle = bool(self.live) and not self._in_flight and not self._depth.is_paused
        return idle and not any(feature.waits for feature in self._features)

    def figures(self) -> dict[str, Any]:
        """Return counts since the start, the current numbers of waiting, running and live
        sequences, and the figures of all features."""
        return {
            **dataclasses.asdict(self.statistics),
            "waiting": len(self._room.waiting),
            "running": len(self._running),
            "live": len(self.live),
            "tombstones": len(self.arrivals.tombstones),
            "credits": self.budget.credits,
            "blocks": self.config.blocks,
            "paused": int(self._depth.is_paused),
            **{name: n for part in self._features for name, n in part.figures().items()},
        }

    def check_idle(self) -> None:
        """Raise `ProtocolBug` if anything is held although no request is live."""
        if not self.live and not self._in_flight and self.budget.oldest_unanswered is None:
            self.budget.check_idle()
            for feature in self._features:
                feature.check_idle()

    HANDLERS: ClassVar[Mapping[type, Callable[[Scheduler, Any], None]]] = {
        Admit: _on_admit,
        Reject: lambda self, event: self.arrivals.reject(event),
        Resume: lambda self, event: self.arrivals.resume(event),
        Abort: _on_abort,
        Pause: lambda self, event: self._depth.pause(event.paused),
        ForgetIndex: lambda self, event: self._turn.forget_index(event.number),
        Stop: _on_stop,
        Answer: _on_answer,
        StepDone: _on_step_done,
        StepWanted: _on_step_wanted,
    }
    """Handlers of the events that do not belong to a feature."""
    EVENTS: ClassVar[frozenset[type]] = frozenset(HANDLERS).union(
        *(feature.HANDLERS for feature in (Pictures, Constraints, HeldAnswers))
    )
    """All event types that the scheduler handles."""
