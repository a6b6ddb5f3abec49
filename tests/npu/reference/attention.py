"""npu_fused_infer_attention_score: the masks, the attention itself and the walk over a batch.

The public kernels (`fused.py`) only rename their arguments into a `Call`; `run` is the one
algorithm. `call.py` holds what the tensors and the lengths must satisfy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.npu.reference import contract
from tests.npu.reference.call import (
    Call,
    Geometry,
    check_block_size,
    check_blocks,
    check_scalars,
    check_tensors,
    geometry_of,
    heads_last,
    kv_spans,
    query_spans,
    rounded_up,
)
from tests.npu.reference.contract import Checker

INT_MAX = 2147483647
MASK_SIZE = 2048
Pair = tuple[Tensor, Tensor]


@cache
def compressed_mask() -> Tensor:
    """The one mask modes 2, 3 and 4 take: 2048 x 2048, 1 (hidden) strictly above the diagonal."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool).triu(1)


def _is_compressed(mask: Tensor) -> bool:
    """One of the three documented shapes of the compressed mask."""
    square = (MASK_SIZE, MASK_SIZE)
    return tuple(mask.shape) in (square, (1, *square), (1, 1, *square))


def check_compressed(check: Checker, mask: Tensor | None) -> None:
    """Modes 2, 3, 4 demand the compressed mask with the documented contents."""
    check.require(mask is not None, "atten_mask", None, "a 2048x2048 mask in sparse modes 2, 3, 4")
    assert mask is not None
    check.require(
        _is_compressed(mask),
        "atten_mask",
        tuple(mask.shape),
        "(2048, 2048), (1, 2048, 2048) or (1, 1, 2048, 2048)",
    )
    hidden = mask.reshape(MASK_SIZE, MASK_SIZE).to(torch.bool).cpu()
    check.require(
        torch.equal(hidden, compressed_mask()),
        "atten_mask",
        "another pattern",
        "zeros on and below the diagonal (kept), ones above it (hidden)",
    )


