"""Messages about constrained sequences: those that must follow a grammar.

`position` is the index of a token in its sequence, prompt included. A mask is a row of int32 words:
bit t % 32 of word t // 32 is set if token id t may be sampled.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanoactor.runtime.codec import message

MAX_RUN = 64
"""Maximum number of tokens forced in a row before one must be sampled again."""
MAX_REASON = 1000
"""Maximum number of characters of the reason why a grammar cannot be used."""
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@message(80, by="uid")
class OpenGrammar:
    """Scheduler to grammar: the tokens of a sequence will follow; its first mask is requested."""

    uid: int
    grammar: str
    """Text as written by `GrammarSpec.to_text`."""
    position: int
    """Position of the next sampled token minus the number of `token_ids`; -1 if the sequence is in
    free text, whose end `BeginGrammar` reports."""
    token_ids: Int32
    """Tokens that the grammar covers so far, if the sequence continues after a restart."""
    jumps: bool
    """True if token ids that are the only valid ones are sent as `ForcedTokens`."""
    end: int
    """Position after the last token that the sequence may have."""


@message(91, by="uid")
class BeginGrammar:
    """Scheduler to grammar: a sequence's free text is finished; its next mask is requested."""

    uid: int
    position: int
    """Position of the next sampled token."""
    token_ids: Int32
    """Tokens that the grammar covers since the last one sent: those that start and end the free
    text, if they are part of the grammar."""


@message(81)
class GrammarTokens:
    """Scheduler to grammar: a new token of each of these sequences; their next masks are
    requested."""

    uids: Int64
    positions: Int32
    token_ids: Int32


@message(89)
class ForcedTokens:
    """Grammar to scheduler: the only tokens that can follow; they need not be sampled."""

    uids: Int64
    positions: Int32
    """Position of each sequence's first forced token."""
    counts: Int32
    token_ids: Int32
    """The tokens of all sequences, one sequence after the other."""


@message(82)
class CloseGrammars:
    """Scheduler to grammar: these sequences are finished."""

    uids: Int64


@message(83)
class Masks:
    """Grammar to every runner: masks, and the sequences that get no more masks."""

    uids: Int64
    positions: Int32
    masks: Int32
    """Bitmasks, (masks, words)."""
    closed: Int64
    """Uids of sequences for which no further masks follow."""


@message(84)
class MasksReady:
    """Runner to scheduler: the runner holds these masks."""

    rank: int
    uids: Int64
    positions: Int32


@message(85)
class GrammarsFailed:
    """Grammar to scheduler: sequences that cannot continue, and the reasons."""

    uids: Int64
    errors: list[str]
    refused: Int64
    """Subset of `uids` that failed because of the machine, not because of their grammar."""


@message(86)
class DropMasks:
    """Scheduler to every runner, by way of the block manager: drop the masks of these sequences,
    which no later step uses."""

    uids: Int64


@message(87)
class MaskClock:
    """Timer of the scheduler: half of the time that a mask may take has passed."""
