"""The operators that write into a cache or a table by index."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.npu.reference.contract import Checker

CACHE_TYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
)
TABLE_TYPES = (torch.float32, torch.float16, torch.bool, torch.bfloat16, torch.int64, torch.int8)
UPDATE_TYPES = (torch.int8, torch.float16, torch.float32, torch.bfloat16, torch.int32)
INDEX_TYPES = (torch.int32, torch.int64)


def _check_cache(check: Checker, name: str, rows: Tensor, cache: Tensor) -> None:
    """Scenario two: rows (tokens, heads, D), cache (blocks, block_size, heads, D)."""
    check.dtype(name, rows, CACHE_TYPES)
    check.contiguous(name, rows)
    check.contiguous(f"{name}_cache", cache)
    check.same_dtype(f"{name}_cache", cache, name, rows)
    check.rank(f"{name}_cache", cache, 4)
    check.shape(
        f"{name}_cache",
        cache,
        (*cache.shape[:2], *rows.shape[1:]),
        "(blocks, block_size, heads, head size)",
    )


def _check_slots(check: Checker, slots: Tensor, tokens: int, capacity: int) -> None:
    """One int32 or int64 slot a token, each in [0, blocks * block_size - 1], none twice."""
    check.dtype("slot_mapping", slots, INDEX_TYPES)
    check.contiguous("slot_mapping", slots)
    check.shape("slot_mapping", slots, (tokens,), "one slot a token")
    if not tokens:
        return
    low, high = int(slots.min()), int(slots.max())
    check.require(
        low >= 0 and high < capacity,
        "slot_mapping",
        f"{low}..{high}",
        f"values in [0, {capacity - 1}]",
    )
    ordered = slots.sort().values
    repeated = ordered[1:][ordered[1:] == ordered[:-1]].tolist()
    check.require(not repeated, "slot_mapping", f"repeating {repeated}", "no repeated slot")


def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """cache[slot // block_size, slot % block_size] = row, in place, for key and value.

    Only cache_mode "Norm" (or None), the ND pools of scenario two; the default "PA_NZ" is not
    implemented. The value rows may be narrower or wider than the key rows.
    """
    check = Checker("npu_scatter_pa_kv_cache")
    check.choice("cache_mode", cache_mode, ("Norm", None), ("PA_NZ",))
    given = {
        "compress_lens": compress_lens,
        "compress_seq_offsets": compress_seq_offsets,
        "seq_lens": seq_lens,
    }
    check.refuse(given, dict.fromkeys(given))
    check.rank("key", key, 3, 4)
    check.rank("value", value, key.dim())
    if key.dim() == 4:
        raise check.unimplemented("key", tuple(key.shape), "scenario three, compressed sequences")
    _check_cache(check, "key", key, key_cache)
    _check_cache(check, "value", value, value_cache)
    check.same_dtype("value", value, "key", key)
    check.shape("value", value[..., :0], (*key.shape[:2], 0), "key's first two axes")
    check.shape(
        "value_cache",
        value_cache[..., :0, :0],
        (*key_cache.shape[:2], 0, 0),
        "key_cache's blocks and block_size",
    )
    blocks, size = key_cache.shape[:2]
    _check_slots(check, slot_mapping, key.size(0), blocks * size)
    slots = slot_mapping.long()
    key_cache.view(-1, *key.shape[1:])[slots] = key
    value_cache.view(-1, *value.shape[1:])[slots] = value


def _check_nd_update(check: Checker, table: Tensor, indices: Tensor, updates: Tensor) -> None:
    """The documented dtypes, ranks, shape of updates and range of indices."""
    check.dtype("input", table, TABLE_TYPES)
    check.rank("input", table, *range(1, 9))
    check.same_dtype("updates", updates, "input", table)
    check.dtype("indices", indices, INDEX_TYPES)
    check.require(indices.dim() >= 2, "indices", tuple(indices.shape), "2 dimensions or more")
    depth = indices.size(-1)
    check.require(
        1 <= depth <= table.dim(),
        "indices",
        tuple(indices.shape),
        f"a last axis of at most {table.dim()}, input's rank",
    )
    check.shape(
        "updates",
        updates,
        (*indices.shape[:-1], *table.shape[depth:]),
        "indices' but the last axis, then input's remaining axes",
    )
    for axis in range(depth):
        column, size = indices[..., axis], table.size(axis)
        inside = not column.numel() or (int(column.min()) >= 0 and int(column.max()) < size)
        check.require(inside, "indices", f"a value outside axis {axis}", f"[0, {size})")


def _nd_update(table: Tensor, indices: Tensor, updates: Tensor) -> None:
    """table[tuple(index)] = update; among repeated indices the last one wins (undocumented)."""
    depth = indices.size(-1)
    flat = indices.reshape(-1, depth).long()
    rows = updates.reshape(-1, *table.shape[depth:])
    table[tuple(flat.unbind(1))] = rows


def npu_scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """A copy of input with updates at indices; input itself stays ("input本身的数据不变")."""
    _check_nd_update(Checker("npu_scatter_nd_update"), input, indices, updates)
    output = input.clone()
    _nd_update(output, indices, updates)
    return output


def npu_scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """The same in place ("input中的数据被改变"); returns input, which may be non-contiguous."""
    _check_nd_update(Checker("npu_scatter_nd_update_"), input, indices, updates)
    _nd_update(input, indices, updates)
    return input


def _update(operator: str, data: Tensor, indices: Tensor, updates: Tensor, axis: int) -> None:
    """data[b, .., indices[b] : indices[b] + n, ..] = updates[b] along axis, n its size there."""
    check = Checker(operator)
    check.dtype("input", data, UPDATE_TYPES)
    check.rank("input", data, *range(2, 9))
    check.same_dtype("updates", updates, "input", data)
    check.rank("updates", updates, data.dim())
    check.dtype("indices", indices, INDEX_TYPES)
    check.rank("indices", indices, 1, 2)
    check.require(-data.dim() <= axis < data.dim(), "axis", axis, f"an axis of {data.dim()}")
    for name, tensor in (("input", data), ("indices", indices), ("updates", updates)):
        check.require(tensor.numel() > 0, name, "empty", "a tensor that is not empty")
    if indices.dim() == 2 or axis % data.dim() == 0:
        raise check.unimplemented("indices", tuple(indices.shape), "only one start a batch row")
    axis %= data.dim()
    count = updates.size(axis)
    expected = list(data.shape)
    expected[0], expected[axis] = indices.size(0), count
    check.shape("updates", updates, expected, "one slice a batch row")
    for row, start in enumerate(indices.tolist()):
        check.require(0 <= start <= data.size(axis) - count, "indices", start, "no index outside")
        data[row].narrow(axis - 1, start, count).copy_(updates[row])


def scatter_update(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """A copy of input with each batch row's slice along axis replaced."""
    output = input.clone()
    _update("scatter_update", output, indices, updates, axis)
    return output


def scatter_update_(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """The same in place."""
    _update("scatter_update_", input, indices, updates, axis)
    return input
