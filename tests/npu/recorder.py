"""What a recorded graph does, on tensors that a CPU can reach: the same operators again, on the
same memory, with nothing new but the lengths that were written into it."""

import contextlib
import dataclasses

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What reads the device's memory on the host: no recording can hold it.
SYNCHRONISES = ("_local_scalar_dense", "nonzero", "_assert_async", "equal", "is_nonzero")


@dataclasses.dataclass
class Call:
    function: object
    args: tuple
    kwargs: dict
    outputs: list
    """Those that are new memory: each replay writes them."""

    def run(self):
        if self.function.namespace == "c10d":
            sum_again(self.function, self.args[0])
            return
        found = tree_leaves(self.function(*self.args, **self.kwargs))
        tensors = [leaf for leaf in found if isinstance(leaf, torch.Tensor)]
        for number, output in self.outputs:
            output.copy_(tensors[number])


def places(values):
    """The memory that tensors lie in. A schema does not say: `contiguous` may copy."""
    return {
        leaf.untyped_storage().data_ptr()
        for leaf in tree_leaves(values)
        if isinstance(leaf, torch.Tensor)
    }


def sum_again(function, tensors):
    """The one collective of a decode step. Called by its operator, it would not be waited for."""
    assert function._schema.name == "c10d::allreduce_", function
    for tensor in tensors:
        dist.all_reduce(tensor)


class Recorder(TorchDispatchMode):
    """Notes every operator that does something."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func._schema.name.partition("::")[2]
        assert not name.startswith(SYNCHRONISES), f"{func} waits for the device while it records"
        result = func(*args, **kwargs)
        given = places((args, kwargs))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        outputs = [(n, tensor) for n, tensor in enumerate(tensors) if not places(tensor) <= given]
        # npu_apply_rotary_pos_emb and sums work in place, whatever their schemas say.
        if outputs or func._schema.is_mutable or func.namespace in ("npu", "c10d"):
            self.calls.append(Call(func, args, kwargs, outputs))
        return result


class HostGraph:
    """The methods of `torch.npu.NPUGraph` that the engine calls, with the same arguments."""

    def __init__(self, log):
        self.calls = []
        self._log = log

    @contextlib.contextmanager
    def recording(self):
        with Recorder() as recorder:
            yield
        self.calls = recorder.calls

    def update(self, cpu_update_input):
        (changes,) = cpu_update_input
        self._log.append(("update", id(self)))
        for call in self.calls:
            if "fused_infer_attention" in call.function._schema.name:
                call.kwargs.update(changes)

    def replay(self):
        self._log.append(("replay", id(self)))
        for call in self.calls:
            call.run()
