"""Compilation of grammars on worker threads, so that masks of other sequences are computed
meanwhile."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from nanoactor.errors import InvalidRequest, OutOfResources, out_of_resources
from nanoactor.grammar.book import FillMasks, MatcherError, SequenceMatcher
from nanoactor.model_files.files import ModelFiles
from nanoactor.runtime.errors import is_out_of_resources
from nanoactor.runtime.native import native_calls
from nanoactor.runtime.worker_thread import WorkerThread

if TYPE_CHECKING:
    from nanoactor.grammar.compiling import GrammarCompiler

log = logging.getLogger("nanoactor.grammar")

# Maximum length of a small grammar, in characters. Longer ones are compiled on a separate thread.
_SMALL_GRAMMAR = 16 * 1024
_FAILED = "the grammar could not be parsed; the log has the parser's error"

Compiled = tuple[SequenceMatcher | MatcherError, int]
"""(matcher or error, time taken to compile the grammar in ns)."""


def _make_compiler(files: ModelFiles) -> GrammarCompiler | InvalidRequest:
    """Return a grammar compiler; if it cannot be created, return the error with which grammars are
    rejected."""
    try:
        with native_calls():
            from nanoactor.grammar.compiling import GrammarCompiler

            return GrammarCompiler(files)
    except Exception as error:
        log.error(
            "the grammar compiler cannot be created, so structured outputs will be refused",
            exc_info=error,
        )
        line = " ".join(str(error).split())[:300]
        return InvalidRequest(f"this model does not support structured outputs: {line}")


class CompilerThreads:
    """Two worker threads that compile grammars with the same compiler: one thread for large
    grammars, which take a long time, and one for all others, so that they need not wait. Used by
    the grammar actor."""

    def __init__(self, files: ModelFiles, on_fill: Callable[[FillMasks], None]) -> None:
        """`on_fill` is called on a worker thread, at most once, with a function that computes
        several masks in parallel. It is not called if masks should be computed one by one."""
        self._files, self._on_fill = files, on_fill
        self._small = WorkerThread("compile")
        self._large = WorkerThread("compile large")
        self._compiler: GrammarCompiler | InvalidRequest | None = None
        """Compiler, created by the first thread that needs it. If it is an error, every grammar is
        rejected with that error."""
        self._lock = threading.Lock()
        """Guards the creation of the compiler."""
        self._has_started_reading = False

    def start_reading(self) -> None:
        """Begin to read the vocabulary on a worker thread, unless it has begun before."""
        if not self._has_started_reading:
            self._has_started_reading = True
            self._small.put(self._read_vocabulary, lambda result: None)

    def _read_vocabulary(self) -> None:
        """Create the compiler, which reads the vocabulary. Runs on a worker thread."""
        with self._lock:
            if self._compiler is None:
                self._compiler = _make_compiler(self._files)
                if not isinstance(self._compiler, InvalidRequest):
                    fill = self._compiler.parallel_fill(len(os.sched_getaffinity(0)))
                    if fill is not None:
                        self._on_fill(fill)

    def compile(
        self, text: str, is_needed: Callable[[], bool], done: Callable[[Compiled], None]
    ) -> None:
        """Compile a grammar (the text of `GrammarSpec.to_text`) on a worker thread, which then
        calls `done` with the result.

        `is_needed` is called on the thread before it compiles. If it returns False, the grammar is
        not compiled, and the result is an error. Raises `RuntimeError` if the thread cannot be
        started.
        """
        thread = self._small if len(text) <= _SMALL_GRAMMAR else self._large
        thread.put(functools.partial(self._compile, text, is_needed), done)

    def _compile(self, text: str, is_needed: Callable[[], bool]) -> Compiled:
        """Compile a grammar on a worker thread. The parser releases the GIL, so masks of other
        sequences are computed meanwhile."""
        begin = time.monotonic_ns()
        found: SequenceMatcher | MatcherError
        try:
            with native_calls():
                if not is_needed():  # all actors were restarted
                    raise InvalidRequest(
                        "the grammar is no longer needed, because the engine's processes have "
                        "been restarted"
                    )
                self._read_vocabulary()
                if isinstance(self._compiler, InvalidRequest):
                    raise self._compiler
                assert self._compiler is not None
                found = self._compiler.matcher(text)
        except (InvalidRequest, OutOfResources) as error:
            found = error
        except Exception as error:  # no grammar may crash the engine
            log.error(
                "a grammar could not be compiled because of an unexpected error", exc_info=error
            )
            refused = is_out_of_resources(error)
            found = out_of_resources(error) if refused else InvalidRequest(_FAILED)
        return found, time.monotonic_ns() - begin

    def close(self) -> None:
        """Stop the threads."""
        for thread in (self._small, self._large):
            thread.close()
