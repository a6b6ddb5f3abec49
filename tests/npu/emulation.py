"""The machine's half of the NPU device on a CPU. Its operators are the reference kernels, which
check what they are given; nothing here is an NPU, and no time or memory means anything."""

import contextlib
import os
from pathlib import Path

import pytest
import torch

import nanoactor.models.devices as devices
from nanoactor.models.devices.npu.device import NPUDevice
from nanoactor.models.devices.npu.runtime import RecordedGraph
from nanoactor.models.devices.portable import HostEvent
from nanoactor.models.options import DeviceOptions
from tests.models.host_machine import HostMachine
from tests.npu import reference
from tests.npu.recorder import HostGraph
from tests.npu.reference import contract


class DoneEvent(HostEvent):
    """One of a queue that is the calling thread."""

    def is_done(self):
        return True


class HostRuntime(HostMachine):
    """`AscendRuntime` without torch_npu."""

    name = "npu"
    chip = "an emulated NPU"
    is_a2_or_a3 = True
    block_multiple, max_block_size = 128, 512
    packed_head_dims = (64, 128, 192)

    def __init__(self, rank=0, any_block=False):
        """`any_block`: so that tests which are about small blocks need no long sequences."""
        self._install()
        if any_block:
            self.block_multiple, self.packed_head_dims = 1, ()
        self.log = []

    def _install(self):
        reference.install()

    def supports(self, dtype):
        return dtype in (torch.float32, torch.float16, torch.bfloat16)

    def event(self):
        return DoneEvent()

    def record(self, function):
        graph = HostGraph(self.log)
        with graph.recording():
            result = function()
        return RecordedGraph(graph, result, self.event())

    def to_fractal(self, weight):
        return torch.ops.npu.npu_format_cast(weight.contiguous(), 29)

    def versions(self):
        return ("emulated",)


@contextlib.contextmanager
def relaxed():
    """Toy models have heads of sizes that no document lists, and small blocks keep tests short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contract, "ENFORCE_ENUMERATED_SIZES", False)
        patch.setattr(contract, "ENFORCE_BLOCK_SIZES", False)
        patch.setattr(contract, "ENFORCE_ROTATION_RANGE", False)
        yield


def emulate(monkeypatch, any_block=False):
    """From now on `device="npu"` is emulated in this process; returns the devices opened."""
    opened = []

    def open_device(name, rank=0, options=None):
        assert name == "npu"
        opened.append(NPUDevice(HostRuntime(rank, any_block), options or DeviceOptions()))
        return opened[-1]

    original = devices.open_device
    monkeypatch.setattr(
        devices,
        "open_device",
        lambda name, *rest: (open_device if name == "npu" else original)(name, *rest),
    )
    return opened


class Unwilling(HostRuntime):
    """Rank 1 records no step of two rows. That shows at the last turn, as here the other rank's
    recordings sum with its own; on a device a recording sums nothing."""

    def __init__(self, rank=0):
        super().__init__(rank)
        self._tries = 0 if rank == 1 else -100

    def record(self, function):
        recorded = super().record(function)
        if len(function.args[-1].decode_contexts) != 2:
            return recorded
        self._tries += 1
        if self._tries == 2:
            raise RuntimeError("error code 207008: no stream is left")
        return recorded


ROOT = Path(__file__).resolve().parents[2]


def emulate_everywhere(monkeypatch, runtime):
    """The same in every process that an engine starts; `runtime` is "module:class"."""
    site = Path(__file__).parent / "site"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(site), str(ROOT))))
    monkeypatch.setenv("NANOACTOR_TEST_RUNTIME", runtime)
