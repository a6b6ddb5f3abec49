"""Memory, streams, events and copies: the machine's half of the device."""

from __future__ import annotations

import importlib.util
import time

import torch

from tests.npu.smoke_checks.frame import Check, Failed, Rig, Skipped, same, short

_MIB = 1 << 20


def opens(rig: Rig) -> str:
    """torch_npu was imported, or this process would not have come so far."""
    runtime = rig.device.runtime
    return f"{runtime.chip}, models run in {short(rig.dtype)}"


def figures_of_memory(rig: Rig) -> str:
    """The driver's and the allocator's."""
    memory = rig.device.memory()
    if not 0 < memory.free <= memory.total:
        raise Failed(f"{memory.free} bytes are free of {memory.total}")
    if not 2 * 1024 <= memory.total // _MIB <= 1024 * 1024:
        raise Failed(f"{memory.total // _MIB} MiB in all")
    said = f"{memory.free // _MIB} of {memory.total // _MIB} MiB are free"
    if rig.emulated:
        return said
    rig.device.reset_peak_memory()
    size = 256 * _MIB
    held = rig.device.zeros(size, dtype=torch.int8)
    peak, left = rig.device.peak_memory(), rig.device.memory().free
    if not size <= peak <= 2 * size:
        raise Failed(f"{size} bytes were allocated, the peak says {peak}")
    if left > memory.free - size // 2:
        raise Failed(f"{size} bytes were allocated, free went from {memory.free} to {left}")
    del held
    again = rig.device.memory().free
    if again < memory.free - size // 2:
        raise Failed(f"{size} bytes were let go of, free is {again} of {memory.free}")
    return said


def streams_and_events(rig: Rig) -> str:
    """Work on a stream of its own, an event behind it."""
    x = rig.to(torch.ones(256, 256))
    with rig.device.stream():
        event = rig.device.runtime.event()
        y = x @ x
        event.record()
        event.wait()
        if not event.is_done():
            raise Failed("an event that was waited for is not done")
        same("a product", y, torch.full((256, 256), 256.0))
    rig.device.synchronize()
    return ""


def timed_events(rig: Rig) -> str:
    """The device's clock against the host's."""
    x = rig.to(torch.ones(512, 512))
    with rig.device.stream():
        first, last = rig.device.timed_event(), rig.device.timed_event()
        begin = time.perf_counter()
        first.record()
        for _ in range(20):
            x = (x @ x) * 0.0
        last.record()
        last.wait()
        by_host = (time.perf_counter() - begin) * 1e3
        by_device = first.milliseconds_until(last)
    if not 0 < by_device <= by_host + 1:
        raise Failed(f"{by_device:.3f} ms by the device, {by_host:.3f} ms by the host")
    return f"{by_device:.3f} ms by the device, {by_host:.3f} ms by the host"


def pinned_memory(rig: Rig) -> str:
    """Page-locked, and copied to and from without waiting."""
    source, target = (rig.device.empty_pinned(1 << 16, dtype=torch.int32) for _ in range(2))
    source.copy_(torch.arange(1 << 16, dtype=torch.int32))
    with rig.device.stream():
        there = source.to(rig.where, non_blocking=True)
        target.copy_(there + 1, non_blocking=True)
        event = rig.device.timed_event()
        event.record()
        event.wait()
    same("pinned memory", target, torch.arange(1, (1 << 16) + 1, dtype=torch.int32))
    if not rig.emulated and not (source.is_pinned() or source.is_pinned(rig.where.type)):
        raise Failed("copies are right, but is_pinned() is False")
    return ""


def round_trip(rig: Rig) -> str:
    """Every type that the engine uses, there and back."""
    names = "float32 float16 bfloat16 int64 int32 int8 bool".split()  # noqa: SIM905
    for name in names:
        numbers = (torch.arange(-500, 500) * 3).to(getattr(torch, name))
        same(name, rig.to(numbers), numbers)
    wide = torch.tensor([-(2**63), 2**63 - 1, 2**40 + 1, -1])
    same("large int64", rig.to(wide), wide)
    return ", ".join(names)


def compilers(rig: Rig) -> str:
    """What the compiled graph modes import."""
    if importlib.util.find_spec("torchair") is None:
        if rig.emulated:
            raise Skipped("torchair is not installed")
        raise Failed("torchair cannot be found: it comes with torch_npu")
    return ""


def checks() -> list[Check]:
    """In their order."""
    return [
        Check("environment: device opens", opens),
        Check("environment: memory", figures_of_memory),
        Check("environment: streams and events", streams_and_events),
        Check("environment: timed events", timed_events),
        Check("environment: pinned memory", pinned_memory),
        Check("environment: host-device round trip", round_trip),
        Check("environment: torchair", compilers),
    ]
