"""Which executor a configuration's device has; imports torch only where it has one."""

from __future__ import annotations

import os
import sys

from nanoactor.runner.config import SIMULATED, ExecutorConfig
from nanoactor.runner.protocol import Executor


def open_executor(config: ExecutorConfig) -> Executor:
    """The executor of a configuration's device; raises what loading the model raises."""
    if config.device.startswith(SIMULATED):
        from nanoactor.runner.simulated import SimulatedExecutor

        return SimulatedExecutor(config)
    if "torch" not in sys.modules:
        # Else `import torch` itself fails where torch_npu is installed and CANN is not sourced.
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    from nanoactor.models.devices import open_device
    from nanoactor.runner.executor import DeviceExecutor

    return DeviceExecutor(config, open_device(config.device, config.rank, config.options))
