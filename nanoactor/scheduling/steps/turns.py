"""Builder of `Turn` messages. A turn contains all scheduler decisions that follow from one
event."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Sequence_

import numpy as np

from nanoactor.messages.engine import (
    Admission,
    Admissions,
    Failures,
    Forks,
    Int32,
    KnownTokens,
    Plan,
    Turn,
)
from nanoactor.messages.grammar import DropMasks
from nanoactor.messages.rows import compress_rows
from nanoactor.messages.scores import ScoreRequests
from nanoactor.messages.vision import DropPixels, EncodeSlices
from nanoactor.models.limits import MAX_FREEZE_IDS
from nanoactor.models.sampling.columns import WORDS
from nanoactor.scheduling.sequences.sequence import Sequence
from nanoactor.scheduling.sequences.table import DecodeBatch, RunningTable
from nanoactor.scheduling.steps.planned import PlannedStep, as_int32, as_int64, as_rows

_NOTHING = as_int32(())


class TurnBuilder:
    """Collects the parts of the next turn, the message with all scheduler decisions that follow
    from one event. Remembers the decode batch that was sent last, so that only changes to it are
    sent."""

    def __init__(self, table: RunningTable) -> None:
        self.number = 1
        """Number of the turn (message to the block manager) that is being built, counted from 1."""
        self._table = table
        self._done = 0
        """Number of the last finished step that was reported to the block manager."""
        self._sent_batch = DecodeBatch(
            0, np.empty(0, np.int64), np.zeros(len(table.occupied), np.bool_)
        )
        self._sent_slots: set[int] = set()
        """Slots for which the runners have the current sequence's sampling parameters."""
        self._clear()

    def _clear(self) -> None:
        self._failures: list[tuple[int, int]] = []
        self._forks: list[tuple[int, int]] = []
        self._known: list[tuple[Int32, Int32]] = []
        """(slots, tokens) arrays with one newly known token per slot."""
        self._runs: list[tuple[int, Int32]] = []
        """(slot, tokens) pairs of newly known tokens that no row has sampled."""
        self._frees: list[int] = []
        self._admissions: list[Admission] = []
        self._plan: Plan | None = None
        self._pixels: DropPixels | None = None
        self._masks: DropMasks | None = None
        self._forget_number = 0

    # -- parts ----------------------------------------------------------------------------

    def fail(self, slot: int, start: int) -> None:
        """Add a failed row of a slot; `start` is the row's first position."""
        self._failures.append((slot, start))

    def fork(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Add forks: sequences that become copies of others, as (slot, source slot) pairs."""
        self._forks += pairs

    def add_known(self, slots: Int32, tokens: Int32) -> None:
        """Add one newly appended token (int32) for each of these slots."""
        if len(slots):
            self._known.append((slots, tokens))

    def add_known_run(self, slot: int, tokens: Int32) -> None:
        """Add newly appended tokens of a slot (int32) that were not sampled but forced by a
        grammar."""
        self._runs.append((slot, tokens))

    def free(self, slot: int) -> None:
        """Add a slot whose blocks are freed."""
        self._frees.append(slot)
        self._sent_slots.discard(slot)

    def admit(self, sequence: Sequence, blocks: int) -> None:
        """Add the admission of a sequence that was assigned a slot and needs `blocks` blocks."""
        self._admissions.append(
            Admission(
                sequence.uid,
                sequence.slot,
                sequence.group.uids.start,
                sequence.saved_tokens,
                sequence.hashes,
                blocks,
                items=None if sequence.items is None else sequence.items.message,
                max_hits=sequence.max_hits,
            )
        )

    def drop_pixels(self, pixels: DropPixels) -> None:
        """Add a command to the runners to drop these pixels."""
        self._pixels = pixels

    def drop_masks(self, masks: DropMasks) -> None:
        """Add a command to the runners to drop these masks."""
        self._masks = masks

    def forget_index(self, number: int) -> None:
        """Add a command to clear the block manager's prefix-cache index; `number` is that of the
        `ForgetIndex` message."""
        self._forget_number = number

    def plan(
        self, planned: PlannedStep, grown: list[Sequence], slices: EncodeSlices | None
    ) -> None:
        """Add the plan of a step. `grown` lists the sequences that receive one more block for the
        step, and `slices` are the parts of images that it encodes."""
        batch, rows, leaves = planned.decode_batch, as_rows(planned.rows), _NOTHING
        if batch.version != self._sent_batch.version:
            starts = self._table.positions.by_slot - 1
            rows, leaves = compress_rows(self._sent_batch.members, batch.members, starts, rows)
            self._sent_batch = batch
        self._plan = Plan(
            planned.step,
            rows,
            leaves,
            grows=as_int32(sequence.slot for sequence in grown) if grown else _NOTHING,
            admissions=self._runner_admissions(planned),
            slices=slices,
        )

    def _runner_admissions(self, planned: PlannedStep) -> Admissions:
        """Return the data that the runners need about sequences that are new in their slots."""
        if not planned.rows:
            return _NO_ADMISSIONS
        new = {row.slot: row.sequence for row in planned.rows if row.slot not in self._sent_slots}
        self._sent_slots |= new.keys()
        return _admissions([*new.values()]) if new else _NO_ADMISSIONS

    # -- the turn -------------------------------------------------------------------------

    @property
    def releases_blocks(self) -> bool:
        """True if the turn frees blocks, which steps in flight may still use."""
        return bool(self._frees or self._forks)

    def build(self, done: int, fence: int, *, may_wait: bool) -> Turn | None:
        """Return the turn and begin the next one; return None if there is nothing to send. `done`
        is the last finished step, and `fence` the last one planned before the turn. If `may_wait`
        is True, newly known tokens and finished steps alone do not cause a turn."""
        parts = (self._failures, self._admissions, self._plan, self._pixels, self._masks)
        others = self.releases_blocks or any(parts) or self._forget_number
        if not others and (may_wait or not (self._known or self._runs or done > self._done)):
            return None
        self._done = done
        turn = Turn(
            self.number,
            self._plan.step if self._plan else 0,
            done,
            fence,
            failures=Failures(*_columns(self._failures)) if self._failures else None,
            forks=Forks(*_columns(self._forks)) if self._forks else None,
            known=self._known_tokens(),
            frees=as_int32(self._frees) if self._frees else _NOTHING,
            drop_pixels=self._pixels,
            forget_index=self._forget_number,
            admissions=tuple(self._admissions),
            plan=self._plan,
            drop_masks=self._masks,
        )
        self.number += 1
        self._clear()
        return turn

    def _known_tokens(self) -> KnownTokens | None:
        if not self._known and not self._runs:
            return None
        if not self._runs and len(self._known) == 1:
            slots, tokens = self._known[0]
            return KnownTokens(slots, _NOTHING, tokens, _NOTHING, _NOTHING)
        run_lengths: collections.Counter[int] = collections.Counter()
        for slot, run in self._runs:
            run_lengths[slot] += len(run)
        runs, lengths = as_int32(run_lengths), as_int32(run_lengths.values())
        singles = [(slots, tokens) for slots, tokens in self._known]
        run_columns = [(as_int32([slot] * len(run)), run) for slot, run in self._runs]
        owners, tokens = map(np.concatenate, zip(*singles, *run_columns, strict=True))
        slot_list = owners.tolist()
        counts = collections.Counter(slot_list)
        if len(counts) == len(slot_list):
            return KnownTokens(owners, _NOTHING, tokens, runs, lengths)
        slots_in_order = [slot for slot, _ in itertools.groupby(slot_list)]
        if len(slots_in_order) > len(counts):  # the tokens of a slot are not contiguous
            order = np.argsort(owners, kind="stable")
            slots_in_order, tokens = sorted(counts), tokens[order]
        slot_counts = as_int32(counts[slot] for slot in slots_in_order)
        return KnownTokens(as_int32(slots_in_order), slot_counts, tokens, runs, lengths)


def _columns(pairs: list[tuple[int, int]]) -> tuple[Int32, Int32]:
    first, second = zip(*pairs, strict=True)
    return as_int32(first), as_int32(second)


def _admissions(sequences: Sequence_[Sequence]) -> Admissions:
    masked = [s.end_ids if s.spec.stopping.min_tokens else () for s in sequences]
    freeze_ids = [
        i for s in sequences for i in (*s.freeze_ids, *[-1] * MAX_FREEZE_IDS)[:MAX_FREEZE_IDS]
    ]
    sampling = np.frombuffer(b"".join(s.sampling for s in sequences), np.int32)
    return Admissions(
        slots=as_int32(s.slot for s in sequences),
        uids=as_int64(s.uid for s in sequences),
        sampling=sampling.reshape(-1, WORDS),
        unmasked_from=as_int32(s.prompt_length + s.spec.stopping.min_tokens for s in sequences),
        masked_ids=as_int32(token for ids in masked for token in ids),
        masked_counts=as_int32(map(len, masked)),
        freeze_ids=as_int32(freeze_ids).reshape(-1, MAX_FREEZE_IDS),
        rope_deltas=as_int32(s.items.message.rope_delta if s.items else 0 for s in sequences),
        prompt_lengths=as_int32(s.prompt_length for s in sequences),
        rule_rows=as_int32(row for row, s in enumerate(sequences) if s.spec.rules),
        rules=tuple(s.spec.rules for s in sequences if s.spec.rules),
        scores=_score_requests(sequences),
    )


def _score_requests(sequences: Sequence_[Sequence]) -> ScoreRequests | None:
    requests = [
        (row, s.spec.logprobs, s.prompt_logprobs)
        for row, s in enumerate(sequences)
        if s.spec.logprobs >= 0 or s.prompt_logprobs >= 0
    ]
    if not requests:
        return None
    rows, output, prompt = zip(*requests, strict=True)
    return ScoreRequests(as_int32(rows), as_int32(output), as_int32(prompt))


_NO_ADMISSIONS = _admissions(())
