"""The origin of a request: the trace that it belongs to, and how it arrived."""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Mapping

from nanoactor.errors import InvalidRequest

PARENT, STATE = "traceparent", "tracestate"


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Trace to which a request belongs, and data about the HTTP request that caused it, if any."""

    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """W3C trace headers, by lowercase name. If they are malformed, the request begins a new
    trace."""
    is_http: bool = False
    """True if the request came over HTTP."""
    request_id: str = ""
    """Id of the HTTP request; empty if there is none."""
    model: str = ""
    """Name of the model that clients use; empty for the name in the engine's configuration."""


_EMPTY = Origin()
ORIGIN: contextvars.ContextVar[Origin] = contextvars.ContextVar("origin", default=_EMPTY)
"""Origin of requests that are submitted without `trace_headers`. The HTTP server sets it for each
of its requests, so that route handlers need not pass it on."""


def origin_of(trace_headers: object) -> Origin:
    """Return the origin of a request with these trace headers, or the current value of `ORIGIN` if
    they are None. Raises `InvalidRequest` unless they are a mapping from strings to strings."""
    if trace_headers is None:
        return ORIGIN.get()
    if not isinstance(trace_headers, Mapping) or not all(
        isinstance(one, str) for pair in trace_headers.items() for one in pair
    ):
        raise InvalidRequest(
            "trace_headers must be a dict of strings, such as {'traceparent': '00-...'}, got "
            f"{type(trace_headers).__name__}"
        )
    lower = {name.lower(): value for name, value in trace_headers.items()}
    return Origin({name: lower[name] for name in (PARENT, STATE) if name in lower})
