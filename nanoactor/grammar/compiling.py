"""Compilation of grammar specifications to matchers, with a cache of compiled grammars."""

from __future__ import annotations

import logging
import resource
import threading
from pathlib import Path
from typing import cast

from nanoactor.errors import InvalidRequest, UnsupportedModel
from nanoactor.grammar.book import FillMasks
from nanoactor.grammar.cache import GrammarCache
from nanoactor.grammar.matcher import CompiledGrammar, Matcher, ParallelFiller
from nanoactor.grammar.vocabulary import Vocabulary
from nanoactor.model_files.files import ModelFiles
from nanoactor.requests.grammar_spec import GrammarSpec

# With fewer cores, waking threads on busy cores costs more than the parallelism gains.
_MIN_CORES, _MAX_THREADS = 4, 8
log = logging.getLogger("nanoactor.grammar")


class GrammarCompiler:
    """Compiles grammars for the vocabulary of one model. If the vocabulary is not supported, every
    grammar is rejected with the reason."""

    def __init__(self, files: ModelFiles) -> None:
        self._cache = GrammarCache()
        self._lock = threading.Lock()
        """Guards the cache, which is used by two compiler threads."""
        self._vocabulary: Vocabulary | None = None
        self._unsupported_reason = ""
        assert files.tokenizer_directory is not None
        path = files.tokenizer_directory / "tokenizer.json"
        try:
            size = files.config.vocab_size
            self._vocabulary = Vocabulary(path, size, tuple(files.eos_token_ids))
        except UnsupportedModel as error:
            self._unsupported_reason = str(error)
            log.warning("structured outputs will be rejected: %s", error)

    def parallel_fill(self, cores: int) -> FillMasks | None:
        """Return a function that computes several masks in parallel, on up to half of the `cores`;
        None if there are fewer than 4, so that threads would cost more than they gain."""
        if cores < _MIN_CORES:
            return None
        return cast(FillMasks, ParallelFiller(min(_MAX_THREADS, cores // 2)))

    def matcher(self, text: str) -> Matcher:
        """Compile a grammar (the text of `GrammarSpec.to_text`), or find it in the cache, and
        return a matcher at the start of a sequence. Raises `InvalidRequest` if the grammar is
        invalid or the model does not support grammars."""
        if self._vocabulary is None:
            raise InvalidRequest(
                f"structured outputs are not available for this model: {self._unsupported_reason}"
            )
        with self._lock:
            compiled = self._cache.get(text)
        if compiled is None:
            before = _resident_bytes()
            try:
                compiled = CompiledGrammar(GrammarSpec.of_text(text), self._vocabulary)
            except InvalidRequest as error:
                with self._lock:
                    self._cache.put(text, error)
                raise
            with self._lock:
                self._cache.put(text, compiled, max(0, _resident_bytes() - before))
        return compiled.matcher()


def _resident_bytes() -> int:
    """Return this process's resident memory in bytes. The growth during compilation is used as a
    grammar's size, which the parser does not report."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()
