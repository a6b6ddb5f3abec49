"""The interface that a device provides to layers and executors, as three protocols. Each device is
a folder next to this file and must pass `tests/models/test_device.py`. docs/extending.md lists the
places in the code that name devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

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
from nanoactor.models.model_config import ModelConfig
from nanoactor.models.options import FusedSampling
from nanoactor.models.seq_lens import HostSeqLens
from nanoactor.models.weights.linear import ExpertWeights, LinearWeights, Router
from nanoactor.models.weights.whole_step import Matrix, ModelWeights


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Total and free memory in bytes."""

    total: int
    free: int


class TimedEvent(Protocol):
    """A point in the device's work queue, and the time at which the device reached it."""

    def record(self) -> None:
        """Record the event after all work queued so far."""

    def wait(self) -> None:
        """Block the calling thread until the device has reached the event."""

    def milliseconds_until(self, later: Any) -> float:
        """Return the milliseconds from this event to `later`, another event of the device. The
        device must have reached both."""


LinearOperator = Callable[[torch.Tensor], torch.Tensor]
"""Maps (tokens, inputs) to (tokens, outputs)."""


ExpertsOperator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps hidden states (tokens, hidden), expert ids int32 (tokens, top_k) and routing weights
float32 (tokens, top_k) to (tokens, hidden)."""


@runtime_checkable
class HasMatrix(Protocol):
    """A linear operator that exposes its matrix to whole-step operators."""

    @property
    def bias(self) -> torch.Tensor | None:
        """Return the bias, (outputs,), or None if there is none."""

    def matrix(self) -> Matrix | None:
        """Return the weight, or None if whole-step operators cannot read its layout."""


@runtime_checkable
class HasExpertMatrices(Protocol):
    """A mixture-of-experts operator that exposes its matrices to whole-step operators."""

    def matrices(self) -> tuple[Matrix, Matrix] | None:
        """Return the experts' combined gate and up projections, and their down projections, or None
        if whole-step operators cannot read their layout."""


@dataclasses.dataclass(frozen=True, slots=True)
class Linear:
    """A linear operator that keeps its weight, (outputs, inputs), unchanged."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x Wᵀ + b."""
        return F.linear(x, self.weight, self.bias)

    def matrix(self) -> torch.Tensor:
        """Return the matrix as the operator stores it."""
        return self.weight


class WholeStep(NamedTuple):
    """Results of a decode step that ran as one operator."""

    hidden: torch.Tensor
    """Hidden states after the final norm, (rows, hidden)."""
    logits: torch.Tensor
    """Logits, (rows, vocabulary)."""


class WholeSteps(Protocol):
    """Decode steps that each run as one operator, available for certain numbers of rows."""

    def run(
        self,
        buffers: RowBuffers,
        slots: torch.Tensor,
        tables: torch.Tensor,
        caches: Sequence[KVCache],
        logits_out: torch.Tensor | None,
    ) -> WholeStep | None:
        """Queue a decode step for `buffers`, as filled in by `BatchOperators.advance`, with their
        `slots`, int32 (rows,). Logits are written to `logits_out` if it is given. Return None if
        there is no operator for this number of rows. The next step overwrites the results."""

    def raise_if_stopped(self) -> None:
        """Raise an error that describes the failure if a step has stopped itself."""


ForwardFunction = Callable[[ForwardInputs], torch.Tensor]
"""Maps the inputs of a step to hidden states."""

CapturedFunction = Callable[[HostSeqLens], torch.Tensor]
"""A function that queues a step's work and that a device can capture. Only the lengths may differ
from one replay to the next."""


