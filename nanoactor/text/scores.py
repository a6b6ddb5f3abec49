"""Log-probabilities on their way from the scheduler to the user, with the bytes of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from nanoactor.messages.scores import RequestScores, TokenScores, ToldScores
from nanoactor.requests.outputs import Logprob

MAX_PIECE = 1024
"""Most bytes of a token that are reported; longer ones exist in no vocabulary that we know."""


class Score(NamedTuple):
    """Score of one token."""

    token: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]
    offset: int = 0
    """Number of output characters before the token."""


class ScoreRun(NamedTuple):
    """Scores of one request, of its prompt or of its output."""

    uid: int
    is_prompt: bool
    scores: list[Score]
    pieces: list[bytes]
    """The bytes of each token, then of its reported alternatives; none without a tokenizer."""


def runs_of(message: RequestScores) -> Iterator[ScoreRun]:
    """Iterate over the runs of a message; the caller fills in the tokens if it knows them."""
    found, at, top = message.scores, 0, 0
    logprobs, ranks = found.logprobs.tolist(), found.ranks.tolist()
    counts, top_ids = found.counts.tolist(), found.top_ids.tolist()
    top_logprobs = found.top_logprobs.tolist()
    for uid, is_prompt, count in zip(
        message.uids.tolist(), message.prompts.tolist(), message.counts.tolist(), strict=True
    ):
        scores = []
        for each in range(at, at + count):
            end = top + counts[each]
            tops = top_ids[top:end], top_logprobs[top:end]
            scores.append(Score(-1, logprobs[each], ranks[each], *tops))
            top = end
        at += count
        yield ScoreRun(uid, is_prompt, scores, [])


def take_first(
    run: ScoreRun, budget: int, most: int, piece: Callable[[int], bytes] | None
) -> tuple[ScoreRun, int]:
    """Take the first scores out of a run, as many as fit into the budget in bytes, but at least
    one.

    Returns them, with the bytes of their tokens, and their size in a message.
    """
    pieces: list[bytes] = []
    count, taken = 0, 0
    for score in itertools.islice(run.scores, most):
        tokens = (score.token, *score.top_ids)
        its = [piece(token)[:MAX_PIECE] for token in tokens] if piece is not None else []
        cost = 48 + 16 * len(tokens) + sum(map(len, its))
        if count and taken + cost > budget:
            break
        pieces += its
        count, taken = count + 1, taken + cost
    first = run._replace(scores=run.scores[:count], pieces=pieces)
    del run.scores[:count]
    return first, taken


def told(runs: list[ScoreRun]) -> ToldScores:
    """Return the message for the frontend."""
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


class ToldRun(NamedTuple):
    """Scores of one request as the user gets them, without the tokens themselves."""

    uid: int
    is_prompt: bool
    logprobs: list[tuple[Logprob, dict[int, Logprob]]]
    """Log-probability of the token itself, and those of the likeliest in its place."""
    offsets: list[int]


def told_runs(message: ToldScores) -> Iterator[ToldRun]:
    """Iterate over the runs of a message."""
    found = message.scores
    pieces = _pieces(message)
    logprobs, ranks = found.logprobs.tolist(), found.ranks.tolist()
    counts, offsets = found.counts.tolist(), message.offsets.tolist()
    tops = iter(zip(found.top_ids.tolist(), found.top_logprobs.tolist(), strict=True))
    at = 0
    for uid, is_prompt, count in zip(
        message.uids.tolist(), message.prompts.tolist(), message.counts.tolist(), strict=True
    ):
        run = []
        for each in range(at, at + count):
            own = Logprob.of(logprobs[each], ranks[each], next(pieces, None))
            likeliest = {}
            for rank in range(1, counts[each] + 1):
                token, logprob = next(tops)
                likeliest[token] = Logprob.of(logprob, rank, next(pieces, None))
            run.append((own, likeliest))
        yield ToldRun(uid, is_prompt, run, offsets[at : at + count])
        at += count


def _pieces(message: ToldScores) -> Iterator[bytes]:
    at = 0
    for length in message.lengths.tolist():
        yield message.pieces[at : at + length]
        at += length
