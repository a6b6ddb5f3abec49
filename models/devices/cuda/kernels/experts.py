"""The mixture-of-experts operator of a layer on NVIDIA GPUs, which chooses kernels by the number of
tokens.

With few tokens, only the weights of the chosen experts are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from nanoactor.models.devices.cuda.kernels import experts_dense, experts_few, experts_fp8, fp8
from nanoactor.models.devices.cuda.kernels.dependent_launch import (
    await_previous,
    dependent_launch,
)
from nanoactor.models.devices.cuda.kernels.expert_products import experts as expert_products
from nanoactor.models.devices.cuda.kernels.fp8_products.experts import (
    HopperExperts,
    experts_unsupported_reason,
)
from nanoactor.models.devices.cuda.kernels.fp8_products.launch import Kernels, log_fallback
from nanoactor.models.devices.cuda.kernels.optional import OptionalKernels
from nanoactor.models.devices.cuda.kernels.rounding import RoundingOperator, Rows
from nanoactor.models.weights.fp8 import Fp8Blocks
from nanoactor.models.weights.linear import DenseExperts, ExpertWeights, dense_experts_of
from nanoactor.models.weights.whole_step import Matrix

GroupedGemms = Callable[[torch.Tensor, Rows | None, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class HopperKernels:
    """The kernels in CUDA C++ for experts. They are loaded when they are first needed."""

    fp8: OptionalKernels[Kernels]
    bf16: OptionalKernels[expert_products.Kernels]


class TritonExperts(RoundingOperator):
    """The experts of a layer as an `ExpertsOperator`."""

    def __init__(
        self, weights: ExpertWeights, keep_packed: bool, kernels: HopperKernels | None = None
    ) -> None:
        """Prepare the weights.

        FP8 weights stay packed if `keep_packed` is True and the kernels support their blocks.
        `kernels` are the CUDA C++ kernels, or None to use only Triton. Raises `DriverError` if a
        driver call fails.
        """
        reason = _packed_unsupported_reason(weights) if keep_packed else None
        packed = self._packed = _packed_of(weights) if keep_packed else None
        self._few_token_matrices: experts_few.Matrices
        if packed is None:
            dense = dense_experts_of(weights, reason)
            self._few_token_matrices = experts_few.dense_matrices(dense)
            self._grouped_gemms = _dense_grouped_gemms(dense, kernels)
        else:
            self._few_token_matrices = experts_few.packed_matrices(*packed)
            self._grouped_gemms = _packed_grouped_gemms(packed, kernels)
        max_pairs = experts_few.MAX_PAIRS if packed is None else experts_few.MAX_PACKED_PAIRS
        self._max_pairs = min(max_pairs, len(self._few_token_matrices.down.weight))

    def matrices(self) -> tuple[Matrix, Matrix] | None:
        """Return (gate and up projections, down projections) of all experts for kernels that run a
        whole decode step, or None if such kernels cannot read the format."""
        experts = self._few_token_matrices
        if self._packed is None:
            return experts.gate_up.weight, experts.down.weight
        gate_up, down = self._packed
        readable = (
            fp8.whole_step_matrix(gate_up, experts.gate_up.inputs),
            fp8.whole_step_matrix(down, experts.down.inputs),
        )
        return None if readable[0] is None or readable[1] is None else (readable[0], readable[1])

    def memory_for(self, x: torch.Tensor) -> Rows | None:
        """Return memory for the rounded rows of `x`, (tokens, hidden), or None if there are so few
        tokens that the operator may not read them."""
        if self._packed is None or len(x) <= self._max_pairs:
            return None
        return fp8.memory_for(x, self._packed[0])

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts, (tokens, hidden)."""
        if not len(x):
            return torch.empty_like(x)
        rows = self.take(x)
        x, topk_weights = x.contiguous(), topk_weights.contiguous()
        if ids.numel() <= self._max_pairs:
            return experts_few.run_experts(x, self._few_token_matrices, ids, topk_weights)
        return _combine_experts(self._grouped_gemms(x, rows, ids, topk_weights))


def _dense_grouped_gemms(weights: DenseExperts, kernels: HopperKernels | None) -> GroupedGemms:
    is_exact = weights.down.dtype == torch.float32
    if kernels is not None and not is_exact and (loaded := kernels.bf16.get()):
        reason = expert_products.unsupported_reason(weights)
        if reason is None:
            experts = expert_products.HopperExperts(weights, loaded)
            return lambda x, rows, ids, topk_weights: experts(x, ids, topk_weights)
        expert_products.log_fallback(reason)
    return lambda x, rows, ids, topk_weights: experts_dense.grouped_gemms(
        x, weights, ids, topk_weights
    )


def _packed_grouped_gemms(
    packed: tuple[fp8.Packed, fp8.Packed], kernels: HopperKernels | None
) -> GroupedGemms:
    if kernels is not None and (loaded := kernels.fp8.get()):
        reason = experts_unsupported_reason(*packed)
        if reason is None:
            return HopperExperts(*packed, loaded)
        log_fallback(reason)
    return lambda x, rows, ids, topk_weights: experts_fp8.grouped_gemms(
        x, rows, *packed, ids, topk_weights
    )


def _packed_of(weights: ExpertWeights) -> tuple[fp8.Packed, fp8.Packed] | None:
    gate_up, down = weights.gate_up, weights.down
    if (
        not isinstance(gate_up, Fp8Blocks)
        or not isinstance(down, Fp8Blocks)
        or _packed_unsupported_reason(weights)
    ):
        return None
    return fp8.pack(gate_up), fp8.pack(down)


def _packed_unsupported_reason(weights: ExpertWeights) -> str | None:
    """Return why no kernel supports these packed (FP8) experts, or None if one does. The result is
    also None if the weights are not packed."""
    gate_up, down = weights.gate_up, weights.down
    if not isinstance(gate_up, Fp8Blocks) or not isinstance(down, Fp8Blocks):
        return None
    if gate_up.weight.shape[1] // 2 % gate_up.group:
        return f"a group of {gate_up.group} outputs spans the gate and up projections"
    return fp8.unsupported_reason(gate_up) or fp8.unsupported_reason(down)


def _combine_experts(pair_outputs: torch.Tensor) -> torch.Tensor:
    """Return the sum of `pair_outputs`, (tokens, top_k, hidden), over each token's experts, as
    (tokens, hidden)."""
    tokens, top_k, hidden = pair_outputs.shape
    y = pair_outputs.new_empty(tokens, hidden)
    block = min(1024, triton.next_power_of_2(hidden))
    _combine_pairs[(tokens, triton.cdiv(hidden, block))](
        pair_outputs,
        y,
        hidden,
        top_k=top_k,
        block=block,
        num_warps=4,
        **dependent_launch(),
    )
    return y


@triton.jit
def _combine_pairs(
    pair_outputs, y, hidden, top_k: tl.constexpr, block: tl.constexpr, overlaps: tl.constexpr
):
    """Sum the outputs of a token's experts, from the most to the least likely one."""
    await_previous(overlaps)
    token = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for k in tl.static_range(top_k):
        offsets = (token * top_k + k) * hidden + j
        total += tl.load(pair_outputs + offsets, mask=j < hidden, other=0.0).to(tl.float32)
    tl.store(y + token * hidden + j, total.to(y.dtype.element_ty), mask=j < hidden)
