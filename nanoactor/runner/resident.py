"""What a step changes in a batch that lives on the device: index-value pairs, and few of them.

Everything that the device knows of slots is one int32 array; a step's deltas are numbers to be
written into it. A decode step in which nothing changed is empty.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from nanoactor.messages import Int32, Int64, Step
from nanoactor.models.lengths import NO_LENGTHS, HostLengths
from nanoactor.runner.sampling_table import NO_ROWS, Long, SampledRows, SamplingTable

# To sort whole vocabularies takes 127 bytes for each logit.
SPECIAL_AT_ONCE = 64
_NOTHING: Int32 = np.empty(0, np.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class StateLayout:
    """Where each table lies in the array. The last slot is a dummy, for padded rows: its block is
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
    def temperature(self) -> int:
        """By slot, the bits of a float32."""
        return self.last_tokens + self.slots

    @property
    def top_k(self) -> int:
        """By slot."""
        return self.temperature + self.slots

    @property
    def top_p(self) -> int:
        """By slot, the bits of a float32."""
        return self.top_k + self.slots

    @property
    def min_p(self) -> int:
        """By slot, the bits of a float32."""
        return self.top_p + self.slots

    @property
    def seeds(self) -> int:
        """Low words by slot, then high words."""
        return self.min_p + self.slots

    @property
    def rows(self) -> int:
        """The slots of the decode set, ascending, then dummies."""
        return self.seeds + 2 * self.slots

    @property
    def size(self) -> int:
        """Of the whole array."""
        return self.rows + self.slots


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
    """Which tokens are followed by a sampled one, ..."""
    sampling: Int32
    """... and their slots."""


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """What the device must be told for a step."""

    indices: Int64
    values: Int32
    """To be written into the state, before anything runs."""
    prefill: Prefill | None
    decodes: int
    """Rows of the decode set."""
    special: tuple[SampledRows, ...]
    """Rows that the fused sampler does not do, a few at a time; `token_index` is the row among
    those that sample."""
    lengths: HostLengths = NO_LENGTHS
    """Where the device asks for them."""

    @property
    def changes(self) -> tuple[NDArray[np.integer], ...]:
        """Indices and values, or nothing."""
        return (self.indices, self.values) if len(self.indices) else ()

    @property
    def words(self) -> int:
        """At most so many int32 numbers travel to the device."""
        words = 3 * len(self.indices) + 128
        if self.prefill:
            words += 3 * len(self.prefill.token_ids) + 6 * self.prefill.rows.shape[1]
            words += 2 * self.prefill.tiles.shape[1]
        for part in self.special:
            words += 24 * len(part.slots) + 4 * len(part.masked_rows) + 64
        return words


