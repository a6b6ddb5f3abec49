"""Sampling from the best k tokens (with top-p and min-p) without reading most of the others again.

The vocabulary is divided into groups of 256 ids, and `sampling.py` stores their maxima. The k-th
highest of these maxima is a bound: at least k logits reach it, so no logit below it is among the
best k. Therefore only groups whose maximum reaches the bound are read again, about k of several
hundred, and only logits that reach it are sorted, little more than k.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanoactor.models.batch import SlotTables
from nanoactor.models.devices.cuda.kernels.philox import gumbel_at
from nanoactor.models.limits import CANDIDATES

GROUP = 256
"""Number of ids in a group."""
_AT_ONCE = 16
"""Number of groups that are read at once."""
_ROOM = 2 * CANDIDATES
"""Maximum number of logits that are sorted. If more reach the bound because of ties, a higher bound
is searched for."""


def room(groups: int) -> int:
    """Return the size of a row's scratch memory in int64 words, for the groups that reach the bound
    and for the best keys."""
    return triton.cdiv(groups, _AT_ONCE) * _AT_ONCE + _ROOM


def sample_truncated(
    logits: torch.Tensor,
    slots: torch.Tensor,
    tables: SlotTables,
    maxima: torch.Tensor,
    scratch: torch.Tensor,
    chosen: torch.Tensor,
) -> None:
    """Choose a token for each row of logits (rows, vocabulary) whose slot has a temperature and a
    top-k of at most `limits.CANDIDATES`. Other rows are unchanged.

    `maxima`, float32 (rows, groups), holds the maximum of each group of 256 ids; `scratch` is int64
    (rows, `room`). Ids are written to `chosen`, int32 (rows,), unless it holds a negative id, and
    to the table of last tokens.
    """
    rows, vocabulary = logits.shape
    groups = maxima.shape[1]
    _sample_truncated[(rows,)](
        logits,
        slots,
        tables.sampling.temperature,
        tables.sampling.top_k,
        tables.sampling.top_p,
        tables.sampling.min_p,
        tables.sampling.seed,
        tables.lengths,
        maxima,
        scratch,
        chosen,
        tables.last_tokens,
        vocabulary,
        groups,
        logits.stride(0),
        tables.sampling.seed.stride(0),
        scratch.stride(0),
        padded=max(16, triton.next_power_of_2(groups)),
        group=GROUP,
        at_once=_AT_ONCE,
        space=_ROOM,
        most=CANDIDATES,
        num_warps=8,
    )


@triton.jit
def sort_keys(scores, ids):
    """Return int64 keys that sort as the scores do. Of equal scores, the lower id has the higher
    key."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def _keys_of(
    logits, listed, first, count, top, temperature, bound, vocabulary, group: tl.constexpr,
    at_once: tl.constexpr,
):  # fmt: skip
    """Return the keys of some listed groups, flattened, and a mask of those whose logits reach the
    bound."""
    index = first + tl.arange(0, at_once)
    number = tl.load(listed + index, mask=index < count, other=0)
    ids = number[:, None] * group + tl.arange(0, group)[None, :]
    there = (index < count)[:, None] & (ids < vocabulary)
    value = tl.load(logits + ids, mask=there, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("-inf"))
    keys = sort_keys(tl.div_rn(value - top, temperature), ids)
    return tl.reshape(keys, [at_once * group]), tl.reshape(
        there & (value >= bound), [at_once * group]
    )


