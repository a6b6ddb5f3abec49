"""Server options: listening address, access control and timeouts."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any, cast

from nanoactor.errors import InvalidConfig
from nanoactor.server.media import MediaLimits

TOOL_CALL_PARSERS = ("auto", "hermes", "qwen3_coder", "llama3_json", "mistral")
REASONING_PARSERS = ("auto", "qwen3", "deepseek_r1", "none")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """Options of `nanoactor serve`, apart from the engine's options. Raises `InvalidConfig`, which
    names the invalid option."""

    host: str = "127.0.0.1"
    """The address to listen on; 0.0.0.0 listens on all addresses."""
    port: int = 8000
    """The port to listen on; 0 selects a free port, which is written to the log."""
    uds: str | None = None
    """A Unix socket to listen on, instead of host and port; only its owner may connect."""
    root_path: str = ""
    """The path under which a proxy exposes this server; the proxy may strip it from requests or
    keep it. Default: none."""
    ssl_keyfile: str | None = None
    """The private key of a TLS certificate, in PEM."""
    ssl_certfile: str | None = None
    """A TLS certificate in PEM, with its chain; if set, the server accepts only HTTPS."""
    served_model_name: str | Sequence[str] | None = None
    """The names that clients may use for the model; answers and metrics use the first. Default: the
    name that the server was started with."""
    api_keys: tuple[str, ...] = ()
    """A key that callers must send. If any key is set, all routes except /live and /ready require
    one."""
    allowed_hosts: tuple[str, ...] = ()
    """A host name, in addition to localhost, that requests to a server on the loopback interface
    may use."""
    cors_origins: tuple[str, ...] = ()
    """An origin whose web pages may call the server; "*" allows any."""
    allowed_media_domains: tuple[str, ...] = ()
    """A host from which images may be fetched (`image_url`), if all of its addresses are public;
    ".example.org" allows all of its subdomains. If no host is given, images are accepted only as
    data: URLs."""
    strict: bool = False
    """Refuse unknown fields of requests, instead of ignoring them with a warning."""
    separate_reasoning: bool = True
    """Move `<think>` parts to `reasoning_content`; a request can override this."""
    tool_call_parser: str = "auto"
    """The format of the model's function calls: "hermes", "qwen3_coder", "llama3_json" or
    "mistral". "auto" detects it from the chat template."""
    reasoning_parser: str = "auto"
    """The reasoning format of the model: "qwen3", "deepseek_r1" (outputs start with reasoning
    whatever the prompt ends with) or "none". "auto" detects it from the chat template."""
    default_chat_template_kwargs: Mapping[str, Any] | None = None
    """Variables of the chat template for requests that do not set them, such as
    {"enable_thinking": false}."""
    drop_volatile_lines: bool = True
    """Drop system-prompt lines that a coding agent changes with every request, so that its
    conversation stays in the prefix cache; only on /v1/messages (docs/server.md lists these
    lines)."""
    max_body_bytes: int | None = None
    """Maximum size of a request's body. Default: enough for the longest prompt."""
    max_answers_per_client: int | None = None
    """Maximum number of answers in progress per client, identified by its API key or, if there are
    no keys, by its address. Default: max_num_seqs plus half of max_waiting_requests."""
    max_connections: int = 10_000
    """Maximum number of connections; additional ones are refused with status 503."""
    drain_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM."""
    idle_timeout: float = 75.0
    """Seconds that a connection may take to send a request's headers, or stay idle between
    requests."""
    body_timeout: float = 30.0
    """Seconds that a request's body may take to arrive."""
    send_timeout: float = 60.0
    """Seconds that a client may leave sent data unread."""
    access_log: bool = True
    """Write a line for each request."""
    disable_access_log_for_endpoints: str | None = None
    """Comma-separated paths that are not logged, such as /health,/metrics."""
    log_level: str | None = None
    """Level of the server's log, including the access log: "debug", "info", "warning" or
    "error"."""
    vllm_metrics: bool = False
    """In /metrics, also report vLLM's metrics under vLLM's names, for dashboards."""
    enable_tokenizer_info_endpoint: bool = False
    """Serve /tokenizer_info, which exposes the chat template and special tokens."""
    enable_control_endpoints: bool = False
    """Serve /reset_prefix_cache, /pause, /resume, /is_paused, /server_info and /get_world_size,
    which let any caller change the state of the engine or read its configuration."""

    def __post_init__(self) -> None:
        """Check all options that can be checked individually."""
        if not isinstance(self.port, int) or not 0 <= self.port < 1 << 16:
            raise InvalidConfig(f"port must be an integer from 0 to 65535, got {self.port!r}")
        for name in ("drain_timeout", "idle_timeout", "body_timeout", "send_timeout"):
            self._check_positive(name)
        self._check_positive("max_connections")
        for name in ("max_body_bytes", "max_answers_per_client"):
            if getattr(self, name) is not None:
                self._check_positive(name)
        MediaLimits(self.allowed_media_domains)
        self._check_names()
        self._check_choices()
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise InvalidConfig(
                    "an API key must consist of printable ASCII characters without spaces"
                )

    def _check_names(self) -> None:
        """Normalize the model's names and the root path, and check them. Check that both TLS files
        are set, or neither."""
        value = self.served_model_name
        names = (value,) if isinstance(value, str) else tuple(value or ())
        if not all(isinstance(name, str) and name for name in names):
            raise InvalidConfig(
                f"served_model_name must be one or more non-empty strings, got {value!r:.100}"
            )
        object.__setattr__(self, "served_model_name", names or None)
        path = self.root_path.rstrip("/")
        if path and not path.startswith("/"):
            raise InvalidConfig(f"root_path must begin with a slash, got {path!r:.100}")
        object.__setattr__(self, "root_path", path)
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise InvalidConfig("ssl_keyfile and ssl_certfile must be given together")

    def _check_choices(self) -> None:
        for name, choices in (
            ("tool_call_parser", TOOL_CALL_PARSERS),
            ("reasoning_parser", REASONING_PARSERS),
            ("log_level", LOG_LEVELS),
        ):
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise InvalidConfig(
                    f"{name} must be one of {', '.join(choices)}, got {value!r:.100}"
                )

    @property
    def model_names(self) -> tuple[str, ...]:
        """Configured names of the model; empty if none are configured."""
        return cast("tuple[str, ...] | None", self.served_model_name) or ()

    def _check_positive(self, name: str) -> None:
        value: Any = getattr(self, name)
        if not isinstance(value, int | float) or not 0 < value < 1e9:
            raise InvalidConfig(f"{name} must be a positive number, got {value!r}")

    @property
    def on_loopback(self) -> bool:
        """True if only clients on this machine can connect."""
        if self.uds is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
