"""Choice of the replica for a request: the one that is expected to finish its prefill first.

Costs are in seconds. A replica that has cached a prefix of the prompt need not prefill that part; a
busy replica makes the prompt wait. However much it has cached, a replica is not chosen if waiting
for it takes longer than computing the prompt elsewhere.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from collections.abc import Iterable, Sequence

from nanoactor.fleet.prefix_map import PrefixMap
from nanoactor.fleet.wire import Hello, Load

_DEFAULT_TOKEN_SECONDS = 5e-5
"""Assumed prefill seconds per token until a replica has measured them."""
_MEAN_WEIGHT = 0.1
"""Weight of each new sequence in the running means."""
_LATER_TURNS = 8.0
"""Rough number of later turns of a conversation, each of which recomputes evicted blocks."""
_MAX_FILL = 2.0
"""Ratio of recently used blocks to cache blocks above which the eviction cost no longer rises."""
_MAX_PACE_RATIO = 2.0
"""Maximum ratio between a replica's prefill time per token and the median; a larger ratio is
considered a measurement error."""
_MIN_TOKEN_SECONDS = 1e-6
_FULL_LOAD_SLOWDOWN = 0.05
"""Assumed relative slowdown of a sequence on a replica with as many streams as slots; proportional
to the number of streams."""
_SHARED_STEP_FRACTION = 0.5
"""Fraction of a sequence's steps in which another running sequence is expected to take part."""


@dataclasses.dataclass
class SequenceMeans:
    """Running means over recent sequences of all replicas."""

    seconds: float = 2.0
    """Seconds from the first token to the last."""
    tokens: float = 128.0

    def note(self, seconds: float, tokens: int) -> None:
        """Record a finished sequence."""
        self.seconds += _MEAN_WEIGHT * (seconds - self.seconds)
        self.tokens += _MEAN_WEIGHT * (tokens - self.tokens)


def _typical_token_seconds(states: Sequence[ReplicaState]) -> float:
    """Return the typical prefill time per token over the replicas."""
    measured = [state.load.token_seconds for state in states if state.load.token_seconds]
    return (
        max(_MIN_TOKEN_SECONDS, statistics.median(measured)) if measured else _DEFAULT_TOKEN_SECONDS
    )


_IDLE_LOAD = Load(0, 0, 0, 0, 0, 0.0, is_reserved=False)


class ReplicaState:
    """An ingress's view of a replica: its last report, and the orders sent to it since then."""

    def __init__(self, name: str, hello: Hello) -> None:
        self.name, self.hello = name, hello
        self.block_size: int = hello.facts["block_size"]
        self.blocks: int = hello.facts["num_blocks"]
        self.load = _IDLE_LOAD
        self._sent: deque[tuple[int, int]] = deque()
        """(number, tokens) of each order that the replica's last report did not include."""

    def note_sent(self, order: int, tokens: int) -> None:
        """Record that order number `order`, with `tokens` tokens to compute, was sent."""
        self._sent.append((order, tokens))

    def update_load(self, load: Load, orders: int) -> None:
        """Record the load that the replica reported after processing `orders` orders."""
        self.load = load
        while self._sent and self._sent[0][0] <= orders:
            self._sent.popleft()

    @property
    def streams(self) -> int:
        """Return the number of running and queued streams on the replica, over all ingresses."""
        return self.load.streams + len(self._sent)

    @property
    def free_slots(self) -> int:
        """Return the number of free slots."""
        return self.hello.max_num_seqs - self.streams

    @property
    def is_full(self) -> bool:
        """Return True if the replica would refuse another stream."""
        return self.streams >= self.hello.max_num_seqs + self.hello.max_waiting_requests

    def has_room(self, tokens: int) -> bool:
        """Return True if a stream with `tokens` tokens to prefill would run at once."""
        blocks = -(-tokens // self.block_size)
        return not self.streams or (self.free_slots > 0 and self.load.free_blocks >= blocks)

    def cost(self, uncached: int, fill: float, means: SequenceMeans, token_seconds: float) -> float:
        """Return the cost in seconds of running a prompt on the replica: the time until `uncached`
        tokens are computed, plus the cost for later turns, as a cache of which a fraction `fill` is
        in use evicts that fraction of the blocks that this or another prompt will need again.
        `token_seconds` is the prefill time per token in seconds."""
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
    """Chooses a replica for each request."""

    def __init__(self) -> None:
        self.prefixes = PrefixMap()
        self.means = SequenceMeans()
        self._turn = 0

    def choose(
        self, states: Iterable[ReplicaState], block_keys: Sequence[int], tokens: int, now: float
    ) -> ReplicaState | None:
        """Return the replica with the lowest cost for a prompt of `tokens` tokens with these block
        keys; None if `states` is empty."""
        self._turn += 1
        best, best_cost = None, (float("inf"), 0, 0)
        candidates = list(states)
        typical = _typical_token_seconds(candidates)
        for number, state in enumerate(candidates):
            uncached = self.uncached_tokens(state, block_keys, tokens)
            turn = (number - self._turn) % 64  # replicas of equal cost take turns
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
