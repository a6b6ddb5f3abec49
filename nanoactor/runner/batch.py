"""The changes that a step makes to a batch on the device: a few index-value pairs.

Everything that the device knows of slots is one int32 array; a step's deltas are numbers to be
written into it. A decode step in which nothing changed is empty.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from nanoactor.messages import Int32, Int64, Step
from nanoactor.models.columns import WORDS
from nanoactor.models.options import FusedSampling
from nanoactor.models.seq_lens import NO_SEQ_LENS, HostSeqLens
from nanoactor.runner.continued_rows import Continued, ContinuedSlots
from nanoactor.runner.deferred_rows import DeferredRows
from nanoactor.runner.row_order import RowOrder
from nanoactor.runner.ruled_rows import NO_ROWS, Long
from nanoactor.runner.sampling_table import SampledRows, SamplingTable
from nanoactor.runner.scored_rows import ScoredRows, ScoreTable

# To sort whole vocabularies takes 127 bytes for each logit.
FALLBACK_AT_ONCE = 64
_NOTHING: Int32 = np.empty(0, np.int32)
NO_MASKS: Int32 = np.empty((0, 0), np.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class StateLayout:
    """The place of each table in the array. The last slot is a dummy, for padded rows: its block is
    one past the cache's last."""

    slots: int
    max_blocks: int

    @property
    def dummy(self) -> int:
        """The slot of padded rows."""
        return self.slots - 1

    @property
    def lengths(self) -> int:
        """Positions computed, by slot. Before it: the block tables, a row for each slot."""
        return self.slots * self.max_blocks

    @property
    def last_tokens(self) -> int:
        """By slot."""
        return self.lengths + self.slots

    @property
    def rope_deltas(self) -> int:
        """By slot: rotary position less index, of what follows a prompt."""
        return self.last_tokens + self.slots

    @property
    def prompt_lengths(self) -> int:
        """By slot: where its output begins."""
        return self.rope_deltas + self.slots

    @property
    def sampling(self) -> int:
        """Sampling parameters by slot: a column after the other, see `nanoactor.models.columns`."""
        return self.prompt_lengths + self.slots

    @property
    def rows(self) -> int:
        """The slots of the decode batch, ascending, then dummies."""
        return self.sampling + WORDS * self.slots

    @property
    def row_positions(self) -> int:
        """Of each of these rows the position, -1 where its slot has it; ..."""
        return self.rows + self.slots

    @property
    def row_token_ids(self) -> int:
        """... and the token of those that have a position of their own."""
        return self.row_positions + self.slots

    @property
    def size(self) -> int:
        """Of the whole array."""
        return self.row_token_ids + self.slots


@dataclasses.dataclass(frozen=True, slots=True)
class Prefill:
    """A step's prompt chunks; the rows that end a prompt sample, before those that decode."""

    token_ids: Int32
    positions: Int32
    slots: Int32
    """(tokens,): whose each token is."""
    rows: Int32
    """(4, rows): slot, first token, tokens, context at the end of the chunk."""
    tiles: Int32
    """(2, programs): row, and which of its groups of tokens."""
    ends: Int32
    """Tokens whose hidden states somebody reads: those that are followed by a sampled one, then
    those that constrained rows keep; ..."""
    sampling: Int32
    """... and the slots of those that sample."""


@dataclasses.dataclass(frozen=True, slots=True)
class EncodeTask:
    """Units of one item that a step encodes."""

    pixels: NDArray[np.uint8]
    """(frames, height, width, channels): of the whole item."""
    number: int
    """Of the pixels: what is half encoded goes by it."""
    first: int
    count: int
    places: Int64
    """Where all rows of the item lie in the encoder cache."""


