"""The CPU device with our own kernels in place of PyTorch's many small operators."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numba
import torch
from torch.nn import functional as F

from nanoactor.models.batch import (
    AttentionBatch,
    DecodeRows,
    HeadTransform,
    KVCache,
    RowBuffers,
    RowChoice,
    SlotTables,
)
from nanoactor.models.devices.cpu.device import CPUDevice, has_instructions
from nanoactor.models.devices.cpu.kernels.attention import decode_attention
from nanoactor.models.devices.cpu.kernels.batch import advance, locate
from nanoactor.models.devices.cpu.kernels.elements import (
    EXPERTS,
    FP8,
    FP8_EXPERTS,
    LOGITS,
    STEPS,
    compile_kernels,
    knows,
)
from nanoactor.models.devices.cpu.kernels.elementwise import (
    add_rms_norm,
    norm_rotate_store,
    rms_norm,
    swiglu,
    takes_heads,
)
from nanoactor.models.devices.cpu.kernels.experts import experts_of_few
from nanoactor.models.devices.cpu.kernels.experts_fp8 import packed_experts_of_few
from nanoactor.models.devices.cpu.kernels.fp8 import fp8_product, fp8_unpacked
from nanoactor.models.devices.cpu.kernels.linear import product
from nanoactor.models.devices.cpu.kernels.sampling import sample_rows
from nanoactor.models.devices.protocols import ExpertsOperator, LinearOperator
from nanoactor.models.weights.fp8 import Fp8Blocks, experts_of
from nanoactor.models.weights.linear import (
    Dense,
    ExpertWeights,
    LinearWeights,
    dense_experts_of,
    dense_of,
)

# Measured by bench/cpu_kernels.py; docs/cpu.md has the results.
_FEW_ROWS = 2
"""Maximum number of rows for which our matrix product is faster than oneDNN's."""
_FEW_CHOICES = 256
"""Maximum number of token-expert pairs for which our kernel is faster than one product per
expert."""
_FEW_PACKED_ROWS = 4
"""Maximum number of rows for which packed weights are multiplied as they are read instead of being
unpacked first; for experts, the maximum mean number of rows per expert."""
_UNPACKED_OUTPUTS = 512
_LARGE_BYTES = 2 << 20
"""Size in bytes above which weights are read from memory rather than from a CPU cache. With AMX,
oneDNN multiplies such weights faster than our kernel."""
_SHARE = 0.1
"""Fraction of the free memory that may hold weights in our layout in addition to oneDNN's."""
_MANY_THREADS = 4
_MANY_ELEMENTS = 1 << 18
"""Minimum numbers of threads and elements for which PyTorch's operators, each of which uses all
threads, are faster than a single pass on one thread."""


