"""Constrained sequences: a grammar says what each may choose next, and that takes time.

Nobody else waits for it. A constrained sequence never decodes: its token is chosen when every rank
holds the mask for it, and then known, so that its position is computed like a prompt's. The token
goes to the grammar, which sends the next mask to the ranks; these tell that they hold it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from nanoactor.errors import ProtocolBug
from nanoactor.grammar.messages import (
    BeginGrammar,
    CloseGrammars,
    DropMasks,
    ForcedTokens,
    GrammarTokens,
    MasksReady,
    OpenGrammar,
)
from nanoactor.messages import Int32
from nanoactor.scheduling.edges import BLOCKS, GRAMMAR, Send
from nanoactor.scheduling.free_text import restored
from nanoactor.scheduling.plan_builder import Deferred, as_int32, as_int64
from nanoactor.scheduling.sequence import Phase, Sequence


@dataclasses.dataclass(slots=True)
class _Awaited:
    """The next mask of one sequence."""

    position: int
    since: int
    """How often the clock had ticked when it was asked for."""
    ranks: dict[int, int] = dataclasses.field(default_factory=dict)
    """By position: how many hold its mask. One behind forced tokens may come before these."""
    due: int = 0
    """The first step that would have used it; 0 before there is one."""
    run: Int32 | None = None
    """Forced tokens from `position` on; they are known once all before them are planned."""

    def is_held_by(self, ranks: int) -> bool:
        """Tell whether so many hold the mask."""
        return self.ranks.get(self.position) == ranks

    def is_missing(self, ranks: int) -> bool:
        """Tell whether the grammar has yet to say what comes next, or a rank yet to hold that."""
        return self.run is None and not self.is_held_by(ranks)


class Constraints:
    """Knows for which position of each sequence every rank holds a mask."""

    def __init__(self, ranks: int, jumps: bool = True) -> None:
        """With `jumps`, tokens that are forced are not chosen."""
        self._out: list[Send] = []
        self._over: list[int] = []
        """Sequences that no later step names."""
        self._ranks, self._jumps = ranks, jumps
        self._awaited: dict[int, _Awaited] = {}
        self._later: dict[int, list[int]] = {}
        """By sequence whose text is free: the tokens that its grammar is to be told."""
        self._missing = 0
        """How many of these are missing, ..."""
        self._forced = 0
        """... and how many runs of forced tokens wait."""
        self._ticks = 0
        self._used = [0, 0, 0]
        """Masks by the steps that were planned without them: none, one, or more."""
        self._jumped = 0
        """Tokens that were forced."""

    def __len__(self) -> int:
        """Return how many sequences have a grammar that is open."""
        return len(self._awaited) + len(self._later)

    @property
    def waits(self) -> bool:
        """Tell whether any mask is under way."""
        return self._missing > 0

    def open(self, sequence: Sequence) -> None:
        """Ask for the first mask of a sequence that is about to run, unless that was done; where
        its text is free, have its grammar be compiled."""
        uid = sequence.uid
        if not sequence.spec.grammar or uid in self._awaited or uid in self._later:
            return
        free = not sequence.is_constrained
        _, told = restored(sequence.free, sequence.tokens[sequence.prompt_length :].tolist())
        output = as_int32(() if free else told)
        first = -1 if free else sequence.length - len(told)
        # Log-probabilities come from choosing, and those of a prompt before the output ends.
        jumps = self._jumps and max(sequence.spec.logprobs, sequence.prompt_logprobs) < 0
        told_first = (uid, sequence.spec.grammar, first, output, jumps, sequence.limit)
        self._out.append((GRAMMAR, OpenGrammar(*told_first)))
        if free:
            self._later[uid] = told
        else:
            self._await(sequence)

    def pause(self, uid: int, token: int) -> None:
        """Free text begins behind a token that was chosen under a mask."""
        del self._awaited[uid]
        self._later[uid] = [token]

    def begin(self, sequence: Sequence, tokens: list[int]) -> None:
        """Ask for the next mask of a sequence whose free text is over; `tokens` ended it, and are
        its grammar's."""
        told = as_int32(self._later.pop(sequence.uid) + tokens)
        self._out.append((GRAMMAR, BeginGrammar(sequence.uid, sequence.length, told)))
        self._await(sequence)

    def _await(self, sequence: Sequence) -> None:
        self._awaited[sequence.uid] = _Awaited(sequence.length, self._ticks)
        self._missing += 1

    def note_tokens(self, sequences: Iterable[Sequence]) -> None:
        """Pass the newest token of each of these on, and ask for their next masks."""
        living = [sequence for sequence in sequences if sequence.uid in self._awaited]
        if not living:
            return
        message = GrammarTokens(
            as_int64(sequence.uid for sequence in living),
            as_int32(sequence.length - 1 for sequence in living),
            as_int32(int(sequence.tokens[-1]) for sequence in living),
        )
        self._out.append((GRAMMAR, message))
        for sequence in living:
            self._await(sequence)

    def note_ready(self, event: MasksReady) -> None:
        """Note that a rank holds some masks. Those of sequences that are over do not count."""
        for uid, position in zip(event.uids.tolist(), event.positions.tolist(), strict=True):
            awaited = self._awaited.get(uid)
            if awaited is None:
                continue
            held = awaited.ranks[position] = awaited.ranks.get(position, 0) + 1
            if position < awaited.position or held > self._ranks:
                raise ProtocolBug(
                    f"rank {event.rank} holds a mask for position {position} of request {uid}, of "
                    f"which {held - 1} ranks have that; {awaited.position} is due"
                )
            self._missing -= position == awaited.position and held == self._ranks

    def note_forced(self, event: ForcedTokens) -> None:
        """Take forced tokens; those of sequences that are over do not count."""
        ends = np.cumsum(event.counts)
        runs = np.split(event.token_ids.copy(), ends[:-1])
        for uid, position, run in zip(
            event.uids.tolist(), event.positions.tolist(), runs, strict=True
        ):
            awaited = self._awaited.get(uid)
            if awaited is None:
                continue
            if awaited.position != position or awaited.run is not None:
                raise ProtocolBug(
                    f"request {uid} is forced at {position}; {awaited.position} is due"
                )
            awaited.run = run
            self._forced += 1
            self._missing -= 1

    def take_runs(self, running: Iterable[Sequence]) -> list[tuple[Sequence, Int32]]:
        """Return forced tokens of sequences all of whose positions are planned; they are known
        from now on."""
        if not self._forced:
            return []
        found = []
        for sequence in running:
            awaited = self._awaited[sequence.uid]
            computed = sequence.phase is Phase.RUNNING and sequence.scheduled == sequence.length
            if awaited.run is not None and computed:
                found.append((sequence, awaited.run))
                self._skip(awaited)
        return found

    def _skip(self, awaited: _Awaited) -> None:
        """Await the mask behind a run."""
        assert awaited.run is not None
        self._jumped += len(awaited.run)
        awaited.position += len(awaited.run)
        awaited.run, awaited.due, awaited.since = None, 0, self._ticks
        self._forced -= 1
        self._missing += awaited.is_missing(self._ranks)

    def choose(self, running: Iterable[Sequence], step: int) -> list[Deferred]:
        """Have those choose a token in the step at hand that can: all positions before it are
        planned, and its mask is everywhere."""
        chosen: list[Deferred] = []
        for sequence in running:
            if not _is_due(sequence):
                continue
            awaited = self._awaited[sequence.uid]
            awaited.due = awaited.due or step
            if awaited.is_held_by(self._ranks):
                sequence.asked = sequence.length
                self._used[min(step - awaited.due, 2)] += 1
                chosen.append(Deferred(sequence, sequence.slot))
        return chosen

    def close(self, uid: int) -> None:
        """A sequence is over; its mask may still be under way."""
        awaited = self._awaited.pop(uid, None)
        if awaited is not None:
            self._missing -= awaited.is_missing(self._ranks)
            self._forced -= awaited.run is not None
        if awaited is not None or self._later.pop(uid, None) is not None:
            self._over.append(uid)

    def flush(self) -> list[Send]:
        """Return what the grammar must know, and, behind the plans that name them, who is over."""
        out, self._out = self._out, []
        if self._over:
            over, self._over = as_int64(self._over), []
            out += [(BLOCKS, DropMasks(over)), (GRAMMAR, CloseGrammars(over))]
        return out

    def tick(self) -> list[int]:
        """The clock ticks: return those whose mask was missing for a whole period at least."""
        self._ticks += 1
        return [
            uid
            for uid, awaited in self._awaited.items()
            if awaited.is_missing(self._ranks) and self._ticks - awaited.since >= 2
        ]

    def check_idle(self) -> None:
        """Raise `ProtocolBug` if any grammar is open."""
        if self._awaited or self._later or self._missing or self._forced:
            found = sorted({*self._awaited, *self._later})
            raise ProtocolBug(f"grammars of {found} are open, though nobody lives")

    def figures(self) -> dict[str, int]:
        """Return how many grammars are open, and the masks that were used since the start: in the
        step that computes the position before, in the step after that one, and later; and the
        tokens that were forced, for which there were none."""
        at_once, next_step, later = self._used
        return {
            "constrained": len(self),
            "masks_at_once": at_once,
            "masks_next_step": next_step,
            "masks_later": later,
            "forced_tokens": self._jumped,
        }


def _is_due(sequence: Sequence) -> bool:
    """Tell whether nothing but its mask keeps a sequence from choosing in the step at hand."""
    length = sequence.length
    if sequence.asked >= length or sequence.phase is not Phase.RUNNING:
        return False
    return sequence.scheduled == length
