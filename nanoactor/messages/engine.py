"""All messages of the engine: sender, receiver, and the meaning of the fields.

`uid` is the number that the frontend gives a sequence, counted from 0 without gaps; most requests
have one sequence. `slot` is a row of the running batch. A *step* is numbered from 1 without gaps.
Arrays of one message that describe the same rows have the same length.
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
    """Empty if end-of-sequence is ignored."""
    stop_ids: tuple[int, ...]
    fewer_will_do: bool = False
    """True if `max_tokens` is a default or a cap, which is reduced to the room that the context
    leaves."""


@message(3)
class TextOptions:
    """Options of the detokenizer: how to make text, and where to stop."""

    stop: tuple[str, ...]
    include_stop: bool
    skip_special: bool
    min_tokens: int
    detokenize: bool = True
    """False if no text is made."""
    delivered: int = -1
    """Characters of the output emitted before the restart; -1: all that the detokenizer released.
    """


@message(6)
class TokenRules:
    """Ids that a request may or must not choose, or is biased for or against."""

    allowed_ids: Int32
    """Ids that may be sampled; empty: all."""
    bias_ids: Int32
    biases: NDArray[np.float32]
    """Value added to the logit of each of `bias_ids`."""
    word_ids: Int32
    """Ids of the bad words, concatenated: an output never contains one."""
    word_lengths: Int32
    """Number of `word_ids` that belong to each word."""


@message(8)
class FreeText:
    """Token ids that delimit the unconstrained part of a sequence, before its grammar applies.
    Reasoning, if any, comes first; text up to a call may follow."""

    thinks: bool
    """True if the prompt has opened the reasoning."""
    think_id: int
    """Opens the reasoning if it is the first output token; -1: no token does."""
    close_id: int
    """Closes the reasoning; -1: there is none."""
    call_id: int
    """Ends the text; -1: there is none, and the grammar applies after the reasoning."""


@message(5)
class RequestSpec:
    """The options of a request, on their way to the scheduler."""

    priority: int
    sampling: bytes
    """Sampling parameters for the runners: a row of `models/sampling/columns.py` for each
    sequence."""
    stopping: Stopping
    text_options: TextOptions
    rules: TokenRules | None = None
    """The tokenizer adds the ids of the bad words."""
    logprobs: int = -1
    """Number of top log-probabilities returned with each output token; -1: none."""
    prompt_logprobs: int = -1
    """Number returned with each prompt token; -1: none."""
    grammar: str = ""
    """Grammar of the output, as `GrammarSpec.to_text` writes it; empty: unconstrained."""
    pools: bool = False
    """True if the request returns a pooled vector instead of tokens."""
    held: bool = False
    """True if each sequence pauses after every token until `Continue` supplies the next one."""


@message(10, by="uid")
class Submit:
    """Frontend to tokenizer: a request with exactly one of text, chat or token ids.

    A request for several sequences uses consecutive uids, starting with this one.

    Messages and template options are JSON text: msgpack would turn their lists into tuples, and
    templates can tell the difference.
    """

    uid: int
    spec: RequestSpec
    text: str | None
    chat: str | None
    chat_options: str
    token_ids: Int32
    item_times: tuple[tuple[float, ...], ...] = ()
    """For each image and video that a vision worker will report to the tokenizer: the times in
    seconds of a video's temporal patches; empty for an image."""
    bad_words: tuple[str, ...] = ()
    keep_last: int = 0
    """Number of prompt tokens to keep, counted from the end; 0: all."""
    output: ToldTokens | None = None
    """Output emitted so far, if the request resumes after it; the request then has a single
    sequence."""


@message(11, by="uid")
class Admit:
    """Tokenizer to scheduler: a request that may run; the uids of its sequences are as in `Submit`.

    `token_ids` are the prompt and, if the request resumes after a restart, the output so far,
    which starts at `prompt_length`. `hashes` has a row of 16 bytes for each full block.
    """

    uid: int
    spec: RequestSpec
    token_ids: Int32
    prompt_length: int
    hashes: NDArray[np.uint8]
    items: Items | None = None
    """Multimodal items; None for text."""
    free: FreeText | None = None
    """None if the grammar applies from the first token."""


