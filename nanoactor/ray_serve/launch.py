"""`nanoactor serve --replicas N`: starts Ray and the application, and shuts them down cleanly.

Ray's processes and the driver run in a session of their own, without a terminal. Signals that a
terminal or a supervisor sends to this process's group do not reach them, so none of them exits
before responses are complete. This process stops the driver by closing its pipe; the kernel closes
it if this process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

from nanoactor.errors import InvalidConfig, StartupFailed, only_ours
from nanoactor.model_files.files import read_model_files
from nanoactor.options.config import EngineConfig
from nanoactor.ray_serve.options import FleetConfig
from nanoactor.server.config import ServerConfig
from nanoactor.server.run import SIGNALS, ShutdownEvent
from nanoactor.telemetry import load_telemetry

log = logging.getLogger("nanoactor.server")

_DRIVER = [sys.executable, "-m", "nanoactor.ray_serve.driver"]
_EXIT_SECONDS = 60.0
"""Seconds after the drain timeout in which the driver has to exit."""
_INSTALL_COMMAND = "pip install 'nanoactor[ray]'"


def check_ray() -> None:
    """Raise `InvalidConfig`, with the command that installs it, if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise InvalidConfig(f"replicas need Ray, which is not installed: {_INSTALL_COMMAND}")
    if importlib.util.find_spec("starlette") is None:
        raise InvalidConfig(f"replicas need Ray Serve, which is not installed: {_INSTALL_COMMAND}")


async def serve_replicas(config: EngineConfig, server: ServerConfig, fleet: FleetConfig) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, then let running requests finish; a second signal
    stops at once. Raises `InvalidConfig` if an option does not work with replicas, and
    `StartupFailed` if Ray or the application fails to start or dies."""
    check_ray()
    if config.otlp_traces_endpoint is not None:
        load_telemetry()  # so that a missing extra is reported here, in one line
    if server.uds is not None:
        raise InvalidConfig("uds works only with a single engine: with replicas, use host and port")
    if server.enable_control_endpoints:
        raise InvalidConfig(
            "enable_control_endpoints works only with a single engine: replicas cannot be paused"
        )
    if config.max_model_len == "auto":
        raise InvalidConfig(
            'max_model_len "auto" works only with a single engine, because replicas may have '
            "caches of different sizes: give a number"
        )
    with only_ours():
        read_model_files(config)  # so that an error in the files is reported here, in one line
    with contextlib.ExitStack() as resources:  # a second signal closes it, too
        await _serve_until_signal(resources, config, server, fleet)


async def _serve_until_signal(
    resources: contextlib.ExitStack, config: EngineConfig, server: ServerConfig, fleet: FleetConfig
) -> None:
    shutdown = ShutdownEvent(resources.close)
    loop = asyncio.get_running_loop()
    handles_sighup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    handled_signals = [
        number for number in SIGNALS if handles_sighup or number is not signal.SIGHUP
    ]
    for number in handled_signals:
        loop.add_signal_handler(number, shutdown.on_signal, number)
    log.info("starting %d replicas of %s on Ray", fleet.replicas, config.model)
    try:
        private_directory = resources.enter_context(
            tempfile.TemporaryDirectory(prefix="nanoactor-ray-")
        )
        driver = _start_driver(Path(private_directory), config, server, fleet)
        resources.callback(_kill_driver, driver)
        await _wait_for_driver(driver, shutdown, server.drain_timeout)
    finally:
        for number in handled_signals:
            loop.remove_signal_handler(number)


def _start_driver(
    private_directory: Path, config: EngineConfig, server: ServerConfig, fleet: FleetConfig
) -> subprocess.Popen[bytes]:
    """Start the driver, and pass it the configuration through a pipe, which keeps API keys off the
    command line."""
    driver = subprocess.Popen(  # noqa: S603 - our own module
        _DRIVER,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={
            **os.environ,
            **environment(private_directory, fleet),
            "NANOACTOR_PARENT": str(os.getpid()),
        },
        start_new_session=True,
    )
    assert driver.stdin is not None
    assert driver.stderr is not None
    threading.Thread(target=_forward_stderr, args=(driver.stderr,), daemon=True).start()
    with contextlib.suppress(BrokenPipeError):  # the driver has already exited and printed why
        pickle.dump((config, server, fleet), driver.stdin)
        driver.stdin.flush()
    return driver


def _forward_stderr(lines: Iterable[bytes]) -> None:
    """Forward the driver's stderr. Ray cannot turn off its `(raylet)` lines about other processes;
    they are logged at debug level only, because they call every exit of a controller a failure."""
    for line in lines:
        if b"(raylet)" in line:
            log.debug("%s", line.decode(errors="replace").rstrip())
        else:
            sys.stderr.write(line.decode(errors="replace"))
            sys.stderr.flush()


def environment(private_directory: Path, fleet: FleetConfig) -> dict[str, str]:
    """Return environment variables for Ray: no usage reports, and unhealthy replicas are stopped by
    force. If the Ray cluster is ours, a token is required and ports are bound to loopback only."""
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1"}
    if fleet.ray_address is not None:
        return {name: value for name, value in variables.items() if name not in os.environ}
    token = private_directory / "token"
    token.touch(mode=0o600)
    token.write_text(os.urandom(32).hex())
    return {
        **variables,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        # Set for a side effect: Ray then uses 127.0.0.1 as the address of this machine.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "NANOACTOR_RAY_LOOPBACK": "1",
    }


async def _wait_for_driver(
    driver: subprocess.Popen[bytes], shutdown: ShutdownEvent, drain_timeout: float
) -> None:
    """Wait until the driver exits, by itself or because a shutdown was requested. Raises
    `StartupFailed` if it exits by itself with an error."""
    assert driver.stdin is not None
    driver_exit = asyncio.ensure_future(asyncio.to_thread(driver.wait))
    shutdown_request = asyncio.ensure_future(shutdown.wait())
    await asyncio.wait((driver_exit, shutdown_request), return_when=asyncio.FIRST_COMPLETED)
    was_requested = shutdown_request.done()
    shutdown_request.cancel()
    if was_requested and not driver_exit.done():
        log.info("shutting down")
        driver.stdin.close()
        await asyncio.wait((driver_exit,), timeout=drain_timeout + _EXIT_SECONDS)
    if not driver_exit.done():
        _kill_driver(driver)
    status = await driver_exit
    if status and not was_requested:
        raise StartupFailed(f"the Ray driver exited with status {status}: see its messages above")


def _kill_driver(driver: subprocess.Popen[bytes]) -> None:
    """Kill the driver if it is alive; the processes of our own Ray instance end with it."""
    if driver.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    if driver.stdin is not None:
        driver.stdin.close()
