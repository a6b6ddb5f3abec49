"""The scheduler's logic: admission, batching, credits, preemption, ends.

Events in, messages out; no I/O, no clock, no ids of blocks, no values of tokens other than
to see whether they end a sequence. Three ideas carry it:

*The host knows lengths, the device knows tokens.* Step N+1 is planned while step N runs:
how long each sequence will be is known, and the sampled token stays on the device.

*Credits, not questions.* Blocks are spent from a count that is kept here, in `BlockBudget`. A
match debits a whole prompt; what the prefix cache saves comes back as a refund.

*Fences.* What is freed while steps are in flight counts only when they are done.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nanoactor.errors import ProtocolBug
from nanoactor.messages import (
    Abort,
    Admit,
    Credits,
    Finish,
    Free,
    Int32,
    Int64,
    Known,
    Match,
    Open,
    Reject,
    StepDone,
    StepWanted,
    Stop,
    Tokens,
)
from nanoactor.scheduling.budget import BlockBudget
from nanoactor.scheduling.ids import SeenNumbers, StopIds
from nanoactor.scheduling.plan_builder import PlanBuilder, PrefillChunk, as_int32, as_int64
from nanoactor.scheduling.sequence import Phase, Sequence
from nanoactor.scheduling.table import RunningTable, Slots

_NO_FAILURES = as_int32(()), as_int32(())
_TAINTED = (
    "the computation of another request failed, and this one had read from the prefix cache what "
    "that one computed; send it again"
)
BLOCKS, TEXT = "blocks", "detokenizer"
Send = tuple[str, Any]
"""An edge (`BLOCKS` or `TEXT`) and the message to send on it."""


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits that plans keep."""

    blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    """At least `max_num_seqs`, so that every running sequence fits into every step."""
    max_model_len: int
    depth: int = 2
    """How many steps may be planned and not done."""
    plan_lead: Literal["eager", "late"] = "eager"
    """Plan as soon as the depth allows, or when the runner says that it is about to run dry."""
    prefix_caching: bool = True
    priority_window: int = 1000
    """How many later requests a difference of 1 in priority may let pass."""


