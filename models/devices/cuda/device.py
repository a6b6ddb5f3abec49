"""NVIDIA GPUs: fused operators in Triton, matrix products in cuBLAS, and steps captured as CUDA
graphs.

If Triton is not installed, slower PyTorch operators are used, and steps are not captured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from nanoactor.models.batch import (
    AttentionBatch,
    DecodeRows,
    FusedSamplingInputs,
    HeadTransform,
    KVCache,
    RowBuffers,
    SlotTables,
)
from nanoactor.models.devices.cuda.kernels.decode_step.steps import DecodeSteps
from nanoactor.models.devices.cuda.kernels.decode_step.table import MAX_ROWS
from nanoactor.models.devices.portable import PortableOperators
from nanoactor.models.devices.protocols import (
    CapturedFunction,
    Consumer,
    DeviceTraits,
    ExpertsOperator,
    LinearOperator,
    Memory,
    WholeSteps,
)
from nanoactor.models.errors import UnsupportedModel
from nanoactor.models.model_config import ModelConfig
from nanoactor.models.seq_lens import HostSeqLens
from nanoactor.models.weights.fp8 import Fp8Blocks
from nanoactor.models.weights.linear import ExpertWeights, LinearWeights, Router, dense_of
from nanoactor.models.weights.whole_step import ModelWeights

try:
    from nanoactor.models.devices.cuda.kernels import batch as batch_kernels
    from nanoactor.models.devices.cuda.kernels import (
        decode_attention,
        elementwise,
        fp8,
        sampling,
    )
    from nanoactor.models.devices.cuda.kernels.expert_products import experts as expert_products
    from nanoactor.models.devices.cuda.kernels.experts import HopperKernels, TritonExperts
    from nanoactor.models.devices.cuda.kernels.fp8_products import launch as fp8_products
    from nanoactor.models.devices.cuda.kernels.fp8_products.linear import linear_of
    from nanoactor.models.devices.cuda.kernels.fp8_products.mlp import mlp_of
    from nanoactor.models.devices.cuda.kernels.masked_sampling import sample_masked_rows
    from nanoactor.models.devices.cuda.kernels.prefill import HOPPER, PrefillAttention
    from nanoactor.models.devices.cuda.kernels.prefill_attention import tokens_per_program
    from nanoactor.models.devices.cuda.kernels.publishing import publish
    from nanoactor.models.devices.cuda.kernels.routing import route

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

log = logging.getLogger("nanoactor.models.cuda")

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


FP8_CAPABILITY = (8, 9)
"""Lowest compute capability with FP8 tensor cores."""
PORTABLE_TRAITS = DeviceTraits(
    name="cuda",
    collective_backend="nccl",
    default_dtype=torch.float16,
    default_block_size=64,
    default_memory_utilization=0.9,
    allows_any_thread=True,
)


def with_kernels(traits: DeviceTraits) -> DeviceTraits:
    """Return a copy of `traits` for a device that uses our kernels and captures steps as graphs."""
    return dataclasses.replace(
        traits,
        captures_graphs=True,
        captures_prompts=True,
        deep_pipeline=True,
        keeps_logits=True,
        publishes_ids=True,
        # The kernel of smaller steps would read keys and values of a sequence while writing others.
        min_rows_for_runs=MAX_ROWS + 1,
        needs_host_seq_lens=False,
        fused_sampling="bounded_top_k",
        sharded_fused_sampling="bounded_top_k",
    )


class CudaEvent:
    """A CUDA event, which `record` queues on the current stream."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def milliseconds_until(self, later: CudaEvent) -> float:
        """Return the time from this event to `later` in milliseconds, with a resolution of about
        0.5 us."""
        return float(self.event.elapsed_time(later.event))

    def record(self) -> None:
        """Record the event on the current stream."""
        self.event.record()

    def wait(self) -> None:
        """Spin, without the GIL, until the device has reached the event. Waking a sleeping thread
        would take about as long as a step of a small model."""
        self.event.synchronize()


