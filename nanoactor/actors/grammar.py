"""The grammar's shell: tokens in, masks out; grammars are compiled on a thread."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from nanoactor.actors.config import MASKS_AT_ONCE, ActorConfig
from nanoactor.errors import InvalidRequest
from nanoactor.grammar.book import AnswerMatcher, GrammarBook
from nanoactor.grammar.messages import BeginGrammar, CloseGrammars, GrammarTokens, OpenGrammar
from nanoactor.runtime.actor import Actor, Context, Handler, ReadyInfo

# The latest masks, whose times are told.
_TIMES = 4096


class GrammarActor(Actor):
    """Owns nothing: an answer's state follows from its grammar and its tokens."""

    def __init__(self, config: ActorConfig) -> None:
        self._config = config
        self._book = self._new_book()
        self._work: queue.SimpleQueue[tuple[GrammarBook, int, str] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._masks = 0
        self._times: deque[int] = deque(maxlen=_TIMES)
        self._compiled = 0
        self._compile_ns = 0

    def _new_book(self) -> GrammarBook:
        files = self._config.files
        return GrammarBook(-(-files.config.vocab_size // 32), files.eos_token_ids)

    def renew(self) -> None:
        """Keep what was read of the vocabulary, and compiled grammars."""
        fill, self._book = self._book.fill, self._new_book()
        self._book.fill = fill

    def start(self, context: Context, ready: Mapping[str, ReadyInfo]) -> None:
        """Find the edges; begin to read the vocabulary."""
        super().start(context, ready)
        self._runners = context.outbox("runners")
        self._scheduler = context.outbox("scheduler")
        if self._thread is None:
            self._start_thread()

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._compile_all, name="compile", daemon=True)
        self._thread.start()

    def handlers(self) -> Mapping[type, Handler]:
        """Answers begin, go on, and end."""
        return {
            OpenGrammar: self._open,
            BeginGrammar: self._begin,
            GrammarTokens: self._take,
            CloseGrammars: self._close,
        }

    def span_names(self) -> Mapping[type, str]:
        """The masks are what others wait for."""
        return {
            OpenGrammar: "open grammar",
            BeginGrammar: "begin grammar",
            GrammarTokens: "mask",
            CloseGrammars: "close grammar",
        }

    def _open(self, event: OpenGrammar) -> None:
        self._book.open(event)
        self._work.put((self._book, event.uid, event.grammar))

    def _begin(self, event: BeginGrammar) -> None:
        self._book.begin(event)
        self._report()

    def _take(self, event: GrammarTokens) -> None:
        begin = time.monotonic_ns()
        self._book.take(event)
        count = len(event.uids)
        self._masks += count
        self._times += [(time.monotonic_ns() - begin) // count] * count
        self._report()

    def _close(self, event: CloseGrammars) -> None:
        self._book.close(event)
        self._report()

    # -- the thread -----------------------------------------------------------------------

    def _compile_all(self) -> None:
        """Compile one grammar after the other: the parser lets go of the interpreter while it
        does, so that masks of others are made meanwhile."""
        from nanoactor.grammar.compiling import GrammarCompiler

        compiler = GrammarCompiler(self._config.files)
        if fill := compiler.parallel_fill(len(os.sched_getaffinity(0))):
            self._book.fill = fill
        while (work := self._work.get()) is not None and not self._stopping:
            book, uid, text = work
            if book is not self._book:  # everybody began anew
                continue
            begin = time.monotonic_ns()
            try:
                found: AnswerMatcher | InvalidRequest = compiler.matcher(text)
            except InvalidRequest as error:
                found = error
            except BaseException as error:
                self.context.call_soon(self.context.fail, error)
                return
            if not self._stopping:
                took = time.monotonic_ns() - begin
                self.context.call_soon(self._note, book, uid, found, took)

    def _note(
        self, book: GrammarBook, uid: int, found: AnswerMatcher | InvalidRequest, took: int
    ) -> None:
        self._compiled += 1
        self._compile_ns += took
        if book is self._book:
            self._book.note_compiled(uid, found)
        self._report()

    # -- the edges ------------------------------------------------------------------------

    def _report(self) -> None:
        """Masks to the runners, the rest to the scheduler; each waits until its edge has room."""
        while self._runners.ready:
            if (masks := self._book.take_masks(MASKS_AT_ONCE)) is None:
                break
            self._runners.send(masks)
        if self._scheduler.ready and (runs := self._book.take_runs()) is not None:
            self._scheduler.send(runs)
        if self._scheduler.ready and (failed := self._book.take_failures()) is not None:
            self._scheduler.send(failed)

    def on_ready(self, outbox: Any) -> None:
        """An edge has room again."""
        self._report()

    def stop(self) -> None:
        """End the thread."""
        self._stopping = True
        self._work.put(None)
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def statistics(self) -> dict[str, Any]:
        """Answers that are open; grammars prepared and the seconds that took; masks, and the
        microseconds that the latest took, those made together taken as equal: the median, and 99
        of 100."""
        times = sorted(self._times) or [0]
        return {
            "open": len(self._book),
            "grammars": self._compiled,
            "grammar_seconds": self._compile_ns * 1e-9,
            "masks": self._masks,
            "mask_us_p50": times[len(times) // 2] / 1000,
            "mask_us_p99": times[len(times) * 99 // 100] / 1000,
        }
