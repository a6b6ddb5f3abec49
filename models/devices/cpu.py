"""The CPU: the embedded default and the ground truth. Nothing to compile, float32 exact."""

from __future__ import annotations

import functools
import logging
import math
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from nanoactor.models.batch import AttentionBatch, KVCache
from nanoactor.models.device import LinearOperator, Memory
from nanoactor.models.devices.cpu_attention import DecodeAttention, DecodePlan
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
        self._attend = DecodeAttention()
        self._constants: dict[float, torch.Tensor] = {}
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
        """Return what the host, or the container if it has less, can still give."""
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
        """Return how far the process's peak has risen."""
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
        """x / sqrt(mean(x²) + eps) in float32, in as few operators as PyTorch allows.

        Its own `rms_norm` is made of a dozen here. sqrt(sum(x²) + n eps) is the hypotenuse of the
        vector's norm and sqrt(n eps), so that no step in between overflows.
        """
        return self._unit(x, eps).mul_(weight)

    def _unit(self, x: torch.Tensor, eps: float) -> torch.Tensor:
        size = x.shape[-1]
        root = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        root = torch.hypot(root, self._constant((size * eps) ** 0.5)).mul_(size**-0.5)
        return (x / root).to(x.dtype)

    def _constant(self, value: float) -> torch.Tensor:
        found = self._constants.get(value)
        if found is None:
            found = self._constants[value] = torch.tensor(value, dtype=torch.float32)
        return found

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """In one new tensor instead of two."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def rotation(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, 1, head_dim): both halves, the sine with the sign that it has in each."""
        return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]

    def norm_rotate_store(
        self,
        qkv: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: KVCache,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Queries and keys together, as far as they go the same way."""
        kv_heads = cache.keys.shape[2]
        heads = qkv.shape[1] - 2 * kv_heads
        x, values = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if weights is not None:
            x = self._unit(x, eps)
            x[:, :heads].mul_(weights[0])
            x[:, heads:].mul_(weights[1])
        cos, sin = rotation
        turned = torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(qkv.dtype)
        self.write_kv(turned[:, heads:], values, cache, slots)
        return turned[:, :heads]

    def attention(
        self, queries: torch.Tensor, cache: KVCache, batch: AttentionBatch, scale: float
    ) -> torch.Tensor:
        """A step that only decodes needs no tensor to put parts together."""
        if batch.plan.decodes is not None and not batch.plan.prefills:
            return self._decode(queries, cache, batch, scale)
        return super().attention(queries, cache, batch, scale)

    def _plan_decodes(self, batch: AttentionBatch) -> DecodePlan:
        return DecodePlan(batch)

    def _decode(
        self, queries: torch.Tensor, cache: KVCache, batch: AttentionBatch, scale: float
    ) -> torch.Tensor:
        return self._attend(queries, cache, batch.plan.decodes, scale)


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