@dataclasses.dataclass(slots=True)
class CapturedGraph:
    """A captured step: the CUDA graph, and the tensor that receives its result."""

    graph: torch.cuda.CUDAGraph
    result: torch.Tensor

    def replay(self, lengths: HostSeqLens) -> torch.Tensor:
        """Launch the graph and return its result tensor. `lengths` is ignored, as the graph reads
        lengths on the device."""
        self.graph.replay()
        return self.result


class PortableCUDADevice(PortableOperators):
    """One GPU with PyTorch's operators. Used if Triton is not installed."""

    def __init__(self, index: int = 0) -> None:
        """Open GPU number `index`. Raises `UnsupportedModel` if it does not exist."""
        count = torch.cuda.device_count()
        if index >= count:
            raise UnsupportedModel(
                f"device cuda:{index} does not exist: PyTorch {torch.__version__} sees {count} "
                "NVIDIA GPUs; check that PyTorch was built with CUDA and that the NVIDIA "
                "driver is loaded"
            )
        self.torch_device = torch.device("cuda", index)
        self._base = 0
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        """Memory pool of all captured graphs; None before the first capture."""
        self.traits = dataclasses.replace(
            PORTABLE_TRAITS,
            default_dtype=torch.bfloat16 if self._has_bfloat16() else torch.float16,
        )

    def _has_bfloat16(self) -> bool:
        return torch.cuda.get_device_capability(self.torch_device) >= (8, 0)

    def prepare_thread(self, threads: int) -> None:
        """Select the GPU for the calling thread, limit its CPU threads, and disable TF32, so that
        float32 products keep full precision."""
        torch.cuda.set_device(self.torch_device)
        torch.set_num_threads(threads)
        torch.backends.cuda.matmul.allow_tf32 = False

    def supports(self, dtype: torch.dtype) -> bool:
        """Return True for float32 and float16, and for bfloat16 from compute capability 8.0 on."""
        return dtype in _DTYPES and (dtype != torch.bfloat16 or self._has_bfloat16())

    def memory(self) -> Memory:
        """Return the total and free memory in bytes that the driver reports, which accounts for
        other processes. Memory cached by PyTorch counts as free."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        cached = torch.cuda.memory_reserved(self.torch_device)
        return Memory(total, free + cached - torch.cuda.memory_allocated(self.torch_device))

    def reset_peak_memory(self) -> None:
        """Reset the peak statistics of PyTorch's allocator, and store the current allocation."""
        torch.cuda.synchronize(self.torch_device)
        self._base = torch.cuda.memory_allocated(self.torch_device)
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_memory(self) -> int:
        """Return the peak allocation in bytes of PyTorch's allocator, minus the allocation at
        `reset_peak_memory`."""
        return torch.cuda.max_memory_allocated(self.torch_device) - self._base

    def empty_pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor in page-locked host memory."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros on the GPU."""
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Make a separate stream current in the context, because the default stream waits for other
        streams."""
        torch.cuda.set_device(self.torch_device)
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            yield

    def capture(
        self, function: CapturedFunction, lengths: HostSeqLens, in_flight: int
    ) -> CapturedGraph:
        """Capture `function` as one CUDA graph, whatever `in_flight` is. All graphs share one
        memory pool. The executor calls this only if `traits.captures_graphs` is True, as it is
        with our kernels."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may keep calling CUDA: one of NCCL's polls events all the time.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
            result = function(lengths)
        self._pool = graph.pool()
        return CapturedGraph(graph, result)

    def timed_event(self) -> CudaEvent:
        """Return a new event that can measure time."""
        return CudaEvent()

    def synchronize(self) -> None:
        """Wait until all streams of the device are idle."""
        torch.cuda.synchronize(self.torch_device)


@dataclasses.dataclass(frozen=True, slots=True)
class Scratch:
    """Workspace for partial results, which all kernels of a step share."""

    splits: decode_attention.Splits
    partials: sampling.Partials
    kv_heads: int


