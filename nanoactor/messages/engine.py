"""The messages that every request needs, with their senders, receivers and fields.

Most requests have one sequence. A `uid` is the number that the frontend assigns to a sequence,
counted from 0 without gaps. A `slot` is the index of a running sequence in arrays of the size of
the batch. Steps are numbered from 1 without gaps. Arrays of one message that describe the same rows
have the same length.
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
    """Conditions under which the scheduler ends a sequence. `max_tokens` and `min_tokens` limit the
    number of output tokens."""

    max_tokens: int
    min_tokens: int
    eos_ids: tuple[int, ...]
    """End-of-sequence token ids; empty if they are ignored."""
    stop_ids: tuple[int, ...]
    clamp_max_tokens: bool = False
    """True if `max_tokens` is a default or an upper bound, and may be reduced to what fits into the
    context."""


@message(3)
class TextOptions:
    """Options for decoding output tokens to text and finding stop strings."""

    stop: tuple[str, ...]
    include_stop: bool
    skip_special: bool
    min_tokens: int
    detokenize: bool = True
    """True if output tokens are decoded to text."""
    delivered: int = -1
    """If the sequence resumes after earlier output, the number of characters of that output that
    were already emitted. -1 if all of it was, except text held back because a stop string may
    follow."""


@message(6)
class TokenRules:
    """Rules on which token ids a request may sample, and biases on their logits."""

    allowed_ids: Int32
    """Token ids that may be sampled; empty if there is no restriction."""
    bias_ids: Int32
    biases: NDArray[np.float32]
    """Value added to the logit of each id in `bias_ids`."""
    word_ids: Int32
    """Token ids of the bad words, which the output must not contain, concatenated over the
    words."""
    word_lengths: Int32
    """Number of token ids of each bad word in `word_ids`."""


@message(8)
class FreeText:
    """Token ids that delimit the free text of a sequence, the text before its grammar applies. Free
    text consists of reasoning, if any, and then possibly text up to a tool call."""

    thinks: bool
    """True if the prompt ends inside a reasoning section."""
    think_id: int
    """Token that opens the reasoning if it is the first output token; -1 if no token does."""
    close_id: int
    """Token that ends the reasoning; -1 if there is no reasoning."""
    call_id: int
    """Token that ends the text before a tool call; -1 if there is no such text, so that the grammar
    applies right after the reasoning."""


@message(5)
class RequestSpec:
    """The options of a request that the scheduler needs."""

    priority: int
    sampling: bytes
    """Sampling parameters for the runners, one row for each sequence, in the format of
    `models/sampling/columns.py`."""
    stopping: Stopping
    text_options: TextOptions
    rules: TokenRules | None = None
    """Rules on token ids; the tokenizer adds the token ids of the bad words. None if there are no
    rules."""
    logprobs: int = -1
    """Number of top log-probabilities to return with each output token; -1 if none are
    requested."""
    prompt_logprobs: int = -1
    """Number of top log-probabilities to return with each prompt token; -1 if none are
    requested."""
    grammar: str = ""
    """Grammar of the output, in the format of `GrammarSpec.to_text`; empty if the output is
    unconstrained."""
    pools: bool = False
    """True if the request returns a pooled vector instead of tokens."""
    held: bool = False
    """True if each sequence pauses after every token until `Continue` supplies the next one."""


@message(10, by="uid")
class Submit:
    """Frontend to tokenizer: a new request, with exactly one of text, chat and token ids.

    A request for several sequences uses consecutive uids, starting with `uid`. `chat` and
    `chat_options` are JSON text, because msgpack would turn lists into tuples, and chat templates
    may treat these differently.
    """

    uid: int
    spec: RequestSpec
    text: str | None
    chat: str | None
    chat_options: str
    token_ids: Int32
    item_times: tuple[tuple[float, ...], ...] = ()
    """One tuple for each image and video that a vision worker will report to the tokenizer: the
    times in seconds of a video's temporal patches, or () for an image."""
    bad_words: tuple[str, ...] = ()
    keep_last: int = 0
    """Maximum number of prompt tokens; only the last ones are kept. 0 keeps all tokens."""
    output: ToldTokens | None = None
    """Output tokens that have already been emitted, if the request resumes after them. Such a
    request has a single sequence."""


