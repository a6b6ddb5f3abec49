"""Requests of an ingress's clients: the output sent so far, and the parts that run on replicas. A
part is a whole request, or one of its sequences."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from nanoactor.fleet import wire
from nanoactor.recovery.journal import Answer, Entry
from nanoactor.recovery.resuming import local_terminal
from nanoactor.requests.params import SamplingParams, derived_seed


class FleetRequest:
    """A client's request to an ingress, which may run on several replicas one after the other."""

    def __init__(self, entry: Entry, params: SamplingParams, priority: int) -> None:
        """Create the record. `params` must have a seed. `entry` collects the output until the
        client's stream reads it."""
        self.entry, self.params, self.priority = entry, params, priority
        self.token_ids: bytes = b""
        """Token ids of the prompt, int32; empty until it has been tokenized."""
        self.media: tuple[bytes, ...] = ()
        self.block_keys: Sequence[int] = ()
        """Keys of the prompt's full KV blocks, for the router."""
        self.block_hashes: bytes = b""
        """Hashes of the blocks in `block_keys`, 16 bytes each, concatenated."""
        self.prompt_length = 0
        """Number of tokens in the prompt, including those of images if their number is known."""
        self.parts: list[Part] = []
        """Unfinished parts of the request."""
        self.on_end: Callable[[Entry], None] | None = None
        """Called once, when the request has ended and all its statistics are known."""

    @property
    def uid(self) -> int:
        """Unique number of the request in the ingress."""
        return self.entry.submit.uid

    @property
    def tokens_sent(self) -> int:
        """Number of output tokens sent to the reader, summed over all sequences."""
        return sum(len(answer.token_ids) for answer in self.entry.answers)

    def begin(self) -> Part:
        """Create the part that runs the whole request from the beginning."""
        part = Part(self, range(len(self.entry.answers)), is_moved=False)
        self.parts = [part]
        return part

    def move(self, part: Part) -> list[Part]:
        """Replace a part that has lost its replica. Return the parts that must resume elsewhere:
        one per unfinished sequence, or a single one if no output was sent. Empty if the request is
        over."""
        self.parts.remove(part)
        if self.entry.is_over or self.entry.aborted:
            return []
        entry, indices = self.entry, part.answer_indices
        if any(has_begun(entry.answers[index]) for index in indices):
            living = [index for index in indices if entry.answers[index].terminal is None]
            moved = [Part(self, [index], is_moved=True) for index in living]
        else:
            moved = [Part(self, indices, is_moved=True)]
        self.parts += moved
        return moved

    def end_sequence(self, uid: int, reason: str, stop_reason: int | str | None) -> None:
        """Record that the sequence with number `uid` has ended with the finish reason `reason`."""
        answer = self.entry.answer(uid)
        answer.metrics.finished_time = time.monotonic()
        terminal = local_terminal(self.entry, uid, reason)
        self.entry.note_end(uid, dataclasses.replace(terminal, stop_reason=stop_reason))

    def abort(self) -> None:
        """Mark the request as aborted, and end all of its sequences."""
        self.entry.aborted = True
        for uid in self.entry.uids:
            if self.entry.answer(uid).terminal is None:
                self.end_sequence(uid, "abort", None)

    def apply_delta(self, delta: wire.Delta, part: Part) -> None:
        """Append new output to one of the request's sequences, and wake up its reader."""
        uid = self.entry.submit.uid + part.answer_indices[delta.index]
        answer = self.entry.answer(uid)
        if answer.terminal is not None:
            return
        now, metrics = time.monotonic(), answer.metrics
        if delta.token_ids:
            metrics.last_token_time = now
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        if delta.text:
            answer.text.append(delta.text)
        answer.token_ids += wire.bytes_to_ids(delta.token_ids)
        if delta.logprobs and answer.logprobs is not None:
            answer.add_logprobs(wire.unpack_logprobs(delta.logprobs) or [], delta.offsets or [])
        if delta.vector:
            answer.vector = np.frombuffer(delta.vector, np.float32)
        if delta.finish_reason is not None:
            self.end_sequence(uid, delta.finish_reason, delta.stop_reason)
        self.entry.wake()

    def note_stats(self, part: Part, progress: wire.Progress) -> None:
        """Store the statistics that a replica reports at the end of a part."""
        for index in part.answer_indices:
            answer = self.entry.answers[index]
            if answer.terminal is None:
                continue
            answer.terminal = dataclasses.replace(
                answer.terminal,
                cached_tokens=progress.cached_tokens,
                preemptions=progress.preemptions if index == part.answer_indices[0] else 0,
            )
            metrics, first = answer.metrics, answer.metrics.first_token_time
            if progress.queue_seconds >= 0 and first is not None:
                began = metrics.arrival_time + progress.queue_seconds
                metrics.first_scheduled_time = min(began, first)

    def note_progress(self, progress: wire.Progress) -> None:
        """Store what a replica reports at the start of a part: that it has accepted the request,
        and the log-probabilities of the prompt. Does nothing if they are already known."""
        if progress.prompt_token_ids is not None and not self.entry.accepted.is_set():
            # With expanded image placeholders.
            self.entry.prompt_token_ids = wire.bytes_to_ids(progress.prompt_token_ids)
            self.entry.accepted.set()
        if progress.prompt_logprobs is not None and not self.entry.has_prompt_logprobs:
            logprobs = wire.unpack_logprobs(progress.prompt_logprobs)
            self.entry.set_prompt_logprobs(logprobs or [None])