@dataclasses.dataclass(frozen=True, slots=True)
class VisionUpdate:
    """The work of a step on pictures."""

    tasks: tuple[EncodeTask, ...]
    rows: Int32
    """(prompt tokens,): which row of the encoder cache each stands for, -1 for text; empty where no
    prompt of the step has pictures."""
    positions: Int32
    """(3, prompt tokens): rotary; likewise."""
    dropped: tuple[int, ...] = ()
    """Pixels of which no later step encodes anything."""

    @property
    def sees(self) -> bool:
        """Tell whether a prompt of the step has pictures."""
        return bool(len(self.rows))


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """All that the device must be told for a step."""

    step: int
    indices: Int64
    values: Int32
    """To be written into the state, before anything runs."""
    prefill: Prefill | None
    decodes: int
    """Rows of the decode batch."""
    fallback: tuple[SampledRows, ...]
    """Rows that the fused sampler does not do, a few at a time."""
    lengths: HostSeqLens
    """Where the device asks for them."""
    vision: VisionUpdate | None = None
    scores: ScoredRows | None = None
    """None where no log-probabilities are wanted."""
    copies: tuple[Long, ...] = ()
    """Blocks that are copied once the layers are computed: from where, and to where; or nothing."""
    continued: int = 0
    """Rows behind the decode batch that compute one position of an output each: ..."""
    resumed: int = 0
    """... so many, the first, choose a token; the last may be constrained."""
    deferred: DeferredRows | None = None
    """What becomes of constrained rows, and of what was kept before."""

    @property
    def changes(self) -> tuple[NDArray[np.integer], ...]:
        """Indices and values, or nothing."""
        return (self.indices, self.values) if len(self.indices) else ()

    @property
    def decode_rows(self) -> int:
        """Rows that attend as those of the decode batch do."""
        return self.decodes + self.continued

    @property
    def rows(self) -> int:
        """Tokens that go through the layers."""
        return self.decode_rows + (len(self.prefill.token_ids) if self.prefill else 0)

    @property
    def order(self) -> RowOrder:
        """The order of its results."""
        prompts = len(self.prefill.sampling) if self.prefill else 0
        return RowOrder(prompts, self.resumed, self.decodes)

    @property
    def final_lengths(self) -> HostSeqLens | None:
        """The rows that sample, as decode rows; None where somebody reads hidden states of other
        tokens too, or where these are hardly fewer."""
        if (prefill := self.prefill) is None or 2 * len(prefill.ends) > len(prefill.token_ids):
            return None
        if self.scores is not None and len(self.scores.prompt_rows):
            return None
        if self.lengths is NO_SEQ_LENS:
            return NO_SEQ_LENS
        contexts = (prefill.positions[prefill.ends] + 1).tolist()
        return HostSeqLens([], [], contexts + self.lengths.decode_contexts)

    @property
    def words(self) -> int:
        """At most so many int32 numbers travel to the device."""
        words = 3 * len(self.indices) + 128
        if self.prefill:
            words += 3 * len(self.prefill.token_ids) + 6 * self.prefill.rows.shape[1]
            words += 2 * (self.prefill.tiles.shape[1] + len(self.prefill.ends))
        words += sum(part.size for part in self.fallback)
        if self.vision:
            words += 4 * len(self.vision.rows) + 64
            words += sum(2 * len(task.places) + 4 for task in self.vision.tasks)
        words += self.scores.size if self.scores else 0
        words += sum(2 * len(blocks) + 4 for blocks in self.copies)
        words += self.deferred.size if self.deferred else 0
        return words


@dataclasses.dataclass(frozen=True, slots=True)
class BatchTraits:
    """Properties of a device that decide how its steps are laid out; see `models.device.Device`."""

    tokens_per_program: int = 1 << 30
    needs_host_seq_lens: bool = False
    fused_sampling: FusedSampling = "none"
    fallback_at_once: int = FALLBACK_AT_ONCE
    """Rows that are sampled together without the fused sampler."""
    runs_as_rows_from: int = 1 << 30
    """Steps of so many decode rows may have several of one sequence."""