@message(12, by="uid")
class Reject:
    """Tokenizer to scheduler: a request that cannot run, and why."""

    uid: int
    text: str
    """Empty if the request was aborted before it was tokenized."""
    answers: int = 1
    """Number of uids of the request, starting with this one."""
    refused: bool = False
    """True if the cause is the machine, not the request."""


@message(13, by="uid")
class Abort:
    """Frontend to scheduler: end a request, which may not have arrived yet, or be finished. Also
    sent to a tokenizer while it may be rendering a conversation."""

    uid: int


@message(14, by="uid")
class Continue:
    """Frontend to scheduler: resume all paused sequences of a request at once."""

    uid: int
    """The uid of the request's first sequence."""
    parents: Int32
    """For each sequence: index of the sequence that it becomes a copy of, as that is now; -1: it
    ends."""
    token_ids: Int32
    """Token that each sequence continues with."""


@message(15)
class HoldClock:
    """The scheduler's timer: half of `hold_timeout` has passed."""


@message(20, by="uid")
class Admission:
    """A sequence that is assigned a slot, and blocks for its tokens.

    `blocks` credits were debited for it, assuming that no prefix is cached.
    """

    uid: int
    slot: int
    request: int
    """The uid of the request's first sequence: sequences of one request share what they can."""
    token_ids: Int32
    hashes: NDArray[np.uint8]
    blocks: int
    items: Items | None = None
    """Pages of the encoder cache were debited for all items."""
    most_hits: int = 2**31 - 1
    """Maximum number of tokens taken from the cache; the others must be recomputed."""


@message(21)
class Admissions:
    """New sequences, with what the runners need to know of them; one row each."""

    slots: Int32
    uids: Int64
    sampling: Int32
    """(rows, columns.WORDS): see `nanoactor.models.sampling.columns`."""
    unmasked_from: Int32
    """Position from which the ids in `masked_ids` may be sampled (`min_tokens`)."""
    masked_ids: Int32
    masked_counts: Int32
    """Number of `masked_ids` that belong to each row."""
    freeze_ids: Int32
    """(rows, limits.FREEZE_IDS): tokens after which a sequence stops decoding, as many as there is
    room for; padded with -1."""
    rope_deltas: Int32
    """Rotary position minus index for tokens after the prompt: negative after an image."""
    prompt_lengths: Int32
    rule_rows: Int32
    """The row that each of `rules` belongs to."""
    rules: tuple[TokenRules, ...]
    scores: ScoreRequests | None = None


@message(22, by="step")
class Plan:
    """A step as the scheduler plans it, without the ids of its blocks and tokens.

    A row of a sequence that is admitted in the same turn starts at 0; the block manager cuts
    prefix-cache hits off it.
    """

    step: int
    rows: Rows
    """Rows in addition to the repeated ones, see `nanoactor.messages.rows.Want.DECODE`."""
    leaves: Int32
    """Slots whose decode rows are no longer repeated."""
    grows: Int32
    """Slots that need one more block for this step."""
    admissions: Admissions
    slices: EncodeSlices | None = None


@message(24)
class Failures:
    """Slots with failed rows: their results must not be read."""

    slots: Int32
    starts: Int32
    """The first position of each row."""


@message(27)
class Forks:
    """Sequences that become copies of others; none has a step in flight. Each gives up its own
    blocks, shares all full blocks of its source, and gets one new block for what follows, into
    which the source's partial block is copied."""

    slots: Int32
    sources: Int32
    """The source slot of each: as it is before this turn, even if it becomes a copy too."""


@message(23)
class KnownTokens:
    """Newly known tokens: sampled, forced by a grammar, or chosen by a caller."""

    slots: Int32
    counts: Int32
    """Number of tokens of each slot; empty: one each."""
    token_ids: Int32
    """Concatenated over the slots."""
    runs: Int32
    """Slots with last tokens that no row has sampled: what decode rows in flight compute in their
    place is discarded."""
    run_counts: Int32
    """Number of tokens in each run."""


