"""The journal of live requests, and its entries: what was submitted, and the output emitted so
far."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Collection, Sequence

from nanoactor.errors import (
    ComputationFailed,
    HoldExpired,
    InvalidRequest,
    NanoactorError,
    OutOfResources,
)
from nanoactor.messages.engine import Submit, Terminal
from nanoactor.messages.pooling import Float32
from nanoactor.recovery.prompt_logprobs import PromptLogprobs
from nanoactor.requests.outputs import (
    CompletionOutput,
    Logprobs,
    RequestMetrics,
    RequestOutput,
    RequestOutputKind,
)
from nanoactor.requests.params import SamplingParams
from nanoactor.text.scores import ReportedRun
from nanoactor.vision.media import Media


class Entry:
    """The journal entry of one request: its submission, and the output emitted so far. It is the
    only record that survives a restart of the engine's processes.

    An entry has a single reader. New output wakes it through a future; output that arrives before
    the reader's next call is merged.
    """

    def __init__(
        self,
        request_id: str,
        submit: Submit,
        kind: RequestOutputKind,
        media: Sequence[Media] = (),
        answers: int = 1,
        is_moved: bool = False,
    ) -> None:
        """Create an entry without output. If `is_moved` is True, the request began in another
        engine and resumes after the output in `submit`."""
        self.request_id = request_id
        self.submit = submit
        self.media = media
        """The request's images and videos, kept until the request finishes because they may have
        to be sent again."""
        self.kind = kind
        self.is_moved = is_moved
        """True if the request began in another engine. It was accepted there, so it is not rejected
        here for lack of room in the queue."""
        self._arrival = time.monotonic()
        self.charge = len(submit.token_ids) or _text_bytes(submit)
        self.media_bytes = sum(one.size for one in media)
        self.prompt_token_ids: list[int] = submit.token_ids.tolist()
        scored = submit.spec.logprobs >= 0
        self.answers = [Answer(index, scored, self._arrival) for index in range(answers)]
        self.continued = 0
        """Number of times that the caller has resumed this request's held sequences."""
        self.error: NanoactorError | None = None
        self.aborted = False
        self.has_left_queue = False
        """True if the request no longer counts as waiting, because its first token has arrived or
        it has ended."""
        self._prompt_logprobs = PromptLogprobs(submit.spec.prompt_logprobs >= 0)
        self._has_news = False
        self._waiter: asyncio.Future[None] | None = None
        self.accepted = asyncio.Event()
        """Event that is set once the scheduler has accepted the request, or once the request has
        ended without being accepted."""
        self.ended = asyncio.Event()
        """Event that is set once no more output will follow."""
        self.on_end: Callable[[Entry], None] | None = None
        """Function to call once, when the request has ended; None if telemetry is off."""

    @property
    def metrics(self) -> RequestMetrics:
        """Times of the request's events. With several answers: the earliest start, the earliest
        first token, the latest last token and the latest end."""
        every = [answer.metrics for answer in self.answers]
        if len(every) == 1:
            return every[0]
        ended = [one.finished_time for one in every]
        return RequestMetrics(
            self._arrival,
            min(filter(None, (one.first_scheduled_time for one in every)), default=None),
            min(filter(None, (one.first_token_time for one in every)), default=None),
            max(filter(None, (one.last_token_time for one in every)), default=None),
            None if None in ended else max(filter(None, ended)),
        )

    @property
    def waiting_uids(self) -> list[int]:
        """Uids that count as waiting requests. If the sequences pause after each token
        (`RequestSpec.held`), only the first uid counts, because they all start together and are
        answered together."""
        return [self.submit.uid] if self.submit.spec.held else list(self.uids)

    @property
    def is_held(self) -> bool:
        """True if the request is paused: each of its live sequences has emitted a token since the
        request was last resumed."""
        live = [answer for answer in self.answers if answer.terminal is None]
        due = all(len(answer.token_ids) > self.continued for answer in live)
        return self.submit.spec.held and bool(live) and due

    async def wait_until_held(self) -> None:
        """Wait until the request is paused or finished. Raises the error that ended the request."""
        while not (self.is_held or self.is_over):
            await self.wait_for_news()
            self._has_news = False
        self.raise_error()

    @property
    def uids(self) -> range:
        """Uids of the request's sequences."""
        return range(self.submit.uid, self.submit.uid + len(self.answers))

    def answer(self, uid: int) -> Answer:
        """Return the answer of the sequence with this uid."""
        return self.answers[uid - self.submit.uid]

    @property
    def is_over(self) -> bool:
        """True if the request has finished: it has failed, or all of its sequences have ended."""
        return self.error is not None or all(one.terminal is not None for one in self.answers)

    def wake(self) -> None:
        """Record that there is new output to read, and wake the reader."""
        self._has_news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def end(self) -> None:
        """Mark the request as finished and wake everything that waits for it."""
        self.accepted.set()
        self.ended.set()
        self.wake()
        if self.on_end is not None:
            on_end, self.on_end = self.on_end, None
            on_end(self)

    def note_end(self, uid: int, terminal: Terminal) -> None:
        """Record the end of one sequence. If the sequence failed, its error becomes the error of
        the request, unless the request already has one."""
        self.answer(uid).terminal = terminal
        if terminal.reason == "error":
            self.error = self.error or InvalidRequest(terminal.error)
        elif terminal.reason == "failed":
            self.error = self.error or ComputationFailed(terminal.error)
        elif terminal.reason == "expired":
            self.error = self.error or HoldExpired(terminal.error)
        elif terminal.reason == "refused":
            self.error = self.error or OutOfResources(terminal.error)
        if self.is_over:
            self.end()
        else:
            self.wake()

    async def next(self) -> RequestOutput:
        """Wait for new output and return it. Raises the error that ended the request, if any."""
        await self.wait_for_news()
        self._has_news = False
        self.raise_error()
        return self._output()

    async def wait_for_news(self) -> None:
        """Wait until there is new output to read, without reading it."""
        while not self._has_news or self._must_wait:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    @property
    def _must_wait(self) -> bool:
        """True if the reader should keep waiting although there is new output."""
        if self.is_over:
            return False
        return self.kind is RequestOutputKind.FINAL_ONLY or not self.has_prompt_logprobs

    def forget_partial_scores(self) -> None:
        """Drop incomplete prompt log-probabilities after a restart, because all of them are sent
        again."""
        self._prompt_logprobs.forget_partial(len(self.prompt_token_ids))

    @property
    def has_prompt_logprobs(self) -> bool:
        """True if the prompt's log-probabilities are complete or were not requested."""
        return self._prompt_logprobs.is_complete(len(self.prompt_token_ids))

    def raise_error(self) -> None:
        """Raise the error that ended the request, if there is one."""
        if self.error is not None:
            # Requests that end together share the error object. Without this, its traceback would
            # grow with each raise.
            raise self.error.with_traceback(None)

    def add_prompt_logprobs(self, run: ReportedRun) -> None:
        """Append log-probabilities for the next prompt tokens."""
        self._prompt_logprobs.add(run, self.prompt_token_ids)
        if self.has_prompt_logprobs and self._has_news:  # new output has waited for these
            self.wake()

    def set_prompt_logprobs(self, logprobs: list[Logprobs | None]) -> None:
        """Set the log-probabilities of all prompt tokens at once."""
        self._prompt_logprobs.values = logprobs
        self.wake()

    def _output(self) -> RequestOutput:
        delta = self.kind is RequestOutputKind.DELTA
        include_all = not delta or len(self.answers) == 1
        outputs = [
            answer.output(delta) for answer in self.answers if include_all or answer.has_undelivered
        ]
        first = self.answers[0].terminal
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.submit.text,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=self.is_over,
            metrics=self.metrics,
            num_cached_tokens=first.cached_tokens if first else 0,
            num_preemptions=sum(one.terminal.preemptions for one in self.answers if one.terminal),
            prompt_logprobs=self._prompt_logprobs.emit(len(self.prompt_token_ids), delta),
        )


