"""One answer to a request, as the scheduler knows it."""

from __future__ import annotations

import dataclasses
import enum

import numpy as np
from numpy.typing import NDArray

from nanoactor.messages import Admit, FreeText, Int32, RequestSpec
from nanoactor.models.columns import rows_of
from nanoactor.runtime.codec import copied
from nanoactor.scheduling.config import SchedulerConfig
from nanoactor.scheduling.ends import End
from nanoactor.scheduling.family import Family
from nanoactor.scheduling.free_text import (
    NO_GATE,
    must_go_on,
    next_gate,
    restored,
    watched_ids,
)
from nanoactor.scheduling.items import SequenceItems
from nanoactor.scheduling.table import RunningTable

_ALL = 2**31 - 1


class Phase(enum.Enum):
    """The state of a sequence."""

    WAITING = "waiting"
    """Holds nothing; new, or preempted."""
    FOLLOWING = "following"
    """Holds nothing, and begins where another answer to its request ends the prompt."""
    MATCHING = "matching"
    """Has a slot and its credits; the block manager's answer is under way."""
    RUNNING = "running"
    HELD = "held"
    """Holds nothing, is in no queue, and has nothing left to compute: its caller will say more, or
    a result will tell what that needs. While it holds a slot, it is among those that run."""
    FINISHED = "finished"


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """One answer's tokens and counters. *Known* are tokens whose value the host has seen;
    *scheduled* are positions that planned steps compute, and may be ahead of what is known.

    While it holds a slot, both stand in the slot's row of the table.
    """

    uid: int
    spec: RequestSpec
    """What its request asks for, as all answers to it have it; but `sampling` and `prompt_logprobs`
    of each stand here."""
    priority_key: tuple[int, int]
    """Lower goes first and is preempted last."""
    table: RunningTable
    kept: Int32
    """Prompt and output as far as known, while it holds no slot."""
    prompt_length: int
    limit: int
    """How many tokens it may have in all."""
    hashes: NDArray[np.uint8]
    sampling: bytes
    family: Family[Sequence]
    prompt_logprobs: int
    scored: int
    """How many of the prompt's positions were scored by planned steps, or need not be: what was
    told once is not told again."""
    free: FreeText | None = None
    """What of its output is free before the grammar holds."""
    gate: int = NO_GATE
    """The id that ends the free text at hand."""
    drops: bool = False
    """Whether results that are under way are dropped: they are behind the end of free text."""
    resumed_to: int = 0
    """How many tokens it was admitted with, if its output had begun before; else 0."""
    told: int = -1
    """The last position for which a token was told to its caller."""
    asked: int = -1
    """The last position for which a planned step chooses under a mask."""
    lent: int = 0
    """How many of its leading blocks other answers to its request may hold too."""
    phase: Phase = Phase.WAITING
    slot: int = -1
    shared: int = 0
    """How many of its blocks it found in the prefix cache, and may not give back alone."""
    starved_since: int = 0
    """The first of the steps that it sits out for want of a block; 0 where it does not."""
    last_step: int = 0
    """The last step with a row of it that was under way when it was preempted."""
    unanswered: int = 0
    """Matches that the block manager has not answered."""
    introduced: bool = False
    """Whether the runners know its sampling parameters under its present slot."""
    cached_tokens: int = -1
    """What its first match found; negative until then."""
    preemptions: int = 0
    began: int = -1
    """When the device took up its first step, in ns of the monotonic clock; -1 until then."""
    items: SequenceItems | None = None
    """Its pictures and videos."""
    is_parked: bool = False
    """Waits for pages of the encoder cache, apart from those who need none."""

    @classmethod
    def answers(
        cls,
        event: Admit,
        table: RunningTable,
        config: SchedulerConfig,
    ) -> list[Sequence]:
        """Make the sequences of a request as the tokenizer admitted it, one for each answer.

        Priority counts as so many places in the order of arrival, so that nobody is passed by
        more than `priority_window` later requests for each degree of priority between them.
        """
        tokens, hashes, spec = event.token_ids.copy(), event.hashes.copy(), copied(event.spec)
        samplings, last = rows_of(spec.sampling), event.prompt_length - 1
        family: Family[Sequence] = Family(range(event.uid, event.uid + len(samplings)))
        gate, _ = restored(event.free, tokens[event.prompt_length :].tolist())
        return [
            cls(
                uid=uid,
                spec=spec,
                priority_key=(uid + spec.priority * config.priority_window, uid),
                table=table,
                kept=tokens,
                prompt_length=event.prompt_length,
                limit=min(event.prompt_length + spec.stopping.max_tokens, config.max_model_len),
                hashes=hashes,
                sampling=sampling,
                family=family,
                prompt_logprobs=spec.prompt_logprobs if uid == event.uid else -1,
                scored=0 if spec.prompt_logprobs >= 0 and uid == event.uid else last,
                free=event.free,
                gate=gate,
                resumed_to=len(tokens) if len(tokens) > event.prompt_length else 0,
                items=SequenceItems.of(event.items, config.encoder) if event.items else None,
            )
            for uid, sampling in zip(family.uids, samplings, strict=True)
        ]

    @property
    def is_constrained(self) -> bool:
        """Tell whether its tokens are chosen under masks: then it never decodes, and each position
        is computed when its token is known."""
        return bool(self.spec.grammar) and self.gate == NO_GATE

    @property
    def is_stepwise(self) -> bool:
        """Tell whether it never decodes: no token of it is known before somebody says so."""
        return self.is_constrained or self.spec.held

    @property
    def is_held(self) -> bool:
        """Tell whether nothing but its caller keeps it from going on. No step with a row of it is
        in flight then."""
        return self.spec.held and self.told == self.length

    @property
    def is_computed(self) -> bool:
        """Tell whether its caller says what is computed next, now or when results are in."""
        return self.spec.held and self.scheduled == self.length

    @property
    def continues(self) -> bool:
        """Tell whether positions of its output are computed like a prompt's."""
        return self.is_stepwise and self.scheduled >= self.prompt_length

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end it."""
        return (*self.spec.stopping.eos_ids, *self.spec.stopping.stop_ids)

    @property
    def watched_ids(self) -> tuple[int, ...]:
        """The tokens behind which it may not go on as it did."""
        return (*self.end_ids, *watched_ids(self.free))

    @property
    def gate_reached(self) -> int:
        """The id that ends the free text behind the newest known token; `NO_GATE` under the
        grammar."""
        if self.free is None:
            return NO_GATE
        index = self.length - self.prompt_length - 1
        return next_gate(self.free, self.gate, index, int(self.tokens[-1]))

    def takes(self, token: int) -> bool:
        """Tell whether a token that was sampled counts: not when it has ended, not behind the end
        of free text, and not where the token would end what must go on."""
        if self.phase is Phase.FINISHED or self.drops:
            return False
        return not self.refuses(token)

    def refuses(self, token: int) -> bool:
        """Tell whether a token would end it in its thoughts, where its form is to come."""
        if not must_go_on(self.free, self.gate) or token not in self.spec.stopping.eos_ids:
            return False
        return self.length + 1 - self.prompt_length >= self.spec.stopping.min_tokens

    @property
    def length(self) -> int:
        """Return how many tokens are known."""
        return int(self.table.known[self.slot]) if self.slot >= 0 else len(self.kept)

    @property
    def tokens(self) -> Int32:
        """The known tokens; a view while it holds a slot."""
        return self.table.tokens[self.slot, : self.length] if self.slot >= 0 else self.kept

    @property
    def target(self) -> int:
        """Return how many positions are prefilled before it decodes; it holds a slot."""
        return int(self.table.targets[self.slot])

    @property
    def reach(self) -> int:
        """Up to where it can be prefilled now, as far as its pictures are encoded, and it has
        blocks."""
        target = self.target
        if self.is_stepwise:
            target = min(target, int(self.table.room[self.slot]))
        return target if self.items is None else self.items.reach(self.scheduled, target)

    @property
    def is_starving(self) -> bool:
        """Tell whether it never decodes, and needs a block for its next position."""
        return (
            self.is_stepwise
            and self.phase is Phase.RUNNING
            and self.scheduled == int(self.table.room[self.slot]) < self.target
        )

    @property
    def pages(self) -> int:
        """Pages of the encoder cache that its items take."""
        return 0 if self.items is None else self.items.pages

    @property
    def scheduled(self) -> int:
        """Return how many positions the planned steps compute; 0 where it holds no slot."""
        return self.table.scheduled_at(self.slot) if self.slot >= 0 else 0

    @property
    def blocks(self) -> int:
        """Return how many blocks it holds."""
        return self.table.blocks_at(self.slot) if self.slot >= 0 else 0

    def has_blocks_of(self, uid: int) -> bool:
        """Tell whether it is this request, or may hold some of its blocks as another answer."""
        shares = self.lent > 0 or self.uid in self.family.marks
        return self.uid == uid or (shares and uid in self.family.uids)

    @property
    def gives_back(self) -> int:
        """Return how many blocks would come back if it gave up all of its own."""
        return self.blocks - max(self.shared, self.family.held_by_others(self))

    @property
    def most_hits(self) -> int:
        """The positions of it that may be found instead of being computed: what is not scored
        must be."""
        return _ALL if self.is_scored else self.scored

    @property
    def is_scored(self) -> bool:
        """Tell whether nothing of its prompt is left to be scored."""
        return self.scored >= self.prompt_length - 1

    def score_before(self, end: int) -> tuple[int, int]:
        """Have a step that computes its positions up to `end` score what was not scored: (the
        first position, how many)."""
        first, count = self.scored, min(end, self.prompt_length - 1) - self.scored
        self.scored += max(0, count)
        return first, max(0, count)

    def append(self, token: int) -> int:
        """Append a token; return its index in the output."""
        index = self.length - self.prompt_length
        if self.slot >= 0:
            self.table.append_one(self.slot, token)
        else:
            self.kept = np.append(self.kept, np.int32(token))
        return index

    def end_reached(self) -> End | None:
        """Return how the newest known token ends it; None where it goes on."""
        tokens, stopping = self.tokens, self.spec.stopping
        token = int(tokens[-1])
        if len(tokens) - self.prompt_length >= stopping.min_tokens:
            if token in stopping.eos_ids:
                return End("stop", hide_last=True)
            if token in stopping.stop_ids:
                return End("stop", token, hide_last=True)
        return End("length") if len(tokens) >= self.limit else None

    def end_restored(self) -> End | None:
        """Return how the last token of an answer that goes on has ended it before; None where it
        has not, or has no token."""
        return self.end_reached() if self.length > self.prompt_length else None

    def describe(self) -> str:
        """Return its counters, for error messages."""
        return (
            f"request {self.uid} ({self.phase.value}, slot {self.slot}): {self.length} known of at "
            f"most {self.limit}, {self.scheduled} scheduled, {self.blocks} blocks, "
            f"{self.preemptions} preemptions"
        )
