"""State of an HTTP request besides its body, and a helper for JSON responses."""

from __future__ import annotations

import contextvars
import functools
import logging
import re
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import HttpVersion10, HttpVersion11, web

from nanoactor.server.anthropic.errors import error_body
from nanoactor.server.errors import APIError, from_engine, rename_fields
from nanoactor.telemetry.origin import PARENT, STATE, Origin

log = logging.getLogger("nanoactor.server")

_V1_PATHS = (
    "/models",
    "/completions",
    "/chat/completions",
    "/responses",
    "/messages",
    "/messages/count_tokens",
    "/embeddings",
)
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class RequestContext:
    """State of one HTTP request while it is handled, and details of its outcome for the log."""

    def __init__(self, request: web.BaseRequest) -> None:
        header = request.headers.get("x-request-id", "")
        self.id = header if _ID.fullmatch(header) else f"req-{uuid.uuid4().hex}"
        self.path = _canonical(request.path)
        self.headers = {"x-request-id": self.id, "Server": "nanoactor"}
        """Headers of every response to this request, including error responses."""
        self.fields: frozenset[str] = frozenset()
        """Names of all fields that the request's body may have. Used to recognize a field name in
        an error message of the engine."""
        self.field_names: Mapping[str, str] = {}
        """Field names for error messages: the name in the request's API, by the name in a chat
        request. Contains only names that differ."""
        self.note = ""
        """Details of the outcome, as text for the access log."""
        self.broken_off = False
        """True if the stream ended with an error after it had started."""

    def strip_root(self, root: str) -> None:
        """Remove the proxy's path prefix `root`, if the path starts with it."""
        if root and (self.path == root or self.path.startswith(f"{root}/")):
            self.path = _canonical(self.path.removeprefix(root))

    def to_api_error(self, error: Exception) -> APIError:
        """Convert an exception to an error for the client. The cause of an internal error is logged
        and not sent."""
        problem = error if isinstance(error, APIError) else from_engine(error, self.fields)
        problem = rename_fields(problem, self.field_names)
        if problem.code == "internal_error":
            log.error("request %s failed", self.id, exc_info=error)
        return problem

    def error_body(self, problem: APIError) -> Any:
        """Return the body of an error response in the format of the request's API."""
        if self.path.startswith("/v1/messages"):
            return error_body(problem, self.id)
        return problem.body


_CONTEXT = web.RequestKey("context", RequestContext)
CURRENT_ID: contextvars.ContextVar[str] = contextvars.ContextVar("request id", default="")
"""Id of the HTTP request that is currently being handled, for log records."""


def context_of(request: web.BaseRequest) -> RequestContext:
    """Return the context of an HTTP request. The first call creates it."""
    if _CONTEXT not in request:
        request[_CONTEXT] = context = RequestContext(request)
        CURRENT_ID.set(context.id)
    return request[_CONTEXT]


def origin_of(request: web.BaseRequest, model: str) -> Origin:
    """Return the `Origin` of all engine requests that an HTTP request makes: its id, its W3C trace
    headers, and the model's name for clients, `model`."""
    parents = request.headers.getall(PARENT, [])
    # A header that must be single and is not is malformed; several states are one list.
    headers = {PARENT: parents[0]} if len(parents) == 1 else {}
    if states := request.headers.getall(STATE, []):
        headers[STATE] = ",".join(states)
    return Origin(headers, is_http=True, request_id=context_of(request).id, model=model)


def _canonical(path: str) -> str:
    """Return the path as it is written in the routes: without trailing slashes, and with the prefix
    `/v1`, which clients may omit."""
    path = path.rstrip("/") or "/"
    if path in _V1_PATHS or path.startswith("/models/"):
        return f"/v1{path}"
    return path


def answer_as_http1(request: web.BaseRequest) -> None:
    """Set the response's HTTP version to 1.1 if the request has a version that is not supported."""
    if request.version not in (HttpVersion10, HttpVersion11):
        request._cache["version"] = HttpVersion11  # where aiohttp caches it


json_response = functools.partial(web.json_bytes_response, dumps=msgspec.json.encode)
"""Function that creates a JSON response from a value. `status` and `headers` are optional."""
