"""Conversion of log-probabilities between the messages that carry them from the scheduler to the
user. The detokenizer adds the bytes of their tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from nanoactor.messages.scores import RequestScores, TokenScores, ToldScores
from nanoactor.requests.outputs import Logprob

MAX_PIECE = 1024
"""Maximum number of bytes reported per token. No known vocabulary has longer tokens."""


class Score(NamedTuple):
    """Log-probability and rank of one token, and the likeliest tokens at the same position."""

    token: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]
    offset: int = 0
    """Number of output characters before the token. 0 for prompt tokens."""


class ScoreRun(NamedTuple):
    """Scores of consecutive tokens of one request: either prompt tokens or output tokens."""

    uid: int
    is_prompt: bool
    scores: list[Score]
    pieces: list[bytes]
    """Bytes of each scored token, followed by those of its alternatives (`top_ids`). Empty if there
    is no tokenizer."""


def score_runs(message: RequestScores) -> Iterator[ScoreRun]:
    """Unpack a message from the scheduler. Each score has the token id -1, because the message does
    not contain the ids; the caller replaces it."""
    scores, offset, top = message.scores, 0, 0
    logprobs, ranks = scores.logprobs.tolist(), scores.ranks.tolist()
    counts, top_ids = scores.counts.tolist(), scores.top_ids.tolist()
    top_logprobs = scores.top_logprobs.tolist()
    for uid, is_prompt, count in zip(
        message.uids.tolist(), message.prompts.tolist(), message.counts.tolist(), strict=True
    ):
        run_scores = []
        for index in range(offset, offset + count):
            end = top + counts[index]
            tops = top_ids[top:end], top_logprobs[top:end]
            run_scores.append(Score(-1, logprobs[index], ranks[index], *tops))
            top = end
        offset += count
        yield ScoreRun(uid, is_prompt, run_scores, [])


def pop_scores(
    run: ScoreRun, budget: int, max_count: int, piece: Callable[[int], bytes] | None
) -> tuple[ScoreRun, int]:
    """Remove scores from the start of a run: as many as fit into `budget` bytes, but at least one
    and at most `max_count`.

    Return the removed scores, together with the bytes of their tokens, and their approximate size
    in bytes. `piece` returns the bytes of a token; None if there is no tokenizer.
    """
    pieces: list[bytes] = []
    count, size = 0, 0
    for score in itertools.islice(run.scores, max_count):
        tokens = (score.token, *score.top_ids)
        score_pieces = [piece(token)[:MAX_PIECE] for token in tokens] if piece is not None else []
        cost = 48 + 16 * len(tokens) + sum(map(len, score_pieces))
        if count and size + cost > budget:
            break
        pieces += score_pieces
        count, size = count + 1, size + cost
    popped = run._replace(scores=run.scores[:count], pieces=pieces)
    del run.scores[:count]
    return popped, size


def scores_message(runs: list[ScoreRun]) -> ToldScores:
    """Pack scores into the message that is sent to the frontend."""
    scores = [score for run in runs for score in run.scores]
    pieces = [piece for run in runs for piece in run.pieces]
    return ToldScores(
        np.array([run.uid for run in runs], np.int64),
        np.array([run.is_prompt for run in runs], np.bool_),
        np.array([len(run.scores) for run in runs], np.int32),
        offsets=np.array([score.offset for score in scores], np.int32),
        pieces=b"".join(pieces),
        lengths=np.array(list(map(len, pieces)), np.int32),
        scores=TokenScores(
            np.array([score.logprob for score in scores], np.float32),
            np.array([score.rank for score in scores], np.int32),
            np.array([len(score.top_ids) for score in scores], np.int32),
            np.array([token for score in scores for token in score.top_ids], np.int32),
            np.array([value for score in scores for value in score.top_logprobs], np.float32),
        ),
    )


class ReportedRun(NamedTuple):
    """Scores of one request in the form that users get. The ids of the scored tokens are not
    included."""

    uid: int
    is_prompt: bool
    logprobs: list[tuple[Logprob, dict[int, Logprob]]]
    """For each token: its own log-probability, and those of the likeliest tokens at its position,
    by token id."""
    offsets: list[int]


def reported_runs(message: ToldScores) -> Iterator[ReportedRun]:
    """Yield the runs of scores in a message from the detokenizer."""
    scores = message.scores
    pieces = _pieces(message)
    logprobs, ranks = scores.logprobs.tolist(), scores.ranks.tolist()
    counts, offsets = scores.counts.tolist(), message.offsets.tolist()
    tops = iter(zip(scores.top_ids.tolist(), scores.top_logprobs.tolist(), strict=True))
    offset = 0
    for uid, is_prompt, count in zip(
        message.uids.tolist(), message.prompts.tolist(), message.counts.tolist(), strict=True
    ):
        run = []
        for index in range(offset, offset + count):
            own = Logprob.of(logprobs[index], ranks[index], next(pieces, None))
            likeliest = {}
            for rank in range(1, counts[index] + 1):
                token, logprob = next(tops)
                likeliest[token] = Logprob.of(logprob, rank, next(pieces, None))
            run.append((own, likeliest))
        yield ReportedRun(uid, is_prompt, run, offsets[offset : offset + count])
        offset += count


def _pieces(message: ToldScores) -> Iterator[bytes]:
    offset = 0
    for length in message.lengths.tolist():
        yield message.pieces[offset : offset + length]
        offset += length
