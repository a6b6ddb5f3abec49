"""`nanoactor serve --replicas N`: start Ray and the application, and shut both down cleanly.

The driver and Ray's processes run in a separate session without a terminal. Signals from a terminal
or a supervisor do not reach them, so none of them exits before responses are complete. This process
stops the driver by closing its pipe; if this process dies, the kernel closes the pipe.
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
"""Time after the drain timeout within which the driver must exit, in seconds."""
_INSTALL_COMMAND = "pip install 'nanoactor[ray]'"


def check_ray() -> None:
    """Raise `InvalidConfig` if Ray or Ray Serve is not installed. The message contains the command
    that installs it."""
    if importlib.util.find_spec("ray") is None:
        raise InvalidConfig(
            f"replicas require Ray, which is not installed; run: {_INSTALL_COMMAND}"
        )
    if importlib.util.find_spec("starlette") is None:
        raise InvalidConfig(
            f"replicas require Ray Serve, which is not installed; run: {_INSTALL_COMMAND}"
        )


async def serve_replicas(config: EngineConfig, server: ServerConfig, fleet: FleetConfig) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, and then wait until running requests have finished. A
    second signal ends the server immediately.

    Raises `InvalidConfig` for options that do not work with replicas. Raises `StartupFailed` if Ray
    or the application fails to start or dies.
    """
    check_ray()
    if config.otlp_traces_endpoint is not None:
        load_telemetry()  # so that a missing extra is reported here, in one line
    if server.uds is not None:
        raise InvalidConfig("uds works only with a single engine; with replicas, use host and port")
    if server.enable_control_endpoints:
        raise InvalidConfig(
            "enable_control_endpoints works only with a single engine, because replicas "
            "cannot be paused"
        )
    if config.max_model_len == "auto":
        raise InvalidConfig(
            'max_model_len "auto" works only with a single engine, because replicas may have '
            "caches of different sizes; give a number"
        )
    with only_ours():
        read_model_files(config)  # to report an error in the files here, in one line
    with contextlib.ExitStack() as resources:  # a second signal closes it as well
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
    """Start the driver process, and send it the configuration through a pipe, so that API keys do
    not appear on its command line."""
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
    """Copy the driver's stderr to ours. Ray's lines about other processes, marked `(raylet)`,
    cannot be turned off. They are only logged at debug level, because they report every exit of a
    controller as a failure."""
    for line in lines:
        if b"(raylet)" in line:
            log.debug("%s", line.decode(errors="replace").rstrip())
        else:
            sys.stderr.write(line.decode(errors="replace"))
            sys.stderr.flush()


def environment(private_directory: Path, fleet: FleetConfig) -> dict[str, str]:
    """Return environment variables for Ray. They disable usage reports, and make Ray Serve stop
    unhealthy replicas by force. If no `ray_address` is set, they also make our own Ray instance
    require a token, which is stored in `private_directory`, and bind its ports to loopback."""
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
        # This has a useful side effect: Ray uses 127.0.0.1 as the address of this machine.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "NANOACTOR_RAY_LOOPBACK": "1",
    }


async def _wait_for_driver(
    driver: subprocess.Popen[bytes], shutdown: ShutdownEvent, drain_timeout: float
) -> None:
    """Wait until the driver exits by itself, or stop it after a shutdown was requested. Raises
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
        raise StartupFailed(f"the Ray driver exited with status {status}; see its messages above")


def _kill_driver(driver: subprocess.Popen[bytes]) -> None:
    """Kill the driver if it is alive. The processes of our own Ray instance end with it."""
    if driver.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    if driver.stdin is not None:
        driver.stdin.close()
