"""The replicas as one ingress sees them: the links to them, the streams on each replica, and the
handling of these streams when a replica dies, hangs, leaves or runs a suspect."""

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
from nanoactor.fleet.dispatch import PATIENCE, Dispatch
from nanoactor.fleet.link_end import Connector, LinkEnd
from nanoactor.fleet.pages import Page, Part
from nanoactor.fleet.prefix_map import PrefixMap
from nanoactor.fleet.replica import Replica
from nanoactor.fleet.routing import Place, Router
from nanoactor.fleet.trial_runs import TrialRuns

log = logging.getLogger("nanoactor.fleet")

SILENCE = 10.0
_TICK = 1.0
_LONGEST_WAIT = 10.0
_DEAD, _LEAVES = "EngineDead", "EngineClosed"
"""Kinds of failures caused by the replica, not the request: its engine died or was closed."""
_REFUSALS = ("EngineOverloaded", "OutOfResources")
"""Kinds of failures after which a request is sent to another replica."""
POISON = (
    "every replica on which the request ran has died, the last one with no other request running, "
    "so the request is not retried"
)


class Counts:
    """Counters of what happened to streams and replicas, for /metrics."""

    def __init__(self) -> None:
        self.moved = self.requeued = self.lost = self.deaths = self.poisoned = 0


