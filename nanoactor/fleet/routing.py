"""Selection of a replica for each request: the one that is expected to finish the prefill first.

All costs are times in seconds. Cached prefixes reduce the tokens to prefill, and a busy replica
makes the prompt wait. A replica with a cached prefix is therefore not selected if waiting for it
takes longer than computing the prompt elsewhere.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from collections.abc import Iterable, Sequence

from nanoactor.fleet.prefix_map import PrefixMap
from nanoactor.fleet.wire import Hello, Load

_DEFAULT_TOKEN_SECONDS = 5e-5
"""Prefill time per token that is assumed until a replica has measured it, in seconds."""
_MEAN_WEIGHT = 0.1
"""Weight of a new sequence in the moving averages, from 0 to 1."""
_LATER_TURNS = 8.0
"""Assumed number of later requests in a conversation. Each of them must recompute the blocks that
have been evicted."""
_MAX_FILL = 2.0
"""Upper limit, in the cost of eviction, on the ratio of recently used blocks to all blocks of a
replica's cache."""
_MAX_PACE_RATIO = 2.0
"""Maximum factor by which a replica's prefill time per token may be above or below the median.
Larger deviations are treated as measurement errors."""
_MIN_TOKEN_SECONDS = 1e-6
_FULL_LOAD_SLOWDOWN = 0.05
"""Assumed relative slowdown of a sequence when its replica runs `max_num_seqs` streams. With fewer
streams, it is proportionally smaller."""
_SHARED_STEP_FRACTION = 0.5
"""Assumed fraction of a sequence's steps that it shares with any other running sequence."""


@dataclasses.dataclass
class SequenceMeans:
    """Moving averages over the finished sequences of all replicas."""

    seconds: float = 2.0
    """Time from the first to the last token, in seconds."""
    tokens: float = 128.0

    def note(self, seconds: float, tokens: int) -> None:
        """Include a finished sequence in the averages: the time from its first to its last token,
        and its number of output tokens."""
        self.seconds += _MEAN_WEIGHT * (seconds - self.seconds)
        self.tokens += _MEAN_WEIGHT * (tokens - self.tokens)


def _typical_token_seconds(states: Sequence[ReplicaState]) -> float:
    """Return the median prefill time per token, in seconds, over the replicas that have measured
    it. Return `_DEFAULT_TOKEN_SECONDS` if none has."""
    measured = [state.load.token_seconds for state in states if state.load.token_seconds]
    return (
        max(_MIN_TOKEN_SECONDS, statistics.median(measured)) if measured else _DEFAULT_TOKEN_SECONDS
    )


_IDLE_LOAD = Load(0, 0, 0, 0, 0, 0.0, is_reserved=False)


class ReplicaState:
    """A replica's load as one ingress (HTTP server) sees it: the last report, plus the requests
    sent to the replica that this report does not include."""

    def __init__(self, name: str, hello: Hello) -> None:
        self.name, self.hello = name, hello
        self.block_size: int = hello.facts["block_size"]
        self.blocks: int = hello.facts["num_blocks"]
        self.load = _IDLE_LOAD
        self._sent: deque[tuple[int, int]] = deque()
        """(number, tokens to compute) of each order that the last report does not include yet."""

    def note_sent(self, order: int, tokens: int) -> None:
        """Record that a request was sent as the link's order number `order`, with `tokens` prompt
        tokens to compute."""
        self._sent.append((order, tokens))

    def update_load(self, load: Load, orders: int) -> None:
        """Store the load that the replica reported after it had processed `orders` orders."""
        self.load = load
        while self._sent and self._sent[0][0] <= orders:
            self._sent.popleft()

    @property
    def streams(self) -> int:
        """Number of running and waiting streams on the replica, over all ingresses."""
        return self.load.streams + len(self._sent)

    @property
    def free_slots(self) -> int:
        """Number of further streams that could run at once: `max_num_seqs` minus all streams.
        Negative if streams are waiting."""
        return self.hello.max_num_seqs - self.streams

    @property
    def is_full(self) -> bool:
        """True if the replica would reject another stream."""
        return self.streams >= self.hello.max_num_seqs + self.hello.max_waiting_requests

    def has_room(self, tokens: int) -> bool:
        """Return True if a stream with `tokens` tokens to prefill could run immediately: the
        replica is idle, or it has enough free KV blocks and runs fewer than `max_num_seqs`
        streams."""
        blocks = -(-tokens // self.block_size)
        return not self.streams or (self.free_slots > 0 and self.load.free_blocks >= blocks)

    def cost(self, uncached: int, fill: float, means: SequenceMeans, token_seconds: float) -> float:
        """Return the estimated cost of running a prompt on the replica, in seconds.

        The cost is the time until `uncached` tokens are computed, plus the time for recomputing
        evicted blocks in later requests of the conversation. `fill`, the ratio of recently used
        blocks to all blocks of the cache, stands for the fraction that will be evicted.
        `token_seconds` is the prefill time per token in seconds.
        """
        tokens_ahead = self.load.waiting_tokens + sum(tokens for _, tokens in self._sent)
        evicted_tokens = _LATER_TURNS * fill * (uncached + means.tokens)
        seconds = token_seconds * (
            tokens_ahead
            + uncached
            + evicted_tokens
            + _SHARED_STEP_FRACTION * means.tokens * self.streams
        )
        seconds += _FULL_LOAD_SLOWDOWN * means.seconds * self.streams / self.hello.max_num_seqs
        queue_length = 1 - self.free_slots
        if queue_length > 0:  # slots become free one after the other
            seconds += means.seconds * queue_length / self.hello.max_num_seqs
        return seconds


class Router:
    """Selector of the replica for each request, by cached prefixes and load."""

    def __init__(self) -> None:
        self.prefixes = PrefixMap()
        self.means = SequenceMeans()
        self._turn = 0

    def choose(
        self, states: Iterable[ReplicaState], block_keys: Sequence[int], tokens: int, now: float
    ) -> ReplicaState | None:
        """Return the replica with the lowest cost for a prompt of `tokens` tokens, or None if there
        are no replicas. `block_keys` identify the prompt's blocks, and `now` is the time in
        seconds."""
        self._turn += 1
        best, best_cost = None, (float("inf"), 0, 0)
        candidates = list(states)
        typical = _typical_token_seconds(candidates)
        for number, state in enumerate(candidates):
            uncached = self.uncached_tokens(state, block_keys, tokens)
            turn = (number - self._turn) % 64  # replicas of equal cost alternate
            fill = self.prefixes.blocks_in_use(state.name, now) / state.blocks
            measured = state.load.token_seconds or typical
            token_seconds = min(max(measured, typical / _MAX_PACE_RATIO), typical * _MAX_PACE_RATIO)
            seconds = state.cost(uncached, min(_MAX_FILL, fill), self.means, token_seconds)
            cost = (seconds, state.streams, turn)
            if best is None or cost < best_cost:
                best, best_cost = state, cost
        return best

    def uncached_tokens(self, state: ReplicaState, block_keys: Sequence[int], tokens: int) -> int:
        """Return the number of prompt tokens that a replica would have to compute, at least 1."""
        cached = self.prefixes.cached_blocks(state.name, block_keys) * state.block_size
        return max(1, tokens - cached)
