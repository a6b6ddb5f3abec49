"""Interface of a device for layers and executors, in three protocols. A device is a folder next
to this file and passes `tests/models/test_device.py`; docs/extending.md lists the places that name
it."""

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
    HeadTransform,
    KVCache,
    RowBuffers,
    RowChoice,
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
    """Amounts of memory in bytes."""

    total: int
    free: int


class TimedEvent(Protocol):
    """A point in the device's work queue, with the time when it was passed."""

    def record(self) -> None:
        """Put the point after all work queued so far."""

    def wait(self) -> None:
        """Block the calling thread until the device has passed it."""

    def milliseconds_until(self, later: Any) -> float:
        """Return the time to another event of the device; both have been passed."""


LinearOperator = Callable[[torch.Tensor], torch.Tensor]
"""(tokens, inputs) to (tokens, outputs)."""


ExpertsOperator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(tokens, hidden), experts int32 (tokens, chosen), shares float32 (tokens, chosen) to (tokens,
hidden)."""


@runtime_checkable
class HasMatrix(Protocol):
    """A linear operator that exposes its matrix to an operator for a whole step."""

    @property
    def bias(self) -> torch.Tensor | None:
        """Bias, (outputs,)."""

    def matrix(self) -> Matrix | None:
        """Return its weight; None if such an operator cannot read its layout."""


@runtime_checkable
class HasExpertMatrices(Protocol):
    """An operator of experts that exposes its matrices to an operator for a whole step."""

    def matrices(self) -> tuple[Matrix, Matrix] | None:
        """Return the experts' gates and ups, and down projections; None if such an operator cannot
        read their layout."""


@dataclasses.dataclass(frozen=True, slots=True)
class Linear:
    """A linear operator that keeps its weight, (outputs, inputs), unchanged."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x Wᵀ + b."""
        return F.linear(x, self.weight, self.bias)

    def matrix(self) -> torch.Tensor:
        """Return the weight."""
        return self.weight


class WholeStep(NamedTuple):
    """Results of a decode step that ran as one operator."""

    hidden: torch.Tensor
    """(rows, hidden), after the final norm."""
    logits: torch.Tensor
    """Logits, (rows, vocabulary)."""


class WholeSteps(Protocol):
    """Decode steps that run as one operator, for some numbers of rows."""

    def run(
        self,
        rows: RowBuffers,
        slots: torch.Tensor,
        tables: torch.Tensor,
        caches: Sequence[KVCache],
        into: torch.Tensor | None,
    ) -> WholeStep | None:
        """Queue a step of rows laid out by `BatchOperators.advance`, of slots int32 (rows,). Return
        None if there is no operator for this number of rows. The next step overwrites the results;
        logits go to `into` if given."""

    def check(self) -> None:
        """Raise the error that stopped a step, if the device reports a failed one."""


ForwardFunction = Callable[[ForwardInputs], torch.Tensor]
"""Maps the inputs of a step to hidden states."""

CapturedFunction = Callable[[HostSeqLens], torch.Tensor]
"""A function that a device can capture: queues a step's work; only the lengths may change."""


