"""The interface that a device provides to layers and executors, as three protocols.

Each device is a package next to this file and must pass `tests/models/test_device.py`.
docs/extending.md lists the places in the code where devices are named.
"""

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
    """Total and free memory of a device, in bytes."""

    total: int
    free: int


class TimedEvent(Protocol):
    """A marker in the device's work queue, and the time at which the device reached it."""

    def record(self) -> None:
        """Place the event after all work that has been queued so far."""

    def wait(self) -> None:
        """Block the calling thread until the device has reached the event."""

    def milliseconds_until(self, later: Any) -> float:
        """Return the time from this event to `later`, another event of the same device, in
        milliseconds. The device must have reached both events."""


LinearOperator = Callable[[torch.Tensor], torch.Tensor]
"""Function from hidden states (tokens, inputs) to (tokens, outputs)."""


ExpertsOperator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Function from hidden states (tokens, hidden), expert ids int32 (tokens, top_k), and routing
weights float32 (tokens, top_k) to (tokens, hidden)."""
Consumer = LinearOperator | ExpertsOperator | None
"""The operator that is called with a result, or None if it is not known. The result must not be
changed before that call."""


@runtime_checkable
class HasMatrix(Protocol):
    """A linear operator with a weight that `WholeSteps` can use."""

    @property
    def bias(self) -> torch.Tensor | None:
        """Bias, (outputs,), or None if there is none."""

    def matrix(self) -> Matrix | None:
        """Return the weight, (outputs, inputs), or None if `WholeSteps` cannot read its layout."""


@runtime_checkable
class HasExpertMatrices(Protocol):
    """A mixture-of-experts operator with weights that `WholeSteps` can use."""

    def matrices(self) -> tuple[Matrix, Matrix] | None:
        """Return (gate and up projections of all experts, down projections of all experts), or None
        if `WholeSteps` cannot read their layout."""


@dataclasses.dataclass(frozen=True, slots=True)
class Linear:
    """A linear operator with an unmodified weight, (outputs, inputs)."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + b."""
        return F.linear(x, self.weight, self.bias)

    def matrix(self) -> torch.Tensor:
        """Return the weight, (outputs, inputs)."""
        return self.weight


class WholeStep(NamedTuple):
    """Results of a decode step that ran as one operator. The next step overwrites them."""

    hidden: torch.Tensor
    """Hidden states after the final norm, (rows, hidden)."""
    logits: torch.Tensor
    """Logits, (rows, vocabulary)."""


class WholeSteps(Protocol):
    """Operators that each run a whole decode step, with a certain number of rows."""

    def run(
        self,
        buffers: RowBuffers,
        slots: torch.Tensor,
        tables: torch.Tensor,
        caches: Sequence[KVCache],
        logits_out: torch.Tensor | None,
    ) -> WholeStep | None:
        """Queue a decode step and return its results, or None if no operator supports this number
        of rows.

        `buffers` contains the inputs computed by `BatchOperators.advance`. `slots`, int32 (rows,),
        is the index of each row's block table in `tables`, int32 (slots, blocks). Logits are
        written to `logits_out` if it is not None. The next step overwrites the results.
        """

    def raise_if_stopped(self) -> None:
        """Raise an error that describes the failure if a step has stopped itself."""


ForwardFunction = Callable[[ForwardInputs], torch.Tensor]
"""Function from the inputs of a step to its hidden states, (tokens, hidden)."""

CapturedFunction = Callable[[HostSeqLens], torch.Tensor]
"""Function that queues the work of a step and that a device can capture. Only its argument, the
sequence lengths, may differ from one replay to the next."""


class CapturedStep(Protocol):
    """Captured work, which is queued as a unit."""

    def replay(self, lengths: HostSeqLens) -> torch.Tensor:
        """Queue the captured work and return the result tensor of the captured function. The next
        replay overwrites this tensor."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceTraits:
    """Properties of a device that planners, executors and models must know before they use it."""

    name: str
    collective_backend: str
    """Backend of torch.distributed for collective operations: gloo, nccl or hccl."""
    default_dtype: torch.dtype
    """Dtype that `dtype="auto"` selects if the checkpoint's own dtype is slow on this device."""
    default_block_size: int
    default_memory_utilization: float
    """Fraction of the initially free memory that the weights and the KV cache may use."""
    shared_memory: bool = False
    """True if all ranks on a host use the same memory."""
    asynchronous: bool = True
    """True if calls only queue work. If False, a call returns once its work is done. The warm-up
    then runs only a small step, because a step of maximum size may take minutes."""
    allows_any_thread: bool = False
    """True if work may be queued from any thread, though only from one at a time."""
    captures_graphs: bool = False
    """True if `Runtime.capture` speeds up decode steps."""
    captures_prompts: bool = False
    """True if `Runtime.capture` also speeds up steps with prompts."""
    narrows_last_layer: bool = True
    """True if steps that are not captured may set `AttentionBatch.final_rows`, so that the last
    layer computes only the needed tokens."""
    needs_host_seq_lens: bool = True
    """True if `BatchOperators.plan` reads `AttentionBatch.lengths`."""
    min_rows_for_runs: int = 1 << 30
    """Minimum number of rows of a decode step that may contain several rows of one sequence, at
    distinct positions. In such a step, the later rows read keys and values that the earlier ones
    write. The default allows no such steps."""
    deep_pipeline: bool = False
    """True if queueing one more step in advance costs only negligible memory."""
    multiplies_packed: bool = False
    """True if linear operators read packed (quantized) weights. If False, weights are unpacked when
    they are loaded."""
    keeps_logits: bool = False
    """True if logits, not hidden states, are kept for rows with a mask of allowed ids, because
    reading the language-modeling head again costs more than the memory for the logits."""
    publishes_ids: bool = False
    """True if a step can write its token ids to host memory by itself."""
    fused_sampling: FusedSampling = "none"
    sharded_fused_sampling: FusedSampling = "none"
    """Value of `fused_sampling` if the vocabulary is divided among ranks. Each rank then samples
    from the logits of all ranks."""


