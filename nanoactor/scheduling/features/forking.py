"""Forking: the sequences of a request share its prompt. One sequence computes it, and the others
start as copies."""

from __future__ import annotations

from collections.abc import Callable

from nanoactor.messages.rows import KEEP, SAMPLE
from nanoactor.scheduling.features.feature import Feature
from nanoactor.scheduling.resources.room import Room
from nanoactor.scheduling.sequences.sequence import Sequence
from nanoactor.scheduling.steps.planned import PlannedRow


class Forking(Feature):
    """Decides which sequences of a request wait for the prompt, start as copies, or prefill it
    themselves. A *follower* is a sequence that waits until another sequence of its request has
    computed the prompt."""

    def __init__(self, room: Room, admit: Callable[[Sequence], None]) -> None:
        """`admit` is called with each sequence that starts as a copy, once it has a slot."""
        self._room, self._admit = room, admit

    def arrive(self, sequences: list[Sequence]) -> None:
        """Queue the first sequence of a new request and make the others its followers."""
        for sequence in sequences:
            sequence.follow()
        if sequences:
            self._room.waiting.push(sequences[0].group.followers.pop(0))

    def close(self, sequence: Sequence) -> None:
        """Remove a follower that has ended. If the sequence that ended was no follower, queue the
        first follower, so that it prefills the prompt."""
        followers = sequence.group.followers
        if sequence in followers:
            followers.remove(sequence)
        elif followers:
            self._room.waiting.push(followers.pop(0))

    def plan_rows(self, step: int, rows: list[PlannedRow]) -> list[PlannedRow]:
        """Start the followers of each row that completes their prompt, in priority order, while
        slots and blocks are free and no waiting sequence has a higher priority. Queue the remaining
        followers. Return the rows of the copies."""
        followers: list[tuple[Sequence, PlannedRow]] = []
        for row in rows:
            completes_prompt = row.wants & (SAMPLE | KEEP)
            if completes_prompt and row.length and (waiting := row.sequence.group.followers):
                followers += [(follower, row) for follower in waiting]
                waiting.clear()
        copies: list[PlannedRow] = []
        for follower, row in sorted(followers, key=lambda each: each[0].priority_key):
            blocks = int(follower.prompt_length % self._room.block_size > 0)
            if self._can_fork(follower, blocks):
                copies.append(self._start_copy(follower, row, blocks))
            else:
                self._room.waiting.push(follower)
        return copies

    def _can_fork(self, follower: Sequence, blocks: int) -> bool:
        head = self._room.head
        goes_first = head is None or follower.priority_key < head.priority_key
        return goes_first and self._room.budget.free_slots > 0 and self._room.credits >= blocks

    def _start_copy(self, follower: Sequence, row: PlannedRow, blocks: int) -> PlannedRow:
        budget = self._room.budget
        budget.debit(blocks)
        slot, length = budget.allocate_slot(), row.sequence.prompt_length
        self._room.running.enter_computed(follower, slot, -(-length // self._room.block_size))
        follower.run()
        follower.history.note_match(length)
        self._admit(follower)
        wants = row.wants & (SAMPLE | KEEP)
        return PlannedRow(follower, slot, row.start, 0, wants, source=row.slot)
