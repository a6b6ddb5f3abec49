"""The messages of the engine: their senders, receivers and fields.

`uid` is the number that the frontend assigns to a sequence, counted from 0 without gaps; most
requests have one sequence. `slot` is the index of a row of the running batch. A *step* is numbered
from 1 without gaps. Arrays of one message that describe the same rows have the same length.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanoactor.messages.grammar import DropMasks
from nanoactor.messages.pooling import RequestVectors, StepVectors
from nanoactor.messages.resuming import ToldTokens
from nanoactor.messages.rows import Rows
from nanoactor.messages.scores import RequestScores, ScoreRequests, StepScores, ToldScores
from nanoactor.messages.vision import (
    DropPixels,
    EncoderCredits,
    EncodeSlices,
    Items,
    VisionStep,
)
from nanoactor.runtime.codec import message

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@message(2)
class Stopping:
    """Conditions under which the scheduler ends a sequence."""

    max_tokens: int
    min_tokens: int
    eos_ids: tuple[int, ...]
    """End-of-sequence token ids; empty if they are ignored."""
    stop_ids: tuple[int, ...]
    clamp_max_tokens: bool = False
    """True if `max_tokens` is a default or a cap, which is reduced to what still fits into the
    context."""


@message(3)
class TextOptions:
    """Options of the detokenizer for decoding tokens and finding stop strings."""

    stop: tuple[str, ...]
    include_stop: bool
    skip_special: bool
    min_tokens: int
    detokenize: bool = True
    """True if tokens are decoded to text."""
    delivered: int = -1
    """Number of output characters that were emitted before the restart; -1 if all text that the
    detokenizer had released was emitted."""


@message(6)
class TokenRules:
    """Token ids that a request may or must not sample, and biases on token ids."""

    allowed_ids: Int32
    """Token ids that may be sampled; empty if all may be sampled."""
    bias_ids: Int32
    biases: NDArray[np.float32]
    """Value added to the logit of each of `bias_ids`."""
    word_ids: Int32
    """Token ids of the bad words, concatenated; an output never contains a bad word."""
    word_lengths: Int32
    """Number of `word_ids` that belong to each word."""


@message(8)
class FreeText:
    """Token ids that delimit the unconstrained part of a sequence, before its grammar applies.
    Reasoning, if any, comes first; text up to a tool call may follow."""

    thinks: bool
    """True if the prompt has opened the reasoning."""
    think_id: int
    """Token that opens the reasoning if it is the first output token; -1 if there is no such
    token."""
    close_id: int
    """Token that closes the reasoning; -1 if there is no reasoning."""
    call_id: int
    """Token that ends the text; -1 if there is no text, and the grammar applies after the
    reasoning."""


@message(5)
class RequestSpec:
    """Options of a request that are passed to the scheduler."""

    priority: int
    sampling: bytes
    """Sampling parameters for the runners: a row of `models/sampling/columns.py` for each
    sequence."""
    stopping: Stopping
    text_options: TextOptions
    rules: TokenRules | None = None
    """Rules for token ids; the tokenizer adds the ids of the bad words."""
    logprobs: int = -1
    """Number of top log-probabilities returned with each output token; -1 to return none at all."""
    prompt_logprobs: int = -1
    """Number of top log-probabilities returned with each prompt token; -1 to return none at all."""
    grammar: str = ""
    """Grammar of the output, as `GrammarSpec.to_text` writes it; empty if the output is
    unconstrained."""
    pools: bool = False
    """True if the request returns a pooled vector instead of tokens."""
    held: bool = False
    """True if each sequence pauses after every token until `Continue` supplies the next one."""


@message(10, by="uid")
class Submit:
    """Frontend to tokenizer: a request with exactly one of text, chat or token ids.

    A request for several sequences uses consecutive uids, starting with this one.

    `chat` and `chat_options` are JSON text: msgpack would turn lists into tuples, and templates can
    tell the difference.
    """

    uid: int
    spec: RequestSpec
    text: str | None
    chat: str | None
    chat_options: str
    token_ids: Int32
    item_times: tuple[tuple[float, ...], ...] = ()
    """For each image and video that a vision worker will report to the tokenizer, the times in
    seconds of the video's temporal patches; empty for an image."""
    bad_words: tuple[str, ...] = ()
    keep_last: int = 0
    """Number of prompt tokens to keep, counted from the end; 0 to keep all."""
    output: ToldTokens | None = None
    """Output tokens that have already been emitted, if the request resumes after them; the request
    then has a single sequence."""


