"""The forward pass of a step over the batch on the device, including the sampling of tokens."""

from __future__ import annotations

import functools

import torch

from nanoactor.models.batch import (
    AttentionBatch,
    ForwardInputs,
    RowBuffers,
    decode_batch,
    with_final_rows,
)
from nanoactor.models.seq_lens import HostSeqLens
from nanoactor.runner.batch.inputs import Prefill, VisualInputs
from nanoactor.runner.model.model import LoadedModel
from nanoactor.runner.model.resident import ResidentBatch
from nanoactor.runner.steps.choosing import TokenChooser
from nanoactor.runner.steps.published import PublishedIds


class StepForward:
    """Queues the operators of a step. Capturing a step records these operators in a graph."""

    def __init__(
        self,
        model: LoadedModel,
        resident: ResidentBatch,
        chooser: TokenChooser,
        published: PublishedIds,
        *,
        max_tokens: int,
        captured_tokens: int,
    ) -> None:
        """Allocate buffers for steps of at most `max_tokens` prompt tokens, and for captured steps
        of at most `captured_tokens` prompt tokens."""
        device, rows = model.device, len(resident.rows.slots) - 1
        self._model, self._device, self._resident = model, device, resident
        self._chooser, self.published = chooser, published
        self._buffers = RowBuffers.zeros(device.zeros, max_tokens + rows, rows)
        self.prompt_states: torch.Tensor | None = None
        """Hidden states of the current step's prompt tokens, (tokens, hidden); None if they are not
        stored. Captured steps write to `captured_states` instead."""
        self.captured_states: torch.Tensor | None = None
        """Memory to which all captured steps write the hidden states of their prompt tokens; None
        if no steps with prompts are captured."""
        if captured_tokens:
            shape = captured_tokens, model.config.hidden_size
            self.captured_states = device.zeros(*shape, dtype=model.dtype)
        self.no_rows = device.zeros(1, model.config.hidden_size, dtype=model.dtype)[:0]
        """Hidden states of a step without rows, (0, hidden)."""
        self._no_prefill_rows = device.zeros(4, 1, dtype=torch.int32)[:, :0]
        self._dummies = torch.full_like(self._buffers.contexts, resident.dummy)

    def decode(self, rows: int, lengths: HostSeqLens) -> torch.Tensor:
        """Queue a step of `rows` decode rows, including padding rows, and return their hidden
        states, (rows, hidden). Logits are not returned, because each captured step would keep its
        own, and they would add up to gigabytes."""
        batch, slots = self._resident, self._resident.rows.slots[:rows]
        buffers = self._sliced(0, rows)
        self._device.advance(batch.tables, batch.rows.first(rows), buffers, batch.tokens.ids)
        where = buffers, slots, batch.tables.blocks, batch.states
        if whole := self._model.whole_step(*where, self._chooser.logits_buffer(rows)):
            hidden, logits = whole
        else:
            inputs = decode_batch(buffers, slots, batch.tables, self._no_prefill_rows, lengths)
            hidden, logits = self._forward(buffers, inputs, buffers.positions), None
        self._chooser.choose(hidden, slots, logits)
        self.published.publish(self._chooser.chosen[:rows])
        return hidden

    def mixed(
        self,
        prefill: Prefill[torch.Tensor],
        rows: int,
        visual: VisualInputs[torch.Tensor] | None,
        lengths: HostSeqLens,
        kept: torch.Tensor | None = None,
        final_lengths: HostSeqLens | None = None,
    ) -> torch.Tensor:
        """Queue a step with prompt chunks and `rows` decode rows. Return the hidden states of the
        tokens in `prefill.ends`, followed by those of the decode rows.

        The hidden states of all prompt tokens are stored in `kept`, or in `self.prompt_states` if
        `kept` is None. If `final_lengths` is not None, the last layer computes only the rows that
        are returned, and no other states are stored.
        """
        device, batch, num_tokens = self._device, self._resident, len(prefill.token_ids)
        all_rows, decodes = self._sliced(0, num_tokens + rows), batch.rows.slots[:rows]
        all_rows.token_ids[:num_tokens] = prefill.token_ids
        all_rows.positions[:num_tokens] = prefill.positions
        device.fill_slot_mapping(
            batch.tables, prefill.slots, prefill.positions, all_rows.slot_mapping[:num_tokens]
        )
        buffers = self._sliced(num_tokens, rows)
        batch.tokens.write(all_rows.slot_mapping[:num_tokens], all_rows.token_ids[:num_tokens])
        device.advance(batch.tables, batch.rows.first(rows), buffers, batch.tokens.ids)
        encoder = self._model.encoder
        inputs = AttentionBatch(
            all_rows.slot_mapping,
            batch.tables.blocks,
            batch.tables.block_size,
            prefill_tokens=num_tokens,
            prefill_rows=prefill.rows,
            prefill_tiles=prefill.tiles,
            decode_slots=decodes,
            decode_contexts=buffers.contexts,
            lengths=lengths,
            visual=encoder.read(visual.rows) if visual and encoder else None,
            frozen=batch.tables.frozen,
        )
        if final_lengths is not None:
            plan = functools.partial(device.plan, self._chooser.scratch)
            chunks = prefill.ends, prefill.slots, prefill.positions
            inputs = with_final_rows(inputs, chunks, final_lengths, plan)
        positions = all_rows.positions
        if visual is not None:
            after = buffers.positions.expand(3, -1)
            positions = torch.cat((visual.positions, after), dim=1)
        hidden = sampling = self._forward(all_rows, inputs, positions)
        if final_lengths is None:
            if kept is None:
                self.prompt_states = hidden[:num_tokens]
            else:
                kept[:num_tokens].copy_(hidden[:num_tokens])
            sampling = hidden.index_select(0, prefill.ends)
            if rows:
                sampling = torch.cat((sampling, hidden[num_tokens:]))
        dummies = self._dummies[: len(prefill.ends) - len(prefill.sampling)]
        self._chooser.choose(sampling, torch.cat((prefill.sampling, dummies, decodes)))
        return sampling

    def _forward(
        self, buffers: RowBuffers, batch: AttentionBatch, positions: torch.Tensor
    ) -> torch.Tensor:
        batch = self._device.plan(self._chooser.scratch, batch)
        inputs = ForwardInputs(buffers.token_ids, positions, self._resident.states, batch)
        return self._device.run(self._model.network.forward, inputs)

    def _sliced(self, first: int, rows: int) -> RowBuffers:
        buffers, at = self._buffers, slice(first, first + rows)
        return RowBuffers(
            buffers.token_ids[at],
            buffers.positions[at],
            buffers.slot_mapping[at],
            buffers.contexts[:rows],
        )
