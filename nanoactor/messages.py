"""Every message of the engine: who sends it to whom, and what its fields mean.

`uid` is the frontend's number of an answer, counted from 0 without gaps; most requests have one.
`slot` is a row of the running batch. A *step* is numbered from 1 without gaps. Arrays of one
message that describe the same rows have the same length.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanoactor.continuing import ToldTokens
from nanoactor.grammar.messages import DropMasks
from nanoactor.pooling.messages import RequestVectors, StepVectors
from nanoactor.rows import Rows
from nanoactor.runtime.codec import message
from nanoactor.scores import RequestScores, ScoreRequests, StepScores, ToldScores
from nanoactor.vision.messages import (
    DropPixels,
    EncoderCredits,
    EncodeSlices,
    Items,
    VisionStep,
)

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
    """True if `max_tokens` is a default or a cap, and is cut to the room that the context
    leaves."""


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
    """Ids that may be sampled; empty: all."""
    bias_ids: Int32
    biases: NDArray[np.float32]
    """Value added to the logit of each of `bias_ids`."""
    word_ids: Int32
    """Bad words, one after the other: an output never contains one."""
    word_lengths: Int32
    """Number of `word_ids` that belong to each word."""


@message(8)
class FreeText:
    """The free part of an answer, before its grammar holds, by ids of tokens. Thoughts, where there
    are any, come first; text up to a call may follow."""

    thinks: bool
    """True if the prompt has opened the reasoning."""
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
    """Sampling parameters for the runners: a row of `models/sampling/columns.py` for each
    sequence."""
    stopping: Stopping
    text_options: TextOptions
    rules: TokenRules | None = None
    """The tokenizer adds the bad words, as it knows their ids."""
    logprobs: int = -1
    """Number of top log-probabilities returned with each output token; -1: none."""
    prompt_logprobs: int = -1
    """Likewise of the prompt."""
    grammar: str = ""
    """Grammar of the output, as `GrammarSpec.to_text` writes it; empty: unconstrained."""
    pools: bool = False
    """True if the request returns a pooled vector instead of tokens."""
    held: bool = False
    """True if each sequence pauses after every token until `Continue` supplies the next one."""


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
    """Number of prompt tokens to keep, counted from the end; 0: all."""
    output: ToldTokens | None = None
    """Output emitted so far, if the request resumes after it; the request then has a single
    sequence."""


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
    """Multimodal items; None for text."""
    free: FreeText | None = None
    """None where the grammar holds from the first token on."""


@message(12, by="uid")
class Reject:
    """Tokenizer to scheduler: a request that cannot run, and why."""

    uid: int
    text: str
    """Empty where it was aborted before it was tokenized."""
    answers: int = 1
    """Number of uids of the request, starting with this one."""
    refused: bool = False
    """True if the machine is at fault, not the request."""


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
    """Token that each sequence continues with."""


@message(15)
class HoldClock:
    """The scheduler's clock: half of the time has passed that a caller is given."""


@message(20, by="uid")
class Admission:
    """A sequence that gets a slot, and blocks for its tokens.

    `blocks` credits were debited for it, as if no prefix were cached.
    """

    uid: int
    slot: int
    request: int
    """The uid of the request's first answer: answers to one request share what they can."""
    token_ids: Int32
    hashes: NDArray[np.uint8]
    blocks: int
    items: Items | None = None
    """Pages of the encoder cache were debited for all of them."""
    most_hits: int = 2**31 - 1
    """The most tokens that may be found; the others must be computed again."""


@message(21)
class Admissions:
    """Sequences that run for the first time, as the runners must know them; a row each."""

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
    """(rows, limits.FREEZE_IDS): tokens behind which a sequence does not go on decoding, as far as
    there is room for them; padded with -1."""
    rope_deltas: Int32
    """Rotary position less index of what follows the prompt: below 0 after a picture."""
    prompt_lengths: Int32
    rule_rows: Int32
    """The row of each of `rules`."""
    rules: tuple[TokenRules, ...]
    scores: ScoreRequests | None = None


@message(22, by="step")
class Plan:
    """A step without the ids of its blocks and tokens, as the scheduler plans it.

    A row of a sequence that is admitted in the same turn starts at 0; it becomes a row of what no
    hit covers.
    """

    step: int
    rows: Rows
    """The rows to add to those that are repeated, see `nanoactor.rows.Want.DECODE`."""
    leaves: Int32
    """Slots whose decode rows are not repeated."""
    grows: Int32
    """Slots that need one more block for this step."""
    admissions: Admissions
    slices: EncodeSlices | None = None


