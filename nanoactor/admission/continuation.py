"""Check of what the caller of a paused request chose for its next step."""

from __future__ import annotations

from collections.abc import Sequence

from nanoactor.errors import InvalidRequest
from nanoactor.recovery.journal import Entry


def check_continuation(
    entry: Entry, parents: Sequence[int], tokens: Sequence[int], vocabulary: int
) -> None:
    """Raise `InvalidRequest` unless the paused sequences of a request can continue with these
    parents and tokens, which are as in `Request.resume_held`. `vocabulary` is the number of token
    ids."""
    answers = entry.answers
    if not entry.is_held or entry.aborted:
        raise InvalidRequest(
            "the request cannot be continued, because its answers are not paused; wait "
            "for held() first"
        )
    if not len(parents) == len(tokens) == len(answers):
        raise InvalidRequest(
            f"parents and tokens must have one item for each of the {len(answers)} "
            f"answers, got {len(parents)} parents and {len(tokens)} tokens"
        )
    ended = {index for index, answer in enumerate(answers) if answer.terminal is not None}
    continuing = [index for index, parent in enumerate(parents) if parent != -1]
    if ended & {*continuing, *(parents[index] for index in continuing)}:
        raise InvalidRequest(f"answers {sorted(ended)} have ended and cannot be continued")
    if not all(0 <= parents[index] < len(answers) for index in continuing):
        raise InvalidRequest(f"parents must be from -1 to {len(answers) - 1}")
    if not all(0 <= tokens[index] < vocabulary for index in continuing):
        raise InvalidRequest(f"tokens must be token ids from 0 to {vocabulary - 1}")
    if continuing and entry.continued + 1 >= entry.submit.spec.stopping.max_tokens:
        raise InvalidRequest(
            "the request cannot be continued, because its answers have reached max_tokens"
        )
