"""The scheduler's state of one sequence."""

from __future__ import annotations

import dataclasses
import enum

import numpy as np
from numpy.typing import NDArray

from nanoactor.messages.engine import Admit, Int32, RequestSpec
from nanoactor.messages.rows import KEEP, POOL, SAMPLE, SCORE
from nanoactor.models.sampling.columns import split_rows
from nanoactor.runtime.codec import copy_arrays
from nanoactor.scheduling.config import SchedulerConfig
from nanoactor.scheduling.sequences.ends import End
from nanoactor.scheduling.sequences.free_text import NO_GATE
from nanoactor.scheduling.sequences.grammar_state import GrammarState
from nanoactor.scheduling.sequences.group import SequenceGroup
from nanoactor.scheduling.sequences.item_state import SequenceItems
from nanoactor.scheduling.sequences.table import RunningTable

_ALL = 2**31 - 1


class Phase(enum.Enum):
    """Phases of a sequence's life in the scheduler."""

    WAITING = "waiting"
    """In the queue, new or preempted; without slot and blocks."""
    FOLLOWING = "following"
    """Waiting until another sequence of the request has computed the prompt; without slot and
    blocks."""
    MATCHING = "matching"
    """Admitted with a slot and debited blocks; the block manager has not answered yet."""
    RUNNING = "running"
    HELD = "held"
    """Without slot and blocks, in no queue, with nothing left to compute: the sequence waits for
    its caller, or for a result that the caller needs. While such a sequence holds a slot, its phase
    is `RUNNING`."""
    FINISHED = "finished"


@dataclasses.dataclass(slots=True)
class History:
    """Facts about a sequence's progress that are reported when it ends."""

    cached_tokens: int = -1
    """Number of tokens found by the first prefix-cache lookup; -1 before it."""
    preemptions: int = 0
    began: int = -1
    """Time at which the device began the sequence's first step, in ns of the monotonic clock; -1
    before that."""

    def note_match(self, tokens: int) -> None:
        """Record the number of tokens found by a prefix-cache lookup; only the first lookup
        counts."""
        if self.cached_tokens < 0:
            self.cached_tokens = tokens

    def note_preemption(self) -> None:
        """Count a preemption of the sequence."""
        self.preemptions += 1

    def note_begin(self, at: int) -> None:
        """Record when a step began, in ns of the monotonic clock; only the sequence's first step
        counts."""
        if self.began < 0:
            self.began = at


