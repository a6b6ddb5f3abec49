"""Admission: waiting sequences receive slots (places in the running batch) and blocks."""

from __future__ import annotations

from nanoactor.messages.engine import Answer
from nanoactor.scheduling.config import SchedulerConfig
from nanoactor.scheduling.features.feature import Features
from nanoactor.scheduling.resources.room import Room
from nanoactor.scheduling.sequences.sequence import Phase, Sequence
from nanoactor.scheduling.statistics import SchedulerStatistics
from nanoactor.scheduling.steps.pipeline import Pipeline
from nanoactor.scheduling.steps.turns import TurnBuilder
from nanoactor.scheduling.steps.unanswered import UnansweredTurns


class AdmissionControl:
    """Decides when waiting sequences are admitted to the running batch, and takes their slots back.
    The scheduler calls it in each turn (the message to the block manager). `HeldSequences`,
    `Forking` and `BlockGrants` release and assign slots through it."""

    def __init__(
        self,
        config: SchedulerConfig,
        room: Room,
        features: Features,
        *,
        turn: TurnBuilder,
        pipeline: Pipeline,
        unanswered: UnansweredTurns,
        statistics: SchedulerStatistics,
    ) -> None:
        self._config, self._room, self._features = config, room, features
        self._turn, self._pipeline = turn, pipeline
        self._unanswered, self._statistics = unanswered, statistics
        self._full_version = -1
        """The prefill queue's `version` when prompts last filled the next step's budget; -1 if they
        have not yet."""

    # -- waiting sequences ----------------------------------------------------------------

    def admit_waiting(self) -> None:
        """Admit sequences from the head of the queue while the next step has token budget left for
        them."""
        room, prefills = self._room, self._room.running.prefills
        if not room.waiting or prefills.version == self._full_version:
            return
        budget = self._config.max_num_batched_tokens - prefills.num_left
        while room.budget.free_slots and budget > 0:
            if (head := room.head) is None:
                return
            blocks = -(-head.length // room.block_size)
            # A preempted sequence can be admitted only once all its results have arrived (known ==
            # scheduled).
            if head.last_step > self._pipeline.completed or room.credits < blocks:
                return
            # Wait for a running prompt to compute the shared prefix: a block can be found in the
            # prefix cache as soon as the step that computes it is planned.
            may_hit = self._config.prefix_caching and head.is_prompt_read
            if may_hit and prefills.will_compute_prefix_of(head):
                return
            room.waiting.pop(head)
            self._admit(head, blocks)
            budget -= head.target
        if budget <= 0:
            self._full_version = prefills.version

    def _admit(self, sequence: Sequence, blocks: int) -> None:
        budget = self._room.budget
        budget.debit(blocks)
        self._room.running.enter(sequence, budget.allocate_slot(), blocks)
        self._unanswered.note_admission(self._turn.number, sequence)
        self._turn.admit(sequence, blocks)
        self.note_admission(sequence)

    def note_admission(self, sequence: Sequence) -> None:
        """Record that the current turn assigns a slot to a sequence, and tell all features."""
        self._room.running.table.admission_turns[sequence.slot] = self._turn.number
        for feature in self._features:
            feature.admit(sequence, self._turn.number)

    # -- answers of the block manager -----------------------------------------------------

    def answer(self, event: Answer) -> list[Sequence | None]:
        """Process the answers to the oldest unanswered admissions. Return, for each of them, the
        sequence if it starts running now, else None."""
        pairs = zip(event.uids.tolist(), event.hits.tolist(), strict=True)
        return [self._answer_one(uid, hit) for uid, hit in pairs]

    def _answer_one(self, uid: int, hit: int) -> Sequence | None:
        """Process the answer to the oldest unanswered admission, which must be that of `uid`. `hit`
        is the number of tokens found in the prefix cache. Return the sequence if it starts running
        now, else None."""
        admission = self._unanswered.pop(uid)
        sequence, table = admission.sequence, self._room.running.table
        sequence.history.note_match(min(hit, sequence.prompt_length))
        if admission.step:
            self._statistics.discount_hits(hit)
        slot = sequence.slot
        # The sequence may have given up that slot.
        if slot < 0 or table.admission_turns[slot] != admission.turn:
            return None
        table.shared[slot] = 0
        if sequence.phase is not Phase.MATCHING:
            return None
        sequence.run()
        self._room.running.start(slot, hit)
        return sequence

    # -- slots are released ---------------------------------------------------------------

    def release_slot(self, sequence: Sequence) -> None:
        """Release a sequence's slot and free its blocks. Steps that are already planned may still
        use both."""
        self._turn.free(sequence.slot)
        self._room.budget.release_slot(sequence.slot, fence=self._pipeline.planned)
        for feature in self._features:
            feature.leave(sequence)
        self._room.running.leave(sequence)

    def release_held_slot(self) -> None:
        """Release the slot of a held sequence (one that waits for its caller) if another sequence
        waits for a slot and no step or answer is outstanding. Only one slot is released at a time:
        the blocks that it frees are counted before the next release."""
        is_busy = self._pipeline.in_flight or self._room.budget.oldest_unanswered is not None
        if is_busy or self._room.head is None:
            return
        candidates = [
            yield_candidate() for yield_candidate in self._features.frequent["sequence_to_yield"]
        ]
        if (sequence := next(filter(None, candidates), None)) is not None:
            self.release_slot(sequence)
            sequence.hold()
