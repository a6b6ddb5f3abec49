"""Errors as clients see them: OpenAI's shape, and the status that fits."""

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
"""Seconds until a retry makes sense: a full queue moves within steps."""
_LONGEST = 2000
"""Maximum characters of a message: some quote the request."""
# At the ends of what the decoder says: between them it may quote a client.
_PATH = re.compile(r" - at (?:`key` in )?`\$\.([A-Za-z_][\w.\[\]]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`(?: - at `\$\.?([^`]*)`)?$", re.DOTALL)


class ErrorDetail(Struct):
    """The `error` object of a response."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    """The body of an answer that is an error, as OpenAI writes it."""

    error: ErrorDetail


class APIError(Exception):
    """An answer other than the requested one."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`param` names the wrong field of the request; `code` is for programs."""
        super().__init__(message)
        self.status = status
        self.message = message[:_LONGEST]
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
    """Return an error for a request that cannot be served as it is."""
    return APIError(400, message, param=param)


def unavailable(message: str) -> APIError:
    """Return an error for a request that cannot be served now, or no longer here."""
    return APIError(503, message, headers={"Retry-After": RETRY_AFTER})


def check_model(asked: str, names: Sequence[str]) -> None:
    """Raise `APIError` for any model but the one that is served by these names."""
    if asked not in names:
        served = " or ".join(map(repr, names))
        text = f"the model {asked[:200]!r} does not exist here; it is {served}"
        raise APIError(404, text, param="model", code="model_not_found")


def context_length_exceeded(tokens: int, limit: int) -> APIError:
    """A prompt has too many tokens: said as the engine says it."""
    text = f"a prompt has {tokens} tokens, but max_model_len is {limit}"
    return APIError(400, text, param="prompt", code="context_length_exceeded")


_LATER = {"Retry-After": RETRY_AFTER}
# The beginnings of what the engine says of lengths: what follows may quote a client.
_TOO_LONG = re.compile(
    r"(the|a) prompt has \d+ (tokens|bytes)"
    r"|(max|min)_tokens is \d+, but after a prompt"
    r"|the request's pictures and videos have \d+ tokens, but max_model_len"
)


def death_for_clients(error: BaseException) -> str:
    """Report that the engine has died, without details: exceptions may name files, so their text
    only goes to the log."""
    cause = error.__cause__
    if cause is None or isinstance(cause, NodeDied | NodeStalled):
        return str(error)
    return "the engine has died; the server's log has the cause"


def from_engine(error: Exception, names: frozenset[str]) -> APIError:
    """Translate an engine's error for a client; `names` are the fields of its request."""
    if isinstance(error, EngineOverloaded):
        return APIError(429, str(error), code="overloaded", headers={"Retry-After": RETRY_AFTER})
    if isinstance(error, EngineDead | EngineClosed):
        return APIError(503, death_for_clients(error), code="engine_dead")
    if isinstance(error, OutOfResources):
        return APIError(503, str(error), code="out_of_resources", headers=_LATER)
    if isinstance(error, PoisonRequest):  # a status that clients do not retry
        return APIError(422, str(error), code="poison_request")
    if isinstance(error, ComputationFailed):
        return APIError(500, str(error), code="computation_failed")
    if isinstance(error, InvalidRequest):
        text = str(error)
        # The engine's messages begin with the parameter's name, where it is one.
        first = re.match(r"\w+", text)
        param = first[0] if first and first[0] in names else None
        code = "context_length_exceeded" if _TOO_LONG.match(text) else None
        return APIError(400, text, param=param, code=code)
    if isinstance(error, RecursionError):  # Python's limit, which counts what is called, too
        return _too_deep()
    return APIError(500, "internal error; the server's log has its cause", code="internal_error")


def renamed(problem: APIError, names: Mapping[str, str]) -> APIError:
    """Return an error with a chat's field names replaced by those of another API."""
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
    """Return an error for a body that is not JSON, or not as expected."""
    if isinstance(error, RecursionError):
        return _too_deep()
    if isinstance(error, UnicodeDecodeError):
        return invalid("the body is not valid UTF-8")
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return invalid(f"the body is not valid JSON: {text}")
    if unknown := _UNKNOWN.search(text):
        name = ".".join(part for part in (unknown[2], unknown[1]) if part)[:200]
        return invalid(f"{name!r} is not a parameter that this server knows", name)
    path = _PATH.search(text)
    if path is None:
        return invalid(text)
    return invalid(text[: path.start()] + path[0].replace("$.", "", 1), path[1])
