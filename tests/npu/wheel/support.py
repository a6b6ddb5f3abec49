"""How torchair runs as far as it goes without CANN, and the devices of these tests."""

import contextlib
import functools

import pytest
import torch
import torchair
import torchair._ge_concrete_graph.compat_ir as compat_ir
import torchair._ge_concrete_graph.fx2ge_converter as converter
import torchair.core._backend as backend
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

import nanoactor.models.devices as devices
from nanoactor.models.devices.npu.device import NPUDevice
from nanoactor.models.options import DeviceOptions
from tests.npu import emulation, reference
from tests.npu.reference import contract
from tests.npu.wheel import functional


@functools.cache
def kernels():
    """The reference kernels behind torch_npu's own schemas, for tensors on the CPU."""
    return [*reference.implement("CPU"), *functional.implement()]


class HostRuntime(emulation.HostRuntime):
    """The same where torch_npu has defined the operators."""

    def _install(self):
        kernels()


def emulate(monkeypatch):
    """`device="npu"` is emulated on the CPU in this process; returns the devices opened."""
    opened = []

    def open_device(name, rank=0, options=None):
        if name == "cpu":
            return original(name, rank, options)
        opened.append(NPUDevice(HostRuntime(), options or DeviceOptions()))
        return opened[-1]

    original = devices.open_device
    monkeypatch.setattr(devices, "open_device", open_device)
    return opened


@contextlib.contextmanager
def without_cann(**settings):
    """torchair converts and generates code; what would start the graph engine is left out, and the
    passes' result is run operator by operator. Yields which operators it asks CANN about.

    `settings` are those of `CompilerConfig.debug`.
    """
    asked = set()
    make = torchair.CompilerConfig

    def config():
        made = make()
        for name, value in settings.items():
            part, _, option = name.rpartition("__")
            setattr(getattr(made.debug, part) if part else made.debug, option, value)
        return made

    def knows(operator, runtime_optional_inputs=(), runtime_optional_attrs=()):
        asked.add(operator)
        return ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchair, "CompilerConfig", config)
        patch.setattr(converter, "initialize_graph_engine", lambda *a, **k: None)
        patch.setattr(backend, "initialize_graph_engine", lambda *a, **k: None)
        patch.setattr(compat_ir, "is_cann_compat", knows)
        patch.setattr(contract, "RESULTS_ALIAS", False)
        torch._dynamo.reset()
        counters.clear()
        yield asked
    torch._dynamo.reset()


class OperatorsCalled(TorchDispatchMode):
    """Notes which operators are called, composite ones by their parts."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with self:
            result = func.decompose(*args, **(kwargs or {}))
        if result is NotImplemented:
            self.found.add(func)
            result = func(*args, **(kwargs or {}))
        return result


def runs_on_the_host(function):
    """Tell whether torch_npu has no kernel for an operator; where PyTorch's own puts another in its
    place, for that (`f.out` or `f_` for `f`). It then copies to the host, waits, and copies back.
    """
    name, overload = function._schema.name, function._schema.overload_name
    tail = f".{overload}" if overload else ""
    kernel = _kernel(name + tail)
    if "default backend kernel" not in kernel:
        return "fallback" in kernel
    places = {f"{name}{tail}_out" if overload else f"{name}.out", f"{name}_{tail}"}
    known = places & set(torch._C._dispatch_get_all_op_names())
    return any("fallback" in _kernel(place) for place in known)


def _kernel(name):
    """What PyTorch's dispatcher runs for NPU tensors, in words."""
    table = torch._C._dispatch_dump_table(name).splitlines()
    (found,) = (line for line in table if line.startswith("PrivateUse1:"))
    return found
