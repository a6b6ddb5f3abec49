"""The driver process of `nanoactor serve --replicas`, which starts or joins Ray."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import signal
import sys
import threading

from nanoactor.errors import NanoactorError
from nanoactor.options.config import EngineConfig
from nanoactor.ray_serve.deployments import LOG_VARIABLE
from nanoactor.ray_serve.loopback import LOOPBACK_VARIABLE
from nanoactor.ray_serve.options import FleetConfig
from nanoactor.server.config import ServerConfig

APPLICATION_NAME = "nanoactor"
"""Name of the application in Ray Serve."""
_STATUS_INTERVAL = 5.0
_JOIN_SECONDS = 0.2
_OBJECT_STORE_BYTES = 128 << 20
"""Size of Ray's object store in bytes. Only reports in transit pass through it."""

log = logging.getLogger("nanoactor.ray")


def main() -> None:
    """Serve until the parent process closes the pipe on standard input."""
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    config, server, fleet = pickle.load(sys.stdin.buffer)  # noqa: S301 - of our own parent
    stop = threading.Event()
    threading.Thread(target=_wait_for_parent_exit, args=(stop,), daemon=True).start()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent process handles signals
    try:
        run(config, server, fleet, stop)
    except NanoactorError as error:
        print(f"nanoactor: {error}", file=sys.stderr)  # noqa: T201 - a command
        sys.exit(1)


def _wait_for_parent_exit(stop: threading.Event) -> None:
    while os.read(sys.stdin.fileno(), 1 << 16):
        pass
    stop.set()


def run(
    config: EngineConfig, server: ServerConfig, fleet: FleetConfig, stop: threading.Event
) -> None:
    """Deploy the application, and serve until `stop` is set."""
    from nanoactor.ray_serve.api import ray, serve
    from nanoactor.ray_serve.application import build

    is_own = fleet.ray_address is None
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    options: dict[str, object] = {"address": fleet.ray_address}
    if is_own:
        max_replicas = max(fleet.replicas, fleet.max_replicas or 0)
        cpus = max(os.cpu_count() or 1, math.ceil(max_replicas * fleet.cpus_per_replica))
        # "local" starts a new Ray instance even if this machine already runs another one.
        options = {"address": "local", "num_cpus": cpus, "object_store_memory": _OBJECT_STORE_BYTES}
        options |= {"include_dashboard": False}
    ray.init(**options, log_to_driver=False, logging_level="error")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # again, because Ray replaced the handler
    try:
        serve.start(proxy_location="Disabled")
        variables = {name: os.environ[name] for name in (LOOPBACK_VARIABLE,) if name in os.environ}
        if parent := os.environ.get("NANOACTOR_PARENT"):
            variables[LOG_VARIABLE] = f"/proc/{parent}/fd/2"
        application = build(config, server, fleet, variables)
        if not _deploy(application, stop):
            return
        threading.Thread(target=_log_errors, args=(stop,), daemon=True).start()
        stop.wait()
    finally:
        with contextlib.suppress(Exception):  # its controller may be gone
            if is_own:
                serve.shutdown()
            else:
                serve.delete(APPLICATION_NAME)
        ray.shutdown()


def _deploy(application: object, stop: threading.Event) -> bool:
    """Deploy the application and wait until it is running. Return False if `stop` is set before
    that. Raises `NanoactorError` if the replicas fail to start."""
    from nanoactor.ray_serve.api import serve

    failures: list[BaseException] = []

    def deploy() -> None:
        try:
            serve.run(application, name=APPLICATION_NAME, route_prefix=None)
        except BaseException as error:
            failures.append(error)

    deploying = threading.Thread(target=deploy, daemon=True)
    deploying.start()
    while deploying.is_alive() and not stop.is_set():
        deploying.join(_JOIN_SECONDS)
    if stop.is_set():
        return False
    if failures:
        status = serve.status().applications.get(APPLICATION_NAME)
        reason = _failure_text(status) if status is not None else str(failures[0])[-1000:]
        raise NanoactorError(f"the replicas failed to start: {reason}")
    return True


def _failure_text(status: object) -> str:
    """Return the last lines of the failure messages in an application's status."""
    deployments = getattr(status, "deployments", {}).values()
    messages = [deployment.message for deployment in deployments if deployment.message] or [
        getattr(status, "message", "")
    ]
    lines = [line.strip() for line in "\n".join(messages).splitlines() if line.strip()]
    return " ".join(lines[-3:])[:1000]


def _log_errors(stop: threading.Event) -> None:
    """Log problems that Ray Serve reports, until `stop` is set. A failure of Ray Serve's controller
    is only logged, because streams do not depend on the controller."""
    from nanoactor.ray_serve.api import serve

    last_problem = ""
    while not stop.wait(_STATUS_INTERVAL):
        try:
            status = serve.status().applications.get(APPLICATION_NAME)
            is_unhealthy = status is not None and status.status in ("UNHEALTHY", "DEPLOY_FAILED")
            problem = (
                f"the application is {status.status}: {_failure_text(status)}"
                if is_unhealthy
                else ""
            )
        except Exception as error:
            problem = f"Ray Serve's controller does not answer: {type(error).__name__}"
        if problem and problem != last_problem:
            log.error("%s", problem)
        last_problem = problem


if __name__ == "__main__":
    main()