class Runtime(Protocol):
    """A device's memory, work queue, events and graphs."""

    torch_device: torch.device

    def prepare_thread(self, threads: int) -> None:
        """Prepare the calling thread for running operators. `threads` is the number of threads that
        an operator on the host may use."""

    def memory(self) -> Memory:
        """Return the device's total and currently free memory in bytes."""

    def reset_peak_memory(self) -> None:
        """Start to track the peak of the allocated memory."""

    def peak_memory(self) -> int:
        """Return the peak number of bytes allocated since `reset_peak_memory`, minus the number
        allocated at that call."""

    def empty_pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized host tensor that supports asynchronous copies to and from the
        device."""

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor of zeros on the device. Used for large, long-lived data such
        as the KV cache."""

    def synchronize(self) -> None:
        """Block until the device has finished all work."""

    def stream(self) -> AbstractContextManager[None]:
        """Return a context manager in which the calling thread uses the device's single work queue,
        with gradients disabled."""

    def timed_event(self) -> TimedEvent:
        """Return a new event, which is not recorded yet."""

    def run(self, forward: ForwardFunction, inputs: ForwardInputs) -> torch.Tensor:
        """Queue a model's forward pass, which may be compiled, and return the hidden states."""

    def capture(
        self, function: CapturedFunction, lengths: HostSeqLens, in_flight: int
    ) -> CapturedStep:
        """Capture the work that `function` queues, for sequence lengths up to `lengths`.

        Call this within `stream`, after `function` has run once. Captures share memory, so the
        largest one must come first. Up to `in_flight` replays may be queued at a time. Raises
        `RuntimeError` if the device cannot capture the work.
        """


