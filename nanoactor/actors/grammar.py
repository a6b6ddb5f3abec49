"""The grammar actor, which computes token masks for constrained sequences, while worker threads
compile grammars."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from nanoactor.errors import out_of_resources
from nanoactor.grammar.book import FillMasks, GrammarBook
from nanoactor.grammar.compile_threads import Compiled, CompilerThreads
from nanoactor.messages.grammar import BeginGrammar, CloseGrammars, GrammarTokens, OpenGrammar
from nanoactor.runtime.actor import Actor, Context, Handler, ReadyInfo
from nanoactor.setup.actors import MAX_MASKS_PER_MESSAGE, ActorConfig

# Maximum number of recent masks whose times are recorded.
_MAX_TIMES = 4096
# Number of masks that the parser's threads compute in one batch.
_BATCH = 16


class GrammarActor(Actor):
    """Actor that opens grammars for constrained sequences, and sends their token masks to the
    runners. All of its state can be rebuilt after a restart from the grammars and tokens of the
    sequences."""

    def __init__(self, config: ActorConfig) -> None:
        self._config = config
        self._book = self._new_book()
        self._threads = CompilerThreads(config.files, self._set_fill)
        self._is_turn_scheduled = False
        """True if another call of `_turn` is scheduled."""
        self._num_masks = 0
        self._mask_times: deque[int] = deque(maxlen=_MAX_TIMES)
        self._num_compiled = 0
        self._compile_ns = 0

    def _new_book(self) -> GrammarBook:
        files = self._config.files
        return GrammarBook(-(-files.config.vocab_size // 32), files.eos_token_ids)

    def reset(self) -> None:
        """Forget all sequences, but keep the compiler with its vocabulary and compiled grammars."""
        before, self._book = self._book, self._new_book()
        self._book.fill, self._book.batch = before.fill, before.batch
        self._is_turn_scheduled = False

    def start(self, context: Context, ready: Mapping[str, ReadyInfo]) -> None:
        """Look up the outboxes to the other actors, and begin to read the vocabulary on a worker
        thread."""
        super().start(context, ready)
        self._runners = context.outbox("runners")
        self._scheduler = context.outbox("scheduler")
        self._threads.start_reading()

    def _set_fill(self, fill: FillMasks) -> None:
        """Use `fill` to compute several masks in parallel. Called on a worker thread."""
        self._book.batch, self._book.fill = _BATCH, fill

    def handlers(self) -> Mapping[type, Handler]:
        """Return the handlers for the beginning, the tokens and the end of constrained
        sequences."""
        return {
            OpenGrammar: self._on_open,
            BeginGrammar: self._on_begin,
            GrammarTokens: self._on_tokens,
            CloseGrammars: self._on_close,
        }

    def span_names(self) -> Mapping[type, str]:
        """Return the trace span names of all handlers."""
        return {
            OpenGrammar: "open grammar",
            BeginGrammar: "begin grammar",
            GrammarTokens: "mask",
            CloseGrammars: "close grammar",
        }

    def _on_open(self, event: OpenGrammar) -> None:
        book = self._book
        book.open(event)
        done = functools.partial(self.context.call_soon, self._on_compiled, book, event.uid)
        try:
            self._threads.compile(event.grammar, lambda: book is self._book, done)
        except RuntimeError as error:  # no thread can be started
            book.set_matcher(event.uid, out_of_resources(error))
            self._report()

    def _on_begin(self, event: BeginGrammar) -> None:
        self._book.begin(event)
        self._turn_unless_scheduled()

    def _on_tokens(self, event: GrammarTokens) -> None:
        self._book.add_tokens(event)
        self._turn_unless_scheduled()

    def _on_close(self, event: CloseGrammars) -> None:
        self._book.close(event)
        self._report()

    # -- turns ----------------------------------------------------------------------------

    def _turn_unless_scheduled(self) -> None:
        """Compute masks now, unless a call of `_turn`, which will compute them, is already
        scheduled."""
        if not self._is_turn_scheduled:
            self._turn()

    def _turn(self) -> None:
        """Compute a bounded number of masks. If more are due, schedule another call, so that
        messages are handled in between."""
        begin = time.monotonic_ns()
        count = self._book.advance()
        if count:
            self._num_masks += count
            self._mask_times += [(time.monotonic_ns() - begin) // count] * count
        self._report()
        self._is_turn_scheduled = self._book.has_work
        if self._is_turn_scheduled:
            self.context.call_soon(self._turn)

    def _on_compiled(self, book: GrammarBook, uid: int, result: Compiled) -> None:
        found, nanoseconds = result
        self._num_compiled += 1
        self._compile_ns += nanoseconds
        if book is self._book:
            book.set_matcher(uid, found)
            self._turn_unless_scheduled()

    # -- the edges ------------------------------------------------------------------------

    def _report(self) -> None:
        """Send masks to the runners, and forced tokens and failures to the scheduler, while the
        outboxes have room. The rest is sent later."""
        while self._runners.ready:
            if (masks := self._book.pop_masks(MAX_MASKS_PER_MESSAGE)) is None:
                break
            self._runners.send(masks)
        if self._scheduler.ready and (runs := self._book.pop_runs()) is not None:
            self._scheduler.send(runs)
        if self._scheduler.ready and (failed := self._book.pop_failures()) is not None:
            self._scheduler.send(failed)

    def on_ready(self, outbox: Any) -> None:
        """Send what waited because the outbox had no room."""
        self._report()

    def stop(self) -> None:
        """Stop the worker threads."""
        self._threads.close()

    def statistics(self) -> dict[str, Any]:
        """Return the number of open sequences, and the counts and times of grammars and masks.

        `mask_us_p50` and `mask_us_p99` are percentiles over the latest masks, in microseconds. The
        time of a batch is divided equally among its masks. `grammar_seconds` is the total time
        spent on compiling.
        """
        times = sorted(self._mask_times) or [0]
        return {
            "open": len(self._book),
            "grammars": self._num_compiled,
            "grammar_seconds": self._compile_ns * 1e-9,
            "masks": self._num_masks,
            "mask_us_p50": times[len(times) // 2] / 1000,
            "mask_us_p99": times[len(times) * 99 // 100] / 1000,
        }
