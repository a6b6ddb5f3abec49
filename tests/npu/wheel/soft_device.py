"""`npu:0` on the stand-ins' soft device: torch_npu's own tensors, streams, events and graphs, whose
memory is the host's, so that each operator can be run by its CPU kernel on the same bytes.

It emulates dispatch and the flow of data. Replaying a graph runs its operators anew, with the
lengths that torch_npu's own records hold by then.
"""

import contextlib
import ctypes
import dataclasses

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from nanoactor.models.devices.npu.runtime import AscendRuntime
from tests.npu.recorder import sum_again
from tests.npu.wheel.support import kernels

ATTENTION = "fused_infer_attention_score"
WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")


def alias(tensor):
    """The same bytes as a tensor of the CPU."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(whole, tensor.storage_offset(), tensor.shape, tensor.stride())


def is_npu(value):
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def makes_no_data(function):
    """Views and fresh memory: torch_npu's own business."""
    name = function._schema.name.partition("::")[2]
    if name.startswith(("empty", "new_empty", "_weak_ref", "detach")):
        return True
    returns = function._schema.returns
    views = bool(returns) and all(
        value.alias_info is not None and not value.alias_info.is_write for value in returns
    )
    return views and name not in ("contiguous", "reshape", "to", "flatten")


@dataclasses.dataclass
class Recorded:
    function: object
    args: tuple
    kwargs: dict
    outputs: list


class SoftNPU(TorchDispatchMode):
    """Runs operators of NPU tensors on the CPU; counts them, and copies between host and device."""

    def __init__(self, device="npu:0"):
        super().__init__()
        self._device = device
        self.launched = []
        self.copies = []
        self.recording = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        device = kwargs.get("device")
        to_npu = device is not None and torch.device(device).type == "npu"
        if not (to_npu or any(map(is_npu, given))) or makes_no_data(func):
            return func(*args, **kwargs)
        if func._schema.name == "aten::contiguous" and args[0].is_contiguous():
            return args[0]
        self._note(func, given, device)
        result = self._run(func, args, kwargs, to_npu if device is not None else True)
        if self.recording is not None:
            leaves = tree_leaves(result)
            new = [(n, leaf) for n, leaf in enumerate(leaves) if self._is_new(leaf, given)]
            self.recording.append(Recorded(func, args, kwargs, new))
        return result

    def _note(self, func, given, device):
        name = func._schema.name
        kinds = {tensor.device.type for tensor in given if tensor.dim()} | (
            {torch.device(device).type} if device is not None else set()
        )
        if any(name.endswith(wait) for wait in WAITS):
            self.copies.append((name, "waits"))
            assert self.recording is None, f"{name} while a graph is recorded"
        elif "cpu" in kinds and "npu" in kinds:
            self.copies.append((name, "copies"))
        else:
            self.launched.append(name.partition("::")[2])

    def _is_new(self, leaf, given):
        if not is_npu(leaf):
            return False
        mine = leaf.untyped_storage().data_ptr()
        return all(mine != tensor.untyped_storage().data_ptr() for tensor in given)

    def _run(self, func, args, kwargs, stays):
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "cpu"}
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        names = {}

        def down(value):
            if not is_npu(value):
                return value
            below = alias(value)
            names[id(below)] = (below, value)
            return below

        def up(value):
            if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
                return value
            if id(value) in names:
                return names[id(value)][1]
            if not stays:
                return value.clone()
            made = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=self._device
            )
            alias(made).copy_(value)
            return made

        lowered = tree_map(down, (args, kwargs))
        return tree_map(up, func(*lowered[0], **lowered[1]))

    def replay(self, calls, records):
        """`records` are torch_npu's, of the attention operators in their order."""
        lengths = iter(records)
        for call in calls:
            if call.function.namespace == "c10d":
                sum_again(call.function, [alias(tensor) for tensor in call.args[0]])
                continue
            kwargs = dict(call.kwargs)
            if ATTENTION in call.function._schema.name and "out" in kwargs:
                told = next(lengths).kwargs
                kwargs |= {name: told[name] for name in told if name.startswith("actual_seq")}
            found = tree_leaves(self._run(call.function, call.args, kwargs, True))
            for number, output in call.outputs:
                alias(output).copy_(alias(found[number]))


class SoftGraph:
    """A real `NPUGraph`; what the soft device leaves out of a replay is done here."""

    def __init__(self, graph, calls, mode, log):
        self.graph, self._calls, self._mode, self._log = graph, calls, mode, log

    def update(self, cpu_update_input):
        self._log.append(("update", id(self)))
        self.graph.update(cpu_update_input=cpu_update_input)

    def replay(self):
        self._log.append(("replay", id(self)))
        self.graph.replay()
        self._mode.replay(self._calls, self.graph.graph_dispatch_mode.graph_dispatch_records)


class SoftRuntime(AscendRuntime):
    """All of the real one, on the soft device."""

    collective_backend = "gloo"

    def __init__(self, index=0):
        super().__init__(index)
        kernels()
        self.mode = SoftNPU(self.torch_device)
        self.log = []

    def supports(self, dtype):
        return dtype in (torch.float32, torch.float16, torch.bfloat16)

    @contextlib.contextmanager
    def stream(self):
        with super().stream(), self.mode:
            yield

    def record(self, function):
        self.mode.recording = calls = []
        try:
            recorded = super().record(function)
        finally:
            self.mode.recording = None
        recorded.graph = SoftGraph(recorded.graph, calls, self.mode, self.log)
        return recorded
