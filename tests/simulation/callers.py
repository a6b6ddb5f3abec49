"""Callers of held answers: they answer in time, late, wrongly or never."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanoactor.errors import HoldExpired, InvalidRequest
from nanoactor.recovery.journal import Entry
from tests.simulation.scenario import Caller

if TYPE_CHECKING:
    from tests.simulation.world import World


class Callers:
    """Acts for the users of a world who have their answers held."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._seen: set[tuple[int, int]] = set()
        """(position, how often it has gone on) of those whose turn was noticed."""

    def look(self) -> None:
        """The frontend has news: it may be somebody's turn."""
        for position, entry in self._world.entries.items():
            caller = self._world.scenario.asks[position].caller
            turn = position, entry.continued
            if caller is None or turn in self._seen or not entry.is_held or entry.aborted:
                continue
            self._seen.add(turn)
            if entry.continued < len(caller.rounds):
                after = caller.rounds[entry.continued].after
            else:
                after = caller.rounds[-1].after if caller.rounds else 0.0
                if caller.end == "never":
                    continue
            self._world.loop.call_later(after, self._act, position, caller, entry)

    def _act(self, position: int, caller: Caller, entry: Entry) -> None:
        frontend: Any = self._world.actors["frontend"]
        counts = self._world.oracle.counts
        if isinstance(entry.error, HoldExpired):
            self._refused(entry, [0] * len(entry.answers), [0] * len(entry.answers), HoldExpired)
            counts["callers who were too late"] += 1
            return
        if entry.aborted or entry.is_over:
            return
        if caller.wrong:
            self._ask_wrongly(entry)
            counts["callers who were wrong"] += 1
        number = entry.continued
        if number < len(caller.rounds):
            turn = caller.rounds[number]
            self._world.oracle.goes_on(position, number + 1)
            frontend.resume_held(entry, turn.parents, turn.tokens)
            self._refused(entry, turn.parents, turn.tokens)  # it is not held now
        elif caller.end == "abort":
            frontend.abort(entry)
        else:
            frontend.resume_held(entry, [-1] * len(entry.answers), [0] * len(entry.answers))

    def _ask_wrongly(self, entry: Entry) -> None:
        count = len(entry.answers)
        living = [i for i, answer in enumerate(entry.answers) if answer.terminal is None]
        over = [i for i in range(count) if i not in living]
        parents = [i if i in living else -1 for i in range(count)]
        zeros, first = [0] * count, living[0]
        self._refused(entry, parents[1:], zeros)
        self._refused(entry, parents, zeros[1:])
        for wrong in (count, -2, *over):
            self._refused(entry, [wrong if i == first else p for i, p in enumerate(parents)], zeros)
        for dead in over:
            self._refused(entry, [first if i == dead else p for i, p in enumerate(parents)], zeros)
        for token in (-1, 1 << 30):
            self._refused(entry, parents, [token] * count)

    def _refused(
        self, entry: Entry, parents: Any, tokens: Any, error: type[Exception] = InvalidRequest
    ) -> None:
        """The door refuses this, and nothing has happened."""
        frontend: Any = self._world.actors["frontend"]
        before = entry.continued, len(self._world.edges["frontend", "scheduler"].messages)
        try:
            frontend.resume_held(entry, parents, tokens)
        except error:
            after = entry.continued, len(self._world.edges["frontend", "scheduler"].messages)
            assert after == before
        else:
            raise AssertionError(f"{parents} and {tokens} were not refused")
