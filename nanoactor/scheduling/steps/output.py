"""Buffer of tokens, log-probabilities and end reasons on their way to the detokenizer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanoactor.messages.engine import Finish, Int32, Int64, StepDone, Tokens
from nanoactor.messages.pooling import Float32, RequestVectors
from nanoactor.messages.scores import RequestScores, TokenScores
from nanoactor.runtime.codec import copy_arrays
from nanoactor.scheduling.sequences.ends import End
from nanoactor.scheduling.sequences.ids import StopIds
from nanoactor.scheduling.sequences.sequence import History, Sequence
from nanoactor.scheduling.sequences.table import DecodeBatch, Slots
from nanoactor.scheduling.statistics import SchedulerStatistics
from nanoactor.scheduling.steps.planned import PlannedStep, as_int32, as_int64
from nanoactor.scheduling.steps.queues import RunningBatch
from nanoactor.scheduling.steps.results import Results

NO_TOKEN = -1
_NOTHING = (as_int64(()), as_int32(()), as_int32(()))


class OutputBuffer:
    """Appends sampled tokens to their sequences, and buffers tokens and `Finish` messages until
    they are sent to the detokenizer."""

    def __init__(self, running: RunningBatch, statistics: SchedulerStatistics) -> None:
        self.stop_ids = StopIds()
        self._running = running
        self._table = running.table
        self._statistics = statistics
        self._new: list[tuple[Int64, Int32, Int32]] = []
        """(uids, indices in the output, tokens) of the tokens that have not been sent yet."""
        self._finishes: list[Finish] = []
        self._scores: RequestScores | None = None
        self._vectors: list[tuple[int, Float32]] = []
        """(uid, vector) pairs that have not been sent yet."""
        self._step = self._discarded_until = 0
        """Number of the step being processed, and of the last step with discarded results."""
        self._refusing: list[Sequence] = []
        """Sequences that sampled an end-of-sequence token before their constrained output, and must
        continue."""

    def record_scores(self, done: PlannedStep, event: StepDone) -> None:
        """Record a step's log-probabilities, except those of dropped results. Call before
        `append_results`."""
        self._step = done.step
        if (step_scores := event.scores) is None:
            return
        runs = [(row.sequence, True, row.num_scored) for row in done.rows if row.num_scored]
        accepted = [sequence.accepts(NO_TOKEN, done.step) for sequence, _, _ in runs]
        decode, num_decodes = done.decode_batch.slots, len(done.decode_batch.slots)
        samplers = [
            *range(num_decodes),
            *(num_decodes + n for n, row in enumerate(done.rows) if row.samples),
        ]
        tokens = event.token_ids[np.searchsorted(samplers, step_scores.rows)].tolist()
        for number, token in zip(step_scores.rows.tolist(), tokens, strict=True):
            if number < num_decodes:
                (sequence,) = self._running.owners(decode[number : number + 1])
            else:
                sequence = done.rows[number - num_decodes].sequence
            runs.append((sequence, False, 1))
            accepted.append(sequence.accepts(token, done.step))
        scores = _selected(step_scores.scores, np.repeat(accepted, [count for _, _, count in runs]))
        if runs := [run for run, lives in zip(runs, accepted, strict=True) if lives]:
            sequences, prompts, counts = map(list, zip(*runs, strict=True))
            uids = as_int64(sequence.uid for sequence in sequences)
            flags = np.array(prompts, np.bool_)
            self._scores = RequestScores(uids, flags, as_int32(counts), scores)

    def add_vector(self, uid: int, vector: Float32) -> None:
        """Queue a request's pooled vector (float32) to be sent."""
        self._vectors.append((uid, vector))

    def append_results(self, results: Results) -> tuple[list[tuple[Int32, Int32]], list[Sequence]]:
        """Append a step's tokens to their sequences. For held sequences, whose callers choose the
        tokens to append, only report them.

        Returns the (slots, tokens) arrays of the sequences that still hold a slot, and the
        sequences whose new token may end them or their free text.
        """
        self._statistics.count_overrun(results.frozen)
        appended = self._append_singly(
            [row.sequence for row, _ in results.singles], [token for _, token in results.singles]
        )
        slots, tokens, candidates = self._append_decodes(results.batch, results.tokens)
        known = [(s.slot, token) for s, token in appended if s.slot >= 0]
        single_slots, single_tokens = zip(*known, strict=True) if known else ((), ())
        return (
            [(as_int32(single_slots), as_int32(single_tokens)), (slots, tokens)],
            [sequence for sequence, _ in appended] + candidates,
        )

    def _append_singly(
        self, sequences: list[Sequence], tokens: list[int]
    ) -> list[tuple[Sequence, int]]:
        """Append each token to its sequence, or, for held sequences, only report it to the caller.
        Return the extended sequences with their tokens."""
        appended: list[tuple[Sequence, int]] = []
        for sequence, token in zip(sequences, tokens, strict=True):
            if not sequence.accepts(token, self._step):
                self._drop(sequence, token)
            elif sequence.spec.held:
                self._report(sequence, token)
            else:
                self.append(sequence, token)
                appended.append((sequence, token))
        return appended

    def _drop(self, sequence: Sequence, token: int) -> None:
        """Drop a sampled token. If the sequence refused it (an end-of-sequence token before the
        constrained output), record the sequence for `take_refused`."""
        self._statistics.count_overrun()
        if sequence.accepts_step(self._step):
            self._refusing.append(sequence)

    def _report(self, sequence: Sequence, token: int) -> None:
        """Report a token to the caller without appending it. The caller chooses the token to
        append."""
        uids, indices = as_int64([sequence.uid]), as_int32([sequence.note_reported()])
        self._new.append((uids, indices, as_int32([token])))

    def append(self, sequence: Sequence, token: int) -> None:
        """Append a token to a sequence and queue it to be sent."""
        index = sequence.append(token)
        self._new.append((as_int64([sequence.uid]), as_int32([index]), as_int32([token])))

    def append_run(self, sequence: Sequence, run: Int32) -> tuple[Int32, End | None]:
        """Append the tokens of `run` up to and including one that ends the sequence. Return the
        appended tokens, and the end reason or None."""
        count, end = 0, None
        while count < len(run) and end is None:
            self.append(sequence, int(run[count]))
            count, end = count + 1, sequence.end_reached()
        return run[:count], end

    def _append_decodes(
        self, batch: DecodeBatch, tokens: Int32
    ) -> tuple[Int32, Int32, list[Sequence]]:
        """Append the tokens of a decode batch. Return the slots and tokens of the sequences that
        still hold a slot, and the sequences whose new token may end them or their free text."""
        candidates: list[Sequence] = []
        if self._step <= self._discarded_until or not self._table.all_occupied(batch):
            owners = self._running.owners(batch.slots)
            in_place = self._table.occupied[batch.slots]
            in_place &= np.array([owner.accepts_step(self._step) for owner in owners], np.bool_)
            moved = [owners[row] for row in np.flatnonzero(~in_place)]
            candidates = [s for s, _ in self._append_singly(moved, tokens[~in_place].tolist())]
            batch, tokens = self._table.positions.batch_of(batch.slots[in_place]), tokens[in_place]
        watched = self.stop_ids.is_watched(tokens)
        if watched.any():
            refused = watched & self._refused(batch.slots, tokens, watched)
            if refused.any():
                self._append_singly(
                    self._running.owners(batch.slots[refused]), tokens[refused].tolist()
                )
                batch = self._table.positions.batch_of(batch.slots[~refused])
                tokens, watched = tokens[~refused], watched[~refused]
        columns = self._table.append(batch, tokens)
        self._new.append((columns.uids, columns.indices, tokens))
        ends = columns.at_limit | watched
        if ends.any():
            candidates += self._running.owners(batch.slots[ends])
        return columns.slots32, tokens, candidates

    def discard_results(self, sequence: Sequence, step: int) -> None:
        """Discard a sequence's results of all steps up to `step`."""
        self._discarded_until = step
        sequence.discard_results(step)

    def take_refused(self) -> list[Sequence]:
        """Return the sequences that have refused an end-of-sequence token since the last call,
        because their constrained output is still to come."""
        refused, self._refusing = self._refusing, []
        return refused

    def _refused(
        self, slots: Slots, tokens: Int32, watched: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Return a bool array that is True for each token that would end its sequence before the
        constrained output. Only tokens marked in `watched` are checked."""
        refused = np.zeros(len(slots), np.bool_)
        owners = self._running.owners(slots[watched])
        ids = tokens[watched].tolist()
        refused[watched] = [s.refuses(token) for s, token in zip(owners, ids, strict=True)]
        return refused

    def finish(self, uid: int, end: End, sequence: Sequence | None = None) -> None:
        """Queue the `Finish` message of a sequence. If `sequence` is None, the sequence never ran,
        and its history is empty."""
        history = sequence.history if sequence else History()
        finish = Finish(
            uid,
            **end._asdict(),
            cached_tokens=max(0, history.cached_tokens),
            preemptions=history.preemptions,
            began=history.began,
        )
        self._finishes.append(finish)

    def flush(self, step: int) -> Tokens | None:
        """Return all output since the last call, or None if there is none. `step` is the number of
        the last finished step."""
        if not self._new and not self._finishes and self._scores is None:
            return None
        new = self._new or [_NOTHING]
        uids, indices, ids = (
            new[0] if len(new) == 1 else map(np.concatenate, zip(*new, strict=True))
        )
        finishes, vectors = tuple(self._finishes), RequestVectors.of(self._vectors)
        tokens = Tokens(step, uids, indices, ids, finishes, scores=self._scores, vectors=vectors)
        self._statistics.output_tokens += len(uids)
        self._new, self._finishes, self._scores, self._vectors = [], [], None, []
        return tokens


def _selected(scores: TokenScores, kept: NDArray[np.bool_]) -> TokenScores:
    """Return a copy of the scores for which `kept`, bool (scores,), is True."""
    if kept.all():
        return copy_arrays(scores)
    tops = np.repeat(kept, scores.counts)
    return TokenScores(
        scores.logprobs[kept],
        scores.ranks[kept],
        scores.counts[kept],
        scores.top_ids[tops],
        scores.top_logprobs[tops],
    )
