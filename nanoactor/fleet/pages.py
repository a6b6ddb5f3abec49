"""An ingress's journal: each client's request, the output sent to the client, and the parts that
run it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from nanoactor.fleet import wire
from nanoactor.recovery.journal import Answer, Entry
from nanoactor.recovery.resuming import own_terminal
from nanoactor.requests.params import SamplingParams, derived_seed


class Page:
    """One request of a client."""

    def __init__(self, entry: Entry, params: SamplingParams, priority: int) -> None:
        """`params` must have a seed. The reader reads the output from `entry`."""
        self.entry, self.params, self.priority = entry, params, priority
        self.token_ids: bytes = b""
        """The prompt's token ids, int32; empty until it is tokenized."""
        self.media: tuple[bytes, ...] = ()
        self.hashes: Sequence[int] = ()
        """Keys of the prompt's full blocks, for the router."""
        self.blocks: bytes = b""
        """Hashes of the same blocks, 16 bytes each."""
        self.length = 0
        """Number of tokens of the prompt, including those of its pictures if they are known."""
        self.parts: list[Part] = []
        """Unfinished parts of the request."""

    @property
    def uid(self) -> int:
        """Return the number that the ingress has given to the request."""
        return self.entry.submit.uid

    @property
    def told(self) -> int:
        """Return the number of tokens sent to the reader, over all sequences."""
        return sum(len(answer.token_ids) for answer in self.entry.answers)

    def begin(self) -> Part:
        """Create the part that runs the whole request from its start."""
        part = Part(self, range(len(self.entry.answers)), is_moved=False)
        self.parts = [part]
        return part

    def move(self, part: Part) -> list[Part]:
        """Handle the loss of the replica that ran a part. Return the parts to resume elsewhere."""
        self.parts.remove(part)
        if self.entry.over or self.entry.aborted:
            return []
        entry, indices = self.entry, part.answers
        if any(has_begun(entry.answers[index]) for index in indices):
            living = [index for index in indices if entry.answers[index].terminal is None]
            moved = [Part(self, [index], is_moved=True) for index in living]
        else:
            moved = [Part(self, indices, is_moved=True)]
        self.parts += moved
        return moved

    def end(self, uid: int, reason: str, stop_reason: int | str | None) -> None:
        """Record the end of one of the request's sequences."""
        answer = self.entry.answer(uid)
        answer.metrics.finished_time = time.monotonic()
        terminal = own_terminal(self.entry, uid, reason)
        self.entry.note_end(uid, dataclasses.replace(terminal, stop_reason=stop_reason))

    def abort(self) -> None:
        """Mark the request as aborted, and end its sequences."""
        self.entry.aborted = True
        for uid in self.entry.uids:
            if self.entry.answer(uid).terminal is None:
                self.end(uid, "abort", None)

    def take(self, delta: wire.Delta, part: Part) -> None:
        """Append a delta to the output of one of the request's sequences."""
        uid = self.entry.submit.uid + part.answers[delta.index]
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
            self.end(uid, delta.finish_reason, delta.stop_reason)
        self.entry.wake()

    def note_figures(self, part: Part, progress: wire.Progress) -> None:
        """Record the figures that are known only when a part has finished."""
        for index in part.answers:
            answer = self.entry.answers[index]
            if answer.terminal is None:
                continue
            answer.terminal = dataclasses.replace(
                answer.terminal,
                cached_tokens=progress.cached_tokens,
                preemptions=progress.preemptions if index == part.answers[0] else 0,
            )
            metrics, first = answer.metrics, answer.metrics.first_token_time
            if progress.queued >= 0 and first is not None:
                began = metrics.arrival_time + progress.queued
                metrics.first_scheduled_time = min(began, first)

    def note_accepted(self, prompt: bytes) -> None:
        """Record that a replica has accepted the request, and its expanded prompt."""
        self.entry.prompt_token_ids = wire.bytes_to_ids(prompt)
        self.entry.accepted.set()


class Part:
    """The unit that runs on one replica: a whole request, or one resumed sequence of it."""

    def __init__(self, page: Page, answers: Sequence[int], is_moved: bool) -> None:
        self.page, self.answers, self.is_moved = page, answers, is_moved
        self.fingerprint = ""
        """Fingerprint of the replica that emitted its output: it resumes only on an equal one.
        Empty if it can run on any replica."""
        self.refused_by: set[str] = set()
        """Names of the replicas that had no room for the part."""
        self.waits_since = time.monotonic()
        """Last time at which a replica could have run the part, even if only after a wait."""

    @property
    def told_ids(self) -> bytes:
        """Return the ids, int32, of the tokens that were sent to the sequence's reader; empty if
        the part has several sequences."""
        if len(self.answers) > 1:
            return b""
        return np.asarray(self._answer.token_ids, np.int32).tobytes()

    @property
    def _answer(self) -> Answer:
        return self.page.entry.answers[self.answers[0]]

    @property
    def tokens(self) -> int:
        """Return the number of tokens to prefill before the part continues: prompt and output."""
        told = len(self._answer.token_ids) if len(self.answers) == 1 else 0
        return self.page.length + told

    def order(self, stream: int, *, is_alone: bool) -> wire.Begin:
        """Return the order that starts or resumes the part."""
        page, entry = self.page, self.page.entry
        params = page.params
        if entry.submit.spec.prompt_logprobs >= 0 and entry.has_prompt_logprobs:
            params = dataclasses.replace(params, prompt_logprobs=None)  # already sent
        told = -1
        if self.is_moved and len(self.answers) == 1:
            assert params.seed is not None
            seed = derived_seed(params.seed, self.answers[0])
            params = dataclasses.replace(params, n=1, seed=seed)
            told = sum(map(len, self._answer.text))
        return wire.Begin(
            stream,
            request_id=entry.request_id,
            token_ids=page.token_ids,
            params=wire.params_to_bytes(params),
            priority=page.priority,
            media=page.media,
            told_ids=self.told_ids if told >= 0 else b"",
            told_characters=told,
            is_alone=is_alone,
            pools=entry.submit.spec.pools,
        )


def has_begun(answer: Answer) -> bool:
    """Return True if a sequence has emitted output or has ended."""
    return bool(answer.token_ids or answer.text or answer.terminal is not None)
