"""A request with what will be told of it, and answers in JSON."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

_WITHOUT_VERSION = ("/models", "/completions", "/chat/completions")
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Exchange:
    """A request on its way through the server, and what the log will tell of it."""

    def __init__(self, request: web.BaseRequest) -> None:
        given = request.headers.get("x-request-id", "")
        self.id = given if _ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        self.request = request
        self.path = _canonical(request.path)
        self.headers: dict[str, str] = {"x-request-id": self.id, "Server": "nanoactor"}
        """Of the answer, whatever it is."""
        self.note = ""
        """For the log: what came of it."""
        self.broken_off = False
        """Whether its answer ended with an error after it had begun."""

    @property
    def begun(self) -> bool:
        """Whether a part of the answer has left: then there cannot be another."""
        return self.request.writer.output_size > 0


def _canonical(path: str) -> str:
    """The path as routes know it: clients add slashes at its end, and forget the /v1."""
    path = path.rstrip("/") or "/"
    if path in _WITHOUT_VERSION or path.startswith("/models/"):
        return f"/v1{path}"
    return path


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """An answer in JSON."""
    return web.Response(
        body=msgspec.json.encode(value),
        status=status,
        headers=headers,
        content_type="application/json",
    )