@triton.jit
def _sample_truncated(
    all_logits,
    slots,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    lengths,
    all_maxima,
    all_scratch,
    chosen,
    last_tokens,
    vocabulary,
    groups,
    stride,
    seed_stride,
    scratch_stride,
    padded: tl.constexpr,
    group: tl.constexpr,
    at_once: tl.constexpr,
    space: tl.constexpr,
    most: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    temperature = tl.load(temperatures + slot)
    top_k = tl.load(top_ks + slot)
    if (temperature == 0) | (top_k <= 0) | (top_k > most):
        return
    logits = all_logits + row.to(tl.int64) * stride
    listed = all_scratch + row.to(tl.int64) * scratch_stride
    best_keys = listed + tl.cdiv(groups, at_once) * at_once
    column = tl.arange(0, padded)
    maxima = tl.load(all_maxima + row * groups + column, mask=column < groups, other=float("-inf"))
    top = tl.max(maxima, 0)
    highest = tl.sort(maxima, descending=True)
    bound = tl.max(tl.where(column == top_k - 1, highest, float("-inf")), 0)
    reaching = (maxima >= bound) & (column < groups)
    place = tl.cumsum(reaching.to(tl.int32), 0) - 1
    tl.store(listed + place, column.to(tl.int64), mask=reaching)
    count = tl.sum(reaching.to(tl.int32), 0)
    tl.debug_barrier()

    total = 0
    for first in range(0, count, at_once):
        keys, reach = _keys_of(
            logits, listed, first, count, top, temperature, bound, vocabulary, group, at_once
        )
        total += tl.sum(reach.to(tl.int32), 0)
    # The lowest key that is kept: all that reach the bound are kept, or exactly the best k.
    lowest = tl.full([], -0x7FFFFFFFFFFFFFFF, tl.int64)
    if total > space:
        upper = sort_keys(tl.zeros([1], tl.float32), tl.zeros([1], tl.int32))
        above = tl.max(upper, 0) + 1
        while lowest + 1 < above:
            # Halved before the addition, so that the sum does not overflow.
            middle = (lowest >> 1) + (above >> 1) + (lowest & above & 1)
            enough = 0
            for first in range(0, count, at_once):
                keys, reach = _keys_of(
                    logits, listed, first, count, top, temperature, bound, vocabulary, group,
                    at_once,
                )  # fmt: skip
                enough += tl.sum((reach & (keys >= middle)).to(tl.int32), 0)
            lowest = tl.where(enough >= top_k, middle, lowest)
            above = tl.where(enough >= top_k, above, middle)
    kept = 0
    for first in range(0, count, at_once):
        keys, reach = _keys_of(
            logits, listed, first, count, top, temperature, bound, vocabulary, group, at_once
        )
        stay = reach & (keys >= lowest)
        to = kept + tl.cumsum(stay.to(tl.int32), 0) - 1
        tl.store(best_keys + to, keys, mask=stay & (to < space))
        kept += tl.sum(stay.to(tl.int32), 0)
    tl.debug_barrier()

    order = tl.arange(0, space)
    least = -0x7FFFFFFFFFFFFFFF
    keys = tl.load(best_keys + order, mask=order < kept, other=least)
    keys = tl.sort(keys, descending=True)
    stay = (order < tl.minimum(top_k, kept)) & (order < vocabulary)
    bits = (keys >> 32).to(tl.int32)
    score = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
    score = tl.where(stay, score, float("-inf"))
    ids = 0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32)
    share = tl.exp(score)  # the highest score is 0
    share = share / tl.sum(share, 0)
    before = tl.cumsum(share, 0) - share
    top_p = tl.load(top_ps + slot)
    # A top-p of 1 excludes nothing, however the sum is rounded.
    stay = stay & (before < tl.where(top_p < 1.0, top_p, 2.0))
    stay = stay & (share >= tl.load(min_ps + slot) * tl.max(share, 0))
    stay = stay | (order == 0)
    low = tl.load(seeds + slot).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(seeds + seed_stride + slot).to(tl.uint32, bitcast=True).to(tl.uint64)
    noise = gumbel_at(low | (high << 32), tl.load(lengths + slot), ids)
    winner = tl.argmax(tl.where(stay, score + noise, float("-inf")), 0)
    token = tl.sum(tl.where(order == winner, ids, 0), 0)
    token = tl.minimum(tl.maximum(token, 0), vocabulary - 1)  # valid for any logits
    # A row with non-finite logits keeps its negative id.
    tl.store(chosen + row, tl.where(tl.load(chosen + row) < 0, tl.load(chosen + row), token))
    tl.store(last_tokens + slot, token)
