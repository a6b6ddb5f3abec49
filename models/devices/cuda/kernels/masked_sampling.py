"""Sampling under masks of allowed ids: kept logits are masked in one pass, then sampled as
usual."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanoactor.models import limits
from nanoactor.models.batch import RowChoice
from nanoactor.models.devices.cuda.kernels.sampling import sample_rows

NO_TOKEN = tl.constexpr(limits.NO_TOKEN)
NOTHING_ALLOWED = tl.constexpr(limits.NOTHING_ALLOWED)
_PART = 4096
"""Number of token ids per program."""


def sample_masked_rows(choice: RowChoice, masks: torch.Tensor) -> None:
    """Choose a token for each slot from its row of logits (slots, vocabulary) under its mask, int32
    (rows, words): bit t % 32 of word t // 32 is set if id t may be chosen.

    Ids are written to `chosen` and to the table of last tokens. `chosen` gets `limits.NO_TOKEN` if
    the highest logit is not finite, and `limits.NOTHING_ALLOWED` if only the highest allowed logit
    is not finite.
    """
    logits, slots, chosen = choice.logits, choice.slots, choice.chosen
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
    sample_rows(masked, slots, choice.tables, choice.scratch.partials, chosen)
    _mark_nothing_allowed[(rows,)](
        highest, chosen, parts, padded=triton.next_power_of_2(parts), num_warps=1
    )


@triton.jit
def _mask_rows(
    logits, slots, masks, masked, highest, vocabulary, stride, words, part: tl.constexpr
):  # fmt: skip
    row, number = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    token = number * part + tl.arange(0, part)
    there = token < vocabulary
    value = tl.load(logits + slot * stride + token, mask=there, other=float("-inf"))
    bits = tl.load(masks + row.to(tl.int64) * words + token // 32, mask=there, other=0)
    allowed = ((bits >> (token % 32)) & 1) != 0
    place = masked + row.to(tl.int64) * vocabulary + token
    tl.store(place, tl.where(allowed, value, float("-inf")), mask=there)
    wide = value.to(tl.float32)
    broken = tl.max((wide != wide).to(tl.int32), 0) > 0
    best = tl.max(tl.where(wide == wide, wide, float("-inf")), 0)
    best = tl.where(broken, float("nan"), best)
    tl.store(highest + row * tl.num_programs(1) + number, best)


@triton.jit
def _mark_nothing_allowed(highest, chosen, parts, padded: tl.constexpr):
    """Mark rows that have finite logits but got no token: their mask allows no id."""
    row = tl.program_id(0)
    column = tl.arange(0, padded)
    maxima = tl.load(highest + row * parts + column, mask=column < parts, other=float("-inf"))
    broken = tl.max((maxima != maxima).to(tl.int32), 0) > 0
    top = tl.max(tl.where(maxima == maxima, maxima, float("-inf")), 0)
    sound = (broken == 0) & (top < float("inf")) & (top > float("-inf"))
    token = tl.load(chosen + row)
    tl.store(chosen + row, tl.where(sound & (token == NO_TOKEN), NOTHING_ALLOWED, token))
