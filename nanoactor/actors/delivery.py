"""Delivery of output and of the ends of sequences to the journal entries of their requests."""

from __future__ import annotations

import time
from collections.abc import Callable

from nanoactor.admission.untokenized import UntokenizedRequests
from nanoactor.admission.waiting import WaitingQueue
from nanoactor.errors import ComputationFailed
from nanoactor.messages.engine import OutputDelta, Terminal
from nanoactor.recovery.journal import Entry, Journal
from nanoactor.recovery.resuming import CHANGED, local_terminal
from nanoactor.text.scores import ReportedRun, reported_runs


class Delivery:
    """Writer of output, and of the ends of sequences, to the entries of the journal. The entries
    wake their readers. The frontend uses it for the detokenizer's messages, and to end requests
    that no other process has any more."""

    def __init__(
        self,
        journal: Journal,
        queue: WaitingQueue,
        untokenized: UntokenizedRequests,
        abort: Callable[[Entry], None],
    ) -> None:
        """`abort` aborts a request that has failed while some of its sequences are live."""
        self._journal, self._queue, self._untokenized = journal, queue, untokenized
        self._abort = abort
        self.step_at = 0
        """Time of the latest output, in ns of the monotonic clock."""

    def deliver(self, chunk: OutputDelta) -> None:
        """Add a message from the detokenizer to the entries of its sequences."""
        self.step_at = time.monotonic_ns()
        for opened in chunk.opened:
            self._note_opened(opened.uid, opened.prompt_token_ids.tolist())
        ids: list[int] = chunk.token_ids.tolist()
        offset = 0
        runs = [] if chunk.scores is None else list(reported_runs(chunk.scores))
        logprobs = {run.uid: run for run in runs if not run.is_prompt}
        for run in runs:
            if run.is_prompt and (entry := self._journal.find_unfinished(run.uid)) is not None:
                entry.add_prompt_logprobs(run)
        for uid, text, count in zip(
            chunk.uids.tolist(), chunk.texts, chunk.counts.tolist(), strict=True
        ):
            self._add_output(uid, text, ids[offset : offset + count], logprobs.get(uid))
            offset += count
        if chunk.vectors is not None:
            for uid, vector in zip(
                chunk.vectors.uids.tolist(), chunk.vectors.values.copy(), strict=True
            ):
                if (entry := self._journal.find_unfinished(uid)) is not None:
                    entry.answer(uid).vector = vector
        for terminal in chunk.terminals:
            self._end(terminal)

    def _note_opened(self, uid: int, prompt: list[int]) -> None:
        """Record that the scheduler has accepted a request, and its prompt tokens."""
        self._untokenized.remove(uid)
        entry = self._journal.find_unfinished(uid)
        if entry is not None and prompt:  # only one of several sequences carries the prompt
            if entry.accepted.is_set() and prompt != entry.prompt_token_ids:
                entry.error = ComputationFailed(CHANGED)
                self._abort(entry)
                return
            entry.prompt_token_ids = prompt
            entry.accepted.set()
            self._queue.set_prompt_length(entry, len(prompt))

    def _add_output(
        self, uid: int, text: str, ids: list[int], logprobs: ReportedRun | None
    ) -> None:
        entry = self._journal.find_unfinished(uid)
        if entry is None:
            return
        answer = entry.answer(uid)
        now, metrics = time.monotonic(), answer.metrics
        if ids:
            metrics.last_token_time = now
        if metrics.first_token_time is None:
            metrics.first_token_time = now
            self._queue.leave(entry, uid)
        if text:
            answer.text.append(text)
        answer.token_ids += ids
        if logprobs is not None:
            answer.add_logprob_run(logprobs)
        entry.wake()

    def _end(self, terminal: Terminal) -> None:
        """Remove a sequence, whose last message this is, from the journal and from the queue."""
        self._untokenized.remove(terminal.uid)
        entry = self._journal.remove(terminal.uid)
        if entry is None:
            return
        if terminal.uid in self._queue:
            self._queue.leave(entry, terminal.uid)
        if entry.answer(terminal.uid).terminal is None:
            _note_end(entry, terminal)
        if entry.error is not None:
            self._abort(entry)
        if all(answer.terminal is not None for answer in entry.answers):
            self._journal.forget_id(entry)
            entry.end()

    def end_locally(self, entry: Entry, reason: str, error: str = "") -> None:
        """Mark a request as aborted and end all its unfinished sequences here, since no other
        process has them any more. `reason` and `error` are as in `Finish`."""
        entry.aborted = True
        for uid in self._journal.live_uids(entry):
            self._end(local_terminal(entry, uid, reason, error))

    def end_for_reader(self, entry: Entry) -> None:
        """End an aborted request for its reader at once. Its entry is kept, and counts towards the
        limits, until the engine has released the request."""
        for uid in entry.uids:
            if entry.answer(uid).terminal is None:
                _note_end(entry, local_terminal(entry, uid, "abort"))
        self._journal.forget_id(entry)


def _note_end(entry: Entry, terminal: Terminal) -> None:
    """Record the end of a sequence, and its times, in the entry of its request."""
    metrics = entry.answer(terminal.uid).metrics
    metrics.finished_time = time.monotonic()
    if terminal.began >= 0:
        began = terminal.began * 1e-9  # if resumed after a death, the time after the restart
        metrics.first_scheduled_time = min(began, metrics.first_token_time or began)
    entry.note_end(terminal.uid, terminal)
