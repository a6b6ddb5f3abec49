"""All replicas, as one ingress (an HTTP server in front of them) sees them: `links` are the
connections to them, `streams` the running requests and `queue` those that wait for a replica.

If a replica dies or hangs, its streams resume on other replicas. A replica that is shut down
finishes its streams first.
"""

from __future__ import annotations

import asyncio
import logging
import time

from nanoactor import errors
from nanoactor.errors import (
    ComputationFailed,
    EngineDead,
    NanoactorError,
    PoisonRequest,
)
from nanoactor.fleet import wire
from nanoactor.fleet.dispatch import NO_REPLICA_TIMEOUT
from nanoactor.fleet.link_end import Connector
from nanoactor.fleet.links import Links
from nanoactor.fleet.part_queue import PartQueue
from nanoactor.fleet.replica import Replica
from nanoactor.fleet.requests import FleetRequest, Part
from nanoactor.fleet.routing import Router
from nanoactor.fleet.streams import Streams

log = logging.getLogger("nanoactor.fleet")

SILENCE_TIMEOUT = 10.0
_TICK_SECONDS = 1.0
_ENGINE_DEAD, _ENGINE_CLOSED = "EngineDead", "EngineClosed"
"""Error classes that mean that the replica failed, not the request: its engine died or was
closed."""
_REFUSALS = ("EngineOverloaded", "OutOfResources")
"""Error classes with which a replica refuses a request that another replica may accept."""
POISON_MESSAGE = (
    "every replica on which the request ran has died, the last one with no other request running, "
    "so the request is not retried"
)


class Counts:
    """Counters of events in the fleet, for `/metrics`."""

    def __init__(self) -> None:
        self.moved = self.requeued = self.lost = self.deaths = self.poisoned = 0


