"""What a runner actor needs from whatever computes its steps; imports no torch."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Protocol, cast

from nanoactor.messages import Int32, Step
from nanoactor.runner.config import SIMULATED, ExecutorConfig

if TYPE_CHECKING:
    from nanoactor.models.device import Accelerator


@dataclasses.dataclass(frozen=True, slots=True)
class Computed:
    """A step's result, and when the device did what, in ns of the host's monotonic clock."""

    token_ids: Int32
    """Of the rows that sample, in their order; negative where the logits are not finite."""
    begin: int
    forwarded: int
    """The layers are through, ..."""
    sampled: int
    """... the tokens are chosen, ..."""
    end: int
    """... and they are on the host."""


class Pending(Protocol):
    """A step that was handed to the device."""

    def wait(self) -> Computed:
        """Block until it is done. Called once, in the order of submission, from one thread."""


class Executor(Protocol):
    """A device with a model on it; made on the thread that will call `Pending.wait`."""

    num_blocks: int
    block_size: int
    dtype_name: str
    device_name: str
    uncaptured: int
    """How many steps were launched operator by operator because they could not be captured."""
    warmed_up: tuple[tuple[int, float], ...]
    """(tokens, seconds) of steps that ran before the first."""

    def submit(self, step: Step) -> Pending:
        """Lay a step out and queue it behind those before it; called on the node's loop, in the
        order of steps, so it does not wait for the device."""


def open_executor(config: ExecutorConfig) -> Executor:
    """The executor of a configuration's device; raises what loading the model raises."""
    if config.device.startswith(SIMULATED):
        from nanoactor.runner.simulated import SimulatedExecutor

        return SimulatedExecutor(config)
    if "torch" not in sys.modules:
        # Else `import torch` itself fails where torch_npu is installed and CANN is not sourced.
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    from nanoactor.models.devices import open_device

    device = open_device(config.device, config.rank, config.options)
    if device.keeps_batch:
        from nanoactor.runner.accelerator import AcceleratorExecutor

        return AcceleratorExecutor(config, cast("Accelerator", device))
    from nanoactor.runner.executor import TorchExecutor

    return TorchExecutor(config, device)