@message(29, by="step")
class Turn:
    """Scheduler to block manager: the effects of one event, in order of execution.

    Fences pass, failures are noted, forks are made, tokens become known, blocks are freed, pixels
    and the index are dropped, sequences are admitted, and the step is planned.
    """

    number: int
    """Counted from 1 without gaps."""
    step: int
    """The step that is planned; 0: none."""
    done: int
    """The last finished step."""
    fence: int
    """The last step planned earlier: steps up to it may still use what is released here."""
    failures: Failures | None
    forks: Forks | None
    known: KnownTokens | None
    frees: Int32
    """Slots with blocks that are no longer needed."""
    drop_pixels: DropPixels | None
    """Passes through to the runners."""
    forget_index: int
    """The number of a `ForgetIndex` order; 0: none."""
    admissions: tuple[Admission, ...]
    plan: Plan | None
    drop_masks: DropMasks | None
    """Passes through to the runners."""


@message(34)
class Copies:
    """Copies of blocks or slot states that precede the layers of a step. All sources are read
    before any target is written."""

    sources: Int32
    targets: Int32


@message(30, by="step")
class Step:
    """Block manager to every runner: a plan, completed with block and token ids."""

    step: int
    rows: Rows
    leaves: Int32
    token_ids: Int32
    """Concatenated over the rows, see `Rows.ids`."""
    table_slots: Int32
    """The slot of each block table that changes."""
    table_starts: Int32
    """The first changed entry of each."""
    table_counts: Int32
    """Number of changed table entries of each slot."""
    table_blocks: Int32
    """Block ids, concatenated over the changes."""
    admissions: Admissions
    copies: Copies | None = None
    """Copies of blocks."""
    slot_copies: Copies | None = None
    """Copies of slot states, if layers keep any."""
    vision: VisionStep | None = None
    """None if nothing is encoded, and no prompt has images."""


@message(31, by="step")
class StepDone:
    """Runner to scheduler: the result of each row of a step, see `StepRows`."""

    step: int
    counts: Int32
    """Number of tokens of each row; empty: one each."""
    token_ids: Int32
    """Concatenated over the rows. A negative value says why there is no token: `NO_TOKEN`,
    `NOTHING_ALLOWED` or `FROZEN` of `nanoactor.models.limits`."""
    seconds: float
    """Device time of the step."""
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
    """The last turn that was processed."""
    uids: Int64
    """The sequences that were admitted, in order."""
    hits: Int32
    """Number of tokens of each that are already computed."""
    refunds: Int32
    """Number of debited blocks of each that other sequences already hold."""
    fences: Int32
    """Steps that must finish before released blocks may be overwritten, ascending."""
    freed: Int32
    """Number of released blocks for each fence."""
    slots: Int32
    """Slots for which the number of shared blocks has changed."""
    shared: Int32
    """Number of shared blocks of each slot."""
    encoder: EncoderCredits | None
    """None if the admissions have no items, and no pages are released."""
    tainted: Int64
    """Requests that have read, or would read, results of failed rows."""


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
    """The end of a request's token stream, after the tokens it travels with."""

    uid: int
    reason: str
    """"stop", "length", "abort", or one of `FAILURES`: "error" (of the request), "failed" (its
    computation), "expired" (its caller did not resume it) or "refused" (the machine has run out of
    a resource)."""
    stop_reason: int | str | None
    error: str
    cached_tokens: int
    preemptions: int
    began: int
    """Start of its first step on the device, in ns of the monotonic clock; -1 if there was none."""
    hide_last: bool
    """The last token is a stop token: its text is not part of the output."""


@message(52, by="step")
class Tokens:
    """Scheduler to detokenizer: the tokens of a step; several for a request if a grammar has forced
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
    """A request was accepted by the scheduler, with its tokenized prompt."""

    uid: int
    prompt_token_ids: Int32


@message(61)
class Terminal:
    """The end of a request; nothing follows. Counts are of the whole output, or 0 if it ends before
    it was opened or, after a restart, reopened."""

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
    """The latest step of which the detokenizer has seen the tokens."""
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
