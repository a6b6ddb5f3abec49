"""Several answers to one prompt: it is computed once, then the others begin as copies."""

from __future__ import annotations

from collections.abc import Callable

from nanoactor.messages import Match
from nanoactor.scheduling.budget import BlockBudget
from nanoactor.scheduling.plan_builder import Fork, PrefillChunk
from nanoactor.scheduling.queues import RunningBatch, WaitingLine
from nanoactor.scheduling.sequence import Phase, Sequence


class Forking:
    """Decides who follows, who is forked, and who computes or finds the prompt by itself."""

    def __init__(
        self,
        budget: BlockBudget,
        running: RunningBatch,
        waiting: WaitingLine,
        block_size: int,
        prefix_caching: bool,
    ) -> None:
        self._budget = budget
        self._running = running
        self._waiting = waiting
        self._block_size = block_size
        self._prefix_caching = prefix_caching

    def admit(self, answers: list[Sequence]) -> None:
        """Have the first answer of a new request wait for a slot, and the others follow it."""
        for answer in answers:
            answer.phase = Phase.FOLLOWING
            answer.family.followers.append(answer)
        if answers:
            self.note_end(answers[0])

    def note_end(self, sequence: Sequence) -> None:
        """One is over: of those that followed it the first goes through the prompt."""
        followers = sequence.family.followers
        if followers:
            self._wait(followers.pop(0))

    def _wait(self, sequence: Sequence) -> None:
        sequence.phase = Phase.WAITING
        self._waiting.push(sequence)

    def fork(
        self, chunks: list[PrefillChunk], pages: int, reserve: Callable[[], int]
    ) -> list[Fork]:
        """Begin the answers that follow where a chunk ends their prompt, by priority, as far as
        there are slots and blocks beside `reserve`, and nobody before them waits; `pages` are those
        of the encoder cache that the queue may spend. The others wait for themselves."""
        followers: list[tuple[Sequence, int]] = []
        for row, chunk in enumerate(chunks):
            if chunk.is_last and (due := chunk.sequence.family.followers):
                followers += [(follower, row) for follower in due]
                due.clear()
        forks: list[Fork] = []
        for follower, row in sorted(followers, key=lambda each: each[0].priority_key):
            need = int(follower.prompt_length % self._block_size > 0)
            if self._may_fork(follower, pages, need + reserve()):
                forks.append(Fork(row, self._begin(follower, chunks[row], need)))
            else:
                self._wait(follower)
        return forks

    def _may_fork(self, follower: Sequence, pages: int, blocks: int) -> bool:
        head = self._waiting.head(pages)
        first = head is None or follower.priority_key < head.priority_key
        return first and self._budget.free_slots > 0 and self._budget.credits >= blocks

    def _begin(self, follower: Sequence, chunk: PrefillChunk, need: int) -> PrefillChunk:
        source, size = chunk.sequence, self._block_size
        self._budget.debit(need)
        slot, length = self._budget.take_slot(), source.prompt_length
        self._running.enter_computed(follower, slot, -(-length // size))
        follower.phase, follower.shared = Phase.RUNNING, source.shared
        follower.cached_tokens = length
        source.family.lend(source, follower, length // size, size)
        return PrefillChunk(follower, slot, chunk.start, 0, is_last=True)

    def match(self, sequence: Sequence, need: int) -> Match:
        """Return what asks for the blocks of a sequence's tokens, `need` in all."""
        return Match(
            sequence.uid,
            sequence.slot,
            sequence.kept,
            sequence.hashes,
            need,
            items=None if sequence.items is None else sequence.items.message,
            most_hits=sequence.most_hits,
            sibling=self._lend(sequence),
        )

    def _lend(self, to: Sequence) -> int:
        """Return the slot of an answer that holds the blocks of the same prompt, from which a match
        takes as many as it may; -1: there is none, or the prefix cache serves as well."""
        family = to.family
        if self._prefix_caching or len(family.uids) == 1:
            return -1
        if (lender := family.lender(self._running)) is None:
            return -1
        size = self._block_size
        blocks = min(to.prompt_length, to.length - 1, to.most_hits) // size
        family.lend(lender, to, blocks, size)
        return lender.slot
