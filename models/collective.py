"""Sums and gathers over the ranks of a tensor-parallel group."""

from __future__ import annotations

import datetime
from typing import Protocol

import torch
import torch.distributed as dist

_HOST = "127.0.0.1"
# How long a rank waits for the others: loading a large model may take one of them minutes longer.
_TIMEOUT = datetime.timedelta(minutes=30)


class Group(Protocol):
    """Collectives for layers and samplers; every rank calls the same ones in the same order."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors, possibly in the memory of `x`."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' tensors, (ranks, *x.shape), in rank order."""

    def all_reduce_min(self, value: int) -> int:
        """Return the minimum over all ranks."""


class SingleRank:
    """A group of one."""

    rank, size = 0, 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor unchanged."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor as the only row."""
        return x[None]

    def all_reduce_min(self, value: int) -> int:
        """Return the value unchanged."""
        return value


class RankGroup:
    """A group of processes that uses torch.distributed."""

    def __init__(
        self,
        rank: int,
        size: int,
        backend: str,
        port: int,
        listener: int | None,
        device: torch.device | None = None,
    ) -> None:
        """Rendezvous at a port of the loopback interface; tensors are on `device`.

        `listener` is rank 0's listening socket: one opened by PyTorch itself would listen on every
        interface.
        """
        self.rank, self.size = rank, size
        self._device = device
        self._gathers_at_once = backend == "nccl"
        store = dist.TCPStore(  # type: ignore[attr-defined]
            _HOST,
            port,
            world_size=size,
            is_master=rank == 0,
            timeout=_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        of_gpu = device if device is not None and device.type == "cuda" else None
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT, device_id=of_gpu
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks in place."""
        dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gather into one new tensor."""
        if self._gathers_at_once:
            whole = x.new_empty(self.size, *x.shape)
            dist.all_gather_into_tensor(whole, x.contiguous())
            return whole
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.stack(parts)

    def all_reduce_min(self, value: int) -> int:
        """Reduce by way of a tensor."""
        held = torch.tensor([value], device=self._device)
        dist.all_reduce(held, dist.ReduceOp.MIN)
        return int(held)
