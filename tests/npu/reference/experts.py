"""Mixture of experts: the routing of rows to experts and the grouped matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tests.npu.reference import contract
from tests.npu.reference.contract import FLOAT_TYPES, Checker

Four = tuple[Tensor, Tensor, Tensor, Tensor]
Tensors = Sequence[Tensor]
EVERY_EXPERT: list[int] = []
"""The default of active_expert_range: 0 to expert_num."""
UNDEFINED_INDEX = torch.iinfo(torch.int32).max
"""What fills an index that no document defines; whoever indexes with it fails."""
QUANT_MODES = tuple(mode for mode in range(18) if mode != 10)
MOST_EXPERTS = 10240
MOST_GROUPS = 1024
MOST_TENSORS = 128
INNER_LIMIT = 65536


def _check_routing(
    check: Checker, x: Tensor, expert_idx: Tensor, active_num: int, expert_num: int
) -> None:
    """Ranks, dtypes, one row of experts for each row of x, ids below expert_num."""
    check.dtype("x", x, (*FLOAT_TYPES, torch.int8))
    check.rank("x", x, 2)
    check.dtype("expert_idx", expert_idx, (torch.int32,))
    check.rank("expert_idx", expert_idx, 2)
    check.shape("expert_idx", expert_idx, (x.size(0), expert_idx.size(1)), "(NUM_ROWS, K)")
    total = expert_idx.numel()
    check.require(active_num == total, "active_num", active_num, f"NUM_ROWS*K = {total}")
    check.require(
        0 < expert_num <= MOST_EXPERTS, "expert_num", expert_num, f"a number in (0, {MOST_EXPERTS}]"
    )
    if total:
        low, high = int(expert_idx.min()), int(expert_idx.max())
        check.require(
            low >= 0 and high < expert_num,
            "expert_idx",
            f"{low}..{high}",
            f"ids in [0, {expert_num})",
        )


def active_range(active_expert_range: Sequence[int], expert_num: int) -> tuple[int, int]:
    """The half-open range of active experts; all of them where none is given."""
    start, end = active_expert_range or (0, expert_num)
    return start, end


def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = EVERY_EXPERT,
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> Four:
    """(expanded_x, expanded_row_idx, counts, expanded_scale), the rows of x sorted by expert.

    Stable: within an expert by flat position in expert_idx. Of the sorted positions only the
    first available ones (whose expert is active) are defined. row_idx_type 1 (scatter): sorted
    place -> flat position, the rest undefined; 0 (gather): flat position -> sorted place, the rest
    -1. expanded_scale is undefined without a scale; expert_capacity is not read without drop_pad.
    """
    check = Checker("npu_moe_init_routing_v2")
    check.choice("quant_mode", quant_mode, (-1,), QUANT_MODES)
    check.choice("drop_pad_mode", drop_pad_mode, (0,), (1,))
    check.choice("expert_tokens_num_type", expert_tokens_num_type, (1,), (0, 2))
    check.choice("expert_tokens_num_flag", expert_tokens_num_flag, (True,), (False,))
    check.choice("row_idx_type", row_idx_type, (0, 1))
    check.require(offset is None, "offset", "a Tensor", "None without quantisation")
    check.refuse({"scale": scale, "x_dtype": x_dtype}, {"scale": None, "x_dtype": None})
    _check_routing(check, x, expert_idx, active_num, expert_num)
    bounds = list(active_expert_range)
    check.require(len(bounds) in (0, 2), "active_expert_range", bounds, "[start, end] or nothing")
    start, end = active_range(bounds, expert_num)
    check.require(
        0 <= start < end <= expert_num,
        "active_expert_range",
        bounds,
        f"0 <= start < end <= expert_num = {expert_num}",
    )

    experts = expert_idx.flatten().long()
    active = (experts >= start) & (experts < end)
    available = int(active.sum())
    order = experts.masked_fill(~active, expert_num).argsort(stable=True)[:available]
    fill = contract.UNDEFINED_VALUE if x.is_floating_point() else 0
    expanded = x.new_full((len(experts), x.size(1)), fill)
    expanded[:available] = x[order // max(expert_idx.size(1), 1)]
    if row_idx_type == 1:
        rows = torch.full((len(experts),), UNDEFINED_INDEX, dtype=torch.int32)
        rows[:available] = order.int()
    else:
        rows = torch.full((len(experts),), -1, dtype=torch.int32)
        rows[order] = torch.arange(available, dtype=torch.int32)
    counts = torch.bincount(experts[active] - start, minlength=end - start)
    scales = torch.full((len(experts),), contract.UNDEFINED_VALUE, dtype=torch.float32)
    return expanded, rows, counts, scales


def _check_operands(check: Checker, x: Tensor, weight: Tensor) -> None:
    """x (M, K) contiguous; weight (E, K, N), as it is or as a transposed view; one dtype."""
    check.choice("x", x.dtype, FLOAT_TYPES, (torch.int8, torch.int32))
    check.choice("weight", weight.dtype, FLOAT_TYPES, (torch.int8, torch.int32))
    check.same_dtype("weight", weight, "x", x)
    check.rank("x", x, 2)
    check.rank("weight", weight, 3)
    check.contiguous("x", x)
    straight = weight.is_contiguous()
    check.require(
        straight or weight.transpose(1, 2).is_contiguous(),
        "weight",
        f"strides {weight.stride()} of shape {tuple(weight.shape)}",
        "a contiguous tensor or one with its last two axes transposed",
    )
    check.shape("weight", weight, (weight.size(0), x.size(1), weight.size(2)), "(E, K, N)")
    for name, size in (("x", x.size(1)), ("weight", weight.size(2 if straight else 1))):
        check.require(size < INNER_LIMIT, name, f"last axis {size}", f"less than {INNER_LIMIT}")


def _ends(
    check: Checker, group_list: Tensor | None, kind: int | None, groups: int, rows: int
) -> list[int]:
    """Where the rows of each group end, out of running sums (0) or sizes (1)."""
    if group_list is None:
        check.require(False, "group_list", None, "a Tensor")
        raise AssertionError
    check.dtype("group_list", group_list, (torch.int64,))
    check.rank("group_list", group_list, 1)
    check.shape("group_list", group_list, (groups,), "one number a group of weight")
    least = 2 if kind == 1 else 1
    check.require(
        least <= groups <= MOST_GROUPS,
        "group_list",
        f"{groups} groups",
        f"{least} to {MOST_GROUPS} groups for group_list_type {kind}",
    )
    given = group_list.tolist()
    check.require(min(given) >= 0, "group_list", given, "no negative number")
    if kind == 1:
        check.require(sum(given) == rows, "group_list", given, f"a sum of {rows}, the rows of x")
        return [sum(given[: index + 1]) for index in range(groups)]
    rising = all(one <= other for one, other in pairwise(given))
    check.require(rising, "group_list", given, "running sums, which do not fall")
    check.require(given[-1] == rows, "group_list", given, f"{rows}, the rows of x, at the end")
    return given


def npu_grouped_matmul(
    x: Tensors,
    weight: Tensors,
    *,
    bias: Tensors | None = None,
    scale: Tensors | None = None,
    offset: Tensors | None = None,
    antiquant_scale: Tensors | None = None,
    antiquant_offset: Tensors | None = None,
    per_token_scale: Tensors | None = None,
    group_list: Tensor | None = None,
    activation_input: Tensors | None = None,
    activation_quant_scale: Tensors | None = None,
    activation_quant_offset: Tensors | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: Sequence[int] | None = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[Tensor]:
    """[y]: each group of consecutive rows of x times its own matrix of weight.

    Implemented: one x (M, K), one weight (E, K, N), one y (M, N), nothing quantised. Products and
    sums in float32, rounded once.
    """
    check = Checker("npu_grouped_matmul")
    for name, value in (
        ("offset", offset),
        ("activation_input", activation_input),
        ("activation_quant_scale", activation_quant_scale),
        ("activation_quant_offset", activation_quant_offset),
    ):
        check.require(value is None, name, "given", "None, the only supported value")
    given: dict[str, object] = {
        "bias": bias,
        "scale": scale,
        "antiquant_scale": antiquant_scale,
        "antiquant_offset": antiquant_offset,
        "per_token_scale": per_token_scale,
        "output_dtype": output_dtype,
        "x_dtype": x_dtype,
        "weight_dtype": weight_dtype,
        "scale_dtype": scale_dtype,
        "per_token_scale_dtype": per_token_scale_dtype,
    }
    check.refuse(given, dict.fromkeys(given))
    for name, tensors in (("x", x), ("weight", weight)):
        count = len(tensors)
        check.choice(name, count, (1,), range(2, MOST_TENSORS + 1))
    check.choice("group_type", group_type, (0,), (-1, 2))
    check.choice("split_item", split_item, (2, 3), (0, 1))
    _check_operands(check, x[0], weight[0])
    check.choice("group_list_type", group_list_type, (0, 1))
    check.choice("act_type", act_type, (0,))
    check.require(tuning_config is None, "tuning_config", tuning_config, "None with floats")

    left, right = x[0], weight[0]
    ends = _ends(check, group_list, group_list_type, right.size(0), left.size(0))
    output = left.new_empty((left.size(0), right.size(2)))
    for matrix, (start, end) in zip(right, pairwise([0, *ends]), strict=True):
        output[start:end] = left[start:end].float() @ matrix.float()
    return [output]
