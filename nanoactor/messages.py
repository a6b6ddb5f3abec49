"""Every message of the engine: who sends it to whom, and what its fields mean.

`uid` is the frontend's number of an answer, counted from 0 without gaps; most requests have one.
`slot` is a row of the running batch. A *step* is numbered from 1 without gaps. Arrays of one
message that describe the same rows have the same length.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanoactor.continuing import ToldTokens
from nanoactor.grammar.messages import DeferredSamples
from nanoactor.runtime.codec import message
from nanoactor.scores import RequestScores, ScoredChunks, ScoreRequests, StepScores, ToldScores
from nanoactor.vision.messages import EncoderCredits, EncodeSlices, Items, VisionStep

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@message(2)
class Stopping:
    """Conditions under which the scheduler ends a sequence."""

    max_tokens: int
    min_tokens: int
    eos_ids: tuple[int, ...]
    """Empty where end-of-sequence is ignored."""
    stop_ids: tuple[int, ...]
    fewer_will_do: bool = False
    """Whether `max_tokens` is cut where the context leaves less room: it is a default, or a cap."""


@message(3)
class TextOptions:
    """Options of the detokenizer: how it makes text, and where it stops."""

    stop: tuple[str, ...]
    include_stop: bool
    skip_special: bool
    min_tokens: int
    detokenize: bool = True
    """Without it there is no text."""
    delivered: int = -1
    """Characters of the output that were told before everybody began anew; -1: all it has let out.
    """


@message(6)
class TokenRules:
    """Ids that a request may choose, must not choose, or shall choose more or less often."""

    allowed_ids: Int32
    """Empty: all."""
    bias_ids: Int32
    biases: NDArray[np.float32]
    """What is added to the logit of each of `bias_ids`."""
    word_ids: Int32
    """Bad words, one after the other: an output never contains one."""
    word_lengths: Int32
    """How many of `word_ids` belong to each."""


@message(8)
class FreeText:
    """The free part of an answer, before its grammar holds, by ids of tokens. Thoughts, where there
    are any, come first; text up to a call may follow."""

    thinks: bool
    """Whether the prompt has begun thoughts."""
    think_id: int
    """Begins thoughts, as the first token of output; -1: none does."""
    close_id: int
    """Ends thoughts; -1: there are none."""
    call_id: int
    """Ends text; -1: there is none, and the grammar holds behind the thoughts."""


@message(5)
class RequestSpec:
    """The options of a request, on their way to the scheduler."""

    priority: int
    sampling: bytes
    """How the runners choose its tokens: a row of `nanoactor.models.columns` for each answer."""
    stopping: Stopping
    text_options: TextOptions
    rules: TokenRules | None = None
    """The tokenizer adds the bad words, as it knows their ids."""
    logprobs: int = -1
    """How many of the likeliest tokens are told beside each token of output; -1: nothing is."""
    prompt_logprobs: int = -1
    """Likewise of the prompt."""
    grammar: str = ""
    """What the answers must look like, as `GrammarSpec.to_text` writes it; empty: anything."""
    held: bool = False
    """Whether each answer is held behind every token: `Continue` says what they go on with."""


@message(10, by="uid")
class Submit:
    """Frontend to tokenizer: a request with exactly one of text, chat or token ids.

    Where it wants several answers, each has a uid of its own: this one and those after it.

    Messages and template options are JSON text: msgpack would turn their lists into tuples on
    the way between processes, and templates can tell.
    """

    uid: int
    spec: RequestSpec
    text: str | None
    chat: str | None
    chat_options: str
    token_ids: Int32
    item_times: tuple[tuple[float, ...], ...] = ()
    """For each picture and video, of which a vision worker will tell the tokenizer: the seconds of
    a video's temporal patches; nothing for a picture."""
    bad_words: tuple[str, ...] = ()
    keep_last: int = 0
    """How many tokens of the prompt count, from its end; 0: all."""
    output: ToldTokens | None = None
    """What was told of the answer, where it goes on behind that; then it is the only one."""


@message(11, by="uid")
class Admit:
    """Tokenizer to scheduler: a request that may run, with the uids of its answers as in `Submit`.

    `token_ids` are the prompt and, where a request continues after a restart, the output so
    far: output starts at `prompt_length`. `hashes` has a row of 16 bytes for each full block.
    """

    uid: int
    spec: RequestSpec
    token_ids: Int32
    prompt_length: int
    hashes: NDArray[np.uint8]
    items: Items | None = None
    """None for text."""
    free: FreeText | None = None
    """None where the grammar holds from the first token on."""


@message(12, by="uid")
class Reject:
    """Tokenizer to scheduler: a request that cannot run, and why."""

    uid: int
    text: str
    """Empty where it was aborted before it was tokenized."""
    answers: int = 1
    """How many uids it has, from this one on."""
    refused: bool = False
    """Whether the machine is to blame, not the request."""


