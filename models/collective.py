"""Collective operations over the ranks of a tensor-parallel group."""

from __future__ import annotations

import datetime
from typing import Protocol

import torch
import torch.distributed as dist

_HOST = "127.0.0.1"
# Time limit for collectives. Ranks may differ by minutes in the time that they take to load a large
# model.
_TIMEOUT = datetime.timedelta(minutes=30)


class Group(Protocol):
    """Collective operations for layers and samplers. All ranks must call the same operations in the
    same order."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors. The result may be written into the memory of
        `x`."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks in rank order, (ranks, *x.shape)."""

    def all_reduce_min(self, value: int) -> int:
        """Return the minimum of the values that the ranks pass."""


class SingleRank:
    """A group of a single rank, which needs no communication."""

    rank, size = 0, 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` unchanged."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return a view of `x` with a leading dimension of size 1."""
        return x[None]

    def all_reduce_min(self, value: int) -> int:
        """Return `value` unchanged."""
        return value


class RankGroup:
    """A tensor-parallel group of processes on one machine that communicate through
    torch.distributed."""

    def __init__(
        self,
        rank: int,
        size: int,
        backend: str,
        port: int,
        listen_fd: int | None,
        device: torch.device | None = None,
    ) -> None:
        """Join the process group through a TCP store at `port` of the loopback interface. Tensors
        are on `device`.

        `listen_fd` is the file descriptor of the store's listening socket on rank 0. A socket
        opened by PyTorch itself would listen on every interface.
        """
        self.rank, self.size = rank, size
        self._device = device
        self._gathers_into_tensor = backend == "nccl"
        store = dist.TCPStore(  # type: ignore[attr-defined]
            _HOST,
            port,
            world_size=size,
            is_master=rank == 0,
            timeout=_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )
        gpu = device if device is not None and device.type == "cuda" else None
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT, device_id=gpu
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks in place, and return it."""
        dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks in a new tensor, (ranks, *x.shape)."""
        if self._gathers_into_tensor:
            gathered = x.new_empty(self.size, *x.shape)
            dist.all_gather_into_tensor(gathered, x.contiguous())
            return gathered
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.stack(parts)

    def all_reduce_min(self, value: int) -> int:
        """Return the minimum over the ranks, after waiting for the device to compute it."""
        tensor = torch.tensor([value], device=self._device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return int(tensor)
