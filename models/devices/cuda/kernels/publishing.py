"""Publication of token ids to host memory by the step itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def publish(ids: torch.Tensor, ring: torch.Tensor, count: torch.Tensor) -> None:
    """Write the number of steps so far, which `count`, int32 (1,), holds, followed by `ids`, int32
    (rows,), to the next place of `ring`, int32 (places, 1 + maximum number of rows) in page-locked
    memory. Increment `count`.

    The number of places is a power of two, so that the order of places continues when the count
    overflows.
    """
    rows, places = len(ids), len(ring)
    assert places & (places - 1) == 0
    width = max(32, triton.next_power_of_2(rows))
    _publish[(1,)](ids, ring, count, rows, places - 1, ring.stride(0), width=width, num_warps=4)


@triton.jit(do_not_specialize=["rows"])
def _publish(ids, ring, count, rows, last_place, stride, width: tl.constexpr):
    number = tl.load(count)
    to = ring + (number & last_place) * stride
    row = tl.arange(0, width)
    tl.store(to + 1 + row, tl.load(ids + row, mask=row < rows, other=0), mask=row < rows)
    tl.store(to, number)
    tl.debug_barrier()  # all threads have read the count
    tl.store(count, number + 1)
