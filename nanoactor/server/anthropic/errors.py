"""Error responses in the format of the Messages API."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from nanoactor.server.errors import APIError

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class AnthropicErrorDetail(Struct):
    """The `error` object in an error response of the Messages API."""

    type: str
    message: str


class AnthropicError(Struct):
    """The body of an error response of the Messages API."""

    error: AnthropicErrorDetail
    type: Literal["error"] = "error"
    request_id: str | None = None


def error_body(problem: APIError, request_id: str | None = None) -> AnthropicError:
    """Convert an error to a response body of the Messages API."""
    kind = _KINDS.get(problem.status)
    if kind is None:
        kind = "invalid_request_error" if problem.status < 500 else "api_error"
    return AnthropicError(AnthropicErrorDetail(kind, problem.message), request_id=request_id)