def _check_full(call: Call, geometry: Geometry, longest: int) -> None:
    """A mode 0 or 1 mask: the documented shapes, S rounded up at will, whole pages when paged."""
    check, mask = call.check, call.mask
    assert mask is not None
    decode = geometry.decode(call)
    check.rank("atten_mask", mask, 2, 3, 4)
    lead = tuple(mask.shape[:-2]) if mask.dim() > 2 else ()
    allowed = {3: ((1,),), 4: ((1, 1), (geometry.batch, 1))}.get(mask.dim(), ((),))
    check.require(lead in allowed, "atten_mask", tuple(mask.shape), f"leading axes among {allowed}")
    rows = mask.size(-2)
    batched = mask.dim() == 2 and decode
    wanted = {geometry.batch} if batched else rounded_up(geometry.q_size)
    check.require(
        rows in wanted,
        "atten_mask",
        tuple(mask.shape),
        f"{'B' if batched else 'Q_S'} rows: one of {sorted(wanted)}",
    )
    if call.paged:
        least = geometry.kv_size if decode else -(-longest // call.block_size) * call.block_size
        check.require(
            mask.size(-1) >= least, "atten_mask", tuple(mask.shape), f"at least {least} columns"
        )
    else:
        columns = sorted(rounded_up(geometry.kv_size))
        check.require(
            mask.size(-1) in columns, "atten_mask", tuple(mask.shape), f"columns among {columns}"
        )


def _check_mask(call: Call, geometry: Geometry, longest: int) -> None:
    """Everything documented about atten_mask and sparse_mode before a score is computed."""
    check, mask, mode = call.check, call.mask, call.sparse_mode
    if mask is not None:
        check.dtype("atten_mask", mask, (torch.bool, torch.int8, torch.uint8))
        check.contiguous("atten_mask", mask)
    if call.packed:
        check.require(mode in (0, 3, 4), "sparse_mode", mode, "0, 3 or 4 for TND")
        check.require(
            mode != 0 or mask is None, "atten_mask", "given", "no mask for TND in sparse_mode 0"
        )
    if geometry.decode(call):
        check.choice("inner_precise", call.inner_precise, (0, 1))
        if mode in (2, 4):
            raise check.unimplemented("sparse_mode", mode, "documented as ignored where Q_S is 1")
        if mask is not None and not (mode == 3 and _is_compressed(mask)):
            _check_full(call, geometry, longest)
        return
    if mode in (2, 3, 4):
        check_compressed(check, mask)
    elif mask is not None:
        _check_full(call, geometry, longest)
    else:
        check.require(mode == 0, "atten_mask", None, "a full mask in sparse_mode 1")


def band(queries: int, keys: int, before: int, after: int, shift: int) -> Tensor:
    """Visible where -before <= key - (query + shift) <= after."""
    distance = torch.arange(keys) - torch.arange(queries).unsqueeze(1) - shift
    return (distance <= after) & (distance >= -before)


def _user_mask(call: Call, geometry: Geometry, row: int, queries: int, keys: int) -> Tensor:
    """One sequence's part of a full mask, True where visible (1 hides, 0 keeps)."""
    assert call.mask is not None
    mask = call.mask
    if mask.dim() == 2:
        part = mask[row].unsqueeze(0) if geometry.decode(call) else mask
    elif mask.dim() == 3:
        part = mask[0]
    else:
        part = mask[row if mask.size(0) > 1 else 0, 0]
    return part[:queries, :keys].to(torch.bool).logical_not()


def _check_band(call: Call, queries: int, keys: int) -> None:
    """What TND demands of each sequence in modes 3 and 4."""
    check, mode = call.check, call.sparse_mode
    if not call.packed:
        return
    if mode == 3:
        check.require(
            queries <= keys,
            "q_lengths",
            f"{queries} queries for {keys} keys",
            "no more queries than keys in every sequence (TND, sparse_mode 3)",
        )
    if mode == 4:
        pre, following = call.pre_tokens, call.next_tokens
        check.require(pre >= -queries, "pre_tokens", pre, f"at least {-queries}")
        check.require(following >= -keys, "next_tokens", following, f"at least {-keys}")
        check.require(
            pre + following >= 0, "pre_tokens", (pre, following), "pre_tokens + next_tokens >= 0"
        )


def _visible(call: Call, geometry: Geometry, row: int, queries: int, keys: int) -> Tensor | None:
    """Which keys each query sees, or None for all: sparse_mode over the actual lengths."""
    mode, corner = call.sparse_mode, keys - queries
    _check_band(call, queries, keys)
    if geometry.decode(call) and (call.mask is None or _is_compressed(call.mask)) and mode == 3:
        return None
    if mode == 2:
        return band(queries, keys, INT_MAX, 0, 0)
    if mode == 3 and not geometry.decode(call):
        return band(queries, keys, INT_MAX, 0, corner)
    if mode == 4:
        return band(queries, keys, call.pre_tokens, call.next_tokens, corner)
    if call.mask is None:
        return None
    visible = _user_mask(call, geometry, row, queries, keys)
    if mode == 0 and not geometry.decode(call):
        visible = visible & band(queries, keys, call.pre_tokens, call.next_tokens, 0)
    return visible


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, visible: Tensor | None, dead: float
) -> Pair:
    """softmax(scale * q k^T) v of one sequence, (S, N, D) each, in float32; and its lse (S, N).

    Query head h reads key head h // (N / KV_N). A row that sees no key yields `dead` and -inf.
    """
    group = query.size(1) // key.size(1)
    keys = key.float().repeat_interleave(group, dim=1)
    values = value.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    if visible is not None:
        scores = scores.masked_fill(~visible.to(scores.device), -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    blind = torch.isneginf(lse).unsqueeze(-1)
    weights = torch.exp(scores - lse.unsqueeze(-1).masked_fill(blind, 0.0))
    output = torch.einsum("hqk,khd->qhd", weights, values)
    return output.masked_fill(blind.transpose(0, 1), dead), lse.transpose(0, 1)


def _dead_value(call: Call, geometry: Geometry) -> float:
    """Rows without a visible key: zero where the document corrects them, undefined elsewhere.

    Corrected: inner_precise bit 1, no keys at all, and what the operator can see by itself
    ("如sparse_mode=3且Q_S > KV_S").
    """
    by_itself = call.sparse_mode in (2, 3, 4) or call.mask is None
    if by_itself or (call.inner_precise & 2 and not geometry.decode(call)):
        return 0.0
    return contract.UNDEFINED_VALUE


def _gather(call: Call, row: int, start: int, length: int) -> Pair:
    """One sequence's keys and values as (S, KV_N, D), out of whatever layout holds them."""
    if call.block_table is not None:
        ids = call.block_table[row, : -(-length // call.block_size)].long()
        found = []
        for pool in (call.key, call.value):
            blocks = pool[ids]
            if blocks.dim() == 3:
                rows = blocks.reshape(-1, call.kv_heads, blocks.size(2) // call.kv_heads)
            else:
                rows = blocks.transpose(1, 2).reshape(-1, blocks.size(1), blocks.size(3))
            found.append(rows[:length])
        return found[0], found[1]
    key = heads_last(call.key, call.layout, call.kv_heads)
    value = heads_last(call.value, call.layout, call.kv_heads)
    if not call.packed:
        key, value = key[row], value[row]
    return key[start : start + length], value[start : start + length]


def _restore(call: Call, output: Tensor) -> Tensor:
    """(B, S, N, D) back into the layout's output order; TND is left alone."""
    if call.layout == "BSH":
        return output.flatten(2)
    return output.transpose(1, 2).contiguous() if call.layout == "BNSD" else output


def run(call: Call) -> Pair:
    """The operator: check every documented constraint, then attend sequence by sequence."""
    check_scalars(call)
    check_tensors(call)
    geometry = geometry_of(call)
    if call.layout == "BNSD_BSND":
        call.check.require(geometry.q_size > 1, "query", "Q_S=1", "Q_S > 1 for BNSD_BSND")
    if call.paged:
        check_block_size(call, geometry)
    queries = query_spans(call, geometry)
    keys = kv_spans(call, geometry)
    lengths = [length for _, length in keys]
    if call.paged:
        check_blocks(call, lengths)
    _check_mask(call, geometry, max(lengths, default=0))
    query = heads_last(call.query, call.layout, call.heads)
    fill = contract.UNDEFINED_VALUE
    output = query.new_full((*query.shape[:-1], geometry.value_dim), fill)
    lse = torch.full(query.shape[:-1], fill, dtype=torch.float32, device=query.device)
    dead = _dead_value(call, geometry)
    for row, ((q_start, q_length), (k_start, k_length)) in enumerate(
        zip(queries, keys, strict=True)
    ):
        source, target, sums = (
            (query, output, lse) if call.packed else (query[row], output[row], lse[row])
        )
        part = slice(q_start, q_start + q_length)
        seen = _visible(call, geometry, row, q_length, k_length)
        key, value = _gather(call, row, k_start, k_length)
        result, summed = attend(source[part], key, value, call.scale, seen, dead)
        target[part], sums[part] = result.to(target.dtype), summed
    lse = lse.unsqueeze(-1) if call.packed else lse.transpose(1, 2).unsqueeze(-1).contiguous()
    return _restore(call, output), lse if call.lse else lse.new_zeros(1)


def _lengths(value: Sequence[int] | None) -> list[int] | None:
    """A length argument as plain integers."""
    return None if value is None else [int(length) for length in value]


V1_NAMES = {"q_lengths": "actual_seq_lengths", "kv_lengths": "actual_seq_lengths_kv"}
V1_REFUSED: dict[str, object] = dict.fromkeys(
    (
        "pse_shift",
        "dequant_scale1",
        "quant_scale1",
        "dequant_scale2",
        "quant_scale2",
        "quant_offset2",
        "antiquant_scale",
        "antiquant_offset",
        "key_antiquant_scale",
        "key_antiquant_offset",
        "value_antiquant_scale",
        "value_antiquant_offset",
        "query_padding_size",
        "kv_padding_size",
        "key_shared_prefix",
        "value_shared_prefix",
        "actual_shared_prefix_len",
        "query_rope",
        "key_rope",
        "key_rope_antiquant_scale",
    )
) | dict.fromkeys(("antiquant_mode", "key_antiquant_mode", "value_antiquant_mode"), 0)
V2_NAMES = {
    "q_lengths": "actual_seq_qlen",
    "kv_lengths": "actual_seq_kvlen",
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
}
V2_REFUSED: dict[str, object] = dict.fromkeys(
    (
        "query_rope",
        "key_rope",
        "pse_shift",
        "dequant_scale_query",
        "dequant_scale_key",
        "dequant_offset_key",
        "dequant_scale_value",
        "dequant_offset_value",
        "dequant_scale_key_rope",
        "quant_scale_out",
        "quant_offset_out",
        "quant_scale_p",
        "learnable_sink",
        "query_dtype",
        "key_dtype",
        "value_dtype",
        "query_rope_dtype",
        "key_rope_dtype",
        "key_shared_prefix_dtype",
        "value_shared_prefix_dtype",
        "dequant_scale_query_dtype",
        "dequant_scale_key_dtype",
        "dequant_scale_value_dtype",
        "dequant_scale_key_rope_dtype",
        "out_dtype",
    )
) | dict.fromkeys(("query_quant_mode", "key_quant_mode", "value_quant_mode"), 0)


def make_call(operator: str, given: dict[str, Any], version: int) -> Call:
    """Rename either version's arguments into a Call; refuse what is not implemented."""
    names, refused = (V1_NAMES, V1_REFUSED) if version == 1 else (V2_NAMES, V2_REFUSED)
    check = Checker(operator, names)
    check.refuse(given, refused)
    heads = given[check.name("num_heads")]
    return Call(
        check=check,
        query=given["query"],
        key=given["key"],
        value=given["value"],
        mask=given["atten_mask"],
        q_lengths=_lengths(given[check.name("q_lengths")]),
        kv_lengths=_lengths(given[check.name("kv_lengths")]),
        block_table=given["block_table"],
        heads=heads,
        kv_heads=given["num_key_value_heads"] or heads,
        scale=given[check.name("scale")],
        pre_tokens=given["pre_tokens"],
        next_tokens=given["next_tokens"],
        layout=given["input_layout"],
        sparse_mode=given["sparse_mode"],
        inner_precise=given["inner_precise"],
        block_size=given["block_size"],
        lse=given["softmax_lse_flag" if version == 1 else "return_softmax_lse"],
    )
