"""Measurement of how well the prefix cache serves conversations: how much of the previous turn's
prompt it still contains. A turn is a request and its answer."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

MAX_TURNS = 4096
"""Maximum number of turns (requests and their answers) that are remembered."""


class Turns:
    """The latest conversation turns (requests and their answers), identified by digests of their
    messages. A turn continues an earlier one if its messages start with the earlier turn's
    messages."""

    def __init__(self, max_turns: int = MAX_TURNS) -> None:
        self._max_turns = max_turns
        self._tokens: OrderedDict[bytes, int] = OrderedDict()
        """Number of prompt tokens of each turn, by a digest of its template options and
        messages."""

    def add(
        self,
        messages: Sequence[Any],
        options: Mapping[str, Any],
        prompt_tokens: int,
        cached_tokens: int,
        block_size: int,
    ) -> tuple[int, int]:
        """Record a turn, and find the longest earlier turn that it continues. Of that turn's prompt
        tokens, return how many were reused from the prefix cache, and how many were computed again.
        Return (0, 0) if there is no such turn.

        The last block of the earlier prompt is not counted, because it may also contain tokens of
        the answer. `messages` and `options` are those passed to the chat template; the order of
        their members is ignored.
        """
        *earlier_digests, digest_of_turn = _digests(messages, options)
        known_tokens = [
            self._tokens[digest] for digest in earlier_digests if digest in self._tokens
        ]
        self._tokens[digest_of_turn] = prompt_tokens
        self._tokens.move_to_end(digest_of_turn)
        while len(self._tokens) > self._max_turns:
            self._tokens.popitem(last=False)
        if not known_tokens:
            return 0, 0
        reusable = (known_tokens[-1] - 1) // block_size * block_size
        reused = min(cached_tokens, reusable)
        return reused, reusable - reused


def _digests(messages: Sequence[Any], options: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield a digest of the options and the messages so far, for each message."""
    state = hashlib.blake2b(msgspec.json.encode(options, order="sorted"), digest_size=16)
    for message in messages:
        state.update(msgspec.json.encode(message, order="sorted"))
        yield state.digest()
