"""The operators' own signatures over `attention.run`: v1, v2, .out, workspace, infer_output."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.npu.reference import contract
from tests.npu.reference.attention import INT_MAX, Pair, make_call, run
from tests.npu.reference.call import RANKS
from tests.npu.reference.contract import Checker

WORKSPACE_ELEMENTS = 1024
"""The documents do not say how large a workspace is, only that it is one-dimensional."""


# fmt: off
def npu_fused_infer_attention_score(
    query: Tensor, key: Tensor, value: Tensor, *,
    pse_shift: Tensor | None = None, atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    dequant_scale1: Tensor | None = None, quant_scale1: Tensor | None = None,
    dequant_scale2: Tensor | None = None, quant_scale2: Tensor | None = None,
    quant_offset2: Tensor | None = None,
    antiquant_scale: Tensor | None = None, antiquant_offset: Tensor | None = None,
    key_antiquant_scale: Tensor | None = None, key_antiquant_offset: Tensor | None = None,
    value_antiquant_scale: Tensor | None = None, value_antiquant_offset: Tensor | None = None,
    block_table: Tensor | None = None,
    query_padding_size: Tensor | None = None, kv_padding_size: Tensor | None = None,
    key_shared_prefix: Tensor | None = None, value_shared_prefix: Tensor | None = None,
    actual_shared_prefix_len: Sequence[int] | None = None,
    query_rope: Tensor | None = None, key_rope: Tensor | None = None,
    key_rope_antiquant_scale: Tensor | None = None,
    num_heads: int = 1, scale: float = 1.0,
    pre_tokens: int = INT_MAX, next_tokens: int = INT_MAX,
    input_layout: str = "BSH", num_key_value_heads: int = 0,
    sparse_mode: int = 0, inner_precise: int = 0, block_size: int = 0,
    antiquant_mode: int = 0, key_antiquant_mode: int = 0, value_antiquant_mode: int = 0,
    softmax_lse_flag: bool = False,
) -> Pair:
    """Attention over BSH, BSND, BNSD, BNSD_BSND or TND, paged or not (rules: `attention.run`)."""
    return run(make_call("npu_fused_infer_attention_score", dict(locals()), 1))


def npu_fused_infer_attention_score_v2(
    query: Tensor, key: Tensor, value: Tensor, *,
    query_rope: Tensor | None = None, key_rope: Tensor | None = None,
    pse_shift: Tensor | None = None, atten_mask: Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None, actual_seq_kvlen: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    dequant_scale_query: Tensor | None = None,
    dequant_scale_key: Tensor | None = None, dequant_offset_key: Tensor | None = None,
    dequant_scale_value: Tensor | None = None, dequant_offset_value: Tensor | None = None,
    dequant_scale_key_rope: Tensor | None = None,
    quant_scale_out: Tensor | None = None, quant_offset_out: Tensor | None = None,
    quant_scale_p: Tensor | None = None, learnable_sink: Tensor | None = None,
    num_query_heads: int = 1, num_key_value_heads: int = 0, softmax_scale: float = 1.0,
    pre_tokens: int = INT_MAX, next_tokens: int = INT_MAX,
    input_layout: str = "BSH", sparse_mode: int = 0, block_size: int = 0,
    query_quant_mode: int = 0, key_quant_mode: int = 0, value_quant_mode: int = 0,
    inner_precise: int = 0, return_softmax_lse: bool = False,
    query_dtype: int | None = None, key_dtype: int | None = None,
    value_dtype: int | None = None, query_rope_dtype: int | None = None,
    key_rope_dtype: int | None = None, key_shared_prefix_dtype: int | None = None,
    value_shared_prefix_dtype: int | None = None, dequant_scale_query_dtype: int | None = None,
    dequant_scale_key_dtype: int | None = None, dequant_scale_value_dtype: int | None = None,
    dequant_scale_key_rope_dtype: int | None = None, out_dtype: int | None = None,
) -> Pair:
    """Version 2: the same rules under its own argument names."""
    return run(make_call("npu_fused_infer_attention_score_v2", dict(locals()), 2))
# fmt: on


def _like(base: Callable[..., Any], **extra: object) -> inspect.Signature:
    """The base kernel's signature with more keyword-only arguments after its own."""
    signature = inspect.signature(base)
    empty = inspect.Parameter.empty
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in extra.items()
        if default is not empty
    ]
    more += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
        for name, default in extra.items()
        if default is empty
    ]
    return signature.replace(parameters=[*signature.parameters.values(), *more])


