"""The logic of the detokenizer actor: decodes output tokens, finds stop strings, and collects the
output for the frontend.

Each request ends with one `Terminal`, a message with the finish reason and the final counts.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Mapping

import numpy as np

from nanoactor.errors import ProtocolBug
from nanoactor.messages.engine import (
    FAILURES,
    Finish,
    Int32,
    Open,
    Opened,
    OutputDelta,
    Terminal,
    TextOptions,
    Tokens,
)
from nanoactor.messages.pooling import Float32, RequestVectors
from nanoactor.messages.scores import RequestScores
from nanoactor.text.decoding import DecoderFactory, IncrementalDecoder
from nanoactor.text.scores import Score, ScoreRun, pop_scores, score_runs, scores_message
from nanoactor.text.stops import StopMatcher

_NO_SCORES: Mapping[int, Score] = {}


@dataclasses.dataclass(slots=True)
class _Entry:
    """Decoding state of one request, from its `Open` message to its `Finish` message."""

    options: TextOptions
    decoder: IncrementalDecoder | None
    matcher: StopMatcher
    standalone_texts: Mapping[int, str]
    """Texts of the tokens that may bypass the decoder and the matcher, by token id. Valid only
    while the decoder has no pending text. Empty if the request has stop strings."""
    tokens: int
    """Number of output tokens processed, which is also the index of the next token."""
    prompt: Int32
    scored: int = 1
    """Index of the prompt token whose log-probability arrives next."""
    decoded: int = 0
    """Number of output characters decoded, including those held back for stop strings. Counted only
    if log-probabilities are requested."""
    characters: int = 0
    characters_to_skip: int = 0
    """Number of characters to drop because they were already sent before a restart."""
    ended: bool = False
    """True once a stop string has been found. Later text is dropped. The final `Terminal` message
    is sent only after the scheduler's `Finish`, because the request's KV blocks are released at
    that time."""


@dataclasses.dataclass(slots=True)
class _Pending:
    """Output of one request that the frontend has not received yet."""

    opened: Int32 | None = None
    text: list[str] = dataclasses.field(default_factory=list)
    ids: list[int] = dataclasses.field(default_factory=list)
    scores: list[Score] = dataclasses.field(default_factory=list)
    """One score per element of `ids`; empty if log-probabilities are not requested."""
    prompt_scores: list[Score] = dataclasses.field(default_factory=list)
    vector: Float32 | None = None
    terminal: Terminal | None = None


_NOTHING_HIDDEN: Mapping[int, int] = {}


def _last_indices(event: Tokens, uids: list[int]) -> dict[int, int]:
    """Return, by uid, the output index of the last token that a step computed for each request in
    `uids`."""
    pairs = zip(event.uids.tolist(), event.indices.tolist(), strict=True)
    return {uid: index for uid, index in pairs if uid in uids}


class Detokenizer:
    """Decoding state and pending output of all requests. A request's output accumulates until
    `pop_delta` removes it for the frontend."""

    def __init__(self, decoders: DecoderFactory | None) -> None:
        """Create a detokenizer without requests. With `decoders=None`, only token ids are
        forwarded. Requests with stop strings have been rejected earlier in that case."""
        self._decoders = decoders
        self._entries: dict[int, _Entry] = {}
        self._pending: dict[int, _Pending] = {}
        self._step = 0
        self.stopped: list[int] = []
        """Ids of the requests that a stop string has ended. The owner clears the list."""

    def open(self, event: Open) -> None:
        """Add a request. If the message contains output tokens from before a restart, decode them
        again to restore the state."""
        decoder = None
        if self._decoders is not None and event.options.detokenize:
            decoder = self._decoders.new(event.options.skip_special)
        matcher = StopMatcher(event.options.stop, event.options.include_stop)
        plain_texts = (
            decoder.standalone_texts if decoder is not None and not event.options.stop else {}
        )
        prompt = event.token_ids[: event.prompt_length].copy()
        entry = _Entry(event.options, decoder, matcher, plain_texts, 0, prompt)
        self._entries[event.uid] = entry
        pending = self._get_pending(event.uid)
        delivered = event.options.delivered
        entry.characters_to_skip = sys.maxsize if delivered < 0 else delivered
        for token in event.token_ids[event.prompt_length :].tolist():
            if not entry.ended:
                self._emit(entry, pending, self._decode(entry, token))
                self._note_stop(event.uid, entry)
        entry.characters_to_skip = 0 if delivered < 0 else entry.characters_to_skip
        pending.opened = prompt

    def process(self, event: Tokens) -> None:
        """Decode the tokens of a step, and then finish the requests that the step ends."""
        self._step = event.step
        hiding_uids = [finish.uid for finish in event.finishes if finish.hide_last]
        hidden = _last_indices(event, hiding_uids) if hiding_uids else _NOTHING_HIDDEN
        entries, get_pending = self._entries, self._get_pending
        scores = self._collect_scores(event.scores) if event.scores else _NO_SCORES
        for uid, index, token in zip(
            event.uids.tolist(), event.indices.tolist(), event.token_ids.tolist(), strict=True
        ):
            entry = entries.get(uid)
            text = None if entry is None else entry.standalone_texts.get(token)
            if (
                text is None
                or entry is None
                or index != entry.tokens
                or (entry.decoder is not None and entry.decoder.has_pending_text)
                or entry.characters_to_skip
                or hidden.get(uid) == index
                or uid in scores
            ):
                self._add_token(uid, index, token, hidden.get(uid) == index, scores.get(uid))
                continue
            # Fast path of `_add_token` for ordinary tokens, which most tokens of most requests are.
            pending = get_pending(uid)
            pending.ids.append(token)
            entry.tokens = index + 1
            if text:
                pending.text.append(text)
                entry.characters += len(text)
        if event.vectors is not None:
            for uid, vector in zip(
                event.vectors.uids.tolist(), event.vectors.values.copy(), strict=True
            ):
                get_pending(uid).vector = vector
        for finish in event.finishes:
            self._finish(finish)

    def _collect_scores(self, scores: RequestScores) -> dict[int, Score]:
        """Store the log-probabilities of prompts. Return those of the step's output tokens, by
        uid."""
        output_scores: dict[int, Score] = {}
        for run in score_runs(scores):
            if not run.is_prompt:
                (output_scores[run.uid],) = run.scores
            elif (entry := self._entries.get(run.uid)) is not None:
                pending = self._get_pending(run.uid)
                tokens = entry.prompt[entry.scored : entry.scored + len(run.scores)].tolist()
                entry.scored += len(tokens)
                named = zip(run.scores, tokens, strict=True)
                pending.prompt_scores += [score._replace(token=token) for score, token in named]
        return output_scores

    def _add_token(
        self, uid: int, index: int, token: int, hidden: bool, score: Score | None = None
    ) -> None:
        entry = self._entries.get(uid)
        if entry is None:
            raise ProtocolBug(
                f"token {index} arrived for request {uid}, which was never opened or has ended"
            )
        if entry.ended or index < entry.tokens:  # after a stop, or a repeat after a restart
            return
        if index > entry.tokens:
            raise ProtocolBug(
                f"request {uid}: token {index} arrived, but token {entry.tokens} was expected"
            )
        pending = self._get_pending(uid)
        pending.ids.append(token)
        if score is not None:
            pending.scores.append(score._replace(token=token, offset=entry.decoded))
        text = "" if hidden else self._decode(entry, token)
        entry.tokens += hidden
        self._emit(entry, pending, text)
        self._note_stop(uid, entry)

    def _note_stop(self, uid: int, entry: _Entry) -> None:
        if entry.matcher.matched is not None:
            entry.ended = True
            self.stopped.append(uid)

    def _decode(self, entry: _Entry, token: int) -> str:
        """Decode a token. Return the text that may be sent, because it can no longer be part of a
        stop string."""
        early = entry.tokens < entry.options.min_tokens
        entry.tokens += 1
        text = entry.decoder.push(token) if entry.decoder else ""
        entry.decoded += len(text)
        # Before `min_tokens`, text cannot be part of a stop string, so it is not held back.
        return text if early else entry.matcher.push(text)

    def _emit(self, entry: _Entry, pending: _Pending, text: str) -> None:
        entry.characters += len(text)
        if entry.characters_to_skip:
            skipped = min(entry.characters_to_skip, len(text))
            entry.characters_to_skip -= skipped
            text = text[skipped:]
        if text:
            pending.text.append(text)

    def _finish(self, finish: Finish) -> None:
        """Add a request's remaining text and its `Terminal` message to the pending output. If a
        stop string was found, it determines the finish reason."""
        entry = self._entries.pop(finish.uid, None)
        reason, stop_reason, error = finish.reason, finish.stop_reason, finish.error
        tokens = characters = 0
        pending = self._get_pending(finish.uid)
        if entry is not None:
            # After an error, do not release held-back text, because it must not match a stop
            # string.
            if not entry.ended and entry.decoder and reason not in FAILURES:
                rest = entry.matcher.push(entry.decoder.finish()) + entry.matcher.finish()
                self._emit(entry, pending, rest)
            if entry.matcher.matched is not None:
                reason, stop_reason, error = "stop", entry.matcher.matched, ""
            tokens, characters = entry.tokens, entry.characters
        pending.terminal = Terminal(
            finish.uid,
            reason=reason,
            stop_reason=stop_reason,
            error=error,
            tokens=tokens,
            characters=characters,
            cached_tokens=finish.cached_tokens,
            preemptions=finish.preemptions,
            began=finish.began,
        )

    def _get_pending(self, uid: int) -> _Pending:
        pending = self._pending.get(uid)
        if pending is None:
            pending = self._pending[uid] = _Pending()
        return pending

    # -- output for the frontend ----------------------------------------------------------

    def pop_delta(self, budget: int) -> OutputDelta | None:
        """Remove up to about `budget` bytes of pending output and return them as one delta (a
        message with new output). Return None if nothing is pending.

        Output over the budget is left for later deltas. A request's last delta contains its
        `Terminal`, which has the finish reason.
        """
        builder = _DeltaBuilder(budget, None if self._decoders is None else self._decoders.piece)
        complete = 0
        for uid, pending in self._pending.items():
            if builder.budget <= 0 or not builder.add(uid, pending):
                break
            complete += 1
        self._drop_sent(complete)
        next_uid = next(iter(self._pending), None)
        if next_uid is not None and self._pending[next_uid].prompt_scores:
            self._pending[next_uid] = self._pending.pop(next_uid)  # so that other requests go first
        return builder.build(self._step)

    def _drop_sent(self, count: int) -> None:
        """Remove the pending output of the first `count` requests, which has been sent."""
        if count == len(self._pending):
            self._pending = {}
        else:
            for uid in list(itertools.islice(self._pending, count)):
                del self._pending[uid]

    @property
    def entries(self) -> int:
        """Number of requests with decoding state."""
        return len(self._entries)

    @property
    def pending(self) -> int:
        """Number of requests with output that the frontend has not read."""
        return len(self._pending)


class _DeltaBuilder:
    """Builder of an `OutputDelta`, a message with new output for the frontend. `budget` is the
    approximate number of bytes that still fit."""

    def __init__(self, budget: int, piece: Callable[[int], bytes] | None) -> None:
        """Create an empty delta. `piece` returns the bytes of a token; None if there is no
        tokenizer."""
        self.budget = budget
        self._piece = piece
        self._opened: list[Opened] = []
        self._uids: list[int] = []
        self._texts: list[str] = []
        self._counts: list[int] = []
        self._ids: list[int] = []
        self._terminals: list[Terminal] = []
        self._scores: list[ScoreRun] = []
        self._vectors: list[tuple[int, Float32]] = []

    def add(self, uid: int, pending: _Pending) -> bool:
        """Move a request's pending output to the delta. Return False if some of it did not fit."""
        if pending.opened is not None:
            self._opened.append(Opened(uid, pending.opened))
            self.budget -= pending.opened.nbytes + 64
            pending.opened = None
        if pending.prompt_scores:
            self._add_scores(uid, pending.prompt_scores, is_prompt=True)
            if pending.prompt_scores:
                return False
        if not self._add_output(uid, pending):
            return False
        if pending.vector is not None:
            self._vectors.append((uid, pending.vector))
            self.budget -= pending.vector.nbytes + 64
        if pending.terminal is not None:
            self._terminals.append(pending.terminal)
            self.budget -= len(pending.terminal.error)
        return True

    def _add_output(self, uid: int, pending: _Pending) -> bool:
        pending_text = "".join(pending.text)
        text, ids = _split(pending_text, pending.ids, max(self.budget, 0))
        if pending.scores:
            ids = ids[: self._add_scores(uid, pending.scores, len(ids))]
        if text or ids:
            self._uids.append(uid)
            self._texts.append(text)
            self._counts.append(len(ids))
            self._ids += ids
        self.budget -= 4 * len(text) + 4 * len(ids) + 64
        if len(text) == len(pending_text) and len(ids) == len(pending.ids):
            return True
        pending.text, pending.ids = [pending_text[len(text) :]], pending.ids[len(ids) :]
        return False

    def _add_scores(
        self, uid: int, scores: list[Score], max_count: int = sys.maxsize, is_prompt: bool = False
    ) -> int:
        """Move scores from the start of a list to the delta: as many as fit, but at least one.
        Return the number of moved scores."""
        run = ScoreRun(uid, is_prompt, scores, [])
        moved, size = pop_scores(run, self.budget, max_count, self._piece)
        self._scores.append(moved)
        self.budget -= size
        return len(moved.scores)

    def build(self, step: int) -> OutputDelta | None:
        """Return the finished delta, or None if it is empty."""
        if not (self._opened or self._uids or self._terminals or self._scores):
            return None
        return OutputDelta(
            step,
            opened=tuple(self._opened),
            uids=np.array(self._uids, np.int64),
            texts=self._texts,
            counts=np.array(self._counts, np.int32),
            token_ids=np.array(self._ids, np.int32),
            terminals=tuple(self._terminals),
            scores=scores_message(self._scores) if self._scores else None,
            vectors=RequestVectors.of(self._vectors),
        )


def _split(text: str, ids: list[int], budget: int) -> tuple[str, list[int]]:
    """Return the leading parts of a text and of its ids that fit into `budget` bytes, but at least
    one character and one id. A character counts as four bytes, the maximum in UTF-8, and so does an
    id."""
    if 4 * len(text) + 4 * len(ids) <= budget:
        return text, ids
    length = max(1, budget // 8)
    return text[:length], ids[:length]
