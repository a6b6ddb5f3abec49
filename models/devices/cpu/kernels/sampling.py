"""Kernel that samples token ids, one row at a time. It chooses the same ids as
`nanoactor.models.sampling.sampler`."""

from __future__ import annotations

import math

import numpy as np
from numba import prange

from nanoactor.models.batch import FusedSamplingInputs
from nanoactor.models.devices.cpu.kernels.elements import (
    FLOAT32,
    INT32,
    LOGITS,
    bits_of,
    exp,
    float_of,
    has_supported_dtype,
    inlined,
    launch,
    like_of,
    serial_and_parallel,
    view,
    widen,
)
from nanoactor.models.limits import FROZEN, NO_TOKEN

_INFINITY = np.uint32(0x7F800000)
_INT32_MIN = np.int32(-(1 << 31))
_ID_MASK = 0xFFFFFFFF


@inlined
def _to_ordered_int(value):
    """Map a float32 to an int32 so that the order is preserved. The compiler vectorizes maxima of
    integers, but not maxima of floats."""
    bits = np.int32(bits_of(value))
    return bits ^ (np.int32(0x7FFFFFFF) if bits < 0 else np.int32(0))


@inlined
def _from_ordered_int(ordered):
    return float_of(np.uint32(ordered ^ (np.int32(0x7FFFFFFF) if ordered < 0 else np.int32(0))))


@inlined
def _argmax(values):
    """Return the first index of the highest value. The result is meaningless if any value is
    NaN."""
    highest = _INT32_MIN
    for i in range(len(values)):
        highest = max(highest, _to_ordered_int(values[i]))
    top = _from_ordered_int(highest)
    for i in range(len(values)):
        if values[i] == top:
            return i
    return 0


@inlined
def _has_finite_maximum(row, best):
    """Return True if the logit at index `best`, the highest, is finite and no logit of the row is
    NaN."""
    largest = np.uint32(0)
    for i in range(len(row)):
        largest = max(largest, bits_of(row[i]) & np.uint32(0x7FFFFFFF))
    return largest <= _INFINITY and bits_of(row[best]) & np.uint32(0x7FFFFFFF) < _INFINITY


@inlined
def _philox_round(c0, c1, c2, c3, k0, k1):
    first, second = np.uint64(0xD2511F53) * np.uint64(c0), np.uint64(0xCD9E8D57) * np.uint64(c2)
    return (
        np.uint32(second >> np.uint64(32)) ^ c1 ^ k0,
        np.uint32(second),
        np.uint32(first >> np.uint64(32)) ^ c3 ^ k1,
        np.uint32(first),
    )


@inlined
def _philox(counter, position, low, high):
    """Return four random words from Philox 4x32-10, one for each token id from 4 * counter to
    4 * counter + 3. `low` and `high` are the two words of the seed."""
    c0, c1, c2, c3 = np.uint32(counter), np.uint32(position), np.uint32(0), np.uint32(0)
    k0, k1 = np.uint32(low), np.uint32(high)
    for _ in range(10):
        c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, k0, k1)
        k0 = np.uint32(k0 + np.uint32(0x9E3779B9))
        k1 = np.uint32(k1 + np.uint32(0xBB67AE85))
    return c0, c1, c2, c3


@inlined
def _gumbel(word):
    """Return standard Gumbel noise computed from a 32-bit word. The high 23 bits become a uniform
    number strictly between 0 and 1."""
    uniform = (np.float32(word >> np.uint32(9)) + np.float32(0.5)) * np.float32(2.0**-23)
    return -np.float32(math.log(-np.float32(math.log(uniform))))


@inlined
def _gumbel_at(token, position, low, high):
    """Return the Gumbel noise of one token id."""
    words = _philox(token >> 2, position, low, high)
    lane = token & 3
    word = words[0]
    if lane == 1:
        word = words[1]
    elif lane == 2:
        word = words[2]
    elif lane == 3:
        word = words[3]
    return _gumbel(word)


