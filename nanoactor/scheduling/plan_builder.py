"""From the scheduler's choice to the arrays of a `Plan`: what changed since the plan before."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence as Sequence_
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanoactor.grammar.messages import DeferredSamples
from nanoactor.messages import Admissions, Forks, Int32, Int64, Plan
from nanoactor.models.columns import WORDS
from nanoactor.scheduling.sequence import Sequence
from nanoactor.scheduling.table import DecodeBatch
from nanoactor.scores import ScoredChunks, ScoreRequests
from nanoactor.vision.messages import EncodeSlices


class PrefillChunk(NamedTuple):
    """Positions of one prompt that a step computes."""

    sequence: Sequence
    slot: int
    """Its slot when the step is planned."""
    start: int
    length: int
    is_last: bool
    """Whether it ends what is to be prefilled."""
    scores: tuple[int, int] = (0, 0)
    """The first position whose successor is scored, and how many positions."""

    @property
    def place(self) -> int:
        """Its place among a step's chunks: prompts first, then what runners may compute as decode
        rows: runs of constrained outputs, then single tokens of outputs, those that sample, those
        that do not, constrained ones."""
        constrained = self.sequence.is_constrained
        if self.start < self.sequence.prompt_length:
            return 0
        if self.length > 1:
            return 1 if constrained else 0
        if constrained:
            return 4
        return 2 if self.samples else 3

    @property
    def samples(self) -> bool:
        """Tell whether a token is sampled behind it."""
        return self.is_last and not self.sequence.is_constrained


class Fork(NamedTuple):
    """A sequence that begins as a copy of another, which ends its prompt in the same step."""

    row: int
    """Which of the step's chunks is copied."""
    copy: PrefillChunk
    """It computes nothing, and samples."""


class Deferred(NamedTuple):
    """A constrained sequence that chooses a token, and its slot when the step is planned."""

    sequence: Sequence
    slot: int


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedStep:
    """The content of a step: chunks of prompts, then one position of each slot that decodes.

    It brings a token for each of `last_chunks`, one for each of the decode batch, then one for each
    of `deferred`.
    """

    step: int
    chunks: list[PrefillChunk]
    decode_batch: DecodeBatch
    slices: EncodeSlices | None = None
    forks: Sequence_[Fork] = ()
    deferred: Sequence_[Deferred] = ()

    @property
    def last_chunks(self) -> list[PrefillChunk]:
        """The chunks behind which a token is sampled, then the copies of such."""
        return [chunk for chunk in self.beginners if chunk.samples]

    @property
    def is_decode_step(self) -> bool:
        """Tell whether it has rows that decode, computes nothing of prompts, and encodes
        nothing."""
        if not len(self.decode_batch.slots) or self.slices is not None:
            return False
        return not self.chunks or self.chunks[0].place > 0  # prompts come first

    @property
    def sampling(self) -> int:
        """Return how many tokens it brings."""
        return len(self.last_chunks) + len(self.decode_batch.slots) + len(self.deferred)

    @property
    def beginners(self) -> list[PrefillChunk]:
        """All that is not decoded."""
        return [*self.chunks, *(fork.copy for fork in self.forks)]

    def note_begin(self, at: int) -> None:
        """Remember when it began, of those sequences whose first step it was."""
        for chunk in self.beginners:
            if chunk.sequence.began < 0:
                chunk.sequence.began = at

    def has_row(self, slot: int) -> bool:
        """Tell whether it computes anything of whoever had this slot then."""
        if self.decode_batch.members[slot]:
            return True
        slots = [chunk.slot for chunk in self.beginners] + [row.slot for row in self.deferred]
        return slot in slots


def as_int32(values: Iterable[int]) -> Int32:
    """Return an int32 array of its own."""
    return np.array(list(values), np.int32)


def as_int64(values: Iterable[int]) -> Int64:
    """Return an int64 array of its own."""
    return np.array(list(values), np.int64)


_NOTHING = as_int32(())


