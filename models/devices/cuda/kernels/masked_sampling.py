"""Sampling of token ids under masks of allowed ids. Stored logits are masked in one pass and then
sampled like any others."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanoactor.models import limits
from nanoactor.models.batch import FusedSamplingInputs
from nanoactor.models.devices.cuda.kernels.sampling import sample_rows

NO_TOKEN = tl.constexpr(limits.NO_TOKEN)
NOTHING_ALLOWED = tl.constexpr(limits.NOTHING_ALLOWED)
_PART = 4096
"""Number of token ids that one program masks."""


def sample_masked_rows(inputs: FusedSamplingInputs, masks: torch.Tensor) -> None:
    """Sample a token for each row from its slot's logits, (slots, vocabulary), among the ids that
    its mask allows.

    `masks` is int32 (rows, words): bit t % 32 of word t // 32 is set if id t may be chosen. Ids are
    written to `sampled_ids` and to the table of last tokens. `sampled_ids` is set to
    `limits.NO_TOKEN` if the row's highest logit is not finite, and to `limits.NOTHING_ALLOWED` if
    that logit is finite but no allowed one is.
    """
    logits, slots, sampled_ids = inputs.logits, inputs.slots, inputs.sampled_ids
    rows, vocabulary = len(slots), logits.shape[1]
    parts = triton.cdiv(vocabulary, _PART)
    masked = torch.empty(rows, vocabulary, dtype=logits.dtype, device=logits.device)
    highest = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    _mask_rows[(rows, parts)](
        logits,
        slots,
        masks,
        masked,
        highest,
        vocabulary,
        logits.stride(0),
        masks.stride(0),
        part=_PART,
        num_warps=8,
    )
    sample_rows(masked, slots, inputs.tables, inputs.scratch.partials, sampled_ids)
    _mark_nothing_allowed[(rows,)](
        highest, sampled_ids, parts, padded=triton.next_power_of_2(parts), num_warps=1
    )


@triton.jit(do_not_specialize_on_alignment=["slots", "masks"])
def _mask_rows(
    logits, slots, masks, masked, highest, vocabulary, stride, words, part: tl.constexpr
):  # fmt: skip
    row, part_number = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    token = part_number * part + tl.arange(0, part)
    mask = token < vocabulary
    value = tl.load(logits + slot * stride + token, mask=mask, other=float("-inf"))
    bits = tl.load(masks + row.to(tl.int64) * words + token // 32, mask=mask, other=0)
    allowed = ((bits >> (token % 32)) & 1) != 0
    masked_pointers = masked + row.to(tl.int64) * vocabulary + token
    tl.store(masked_pointers, tl.where(allowed, value, float("-inf")), mask=mask)
    value32 = value.to(tl.float32)
    has_nan = tl.max((value32 != value32).to(tl.int32), 0) > 0
    best = tl.max(tl.where(value32 == value32, value32, float("-inf")), 0)
    best = tl.where(has_nan, float("nan"), best)
    tl.store(highest + row * tl.num_programs(1) + part_number, best)


@triton.jit(do_not_specialize_on_alignment=["sampled_ids"])
def _mark_nothing_allowed(highest, sampled_ids, parts, padded: tl.constexpr):
    """Set a row's result to `NOTHING_ALLOWED` if its highest logit is finite but no token was
    sampled, because the mask allows none."""
    row = tl.program_id(0)
    column = tl.arange(0, padded)
    maxima = tl.load(highest + row * parts + column, mask=column < parts, other=float("-inf"))
    has_nan = tl.max((maxima != maxima).to(tl.int32), 0) > 0
    top = tl.max(tl.where(maxima == maxima, maxima, float("-inf")), 0)
    is_finite = (has_nan == 0) & (top < float("inf")) & (top > float("-inf"))
    token = tl.load(sampled_ids + row)
    tl.store(sampled_ids + row, tl.where(is_finite & (token == NO_TOKEN), NOTHING_ALLOWED, token))
