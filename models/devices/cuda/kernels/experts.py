"""The mixture-of-experts operator of a layer, in Triton.

For a few tokens, only the weights of the chosen experts are read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from nanoactor.models.devices.cuda.kernels import experts_dense, experts_few, experts_fp8, fp8
from nanoactor.models.devices.cuda.kernels.fp8_products.experts import HopperExperts, supports
from nanoactor.models.devices.cuda.kernels.fp8_products.launch import Kernels
from nanoactor.models.weights.fp8 import Fp8Blocks
from nanoactor.models.weights.linear import ExpertWeights, dense_experts_of
from nanoactor.models.weights.whole_step import Matrix

Grouped = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class TritonExperts:
    """Runs each token through its experts."""

    def __init__(self, weights: ExpertWeights, packs: bool, kernels: Kernels | None = None) -> None:
        """Keep FP8 experts packed if `packs` is set and the kernels support their blocks. `kernels`
        are the CUDA C++ kernels, if available. Raises `DriverError` if a driver call fails."""
        why = _refusal(weights) if packs else None
        packed = self._packed = _packed_of(weights) if packs else None
        self._few: experts_few.Matrices
        if packed is None:
            dense = dense_experts_of(weights, why)
            self._few = experts_few.dense_matrices(dense)
            self._grouped: Grouped = lambda x, ids, shares: experts_dense.grouped(
                x, dense, ids, shares
            )
        else:
            self._few = experts_few.packed_matrices(*packed)
            self._grouped = _grouped_of(packed, kernels)
        most = experts_few.MOST_PAIRS if packed is None else experts_few.MOST_PACKED_PAIRS
        self._most = min(most, len(self._few.down.weight))

    def matrices(self) -> tuple[Matrix, Matrix] | None:
        """Return the combined gate and up projections and the down projections as the whole-step
        kernel reads them, or None if it cannot."""
        few = self._few
        if self._packed is None:
            return few.gate_up.weight, few.down.weight
        pair, down = self._packed
        found = fp8.matrix_of(pair, few.gate_up.inputs), fp8.matrix_of(down, few.down.inputs)
        return None if found[0] is None or found[1] is None else (found[0], found[1])

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Implement `Operators.experts`."""
        if not len(x):
            return torch.empty_like(x)
        x, shares = x.contiguous(), shares.contiguous()
        if ids.numel() <= self._most:
            return experts_few.through(x, self._few, ids, shares)
        return _sum(self._grouped(x, ids, shares))


def _grouped_of(packed: tuple[fp8.Packed, fp8.Packed], kernels: Kernels | None) -> Grouped:
    if kernels is not None and supports(*packed):
        return HopperExperts(*packed, kernels)
    return lambda x, ids, shares: experts_fp8.grouped(x, *packed, ids, shares)


def _packed_of(weights: ExpertWeights) -> tuple[fp8.Packed, fp8.Packed] | None:
    pair, down = weights.gate_up, weights.down
    if not isinstance(pair, Fp8Blocks) or not isinstance(down, Fp8Blocks) or _refusal(weights):
        return None
    return fp8.packed_of(pair), fp8.packed_of(down)


def _refusal(weights: ExpertWeights) -> str | None:
    """Return why no kernel supports packed experts, or None if one does."""
    pair, down = weights.gate_up, weights.down
    if not isinstance(pair, Fp8Blocks) or not isinstance(down, Fp8Blocks):
        return None
    if pair.weight.shape[1] // 2 % pair.group:
        return f"a group of {pair.group} outputs spans the gate and up projections"
    return fp8.refusal(pair) or fp8.refusal(down)


def _sum(parts: torch.Tensor) -> torch.Tensor:
    """Sum (tokens, chosen, hidden) over the chosen experts to (tokens, hidden)."""
    tokens, chosen, hidden = parts.shape
    y = parts.new_empty(tokens, hidden)
    block = min(1024, triton.next_power_of_2(hidden))
    _add[(tokens, triton.cdiv(hidden, block))](
        parts, y, hidden, chosen=chosen, block=block, num_warps=4
    )
    return y


@triton.jit
def _add(parts, y, hidden, chosen: tl.constexpr, block: tl.constexpr):
    """Add the outputs of a token's experts in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for n in tl.static_range(chosen):
        at = (token * chosen + n) * hidden + j
        total += tl.load(parts + at, mask=j < hidden, other=0.0).to(tl.float32)
    tl.store(y + token * hidden + j, total.to(y.dtype.element_ty), mask=j < hidden)
