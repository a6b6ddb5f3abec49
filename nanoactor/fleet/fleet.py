"""State of all replicas, as one ingress (an HTTP server in front of them) sees it: connections,
running streams and queued requests.

A *link* is the connection between an ingress and a replica. If a replica dies or hangs, its streams
resume on other replicas. A replica that is shut down finishes its streams first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Any

from nanoactor import errors
from nanoactor.errors import (
    ComputationFailed,
    EngineDead,
    NanoactorError,
    PoisonRequest,
)
from nanoactor.fleet import wire
from nanoactor.fleet.dispatch import NO_REPLICA_TIMEOUT, Dispatch
from nanoactor.fleet.link_end import Connector, LinkEnd
from nanoactor.fleet.prefix_map import PrefixMap
from nanoactor.fleet.replica import Replica
from nanoactor.fleet.requests import FleetRequest, Part
from nanoactor.fleet.routing import ReplicaState, Router
from nanoactor.fleet.trial_runs import TrialRuns

log = logging.getLogger("nanoactor.fleet")

SILENCE_TIMEOUT = 10.0
_TICK_SECONDS = 1.0
_MAX_RETRY_WAIT = 10.0
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
        self._connector, self._ingress, self._silence = connector, ingress, silence
        self.router = Router()
        self.dispatch = Dispatch(self.router)
        self.counts = Counts()
        self.replicas: dict[str, Replica] = {}
        """Connected replicas, by name."""
        self._links: dict[str, LinkEnd] = {}
        self._retries: dict[str, tuple[float, float]] = {}
        """For each lost replica: time of the next attempt to connect (`time.monotonic()`), and the
        delay before that attempt, in seconds."""
        self._running: dict[Part, tuple[Replica, int]] = {}
        """For each running part (a request or one of its sequences): its replica, and the number of
        its stream there."""
        self._last_stream = 0
        self.requests: dict[int, FleetRequest] = {}
        """Unfinished requests, by their number in this ingress (uid)."""
        self.trials = TrialRuns(self)
        self.first_connected = asyncio.Event()
        self.facts: dict[str, Any] = {}
        """Properties of the replica that connected last."""
        self._ticker: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self) -> None:
        """Connect to all replicas, and later to new ones, in the background."""
        self._connector.watch(self.update_members)
        self._ticker = asyncio.ensure_future(self._tick())
        self.update_members()

    async def close(self) -> None:
        """Close the connections to all replicas."""
        self._closed = True
        if self._ticker is not None:
            self._ticker.cancel()
        await asyncio.gather(*(link.close() for link in self._links.values()))
        await asyncio.gather(*self._closing, return_exceptions=True)

    # -- replicas that join and leave -------------------------------------------------------

    def update_members(self) -> None:
        """Connect to new members, the replicas that the connector reports as serving. Close the
        connection to a replica that is no longer a member once no stream runs there."""
        members = self._connector.members
        now = time.monotonic()
        for replica in members - self._links.keys():
            if self._retries.get(replica, (0.0, 0.0))[0] <= now and not self._closed:
                self._links[replica] = LinkEnd(
                    replica, self._connector, self, self._silence, self._ingress
                )
        for replica in self._retries.keys() - members:
            del self._retries[replica]
        for replica, link in list(self._links.items()):
            if replica not in members and not link.is_leaving:
                link.left_at = now
                log.info("replica %s is leaving; it finishes its running streams", replica)
                self._close_if_idle(link)

    def _close_if_idle(self, link: LinkEnd) -> None:
        """Close the link to a replica that is shutting down, unless streams of this ingress still
        run there."""
        replica = self.replicas.get(link.replica)
        if replica is not None and replica.link is link and replica.parts:
            return
        self._remove(link)
        task = asyncio.ensure_future(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _remove(self, link: LinkEnd) -> Replica | None:
        if self._links.get(link.replica) is link:
            del self._links[link.replica]
        replica = self.replicas.get(link.replica)
        if replica is None or replica.link is not link:
            return None
        del self.replicas[link.replica]
        self.router.prefixes.forget(link.replica)
        return replica

    def on_up(self, link: LinkEnd) -> None:
        """Add a replica that has sent its first report."""
        assert link.hello is not None
        self.replicas[link.replica] = Replica(link, link.hello)
        self._retries.pop(link.replica, None)
        log.info("replica %s is serving", link.replica)
        self.facts = link.hello.facts
        self.first_connected.set()

    def on_lost(self, link: LinkEnd, cause: str) -> None:
        """Handle the loss of a replica that died, hung or closed the link: resume its requests on
        other replicas. `cause` is for the log."""
        replica = self._remove(link)
        wait = min(_MAX_RETRY_WAIT, 2 * self._retries.get(link.replica, (0.0, 0.5))[1])
        self._retries[link.replica] = time.monotonic() + wait, wait
        if self._closed:
            return
        is_planned = link.has_drained
        log.log(
            logging.INFO if is_planned else logging.ERROR,
            "replica %s is lost: %s%s",
            link.replica,
            cause,
            f"; {len(replica.parts)} streams continue on other replicas" if replica else "",
        )
        if replica is not None:
            self.counts.deaths += not is_planned
            culprit = None
            if is_planned:
                self.trials.note_departure(replica)
            else:
                culprit = self.trials.note_death(replica)
            for part in list(replica.parts.values()):
                self._move_safely(part, replica)
            if culprit is not None:
                self._fail_poisonous(culprit)
        self.advance()

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
        self._running.pop(part, None)
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
            self.add(moved)

    # -- requests ---------------------------------------------------------------------------

    def add(self, part: Part) -> None:
        """Queue a part (a request or one of its sequences) until a replica has room for it. If its
        request is suspected of killing replicas, queue it to run alone instead."""
        if not self.trials.queue_if_suspect(part):
            self.dispatch.add(part)

    def advance(self) -> None:
        """Start all queued parts for which a replica has room, and reserve a replica for the next
        request that must run alone."""
        if self._closed:
            return
        if self.dispatch.waiting:
            self.dispatch.assign([replica.state for replica in self.usable_replicas()], self._begin)
        # With a single replica, start queued parts before the next request that must run alone.
        if len(self.replicas) > 1 or not self.dispatch.waiting:
            self.trials.advance()

    def usable_replicas(self) -> Iterator[Replica]:
        """Yield the replicas that accept new requests: those that are neither shutting down nor
        reserved to run a single request alone."""
        for replica in self.replicas.values():
            is_reserved = replica.state.load.is_reserved or self.trials.reserves(replica)
            if not (replica.link.is_leaving or is_reserved):
                yield replica

    def _begin(self, part: Part, state: ReplicaState) -> None:
        self.begin(part, self.replicas[state.name])

    def begin(self, part: Part, replica: Replica, *, is_alone: bool = False) -> None:
        """Send a part (a request or one of its sequences) to a replica, which starts it. `is_alone`
        is True if the part must run there alone, because it may kill the replica."""
        self._last_stream += 1
        stream, request, state = self._last_stream, part.request, replica.state
        try:
            order = part.order(stream, is_alone=is_alone)
        except Exception as error:  # concerns only this request
            log.exception("request %s cannot be sent", request.entry.request_id)
            self.fail(request, ComputationFailed(f"the request cannot be sent: {error!r}"))
            return
        replica.parts[stream] = part
        self._running[part] = replica, stream
        replica.link.send(order)
        uncached = self.router.uncached_tokens(state, request.block_keys, part.tokens)
        state.note_sent(replica.link.orders_queued, uncached)
        self.router.prefixes.expect(replica.name, request.block_hashes, time.monotonic())
        self.trials.note_resumed(request)

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
            self.dispatch.remove(part)
            if part in self._running:
                replica, stream = self._running.pop(part)
                del replica.parts[stream]
                replica.link.send(wire.Abort(stream))
                self._after_part(replica)
        request.parts = []
        self._forget_request(request)

    def _forget_request(self, request: FleetRequest) -> None:
        if self.requests.pop(request.uid, None) is not None and request.on_end is not None:
            request.on_end(request.entry)
        self.trials.forget(request)

    def _end_part(self, replica: Replica, stream: int) -> Part | None:
        part = replica.parts.pop(stream, None)
        if part is not None:
            self._running.pop(part, None)
        return part

    def _after_part(self, replica: Replica) -> None:
        if replica.link.is_leaving:
            self._close_if_idle(replica.link)

    # -- reports ----------------------------------------------------------------------------

    def on_report(self, link: LinkEnd, report: wire.Report) -> None:
        """Process a replica's report: its load, new output, failures, and streams that it did not
        start."""
        replica = self.replicas.get(link.replica)
        if replica is None or replica.link is not link:
            return
        self._apply_state(replica, report)
        self._apply_outputs(replica, report)
        if any(failure.kind == _ENGINE_DEAD for failure in report.failures):
            link.mark_lost("its engine has died")
            return
        for failure in report.failures:
            self._handle_failure(replica, failure)
        for stream in report.declined:
            if (part := self._end_part(replica, stream)) is not None:
                self.add(part)
                self._after_part(replica)
        self.trials.on_report(replica, report.is_vacant)
        self.advance()

    def _apply_state(self, replica: Replica, report: wire.Report) -> None:
        replica.last_report = time.monotonic()
        if report.load is not None:
            replica.state.update_load(report.load, report.orders_processed)
            replica.figures = report.load.figures or replica.figures
        for update in report.index:
            self.router.prefixes.apply(replica.name, update, replica.last_report)

    def _apply_outputs(self, replica: Replica, report: wire.Report) -> None:
        for progress in report.progress:
            self._handle_progress(replica, progress)
        for delta in report.deltas:
            if (part := replica.parts.get(delta.stream)) is not None:
                part.request.apply_delta(delta, part)
        for progress in report.progress:
            if progress.is_finished:
                self._handle_finished(replica, progress)

    def _handle_progress(self, replica: Replica, progress: wire.Progress) -> None:
        part = replica.parts.get(progress.stream)
        if part is None:
            return
        request = part.request
        if progress.prompt_token_ids is not None and not request.entry.accepted.is_set():
            request.note_accepted(progress.prompt_token_ids)
        if progress.prompt_logprobs is not None and not request.entry.has_prompt_logprobs:
            logprobs = wire.unpack_logprobs(progress.prompt_logprobs)
            request.entry.set_prompt_logprobs(logprobs or [None])

    def _handle_finished(self, replica: Replica, progress: wire.Progress) -> None:
        part = self._end_part(replica, progress.stream)
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
        self._after_part(replica)

    def _handle_failure(self, replica: Replica, failure: wire.Failure) -> None:
        part = self._end_part(replica, failure.stream)
        if part is None:
            return
        request = part.request
        if failure.kind == _ENGINE_CLOSED:  # the link will be lost, too
            self._move(part, replica)
        elif failure.kind in _REFUSALS and self._can_retry_elsewhere(part, replica):
            self.add(part)
        else:
            request.parts.remove(part)
            self.counts.lost += request.tokens_sent > 0
            self.fail(request, error_from_failure(failure))
        self._after_part(replica)

    def _can_retry_elsewhere(self, part: Part, replica: Replica) -> bool:
        if part.is_moved:  # it was accepted before, so it waits for room
            return True
        part.refused_by.add(replica.name)
        return any(other.name not in part.refused_by for other in self.usable_replicas())

    # -- timer ------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            try:
                self.update_members()
                now = time.monotonic()
                self.trials.tick(now)
                self.dispatch.refresh_timeouts([r.state for r in self.replicas.values()], now)
                self._fail_expired(now)
                self.advance()
            except Exception:  # a bug here must not stop the supervision of the replicas
                log.exception("the fleet's periodic work has failed once")

    def _fail_expired(self, now: float) -> None:
        for part in (*self.dispatch.pop_expired(now), *self.trials.expired(now)):
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

    # -- statistics -------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Maximum number of requests that may wait on the connected replicas, summed over the
        replicas."""
        return sum(r.state.hello.max_waiting_requests for r in self.replicas.values())

    @property
    def unconnected(self) -> frozenset[str]:
        """Names of the serving replicas to which this ingress is not connected."""
        return self._connector.members - self.replicas.keys()

    @property
    def block_size(self) -> int:
        """Number of tokens in a KV block; 0 while no replica is connected."""
        return next((r.state.block_size for r in self.replicas.values()), 0)

    @property
    def prefixes(self) -> PrefixMap:
        """Map of the prompt prefixes that each replica has cached."""
        return self.router.prefixes

    @property
    def streams(self) -> int:
        """Number of running streams of this ingress."""
        return len(self._running)


def error_from_failure(failure: wire.Failure) -> NanoactorError:
    """Recreate the error that a replica reported. Return `ComputationFailed` if its class is
    unknown."""
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, NanoactorError):
        error: NanoactorError = kind(failure.text)
        return error
    return ComputationFailed(f"the replica has failed: {failure.text}")
