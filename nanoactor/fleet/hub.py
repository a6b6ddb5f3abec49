"""A replica's side of its links to ingresses, the HTTP servers in front of the replicas. Over a
link, the replica receives orders from one ingress and reports on that ingress's streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncGenerator

from nanoactor.admission.request import Request
from nanoactor.api.engine import AsyncLLM, Prompt
from nanoactor.errors import (
    ComputationFailed,
    EngineClosed,
    EngineDead,
    InvalidRequest,
    NanoactorError,
)
from nanoactor.fleet import wire
from nanoactor.fleet.gauges import Gauges
from nanoactor.fleet.pacing import INTERVAL, Pace
from nanoactor.kv.index_events import IndexEvents
from nanoactor.requests.outputs import CompletionOutput, RequestOutput
from nanoactor.requests.pooling_params import PoolingParams

log = logging.getLogger("nanoactor.fleet")

WINDOW = 32
"""Maximum number of reports on a link that the ingress has not acknowledged."""
SILENCE_TIMEOUT = 20.0
"""Time without a message from the ingress after which a link ends, in seconds. An ingress without
orders sends a heartbeat every few seconds."""
_TIMER_RESOLUTION = 0.001
"""Resolution of the event loop's timer, in seconds. Shorter waits would keep the loop busy."""
_REPORT_BYTES = 1 << 20
"""Size at which no more streams are added to a report: characters of text, plus bytes of token ids
and vectors."""


class Hub:
    """Main object of a replica. It serves one engine to any number of ingresses, the HTTP servers
    that forward clients' requests."""

    def __init__(self, llm: AsyncLLM, fingerprint: str, interval: float = INTERVAL) -> None:
        """Create the hub. `llm` must have been started. Replicas with equal values of `fingerprint`
        can resume each other's sequences. `interval` is the time between reports, in seconds."""
        self.llm, self.fingerprint, self.interval = llm, fingerprint, interval
        self.gauges = Gauges(llm)
        self._blocks: int = llm.facts["num_blocks"]
        self.links: dict[str, Link] = {}
        self.reserved_by: str | None = None
        """Name of the link that has reserved the replica for a request that may crash it and must
        run alone. None if the replica is not reserved."""

    def start(self) -> None:
        """Start sampling the engine's statistics."""
        self.gauges.start()

    async def stop(self) -> None:
        """Close all links, which ends their streams, and stop sampling."""
        for link in list(self.links.values()):
            link.close()
        await self.gauges.stop()

    @property
    def streams(self) -> list[Stream]:
        """Unfinished streams of all ingresses."""
        return [stream for link in self.links.values() for stream in link.streams.values()]

    def load(self, last_sample: int) -> wire.Load:
        """Return the replica's load. It includes the engine's statistics only if there is a newer
        sample than `last_sample`, the number of the last sample sent to the receiver."""
        streams, gauges = self.streams, self.gauges
        waiting = [stream for stream in streams if not stream.has_begun]
        figures = gauges.figures
        return wire.Load(
            running=len(streams) - len(waiting),
            waiting=len(waiting),
            waiting_tokens=sum(stream.tokens for stream in waiting),
            free_blocks=int(figures.get("kv_blocks_available", self._blocks)),
            streams=len(streams),
            token_seconds=gauges.pace.seconds,
            is_reserved=self.reserved_by is not None,
            figures=dict(figures) if gauges.samples != last_sample else {},
        )

    async def link(self, name: str) -> AsyncGenerator[bytes, None]:
        """Serve an ingress over a new link with this name. Yield encoded reports until the ingress
        closes the link or stops sending. Raises `InvalidRequest` if the name is in use, and
        `EngineDead` if the engine has died."""
        if name in self.links:
            raise InvalidRequest(f"the link name {name!r} is already in use")
        if self.llm.dead is not None:
            raise self.llm.dead
        link = self.links[name] = Link(self, name)
        try:
            async with contextlib.aclosing(link.reports()) as reports:
                async for report in reports:
                    yield report
        finally:
            del self.links[name]
            if self.reserved_by == name:
                self.reserved_by = None
            await link.end()

    def handle_orders(self, data: bytes) -> bool:
        """Process an encoded batch of orders from an ingress. Return False if the link that sent
        them has ended. Raises `msgspec.DecodeError` for malformed data."""
        batch = wire.decode_orders(data)
        link = self.links.get(batch.link)
        if link is None:
            return False
        link.handle_orders(batch)
        return True

    def is_vacant(self, link: str) -> bool:
        """Return True if the link with this name has reserved the replica and the replica runs no
        stream."""
        return self.reserved_by == link and not self.streams

    def can_begin(self, link: str, order: wire.Begin) -> bool:
        """Return True if an ingress may start a stream over this link. A reserved replica accepts
        only streams that must run alone, from the link that has reserved it."""
        return self.reserved_by is None or (self.reserved_by == link and order.is_alone)

    def reserve(self, link: str, is_wanted: bool) -> None:
        """Reserve the replica for a link (an ingress's connection), so that it accepts only streams
        that must run alone. If `is_wanted` is False, release the link's reservation. Another link's
        reservation is never changed."""
        if is_wanted and self.reserved_by is None:
            self.reserved_by = link
        elif not is_wanted and self.reserved_by == link:
            self.reserved_by = None
        self.report_load()

    def submit_pooled(self, prompt: Prompt, priority: int) -> Request:
        """Submit a prompt whose result is an embedding vector, or the logits of a score if the
        model is a reranker."""
        pooling = self.llm.files.pooling
        scores = pooling is not None and pooling.returns_scores
        return self.llm.submit_pooled(prompt, PoolingParams(), priority=priority, scores=scores)

    def note_end(self) -> None:
        """Handle the end of a stream: if the replica is reserved and has become idle, report
        that."""
        if self.reserved_by is not None and not self.streams:
            self.report_load()

    def report_load(self) -> None:
        """Schedule a report of the replica's load to every ingress."""
        for link in self.links.values():
            link.note(urgent=True)