@message(13, by="uid")
class Abort:
    """Frontend to scheduler: end a request; it may not have arrived yet, or be over. To a tokenizer
    too, while it may be rendering a conversation."""

    uid: int


@message(14, by="uid")
class Continue:
    """Frontend to scheduler: what the held answers of a request go on with, all at once."""

    uid: int
    """Of the request's first answer."""
    parents: Int32
    """Of each answer: it becomes a copy of what this one is now, counted from 0, ...; -1: it ends.
    """
    token_ids: Int32
    """... and this token follows."""


@message(15)
class HoldClock:
    """The scheduler's clock: half of the time has passed that a caller is given."""


@message(20, by="uid")
class Match:
    """Scheduler to block manager: give a slot the blocks for these tokens.

    `blocks` credits were debited for it, as if no prefix were cached.
    """

    uid: int
    slot: int
    token_ids: Int32
    hashes: NDArray[np.uint8]
    blocks: int
    items: Items | None = None
    """None for text. Pages of the encoder cache were debited for all of them."""
    most_hits: int = 2**31 - 1
    """At most so many tokens may be found, as the others must be computed again."""
    sibling: int = -1
    """A slot that holds the blocks of the same prompt; -1: none is known."""


@message(21)
class Admissions:
    """Sequences that run for the first time, as the runners must know them; a row each."""

    slots: Int32
    sampling: Int32
    """(rows, columns.WORDS): see `nanoactor.models.columns`."""
    unmasked_from: Int32
    """Position from which the ids in `masked_ids` may be sampled (`min_tokens`)."""
    masked_ids: Int32
    masked_counts: Int32
    """How many of `masked_ids` belong to each row."""
    rope_deltas: Int32
    """Rotary position less index of what follows the prompt: below 0 after a picture."""
    prompt_lengths: Int32
    rule_rows: Int32
    """Which rows have each of the ..."""
    rules: tuple[TokenRules, ...]
    constrained: Int32
    """Rows that choose no token when their positions are computed: `DeferredSamples` say when."""
    scores: ScoreRequests | None = None


@message(27)
class Forks:
    """Sequences that begin as copies of others, which end their prompts in this step: they sample
    from the same logits, and share all blocks but the last, which is copied unless it is full."""

    rows: Int32
    """Which prefill row is copied, ..."""
    slots: Int32
    """... into which slot, ..."""
    uids: Int64
    """... for which request."""
    sources: Int32
    """Of the blocks that are copied when the step has computed its layers: from where, ..."""
    copies: Int32
    """... and to where; none in a `Plan`."""


@message(22, by="step")
class Plan:
    """Scheduler to block manager: one step, in counts. It becomes a `Step` there.

    The rows are the prefill rows, then the slots of the decode batch in ascending order.
    """

    step: int
    slots: Int32
    """Prefill rows: the slot, ..."""
    starts: Int32
    """... its first position in this step, ..."""
    counts: Int32
    """... how many tokens, ..."""
    samples: NDArray[np.bool_]
    """... and whether the row ends what is to be prefilled, so that a token is sampled."""
    joins: Int32
    """Slots that enter the decode batch before this step."""
    leaves: Int32
    """Slots that leave the decode batch before this step."""
    grows: Int32
    """Slots that need one more block for this step."""
    admissions: Admissions
    slices: tuple[EncodeSlices, ...] = ()
    """At most one."""
    scored: tuple[ScoredChunks, ...] = ()
    """At most one."""
    forks: tuple[Forks, ...] = ()
    """At most one; they sample after the prefill rows, in this order."""
    deferred: tuple[DeferredSamples, ...] = ()
    """At most one; they sample last."""


@message(23, by="step")
class SampledTokens:
    """Scheduler to block manager: a step is done, and these slots got these tokens."""

    step: int
    slots: Int32
    token_ids: Int32
    failed: Int32
    """Slots whose rows came to nothing: what they computed is not to be read, ..."""
    failed_from: Int32
    """... from these positions on. Answered by `Credits`."""


@message(24)
class Free:
    """Scheduler to block manager: these slots' sequences no longer need their blocks.

    Steps up to `fence` may still use them.
    """

    slots: Int32
    fence: int


@message(29)
class Fork:
    """Scheduler to block manager: sequences of which no step is in flight become copies of others
    of which none is. Each gives up its own blocks, holds all full blocks of its source too, and has
    one more for what follows; the rest of what its source has computed is computed again."""

    slots: Int32
    sources: Int32
    """The slot of each one's source: as it is before this message, should it be a copy too."""
    fence: int
    """Of the blocks that are given up, as `Free` has it."""


