"""Two devices: sums by the engine's own group, and an engine of two ranks.

    python -m tests.npu.smoke_checks.collectives RANK PORT LISTENER

is one of the two processes that add.
"""

from __future__ import annotations

import functools
import subprocess
import sys

import torch

from nanoactor.models.collective import RankGroup
from nanoactor.models.devices import open_device
from nanoactor.models.devices.npu.device import NPUDevice
from nanoactor.models.options import DeviceOptions
from nanoactor.placement.rendezvous import Rendezvous
from tests.npu.smoke_checks import engines
from tests.npu.smoke_checks.frame import Check, Failed, Rig

RANKS = 2
SIZES = (1, 1000, 1 << 20)
SECONDS = 240


def part(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, which every type adds exactly."""
    return ((torch.arange(size) * (rank + 3)) % 61 - 30).to(dtype)


def missing(rig: Rig) -> str:
    """Why there cannot be two ranks; nothing where there can."""
    if rig.devices < RANKS:
        return "needs --devices 2"
    torch_npu = getattr(rig.device.runtime, "torch_npu", None)
    if torch_npu is not None and (count := torch_npu.npu.device_count()) < RANKS:
        return f"needs 2 NPUs, {count} is seen"
    return ""


def sums(rig: Rig) -> str:
    """all_reduce, all_gather and the least of both, by two processes."""
    rendezvous = Rendezvous(RANKS)
    command = [sys.executable, "-m", __name__]
    processes = []
    for rank in range(RANKS):
        words = [str(rank), str(rendezvous.port), str(rendezvous.descriptor)]
        inherited = (rendezvous.descriptor,) if rank == 0 else ()
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        processes.append(subprocess.Popen([*command, *words], pass_fds=inherited, **pipes))
    rendezvous.close()
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, text) in enumerate(zip(processes, said, strict=True)):
        print(text, flush=True)
        if process.returncode:
            last = [line for line in text.splitlines() if line.strip()] or ["it says nothing"]
            raise Failed(f"rank {rank}: {last[-1]}")
    return f"{rig.device.collective_backend}: sums of up to {SIZES[-1]} numbers, gather, least"


def _add(rank: int, port: int, listener: int) -> None:
    """One rank's half; whatever is wrong raises."""
    device = open_device("npu", rank, DeviceOptions())
    assert isinstance(device, NPUDevice)
    device.prepare_thread(1)
    with device.stream():
        inherited = listener if rank == 0 else None
        where = device.torch_device
        group = RankGroup(rank, RANKS, device.collective_backend, port, inherited, where)
        for dtype in (device.traits.default_dtype, torch.float32):
            for size in SIZES:
                parts = [part(number, size, dtype) for number in range(RANKS)]
                _compare(
                    "sum", group.all_reduce(parts[rank].to(where, copy=True)), parts[0] + parts[1]
                )
                _compare("gather", group.all_gather(parts[rank].to(where)), torch.stack(parts))
        if (least := group.all_reduce_min(rank + 5)) != 5:
            raise Failed(f"the least of 5 and 6 is {least}")
        device.synchronize()


def _compare(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(found.cpu(), expected):
        raise Failed(f"{what} of {expected.shape[-1]} numbers in {expected.dtype} is wrong")


def two_ranks(mode: str, rig: Rig) -> str:
    """Each in a process of its own; sums are rounded in a different order from one rank's."""
    options = dict(device="npu", placement="default", tensor_parallel_size=RANKS, graph_mode=mode)
    found = engines.run(rig, **options)
    engines.all_captured(found)
    tokens = engines.eager_tokens(rig, "tnd")
    return engines.judge_of(rig).equal(found.tokens, tokens, "one rank's")


def checks(rig: Rig) -> list[Check]:
    """In their order."""
    make = functools.partial(Check, alone=True, skip=missing(rig))
    modes = ("eager",) if rig.quick else ("eager", "npugraph")
    return [
        make("two devices: all-reduce", sums, seconds=SECONDS + 60),
        *(
            make(f"two devices: engine, {mode}", functools.partial(two_ranks, mode), seconds=900)
            for mode in modes
        ),
    ]


if __name__ == "__main__":
    _add(*map(int, sys.argv[1:]))
