"""The table of kernels, their schemas, their shape functions, and how torch learns of them."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.npu.reference import elementwise, experts, fused, fusion, scatter

NAMESPACE = "npu"
SCHEMAS: dict[str, str] = json.loads(
    (Path(__file__).parent / "schemas.json").read_text(encoding="utf-8")
)
"""Operator name -> schema, verbatim from torch_npu 2.13.0 (the private helpers' from its yaml)."""

KERNELS: dict[str, Callable[..., Any]] = {
    "npu_fused_infer_attention_score": fused.npu_fused_infer_attention_score,
    "npu_fused_infer_attention_score.out": fused.npu_fused_infer_attention_score_out,
    "npu_fused_infer_attention_score_v2": fused.npu_fused_infer_attention_score_v2,
    "npu_fused_infer_attention_score_v2.out": fused.npu_fused_infer_attention_score_v2_out,
    "_npu_fused_infer_attention_score_get_max_workspace": (
        fused._npu_fused_infer_attention_score_get_max_workspace
    ),
    "_npu_fused_infer_attention_score_v2_get_max_workspace": (
        fused._npu_fused_infer_attention_score_v2_get_max_workspace
    ),
    "_npu_fused_infer_attention_score_infer_output": (
        fused._npu_fused_infer_attention_score_infer_output
    ),
    "_npu_fused_infer_attention_score_v2_infer_output": (
        fused._npu_fused_infer_attention_score_v2_infer_output
    ),
    "npu_scatter_pa_kv_cache": scatter.npu_scatter_pa_kv_cache,
    "npu_scatter_nd_update": scatter.npu_scatter_nd_update,
    "npu_scatter_nd_update_": scatter.npu_scatter_nd_update_,
    "scatter_update": scatter.scatter_update,
    "scatter_update_": scatter.scatter_update_,
    "npu_rms_norm": elementwise.npu_rms_norm,
    "npu_add_rms_norm": elementwise.npu_add_rms_norm,
    "npu_rotary_mul": elementwise.npu_rotary_mul,
    "npu_apply_rotary_pos_emb": elementwise.npu_apply_rotary_pos_emb,
    "npu_mrope": elementwise.npu_mrope,
    "npu_swiglu": elementwise.npu_swiglu,
    "npu_top_k_top_p": elementwise.npu_top_k_top_p,
    "npu_format_cast": elementwise.npu_format_cast,
    "npu_format_cast_.acl_format": elementwise.npu_format_cast_,
    "npu_fusion_attention": fusion.npu_fusion_attention,
    "npu_prefetch": elementwise.npu_prefetch,
    "npu_moe_init_routing_v2": experts.npu_moe_init_routing_v2,
    "npu_grouped_matmul": experts.npu_grouped_matmul,
}

Shape = Callable[[dict[str, Any]], Any]


def _attention(operator: str, version: int) -> Shape:
    """Shapes of attention_out and softmax_lse (the latter (1,) unless asked for)."""
    heads = "num_heads" if version == 1 else "num_query_heads"
    flag = "softmax_lse_flag" if version == 1 else "return_softmax_lse"

    def shape(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        query: Tensor = given["query"]
        output, sums = fused.output_shapes(
            operator,
            query,
            given["value"],
            given["input_layout"],
            given[heads],
            given["num_key_value_heads"],
            given["block_table"] is not None,
        )
        lse = query.new_empty(sums if given[flag] else [1], dtype=torch.float32)
        return query.new_empty(output), lse

    return shape


def _norm(given: dict[str, Any]) -> tuple[Tensor, ...]:
    """Output and rstd of either norm; the sum as well for npu_add_rms_norm."""
    x: Tensor = given["input"] if "input" in given else given["x1"]
    kept = x.dim() - given["gamma"].dim()
    sizes = [*x.shape[:kept], *[1] * (x.dim() - kept)]
    rstd = x.new_empty(sizes, dtype=torch.float32)
    pair = (torch.empty_like(x), rstd)
    return pair if "input" in given else (*pair, torch.empty_like(x))


def _halved(given: dict[str, Any]) -> Tensor:
    """npu_swiglu: half the size along dim."""
    sizes = list(given["input"].shape)
    sizes[given["dim"]] //= 2
    return given["input"].new_empty(sizes)  # type: ignore[no-any-return]


def _fusion(given: dict[str, Any]) -> fusion.Result:
    """npu_fusion_attention's seven outputs."""
    query, value, heads = given["query"], given["value"], given["head_num"]
    layout = given["input_layout"]
    sizes, dim = list(query.shape), value.size(-1)
    if layout in ("BSH", "SBH"):
        dim = heads * value.size(2) // (given["key"].size(2) // (sizes[2] // heads))
    batch, rows = {"BSH": (0, 1), "SBH": (1, 0), "BSND": (0, 1), "BNSD": (0, 2)}.get(layout, (0, 0))
    sums = [sizes[0], heads, 8] if layout == "TND" else [sizes[batch], heads, sizes[rows], 8]
    maxima, totals = (query.new_empty(sums, dtype=torch.float32) for _ in range(2))
    return query.new_empty([*sizes[:-1], dim]), maxima, totals, query.new_empty(0), 0, 0, 0


def _routing(given: dict[str, Any]) -> experts.Four:
    """npu_moe_init_routing_v2's four outputs, counts in the form of expert_tokens_num_type 1."""
    x, total = given["x"], given["expert_idx"].numel()
    start, end = experts.active_range(given["active_expert_range"], given["expert_num"])
    return (
        x.new_empty([total, x.size(1)]),
        x.new_empty(total, dtype=torch.int32),
        x.new_empty(end - start, dtype=torch.int64),
        x.new_empty(total, dtype=torch.float32),
    )


def _grouped(given: dict[str, Any]) -> list[Tensor]:
    """npu_grouped_matmul's one y."""
    x: Tensor = given["x"][0]
    return [x.new_empty([x.size(0), given["weight"][0].size(2)])]


def _first(given: dict[str, Any]) -> Tensor:
    """A new tensor like the first argument."""
    return torch.empty_like(next(iter(given.values())))


def _same(given: dict[str, Any]) -> Any:
    """An in-place operator's first argument."""
    return next(iter(given.values()))


def _pair(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """New tensors like query and key."""
    return torch.empty_like(given["query"]), torch.empty_like(given["key"])


SHAPES: dict[str, Shape] = {
    "npu_fused_infer_attention_score": _attention("npu_fused_infer_attention_score", 1),
    "npu_fused_infer_attention_score_v2": _attention("npu_fused_infer_attention_score_v2", 2),
    "npu_fused_infer_attention_score.out": lambda given: tuple(given["out"]),
    "npu_fused_infer_attention_score_v2.out": lambda given: tuple(given["out"]),
    "npu_scatter_pa_kv_cache": lambda given: None,
    "npu_scatter_nd_update": _first,
    "npu_scatter_nd_update_": _same,
    "scatter_update": _first,
    "scatter_update_": _same,
    "npu_rms_norm": _norm,
    "npu_add_rms_norm": _norm,
    "npu_rotary_mul": _first,
    "npu_apply_rotary_pos_emb": _pair,
    "npu_mrope": _pair,
    "npu_swiglu": _halved,
    "npu_top_k_top_p": _first,
    "npu_format_cast": _first,
    "npu_format_cast_.acl_format": _same,
    "npu_fusion_attention": _fusion,
    "npu_prefetch": lambda given: None,
    "npu_moe_init_routing_v2": _routing,
    "npu_grouped_matmul": _grouped,
}
"""Shape functions of the kernels that cannot run on meta tensors themselves."""


def _meta(name: str) -> Callable[..., Any]:
    """The Meta kernel of an operator: its shape function over fully bound arguments."""
    kernel = KERNELS[name]
    shape = SHAPES.get(name)
    if shape is None:
        return kernel
    signature = inspect.signature(kernel)

    def meta(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return shape(dict(bound.arguments))

    return meta


def _library(kind: str) -> Any:
    """A torch.library.Library (whose class torch leaves untyped)."""
    make: Any = torch.library.Library
    return make(NAMESPACE, kind)


def implement(key: str = "CPU") -> list[torch.library.Library]:
    """Register the kernels for one dispatch key; keep the returned libraries alive.

    For a process in which torch_npu (or `install`) has defined the schemas.
    """
    library = _library("IMPL")
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, key)
    return [library]


@functools.cache
def install() -> list[torch.library.Library]:
    """Define every schema, register the CPU and the Meta kernels; keep the result alive.

    For a process without torch_npu; a second call does nothing.
    """
    library = _library("FRAGMENT")
    for name in KERNELS:
        library.define(SCHEMAS[name].removeprefix(f"{NAMESPACE}::"))
    libraries = [library, *implement("CPU")]
    for name in KERNELS:
        library.impl(name, _meta(name), "Meta")
    return libraries