@message(24)
class Failures:
    """Slots with rows that failed: what they computed must not be read."""

    slots: Int32
    starts: Int32
    """The first position of each row."""


@message(27)
class Forks:
    """Sequences that become copies of others, none with a step in flight. Each gives up its own
    blocks, shares all full blocks of its source, and has one more for what follows, into which
    the rest of what its source has computed is copied."""

    slots: Int32
    sources: Int32
    """The slot of each one's source: as it is before this turn, even if it becomes a copy too."""


@message(23)
class KnownTokens:
    """Tokens whose value is known now: sampled, forced by a grammar, or chosen by a caller."""

    slots: Int32
    counts: Int32
    """Tokens of each slot; empty: one each."""
    token_ids: Int32
    """Those of one slot after the other."""
    runs: Int32
    """Slots whose last tokens no row has sampled: what decode rows in flight compute in their place
    counts for nothing."""
    run_counts: Int32
    """Number of tokens in each run."""


@message(29, by="step")
class Turn:
    """Scheduler to block manager: what follows from one event, in the order in which it is done.

    First fences pass, then failures are noted, forks made, tokens known, blocks freed, pixels and
    the index forgotten, sequences admitted, and the step is planned.
    """

    number: int
    """Counted from 1 without gaps."""
    step: int
    """The step that it plans; 0: none."""
    done: int
    """The last step done."""
    fence: int
    """The last step planned before: steps up to it may still use what is given up here."""
    failures: Failures | None
    forks: Forks | None
    known: KnownTokens | None
    frees: Int32
    """Slots whose sequences no longer need their blocks."""
    drop_pixels: DropPixels | None
    """Passes through to the runners."""
    forget_index: int
    """The number of an order to forget the index; 0: there is none."""
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
    """Block manager to every runner: a plan with the ids that it needs."""

    step: int
    rows: Rows
    leaves: Int32
    token_ids: Int32
    """Those of one row after the other, see `Rows.ids`."""
    table_slots: Int32
    """The slot of each block table that changes."""
    table_starts: Int32
    """The first entry that changes in each."""
    table_counts: Int32
    """Number of changed table entries of each slot."""
    table_blocks: Int32
    """The block ids of one change after the other."""
    admissions: Admissions
    copies: Copies | None = None
    """Copies of blocks."""
    slot_copies: Copies | None = None
    """Of slots, where layers keep states of them."""
    vision: VisionStep | None = None
    """None where nothing is encoded, and no prompt has pictures."""


@message(31, by="step")
class StepDone:
    """Runner to scheduler: what each row of a step has brought, see `nanoactor.rows.StepRows`."""

    step: int
    counts: Int32
    """Tokens of each row; empty: one each."""
    token_ids: Int32
    """Those of one row after the other. A negative one says why there is none: `NO_TOKEN`,
    `NOTHING_ALLOWED` or `FROZEN` of `nanoactor.models.limits`."""
    seconds: float
    """Device time of the step."""
    began: int
    """When it took the step up, in ns of the monotonic clock."""
    scores: StepScores | None = None
    vectors: StepVectors | None = None


@message(32, by="step")
class StepWanted:
    """Runner to scheduler: the device will run dry unless this step is planned now."""

    step: int


@message(40)
class Answer:
    """Block manager to scheduler: what the turns up to one have led to, since the last answer."""

    turn: int
    """All turns up to this one are seen."""
    uids: Int64
    """The sequences that were admitted, in order."""
    hits: Int32
    """Tokens of each that are already computed."""
    refunds: Int32
    """Debited blocks of each that other sequences already hold."""
    fences: Int32
    """Steps that must be done before blocks that were given up may be written again, ascending."""
    freed: Int32
    """The number of these blocks, by fence."""
    slots: Int32
    """Slots that share another number of their blocks with others than before."""
    shared: Int32
    """Number of shared blocks of each slot."""
    encoder: EncoderCredits | None
    """None where the admissions have no items, and no pages are given back."""
    tainted: Int64
    """Requests that have read, or would read, what failing rows computed."""


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
    vectors: RequestVectors | None = None


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
    """Number of `token_ids` that belong to each of `uids`."""
    token_ids: Int32
    terminals: tuple[Terminal, ...]
    scores: ToldScores | None = None
    vectors: RequestVectors | None = None


@message(63)
class Stop:
    """Detokenizer to scheduler: stop strings ended these requests; answer with their `Finish`."""

    uids: Int64