@message(30, by="step")
class Step:
    """Block manager to every runner: a plan with the ids that it needs."""

    step: int
    slots: Int32
    starts: Int32
    counts: Int32
    samples: NDArray[np.bool_]
    token_ids: Int32
    """The prefill rows' tokens, one row after the other."""
    joins: Int32
    leaves: Int32
    table_slots: Int32
    """Changes to block tables: the slot, ..."""
    table_starts: Int32
    """... the first entry that changes, ..."""
    table_counts: Int32
    """... and how many, ..."""
    table_blocks: Int32
    """... and the block ids, one change after the other."""
    admissions: Admissions
    vision: tuple[VisionStep, ...] = ()
    """At most one; none where nothing is encoded, and no prompt has pictures."""
    scored: tuple[ScoredChunks, ...] = ()
    """At most one."""
    forks: tuple[Forks, ...] = ()
    """At most one."""
    deferred: tuple[DeferredSamples, ...] = ()
    """At most one."""


@message(31, by="step")
class StepDone:
    """Runner to scheduler: the tokens sampled in a step, by row, rows that sample none left out."""

    step: int
    token_ids: Int32
    seconds: float
    """How long the device took."""
    began: int
    """When it took the step up, in ns of the monotonic clock."""
    failed: Int32
    """Rows, counted like the tokens, that have none: theirs do not count, ..."""
    errors: list[str]
    """... and why."""
    choiceless: Int32
    """Rows that have none because the request's own rules leave no id. What these computed is as
    good as any other's."""
    scores: tuple[StepScores, ...] = ()
    """At most one."""


@message(32, by="step")
class StepWanted:
    """Runner to scheduler: the device will run dry unless this step is planned now."""

    step: int


@message(40)
class Credits:
    """Block manager to scheduler: what matches found and what frees gave back."""

    uids: Int64
    """Of the matches answered, in their order."""
    hits: Int32
    """How many tokens of each are already computed."""
    refunds: Int32
    """How many of the debited blocks other sequences already hold."""
    freed: Int32
    """For each `Free` answered: blocks that nobody holds any more, ..."""
    fences: Int32
    """... and the step that must be done before they may be written again."""
    encoder: EncoderCredits | None
    """None where the matches have no items, and no pages are given back."""
    settled: int
    """How many `SampledTokens` with failures are answered; ..."""
    tainted: Int64
    """... these requests have read, or would read, what failing rows computed."""


@message(50, by="uid")
class Open:
    """Scheduler to detokenizer: a request's tokens will follow."""

    uid: int
    token_ids: Int32
    prompt_length: int
    options: TextOptions


FAILURES = ("error", "failed", "expired", "refused")


@message(51)
class Finish:
    """The end of a request's token stream, after the tokens it travels with."""

    uid: int
    reason: str
    """"stop", "length", "abort", or one of `FAILURES`: "error" (of the request), "failed" (its
    computation), "expired" (its caller said nothing) or "refused" (the machine has no more of
    something)."""
    stop_reason: int | str | None
    error: str
    cached_tokens: int
    preemptions: int
    began: int
    """When the device took up its first step, in ns of the monotonic clock; -1 if it never did."""
    hide_last: bool
    """The last token is a stop token: its text is not part of the output."""


@message(52, by="step")
class Tokens:
    """Scheduler to detokenizer: what a step brought; several tokens of a request where a grammar
    has forced them."""

    step: int
    uids: Int64
    indices: Int32
    """The index of each token in its request's output, from 0."""
    token_ids: Int32
    finishes: tuple[Finish, ...]
    scores: RequestScores | None = None


@message(60)
class Opened:
    """The scheduler has taken a request; what its prompt became."""

    uid: int
    prompt_token_ids: Int32


@message(61)
class Terminal:
    """The last word on a request; nothing follows. Its counts are those of the whole output, or 0
    where it ends before it was opened, or, after a death, opened again."""

    uid: int
    reason: str
    stop_reason: int | str | None
    error: str
    tokens: int
    characters: int
    cached_tokens: int
    preemptions: int
    began: int
    """As `Finish` has it."""


@message(62, by="step")
class OutputDelta:
    """Detokenizer to frontend: what is new, for any number of requests."""

    step: int
    """The latest step whose tokens the detokenizer had seen."""
    opened: tuple[Opened, ...]
    uids: Int64
    texts: list[str]
    counts: Int32
    """How many of `token_ids` belong to each of `uids`."""
    token_ids: Int32
    terminals: tuple[Terminal, ...]
    scores: ToldScores | None = None


@message(63)
class Stop:
    """Detokenizer to scheduler: stop strings ended these requests; answer with their `Finish`."""

    uids: Int64
