"""Access to one Ascend NPU through torch_npu: memory, streams, events and captured graphs, but no
operators.

This code has never run on an NPU. docs/ascend.md lists what was verified, and how.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from nanoactor.models.devices.protocols import Memory
from nanoactor.models.errors import UnsupportedModel

_INSTALL = (
    "run `pip install '.[npu]'` in a separate environment, which installs matching releases of "
    "PyTorch and torch_npu"
)
_SOURCE = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
# Atlas A2 (910B) and A3 (910_93) have bfloat16; some operators are documented only for them.
_A2_OR_A3 = re.compile(r"Ascend910(B|_93)")
_HALF_DTYPES = (torch.float16, torch.bfloat16)


def load_torch_npu() -> Any:
    """Import torch_npu and return it. Raises `UnsupportedModel`, which names the missing part and
    the remedy, if that fails."""
    try:
        import torch_npu
    except ModuleNotFoundError as error:
        if error.name != "torch_npu":
            raise UnsupportedModel(
                f"torch_npu cannot be imported, because {error.name} is not installed; {_INSTALL}"
            ) from error
        raise UnsupportedModel(
            f"device npu requires torch_npu, which is not installed; {_INSTALL}"
        ) from error
    except ImportError as error:
        match = re.search(r"lib\w+\.so", str(error))
        missing = match.group() if match else error
        raise UnsupportedModel(
            f"torch_npu is installed, but CANN's {missing} cannot be loaded: "
            f"run `{_SOURCE}` in this shell (or install CANN), then `nanoactor doctor`"
        ) from error
    return torch_npu


class NPUEvent:
    """An NPU event, which `record` queues on the current stream."""

    def __init__(self, event: Any) -> None:
        """Wrap an event of torch_npu."""
        self.event = event

    def record(self) -> None:
        """Record the event on the current stream."""
        self.event.record()

    def is_done(self) -> bool:
        """Return True if the stream has reached the event."""
        return bool(self.event.query())

    def wait(self) -> None:
        """Block until the stream has reached the event."""
        self.event.synchronize()

    def milliseconds_until(self, later: NPUEvent) -> float:
        """Return the time from this event to `later` in milliseconds, by the device's clock."""
        return float(self.event.elapsed_time(later.event))


@dataclasses.dataclass(slots=True)
class RecordedGraph:
    """A captured native graph. Before each replay, the host writes the context lengths for the
    attention operators into it."""

    graph: Any
    result: torch.Tensor
    end_event: NPUEvent

    def replay(self, contexts: Sequence[int]) -> None:
        """Write the context lengths into the graph and launch it. The previous replay must have
        finished, because a running replay would see the new lengths."""
        self.graph.update(cpu_update_input=[{"actual_seq_lengths_kv": list(contexts)}])
        self.graph.replay()
        self.end_event.record()