class CapturedStep(Protocol):
    """Captured work that is queued as a unit."""

    def replay(self, lengths: HostSeqLens) -> torch.Tensor:
        """Queue the captured work. Return the result tensor of the captured function, which the
        replay overwrites."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceTraits:
    """Properties of a device that planners, executors and models need before they call it."""

    name: str
    collective_backend: str
    """Backend for collective operations: gloo, nccl or hccl."""
    default_dtype: torch.dtype
    """Dtype chosen for `dtype="auto"` if the checkpoint's own dtype is slow on this device."""
    default_block_size: int
    default_memory_utilization: float
    """Fraction of the memory free at startup that weights and KV cache may use."""
    shared_memory: bool = False
    """True if the ranks on a host share the same memory."""
    asynchronous: bool = True
    """True if calls only queue work. If False, calls return only when their work is complete, and
    the warm-up runs a smaller step because one of maximum size may take minutes."""
    allows_any_thread: bool = False
    """True if any thread may queue work, as long as only one does so at a time."""
    captures_graphs: bool = False
    """True if `Runtime.capture` speeds up decode steps."""
    captures_prompts: bool = False
    """True if `Runtime.capture` also speeds up steps with prompts."""
    narrows_last_layer: bool = True
    """True if steps that are not captured may set `AttentionBatch.final_rows`."""
    needs_host_seq_lens: bool = True
    """True if `BatchOperators.plan` reads `AttentionBatch.lengths`."""
    min_rows_for_runs: int = 1 << 30
    """Minimum number of rows of a decode step that may contain a run: several rows of one slot, at
    distinct positions. Each row of a run reads keys and values that other rows of the run write in
    the same step."""
    deep_pipeline: bool = False
    """True if each additional step in flight costs only negligible memory."""
    keeps_logits: bool = False
    """True if the logits of constrained rows are kept rather than their hidden states, because
    reading the LM head again costs more than the memory for the logits."""
    publishes_ids: bool = False
    """True if a step can write token ids to host memory itself."""
    fused_sampling: FusedSampling = "none"
    sharded_fused_sampling: FusedSampling = "none"
    """The value of `fused_sampling` if the vocabulary is sharded across ranks: each rank samples
    from the logits of all ranks."""


class Runtime(Protocol):
    """A device's memory, queue, events and graphs."""

    torch_device: torch.device

    def prepare_thread(self, threads: int) -> None:
        """Prepare the calling thread for running operators, with `threads` intra-operator
        threads."""

    def memory(self) -> Memory:
        """Return the device's total and currently free memory."""

    def reset_peak_memory(self) -> None:
        """Start tracking peak allocation."""

    def peak_memory(self) -> int:
        """Return the peak number of bytes allocated since `reset_peak_memory`, minus the number
        allocated at that call."""

    def empty_pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a host tensor for asynchronous copies to and from the device."""

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a contiguous tensor of zeros on the device, for large, long-lived data such as
        the KV cache."""

    def synchronize(self) -> None:
        """Block until the device is idle."""

    def stream(self) -> AbstractContextManager[None]:
        """Return a context manager in which the calling thread uses the device's single queue, with
        gradients disabled."""

    def timed_event(self) -> TimedEvent:
        """Create a timed event."""

    def run(self, forward: ForwardFunction, inputs: ForwardInputs) -> torch.Tensor:
        """Queue a model's forward pass, possibly a compiled one."""

    def capture(
        self, function: CapturedFunction, lengths: HostSeqLens, in_flight: int
    ) -> CapturedStep:
        """Capture the work that `function` queues, for sequence lengths up to `lengths`. Call this
        within `stream`, after `function` has run once. Captures share memory, so the largest must
        be captured first. Up to `in_flight` replays may be in flight at once. Raises `RuntimeError`
        if the device cannot capture the work."""


