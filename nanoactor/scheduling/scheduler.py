"""The scheduler's logic: admission, batching, preemption, ends.

Events in, messages out; no I/O, no clock, no ids of blocks, no values of tokens other than
to see whether they end a sequence. Three ideas carry it:

*The host knows lengths, the device knows tokens.* Step N+1 is planned while step N runs:
how long each sequence will be is known, and the sampled token stays on the device.

*Credits, not questions.* Blocks are spent from a count that is kept here, in `BlockBudget`. A
match debits a whole prompt; what the prefix cache saves comes back as a refund.

*Fences.* What is freed while steps are in flight counts only when they are done.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from nanoactor.continuing import Resume
from nanoactor.grammar.messages import ForcedTokens, GrammarsFailed, MaskClock, MasksReady
from nanoactor.messages import (
    Abort,
    Admit,
    Continue,
    Credits,
    Free,
    HoldClock,
    Int32,
    Reject,
    SampledTokens,
    StepDone,
    StepWanted,
    Stop,
)
from nanoactor.orders import ForgetIndex, Freeze
from nanoactor.runtime.codec import copied
from nanoactor.scheduling import ends
from nanoactor.scheduling.arrivals import Arrivals
from nanoactor.scheduling.budget import BlockBudget
from nanoactor.scheduling.config import SchedulerConfig
from nanoactor.scheduling.constraints import Constraints
from nanoactor.scheduling.depth import PipelineDepth
from nanoactor.scheduling.edges import BLOCKS, TEXT, Send
from nanoactor.scheduling.ends import End
from nanoactor.scheduling.forking import Forking
from nanoactor.scheduling.holding import HeldAnswers
from nanoactor.scheduling.items import ItemBook
from nanoactor.scheduling.output import OutputBuffer
from nanoactor.scheduling.plan_builder import PlanBuilder, PlannedStep, as_int32
from nanoactor.scheduling.queues import RunningBatch, WaitingLine
from nanoactor.scheduling.results import check_due, split_rows
from nanoactor.scheduling.sequence import Phase, Sequence
from nanoactor.scheduling.statistics import SchedulerStatistics
from nanoactor.scheduling.table import DecodeBatch
from nanoactor.scheduling.turning import Turning
from nanoactor.vision.messages import ItemsFailed, ItemsReady


class Scheduler:
    """Decides what runs. `handle` takes one event and returns what to send, in order."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.statistics = SchedulerStatistics()
        self.budget = BlockBudget(config.blocks, config.max_num_seqs)
        self.items = ItemBook(config.encoder)
        self.constraints = Constraints(config.ranks, config.jump_forward)
        self._turning = Turning(self.constraints, self._send_back)
        self.live: dict[int, Sequence] = {}
        self._waiting = WaitingLine()
        self._running = RunningBatch(config.max_num_seqs, config.max_model_len, config.block_size)
        self._table = self._running.table
        self._output = OutputBuffer(self._running, self.statistics)
        self._forking = Forking(
            self.budget, self._running, self._waiting, config.block_size, config.prefix_caching
        )
        self.holds = HeldAnswers(self.budget, self._running, self._waiting, config.block_size)
        self.arrivals = Arrivals(self._output, self.statistics)
        self._planned = self._completed = self._preempted_at = self._wanted = 0
        """The last steps planned, done, with somebody preempted for them, and asked for."""
        self._in_flight: deque[PlannedStep] = deque()
        self._depth = PipelineDepth(config.depth, config.max_depth)
        self._unsettled = 0
        """Failures of which the block manager has not said whom else they concern; ..."""
        self._held_back: deque[StepDone] = deque()
        """... until then nobody is told what these steps brought."""
        self._plan_builder = PlanBuilder(config.max_num_seqs)
        self._to_free: list[int] = []
        self._out: list[Send] = []

    def handle(self, event: Any) -> list[Send]:
        """Take one event; the plan it leads to leaves before the tokens it brought."""
        if self._unsettled and type(event) is StepDone:
            self._held_back.append(copied(event))  # it outlives its handler
            return []
        self._process(event)
        while self._held_back and not self._unsettled:
            self._process(self._held_back.popleft())
        out, self._out = self._out, []
        return out

    def _process(self, event: Any) -> None:
        self.HANDLERS[type(event)](self, event)
        for sequence, run in self.constraints.take_runs(self._running.constrained):
            self._jump(sequence, run)
        self._flush_frees()
        self._admit_waiting()
        while self._may_plan() and self._plan():
            self._admit_waiting()
        self._make_way()
        self._out += [*self.items.flush(), *self.constraints.flush()]
        if (tokens := self._output.flush(self._completed)) is not None:
            self._out.append((TEXT, tokens))

    # -- requests come and go -------------------------------------------------------------

    def _on_admit(self, event: Admit) -> None:
        answers = Sequence.answers(event, self._table, self.config)
        living, opened = self.arrivals.admit(event, answers)
        self.live |= {sequence.uid: sequence for sequence in living}
        self._out += opened
        self._forking.admit(living)
        for sequence in living:
            if (end := sequence.end_restored()) is not None:  # nobody had been told
                self._end(sequence, end)

    def _on_abort(self, event: Abort) -> None:
        if self.arrivals.overtaken(event):
            return
        if (sequence := self.live.get(event.uid)) is not None:
            self.statistics.aborted += 1
            self._end(sequence, End("abort"))

    def _on_stop(self, event: Stop) -> None:
        for uid in event.uids.tolist():
            if (sequence := self.live.get(uid)) is not None:
                self._end(sequence, End("stop"))

    def _fail(self, sequence: Sequence, end: End) -> None:
        if sequence.phase is Phase.FINISHED:
            self.statistics.overruns += 1
            return
        self.statistics.failed += end.reason == "failed"
        self._end(sequence, end)

    def _end(self, sequence: Sequence, end: End) -> None:
        """End a sequence, the only way there is; its results that are under way are dropped."""
        self.statistics.finished += 1
        self._output.stop_ids.remove(sequence.watched_ids)
        self._output.finish(sequence.uid, end, sequence)
        phase = sequence.phase
        sequence.phase = Phase.FINISHED
        del self.live[sequence.uid]
        self.constraints.close(sequence.uid)
        self.holds.close(sequence.uid)
        if phase is Phase.FOLLOWING:
            sequence.family.followers.remove(sequence)
            return
        if phase is Phase.WAITING:
            self._waiting.note_end(sequence)
        elif sequence.slot >= 0:
            self._give_up_slot(sequence)
        self._forking.note_end(sequence)

    # -- blocks and slots -----------------------------------------------------------------

    def _give_up_slot(self, sequence: Sequence) -> None:
        self._to_free.append(sequence.slot)
        self.budget.give_up_slot(sequence.slot, fence=self._planned)
        self.items.leave(sequence)
        sequence.family.leave(sequence)
        self._running.leave(sequence)

    def _flush_frees(self) -> None:
        self._out += self.items.flush()
        if self._to_free:
            self._out.append((BLOCKS, Free(as_int32(self._to_free), fence=self._planned)))
            self._to_free = []
            self.budget.expect(fence=self._planned)

    def _on_credits(self, event: Credits) -> None:
        found = self.items.answers(event.encoder, len(event.uids))
        columns = (event.uids.tolist(), event.hits.tolist(), event.refunds.tolist(), found)
        for uid, hit, refund, item_answer in zip(*columns, strict=True):
            self.budget.refund(refund)
            if (sequence := self.live.get(uid)) is not None:
                self._answer_match(sequence, hit, item_answer)
            self.items.note_answer()
        for freed, fence in zip(event.freed.tolist(), event.fences.tolist(), strict=True):
            self.budget.answer(freed, fence)
        self._unsettled -= event.settled
        for uid in event.tainted.tolist():
            # What it has read its copies have; they may have been planned after that was found.
            for sequence in [s for s in self.live.values() if s.has_blocks_of(uid)]:
                self._fail(sequence, ends.TAINTED)

    def _answer_match(
        self, sequence: Sequence, hit: int, item_answer: tuple[list[int], list[int]]
    ) -> None:
        sequence.unanswered -= 1
        if sequence.phase is Phase.MATCHING and not sequence.unanswered:
            sequence.phase = Phase.RUNNING
            self._table.start(sequence.slot, hit)
            if sequence.items is not None:
                self.items.take(sequence, *item_answer)
            if self.config.prefix_caching:
                sequence.shared = hit // self.config.block_size
            if sequence.cached_tokens < 0:
                sequence.cached_tokens = min(hit, sequence.prompt_length)

    def _admit_waiting(self) -> None:
        """Match the head of the queue, as far as the next step has tokens for it."""
        if not self._waiting:
            return
        tokens = self.config.max_num_batched_tokens - self._running.left_to_prefill
        while self.budget.free_slots and tokens > 0:
            if (head := self._waiting.head(self.items.budget.credits)) is None:
                return
            need = -(-head.length // self.config.block_size)
            # A preempted sequence comes back when all its results are in: known == scheduled.
            if head.last_step > self._completed or self.budget.credits < need + self._reserve():
                return
            # It pays to wait: a block is indexed as soon as the step that computes it is planned.
            hits = self.config.prefix_caching and head.is_scored
            if hits and self._running.is_about_to_compute_for(head):
                return
            self._waiting.pop(head)
            self._match(head, need)
            tokens -= head.target

    def _reserve(self) -> int:
        """Count the credits that admission leaves alone: for those that need a block now.

        Without them a preempted sequence would take back what it had to give up. A few more,
        up to one for each running sequence, keep the next preemption from following at once.
        """
        _, starving = self._table.demand()
        needed = int(np.count_nonzero(starving)) + len(self._running.starving)
        return needed + min(len(self._running), self.config.blocks // 64)

    def _make_way(self) -> None:
        """Have one that is held give up its place, where somebody waits and nothing is under way;
        what comes back is known before the next one does."""
        under_way = self._in_flight or self.budget.oldest_unanswered is not None
        if under_way or self._waiting.head(self.items.budget.credits) is None:
            return
        if (held := self.holds.who_yields()) is not None:
            self._give_up_slot(held)
            held.phase = Phase.HELD
            self._flush_frees()

    def _match(self, sequence: Sequence, need: int) -> None:
        self.budget.debit(need)
        sequence.phase = Phase.MATCHING
        sequence.unanswered += 1
        sequence.drops = False
        self._running.enter(sequence, self.budget.take_slot(), need)
        self.items.note_match(sequence)
        self.constraints.open(sequence)
        self._out.append((BLOCKS, self._forking.match(sequence, need)))

    def _feed(self, starving: list[Sequence]) -> list[Sequence]:
        """Give one more block to each of these; those for whom there is none sit this step out.

        Who has waited longest goes first, so that each waits its turn at most once.
        """
        step = self._planned + 1
        self._make_room(starving)
        queue = [s for s in starving if s.slot >= 0]  # others were preempted a moment ago
        queue.sort(key=lambda s: (s.starved_since or step, s.priority_key))
        fed, unfed = queue[: self.budget.credits], queue[self.budget.credits :]
        self.budget.debit(len(fed))
        self._table.grow([sequence.slot for sequence in fed])
        for sequence in fed:
            sequence.starved_since = 0
        for sequence in unfed:
            sequence.starved_since = sequence.starved_since or step
        return fed

    def _make_room(self, starving: list[Sequence]) -> None:
        """Preempt the youngest until there is, or will be, a block for each of these.

        Nobody is preempted while credits on their way suffice, or while an answer that may
        tell of more is out: for `depth` steps at most.
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
        self._flush_frees()

    def _preempt(self, victim: Sequence) -> None:
        """Send the youngest back to wait; steps in flight still bring it their tokens."""
        self.statistics.preemptions += 1
        victim.preemptions += 1
        self._send_back(victim)

    def _send_back(self, sequence: Sequence) -> None:
        """Have a sequence give up all it holds; it comes back when its results are in."""
        rows_in = [p.step for p in self._in_flight if p.has_row(sequence.slot)]
        sequence.last_step = max(rows_in, default=0)
        sequence.phase = Phase.HELD if sequence.is_computed else Phase.WAITING
        self._give_up_slot(sequence)
        if sequence.phase is Phase.WAITING:
            self._waiting.push(sequence)

    # -- steps ----------------------------------------------------------------------------

    def _may_plan(self) -> bool:
        if not self._depth.has_room(self._in_flight, stepwise=bool(self._running.stepwise)):
            return False
        # What a preemption gave back is known within `depth` steps, however slow the edge is.
        unanswered = self.budget.oldest_unanswered
        if unanswered is not None and self._planned >= unanswered + self.config.depth:
            return False
        at_once = self.config.plan_lead == "eager" or not self._in_flight
        return at_once or self._wanted > self._planned

    def _on_step_wanted(self, event: StepWanted) -> None:
        self._wanted = max(self._wanted, event.step)

    def _plan(self) -> bool:
        """Plan one step: every sequence that decodes, then prompts as far as the budget goes."""
        decode_batch, grown, sitting_out = self._choose_decodes()
        decodes = len(decode_batch.slots)
        slices = self.items.choose(self._running.prefilling) if self.items.works else None
        chunks = self._running.choose_chunks(self.config.max_num_batched_tokens - decodes)
        deferred = self.constraints.choose(self._running.constrained, self._planned + 1)
        if not decodes and not chunks and slices is None and not deferred:
            return False
        self._planned += 1
        for chunk in chunks:
            self.items.advance(chunk.sequence)
        forks = self._forking.fork(chunks, self.items.budget.credits, self._reserve)
        for fork in forks:
            self.constraints.open(fork.copy.sequence)
        planned = PlannedStep(self._planned, chunks, decode_batch, slices, forks, deferred)
        self._in_flight.append(planned)
        self._out.append((BLOCKS, self._plan_builder.build(planned, grown)))
        self.statistics.count_step(sum(chunk.length for chunk in chunks), decodes, sitting_out)
        return True

    def _choose_decodes(self) -> tuple[DecodeBatch, list[Sequence], int]:
        """Return what decodes, who of it gets one more block, and how many sit this step out."""
        table = self._table
        constrained = self._running.starving
        if constrained:
            table.interrupt()
        if (same := table.decode_again()) is not None:
            return same, [], 0
        grown: list[Sequence] = []
        ready, starving = table.demand()
        if constrained or starving.any():
            grown = self._feed([*self._running.owners(np.flatnonzero(starving)), *constrained])
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
        self.items.budget.complete(event.step)
        self.statistics.device_seconds += event.seconds
        results = split_rows(planned, event, self._running)
        for sequence, error in zip(results.failed, event.errors, strict=True):
            self._fail(sequence, End("failed", error=error))
        for sequence in (s for s in results.choiceless if not s.drops):
            self._fail(sequence, ends.choiceless(sequence.is_constrained))
        self._unsettled += bool(results.failed)
        self._output.take_scores(planned, event)
        slots, tokens, candidates = self._output.take(results.done, results.tokens)
        self.holds.note_told(chunk.sequence for chunk in results.done.last_chunks)
        for sequence in candidates:
            if (end := sequence.end_reached()) is not None:
                self._end(sequence, end)
            else:
                self._turning.look(sequence)
        self._turning.refuse(self._output.take_refused())
        self._go_on([row.sequence for row in results.done.deferred])
        told = event.step, slots, tokens, results.failed_slots, results.failed_from
        self._out.append((BLOCKS, SampledTokens(*told)))

    def _go_on(self, chosen: list[Sequence]) -> None:
        """Have the next position of each of these be computed, and its mask be made."""
        living = [s for s in chosen if s.phase is not Phase.FINISHED and s.is_constrained]
        for sequence in living:
            self._running.resume(sequence)
        self.constraints.note_tokens(living)

    def _jump(self, sequence: Sequence, run: Int32) -> None:
        """Append tokens that are forced, as far as they do not end it."""
        known, end = self._output.append_run(sequence, run)
        self._out.append((BLOCKS, known))
        self._running.resume(sequence)
        if end is not None:
            self._end(sequence, end)

    def _on_continue(self, event: Continue) -> None:
        """Forks leave before what others give up: that may be what they share."""
        place = self._reserve(), self._planned, self._give_up_slot
        out, over = self.holds.go_on(event, self.live, *place)
        self._out += out
        for sequence in over:
            self._end(sequence, End("stop"))

    def _on_hold_clock(self, event: HoldClock) -> None:
        for sequence in self.holds.tick(self.live):
            self._end(sequence, ends.NO_ANSWER)

    def _on_grammars_failed(self, event: GrammarsFailed) -> None:
        for uid, error in zip(event.uids.tolist(), event.errors, strict=True):
            if (sequence := self.live.get(uid)) is not None:
                self._end(sequence, ends.rejected(error, refused=uid in event.refused))

    def _on_mask_clock(self, event: MaskClock) -> None:
        for uid in self.constraints.tick():
            self._fail(self.live[uid], ends.NO_MASK)

    def _on_items_failed(self, event: ItemsFailed) -> None:
        for pixels, error in zip(event.pixels.tolist(), event.errors, strict=True):
            for uid in self.items.failed(pixels):
                self._end(self.live[uid], ends.rejected(error, refused=pixels in event.refused))

    # -- looking on -----------------------------------------------------------------------

    def uids_of(self, slots: Int32) -> list[int]:
        """Return the request in each of these slots."""
        return list(map(int, self._table.uids[slots]))

    @property
    def is_waiting(self) -> bool:
        """Tell whether there are sequences, and nothing that they need is under way: no step, no
        pixels, no mask."""
        waits = self.items.wanted or self.constraints.waits or self._depth.is_frozen
        idle = bool(self.live) and not self._in_flight and not waits
        return idle and not self.holds.awaits_a_caller(self.live)

    def figures(self) -> dict[str, Any]:
        """Return what was counted since the start, and what waits, runs and is held now."""
        return {
            **dataclasses.asdict(self.statistics),
            "waiting": len(self._waiting),
            "running": len(self._running),
            "live": len(self.live),
            "tombstones": len(self.arrivals.tombstones),
            "credits": self.budget.credits,
            "blocks": self.config.blocks,
            "frozen": int(self._depth.is_frozen),
            "items_encoded": self.items.encoded,
            **self.constraints.figures(),
            **self.holds.figures(),
        }

    def check_idle(self) -> None:
        """Raise `ProtocolBug` if anything is held although no request lives."""
        if not self.live and not self._in_flight and self.budget.oldest_unanswered is None:
            for part in (self.budget, self.items, self.constraints, self.holds):
                part.check_idle()

    HANDLERS: ClassVar[Mapping[type, Callable[[Scheduler, Any], None]]] = {
        Admit: _on_admit,
        Reject: lambda self, event: self.arrivals.reject(event),
        Resume: lambda self, event: self.arrivals.resume(event),
        Abort: _on_abort,
        Continue: _on_continue,
        HoldClock: _on_hold_clock,
        Freeze: lambda self, event: self._depth.freeze(event.frozen),
        ForgetIndex: lambda self, event: self._out.append((BLOCKS, event)),
        Stop: _on_stop,
        Credits: _on_credits,
        StepDone: _on_step_done,
        StepWanted: _on_step_wanted,
        MasksReady: lambda self, event: self.constraints.note_ready(event),
        ForcedTokens: lambda self, event: self.constraints.note_forced(event),
        GrammarsFailed: _on_grammars_failed,
        MaskClock: _on_mask_clock,
        ItemsReady: lambda self, event: self.items.note_ready(event.rank, event.pixels.tolist()),
        ItemsFailed: _on_items_failed,
    }
    """All events that there are, and what handles each."""
