"""The forward pass of a step over the batch on the device, including the choice of tokens."""

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
from nanoactor.runner.batch.inputs import Prefill, SeenPictures
from nanoactor.runner.model.model import LoadedModel
from nanoactor.runner.model.resident import ResidentBatch
from nanoactor.runner.steps.choosing import TokenChooser
from nanoactor.runner.steps.published import PublishedIds


class StepForward:
    """Queues steps operator by operator. A step is captured by recording the operators that it
    queues."""

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
        """Allocate buffers for steps of at most `max_tokens` prompt tokens, and of at most
        `captured_tokens` if they are captured."""
        device, rows = model.device, len(resident.rows.slots) - 1
        self._model, self._device, self._resident = model, device, resident
        self._chooser, self.published = chooser, published
        self._buffers = RowBuffers.zeros(device.zeros, max_tokens + rows, rows)
        self.prompts: torch.Tensor | None = None
        """Hidden states of the current step's prompt tokens, unless the step is captured (see
        `kept`)."""
        self.kept: torch.Tensor | None = None
        """Memory to which all captured steps write the hidden states of prompt tokens; None if no
        steps with prompts are captured."""
        if captured_tokens:
            shape = captured_tokens, model.config.hidden_size
            self.kept = device.zeros(*shape, dtype=model.dtype)
        self.no_rows = device.zeros(1, model.config.hidden_size, dtype=model.dtype)[:0]
        """Hidden states of a step without rows, (0, hidden)."""
        self._nothing = device.zeros(4, 1, dtype=torch.int32)[:, :0]
        self._dummies = torch.full_like(self._buffers.contexts, resident.dummy)

    def decode(self, rows: int, lengths: HostSeqLens) -> torch.Tensor:
        """Queue a step of this many decode rows, including padded ones, and return their hidden
        states. (If it returned logits, each capture would keep a set of them, which adds up to
        gigabytes.)"""
        batch, slots = self._resident, self._resident.rows.slots[:rows]
        buffers = self._sliced(0, rows)
        self._device.advance(batch.tables, batch.rows.first(rows), buffers, batch.tokens.ids)
        where = buffers, slots, batch.tables.blocks, batch.states
        if whole := self._model.whole_step(*where, self._chooser.room(rows)):
            hidden, logits = whole
        else:
            inputs = decode_batch(buffers, slots, batch.tables, self._nothing, lengths)
            hidden, logits = self._forward(buffers, inputs, buffers.positions), None
        self._chooser.choose(hidden, slots, logits)
        self.published.publish(self._chooser.chosen[:rows])
        return hidden

    def mixed(
        self,
        prefill: Prefill[torch.Tensor],
        rows: int,
        seen: SeenPictures[torch.Tensor] | None,
        lengths: HostSeqLens,
        kept: torch.Tensor | None = None,
        final: HostSeqLens | None = None,
    ) -> torch.Tensor:
        """Queue a step with prompt chunks. Return the hidden states of the tokens `prefill.ends`,
        then those of the decode rows. The hidden states of all prompt tokens are stored in `kept`
        if given, else in `self.prompts`; if `final` is given, they are not stored."""
        device, batch, first = self._device, self._resident, len(prefill.token_ids)
        every, decodes = self._sliced(0, first + rows), batch.rows.slots[:rows]
        every.token_ids[:first] = prefill.token_ids
        every.positions[:first] = prefill.positions
        device.locate(batch.tables, prefill.slots, prefill.positions, every.slot_mapping[:first])
        buffers = self._sliced(first, rows)
        batch.tokens.write(every.slot_mapping[:first], every.token_ids[:first])
        device.advance(batch.tables, batch.rows.first(rows), buffers, batch.tokens.ids)
        encoder = self._model.encoder
        inputs = AttentionBatch(
            every.slot_mapping,
            batch.tables.blocks,
            batch.tables.block_size,
            prefill_tokens=first,
            prefill_rows=prefill.rows,
            prefill_tiles=prefill.tiles,
            decode_slots=decodes,
            decode_contexts=buffers.contexts,
            lengths=lengths,
            visual=encoder.read(seen.rows) if seen and encoder else None,
            frozen=batch.tables.frozen,
        )
        if final is not None:
            plan = functools.partial(device.plan, self._chooser.scratch)
            chunks = prefill.ends, prefill.slots, prefill.positions
            inputs = with_final_rows(inputs, chunks, final, plan)
        positions = every.positions
        if seen is not None:
            after = buffers.positions.expand(3, -1)
            positions = torch.cat((seen.positions, after), dim=1)
        hidden = sampling = self._forward(every, inputs, positions)
        if final is None:
            if kept is None:
                self.prompts = hidden[:first]
            else:
                kept[:first].copy_(hidden[:first])
            sampling = hidden.index_select(0, prefill.ends)
            if rows:
                sampling = torch.cat((sampling, hidden[first:]))
        keeping = self._dummies[: len(prefill.ends) - len(prefill.sampling)]
        self._chooser.choose(sampling, torch.cat((prefill.sampling, keeping, decodes)))
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
