"""One attention call in version 1's vocabulary, and what its tensors and lengths must satisfy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.npu.reference import contract
from tests.npu.reference.contract import Checker

RANKS = {"BSH": 3, "BSND": 4, "BNSD": 4, "BNSD_BSND": 4, "TND": 3}
OTHER_LAYOUTS = (
    "BSH_NBSD",
    "BSND_NBSD",
    "BNSD_NBSD",
    "TND_NTD",
    "NTD_TND",
    "NTD",
    "NSD",
    "BSH_BNSD",
    "BSND_BNSD",
)


@dataclass(frozen=True)
class Call:
    """One call, in version 1's vocabulary."""

    check: Checker
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    q_lengths: list[int] | None
    kv_lengths: list[int] | None
    block_table: Tensor | None
    heads: int
    kv_heads: int
    scale: float
    pre_tokens: int
    next_tokens: int
    layout: str
    sparse_mode: int
    inner_precise: int
    block_size: int
    lse: bool

    @property
    def packed(self) -> bool:
        """Whether the sequences are concatenated without padding (TND)."""
        return self.layout == "TND"

    @property
    def paged(self) -> bool:
        """Whether key and value are block pools ("block_table存在且有效")."""
        return self.block_table is not None


@dataclass(frozen=True)
class Geometry:
    """The sizes a call's tensors agree on."""

    batch: int
    q_size: int
    kv_size: int
    dim: int
    value_dim: int

    def decode(self, call: Call) -> bool:
        """The document's "Q_S为1" branch, which only exists where query has an S axis."""
        return not call.packed and self.q_size == 1


