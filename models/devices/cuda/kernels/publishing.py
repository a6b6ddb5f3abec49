"""A kernel that writes the token ids of a step to host memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def publish(ids: torch.Tensor, ring: torch.Tensor, count: torch.Tensor) -> None:
    """Write the step number, followed by `ids`, int32 (rows,), to the next entry of `ring`, and
    increment the step number in `count`, int32 (1,).

    `ring` is int32 (entries, 1 + maximum number of rows), in page-locked memory. The number of
    entries must be a power of two, so that entries stay in order when `count` overflows.
    """
    rows, entries = len(ids), len(ring)
    assert entries & (entries - 1) == 0
    width = max(32, triton.next_power_of_2(rows))
    _publish[(1,)](ids, ring, count, rows, entries - 1, ring.stride(0), width=width, num_warps=4)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["ids"])
def _publish(ids, ring, count, rows, last_entry, stride, width: tl.constexpr):
    step = tl.load(count)
    entry = ring + (step & last_entry) * stride
    row = tl.arange(0, width)
    tl.store(entry + 1 + row, tl.load(ids + row, mask=row < rows, other=0), mask=row < rows)
    tl.store(entry, step)
    tl.debug_barrier()  # all threads have read the count
    tl.store(count, step + 1)