class HostBatch:
    """The host's side: lengths, the decode batch, and how slots sample."""

    def __init__(self, max_num_seqs: int, max_blocks: int, traits: BatchTraits) -> None:
        self._traits = traits
        self.layout = StateLayout(max_num_seqs + 1, max_blocks)
        self.lengths = np.zeros(max_num_seqs, np.int64)
        """By slot: positions that the steps so far compute."""
        self._decoding = np.zeros(max_num_seqs, np.bool_)
        self._decode: Long = NO_ROWS
        self.sampling = SamplingTable(max_num_seqs)
        self._scores = ScoreTable(max_num_seqs)
        self._fallback: Long | None = None
        """Decode rows that the fused sampler never does, until the set changes, ..."""
        self._parts: tuple[SampledRows, ...] = ()
        """... how they sample, ..."""
        self._asking: Long = NO_ROWS
        """... which decode rows want log-probabilities, ..."""
        self._masked_steps = 0
        """... and how many steps of this set there are until all of its rows are past
        `min_tokens`."""
        self._continuing = ContinuedSlots(max_num_seqs, traits.runs_as_rows_from)
        self._continued = 0
        """Rows behind the decode batch in the step before."""

    def update(self, step: Step, masks: Int32 = NO_MASKS) -> Update:
        """Apply a step, whose deferred rows choose under these masks, (rows, words). Steps must
        come in order."""
        pairs: list[tuple[NDArray[np.integer], NDArray[np.integer]]] = []
        if len(step.admissions.slots):
            self.sampling.admit(step.admissions)
            self._scores.admit(step.admissions.slots, step.admissions.scores)
            self._continuing.admit(step.admissions)
            pairs.append(self._admitted(step.admissions.slots))
            new, layout = step.admissions, self.layout
            slots = new.slots.astype(np.int64)
            pairs.append((layout.rope_deltas + slots, new.rope_deltas.copy()))
            pairs.append((layout.prompt_lengths + slots, new.prompt_lengths.copy()))
        if len(step.table_slots):
            pairs.append((self._table_indices(step), step.table_blocks))
        ends = (step.starts + step.counts).astype(np.int64)
        if len(step.slots):
            self.lengths[step.slots] = ends
            pairs.append((self.layout.lengths + step.slots.astype(np.int64), ends))
        decodes = len(self._decode) + len(step.joins) - len(step.leaves)
        step, continued = self._continuing.split(step, decodes)
        if len(step.joins) or len(step.leaves) or len(continued.slots) or self._continued:
            pairs += self._change_rows(step, continued)
        decode = self._decode
        self.lengths[decode] += 1
        kept, kept_slots = self._kept(step)
        prefill = None
        if len(step.slots):
            for forks in step.forks:
                self.lengths[forks.slots] = ends[forks.rows]
                places = self.layout.lengths + forks.slots.astype(np.int64)
                pairs.append((places, ends[forks.rows]))
            prefill = self._prefill(step, kept)
        indices, values = _joined(pairs)
        resumed = continued.slots[: continued.resumed]
        ended = prefill.sampling.astype(np.int64) if prefill is not None else NO_ROWS
        fallback = self._fallback_rows(ended, resumed)
        return Update(
            step.step,
            indices,
            values,
            prefill,
            len(decode),
            fallback=fallback,
            lengths=self._host_seq_lens(step, continued),
            scores=self._scored(step, ended, resumed),
            copies=tuple(
                blocks.astype(np.int64)
                for forks in step.forks
                for blocks in (forks.sources, forks.copies)
                if len(blocks)
            ),
            continued=len(continued.slots),
            resumed=continued.resumed,
            deferred=self._deferred(step, kept_slots, continued.constrained, masks),
        )

    def _kept(self, step: Step) -> tuple[Long, Long]:
        """Return which tokens of prompts constrained rows keep something of, and their slots."""
        if not self._continuing.has_constrained:
            return NO_ROWS, NO_ROWS
        lasts = (np.cumsum(step.counts) - 1).astype(np.int64)
        rows = self._continuing.constrained_among(step.slots)
        tokens, slots = [lasts[rows]], [step.slots[rows]]
        for forks in step.forks:
            rows = self._continuing.constrained_among(forks.slots)
            tokens.append(lasts[forks.rows[rows]])
            slots.append(forks.slots[rows])
        return np.concatenate(tokens), np.concatenate(slots).astype(np.int64)

    def _deferred(
        self, step: Step, kept: Long, continued: Long, masks: Int32
    ) -> DeferredRows | None:
        """Return what becomes of constrained rows; None where the step has none."""
        choosing = [deferred.slots for deferred in step.deferred]
        if not choosing and not len(continued) and not len(kept):
            return None
        choices = self._choices(np.concatenate([NO_ROWS, *choosing]), masks)
        return DeferredRows(kept, continued, choices)

    def _choices(self, slots: Long, masks: Int32) -> tuple[SampledRows, ...]:
        most, parts = self._traits.fallback_at_once, []
        for at in range(0, len(slots), most):
            part = slots[at : at + most]
            rows = self.sampling.masked(self.sampling.rows(part, part), self.lengths[part])
            singly = self._never_fused(part) | self.sampling.masking(part, self.lengths[part])
            mine = masks[at : at + most]
            parts.append(dataclasses.replace(rows, masks=mine, fused=not singly.any()))
        return tuple(map(self._reaching, parts))

    def _scored(self, step: Step, ended: Long, resumed: Long) -> ScoredRows | None:
        """Return what the step scores; the set of those that decode is known by now."""
        slots, asking = self._decode, self._asking
        for deferred in step.deferred:
            chosen = deferred.slots.astype(np.int64)
            asking = np.concatenate((asking, self._scores.asking(chosen) + len(slots)))
            slots = np.concatenate((slots, chosen))
        if len(first := np.concatenate((ended, resumed))):
            slots = np.concatenate((first, slots))
            asking = np.concatenate((self._scores.asking(first), asking + len(first)))
        order = RowOrder(len(ended), len(resumed), len(self._decode))
        return self._scores.rows(step, slots, asking, order)

    def _host_seq_lens(self, step: Step, continued: Continued) -> HostSeqLens:
        if not self._traits.needs_host_seq_lens:
            return NO_SEQ_LENS
        contexts = (step.starts + step.counts).tolist()
        decodes = np.concatenate((self.lengths[self._decode], continued.positions + 1))
        return HostSeqLens(step.counts.tolist(), contexts, decodes.tolist())

    def _admitted(self, slots: Int32) -> tuple[Int64, Int32]:
        columns = self.layout.sampling + np.arange(WORDS)[:, None] * self.layout.slots
        return (columns + slots).ravel(), self.sampling.words[:, slots].ravel()

    def _table_indices(self, step: Step) -> Int64:
        firsts = step.table_slots.astype(np.int64) * self.layout.max_blocks + step.table_starts
        if len(firsts) == len(step.table_blocks):  # each grows by one, as decodes do
            return firsts
        counts = step.table_counts.astype(np.int64)
        begins = np.cumsum(counts) - counts
        return np.repeat(firsts - begins, counts) + np.arange(len(step.table_blocks))

    def _change_rows(self, step: Step, continued: Continued) -> list[tuple[Int64, Long]]:
        """Return the part of the list of rows that changes; `continued` follow the decode batch."""
        before, first = len(self._decode) + self._continued, len(self._decode)
        if len(step.joins) or len(step.leaves):
            self._decoding[step.leaves] = False
            self._decoding[step.joins] = True
            self._decode, self._fallback, first = np.flatnonzero(self._decoding), None, 0
        decodes, known = len(self._decode), len(self._decode) + len(continued.slots)
        rows = np.full(max(before, known), self.layout.dummy, np.int64)
        rows[:decodes], rows[decodes:known] = self._decode, continued.slots
        places, layout = np.arange(first, len(rows)), self.layout
        pairs = [(layout.rows + places, rows[first:])]
        if len(continued.slots) or self._continued:
            positions = np.full(len(rows), -1, np.int64)
            positions[decodes:known] = continued.positions
            pairs.append((layout.row_positions + places, positions[first:]))
            own = np.arange(decodes, known)
            pairs.append((layout.row_token_ids + own, continued.token_ids.astype(np.int64)))
        self._continued = len(continued.slots)
        return pairs

    def _prefill(self, step: Step, kept: Long) -> Prefill:
        counts = step.counts
        firsts = (np.cumsum(counts) - counts).astype(np.int32)
        row_of = np.repeat(np.arange(len(counts)), counts)
        offsets = (step.starts - firsts)[row_of]
        per_program = self._traits.tokens_per_program
        groups = -(-counts // per_program)
        tile_rows = np.repeat(np.arange(len(groups), dtype=np.int32), groups)
        tile_numbers = np.arange(len(tile_rows)) - np.repeat(np.cumsum(groups) - groups, groups)
        # The longest first, which a device that is nearly done should not wait for.
        ends_in_row = np.minimum(counts[tile_rows], (tile_numbers + 1) * per_program)
        longest_first = np.argsort(-(step.starts[tile_rows] + ends_in_row), kind="stable")
        ends, sampling = (firsts + counts - 1)[step.samples], step.slots[step.samples]
        for forks in step.forks:
            free = np.delete(
                np.arange(len(forks.slots)), self._continuing.constrained_among(forks.slots)
            )
            ends = np.concatenate((ends, (firsts + counts - 1)[forks.rows[free]]))
            sampling = np.concatenate((sampling, forks.slots[free]))
        ends = np.concatenate((ends, kept))
        return Prefill(
            step.token_ids.copy(),  # the record is gone when the step is launched
            positions=(np.arange(len(row_of)) + offsets).astype(np.int32),
            slots=step.slots[row_of],
            rows=np.stack((step.slots, firsts, counts, step.starts + counts)).astype(np.int32),
            tiles=np.stack((tile_rows, tile_numbers))[:, longest_first].astype(np.int32),
            ends=ends.astype(np.int32),
            sampling=sampling,
        )

    def _fallback_rows(self, ended: Long, resumed: Long) -> tuple[SampledRows, ...]:
        """Rows of the step that `Device.sample_rows` does not do, as they stand: of prompts that
        end, of the decode batch, of outputs that are resumed."""
        rows, masking = self._fallback_decodes()
        if not len(ended) and not len(resumed) and not masking:
            return tuple(map(self._reaching, self._parts)) if self._parts else ()
        behind = len(ended) + len(self._decode)
        rows = np.concatenate((self._cut(ended), rows + len(ended), self._cut(resumed) + behind))
        parts = self._sampled(np.concatenate((ended, self._decode, resumed)), rows)
        parts = tuple(self.sampling.masked(part, self.lengths[part.slots]) for part in parts)
        return tuple(map(self._reaching, parts))

    def _cut(self, slots: Long) -> Long:
        masking = self.sampling.masking(slots, self.lengths[slots])
        return np.flatnonzero(self._never_fused(slots) | masking)

    def _reaching(self, part: SampledRows) -> SampledRows:
        """The rows with the length of the longest whose tokens count."""
        if part.rules is None or not len(part.rules.penalized):
            return part
        longest = int(self.lengths[part.slots[part.rules.penalized]].max())
        return dataclasses.replace(part, rules=dataclasses.replace(part.rules, longest=longest))

    def _sampled(self, slots: Long, rows: Long) -> tuple[SampledRows, ...]:
        """Return how these of the sampling rows' slots sample, a few at a time."""
        most = self._traits.fallback_at_once
        parts = (rows[at : at + most] for at in range(0, len(rows), most))
        return tuple(self.sampling.rows(slots[part], part) for part in parts)

    def _never_fused(self, slots: Long) -> NDArray[np.bool_]:
        return self.sampling.never_fused(slots, self._traits.fused_sampling)

    def _fallback_decodes(self) -> tuple[Long, bool]:
        """Rows of the decode batch that are not fused in this step, and whether some of the set may
        not sample some ids yet."""
        decode = self._decode
        if self._fallback is None:
            self._fallback = np.flatnonzero(self._never_fused(decode))
            self._asking = self._scores.asking(decode)
            self._parts = self._sampled(decode, self._fallback)
            self._masked_steps = self.sampling.masked_steps(decode, self.lengths[decode])
        if self._masked_steps <= 0:
            return self._fallback, False
        self._masked_steps -= 1
        masking = self.sampling.masking(decode, self.lengths[decode])
        masking[self._fallback] = True
        return np.flatnonzero(masking), True


def _joined(
    pairs: list[tuple[NDArray[np.integer], NDArray[np.integer]]],
) -> tuple[Int64, Int32]:
    if not pairs:
        return NO_ROWS, _NOTHING
    indices = np.concatenate([pair[0] for pair in pairs]).astype(np.int64)
    return indices, np.concatenate([pair[1] for pair in pairs]).astype(np.int32)
