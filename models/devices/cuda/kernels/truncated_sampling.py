"""Sampling from the k most likely tokens, with top-p and min-p, without reading most of the other
logits again.

The vocabulary is divided into groups of 256 ids, whose maxima `sampling.py` has stored. The k-th
highest of these maxima is a bound: at least k logits reach it, so no logit below it is among the
best k. Only groups whose maximum reaches the bound are read again, about k of several hundred. Only
logits that reach the bound are sorted. There are only a few more than k of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanoactor.models.batch import SlotTables
from nanoactor.models.devices.cuda.kernels.philox import gumbel_at
from nanoactor.models.limits import CANDIDATES

GROUP = 256
"""Number of token ids in a group."""
_GROUPS_PER_ITERATION = 16
"""Number of groups that are read at a time."""
_MAX_SORTED_KEYS = 2 * CANDIDATES
"""Maximum number of logits that are sorted. If more logits reach the bound because of ties, a
higher bound is determined."""


def scratch_words(groups: int) -> int:
    """Return the size, in int64 words, of the workspace for one row: a list of groups with a
    maximum that reaches the bound, and the sort keys of the best logits."""
    return triton.cdiv(groups, _GROUPS_PER_ITERATION) * _GROUPS_PER_ITERATION + _MAX_SORTED_KEYS


def sample_truncated(
    logits: torch.Tensor,
    slots: torch.Tensor,
    tables: SlotTables,
    maxima: torch.Tensor,
    scratch: torch.Tensor,
    sampled_ids: torch.Tensor,
) -> None:
    """Sample a token for each row of logits (rows, vocabulary) whose slot has a nonzero temperature
    and a top-k of at most `limits.CANDIDATES`. Other rows are unchanged.

    `maxima`, float32 (rows, groups), is the maximum of each group of 256 ids. `scratch` is int64
    (rows, `scratch_words`). Ids are written to the table of last tokens and to `sampled_ids`, int32
    (rows,), where negative ids are kept.
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
        sampled_ids,
        tables.last_tokens,
        vocabulary,
        groups,
        logits.stride(0),
        tables.sampling.seed.stride(0),
        scratch.stride(0),
        padded=max(16, triton.next_power_of_2(groups)),
        group=GROUP,
        groups_per_iteration=_GROUPS_PER_ITERATION,
        max_sorted_keys=_MAX_SORTED_KEYS,
        max_top_k=CANDIDATES,
        num_warps=8,
    )


