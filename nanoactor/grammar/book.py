"""Tracking of all sequences that must follow a grammar: their masks of allowed tokens, their forced
tokens (each the only one that the grammar allows), and their failures."""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np

from nanoactor.errors import InvalidRequest, NanoactorError, OutOfResources, ProtocolBug
from nanoactor.messages.grammar import (
    MAX_REASON,
    MAX_RUN,
    BeginGrammar,
    CloseGrammars,
    ForcedTokens,
    GrammarsFailed,
    GrammarTokens,
    Int32,
    Masks,
    OpenGrammar,
)

TURN_MASKS = 64
"""Maximum number of masks computed per turn (one call of `advance`), over all sequences. Also
limits the number of forced tokens, because each requires a mask."""
TURN_SECONDS = 0.005
"""Time, in seconds, after which a turn (one call of `advance`) starts no further batch of masks."""
_MAX_TURN_TOKENS = 1024
"""Maximum number of tokens passed to matchers per turn (one call of `advance`). Each takes a few
microseconds."""


def only_bit(mask: Int32) -> int | None:
    """Return the token id of the only set bit in a mask, (words,) int32; None unless exactly one
    bit is set."""
    (words,) = np.nonzero(mask)
    if len(words) != 1:
        return None
    word = int(mask[words[0]]) & 0xFFFFFFFF
    if word & (word - 1):
        return None
    return int(words[0]) * 32 + word.bit_length() - 1


class SequenceMatcher(Protocol):
    """The parser state of one sequence under its grammar. All methods raise `InvalidRequest` if the
    parser reaches its limits, and `OutOfResources` if the machine runs out of a resource such as
    memory."""

    def consume(self, tokens: Sequence[int]) -> None:
        """Append tokens to the sequence. The grammar must allow each of them."""

    def fill(self, out: Int32) -> None:
        """Write the mask for the next token to `out`, int32 (words,): bit t % 32 of word t // 32 is
        set if token id t is allowed."""


MatcherError = InvalidRequest | OutOfResources
FillMasks = Callable[[list[SequenceMatcher], Int32], list[MatcherError | None]]
"""Function that writes the mask of each sequence to a row of an int32 array, (sequences, words),
and returns a list with each sequence's error, or None if it succeeded."""


def fill_sequentially(matchers: list[SequenceMatcher], out: Int32) -> list[MatcherError | None]:
    """Compute the masks of several sequences one by one and write them to `out`, (sequences,
    words). Return a list with each sequence's error, or None if it succeeded."""
    errors: list[MatcherError | None] = []
    for matcher, row in zip(matchers, out, strict=True):
        try:
            matcher.fill(row)
        except (InvalidRequest, OutOfResources) as error:
            errors.append(error)
        else:
            errors.append(None)
    return errors


@dataclasses.dataclass(slots=True)
class _Sequence:
    """A sequence that is being generated under a grammar."""

    position: int
    """Index of the next token in the sequence, prompt included. Negative until the free text, to
    which the grammar does not apply, has ended."""
    tokens: list[int]
    """Tokens not yet passed to the matcher."""
    jumps: bool
    """True if a token is forced, that is, appended without sampling, when the grammar allows no
    other."""
    end: int
    """Maximum length of the sequence, prompt included. No token is forced beyond it."""
    run: list[int] = dataclasses.field(default_factory=list)
    """Tokens forced since the last mask was stored. `position` is already past them."""
    matcher: SequenceMatcher | None = None
    """The matcher; None until the grammar has been compiled."""


