"""Errors for clients, in OpenAI's format and with the appropriate HTTP status."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from nanoactor.errors import (
    ComputationFailed,
    EngineClosed,
    EngineDead,
    EngineOverloaded,
    InvalidRequest,
    OutOfResources,
    PoisonRequest,
)
from nanoactor.runtime.errors import NodeDied, NodeStalled

RETRY_AFTER = "1"
"""Value of the header `Retry-After`, in seconds. A full queue usually has room again after a few
steps of the engine."""
_MAX_MESSAGE_CHARACTERS = 2000
"""Maximum length of a message, which may quote the request, in characters."""
# Match only the ends of the decoder's messages, because the middle may quote the client.
_PATH = re.compile(r" - at (?:`key` in )?`\$\.([A-Za-z_][\w.\[\]]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`(?: - at `\$\.?([^`]*)`)?$", re.DOTALL)


class ErrorDetail(Struct):
    """The `error` object in an error response."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    """The body of an error response, in OpenAI's format."""

    error: ErrorDetail


class APIError(Exception):
    """An error that is sent to the client as a response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Create the error. `param` is the name of the invalid request field, and `code` is a
        machine-readable reason."""
        super().__init__(message)
        self.status = status
        self.message = message[:_MAX_MESSAGE_CHARACTERS]
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> Error:
        """The body of the error response, in OpenAI's format."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return Error(ErrorDetail(self.message, kind, self.param, self.code))


def invalid(message: str, param: str | None = None) -> APIError:
    """Create an error with status 400, for an invalid request. `param` is the invalid field."""
    return APIError(400, message, param=param)


def unavailable(message: str) -> APIError:
    """Create an error with status 503, for a request that may succeed later or on another
    server."""
    return APIError(503, message, headers={"Retry-After": RETRY_AFTER})


def check_model(name: str, names: Sequence[str]) -> None:
    """Raise `APIError` (status 404) unless `name` is one of the served model's names."""
    if name not in names:
        served = " or ".join(map(repr, names))
        text = f"the model {name[:200]!r} does not exist; this server serves {served}"
        raise APIError(404, text, param="model", code="model_not_found")


def context_length_exceeded(tokens: int, limit: int) -> APIError:
    """Create the error for a prompt with too many tokens. The wording is the same as that of the
    engine."""
    text = f"a prompt has {tokens} tokens, but max_model_len is {limit}"
    return APIError(400, text, param="prompt", code="context_length_exceeded")


_RETRY_LATER = {"Retry-After": RETRY_AFTER}
# Start of the engine's messages about lengths. The rest of a message may quote the client.
_TOO_LONG = re.compile(
    r"(the|a) prompt has \d+ (tokens|bytes)"
    r"|(max|min)_tokens is \d+, but after a prompt"
    r"|the request's images and videos have \d+ tokens, but max_model_len"
)


def death_message(error: BaseException) -> str:
    """Return the message for clients about the engine's death. If a process died or stalled, the
    message says so. Any other cause is only logged, because its text may contain file names."""
    cause = error.__cause__
    if cause is None or isinstance(cause, NodeDied | NodeStalled):
        return str(error)
    return "the engine has died; see the server's log for the cause"


def from_engine(error: Exception, names: frozenset[str]) -> APIError:
    """Convert an exception of the engine to an error for the client. `names` are the request's
    field names."""
    if isinstance(error, EngineOverloaded):
        return APIError(429, str(error), code="overloaded", headers={"Retry-After": RETRY_AFTER})
    if isinstance(error, EngineDead | EngineClosed):
        return APIError(503, death_message(error), code="engine_dead")
    if isinstance(error, OutOfResources):
        return APIError(503, str(error), code="out_of_resources", headers=_RETRY_LATER)
    if isinstance(error, PoisonRequest):  # clients do not retry this status
        return APIError(422, str(error), code="poison_request")
    if isinstance(error, ComputationFailed):
        return APIError(500, str(error), code="computation_failed")
    if isinstance(error, InvalidRequest):
        text = str(error)
        # For an invalid parameter, the engine's message starts with its name.
        parameter = re.match(r"\w+", text)
        param = parameter[0] if parameter and parameter[0] in names else None
        code = "context_length_exceeded" if _TOO_LONG.match(text) else None
        return APIError(400, text, param=param, code=code)
    if isinstance(error, RecursionError):  # raised by Python, for deep nesting or many calls
        return _too_deep()
    return APIError(
        500, "internal error; see the server's log for the cause", code="internal_error"
    )


def rename_fields(problem: APIError, names: Mapping[str, str]) -> APIError:
    """Replace field names of a chat request with those of another API, in the message and `param`
    of an error. `names` maps the former to the latter. The error is changed in place and
    returned."""
    for ours, theirs in names.items():
        if re.match(rf"{re.escape(ours)}\b", problem.message):
            problem.message = theirs + problem.message.removeprefix(ours)
        if problem.param is not None and re.match(rf"{re.escape(ours)}\b", problem.param):
            problem.param = theirs + problem.param.removeprefix(ours)
            break
    return problem


def _too_deep() -> APIError:
    return invalid("the body is nested too deeply")


def from_decoding(error: Exception) -> APIError:
    """Convert an error from the JSON decoder to an error for the client."""
    if isinstance(error, RecursionError):
        return _too_deep()
    if isinstance(error, UnicodeDecodeError):
        return invalid("the body is not valid UTF-8")
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return invalid(f"the body is not valid JSON: {text}")
    if unknown := _UNKNOWN.search(text):
        name = ".".join(part for part in (unknown[2], unknown[1]) if part)[:200]
        return invalid(f"{name!r} is not a known parameter", name)
    path = _PATH.search(text)
    if path is None:
        return invalid(text)
    return invalid(text[: path.start()] + path[0].replace("$.", "", 1), path[1])
