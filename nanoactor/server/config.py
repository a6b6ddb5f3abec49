"""Options of the server: where it listens, whom it lets in, and how long it waits."""

from __future__ import annotations

import dataclasses
import ipaddress
from typing import Any

from nanoactor.errors import InvalidConfig
from nanoactor.server.media import MediaLimits


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """Options of `nanoactor serve` besides the engine's. Raises `InvalidConfig`, naming one."""

    host: str = "127.0.0.1"
    """The address to listen on; 0.0.0.0 listens on all."""
    port: int = 8000
    """The port to listen on; 0 takes a free one, which the log names."""
    served_model_name: str | None = None
    """The name by which clients call the model. Default: the name it was started with."""
    api_keys: tuple[str, ...] = ()
    """A key that callers must send. With any key set, every route but /live and /ready asks for
    one."""
    allowed_hosts: tuple[str, ...] = ()
    """A host name by which a server on the loopback interface may be called, besides localhost."""
    cors_origins: tuple[str, ...] = ()
    """An origin whose web pages may call the server; "*" allows any."""
    allowed_media_domains: tuple[str, ...] = ()
    """A host from which pictures may be fetched (`image_url`); ".example.org" allows all names
    below. Public addresses only. Without any, pictures come as data: URLs alone."""
    strict: bool = False
    """Refuse unknown fields of requests, instead of ignoring them with a warning."""
    separate_reasoning: bool = True
    """Move `<think>` parts to `reasoning_content`; a request may say otherwise."""
    drop_volatile_lines: bool = True
    """Leave lines out of system texts that a coding agent changes with every request, so that its
    conversation stays in the prefix cache; on /v1/messages alone (docs/server.md lists them)."""
    max_body_bytes: int | None = None
    """The longest body of a request. Default: what the longest prompt can take."""
    max_answers_per_client: int | None = None
    """Answers that one client may have under way, by its API key, or by its address where no keys
    are set. Default: max_num_seqs, and half of max_waiting_requests."""
    max_connections: int = 10_000
    """Connections at once; further ones get 503."""
    drain_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM."""
    idle_timeout: float = 75.0
    """Seconds that a connection may take for a request's head, or stay idle between requests."""
    body_timeout: float = 30.0
    """Seconds that a request's body may take."""
    send_timeout: float = 60.0
    """Seconds that a client may leave unread what it was sent."""
    access_log: bool = True
    """Write a line for each request."""

    def __post_init__(self) -> None:
        """Check every option by itself."""
        if not isinstance(self.port, int) or not 0 <= self.port < 1 << 16:
            raise InvalidConfig(f"port must be from 0 to 65535, got {self.port!r}")
        for name in ("drain_timeout", "idle_timeout", "body_timeout", "send_timeout"):
            self._check_positive(name)
        self._check_positive("max_connections")
        for name in ("max_body_bytes", "max_answers_per_client"):
            if getattr(self, name) is not None:
                self._check_positive(name)
        MediaLimits(self.allowed_media_domains)
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise InvalidConfig("an API key must be printable ASCII without spaces")

    def _check_positive(self, name: str) -> None:
        value: Any = getattr(self, name)
        if not isinstance(value, int | float) or not 0 < value < 1e9:
            raise InvalidConfig(f"{name} must be a positive number, got {value!r}")

    @property
    def on_loopback(self) -> bool:
        """Tell whether only this machine can call."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
