"""The batch on the device: tables indexed by sequence, token ids, and the states of all layers."""

from __future__ import annotations

import torch

from nanoactor.models.batch import DecodeRows, SlotTables
from nanoactor.models.layers.state import LayerState, SlotArrays
from nanoactor.models.limits import MAX_FREEZE_IDS
from nanoactor.models.sampling.columns import WORDS
from nanoactor.models.sampling.logit_rules import TokenIds
from nanoactor.runner.batch.batch import StateLayout
from nanoactor.runner.batch.inputs import Inputs
from nanoactor.runner.model.layer_states import copy_blocks
from nanoactor.runner.model.model import LoadedModel


class ResidentBatch:
    """One rank's batch on the device. Its tables are views of a single int32 array, and a step
    changes them by writing values at a few indices."""

    def __init__(self, model: LoadedModel, layout: StateLayout, blocks: int) -> None:
        """Allocate the tables, and a cache of `blocks` blocks plus the dummy blocks to which
        padding rows write."""
        device, self._layout, self._blocks = model.device, layout, blocks
        total_blocks = blocks + device.dummy_blocks(layout.slots - 1, model.block_size)
        self.states: list[LayerState] = model.allocate(total_blocks, layout.slots)
        self._slot_arrays = [state for state in self.states if isinstance(state, SlotArrays)]
        self._state = device.zeros(layout.size, dtype=torch.int32)
        self.tables = SlotTables(
            blocks=self._state[: layout.lengths].view(layout.slots, layout.max_blocks),
            lengths=self._column(layout.lengths),
            last_tokens=self._column(layout.last_tokens),
            rope_deltas=self._column(layout.rope_deltas) if model.encoder else None,
            sampling_words=self._column(layout.sampling, WORDS).view(WORDS, layout.slots),
            block_size=model.block_size,
            frozen=self._column(layout.frozen),
            freeze_ids=self._column(layout.freeze_ids, MAX_FREEZE_IDS).view(
                MAX_FREEZE_IDS, layout.slots
            ),
        )
        ids = device.zeros(total_blocks * model.block_size, dtype=torch.int32)
        self.tokens = TokenIds(ids, self._column(layout.prompt_lengths), self.tables)
        rows = layout.rows, layout.row_positions, layout.row_token_ids
        self.rows = DecodeRows(*map(self._column, rows))
        self._reset_rows()

    def _column(self, start: int, columns: int = 1) -> torch.Tensor:
        return self._state[start : start + columns * self._layout.slots]

    def _reset_rows(self) -> None:
        self.tables.blocks[self.dummy] = self._blocks
        self.rows.slots.fill_(self.dummy)
        self.rows.positions.fill_(-1)
        self.tables.freeze_ids.fill_(-1)

    @property
    def dummy(self) -> int:
        """Index, in all tables, of the dummy sequence to which padding rows belong."""
        return self._layout.dummy

    def free_states(self) -> None:
        """Free the cache and the other states of layers. No step can run afterwards."""
        self.states.clear()
        self._slot_arrays.clear()

    def reset(self) -> None:
        """Reset all tables. The contents of blocks are kept."""
        self._state.zero_()
        self._reset_rows()

    def apply(self, inputs: Inputs[torch.Tensor]) -> None:
        """Queue the changes to tables and the copies of blocks and states that must precede a
        step's layers."""
        if inputs.changes:
            self._state[inputs.changes[0]] = inputs.changes[1]
        if inputs.copies:
            copy_blocks(self.states, self.tokens, *inputs.copies)
        for arrays in self._slot_arrays:  # copied first: a source slot may get a new sequence
            if inputs.slot_copies:
                arrays.copy(*inputs.slot_copies)
            if inputs.admitted is not None:
                arrays.zero(inputs.admitted)
