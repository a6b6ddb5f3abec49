"""Sampling of the next tokens: with the device's fused sampler as part of the captured step or, for
rows that this sampler does not handle, after the step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from nanoactor.models.batch import FusedSamplingInputs, SamplingBatch, SlotTables
from nanoactor.models.limits import FROZEN, NO_TOKEN, NOTHING_ALLOWED
from nanoactor.models.options import FusedSampling
from nanoactor.models.sampling.logit_rules import TokenIds, apply_rules
from nanoactor.models.sampling.token_masks import BITS, TokenMasks
from nanoactor.runner.batch.inputs import SampledRows
from nanoactor.runner.model.model import LoadedModel
from nanoactor.runner.steps.graphs import MAX_PROMPTS


def row_indices(index: torch.Tensor, prompts: tuple[int, int]) -> torch.Tensor:
    """Map the indices of rows that sample, int64 (rows,), to rows of a step's hidden states.
    `prompts` are the number of rows that end a prompt, and the number to which a captured step pads
    them."""
    num_prompts, padded = prompts
    return (
        torch.where(index < num_prompts, index, index + (padded - num_prompts))
        if padded > num_prompts
        else index
    )


class KeptStates(NamedTuple):
    """Hidden states and logits after the newest token in each slot (a sequence's index in the
    batch), kept until the grammar mask for the next token arrives."""

    states: torch.Tensor
    """Hidden state by slot, (slots, hidden)."""
    logits: torch.Tensor | None
    """Logits by slot, (slots, vocabulary); None if they are recomputed from `states`."""


class TokenChooser:
    """Samples tokens on one rank, with the fused sampler or without it."""

    def __init__(
        self,
        model: LoadedModel,
        fused: FusedSampling,
        tokens: TokenIds,
        *,
        max_num_seqs: int,
        debug: bool,
        constrains: bool = False,
    ) -> None:
        """Allocate buffers for `max_num_seqs` decode rows and the prompts of a step. `tokens` are
        the token ids and tables of all sequences. If `debug` is True, ranks compare the tokens that
        they have sampled. `constrains` is True if requests may use grammars."""
        device, config = model.device, model.config
        self._model, self._device, self._fused = model, device, fused
        self._compares = debug and model.group.size > 1
        self._constrains = constrains
        self._tokens, self._masks = tokens, TokenMasks(device.torch_device)
        self._tables: SlotTables = tokens.tables
        rows = max_num_seqs + MAX_PROMPTS
        self.chosen = device.zeros(rows, dtype=torch.int32)
        """Sampled token ids, int32 (rows,), in the order of the step's logits."""
        self.logits: torch.Tensor | None = None
        """Logits of the latest step, (rows, vocabulary); None unless the logits of constrained rows
        are kept."""
        if constrains and device.traits.keeps_logits and model.group.size == 1:
            self.logits = device.zeros(rows, config.vocab_size, dtype=model.dtype)
        heads, kv_heads = model.network.shard.heads.size, model.network.shard.kv_heads.size
        self.scratch = device.scratch(rows, heads, kv_heads, config.head_dim, config.vocab_size)
        """Workspace of the device's kernels."""

    def logits_buffer(self, rows: int) -> torch.Tensor | None:
        """Return the buffer to which the logits of `rows` rows must be written; None if they may be
        written anywhere."""
        return None if self.logits is None else self.logits[:rows]

    def choose(
        self, hidden: torch.Tensor, slots: torch.Tensor, logits: torch.Tensor | None = None
    ) -> None:
        """Sample tokens into `chosen` with the fused sampler, if there is one. In a captured step,
        this is part of the graph. If `logits` is not None, they are already in the buffer returned
        by `logits_buffer`."""
        if self._fused != "none":
            if logits is None:
                logits = self._model.gather_logits(hidden, self.logits_buffer(len(slots)))
            chosen = self.chosen[: len(slots)]
            self._device.sample_rows(self._choice(logits, slots, chosen))

    def _choice(
        self, logits: torch.Tensor, slots: torch.Tensor, chosen: torch.Tensor
    ) -> FusedSamplingInputs:
        return FusedSamplingInputs(logits, slots, self._tables, self.scratch, chosen)

    def choose_fallback(
        self, hidden: torch.Tensor, rows: SampledRows[torch.Tensor], prompts: tuple[int, int]
    ) -> None:
        """Sample tokens for rows that the fused sampler does not handle, or for all rows if the
        device has no fused sampler.

        `prompts` is a pair: the number of rows that complete a prompt, and the number to which they
        are padded.
        """
        index, slots = row_indices(rows.index, prompts), rows.slots
        logits = self._model.network.logits(hidden.index_select(0, index))
        chosen = self._sample(logits, rows).int()
        frozen = self._tables.frozen.index_select(0, slots) > 0
        self.chosen[index] = torch.where(frozen, FROZEN, chosen)
        self._tables.last_tokens[slots] = chosen.clamp_min(0)

    def choose_from(self, kept: KeptStates, rows: SampledRows[torch.Tensor]) -> torch.Tensor:
        """Return token ids, int32 (rows,), sampled from the hidden states kept in the slots
        `rows.index`."""
        masks = rows.masks if rows.fused else None
        if kept.logits is not None and masks is not None:
            slots = rows.slots.int()
            chosen = torch.empty_like(slots)
            self._device.sample_masked_rows(self._choice(kept.logits, slots, chosen), masks)
            return chosen
        if masks is not None:
            hidden = kept.states.index_select(0, rows.index)
            return self._choose_masked(hidden, masks, rows.slots.int())
        if kept.logits is not None:
            logits = kept.logits.index_select(0, rows.index)
        else:
            logits = self._model.network.logits(kept.states.index_select(0, rows.index))
        chosen = self._sample(logits, rows).int()
        self._tables.last_tokens[rows.slots] = chosen.clamp_min(0)
        return chosen

    def _choose_masked(
        self, hidden: torch.Tensor, masks: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Return token ids, int32 (rows,), sampled under `masks` by the fused sampler."""
        logits = self._model.gather_logits(hidden)
        masked = self._masks.apply(logits, masks)
        chosen = torch.empty_like(slots)
        self._device.sample_rows(self._choice(masked, slots, chosen))
        no_choice = torch.where(logits.amax(-1).isfinite(), NOTHING_ALLOWED, NO_TOKEN).int()
        return torch.where(masked.amax(-1).isfinite(), chosen, no_choice)

    def warm_up(self) -> None:
        """Sample a dummy token under a grammar mask, so that no constrained row has to wait for
        compilation."""
        if self._fused == "none" or not self._constrains:
            return
        model, dummy = self._model, len(self._tables.last_tokens) - 1
        options: dict[str, Any] = {"dtype": torch.int32, "device": self._device.torch_device}
        slots = torch.full((1,), dummy, **options)
        masks = torch.full((1, -(-model.config.vocab_size // BITS)), -1, **options)
        if self.logits is not None:
            chosen = torch.empty_like(slots)
            self._device.sample_masked_rows(self._choice(self.logits, slots, chosen), masks)
        else:
            hidden = self._device.zeros(1, model.config.hidden_size, dtype=model.dtype)
            self._choose_masked(hidden, masks, slots)

    def compare(self, step: int, *chosen: torch.Tensor) -> None:
        """In debug mode, raise `RanksDisagree` if the ranks have sampled different tokens in a
        step."""
        if self._compares and chosen:
            self._model.check_agreement(step, torch.cat(chosen).long())

    def _sample(self, logits: torch.Tensor, rows: SampledRows[torch.Tensor]) -> torch.Tensor:
        """Return token ids, int64 (rows,), sampled from `logits` under the masks and rules of the
        rows."""
        batch, rules = SamplingBatch.of(self._tables, rows.slots, rows.groups), rows.rules
        if rules is None and rows.masks is None:
            return self._model.sample(logits, batch)
        is_finite = self._model.max_logits(logits).isfinite()
        start = self._model.network.shard.vocabulary.start
        if rows.masks is not None:
            logits = self._masks.apply(logits, rows.masks, start)
        if rules is not None:
            logits = apply_rules(logits, rules, batch.sampling, rows.slots, self._tokens, start)
        chosen = self._model.sample(logits, batch)
        return torch.where((chosen == NO_TOKEN) & is_finite, NOTHING_ALLOWED, chosen)