class CUDADevice(PortableCUDADevice):
    """One GPU with operators in Triton and steps captured as CUDA graphs."""

    def __init__(self, index: int = 0) -> None:
        """Open GPU number `index`. Raises `UnsupportedModel` if it does not exist."""
        super().__init__(index)
        self.traits = with_kernels(self.traits)
        log.info("using nanoactor's Triton kernels on %s", torch.cuda.get_device_name(index))
        properties = torch.cuda.get_device_properties(index)
        capability = properties.major, properties.minor
        self.prefill_attention = PrefillAttention(capability, properties.multi_processor_count)
        self._multiplies_fp8 = capability >= FP8_CAPABILITY
        self.traits = dataclasses.replace(self.traits, multiplies_packed=self._multiplies_fp8)
        self._fp8_products = fp8_products.optional_kernels(capability)
        expert_kernels = expert_products.optional_kernels(capability)
        self._expert_kernels = HopperKernels(self._fp8_products, expert_kernels)

    def check(self, dtype: torch.dtype, block_size: int, head_dim: int) -> None:
        """Log a warning if this is a Hopper GPU but prompts cannot use the attention kernel for it.
        Every configuration is supported."""
        reason = self.prefill_attention.unsupported_reason(dtype, block_size, head_dim)
        is_hopper = self.prefill_attention.capability[0] >= HOPPER
        if reason is not None and is_hopper and dtype != torch.float32:
            log.warning(
                "attention over prompts takes up to 47 %% longer, because the kernel for Hopper "
                "GPUs cannot be used: %s",
                reason,
            )

    def whole_steps(
        self, config: ModelConfig, weights: ModelWeights, sizes: Sequence[int], block_size: int
    ) -> WholeSteps | None:
        """Compile, for each number of rows in `sizes`, a kernel that runs a whole decode step.
        Return None if the GPU is not a Hopper, the dtype is not bfloat16, or the model is not
        supported."""
        steps = DecodeSteps.load(config, weights, sizes, block_size)
        return steps if steps.steps else None

    # -- the batch ------------------------------------------------------------------------

    def tokens_per_program(self, heads: int, kv_heads: int) -> int:
        """Return the number of tokens that one program of the prefill attention kernel
        processes."""
        return tokens_per_program(heads, kv_heads)

    def scratch(
        self, rows: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int
    ) -> Scratch:
        """Allocate the workspace for partial results of attention and sampling."""
        device = self.torch_device
        splits = decode_attention.Splits.empty(rows, heads, kv_heads, head_dim, device)
        return Scratch(splits, sampling.Partials.empty(rows, vocabulary, device), kv_heads)

    def advance(
        self, tables: SlotTables, rows: DecodeRows, buffers: RowBuffers, ids: torch.Tensor
    ) -> None:
        """Compute the inputs of all decode rows in one kernel, and write them to `buffers`."""
        batch_kernels.advance(tables, rows, buffers, ids)

    def fill_slot_mapping(
        self,
        tables: SlotTables,
        slots: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the cache position of every token to `slot_mapping`, in one kernel."""
        batch_kernels.fill_slot_mapping(tables, slots, positions, slot_mapping)

    def plan(self, scratch: Scratch, batch: AttentionBatch) -> AttentionBatch:
        """Return the batch with a plan that splits the contexts of decode rows into chunks of equal
        length."""
        contexts = batch.decode_contexts
        splits = scratch.splits.for_rows(max(1, len(contexts)), scratch.kv_heads)
        if len(contexts):
            decode_attention.plan_splits(contexts, splits)
        return dataclasses.replace(batch, plan=splits)

    def sample_rows(self, inputs: FusedSamplingInputs) -> None:
        """Sample a token for each row, with five kernels in total. If a row has a top-k, only
        candidates for its best k tokens are sorted."""
        if len(inputs.slots):
            partials = inputs.scratch.partials
            sampling.sample_rows(
                inputs.logits, inputs.slots, inputs.tables, partials, inputs.sampled_ids
            )

    def sample_masked_rows(self, inputs: FusedSamplingInputs, masks: torch.Tensor) -> None:
        """Sample as `sample_rows` does, but only allowed tokens. Two additional kernels apply the
        masks."""
        sample_masked_rows(inputs, masks)

    def publish(self, ids: torch.Tensor, ring: torch.Tensor, count: torch.Tensor) -> None:
        """Write the step number and the sampled ids to the next entry of `ring`, a ring buffer in
        host memory, in one kernel."""
        publish(ids, ring, count)

    # -- operators ------------------------------------------------------------------------

    def route(self, x: torch.Tensor, router: Router) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids and weights of each token's experts. One or two kernels compute the router
        logits, and another one chooses the experts."""
        return route(x, router)

    def experts(self, weights: ExpertWeights) -> ExpertsOperator:
        """Return a function that runs a layer's experts. It launches two kernels for few tokens and
        four to eight for more, and the host waits for none of them."""
        return TritonExperts(weights, self._multiplies_fp8, self._expert_kernels)

    def linear(self, weights: LinearWeights) -> LinearOperator:
        """Return a linear operator with these weights. It uses FP8 tensor cores if the weights are
        in FP8 and the GPU supports their format."""
        if not isinstance(weights, Fp8Blocks) or not self._multiplies_fp8:
            return super().linear(weights)
        if reason := fp8.unsupported_reason(weights):
            return super().linear(dense_of(weights, reason))
        return linear_of(weights, self._fp8_products.get())

    def mlp(self, gate_up: LinearOperator, down: LinearOperator) -> LinearOperator:
        """Return the feed-forward operator. For many rows of FP8 matrices, SwiGLU and the rounding
        of its results are part of the first product."""
        return mlp_of(gate_up, down, super().mlp(gate_up, down))

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, consumer: Consumer = None
    ) -> torch.Tensor:
        """Return the RMS norm of `x`, computed in float32 and rounded once. A consumer with FP8
        weights also gets it rounded to e4m3."""
        return elementwise.rms_norm(x.contiguous(), weight, eps, consumer)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        consumer: Consumer = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (RMS norm of x + residual, x + residual), computed in one pass. A consumer with
        FP8 weights also gets the norm rounded to e4m3."""
        return elementwise.add_rms_norm(
            x.contiguous(), residual.contiguous(), weight, eps, consumer
        )

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return `x` with a rotary embedding applied, computed in float32 and rounded once."""
        if 2 * cos.shape[-1] != x.shape[-1]:
            return super().rotary(x, cos, sin)
        return elementwise.rotary(x, cos, sin)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return SiLU(gate) * up, computed in one pass."""
        return elementwise.swiglu(gate_up.contiguous())

    def norm_rotate_store(
        self,
        qkv: torch.Tensor,
        transform: HeadTransform,
        cache: KVCache,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """Normalize and rotate queries and keys, store keys and values in the cache, and return the
        queries.

        This is one pass, or several operators if only a part of each head is rotated.
        """
        if 2 * transform.rotation[0].shape[-1] != qkv.shape[-1]:
            return super().norm_rotate_store(qkv, transform, cache, slot_mapping)
        return elementwise.norm_rotate_store(qkv.contiguous(), transform, cache, slot_mapping)

    def attention(
        self,
        queries: torch.Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        scale: float,
        consumer: Consumer = None,
    ) -> torch.Tensor:
        """Return the attention output of all rows. Separate kernels compute prefill and decode
        rows. If there are only decode rows, a consumer with FP8 weights also gets the output
        rounded to e4m3.

        Cache contents after the end of a context have no effect.
        """
        output = torch.empty_like(queries)
        prefill_tokens = batch.prefill_tokens
        if prefill_tokens:
            self.prefill_attention(queries, cache, batch, scale, output)
        if len(batch.decode_slots):
            decode_attention.decode_attention(
                queries[prefill_tokens:],
                cache=cache,
                tables=batch.tables,
                slots=batch.decode_slots,
                contexts=batch.decode_contexts,
                splits=batch.plan,
                scale=scale,
                output=output[prefill_tokens:],
                consumer=None if prefill_tokens else consumer,
            )
        return output