class Stream:
    """A request that runs for an ingress, with the output that has not been reported to it yet."""

    def __init__(self, order: wire.Begin, request: Request | None) -> None:
        self.order, self.request = order, request
        self.tokens = len(order.token_ids) // 4
        self.has_begun = False
        """True once the request has produced output."""
        self.prompt_token_ids: bytes | None = None
        self.output: RequestOutput | None = None
        self.error: NanoactorError | None = None
        self.reported = asyncio.Event()
        """Set when the stream's output has been reported."""
        self.reader: asyncio.Task[None] | None = None

    def end(self) -> None:
        """Abort the stream's request, and stop reading its output."""
        if self.reader is not None:
            self.reader.cancel()
        if self.request is not None:
            self.request.close()


class Link:
    """A replica's side of its connection to one ingress: that ingress's streams, and the reports on
    them."""

    def __init__(self, hub: Hub, name: str) -> None:
        self._hub, self.name = hub, name
        self.streams: dict[int, Stream] = {}
        self._pending: dict[int, Stream] = {}
        """Streams that have something to report, by number."""
        self._declined: list[int] = []
        self._pace = Pace(hub.interval)
        self._wakeup = asyncio.Event()
        self._report_count = self._acked = self._order_count = 0
        self._last_heard = time.monotonic()
        self._last_sample = 0
        """Value of `Gauges.samples` when the last report was sent."""
        self._closed = False
        self._index_events: list[IndexEvents] = []
        self._index_reported = asyncio.Event()

    # -- orders ---------------------------------------------------------------------------

    def handle_orders(self, batch: wire.Orders) -> None:
        """Process a decoded batch of orders: start or abort streams, reserve the replica, or close
        the link."""
        self._last_heard = time.monotonic()
        self._acked = batch.last_report
        self._order_count += len(batch.orders)
        for order in batch.orders:
            match order:
                case wire.Begin():
                    self._begin(order)
                case wire.Abort():
                    self._abort(order.stream)
                case wire.Reserve():
                    self._hub.reserve(self.name, order.is_wanted)
                case wire.Close():
                    self.close()
        self._wakeup.set()

    def _begin(self, order: wire.Begin) -> None:
        if not self._hub.can_begin(self.name, order):
            self._declined.append(order.stream)
            self.note(urgent=True)
            return
        try:
            request = self._submit(order)
        except NanoactorError as error:
            self._fail(order, error)
            return
        except Exception as error:  # concerns only this request, not the link
            log.exception("request %s cannot be read", order.request_id)
            self._fail(order, ComputationFailed(f"the replica cannot read the request: {error!r}"))
            return
        if order.emitted_characters >= 0 or order.is_alone:
            what = "runs alone" if order.is_alone else "comes from another replica"
            log.info("request %s %s", order.request_id, what)
        stream = Stream(order, request)
        self.streams[order.stream] = stream
        stream.reader = asyncio.ensure_future(self._read_outputs(stream, request))

    def _submit(self, order: wire.Begin) -> Request:
        media = [wire.bytes_to_media(data) for data in order.media]
        prompt: dict[str, object] = {"prompt_token_ids": wire.bytes_to_ids(order.token_ids)}
        if media:
            images = [one for one in media if not one.frames]
            prompt["multi_modal_data"] = {
                "image": images,
                "video": [one for one in media if one.frames],
            }
        if order.is_pooling:
            return self._hub.submit_pooled(prompt, order.priority)
        params = wire.bytes_to_params(order.params)
        emitted = wire.emitted_output(order)
        (request,) = self._hub.llm.submit([prompt], params, priority=order.priority, so_far=emitted)
        return request

    def _fail(self, order: wire.Begin, error: NanoactorError) -> None:
        """Report a failure for a stream that could not be started."""
        stream = Stream(order, None)
        stream.error = error
        self._pending[order.stream] = stream
        self.note(urgent=True)

    def _abort(self, number: int) -> None:
        stream = self.streams.pop(number, None)
        self._pending.pop(number, None)
        if stream is not None:
            stream.end()
        self._hub.note_end()

    # -- streams --------------------------------------------------------------------------

    async def _read_outputs(self, stream: Stream, request: Request) -> None:
        """Read a request's outputs until the request ends. Outputs that arrive while one waits to
        be reported are merged."""
        number = stream.order.stream
        try:
            await request.accepted()
            stream.prompt_token_ids = wire.ids_to_bytes(request.prompt_token_ids)
            self._pending[number] = stream
            self.note(urgent=False)
            async for output in request:
                stream.output = output
                self._pending[number] = stream
                stream.reported.clear()
                self.note(urgent=output.finished or not stream.has_begun)
                stream.has_begun = True
                if output.finished:
                    return
                await stream.reported.wait()
        except NanoactorError as error:
            log.info("request %s ends: %s", stream.order.request_id, type(error).__name__)
            stream.error = error
            self._pending[number] = stream
            self.note(urgent=True)
        except Exception as error:  # report any error to the ingress
            log.exception("request %s has failed", stream.order.request_id)
            stream.error = ComputationFailed(f"the replica has failed: {error!r}")
            self._pending[number] = stream
            self.note(urgent=True)
        finally:
            self.streams.pop(number, None)
            self._hub.note_end()

    def note(self, *, urgent: bool) -> None:
        """Record that there is something to report, and wake up the sender. `urgent` makes the
        report due earlier."""
        self._pace.note(urgent=urgent)
        self._wakeup.set()

    # -- reports --------------------------------------------------------------------------

    async def reports(self) -> AsyncGenerator[bytes, None]:
        """Yield encoded reports, each when it is due and fewer than `WINDOW` reports are
        unacknowledged. Ends when the link is closed or the ingress stops sending."""
        hub = self._hub
        hello = wire.Hello(
            hub.fingerprint,
            {**hub.llm.facts, "pid": os.getpid(), "host": socket.gethostname()},
            hub.llm.config.max_num_seqs,
            hub.llm.config.max_waiting_requests,
        )
        watcher = asyncio.ensure_future(self._watch_index())
        try:
            yield self._report(hello)
            while not self._closed and not self._is_silent:
                if not await self._is_due():
                    continue
                yield self._report()
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    @property
    def _is_silent(self) -> bool:
        return time.monotonic() - self._last_heard > SILENCE_TIMEOUT

    async def _is_due(self) -> bool:
        """Return True if a report is due and fewer than `WINDOW` reports are unacknowledged. If
        not, wait until this may have changed, and return False."""
        has_room = self._report_count - self._acked < WINDOW
        wait = self._pace.due - time.monotonic()
        if has_room and wait <= 0:
            return True
        self._wakeup.clear()
        loop = asyncio.get_running_loop()
        timer = loop.call_later(max(_TIMER_RESOLUTION, wait) if has_room else 1.0, self._wakeup.set)
        try:
            await self._wakeup.wait()
        finally:
            timer.cancel()
        return False

    async def _watch_index(self) -> None:
        if self._hub.llm.config.prefix_salt is None:
            return
        with contextlib.suppress(EngineDead, EngineClosed):
            async for events in self._hub.llm.index_events():
                self._index_events.append(events)
                self._index_reported.clear()
                self.note(urgent=False)
                await self._index_reported.wait()  # later changes are merged meanwhile

    def _report(self, hello: wire.Hello | None = None) -> bytes:
        self._report_count += 1
        deltas: list[wire.Delta] = []
        progress: list[wire.Progress] = []
        failures: list[wire.Failure] = []
        budget = _REPORT_BYTES
        while self._pending and budget > 0:
            stream = self._pending.pop(next(iter(self._pending)))
            number = stream.order.stream
            if stream.output is not None:
                vector = _vector(stream.request)
                stream_deltas = [_delta(number, delta, vector) for delta in stream.output.outputs]
                deltas += stream_deltas
                budget -= sum(
                    len(delta.text) + len(delta.token_ids) for delta in stream_deltas
                ) + len(vector)
            if (update := _progress(stream)) is not None:
                progress.append(update)
            if stream.error is not None:
                failures.append(
                    wire.Failure(number, type(stream.error).__name__, str(stream.error))
                )
            stream.output = stream.prompt_token_ids = None
            stream.reported.set()
        declined, self._declined = self._declined, []
        index, self._index_events = self._index_events, []
        self._index_reported.set()
        report = wire.Report(
            self._report_count,
            self._order_count,
            hello=hello,
            load=self._hub.load(self._last_sample),
            deltas=deltas,
            progress=progress,
            failures=failures,
            declined=declined,
            is_vacant=self._hub.is_vacant(self.name),
            index=[_index_update(events) for events in index],
        )
        self._last_sample = self._hub.gauges.samples
        self._pace.note_report(time.monotonic())
        if self._pending:
            self.note(urgent=True)
        return wire.encode(report)

    async def end(self) -> None:
        """Abort all streams, and wait until they have ended."""
        streams, self.streams = list(self.streams.values()), {}
        for stream in streams:
            stream.end()
        await asyncio.gather(*(s.reader for s in streams if s.reader), return_exceptions=True)

    def close(self) -> None:
        """End the link. Output that has not been reported is lost."""
        self._closed = True
        self._wakeup.set()


