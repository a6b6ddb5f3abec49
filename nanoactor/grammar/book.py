"""The answers that follow a grammar, and the masks and failures of which nobody was told yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np

from nanoactor.errors import InvalidRequest, ProtocolBug
from nanoactor.grammar.messages import (
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


def only_bit(mask: Int32) -> int | None:
    """Return the place of a mask's only bit; None where it has several."""
    (words,) = np.nonzero(mask)
    if len(words) != 1:
        return None
    word = int(mask[words[0]]) & 0xFFFFFFFF
    if word & (word - 1):
        return None
    return int(words[0]) * 32 + word.bit_length() - 1


class AnswerMatcher(Protocol):
    """The state of one answer in its grammar; every method raises `InvalidRequest` where the
    parser reaches its limits."""

    def take(self, tokens: Sequence[int]) -> None:
        """Append tokens to the answer."""

    def fill(self, out: Int32) -> None:
        """Write the mask of the next position, (words,)."""


Fill = Callable[[list[AnswerMatcher], Int32], list[InvalidRequest | None]]
"""Writes the masks of several answers, (answers, words); returns what went wrong with each."""


def fill_singly(matchers: list[AnswerMatcher], out: Int32) -> list[InvalidRequest | None]:
    """Fill one mask after the other."""
    found: list[InvalidRequest | None] = []
    for matcher, row in zip(matchers, out, strict=True):
        try:
            matcher.fill(row)
        except InvalidRequest as error:
            found.append(error)
        else:
            found.append(None)
    return found


@dataclasses.dataclass(slots=True)
class _Open:
    """An answer whose grammar is open."""

    position: int
    """Of its next token; negative while that is free."""
    tokens: list[int]
    """Those that its matcher has not taken."""
    jumps: bool
    """Whether forced tokens are told, instead of masks with one bit."""
    matcher: AnswerMatcher | None = None
    """None while the grammar is compiled."""


class GrammarBook:
    """Takes tokens to matchers, and masks from them. An answer whose matcher has failed is quiet
    until it is closed; its masks are dropped when it is."""

    def __init__(self, words: int, ends: Collection[int] = (), epoch: int = 0) -> None:
        """Masks have so many int32 words; `ends` are the end-of-sequence ids, never forced."""
        self._words, self._ends, self._epoch = words, ends, epoch
        self.fill: Fill = fill_singly
        """What makes the masks of several answers."""
        self._open: dict[int, _Open] = {}
        self._masks: dict[int, tuple[int, Int32]] = {}
        """By answer: the position that a mask is for, and the row."""
        self._runs: dict[int, tuple[int, list[int]]] = {}
        """By answer: the position of the first of the tokens that are forced, and these."""
        self._closed: list[int] = []
        self._failed: dict[int, str] = {}

    def __len__(self) -> int:
        """Return how many answers are open, and how many ends were not told."""
        return len(self._open) + len(self._closed)

    def open(self, event: OpenGrammar) -> None:
        """Await the matcher of a new answer."""
        tokens: list[int] = event.token_ids.tolist()
        self._open[event.uid] = _Open(event.position + len(tokens), tokens, event.jumps)

    def begin(self, event: BeginGrammar) -> None:
        """Free text is over: make the next mask."""
        answer = self._open[event.uid]
        if event.position <= answer.position:
            raise ProtocolBug(
                f"request {event.uid} goes on at {event.position}, and is at {answer.position}"
            )
        answer.position = event.position
        answer.tokens += event.token_ids.tolist()
        self._advance([event.uid])

    def note_compiled(self, uid: int, found: AnswerMatcher | InvalidRequest) -> None:
        """Take an answer's matcher, or why it has none; it may be over."""
        answer = self._open.get(uid)
        if answer is None:
            return
        if isinstance(found, InvalidRequest):
            self._fail(uid, found)
            return
        answer.matcher = found
        self._advance([uid])

    def take(self, event: GrammarTokens) -> None:
        """Take new tokens; make the next masks."""
        for uid, position, token in zip(
            event.uids.tolist(), event.positions.tolist(), event.token_ids.tolist(), strict=True
        ):
            answer = self._open[uid]
            if answer.position != position:
                raise ProtocolBug(
                    f"request {uid} tells its token at {position}, that at {answer.position} is due"
                )
            answer.position += 1
            answer.tokens.append(token)
        self._advance(event.uids.tolist())

    def _advance(self, uids: list[int]) -> None:
        """Make the next masks of those of these answers that have a matcher and have not failed."""
        taken = [uid for uid in uids if self._take_tokens(uid)]
        if not taken:
            return
        matchers = [matcher for uid in taken if (matcher := self._open[uid].matcher)]
        masks = np.empty((len(taken), self._words), np.int32)
        for uid, mask, error in zip(taken, masks, self.fill(matchers, masks), strict=True):
            answer = self._open[uid]
            try:
                if error is not None:
                    raise error
                if answer.jumps:
                    self._jump(uid, answer, mask)
            except InvalidRequest as failed:
                self._fail(uid, failed)
            else:
                self._masks[uid] = answer.position, mask

    def _take_tokens(self, uid: int) -> bool:
        """Have an answer's matcher take its new tokens; False where it cannot."""
        answer = self._open[uid]
        if answer.matcher is None or answer.position < 0 or uid in self._failed:
            return False
        tokens, answer.tokens = answer.tokens, []
        try:
            answer.matcher.take(tokens)
        except InvalidRequest as error:
            self._fail(uid, error)
            return False
        return True

    def _jump(self, uid: int, answer: _Open, mask: Int32) -> None:
        """Go on as long as one id alone is allowed; `mask` is that of the position reached."""
        assert answer.matcher is not None
        first, run = answer.position, list[int]()
        while len(run) < MAX_RUN and (token := only_bit(mask)) is not None:
            if token in self._ends:
                break
            run.append(token)
            answer.position += 1
            answer.matcher.take([token])
            answer.matcher.fill(mask)
        if run:
            self._runs[uid] = first, run

    def _fail(self, uid: int, error: InvalidRequest) -> None:
        # Begins with the parameter's name, as all that is said of parameters.
        self._failed[uid] = f"structured_outputs: {error}"[:MAX_REASON]

    def close(self, event: CloseGrammars) -> None:
        """Forget answers that are over."""
        for uid in event.uids.tolist():
            del self._open[uid]
            self._masks.pop(uid, None)
            self._runs.pop(uid, None)
            self._failed.pop(uid, None)
            self._closed.append(uid)

    def take_masks(self, most: int) -> Masks | None:
        """Return masks that were not told, at most so many, with all ends that were not; None
        where there are none."""
        if not self._masks and not self._closed:
            return None
        uids = list(self._masks)[:most]
        found = [self._masks.pop(uid) for uid in uids]
        closed, self._closed = self._closed, []
        rows = [mask for _, mask in found]
        return Masks(
            self._epoch,
            np.array(uids, np.int64),
            np.array([position for position, _ in found], np.int32),
            np.stack(rows) if rows else np.empty((0, self._words), np.int32),
            np.array(closed, np.int64),
        )

    def take_runs(self) -> ForcedTokens | None:
        """Return the forced tokens that were not told; None where there are none."""
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

    def take_failures(self) -> GrammarsFailed | None:
        """Return the answers that have failed since the last call; None where there are none."""
        told = {uid: error for uid, error in self._failed.items() if error}
        if not told:
            return None
        self._failed |= dict.fromkeys(told, "")
        return GrammarsFailed(np.array(list(told), np.int64), list(told.values()))
