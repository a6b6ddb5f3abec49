"""Held sequences: after each token their caller chooses how they continue.

A held sequence never decodes. When all its known tokens are computed, the next token is sampled and
reported to the caller, but not appended. From then on the sequence is *held*: no step is in flight
for it, and none is planned. The caller chooses for all sequences of the request at once which of
them each becomes a copy of, and which token follows; if it takes too long, they end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from nanoactor.errors import ProtocolBug
from nanoactor.messages.engine import Continue, HoldClock, Int32
from nanoactor.scheduling.features.feature import Ending, Feature, Handlers
from nanoactor.scheduling.resources.room import Room
from nanoactor.scheduling.sequences import ends
from nanoactor.scheduling.sequences.ends import End
from nanoactor.scheduling.sequences.sequence import Phase, Sequence
from nanoactor.scheduling.steps.planned import PlannedRow, as_int32
from nanoactor.scheduling.steps.turns import TurnBuilder

_PERIODS = 3
"""Clock ticks until a caller's time is up: the first may come at once, and each further one takes
half of that time."""


class HeldAnswers(Feature):
    """Tracks since when sequences wait for their callers, and resumes them as callers choose."""

    def __init__(
        self,
        live: Mapping[int, Sequence],
        room: Room,
        turn: TurnBuilder,
        give_up: Callable[[Sequence], None],
    ) -> None:
        """`give_up` releases the slot of a sequence that cannot resume in place."""
        self._live, self._room, self._turn, self._give_up = live, room, turn, give_up
        self._since: dict[int, int] = {}
        """By held sequence: the number of clock ticks when its token was reported."""
        self._ticks = 0
        self._forked = self._alone = self._stayed = self._yields = 0

    def __len__(self) -> int:
        """Return the number of paused sequences."""
        return len(self._since)

    def note_results(self, rows: list[PlannedRow]) -> None:
        """Record which of these sequences are held, as their tokens were just reported."""
        for sequence in (row.sequence for row in rows):
            if sequence.is_held and sequence.phase is not Phase.FINISHED:
                self._since[sequence.uid] = self._ticks

    def close(self, sequence: Sequence) -> None:
        """Forget a finished sequence."""
        self._since.pop(sequence.uid, None)

    # -- a caller responds ----------------------------------------------------------------

    def _on_continue(self, event: Continue) -> list[Ending]:
        """Resume a request's sequences in place as far as there is room; the others queue. Returns
        the sequences that end. If a parent has ended in the meantime, the request is ending and
        nothing resumes."""
        uids = range(event.uid, event.uid + len(event.parents))
        living = {uid: self._live[uid] for uid in uids if uid in self._live}
        for sequence in living.values():
            if not sequence.is_held:
                raise ProtocolBug(f"a caller goes on, but not held is {sequence.describe()}")
        parents = dict(zip(uids, event.parents.tolist(), strict=True))
        parents = {uid: event.uid + parent for uid, parent in parents.items() if parent >= 0}
        if not living.keys() >= {*parents, *parents.values()}:
            return []
        before = {uid: living[uid].tokens.copy() for uid in parents.values()}
        forked = self._fork(parents, living)
        for uid, parent in parents.items():
            sequence, token = living[uid], int(event.token_ids[uid - event.uid])
            del self._since[uid]
            if parent != uid and uid not in forked:
                self._alone += 1
                self._become(sequence, before[parent])
            self._stayed += parent == uid
            sequence.append(token)
            if sequence.slot >= 0:
                self._turn.know(as_int32([sequence.slot]), as_int32([token]))
                self._room.running.resume(sequence)
            else:
                self._room.waiting.push(sequence)
        over = [sequence for uid, sequence in living.items() if uid not in parents]
        return [(sequence, End("stop")) for sequence in over]

    def _become(self, sequence: Sequence, tokens: Int32) -> None:
        """Make a sequence a copy by its tokens alone."""
        if sequence.slot >= 0:
            self._give_up(sequence)
        sequence.replace_tokens(tokens)

    def _fork(self, parents: dict[int, int], living: dict[int, Sequence]) -> set[int]:
        """Share parents' blocks where possible: both sequences hold blocks, and one more is free
        for what follows. All parents are read before any sequence resumes."""
        moves = [(living[uid], living[p]) for uid, p in parents.items() if uid != p]
        moves = [(to, source) for to, source in moves if to.slot >= 0 and source.slot >= 0]
        moves = moves[: max(0, self._room.credits)]
        self._turn.fork((to.slot, source.slot) for to, source in moves)
        self._room.budget.debit(len(moves))
        taken = [(to, source.tokens.copy()) for to, source in moves]
        for to, tokens in taken:
            blocks = len(tokens) // self._room.block_size + 1
            self._room.running.table.copy(to.slot, tokens, blocks)
        self._forked += len(moves)
        return {to.uid for to, _ in moves}

    # -- a caller is silent ---------------------------------------------------------------

    def _on_tick(self, event: HoldClock) -> list[Ending]:
        """End the sequences of requests that were fully held for too long."""
        self._ticks += 1
        over: list[Sequence] = []
        for group in self._complete():
            if self._ticks - max(self._since[s.uid] for s in group) >= _PERIODS:
                over += group
        return [(sequence, ends.NO_ANSWER) for sequence in over]

    def _complete(self) -> list[list[Sequence]]:
        """Return the live sequences of each request with all of them held."""
        live = self._live
        requests = {live[uid].group.uids for uid in self._since}
        groups = [[live[uid] for uid in uids if uid in live] for uids in requests]
        return [group for group in groups if all(s.uid in self._since for s in group)]

    @property
    def waits(self) -> bool:
        """Return True if a caller must act before the sequences can continue."""
        return bool(self._complete())

    def yielding(self) -> Sequence | None:
        """Return the youngest held sequence.

        A waiting sequence must not depend on a caller, least of all another sequence of the same
        request, since the caller waits for that one.
        """
        if any(sequence.phase is Phase.MATCHING for sequence in self._room.running):
            return None
        held = [sequence for sequence in self._room.running if sequence.is_held]
        self._yields += bool(held)
        return held[-1] if held else None

    def check_idle(self) -> None:
        """Raise `ProtocolBug` if a sequence is held."""
        if self._since:
            raise ProtocolBug(f"{sorted(self._since)} are held, though no sequence is alive")

    def figures(self) -> dict[str, int]:
        """Return the number of paused sequences; how many resumed since the start in place, as
        forks that share blocks, and as copies that match blocks; and how often one gave up its slot
        to a waiting request."""
        return {
            "held": len(self),
            "held_stayed": self._stayed,
            "held_forked": self._forked,
            "held_copied": self._alone,
            "held_yields": self._yields,
        }

    HANDLERS: ClassVar[Handlers] = {Continue: _on_continue, HoldClock: _on_tick}
