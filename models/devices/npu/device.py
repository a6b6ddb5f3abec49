"""Ascend NPUs: torch_npu's fused operators, paged attention, and steps captured as graphs.

Operators are called by their schemas, through `torch.ops.npu`, so that they can be emulated. This
code has never run on an NPU: docs/ascend.md lists what has been verified and how.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from nanoactor.models.batch import (
    AttentionBatch,
    DecodeRows,
    ForwardInputs,
    FusedSamplingInputs,
    HeadTransform,
    KVCache,
    RowBuffers,
    SamplingBatch,
    SlotTables,
)
from nanoactor.models.devices.npu import sampling
from nanoactor.models.devices.npu.attention import MASK_SIZE, Attention, make_attention
from nanoactor.models.devices.npu.graphs import CompiledStep, NativeCapture, graph_cache_directory
from nanoactor.models.devices.npu.runtime import AscendRuntime
from nanoactor.models.devices.portable import PortableOperators
from nanoactor.models.devices.protocols import (
    CapturedFunction,
    CapturedStep,
    Consumer,
    DeviceTraits,
    ExpertsOperator,
    ForwardFunction,
    LinearOperator,
    Memory,
)
from nanoactor.models.errors import UnsupportedModel
from nanoactor.models.limits import FROZEN
from nanoactor.models.options import DeviceOptions
from nanoactor.models.seq_lens import HostSeqLens
from nanoactor.models.weights.linear import (
    DenseExperts,
    ExpertWeights,
    LinearWeights,
    Router,
    dense_experts_of,
    dense_of,
)

log = logging.getLogger("nanoactor.models.npu")

_MAX_SEGMENTS = 1024
_MAX_GROUPS = 1024
"""Maximum number of groups in a grouped GEMM."""
# Head sizes for which A2 and A3 document npu_apply_rotary_pos_emb; others use npu_rotary_mul.
_FUSED_ROTARY_HEAD_DIMS = (64, 128)


class NPUDevice(PortableOperators):
    """One NPU: its memory, streams and graphs, and the operators that layers and executors call."""

    def __init__(self, runtime: AscendRuntime, options: DeviceOptions) -> None:
        """Set up the device. `runtime` is the part that talks to the driver; tests replace it."""
        self.runtime = runtime
        self.torch_device = runtime.torch_device
        mode = "npugraph" if options.graph_mode == "auto" else options.graph_mode
        self.graph_mode = mode
        self.traits = DeviceTraits(
            name=runtime.name,
            collective_backend=runtime.collective_backend,
            default_dtype=runtime.default_dtype,
            default_block_size=128,
            default_memory_utilization=0.9,
            captures_graphs=mode != "eager",
            narrows_last_layer=False,
            min_rows_for_runs=1,
            fused_sampling="greedy",
        )
        self._options = options
        compiled = mode in ("max-autotune", "reduce-overhead")
        self._directory = graph_cache_directory(options.graph_cache_dir) if compiled else Path()
        self._attention: Attention = make_attention(options.attention_layout)
        self._compiled: CompiledStep | None = None
        self._mask: torch.Tensor | None = None
        log.info(
            "%s, graph mode %s, attention layout %s, weights %s",
            runtime.chip,
            mode,
            options.attention_layout,
            options.weight_format,
        )

    # -- the machine ----------------------------------------------------------------------

    def prepare_thread(self, threads: int) -> None:
        """Select the NPU for the calling thread, and limit its CPU threads."""
        self.runtime.prepare_thread(threads)

    def supports(self, dtype: torch.dtype) -> bool:
        """Return True if the NPU's fused attention supports this dtype."""
        return self.runtime.supports(dtype)

    def check(self, dtype: torch.dtype, block_size: int, head_dim: int) -> None:
        """Raise `UnsupportedModel` if fused attention does not support the dtype, block size or
        head size."""
        if not self.supports(dtype):
            types = dtype, self.traits.default_dtype
            requested, supported = (str(value).removeprefix("torch.") for value in types)
            raise UnsupportedModel(
                f"{self.runtime.chip} does not support fused attention in {requested}; use "
                f"dtype {supported}"
            )
        head_dims = self.runtime.packed_head_dims
        if self._options.attention_layout == "tnd" and head_dims and head_dim not in head_dims:
            raise UnsupportedModel(
                "attention_layout 'tnd' supports only a head_dim of "
                f"{', '.join(map(str, head_dims))}, but the model's is {head_dim}; use "
                "attention_layout 'bnsd'"
            )
        multiple, largest = self.runtime.block_multiple, self.runtime.max_block_size
        if block_size % multiple or block_size > largest:
            raise UnsupportedModel(
                f"block_size {block_size} is not supported on an NPU, where fused attention "
                f"requires a multiple of {multiple} that is at most {largest}"
            )

    def memory(self) -> Memory:
        """Return the total and free memory in bytes that the driver reports."""
        return self.runtime.memory()

    def reset_peak_memory(self) -> None:
        """Reset the peak statistics of PyTorch's allocator, and store the current allocation."""
        self.runtime.reset_peak_memory()

    def peak_memory(self) -> int:
        """Return the peak allocation in bytes of PyTorch's allocator, minus the allocation at
        `reset_peak_memory`."""
        return self.runtime.peak_memory()

    def empty_pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor in page-locked host memory."""
        return self.runtime.empty_pinned(*shape, dtype=dtype)

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros on the NPU."""
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def timed_event(self) -> Any:
        """Return a new event that can measure time."""
        return self.runtime.event()

    def synchronize(self) -> None:
        """Wait until all streams of the device are idle."""
        self.runtime.synchronize()

    def stream(self) -> AbstractContextManager[None]:
        """Return a context manager that makes a separate stream current."""
        return self.runtime.stream()

    # -- graphs ---------------------------------------------------------------------------

    def capture(
        self, function: CapturedFunction, lengths: HostSeqLens, in_flight: int
    ) -> CapturedStep:
        """Capture `function` as `in_flight` native graphs, which take turns, or compile its forward
        pass with torchair. The graph mode determines which."""
        if self.graph_mode == "npugraph":
            return NativeCapture(self.runtime, function, lengths, in_flight)
        compiled = CompiledStep(self.graph_mode, self.runtime, self._options, self._directory)
        captured = _CompiledCapture(self, function, compiled)
        try:
            captured.replay(lengths)  # compiles
        except (AssertionError, ImportError, ValueError) as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        return captured

    def run(self, forward: ForwardFunction, inputs: ForwardInputs) -> torch.Tensor:
        """Run the forward pass and return the hidden states. Within `run_compiled`, the compiled
        forward pass runs instead of single operators."""
        run = self._compiled or super().run
        return run(forward, inputs)

    def run_compiled(
        self, compiled: CompiledStep, function: CapturedFunction, lengths: HostSeqLens
    ) -> torch.Tensor:
        """Call `function` and return its result. When it calls `run`, the compiled forward pass is
        executed."""
        self._compiled = compiled
        try:
            return function(lengths)
        finally:
            self._compiled = None

    # -- the batch ------------------------------------------------------------------------

    def dummy_blocks(self, rows: int, block_size: int) -> int:
        """Return the number of blocks in which each of `rows` padding rows has a position of its
        own. The operator that writes the cache does not accept the same position twice."""
        return -(-rows // block_size)

    def advance(
        self, tables: SlotTables, rows: DecodeRows, buffers: RowBuffers, ids: torch.Tensor
    ) -> None:
        """Compute the inputs of all decode rows.

        Padding rows, and rows of frozen slots (stopped by one of their `freeze_ids`), all write to
        the first position of the dummy slot. They are moved to separate positions from there on,
        because the operator that writes the cache does not accept the same position twice.
        """
        target_slots = self._advance(tables, rows, buffers, ids)
        offsets = torch.arange(len(target_slots), device=self.torch_device)
        buffers.slot_mapping.add_(offsets.mul_(target_slots == len(tables.lengths) - 1))

    def plan(self, scratch: None, batch: AttentionBatch) -> AttentionBatch:
        """Return the batch with a plan, which contains the block tables of the step's rows for all
        layers."""
        slots = batch.decode_slots
        if batch.prefill_tokens:
            slots = torch.cat((batch.prefill_rows[0], slots))
        tables = batch.tables.index_select(0, slots)
        plan = self._attention.plan(tables, batch.lengths, batch.prefill_rows, self._causal_mask())
        return dataclasses.replace(batch, plan=plan)

    def _causal_mask(self) -> torch.Tensor:
        """Return the causal mask, int8 with 1 for hidden positions, in the compressed form that is
        valid for every length."""
        if self._mask is None:
            ones = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.int8)
            self._mask = ones.triu(1).to(self.torch_device)
        return self._mask

    def sample_rows(self, inputs: FusedSamplingInputs) -> None:
        """Choose the most likely token of each row. The results of rows with a nonzero temperature
        are replaced after the captured graph has run."""
        if len(inputs.slots):
            greedy_ids = inputs.logits.argmax(-1).int()
            inputs.tables.last_tokens.index_copy_(0, inputs.slots.long(), greedy_ids)
            frozen = inputs.tables.frozen.index_select(0, inputs.slots) > 0
            inputs.sampled_ids.copy_(torch.where(frozen, FROZEN, greedy_ids))

    # -- operators ------------------------------------------------------------------------

    def linear(self, weights: LinearWeights) -> LinearOperator:
        """Return a linear operator with these weights, which are converted to the layout of the
        matrix units if `weight_format` is "nz"."""
        dense = dense_of(weights)
        weight, bias = dense.weight, dense.bias
        if self._options.weight_format == "nz" and weight.dtype in (torch.float16, torch.bfloat16):
            weight = self.runtime.to_fractal(weight)
        return lambda x: F.linear(x, weight, bias)

    def route(self, x: torch.Tensor, router: Router) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids and weights of each token's experts.

        Experts are chosen one at a time, because torchair cannot convert a stable sort, and the
        order of equal values in a top-k is undocumented.
        """
        probabilities = F.linear(x.float(), router.weight).softmax(-1)
        count = probabilities.shape[-1]
        # The lowest of equal experts wins; NaN equals nothing, so it selects the last expert.
        reversed_ranks = torch.arange(count, 0, -1, dtype=torch.float32, device=x.device)
        ranks, maxima = [], []
        for _ in range(router.top_k):
            highest = probabilities.max(-1, keepdim=True).values
            rank = (
                torch.where(probabilities == highest, reversed_ranks, 1.0)
                .max(-1, keepdim=True)
                .values
            )
            ranks.append(rank)
            maxima.append(highest)
            probabilities = torch.where(reversed_ranks == rank, -1.0, probabilities)
        ids, topk_weights = (count - torch.cat(ranks, -1)).int(), torch.cat(maxima, -1)
        if router.renormalize:
            topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
        return ids, topk_weights.to(x.dtype).float()

    def experts(self, weights: ExpertWeights) -> ExpertsOperator:
        """Return a function that runs a layer's experts. It sorts tokens by expert and calls
        grouped GEMMs, whose group sizes only the device knows.

        Chips other than Atlas A2 and A3 have no operator for the sort, and run every expert for
        every token. So do layers with only one expert or with more than `_MAX_GROUPS`.
        """
        dense = dense_experts_of(weights)
        count = len(dense.down)
        if not self.runtime.is_a2_or_a3 or not 1 < count <= _MAX_GROUPS:
            return self._dense_experts(dense)
        # Weights stay in the layout for x Wᵀ; the operator accepts transposed views.
        gate_up, down = dense.gate_up.transpose(1, 2), dense.down.transpose(1, 2)

        def operator(
            x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor
        ) -> torch.Tensor:
            tokens, top_k = ids.shape
            if not tokens:
                return torch.empty_like(x)
            rows, pair_rows, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
                x.contiguous(),
                ids,
                active_num=tokens * top_k,
                expert_num=count,
                expert_tokens_num_type=1,
                expert_tokens_num_flag=True,
                quant_mode=-1,
                active_expert_range=[0, count],
                row_idx_type=0,
            )
            outputs = _grouped_matmul(
                self.swiglu(_grouped_matmul(rows, gate_up, counts)), down, counts
            )
            pair_outputs = outputs.index_select(0, pair_rows).view(tokens, top_k, -1).float()
            return (pair_outputs * topk_weights[..., None]).sum(1).to(x.dtype)

        return operator

    def _dense_experts(self, dense: DenseExperts) -> ExpertsOperator:
        """Return a function that runs every expert of a layer for every token. Captured steps
        cannot read the number of tokens per expert back to the host."""
        _log_once(
            "every expert is computed for every token, so the work is larger by the ratio of all "
            "experts to chosen experts: no operator that sorts tokens by expert supports this chip "
            "or this number of experts"
        )

        def operator(
            x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor
        ) -> torch.Tensor:
            total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
            for expert, (gate_up, down) in enumerate(zip(dense.gate_up, dense.down, strict=True)):
                weight = (topk_weights * (ids == expert)).sum(-1, keepdim=True)
                total = total + F.linear(self.swiglu(F.linear(x, gate_up)), down).float() * weight
            return total.to(x.dtype)

        return operator

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, consumer: Consumer = None
    ) -> torch.Tensor:
        """Return the RMS norm of `x`, from npu_rms_norm if all dtypes are equal."""
        if weight.dtype != x.dtype:
            return super().rms_norm(x, weight, eps)
        normed: torch.Tensor = torch.ops.npu.npu_rms_norm(x.contiguous(), weight, eps)[0]
        return normed

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        consumer: Consumer = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (RMS norm of x + residual, x + residual), from npu_add_rms_norm if all dtypes are
        equal."""
        if weight.dtype != x.dtype:
            return super().add_rms_norm(x, residual, weight, eps)
        normed, _, added = torch.ops.npu.npu_add_rms_norm(
            x.contiguous(), residual.contiguous(), weight, eps
        )
        return normed, added

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return SiLU(gate) * up from npu_swiglu, which treats the first half as the gate."""
        activated: torch.Tensor = torch.ops.npu.npu_swiglu(gate_up.contiguous(), -1)
        return activated

    def rotation(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, repeated for both halves of a head, as (1, tokens, 1, rotated
        dimensions). Called once per step."""
        return tuple(torch.cat((half, half), -1)[None, :, None] for half in (cos, sin))  # type: ignore[return-value]

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return `x` with a rotary embedding applied by npu_rotary_mul, in the dtype of `cos`."""
        return self._rotate(x.to(cos.dtype), *self.rotation(cos, sin)).to(x.dtype)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        size = cos.shape[-1]
        if size < x.shape[-1]:  # only a part of each head is rotated
            return torch.cat((self._rotate(x[..., :size], cos, sin), x[..., size:]), dim=-1)
        rotated: torch.Tensor = torch.ops.npu.npu_rotary_mul(x.contiguous()[None], cos, sin)
        return rotated[0]

    def write_kv(
        self, keys: torch.Tensor, values: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor
    ) -> None:
        """Store keys and values with npu_scatter_pa_kv_cache in its plain layout. The positions in
        `slot_mapping` must be distinct."""
        # Contiguous before nan_to_num, not after: torchair may replace numbers in place in a view.
        keys, values = (torch.nan_to_num(new.contiguous(), 0.0, 0.0, 0.0) for new in (keys, values))
        torch.ops.npu.npu_scatter_pa_kv_cache(
            keys, values, cache.keys, cache.values, slot_mapping, cache_mode="Norm"
        )

    def norm_rotate_store(
        self,
        qkv: torch.Tensor,
        transform: HeadTransform,
        cache: KVCache,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """Normalize and rotate queries and keys, store keys and values in the cache, and return the
        queries. Each part is a separate operator."""
        kv_heads, size = cache.keys.shape[2:]
        q, k, v = torch.split(qkv, [qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        if transform.norms is not None:
            q, k = (
                self.rms_norm(x, w, transform.eps)
                for x, w in zip((q, k), transform.norms, strict=True)
            )
        else:
            q, k = q.contiguous(), k.contiguous()
        if transform.rotation[0].shape[-1] == size and size in _FUSED_ROTARY_HEAD_DIMS:
            # The operator may work in place: its inputs are not used again.
            rotated = torch.ops.npu.npu_apply_rotary_pos_emb(
                q[None], k[None], *transform.rotation, "BSND"
            )
            q, k = rotated[0][0], rotated[1][0]
        else:
            q, k = self._rotate(q, *transform.rotation), self._rotate(k, *transform.rotation)
        self.write_kv(k, v, cache, slot_mapping)
        return q

    def attention(
        self,
        queries: torch.Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        scale: float,
        consumer: Consumer = None,
    ) -> torch.Tensor:
        """Return the attention output of all rows from npu_fused_infer_attention_score."""
        return self._attention(queries.contiguous(), cache, batch.plan, scale)

    def segment_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Sequence[int]
    ) -> torch.Tensor:
        """Return attention within each segment from npu_fusion_attention over packed tokens.

        The operator is called with at most `_MAX_SEGMENTS` segments at a time, and supports head
        sizes up to 768. Chips other than Atlas A2 and A3 use PyTorch's operators.
        """
        if not self.runtime.is_a2_or_a3:
            return super().segment_attention(q, k, v, segments)
        if len(segments) > _MAX_SEGMENTS:
            split = sum(segments[:_MAX_SEGMENTS])
            first = self.segment_attention(
                q[:split], k[:split], v[:split], segments[:_MAX_SEGMENTS]
            )
            rest = self.segment_attention(q[split:], k[split:], v[split:], segments[_MAX_SEGMENTS:])
            return torch.cat((first, rest))
        ends = [*itertools.accumulate(segments)]
        output: torch.Tensor = torch.ops.npu.npu_fusion_attention(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            q.shape[1],
            "TND",
            scale=q.shape[2] ** -0.5,
            actual_seq_qlen=ends,
            actual_seq_kvlen=ends,
        )[0]
        return output

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Return the sampled token ids, int64 (rows,). They are computed with npu_top_k_top_p if
        the chip has this operator, else with PyTorch's operators."""
        if self.runtime.is_a2_or_a3:
            return sampling.sample(logits, batch)
        return super().sample(logits, batch)


@functools.cache
def _log_once(text: str) -> None:
    log.warning(text)


@dataclasses.dataclass(frozen=True, slots=True)
class _CompiledCapture:
    """A captured step whose forward pass was compiled by torchair. The rest runs operator by
    operator."""

    device: NPUDevice
    function: CapturedFunction
    compiled: CompiledStep

    def replay(self, lengths: HostSeqLens) -> torch.Tensor:
        """Run the small operators around the forward pass, and the compiled forward pass itself."""
        return self.device.run_compiled(self.compiled, self.function, lengths)


def _grouped_matmul(x: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the grouped GEMM of `x`, (rows, inputs), and `weights`, (groups, inputs, outputs).

    The rows of a group are consecutive. `counts`, int64 (groups,), contains the number of rows in
    each group.
    """
    outputs: list[torch.Tensor] = torch.ops.npu.npu_grouped_matmul(
        [x], [weights], group_list=counts, split_item=3, group_type=0, group_list_type=1
    )
    return outputs[0]
