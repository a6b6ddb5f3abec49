"""The scheduler's logic: the order of operations in one turn, the choice of each step, and
termination.

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
from nanoactor.scheduling.admission import AdmissionControl
from nanoactor.scheduling.config import SchedulerConfig
from nanoactor.scheduling.edges import BLOCKS, DETOKENIZER, Outgoing
from nanoactor.scheduling.features.constraints import Constraints
from nanoactor.scheduling.features.feature import Features
from nanoactor.scheduling.features.forking import Forking
from nanoactor.scheduling.features.holding import HeldSequences
from nanoactor.scheduling.features.items import Images
from nanoactor.scheduling.features.pooling import Pooling
from nanoactor.scheduling.preemption import BlockGrants
from nanoactor.scheduling.resources.budget import BlockBudget
from nanoactor.scheduling.resources.room import Room
from nanoactor.scheduling.sequences import ends
from nanoactor.scheduling.sequences.ends import End
from nanoactor.scheduling.sequences.sequence import Phase, Sequence
from nanoactor.scheduling.sequences.table import DecodeBatch
from nanoactor.scheduling.statistics import SchedulerStatistics
from nanoactor.scheduling.steps.arrivals import Arrivals
from nanoactor.scheduling.steps.output import OutputBuffer
from nanoactor.scheduling.steps.pipeline import Pipeline
from nanoactor.scheduling.steps.planned import PlannedRow, PlannedStep
from nanoactor.scheduling.steps.queues import RunningBatch, WaitingQueues
from nanoactor.scheduling.steps.results import Results, split_rows
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
        self.items = Images(config.encoder)
        self._pipeline = Pipeline(config, self.budget, self._running)
        self.constraints = Constraints(
            self._running,
            self._output,
            self._pipeline,
            ranks=config.ranks,
            jumps=config.jump_forward,
        )
        self._room = Room(
            self.budget,
            self.items.budget,
            self._running,
            WaitingQueues(),
            blocks=config.blocks,
            block_size=config.block_size,
        )
        self._features = Features()
        self._unanswered = UnansweredTurns()
        self._admission = AdmissionControl(
            config,
            self._room,
            self._features,
            turn=self._turn,
            pipeline=self._pipeline,
            unanswered=self._unanswered,
            statistics=self.statistics,
        )
        release_slot = self._admission.release_slot
        self._grants = BlockGrants(
            self._room, self._pipeline, self.statistics, release_slot, depth=config.depth
        )
        self.held_sequences = HeldSequences(self.live, self._room, self._turn, release_slot)
        self._features.add(
            self.items,
            self.constraints,
            self.held_sequences,
            Forking(self._room, self._admission.note_admission),
            Pooling(config.pooling, self._output),
        )
        self.arrivals = Arrivals(self._output, self.statistics)
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
        before = self._pipeline.planned
        if event is not None:
            self._handle(event)
        for forced in self._features.frequent["forced"]:
            for sequence, run in forced():
                self._jump(sequence, run)
        if self._pipeline.may_plan():
            self._plan()
        else:
            self._admission.admit_waiting()
        self._admission.release_held_slot()
        can_plan_more = self._pipeline.planned > before and self._pipeline.may_plan()
        self._send_turn(fence=before)
        if (tokens := self._output.flush(self._pipeline.completed)) is not None:
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
        pipeline = self._pipeline
        turn = self._turn.build(pipeline.completed, fence, may_wait=pipeline.may_wait)
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
            self._admission.release_slot(sequence)
        for feature in self._features:
            feature.close(sequence)

    def _on_answer(self, event: Answer) -> None:
        self._unanswered.note_answer(event.turn)
        self.budget.refund(int(event.refunds.sum()))
        admitted = self._admission.answer(event)
        for feature in self._features:
            feature.answer(event, admitted)
        self._running.table.note_shared(event.slots, event.shared, event.turn)
        freed = zip(event.fences.tolist(), event.freed.tolist(), strict=True)
        self.budget.answer(event.turn, freed)
        for uid in event.tainted.tolist():
            if (sequence := self.live.get(uid)) is not None:
                self._fail(sequence, ends.TAINTED)

    # -- steps ----------------------------------------------------------------------------

    def _plan(self) -> None:
        """Plan one step: all sequences that decode, then prompts within the remaining token budget.
        Waiting sequences are admitted between the two, so that they are not preempted
        immediately."""
        decode_batch, grown, num_skipped = self._choose_decodes()
        self._admission.admit_waiting()
        num_decodes, turn = len(decode_batch.slots), self._turn.number
        prefilling = self._running.prefills.running
        encodings = [feature.plan_encoding(prefilling) for feature in self._features if prefilling]
        slices = next((slices for slices in encodings if slices is not None), None)
        budget = self.config.max_num_batched_tokens - num_decodes
        rows = self._running.prefills.choose_rows(budget, turn)
        step = self._pipeline.planned + 1
        extra_rows: list[PlannedRow] = []
        if rows or self._running.stepwise:
            extra_rows = [row for f in self._features for row in f.plan_rows(step, rows)]
        if not num_decodes and not rows and slices is None and not extra_rows:
            return
        if rows:
            self._unanswered.note_first_rows(turn, step, {row.sequence.uid for row in rows})
        rows += extra_rows
        planned = PlannedStep(step, decode_batch, rows, encodes=slices is not None)
        self._pipeline.add(planned)
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
            granted = self._grants.grant(
                [*self._running.owners(np.flatnonzero(starving)), *blocked]
            )
            ready, starving = table.readiness()
        num_skipped = int(np.count_nonzero(starving)) + len(self._running.starving)
        batch = table.decode(np.flatnonzero(ready), none_starving=not starving.any())
        return batch, granted, num_skipped

    # -- results --------------------------------------------------------------------------

    def _on_step_done(self, event: StepDone) -> None:
        planned = self._pipeline.complete(event)
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

    @property
    def is_stalled(self) -> bool:
        """True if live sequences cannot make progress although planning is not paused: no step is
        in flight, and no feature waits for another actor or a caller."""
        pipeline = self._pipeline
        idle = bool(self.live) and not pipeline.in_flight and not pipeline.depth.is_paused
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
            "paused": int(self._pipeline.depth.is_paused),
            **{name: n for part in self._features for name, n in part.figures().items()},
        }

    def check_idle(self) -> None:
        """Raise `ProtocolBug` if blocks, slots or features' resources are held although no request
        is live."""
        idle = not self.live and not self._pipeline.in_flight
        if idle and self.budget.oldest_unanswered is None:
            self.budget.check_idle()
            for feature in self._features:
                feature.check_idle()

    HANDLERS: ClassVar[Mapping[type, Callable[[Scheduler, Any], None]]] = {
        Admit: _on_admit,
        Reject: lambda self, event: self.arrivals.reject(event),
        Resume: lambda self, event: self.arrivals.resume(event),
        Abort: _on_abort,
        Pause: lambda self, event: self._pipeline.depth.pause(event.paused),
        ForgetIndex: lambda self, event: self._turn.forget_index(event.number),
        Stop: _on_stop,
        Answer: _on_answer,
        StepDone: _on_step_done,
        StepWanted: lambda self, event: self._pipeline.request(event.step),
    }
    """Handlers of the events that the scheduler processes itself, by event class."""
    EVENTS: ClassVar[frozenset[type]] = frozenset(HANDLERS).union(
        *(feature.HANDLERS for feature in (Images, Constraints, HeldSequences))
    )
    """All event types that `Scheduler.handle` accepts."""
