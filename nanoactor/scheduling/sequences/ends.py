"""Reasons why a sequence ends, as they are reported to the caller."""

from __future__ import annotations

from typing import NamedTuple


class End(NamedTuple):
    """The reason why a sequence ended; the fields are those of the message `Finish`."""

    reason: str
    stop_reason: int | None = None
    error: str = ""
    hide_last: bool = False


NOT_FINITE = End(
    "failed",
    error="the model's logits are not finite (NaN or infinity): its weights are damaged, or the "
    "device is faulty",
)
TAINTED = End(
    "failed",
    error="another request failed, and this request had read keys and values from the prefix cache "
    "that the failed request had computed; send this request again",
)
CHOICELESS = End(
    "error", error="allowed_token_ids, bad_words and min_tokens together leave no token to choose"
)
CHOICELESS_UNDER_GRAMMAR = End(
    "error",
    error="the answer's grammar together with allowed_token_ids, bad_words and min_tokens leaves "
    "no token to choose",
)
NO_ANSWER = End(
    "expired",
    error="the request was paused, and its caller did not resume it within the time limit "
    "(hold_timeout)",
)
NO_MASK = End(
    "failed",
    error="the token mask of the answer's grammar was not ready in time (mask_timeout); the "
    "machine is busy, or a grammar is slow",
)


def rejected(error: str, *, refused: bool) -> End:
    """Return the end reason of a request that cannot run. An empty `error` means that the request
    was already aborted. `refused` means that the machine, not the request, is at fault."""
    if not error:
        return End("abort")
    return End("refused" if refused else "error", error=error)


def choiceless(constrained: bool) -> End:
    """Return the end reason of a sequence whose rules leave no token to sample. `constrained` is
    True if it follows a grammar."""
    return CHOICELESS_UNDER_GRAMMAR if constrained else CHOICELESS