class Operators(Protocol):
    """Operators that layers call. Hidden states are (tokens, ...) in the model's dtype."""

    def supports(self, dtype: torch.dtype) -> bool:
        """Return True if models run at a reasonable speed in this dtype."""

    def check(self, dtype: torch.dtype, block_size: int, head_dim: int) -> None:
        """Raise `UnsupportedModel` if the operators cannot run the model at all."""

    def linear(self, weights: LinearWeights) -> LinearOperator:
        """Create the operator x Wᵀ + b. The device may store the weights in a layout of its own;
        the caller releases the originals. Weights in a format without an operator on this device
        are unpacked."""

    def route(self, x: torch.Tensor, router: Router) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's top-k experts, int32 (tokens, top_k), most likely first and ties to
        the lower id, and their routing weights, float32 (tokens, top_k), rounded to the dtype of
        `x`."""

    def experts(self, weights: ExpertWeights) -> ExpertsOperator:
        """Create the mixture-of-experts operator: the sum of share * down(silu(gate x) * up x) over
        a token's experts. Weights in a format without an operator on this device are unpacked."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Compute x / sqrt(mean(x²) + eps) * weight over the last dimension (arXiv:1910.07467).
        With a float32 weight, the product is rounded only once."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the RMS norm of x + residual, and x + residual."""

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate pairs of dimensions of `x`, (tokens, heads, head_dim), by `cos` and `sin`,
        (tokens, pairs). Dimensions from 2 * pairs on are unchanged."""

    def rotation(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert cosines and sines, (tokens, pairs), to the form that `norm_rotate_store`
        expects."""

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Compute silu(first half of the last dimension) * second half (arXiv:2002.05202)."""

    def write_kv(
        self, keys: torch.Tensor, values: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor
    ) -> None:
        """Store keys and values, (tokens, kv_heads, head_dim), at the flat positions `slot_mapping`
        of the cache.

        Non-finite numbers are stored as 0: attention may read whole blocks and mask the positions
        past a sequence's end, and even a masked NaN would corrupt the next sequence in the block.
        """

    def norm_rotate_store(
        self,
        qkv: torch.Tensor,
        transform: HeadTransform,
        cache: KVCache,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """Normalize and rotate the query and key heads, store keys and values as `write_kv` does,
        and return the queries.

        `qkv` is (tokens, heads + 2 * kv_heads, head_dim): queries, keys, values.
        """

    def attention(
        self, queries: torch.Tensor, cache: KVCache, batch: AttentionBatch, scale: float
    ) -> torch.Tensor:
        """Return the causal attention of `queries`, (tokens, heads, head_dim), over the paged
        cache, in the same shape."""

    def segment_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Sequence[int]
    ) -> torch.Tensor:
        """Return the attention of `q`, (tokens, heads, head_dim), without a cache or a mask, in the
        same shape. `segments` holds the lengths in tokens of consecutive segments; tokens attend
        only to their own segment."""

    def whole_steps(
        self, config: ModelConfig, weights: ModelWeights, sizes: Sequence[int], block_size: int
    ) -> WholeSteps | None:
        """Create whole-step operators for those numbers of rows in `sizes` that support them.
        Return None if none does. A failure is logged along with its effect on performance."""


class BatchOperators(Protocol):
    """Operators that executors call at each step. The batch stays on the device: steps read tables
    that are indexed by slot, and no step waits for the host."""

    def dummy_blocks(self, rows: int, block_size: int) -> int:
        """Return the number of dummy blocks needed as the write target of `rows` padding rows."""

    def tokens_per_program(self, heads: int, kv_heads: int) -> int:
        """Return the number of prompt tokens per program of the prefill kernel, the unit of
        `AttentionBatch.prefill_tiles`."""

    def scratch(self, rows: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int) -> Any:
        """Allocate the kernels' workspace for `rows` decode rows."""

    def advance(
        self, tables: SlotTables, rows: DecodeRows, buffers: RowBuffers, ids: torch.Tensor
    ) -> None:
        """Fill in `buffers` for each row, and store the row's token at its cache position in `ids`,
        int32 (places,). A row without a position of its own continues its slot: it adds one to the
        slot's length, unless the slot is the dummy.

        Such a row freezes its slot if the slot's last token is one of the slot's `freeze_ids`. Rows
        that continue a frozen slot get the dummy slot's cache position and do not change the
        length."""

    def fill_slot_mapping(
        self,
        tables: SlotTables,
        slots: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Fill `slot_mapping`, int64 (tokens,), with the cache positions of tokens, given their
        `slots` and `positions`, int32 (tokens,)."""

    def plan(self, scratch: Any, batch: AttentionBatch) -> AttentionBatch:
        """Return the batch with `plan` set to the state that the attention of all layers shares."""

    def sample_rows(self, inputs: FusedSamplingInputs) -> None:
        """Sample a token for each row with its slot's parameters. `DeviceTraits.fused_sampling`
        specifies the supported rows; results for other rows are ignored. Ids are written to
        `inputs.sampled_ids` and to the table of last tokens; for frozen slots, `sampled_ids` gets
        `limits.FROZEN`."""

    def sample_masked_rows(self, inputs: FusedSamplingInputs, masks: torch.Tensor) -> None:
        """Choose tokens as `sample_rows` does, but from kept logits, (slots, vocabulary), under bit
        masks of the allowed ids, int32 (rows, words). Rows whose mask allows no id get
        `limits.NOTHING_ALLOWED`. Called only if `DeviceTraits.keeps_logits`."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Return token ids, int64 (rows,), sampled from logits (rows, vocabulary)."""

    def publish(self, ids: torch.Tensor, ring: torch.Tensor, count: torch.Tensor) -> None:
        """Write the step number and then `ids`, int32 (rows,), to the next entry of `ring`, and
        increment the step number. `ring`, int32 (entries, 1 + maximum number of rows), was
        allocated by `empty_pinned`; `count`, int32 (1,), holds the step number. Called only if
        `DeviceTraits.publishes_ids`."""


class Device(Runtime, Operators, BatchOperators, Protocol):
    """The complete interface of a device."""

    @property
    def traits(self) -> DeviceTraits:
        """Return the device's properties."""
