"""The origin of a request: the trace that it belongs to, and how it arrived."""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Mapping

from nanoactor.errors import InvalidRequest

PARENT, STATE = "traceparent", "tracestate"


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Trace headers and door of a request."""

    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """W3C trace headers, by lowercase name. Malformed ones begin a new trace."""
    is_http: bool = False
    """True if the request came over HTTP."""
    request_id: str = ""
    """Id of the HTTP request; empty if there is none."""
    model: str = ""
    """The model's name for clients; empty if it is the engine's own."""


_EMPTY = Origin()
ORIGIN: contextvars.ContextVar[Origin] = contextvars.ContextVar("origin", default=_EMPTY)
"""Origin of requests that are submitted without `trace_headers`. A server sets it for each HTTP
request, so that each of its routes has it without passing it on."""


def origin_of(trace_headers: object) -> Origin:
    """Return the origin of a request with these headers, or the ambient one if they are None.
    Raises `InvalidRequest` unless they are a mapping from strings to strings."""
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
