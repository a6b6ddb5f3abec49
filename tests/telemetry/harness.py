"""Engines that make spans, collectors that take them, and checks of a request's tree of spans."""

import asyncio
import contextlib

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

URL = "http://localhost:4318/v1/traces"
FAST = dict(device="simulated:1", placement="single", max_model_len=512, otlp_traces_endpoint=URL)
STAGES = ["queue", "prefill", "decode"]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def traceparent(flags="01"):
    return f"00-{TRACE}-{PARENT}-{flags}"


def requests(memory):
    """Each request's span with its stages by name, in the order of the requests' ends."""
    spans = memory.get_finished_spans()
    found = []
    for whole in spans:
        if whole.name != "llm_request":
            continue
        own = [one for one in spans if one.parent and one.parent.span_id == whole.context.span_id]
        check_times(whole, own)
        found.append((whole, {one.name: one for one in own}))
    assert len(spans) == sum(1 + len(stages) for _, stages in found), "a span has no request"
    return found


def check_times(whole, stages):
    """Stages follow each other inside the request, and belong to its trace."""
    at = whole.start_time
    for stage in sorted(stages, key=lambda one: STAGES.index(one.name)):
        assert whole.start_time <= at <= stage.start_time <= stage.end_time <= whole.end_time
        assert stage.context.trace_id == whole.context.trace_id
        at = stage.end_time


def only(memory):
    (found,) = requests(memory)
    return found


class Collector:
    """An OTLP collector on the test's loop."""

    def __init__(self):
        self.bodies, self.headers = [], []
        self.url = ""

    @property
    def spans(self):
        return [
            span
            for body in self.bodies
            for resource in body.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def resource(self):
        (resource, *_) = self.bodies[0].resource_spans
        return {one.key: one.value.string_value for one in resource.resource.attributes}

    async def take(self, request):
        self.headers.append(request.headers)
        body = ExportTraceServiceRequest()
        body.ParseFromString(await request.read())
        self.bodies.append(body)
        content = ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=content, content_type="application/x-protobuf")


@contextlib.asynccontextmanager
async def collector():
    found = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", found.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    try:
        yield found
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def silent():
    """(the URL of a server that reads and never answers, an event that tells of a request)."""
    asked, over = asyncio.Event(), asyncio.Event()

    async def hear(reader, writer):
        await reader.readuntil(b"\r\n")
        asked.set()
        await over.wait()
        writer.close()

    server = await asyncio.start_server(hear, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/traces", asked
        over.set()