@message(11, by="uid")
class Admit:
    """Tokenizer to scheduler: a tokenized request that may run. Its sequences have consecutive
    uids, starting with `uid`.

    `token_ids` contains the prompt and, if the request resumes after a restart, the output so far,
    which begins at index `prompt_length`. `hashes`, (blocks, 16), has a 16-byte hash for each full
    KV cache block of `token_ids`.
    """

    uid: int
    spec: RequestSpec
    token_ids: Int32
    prompt_length: int
    hashes: NDArray[np.uint8]
    items: Items | None = None
    """Images and videos of the prompt; None if there are none."""
    free: FreeText | None = None
    """Token ids that delimit the free text before the grammar; None if the grammar applies from the
    first output token."""


@message(12, by="uid")
class Reject:
    """Tokenizer to scheduler: a request that cannot run, with the reason."""

    uid: int
    text: str
    """Error message; empty if the request was aborted before it was tokenized."""
    answers: int = 1
    """Number of sequences of the request, whose uids start at `uid`."""
    refused: bool = False
    """True if the machine (for example, a lack of memory), not the request, is at fault."""


@message(13, by="uid")
class Abort:
    """Frontend to scheduler: abort a request, which may not have arrived yet or may already have
    finished. Also sent to tokenizers, which may still be rendering the request's chat."""

    uid: int


@message(14, by="uid")
class Continue:
    """Frontend to scheduler: resume all sequences of a held request, which pause after every token
    until their caller supplies the next one."""

    uid: int
    """Uid of the request's first sequence."""
    parents: Int32
    """For each sequence, the index in the request of the sequence that it becomes a copy of,
    possibly itself; -1 if the sequence ends."""
    token_ids: Int32
    """Token to append to each sequence."""


@message(15)
class HoldClock:
    """Scheduler to itself, as a timer: end the paused sequences whose callers are overdue. Sent at
    intervals of half `hold_timeout` while sequences are paused."""


@message(20, by="uid")
class Admission:
    """A newly admitted sequence, which occupies a slot (an index in the running batch) and needs KV
    cache blocks for its tokens.

    `blocks` is the number of blocks that the scheduler has subtracted from its count of free
    blocks, on the assumption that there is no prefix cache hit.
    """

    uid: int
    slot: int
    request: int
    """Uid of the request's first sequence. Sequences of one request share blocks where possible."""
    token_ids: Int32
    hashes: NDArray[np.uint8]
    blocks: int
    items: Items | None = None
    """Images and videos of the prompt. The scheduler has subtracted encoder-cache pages for all of
    them from its count of free pages."""
    max_hits: int = 2**31 - 1
    """Maximum number of leading tokens that may be prefix cache hits; the rest must be computed."""


@message(21)
class Admissions:
    """The data that the runners need about newly admitted sequences, one row for each sequence."""

    slots: Int32
    uids: Int64
    sampling: Int32
    """Sampling parameters, (rows, columns.WORDS), in the format of
    `nanoactor.models.sampling.columns`."""
    unmasked_from: Int32
    """Position in each sequence from which on the ids in `masked_ids` may be sampled
    (`min_tokens`)."""
    masked_ids: Int32
    masked_counts: Int32
    """Number of ids of each row in `masked_ids`."""
    freeze_ids: Int32
    """Token ids after which the device stops decoding a sequence, (rows, limits.MAX_FREEZE_IDS): as
    many ids as fit, padded with -1."""
    rope_deltas: Int32
    """Rotary position minus token index, for the tokens after the prompt; negative if the prompt
    contains images."""
    prompt_lengths: Int32
    rule_rows: Int32
    """Row to which each entry of `rules` belongs."""
    rules: tuple[TokenRules, ...]
    scores: ScoreRequests | None = None


@message(22, by="step")
class Plan:
    """A step as planned by the scheduler, without block ids and token ids.

    The row of a newly admitted sequence starts at position 0. The block manager removes the part
    that the prefix cache provides.
    """

    step: int
    rows: Rows
    """All rows of the step except decode rows that are repeated from the previous step
    (`Want.DECODE` in `nanoactor.messages.rows`)."""
    leaves: Int32
    """Slots that leave the decode batch: their rows of the previous step are not repeated."""
    grows: Int32
    """Slots that receive one more block for this step."""
    admissions: Admissions
    slices: EncodeSlices | None = None