def entry_maker(
    built: tuple[Submit, tuple[Media, ...]],
    params: SamplingParams,
    request_id: str | None,
    id_prefix: str,
    is_moved: bool = False,
) -> Callable[[int], Entry]:
    """Return a function that creates the journal entry of a checked request, given the request's
    first uid. A request without a `request_id` is named after `id_prefix` and its uid. `is_moved`
    is True if the request began in another engine."""
    checked, media = built

    def make(uid: int) -> Entry:
        submit = dataclasses.replace(checked, uid=uid)
        name = request_id or f"{id_prefix}-{uid}"
        return Entry(name, submit, params.output_kind, media, params.n, is_moved)

    return make


class Answer:
    """One of the completions (sequences) of a request, with its output so far."""

    def __init__(self, index: int, scored: bool, arrival: float) -> None:
        """Create an answer without output. `scored` is True if its tokens come with
        log-probabilities; `arrival` is the arrival time of the request, in seconds of the monotonic
        clock."""
        self.index = index
        self.metrics = RequestMetrics(arrival)
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[Logprobs] | None = [] if scored else None
        self.offsets: list[int] = []
        self.vector: Float32 | None = None
        """The pooled vector, if this is a pooling request."""
        self.terminal: Terminal | None = None
        self._sum = 0.0
        self._delivered = (0, 0)
        """Number of text pieces and of tokens that the reader has received."""
        self._has_delivered_end = False
        """True if the reader has received the end of the answer."""

    def add_logprob_run(self, run: ReportedRun) -> None:
        """Append the log-probabilities of the newest tokens, as received from the detokenizer."""
        assert self.logprobs is not None
        tokens = self.token_ids[len(self.logprobs) :]
        pairs = zip(tokens, run.logprobs, strict=True)
        self.add_logprobs([{token: own} | top for token, (own, top) in pairs], run.offsets)

    def add_logprobs(self, logprobs: Sequence[Logprobs], offsets: Sequence[int]) -> None:
        """Append the log-probabilities of the newest tokens and the tokens' text offsets, in
        characters. In each dict, the sampled token comes first."""
        assert self.logprobs is not None
        self.logprobs += logprobs
        self.offsets += offsets
        for each in logprobs:
            self._sum += next(iter(each.values())).logprob

    @property
    def has_undelivered(self) -> bool:
        """True if there is output, or the end, that a reader of deltas has not received yet."""
        ended = self.terminal is not None and not self._has_delivered_end
        return ended or self._delivered != (len(self.text), len(self.token_ids))

    def output(self, delta: bool) -> CompletionOutput:
        """Return the answer's output: if `delta` is True, what the reader has not received yet,
        else everything so far."""
        texts, tokens = self._delivered if delta else (0, 0)
        self._delivered = len(self.text), len(self.token_ids)
        terminal, scored = self.terminal, self.logprobs is not None
        self._has_delivered_end = terminal is not None
        return CompletionOutput(
            self.index,
            "".join(self.text[texts:]),
            self.token_ids[tokens:],
            terminal.reason if terminal else None,
            terminal.stop_reason if terminal else None,
            cumulative_logprob=self._sum if scored else None,
            logprobs=self.logprobs[tokens:] if self.logprobs is not None else None,
            text_offsets=self.offsets[tokens:] if scored else None,
        )


