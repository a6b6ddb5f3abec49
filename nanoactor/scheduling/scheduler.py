"""The scheduler's logic: admission, batching, preemption and termination.

The scheduler receives events and returns messages. It does no I/O, reads no clock and knows no
block ids. It looks at token values only to see whether they end a sequence or its free text. It is
based on three ideas:

*The host knows lengths, the device knows tokens.* Step N+1 is planned while step N runs: the length
of each sequence is known in advance, and the sampled token stays on the device.

*Credits, not queries.* The scheduler itself counts the blocks that it may spend, in `BlockBudget`.
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
from nanoactor.scheduling.edges import BLOCKS, DETOKENIZER, Outgoing
from nanoactor.scheduling.features.constraints import Constraints
from nanoactor.scheduling.features.feature import Features
from nanoactor.scheduling.features.forking import Forking
from nanoactor.scheduling.features.holding import HeldSequences
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
from nanoactor.scheduling.steps.queues import RunningBatch, WaitingQueues
from nanoactor.scheduling.steps.results import Results, check_due, split_rows
from nanoactor.scheduling.steps.turns import TurnBuilder
from nanoactor.scheduling.steps.unanswered import UnansweredTurns

_NO_SLOTS = np.empty(0, np.int64)


class Scheduler:
    """Decides which sequences run in each step. `handle` processes one event and returns the
    messages to send. A *turn* is the message with all decisions that follow from one event; the
    block manager converts it into a step."""

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
            self._running, self._rewind, ranks=config.ranks, jumps=config.jump_forward
        )
        places = self.budget, self._running, WaitingQueues()
        self._room = Room(*places, self._available_pages, self._reserved_blocks, config.block_size)
        self.held_sequences = HeldSequences(self.live, self._room, self._turn, self._release_slot)
        forking = Forking(self._room, self._note_admission)
        pooling = Pooling(config.pooling, self._output)
        self._features = Features(
            self.items, self.constraints, self.held_sequences, forking, pooling
        )
        self.arrivals = Arrivals(self._output, self.statistics)
        self._planned = self._completed = self._preempted_at = self._requested = 0
        """Step numbers: the last one planned, the last one completed, the first one planned after
        the latest preemption, and the last one requested by the runner."""
        self._in_flight: deque[PlannedStep] = deque()
        self._depth = PipelineDepth(config.depth, config.max_depth)
        self._unanswered = UnansweredTurns()
        self._full_version = -1
        """The prefill queue's `version` when prompts last filled the next step's budget; -1 if they
        have not yet."""
        self._turns: list[Outgoing] = []
        self._out: list[Outgoing] = []

    def handle(self, event: Any) -> list[Outgoing]:
        """Process one event and return the (edge, message) pairs to send: turns first, then all
        others."""
        if type(event) is StepDone and self._unanswered.hold_back(event):
            return []
        can_plan_more = self._process(event)
        if self._unanswered.held_back:
            for results in self._unanswered.release():
                can_plan_more = self._process(results)
        while can_plan_more:  # each additional step is a separate event and turn
            can_plan_more = self._process(None)
        turns, out = self._turns, self._out
        self._turns, self._out = [], []
        return [*turns, *out]

    def _process(self, event: Any) -> bool:
        """Process one event, or plan one more step if it is None. Return True if yet another step
        may be planned."""
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
        self._release_held_slot()
        can_plan_more = self._planned > before and self._may_plan()
        self._send_turn(fence=before)
        if (tokens := self._output.flush(self._completed)) is not None:
            self._out.append((DETOKENIZER, tokens))
        return can_plan_more

    def _handle(self, event: Any) -> None:
        feature = self._features.by_event.get(type(event))
        if feature is None:
            self.HANDLERS[type(event)](self, event)
        else:
            for sequence, end in feature.HANDLERS[type(event)](feature, event):
                self._fail(sequence, end)

    def _send_turn(self, fence: int) -> None:
        """Queue the messages that result from an event. The turn (the message to the block manager)
        is queued separately, because the next step depends on it. `fence` is the number of the last
        step planned before the event."""
        for flush in self._features.frequent["flush"]:
            self._out += flush(self._turn)
        if self._turn.releases_blocks:
            self.budget.expect(self._turn.number, fence)
        # With late planning, the block manager should have recorded all known tokens before the
        # next plan.
        may_wait = bool(self._in_flight) and self.config.plan_lead == "eager"
        turn = self._turn.build(self._completed, fence, may_wait=may_wait)
        if turn is not None:
            self._turns.append((BLOCKS, turn))

    # -- requests arrive and end ----------------------------------------------------------

    def _on_admit(self, event: Admit) -> None:
        arrived = Sequence.of_request(event, self._running.table, self.config)
        sequences, opened = self.arrivals.admit(event, arrived)
        self.live |= {sequence.uid: sequence for sequence in sequences}
        self._out += opened
        for feature in self._features:
            feature.arrive(sequences)
        for sequence in sequences:
            if (end := sequence.end_restored()) is not None:  # the end was never reported
                self._end(sequence, end)

    def _on_abort(self, event: Abort) -> None:
        if self.arrivals.note_early_abort(event):
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
        """End a sequence for any reason. Its results in flight will be dropped."""
        self.statistics.finished += 1
        self._output.stop_ids.remove(sequence.watched_ids)
        self._output.finish(sequence.uid, end, sequence)
        was_waiting = sequence.phase is Phase.WAITING
        sequence.finish()
        del self.live[sequence.uid]
        if was_waiting:
            self._room.waiting.note_end(sequence)
        elif sequence.slot >= 0:
            self._release_slot(sequence)
        for feature in self._features:
            feature.close(sequence)

    # -- blocks and slots -----------------------------------------------------------------

    def _release_slot(self, sequence: Sequence) -> None:
        self._turn.free(sequence.slot)
        self.budget.release_slot(sequence.slot, fence=self._planned)
        for feature in self._features:
            feature.leave(sequence)
        self._running.leave(sequence)

    def _on_answer(self, event: Answer) -> None:
        self._unanswered.note_answer(event.turn)
        self.budget.refund(int(event.refunds.sum()))
        pairs = zip(event.uids.tolist(), event.hits.tolist(), strict=True)
        admitted = [self._answer_admission(uid, hit) for uid, hit in pairs]
        for feature in self._features:
            feature.answer(event, admitted)
        self._running.table.note_shared(event.slots, event.shared, event.turn)
        freed = zip(event.fences.tolist(), event.freed.tolist(), strict=True)
        self.budget.answer(event.turn, freed)
        for uid in event.tainted.tolist():
            if (sequence := self.live.get(uid)) is not None:
                self._fail(sequence, ends.TAINTED)

    def _answer_admission(self, uid: int, hit: int) -> Sequence | None:
        """Process the answer to the oldest unanswered admission, which must be that of `uid`. `hit`
        is the number of tokens found in the prefix cache. Return the sequence if it starts running
        now, else None."""
        admission = self._unanswered.pop(uid)
        sequence = admission.sequence
        sequence.history.note_match(min(hit, sequence.prompt_length))
        if admission.step:
            self.statistics.discount_hits(hit)
        slot = sequence.slot
        if (
            slot < 0 or self._running.table.admission_turns[slot] != admission.turn
        ):  # the sequence has given up that slot
            return None
        self._running.table.shared[slot] = 0
        if sequence.phase is not Phase.MATCHING:
            return None
        sequence.run()
        self._running.start(slot, hit)
        return sequence

    def _admit_waiting(self) -> None:
        """Admit sequences from the head of the queue while the next step has token budget left for
        them."""
        if not self._room.waiting or self._running.prefills.version == self._full_version:
            return
        budget = self.config.max_num_batched_tokens - self._running.prefills.num_left
        while self.budget.free_slots and budget > 0:
            if (head := self._room.head) is None:
                return
            blocks = -(-head.length // self.config.block_size)
            # A preempted sequence can be admitted only once all its results have arrived (known ==
            # scheduled).
            if (
                head.last_step > self._completed
                or self.budget.credits < blocks + self._reserved_blocks()
            ):
                return
            # Wait for a running prompt to compute the shared prefix: a block can be found in the
            # prefix cache as soon as the step that computes it is planned.
            may_hit = self.config.prefix_caching and head.is_prompt_read
            if may_hit and self._running.prefills.will_compute_prefix_of(head):
                return
            self._room.waiting.pop(head)
            self._admit(head, blocks)
            budget -= head.target
        if budget <= 0:
            self._full_version = self._running.prefills.version

    def _reserved_blocks(self) -> int:
        """Return the number of free blocks that admissions must leave for running sequences.

        Without this reserve, a preempted sequence would take back the blocks that it had to give
        up. A few more blocks, up to one for each running sequence, avoid another preemption right
        away.
        """
        if not len(self._running):
            return 0
        _, starving = self._running.table.readiness()
        needed = int(np.count_nonzero(starving)) + len(self._running.starving)
        return needed + min(len(self._running), self.config.blocks // 64)

    def _available_pages(self) -> int:
        """Return the number of encoder-cache pages that admissions may spend."""
        return self.items.budget.credits

    def _release_held_slot(self) -> None:
        """Release the slot of a held sequence (one that waits for its caller) if another sequence
        waits for a slot and no step or answer is outstanding. Only one slot is released at a time:
        the blocks that it frees are counted before the next release."""
        is_busy = self._in_flight or self.budget.oldest_unanswered is not None
        if is_busy or self._room.head is None:
            return
        candidates = [
            yield_candidate() for yield_candidate in self._features.frequent["sequence_to_yield"]
        ]
        if (sequence := next(filter(None, candidates), None)) is not None:
            self._release_slot(sequence)
            sequence.hold()

    def _admit(self, sequence: Sequence, blocks: int) -> None:
        self.budget.debit(blocks)
        self._running.enter(sequence, self.budget.allocate_slot(), blocks)
        self._unanswered.note_admission(self._turn.number, sequence)
        self._turn.admit(sequence, blocks)
        self._note_admission(sequence)

    def _note_admission(self, sequence: Sequence) -> None:
        self._running.table.admission_turns[sequence.slot] = self._turn.number
        for feature in self._features:
            feature.admit(sequence, self._turn.number)

    def _grant_blocks(self, starving: list[Sequence]) -> list[Sequence]:
        """Grant one more block to as many of these sequences as possible, in the order in which
        they ran out of blocks. Return those that received one; the others skip this step. Preempts
        the youngest running sequences if there are too few blocks."""
        step = self._planned + 1
        self._preempt_for(starving)
        queue = [s for s in starving if s.slot >= 0]  # the others have just been preempted
        queue.sort(key=lambda s: (s.starved_since or step, s.priority_key))
        granted, denied = queue[: self.budget.credits], queue[self.budget.credits :]
        self.budget.debit(len(granted))
        self._running.table.grow([sequence.slot for sequence in granted])
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
        step = self._planned + 1
        missing = len(starving) - self.budget.credits - self.budget.pending
        since = max(self._preempted_at, min(s.starved_since or step for s in starving))
        answered = self.budget.oldest_unanswered is None
        if missing <= 0 or (step < since + self.config.depth and not answered):
            return
        while missing > 0 and len(self._running) > 1:
            victim = self._running.youngest
            missing -= max(1, victim.num_freeable_blocks) + (victim in starving)
            self._preempt(victim)
        self._preempted_at = step

    def _preempt(self, victim: Sequence) -> None:
        """Preempt a sequence: release its slot and queue it again. If it can continue only after
        its caller has chosen its next token, it is not queued until then. The sequence still
        receives its tokens from steps in flight, and can be admitted again once they have
        arrived."""
        self.statistics.preemptions += 1
        steps = [p.step for p in self._in_flight if p.has_row(victim.slot)]
        victim.note_preemption(max(steps, default=0))
        is_computed = victim.is_computed
        self._release_slot(victim)
        if is_computed:
            victim.hold()
        else:
            self._room.waiting.push(victim)

    def _rewind(self, sequence: Sequence) -> None:
        self._output.discard_results(sequence, self._planned)
        if sequence.slot >= 0:
            self._running.rewind(sequence)

    # -- steps ----------------------------------------------------------------------------

    def _may_plan(self) -> bool:
        if not self._depth.has_room(self._in_flight, stepwise=bool(self._running.stepwise)):
            return False
        # The number of freed blocks must be known within `depth` steps, however slow the block
        # manager is.
        unanswered = self.budget.oldest_unanswered
        if unanswered is not None and self._planned >= unanswered + self.config.depth:
            return False
        at_once = self.config.plan_lead == "eager" or not self._in_flight
        return at_once or self._requested > self._planned

    def _on_step_wanted(self, event: StepWanted) -> None:
        self._requested = max(self._requested, event.step)

    def _plan(self) -> None:
        """Plan one step: all sequences that decode, then prompts within the remaining token budget.
        Waiting sequences are admitted between the two, so that they are not preempted
        immediately."""
        decode_batch, grown, num_skipped = self._choose_decodes()
        self._admit_waiting()
        num_decodes, turn = len(decode_batch.slots), self._turn.number
        prefilling = self._running.prefills.running
        encodings = [feature.plan_encoding(prefilling) for feature in self._features if prefilling]
        slices = next((slices for slices in encodings if slices is not None), None)
        budget = self.config.max_num_batched_tokens - num_decodes
        rows = self._running.prefills.choose_rows(budget, turn)
        extra_rows: list[PlannedRow] = []
        if rows or self._running.stepwise:
            extra_rows = [
                row for f in self._features for row in f.plan_rows(self._planned + 1, rows)
            ]
        if not num_decodes and not rows and slices is None and not extra_rows:
            return
        self._planned += 1
        if rows:
            self._unanswered.note_first_rows(
                turn, self._planned, {row.sequence.uid for row in rows}
            )
        rows += extra_rows
        planned = PlannedStep(self._planned, decode_batch, rows, encodes=slices is not None)
        self._in_flight.append(planned)
        self._turn.plan(planned, grown, slices)
        self.statistics.count_step(planned.num_positions, num_decodes, num_skipped)

    def _choose_decodes(self) -> tuple[DecodeBatch, list[Sequence], int]:
        """Return the decode batch, the sequences that receive another block, and the number of
        sequences that skip this step for lack of one."""
        table = self._running.table
        if not len(self._running):
            return table.decode(_NO_SLOTS, none_starving=True), [], 0
        blocked = self._running.starving
        if blocked:
            table.positions.interrupt()
        if (repeated := table.positions.decode_again()) is not None:
            return repeated, [], 0
        granted: list[Sequence] = []
        ready, starving = table.readiness()
        if blocked or starving.any():
            granted = self._grant_blocks(
                [*self._running.owners(np.flatnonzero(starving)), *blocked]
            )
            ready, starving = table.readiness()
        num_skipped = int(np.count_nonzero(starving)) + len(self._running.starving)
        batch = table.decode(np.flatnonzero(ready), none_starving=not starving.any())
        return batch, granted, num_skipped

    # -- results --------------------------------------------------------------------------

    def _on_step_done(self, event: StepDone) -> None:
        due = self._in_flight.popleft() if self._in_flight else None
        planned = check_due(due, event, self._running)
        planned.note_begin(event.began)
        self._depth.note_step(planned, event.seconds)
        self._completed = event.step
        self.budget.complete(event.step)
        for note_done in self._features.frequent["note_done"]:
            note_done(event.step)
        self.statistics.device_seconds += event.seconds
        results = split_rows(planned, event, self._running)
        for sequence, slot, start in results.failed:
            self._turn.fail(slot, start)
            self._unanswered.note_failure(self._turn.number)
            self._fail(sequence, ends.NOT_FINITE)
        for sequence in (s for s in results.choiceless if event.step > s.discarded_until):
            self._fail(sequence, ends.choiceless(sequence.is_constrained))
        self._output.record_scores(planned, event)
        for take_results in self._features.frequent["take_results"]:
            for sequence, end in take_results(results, event.step):
                self._end(sequence, end)
        self._append_tokens(results)

    def _append_tokens(self, results: Results) -> None:
        known, candidates = self._output.append_results(results)
        for sequence in candidates:
            if (end := sequence.end_reached()) is not None:
                self._end(sequence, end)
                continue
            for note_token in self._features.frequent["note_token"]:
                note_token(sequence)
        if refused := self._output.take_refused():
            for note_refused in self._features.frequent["note_refused"]:
                note_refused(refused)
        if rows := [row for row, _ in results.singles]:
            for note_results in self._features.frequent["note_results"]:
                note_results(rows)
        for slots, tokens in known:
            self._turn.add_known(slots, tokens)

    def _jump(self, sequence: Sequence, run: Int32) -> None:
        """Append the tokens `run`, the only continuation that the sequence's grammar allows,
        without sampling. Stop after a token that ends the sequence."""
        slot = sequence.slot
        known, end = self._output.append_run(sequence, run)
        self._turn.add_known_run(slot, known)
        self._running.prefills.push_again(sequence)
        if end is not None:
            self._end(sequence, end)

    # -- inspection -----------------------------------------------------------------------

    def uids_of(self, slots: Int32) -> list[int]:
        """Return the uid of the sequence in each of these slots. The slots must be occupied."""
        return list(map(int, self._running.table.uids[slots]))

    @property
    def is_stalled(self) -> bool:
        """True if live sequences cannot make progress although planning is not paused: no step is
        in flight, and no feature waits for another actor or a caller."""
        idle = bool(self.live) and not self._in_flight and not self._depth.is_paused
        return idle and not any(feature.is_waiting for feature in self._features)

    def figures(self) -> dict[str, Any]:
        """Return all figures of the scheduler by metric name: counts since the start, the current
        numbers of waiting, running and live sequences, and the figures of all features."""
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
        """Raise `ProtocolBug` if blocks, slots or features' resources are held although no request
        is live."""
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
    """Handlers of the events that the scheduler processes itself, by event class."""
    EVENTS: ClassVar[frozenset[type]] = frozenset(HANDLERS).union(
        *(feature.HANDLERS for feature in (Pictures, Constraints, HeldSequences))
    )
    """All event types that `Scheduler.handle` accepts."""
