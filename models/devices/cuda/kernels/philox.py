"""The Gumbel noise of `models/sampling/philox.py` in Triton, with the same random words and the
same arithmetic."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _gumbel(words):
    """Return standard Gumbel noise computed from 32-bit words. The high 23 bits of each word become
    a uniform number strictly between 0 and 1."""
    bits = (words.to(tl.uint32, bitcast=True) >> 9).to(tl.float32)
    return -tl.log(-tl.log((bits + 0.5) * 1.1920928955078125e-07))


@triton.jit
def gumbel_of_part(seed, position, number, part: tl.constexpr):
    """Return the Gumbel noise of `part` consecutive token ids, from `number` * `part` on, in order.
    Each Philox counter provides four values."""
    group = number * (part // 4) + tl.arange(0, part // 4)
    zero = tl.zeros_like(group)
    first, second, third, fourth = tl.philox(seed, group, zero + position, zero, zero)
    words = tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))
    return _gumbel(words)


@triton.jit
def gumbel_at(seed, position, ids):
    """Return the Gumbel noise of arbitrary token ids. The values equal those of
    `gumbel_of_part`."""
    group = ids // 4
    zero = tl.zeros_like(group)
    first, second, third, fourth = tl.philox(seed, group, zero + position, zero, zero)
    word = ids % 4
    low = tl.where(word == 0, first, second)
    high = tl.where(word == 2, third, fourth)
    return _gumbel(tl.where(word < 2, low, high))
