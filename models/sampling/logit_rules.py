"""Rules of requests that change logits before a token is chosen: allowed ids, bad words, biases and
penalties. They are computed only for the rows that use them.

The rules are applied in this order:

- allowed ids and bad words: excluded ids get minus infinity
- biases: added
- repetition penalty, for ids in the prompt or output: logits above 0 divided by it, others
  multiplied (arXiv:1909.05858)
- frequency penalty: subtracted once per occurrence in the output
- presence penalty: subtracted once if the id occurs in the output

Ids that `min_tokens` excludes get minus infinity after these rules. Doing so before them would have
the same effect.

Penalties count the ids of a sequence along its length, so besides the logits, no tensor is as wide
as the vocabulary.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.nn import functional as F

from nanoactor.models.batch import SlotTables
from nanoactor.models.sampling.columns import SamplingColumns
from nanoactor.models.sampling.rows import LogitRules


@dataclasses.dataclass(frozen=True, slots=True)
class TokenIds:
    """Token ids of all sequences, kept on the device to find repetitions and bad words.

    They are stored at the same cache positions as the keys and values, so sequences that share a
    block also share its ids.
    """

    ids: torch.Tensor
    """Token ids by cache position, int32 (blocks * block_size,)."""
    prompt_lengths: torch.Tensor
    """Number of prompt tokens of each slot (a sequence's index), int32 (slots,)."""
    tables: SlotTables

    def write(self, slot_mapping: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Store the token ids of a step, int32 (tokens,), at the cache positions `slot_mapping`,
        int64 (tokens,)."""
        self.ids.index_copy_(0, slot_mapping, token_ids)

    def gather(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the token ids, int64 (rows, n), at `positions`, (rows, n), in the sequences of
        `slots` (sequence indices), (rows,)."""
        size = self.tables.block_size
        blocks = self.tables.blocks[slots[:, None], positions // size].long()
        return self.ids[blocks * size + positions % size].long()


@dataclasses.dataclass(frozen=True, slots=True)
class _LocalVocabulary:
    """A rank's share of the vocabulary, followed by one column that stands for all other ids."""

    start: int
    width: int

    def column(self, ids: torch.Tensor) -> torch.Tensor:
        local = ids - self.start
        # Filtering out the other ids would wait for the device.
        return torch.where((local >= 0) & (local < self.width), local, self.width)


def apply_rules(
    logits: torch.Tensor,
    rules: LogitRules[torch.Tensor],
    sampling: SamplingColumns[torch.Tensor],
    slots: torch.Tensor,
    tokens: TokenIds,
    start: int = 0,
) -> torch.Tensor:
    """Return the logits after the requests' rules, float32 (rows, ids).

    `slots` are the rows' sequence indices, int64 (rows,). `sampling` contains the rows' parameters.
    The first column of `logits` is token id `start`.
    """
    width = logits.shape[-1]
    local = _LocalVocabulary(start, width)
    logits = F.pad(logits.float(), (0, 1))
    if rules.allowed.numel():
        _keep_allowed(logits, rules, local)
    if rules.word_rows.numel():
        _ban_words(logits, rules, slots, tokens, local)
    if rules.biased_rows.numel():
        index = rules.biased_rows, local.column(rules.biased_ids)
        logits.index_put_(index, rules.biases, accumulate=True)
    if rules.penalized.numel():
        rows = rules.penalized
        logits[rows] = _penalize(logits[rows], rules, sampling, slots[rows], tokens, local)
    return logits[:, :width].contiguous()


def _keep_allowed(
    logits: torch.Tensor, rules: LogitRules[torch.Tensor], local: _LocalVocabulary
) -> None:
    index = rules.allowed_rows, local.column(rules.allowed_ids)
    allowed_logits = logits[index]
    logits[rules.allowed] = float("-inf")
    logits[index] = allowed_logits


def _ban_words(
    logits: torch.Tensor,
    rules: LogitRules[torch.Tensor],
    slots: torch.Tensor,
    tokens: TokenIds,
    local: _LocalVocabulary,
) -> None:
    slots, prefixes = slots[rules.word_rows], rules.words[:, :-1]
    lengths = tokens.tables.lengths[slots].long()[:, None]
    positions = lengths - torch.arange(prefixes.shape[1], 0, -1, device=logits.device)
    in_output = positions >= tokens.prompt_lengths[slots][:, None]
    matches = in_output & (tokens.gather(slots, positions.clamp_min(0)) == prefixes)
    banned = (matches | (prefixes < 0)).all(-1)
    # Accumulated, because another word of the row may end with the same id.
    penalty = torch.where(banned, float("-inf"), 0.0)
    logits.index_put_((rules.word_rows, local.column(rules.words[:, -1])), penalty, accumulate=True)


def _penalize(
    logits: torch.Tensor,
    rules: LogitRules[torch.Tensor],
    sampling: SamplingColumns[torch.Tensor],
    slots: torch.Tensor,
    tokens: TokenIds,
    local: _LocalVocabulary,
) -> torch.Tensor:
    """Return `logits` with penalties applied. Row i is row `rules.penalized[i]` of the step, and
    belongs to the sequence with index `slots[i]`."""

    def column(values: torch.Tensor) -> torch.Tensor:
        return values[rules.penalized][:, None]

    positions = torch.arange(rules.longest, device=logits.device)[None]
    lengths = tokens.tables.lengths[slots][:, None]
    ids = tokens.gather(slots, torch.where(positions < lengths, positions, 0))
    # Positions past a sequence's end repeat its first token: the same id gets the same value,
    # however often it is written.
    in_output = (positions < lengths) & (positions >= tokens.prompt_lengths[slots][:, None])
    counts = _counts(ids, in_output)
    columns = local.column(ids)
    seen_logits = logits.gather(1, columns)
    repetition = column(sampling.repetition_penalty)
    seen_logits = torch.where(seen_logits > 0, seen_logits / repetition, seen_logits * repetition)
    seen_logits = seen_logits - counts * column(sampling.frequency_penalty)
    seen_logits = seen_logits - (counts > 0) * column(sampling.presence_penalty)
    return logits.scatter(1, columns, seen_logits)


def _counts(ids: torch.Tensor, is_counted: torch.Tensor) -> torch.Tensor:
    """Return the count of each of `ids`, (rows, n), in its row, int64 (rows, n). Only positions
    where `is_counted`, bool (rows, n), is True are counted."""
    sorted_ids = torch.where(is_counted, ids, torch.iinfo(torch.int64).max).sort(-1).values
    end = torch.searchsorted(sorted_ids, ids, right=True)
    return end - torch.searchsorted(sorted_ids, ids)
