"""Sampling in several passes: maxima of groups, perturbed maxima, the winner; then rows with a
top-k, and rows with only a top-p or a min-p.

The numbers are the same as in `models/sampling/sampler.py`: the same Philox words, the same scores,
ties to the lower id. Rows with a top-k above `limits.CANDIDATES` or with masked logits are sampled
there.
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
from nanoactor.models.devices.cuda.kernels.truncated_sampling import GROUP, room, sample_truncated

NO_TOKEN = tl.constexpr(limits.NO_TOKEN)
FROZEN = tl.constexpr(limits.FROZEN)
_PART = 4096
"""Number of token ids per program."""


@dataclasses.dataclass(frozen=True, slots=True)
class Partials:
    """Intermediate results for each part of the vocabulary."""

    highest: torch.Tensor
    """Highest logit of each part, float32 (rows, parts)."""
    highest_ids: torch.Tensor
    """Id of each logit in `highest`, int32 (rows, parts)."""
    scores: torch.Tensor
    """Highest perturbed score of each part, float32 (rows, parts)."""
    score_ids: torch.Tensor
    """Id of each score in `scores`, int32 (rows, parts)."""
    group_maxima: torch.Tensor
    """Highest logit of each group of 256 ids, float32 (rows, groups)."""
    truncating: torch.Tensor
    """Workspace of `truncated_sampling`, int64 (rows, room)."""

    @classmethod
    def empty(cls, rows: int, vocabulary: int, device: torch.device) -> Partials:
        """Allocate memory for `rows` rows."""
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
            torch.empty(rows, room(groups), dtype=torch.int64, device=device),
        )


def sample_rows(
    logits: torch.Tensor,
    slots: torch.Tensor,
    tables: SlotTables,
    partials: Partials,
    chosen: torch.Tensor,
) -> None:
    """Choose a token for each row of logits (rows, vocabulary); `slots`, int32 (rows,), holds the
    slot of each row.

    Ids are written to `chosen`, int32 (rows,), and to the table of last tokens. `chosen` gets
    `limits.NO_TOKEN` if the highest logit is not finite, and `limits.FROZEN` if the slot is frozen.
    `tables.lengths` are the positions that the sampled tokens will have.
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
    _winners[(rows,)](
        slots,
        tables.sampling.temperature,
        partials.highest,
        partials.highest_ids,
        partials.scores,
        partials.score_ids,
        chosen,
        tables.last_tokens,
        tables.frozen,
        vocabulary,
        parts,
        padded=padded,
        num_warps=1,
    )
    sample_truncated(logits, slots, tables, partials.group_maxima, partials.truncating, chosen)
    sample_nucleus(logits, slots, tables, partials.highest, chosen)


@triton.jit
def _finite_or_low(at, there):
    """Load logits in float32. NaN becomes minus infinity, so that it is never chosen."""
    value = tl.load(at, mask=there, other=float("-inf")).to(tl.float32)
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
    row, number = tl.program_id(0), tl.program_id(1)
    token = number * part + tl.arange(0, part)
    there = token < vocabulary
    given = tl.load(logits + row.to(tl.int64) * stride + token, mask=there, other=float("-inf"))
    given = given.to(tl.float32)
    value = tl.where(given == given, given, float("-inf"))
    best, at = tl.max(value, 0, return_indices=True)
    place = row * tl.num_programs(1) + number
    broken = tl.max((given != given).to(tl.int32), 0) > 0
    tl.store(highest + place, tl.where(broken, float("nan"), best))
    tl.store(highest_ids + place, number * part + at)
    maxima = tl.max(tl.reshape(value, [part // group, group]), 1)
    tl.store(group_maxima + place * (part // group) + tl.arange(0, part // group), maxima)


@triton.jit
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
    row, number = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    temperature = tl.load(temperatures + slot)
    if temperature == 0:
        return
    column = tl.arange(0, padded)
    maxima = _finite_or_low(highest + row * parts + column, column < parts)
    top = tl.max(maxima, 0)
    token = number * part + tl.arange(0, part)
    there = token < vocabulary
    value = _finite_or_low(logits + row.to(tl.int64) * stride + token, there)
    low = tl.load(seeds + slot).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(seeds + seed_stride + slot).to(tl.uint32, bitcast=True).to(tl.uint64)
    noise = gumbel_of_part(low | (high << 32), tl.load(lengths + slot), number, part)
    score = tl.div_rn(value - top, temperature) + noise
    score = tl.where(there & (score == score), score, float("-inf"))
    best, at = tl.max(score, 0, return_indices=True)
    place = row * parts + number
    tl.store(scores + place, best)
    tl.store(score_ids + place, number * part + at)


@triton.jit
def _winners(
    slots,
    temperatures,
    highest,
    highest_ids,
    scores,
    score_ids,
    chosen,
    last_tokens,
    frozen,
    vocabulary,
    parts,
    padded: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    column = tl.arange(0, padded)
    there = column < parts
    at = row * parts + column
    maxima = tl.load(highest + at, mask=there, other=float("-inf"))
    nan = tl.max((maxima != maxima).to(tl.int32), 0) > 0
    top = tl.max(tl.where(maxima == maxima, maxima, float("-inf")), 0)
    finite = ~nan & (top < float("inf")) & (top > float("-inf"))
    if tl.load(temperatures + slot) == 0:
        score = tl.where(maxima == maxima, maxima, float("-inf"))
        ids = tl.load(highest_ids + at, mask=there, other=0)
    else:
        score = tl.load(scores + at, mask=there, other=float("-inf"))
        ids = tl.load(score_ids + at, mask=there, other=0)
    winner = tl.argmax(score, 0)
    token = tl.sum(tl.where(column == winner, ids, 0), 0)
    token = tl.minimum(tl.maximum(token, 0), vocabulary - 1)  # valid for any logits
    told = tl.where(finite, token, NO_TOKEN)
    tl.store(chosen + row, tl.where(tl.load(frozen + slot) > 0, FROZEN, told))
    tl.store(last_tokens + slot, token)