def _vector(request: Request | None) -> bytes:
    vector = None if request is None else request.vector_so_far
    return b"" if vector is None else vector.tobytes()


def _delta(stream: int, output: CompletionOutput, vector: bytes) -> wire.Delta:
    return wire.Delta(
        stream,
        index=output.index,
        text=output.text,
        token_ids=wire.ids_to_bytes(output.token_ids),
        logprobs=wire.pack_logprobs(output.logprobs),
        offsets=output.text_offsets,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        vector=vector,
    )


def _progress(stream: Stream) -> wire.Progress | None:
    """Return what is new about a stream besides its output: its acceptance, prompt
    log-probabilities or end. None if nothing is."""
    output, is_finished = stream.output, stream.output is not None and stream.output.finished
    prompt = None if output is None else wire.pack_logprobs(output.prompt_logprobs)
    if stream.prompt_token_ids is None and prompt is None and not is_finished:
        return None
    queue_seconds = -1.0
    if output is not None and output.metrics.first_scheduled_time is not None:
        queue_seconds = output.metrics.first_scheduled_time - output.metrics.arrival_time
    return wire.Progress(
        stream.order.stream,
        prompt_token_ids=stream.prompt_token_ids,
        prompt_logprobs=prompt,
        is_finished=is_finished,
        cached_tokens=output.num_cached_tokens if output is not None else 0,
        preemptions=output.num_preemptions if output is not None else 0,
        queue_seconds=queue_seconds,
    )


def _index_update(events: IndexEvents) -> wire.IndexUpdate:
    return wire.IndexUpdate(events.cleared, events.forgotten.tobytes(), events.remembered.tobytes())
