"""Converts log-probabilities on their way from the scheduler to the user, and adds the bytes of
tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from nanoactor.messages.scores import RequestScores, TokenScores, ToldScores
from nanoactor.requests.outputs import Logprob

MAX_PIECE = 1024
"""Maximum number of bytes reported for a token. No vocabulary that we know has longer tokens."""


class Score(NamedTuple):
    """Log-probability of one token, with the likeliest tokens at its position."""

    token: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]
    offset: int = 0
    """Number of output characters before the token."""


class ScoreRun(NamedTuple):
    """Scores of consecutive tokens of one request, either of its prompt or of its output."""

    uid: int
    is_prompt: bool
    scores: list[Score]
    pieces: list[bytes]
    """For each score, the bytes of its token, followed by those of the reported alternatives; empty
    if there is no tokenizer."""


def score_runs(message: RequestScores) -> Iterator[ScoreRun]:
    """Yield the runs of a message, with -1 for each token id; the caller fills in the ids if it has
    them."""
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
    """Remove scores from the front of a run: as many as fit into `budget` bytes, but at least one
    and at most `max_count`.

    Return the removed scores, with the bytes of their tokens, and their size in a message.
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
    """Return the message that reports these scores to the frontend."""
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
    """Scores of one request as reported to the user, without the ids of the scored tokens."""

    uid: int
    is_prompt: bool
    logprobs: list[tuple[Logprob, dict[int, Logprob]]]
    """For each token, its own log-probability and, by token id, those of the likeliest tokens at
    its position."""
    offsets: list[int]


def reported_runs(message: ToldScores) -> Iterator[ReportedRun]:
    """Yield the runs of a message."""
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