class PlanBuilder:
    """Remembers the decode batch as the runners last heard of it, to send only the difference."""

    def __init__(self, max_num_seqs: int) -> None:
        self._version = 0
        self._members = np.zeros(max_num_seqs, np.bool_)

    def build(self, planned: PlannedStep, grown: list[Sequence]) -> Plan:
        """Return the message for a step for which the sequences `grown` get one more block."""
        slots, starts, counts, samples = _rows(planned.chunks) if planned.chunks else _NO_ROWS
        joins, leaves = self._changes(planned.decode_batch)
        return Plan(
            planned.step,
            slots=slots,
            starts=starts,
            counts=counts,
            samples=samples,
            joins=joins,
            leaves=leaves,
            grows=as_int32(sequence.slot for sequence in grown) if grown else _NOTHING,
            admissions=_introduce(planned.beginners),
            slices=() if planned.slices is None else (planned.slices,),
            scored=_scored(planned.chunks),
            forks=_forks(planned.forks) if planned.forks else (),
            deferred=_deferred(planned.deferred) if planned.deferred else (),
        )

    def _changes(self, batch: DecodeBatch) -> tuple[Int32, Int32]:
        if batch.version == self._version:
            return _NOTHING, _NOTHING
        changed = np.flatnonzero(batch.members != self._members).astype(np.int32)
        self._version, self._members = batch.version, batch.members
        joins = batch.members[changed]
        return changed[joins], changed[~joins]


def _rows(chunks: list[PrefillChunk]) -> tuple[Int32, Int32, Int32, NDArray[np.bool_]]:
    return (
        as_int32(chunk.slot for chunk in chunks),
        as_int32(chunk.start for chunk in chunks),
        as_int32(chunk.length for chunk in chunks),
        np.array([chunk.samples for chunk in chunks], np.bool_),
    )


def _scored(chunks: list[PrefillChunk]) -> tuple[ScoredChunks, ...]:
    rows = [row for row, chunk in enumerate(chunks) if chunk.scores[1]]
    if not rows:
        return ()
    starts, counts = zip(*(chunks[row].scores for row in rows), strict=True)
    return (ScoredChunks(as_int32(rows), as_int32(starts), as_int32(counts), _NOTHING),)


def _forks(forks: Sequence_[Fork]) -> tuple[Forks, ...]:
    copies = [fork.copy for fork in forks]
    return (
        Forks(
            rows=as_int32(fork.row for fork in forks),
            slots=as_int32(copy.slot for copy in copies),
            uids=as_int64(copy.sequence.uid for copy in copies),
            sources=_NOTHING,
            copies=_NOTHING,
        ),
    )


def _deferred(rows: Sequence_[Deferred]) -> tuple[DeferredSamples, ...]:
    return (
        DeferredSamples(
            as_int32(row.slot for row in rows),
            as_int64(row.sequence.uid for row in rows),
            as_int32(row.sequence.length for row in rows),
        ),
    )


def _introduce(chunks: list[PrefillChunk]) -> Admissions:
    """Tell of those sequences that the runners do not know under their present slots."""
    sequences = [chunk.sequence for chunk in chunks if not chunk.sequence.introduced]
    for sequence in sequences:
        sequence.introduced = True
    return _admissions(sequences) if sequences else _NO_ADMISSIONS


def _admissions(sequences: list[Sequence]) -> Admissions:
    masked = [s.end_ids if s.spec.stopping.min_tokens else () for s in sequences]
    sampling = np.frombuffer(b"".join(s.sampling for s in sequences), np.int32)
    return Admissions(
        slots=as_int32(s.slot for s in sequences),
        sampling=sampling.reshape(-1, WORDS),
        unmasked_from=as_int32(s.prompt_length + s.spec.stopping.min_tokens for s in sequences),
        masked_ids=as_int32(token for ids in masked for token in ids),
        masked_counts=as_int32(map(len, masked)),
        rope_deltas=as_int32(s.items.message.rope_delta if s.items else 0 for s in sequences),
        prompt_lengths=as_int32(s.prompt_length for s in sequences),
        rule_rows=as_int32(row for row, s in enumerate(sequences) if s.spec.rules),
        rules=tuple(s.spec.rules for s in sequences if s.spec.rules),
        constrained=as_int32(row for row, s in enumerate(sequences) if s.is_constrained),
        scores=_score_requests(sequences),
    )


def _score_requests(sequences: list[Sequence]) -> ScoreRequests | None:
    asking = [
        (row, s.spec.logprobs, s.prompt_logprobs)
        for row, s in enumerate(sequences)
        if s.spec.logprobs >= 0 or s.prompt_logprobs >= 0
    ]
    if not asking:
        return None
    rows, output, prompt = zip(*asking, strict=True)
    return ScoreRequests(as_int32(rows), as_int32(output), as_int32(prompt))


_NO_ROWS = _rows([])
_NO_ADMISSIONS = _admissions([])
