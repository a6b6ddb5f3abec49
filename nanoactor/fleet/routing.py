"""The choice of a replica: the one that will have computed the prompt first.

Cost is time. A replica that has the start of a prompt cached saves its prefill; a busy one makes it
wait. Weighed in seconds, a replica loses, however much it has cached, once waiting for it takes
longer than computing the prompt elsewhere.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from collections.abc import Iterable, Sequence

from nanoactor.fleet.prefix_map import PrefixMap
from nanoactor.fleet.wire import Hello, Load

_TOKEN_SECONDS = 5e-5
"""Assumed time per prompt token until a replica has measured it."""
_WEIGHT = 0.1
"""Weight of another sequence in the means."""
_TURNS = 8.0
"""Rough number of later turns of a conversation, each of which recomputes evicted blocks."""
_FULL = 2.0
"""Share of a cache in use beyond which the cost of eviction no longer rises."""
_UNEQUAL = 2.0
"""Maximum speed ratio of one replica to the others: more is a measurement error."""
_LEAST_SECONDS = 1e-6
_SLOT = 0.05
"""Share of a sequence's time that each other one costs it on a full replica."""
_BESIDE = 0.5
"""Share of a sequence's steps that another one alongside it is expected to run too."""


@dataclasses.dataclass
class Answers:
    """Running means over recent sequences of all replicas."""

    seconds: float = 2.0
    """From the first token to the last."""
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
    """A replica as an ingress knows it: its last report, and what was sent to it since."""

    def __init__(self, replica: str, hello: Hello) -> None:
        self.replica, self.hello = replica, hello
        self.block_size: int = hello.facts["block_size"]
        self.blocks: int = hello.facts["num_blocks"]
        self.load = _IDLE
        self._sent: deque[tuple[int, int]] = deque()
        """(number, tokens) of each order that the replica's last report did not include."""

    def sent(self, order: int, tokens: int) -> None:
        """Note that order `order`, with `tokens` tokens to compute, is sent to the replica."""
        self._sent.append((order, tokens))

    def told(self, load: Load, orders: int) -> None:
        """Take the load that the replica reported, as of `orders` orders."""
        self.load = load
        while self._sent and self._sent[0][0] <= orders:
            self._sent.popleft()

    @property
    def streams(self) -> int:
        """Return the number of running and queued streams there, over all ingresses."""
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
        """Return True if a stream of `tokens` tokens would run at once."""
        blocks = -(-tokens // self.block_size)
        return not self.streams or (self.free_slots > 0 and self.load.free_blocks >= blocks)

    def seconds(self, missing: int, fill: float, answers: Answers, each: float) -> float:
        """Return the cost of a prompt there in seconds: the time to compute `missing` tokens, and
        the cost to later turns: a cache with a share of `fill` in use evicts as much of what this
        or another prompt will need again. `each` is the time per token."""
        ahead = self.load.waiting_tokens + sum(tokens for _, tokens in self._sent)
        evicted = _TURNS * fill * (missing + answers.tokens)
        seconds = each * (ahead + missing + evicted + _BESIDE * answers.tokens * self.streams)
        seconds += _SLOT * answers.seconds * self.streams / self.hello.max_num_seqs
        queue = 1 - self.free_slots
        if queue > 0:  # places become free one after the other
            seconds += answers.seconds * queue / self.hello.max_num_seqs
        return seconds


class Router:
    """Chooser of a replica for each request."""

    def __init__(self) -> None:
        self.prefixes = PrefixMap()
        self.answers = Answers()
        self._turn = 0

    def choose(
        self, places: Iterable[Place], hashes: Sequence[int], tokens: int, now: float
    ) -> Place | None:
        """Return the place that computes a prompt with these hashes first; None if there is
        none."""
        self._turn += 1
        best, least = None, (float("inf"), 0, 0)
        several = list(places)
        usual = _usual_token_seconds(several)
        for number, place in enumerate(several):
            missing = self.missing(place, hashes, tokens)
            turn = (number - self._turn) % 64  # equal ones take turns
            fill = self.prefixes.in_use(place.replica, now) / place.blocks
            own = place.load.token_seconds or usual
            each = min(max(own, usual / _UNEQUAL), usual * _UNEQUAL)
            seconds = place.seconds(missing, min(_FULL, fill), self.answers, each)
            cost = (seconds, place.streams, turn)
            if best is None or cost < least:
                best, least = place, cost
        return best

    def missing(self, place: Place, hashes: Sequence[int], tokens: int) -> int:
        """Return the number of prompt tokens that a replica has to compute."""
        known = self.prefixes.longest(place.replica, hashes) * place.block_size
        return max(1, tokens - known)