def _out_overload(base: Callable[..., Pair], version: int) -> Callable[..., Pair]:
    """The .out overload: out is [attention_out, softmax_lse], both written and returned.

    workspace: one-dimensional, of query's dtype. softmax_lse is left alone unless it was asked
    for ("softmaxLseFlag为False时, 如果softmaxLse传入的Tensor非空, 则直接返回该Tensor数据").
    """
    operator = f"{base.__name__}.out"
    flag = "softmax_lse_flag" if version == 1 else "return_softmax_lse"

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        workspace: Tensor | None = None,
        out: list[Tensor],
        **given: Any,
    ) -> Pair:
        check = Checker(operator)
        check.require(len(out) == 2, "out", f"{len(out)} tensors", "[attention_out, softmax_lse]")
        if workspace is not None:
            check.rank("workspace", workspace, 1)
            check.same_dtype("workspace", workspace, "query", query)
        attention, lse = base(query, key, value, **given)
        check.shape("out[0]", out[0], attention.shape, "attention_out")
        check.same_dtype("out[0]", out[0], "query", query)
        out[0].copy_(attention)
        if given.get(flag, False):
            check.shape("out[1]", out[1], lse.shape, "softmax_lse")
            check.dtype("out[1]", out[1], (torch.float32,))
            out[1].copy_(lse)
        return (out[0], out[1]) if contract.RESULTS_ALIAS else (out[0].clone(), out[1].clone())

    kernel.__name__ = operator
    kernel.__signature__ = _like(  # type: ignore[attr-defined]
        base, workspace=None, out=inspect.Parameter.empty
    )
    return kernel


def _max_workspace(base: Callable[..., Pair], name: str) -> Callable[..., Tensor]:
    """The private helper that graph capture calls first: a 1-D zero tensor of query's dtype.

    "输入与npu_fused_infer_attention_score一致": its arguments are only bound, not checked.
    """
    signature = inspect.signature(base).replace(return_annotation="Tensor")

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        bound = signature.bind(*args, **kwargs)
        query: Tensor = bound.arguments["query"]
        return query.new_zeros(WORKSPACE_ELEMENTS)

    kernel.__name__ = name
    kernel.__signature__ = signature  # type: ignore[attr-defined]
    return kernel


def output_shapes(
    operator: str, query: Tensor, value: Tensor, layout: str, heads: int, kv_heads: int, paged: bool
) -> tuple[list[int], list[int]]:
    """The shapes of attention_out and of a requested softmax_lse, from the inputs' alone."""
    check = Checker(operator)
    check.choice("input_layout", layout, RANKS)
    check.rank("query", query, RANKS[layout])
    if value.dim() == 3 and (paged or layout == "BSH"):
        dim = value.size(2) // (kv_heads or heads)
    else:
        dim = value.size(-1)
    sizes = list(query.shape)
    if layout == "TND":
        return [*sizes[:2], dim], [*sizes[:2], 1]
    if layout == "BSH":
        return [*sizes[:2], heads * dim], [sizes[0], heads, sizes[1], 1]
    if layout == "BSND":
        return [*sizes[:3], dim], [sizes[0], sizes[2], sizes[1], 1]
    swapped = [sizes[0], sizes[2], sizes[1], dim]
    plain = [*sizes[:3], dim]
    return (swapped if layout == "BNSD_BSND" else plain), [*sizes[:3], 1]


def _npu_fused_infer_attention_score_infer_output(
    query: Tensor,
    value: Tensor,
    *,
    input_layout: str = "BSH",
    quant_scale2: Tensor | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_lse_flag: bool = False,
    query_rope: Tensor | None = None,
) -> Pair:
    """Allocate what .out writes: attention_out in query's dtype, and softmax_lse."""
    operator = "_npu_fused_infer_attention_score_infer_output"
    given = {"quant_scale2": quant_scale2, "query_rope": query_rope}
    Checker(operator).refuse(given, dict.fromkeys(given))
    shape, sums = output_shapes(
        operator,
        query,
        value,
        input_layout,
        num_heads,
        num_key_value_heads,
        block_table is not None,
    )
    lse = torch.zeros(sums if softmax_lse_flag else [1], dtype=torch.float32, device=query.device)
    return query.new_zeros(shape), lse


def _npu_fused_infer_attention_score_v2_infer_output(
    query: Tensor,
    value: Tensor,
    *,
    query_dtype: int | None = None,
    value_dtype: int | None = None,
    input_layout: str = "BSH",
    quant_scale_out: Tensor | None = None,
    block_table: Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    return_softmax_lse: bool = False,
    query_rope: Tensor | None = None,
    out_dtype: int | None = None,
) -> Pair:
    """Version 2 of the allocation."""
    operator = "_npu_fused_infer_attention_score_v2_infer_output"
    given = {
        "query_dtype": query_dtype,
        "value_dtype": value_dtype,
        "out_dtype": out_dtype,
        "quant_scale_out": quant_scale_out,
        "query_rope": query_rope,
    }
    Checker(operator).refuse(given, dict.fromkeys(given))
    shape, sums = output_shapes(
        operator,
        query,
        value,
        input_layout,
        num_query_heads,
        num_key_value_heads,
        block_table is not None,
    )
    lse = torch.zeros(sums if return_softmax_lse else [1], dtype=torch.float32, device=query.device)
    return query.new_zeros(shape), lse


npu_fused_infer_attention_score_out = _out_overload(npu_fused_infer_attention_score, 1)
npu_fused_infer_attention_score_v2_out = _out_overload(npu_fused_infer_attention_score_v2, 2)
_npu_fused_infer_attention_score_get_max_workspace = _max_workspace(
    npu_fused_infer_attention_score, "_npu_fused_infer_attention_score_get_max_workspace"
)
_npu_fused_infer_attention_score_v2_get_max_workspace = _max_workspace(
    npu_fused_infer_attention_score_v2, "_npu_fused_infer_attention_score_v2_get_max_workspace"
)