class Captured(Protocol):
    """Recorded work that is queued as one."""

    def replay(self, lengths: HostSeqLens) -> torch.Tensor:
        """Queue the recorded work; return the recorded function's result tensor, which the replay
        overwrites."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceTraits:
    """Properties of a device that planners, executors and models need before they call it."""

    name: str
    collective_backend: str
    """gloo, nccl or hccl."""
    default_dtype: torch.dtype
    """Type for `dtype="auto"` if the checkpoint's own type is slow on this device."""
    default_block_size: int
    default_memory_utilization: float
    """Share of the memory free at start that weights and cache may take."""
    shared_memory: bool = False
    """True if the ranks of a host share one memory."""
    asynchronous: bool = True
    """True if calls are queued. Otherwise they complete before they return, and as a maximal step
    may take minutes, the warm-up runs a smaller one."""
    any_thread: bool = False
    """True if any thread may queue work, one at a time."""
    captures_graphs: bool = False
    """True if `Runtime.capture` speeds up decode steps."""
    captures_prompts: bool = False
    """True if it also speeds up steps with prompts."""
    narrows_last_layer: bool = True
    """True if steps that are not captured may have `AttentionBatch.final`."""
    needs_host_seq_lens: bool = True
    """True if `BatchOperators.plan` reads `AttentionBatch.lengths`."""
    runs_as_rows_from: int = 1 << 30
    """Minimum number of rows from which a decode step may have several rows of one slot, at
    distinct positions: each reads the keys and values that the others write in the same step."""
    deep_pipeline: bool = False
    """True if another step in flight costs negligible memory."""
    keeps_logits: bool = False
    """True if constrained rows keep their step's logits rather than hidden states, because reading
    the head again costs more than the memory."""
    publishes_ids: bool = False
    """True if a step can write to host memory itself."""
    fused_sampling: FusedSampling = "none"
    fused_sampling_of_ranks: FusedSampling = "none"
    """The same if ranks share a vocabulary: each chooses from the logits of all ranks."""


class Runtime(Protocol):
    """The memory of a device, its queue, events and graphs."""

    torch_device: torch.device

    def prepare_thread(self, threads: int) -> None:
        """Set up the calling thread for computing, with `threads` intra-operator threads."""

    def memory(self) -> Memory:
        """Return the device's total and currently free memory."""

    def reset_peak(self) -> None:
        """Start to track peak allocation."""

    def peak(self) -> int:
        """Return the peak number of bytes allocated since `reset_peak`, minus the number allocated
        at that call."""

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a host tensor for asynchronous copies from and to the device."""

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate zeros on the device, for the KV cache: large, contiguous, long-lived."""

    def synchronize(self) -> None:
        """Block until the device is idle."""

    def stream(self) -> AbstractContextManager[None]:
        """Return a context in which the calling thread uses the device's one queue, without
        gradients."""

    def timed_event(self) -> TimedEvent:
        """Create a timed event."""

    def run(self, forward: ForwardFunction, inputs: ForwardInputs) -> torch.Tensor:
        """Queue a model's forward pass, possibly a compiled one."""

    def capture(self, function: CapturedFunction, lengths: HostSeqLens, in_flight: int) -> Captured:
        """Record the work that a function queues, within `stream`, for lengths up to these. It has
        run once before; captures share memory, so the largest comes first. Up to `in_flight`
        replays may be in flight at once. Raises RuntimeError if the device cannot."""