def rounded_up(size: int) -> set[int]:
    """A size and its round-ups to 16 and 32 ("如果Q_S、KV_S非16或32对齐, 可以向上取到对齐的S")."""
    return {size, -(-size // 16) * 16, -(-size // 32) * 32}


def check_scalars(call: Call) -> None:
    """Heads, layout, sparse_mode and inner_precise: their documented ranges."""
    check = call.check
    check.choice("input_layout", call.layout, RANKS, OTHER_LAYOUTS)
    check.require(0 < call.heads <= 256, "num_heads", call.heads, "1 to 256 heads")
    check.require(
        call.kv_heads > 0 and call.heads % call.kv_heads == 0,
        "num_key_value_heads",
        call.kv_heads,
        f"a divisor of {check.name('num_heads')}={call.heads}",
    )
    ratio = call.heads // call.kv_heads
    check.require(ratio <= 64, "num_key_value_heads", call.kv_heads, "at most 64 query heads each")
    check.choice("sparse_mode", call.sparse_mode, (0, 1, 2, 3, 4), (9,))
    check.choice("inner_precise", call.inner_precise, (0, 1, 2, 3))


def check_tensors(call: Call) -> None:
    """Dtypes, ranks and contiguity of query, key and value (quantised types: not implemented)."""
    check = call.check
    for argument, tensor in (("query", call.query), ("key", call.key), ("value", call.value)):
        if tensor.dtype in (torch.int8, torch.int32):
            raise check.unimplemented(argument, tensor.dtype, "quantised inputs")
        check.half(argument, tensor)
        check.contiguous(argument, tensor)
    check.same_dtype("key", call.key, "query", call.query)
    check.same_dtype("value", call.value, "query", call.query)
    check.rank("query", call.query, RANKS[call.layout])
    if call.paged:
        if call.key.dim() == 5 or call.value.dim() == 5:
            raise check.unimplemented("key", tuple(call.key.shape), "NZ block pools")
        packed_or_bnsd = call.packed or call.layout.startswith("BNSD")
        ranks = (3, 4) if packed_or_bnsd else (3,)
        check.rank("key", call.key, *ranks)
        check.shape("value", call.value, call.key.shape, "paged key and value must agree")
    else:
        check.rank("key", call.key, call.query.dim())
        check.rank("value", call.value, call.query.dim())


def heads_last(tensor: Tensor, layout: str, heads: int) -> Tensor:
    """A non-paged tensor as (B, S, N, D), or (T, N, D) for TND; a view."""
    if layout == "BSH":
        return tensor.reshape(*tensor.shape[:2], heads, tensor.size(2) // heads)
    return tensor.transpose(1, 2) if layout.startswith("BNSD") else tensor


def _split_heads(call: Call, argument: str, tensor: Tensor, heads: int) -> Tensor:
    """The tensor with its heads apart, after checking that the documented N axis matches."""
    check = call.check
    source = "num_heads" if argument == "query" else "num_key_value_heads"
    if call.layout == "BSH":
        check.require(
            tensor.size(2) % heads == 0, argument, f"H={tensor.size(2)}", f"H = {heads} heads * D"
        )
    split = heads_last(tensor, call.layout, heads)
    check.require(
        split.size(-2) == heads,
        argument,
        f"N={split.size(-2)} in shape {tuple(tensor.shape)}",
        f"N equal to {check.name(source)}={heads}",
    )
    return split


def _paged_dim(call: Call) -> int:
    """Check the block pool's shape against block_size and the heads; its head dimension."""
    check, key, size, heads = call.check, call.key, call.block_size, call.kv_heads
    if key.dim() == 3:
        check.require(
            key.size(1) == size, "key", tuple(key.shape), f"(blocks, block_size={size}, H)"
        )
        check.require(key.size(2) % heads == 0, "key", tuple(key.shape), f"H = {heads} heads * D")
        check.require(
            key.size(2) <= 65535, "key", f"KV_N*D={key.size(2)}", "KV_N*D of at most 65535"
        )
        return key.size(2) // heads
    check.require(
        tuple(key.shape[1:3]) == (heads, size),
        "key",
        tuple(key.shape),
        f"(blocks, KV_N={heads}, block_size={size}, D)",
    )
    return key.size(3)


def check_block_size(call: Call, geometry: Geometry) -> None:
    """block_size: TND 16..1024 by 16; Q_S > 1 128..512 by 128; Q_S = 1 16..512 by 16."""
    if not contract.ENFORCE_BLOCK_SIZES:
        return
    if call.packed:
        step, least, most = 16, 16, 1024
    elif geometry.decode(call):
        step, least, most = 16, 16, 512
    else:
        step, least, most = 128, 128, 512
    size = call.block_size
    call.check.require(
        least <= size <= most and size % step == 0,
        "block_size",
        size,
        f"a multiple of {step} from {least} to {most}",
    )


def geometry_of(call: Call) -> Geometry:
    """Read the batch, the S axes and the head dims, checking that the tensors agree."""
    check = call.check
    query = _split_heads(call, "query", call.query, call.heads)
    batch = len(call.q_lengths or ()) if call.packed else query.size(0)
    q_size = query.size(0) if call.packed else query.size(1)
    if call.paged:
        assert call.block_table is not None
        table = call.block_table
        check.rank("block_table", table, 2)
        check.dtype("block_table", table, (torch.int32,))
        check.require(
            table.size(0) == batch, "block_table", tuple(table.shape), f"{batch} rows (B)"
        )
        dim = value_dim = _paged_dim(call)
        kv_size = table.size(1) * call.block_size
    else:
        key = _split_heads(call, "key", call.key, call.kv_heads)
        value = _split_heads(call, "value", call.value, call.kv_heads)
        check.shape("value", value[..., :0], key[..., :0].shape, "key's, up to D")
        check.require(
            call.packed or key.size(0) == batch, "key", tuple(call.key.shape), f"batch {batch}"
        )
        kv_size = key.size(0) if call.packed else key.size(1)
        dim, value_dim = key.size(-1), value.size(-1)
    check.require(
        query.size(-1) == dim, "key", f"head dim {dim}", f"query's head dim {query.size(-1)}"
    )
    geometry = Geometry(batch, q_size, kv_size, dim, value_dim)
    _check_sizes(call, geometry)
    return geometry


def _check_sizes(call: Call, geometry: Geometry) -> None:
    """The documented limits of B, S, N*D and D, and the head dims that TND enumerates."""
    check, dim, value_dim = call.check, geometry.dim, geometry.value_dim
    most = 4096 if call.packed else 65536
    check.require(geometry.batch <= most, "query", f"batch {geometry.batch}", f"at most {most}")
    check.require(0 < dim <= 512, "query", f"D={dim}", "1 <= D <= 512")
    check.require(0 < value_dim <= 512, "value", f"D={value_dim}", "1 <= D <= 512")
    check.require(
        dim % 16 == 0 or not contract.ENFORCE_ENUMERATED_SIZES,
        "query",
        f"D={dim}",
        "D a multiple of 16 for 16-bit types",
    )
    limit = 262144 if geometry.decode(call) else 20971520
    if not call.packed:
        check.require(geometry.kv_size <= limit, "key", f"S={geometry.kv_size}", f"S <= {limit}")
        check.require(
            call.layout not in ("BSH", "BSND") or geometry.decode(call) or call.heads * dim < 65535,
            "query",
            f"N*D={call.heads * dim}",
            "N*D < 65535 for BSH and BSND",
        )
        check.require(dim == value_dim, "value", f"D={value_dim}", f"key's D={dim}")
        return
    check.require(geometry.q_size <= 1 << 20, "query", f"T={geometry.q_size}", "T of at most 1M")
    if contract.ENFORCE_ENUMERATED_SIZES:
        plain = call.heads == call.kv_heads
        pairs = {(128, 128), (192, 128)} | ({(64, 64)} if plain else set())
        pairs |= {(192, 192)} if plain and not call.paged else set()
        check.require(
            (dim, value_dim) in pairs,
            "query",
            f"Q_D=K_D={dim}, V_D={value_dim}, {call.heads} heads over {call.kv_heads}",
            f"(Q_D, V_D) in {sorted(pairs)} for TND with these heads",
        )


def _cumulative(call: Call, argument: str, ends: list[int], total: int) -> list[tuple[int, int]]:
    """TND lengths: running ends, non-decreasing, the last one T; as (start, length) pairs."""
    check = call.check
    starts = [0, *ends[:-1]]
    growing = all(end >= start for start, end in zip(starts, ends, strict=True))
    check.require(growing, argument, ends, "non-negative, non-decreasing cumulative lengths")
    check.require(
        bool(ends) and ends[-1] == total, argument, ends, f"cumulative lengths ending at T={total}"
    )
    return [(start, end - start) for start, end in zip(starts, ends, strict=True)]


def _per_batch(
    call: Call, argument: str, lengths: list[int] | None, batch: int, size: int
) -> list[int]:
    """Per-sequence lengths: None means S, one value serves all, else the first B values count."""
    check = call.check
    if lengths is None:
        return [size] * batch
    check.require(
        len(lengths) == 1 or len(lengths) >= batch, argument, lengths, f"1 or >= {batch} values"
    )
    used = lengths * batch if len(lengths) == 1 else lengths[:batch]
    for length in used:
        check.require(0 <= length <= size, argument, lengths, f"values between 0 and S={size}")
    return used


def query_spans(call: Call, geometry: Geometry) -> list[tuple[int, int]]:
    """(start, length) of every sequence's query rows; lengths are ignored where Q_S is 1."""
    if call.packed:
        call.check.require(
            call.q_lengths is not None, "q_lengths", None, "a value when input_layout is TND"
        )
        return _cumulative(call, "q_lengths", call.q_lengths or [], geometry.q_size)
    lengths = None if geometry.decode(call) else call.q_lengths
    return [(0, n) for n in _per_batch(call, "q_lengths", lengths, geometry.batch, geometry.q_size)]


def kv_spans(call: Call, geometry: Geometry) -> list[tuple[int, int]]:
    """(start, length) of every sequence's keys.

    TND without pages: cumulative. With pages, in every layout: each sequence's own length
    ("在PA场景下, 其长度等于key/value的Batch值, 代表每个Batch的实际长度, 值不大于KV_S").
    """
    check, lengths, batch = call.check, call.kv_lengths, geometry.batch
    if call.paged:
        check.require(lengths is not None, "kv_lengths", None, "a value with page attention")
    if not call.packed:
        own = _per_batch(call, "kv_lengths", lengths, batch, geometry.kv_size)
        return [(0, length) for length in own]
    check.require(lengths is not None, "kv_lengths", None, "a value when input_layout is TND")
    given = lengths or []
    check.require(len(given) == batch, "kv_lengths", given, f"{batch} values, as many as q_lengths")
    if call.paged:
        own = _per_batch(call, "kv_lengths", given, batch, geometry.kv_size)
        return [(0, length) for length in own]
    return _cumulative(call, "kv_lengths", given, geometry.kv_size)


def check_blocks(call: Call, lengths: list[int]) -> None:
    """Every used id lies inside the pool.

    The document also asks for as many blocks as all sequences have in sum; but those that share a
    prefix share its blocks, so this is not required here (disagreements.md, 26).
    """
    assert call.block_table is not None
    check, table, blocks = call.check, call.block_table, call.key.size(0)
    needed = [-(-length // call.block_size) for length in lengths]
    for row, count in enumerate(needed):
        ids = table[row, :count].tolist()
        inside = all(0 <= block < blocks for block in ids)
        check.require(inside, "block_table", f"row {row}: {ids}", f"block ids in [0, {blocks})")