class Journal:
    """The entries of all requests that the engine has not released yet. The frontend owns it; after
    a restart, the unfinished requests are sent again from it."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        """The entry of each live sequence, by uid."""
        self._by_id: dict[str, Entry] = {}
        """Entries by request id, for requests that have not ended for their reader."""
        self.next_uid = 0
        """First uid of the next request. The scheduler relies on uids without gaps."""

    def __len__(self) -> int:
        """Return the number of live sequences."""
        return len(self._entries)

    @property
    def uids(self) -> Collection[int]:
        """Uids of the live sequences."""
        return self._entries.keys()

    @property
    def entries(self) -> list[Entry]:
        """The entries of all live requests, each once."""
        return list({id(entry): entry for entry in self._entries.values()}.values())

    def add(self, entry: Entry) -> None:
        """Add a new request, whose uids begin with `next_uid`."""
        self.next_uid = entry.uids.stop
        self._entries |= dict.fromkeys(entry.uids, entry)
        self._by_id[entry.request_id] = entry

    def find(self, uid: int) -> Entry | None:
        """Return the entry of a live sequence; None if the sequence is not live."""
        return self._entries.get(uid)

    def find_unfinished(self, uid: int) -> Entry | None:
        """Return the entry of a sequence; None if the sequence has already ended for its reader.
        The engine may still emit output of it for a while."""
        entry = self._entries.get(uid)
        return entry if entry is not None and entry.answer(uid).terminal is None else None

    def find_by_id(self, request_id: str) -> Entry | None:
        """Return the entry of the live request with this id; None if there is none."""
        return self._by_id.get(request_id)

    def live_uids(self, entry: Entry) -> list[int]:
        """Return the uids of a request's live sequences."""
        return [uid for uid in entry.uids if self._entries.get(uid) is entry]

    def remove(self, uid: int) -> Entry | None:
        """Remove a sequence that has ended, and return its entry; None if it is not live."""
        return self._entries.pop(uid, None)

    def forget_id(self, entry: Entry) -> None:
        """Free the id of a request that has ended for its reader, so that it can be used again."""
        if self._by_id.get(entry.request_id) is entry:  # otherwise the id was reused
            del self._by_id[entry.request_id]

    def clear(self) -> None:
        """Remove all requests, because the engine is gone."""
        self._entries.clear()
        self._by_id.clear()


def _text_bytes(submit: Submit) -> int:
    """Return the size of the prompt's text in bytes (UTF-8); for a chat, this includes the options
    of the chat template."""
    text = submit.text if submit.chat is None else submit.chat + submit.chat_options
    return len((text or "").encode())
