"""Errors reported to clients, in OpenAI's format and with the matching HTTP status."""

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
"""Maximum number of characters in a message, as some messages quote the request."""
# Anchored at the ends of the decoder's messages, as the text in between may quote the client.
_PATH = re.compile(r" - at (?:`key` in )?`\$\.([A-Za-z_][\w.\[\]]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`(?: - at `\$\.?([^`]*)`)?$", re.DOTALL)


class ErrorDetail(Struct):
    """The `error` object of a response."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    """The body of an error response, in OpenAI's format."""

    error: ErrorDetail


class APIError(Exception):
    """Error response to a request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`param` names the invalid field of the request; `code` is machine-readable."""
        super().__init__(message)
        self.status = status
        self.message = message[:_MAX_MESSAGE_CHARACTERS]
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> Error:
        """Return the response body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return Error(ErrorDetail(self.message, kind, self.param, self.code))


def invalid(message: str, param: str | None = None) -> APIError:
    """Return a 400 error for a request that cannot be served as it is."""
    return APIError(400, message, param=param)


def unavailable(message: str) -> APIError:
    """Return a 503 error for a request that this server cannot serve now, or no longer serves."""
    return APIError(503, message, headers={"Retry-After": RETRY_AFTER})


def check_model(name: str, names: Sequence[str]) -> None:
    """Raise `APIError` unless `name` is one of the served model's names."""
    if name not in names:
        served = " or ".join(map(repr, names))
        text = f"the model {name[:200]!r} does not exist; this server serves {served}"
        raise APIError(404, text, param="model", code="model_not_found")


def context_length_exceeded(tokens: int, limit: int) -> APIError:
    """Return the error for a prompt with too many tokens, worded like the engine's error."""
    text = f"a prompt has {tokens} tokens, but max_model_len is {limit}"
    return APIError(400, text, param="prompt", code="context_length_exceeded")


_RETRY_LATER = {"Retry-After": RETRY_AFTER}
# Beginnings of the engine's messages about lengths; the text after them may quote a client.
_TOO_LONG = re.compile(
    r"(the|a) prompt has \d+ (tokens|bytes)"
    r"|(max|min)_tokens is \d+, but after a prompt"
    r"|the request's pictures and videos have \d+ tokens, but max_model_len"
)


def death_message(error: BaseException) -> str:
    """Return the message about the engine's death for clients. The text of an exception that caused
    it is only logged, because it may name files."""
    cause = error.__cause__
    if cause is None or isinstance(cause, NodeDied | NodeStalled):
        return str(error)
    return "the engine has died; see the server's log for the cause"


def from_engine(error: Exception, names: frozenset[str]) -> APIError:
    """Convert an engine's error for a client. `names` are the field names of the request."""
    if isinstance(error, EngineOverloaded):
        return APIError(429, str(error), code="overloaded", headers={"Retry-After": RETRY_AFTER})
    if isinstance(error, EngineDead | EngineClosed):
        return APIError(503, death_message(error), code="engine_dead")
    if isinstance(error, OutOfResources):
        return APIError(503, str(error), code="out_of_resources", headers=_RETRY_LATER)
    if isinstance(error, PoisonRequest):  # a status that clients do not retry
        return APIError(422, str(error), code="poison_request")
    if isinstance(error, ComputationFailed):
        return APIError(500, str(error), code="computation_failed")
    if isinstance(error, InvalidRequest):
        text = str(error)
        # If a parameter is invalid, the engine's message begins with its name.
        parameter = re.match(r"\w+", text)
        param = parameter[0] if parameter and parameter[0] in names else None
        code = "context_length_exceeded" if _TOO_LONG.match(text) else None
        return APIError(400, text, param=param, code=code)
    if isinstance(error, RecursionError):  # Python's limit, which also counts calls
        return _too_deep()
    return APIError(
        500, "internal error; see the server's log for the cause", code="internal_error"
    )


def rename_fields(problem: APIError, names: Mapping[str, str]) -> APIError:
    """Replace a chat's field names in an error with those of another API; return the error."""
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
    """Return the error for a body that is not JSON, or does not have the expected structure."""
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