@message(11, by="uid")
class Admit:
    """Tokenizer to scheduler: a request that may run; the uids of its sequences are as in `Submit`.

    `token_ids` holds the prompt and, if the request resumes after a restart, the output so far,
    which starts at `prompt_length`. `hashes` has a row of 16 bytes for each full block.
    """

    uid: int
    spec: RequestSpec
    token_ids: Int32
    prompt_length: int
    hashes: NDArray[np.uint8]
    items: Items | None = None
    """Images and videos; None for a request without any."""
    free: FreeText | None = None
    """Description of the free text before the grammar; None if the grammar applies from the first
    token."""


@message(12, by="uid")
class Reject:
    """Tokenizer to scheduler: a request that cannot run, and the reason."""

    uid: int
    text: str
    """The reason; empty if the request was aborted before it was tokenized."""
    answers: int = 1
    """Number of uids of the request, starting with this one."""
    refused: bool = False
    """True if the cause is the machine, not the request."""


@message(13, by="uid")
class Abort:
    """Frontend to scheduler: abort a request, which may not have arrived yet or may have finished
    already. Also sent to a tokenizer that may still be rendering the conversation."""

    uid: int


@message(14, by="uid")
class Continue:
    """Frontend to scheduler: resume all paused sequences of a request at once."""

    uid: int
    """The uid of the request's first sequence."""
    parents: Int32
    """For each sequence, the index of the sequence whose current state it takes over as a copy; -1
    if the sequence ends."""
    token_ids: Int32
    """Token with which each sequence continues."""


@message(15)
class HoldClock:
    """Timer of the scheduler: half of `hold_timeout` has passed."""


@message(20, by="uid")
class Admission:
    """A sequence that is assigned a slot, and KV cache blocks for its tokens.

    `blocks` credits were debited for the sequence, assuming that there is no prefix cache hit.
    """

    uid: int
    slot: int
    request: int
    """The uid of the request's first sequence; sequences of one request share blocks where
    possible."""
    token_ids: Int32
    hashes: NDArray[np.uint8]
    blocks: int
    items: Items | None = None
    """Images and videos; pages of the encoder cache were debited for all of them."""
    max_hits: int = 2**31 - 1
    """Maximum number of tokens that may be prefix cache hits; all others must be recomputed."""


@message(21)
class Admissions:
    """New sequences with the data that the runners need, one row for each sequence."""

    slots: Int32
    uids: Int64
    sampling: Int32
    """Sampling parameters, (rows, columns.WORDS); see `nanoactor.models.sampling.columns`."""
    unmasked_from: Int32
    """Position in each sequence from which the ids in `masked_ids` may be sampled
    (`min_tokens`)."""
    masked_ids: Int32
    masked_counts: Int32
    """Number of `masked_ids` that belong to each row."""
    freeze_ids: Int32
    """(rows, limits.MAX_FREEZE_IDS): token ids after which a sequence stops decoding, as many as
    there is room for; padded with -1."""
    rope_deltas: Int32
    """Rotary position minus token index for tokens after the prompt; negative after an image."""
    prompt_lengths: Int32
    rule_rows: Int32
    """Index of the row to which each of `rules` belongs."""
    rules: tuple[TokenRules, ...]
    scores: ScoreRequests | None = None