@message(24)
class Failures:
    """Slots in which the computation of a row has failed. The keys and values of the failed row
    must not be read."""

    slots: Int32
    starts: Int32
    """First position of the failed row of each slot."""


@message(27)
class Forks:
    """Sequences that become copies of other sequences, while no step of any of them is in flight.
    Each copy releases its own KV cache blocks and shares all full blocks of its source. It also
    receives one new block, into which the source's partial block is copied."""

    slots: Int32
    sources: Int32
    """Slot of the source of each copy. The source is copied in its state before all of these
    copies, even if it becomes a copy itself."""


@message(23)
class KnownTokens:
    """Tokens newly known to the host: sampled, forced by a grammar, or chosen by a caller."""

    slots: Int32
    counts: Int32
    """Number of new tokens of each slot; empty if each slot has one."""
    token_ids: Int32
    """Token ids, concatenated over the slots."""
    runs: Int32
    """Slots whose newest tokens were not sampled but forced by a grammar or chosen by a caller. If
    decode rows in flight compute results for these positions, the results are discarded."""
    run_counts: Int32
    """Number of tokens, for each slot in `runs`, that were not sampled."""


@message(29, by="step")
class Turn:
    """Scheduler to block manager: all decisions that the scheduler makes after one event.

    The block manager processes the parts in this order: finished steps, failures, forks, known
    tokens, freed blocks, dropped pixels, clearing of the prefix cache index, admissions, and the
    plan of the step.
    """

    number: int
    """Number of the turn, counted from 1 without gaps."""
    step: int
    """Number of the planned step; 0 if no step is planned."""
    done: int
    """Number of the last step that has finished."""
    fence: int
    """Number of the last step planned before this turn. Steps up to that one may still use the
    blocks and slots that the turn releases."""
    failures: Failures | None
    forks: Forks | None
    known: KnownTokens | None
    frees: Int32
    """Slots whose blocks are freed."""
    drop_pixels: DropPixels | None
    """Pixels to drop, which the block manager forwards to the runners."""
    forget_index: int
    """Number of the `ForgetIndex` order that clears the prefix cache index; 0 if there is none."""
    admissions: tuple[Admission, ...]
    plan: Plan | None
    drop_masks: DropMasks | None
    """Masks to drop, which the block manager forwards to the runners."""


@message(34)
class Copies:
    """Copies of KV cache blocks or of slot states (per-sequence states of layers outside the KV
    cache), made before the layers of a step run. All sources are read before any target is
    written."""

    sources: Int32
    targets: Int32


@message(30, by="step")
class Step:
    """Block manager to all runners: the plan of a step, completed with block ids and token ids."""

    step: int
    rows: Rows
    leaves: Int32
    token_ids: Int32
    """Token ids of all rows, concatenated. `Rows.ids` is the number of ids of each row."""
    table_slots: Int32
    """Slots of the block tables that change."""
    table_starts: Int32
    """Index of the first changed entry in each of these block tables."""
    table_counts: Int32
    """Number of changed entries in each of these block tables."""
    table_blocks: Int32
    """New block ids of the changed entries, concatenated over the block tables."""
    admissions: Admissions
    copies: Copies | None = None
    """Block copies; None if there are none."""
    slot_copies: Copies | None = None
    """Copies of per-sequence layer states outside the KV cache; None if there are none or if no
    layer keeps such a state."""
    vision: VisionStep | None = None
    """Work on images and videos; None if nothing is encoded and no prompt token of the step is at
    or after an image or video."""


@message(31, by="step")
class StepDone:
    """Runner to scheduler: the results of a step, one for each row, in the order of `StepRows`."""

    step: int
    counts: Int32
    """Number of tokens that each row yields; empty if each row yields one."""
    token_ids: Int32
    """Token ids, concatenated over the rows. A negative value states why there is no token:
    `NO_TOKEN`, `NOTHING_ALLOWED` or `FROZEN` of `nanoactor.models.limits`."""
    seconds: float
    """Time that the step took on the device, in seconds."""
    began: int
    """Start time of the step, in ns of the monotonic clock."""
    scores: StepScores | None = None
    vectors: StepVectors | None = None