@inlined
def _sample_all(scores, position, low, high):
    """Return a token id sampled from the whole vocabulary. The scores are overwritten."""
    count = len(scores)
    for group in range((count + 3) // 4):
        first, second, third, fourth = _philox(group, position, low, high)
        token = group * 4
        scores[token] += _gumbel(first)
        if token + 1 < count:
            scores[token + 1] += _gumbel(second)
        if token + 2 < count:
            scores[token + 2] += _gumbel(third)
        if token + 3 < count:
            scores[token + 3] += _gumbel(fourth)
    return _argmax(scores)


@inlined
def _sorted_candidates(scores, min_count, min_mass):
    """Return sort keys of the most likely tokens, int64, in descending order.

    The high half of a key is the score, as returned by `_to_ordered_int`, and the low half is the
    complement of the token id. The result contains enough tokens to reach `min_count` or to exceed
    a total mass (sum of e^score) of `min_mass`, whichever comes first; all tokens if neither is
    reached. It may contain more.
    """
    bound = np.float32(-4)
    while True:
        count, mass = 0, 0.0
        for i in range(len(scores)):
            if scores[i] >= bound:
                count += 1
                mass += exp(scores[i])
        if count >= min_count or mass > min_mass or bound < np.float32(-1e30):
            break
        bound = bound * np.float32(4) if bound > np.float32(-100) else np.float32(-np.inf)
    keys = np.empty(count, np.int64)
    count = 0
    for i in range(len(scores)):
        if scores[i] >= bound:
            # Equal scores are sorted by ascending id, so -0.0 is replaced by 0.0.
            positive = scores[i] if scores[i] != 0 else np.float32(0)
            keys[count] = -((np.int64(_to_ordered_int(positive)) << 32) | (_ID_MASK - i))
            count += 1
    keys.sort()
    return -keys


@inlined
def _sample_truncated(scores, top_k, top_p, min_p, position, low, high):
    """Return a token id sampled from the tokens that remain after top-k, top-p and min-p, in this
    order."""
    limit = min(top_k, len(scores)) if top_k > 0 else len(scores)
    total = 0.0
    for i in range(len(scores)):
        total += exp(scores[i])
    mass = math.inf
    if top_k <= 0:  # tokens beyond top-p of the whole vocabulary cannot be chosen
        mass = total * top_p if top_p < 1 else math.inf
    keys = _sorted_candidates(scores, limit, mass)
    limit = min(limit, len(keys))
    if top_k > 0:
        total = 0.0
        for i in range(limit):
            total += exp(_from_ordered_int(np.int32(keys[i] >> 32)))
    best_score, chosen, cumulative = np.float32(-np.inf), 0, np.float32(0)
    max_probability = np.float32(1.0 / total)
    for i in range(limit):
        score, token = _from_ordered_int(np.int32(keys[i] >> 32)), _ID_MASK - (keys[i] & _ID_MASK)
        probability = np.float32(exp(score) / total)
        is_kept = (cumulative < top_p or top_p >= 1) and probability >= min_p * max_probability
        cumulative += probability
        if i == 0 or is_kept:
            perturbed = score + _gumbel_at(token, position, low, high)
            if i == 0 or perturbed > best_score:
                best_score, chosen = perturbed, token
    return chosen


@inlined
def _sample_row(logits, row, temperature, top_k, top_p, min_p, low, high, position):
    """Return the token id sampled from one row of logits, or `NO_TOKEN` if its highest logit is not
    finite."""
    scores = np.empty(logits.shape[1], np.float32)
    for i in range(len(scores)):
        scores[i] = widen(logits[row, i])
    best = _argmax(scores)
    if not _has_finite_maximum(scores, best):
        return NO_TOKEN
    if temperature <= 0:
        return best
    top = scores[best]
    for i in range(len(scores)):
        scores[i] = (scores[i] - top) / temperature
    if top_k <= 0 and top_p >= 1 and min_p <= 0:
        return _sample_all(scores, position, low, high)
    return _sample_truncated(scores, top_k, top_p, min_p, position, low, high)


@serial_and_parallel("aaaaaaaaaaannn", purpose=LOGITS)
def _sample_rows(
    logits, slots, temperatures, top_ks, top_ps, min_ps, seeds, lengths, last_tokens, frozen_slots,
    sampled_ids, rows, vocabulary, columns, like
):  # fmt: skip
    """Sample an id for each row of logits (rows, vocabulary), with the parameters of the row's
    slot.

    Parameters are indexed by slot, (columns,); `seeds` is (2, columns), low words before high
    words. Ids are written to `sampled_ids`, int32 (rows,), and to `last_tokens`. `sampled_ids` is
    set to `NO_TOKEN` if the highest logit is not finite, and to `FROZEN` if the slot is frozen
    (stopped by one of its `freeze_ids`). `lengths` are the positions of the sampled tokens.
    """
    logit_rows, slots_by_row = view(logits, (rows, vocabulary), like), view(slots, (rows,), INT32)
    temperature, top_p = view(temperatures, (columns,), FLOAT32), view(top_ps, (columns,), FLOAT32)
    top_k, min_p = view(top_ks, (columns,), INT32), view(min_ps, (columns,), FLOAT32)
    seed, positions = view(seeds, (2, columns), INT32), view(lengths, (columns,), INT32)
    ids, newest_tokens = view(sampled_ids, (rows,), INT32), view(last_tokens, (columns,), INT32)
    frozen = view(frozen_slots, (columns,), INT32)
    for row in prange(rows):
        slot = slots_by_row[row]
        if frozen[slot]:
            ids[row] = FROZEN
        else:
            ids[row] = _sample_row(
                logit_rows, row, temperature[slot], top_k[slot], top_p[slot], min_p[slot],
                seed[0, slot], seed[1, slot], positions[slot],
            )  # fmt: skip
            newest_tokens[slot] = max(ids[row], 0)


def sample_rows(inputs: FusedSamplingInputs, threads: int) -> None:
    """Sample a token for each row of logits, as specified by `BatchOperators.sample_rows`."""
    logits, tables = inputs.logits, inputs.tables
    if not has_supported_dtype(logits):
        logits = logits.float()
    logits, (rows, vocabulary), params = logits.contiguous(), logits.shape, tables.sampling
    launch(
        _sample_rows,
        threads,
        logits.numel(),
        logits.data_ptr(),
        inputs.slots.data_ptr(),
        params.temperature.data_ptr(),
        params.top_k.data_ptr(),
        params.top_p.data_ptr(),
        params.min_p.data_ptr(),
        params.seed.data_ptr(),
        tables.lengths.data_ptr(),
        tables.last_tokens.data_ptr(),
        tables.frozen.data_ptr(),
        inputs.sampled_ids.data_ptr(),
        rows,
        vocabulary,
        tables.sampling_words.shape[1],
        like_of(logits),
    )