@message(22, by="step")
class Plan:
    """A step as planned by the scheduler, without block ids and token ids.

    A row of a sequence that is admitted in the same turn starts at position 0; the block manager
    removes prefix cache hits from the row.
    """

    step: int
    rows: Rows
    """Rows in addition to the repeated decode rows; see `nanoactor.messages.rows.Want.DECODE`."""
    leaves: Int32
    """Slots whose decode rows are no longer repeated."""
    grows: Int32
    """Slots that need one more block for this step."""
    admissions: Admissions
    slices: EncodeSlices | None = None


@message(24)
class Failures:
    """Slots with failed rows, whose results must not be read."""

    slots: Int32
    starts: Int32
    """First position of each failed row."""


@message(27)
class Forks:
    """Sequences that become copies of other sequences; none of them has a step in flight. Each
    sequence releases its own blocks, shares all full blocks of its source, and gets one new block
    for its next tokens, into which the source's partial block is copied."""

    slots: Int32
    sources: Int32
    """Source slot of each copy, in its state before this turn, even if the source itself becomes a
    copy."""


@message(23)
class KnownTokens:
    """Newly known tokens: sampled, forced by a grammar, or chosen by a caller."""

    slots: Int32
    counts: Int32
    """Number of tokens of each slot; empty if each slot has one."""
    token_ids: Int32
    """Concatenated over the slots."""
    runs: Int32
    """Slots whose newest tokens were not sampled from a row (but forced by a grammar or chosen by a
    caller). If decode rows in flight compute results for these positions, those results are
    discarded."""
    run_counts: Int32
    """Number of such tokens of each slot in `runs`."""


@message(29, by="step")
class Turn:
    """Scheduler to block manager: the effects of one event, in order of execution.

    Finished steps are recorded, failures are handled, sequences are forked, known tokens are
    recorded, blocks are freed, pixels are dropped, the prefix cache index is cleared, sequences are
    admitted, and the step is planned.
    """

    number: int
    """Number of the turn, counted from 1 without gaps."""
    step: int
    """Number of the planned step; 0 if no step is planned."""
    done: int
    """Number of the last finished step."""
    fence: int
    """Number of the last step planned before this turn; steps up to it may still use what the turn
    releases."""
    failures: Failures | None
    forks: Forks | None
    known: KnownTokens | None
    frees: Int32
    """Slots whose blocks are freed."""
    drop_pixels: DropPixels | None
    """The block manager forwards this message to the runners."""
    forget_index: int
    """Number of a `ForgetIndex` order; 0 if there is none."""
    admissions: tuple[Admission, ...]
    plan: Plan | None
    drop_masks: DropMasks | None
    """The block manager forwards this message to the runners."""


@message(34)
class Copies:
    """Copies of blocks or slot states that are made before the layers of a step run. All sources
    are read before any target is written."""

    sources: Int32
    targets: Int32


@message(30, by="step")
class Step:
    """Block manager to every runner: a plan, completed with block and token ids."""

    step: int
    rows: Rows
    leaves: Int32
    token_ids: Int32
    """Token ids, concatenated over the rows; see `Rows.ids`."""
    table_slots: Int32
    """Slot of each block table that changes."""
    table_starts: Int32
    """Index of the first changed entry of each of these block tables."""
    table_counts: Int32
    """Number of changed entries of each of these block tables."""
    table_blocks: Int32
    """Block ids of the changed entries, concatenated over the block tables."""
    admissions: Admissions
    copies: Copies | None = None
    """Copies of blocks."""
    slot_copies: Copies | None = None
    """Copies of slot states, if layers keep any."""
    vision: VisionStep | None = None
    """None if nothing is encoded and no prompt tokens are at or after an image or a video."""