class GrammarBook:
    """All sequences that are being generated under a grammar. Passes their tokens to their matchers
    and collects the resulting masks. A sequence whose matcher has failed produces no more masks.

    Incoming messages only mark sequences as due; `advance` does the work, a bounded amount per call
    (a turn). The sequence that has been due longest is processed first. If it becomes due again, it
    goes to the end of the queue.
    """

    def __init__(
        self,
        words: int,
        ends: Collection[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a book without sequences. Masks have `words` int32 words. `ends` are the
        end-of-sequence ids, which are never forced. `clock` returns the time in seconds."""
        self._words, self._ends, self._clock = words, ends, clock
        self.fill: FillMasks = fill_sequentially
        """Function that computes the masks of several sequences."""
        self.batch = 1
        """Maximum number of sequences per call of `fill`. The clock is checked between calls."""
        self._open: dict[int, _Sequence] = {}
        self._due: OrderedDict[int, None] = OrderedDict()
        """Uids of the sequences that are due, in the order in which they became due."""
        self._masks: dict[int, tuple[int, Int32]] = {}
        """(position, mask) of each unreported mask, by uid; masks are (words,) int32."""
        self._runs: dict[int, tuple[int, list[int]]] = {}
        """(position of the first token, tokens) of unreported forced tokens, by uid."""
        self._unreported_closed: list[int] = []
        self._failed: dict[int, str] = {}
        self._out_of_resources: set[int] = set()
        """Uids of the sequences that have failed because the machine ran out of a resource."""

    def __len__(self) -> int:
        """Return the number of open sequences plus the number of closed ones that have not been
        reported yet."""
        return len(self._open) + len(self._unreported_closed)

    def open(self, event: OpenGrammar) -> None:
        """Add a new sequence. Its matcher is passed to `set_matcher` once the grammar is
        compiled."""
        tokens: list[int] = event.token_ids.tolist()
        self._open[event.uid] = _Sequence(
            event.position + len(tokens), tokens, event.jumps, event.end
        )

    def begin(self, event: BeginGrammar) -> None:
        """End a sequence's free text, to which the grammar does not apply, and mark the sequence as
        due. Raises `ProtocolBug` if its position does not increase."""
        sequence = self._open[event.uid]
        if event.position <= sequence.position:
            raise ProtocolBug(
                f"request {event.uid} continues at position {event.position}, but is already at "
                f"{sequence.position}"
            )
        sequence.position = event.position
        sequence.tokens += event.token_ids.tolist()
        self._due[event.uid] = None

    def set_matcher(self, uid: int, result: SequenceMatcher | MatcherError) -> None:
        """Set a sequence's matcher, or record the error if its grammar could not be compiled.
        Ignored if the sequence was closed in the meantime."""
        sequence = self._open.get(uid)
        if sequence is None:
            return
        if isinstance(result, InvalidRequest | OutOfResources):
            self._fail(uid, result)
            return
        sequence.matcher = result
        self._due[uid] = None

    def add_tokens(self, event: GrammarTokens) -> None:
        """Append a token to each sequence in `event` and mark these sequences as due. Raises
        `ProtocolBug` if a token is not at the expected position."""
        for uid, position, token in zip(
            event.uids.tolist(), event.positions.tolist(), event.token_ids.tolist(), strict=True
        ):
            sequence = self._open[uid]
            if sequence.position != position:
                raise ProtocolBug(
                    f"request {uid} reports its token at position {position}, but the token at "
                    f"position {sequence.position} was expected"
                )
            sequence.position += 1
            sequence.tokens.append(token)
        self._due |= dict.fromkeys(event.uids.tolist())

    # -- turns ----------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True if any sequence is due, so that another call of `advance` is needed."""
        return bool(self._due)

    def advance(self) -> int:
        """Process due sequences until a turn's limit on masks, tokens or time is reached. Return
        the number of masks computed, including those that led to a forced token."""
        deadline, masks, token_budget = self._clock() + TURN_SECONDS, 0, _MAX_TURN_TOKENS
        while self._due and masks < TURN_MASKS and token_budget > 0:
            if masks and self._clock() >= deadline:
                break
            ready: list[int] = []
            while (
                self._due and token_budget > 0 and len(ready) < min(self.batch, TURN_MASKS - masks)
            ):
                uid, _ = self._due.popitem(last=False)
                token_budget -= self._consume_tokens(uid, token_budget, ready)
            if ready:  # empty if the due sequences have finished, failed or have tokens left
                masks += len(ready)
                self._make_masks(ready)
        return masks

    def _consume_tokens(self, uid: int, max_tokens: int, ready: list[int]) -> int:
        """Pass up to `max_tokens` of a sequence's new tokens to its matcher. If none are left,
        append the sequence's uid to `ready`. Return the number of tokens passed."""
        sequence = self._open.get(uid)
        if (
            sequence is None
            or sequence.matcher is None
            or sequence.position < 0
            or uid in self._failed
        ):
            return 0
        batch, sequence.tokens = sequence.tokens[:max_tokens], sequence.tokens[max_tokens:]
        try:
            sequence.matcher.consume(batch)
        except (InvalidRequest, OutOfResources) as error:
            self._fail(uid, error)
        else:
            if sequence.tokens:
                self._due[uid] = None
            else:
                ready.append(uid)
        return len(batch)

    def _make_masks(self, uids: list[int]) -> None:
        """Compute the next mask of each sequence in `uids` and store it. If the mask allows only
        one token and that token may be forced, append the token and mark the sequence as due again
        instead."""
        matchers = [matcher for uid in uids if (matcher := self._open[uid].matcher)]
        masks = np.empty((len(uids), self._words), np.int32)
        for uid, mask, error in zip(uids, masks, self.fill(matchers, masks), strict=True):
            sequence = self._open[uid]
            if error is not None:
                self._fail(uid, error)
            elif (token := self._forced_token(sequence, mask)) is not None:
                sequence.run.append(token)
                sequence.tokens.append(token)
                sequence.position += 1
                self._due[uid] = None
            else:
                self._store_mask(uid, sequence, mask)

    def _forced_token(self, sequence: _Sequence, mask: Int32) -> int | None:
        """Return the only token that the mask allows if it may be forced; None if the mask must be
        sent instead."""
        if not sequence.jumps or len(sequence.run) >= MAX_RUN or sequence.position >= sequence.end:
            return None
        token = only_bit(mask)
        return None if token in self._ends else token

    def _store_mask(self, uid: int, sequence: _Sequence, mask: Int32) -> None:
        run, sequence.run = sequence.run, []
        if run:
            self._runs[uid] = sequence.position - len(run), run
        self._masks[uid] = sequence.position, mask.copy()

    def _fail(self, uid: int, error: NanoactorError) -> None:
        # Error messages about parameters start with the parameter's name.
        self._failed[uid] = f"structured_outputs: {error}"[:MAX_REASON]
        if isinstance(error, OutOfResources):
            self._out_of_resources.add(uid)

    def close(self, event: CloseGrammars) -> None:
        """Remove finished sequences, including their unreported masks, forced tokens and
        failures."""
        for uid in event.uids.tolist():
            del self._open[uid]
            self._masks.pop(uid, None)
            self._runs.pop(uid, None)
            self._failed.pop(uid, None)
            self._due.pop(uid, None)
            self._out_of_resources.discard(uid)
            self._unreported_closed.append(uid)

    def pop_masks(self, max_count: int) -> Masks | None:
        """Remove and return up to `max_count` unreported masks and all unreported closed sequences;
        None if there are neither."""
        if not self._masks and not self._unreported_closed:
            return None
        uids = list(self._masks)[:max_count]
        found = [self._masks.pop(uid) for uid in uids]
        closed, self._unreported_closed = self._unreported_closed, []
        rows = [mask for _, mask in found]
        return Masks(
            np.array(uids, np.int64),
            np.array([position for position, _ in found], np.int32),
            np.stack(rows) if rows else np.empty((0, self._words), np.int32),
            np.array(closed, np.int64),
        )

    def pop_runs(self) -> ForcedTokens | None:
        """Remove and return all unreported forced tokens; None if there are none."""
        runs, self._runs = self._runs, {}
        if not runs:
            return None
        firsts, tokens = zip(*runs.values(), strict=True)
        return ForcedTokens(
            np.array(list(runs), np.int64),
            np.array(firsts, np.int32),
            np.array(list(map(len, tokens)), np.int32),
            np.array([token for run in tokens for token in run], np.int32),
        )

    def pop_failures(self) -> GrammarsFailed | None:
        """Return the sequences that have failed since the last call; None if there are none."""
        unreported = {uid: error for uid, error in self._failed.items() if error}
        if not unreported:
            return None
        self._failed |= dict.fromkeys(unreported, "")
        resource_failures = [uid for uid in unreported if uid in self._out_of_resources]
        return GrammarsFailed(
            np.array(list(unreported), np.int64),
            list(unreported.values()),
            np.array(resource_failures, np.int64),
        )
