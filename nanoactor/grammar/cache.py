"""A cache of compiled grammars, for later requests with the same grammar."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from nanoactor.errors import InvalidRequest
from nanoactor.grammar.matcher import CompiledGrammar


class GrammarCache:
    """An LRU cache of the results of compiling grammars, including errors, so that each grammar is
    compiled only once."""

    def __init__(self, max_count: int = 64, max_bytes: int = 256 * 2**20) -> None:
        """Create an empty cache of at most `max_count` grammars. `max_bytes` limits the total size
        of specifications and compiled grammars. The parser's limits (`matcher.limits`) allow a
        compiled grammar of up to 100 MB, but most take less than 1 MB."""
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[bytes, tuple[CompiledGrammar | str, int]] = OrderedDict()

    @property
    def count(self) -> int:
        """Number of cached grammars, valid or not."""
        return len(self._entries)

    def get(self, spec_text: str) -> CompiledGrammar | None:
        """Return the compiled grammar for a specification (the text of `GrammarSpec.to_text`); None
        if it is not cached. Raises `InvalidRequest` if the grammar is known to be invalid."""
        key = _key(spec_text)
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        value, _ = self._entries[key]
        if isinstance(value, str):
            raise InvalidRequest(value)
        return value

    def put(
        self, spec_text: str, result: CompiledGrammar | InvalidRequest, nbytes: int = 0
    ) -> None:
        """Store the result of compiling a specification. `nbytes` is the size of the compiled
        grammar. The least recently used entries are evicted until the limits are met, so a result
        larger than `max_bytes` empties the cache."""
        key = _key(spec_text)
        size = len(spec_text.encode(errors="surrogatepass")) + nbytes
        if key in self._entries:
            self._evict(key)
        value = str(result) if isinstance(result, InvalidRequest) else result
        self._entries[key] = value, size
        self._bytes += size
        while len(self._entries) > self._max_count or self._bytes > self._max_bytes:
            self._evict(next(iter(self._entries)))

    def _evict(self, key: bytes) -> None:
        _, size = self._entries.pop(key)
        self._bytes -= size


def _key(spec_text: str) -> bytes:
    return hashlib.blake2b(spec_text.encode(errors="surrogatepass"), digest_size=32).digest()
