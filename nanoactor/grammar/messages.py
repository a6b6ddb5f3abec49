"""Messages about constrained answers: those that must follow a grammar.

`position` is the index of a token in its sequence, prompt included. A mask is a row of int32 words:
bit t % 32 of word t // 32 is set where id t may be chosen.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanoactor.runtime.codec import message

MAX_RUN = 64
"""Tokens that are forced before somebody must choose again."""
MAX_REASON = 1000
"""Characters of what is said of a grammar that cannot be used."""
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@message(80, by="uid")
class OpenGrammar:
    """Scheduler to grammar: an answer's tokens will follow; its first mask is wanted."""

    uid: int
    grammar: str
    """As `GrammarSpec.to_text` writes it."""
    position: int
    """Of the token that is chosen next, less the number of `token_ids`; -1: its text is free,
    `BeginGrammar` tells when that ends."""
    token_ids: Int32
    """The grammar's tokens so far, where the answer goes on after everybody began anew."""
    jumps: bool
    """True if ids that are the only valid ones are sent as `ForcedTokens`."""
    end: int
    """The position behind the last token that the answer may have."""


@message(91, by="uid")
class BeginGrammar:
    """Scheduler to grammar: an answer's free text is over; its next mask is wanted."""

    uid: int
    position: int
    """Of the token that is chosen next."""
    token_ids: Int32
    """Tokens of the grammar's since the last that it was told: those that begin and end the free
    text, as far as the grammar has them."""


@message(81)
class GrammarTokens:
    """Scheduler to grammar: a new token of each of these answers; their next masks are wanted."""

    uids: Int64
    positions: Int32
    token_ids: Int32


@message(89)
class ForcedTokens:
    """Grammar to scheduler: these follow, as nothing else may; nobody need choose them."""

    uids: Int64
    positions: Int32
    """Of each answer's first one."""
    counts: Int32
    token_ids: Int32
    """One answer's after the other's."""


@message(82)
class CloseGrammars:
    """Scheduler to grammar: these answers are over."""

    uids: Int64


@message(83)
class Masks:
    """Grammar to every runner: masks, and of whom none will follow."""

    uids: Int64
    positions: Int32
    masks: Int32
    """Bitmasks, (masks, words)."""
    closed: Int64
    """Answers of which nothing follows this message."""


@message(84)
class MasksReady:
    """Runner to scheduler: it holds these masks."""

    rank: int
    uids: Int64
    positions: Int32


@message(85)
class GrammarsFailed:
    """Grammar to scheduler: these answers cannot go on, and why."""

    uids: Int64
    errors: list[str]
    refused: Int64
    """Those of them of which the machine is to blame, not their grammar."""


@message(86)
class DropMasks:
    """Scheduler to every runner, by way of the block manager: no later step names these answers."""

    uids: Int64


@message(87)
class MaskClock:
    """The scheduler's clock: half of the time has passed that a mask may take."""
