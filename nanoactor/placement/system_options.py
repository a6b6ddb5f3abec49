"""The engine options that configure the system of processes."""

from __future__ import annotations

from nanoactor.options.config import EngineConfig
from nanoactor.runner.timing.threads import usable_cores
from nanoactor.runtime.wiring import Options

_DEFAULT_AWAKE_MS = 3.0
"""Default time for which event loops poll before they sleep, in ms. It is long enough for a request
to reach the runner, or for its first token to reach the user."""


def system_options(config: EngineConfig, processes: int) -> Options:
    """Return the runtime's options for an engine that has `processes` processes."""
    return Options(
        transport=config.transport,
        debug=config.debug,
        debug_delay_ms=config.debug_delay_ms,
        awake_seconds=_awake_ms(config, processes) * 1e-3,
        record_dir=config.debug_record_dir,
        start_timeout=config.start_timeout,
        stop_timeout=config.stop_timeout,
        stall_timeout=config.stall_timeout,
        max_restarts=config.restarts_allowed,
        restart_window=config.restart_window,
    )


def _awake_ms(config: EngineConfig, processes: int) -> float:
    """Return the time for which event loops poll for messages before they sleep, in ms. Return 0 if
    cores are scarce."""
    if config.awake_ms is not None:
        return config.awake_ms
    return _DEFAULT_AWAKE_MS if usable_cores() >= 2 * processes else 0.0
