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

_TOKEN_SECONDS = 5e-5
"""Assumed prefill seconds per token until a replica has measured them."""
_WEIGHT = 0.1
"""Weight of each new sequence in the running means."""
_TURNS = 8.0
"""Rough number of later turns of a conversation, each of which recomputes evicted blocks."""
_FULL = 2.0
"""Ratio of recently used blocks to cache blocks above which the eviction cost no longer rises."""
_UNEQUAL = 2.0
"""Maximum ratio between a replica's prefill time per token and the median; a larger ratio is
considered a measurement error."""
_LEAST_SECONDS = 1e-6
_SLOT = 0.05
"""Assumed relative slowdown of a sequence on a replica with as many streams as slots; proportional
to the number of streams."""
_BESIDE = 0.5
"""Fraction of a sequence's steps in which another running sequence is expected to take part."""


@dataclasses.dataclass
class Answers:
    """Running means over recent sequences of all replicas."""

    seconds: float = 2.0
    """Seconds from the first token to the last."""
    tokens: float = 128.0

    def note(self, seconds: float, tokens: int) -> None:
        """Record a finished sequence."""
        self.seconds += _WEIGHT * (seconds - self.seconds)
        self.tokens += _WEIGHT * (tokens - self.tokens)


def _usual_token_seconds(places: Sequence[Place]) -> float:
    """Return the typical prefill time per token over the replicas."""
    known = [place.load.token_seconds for place in places if place.load.token_seconds]
    return max(_LEAST_SECONDS, statistics.median(known)) if known else _TOKEN_SECONDS


_IDLE = Load(0, 0, 0, 0, 0, 0.0, is_reserved=False)


class Place:
    """An ingress's view of a replica: its last report, and the orders sent to it since then."""

    def __init__(self, replica: str, hello: Hello) -> None:
        self.replica, self.hello = replica, hello
        self.block_size: int = hello.facts["block_size"]
        self.blocks: int = hello.facts["num_blocks"]
        self.load = _IDLE
        self._sent: deque[tuple[int, int]] = deque()
        """(number, tokens) of each order that the replica's last report did not include."""

    def sent(self, order: int, tokens: int) -> None:
        """Record that order number `order`, with `tokens` tokens to compute, was sent."""
        self._sent.append((order, tokens))

    def told(self, load: Load, orders: int) -> None:
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

    def seconds(self, missing: int, fill: float, answers: Answers, each: float) -> float:
        """Return the cost in seconds of running a prompt on the replica: the time until `missing`
        tokens are computed, plus the cost for later turns, as a cache of which a fraction `fill` is
        in use evicts that fraction of the blocks that this or another prompt will need again.
        `each` is the prefill time per token in seconds."""
        ahead = self.load.waiting_tokens + sum(tokens for _, tokens in self._sent)
        evicted = _TURNS * fill * (missing + answers.tokens)
        seconds = each * (ahead + missing + evicted + _BESIDE * answers.tokens * self.streams)
        seconds += _SLOT * answers.seconds * self.streams / self.hello.max_num_seqs
        queue = 1 - self.free_slots
        if queue > 0:  # slots become free one after the other
            seconds += answers.seconds * queue / self.hello.max_num_seqs
        return seconds


class Router:
    """Chooses a replica for each request."""

    def __init__(self) -> None:
        self.prefixes = PrefixMap()
        self.answers = Answers()
        self._turn = 0

    def choose(
        self, places: Iterable[Place], hashes: Sequence[int], tokens: int, now: float
    ) -> Place | None:
        """Return the replica with the lowest cost for a prompt of `tokens` tokens with these block
        keys; None if `places` is empty."""
        self._turn += 1
        best, least = None, (float("inf"), 0, 0)
        several = list(places)
        usual = _usual_token_seconds(several)
        for number, place in enumerate(several):
            missing = self.missing(place, hashes, tokens)
            turn = (number - self._turn) % 64  # replicas of equal cost take turns
            fill = self.prefixes.in_use(place.replica, now) / place.blocks
            own = place.load.token_seconds or usual
            each = min(max(own, usual / _UNEQUAL), usual * _UNEQUAL)
            seconds = place.seconds(missing, min(_FULL, fill), self.answers, each)
            cost = (seconds, place.streams, turn)
            if best is None or cost < least:
                best, least = place, cost
        return best

    def missing(self, place: Place, hashes: Sequence[int], tokens: int) -> int:
        """Return the number of prompt tokens that a replica would have to compute, at least 1."""
        known = self.prefixes.longest(place.replica, hashes) * place.block_size
        return max(1, tokens - known)