@dataclasses.dataclass(slots=True)
class PromptReading:
    """Progress in reading the hidden states of a prompt's positions, for log-probabilities or
    pooling."""

    flag: int
    """Flag of the rows whose hidden states are read: `Want.SCORE` or `Want.POOL`."""
    end: int
    """Number of leading prompt positions to read."""
    num_read: int = 0
    """Number of positions that planned steps have read so far; no state is read twice."""

    @classmethod
    def of(cls, spec: RequestSpec, prompt_length: int, kind: str) -> PromptReading | None:
        """Return the initial progress of a request; None if the request needs no hidden state other
        than that of the prompt's last position. `kind` is the model's pooling method, as in
        `PoolingConfig.kind`."""
        if spec.prompt_logprobs >= 0:
            return cls(SCORE, prompt_length - 1)
        if not spec.pools or kind not in ("mean", "cls"):
            return None
        return cls(POOL, prompt_length if kind == "mean" else 1)

    @property
    def is_done(self) -> bool:
        """True if all positions have been read."""
        return self.num_read >= self.end

    def clip(self, start: int, stop: int) -> int:
        """Return where a row that starts at `start` must end, at most `stop`. A row must not
        contain both positions that were already read and positions that were not."""
        return min(stop, self.num_read) if start < self.num_read < self.end else stop

    def read_row(self, start: int, stop: int) -> int:
        """Return `flag` if a row over positions `start` to `stop` (exclusive) is read, and count
        these positions as read. Return 0 if the row is not read."""
        if start < self.num_read or self.is_done:
            return 0
        self.num_read = stop
        return self.flag


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """The tokens and counters of one sequence.

    *Known* tokens are those that the host has seen. *Scheduled* positions are those that planned
    steps compute; they may be ahead of the known tokens. While the sequence holds a slot, both are
    stored in the slot's row of `table`.
    """

    uid: int
    spec: RequestSpec
    """The request's specification, shared by all of its sequences. Exceptions: the sampling
    parameters are per sequence (`sampling`), and only the first sequence reports log-probabilities
    of the prompt."""
    priority_key: tuple[int, int]
    """Sort key: the sequence with the lowest key is admitted first and preempted last."""
    table: RunningTable
    saved_tokens: Int32
    """Known tokens of prompt and output, valid only while the sequence holds no slot."""
    prompt_length: int
    limit: int
    """Maximum number of tokens of prompt and output together."""
    hashes: NDArray[np.uint8]
    sampling: bytes
    group: SequenceGroup[Sequence]
    reading: PromptReading | None = None
    """Progress in reading the prompt's hidden states; None if at most that of the last position is
    needed."""
    grammar: GrammarState | None = None
    items: SequenceItems | None = None
    """Images and videos in the prompt; None if there are none."""
    discarded_until: int = 0
    """Number of the last step whose results are discarded because the sequence has since switched
    between free text and grammar."""
    resumed_to: int = 0
    """Number of known tokens on arrival if the sequence resumed with part of its output; else 0."""
    reported: int = -1
    """Last position whose sampled token was reported to the caller without being appended; -1 if
    there is none."""
    phase: Phase = Phase.WAITING
    slot: int = -1
    starved_since: int = 0
    """First step that the sequence skipped for lack of a block; 0 if it lacks none."""
    last_step: int = 0
    """Number of the last step that contained the sequence and was in flight when the sequence was
    preempted; 0 if there was none."""
    history: History = dataclasses.field(default_factory=History)

    @classmethod
    def of_request(
        cls,
        event: Admit,
        table: RunningTable,
        config: SchedulerConfig,
    ) -> list[Sequence]:
        """Return the sequences of an arrived request, in uid order.

        In the queue, a priority that is lower by one (more urgent) counts like an arrival
        `priority_window` places earlier.
        """
        tokens, hashes, spec = event.token_ids.copy(), event.hashes.copy(), copy_arrays(event.spec)
        samplings, output = split_rows(spec.sampling), tokens[event.prompt_length :].tolist()
        group: SequenceGroup[Sequence] = SequenceGroup(range(event.uid, event.uid + len(samplings)))
        reading = PromptReading.of(spec, event.prompt_length, config.pooling)
        return [
            cls(
                uid=uid,
                spec=spec,
                priority_key=(uid + spec.priority * config.priority_window, uid),
                table=table,
                saved_tokens=tokens,
                prompt_length=event.prompt_length,
                limit=min(event.prompt_length + spec.stopping.max_tokens, config.max_model_len),
                hashes=hashes,
                sampling=sampling,
                group=group,
                reading=reading if uid == event.uid else None,
                grammar=GrammarState.restore(event.free, output) if spec.grammar else None,
                resumed_to=len(tokens) if len(tokens) > event.prompt_length else 0,
                items=SequenceItems.of(event.items, config.encoder) if event.items else None,
            )
            for uid, sampling in zip(group.uids, samplings, strict=True)
        ]

    # -- phases ---------------------------------------------------------------------------

    def follow(self) -> None:
        """Make the sequence a follower: it waits until another one of its request has computed the
        prompt."""
        self.phase = Phase.FOLLOWING
        self.group.followers.append(self)

    def wait(self) -> None:
        """Mark the sequence as waiting in the scheduler's queue."""
        self.phase = Phase.WAITING

    def assign_slot(self, slot: int) -> None:
        """Assign a slot to the sequence, which then waits for its prefix-cache lookup."""
        self.phase, self.slot = Phase.MATCHING, slot

    def run(self) -> None:
        """Mark the sequence as running: its prefix-cache lookup is done or does not matter."""
        self.phase = Phase.RUNNING

    def release_slot(self) -> None:
        """Release the slot but keep the known tokens. The caller sets the next phase."""
        self.saved_tokens, self.slot, self.starved_since = self.tokens.copy(), -1, 0

    def hold(self) -> None:
        """Mark the sequence, which must have no slot, as held: it waits for its caller, or for a
        result that its caller needs."""
        self.phase = Phase.HELD

    def finish(self) -> None:
        """Mark the sequence as finished."""
        self.phase = Phase.FINISHED

    def replace_tokens(self, tokens: Int32) -> None:
        """Replace the known tokens of the sequence, which must not hold a slot."""
        self.saved_tokens = tokens

    def record_starved(self, step: int) -> None:
        """Record that the sequence skips step `step` for lack of a block. If `step` is 0, record
        that it has received one."""
        self.starved_since = (self.starved_since or step) if step else 0

    def note_preemption(self, last_step: int) -> None:
        """Record a preemption. `last_step` is the last step in flight that contains the
        sequence."""
        self.last_step = last_step
        self.history.note_preemption()

    def discard_results(self, step: int) -> None:
        """Discard this sequence's results of all steps up to `step`."""
        self.discarded_until = step

    def note_reported(self) -> int:
        """Record that the next token was sampled and reported to the caller without being appended.
        Return its index in the output."""
        self.reported = self.length
        return self.length - self.prompt_length

    # -- properties -----------------------------------------------------------------------

    @property
    def is_constrained(self) -> bool:
        """True if the sequence's tokens are sampled under a grammar's masks. Such a sequence never
        decodes: each position is computed once its token is known."""
        return self.grammar is not None and self.grammar.applies

    @property
    def is_stepwise(self) -> bool:
        """True if the sequence never decodes because its tokens are masked or chosen by a
        caller."""
        return self.is_constrained or self.spec.held

    @property
    def is_held(self) -> bool:
        """True if the sequence waits only for its caller, so that no step in flight contains it."""
        return self.spec.held and self.reported == self.length

    @property
    def is_computed(self) -> bool:
        """True if the sequence's caller chooses its tokens, and planned steps compute all tokens
        chosen so far. Results may still be in flight."""
        return self.spec.held and self.scheduled == self.length

    @property
    def continues(self) -> bool:
        """True if the sequence never decodes and is past its prompt: its output positions are
        computed like prompt positions."""
        return self.is_stepwise and self.scheduled >= self.prompt_length

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids of the end-of-sequence and stop tokens, which end the sequence."""
        return (*self.spec.stopping.eos_ids, *self.spec.stopping.stop_ids)

    @property
    def watched_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that may end the sequence or change its grammar state."""
        return (*self.end_ids, *(self.grammar.watched_ids if self.grammar else ()))

    @property
    def freeze_ids(self) -> tuple[int, ...]:
        """Ids of the tokens after which the device stops decoding the sequence, because it ends or
        continues under a grammar's masks."""
        gate = self.grammar.last_gate if self.grammar else NO_GATE
        return self.end_ids if gate == NO_GATE else (gate, *self.end_ids)

    def accepts(self, token: int, step: int) -> bool:
        """Return True if a token sampled by step `step` counts: the step's results were not
        discarded, and the token does not end a sequence that must continue."""
        return self.accepts_step(step) and not self.refuses(token)

    def accepts_step(self, step: int) -> bool:
        """Return True if the results of step `step` count: the sequence has not ended, and they
        were not discarded."""
        return self.phase is not Phase.FINISHED and step > self.discarded_until

    def refuses(self, token: int) -> bool:
        """Return True if a token must be dropped because it would end the sequence before its
        constrained output."""
        must_continue = self.grammar is not None and self.grammar.must_continue
        if not must_continue or token not in self.spec.stopping.eos_ids:
            return False
        return self.length + 1 - self.prompt_length >= self.spec.stopping.min_tokens

    @property
    def length(self) -> int:
        """Number of known tokens, prompt included."""
        return int(self.table.known[self.slot]) if self.slot >= 0 else len(self.saved_tokens)

    @property
    def tokens(self) -> Int32:
        """The known tokens, prompt included (int32); a view of the table while the sequence holds a
        slot."""
        return self.table.tokens[self.slot, : self.length] if self.slot >= 0 else self.saved_tokens

    @property
    def target(self) -> int:
        """Number of positions to prefill before the sequence decodes. Valid only with a slot."""
        return int(self.table.targets[self.slot])

    @property
    def prefill_end(self) -> int:
        """End (exclusive) of the positions that can be prefilled now: the sequence has blocks for
        them, and the encoding of their images is planned."""
        target = min(self.target, int(self.table.capacity[self.slot]))
        return target if self.items is None else self.items.prefill_end(self.scheduled, target)

    @property
    def is_starving(self) -> bool:
        """True if the sequence is running and needs another block before it can prefill its next
        known token."""
        return (
            self.phase is Phase.RUNNING
            and self.scheduled == int(self.table.capacity[self.slot]) < self.target
        )

    @property
    def pages(self) -> int:
        """Number of encoder-cache pages that the sequence's images and videos need."""
        return 0 if self.items is None else self.items.pages

    @property
    def scheduled(self) -> int:
        """Number of positions that the planned steps compute; 0 without a slot."""
        return self.table.scheduled_at(self.slot) if self.slot >= 0 else 0

    @property
    def blocks(self) -> int:
        """Number of blocks that the sequence holds; 0 without a slot."""
        return self.table.blocks_at(self.slot) if self.slot >= 0 else 0

    @property
    def num_freeable_blocks(self) -> int:
        """Number of blocks that would be freed if the sequence gave up its slot: those that it
        shares with no other."""
        return self.blocks - int(self.table.shared[self.slot])

    @property
    def max_hits(self) -> int:
        """Maximum number of leading positions that may come from the prefix cache. Positions whose
        hidden states are still to be read for log-probabilities or pooling must be computed."""
        return _ALL if self.is_prompt_read or self.reading is None else self.reading.num_read

    @property
    def is_prompt_read(self) -> bool:
        """True if no hidden state of the prompt is left to be read for log-probabilities or
        pooling."""
        return self.reading is None or self.reading.is_done

    @property
    def prompt_logprobs(self) -> int:
        """Number of top log-probabilities requested for each prompt position; -1 if none are
        requested."""
        return -1 if self.reading is None else self.spec.prompt_logprobs

    @property
    def last_want(self) -> int:
        """Flag (`Want`) that is set on the row that completes the sequence's prefill; 0 if none."""
        if self.spec.pools:
            return POOL if self.reading is None else 0
        return KEEP if self.is_constrained else SAMPLE

    def append(self, token: int) -> int:
        """Append a token to the known ones; return its index in the output."""
        index = self.length - self.prompt_length
        if self.slot >= 0:
            self.table.append_one(self.slot, token)
        else:
            self.saved_tokens = np.append(self.saved_tokens, np.int32(token))
        return index

    def end_reached(self) -> End | None:
        """Return the end reason if the newest known token ends the sequence, else None. Checks
        end-of-sequence and stop ids, and the maximum length."""
        tokens, stopping = self.tokens, self.spec.stopping
        token = int(tokens[-1])
        if len(tokens) - self.prompt_length >= stopping.min_tokens:
            if token in stopping.eos_ids:
                return End("stop", hide_last=True)
            if token in stopping.stop_ids:
                return End("stop", token, hide_last=True)
        return End("length") if len(tokens) >= self.limit else None

    def end_restored(self) -> End | None:
        """Return the end reason if a resumed sequence had already ended with its last output token,
        else None."""
        return self.end_reached() if self.length > self.prompt_length else None

    def describe(self) -> str:
        """Return the sequence's phase and counters as text for error messages."""
        return (
            f"sequence {self.uid} ({self.phase.value}, slot {self.slot}): {self.length} known "
            f"tokens of at most {self.limit}, {self.scheduled} scheduled, {self.blocks} blocks, "
            f"{self.history.preemptions} preemptions"
        )
