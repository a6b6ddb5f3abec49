"""Sampling of token ids in several kernels.

The first three compute the maxima of parts of each row, the maxima after noise is added, and the
winner of each row. The last two then sample rows that have a top-k, and rows that have only a top-p
or a min-p.

The ids are those that `models/sampling/sampler.py` chooses: the random words and scores are the
same, and of equal scores the lower id wins. That module itself samples rows with a top-k above
`limits.CANDIDATES` and rows with penalties or other changes to logits. `masked_sampling.py` handles
masks.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from nanoactor.models import limits
from nanoactor.models.batch import SlotTables
from nanoactor.models.devices.cuda.kernels.nucleus_sampling import sample_nucleus
from nanoactor.models.devices.cuda.kernels.philox import gumbel_of_part
from nanoactor.models.devices.cuda.kernels.truncated_sampling import (
    GROUP,
    sample_truncated,
    scratch_words,
)

NO_TOKEN = tl.constexpr(limits.NO_TOKEN)
FROZEN = tl.constexpr(limits.FROZEN)
_PART = 4096
"""Number of token ids that one program processes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Partials:
    """Intermediate results for each part of the vocabulary. A part is 4,096 consecutive ids."""

    highest: torch.Tensor
    """Highest logit of each part, float32 (rows, parts)."""
    highest_ids: torch.Tensor
    """Token id of each logit in `highest`, int32 (rows, parts)."""
    scores: torch.Tensor
    """Highest score with noise in each part, float32 (rows, parts)."""
    score_ids: torch.Tensor
    """Token id of each score in `scores`, int32 (rows, parts)."""
    group_maxima: torch.Tensor
    """Highest logit of each group of 256 ids, float32 (rows, groups)."""
    truncation_scratch: torch.Tensor
    """Workspace of `truncated_sampling`, int64 (rows, words)."""

    @classmethod
    def empty(cls, rows: int, vocabulary: int, device: torch.device) -> Partials:
        """Allocate memory for up to `rows` rows."""
        shape = (rows, triton.cdiv(vocabulary, _PART))

        def make(dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        groups = shape[1] * (_PART // GROUP)
        return cls(
            make(torch.float32),
            make(torch.int32),
            make(torch.float32),
            make(torch.int32),
            torch.empty(rows, groups, dtype=torch.float32, device=device),
            torch.empty(rows, scratch_words(groups), dtype=torch.int64, device=device),
        )


def sample_rows(
    logits: torch.Tensor,
    slots: torch.Tensor,
    tables: SlotTables,
    partials: Partials,
    sampled_ids: torch.Tensor,
) -> None:
    """Sample a token for each row of logits (rows, vocabulary), with the parameters of its slot in
    `slots`, int32 (rows,).

    Ids are written to `sampled_ids`, int32 (rows,), and to the table of last tokens. `sampled_ids`
    is set to `limits.NO_TOKEN` if the highest logit is not finite, and to `limits.FROZEN` if the
    slot is frozen (stopped by one of its `freeze_ids`). `tables.lengths` are the positions of the
    sampled tokens.
    """
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, _PART)
    padded = triton.next_power_of_2(parts)
    _row_maxima[(rows, parts)](
        logits,
        partials.highest,
        partials.highest_ids,
        partials.group_maxima,
        vocabulary,
        logits.stride(0),
        part=_PART,
        group=GROUP,
        num_warps=4,
    )
    _perturbed_maxima[(rows, parts)](
        logits,
        slots,
        tables.sampling.temperature,
        tables.sampling.seed,
        tables.lengths,
        partials.highest,
        partials.scores,
        partials.score_ids,
        vocabulary,
        logits.stride(0),
        tables.sampling.seed.stride(0),
        parts,
        padded=padded,
        part=_PART,
        num_warps=8,
    )
    _pick_winners[(rows,)](
        slots,
        tables.sampling.temperature,
        partials.highest,
        partials.highest_ids,
        partials.scores,
        partials.score_ids,
        sampled_ids,
        tables.last_tokens,
        tables.frozen,
        vocabulary,
        parts,
        padded=padded,
        num_warps=1,
    )
    sample_truncated(
        logits, slots, tables, partials.group_maxima, partials.truncation_scratch, sampled_ids
    )
    sample_nucleus(logits, slots, tables, partials.highest, sampled_ids)


@triton.jit
def _load_logits(pointers, mask):
    """Return logits as float32, with minus infinity in place of NaN, so that NaN is never
    chosen."""
    value = tl.load(pointers, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(value == value, value, float("-inf"))


@triton.jit
def _row_maxima(
    logits,
    highest,
    highest_ids,
    group_maxima,
    vocabulary,
    stride,
    part: tl.constexpr,
    group: tl.constexpr,
):
    row, part_number = tl.program_id(0), tl.program_id(1)
    token = part_number * part + tl.arange(0, part)
    mask = token < vocabulary
    logit = tl.load(logits + row.to(tl.int64) * stride + token, mask=mask, other=float("-inf"))
    logit = logit.to(tl.float32)
    value = tl.where(logit == logit, logit, float("-inf"))
    best, argmax = tl.max(value, 0, return_indices=True)
    part_index = row * tl.num_programs(1) + part_number
    has_nan = tl.max((logit != logit).to(tl.int32), 0) > 0
    tl.store(highest + part_index, tl.where(has_nan, float("nan"), best))
    tl.store(highest_ids + part_index, part_number * part + argmax)
    maxima = tl.max(tl.reshape(value, [part // group, group]), 1)
    tl.store(group_maxima + part_index * (part // group) + tl.arange(0, part // group), maxima)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _perturbed_maxima(
    logits,
    slots,
    temperatures,
    seeds,
    lengths,
    highest,
    scores,
    score_ids,
    vocabulary,
    stride,
    seed_stride,
    parts,
    padded: tl.constexpr,
    part: tl.constexpr,
):
    row, part_number = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    temperature = tl.load(temperatures + slot)
    if temperature == 0:
        return
    column = tl.arange(0, padded)
    maxima = _load_logits(highest + row * parts + column, column < parts)
    top = tl.max(maxima, 0)
    token = part_number * part + tl.arange(0, part)
    mask = token < vocabulary
    value = _load_logits(logits + row.to(tl.int64) * stride + token, mask)
    low = tl.load(seeds + slot).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(seeds + seed_stride + slot).to(tl.uint32, bitcast=True).to(tl.uint64)
    noise = gumbel_of_part(low | (high << 32), tl.load(lengths + slot), part_number, part)
    score = tl.div_rn(value - top, temperature) + noise
    score = tl.where(mask & (score == score), score, float("-inf"))
    best, argmax = tl.max(score, 0, return_indices=True)
    part_index = row * parts + part_number
    tl.store(scores + part_index, best)
    tl.store(score_ids + part_index, part_number * part + argmax)


@triton.jit(do_not_specialize_on_alignment=["slots", "sampled_ids"])
def _pick_winners(
    slots,
    temperatures,
    highest,
    highest_ids,
    scores,
    score_ids,
    sampled_ids,
    last_tokens,
    frozen,
    vocabulary,
    parts,
    padded: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    column = tl.arange(0, padded)
    mask = column < parts
    offsets = row * parts + column
    maxima = tl.load(highest + offsets, mask=mask, other=float("-inf"))
    has_nan = tl.max((maxima != maxima).to(tl.int32), 0) > 0
    top = tl.max(tl.where(maxima == maxima, maxima, float("-inf")), 0)
    is_finite = ~has_nan & (top < float("inf")) & (top > float("-inf"))
    if tl.load(temperatures + slot) == 0:
        score = tl.where(maxima == maxima, maxima, float("-inf"))
        ids = tl.load(highest_ids + offsets, mask=mask, other=0)
    else:
        score = tl.load(scores + offsets, mask=mask, other=float("-inf"))
        ids = tl.load(score_ids + offsets, mask=mask, other=0)
    winner = tl.argmax(score, 0)
    token = tl.sum(tl.where(column == winner, ids, 0), 0)
    token = tl.minimum(tl.maximum(token, 0), vocabulary - 1)  # valid for any logits
    result = tl.where(is_finite, token, NO_TOKEN)
    tl.store(sampled_ids + row, tl.where(tl.load(frozen + slot) > 0, FROZEN, result))
    tl.store(last_tokens + slot, token)
