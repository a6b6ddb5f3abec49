"""Messages about constrained sequences, which must follow a grammar.

A `position` is the index of a token in its sequence, prompt included. A mask is a row of int32
words: bit t % 32 of word t // 32 is set if token id t may be sampled.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanoactor.runtime.codec import message

MAX_RUN = 64
"""Maximum number of consecutive forced tokens; after that many, a token must be sampled."""
MAX_REASON = 1000
"""Maximum length, in characters, of the error message for a grammar that cannot be used."""
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@message(80, by="uid")
class OpenGrammar:
    """Scheduler to grammar actor: open the grammar of a sequence, and compute its first mask unless
    the sequence begins with free text (text before the grammar applies)."""

    uid: int
    grammar: str
    """The grammar, in the format of `GrammarSpec.to_text`."""
    position: int
    """Position of the first of `token_ids` or, if there are none, of the next token to sample. -1
    if the sequence begins with free text, whose end `BeginGrammar` reports."""
    token_ids: Int32
    """Tokens that the grammar must already accept, if the sequence continues after a restart."""
    jumps: bool
    """True if tokens without an alternative are sent as `ForcedTokens` instead of being sampled."""
    end: int
    """Position after the last token that the sequence may have, which limits forced tokens."""


@message(91, by="uid")
class BeginGrammar:
    """Scheduler to grammar actor: the free text of a sequence (the text before its grammar applies)
    has ended. Compute the next mask."""

    uid: int
    position: int
    """Position of the next token to sample."""
    token_ids: Int32
    """Tokens that the grammar must accept before the next mask, following those sent earlier: the
    tokens that begin and end the free text, if they are part of the grammar."""


@message(81)
class GrammarTokens:
    """Scheduler to grammar actor: one new token of each of these sequences; compute their next
    masks."""

    uids: Int64
    positions: Int32
    token_ids: Int32


@message(89)
class ForcedTokens:
    """Grammar actor to scheduler: tokens that are the only possible continuation and need not be
    sampled."""

    uids: Int64
    positions: Int32
    """Position of the first forced token of each sequence."""
    counts: Int32
    token_ids: Int32
    """Token ids, concatenated over the sequences."""


@message(82)
class CloseGrammars:
    """Scheduler to grammar actor: close the grammars of these finished sequences."""

    uids: Int64


@message(83)
class Masks:
    """Grammar actor to all runners: new masks, and the sequences that need no more masks."""

    uids: Int64
    positions: Int32
    masks: Int32
    """Bitmasks, (masks, words), int32."""
    closed: Int64
    """Uids of the sequences for which no further masks follow."""


@message(84)
class MasksReady:
    """Runner to scheduler: this rank has received the masks for these positions."""

    rank: int
    uids: Int64
    positions: Int32


@message(85)
class GrammarsFailed:
    """Grammar actor to scheduler: sequences that cannot continue, with error messages."""

    uids: Int64
    errors: list[str]
    refused: Int64
    """Subset of `uids` whose failure is due to the machine, not to their grammar."""


@message(86)
class DropMasks:
    """Scheduler to all runners, through the block manager: drop the masks of these sequences, which
    no later step uses."""

    uids: Int64


@message(87)
class MaskClock:
    """Scheduler to itself, as a timer: end the sequences whose masks are overdue. Sent at intervals
    of half `mask_timeout` while sequences wait for masks."""