class Fleet:
    """All replicas, as seen by one ingress. Runs on the ingress's event loop."""

    def __init__(self, connector: Connector, ingress: str, silence: float = SILENCE) -> None:
        """`ingress` identifies this ingress to the replicas. A replica that sends nothing for
        `silence` seconds is considered hung."""
        self._connector, self._ingress, self._silence = connector, ingress, silence
        self.router = Router()
        self.dispatch = Dispatch(self.router)
        self.counts = Counts()
        self.replicas: dict[str, Replica] = {}
        """Replicas whose link is up."""
        self._links: dict[str, LinkEnd] = {}
        self._retries: dict[str, tuple[float, float]] = {}
        """By lost replica: time of the next attempt to connect, and the wait before it in
        seconds."""
        self._at: dict[Part, tuple[Replica, int]] = {}
        """By running part: its replica and its stream number."""
        self._streams = 0
        self.pages: dict[int, Page] = {}
        """Unfinished requests, by uid."""
        self.trials = TrialRuns(self)
        self.first_up = asyncio.Event()
        self.facts: dict[str, Any] = {}
        """Facts of the replica that connected last."""
        self._ticker: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self) -> None:
        """Start connecting to all replicas, current and future ones."""
        self._connector.watch(self.update_members)
        self._ticker = asyncio.ensure_future(self._tick())
        self.update_members()

    async def close(self) -> None:
        """Close all links."""
        self._closed = True
        if self._ticker is not None:
            self._ticker.cancel()
        await asyncio.gather(*(link.close() for link in self._links.values()))
        await asyncio.gather(*self._closing, return_exceptions=True)

    # -- replicas that join and leave -------------------------------------------------------

    def update_members(self) -> None:
        """Update the links to the current members: connect to new members, and close links to
        removed members once they are idle."""
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
                self._leave(link)

    def _leave(self, link: LinkEnd) -> None:
        """Close the link to a leaving replica unless it still runs streams of this ingress."""
        replica = self.replicas.get(link.replica)
        if replica is not None and replica.link is link and replica.parts:
            return
        self._forget(link)
        task = asyncio.ensure_future(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _forget(self, link: LinkEnd) -> Replica | None:
        if self._links.get(link.replica) is link:
            del self._links[link.replica]
        replica = self.replicas.get(link.replica)
        if replica is None or replica.link is not link:
            return None
        del self.replicas[link.replica]
        self.router.prefixes.forget(link.replica)
        return replica

    def up(self, link: LinkEnd) -> None:
        """Register a replica that has identified itself."""
        assert link.hello is not None
        self.replicas[link.replica] = Replica(link, link.hello)
        self._retries.pop(link.replica, None)
        log.info("replica %s is serving", link.replica)
        self.facts = link.hello.facts
        self.first_up.set()

    def lost(self, link: LinkEnd, cause: str) -> None:
        """Handle the loss of a replica that has died or hangs: its requests resume elsewhere."""
        replica = self._forget(link)
        waited = min(_LONGEST_WAIT, 2 * self._retries.get(link.replica, (0.0, 0.5))[1])
        self._retries[link.replica] = time.monotonic() + waited, waited
        if self._closed:
            return
        expected = link.has_drained
        log.log(
            logging.INFO if expected else logging.ERROR,
            "replica %s is lost: %s%s",
            link.replica,
            cause,
            f"; {len(replica.parts)} streams continue on other replicas" if replica else "",
        )
        if replica is not None:
            self.counts.deaths += not expected
            culprit = None
            if expected:
                self.trials.note_gone(replica)
            else:
                culprit = self.trials.note_death(replica)
            for part in list(replica.parts.values()):
                self._move_safely(part, replica)
            if culprit is not None:
                self._convict(culprit)
        self.advance()

    def _convict(self, page: Page) -> None:
        log.error(
            "request %s has been ended, because it killed its replica while it ran alone",
            page.entry.request_id,
        )
        self.counts.poisoned += 1
        self.fail(page, PoisonRequest(POISON))

    def _move_safely(self, part: Part, replica: Replica) -> None:
        """Move a part. If that fails, only its request fails, so that other parts still move."""
        try:
            self._move(part, replica)
        except Exception as error:
            log.exception("request %s cannot continue", part.page.entry.request_id)
            self.fail(part.page, ComputationFailed(f"the stream cannot continue: {error!r}"))

    def _move(self, part: Part, replica: Replica) -> None:
        """Queue a part of a lost or leaving replica to resume on another replica."""
        self._at.pop(part, None)
        page = part.page
        for moved in page.move(part):
            told = moved.is_moved and part.page.told
            self.counts.moved += bool(told)
            self.counts.requeued += not told
            moved.fingerprint = replica.place.hello.fingerprint if told else ""
            name = page.entry.request_id
            log.info("request %s continues on another replica after %d tokens", name, page.told)
            self.add(moved)

    # -- requests ---------------------------------------------------------------------------

    def add(self, part: Part) -> None:
        """Queue a part until a replica has room for it; a suspect's part is queued for its trial
        instead."""
        if not self.trials.keeps(part):
            self.dispatch.add(part)

    def advance(self) -> None:
        """Start all queued parts and trials that can start now."""
        if self._closed:
            return
        if self.dispatch.waiting:
            self.dispatch.place([replica.place for replica in self.usable()], self._begin)
        # If there is only one replica, queued parts start before the next trial.
        if len(self.replicas) > 1 or not self.dispatch.waiting:
            self.trials.advance()

    def usable(self) -> Iterator[Replica]:
        """Iterate over the replicas that accept new requests."""
        for replica in self.replicas.values():
            is_reserved = replica.place.load.is_reserved or self.trials.is_on(replica)
            if not (replica.link.is_leaving or is_reserved):
                yield replica

    def _begin(self, part: Part, place: Place) -> None:
        self.begin(part, self.replicas[place.replica])

    def begin(self, part: Part, replica: Replica, *, is_alone: bool = False) -> None:
        """Start a part on a replica."""
        self._streams += 1
        stream, page, place = self._streams, part.page, replica.place
        try:
            order = part.order(stream, is_alone=is_alone)
        except Exception as error:  # affects only this request
            log.exception("request %s cannot be sent", page.entry.request_id)
            self.fail(page, ComputationFailed(f"the request cannot be sent: {error!r}"))
            return
        replica.parts[stream] = part
        self._at[part] = replica, stream
        replica.link.order(order)
        missing = self.router.missing(place, page.hashes, part.tokens)
        place.sent(replica.link.ordered, missing)
        self.router.prefixes.expect(replica.name, page.blocks, time.monotonic())
        self.trials.note_going_on(page)

    def abort(self, page: Page) -> None:
        """Abort a request that is no longer read."""
        page.abort()
        self._drop(page)

    def fail(self, page: Page, error: NanoactorError) -> None:
        """End a request with an error."""
        if not page.entry.over:
            page.entry.error = error
        page.entry.end()
        self._drop(page)

    def _drop(self, page: Page) -> None:
        """Abort a request's running parts, and remove its waiting parts from the queue."""
        for part in page.parts:
            self.dispatch.remove(part)
            if part in self._at:
                replica, stream = self._at.pop(part)
                del replica.parts[stream]
                replica.link.order(wire.Abort(stream))
                self._after_end(replica)
        page.parts = []
        self._note_over(page)

    def _note_over(self, page: Page) -> None:
        self.pages.pop(page.uid, None)
        self.trials.forget(page)

    def _end_part(self, replica: Replica, stream: int) -> Part | None:
        part = replica.parts.pop(stream, None)
        if part is not None:
            self._at.pop(part, None)
        return part

    def _after_end(self, replica: Replica) -> None:
        if replica.link.is_leaving:
            self._leave(replica.link)

    # -- reports ----------------------------------------------------------------------------

    def reported(self, link: LinkEnd, report: wire.Report) -> None:
        """Process a replica's report."""
        replica = self.replicas.get(link.replica)
        if replica is None or replica.link is not link:
            return
        self._take_state(replica, report)
        self._take_outputs(replica, report)
        if any(failure.kind == _DEAD for failure in report.failures):
            link.give_up("its engine has died")
            return
        for failure in report.failures:
            self._failed(replica, failure)
        for stream in report.declined:
            if (part := self._end_part(replica, stream)) is not None:
                self.add(part)
                self._after_end(replica)
        self.trials.reported(replica, report.is_alone)
        self.advance()

    def _take_state(self, replica: Replica, report: wire.Report) -> None:
        replica.reported = time.monotonic()
        if report.load is not None:
            replica.place.told(report.load, report.orders)
            replica.figures = report.load.figures or replica.figures
        for news in report.index:
            self.router.prefixes.take(replica.name, news, replica.reported)

    def _take_outputs(self, replica: Replica, report: wire.Report) -> None:
        for progress in report.progress:
            self._progress(replica, progress)
        for delta in report.deltas:
            if (part := replica.parts.get(delta.stream)) is not None:
                part.page.take(delta, part)
        for progress in report.progress:
            if progress.is_over:
                self._finished(replica, progress)

    def _progress(self, replica: Replica, progress: wire.Progress) -> None:
        part = replica.parts.get(progress.stream)
        if part is None:
            return
        page = part.page
        if progress.accepted is not None and not page.entry.accepted.is_set():
            page.note_accepted(progress.accepted)
        if progress.prompt_logprobs is not None and not page.entry.has_prompt_logprobs:
            told = wire.unpack_logprobs(progress.prompt_logprobs)
            page.entry.set_prompt_logprobs(told or [None])

    def _finished(self, replica: Replica, progress: wire.Progress) -> None:
        part = self._end_part(replica, progress.stream)
        if part is None:
            return
        page = part.page
        page.note_figures(part, progress)
        page.parts.remove(part)
        for index in part.answers:
            answer = page.entry.answers[index]
            metrics = answer.metrics
            if metrics.first_token_time and metrics.finished_time:
                seconds = metrics.finished_time - metrics.first_token_time
                self.router.answers.note(seconds, len(answer.token_ids))
        if not page.parts:
            page.entry.end()
            self._note_over(page)
        self._after_end(replica)

    def _failed(self, replica: Replica, failure: wire.Failure) -> None:
        part = self._end_part(replica, failure.stream)
        if part is None:
            return
        page = part.page
        if failure.kind == _LEAVES:  # the link will be lost, too
            self._move(part, replica)
        elif failure.kind in _REFUSALS and self._ask_another(part, replica):
            self.add(part)
        else:
            page.parts.remove(part)
            self.counts.lost += page.told > 0
            self.fail(page, error_of(failure))
        self._after_end(replica)

    def _ask_another(self, part: Part, replica: Replica) -> bool:
        if part.is_moved:  # it was accepted once: it waits until there is room
            return True
        part.refused_by.add(replica.name)
        return any(other.name not in part.refused_by for other in self.usable())

    # -- timer ------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            try:
                self.update_members()
                now = time.monotonic()
                self.trials.tick(now)
                self.dispatch.note_serving([r.place for r in self.replicas.values()], now)
                self._give_up(now)
                self.advance()
            except Exception:  # a bug here must not stop the supervision of the replicas
                log.exception("the fleet's clock has failed once")

    def _give_up(self, now: float) -> None:
        for part in (*self.dispatch.take_hopeless(now), *self.trials.take_hopeless(now)):
            if part.fingerprint and self.replicas:
                error: NanoactorError = ComputationFailed(
                    "the replica that was answering has died, and no replica with the same model, "
                    f"version and options was found for {PATIENCE:g} s; send the request again"
                )
            else:
                error = EngineDead(f"no replica has served for {PATIENCE:g} s")
            self.counts.lost += part.page.told > 0
            self.fail(part.page, error)

    # -- statistics -------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Return the maximum number of waiting requests, summed over the replicas."""
        return sum(r.place.hello.max_waiting_requests for r in self.replicas.values())

    @property
    def missing(self) -> frozenset[str]:
        """Return the members whose link is not up."""
        return self._connector.members - self.replicas.keys()

    @property
    def block_size(self) -> int:
        """Return the number of tokens in a KV cache block; 0 if no replica is connected."""
        return next((r.place.block_size for r in self.replicas.values()), 0)

    @property
    def prefixes(self) -> PrefixMap:
        """Return the map of the replicas' cached prefixes."""
        return self.router.prefixes

    @property
    def streams(self) -> int:
        """Return the number of this ingress's running streams."""
        return len(self._at)


def error_of(failure: wire.Failure) -> NanoactorError:
    """Return the error that a replica has raised; `ComputationFailed` if its class is unknown."""
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, NanoactorError):
        made: NanoactorError = kind(failure.text)
        return made
    return ComputationFailed(f"the replica has failed: {failure.text}")
