"""Routes for operators: health, metrics, traces and the web page."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import pickle
import re
import sys
import time
from importlib import resources
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from nanoactor.runtime.tracing import NodeTrace
from nanoactor.server.context import json_response
from nanoactor.server.errors import APIError, invalid, unavailable
from nanoactor.server.http import HttpFrontend
from nanoactor.server.metrics import Metrics
from nanoactor.server.serving import MonitorProtocol, Tracer
from nanoactor.server.text_service import TextService

MAX_TRACE_SECONDS = 60.0
_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">'
    '<rect width="16" height="16" rx="3" fill="#1f2937"/><g fill="#60a5fa">'
    '<rect x="3" y="3" width="7" height="2.4" rx="1"/>'
    '<rect x="6" y="6.8" width="7" height="2.4" rx="1"/>'
    '<rect x="4" y="10.6" width="6" height="2.4" rx="1"/></g></svg>'
)
# An event loop that runs late records a span (for example, of the device) some time after the
# span's end. Consecutive snapshots therefore overlap by this many ns, and `join_snapshots` removes
# the duplicates.
_LATE_NS = 500_000_000
_TRACE_INTERVAL = 0.5
"""Seconds between two snapshots of a trace. Must be well below the two seconds for which a busy
actor keeps its spans (recorded periods of activity)."""
_MAX_EXPORTS = 4
_CHUNK_BYTES = 1 << 16
_EXPORTER = [sys.executable, "-m", "nanoactor.tracing.export"]


class ObservationRoutes:
    """Handlers of the read-only routes for operators."""

    def __init__(
        self,
        tracer: Tracer | None,
        monitor: MonitorProtocol,
        metrics: Metrics,
        http: HttpFrontend,
        text_service: TextService | None,
    ) -> None:
        """Store the services. `tracer` is None if the server has several engines, and
        `text_service` is None if there is no tokenizer."""
        self._tracer = tracer
        self._monitor = monitor
        self._metrics = metrics
        self._http = http
        self._text_service = text_service
        self._is_tracing = False
        self._running_exports = 0
        self._page = resources.files("nanoactor.server").joinpath("page.html").read_bytes()
        self._policy = _content_policy(self._page.decode())

    async def live(self, request: web.Request) -> web.StreamResponse:
        """Handle `GET /live`: report that the process and its event loop are running."""
        return json_response({"status": "ok"})

    async def ready(self, request: web.Request) -> web.StreamResponse:
        """Handle `GET /ready`: return status 200 if requests are accepted, and 503 otherwise."""
        if self._http.is_draining:
            raise unavailable("the server is shutting down")
        health = self._monitor.health()
        if not health.is_ok:
            raise unavailable(f"the engine is {health.status}: {health.culprit}")
        return json_response({"status": "ok"})

    async def health(self, request: web.Request) -> web.StreamResponse:
        """Handle `GET /health`: return the engine's health, with the age of each actor's latest
        step. The status is 503 if the engine is not healthy."""
        health = self._monitor.health()
        value = {**dataclasses.asdict(health), "draining": self._http.is_draining}
        if self._text_service is not None:
            value["text_service"] = self._text_service.state
        return json_response(value, status=200 if health.is_ok else 503)

    async def icon(self, request: web.Request) -> web.StreamResponse:
        """Handle `GET /favicon.ico`: return the icon, which shows three actors."""
        headers = {"Cache-Control": "max-age=86400"}
        return web.Response(text=_ICON, headers=headers, content_type="image/svg+xml")

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """Handle `GET /metrics`: return all metrics in the Prometheus text format."""
        kind = {"Content-Type": CONTENT_TYPE_LATEST}
        return web.Response(body=self._metrics.text(), headers=kind)

    async def activity(self, request: web.Request) -> web.StreamResponse:
        """Handle `GET /activity?since=N`: return the snapshots after number N, for the web page."""
        number = _only_parameter(request, "since", "0")
        if not re.fullmatch(r"\d{1,15}", number, re.ASCII):
            raise invalid("since must be the number returned by an earlier answer", "since")
        return json_response(self._monitor.samples_since(int(number)))

    async def page(self, request: web.Request) -> web.StreamResponse:
        """Handle `GET /`: return the web page with a chat and a live view of the actors."""
        headers = {
            "Content-Security-Policy": self._policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }
        return web.Response(
            body=self._page, headers=headers, content_type="text/html", charset="utf-8"
        )

    async def trace(self, request: web.Request) -> web.StreamResponse:
        """Handle `GET /trace?seconds=N`: record the activity of all actors for N seconds, and
        return a timeline as JSON for ui.perfetto.dev."""
        if self._tracer is None:
            raise APIError(404, "a timeline shows a single engine, but this server runs several")
        seconds = _seconds(_only_parameter(request, "seconds", "1"))
        if self._is_tracing or self._running_exports >= _MAX_EXPORTS:
            later = {"Retry-After": "5"}
            raise APIError(
                429, "another trace is already being recorded", code="overloaded", headers=later
            )
        self._is_tracing = True
        try:
            recorded = await self._record(self._tracer, seconds)
            snapshots = await asyncio.to_thread(pickle.dumps, recorded)
        finally:
            self._is_tracing = False
        self._running_exports += 1
        try:
            return await self._export(request, snapshots)
        finally:
            self._running_exports -= 1

    async def _record(self, tracer: Tracer, seconds: float) -> list[list[NodeTrace]]:
        """Record a trace for `seconds` seconds, and return its snapshots. Several snapshots are
        taken, because each actor keeps only the last few seconds of its activity."""
        begin = since = time.monotonic_ns()
        end = begin + int(seconds * 1e9)
        snapshots: list[list[NodeTrace]] = []
        while since < end:
            await asyncio.sleep(min(_TRACE_INTERVAL, (end - since) * 1e-9))
            now = time.monotonic_ns()
            trace = await tracer.trace(max(begin, since - _LATE_NS))
            snapshots.append([_spans_until(node, now) for node in trace.nodes])
            since = now
        return snapshots

    async def _export(self, request: web.Request, snapshots: bytes) -> web.StreamResponse:
        """Convert pickled snapshots to JSON in a separate process, and forward its output to the
        client."""
        pipe = asyncio.subprocess.PIPE
        exporter = await asyncio.create_subprocess_exec(*_EXPORTER, stdin=pipe, stdout=pipe)
        assert exporter.stdin is not None
        assert exporter.stdout is not None
        headers = {"Content-Disposition": 'attachment; filename="nanoactor-trace.json"'}
        response = web.StreamResponse(headers={"Content-Type": "application/json", **headers})
        try:
            exporter.stdin.write(snapshots)
            await exporter.stdin.drain()
            exporter.stdin.close()
            while chunk := await exporter.stdout.read(_CHUNK_BYTES):
                await response.prepare(request)  # only the first call has an effect
                await response.write(chunk)
            # Before the answer ends: a client that has received everything may disconnect, and that
            # would cancel this handler.
            if await exporter.wait() or not response.prepared:
                raise APIError(
                    500, "the trace could not be written; see the server's log for the cause"
                )
            await response.write_eof()
            return response
        finally:
            with contextlib.suppress(ProcessLookupError):
                exporter.kill()
            await exporter.wait()


def _only_parameter(request: web.Request, name: str, default: str) -> str:
    """Return the query parameter `name`, or `default` if it is missing. Raises `APIError` if the
    request has any other parameter."""
    if others := [other for other in request.query if other != name]:
        raise invalid(f"{others[0][:100]!r} is not a parameter of {request.path}", others[0])
    return request.query.get(name, default)


def _spans_until(node: NodeTrace, end: int) -> NodeTrace:
    """Return a process's trace without the spans (recorded periods of activity) that end after
    `end`, in ns. The next snapshot includes those spans."""
    tracks = [
        dataclasses.replace(track, spans=track.spans[track.spans["end"] <= end])
        for track in node.tracks
    ]
    return dataclasses.replace(node, tracks=tracks)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) <= MAX_TRACE_SECONDS:
            return seconds
    raise invalid(
        f"seconds must be a number greater than 0 and at most {MAX_TRACE_SECONDS:g}", "seconds"
    )


def _content_policy(page: str) -> str:
    """Return the Content-Security-Policy of the web page. It permits the page's own script and
    style, data: images, and requests to this server."""

    def allowed(tag: str) -> str:
        parts: list[Any] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(part.encode()).digest()) for part in parts)
        return " ".join(f"'sha256-{digest.decode()}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {allowed('script')}; style-src {allowed('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