@message(32, by="step")
class StepWanted:
    """Runner to scheduler: the device will become idle unless step `step` is planned now."""

    step: int


@message(40)
class Answer:
    """Block manager to scheduler: the results of all turns since the last `Answer`, up to turn
    `turn`. A turn contains the scheduler's decisions after one event."""

    turn: int
    """Number of the last turn that the block manager has processed."""
    uids: Int64
    """Uids of the admitted sequences, in order of admission."""
    hits: Int32
    """Number of leading tokens of each admitted sequence that are already computed (prefix cache
    hits)."""
    refunds: Int32
    """For each admitted sequence, the number of its blocks that other sequences already hold, and
    that therefore do not take up free blocks."""
    fences: Int32
    """Steps that must finish before freed blocks may be overwritten, in ascending order."""
    freed: Int32
    """Number of freed blocks for each of `fences`."""
    slots: Int32
    """Slots for which the number of blocks shared with other slots has changed."""
    shared: Int32
    """Number of shared blocks of each of `slots`."""
    encoder: EncoderCredits | None
    """Changes of the encoder cache; None if no admitted sequence has images or videos and no pages
    are released."""
    tainted: Int64
    """Uids of the sequences that have read, or would read, keys and values of failed rows."""


@message(50, by="uid")
class Open:
    """Scheduler to detokenizer: a new sequence, whose tokens will follow. Only the first sequence
    of a request carries `token_ids`, the prompt and any output so far."""

    uid: int
    token_ids: Int32
    prompt_length: int
    options: TextOptions


FAILURES = ("error", "failed", "expired", "refused")


@message(51)
class Finish:
    """The end of a sequence's output, which follows the tokens in the same message."""

    uid: int
    reason: str
    """"stop", "length", "abort", or one of `FAILURES`: "error" (invalid request), "failed" (failed
    computation), "expired" (its caller did not resume it) or "refused" (the machine ran out of a
    resource)."""
    stop_reason: int | str | None
    error: str
    cached_tokens: int
    preemptions: int
    began: int
    """Start time of the sequence's first step on the device, in ns of the monotonic clock; -1 if
    there was none."""
    hide_last: bool
    """True if the last token is a stop token, whose text is not part of the output."""


@message(52, by="step")
class Tokens:
    """Scheduler to detokenizer: new tokens since the previous message. A sequence may have several,
    for example if its grammar forced them."""

    step: int
    uids: Int64
    indices: Int32
    """Index of each token in the output of its sequence, from 0."""
    token_ids: Int32
    finishes: tuple[Finish, ...]
    scores: RequestScores | None = None
    vectors: RequestVectors | None = None


@message(60)
class Opened:
    """A sequence accepted by the scheduler, with its tokenized prompt, which is empty except in the
    first sequence of a request."""

    uid: int
    prompt_token_ids: Int32


@message(61)
class Terminal:
    """The end of a sequence, after which it has no more output. Counts cover the whole output. They
    are 0 if the sequence ends before the scheduler has accepted it or, after a restart, has
    accepted it again."""

    uid: int
    reason: str
    stop_reason: int | str | None
    error: str
    tokens: int
    characters: int
    cached_tokens: int
    preemptions: int
    began: int
    """Start time of the first step, as in `Finish`."""


@message(62, by="step")
class OutputDelta:
    """Detokenizer to frontend: new output of any number of sequences."""

    step: int
    """Number of the latest step whose tokens the detokenizer has received."""
    opened: tuple[Opened, ...]
    uids: Int64
    texts: list[str]
    counts: Int32
    """Number of token ids of each of `uids` in `token_ids`."""
    token_ids: Int32
    terminals: tuple[Terminal, ...]
    scores: ToldScores | None = None
    vectors: RequestVectors | None = None


@message(63)
class Stop:
    """Detokenizer to scheduler: end these sequences, whose text contains a stop string. The
    scheduler replies with their `Finish`."""

    uids: Int64
