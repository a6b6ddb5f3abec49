"""A device that keeps the batch itself, told nothing but deltas: it must come to the same inputs as
the batch that the host lays out anew for every step."""

from __future__ import annotations

from typing import Any

import numpy as np

from nanoactor.runner.batch import StepInputs
from nanoactor.runner.resident import HostBatch, Prefill, Update

_TOKENS_PER_PROGRAM = 3


class ResidentTwin:
    """The array that an accelerator holds, and what its kernels read from it."""

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int) -> None:
        self._host = HostBatch(max_num_seqs, max_blocks, _TOKENS_PER_PROGRAM)
        self._layout = self._host.layout
        self._block_size = block_size
        self._state = np.zeros(self._layout.size, np.int32)
        self._state[self._layout.rows :] = self._layout.dummy

    def check(self, step: Any, inputs: StepInputs) -> None:
        """Apply a step's deltas and compare all that it runs on."""
        update = self._host.update(step)
        assert len(np.unique(update.indices)) == len(update.indices), "one place written twice"
        assert update.words >= self._words(update)
        self._state[update.indices] = update.values
        rows = self._check_rows(update, inputs)
        if update.prefill is not None:
            self._check_prefill(update.prefill, inputs)
        self._check_sampling(update, inputs, rows)

    def _words(self, update: Update) -> int:
        words = 3 * len(update.indices)
        if update.prefill:
            prefill = update.prefill
            arrays = (prefill.token_ids, prefill.positions, prefill.slots, prefill.rows)
            words += sum(array.size for array in arrays) + prefill.tiles.size
            words += 2 * len(prefill.ends)
        for part in update.special:
            words += sum(getattr(part, name).nbytes // 4 for name in part.__dataclass_fields__)
        return words + 3 * (2 + 7 + 15 * len(update.special))  # each is aligned to 4 words

    def _column(self, start: int) -> Any:
        return self._state[start : start + self._layout.slots]

    def _places(self, slots: Any, positions: Any) -> Any:
        tables = self._state[: self._layout.lengths].reshape(self._layout.slots, -1)
        size = self._block_size
        return tables[slots, positions // size].astype(np.int64) * size + positions % size

    def _check_rows(self, update: Update, inputs: StepInputs) -> Any:
        """As `advance` lays them out."""
        listed = self._column(self._layout.rows)
        rows = listed[: update.decodes]
        assert rows.tolist() == inputs.decode_slots.tolist()
        assert (listed[update.decodes :] == self._layout.dummy).all()
        lengths = self._column(self._layout.lengths)
        positions = lengths[rows]
        first = len(inputs.token_ids) - len(rows)
        assert positions.tolist() == inputs.positions[first:].tolist()
        assert (self._places(rows, positions) == inputs.slot_mapping[first:]).all()
        lengths[rows] += 1
        assert lengths[rows].tolist() == inputs.decode_contexts.tolist()
        return rows

    def _check_prefill(self, prefill: Prefill, inputs: StepInputs) -> None:
        tokens = len(prefill.token_ids)
        assert prefill.token_ids.tolist() == inputs.token_ids[:tokens].tolist()
        assert prefill.positions.tolist() == inputs.positions[:tokens].tolist()
        places = self._places(prefill.slots, prefill.positions)
        assert (places == inputs.slot_mapping[:tokens]).all()
        tiles = []
        tables = self._state[: self._layout.lengths].reshape(self._layout.slots, -1)
        for number, row in enumerate(inputs.prefills):
            slot, *rest = prefill.rows[:, number].tolist()
            assert rest == [row.first, row.tokens, row.context]
            assert tables[slot, : len(row.blocks)].tolist() == row.blocks.tolist()
            groups = -(-row.tokens // _TOKENS_PER_PROGRAM)
            tiles += [(number, group) for group in range(groups)]
        assert prefill.tiles.T.tolist() == [list(tile) for tile in tiles]

    def _check_sampling(self, update: Update, inputs: StepInputs, rows: Any) -> None:
        prefill, sampled = update.prefill, inputs.sampled
        slots = [*(prefill.sampling.tolist() if prefill else []), *rows.tolist()]
        assert slots == sampled.slots.tolist()
        if prefill:
            ends = len(prefill.ends)
            assert prefill.ends.tolist() == sampled.token_index[:ends].tolist()
        layout = self._layout
        assert self._column(layout.lengths)[slots].tolist() == sampled.positions.tolist()
        temperature = self._column(layout.temperature).view(np.float32)[slots]
        greedy = np.zeros(len(slots), np.bool_)
        greedy[sampled.greedy] = True
        assert ((temperature == 0) == greedy).all()
        assert (temperature[~greedy] == sampled.temperature[~greedy]).all()
        seeds = np.stack(
            (self._column(layout.seeds), self._column(layout.seeds + layout.slots)), axis=-1
        )
        assert (np.ascontiguousarray(seeds[slots]).view(np.int64)[:, 0] == sampled.seeds).all()
        for name in ("top_k", "top_p", "min_p"):
            held = self._column(getattr(layout, name))[slots]
            given = getattr(sampled, name)
            held = held if given.dtype.kind == "i" else held.view(np.float32)
            assert (held == given).all()
        special = {*sampled.unlimited, *sampled.nucleus, *sampled.masked_rows}
        found = [row for part in update.special for row in part.token_index.tolist()]
        assert found == sorted(special)
