"""The frontend: the request journal, in the user's process and on the user's loop."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nanoactor.actors.config import ActorConfig
from nanoactor.errors import ComputationFailed, EngineOverloaded, InvalidRequest, NanoactorError
from nanoactor.messages import Abort, OutputDelta, Submit, Terminal
from nanoactor.outputs import CompletionOutput, RequestMetrics, RequestOutput, RequestOutputKind
from nanoactor.runtime.actor import Actor, Context, Handler, ReadyInfo
from nanoactor.vision.media import PIECE_BYTES, Media
from nanoactor.vision.messages import MediaPiece, ResendMedia

# A tokenizer other than the first takes prompts longer than this, where there are several.
_LONG_PROMPT_BYTES = 64 * 1024


class Entry:
    """The journal's page of one request: what it asked for, what it was given so far.

    One future wakes its one reader; deltas that come meanwhile merge.
    """

    def __init__(
        self,
        request_id: str,
        submit: Submit,
        kind: RequestOutputKind,
        media: Sequence[Media] = (),
    ) -> None:
        self.request_id = request_id
        self.submit = submit
        self.media = media
        """Its pictures, as they were given: they may be wanted again until it is over."""
        self.kind = kind
        self.metrics = RequestMetrics(time.monotonic())
        self.charge = len(submit.token_ids) or _text_bytes(submit)
        self.media_bytes = sum(one.size for one in media)
        self.prompt_token_ids: list[int] = submit.token_ids.tolist()
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.terminal: Terminal | None = None
        self.error: NanoactorError | None = None
        self.aborted = False
        self._told = (0, 0)
        """How many texts and tokens the reader was given."""
        self._news = False
        self._waiter: asyncio.Future[None] | None = None
        self.accepted = asyncio.Event()
        """Set when the scheduler has taken it, or it has ended without that."""
        self.ended = asyncio.Event()
        """Set when nothing follows."""

    @property
    def over(self) -> bool:
        """Tell whether nothing follows."""
        return self.terminal is not None or self.error is not None

    def wake(self) -> None:
        """There is something to read."""
        self._news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def end(self) -> None:
        """Nothing follows."""
        self.accepted.set()
        self.ended.set()
        self.wake()

    async def next(self) -> RequestOutput:
        """Wait for news and return them; raises the error that ended the request."""
        while not self._news or (self.kind is RequestOutputKind.FINAL_ONLY and not self.over):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            if self.kind is RequestOutputKind.FINAL_ONLY and not self.over:
                self._news = False
        self._news = False
        self.raise_error()
        return self._output()

    def raise_error(self) -> None:
        """Raise what ended the request, if it was an error."""
        if self.error is not None:
            raise self.error
        if self.terminal is not None and self.terminal.reason == "error":
            raise InvalidRequest(self.terminal.error)
        if self.terminal is not None and self.terminal.reason == "failed":
            raise ComputationFailed(self.terminal.error)

    def _output(self) -> RequestOutput:
        texts, ids = self.text, self.token_ids
        if self.kind is RequestOutputKind.DELTA:
            told_texts, told_ids = self._told
            self._told = (len(texts), len(ids))
            texts, ids = texts[told_texts:], ids[told_ids:]
        else:
            ids = ids[:]
        terminal = self.terminal
        completion = CompletionOutput(
            0,
            "".join(texts),
            ids,
            terminal.reason if terminal else None,
            terminal.stop_reason if terminal else None,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.submit.text,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[completion],
            finished=terminal is not None,
            metrics=self.metrics,
            num_cached_tokens=terminal.cached_tokens if terminal else 0,
            num_preemptions=terminal.preemptions if terminal else 0,
        )


def _text_bytes(submit: Submit) -> int:
    """Of the prompt; templates write tools and other options into it too."""
    text = submit.text if submit.chat is None else submit.chat + submit.chat_options
    return len((text or "").encode())


class FrontendActor(Actor):
    """Keeps the journal. The engine's public face calls it; it never waits."""

    def __init__(self, config: ActorConfig) -> None:
        self._config = config.engine
        self._sees = config.files.images is not None
        self._entries: dict[int, Entry] = {}
        self._by_id: dict[str, Entry] = {}
        """The same by what their users call them."""
        self._waiting_requests: set[int] = set()
        """Requests without a first token."""
        self._waiting_tokens = self._waiting_media_bytes = 0
        self._untokenized: dict[int, tuple[int, int]] = {}
        """(tokenizer, bytes) of requests that no tokenizer has answered."""
        self._load = [0] * self._config.num_tokenizers
        self._next_uid = 0
        self._step_at = 0
        self._sending: dict[int, deque[MediaPiece]] = {}
        """By vision worker: pieces of pictures for which its edge had no room; of each item the
        next one, ..."""
        self._data: dict[tuple[int, int], memoryview] = {}
        """... and all bytes of those."""
        self._progress: asyncio.Event | None = None
        """Set, and forgotten, when a request no longer waits; None where nobody wants to know."""

    def start(self, context: Context, ready: Mapping[str, ReadyInfo]) -> None:
        """Find the edges."""
        super().start(context, ready)
        self._tokenizers = [
            context.outbox(f"tokenizer.{index}") for index in range(self._config.num_tokenizers)
        ]
        self._scheduler = context.outbox("scheduler")
        workers = self._config.num_vision_workers if self._sees else 0
        self._vision = [context.outbox(f"vision.{index}") for index in range(workers)]
        self._submit_kind = context.track.kind("submit", "uid")

    def handlers(self) -> Mapping[type, Handler]:
        """News from the detokenizer, and what vision workers lack."""
        return {OutputDelta: self._deliver, ResendMedia: self._resend}

    def span_names(self) -> Mapping[type, str]:
        """News for the readers; what they do with it is theirs."""
        return {OutputDelta: "deliver"}

    # -- from the user --------------------------------------------------------------------

    def _check_room(self, entries: Sequence[Entry]) -> None:
        """Raise `EngineOverloaded` where the queue's bounds leave no room for these."""
        config, requests = self._config, len(entries)
        charge, media = sum(e.charge for e in entries), sum(e.media_bytes for e in entries)
        if requests > config.max_waiting_requests:
            raise InvalidRequest(
                f"{requests} prompts at once, but at most {config.max_waiting_requests} requests "
                "may wait (max_waiting_requests)"
            )
        if len(self._waiting_requests) + requests > config.max_waiting_requests:
            raise EngineOverloaded(
                f"{len(self._waiting_requests)} requests wait already (max_waiting_requests)"
            )
        if self._waiting_tokens and self._waiting_tokens + charge > config.max_waiting_tokens:
            raise EngineOverloaded(
                f"prompts of {self._waiting_tokens} tokens wait already (max_waiting_tokens is "
                f"{config.max_waiting_tokens})"
            )
        held = self._waiting_media_bytes
        if held and held + media > config.max_waiting_media_bytes:
            raise EngineOverloaded(
                f"pictures of {held} bytes wait already (max_waiting_media_bytes is "
                f"{config.max_waiting_media_bytes})"
            )

    def submit(self, make: Callable[[int], Entry]) -> Entry:
        """Make a request with the next number, enter it into the journal, send it on its way.

        A refused request takes no number: the scheduler relies on there being no gaps.
        """
        return self.submit_all([make])[0]

    def submit_all(self, makes: Sequence[Callable[[int], Entry]]) -> list[Entry]:
        """The same for several, which find room all together or not at all."""
        entries = [make(uid) for uid, make in enumerate(makes, self._next_uid)]
        self._check_room(entries)
        for entry in entries:
            self._send(entry)
        return entries

    def _send(self, entry: Entry) -> None:
        uid, begin = entry.submit.uid, time.monotonic_ns()
        tokenizer = self._choose_tokenizer(entry.charge)
        self._tokenizers[tokenizer].send(entry.submit)
        for item in range(len(entry.media)):
            self._send_media(entry, item, tokenizer)
        self._next_uid += 1
        self._load[tokenizer] += entry.charge
        self._untokenized[uid] = (tokenizer, entry.charge)
        self._entries[uid] = self._by_id[entry.request_id] = entry
        self._waiting_requests.add(uid)
        self._waiting_tokens += entry.charge
        self._waiting_media_bytes += entry.media_bytes
        self.context.track.add(self._submit_kind, uid, begin, time.monotonic_ns())

    # -- pictures -------------------------------------------------------------------------

    def _send_media(self, entry: Entry, item: int, tokenizer: int) -> None:
        """Send a picture's bytes, in pieces, as its worker's edge has room for them."""
        uid, media = entry.submit.uid, entry.media[item]
        worker = uid % len(self._vision)
        data = memoryview(media.data).cast("B")
        empty = np.empty(0, np.uint8)
        piece = MediaPiece(
            uid,
            item,
            tokenizer,
            form=media.form,
            shape=media.shape,
            area=media.area,
            frames=media.frames,
            size=len(data),
            offset=0,
            data=empty,
        )
        self._data[uid, item] = data
        self._sending.setdefault(worker, deque()).append(piece)
        self._send_pieces(worker)

    def _send_pieces(self, worker: int) -> None:
        pieces, outbox = self._sending.get(worker, deque()), self._vision[worker]
        while pieces and outbox.ready:
            piece = pieces.popleft()
            place, end = (piece.uid, piece.item), piece.offset + PIECE_BYTES
            data = np.frombuffer(self._data[place][piece.offset : end], np.uint8)
            outbox.send(dataclasses.replace(piece, data=data))
            if end < piece.size:
                pieces.appendleft(dataclasses.replace(piece, offset=end))
            else:
                del self._data[place]

    def _resend(self, event: ResendMedia) -> None:
        """A worker has forgotten some bytes. Of a request that is over nobody wants them."""
        for uid, item in zip(event.uids.tolist(), event.items.tolist(), strict=True):
            entry = self._entries.get(uid)
            if entry is not None and (uid, item) not in self._data:
                self._send_media(entry, item, -1)

    def on_ready(self, outbox: Any) -> None:
        """An edge has room again."""
        for worker, mine in enumerate(self._vision):
            if mine is outbox:
                self._send_pieces(worker)

    # -- the queue ------------------------------------------------------------------------

    async def wait_for_capacity(self) -> None:
        """Wait until a waiting request has got its first token, or is over."""
        if self._waiting_requests:
            self._progress = self._progress or asyncio.Event()
            await self._progress.wait()

    def _choose_tokenizer(self, size: int) -> int:
        """The least loaded; the first never takes a long prompt, so that short ones pass it."""
        first = 1 if size > _LONG_PROMPT_BYTES and len(self._load) > 1 else 0
        return min(range(first, len(self._load)), key=self._load.__getitem__)

    def abort(self, uid: int) -> None:
        """Ask for a request's end; its entry lives until the terminal that acknowledges it."""
        entry = self._entries.get(uid)
        if entry is not None and not entry.aborted:
            entry.aborted = True
            self._scheduler.send(Abort(uid))
            waits = entry.submit.chat is not None or entry.media
            if waits and uid in self._untokenized:
                self._tokenizers[self._untokenized[uid][0]].send(Abort(uid))

    def fail_all(self, error: NanoactorError) -> None:
        """The engine is gone: every waiting request gets the error."""
        for entry in self._entries.values():
            entry.error = error
            entry.end()
        self._entries.clear()
        self._sending.clear()
        self._data.clear()
        self._by_id.clear()
        self._waiting_requests.clear()
        self._waiting_tokens = self._waiting_media_bytes = 0
        self._tell_progress()

    def entry_of(self, request_id: str) -> Entry | None:
        """The living request with this id."""
        return self._by_id.get(request_id)

    @property
    def has_work(self) -> bool:
        """Tell whether a request lives."""
        return bool(self._entries)

    # -- from the detokenizer -------------------------------------------------------------

    def _deliver(self, chunk: OutputDelta) -> None:
        self._step_at = time.monotonic_ns()
        for opened in chunk.opened:
            self._opened(opened.uid, opened.prompt_token_ids.tolist())
        ids: list[int] = chunk.token_ids.tolist()
        at = 0
        for uid, text, count in zip(
            chunk.uids.tolist(), chunk.texts, chunk.counts.tolist(), strict=True
        ):
            self._delta(uid, text, ids[at : at + count])
            at += count
        for terminal in chunk.terminals:
            self._terminal(terminal)

    def _opened(self, uid: int, prompt: list[int]) -> None:
        self._tokenized(uid)
        entry = self._entries.get(uid)
        if entry is not None:
            entry.prompt_token_ids = prompt
            entry.accepted.set()
            if uid in self._waiting_requests:
                self._waiting_tokens += len(prompt) - entry.charge
                entry.charge = len(prompt)

    def _tokenized(self, uid: int) -> None:
        tokenizer, size = self._untokenized.pop(uid, (0, 0))
        self._load[tokenizer] -= size

    def _delta(self, uid: int, text: str, ids: list[int]) -> None:
        entry = self._entries.get(uid)
        if entry is None:
            return
        now, metrics = time.monotonic(), entry.metrics
        if ids:
            metrics.last_token_time = now
        if metrics.first_token_time is None:
            metrics.first_token_time = now
            self._no_longer_waiting(entry)
        if text:
            entry.text.append(text)
        entry.token_ids += ids
        entry.wake()

    def _no_longer_waiting(self, entry: Entry) -> None:
        if entry.submit.uid in self._waiting_requests:
            self._waiting_requests.remove(entry.submit.uid)
            self._waiting_tokens -= entry.charge
            self._waiting_media_bytes -= entry.media_bytes
            self._tell_progress()

    def _tell_progress(self) -> None:
        if self._progress is not None:
            self._progress.set()
            self._progress = None

    def _terminal(self, terminal: Terminal) -> None:
        self._tokenized(terminal.uid)
        entry = self._entries.pop(terminal.uid, None)
        if entry is not None:
            self._by_id.pop(entry.request_id, None)
            self._no_longer_waiting(entry)
            entry.terminal = terminal
            entry.metrics.finished_time = time.monotonic()
            if terminal.began >= 0:
                entry.metrics.first_scheduled_time = terminal.began * 1e-9
            entry.end()

    def statistics(self) -> dict[str, Any]:
        """Living requests, those without a first token, those that no tokenizer has answered;
        when news last came, in ns of the monotonic clock."""
        return {
            "entries": len(self._entries),
            "waiting_requests": len(self._waiting_requests),
            "waiting_tokens": self._waiting_tokens,
            "waiting_media_bytes": self._waiting_media_bytes,
            "untokenized": len(self._untokenized),
            "media_sending": len(self._data),
            "step_at": self._step_at,
        }