@triton.jit
def sort_keys(scores, ids):
    """Return int64 keys that have the same order as the scores. Of equal scores, the lower id has
    the higher key."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def _load_keys(
    logits, group_list, first, count, top, temperature, bound, vocabulary, group: tl.constexpr,
    groups_per_iteration: tl.constexpr,
):  # fmt: skip
    """Return the sort keys of all ids in `groups_per_iteration` of the listed groups, from entry
    `first` on, and a mask of the ids with logits that reach the bound."""
    index = first + tl.arange(0, groups_per_iteration)
    group_index = tl.load(group_list + index, mask=index < count, other=0)
    ids = group_index[:, None] * group + tl.arange(0, group)[None, :]
    mask = (index < count)[:, None] & (ids < vocabulary)
    value = tl.load(logits + ids, mask=mask, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("-inf"))
    keys = sort_keys(tl.div_rn(value - top, temperature), ids)
    return tl.reshape(keys, [groups_per_iteration * group]), tl.reshape(
        mask & (value >= bound), [groups_per_iteration * group]
    )


@triton.jit(do_not_specialize_on_alignment=["slots", "sampled_ids"])
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
    sampled_ids,
    last_tokens,
    vocabulary,
    groups,
    stride,
    seed_stride,
    scratch_stride,
    padded: tl.constexpr,
    group: tl.constexpr,
    groups_per_iteration: tl.constexpr,
    max_sorted_keys: tl.constexpr,
    max_top_k: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    temperature = tl.load(temperatures + slot)
    top_k = tl.load(top_ks + slot)
    if (temperature == 0) | (top_k <= 0) | (top_k > max_top_k):
        return
    logits = all_logits + row.to(tl.int64) * stride
    group_list = all_scratch + row.to(tl.int64) * scratch_stride
    best_keys = group_list + tl.cdiv(groups, groups_per_iteration) * groups_per_iteration
    column = tl.arange(0, padded)
    maxima = tl.load(all_maxima + row * groups + column, mask=column < groups, other=float("-inf"))
    top = tl.max(maxima, 0)
    highest = tl.sort(maxima, descending=True)
    bound = tl.max(tl.where(column == top_k - 1, highest, float("-inf")), 0)
    reaches_bound = (maxima >= bound) & (column < groups)
    list_index = tl.cumsum(reaches_bound.to(tl.int32), 0) - 1
    tl.store(group_list + list_index, column.to(tl.int64), mask=reaches_bound)
    count = tl.sum(reaches_bound.to(tl.int32), 0)
    tl.debug_barrier()

    total = 0
    for first in range(0, count, groups_per_iteration):
        keys, is_candidate = _load_keys(
            logits,
            group_list,
            first,
            count,
            top,
            temperature,
            bound,
            vocabulary,
            group,
            groups_per_iteration,
        )
        total += tl.sum(is_candidate.to(tl.int32), 0)
    # The lowest key that is kept: all that reach the bound are kept, or exactly the best k.
    lower_key = tl.full([], -0x7FFFFFFFFFFFFFFF, tl.int64)
    if total > max_sorted_keys:
        zero_key = sort_keys(tl.zeros([1], tl.float32), tl.zeros([1], tl.int32))
        upper_key = tl.max(zero_key, 0) + 1
        while lower_key + 1 < upper_key:
            # Halved before the addition, so that the sum does not overflow.
            middle_key = (lower_key >> 1) + (upper_key >> 1) + (lower_key & upper_key & 1)
            num_above = 0
            for first in range(0, count, groups_per_iteration):
                keys, is_candidate = _load_keys(
                    logits, group_list, first, count, top, temperature, bound, vocabulary, group,
                    groups_per_iteration,
                )  # fmt: skip
                num_above += tl.sum((is_candidate & (keys >= middle_key)).to(tl.int32), 0)
            lower_key = tl.where(num_above >= top_k, middle_key, lower_key)
            upper_key = tl.where(num_above >= top_k, upper_key, middle_key)
    num_kept = 0
    for first in range(0, count, groups_per_iteration):
        keys, is_candidate = _load_keys(
            logits,
            group_list,
            first,
            count,
            top,
            temperature,
            bound,
            vocabulary,
            group,
            groups_per_iteration,
        )
        keep = is_candidate & (keys >= lower_key)
        key_index = num_kept + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(best_keys + key_index, keys, mask=keep & (key_index < max_sorted_keys))
        num_kept += tl.sum(keep.to(tl.int32), 0)
    tl.debug_barrier()

    rank = tl.arange(0, max_sorted_keys)
    min_key = -0x7FFFFFFFFFFFFFFF
    keys = tl.load(best_keys + rank, mask=rank < num_kept, other=min_key)
    keys = tl.sort(keys, descending=True)
    keep = (rank < tl.minimum(top_k, num_kept)) & (rank < vocabulary)
    bits = (keys >> 32).to(tl.int32)
    score = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
    score = tl.where(keep, score, float("-inf"))
    ids = 0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32)
    probability = tl.exp(score)  # the highest score is 0
    probability = probability / tl.sum(probability, 0)
    cumulative = tl.cumsum(probability, 0) - probability
    top_p = tl.load(top_ps + slot)
    # A top-p of 1 excludes nothing, however the sum is rounded.
    keep = keep & (cumulative < tl.where(top_p < 1.0, top_p, 2.0))
    keep = keep & (probability >= tl.load(min_ps + slot) * tl.max(probability, 0))
    keep = keep | (rank == 0)
    low = tl.load(seeds + slot).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(seeds + seed_stride + slot).to(tl.uint32, bitcast=True).to(tl.uint64)
    noise = gumbel_at(low | (high << 32), tl.load(lengths + slot), ids)
    winner = tl.argmax(tl.where(keep, score + noise, float("-inf")), 0)
    token = tl.sum(tl.where(rank == winner, ids, 0), 0)
    token = tl.minimum(tl.maximum(token, 0), vocabulary - 1)  # valid for any logits
    # A row with non-finite logits keeps its negative id.
    tl.store(
        sampled_ids + row,
        tl.where(tl.load(sampled_ids + row) < 0, tl.load(sampled_ids + row), token),
    )
    tl.store(last_tokens + slot, token)
