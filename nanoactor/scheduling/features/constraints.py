"""Scheduling of constrained sequences, whose next tokens must follow a grammar.

A constrained sequence does not take part in decode batches, so that no other sequence waits for its
masks. Its next token is sampled once every rank holds the mask for that token. The sampled token is
then known to the host, and its position is computed like a prompt position. The scheduler sends the
token to the grammar actor. The grammar actor sends the next mask to the ranks, and each rank
reports when it has the mask.

A sequence may switch between free text and text under its grammar. It then continues after the
newest token that the host has received, and its results from steps in flight are discarded.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from nanoactor.errors import ProtocolBug
from nanoactor.messages.engine import Int32
from nanoactor.messages.grammar import (
    BeginGrammar,
    CloseGrammars,
    DropMasks,
    ForcedTokens,
    GrammarsFailed,
    GrammarTokens,
    MaskClock,
    MasksReady,
    OpenGrammar,
)
from nanoactor.messages.rows import SAMPLE
from nanoactor.scheduling.edges import GRAMMAR, Outgoing
from nanoactor.scheduling.features.feature import Ending, Feature, Handlers
from nanoactor.scheduling.resources.rank_resources import RankResources
from nanoactor.scheduling.sequences import ends
from nanoactor.scheduling.sequences.free_text import NO_GATE
from nanoactor.scheduling.sequences.grammar_state import GrammarState
from nanoactor.scheduling.sequences.sequence import Phase, Sequence
from nanoactor.scheduling.steps.output import OutputBuffer
from nanoactor.scheduling.steps.pipeline import Pipeline
from nanoactor.scheduling.steps.planned import PlannedRow, as_int32, as_int64
from nanoactor.scheduling.steps.queues import RunningBatch
from nanoactor.scheduling.steps.turns import TurnBuilder


class Constraints(Feature):
    """Opens grammars, requests their masks, and plans a sampling row for each sequence whose mask
    every rank holds."""

    def __init__(
        self,
        running: RunningBatch,
        output: OutputBuffer,
        pipeline: Pipeline,
        *,
        ranks: int,
        jumps: bool = True,
    ) -> None:
        """`output` and `pipeline` are used to discard results of steps in flight. If `jumps` is
        True, tokens that the grammar forces are appended without sampling."""
        self._running, self._output, self._pipeline = running, output, pipeline
        self._jumps = jumps
        self._out: list[Outgoing] = []
        self._finished: list[int] = []
        """Uids of finished sequences whose masks the runners may drop."""
        self._open: dict[int, Sequence] = {}
        """Sequences with an open grammar, by uid."""
        self._masks = RankResources("mask", ranks, timeout_ticks=2)
        """Requested mask of each sequence, by uid. The version of a mask is the position that it
        applies to. A sequence has no entry while its text is free."""
        self._pending_runs = 0
        """Number of sequences with forced tokens that have not been appended yet."""
        self._mask_delays = [0, 0, 0]
        """Number of masks used in the first possible step, in the step after it, and later."""
        self._num_forced = 0
        """Number of forced tokens appended since the start."""

    @property
    def is_waiting(self) -> bool:
        """True if any requested mask is missing on a rank."""
        return self._masks.missing > 0

    def admit(self, sequence: Sequence, turn: int) -> None:
        """Open the grammar of an admitted sequence unless it is already open. If the grammar
        already applies, also request the first mask."""
        uid, grammar = sequence.uid, sequence.grammar
        if grammar is None or uid in self._open:
            return
        self._open[uid] = sequence
        covered = as_int32(grammar.pending if grammar.applies else ())
        first = sequence.length - len(covered) if grammar.applies else -1
        # Output logprobs need sampled rows. Prompt logprobs must be reported before the output
        # ends.
        jumps = self._jumps and max(sequence.spec.logprobs, sequence.prompt_logprobs) < 0
        fields = (uid, sequence.spec.grammar, first, covered, jumps, sequence.limit)
        self._out.append((GRAMMAR, OpenGrammar(*fields)))
        if grammar.applies:
            self._masks.request(uid, sequence.length)

    def close(self, sequence: Sequence) -> None:
        """Close the grammar of a finished sequence. Its mask may still be in flight."""
        if self._open.pop(sequence.uid, None) is None:
            return
        self._masks.drop(sequence.uid)
        assert sequence.grammar is not None
        self._pending_runs -= sequence.grammar.run is not None
        self._finished.append(sequence.uid)

    # -- switching between free text and the grammar --------------------------------------

    def note_token(self, sequence: Sequence) -> None:
        """Update a sequence's grammar state after a new token, which may end one section of free
        text or make the grammar start or stop applying."""
        if (grammar := sequence.grammar) is None:
            return
        token, before = int(sequence.tokens[-1]), grammar.gate
        grammar.gate = grammar.gate_after(sequence.length - sequence.prompt_length - 1, token)
        if grammar.applies and before != NO_GATE:
            self._begin_grammar(sequence, grammar, [token])
        elif not grammar.applies and before == NO_GATE:
            self._masks.drop(sequence.uid)
            grammar.pending = [token]
            self._rewind(sequence)
        elif not grammar.applies and token == grammar.last_gate:  # the device froze the slot
            self._rewind(sequence)

    def note_refused(self, sequences: list[Sequence]) -> None:
        """End the reasoning of sequences that sampled an end-of-sequence token while reasoning.
        From now on, their grammars apply."""
        for sequence in sequences:
            assert sequence.grammar is not None
            sequence.grammar.gate = NO_GATE
            self._begin_grammar(sequence, sequence.grammar, [])

    def _begin_grammar(self, sequence: Sequence, grammar: GrammarState, tokens: list[int]) -> None:
        """Make a grammar apply and request its next mask. `tokens` are the tokens that ended the
        free text; they are sent to the grammar."""
        covered = as_int32(grammar.pending + tokens)
        self._out.append((GRAMMAR, BeginGrammar(sequence.uid, sequence.length, covered)))
        self._masks.request(sequence.uid, sequence.length)
        self._rewind(sequence)

    def _rewind(self, sequence: Sequence) -> None:
        """Make a sequence continue after its newest known token, and discard its results from steps
        in flight."""
        self._output.discard_results(sequence, self._pipeline.planned)
        if sequence.slot >= 0:
            self._running.rewind(sequence)

    # -- masks and forced tokens ----------------------------------------------------------

    def note_results(self, rows: list[PlannedRow]) -> None:
        """Queue the positions of the sampled tokens for computation, send the tokens to the grammar
        actor, and request the next masks."""
        chosen = (row.sequence for row in rows if row.is_choice)
        live = [s for s in chosen if s.phase is not Phase.FINISHED and s.is_constrained]
        for sequence in live:
            self._running.prefills.push_again(sequence)
        live = [sequence for sequence in live if sequence.uid in self._masks]
        if not live:
            return
        message = GrammarTokens(
            as_int64(sequence.uid for sequence in live),
            as_int32(sequence.length - 1 for sequence in live),
            as_int32(int(sequence.tokens[-1]) for sequence in live),
        )
        self._out.append((GRAMMAR, message))
        for sequence in live:
            self._request_mask(sequence, sequence.length)

    def _request_mask(self, sequence: Sequence, position: int) -> None:
        assert sequence.grammar is not None
        sequence.grammar.run, sequence.grammar.due_step = None, 0
        self._masks.request(sequence.uid, position)

    def _on_ready(self, event: MasksReady) -> tuple[Ending, ...]:
        """Record which masks a rank has received. Masks of sequences that no longer need one are
        ignored."""
        for uid, position in zip(event.uids.tolist(), event.positions.tolist(), strict=True):
            self._masks.note_ready(event.rank, uid, position)
        return ()

    def _on_forced(self, event: ForcedTokens) -> tuple[Ending, ...]:
        """Record forced tokens (the only continuation that a grammar allows). Tokens of sequences
        that no longer need a mask are ignored. Raises `ProtocolBug` if the tokens start at a
        position other than that of the requested mask."""
        stops = np.cumsum(event.counts)
        runs = np.split(event.token_ids.copy(), stops[:-1])
        for uid, position, run in zip(
            event.uids.tolist(), event.positions.tolist(), runs, strict=True
        ):
            if uid not in self._masks:
                continue
            grammar = self._open[uid].grammar
            due = self._masks.requested(uid)
            if grammar is None or due != position:
                raise ProtocolBug(
                    f"request {uid} forces a token at position {position}, but position {due} "
                    "is next"
                )
            self._masks.withdraw(uid)
            grammar.run = run
            self._pending_runs += 1
        return ()

    def forced(self) -> list[tuple[Sequence, Int32]]:
        """Return (sequence, forced tokens) for each running sequence with pending forced tokens
        whose earlier positions are all covered by planned steps. The caller appends the tokens."""
        if not self._pending_runs:
            return []
        found = []
        for sequence in self._running.constrained:
            assert sequence.grammar is not None
            run = sequence.grammar.run
            computed = sequence.phase is Phase.RUNNING and sequence.scheduled == sequence.length
            if run is not None and computed:
                found.append((sequence, run))
                self._request_mask(sequence, sequence.length + len(run))
                self._pending_runs -= 1
                self._num_forced += len(run)
        return found

    def plan_rows(self, step: int, rows: list[PlannedRow]) -> list[PlannedRow]:
        """Return one row for each constrained sequence that can sample in step `step`: all its
        known tokens are covered by planned steps, and every rank has its mask."""
        chosen: list[PlannedRow] = []
        for sequence in self._running.constrained:
            grammar = sequence.grammar
            if grammar is None or not _is_due(sequence, grammar):
                continue
            grammar.due_step = grammar.due_step or step
            if self._masks.is_ready(sequence.uid):
                grammar.last_sampled = sequence.length
                self._mask_delays[min(step - grammar.due_step, 2)] += 1
                row = sequence, sequence.slot, sequence.length, 0
                chosen.append(PlannedRow(*row, wants=SAMPLE))
        return chosen

    # -- failures and figures -------------------------------------------------------------

    def _on_failed(self, event: GrammarsFailed) -> list[Ending]:
        """Return the sequences whose grammars cannot be compiled or applied, with their end
        reasons."""
        return [
            (sequence, ends.rejected(error, refused=uid in event.refused))
            for uid, error in zip(event.uids.tolist(), event.errors, strict=True)
            if (sequence := self._open.get(uid)) is not None
        ]

    def _on_tick(self, event: MaskClock) -> list[Ending]:
        """Return the sequences that have waited for a mask for at least one full clock period, with
        the end reason `NO_MASK`."""
        return [(self._open[uid], ends.NO_MASK) for uid in self._masks.tick()]

    def flush(self, turn: TurnBuilder) -> list[Outgoing]:
        """Return the queued messages to the grammar actor, and add to `turn` (the next message to
        the block manager) the masks that the runners may drop."""
        out, self._out = self._out, []
        if not self._finished:
            return out
        finished, self._finished = as_int64(self._finished), []
        turn.drop_masks(DropMasks(finished))
        return [*out, (GRAMMAR, CloseGrammars(finished))]

    def check_idle(self) -> None:
        """Raise `ProtocolBug` if any grammar is open or any mask is requested."""
        self._masks.check_idle()
        if self._open or self._pending_runs:
            raise ProtocolBug(
                f"grammars of {sorted(self._open)} are open, although no sequence is alive"
            )

    def figures(self) -> dict[str, int]:
        """Return the number of grammars that are open now, and counts since the start: forced
        tokens, and masks that were used in the first possible step, in the step after it, or
        later."""
        at_once, next_step, later = self._mask_delays
        return {
            "constrained": len(self._open),
            "masks_at_once": at_once,
            "masks_next_step": next_step,
            "masks_later": later,
            "forced_tokens": self._num_forced,
        }

    HANDLERS: ClassVar[Handlers] = {
        MasksReady: _on_ready,
        ForcedTokens: _on_forced,
        GrammarsFailed: _on_failed,
        MaskClock: _on_tick,
    }


def _is_due(sequence: Sequence, grammar: GrammarState) -> bool:
    """Return True if a sequence can sample in the next step as soon as its mask is ready."""
    length = sequence.length
    if grammar.last_sampled >= length or sequence.phase is not Phase.RUNNING:
        return False
    return sequence.scheduled == length