def _unpacked(
    weights: Fp8Blocks, threads: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yield parts of a matrix with their biases, unpacking only one part at a time."""
    for at in range(0, len(weights.weight), _UNPACKED_OUTPUTS):
        some = slice(at, at + _UNPACKED_OUTPUTS)
        bias = None if weights.bias is None else weights.bias[some]
        yield fp8_unpacked(weights, some, threads), bias


def _has_product(weights: Fp8Blocks) -> bool:
    return weights.dtype in (torch.float32, torch.bfloat16)


class CompiledCPUDevice(CPUDevice):
    """The CPU with kernels compiled by Numba and matrix products by oneDNN. Dtypes other than
    float32 and bfloat16 use only PyTorch's operators."""

    def __init__(self) -> None:
        super().__init__()
        share = self.traits.default_memory_utilization + _SHARE
        self.traits = dataclasses.replace(
            self.traits, fused_sampling="every", default_memory_utilization=share
        )
        self._threads = 1
        self._spare = int(self.memory().free * _SHARE)

    def prepare_thread(self, threads: int) -> None:
        """Limit the number of threads of PyTorch and Numba."""
        super().prepare_thread(threads)
        self._threads = min(threads, numba.config.NUMBA_NUM_THREADS)
        numba.set_num_threads(self._threads)

    def check(self, dtype: torch.dtype, block_size: int, head_dim: int) -> None:
        """Accept every configuration, and compile the kernels."""
        self._compile(dtype, STEPS, LOGITS)
        self._compile(torch.float32, LOGITS)  # masked logits are float32

    def _compile(self, dtype: torch.dtype, *purposes: str) -> None:
        compile_kernels(dtype, parallel=self._threads > 1, purposes=purposes)

    def _takes(self, x: torch.Tensor) -> bool:
        many = self._threads >= _MANY_THREADS and x.numel() >= _MANY_ELEMENTS
        return knows(x) and not many

    # -- the batch ------------------------------------------------------------------------

    def advance(
        self, tables: SlotTables, rows: DecodeRows, into: RowBuffers, ids: torch.Tensor
    ) -> None:
        """Advance all rows in one pass."""
        advance(tables, rows, into, ids)

    def locate(
        self,
        tables: SlotTables,
        slots: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Locate all tokens in one pass."""
        locate(tables, slots, positions, slot_mapping)

    def sample_rows(self, rows: RowChoice) -> None:
        """Sample all rows, whatever their parameters."""
        sample_rows(rows, self._threads)

    # -- operators ------------------------------------------------------------------------

    def linear(self, weights: LinearWeights) -> LinearOperator:
        """Keep weights in two layouts if memory allows, one for few rows and one for many. FP8
        weights stay packed."""
        if isinstance(weights, Fp8Blocks) and _has_product(weights):
            return self._packed(weights)
        dense = dense_of(weights)
        many, weight, bias = super().linear(dense), dense.weight, dense.bias
        slower = weight.nbytes > _LARGE_BYTES and has_instructions("amx_tile")
        if slower or not knows(weight) or weight.nbytes > self._spare:
            return many
        self._spare -= weight.nbytes
        # Our copy is in large pages, so that address translation does not slow down reads.
        own = self.zeros(*weight.shape, dtype=weight.dtype).copy_(weight)

        def few_or_many(x: torch.Tensor) -> torch.Tensor:
            if x.shape[:-1].numel() > _FEW_ROWS:
                return many(x)
            return product(x, own, bias, self._threads)

        return few_or_many

    def _packed(self, weights: Fp8Blocks) -> LinearOperator:
        self._compile(weights.dtype, FP8)

        def few_or_many(x: torch.Tensor) -> torch.Tensor:
            if x.shape[:-1].numel() <= _FEW_PACKED_ROWS:
                return fp8_product(x, weights, self._threads)
            return torch.cat([F.linear(x, *part) for part in _unpacked(weights, self._threads)], -1)

        return few_or_many

    def _packed_experts(self, gate_up: Fp8Blocks, down: Fp8Blocks) -> ExpertsOperator:
        self._compile(down.dtype, FP8_EXPERTS)
        many = self.one_by_one(*(map(self._packed, experts_of(one)) for one in (gate_up, down)))
        plain = gate_up.block == down.block and not gate_up.offset
        most = _FEW_PACKED_ROWS * len(down.weight)

        def few_or_many(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
            if not plain or ids.numel() > most:
                return many(x, ids, shares)
            return packed_experts_of_few(x, gate_up, down, ids, shares, self._threads)

        return few_or_many

    def experts(self, weights: ExpertWeights) -> ExpertsOperator:
        """Use our kernel for few tokens and PyTorch's products for many. FP8 weights stay
        packed."""
        pair, down = weights.gate_up, weights.down
        if isinstance(pair, Fp8Blocks) and isinstance(down, Fp8Blocks) and _has_product(down):
            return self._packed_experts(pair, down)
        dense = dense_experts_of(weights)
        self._compile(dense.down.dtype, EXPERTS)
        many = super().experts(ExpertWeights(Dense(dense.gate_up), Dense(dense.down)))

        def few_or_many(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
            if not knows(x) or ids.numel() > _FEW_CHOICES:
                return many(x, ids, shares)
            return experts_of_few(x, dense, ids, shares, self._threads)

        return few_or_many

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalize in one pass."""
        norm = rms_norm if self._takes(x) and weight.dtype == x.dtype else super().rms_norm
        return norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add and normalize in one pass."""
        known = self._takes(x) and weight.dtype == x.dtype
        norm = add_rms_norm if known else super().add_rms_norm
        return norm(x, residual, weight, eps)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Compute SwiGLU in one pass."""
        return swiglu(gate_up) if self._takes(gate_up) else super().swiglu(gate_up)

    def rotation(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tables in float32, the dtype in which the kernels compute."""
        return cos.float().contiguous(), sin.float().contiguous()

    def norm_rotate_store(
        self, qkv: torch.Tensor, how: HeadTransform, cache: KVCache, slots: torch.Tensor
    ) -> torch.Tensor:
        """Normalize, rotate and store in one pass."""
        known = self._takes(qkv) and takes_heads(qkv, how)
        store = norm_rotate_store if known else super().norm_rotate_store
        return store(qkv, how, cache, slots)

    def attention(
        self, queries: torch.Tensor, cache: KVCache, batch: AttentionBatch, scale: float
    ) -> torch.Tensor:
        """Compute attention. A decode-only step needs no tensor that joins prefill and decode
        results."""
        if batch.plan.decodes is not None and not batch.plan.prefills:
            return self._decode(queries, cache, batch, scale)
        return super().attention(queries, cache, batch, scale)

    def _plan_decodes(self, batch: AttentionBatch) -> Any:
        """Return True as a placeholder: the kernel reads the block tables itself."""
        return True

    def _decode(
        self, queries: torch.Tensor, cache: KVCache, batch: AttentionBatch, scale: float
    ) -> torch.Tensor:
        """Compute decode attention, reading the blocks in place."""
        if knows(queries):
            return decode_attention(queries, cache, batch, scale, self._threads)
        plan = dataclasses.replace(batch.plan, decodes=super()._plan_decodes(batch))
        return super()._decode(queries, cache, dataclasses.replace(batch, plan=plan), scale)
