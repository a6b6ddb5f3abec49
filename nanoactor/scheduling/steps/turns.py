"""Builds `Turn` messages, which hold all scheduler decisions that follow from one event."""

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
from nanoactor.messages.rows import compressed
from nanoactor.messages.scores import ScoreRequests
from nanoactor.messages.vision import DropPixels, EncodeSlices
from nanoactor.models.limits import FREEZE_IDS
from nanoactor.models.sampling.columns import WORDS
from nanoactor.scheduling.sequences.sequence import Sequence
from nanoactor.scheduling.sequences.table import DecodeBatch, RunningTable
from nanoactor.scheduling.steps.planned import PlannedStep, as_int32, as_int64, as_rows

_NOTHING = as_int32(())


class TurnBuilder:
    """Collects the parts of the next turn. Keeps the last decode batch that was sent, so that only
    the difference is sent."""

    def __init__(self, table: RunningTable) -> None:
        self.number = 1
        """Number of the turn that is being built."""
        self._table = table
        self._done = 0
        """The last finished step that was reported to the block manager."""
        self._sent = DecodeBatch(0, np.empty(0, np.int64), np.zeros(len(table.occupied), np.bool_))
        self._introduced: set[int] = set()
        """Slots whose sampling parameters the runners have."""
        self._clear()

    def _clear(self) -> None:
        self._failures: list[tuple[int, int]] = []
        self._forks: list[tuple[int, int]] = []
        self._known: list[tuple[Int32, Int32]] = []
        """(slots, tokens), one token for each slot."""
        self._runs: list[tuple[int, Int32]] = []
        """(slot, tokens) for each slot with several new tokens."""
        self._frees: list[int] = []
        self._admissions: list[Admission] = []
        self._plan: Plan | None = None
        self._pixels: DropPixels | None = None
        self._masks: DropMasks | None = None
        self._forget = 0

    # -- parts ----------------------------------------------------------------------------

    def fail(self, slot: int, start: int) -> None:
        """Report that a slot's row from position `start` on has failed."""
        self._failures.append((slot, start))

    def fork(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Add forks of slots, as (slot, source slot) pairs."""
        self._forks += pairs

    def know(self, slots: Int32, tokens: Int32) -> None:
        """Add one newly known token for each of these slots."""
        if len(slots):
            self._known.append((slots, tokens))

    def know_run(self, slot: int, tokens: Int32) -> None:
        """Add several newly known tokens of a slot, which no row has sampled."""
        self._runs.append((slot, tokens))

    def free(self, slot: int) -> None:
        """Release a slot's blocks."""
        self._frees.append(slot)
        self._introduced.discard(slot)

    def admit(self, sequence: Sequence, blocks: int) -> None:
        """Request blocks for a sequence's slot."""
        self._admissions.append(
            Admission(
                sequence.uid,
                sequence.slot,
                sequence.group.uids.start,
                sequence.kept,
                sequence.hashes,
                blocks,
                items=None if sequence.items is None else sequence.items.message,
                most_hits=sequence.most_hits,
            )
        )

    def drop_pixels(self, pixels: DropPixels) -> None:
        """Drop pixels on the runners."""
        self._pixels = pixels

    def drop_masks(self, masks: DropMasks) -> None:
        """Drop masks on the runners."""
        self._masks = masks

    def forget_index(self, number: int) -> None:
        """Clear the block manager's index."""
        self._forget = number

    def plan(
        self, planned: PlannedStep, grown: list[Sequence], slices: EncodeSlices | None
    ) -> None:
        """Add the plan of a step; the sequences in `grown` get one more block for it."""
        batch, rows, leaves = planned.decode_batch, as_rows(planned.rows), _NOTHING
        if batch.version != self._sent.version:
            starts = self._table.scheduled - 1
            rows, leaves = compressed(self._sent.members, batch.members, starts, rows)
            self._sent = batch
        self._plan = Plan(
            planned.step,
            rows,
            leaves,
            grows=as_int32(sequence.slot for sequence in grown) if grown else _NOTHING,
            admissions=self._introduce(planned),
            slices=slices,
        )

    def _introduce(self, planned: PlannedStep) -> Admissions:
        """Return the runners' admissions of the sequences that are new to their slots."""
        if not planned.rows:
            return _NO_ADMISSIONS
        new = {row.slot: row.sequence for row in planned.rows if row.slot not in self._introduced}
        self._introduced |= new.keys()
        return _admissions([*new.values()]) if new else _NO_ADMISSIONS

    # -- the turn -------------------------------------------------------------------------

    @property
    def gives_up(self) -> bool:
        """Return True if the turn releases blocks."""
        return bool(self._frees or self._forks)

    def take(self, done: int, fence: int, *, may_wait: bool) -> Turn | None:
        """Return the turn and begin the next one; None if there is nothing to send. If `may_wait`
        is set, newly known tokens and the end of a step wait until a turn has other parts."""
        parts = (self._failures, self._admissions, self._plan, self._pixels, self._masks)
        others = self.gives_up or any(parts) or self._forget
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
            forget_index=self._forget,
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
        chosen: collections.Counter[int] = collections.Counter()
        for slot, run in self._runs:
            chosen[slot] += len(run)
        runs, lengths = as_int32(chosen), as_int32(chosen.values())
        singles = [(slots, tokens) for slots, tokens in self._known]
        long = [(as_int32([slot] * len(run)), run) for slot, run in self._runs]
        owners, tokens = map(np.concatenate, zip(*singles, *long, strict=True))
        every = owners.tolist()
        counts = collections.Counter(every)
        if len(counts) == len(every):
            return KnownTokens(owners, _NOTHING, tokens, runs, lengths)
        named = [slot for slot, _ in itertools.groupby(every)]
        if len(named) > len(counts):  # the tokens of a slot are not contiguous
            order = np.argsort(owners, kind="stable")
            named, tokens = sorted(counts), tokens[order]
        counted = as_int32(counts[slot] for slot in named)
        return KnownTokens(as_int32(named), counted, tokens, runs, lengths)


def _columns(pairs: list[tuple[int, int]]) -> tuple[Int32, Int32]:
    first, second = zip(*pairs, strict=True)
    return as_int32(first), as_int32(second)


def _admissions(sequences: Sequence_[Sequence]) -> Admissions:
    masked = [s.end_ids if s.spec.stopping.min_tokens else () for s in sequences]
    watched = [i for s in sequences for i in (*s.freeze_ids, *[-1] * FREEZE_IDS)[:FREEZE_IDS]]
    sampling = np.frombuffer(b"".join(s.sampling for s in sequences), np.int32)
    return Admissions(
        slots=as_int32(s.slot for s in sequences),
        uids=as_int64(s.uid for s in sequences),
        sampling=sampling.reshape(-1, WORDS),
        unmasked_from=as_int32(s.prompt_length + s.spec.stopping.min_tokens for s in sequences),
        masked_ids=as_int32(token for ids in masked for token in ids),
        masked_counts=as_int32(map(len, masked)),
        freeze_ids=as_int32(watched).reshape(-1, FREEZE_IDS),
        rope_deltas=as_int32(s.items.message.rope_delta if s.items else 0 for s in sequences),
        prompt_lengths=as_int32(s.prompt_length for s in sequences),
        rule_rows=as_int32(row for row, s in enumerate(sequences) if s.spec.rules),
        rules=tuple(s.spec.rules for s in sequences if s.spec.rules),
        scores=_score_requests(sequences),
    )


def _score_requests(sequences: Sequence_[Sequence]) -> ScoreRequests | None:
    asking = [
        (row, s.spec.logprobs, s.prompt_logprobs)
        for row, s in enumerate(sequences)
        if s.spec.logprobs >= 0 or s.prompt_logprobs >= 0
    ]
    if not asking:
        return None
    rows, output, prompt = zip(*asking, strict=True)
    return ScoreRequests(as_int32(rows), as_int32(output), as_int32(prompt))


_NO_ADMISSIONS = _admissions(())