class Operators(Protocol):
    """Operators that layers call. Hidden states are (tokens, ...) in the model's dtype."""

    def supports(self, dtype: torch.dtype) -> bool:
        """Return True if models run at a reasonable speed in this dtype."""

    def check(self, dtype: torch.dtype, block_size: int, head_dim: int) -> None:
        """Raise `UnsupportedModel` if the operators cannot run a model with this dtype, block size
        and head size."""

    def linear(self, weights: LinearWeights) -> LinearOperator:
        """Return a function that computes x Wᵀ + b.

        The device may store the weights in a layout of its own, and the caller then releases the
        originals. Weights in a format without an operator on this device are unpacked.
        """

    def mlp(self, gate_up: LinearOperator, down: LinearOperator) -> LinearOperator:
        """Return a function that computes down(swiglu(gate_up(x))). Both operators must come from
        `linear`."""

    def route(self, x: torch.Tensor, router: Router) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts of each token and their weights.

        The ids, int32 (tokens, top_k), are sorted by probability; of equal probabilities, the lower
        id comes first. The routing weights, float32 (tokens, top_k), are rounded to the dtype of
        `x`.
        """

    def experts(self, weights: ExpertWeights) -> ExpertsOperator:
        """Return a function that computes the sum of weight * down(silu(gate x) * up x) over each
        token's experts.

        Weights in a format without an operator on this device are unpacked.
        """

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, consumer: Consumer = None
    ) -> torch.Tensor:
        """Return x / sqrt(mean(x²) + eps) * weight over the last dimension (arXiv:1910.07467).

        If `weight` is float32, the product is rounded only once. `consumer` is the operator that is
        called with the result, if it is known: a device may prepare its input in the same pass.
        """

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        consumer: Consumer = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (RMS norm of x + residual, x + residual). `consumer` is the operator that is
        called with the norm, as in `rms_norm`."""

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return `x`, (tokens, heads, head_dim), with pairs of dimensions rotated by `cos` and
        `sin`, (tokens, pairs). Dimensions from 2 * pairs on are unchanged."""

    def rotation(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, (tokens, pairs), in the form that `norm_rotate_store`
        expects."""

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(first half of the last dimension) * second half (arXiv:2002.05202)."""

    def write_kv(
        self, keys: torch.Tensor, values: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor
    ) -> None:
        """Store keys and values, (tokens, kv_heads, head_dim), at the cache positions in
        `slot_mapping`.

        Non-finite numbers are stored as 0. Attention may read whole blocks and mask the positions
        after a sequence's end, and even a masked NaN would corrupt the next sequence in the block.
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

        `qkv` is (tokens, heads + 2 * kv_heads, head_dim): queries, then keys, then values.
        """

    def attention(
        self,
        queries: torch.Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        scale: float,
        consumer: Consumer = None,
    ) -> torch.Tensor:
        """Return the causal attention output of `queries`, (tokens, heads, head_dim), over the
        paged cache, in the same shape.

        `consumer` is the operator that is called with it, as (tokens, heads * head_dim), if it is
        known (see `rms_norm`).
        """

    def segment_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Sequence[int]
    ) -> torch.Tensor:
        """Return the attention output of `q`, (tokens, heads, head_dim), in the same shape, without
        a cache or a causal mask.

        `segments` contains the lengths of consecutive segments in tokens. Tokens attend only to
        their own segment.
        """

    def whole_steps(
        self, config: ModelConfig, weights: ModelWeights, sizes: Sequence[int], block_size: int
    ) -> WholeSteps | None:
        """Return operators for whole decode steps, for those numbers of rows in `sizes` that the
        device supports, or None if it supports none.

        A failure is logged along with its effect on performance.
        """


class BatchOperators(Protocol):
    """Operators that executors call in each step. The batch stays on the device: steps read tables
    that are indexed by slot (a sequence's index), and no step waits for the host."""

    def dummy_blocks(self, rows: int, block_size: int) -> int:
        """Return the number of cache blocks that must be reserved as a target for the writes of
        `rows` padding rows."""

    def tokens_per_program(self, heads: int, kv_heads: int) -> int:
        """Return the number of prompt tokens that one program of the prefill kernel processes. This
        is the unit of `AttentionBatch.prefill_tiles`."""

    def scratch(self, rows: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int) -> Any:
        """Return the workspace that the kernels need for up to `rows` decode rows."""

    def advance(
        self, tables: SlotTables, rows: DecodeRows, buffers: RowBuffers, ids: torch.Tensor
    ) -> None:
        """Write the inputs of each decode row to `buffers`, and the row's token id to its cache
        position in `ids`, int32 (cache positions,).

        A row with position -1 computes the next position of its slot (a sequence's index) and adds
        one to the slot's length. If the slot's last token is one of its `freeze_ids`, the row
        freezes the slot instead. Rows that continue a frozen slot write to the dummy slot, the last
        one, and do not change the length. The length of the dummy slot stays 0.
        """

    def fill_slot_mapping(
        self,
        tables: SlotTables,
        slots: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Fill `slot_mapping`, int64 (tokens,), with the cache positions of tokens, given their
        `slots` and `positions`, int32 (tokens,) each."""

    def plan(self, scratch: Any, batch: AttentionBatch) -> AttentionBatch:
        """Return the batch with `plan` set to the state that the attention of all layers shares."""

    def sample_rows(self, inputs: FusedSamplingInputs) -> None:
        """Sample a token for each row with the parameters of its slot.

        `DeviceTraits.fused_sampling` specifies the supported rows. The caller ignores the results
        of other rows. Ids are written to `inputs.sampled_ids` and to the table of last tokens. If a
        slot is frozen (stopped by one of its `freeze_ids`), the id is `limits.FROZEN`.
        """

    def sample_masked_rows(self, inputs: FusedSamplingInputs, masks: torch.Tensor) -> None:
        """Choose tokens as `sample_rows` does, but only among allowed ids, and from logits that are
        stored by slot (a sequence's index), (slots, vocabulary).

        `masks`, int32 (rows, words), has one bit per id. If a row's mask allows no id, the result
        is `limits.NOTHING_ALLOWED`. Called only if `DeviceTraits.keeps_logits` is True.
        """

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Return token ids, int64 (rows,), sampled from logits (rows, vocabulary)."""

    def publish(self, ids: torch.Tensor, ring: torch.Tensor, count: torch.Tensor) -> None:
        """Write the step number, followed by `ids`, int32 (rows,), to the next entry of `ring`, and
        increment the step number.

        `ring`, int32 (entries, 1 + maximum number of rows), was allocated by `empty_pinned`.
        `count`, int32 (1,), contains the step number. Called only if `DeviceTraits.publishes_ids`
        is True.
        """


class Device(Runtime, Operators, BatchOperators, Protocol):
    """The complete interface of a device."""

    @property
    def traits(self) -> DeviceTraits:
        """Properties of the device that do not change."""
