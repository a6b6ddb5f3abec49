"""The CPU device with kernels compiled by Numba. Each kernel replaces many small PyTorch
operators."""

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
    FusedSamplingInputs,
    HeadTransform,
    KVCache,
    RowBuffers,
    SlotTables,
)
from nanoactor.models.devices.cpu.device import CPUDevice, has_instructions
from nanoactor.models.devices.cpu.kernels.attention import decode_attention
from nanoactor.models.devices.cpu.kernels.batch import advance, fill_slot_mapping
from nanoactor.models.devices.cpu.kernels.elements import (
    EXPERTS,
    FP8,
    FP8_EXPERTS,
    LOGITS,
    STEPS,
    compile_kernels,
    has_supported_dtype,
)
from nanoactor.models.devices.cpu.kernels.elementwise import (
    add_rms_norm,
    can_rotate_whole_heads,
    norm_rotate_store,
    rms_norm,
    swiglu,
)
from nanoactor.models.devices.cpu.kernels.experts import few_token_experts
from nanoactor.models.devices.cpu.kernels.experts_fp8 import few_token_fp8_experts
from nanoactor.models.devices.cpu.kernels.fp8 import dequantize_outputs, fp8_linear
from nanoactor.models.devices.cpu.kernels.linear import few_row_linear
from nanoactor.models.devices.cpu.kernels.sampling import sample_rows
from nanoactor.models.devices.protocols import Consumer, ExpertsOperator, LinearOperator
from nanoactor.models.weights.fp8 import Fp8Blocks, iter_experts
from nanoactor.models.weights.linear import (
    Dense,
    ExpertWeights,
    LinearWeights,
    dense_experts_of,
    dense_of,
)

# Measured with bench/cpu_kernels.py; the results are in docs/cpu.md.
_MAX_KERNEL_ROWS = 2
"""Maximum number of rows for which our matrix product is faster than oneDNN's."""
_MAX_KERNEL_PAIRS = 256
"""Maximum number of token-expert pairs for which our kernel is faster than one matrix product per
expert."""
_MAX_PACKED_ROWS = 4
"""Maximum number of rows for which packed FP8 weights are unpacked on the fly, instead of before
the product. For experts, this is the maximum mean number of rows per expert."""
_UNPACK_CHUNK = 512
_LARGE_BYTES = 2 << 20
"""Size in bytes above which weights do not stay in a CPU cache. With AMX, oneDNN multiplies such
weights faster than our kernel does."""
_REPACK_FRACTION = 0.1
"""Fraction of the free memory that may be spent on copies of weights in our kernel's layout."""
_TORCH_MIN_THREADS = 4
_TORCH_MIN_ELEMENTS = 1 << 18
"""Minimum numbers of threads and of elements for which PyTorch's operators, which use all threads,
are faster than our single-threaded pass."""


