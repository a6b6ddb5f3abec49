"""Sampling with top-p and min-p from the whole vocabulary, without sorting it.

The tokens that are kept are those with the highest scores: if a token is removed, so are all tokens
with lower scores. If the winner of a draw from all tokens is kept, it is therefore also the winner
among the kept tokens. If it is not kept, it and all lower tokens are excluded, and the winner of
the rest is checked. With top-p, the first winner is kept with a probability of at least top-p, so
one check is usually enough. Each token has its own noise, so the result is the same as with
sorting.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanoactor.models.batch import SlotTables
from nanoactor.models.devices.cuda.kernels.philox import gumbel_of_part
from nanoactor.models.devices.cuda.kernels.truncated_sampling import sort_keys

_PART = 4096
"""Number of token ids that are read at a time."""


def sample_nucleus(
    logits: torch.Tensor,
    slots: torch.Tensor,
    tables: SlotTables,
    highest: torch.Tensor,
    sampled_ids: torch.Tensor,
) -> None:
    """Sample a token for each row of logits (rows, vocabulary) whose slot has a nonzero
    temperature, no top-k, and a top-p or a min-p. Other rows are unchanged.

    `highest`, float32 (rows, parts), is the maximum of each part of a row. `sampled_ids`, int32
    (rows,), are the ids sampled from all tokens; rows with a negative id are also unchanged. New
    ids are written to `sampled_ids` and to the table of last tokens.
    """
    rows, vocabulary = logits.shape
    parts = highest.shape[1]
    _sample_nucleus[(rows,)](
        logits,
        slots,
        tables.sampling.temperature,
        tables.sampling.top_k,
        tables.sampling.top_p,
        tables.sampling.min_p,
        tables.sampling.seed,
        tables.lengths,
        highest,
        sampled_ids,
        tables.last_tokens,
        vocabulary,
        logits.stride(0),
        tables.sampling.seed.stride(0),
        parts,
        padded=triton.next_power_of_2(parts),
        part=_PART,
        num_warps=16,
    )


@triton.jit
def _scores(logits, ids, vocabulary, top, temperature):
    """Return the scores of some token ids, (logit - top) / temperature. The score is minus infinity
    for NaN logits and for ids past the end of the vocabulary."""
    value = tl.load(logits + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
    score = tl.div_rn(value - top, temperature)
    return tl.where(score == score, score, float("-inf"))


@triton.jit(do_not_specialize_on_alignment=["slots", "sampled_ids"])
def _sample_nucleus(
    all_logits,
    slots,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    lengths,
    highest,
    sampled_ids,
    last_tokens,
    vocabulary,
    stride,
    seed_stride,
    parts,
    padded: tl.constexpr,
    part: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    temperature = tl.load(temperatures + slot)
    top_p = tl.load(top_ps + slot)
    min_p = tl.load(min_ps + slot)
    token = tl.load(sampled_ids + row)
    if (temperature == 0) | (tl.load(top_ks + slot) > 0) | (token < 0):
        return
    if (top_p >= 1.0) & (min_p <= 0.0):
        return
    logits = all_logits + row.to(tl.int64) * stride
    column = tl.arange(0, padded)
    maxima = tl.load(highest + row * parts + column, mask=column < parts, other=float("-inf"))
    top = tl.max(tl.where(maxima == maxima, maxima, float("-inf")), 0)
    low = tl.load(seeds + slot).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(seeds + seed_stride + slot).to(tl.uint32, bitcast=True).to(tl.uint64)
    position = tl.load(lengths + slot)
    # A top-p of 1 excludes nothing, however the sum is rounded.
    limit = tl.where(top_p < 1.0, top_p, 2.0)
    searching = 1
    while searching > 0:
        token_vector = token + tl.zeros([1], tl.int32)
        score = tl.max(_scores(logits, token_vector, vocabulary, top, temperature), 0)
        key = tl.max(sort_keys(score + tl.zeros([1], tl.float32), token_vector), 0)
        mass = tl.zeros([part], tl.float32)
        mass_above = tl.zeros([part], tl.float32)
        for part_number in range(parts):
            ids = part_number * part + tl.arange(0, part)
            scores = _scores(logits, ids, vocabulary, top, temperature)
            weights = tl.exp(scores)
            mass += weights
            mass_above += tl.where(sort_keys(scores, ids) > key, weights, 0.0)
        mass_before = tl.sum(mass_above, 0)
        is_kept = (mass_before < limit * tl.sum(mass, 0)) & (tl.exp(score) >= min_p)
        searching = tl.where(is_kept | (mass_before == 0.0), 0, 1)
        if searching > 0:
            best = tl.full([], float("-inf"), tl.float32)
            for part_number in range(parts):
                ids = part_number * part + tl.arange(0, part)
                scores = _scores(logits, ids, vocabulary, top, temperature)
                noise = gumbel_of_part(low | (high << 32), position, part_number, part)
                perturbed = tl.where(sort_keys(scores, ids) > key, scores + noise, float("-inf"))
                part_best, argmax = tl.max(perturbed, 0, return_indices=True)
                token = tl.where(part_best > best, part_number * part + argmax, token)
                best = tl.maximum(best, part_best)
    tl.store(sampled_ids + row, token)
    tl.store(last_tokens + slot, token)