class Operators(Protocol):
    """Operators that layers call. Hidden states are (tokens, ...) in the model's type."""

    def supports(self, dtype: torch.dtype) -> bool:
        """Return True if models run in this type at a reasonable speed."""

    def check(self, dtype: torch.dtype, block_size: int, head_dim: int) -> None:
        """Raise `UnsupportedModel` if the operators cannot run the model at all."""

    def linear(self, weights: LinearWeights) -> LinearOperator:
        """Make the operator x Wᵀ + b. The device may keep weights in its own layout; the caller
        releases them. A format without an operator here is unpacked."""

    def route(self, x: torch.Tensor, router: Router) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's experts, int32 (tokens, chosen), the likeliest first, ties to the
        lower one; and their shares, float32, of the type of x in value."""

    def experts(self, weights: ExpertWeights) -> ExpertsOperator:
        """Make the operator of experts: sum of share * down(silu(gate x) * up x). A format without
        an operator here is unpacked."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x²) + eps) * weight over the last dimension (arXiv:1910.07467). With a
        float32 weight the product is rounded once."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual)."""

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate pairs of the first 2 * pairs dimensions of (tokens, heads, head_dim) by (tokens,
        pairs); the others are unchanged."""

    def rotation(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines (tokens, pairs) in the form that `norm_rotate_store` takes."""

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(first half of the last dimension) * second half (arXiv:2002.05202)."""

    def write_kv(
        self, keys: torch.Tensor, values: torch.Tensor, cache: KVCache, slots: torch.Tensor
    ) -> None:
        """Store (tokens, kv_heads, head_dim) at the flat positions `slots` of the cache.

        Non-finite numbers are stored as 0: attention may read whole blocks and mask positions past
        a sequence's end, and a masked NaN would still corrupt the next sequence in the block.
        """

    def norm_rotate_store(
        self, qkv: torch.Tensor, how: HeadTransform, cache: KVCache, slots: torch.Tensor
    ) -> torch.Tensor:
        """Norm and rotate the heads of queries and keys, `write_kv`; returns the queries.

        `qkv` is (tokens, heads + 2 * kv_heads, head_dim): queries, keys, values.
        """

    def attention(
        self, queries: torch.Tensor, cache: KVCache, batch: AttentionBatch, scale: float
    ) -> torch.Tensor:
        """Return causal attention of (tokens, heads, head_dim) over the paged cache, same shape."""

    def segment_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Sequence[int]
    ) -> torch.Tensor:
        """Return attention of (tokens, heads, head_dim) without a cache or a mask, same shape. Each
        of the consecutive segments, given by their lengths in tokens, sees exactly itself."""

    def whole_steps(
        self, config: ModelConfig, weights: ModelWeights, sizes: Sequence[int], block_size: int
    ) -> WholeSteps | None:
        """Make whole decode steps for those of `sizes` that have one; None if none has. A failure
        is logged with its cost."""


class BatchOperators(Protocol):
    """Operators that executors call at each step. The batch is kept on the device: steps read
    tables that are indexed by slot, and none waits for the host."""

    def dummy_blocks(self, rows: int, block_size: int) -> int:
        """Return the number of blocks that `rows` padded rows may write to."""

    def tokens_per_program(self, heads: int, kv_heads: int) -> int:
        """Return the number of prompt tokens per program of the prefill kernel, the unit of
        `AttentionBatch.prefill_tiles`."""

    def scratch(self, rows: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int) -> Any:
        """Allocate the kernels' memory for `rows` decode rows."""

    def advance(
        self, tables: SlotTables, rows: DecodeRows, into: RowBuffers, ids: torch.Tensor
    ) -> None:
        """Lay out the token of each row, and record it at its place in `ids`, int32 (places,). Rows
        without a position of their own are counted in their slots' lengths, except for the dummy's.

        Such a row freezes its slot if the slot's last token is one of its `freeze_ids`. The rows of
        frozen slots get the dummy's place, and are not counted."""

    def locate(
        self,
        tables: SlotTables,
        slots: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Fill in the places int64 (tokens,) of tokens at positions of slots, int32 (tokens,)."""

    def plan(self, scratch: Any, batch: AttentionBatch) -> AttentionBatch:
        """Return the batch with its `plan`: the state shared by the attention of all layers."""

    def sample_rows(self, rows: RowChoice) -> None:
        """Choose by each row's slot, as `DeviceTraits.fused_sampling` says: greedily, from the
        whole vocabulary, or with a top-k of at most `limits.CANDIDATES`; results for other rows do
        not matter. Ids go to `chosen` and to the table of last tokens; of frozen slots,
        `limits.FROZEN` goes to `chosen`."""

    def sample_masked_rows(self, rows: RowChoice, masks: torch.Tensor) -> None:
        """Choose from kept logits, (slots, vocabulary), under masks, int32 (rows, words), as
        `sample_rows` does; `limits.NOTHING_ALLOWED` if a mask leaves no id. Called if
        `DeviceTraits.keeps_logits`."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Return ids, int64 (rows,), chosen from logits (rows, vocabulary)."""

    def publish(self, ids: torch.Tensor, ring: torch.Tensor, count: torch.Tensor) -> None:
        """Write ids, int32 (rows,), to the next place of `ring`, int32 (places, 1 + most rows),
        allocated by `pinned`, after the number of the step, which `count`, int32 (1,), holds.
        Called if `DeviceTraits.publishes_ids`."""


class Device(Runtime, Operators, BatchOperators, Protocol):
    """All of a device."""

    @property
    def traits(self) -> DeviceTraits:
        """Return the device's properties."""