def _unpacked_parts(
    weights: Fp8Blocks, threads: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yield (unpacked weight, bias) for consecutive ranges of a packed matrix's outputs. Only one
    range is unpacked at a time."""
    for start in range(0, len(weights.weight), _UNPACK_CHUNK):
        chunk = slice(start, start + _UNPACK_CHUNK)
        bias = None if weights.bias is None else weights.bias[chunk]
        yield dequantize_outputs(weights, chunk, threads), bias


def _has_fp8_kernel(weights: Fp8Blocks) -> bool:
    return weights.dtype in (torch.float32, torch.bfloat16)


class CompiledCPUDevice(CPUDevice):
    """The CPU with elementwise and attention kernels compiled by Numba, and matrix products by
    oneDNN.

    Dtypes other than float32 and bfloat16 use only PyTorch's operators.
    """

    def __init__(self) -> None:
        super().__init__()
        utilization = self.traits.default_memory_utilization + _REPACK_FRACTION
        self.traits = dataclasses.replace(
            self.traits,
            fused_sampling="all",
            default_memory_utilization=utilization,
            multiplies_packed=True,
        )
        self._threads = 1
        self._repack_budget = int(self.memory().free * _REPACK_FRACTION)

    def prepare_thread(self, threads: int) -> None:
        """Limit PyTorch and Numba to `threads` threads in the calling thread."""
        super().prepare_thread(threads)
        self._threads = min(threads, numba.config.NUMBA_NUM_THREADS)
        numba.set_num_threads(self._threads)

    def check(self, dtype: torch.dtype, block_size: int, head_dim: int) -> None:
        """Compile the kernels that the configuration needs. Every configuration is supported."""
        self._compile(dtype, STEPS, LOGITS)
        self._compile(torch.float32, LOGITS)  # masked logits are float32

    def _compile(self, dtype: torch.dtype, *purposes: str) -> None:
        compile_kernels(dtype, parallel=self._threads > 1, purposes=purposes)

    def _uses_kernel(self, x: torch.Tensor) -> bool:
        torch_is_faster = self._threads >= _TORCH_MIN_THREADS and x.numel() >= _TORCH_MIN_ELEMENTS
        return has_supported_dtype(x) and not torch_is_faster

    # -- the batch ------------------------------------------------------------------------

    def advance(
        self, tables: SlotTables, rows: DecodeRows, buffers: RowBuffers, ids: torch.Tensor
    ) -> None:
        """Compute the inputs of all decode rows in one pass, and write them to `buffers`."""
        advance(tables, rows, buffers, ids)

    def fill_slot_mapping(
        self,
        tables: SlotTables,
        slots: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the cache position of every token to `slot_mapping`, in one pass."""
        fill_slot_mapping(tables, slots, positions, slot_mapping)

    def sample_rows(self, inputs: FusedSamplingInputs) -> None:
        """Sample a token for each row in one pass. All sampling parameters are supported."""
        sample_rows(inputs, self._threads)

    # -- operators ------------------------------------------------------------------------

    def linear(self, weights: LinearWeights) -> LinearOperator:
        """Return a linear operator with these weights, which selects a kernel by the number of
        rows.

        If memory allows, the weights are stored in two layouts, one for few rows and one for many.
        FP8 weights stay packed.
        """
        if isinstance(weights, Fp8Blocks) and _has_fp8_kernel(weights):
            return self._packed_linear(weights)
        dense = dense_of(weights)
        fallback, weight, bias = super().linear(dense), dense.weight, dense.bias
        onednn_is_faster = weight.nbytes > _LARGE_BYTES and has_instructions("amx_tile")
        if (
            onednn_is_faster
            or not has_supported_dtype(weight)
            or weight.nbytes > self._repack_budget
        ):
            return fallback
        self._repack_budget -= weight.nbytes
        # Our copy is in large pages, so that address translation does not slow down reads.
        repacked = self.zeros(*weight.shape, dtype=weight.dtype).copy_(weight)

        def dispatch(x: torch.Tensor) -> torch.Tensor:
            if x.shape[:-1].numel() > _MAX_KERNEL_ROWS:
                return fallback(x)
            return few_row_linear(x, repacked, bias, self._threads)

        return dispatch

    def _packed_linear(self, weights: Fp8Blocks) -> LinearOperator:
        self._compile(weights.dtype, FP8)

        def dispatch(x: torch.Tensor) -> torch.Tensor:
            if x.shape[:-1].numel() <= _MAX_PACKED_ROWS:
                return fp8_linear(x, weights, self._threads)
            return torch.cat(
                [F.linear(x, *part) for part in _unpacked_parts(weights, self._threads)], -1
            )

        return dispatch

    def _packed_experts(self, gate_up: Fp8Blocks, down: Fp8Blocks) -> ExpertsOperator:
        self._compile(down.dtype, FP8_EXPERTS)
        fallback = self.sequential_experts(
            *(map(self._packed_linear, iter_experts(matrix)) for matrix in (gate_up, down))
        )
        is_aligned = gate_up.block == down.block and not gate_up.offset
        max_pairs = _MAX_PACKED_ROWS * len(down.weight)

        def dispatch(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
            if not is_aligned or ids.numel() > max_pairs:
                return fallback(x, ids, shares)
            return few_token_fp8_experts(x, gate_up, down, ids, shares, self._threads)

        return dispatch

    def experts(self, weights: ExpertWeights) -> ExpertsOperator:
        """Return a function that runs a layer's experts. It uses our kernel for few tokens and
        PyTorch's products for many. FP8 weights stay packed."""
        gate_up, down = weights.gate_up, weights.down
        if isinstance(gate_up, Fp8Blocks) and isinstance(down, Fp8Blocks) and _has_fp8_kernel(down):
            return self._packed_experts(gate_up, down)
        dense = dense_experts_of(weights)
        self._compile(dense.down.dtype, EXPERTS)
        fallback = super().experts(ExpertWeights(Dense(dense.gate_up), Dense(dense.down)))

        def dispatch(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
            if not has_supported_dtype(x) or ids.numel() > _MAX_KERNEL_PAIRS:
                return fallback(x, ids, shares)
            return few_token_experts(x, dense, ids, shares, self._threads)

        return dispatch

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, consumer: Consumer = None
    ) -> torch.Tensor:
        """Return the RMS norm of `x`, computed in one pass."""
        norm = rms_norm if self._uses_kernel(x) and weight.dtype == x.dtype else super().rms_norm
        return norm(x, weight, eps)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        consumer: Consumer = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (RMS norm of x + residual, x + residual), computed in one pass."""
        uses_kernel = self._uses_kernel(x) and weight.dtype == x.dtype
        norm = add_rms_norm if uses_kernel else super().add_rms_norm
        return norm(x, residual, weight, eps)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return SiLU(gate) * up, computed in one pass."""
        return swiglu(gate_up) if self._uses_kernel(gate_up) else super().swiglu(gate_up)

    def rotation(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines in float32, the dtype in which the kernels compute."""
        return cos.float().contiguous(), sin.float().contiguous()

    def norm_rotate_store(
        self,
        qkv: torch.Tensor,
        transform: HeadTransform,
        cache: KVCache,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """Normalize and rotate queries and keys, store keys and values in the cache, and return the
        queries, in one pass."""
        uses_kernel = self._uses_kernel(qkv) and can_rotate_whole_heads(qkv, transform)
        store = norm_rotate_store if uses_kernel else super().norm_rotate_store
        return store(qkv, transform, cache, slot_mapping)

    def attention(
        self,
        queries: torch.Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        scale: float,
        consumer: Consumer = None,
    ) -> torch.Tensor:
        """Return the attention output of all rows. In a step without prefill rows, this is the
        decode kernel's own output tensor, which saves a copy."""
        if batch.plan.decodes is not None and not batch.plan.prefills:
            return self._decode(queries, cache, batch, scale)
        return super().attention(queries, cache, batch, scale)

    def _plan_decodes(self, batch: AttentionBatch) -> Any:
        """Return True, which only marks that there are decode rows. The kernel reads the block
        tables itself."""
        return True

    def _decode(
        self, queries: torch.Tensor, cache: KVCache, batch: AttentionBatch, scale: float
    ) -> torch.Tensor:
        """Return the attention output of the decode rows. The kernel reads the cache blocks in
        place."""
        if has_supported_dtype(queries):
            return decode_attention(queries, cache, batch, scale, self._threads)
        plan = dataclasses.replace(batch.plan, decodes=super()._plan_decodes(batch))
        return super()._decode(queries, cache, dataclasses.replace(batch, plan=plan), scale)
