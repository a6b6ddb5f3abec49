"""The frontend actor, which runs in the user's process and on the user's event loop. It keeps the
journal of all live requests."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nanoactor.actors.control import EngineControl
from nanoactor.actors.delivery import Delivery
from nanoactor.actors.index_feed import IndexFeed
from nanoactor.actors.request_sending import RequestSender
from nanoactor.admission.admission import Admission
from nanoactor.admission.continuation import check_continuation
from nanoactor.admission.untokenized import UntokenizedRequests
from nanoactor.admission.waiting import WaitingQueue
from nanoactor.errors import NanoactorError, PoisonRequest
from nanoactor.kv.index_events import IndexEvents
from nanoactor.messages.engine import Continue, OutputDelta
from nanoactor.messages.resuming import Resume
from nanoactor.messages.vision import ResendMedia
from nanoactor.recovery.journal import Entry, Journal
from nanoactor.recovery.readmission import Readmission
from nanoactor.recovery.resubmission import Resubmission
from nanoactor.recovery.resuming import LOST, POISON
from nanoactor.runtime.actor import Actor, Context, Handler, ReadyInfo
from nanoactor.runtime.recovery import Death
from nanoactor.setup.actors import ActorConfig, RunnerReady

log = logging.getLogger("nanoactor.engine")


class FrontendActor(Actor):
    """Actor that keeps the journal of live requests, submits requests to the other actors, and
    delivers their output. The engine's public API calls its methods, which never block."""

    def __init__(self, config: ActorConfig) -> None:
        self._config, self._files, self._salt = config.engine, config.files, config.salt
        self.journal = Journal()
        self.queue = WaitingQueue(config.engine)
        self._untokenized = UntokenizedRequests(config.engine.num_tokenizers)
        self._sender = RequestSender(self.journal, self._untokenized)
        self._delivery = Delivery(self.journal, self.queue, self._untokenized, self.abort)
        self._is_restarting = False
        """True if all processes are restarting, so that nothing can be sent."""
        self._readmission = Readmission(config.engine.max_num_seqs)
        self.control = EngineControl()
        self.index = IndexFeed()

    def start(self, context: Context, ready: Mapping[str, ReadyInfo]) -> None:
        """Look up the outboxes to the other actors, and set the limits on requests according to the
        KV cache that the runners have allocated."""
        super().start(context, ready)
        config = self._config
        tokenizers = [context.outbox(f"tokenizer.{n}") for n in range(config.num_tokenizers)]
        self._scheduler = context.outbox("scheduler")
        if not self._is_restarting:
            self.control.attach(self._scheduler)
        cache = RunnerReady.find(ready)
        files = self._files.fit_to_cache(cache.capacity_tokens)
        admission = Admission(files, self._salt, cache.block_size)
        workers = config.num_vision_workers if self._files.images is not None else 0
        vision = [context.outbox(f"vision.{index}") for index in range(workers)]
        self._sender.connect(admission, self._scheduler, tokenizers, vision)
        self._resubmission = Resubmission(
            self._readmission, self.journal, self._sender.send_again, context
        )
        self._submit_kind = context.track.kind("submit", "uid")

    def begin_restart(self, deaths: Sequence[Death]) -> int:
        """Hold back new requests while all processes restart. If a request is found to have caused
        deaths, end the request and return the number of these deaths; otherwise return 0."""
        if self._is_restarting:  # nothing has run since the last death
            return 0
        self._is_restarting = True
        self.control.detach()
        may_run_on = functools.partial(_may_run_on, self._untokenized)
        verdict = self._readmission.note_deaths(
            deaths, self.journal.entries, may_run_on, self.context.now()
        )
        if verdict is None:
            return 0
        culprit, death, explained = verdict
        log.error(
            "request %s has been ended, because a process (%s) died when no other request "
            "was running",
            culprit.request_id,
            death,
        )
        culprit.error = PoisonRequest(POISON.format(death))
        self._delivery.end_locally(culprit, "abort")
        return explained

    def reset(self) -> None:
        """Forget which requests are at the tokenizers, but keep the journal of live requests."""
        self._untokenized.clear()

    def expects_death(self) -> bool:
        """Return True during a trial, in which requests that may have crashed a process run in
        separate groups until the culprit is found."""
        return self._readmission.is_trial

    def finish_restart(self) -> None:
        """Send all unfinished requests again after all processes have restarted. Held requests, for
        which a caller chooses each token, end with an error."""
        self._is_restarting = False
        for entry in self.journal.entries:
            if entry.aborted:
                self._delivery.end_locally(entry, "abort")
            elif entry.submit.spec.held:
                self._delivery.end_locally(entry, "failed", LOST)
            else:
                entry.forget_partial_scores()
        self.control.attach(self._scheduler)
        live = np.array([*self.journal.uids], np.int64)
        self._scheduler.send(Resume(self.journal.next_uid, live))
        self._resubmission.resume_all()

    def handlers(self) -> Mapping[type, Handler]:
        """Return the handlers of output, of requests to resend media, and of changes to the prefix
        cache index."""
        return {
            OutputDelta: self._deliver,
            ResendMedia: self._sender.resend,
            IndexEvents: self.index.forward,
        }

    def span_names(self) -> Mapping[type, str]:
        """Return the trace span name for delivering output to readers, which excludes the readers'
        own time."""
        return {OutputDelta: "deliver"}

    def announce(self) -> None:
        """Wake the other processes, because a request is about to be submitted. They wake up while
        the request is checked. Does nothing if requests are already waiting, because then the
        processes are awake or busy."""
        if not self.queue:
            self.context.wake_others()

    def submit(self, make: Callable[[int], Entry]) -> Entry:
        """Create a request with the next uid, add it to the journal, and send it to the other
        actors. `make` creates the journal entry, given the uid.

        Raises `EngineOverloaded` if the queue has no room. A rejected request uses no uid, because
        the scheduler relies on uids without gaps.
        """
        return self.submit_all([make])[0]

    def submit_all(self, factories: Sequence[Callable[[int], Entry]]) -> list[Entry]:
        """Submit several requests, or raise `EngineOverloaded` and submit none if the queue has no
        room for all. Each factory creates a journal entry, given its first uid."""
        entries, uid = [], self.journal.next_uid
        for make in factories:
            entries.append(make(uid))
            uid = entries[-1].uids.stop
        if not all(entry.is_moved for entry in entries):  # moved ones were accepted before
            self.queue.check_room(entries)
        for entry in entries:
            self._send(entry)
        return entries

    def _send(self, entry: Entry) -> None:
        uid, begin = entry.submit.uid, time.monotonic_ns()
        if not self._is_restarting and not self._readmission.defer(entry):
            # If requests are waiting, the detour over a tokenizer costs nothing, and tokenizers
            # have more time than the user's event loop.
            self._sender.send(entry, entry.submit, direct=not self.queue)
        self.journal.add(entry)
        self.queue.add(entry)
        self.context.track.add(self._submit_kind, uid, begin, time.monotonic_ns())

    def on_ready(self, outbox: Any) -> None:
        """Continue sending media through an outbox that has room again."""
        self._sender.media.on_ready(outbox)

    def abort(self, entry: Entry) -> None:
        """Abort a request. Its entry is kept until the other actors have confirmed the end of all
        its sequences."""
        if entry.aborted:
            return
        if not self._is_restarting and self._readmission.remove_deferred(entry):
            self._sender.send_again(entry)  # the scheduler relies on receiving all live requests
        if self._is_restarting:
            self._delivery.end_locally(entry, "abort")
            return
        entry.aborted = True
        self._sender.abort(entry)

    def end_for_reader(self, entry: Entry) -> None:
        """End an aborted request for its reader at once. Its entry is kept, and counts towards the
        limits, until the engine has released the request."""
        self._delivery.end_for_reader(entry)

    def resume_held(self, entry: Entry, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """Resume the paused sequences of a request. Sequence i becomes a copy of sequence
        `parents[i]` and continues with token id `tokens[i]`; if `parents[i]` is -1, it ends. Raises
        the error that ended the request, or `InvalidRequest` if the request cannot be resumed."""
        entry.raise_error()
        if self._is_restarting:
            self._delivery.end_locally(entry, "failed", LOST)
            entry.raise_error()
        check_continuation(entry, parents, tokens, self._files.config.vocab_size)
        entry.continued += 1
        rows = np.array(parents, np.int32), np.array(tokens, np.int32)
        self._scheduler.send(Continue(entry.submit.uid, *rows))

    def fail_all(self, error: NanoactorError) -> None:
        """End every unfinished request with `error`, because the engine is gone."""
        for entry in self.journal.entries:
            if not entry.is_over:
                entry.error = error
                entry.end()
        self.journal.clear()
        self._sender.media.forget()
        self.queue.clear()
        self.index.end(error)

    @property
    def has_work(self) -> bool:
        """True if there are unfinished requests and the engine is not paused."""
        return bool(self.journal) and not self.control.is_paused

    def _deliver(self, chunk: OutputDelta) -> None:
        self._delivery.deliver(chunk)
        if self._readmission.is_trial:
            self._resubmission.check_trial()

    def statistics(self) -> dict[str, Any]:
        """Return the sizes of the journal and of its queues.

        `entries` is the number of unfinished sequences. `waiting_*` are the number of sequences
        without a first token, and the prompt tokens and media bytes of such requests. `kept` is the
        number of requests that wait for the end of a trial (a run of requests that may have crashed
        a process). `untokenized` is the number of requests that no tokenizer has processed yet.
        `direct` is the number of requests since the start that needed no tokenizer. `media_sending`
        is the number of media items in transit. `step_at` is the time of the latest output, in ns
        of the monotonic clock.
        """
        return {
            "entries": len(self.journal),
            "waiting_requests": len(self.queue),
            "waiting_tokens": self.queue.tokens,
            "waiting_media_bytes": self.queue.media_bytes,
            "kept": self._readmission.waiting,
            "untokenized": len(self._untokenized),
            "direct": self._sender.num_direct,
            "media_sending": len(self._sender.media),
            "step_at": self._delivery.step_at,
        }


def _may_run_on(untokenized: UntokenizedRequests, entry: Entry, node: str) -> bool:
    """Return True if a request may have been running on a node (a process) when that node died."""
    kind, _, number = node.partition(".")
    if kind == "tokenizer":
        return any(untokenized.tokenizer_of(uid) == int(number) for uid in entry.uids)
    if kind == "vision":
        return bool(entry.media)
    return kind != "grammar" or bool(entry.submit.spec.grammar)
