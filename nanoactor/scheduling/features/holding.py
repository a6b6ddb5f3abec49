"""Held sequences, whose caller chooses after each token how they continue (for example, beam
search).

Such a sequence takes no part in decode batches. Once all its known tokens are computed, the next
token is sampled and reported to the caller, but not appended. From then on the sequence is *held*:
no step for it is in flight or planned. The caller responds for all sequences of the request at
once. For each sequence, the caller names the parent that the sequence becomes a copy of (possibly
itself) and the token to append. If the caller takes too long, the sequences end.
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

_TIMEOUT_TICKS = 3
"""Number of clock ticks after which a caller is overdue. The first tick may come immediately; later
ticks are half of `hold_timeout` apart."""


class HeldSequences(Feature):
    """Resumes held sequences, which wait until their callers choose their next tokens. Ends
    sequences whose callers are overdue."""

    def __init__(
        self,
        live: Mapping[int, Sequence],
        room: Room,
        turn: TurnBuilder,
        release_slot: Callable[[Sequence], None],
    ) -> None:
        """`live` maps uids to live sequences. `release_slot` releases the slot of a sequence that
        cannot resume in place."""
        self._live, self._room, self._turn, self._release_slot = live, room, turn, release_slot
        self._held_since: dict[int, int] = {}
        """Tick count at which each held sequence's token was reported, by uid of the sequence."""
        self._ticks = 0
        self._forked = self._copied = self._stayed = self._yields = 0

    def __len__(self) -> int:
        """Return the number of held sequences."""
        return len(self._held_since)

    def note_results(self, rows: list[PlannedRow]) -> None:
        """Mark sequences as held if the tokens that these rows sampled were reported to their
        callers."""
        for sequence in (row.sequence for row in rows):
            if sequence.is_held and sequence.phase is not Phase.FINISHED:
                self._held_since[sequence.uid] = self._ticks

    def close(self, sequence: Sequence) -> None:
        """Stop tracking a finished sequence."""
        self._held_since.pop(sequence.uid, None)

    # -- responses of callers -------------------------------------------------------------

    def _on_continue(self, event: Continue) -> list[Ending]:
        """Resume a request's held sequences: those with a slot continue in place, the others are
        queued. Return the sequences that end because the caller dropped them. If any sequence
        involved has ended in the meantime, the whole request is ending, and nothing resumes."""
        uids = range(event.uid, event.uid + len(event.parents))
        living = {uid: self._live[uid] for uid in uids if uid in self._live}
        for sequence in living.values():
            if not sequence.is_held:
                raise ProtocolBug(
                    f"a caller continued a sequence that is not held: {sequence.describe()}"
                )
        parents = dict(zip(uids, event.parents.tolist(), strict=True))
        parents = {uid: event.uid + parent for uid, parent in parents.items() if parent >= 0}
        if not living.keys() >= {*parents, *parents.values()}:
            return []
        before = {uid: living[uid].tokens.copy() for uid in parents.values()}
        forked = self._fork(parents, living)
        for uid, parent in parents.items():
            sequence, token = living[uid], int(event.token_ids[uid - event.uid])
            del self._held_since[uid]
            if parent != uid and uid not in forked:
                self._copied += 1
                self._replace_with_copy(sequence, before[parent])
            self._stayed += parent == uid
            sequence.append(token)
            if sequence.slot >= 0:
                self._turn.add_known(as_int32([sequence.slot]), as_int32([token]))
                self._room.running.prefills.push_again(sequence)
            else:
                self._room.waiting.push(sequence)
        ended = [sequence for uid, sequence in living.items() if uid not in parents]
        return [(sequence, End("stop")) for sequence in ended]

    def _replace_with_copy(self, sequence: Sequence, tokens: Int32) -> None:
        """Make a sequence a copy of its parent that shares no blocks: release its slot and replace
        its tokens."""
        if sequence.slot >= 0:
            self._release_slot(sequence)
        sequence.replace_tokens(tokens)

    def _fork(self, parents: dict[int, int], living: dict[int, Sequence]) -> set[int]:
        """Turn sequences into forks (copies that share blocks) of their parents where possible, and
        return the uids of the forks. `parents` maps uids to the uids of the parents. A fork
        requires that both sequences have a slot and that one more block is free. Tokens of all
        parents are read before any sequence resumes."""
        forks = [(living[uid], living[p]) for uid, p in parents.items() if uid != p]
        forks = [
            (target, source) for target, source in forks if target.slot >= 0 and source.slot >= 0
        ]
        forks = forks[: max(0, self._room.credits)]
        self._turn.fork((target.slot, source.slot) for target, source in forks)
        self._room.budget.debit(len(forks))
        tokens_of = [(target, source.tokens.copy()) for target, source in forks]
        for target, tokens in tokens_of:
            blocks = len(tokens) // self._room.block_size + 1
            self._room.running.table.copy(target.slot, tokens, blocks)
        self._forked += len(forks)
        return {target.uid for target, _ in forks}

    # -- overdue callers ------------------------------------------------------------------

    def _on_tick(self, event: HoldClock) -> list[Ending]:
        """Return the sequences of each request whose live sequences have all been held for too
        long, with the end reason `NO_ANSWER`."""
        self._ticks += 1
        expired: list[Sequence] = []
        for group in self._fully_held():
            if self._ticks - max(self._held_since[s.uid] for s in group) >= _TIMEOUT_TICKS:
                expired += group
        return [(sequence, ends.NO_ANSWER) for sequence in expired]

    def _fully_held(self) -> list[list[Sequence]]:
        """Return, for each request whose live sequences are all held, the list of these
        sequences."""
        live = self._live
        requests = {live[uid].group.uids for uid in self._held_since}
        groups = [[live[uid] for uid in uids if uid in live] for uids in requests]
        return [group for group in groups if all(s.uid in self._held_since for s in group)]

    @property
    def is_waiting(self) -> bool:
        """True if any request can continue only after its caller responds."""
        return bool(self._fully_held())

    def sequence_to_yield(self) -> Sequence | None:
        """Return the running held sequence with the lowest priority, or None if there is none.

        Also returns None while any sequence waits for its prefix-cache lookup. A sequence that
        waits for a slot must not have to wait for a caller. If it belongs to the same request as
        the held ones, their caller waits for it in turn, so neither would make progress.
        """
        if any(sequence.phase is Phase.MATCHING for sequence in self._room.running):
            return None
        held = [sequence for sequence in self._room.running if sequence.is_held]
        self._yields += bool(held)
        return held[-1] if held else None

    def check_idle(self) -> None:
        """Raise `ProtocolBug` if any sequence is still held."""
        if self._held_since:
            raise ProtocolBug(
                f"requests {sorted(self._held_since)} are held, but no sequence is alive"
            )

    def figures(self) -> dict[str, int]:
        """Return the number of held sequences, and counts since the start: sequences resumed as
        themselves, forks that share blocks, copies that share none, and slots that held sequences
        gave up for waiting ones."""
        return {
            "held": len(self),
            "held_stayed": self._stayed,
            "held_forked": self._forked,
            "held_copied": self._copied,
            "held_yields": self._yields,
        }

    HANDLERS: ClassVar[Handlers] = {Continue: _on_continue, HoldClock: _on_tick}
