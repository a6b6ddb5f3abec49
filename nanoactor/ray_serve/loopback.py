"""Restriction of Ray Serve's replica ports to the loopback interface, which suffices on one
machine.

Ray Serve opens a port for each replica on all interfaces, and Ray 2.60 has no option to change
that. Therefore, the function that opens the port is replaced in the replica's process before it is
called. If the function does not exist, a warning is logged that the port is open on all interfaces.
Connections require Ray's token even then.
"""

from __future__ import annotations

import logging
import os
from typing import Any

LOOPBACK_VARIABLE = "NANOACTOR_RAY_LOOPBACK"
"""Environment variable that is "1" in the processes of a Ray instance that we started for one
machine."""

log = logging.getLogger("nanoactor.ray")


def bind_to_loopback() -> None:
    """Make Ray Serve bind its port to loopback in this process, if `LOOPBACK_VARIABLE` requests
    it."""
    if os.environ.get(LOOPBACK_VARIABLE) != "1":
        return
    try:
        from ray.serve._private import replica

        original = replica.add_port_to_grpc_server
    except (ImportError, AttributeError):
        log.warning(
            "this release of Ray Serve opens a port, protected by Ray's token, on all interfaces"
        )
        return
    if getattr(original, "is_on_loopback", False):
        return

    def add_port(server: Any, address: str) -> Any:
        _, _, port = address.rpartition(":")
        return original(server, f"127.0.0.1:{port}" if address.startswith("[::]:") else address)

    add_port.is_on_loopback = True  # type: ignore[attr-defined]
    replica.add_port_to_grpc_server = add_port