@message(31, by="step")
class StepDone:
    """Runner to scheduler: the result of each row of a step, in the order of `StepRows`."""

    step: int
    counts: Int32
    """Number of tokens of each row; empty if each row has one."""
    token_ids: Int32
    """Token ids, concatenated over the rows. A negative value is the reason why there is no token:
    `NO_TOKEN`, `NOTHING_ALLOWED` or `FROZEN` of `nanoactor.models.limits`."""
    seconds: float
    """Device time of the step in seconds."""
    began: int
    """Start of the step, in ns of the monotonic clock."""
    scores: StepScores | None = None
    vectors: StepVectors | None = None


@message(32, by="step")
class StepWanted:
    """Runner to scheduler: the device will go idle unless this step is planned now."""

    step: int


@message(40)
class Answer:
    """Block manager to scheduler: results of all turns up to `turn` since the last `Answer`."""

    turn: int
    """Number of the last turn that was processed."""
    uids: Int64
    """Uids of the sequences that were admitted, in order."""
    hits: Int32
    """Number of tokens of each of these sequences that are already computed."""
    refunds: Int32
    """Number of debited blocks of each of these sequences that other sequences already hold."""
    fences: Int32
    """Steps that must finish before released blocks may be overwritten, ascending."""
    freed: Int32
    """Number of released blocks for each fence."""
    slots: Int32
    """Slots whose number of shared blocks has changed."""
    shared: Int32
    """Number of shared blocks of each slot."""
    encoder: EncoderCredits | None
    """Encoder cache credits; None if the admissions have no items and no pages are released."""
    tainted: Int64
    """Uids of sequences that have read, or would read, results of failed rows."""


@message(50, by="uid")
class Open:
    """Scheduler to detokenizer: tokens of this request will follow."""

    uid: int
    token_ids: Int32
    prompt_length: int
    options: TextOptions


FAILURES = ("error", "failed", "expired", "refused")


@message(51)
class Finish:
    """The end of a request's token stream, after the tokens in the same message."""

    uid: int
    reason: str
    """"stop", "length", "abort", or one of `FAILURES`: "error" (in the request), "failed" (its
    computation failed), "expired" (its caller did not resume it) or "refused" (the machine ran out
    of a resource)."""
    stop_reason: int | str | None
    error: str
    cached_tokens: int
    preemptions: int
    began: int
    """Start of its first step on the device, in ns of the monotonic clock; -1 if there was none."""
    hide_last: bool
    """True if the last token is a stop token, whose text is not part of the output."""


@message(52, by="step")
class Tokens:
    """Scheduler to detokenizer: the tokens of a step. A request has several if a grammar has forced
    them."""

    step: int
    uids: Int64
    indices: Int32
    """Index of each token in its request's output, from 0."""
    token_ids: Int32
    finishes: tuple[Finish, ...]
    scores: RequestScores | None = None
    vectors: RequestVectors | None = None


@message(60)
class Opened:
    """A request that the scheduler has accepted, with its tokenized prompt."""

    uid: int
    prompt_token_ids: Int32


@message(61)
class Terminal:
    """The end of a request; no output of the request follows. Counts cover the whole output, or are
    0 if the request ends before it is opened or, after a restart, reopened."""

    uid: int
    reason: str
    stop_reason: int | str | None
    error: str
    tokens: int
    characters: int
    cached_tokens: int
    preemptions: int
    began: int
    """As in `Finish`."""


@message(62, by="step")
class OutputDelta:
    """Detokenizer to frontend: new output of any number of requests."""

    step: int
    """Latest step whose tokens the detokenizer has received."""
    opened: tuple[Opened, ...]
    uids: Int64
    texts: list[str]
    counts: Int32
    """Number of `token_ids` that belong to each of `uids`."""
    token_ids: Int32
    terminals: tuple[Terminal, ...]
    scores: ToldScores | None = None
    vectors: RequestVectors | None = None


@message(63)
class Stop:
    """Detokenizer to scheduler: stop strings ended these requests; reply with their `Finish`."""

    uids: Int64