@dataclasses.dataclass(slots=True)
class SchedulerStatistics:
    """Counts since the start."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    output_tokens: int = 0
    """Tokens that sequences got."""
    mixed_steps: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    """Sequences whose logits were not finite, or that had read what such a one computed."""
    preemptions: int = 0
    overruns: int = 0
    """Tokens of sequences that had ended, by themselves or aborted, and dropped."""
    sat_out: int = 0
    """Decode rows left out of a step for want of a block."""
    device_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class _InFlight:
    """A planned step: whose rows it has, and whose tokens it will bring, in row order."""

    step: int
    table: RunningTable
    chunks: list[Sequence]
    last_chunks: list[Sequence]
    """Those whose prompt ends here: they sample, then those that decode."""
    last_from: list[tuple[int, int]]
    """(slot, first position in this step) of each of these."""
    decoding: Slots

    def _decoders(self) -> list[Sequence]:
        owners = (self.table.owners[slot] for slot in self.decoding.tolist())
        return [owner for owner in owners if owner is not None]

    @property
    def rows(self) -> list[Sequence]:
        """All sequences with a row."""
        return self.chunks + self._decoders()

    @property
    def samplers(self) -> list[Sequence]:
        """All sequences that get a token."""
        return self.last_chunks + self._decoders()


class Scheduler:
    """Decides what runs. `handle` takes one event and returns what to send, in order."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.statistics = SchedulerStatistics()
        self.live: dict[int, Sequence] = {}
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []
        """A heap; sequences that ended while they waited are skipped when they come up."""
        self._ended_waiting = 0
        """How many of these it holds."""
        self._table = RunningTable(config.max_num_seqs, config.max_model_len, config.block_size)
        self._running: list[Sequence] = []
        """By priority: what runs or is being matched."""
        self._prefills: list[Sequence] = []
        """Those of them that have positions left to prefill."""
        self._stop_ids = StopIds()
        self._seen = SeenNumbers()
        self._tombstones: set[int] = set()
        self.budget = BlockBudget(config.blocks, config.max_num_seqs)
        self._sitting_out = 0
        """How many that would decode in the step at hand have no block for it."""
        self._preempted_at = 0
        """The step for which a sequence was last preempted."""
        self._planned = 0
        self._completed = 0
        self._wanted = 0
        self._in_flight: deque[_InFlight] = deque()
        self._unsettled = 0
        """Failures of which the block manager has not said whom else they concern; ..."""
        self._held_back: deque[StepDone] = deque()
        """... until then nobody is told what these steps brought."""
        self._plan_builder = PlanBuilder(config.max_num_seqs)
        self._to_free: list[int] = []
        self._out: list[Send] = []
        self._new_tokens: list[tuple[Int64, Int32, Int32]] = []
        """(uids, indices, tokens) to report to the detokenizer after this event."""
        self._finishes: list[Finish] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            Admit: self._on_admit,
            Reject: self._on_reject,
            Abort: self._on_abort,
            Stop: self._on_stop,
            Credits: self._on_credits,
            StepDone: self._on_step_done,
            StepWanted: self._on_step_wanted,
        }

    def handle(self, event: Any) -> list[Send]:
        """Take one event; the plan it leads to leaves before the tokens it brought."""
        if self._unsettled and type(event) is StepDone:
            # It outlives its handler, so it takes arrays of its own along.
            tokens, failed = event.token_ids.copy(), event.failed.copy()
            self._held_back.append(dataclasses.replace(event, token_ids=tokens, failed=failed))
            return []
        self._process(event)
        while self._held_back and not self._unsettled:
            self._process(self._held_back.popleft())
        out, self._out = self._out, []
        return out

    def _process(self, event: Any) -> None:
        self._handlers[type(event)](event)
        self._flush_frees()
        self._admit_waiting()
        while self._may_plan() and self._plan():
            self._admit_waiting()
        self._flush_tokens()

    # -- requests come and go -------------------------------------------------------------

    def _on_admit(self, event: Admit) -> None:
        if self._swallowed(event.uid):
            return
        config = self.config
        sequence = Sequence.of(event, self._table, config.max_model_len, config.priority_window)
        self.live[event.uid] = sequence
        self._stop_ids.add((*event.stopping.eos_ids, *event.stopping.stop_ids))
        options = event.text_options
        self._out.append(
            (TEXT, Open(event.uid, event.token_ids.copy(), event.prompt_length, options))
        )
        heapq.heappush(self._waiting, (sequence.priority_key, sequence))

    def _on_reject(self, event: Reject) -> None:
        if not self._swallowed(event.uid):
            reason = "error" if event.text else "abort"
            self.statistics.aborted += not event.text
            self._finishes.append(_finish(event.uid, reason, error=event.text))

    def _swallowed(self, uid: int) -> bool:
        """Note that a request has arrived; True where its abort was here first."""
        self._seen.add(uid)
        if uid not in self._tombstones:
            return False
        self._tombstones.remove(uid)
        self.statistics.aborted += 1
        self._finishes.append(_finish(uid, "abort"))
        return True

    def _on_abort(self, event: Abort) -> None:
        if event.uid not in self._seen:
            self._tombstones.add(event.uid)
        elif (sequence := self.live.get(event.uid)) is not None:
            self.statistics.aborted += 1
            self._end(sequence, "abort")

    def _on_stop(self, event: Stop) -> None:
        for uid in event.uids.tolist():
            if (sequence := self.live.get(uid)) is not None:
                self._end(sequence, "stop")

    def _end(
        self,
        sequence: Sequence,
        reason: str,
        stop_reason: int | None = None,
        hide_last: bool = False,
        error: str = "",
    ) -> None:
        """The one way in which a sequence ends; its results that are under way are dropped."""
        self.statistics.finished += 1
        self._stop_ids.remove((*sequence.stopping.eos_ids, *sequence.stopping.stop_ids))
        finish = _finish(sequence.uid, reason, stop_reason, hide_last, sequence, error)
        self._finishes.append(finish)
        self._give_up_slot(sequence)
        waited = sequence.phase is Phase.WAITING
        sequence.phase = Phase.FINISHED
        del self.live[sequence.uid]
        if waited:
            self._ended_waiting += 1
            self._sweep_waiting()

    def _sweep_waiting(self) -> None:
        """Drop what ended while it waited, once that is most of the queue."""
        if 2 * self._ended_waiting > len(self._waiting):
            self._waiting = [entry for entry in self._waiting if entry[1].uid in self.live]
            heapq.heapify(self._waiting)
            self._ended_waiting = 0

    # -- blocks and slots -----------------------------------------------------------------

    def _give_up_slot(self, sequence: Sequence) -> None:
        if sequence.slot < 0:
            return
        self._to_free.append(sequence.slot)
        self.budget.give_up_slot(sequence.slot, fence=self._planned)
        self._running.remove(sequence)
        if sequence in self._prefills:
            self._prefills.remove(sequence)
        sequence.leave()

    def _flush_frees(self) -> None:
        if self._to_free:
            self._out.append((BLOCKS, Free(as_int32(self._to_free), self._planned)))
            self._to_free = []
            self.budget.expect(fence=self._planned)

    def _on_credits(self, event: Credits) -> None:
        for uid, hit, refund in zip(
            event.uids.tolist(), event.hits.tolist(), event.refunds.tolist(), strict=True
        ):
            self.budget.refund(refund)
            sequence = self.live.get(uid)
            if sequence is not None:
                self._answer_match(sequence, hit)
        for freed, fence in zip(event.freed.tolist(), event.fences.tolist(), strict=True):
            self.budget.answer(freed, fence)
        self._unsettled -= event.settled
        for uid in event.tainted.tolist():
            if (sequence := self.live.get(uid)) is not None:
                self._fail(sequence, _TAINTED)

    def _fail(self, sequence: Sequence, error: str) -> None:
        self.statistics.failed += 1
        self._end(sequence, "failed", error=error)

    def _answer_match(self, sequence: Sequence, hit: int) -> None:
        sequence.unanswered -= 1
        if sequence.phase is Phase.MATCHING and not sequence.unanswered:
            sequence.phase = Phase.RUNNING
            self._table.running[sequence.slot] = True
            self._table.scheduled[sequence.slot] = hit
            sequence.shared = hit // self.config.block_size
            if sequence.cached_tokens < 0:
                sequence.cached_tokens = hit

    def _admit_waiting(self) -> None:
        """Match the head of the queue, as far as the next step has tokens for it."""
        if not self._waiting:
            return
        tokens = self.config.max_num_batched_tokens
        tokens -= sum(s.target - s.scheduled for s in self._prefills)
        while self.budget.free_slots and tokens > 0 and (head := self._head()) is not None:
            need = self._blocks_for(head.length)
            # A preempted sequence comes back when all its results are in: known == scheduled.
            if head.in_flight(self._completed):
                return
            if self.budget.credits < need + self._reserve():
                return
            if self._prefix_under_way(head):
                return
            heapq.heappop(self._waiting)
            self._match(head, need)
            tokens -= head.target

    def _reserve(self) -> int:
        """Credits that admission leaves alone: for running sequences that need a block now.

        Without them a preempted sequence would take back what it had to give up. A few more,
        up to one for each running sequence, keep the next preemption from following at once.
        """
        starving = int(np.count_nonzero(self._starving()))
        return starving + min(len(self._running), self.config.blocks // 64)

    def _prefix_under_way(self, head: Sequence) -> bool:
        """Whether a running sequence is about to compute a block that the head could share.

        It pays to wait: the block is indexed as soon as the step that computes it is planned.
        """
        if not self.config.prefix_caching:
            return False
        size = self.config.block_size
        useful = min(len(head.hashes), (head.length - 1) // size)
        for sequence in self._prefills:
            block = sequence.scheduled // size
            if block >= min(useful, len(sequence.hashes)):
                continue
            if (sequence.hashes[block] == head.hashes[block]).all():
                return True
        return False

    def _starving(self) -> NDArray[np.bool_]:
        """By slot: may it decode, but for want of a block?"""
        return self._table.decodable() & self._table.at_block_end()

    def _head(self) -> Sequence | None:
        while self._waiting and self._waiting[0][1].phase is Phase.FINISHED:
            heapq.heappop(self._waiting)
            self._ended_waiting -= 1
        return self._waiting[0][1] if self._waiting else None

    def _match(self, sequence: Sequence, need: int) -> None:
        self.budget.debit(need)
        sequence.phase = Phase.MATCHING
        sequence.enter(self.budget.take_slot(), need)
        sequence.unanswered += 1
        bisect.insort(self._running, sequence, key=lambda s: s.priority_key)
        bisect.insort(self._prefills, sequence, key=lambda s: s.priority_key)
        match = Match(sequence.uid, sequence.slot, sequence.kept, sequence.hashes, need)
        self._out.append((BLOCKS, match))

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)

    def _feed(self, starving: list[Sequence]) -> list[Sequence]:
        """One more block for each of these; those for whom there is none sit this step out.

        Who has waited longest goes first, so that each waits its turn at most once.
        """
        step = self._planned + 1
        self._make_room(starving)
        fed = []
        for sequence in sorted(starving, key=lambda s: s.starved_since or step):
            if sequence.phase is not Phase.RUNNING:  # preempted a moment ago
                continue
            if self.budget.credits:
                self.budget.debit(1)
                sequence.blocks += 1
                self._table.room[sequence.slot] += self.config.block_size
                sequence.starved_since = 0
                fed.append(sequence)
            else:
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
            victim = self._running[-1]
            missing -= max(1, victim.blocks - victim.shared) + (victim in starving)
            self._preempt(victim)
        self._preempted_at = step
        self._flush_frees()

    def _preempt(self, victim: Sequence) -> None:
        """Send the youngest back to wait; steps in flight still bring it their tokens."""
        self.statistics.preemptions += 1
        victim.preemptions += 1
        self._give_up_slot(victim)
        victim.phase = Phase.WAITING
        heapq.heappush(self._waiting, (victim.priority_key, victim))

    # -- steps ----------------------------------------------------------------------------

    def _may_plan(self) -> bool:
        if len(self._in_flight) >= self.config.depth:
            return False
        # What a preemption gave back is known within `depth` steps, however slow the edge is.
        unanswered = self.budget.oldest_unanswered
        if unanswered is not None and self._planned >= unanswered + self.config.depth:
            return False
        if self.config.plan_lead == "eager" or not self._in_flight:
            return True
        return self._wanted > self._planned

    def _on_step_wanted(self, event: StepWanted) -> None:
        self._wanted = max(self._wanted, event.step)

    def _plan(self) -> bool:
        """Plan one step: every sequence that decodes, then prompts as far as the budget goes."""
        step = self._planned + 1
        decoding, grown = self._choose_decodes()
        chunks = self._choose_chunks(self.config.max_num_batched_tokens - len(decoding))
        if not len(decoding) and not chunks:
            return False
        rows = [chunk[0] for chunk in chunks]
        for sequence in rows:
            self._table.last_steps[sequence.slot] = step
        last = [sequence for sequence, _, _, ends in chunks if ends]
        last_from = [(sequence.slot, start) for sequence, start, _, ends in chunks if ends]
        self._planned = step
        self._in_flight.append(_InFlight(step, self._table, rows, last, last_from, decoding))
        self._out.append((BLOCKS, self._plan_builder.plan(step, chunks, decoding, grown)))
        self._count(chunks, len(decoding))
        return True

    def _choose_decodes(self) -> tuple[Slots, list[Sequence]]:
        """(slots of the sequences that decode, those that get one more block)."""
        table, step = self._table, self._planned + 1
        self._sitting_out = 0
        if (same := table.decode_again(step)) is not None:
            return same, []
        grown: list[Sequence] = []
        able, full = table.decodable(), table.at_block_end()
        if (starving := able & full).any():
            grown = self._feed(self._owners(np.flatnonzero(starving)))
            able, full = table.decodable(), table.at_block_end()
        chosen = np.flatnonzero(able & ~full)
        self._sitting_out = int(np.count_nonzero(able)) - len(chosen)
        table.decode(chosen, step, all_fed=not self._sitting_out)
        return table.decode_batch, grown

    def _owners(self, slots: Slots) -> list[Sequence]:
        """Who holds these slots, by priority."""
        owners = (self._table.owners[slot] for slot in slots.tolist())
        return sorted((o for o in owners if o is not None), key=lambda s: s.priority_key)

    def _choose_chunks(self, budget: int) -> list[PrefillChunk]:
        """(sequence, first position, count, whether it is the last) of each prefill row."""
        chunks: list[PrefillChunk] = []
        for sequence in self._prefills:
            if budget <= 0:
                break
            if sequence.prefilling:
                start, target = sequence.scheduled, sequence.target
                count = min(budget, target - start)
                self._table.prefill(sequence.slot, count)
                budget -= count
                chunks.append((sequence, start, count, start + count == target))
        if chunks:
            self._prefills = [s for s in self._prefills if s.scheduled < s.target]
        return chunks

    def _count(self, chunks: list[PrefillChunk], decoding: int) -> None:
        self.statistics.steps += 1
        self.statistics.prefill_tokens += sum(count for _, _, count, _ in chunks)
        self.statistics.decode_tokens += decoding
        self.statistics.sat_out += self._sitting_out
        self.statistics.mixed_steps += bool(chunks and decoding)

    def _on_step_done(self, event: StepDone) -> None:
        done = self._in_flight.popleft() if self._in_flight else None
        samplers = len(done.last_chunks) + len(done.decoding) if done else 0
        if done is None or done.step != event.step or samplers != len(event.token_ids):
            raise ProtocolBug(
                f"step {event.step} is reported done with {len(event.token_ids)} tokens; "
                f"{f'step {done.step}' if done else 'none'} was due with {samplers}: "
                + "; ".join(sequence.describe() for sequence in (done.rows if done else ()))
            )
        self._completed = event.step
        self.budget.complete(event.step)
        self.statistics.device_seconds += event.seconds
        tokens, failed = event.token_ids.copy(), _NO_FAILURES
        if len(event.failed):
            done, tokens, failed = self._drop_failed(done, tokens, event)
        prompted = self._take_prompted(done.last_chunks, tokens)
        slots, ids = self._take_decodes(done.decoding, tokens[len(done.last_chunks) :])
        if len(prompted[0]):
            slots, ids = np.concatenate((prompted[0], slots)), np.concatenate((prompted[1], ids))
        self._out.append((BLOCKS, Known(event.step, slots, ids, *failed)))

    def _drop_failed(
        self, done: _InFlight, tokens: Int32, event: StepDone
    ) -> tuple[_InFlight, Int32, tuple[Int32, Int32]]:
        """End the sequences whose rows failed; what is left of the step, and (slots, positions)
        from which on what they computed is bad."""
        prompts, samplers = len(done.last_chunks), done.samplers
        slots, starts = [], []
        for row, error in zip(event.failed.tolist(), event.errors, strict=True):
            sequence = samplers[row]
            if row < prompts:
                slot, start = done.last_from[row]
            else:
                slot, start = int(done.decoding[row - prompts]), sequence.length - 1
            slots.append(slot)
            starts.append(start)
            if sequence.phase is Phase.FINISHED:
                self.statistics.overruns += 1
            else:
                self._fail(sequence, error)
        self._unsettled += 1
        kept = np.ones(len(tokens), np.bool_)
        kept[event.failed] = False
        rest = dataclasses.replace(
            done,
            last_chunks=[s for s, keep in zip(done.last_chunks, kept, strict=False) if keep],
            decoding=done.decoding[kept[prompts:]],
        )
        return rest, tokens[kept], (as_int32(slots), as_int32(starts))

    def _take_prompted(self, sequences: list[Sequence], tokens: Int32) -> tuple[Int32, Int32]:
        """Take the tokens of rows that ended a prompt; (slots, tokens) of those that hold one."""
        taken = []
        for sequence, token in zip(sequences, tokens.tolist(), strict=False):
            if sequence.slot >= 0:
                taken.append((sequence.slot, token))
            self._take(sequence, token)
        return as_int32(slot for slot, _ in taken), as_int32(token for _, token in taken)

    def _take_decodes(self, slots: Slots, tokens: Int32) -> tuple[Int32, Int32]:
        """Take the tokens of a decode set; returns those whose sequences held their slots."""
        if not self._table.all_held(slots):
            held = self._table.held[slots]
            for slot, token in zip(slots[~held].tolist(), tokens[~held].tolist(), strict=True):
                owner = self._table.owners[slot]
                assert owner is not None
                self._take(owner, token)
            slots, tokens = slots[held], tokens[held]
        taking = self._table.take(slots, tokens)
        self._new_tokens.append((taking.uids, taking.indices, tokens))
        known, due = taking.slots32, taking.full | self._stop_ids.among(tokens)
        if due.any():
            for slot in slots[due].tolist():
                owner = self._table.owners[slot]
                assert owner is not None
                self._end_if_due(owner)
        return known, tokens

    def _take(self, sequence: Sequence, token: int) -> None:
        """Take one result, or drop it where its sequence has ended."""
        if sequence.phase is Phase.FINISHED:
            self.statistics.overruns += 1
            return
        index = sequence.take(token)
        self._new_tokens.append((as_int64((sequence.uid,)), as_int32((index,)), as_int32((token,))))
        self._end_if_due(sequence)

    def _end_if_due(self, sequence: Sequence) -> None:
        if (verdict := sequence.verdict()) is not None:
            reason, stop_reason = verdict
            self._end(sequence, reason, stop_reason, hide_last=reason == "stop")

    def _flush_tokens(self) -> None:
        if self._new_tokens or self._finishes:
            new = self._new_tokens or [(as_int64(()), as_int32(()), as_int32(()))]
            uids, indices, ids = (
                new[0] if len(new) == 1 else map(np.concatenate, zip(*new, strict=True))
            )
            tokens = Tokens(self._completed, uids, indices, ids, tuple(self._finishes))
            self.statistics.output_tokens += len(uids)
            self._out.append((TEXT, tokens))
            self._new_tokens, self._finishes = [], []

    # -- looking on -----------------------------------------------------------------------

    def uids_of(self, slots: Int32) -> list[int]:
        """Whose these slots are."""
        uids: list[int] = self._table.uids[slots].tolist()
        return uids

    @property
    def is_waiting(self) -> bool:
        """Whether there are sequences, and none is in a step under way."""
        return bool(self.live) and not self._in_flight

    @property
    def waiting(self) -> int:
        """How many sequences wait for a slot."""
        return sum(1 for s in self.live.values() if s.phase is Phase.WAITING)

    @property
    def running(self) -> int:
        """How many sequences have a slot."""
        return len(self._running)

    @property
    def tombstones(self) -> int:
        """How many aborts wait for a request that has not arrived."""
        return len(self._tombstones)

    def check_idle(self) -> None:
        """Raise `ProtocolBug` if anything is held although no request lives."""
        if not self.live and not self._in_flight and self.budget.oldest_unanswered is None:
            self.budget.check_idle()


def _finish(
    uid: int,
    reason: str,
    stop_reason: int | None = None,
    hide_last: bool = False,
    sequence: Sequence | None = None,
    error: str = "",
) -> Finish:
    cached = max(0, sequence.cached_tokens) if sequence else 0
    preemptions = sequence.preemptions if sequence else 0
    return Finish(uid, reason, stop_reason, error, cached, preemptions, hide_last)
