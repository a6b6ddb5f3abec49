"""Held answers: behind each token their caller says what they go on with.

A held sequence never decodes. When all that is known of it is computed, a token is sampled behind
it and told to its caller, and not appended. From then on the sequence is *held*: no step is in
flight for it, and none is planned. Its caller says for all answers of the request at once which of
them each becomes a copy of, and which token follows; who says nothing for too long has lost them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from nanoactor.errors import ProtocolBug
from nanoactor.grammar.messages import KnownTokens
from nanoactor.messages import Continue, Fork, Int32
from nanoactor.scheduling.budget import BlockBudget
from nanoactor.scheduling.edges import BLOCKS, Send
from nanoactor.scheduling.plan_builder import as_int32
from nanoactor.scheduling.queues import RunningBatch, WaitingLine
from nanoactor.scheduling.sequence import Phase, Sequence

_PERIODS = 3
"""Ticks of the clock that a caller has: the first may come at once, and each other is half of the
time that it is given."""


class HeldAnswers:
    """Knows who waits for a caller since when, and has sequences go on as callers say."""

    def __init__(
        self, budget: BlockBudget, running: RunningBatch, waiting: WaitingLine, block_size: int
    ) -> None:
        self._budget = budget
        self._running = running
        self._waiting = waiting
        self._block_size = block_size
        self._since: dict[int, int] = {}
        """By sequence that is held: how often the clock had ticked when its token was told."""
        self._marks = self._ticks = 0
        self._forked = self._alone = self._stayed = self._yields = 0

    def __len__(self) -> int:
        """Return how many sequences are held."""
        return len(self._since)

    def note_told(self, sequences: Iterable[Sequence]) -> None:
        """Those of these that are held have just had a token told to their caller."""
        for sequence in sequences:
            if sequence.is_held and sequence.phase is not Phase.FINISHED:
                self._since[sequence.uid] = self._ticks

    def close(self, uid: int) -> None:
        """A sequence is over."""
        self._since.pop(uid, None)

    # -- a caller speaks ------------------------------------------------------------------

    def go_on(
        self,
        event: Continue,
        live: Mapping[int, Sequence],
        reserve: int,
        fence: int,
        give_up: Callable[[Sequence], None],
    ) -> tuple[list[Send], list[Sequence]]:
        """Have the answers of a request go on, as many as there is room for beside `reserve` where
        they are; the others `give_up` what they hold, and wait for their turn.

        Returns what to send, and who ends. Where somebody has ended meanwhile whom the caller
        counted on, the request is ending, and nothing goes on.
        """
        uids = range(event.uid, event.uid + len(event.parents))
        living = {uid: live[uid] for uid in uids if uid in live}
        for sequence in living.values():
            if not sequence.is_held:
                raise ProtocolBug(f"a caller goes on, but not held is {sequence.describe()}")
        parents = dict(zip(uids, event.parents.tolist(), strict=True))
        parents = {uid: event.uid + parent for uid, parent in parents.items() if parent >= 0}
        if not living.keys() >= {*parents, *parents.values()}:
            return [], []
        before = {uid: living[uid].tokens.copy() for uid in parents.values()}
        out, forked = self._fork(parents, living, reserve, fence)
        known: list[tuple[int, int]] = []
        for uid, parent in parents.items():
            sequence, token = living[uid], int(event.token_ids[uid - event.uid])
            del self._since[uid]
            if parent != uid and uid not in forked:
                self._alone += 1
                self._leave(sequence, before[parent], give_up)
            self._stayed += parent == uid
            sequence.append(token)
            if sequence.slot >= 0:
                known.append((sequence.slot, token))
                self._running.resume(sequence)
            else:
                sequence.phase = Phase.WAITING
                self._waiting.push(sequence)
        if known:
            slots, tokens = map(as_int32, zip(*known, strict=True))
            out.append((BLOCKS, KnownTokens(slots, as_int32([1] * len(known)), tokens)))
        return out, [sequence for uid, sequence in living.items() if uid not in parents]

    def _leave(
        self, sequence: Sequence, tokens: Int32, give_up: Callable[[Sequence], None]
    ) -> None:
        """Have a sequence become a copy by the tokens alone."""
        if sequence.slot >= 0:
            give_up(sequence)
        sequence.kept = tokens

    def _fork(
        self, parents: dict[int, int], living: dict[int, Sequence], reserve: int, fence: int
    ) -> tuple[list[Send], set[int]]:
        """Have those share their parents' blocks that can: both hold some, and there is one more
        for what follows. All is taken as it is before anybody goes on."""
        moves = [(living[uid], living[p]) for uid, p in parents.items() if uid != p]
        moves = [(to, source) for to, source in moves if to.slot >= 0 and source.slot >= 0]
        moves = moves[: max(0, self._budget.credits - reserve)]
        if not moves:
            return [], set()
        message = Fork(
            as_int32(to.slot for to, _ in moves), as_int32(s.slot for _, s in moves), fence
        )
        self._budget.debit(len(moves))
        self._budget.expect(fence)
        taken = [(to, *self._taken(source)) for to, source in moves]
        for to, *_ in taken:
            to.family.leave(to)
        for to, tokens, marks, shared, lent in taken:
            full = len(marks)
            to.family.marks[to.uid], to.shared = marks, shared
            to.family.join(to, lent)
            self._running.table.copy(to.slot, tokens, full + 1, full * self._block_size)
        self._forked += len(moves)
        return [(BLOCKS, message)], {to.uid for to, _ in moves}

    def _taken(self, source: Sequence) -> tuple[Int32, list[int], int, int]:
        """Return what a copy has of it: tokens; names of its full blocks, of which so many are in
        the prefix cache, and so many are the prompt's and lent."""
        full = source.length // self._block_size
        marks = source.family.marks.setdefault(source.uid, [])
        while len(marks) < full:
            self._marks += 1
            marks.append(self._marks)
        lent = min(source.lent, full)
        return source.tokens.copy(), marks[:full], min(source.shared, full), lent

    # -- a caller is silent ---------------------------------------------------------------

    def tick(self, live: Mapping[int, Sequence]) -> list[Sequence]:
        """The clock ticks: return those whose request was held as a whole for too long."""
        self._ticks += 1
        over: list[Sequence] = []
        for family in self._complete(live):
            if self._ticks - max(self._since[s.uid] for s in family) >= _PERIODS:
                over += family
        return over

    def _complete(self, live: Mapping[int, Sequence]) -> list[list[Sequence]]:
        """Return the answers of each request of which all that live are held."""
        requests = {live[uid].family.uids for uid in self._since}
        families = [[live[uid] for uid in uids if uid in live] for uids in requests]
        return [family for family in families if all(s.uid in self._since for s in family)]

    def awaits_a_caller(self, live: Mapping[int, Sequence]) -> bool:
        """Tell whether it is a caller's turn."""
        return bool(self._complete(live))

    def who_yields(self) -> Sequence | None:
        """Return who gives up its place where nobody else can go on: the youngest that is held.

        Nobody who waits may depend on a caller; the other answers to a request least of all, as
        the caller waits for them.
        """
        if any(sequence.phase is Phase.MATCHING for sequence in self._running):
            return None
        held = [sequence for sequence in self._running if sequence.is_held]
        self._yields += bool(held)
        return held[-1] if held else None

    def check_idle(self) -> None:
        """Raise `ProtocolBug` if anybody is held."""
        if self._since:
            raise ProtocolBug(f"{sorted(self._since)} are held, though nobody lives")

    def figures(self) -> dict[str, int]:
        """Return how many are held; and of the answers that went on since the start, how many did
        so where they were, as copies that share blocks, and as copies that match them; and how
        often one gave up its place to somebody who waited."""
        return {
            "held": len(self),
            "held_stayed": self._stayed,
            "held_forked": self._forked,
            "held_copied": self._alone,
            "held_yields": self._yields,
        }