class AscendRuntime:
    """The part of an `NPUDevice` that depends on torch_npu and the chip."""

    name = "npu"
    block_multiple, max_block_size = 128, 512
    """Block sizes that fused attention supports for rows of several tokens: multiples of
    `block_multiple`, up to `max_block_size`."""
    packed_head_dims: tuple[int, ...] = (64, 128, 192)
    """Head sizes that fused attention supports for packed tokens (TND)."""
    collective_backend = "hccl"
    default_dtype: torch.dtype

    def __init__(self, index: int = 0) -> None:
        """Open NPU number `index`. Raises `UnsupportedModel` if torch_npu, CANN or the NPU is
        missing."""
        self.torch_npu = load_torch_npu()
        self._npu = self.torch_npu.npu
        count = self._npu.device_count()
        if index >= count:
            raise UnsupportedModel(
                f"device npu:{index} does not exist: torch_npu {self.torch_npu.__version__} sees "
                f"{count} NPUs; run `nanoactor doctor` to find the cause"
            )
        self.torch_device = torch.device("npu", index)
        self._npu.set_device(self.torch_device)
        self.chip = str(self._npu.get_device_name(index))
        self.is_a2_or_a3 = bool(_A2_OR_A3.match(self.chip))
        self.default_dtype = torch.bfloat16 if self.is_a2_or_a3 else torch.float16
        self._stream: Any = None
        self._pool: Any = None
        self._base = 0

    def supports(self, dtype: torch.dtype) -> bool:
        """Return True for float16, and for bfloat16 on Atlas A2 and A3: the dtypes of fused
        attention."""
        return dtype in _HALF_DTYPES and (dtype != torch.bfloat16 or self.is_a2_or_a3)

    def prepare_thread(self, threads: int) -> None:
        """Select the NPU for the calling thread, limit its CPU threads, and use precompiled
        operators, so that none is compiled while the engine runs."""
        self._npu.set_device(self.torch_device)
        self._npu.set_compile_mode(jit_compile=False)
        torch.set_num_threads(threads)

    def memory(self) -> Memory:
        """Return the total and free memory in bytes that the driver reports. Memory cached by
        PyTorch counts as free."""
        free, total = self._npu.mem_get_info(self.torch_device)
        cached = self._npu.memory_reserved(self.torch_device)
        return Memory(total, free + cached - self._npu.memory_allocated(self.torch_device))

    def reset_peak_memory(self) -> None:
        """Reset the peak statistics of PyTorch's allocator, and store the current allocation."""
        self._npu.synchronize()
        self._base = self._npu.memory_allocated(self.torch_device)
        self._npu.reset_peak_memory_stats(self.torch_device)

    def peak_memory(self) -> int:
        """Return the peak allocation in bytes of PyTorch's allocator, minus the allocation at
        `reset_peak_memory`."""
        return int(self._npu.max_memory_allocated(self.torch_device)) - self._base

    def empty_pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor in page-locked host memory."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def synchronize(self) -> None:
        """Wait until all streams of the device are idle."""
        self._npu.synchronize()

    def event(self) -> NPUEvent:
        """Return a new event that can measure time."""
        return NPUEvent(self._npu.Event(enable_timing=True))

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Make a separate stream current in the context, because the default stream cannot be
        captured."""
        self._npu.set_device(self.torch_device)
        if self._stream is None:
            self._stream = self._npu.Stream()
        with torch.inference_mode(), self._npu.stream(self._stream):
            yield

    def record(self, function: Callable[[], torch.Tensor]) -> RecordedGraph:
        """Capture the work that `function` queues as a native graph. All graphs share one memory
        pool."""
        graph = self._npu.NPUGraph()
        with (
            self._cleaned_up_on_failure(graph),
            self._npu.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                # Each attention operator becomes a group of tasks with mutable parameters.
                auto_dispatch_capture=True,
                capture_error_mode="thread_local",
            ),
        ):
            result = function()
        self._pool = graph.pool()
        return RecordedGraph(graph, result, self.event())

    @contextlib.contextmanager
    def _cleaned_up_on_failure(self, graph: Any) -> Iterator[None]:
        """Clean up in case the capture fails inside the context.

        torch_npu may leave its dispatch mode on PyTorch's stack and its stream current. Later work
        would then become part of the capture.
        """
        modes, stream = len(_get_current_dispatch_mode_stack()), self._npu.current_stream()
        try:
            yield
        except BaseException:
            if len(_get_current_dispatch_mode_stack()) > modes:
                graph.graph_dispatch_mode.__exit__(None, None, None)
            self._npu.set_stream(stream)
            raise

    def to_fractal(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the matrix in the layout that the matrix units read (NZ)."""
        self._npu.config.allow_internal_format = True
        fractal: torch.Tensor = torch.ops.npu.npu_format_cast(weight.contiguous(), _FRACTAL_NZ)
        return fractal

    def versions(self) -> tuple[str, ...]:
        """Return the versions on which compiled graphs depend: PyTorch, torch_npu, CANN, and the
        chip."""
        cann = str(self._npu.utils.get_cann_version())
        return (torch.__version__, str(self.torch_npu.__version__), cann, self.chip)


_FRACTAL_NZ = 29
"""Value of ACL_FORMAT_FRACTAL_NZ."""