class Fleet:
    """The replicas that one ingress (HTTP server) uses, and the requests that run on them. Must be
    used on the ingress's event loop."""

    def __init__(
        self, connector: Connector, ingress: str, silence: float = SILENCE_TIMEOUT
    ) -> None:
        """Create the fleet without connecting. `connector` provides access to the replicas, and
        `ingress` is the name under which they know this ingress. A replica that sends nothing for
        `silence` seconds is considered hung."""
        self.router = Router()
        self.counts = Counts()
        self.links = Links(connector, ingress, silence, self.router.prefixes, self)
        self.replicas = self.links.replicas
        """Connected replicas, by name. Only `links` adds and removes them."""
        self.streams = Streams()
        self.queue = PartQueue(self.router, self.replicas, self.begin)
        self.requests: dict[int, FleetRequest] = {}
        """Unfinished requests, by their number in this ingress (uid)."""
        self._ticker: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connect to all replicas, and later to new ones, in the background."""
        self.links.start()
        self._ticker = asyncio.ensure_future(self._tick())

    async def close(self) -> None:
        """Close the connections to all replicas."""
        self.queue.close()
        if self._ticker is not None:
            self._ticker.cancel()
        await self.links.close()

    # -- lost replicas ----------------------------------------------------------------------

    def on_lost(self, replica: Replica | None, *, is_planned: bool) -> None:
        """Resume the requests of a lost replica on other replicas. `replica` is None if it had not
        sent its first report. `is_planned` is True if the replica was shut down on purpose."""
        if replica is not None:
            self.counts.deaths += not is_planned
            culprit = None
            if is_planned:
                self.queue.trials.note_departure(replica)
            else:
                culprit = self.queue.trials.note_death(replica)
            for part in list(replica.parts.values()):
                self._move_safely(part, replica)
            if culprit is not None:
                self._fail_poisonous(culprit)
        self.queue.advance()

    def _fail_poisonous(self, request: FleetRequest) -> None:
        log.error(
            "request %s has been ended, because its replica died when no other request was "
            "running on it",
            request.entry.request_id,
        )
        self.counts.poisoned += 1
        self.fail(request, PoisonRequest(POISON_MESSAGE))

    def _move_safely(self, part: Part, replica: Replica) -> None:
        """Queue a part (a request or one of its sequences) of a lost replica to resume elsewhere.
        If that raises an error, fail only the part's request, so that the other parts of the
        replica are still queued."""
        try:
            self._move(part, replica)
        except Exception as error:
            log.exception("request %s cannot continue", part.request.entry.request_id)
            self.fail(part.request, ComputationFailed(f"the stream cannot continue: {error!r}"))

    def _move(self, part: Part, replica: Replica) -> None:
        """Queue a part (a request or one of its sequences) to resume on another replica, because
        `replica` was lost."""
        self.streams.forget(part)
        request = part.request
        for moved in request.move(part):
            has_sent = moved.is_moved and part.request.tokens_sent
            self.counts.moved += bool(has_sent)
            self.counts.requeued += not has_sent
            moved.fingerprint = replica.state.hello.fingerprint if has_sent else ""
            name = request.entry.request_id
            log.info(
                "request %s continues on another replica after %d tokens", name, request.tokens_sent
            )
            self.queue.add(moved)

    # -- requests ---------------------------------------------------------------------------

    def begin(self, part: Part, replica: Replica, *, is_alone: bool = False) -> None:
        """Send a part (a request or one of its sequences) to a replica, which starts it. `is_alone`
        is True if the part must run there alone, because it may kill the replica."""
        stream, request, state = self.streams.new_number(), part.request, replica.state
        try:
            order = part.order(stream, is_alone=is_alone)
        except Exception as error:  # concerns only this request
            log.exception("request %s cannot be sent", request.entry.request_id)
            self.fail(request, ComputationFailed(f"the request cannot be sent: {error!r}"))
            return
        self.streams.add(part, replica, stream)
        replica.link.send(order)
        uncached = self.router.uncached_tokens(state, request.block_keys, part.tokens)
        state.note_sent(replica.link.orders_queued, uncached)
        self.router.prefixes.expect(replica.name, request.block_hashes, time.monotonic())
        self.queue.trials.note_resumed(request)

    def abort(self, request: FleetRequest) -> None:
        """Abort a request whose output is no longer read."""
        request.abort()
        self._drop(request)

    def fail(self, request: FleetRequest, error: NanoactorError) -> None:
        """End a request and all of its parts. Its reader receives `error`, unless the request was
        already over."""
        if not request.entry.is_over:
            request.entry.error = error
        request.entry.end()
        self._drop(request)

    def _drop(self, request: FleetRequest) -> None:
        """Abort all parts of a request, running or queued, and forget the request."""
        for part in request.parts:
            self.queue.dispatch.remove(part)
            if (replica := self.streams.abort(part)) is not None:
                self.links.close_if_idle(replica.link)
        request.parts = []
        self._forget_request(request)

    def _forget_request(self, request: FleetRequest) -> None:
        if self.requests.pop(request.uid, None) is not None and request.on_end is not None:
            request.on_end(request.entry)
        self.queue.trials.forget(request)

    # -- reports ----------------------------------------------------------------------------

    def on_report(self, replica: Replica, report: wire.Report) -> None:
        """Process a replica's report: its load, new output, failures, and streams that it did not
        start."""
        replica.note_report(report)
        for update in report.index:
            self.router.prefixes.apply(replica.name, update, replica.last_report)
        self._apply_outputs(replica, report)
        if any(failure.kind == _ENGINE_DEAD for failure in report.failures):
            replica.link.mark_lost("its engine has died")
            return
        for failure in report.failures:
            self._handle_failure(replica, failure)
        for stream in report.declined:
            if (part := self.streams.end(replica, stream)) is not None:
                self.queue.add(part)
                self.links.close_if_idle(replica.link)
        self.queue.trials.on_report(replica, report.is_vacant)
        self.queue.advance()

    def _apply_outputs(self, replica: Replica, report: wire.Report) -> None:
        for progress in report.progress:
            if (part := replica.parts.get(progress.stream)) is not None:
                part.request.note_progress(progress)
        for delta in report.deltas:
            if (part := replica.parts.get(delta.stream)) is not None:
                part.request.apply_delta(delta, part)
        for progress in report.progress:
            if progress.is_finished:
                self._handle_finished(replica, progress)

    def _handle_finished(self, replica: Replica, progress: wire.Progress) -> None:
        part = self.streams.end(replica, progress.stream)
        if part is None:
            return
        request = part.request
        request.note_stats(part, progress)
        request.parts.remove(part)
        for index in part.answer_indices:
            answer = request.entry.answers[index]
            metrics = answer.metrics
            if metrics.first_token_time and metrics.finished_time:
                seconds = metrics.finished_time - metrics.first_token_time
                self.router.means.note(seconds, len(answer.token_ids))
        if not request.parts:
            request.entry.end()
            self._forget_request(request)
        self.links.close_if_idle(replica.link)

    def _handle_failure(self, replica: Replica, failure: wire.Failure) -> None:
        part = self.streams.end(replica, failure.stream)
        if part is None:
            return
        request = part.request
        if failure.kind == _ENGINE_CLOSED:  # the link will be lost, too
            self._move(part, replica)
        elif failure.kind not in _REFUSALS or not self.queue.add_refused(part, replica):
            request.parts.remove(part)
            self.counts.lost += request.tokens_sent > 0
            self.fail(request, error_from_failure(failure))
        self.links.close_if_idle(replica.link)

    # -- timer ------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            try:
                self.links.update_members()
                now = time.monotonic()
                self.queue.tick(now)
                self._fail_expired(now)
                self.queue.advance()
            except Exception:  # a bug here must not stop the supervision of the replicas
                log.exception("the fleet's periodic work has failed once")

    def _fail_expired(self, now: float) -> None:
        for part in self.queue.pop_expired(now):
            if part.fingerprint and self.replicas:
                error: NanoactorError = ComputationFailed(
                    "the replica that was answering has died, and no replica with the same model, "
                    f"version and options was found for {NO_REPLICA_TIMEOUT:g} s; "
                    "send the request again"
                )
            else:
                error = EngineDead(f"no replica has been available for {NO_REPLICA_TIMEOUT:g} s")
            self.counts.lost += part.request.tokens_sent > 0
            self.fail(part.request, error)


def error_from_failure(failure: wire.Failure) -> NanoactorError:
    """Recreate the error that a replica reported. Return `ComputationFailed` if its class is
    unknown."""
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, NanoactorError):
        error: NanoactorError = kind(failure.text)
        return error
    return ComputationFailed(f"the replica has failed: {failure.text}")
