"""The CPU: the embedded default and the ground truth. Nothing to compile, float32 exact."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from nanoactor.models.batch import AttentionBatch, KVCache
from nanoactor.models.device import LinearOperator, Memory
from nanoactor.models.devices.portable import HostEvent, PortableOperators

log = logging.getLogger("nanoactor.models.cpu")


class CPUDevice(PortableOperators):
    """PyTorch on the host's cores."""

    name = "cpu"
    torch_device = torch.device("cpu")
    collective_backend = "gloo"
    default_block_size = 16
    shared_memory = True
    asynchronous = False
    default_memory_utilization = 0.4

    def __init__(self) -> None:
        self._base = 0
        self._buffers: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}
        native = self.supports(torch.bfloat16)
        self.default_dtype = torch.bfloat16 if native else torch.float32

    def prepare_thread(self, threads: int) -> None:
        """Limit OpenMP here; each thread that computes has its own setting."""
        torch.set_num_threads(threads)

    def supports(self, dtype: torch.dtype) -> bool:
        """float32 always; bfloat16 where the processor multiplies in it."""
        if dtype == torch.bfloat16:
            flags = _first_line("/proc/cpuinfo", "flags") + _first_line("/proc/cpuinfo", "Features")
            return any(flag in flags.split() for flag in ("avx512_bf16", "amx_bf16", "bf16"))
        return dtype == torch.float32

    def memory(self) -> Memory:
        """What the host, or the container if it has less, can still give."""
        total = _kibibytes("/proc/meminfo", "MemTotal") * 1024
        free = _kibibytes("/proc/meminfo", "MemAvailable") * 1024
        limit, used = _cgroup("memory.max"), _cgroup("memory.current")
        if limit is not None:
            total = min(total, limit)
            free = min(free, limit - (used or 0))
        return Memory(total, max(0, free))

    def reset_peak(self) -> None:
        """Have the kernel forget the process's peak, and remember where it stands."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self._base = _kibibytes("/proc/self/status", "VmRSS") * 1024
        except OSError:  # /proc is read-only: only a rise above the old peak can be seen
            self._base = _kibibytes("/proc/self/status", "VmHWM") * 1024

    def peak(self) -> int:
        """How far the process's peak has risen."""
        return max(0, _kibibytes("/proc/self/status", "VmHWM") * 1024 - self._base)

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty(shape, dtype=dtype)

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Fresh pages from the kernel, which are zero and take no memory until they are written.

        `torch.zeros` would write them all: seconds, and gigabytes that may never be used.
        """
        size = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)

    def timed_event(self) -> HostEvent:
        """By the host's clock."""
        return HostEvent()

    def synchronize(self) -> None:
        """Nothing is ever queued."""

    # -- operators for which PyTorch has faster forms here than the portable ones ----------

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOperator:
        """oneDNN's own layout, reordered once instead of in every call."""
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        except (AttributeError, RuntimeError) as error:  # a build of PyTorch without oneDNN
            _log_once(f"weights stay unpacked, which costs up to half of the speed: {error}")
            return super().linear(weight, bias)
        apply = torch.ops.mkldnn._linear_pointwise
        return lambda x: apply(x, packed, bias, "none", [], "")

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Fused in float32, where it gives the same bits."""
        if x.dtype == torch.float32 and _FUSED_RMS_NORM is not None:
            normed: torch.Tensor = _FUSED_RMS_NORM(x, [x.shape[-1]], weight, eps)[0]
            return normed
        return super().rms_norm(x, weight, eps)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """In one new tensor instead of two."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def _plan_decodes(self, batch: AttentionBatch) -> _DecodePlan:
        return _DecodePlan(batch)

    def _decode(
        self, queries: torch.Tensor, cache: KVCache, batch: AttentionBatch, scale: float
    ) -> torch.Tensor:
        """Rows of similar length together, so that little is padded; the query heads that share a
        KV head stand as positions of one query, so that keys and values are read once."""
        plan: _DecodePlan = batch.plan.decodes
        groups = plan.groups(cache.keys.dtype)
        rows, heads, size = queries.shape
        kv_heads = cache.keys.shape[2]
        grouped = queries.view(rows, kv_heads, heads // kv_heads, size)
        output = torch.empty_like(grouped)
        keys, values = self._gathered(cache.keys, plan.most_blocks)
        for group in groups:
            blocks = len(group.blocks)
            torch.index_select(cache.keys, 0, group.blocks, out=keys[:blocks])
            torch.index_select(cache.values, 0, group.blocks, out=values[:blocks])
            shape = (len(group.rows), -1, kv_heads, size)
            output[group.rows] = F.scaled_dot_product_attention(
                grouped[group.rows],
                keys[:blocks].view(shape).transpose(1, 2),
                values[:blocks].view(shape).transpose(1, 2),
                attn_mask=group.mask,
                scale=scale,
            )
        return output.view(rows, heads, size)

    def _gathered(self, like: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Buffers for so many blocks, kept: fresh ones would fault every page in anew."""
        found = self._buffers.get(like.dtype)
        if found is None or len(found[0]) < blocks or found[0].shape[1:] != like.shape[1:]:
            shape = (1 << (blocks - 1).bit_length(), *like.shape[1:])
            found = torch.empty(shape, dtype=like.dtype), torch.empty(shape, dtype=like.dtype)
            self._buffers[like.dtype] = found
        return found


class _DecodePlan:
    """How the decode rows of a step are grouped: by its first layer, for all of them."""

    def __init__(self, batch: AttentionBatch) -> None:
        # By the host's own figures: to ask a tensor for each group's longest costs more.
        self._contexts = np.array(batch.lengths.decode_contexts)
        self._tables = batch.tables.index_select(0, batch.decode_slots)
        self._block_size = batch.block_size
        self._groups: list[_DecodeGroup] = []
        self.most_blocks = 0
        """Of any group."""

    def groups(self, dtype: torch.dtype) -> list[_DecodeGroup]:
        """The groups, longest rows first; `dtype` is that of keys and values."""
        if not self._groups:
            order, size = np.argsort(-self._contexts, kind="stable"), _GROUP_ROWS.get(dtype, 8)
            parts = np.split(order, range(size, len(order), size))
            self._groups = [self._group(rows, dtype) for rows in parts]
            self.most_blocks = max(len(group.blocks) for group in self._groups)
        return self._groups

    def _group(self, rows: NDArray[np.int64], dtype: torch.dtype) -> _DecodeGroup:
        contexts, numbers = torch.from_numpy(self._contexts[rows]), torch.from_numpy(rows)
        blocks = -(-int(self._contexts[rows[0]]) // self._block_size)
        past = torch.arange(blocks * self._block_size)[None] >= contexts[:, None]
        mask = torch.zeros(past.shape, dtype=dtype).masked_fill_(past, float("-inf"))
        return _DecodeGroup(numbers, self._tables[numbers, :blocks].flatten(), mask[:, None, None])


@dataclasses.dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Some rows, the blocks of their contexts padded to the longest, and what is padding."""

    rows: torch.Tensor
    blocks: torch.Tensor
    mask: torch.Tensor
    """(rows, 1, 1, positions): 0, or minus infinity where a row has no such position."""


# Measured on two cores of an AMD EPYC with AVX-512: more rows pad more, fewer call more.
_GROUP_ROWS = {torch.float32: 4, torch.bfloat16: 8}
_FUSED_RMS_NORM = getattr(torch.ops.aten, "_fused_rms_norm", None)


@functools.cache
def _log_once(text: str) -> None:
    log.warning(text)


def _first_line(path: str, key: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(key)), "")


def _kibibytes(path: str, key: str) -> int:
    words = _first_line(path, key + ":").split()
    return int(words[1]) if len(words) > 1 else 0


def _cgroup(name: str) -> int | None:
    try:
        text = Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
