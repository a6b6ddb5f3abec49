"""Creation of the executor for the configured device. Imports torch only if that device needs
it."""

from __future__ import annotations

import os
import sys

from nanoactor.runner.config import SIMULATED, RankConfig
from nanoactor.runner.protocol import Executor


def open_executor(config: RankConfig) -> Executor:
    """Create the executor for the configured device and load the model. Raises `ModelError` if the
    device is unknown or the model cannot be loaded."""
    if config.engine.device.startswith(SIMULATED):
        from nanoactor.runner.simulated import SimulatedExecutor

        return SimulatedExecutor(config)
    if "torch" not in sys.modules:
        # Otherwise `import torch` fails if torch_npu is installed but CANN's environment script was
        # not sourced.
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    from nanoactor.models.devices import open_device
    from nanoactor.runner.executor import DeviceExecutor

    engine = config.engine
    device = open_device(engine.device, config.rank, engine.device_options)
    return DeviceExecutor(config, device)