class HostBatch:
    """The host's side: lengths, the decode set, and how slots sample."""

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks: int,
        tokens_per_program: int,
        takes_lengths: bool = False,
        samples_greedily: bool = False,
    ) -> None:
        """The last three are the device's, see `Accelerator`."""
        self._takes_lengths = takes_lengths
        self._samples_greedily = samples_greedily
        self.layout = StateLayout(max_num_seqs + 1, max_blocks)
        self.tokens_per_program = tokens_per_program
        self._lengths = np.zeros(max_num_seqs, np.int64)
        self._decoding = np.zeros(max_num_seqs, np.bool_)
        self._decode: Long = NO_ROWS
        self._sampling = SamplingTable(max_num_seqs)
        self._special: Long | None = None
        """Decode rows that the fused sampler never does, until the set changes."""
        self._masked_steps = 0
        """How many steps of this set there are until all of its rows are past `min_tokens`."""

    def update(self, step: Step, all_special: bool = False) -> Update:
        """Apply a step. Steps must come in order. `all_special`: there is no fused sampler."""
        pairs: list[tuple[NDArray[np.integer], NDArray[np.integer]]] = []
        if len(step.admissions.slots):
            self._sampling.admit(step.admissions)
            pairs += self._admitted(step.admissions.slots)
        if len(step.table_slots):
            pairs.append((self._table_indices(step), step.table_blocks))
        if len(step.joins) or len(step.leaves):
            pairs.append(self._change_rows(step))
        decode = self._decode
        self._lengths[decode] += 1
        prefill = None
        if len(step.slots):
            ends = (step.starts + step.counts).astype(np.int64)
            self._lengths[step.slots] = ends
            pairs.append((self.layout.lengths + step.slots.astype(np.int64), ends))
            prefill = self._prefill(step)
        return Update(
            *_joined(pairs),
            prefill,
            len(decode),
            self._special_rows(prefill, all_special),
            self._host_lengths(step) if self._takes_lengths else NO_LENGTHS,
        )

    def _host_lengths(self, step: Step) -> HostLengths:
        contexts = (step.starts + step.counts).tolist()
        return HostLengths(step.counts.tolist(), contexts, self._lengths[self._decode].tolist())

    def _admitted(self, slots: Int32) -> list[tuple[NDArray[np.integer], NDArray[np.integer]]]:
        layout, wide = self.layout, slots.astype(np.int64)
        sampling = self._sampling
        seeds = sampling.seeds[slots].view(np.int32).reshape(-1, 2)
        return [
            (layout.temperature + wide, sampling.temperature[slots].view(np.int32)),
            (layout.top_k + wide, sampling.top_k[slots]),
            (layout.top_p + wide, sampling.top_p[slots].view(np.int32)),
            (layout.min_p + wide, sampling.min_p[slots].view(np.int32)),
            (layout.seeds + wide, seeds[:, 0]),
            (layout.seeds + layout.slots + wide, seeds[:, 1]),
        ]

    def _table_indices(self, step: Step) -> Int64:
        firsts = step.table_slots.astype(np.int64) * self.layout.max_blocks + step.table_starts
        if len(firsts) == len(step.table_blocks):  # each grows by one, as decodes do
            return firsts
        counts = step.table_counts.astype(np.int64)
        begins = np.cumsum(counts) - counts
        return np.repeat(firsts - begins, counts) + np.arange(len(step.table_blocks))

    def _change_rows(self, step: Step) -> tuple[Int64, Long]:
        before = len(self._decode)
        self._decoding[step.leaves] = False
        self._decoding[step.joins] = True
        self._decode, self._special = np.flatnonzero(self._decoding), None
        rows = np.full(max(before, len(self._decode)), self.layout.dummy, np.int64)
        rows[: len(self._decode)] = self._decode
        return self.layout.rows + np.arange(len(rows)), rows

    def _prefill(self, step: Step) -> Prefill:
        counts = step.counts
        firsts = (np.cumsum(counts) - counts).astype(np.int32)
        row_of = np.repeat(np.arange(len(counts)), counts)
        offsets = (step.starts - firsts)[row_of]
        groups = -(-counts // self.tokens_per_program)
        tile_rows = np.repeat(np.arange(len(groups), dtype=np.int32), groups)
        tile_numbers = np.arange(len(tile_rows)) - np.repeat(np.cumsum(groups) - groups, groups)
        return Prefill(
            step.token_ids,
            (np.arange(len(row_of)) + offsets).astype(np.int32),
            step.slots[row_of],
            np.stack((step.slots, firsts, counts, step.starts + counts)).astype(np.int32),
            np.stack((tile_rows, tile_numbers)).astype(np.int32),
            (firsts + counts - 1)[step.samples].astype(np.int32),
            step.slots[step.samples],
        )

    def _special_rows(self, prefill: Prefill | None, every: bool) -> tuple[SampledRows, ...]:
        """Rows of the step that `Accelerator.sample_rows` does not do."""
        rows, sampling = self._special_decodes(), self._decode
        if prefill is not None and len(prefill.sampling):
            ended = prefill.sampling.astype(np.int64)
            cut = self._never_fused(ended)
            cut |= self._sampling.masking(ended, self._lengths[ended])
            rows = np.concatenate((np.flatnonzero(cut), rows + len(ended)))
            sampling = np.concatenate((ended, sampling))
        if every:
            rows = np.arange(len(sampling))
        parts = [rows[at : at + SPECIAL_AT_ONCE] for at in range(0, len(rows), SPECIAL_AT_ONCE)]
        return tuple(self._sampled_rows(sampling[part], part) for part in parts)

    def _sampled_rows(self, slots: Long, index: Long) -> SampledRows:
        return self._sampling.rows(slots, index, self._lengths[slots])

    def _never_fused(self, slots: Long) -> NDArray[np.bool_]:
        if self._samples_greedily:
            return self._sampling.sampling(slots)
        return self._sampling.cut_from_all(slots)

    def _special_decodes(self) -> Long:
        decode = self._decode
        if self._special is None:
            self._special = np.flatnonzero(self._never_fused(decode))
            self._masked_steps = self._sampling.masked_steps(decode, self._lengths[decode])
        if self._masked_steps <= 0:
            return self._special
        self._masked_steps -= 1
        masking = self._sampling.masking(decode, self._lengths[decode])
        masking[self._special] = True
        return np.flatnonzero(masking)


def _joined(
    pairs: list[tuple[NDArray[np.integer], NDArray[np.integer]]],
) -> tuple[Int64, Int32]:
    if not pairs:
        return NO_ROWS, _NOTHING
    indices = np.concatenate([pair[0] for pair in pairs]).astype(np.int64)
    return indices, np.concatenate([pair[1] for pair in pairs]).astype(np.int32)