class Part:
    """The work that one replica runs as a stream: a whole request, or a single sequence that
    resumes after the loss of its replica."""

    def __init__(
        self, request: FleetRequest, answer_indices: Sequence[int], is_moved: bool
    ) -> None:
        self.request, self.answer_indices, self.is_moved = request, answer_indices, is_moved
        self.fingerprint = ""
        """Fingerprint of the replica that produced the output so far. Only replicas with the same
        fingerprint may resume the part. Empty if any replica may run it."""
        self.refused_by: set[str] = set()
        """Names of the replicas that had no room for the part."""
        self.waiting_since = time.monotonic()
        """Time (`time.monotonic()`) at which the part was queued, or at which a compatible replica
        was last connected."""

    @property
    def sent_ids(self) -> bytes:
        """Ids of the output tokens already sent to the reader, int32. Empty if the part has several
        sequences."""
        if len(self.answer_indices) > 1:
            return b""
        return np.asarray(self._answer.token_ids, np.int32).tobytes()

    @property
    def _answer(self) -> Answer:
        return self.request.entry.answers[self.answer_indices[0]]

    @property
    def tokens(self) -> int:
        """Number of tokens to prefill before the part continues: its prompt, and the output so
        far."""
        sent = len(self._answer.token_ids) if len(self.answer_indices) == 1 else 0
        return self.request.prompt_length + sent

    def order(self, stream: int, *, is_alone: bool) -> wire.Begin:
        """Create the message that orders a replica to start or resume the part, as stream number
        `stream`. `is_alone` is True if the replica must run nothing else."""
        request, entry = self.request, self.request.entry
        params = request.params
        if entry.submit.spec.prompt_logprobs >= 0 and entry.has_prompt_logprobs:
            params = dataclasses.replace(params, prompt_logprobs=None)  # already sent
        emitted = -1
        if self.is_moved and len(self.answer_indices) == 1:
            assert params.seed is not None
            seed = derived_seed(params.seed, self.answer_indices[0])
            params = dataclasses.replace(params, n=1, seed=seed)
            emitted = sum(map(len, self._answer.text))
        return wire.Begin(
            stream,
            request_id=entry.request_id,
            token_ids=request.token_ids,
            params=wire.params_to_bytes(params),
            priority=request.priority,
            media=request.media,
            emitted_ids=self.sent_ids if emitted >= 0 else b"",
            emitted_characters=emitted,
            is_alone=is_alone,
            is_pooling=entry.submit.spec.pools,
        )


def has_begun(answer: Answer) -> bool:
    """Return True if a sequence has any output or has ended."""
    return bool(answer.token_ids or answer.text or answer.terminal is not None)
