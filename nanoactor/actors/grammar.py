"""The grammar actor: turns tokens into masks, and compiles grammars on threads."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanoactor.errors import InvalidRequest, OutOfResources, out_of_resources
from nanoactor.grammar.book import AnswerMatcher, Fill, GrammarBook, Refusal
from nanoactor.messages.grammar import BeginGrammar, CloseGrammars, GrammarTokens, OpenGrammar
from nanoactor.runtime.actor import Actor, Context, Handler, ReadyInfo
from nanoactor.runtime.errors import machine_refuses
from nanoactor.runtime.native import native_calls
from nanoactor.runtime.worker_thread import WorkerThread
from nanoactor.setup.actors import MASKS_AT_ONCE, ActorConfig

if TYPE_CHECKING:
    from nanoactor.grammar.compiling import GrammarCompiler

log = logging.getLogger("nanoactor.grammar")

# Number of latest masks with recorded times.
_TIMES = 4096
# Number of masks that the parser's threads compute at once.
_BATCH = 16
# Maximum length, in characters, of a small grammar; others are compiled on a separate thread.
_SMALL_GRAMMAR = 16 * 1024
_FAILED = "the grammar could not be parsed; the log has the parser's error"


def _made(config: ActorConfig) -> GrammarCompiler | InvalidRequest:
    """Return a grammar compiler, or the error that explains why there is none."""
    try:
        with native_calls():
            from nanoactor.grammar.compiling import GrammarCompiler

            return GrammarCompiler(config.files)
    except Exception as error:
        log.error(
            "the grammar compiler cannot be created, so structured outputs will be refused",
            exc_info=error,
        )
        line = " ".join(str(error).split())[:300]
        return InvalidRequest(f"this model does not support structured outputs: {line}")


class GrammarActor(Actor):
    """Keeps no irreplaceable state: a sequence's state follows from its grammar and its tokens."""

    def __init__(self, config: ActorConfig) -> None:
        self._config = config
        self._book = self._new_book()
        # Large grammars take long to compile: small ones must not wait for them.
        self._small = WorkerThread("compile")
        self._large = WorkerThread("compile large")
        self._compiler: GrammarCompiler | InvalidRequest | None = None
        """Created by the first thread that needs it; if it is an error, every grammar is rejected
        with that error."""
        self._making = threading.Lock()
        self._reads = self._turning = False
        """Whether reading the vocabulary has been started; whether another turn is scheduled."""
        self._masks = 0
        self._times: deque[int] = deque(maxlen=_TIMES)
        self._compiled = 0
        self._compile_ns = 0

    def _new_book(self) -> GrammarBook:
        files = self._config.files
        return GrammarBook(-(-files.config.vocab_size // 32), files.eos_token_ids)

    def renew(self) -> None:
        """Keep the compiler, with the vocabulary and compiled grammars; forget all sequences."""
        before, self._book = self._book, self._new_book()
        self._book.fill, self._book.batch = before.fill, before.batch
        self._turning = False

    def start(self, context: Context, ready: Mapping[str, ReadyInfo]) -> None:
        """Look up the outgoing edges, and start reading the vocabulary."""
        super().start(context, ready)
        self._runners = context.outbox("runners")
        self._scheduler = context.outbox("scheduler")
        self._start_thread()

    def _start_thread(self) -> None:
        if not self._reads:
            self._reads = True
            self._small.put(self._read_vocabulary, lambda result: None)

    def _read_vocabulary(self) -> None:
        """Read the vocabulary on a worker thread."""
        with self._making:
            if self._compiler is None:
                self._compiler = _made(self._config)
                if not isinstance(self._compiler, InvalidRequest):
                    self._use(self._compiler.parallel_fill(len(os.sched_getaffinity(0))))

    def _use(self, fill: Fill | None) -> None:
        """Compute several masks in parallel with `fill`, if it is available."""
        if fill is not None:
            self._book.batch, self._book.fill = _BATCH, fill

    def handlers(self) -> Mapping[type, Handler]:
        """Handle the start, progress and end of constrained sequences."""
        return {
            OpenGrammar: self._open,
            BeginGrammar: self._begin,
            GrammarTokens: self._take,
            CloseGrammars: self._close,
        }

    def span_names(self) -> Mapping[type, str]:
        """Name the spans; other actors wait for the masks."""
        return {
            OpenGrammar: "open grammar",
            BeginGrammar: "begin grammar",
            GrammarTokens: "mask",
            CloseGrammars: "close grammar",
        }

    def _open(self, event: OpenGrammar) -> None:
        self._book.open(event)
        thread = self._small if len(event.grammar) <= _SMALL_GRAMMAR else self._large
        book = self._book
        note = functools.partial(self.context.call_soon, self._note, book, event.uid)
        try:
            thread.put(functools.partial(self._compile, book, event.grammar), note)
        except RuntimeError as error:  # no thread can be started
            book.note_compiled(event.uid, out_of_resources(error))
            self._report()

    def _begin(self, event: BeginGrammar) -> None:
        self._book.begin(event)
        self._turn_unless_due()

    def _take(self, event: GrammarTokens) -> None:
        self._book.take(event)
        self._turn_unless_due()

    def _close(self, event: CloseGrammars) -> None:
        self._book.close(event)
        self._report()

    # -- turns ----------------------------------------------------------------------------

    def _turn_unless_due(self) -> None:
        """Make masks now, unless a turn is already scheduled, which will make them."""
        if not self._turning:
            self._turn()

    def _turn(self) -> None:
        """Make a bounded number of masks. If more are due, schedule another turn, so that messages
        are handled in between."""
        begin = time.monotonic_ns()
        count = self._book.advance()
        if count:
            self._masks += count
            self._times += [(time.monotonic_ns() - begin) // count] * count
        self._report()
        self._turning = self._book.has_work
        if self._turning:
            self.context.call_soon(self._turn)

    # -- the threads ----------------------------------------------------------------------

    def _compile(self, book: GrammarBook, text: str) -> tuple[AnswerMatcher | Refusal, int]:
        """Compile a grammar on a worker thread. The parser releases the GIL meanwhile, so that
        masks of other sequences are made. Return the matcher, or the error, and the time in ns."""
        begin = time.monotonic_ns()
        found: AnswerMatcher | Refusal
        try:
            with native_calls():
                if book is not self._book:  # all actors were restarted
                    raise InvalidRequest("the grammar is no longer needed")
                self._read_vocabulary()
                if isinstance(self._compiler, InvalidRequest):
                    raise self._compiler
                assert self._compiler is not None
                found = self._compiler.matcher(text)
        except (InvalidRequest, OutOfResources) as error:
            found = error
        except Exception as error:  # no grammar may crash the engine
            log.error("a grammar cannot be compiled", exc_info=error)
            refused = machine_refuses(error)
            found = out_of_resources(error) if refused else InvalidRequest(_FAILED)
        return found, time.monotonic_ns() - begin

    def _note(self, book: GrammarBook, uid: int, told: tuple[AnswerMatcher | Refusal, int]) -> None:
        found, took = told
        self._compiled += 1
        self._compile_ns += took
        if book is self._book:
            book.note_compiled(uid, found)
            self._turn_unless_due()

    # -- the edges ------------------------------------------------------------------------

    def _report(self) -> None:
        """Send masks to the runners, and forced tokens and failures to the scheduler, as far as
        their edges have room."""
        while self._runners.ready:
            if (masks := self._book.take_masks(MASKS_AT_ONCE)) is None:
                break
            self._runners.send(masks)
        if self._scheduler.ready and (runs := self._book.take_runs()) is not None:
            self._scheduler.send(runs)
        if self._scheduler.ready and (failed := self._book.take_failures()) is not None:
            self._scheduler.send(failed)

    def on_ready(self, outbox: Any) -> None:
        """Handle an edge that has room again."""
        self._report()

    def stop(self) -> None:
        """Stop the worker threads."""
        for thread in (self._small, self._large):
            thread.close()

    def statistics(self) -> dict[str, Any]:
        """Return the number of open sequences; the number of compiled grammars, and the seconds
        that they took; the number of masks, and the median and 99th percentile of the time of the
        latest ones, in microseconds. The time of a turn is divided equally among its masks."""
        times = sorted(self._times) or [0]
        return {
            "open": len(self._book),
            "grammars": self._compiled,
            "grammar_seconds": self._compile_ns * 1e-9,
            "masks": self._masks,
            "mask_us_p50": times[len(times) // 2] / 1000,
            "mask_us_p99": times[len(times) * 99 // 100] / 1000,
        }
