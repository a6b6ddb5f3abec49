"""Sockets on which the server listens: TCP or Unix, plain or with TLS."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
from pathlib import Path

from nanoactor.errors import InvalidConfig
from nanoactor.server.config import ServerConfig


def bind_socket(config: ServerConfig, reuse_port: bool = False) -> socket.socket:
    """Create a socket that is bound to the configured address but does not listen yet. Called
    before the model is loaded, so that an unavailable address is reported immediately, as
    `OSError`."""
    if config.uds is not None:
        return _bind_unix(Path(config.uds))
    family, _, _, _, address = socket.getaddrinfo(
        config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    # The kernel closes a connection if the client leaves data unread for this time, in ms.
    unread_timeout_ms = max(1, min(int(1000 * config.send_timeout), 2**31 - 1))
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_timeout_ms)
        listener.setblocking(False)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def _bind_unix(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        _remove_stale_socket(path)
        before = os.umask(0o177)  # no other user may connect, not even for a moment
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_stale_socket(path: Path) -> None:
    """Remove the socket file of a killed server, on which no process listens anymore."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.stat().st_mode):
            return  # binding reports the existing file
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()


def remove_unix_socket(config: ServerConfig) -> None:
    """Remove the socket file, if the server listens on a Unix socket."""
    if config.uds is not None:
        Path(config.uds).unlink(missing_ok=True)


def make_tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Create the TLS context. Return None if no certificate is configured. Raises `InvalidConfig`
    if the files are invalid."""
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, _no_password)
    except (OSError, ValueError) as error:  # an `SSLError` is an `OSError`
        raise InvalidConfig(
            f"ssl_certfile {config.ssl_certfile} and ssl_keyfile {config.ssl_keyfile} cannot be "
            f"used: {getattr(error, 'strerror', None) or error}"
        ) from None
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted; give an unencrypted key")


def url_of(config: ServerConfig, port: int) -> str:
    """Return the URL of the server, for messages."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    scheme = "http" if config.ssl_certfile is None else "https"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{port}{config.root_path}"
