"""Check of the option `otlp_traces_endpoint`, the URL of an OpenTelemetry collector."""

from __future__ import annotations

from urllib.parse import urlsplit

from nanoactor.errors import InvalidConfig

_GRPC_PORT = 4317


def check_traces_endpoint(given: object) -> None:
    """Raise `InvalidConfig` unless the option is None or the full HTTP URL of a collector, with a
    path and without credentials."""
    if given is not None and (problem := _problem(given)):
        raise InvalidConfig(
            "otlp_traces_endpoint must be the full URL at which a collector takes traces over "
            f"HTTP, such as 'http://localhost:4318/v1/traces': {problem}"
        )


def _problem(given: object) -> str:
    """Return the problem with the URL of a collector; empty if there is none."""
    if not isinstance(given, str):
        return f"got {given!r:.100}"
    try:
        url = urlsplit(given)
        port, host = url.port, url.hostname
    except ValueError as error:
        return f"{error}"
    if url.username is not None or url.password is not None:  # not shown
        return "credentials belong into the variable OTEL_EXPORTER_OTLP_HEADERS, not into the URL"
    if url.scheme not in ("http", "https"):
        grpc = "; gRPC is not supported" if url.scheme == "grpc" or port == _GRPC_PORT else ""
        return f"it must begin with http:// or https://, got {given!r:.100}{grpc}"
    if not host or not given.isprintable() or " " in given:
        return f"got {given!r:.100}"
    if not url.path:
        grpc = f"; port {_GRPC_PORT} is that of gRPC, which is not supported"
        return f"{given!r:.100} has no path{grpc if port == _GRPC_PORT else ''}"
    return ""
