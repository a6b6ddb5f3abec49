"""Knows what must be true, and looks after every message whether it is."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, defaultdict, deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nanoactor.kv.hashing import HASH_BYTES
from nanoactor.kv.index_changes import IndexCopy
from nanoactor.kv.index_events import IndexEvents
from nanoactor.messages.engine import (
    Abort,
    Admission,
    Admit,
    Continue,
    HoldClock,
    OutputDelta,
    Plan,
    Step,
    StepDone,
    StepWanted,
    Stop,
    Submit,
    Terminal,
    Tokens,
    Turn,
)
from nanoactor.messages.engine import (
    Answer as Answered,
)
from nanoactor.messages.grammar import ForcedTokens
from nanoactor.messages.orders import Pause
from nanoactor.messages.rows import RowExpander, Rows, Want
from nanoactor.messages.vision import VisionStep
from nanoactor.scheduling.sequences.sequence import Phase, Sequence
from nanoactor.scheduling.steps.depth import AHEAD_SECONDS, STEPWISE_SECONDS
from nanoactor.scheduling.steps.planned import PlannedRow, PlannedStep
from nanoactor.setup.actors import ENCODER_PAGE_ROWS
from tests.simulation.device import SPOILT
from tests.simulation.grammar import TOO_HARD, is_refused
from tests.simulation.reference import (
    Answer,
    Letters,
    Scored,
    cut_by_text,
    letter,
    pooled,
    sample,
    score,
    true_blocks,
    turns,
)
from tests.simulation.scenario import Ask, Toy, rules_of, sampling_of, seed_of
from tests.simulation.stories import Stories

if TYPE_CHECKING:
    from tests.simulation.world import World


class Facts(NamedTuple):
    """What a request's last life was like."""

    preemptions: int
    began: int | None
    first_hit: int
    must_abort: bool
    opened: bool


class Oracle:
    """The invariants of one world. Every method raises `AssertionError` where one is broken."""

    def __init__(self, world: World, record: bool) -> None:
        self._world = world
        self._scenario = world.scenario
        self._turns = [turns(ask, world.scenario) for ask in world.scenario.asks]
        answers = [each[0] for each in self._turns]
        every = [one for each in self._turns for several in each for one in several]
        self._true = true_blocks(every, world.scenario.block_size)
        self._answer_of = answers
        self.answers: dict[int, Answer | None] = {}
        self.positions: dict[int, int] = {}
        """By request number: its position in the scenario, ..."""
        self.numbers: dict[int, int] = {}
        """... and which of the answers it is."""
        self.terminals: dict[int, Terminal] = {}
        self.counts: Counter[str] = Counter()
        self.stories = Stories(record)
        self._told_index = IndexCopy()
        """The prefix index, as the block manager has told it."""
        self._failed: dict[int, int] = {}
        self._choiceless: dict[int, int] = {}
        """By request: the first position at which its logits were not finite."""
        self._told_prompts: set[int] = set()
        """Positions of requests whose prompts' log-probabilities were complete before a death."""
        self._forgotten = 0
        """The latest order to forget the index that was obeyed."""
        self._facts: dict[int, Facts] = {}
        """By request that is over: what its terminal must say."""
        self._begin()

    def _begin(self) -> None:
        """What is known since everybody began anew."""
        self._rows: dict[int, tuple[list[int], dict[int, int]]] = {}
        """By stamped step: the requests whose positions it computes, and all by slot."""
        self._expander = RowExpander(self._scenario.max_num_seqs)
        self._first_steps: dict[int, int] = {}
        """By request: the first step with a row of it."""
        self._began: dict[int, int] = {}
        """By step: when the device took it up."""
        self._planned_slots: dict[int, set[int]] = {}
        """By step that is planned and not computed: the slots with a row in it."""
        self._decode_slots: set[int] = set()
        self._last_use = np.zeros(self._scenario.blocks, np.int64)
        """By block: the last step that reads or writes it."""
        self._indexed: defaultdict[int, list[tuple[int, bytes]]] = defaultdict(list)
        """By step after which they must be true: (block, content) that were indexed."""
        self._sat_out: dict[int, tuple[int, int]] = {}
        """By request that sits out: (steps, preemptions when it began to)."""
        self._head: tuple[Any, int, int] = (None, 0, 0)
        """(which head since which match, steps when it became that, the bound then)."""
        self._matches = 0
        self._stamping = 0
        self._released: dict[int, int] = {}
        """By block: when it was last let go."""
        self._yielded = 0
        """Blocks that this event's victims give back."""
        self._due: set[int] = set()
        """Requests whose results are about to be handled."""
        self._must_abort: set[int] = set()
        self._preemptions: Counter[int] = Counter()
        self._first_hit: dict[int, int] = {}
        self._introduced: dict[int, int] = {}
        """By slot: whose sampling parameters the runner has."""
        self._opened: set[int] = set()
        self._promised: deque[tuple[int, int]] = deque()
        """(slot, blocks that it is to give back) of the victims whose free is under way; -1 where
        the scheduler may not know."""
        self._unanswered: deque[tuple[int, int]] = deque()
        """(turn, fence) of the turns with frees whose answer the scheduler has not handled."""
        self._awaited: deque[int] = deque()
        """Turns whose answer the scheduler has not handled."""
        self._wanted = 0
        self._steps_before = 0
        self._stale: set[int] = set()
        """Blocks that were written before the index was forgotten, and have not been handed out
        since."""
        self._held_since: dict[int, float] = {}
        """By request of which all living answers are held: since when."""

    def cut(self) -> None:
        """Somebody has died: nothing of what was under way counts any more."""
        self.counts["deaths"] += 1
        for name in ("allocate", "remember", "release"):
            vars(self.manager.pool).pop(name, None)
        vars(self.manager.index).pop("forget_all", None)
        self._note_facts()
        self._begin()

    def resumes(self) -> None:
        """The journal is about to send what is not over."""
        entries = self._world.entries.items()
        self._told_prompts = {at for at, entry in entries if entry.has_prompt_logprobs}

    def attach(self) -> None:
        """The actors are there: take a look at every block that is handed out or indexed."""
        actors: Any = self._world.actors
        self.scheduler = actors["scheduler"]._scheduler
        self.manager = actors["blocks"]._manager
        self.device = actors["runner.0"]
        self._vision = [actors[name] for name in actors if name.startswith("vision")]
        cache = self.manager.items.cache
        self._allocate_pages, cache._allocate = cache._allocate, self.allocate_pages
        self._page_use = np.zeros(self._scenario.encoder_pages, np.int64)
        pool = self.manager.pool
        self._allocate, self._remember = pool.allocate, pool.remember
        self._release, grants = pool.release, self.scheduler._grants
        self._released |= dict.fromkeys(pool._cached, 0)  # in the order of `min`
        self._check_survivors()
        pool.allocate, pool.remember = self.allocate, self.remember
        pool.release = self.release
        self._preempt, grants.preempt = grants.preempt, self.preempt
        admission = self.scheduler._admission
        self._admit, admission._admit = admission._admit, self.admit
        index = self.manager.index
        self._forget, index.forget_all = index.forget_all, self.forget_index
        self._plan, self.scheduler._plan = self.scheduler._plan, self.plan
        self._beside_stepwise = False
        running = self.scheduler._running
        self._rewind, running.rewind = running.rewind, self.rewind

    # -- blocks ---------------------------------------------------------------------------

    def allocate(self) -> int:
        """No block is handed out while a step in flight may still use it; LRU among cached."""
        pool = self.manager.pool
        evictions, cached = pool.evictions, list(pool._cached)
        block: int = self._allocate()
        if pool.evictions > evictions:
            oldest = min(cached, key=self._released.__getitem__)
            assert block == oldest, f"block {block} is evicted, but {oldest} was used before"
        self._stale.discard(block)
        assert self._last_use[block] <= self.device.done, (
            f"block {block} is to be rewritten, but step {self._last_use[block]} uses it and "
            f"only step {self.device.done} is done"
        )
        return block

    def allocate_pages(self, count: int) -> list[int]:
        """No page is handed out while a step in flight may still read or write it."""
        pages: list[int] = self._allocate_pages(count)
        used = [page for page in pages if self._page_use[page] > self.device.done]
        assert not used, f"pages {used} are to be rewritten, but steps in flight use them"
        return pages

    def _encoded(self, step: Step) -> None:
        """A step uses these pages; its slices are within the budget."""
        if (vision := step.vision) is not None:
            self._page_use[vision.pages] = step.step
            self._page_use[vision.rows // ENCODER_PAGE_ROWS] = step.step
            self._check_budget(vision)

    def _check_budget(self, vision: VisionStep) -> None:
        budget, cost = self._scenario.max_num_batched_tokens, 0
        for number, count in zip(
            vision.slices.numbers.tolist(), vision.slices.counts.tolist(), strict=True
        ):
            cost += count * self.manager.items.cache.get(number).units.cost(budget)
        assert cost <= budget, f"{cost} rows are encoded in a step"
        alone = len(vision.slices.numbers) == 1
        self.counts["units of large images"] += alone and cost == budget

    def release(self, blocks: list[int], fence: int) -> int:
        """Children are let go, and so evicted, before their parents."""
        contents = [self.manager.pool._hashes[block] for block in blocks]
        for content, older in zip(contents[1:], contents, strict=False):
            wrong = content in self._true and older and self._true[content].parent == older
            assert not wrong, f"of blocks {blocks} a parent is let go before its child"
        for block in blocks:
            self.counts["releases"] += 1
            self._released[block] = self.counts["releases"]
        return int(self._release(blocks, fence))

    def preempt(self, victim: Sequence) -> None:
        """Nobody is preempted while credits, there or on their way, suffice."""
        scheduler = self.scheduler
        starving = int(scheduler._running.table.readiness()[1].sum()) + len(
            scheduler._running.starving
        )
        enough = scheduler.budget.credits + scheduler.budget.pending + self._yielded
        assert starving > enough, f"{enough} blocks are there or on their way for {starving}"
        youngest = max(scheduler._running, key=lambda s: self._place(s.uid))
        assert victim is youngest, f"{victim.uid} is preempted, but {youngest.uid} is younger"
        turn = scheduler._turn
        unseen = self._awaited or scheduler._turns or turn._frees or turn._forks
        stale = unseen or self._yielded or self._scenario.prefix_caching
        self._promised.append((victim.slot, -1 if stale else victim.num_freeable_blocks))
        self._yielded += max(1, victim.num_freeable_blocks)
        self._preemptions[victim.uid] += 1
        self._preempt(victim)

    def remember(self, block: int, content: bytes) -> bool:
        """Nothing but the beginnings of requests is indexed, and only where it is or will be."""
        before = self.manager.pool.find(content)
        new: bool = self._remember(block, content)
        if before is None and self.manager.pool.find(content) == block:
            assert block not in self._stale, f"block {block} was to be forgotten, and is indexed"
            assert content in self._true, f"block {block} is indexed with tokens nobody knows"
            # True when the last step that was stamped, or is being stamped now, is computed.
            last = max(self._stamping, max(self._rows, default=0))
            self._indexed[last].append((block, content))
            if last <= self.device.done:
                self._check_indexed(last)
        return new

    def forget_index(self, number: int) -> None:
        """What was computed so far is not found any more."""
        is_new = number > self._forgotten
        self._forget(number)
        if is_new:
            assert not self.manager.pool._index, "what was computed before is found after"
            self._stale = set(range(self._scenario.blocks))
            self._forgotten = number
            self.counts["indexes forgotten"] += 1

    def _check_survivors(self) -> None:
        """What is indexed when everybody begins anew is in the device's memory."""
        size = self._scenario.block_size
        for content, block in self.manager.pool._index.items():
            if content in self._true:
                held = self.device.kv[block * size : (block + 1) * size]
                assert (held == self._true[content].states).all(), f"block {block} did not survive"
                self.counts["blocks that survive"] += 1
            else:
                assert content.startswith(b"begun"), f"block {block} is indexed by {content!r}"

    def _check_indexed(self, step: int) -> None:
        size = self._scenario.block_size
        for block, content in self._indexed.pop(step, ()):
            held = self.device.kv[block * size : (block + 1) * size]
            right = (held == self._true[content].states) | (held == SPOILT)
            assert right.all(), f"block {block} is indexed wrongly"
            self.counts["blocks indexed"] += 1

    # -- steps ----------------------------------------------------------------------------

    def owners(self, step: int) -> list[int]:
        """The request of each row, in the order of the rows."""
        return self._rows[step][0]

    def owners_of_slots(self, step: int, slots: list[int]) -> list[int]:
        """The request that had each slot when the step was stamped."""
        return [self._rows[step][1][slot] for slot in slots]

    def token_after(self, uid: int, position: int) -> int:
        """What the model says after so many tokens of a request."""
        found = self.answers[uid]
        assert found is not None
        return found.tokens[position]

    def fails(self, uid: int, position: int) -> bool:
        """Whether the logits after so many tokens of a request are not finite."""
        if not self._scenario.failures:
            return False
        # Prompts are what others share, so they fail more often, and for all answers alike.
        answer = self.answers[uid]
        prompted = answer is not None and position == answer.prompt_length
        name = f"{self._scenario.seed} {self.positions[uid]} {position}"
        if self.numbers[uid] and not prompted:
            name += f" {self.numbers[uid]}"
        chance = random.Random(name).random()
        if chance >= self._scenario.failures * (5 if prompted else 1):
            return False
        self._failed.setdefault(uid, position)
        return True

    def is_choiceless(self, uid: int, position: int, dropped: bool = False) -> bool:
        """Whether the request's rules leave it no token after so many. A row that is dropped ends
        nothing: forced tokens may come to stand in its place."""
        if not self._scenario.choiceless or not rules_of(self.positions[uid]):
            return False
        name = f"{self._scenario.seed} {self.positions[uid]} {position} choiceless"
        if random.Random(name).random() >= self._scenario.choiceless:
            return False
        if not dropped:
            self._choiceless.setdefault(uid, position)
        return True

    def seed_of(self, uid: int) -> int:
        """By which the runner knows it."""
        return seed_of(self.positions[uid], self.numbers[uid])

    def forked(self, source: int, copy: int) -> None:
        """A sequence begins as a copy: of another answer to the same request, at its prompt's
        end."""
        assert self.positions[source] == self.positions[copy], f"{copy} is a copy of {source}"
        self.counts["forks"] += 1

    def goes_on(self, position: int, turn: int) -> None:
        """A caller says what its answers go on with; no step has a row of them until then."""
        for number, found in enumerate(self._turns[position][turn]):
            self.answers[self._world.uid_of[position] + number] = found

    def masked(self, uid: int, position: int) -> list[int]:
        """The tokens that must not be sampled for a position: ends before `min_tokens`."""
        ask = self._scenario.asks[self.positions[uid]]
        answer = self.answers[uid]
        assert answer is not None
        early = position < answer.prompt_length + ask.min_tokens
        return [*ask.eos_ids, *ask.stop_ids] if early else []

    def computed(self, step: int) -> None:
        """The device has done a step."""
        self._check_indexed(step)
        self._planned_slots.pop(step, None)

    def _stamped(self, step: Step) -> None:
        holdings = self.manager.tables.holdings
        decode, _, others = self._expander.expand(step.rows, step.leaves)
        decoding, counts = decode.tolist(), others.counts
        copies = others.slots[others.copies].tolist()
        slots = [*others.slots[counts > 0].tolist(), *decoding, *copies]
        assert len(set(slots)) == len(slots) <= self._scenario.max_num_seqs
        late = others.slots[others.choices].tolist()
        used = int(counts.sum()) + len(decoding)
        encodes = step.vision is not None and len(step.vision.slices.numbers)
        assert used + bool(encodes) + len(late) > 0, "an empty step"
        assert used <= self._scenario.max_num_batched_tokens, f"{used} tokens in a step"
        self._encoded(step)
        self.counts["tokens"] += used
        self.counts["steps"] += 1
        by_slot = {slot: holdings[slot].uid for slot in (*slots, *late)}
        self.counts["chosen under masks"] += len(late)
        self._check_introduced(step, by_slot)
        self._check_wants(others, by_slot)
        rows = [by_slot[slot] for slot in slots[: len(slots) - len(copies)]]
        self._rows[step.step] = (rows, by_slot)
        for slot in copies:
            answer = self.answers[by_slot[slot]]
            assert answer is not None
            self._first_hit.setdefault(by_slot[slot], answer.prompt_length)
        self._rows.pop(step.step - 10, None)
        for uid in by_slot.values():
            self._first_steps.setdefault(uid, step.step)
        for slot in (*slots, *late):
            self._last_use[holdings[slot].table] = step.step
        self.manager.check()
        self.stories.step(step, by_slot)

    def _has_prompt_logprobs(self, position: int) -> bool:
        """Whether all were told before everybody began anew."""
        return position in self._told_prompts

    def _check_introduced(self, step: Step, by_slot: dict[int, int]) -> None:
        """The runner has the sampling parameters of every row's own request."""
        new, masked = step.admissions, 0
        for row, slot in enumerate(new.slots.tolist()):
            position = self.positions[by_slot[slot]]
            ask = self._scenario.asks[position]
            ends = masked + int(new.masked_counts[row])
            number = self.numbers[by_slot[slot]]
            assert new.sampling[row].tobytes() == sampling_of(position, number)
            of_prompt = -1 if number else ask.prompt_logprobs
            if self._world.cuts and self._has_prompt_logprobs(position):
                of_prompt = -1
            wanted = ask.logprobs, of_prompt
            scores = new.scores
            asked = [
                (int(scores.output[at]), int(scores.prompt[at]))
                for at in (np.flatnonzero(scores.rows == row) if scores is not None else ())
            ]
            assert asked == ([wanted] if max(wanted) >= 0 else [])
            told = (int(new.unmasked_from[row]), *new.masked_ids[masked:ends])
            ids = (*ask.eos_ids, *ask.stop_ids) if ask.min_tokens else ()
            answer = self.answers[by_slot[slot]]
            assert answer is not None
            assert told == (answer.prompt_length + ask.min_tokens, *ids)
            assert new.prompt_lengths[row] == answer.prompt_length
            rules = [r for at, r in zip(new.rule_rows, new.rules, strict=True) if at == row]
            ruled = None if ask.pools else rules_of(position)
            assert list(map(str, rules)) == [str(r) for r in [ruled] if r is not None]
            assert new.uids[row] == by_slot[slot]
            self._introduced[slot], masked = by_slot[slot], ends
        assert masked == len(new.masked_ids)
        for slot, uid in by_slot.items():
            assert self._introduced.get(slot) == uid, f"{uid} in slot {slot} is not introduced"

    def freeze_ids(self, uid: int) -> set[int]:
        """The tokens behind which a request does not go on decoding."""
        ask = self._scenario.asks[self.positions[uid]]
        return {*ask.eos_ids, *ask.stop_ids, *self._last_gate(uid)}

    def _last_gate(self, uid: int) -> tuple[int, ...]:
        """The token that ends a request's free text."""
        grammar = self._scenario.asks[self.positions[uid]].grammar
        if grammar is None or grammar.free is None:
            return ()
        _, _, close, call = grammar.free
        return (close if call < 0 else call,)

    def _is_behind_gate(self, sequence: Sequence) -> bool:
        """Whether the newest token is a last gate, even if the text before goes on: the next one
        follows a row of its own."""
        return int(sequence.tokens[-1]) in self._last_gate(sequence.uid)

    def _check_wants(self, rows: Rows, by_slot: dict[int, int]) -> None:
        """A row that ends what is known samples, or keeps its state where a mask is needed."""
        for slot, wants in zip(rows.slots.tolist(), rows.wants.tolist(), strict=True):
            answer = self.answers[by_slot[slot]]
            assert answer is not None
            known = int(self.manager.tables.known[slot])
            if wants & Want.KEEP:  # an answer is free until its end-of-sequence token is refused
                assert answer.is_chosen(known) or known == answer.refused
            elif wants & Want.SAMPLE and not rows.choices[rows.slots == slot].any():
                assert not answer.is_chosen(known) or known == answer.refused

    def _check_available(self) -> None:
        """What may be rewritten is used by no step that is planned and not done."""
        pool = self.manager.pool
        blocks = np.array([*pool._free, *pool._cached], np.int64)
        used = blocks[self._last_use[blocks] > self.device.done]
        assert not len(used), f"blocks {used} may be rewritten while steps in flight use them"

    def _planned(self, plan: Plan) -> None:
        assert not self._is_paused(), f"step {plan.step} is planned, though no step is to be"
        self._decode_slots -= set(plan.leaves.tolist())
        self._decode_slots |= set(plan.rows.slots[plan.rows.wants & Want.DECODE > 0].tolist())
        copies = set(plan.rows.slots[plan.rows.copies].tolist())
        for slot in copies:
            self._check_slot(slot)
        self._matches += len(copies)
        self._planned_slots[plan.step] = self._decode_slots | set(plan.rows.slots.tolist())
        in_flight = plan.step - self.scheduler._pipeline.completed
        assert in_flight <= self._scenario.most_in_flight, f"{in_flight} steps in flight"
        if in_flight > self._scenario.depth:
            self._check_short(list(self.scheduler._pipeline.in_flight)[: in_flight - 1])

    def _is_paused(self) -> bool:
        """Whether no step is to be planned, and the scheduler has been told."""
        frontend: Any = self._world.actors["frontend"]
        under_way = self._world.edges["frontend", "scheduler"].messages
        told = not frontend._is_restarting and not any(isinstance(one, Pause) for one in under_way)
        return bool(frontend.control.is_paused) and told

    def _check_short(self, before: list[PlannedStep]) -> None:
        """One more than usual is planned only behind steps that decode, without prompts, and are
        short."""
        self.counts["planned deep"] += 1
        rows = [row for step in before for row in step.rows]
        prompts = [row for row in rows if row.start < row.sequence.prompt_length]
        assert not prompts, "planned behind a prompt"
        assert all(len(step.decode_batch.slots) for step in before), "planned where nobody decodes"
        least, most = len(before) * self._scenario.step_seconds, AHEAD_SECONDS
        if self._beside_stepwise:
            self.counts["planned deep beside stepwise ones"] += 1
            least, most = least - self._scenario.step_seconds, STEPWISE_SECONDS
        assert least < most, f"the device has work for {least} s, and gets more"

    def _admitted(self, admission: Admission) -> None:
        self._check_slot(admission.slot)
        self._matches += 1

    def _check_slot(self, slot: int) -> None:
        busy = [step for step, slots in self._planned_slots.items() if slot in slots]
        assert not busy, f"slot {slot} is given away, but steps {busy} have rows in it"

    # -- waiting --------------------------------------------------------------------------

    def admit(self, sequence: Sequence, need: int) -> None:
        """Nobody is overtaken by more than the bound of docs/scheduling.md."""
        mine = self._place(sequence.uid)
        for other in self.scheduler.live.values():
            passed = self.scheduler._room.waiting.is_parked(other) and not sequence.pages
            if other.phase is Phase.WAITING and other is not sequence and not passed:
                assert mine < self._place(other.uid), f"{sequence.uid} overtakes {other.uid}"
        budget = self._scenario.max_num_batched_tokens
        for other in self.scheduler._running:
            budget -= max(0, other.prefill_end - other.scheduled)
            cached = self._scenario.prefix_caching and sequence.is_prompt_read
            if other.prefill_end > other.scheduled and cached:
                self._check_not_under_way(sequence, other)
        assert budget > 0, "more is matched than the next step has tokens for"
        self._admit(sequence, need)

    def _check_not_under_way(self, head: Sequence, other: Sequence) -> None:
        """The head does not compute what is about to be computed for another."""
        size = self._scenario.block_size
        end = (other.scheduled // size + 1) * size
        useful = min(head.prompt_length, len(head.tokens) - 1, other.prompt_length)
        same = end <= useful and (head.tokens[:end] == other.tokens[:end]).all()
        blocks = end // size
        same = same and (head.hashes[:blocks] == other.hashes[:blocks]).all()
        assert not same, f"{head.uid} computes again what {other.uid} is about to compute"

    def plan(self) -> None:
        """Steps are filled up, oldest first, and no step is planned too early."""
        scheduler, step = self.scheduler, self.scheduler._pipeline.planned + 1
        idle = not scheduler._pipeline.in_flight
        # The last of them may end while the step is planned.
        self._beside_stepwise = bool(scheduler._running.stepwise)
        before = {s.uid: s.scheduled for s in scheduler._running}
        self._plan()
        if scheduler._pipeline.planned < step:
            return
        if self._scenario.plan_lead == "late":
            assert idle or self._wanted >= step, f"step {step} is planned before it is wanted"
            self.counts["planned as wanted"] += not idle
        planned = scheduler._pipeline.in_flight[-1]
        rows = scheduler._running.sequences_in(planned)
        held = [s.uid for s in rows if s.is_held]
        assert not held, f"step {step} has rows of {held}, which are held"
        late = [fence for _, fence in self._unanswered if step > fence + self._scenario.depth]
        assert not late, f"step {step} is planned, but frees at {late} are not answered"
        used = len(planned.decode_batch.slots) + planned.num_positions
        riding = [r for r in planned.rows if r.sequence.uid not in before and r.source < 0]
        self.counts["prompts that ride with their admission"] += len(riding)
        before |= {row.sequence.uid: 0 for row in riding}
        self._check_constrained(before)
        self._check_forks(planned)
        running = [s for s in scheduler._running if not self._is_cut(s)]
        left = [self._place(s.uid) for s in running if _prefills(s)]
        if left:
            assert used == self._scenario.max_num_batched_tokens, f"{used} tokens, more wait"
            prompts = [s for s in rows if before.get(s.uid, s.target) < s.target]
            served = [self._place(s.uid) for s in prompts if not _continued(s, before)]
            assert not served or max(served) <= min(left), "a younger prompt goes first"

    def _is_cut(self, sequence: Sequence) -> bool:
        """Whether a step may compute less of it than the budget has room for."""
        reading = sequence.reading
        read = reading is not None and 0 < reading.num_read < reading.end
        return read or _goes_on_one_by_one(sequence, self._scenario.block_size)

    def _check_constrained(self, before: dict[int, int]) -> None:
        """Who can go on is in the step, and so is who can choose."""
        for s in self.scheduler._running.stepwise:
            if s.phase is not Phase.RUNNING:
                continue
            if _continued(s, before) and before[s.uid] < s.target:
                assert s.scheduled > before[s.uid] or s.is_starving, f"{s.uid} does not go on"
            if s.spec.held:
                continue
            held = self.scheduler.constraints._masks.is_ready(s.uid)
            chooses = s.scheduled == s.length and held and s.grammar.last_sampled < s.length
            assert not chooses, f"{s.uid} could choose, but does not"

    def _check_forks(self, planned: PlannedStep) -> None:
        """Who begins as a copy overtakes nobody."""
        for copy in (row for row in planned.rows if row.source >= 0):
            mine = self._place(copy.sequence.uid)
            for other in self.scheduler.live.values():
                parked = self.scheduler._room.waiting.is_parked(other)
                if other.phase is Phase.WAITING and not parked:
                    assert mine < self._place(other.uid), f"a copy overtakes {other.uid}"

    def _place(self, uid: int) -> tuple[int, int]:
        """A degree of priority is worth so many places in the order of arrival."""
        ask = self._scenario.asks[self.positions[uid]]
        return uid + ask.priority * self._scenario.priority_window, uid

    def _check_gaps(self, steps_before: int) -> None:
        """A stream that runs is in every step, or sits out within the bound."""
        scheduler = self.scheduler
        preemptions = scheduler.statistics.preemptions
        for planned in list(scheduler._pipeline.in_flight):
            if planned.step <= steps_before:
                continue
            rows = {sequence.uid for sequence in scheduler._running.sequences_in(planned)}
            decodable = np.logical_or(*scheduler._running.table.readiness())
            streams = {s.uid for s in scheduler._running if decodable[s.slot]}
            stepwise = [s for s in scheduler._running.stepwise if s.phase is Phase.RUNNING]
            streams |= {s.uid for s in stepwise if s.continues and s.scheduled < s.target}
            streams -= rows
            for uid in [uid for uid in self._sat_out if uid not in streams]:
                del self._sat_out[uid]
            for uid in streams:
                steps, since = self._sat_out.get(uid, (0, preemptions))
                self._sat_out[uid] = (steps + 1, since)
                self.counts["sat out"] += 1
                most = self._scenario.most_in_flight * (2 + preemptions - since)
                assert steps + 1 <= most, (
                    f"request {uid} has sat out {steps + 1} steps, {preemptions - since} "
                    f"preemptions were made meanwhile: at most {most}"
                )

    def rewind(self, sequence: Sequence) -> None:
        """What is lowered is computed again, so that the head of the queue waits longer."""
        before = _positions_left(sequence)
        self._rewind(sequence)
        key, steps, bound = self._head
        self._head = (key, steps, bound + _positions_left(sequence) - before)
        self.counts["lowered"] += 1

    def _check_head(self) -> None:
        """The head of the queue waits at most as long as those that run have tokens left."""
        scheduler = self.scheduler
        steps = scheduler.statistics.steps
        head = scheduler._room.waiting._ready.head
        key = None if head is None else (head.uid, self._matches)
        if key != self._head[0]:
            left = sum(_positions_left(s) for s in scheduler._running)
            works = scheduler.items.entries.values()
            left += sum(work.units.count for work in works)
            left += sum(map(_unanswered_units, scheduler._running))
            self._head = (key, steps, left + self._scenario.most_in_flight)
        elif key is not None:
            _, since, bound = self._head
            assert steps - since <= bound, (
                f"request {key[0]} has been first in the queue for {steps - since} steps, "
                f"but only {bound} tokens were left to those that ran"
            )

    # -- messages -------------------------------------------------------------------------

    def submitted(self, uid: int, position: int, number: int) -> None:
        """An answer of a request got its number."""
        self.positions[uid], self.numbers[uid] = position, number
        self.answers[uid] = self._answer_of[position][number]
        self.stories.submitted(uid, self._scenario.asks[position])

    def check_overload(self, answers: int) -> None:
        """A request of so many answers was refused for want of room: there must be none."""
        frontend: Any = self._world.actors["frontend"]
        figures = frontend.statistics()
        full = figures["waiting_requests"] + answers > self._scenario.max_waiting_requests
        assert full or figures["waiting_tokens"] > 0
        self.counts["refused"] += 1

    def _forced(self, message: ForcedTokens) -> None:
        """No more than what may follow."""
        ends = message.positions + message.counts
        for uid, end in zip(message.uids.tolist(), ends.tolist(), strict=True):
            sequence = self.scheduler.live.get(uid)
            assert sequence is None or end <= sequence.limit, f"{uid} is forced beyond its end"

    def check_door(self, charge: int) -> None:
        """A request of so many tokens was let in: there must have been room, or no other prompt
        waits."""
        frontend: Any = self._world.actors["frontend"]
        figures = frontend.statistics()
        assert figures["waiting_requests"] <= self._scenario.max_waiting_requests
        tokens = figures["waiting_tokens"]
        alone = tokens == charge
        assert tokens <= self._scenario.max_waiting_tokens or alone

    def sent(self, source: str, message: Any) -> None:
        """A message leaves its actor."""
        self._count_kinds(message)
        self.stories.message(self._world.loop.time(), source, message)
        match message:
            case Submit() | Admit() if source == "frontend":
                entry = self._world.entries.get(self.positions[message.uid])
                assert entry is None or not entry.aborted, f"{message.uid} was aborted"
                frontend: Any = self._world.actors["frontend"]
                waits = entry is not None and entry.submit.uid in frontend._readmission._deferred
                assert not waits, f"{message.uid} waits for a trial to end"
            case ForcedTokens():
                self._forced(message)
            case IndexEvents():
                self._told_index.apply(message)
            case Step():
                self._stamped(message)
            case Turn():
                self._turned(message)
            case Tokens():
                self._due -= set(message.uids.tolist())

    def _count_kinds(self, message: Any) -> None:
        """Count messages by class, and those inside others."""
        self.counts[f"message {type(message).__name__}"] += 1
        for field in dataclasses.fields(message):
            value = getattr(message, field.name)
            for one in value if isinstance(value, tuple) else (value,):
                if dataclasses.is_dataclass(one):
                    self._count_kinds(one)

    def _turned(self, turn: Turn) -> None:
        """A turn is sent."""
        for admission in turn.admissions:
            self._admitted(admission)
        if len(turn.frees) or turn.forks:
            self._unanswered.append((turn.number, turn.fence))
        copies = turn.plan is not None and turn.plan.rows.copies.any()
        if len(turn.frees) or turn.forks or turn.admissions or turn.failures or copies:
            self._awaited.append(turn.number)
        if turn.forks is not None:
            self._matches += 1
            self.counts["forks of held answers"] += len(turn.forks.slots)
            for slot in (*turn.forks.slots.tolist(), *turn.forks.sources.tolist()):
                self._check_slot(slot)
        if turn.plan is not None:
            self._planned(turn.plan)

    def arrives(  # noqa: C901 - a table of messages
        self, source: str, target: str, message: Any
    ) -> None:
        """A message is about to be handled."""
        self._steps_before = self.scheduler._pipeline.planned
        self._yielded = 0
        match message:
            case Turn():
                self._stamping = message.plan.step if message.plan else 0
                self._check_promises(message)
            case Abort() if (
                target == "scheduler" and message.uid not in self.scheduler.arrivals.seen
            ):
                self.counts["aborts that overtook"] += 1
                self._must_abort.add(message.uid)
            case Continue():
                for uid in range(message.uid, message.uid + len(message.parents)):
                    if (sequence := self.scheduler.live.get(uid)) and sequence.slot >= 0:
                        self._check_slot(sequence.slot)
            case StepDone():
                self._began[message.step] = message.began
                due = self.scheduler._pipeline.in_flight[len(self.scheduler._unanswered.held_back)]
                rows = [row for row in due.rows if row.samples]
                free = [row.sequence for row in rows if not row.is_choice]
                decoding = self.scheduler._running.owners(due.decode_batch.slots)
                free += [s for s in decoding if not self._is_behind_gate(s)]
                samplers = {s.uid for s in free if not self._is_behind_free_text(s)}
                samplers |= {row.sequence.uid for row in rows if row.is_choice}
                samplers |= {row.sequence.uid for row in due.rows if self._ends_with(row)}
                live = samplers & self.scheduler.live.keys()
                self._due = live | (self._due if self.scheduler._unanswered.held_back else set())
            case Stop():
                self.counts["stop strings"] += len(message.uids)
                self.counts["several stops at once"] += len(message.uids) > 1
            case StepWanted():
                self._wanted = max(self._wanted, message.step)
            case Answered():
                while self._unanswered and self._unanswered[0][0] <= message.turn:
                    self._unanswered.popleft()
                while self._awaited and self._awaited[0] <= message.turn:
                    self._awaited.popleft()
                found = bool(message.hits.any()) and not self._scenario.prefix_caching
                self.counts["siblings found"] += found
                for uid, hit in zip(message.uids.tolist(), message.hits.tolist(), strict=True):
                    if (answer := self.answers[uid]) is not None:
                        self._first_hit.setdefault(uid, min(hit, answer.prompt_length))
            case OutputDelta():
                self._check_delta(message)

    def _check_promises(self, turn: Turn) -> None:
        """A victim gives back what it was preempted for, if the scheduler could know. Where
        prefixes are cached somebody may have found some of its blocks, or others' may be its alone
        by now."""
        references = list(self.manager.pool._references)
        for slot in turn.frees.tolist():
            table = self.manager.tables.holdings[slot].table
            for block in table:
                references[block] -= 1
            freed = sum(not references[block] for block in table)
            if self._promised and self._promised[0][0] == slot:
                promised = self._promised.popleft()[1]
                self.counts["promises checked"] += promised >= 0
                assert promised in (-1, freed), (
                    f"slot {slot} was to give {promised} blocks back, not {freed}"
                )

    def _ends_with(self, row: PlannedRow) -> bool:
        """Whether a request ends with the vector that a row brings."""
        answer = self.answers[row.sequence.uid]
        if not row.pools or answer is None:
            return False
        return self._scenario.pooling == "cls" or row.start + row.length == answer.prompt_length

    def _is_behind_free_text(self, sequence: Sequence) -> bool:
        """Whether the next token must be chosen under a mask, so that what others bring is lost."""
        answer = self.answers[sequence.uid]
        return answer is not None and answer.is_chosen(sequence.length)

    def _check_delta(self, chunk: OutputDelta) -> None:
        for opened in chunk.opened:
            answer = self.answers[opened.uid]
            assert answer is not None
            prompt = answer.tokens[: answer.prompt_length]
            assert opened.uid not in self._opened
            told = tuple(opened.prompt_token_ids.tolist())
            ask = self._scenario.asks[self.positions[opened.uid]]
            assert told == prompt or (ask.n > 1 and not told)
            self._opened.add(opened.uid)
        told = {*chunk.uids.tolist(), *(opened.uid for opened in chunk.opened)}
        again = told & self.terminals.keys()
        assert not again, f"more news of requests {again}, which are over"
        assert told <= self._opened, "news of requests before they are opened"
        for terminal in chunk.terminals:
            assert terminal.uid not in self.terminals, f"a second terminal of {terminal.uid}"
            self.terminals[terminal.uid] = terminal

    def _note_facts(self) -> None:
        for uid in self.terminals.keys() - self._facts.keys():
            self._facts[uid] = self._facts_of(uid)

    def _facts_of(self, uid: int) -> Facts:
        began = self._began.get(self._first_steps.get(uid, 0))
        aborts, opened = uid in self._must_abort, uid in self._opened
        return Facts(self._preemptions[uid], began, self._first_hit.get(uid, 0), aborts, opened)

    def handled(self, target: str, message: Any) -> None:
        """A message was handled."""
        if target not in ("scheduler", "blocks"):
            return
        self._check_credits()
        if target == "blocks":
            self._check_index()
            self._check_available()
        if target == "scheduler":
            if not self.scheduler._unanswered.held_back:
                dropped = self._due & self.scheduler.live.keys()
                assert not dropped, f"results of {dropped} were dropped, though they live"
            self._check_gaps(self._steps_before)
            self._check_head()
            self._check_callers(message)
            if isinstance(message, Abort):
                assert message.uid not in self.scheduler.live, "an abort was not obeyed"

    def _check_index(self) -> None:
        """What was told of the index, and what is about to be, is the index."""
        pool, copy = self.manager.pool, IndexCopy()
        copy.contents = set(self._told_index.contents)
        rest = pool.changes
        if rest._cleared:
            copy.contents.clear()
        for content, is_there in rest._changes.items():
            assert (content in copy.contents) is not is_there, "the same is told twice"
            (copy.contents.add if is_there else copy.contents.discard)(content)
        full = {content for content in pool._index if len(content) == HASH_BYTES}
        assert copy.contents == full, "what is told of the index does not make it"
        self.counts["changes of the index that wait"] += len(rest)

    def _check_callers(self, message: Any) -> None:
        """Who is held has its time, and no more; then all answers to its request end."""
        now, limit, live = self._world.loop.time(), self._scenario.hold_seconds, self.scheduler.live
        held: set[int] = set()
        for position in {self.positions[uid] for uid, s in live.items() if s.spec.held}:
            first = self._world.uid_of[position]
            count = self._scenario.asks[position].n
            answers = [live[uid] for uid in range(first, first + count) if uid in live]
            if all(s.is_held and s.phase is not Phase.WAITING for s in answers):
                held.add(first)
        for first in self._held_since.keys() - held:
            since = self._held_since.pop(first)
            if isinstance(message, HoldClock):
                self.counts["expired"] += 1
                assert now - since >= limit * 0.999, f"{first} has expired after {now - since} s"
                count = self._scenario.asks[self.positions[first]].n
                left = live.keys() & {*range(first, first + count)}
                assert not left, f"{left} did not expire with {first}"
        for first in held:
            since = self._held_since.setdefault(first, now)
            assert now - since <= 1.501 * limit, f"{first} has been held for {now - since} s"

    def _check_credits(self) -> None:
        """The scheduler's count is the block manager's, but for what is under way."""
        scheduler, pool = self.scheduler, self.manager.pool
        counted = scheduler.budget.credits + scheduler.budget.pending
        ownerless = sum(1 for references in pool._references if not references)
        for message in self._world.edges["scheduler", "blocks"].messages:
            ownerless -= sum(admission.blocks for admission in message.admissions)
            ownerless -= len(message.forks.slots) if message.forks else 0
            if (plan := message.plan) is not None:
                ownerless -= len(plan.grows) + self._copied_blocks(plan.rows)
        answers = self.manager._answers
        ownerless -= sum(answers.refunds) + sum(answers.freed.values())
        for message in self._world.edges["blocks", "scheduler"].messages:
            assert isinstance(message, Answered)
            ownerless -= int(message.refunds.sum()) + int(message.freed.sum())
        assert counted == ownerless, f"{counted} credits are counted, {ownerless} are true"
        assert scheduler.budget.credits >= 0, f"{scheduler.budget.credits} credits"

    def _copied_blocks(self, rows: Rows) -> int:
        """Blocks that a plan's copies take."""
        ends = dict(zip(rows.slots.tolist(), (rows.starts + rows.counts).tolist(), strict=True))
        sources = rows.sources[rows.copies].tolist() if len(rows.sources) else []
        return sum(ends[slot] % self._scenario.block_size > 0 for slot in sources)

    # -- the end --------------------------------------------------------------------------

    def conclude(self) -> None:
        """Everything is over: every answer is right, and nothing is held anywhere."""
        self._note_facts()
        for position, entry in self._world.entries.items():
            for uid in entry.uids:
                if self._is_abandoned(position, entry, uid):
                    continue
                assert uid in self.terminals, f"request {uid} got no end"
                self._check_answer(position, entry, self.terminals[uid])
            self._check_prompt_scores(entry)
        self._check_nothing_held()
        self._check_nothing_spoilt()
        frontend: Any = self._world.actors["frontend"]
        assert self._forgotten == frontend.control._forget_number, "an index was not forgotten"
        known = frontend.index._copy.contents
        # What a death has lost is told with the whole index, in a later turn.
        if not self.manager.pool.changes._cleared:
            assert known == self._told_index.contents, "the frontend has lost some of the index"
        self._count()

    def _is_abandoned(self, position: int, entry: Any, uid: int) -> bool:
        """Whether it was ended for its reader before the engine had let go of it, or while nobody
        but its journal knew of it: then what it was told is right as far as it goes."""
        own, expected = entry.answer(uid), self.answers[uid]
        ended_here = own.terminal is not None and own.terminal is not self.terminals.get(uid)
        if own.terminal is None or not ended_here:
            return False
        assert own.terminal.reason == "abort"
        assert own.terminal.tokens == len(own.token_ids), "it was told more behind its end"
        assert self._scenario.asks[position].aborts or entry.error
        ask = self._scenario.asks[position]
        if expected is not None and not ask.grammar and ask.caller is None:
            assert tuple(own.token_ids) == expected.output[: len(own.token_ids)]
        self.counts["aborted between lives"] += 1
        return True

    def _check_answer(self, position: int, entry: Any, terminal: Terminal) -> None:
        ask, expected = self._scenario.asks[position], self.answers[terminal.uid]
        own = entry.answer(terminal.uid)
        ids, text = list(own.token_ids), "".join(own.text)
        who, facts = f"request {terminal.uid}", self._facts[terminal.uid]
        # By its user, or because another answer to the same request has failed.
        given_up = bool(ask.aborts or entry.error)
        assert own.terminal is terminal
        self._check_scores(ask, own, self._told_states(ask, terminal.uid))
        told = (terminal.tokens, terminal.characters)
        unopened = terminal.reason == "abort" and self.counts["deaths"] and told == (0, 0)
        assert unopened or told == (len(ids), len(text)), who
        assert terminal.preemptions == facts.preemptions, who
        began = facts.began
        # Forced tokens may end it before its first step has, and it may be of an earlier life.
        never = not ids or ask.grammar or self._world.cuts
        assert terminal.began == began or (terminal.began == -1 and never), who
        if expected is not None and expected.undecodable:
            assert terminal.reason in ("error", "abort")
            assert not ids, f"{who} was answered without its image"
            self.counts["undecodable"] += terminal.reason == "error"
            return
        if ask.grammar is not None and self._check_grammar(ask.grammar, terminal, ids, expected):
            return
        if ask.caller is not None and expected is not None:
            told = tuple(self._told(ask, terminal.uid)[: len(ids)])
            expected = dataclasses.replace(expected, output=told)
            self._check_held(ask, entry, terminal, text, expected)
            return
        if self._check_error(terminal, ids, text, expected):
            return
        self._check_nothing_hidden(terminal, expected)
        if not facts.preemptions and terminal.reason != "abort":
            # Behind a death a stop string that was told before may end it before it is answered.
            early = self.counts["deaths"] and isinstance(terminal.stop_reason, str)
            assert terminal.cached_tokens in (facts.first_hit, 0 if early else -1), who
        assert terminal.reason == "abort" or not facts.must_abort, who
        if terminal.reason == "abort":
            assert given_up, f"{who} was aborted by nobody"
            self.counts["aborted"] += 1
            if not ids:
                return
        refused = expected is None or facts.must_abort
        assert facts.opened != refused, who
        if expected is None:
            assert terminal.reason in ("error", "abort")
            assert terminal.error or terminal.reason == "abort"
            return
        if terminal.reason == "abort" or (given_up and len(ids) < len(expected.output)):
            # What was held back is let out at the end, and may complete a stop string.
            cut = cut_by_text(ask, ids, hide_last=False)
            assert tuple(ids) == expected.output[: len(ids)], who
            assert (text, terminal.stop_reason) == cut[1:], who
            return
        self._check_vector(ask, own.vector, expected)
        assert tuple(ids) == expected.output, f"{who}: {ids} where {expected.output} was due"
        assert text == expected.text, f"{who}: {text!r} where {expected.text!r} was due"
        assert (terminal.reason, terminal.stop_reason) == (expected.reason, expected.stop_reason)

    def _check_vector(self, ask: Ask, vector: Any, expected: Answer) -> None:
        """An answer that is a vector has it, others have none."""
        if not ask.pools:
            assert vector is None
            return
        due = pooled(expected, self._scenario.pooling)
        assert (vector == due).all(), f"{vector} where {due} was due"

    def _check_error(
        self, terminal: Terminal, ids: list[int], text: str, expected: Answer | None
    ) -> bool:
        """Whether it ended since a row had no token; then what it was told before is right."""
        if terminal.reason == "failed":
            self._check_failed(terminal, ids, text, expected)
        elif terminal.reason == "error" and expected is not None:
            self._check_choiceless(terminal, ids, text, expected)
        else:
            return False
        return True

    def _told_states(self, ask: Ask, uid: int) -> list[int]:
        """The states behind which an answer's tokens are sampled, one after the other."""
        expected, number = self.answers[uid], self.numbers[uid]
        if expected is None:
            return []
        begin = expected.prompt_length - 1
        if ask.caller is None:
            return list(map(int, expected.states[begin:]))
        found = (several[number] for several in self._turns[self.positions[uid]])
        return [int(one.states[begin + at]) for at, one in enumerate(found) if one is not None]

    def _told(self, ask: Ask, uid: int) -> list[int]:
        """What a caller is told of an answer, one turn after the other."""
        states = self._told_states(ask, uid)
        return [sample(state, self.numbers[uid]) for state in states]

    def _check_held(
        self, ask: Ask, entry: Any, terminal: Terminal, text: str, expected: Answer
    ) -> None:
        """Each turn its caller was told what follows, and it ended as the caller said."""
        who, caller, taken = f"request {terminal.uid}", ask.caller, entry.continued
        assert caller is not None
        ids = list(entry.answer(terminal.uid).token_ids)
        if self._check_error(terminal, ids, text, expected):
            return
        assert tuple(ids) == expected.output, f"{who} was told {ids}, not {expected.output}"
        cut = cut_by_text(ask, ids, hide_last=False)[1]
        self.counts["told to callers"] += len(ids)
        if terminal.reason == "abort":
            assert ask.aborts or entry.error or caller.end == "abort", who
            return
        self._check_nothing_hidden(terminal, expected)
        if terminal.reason == "expired":
            assert len(ids) in (taken, taken + 1), who
            assert cut.startswith(text), who
            return
        assert terminal.reason == "stop", who
        assert text == cut, who
        number = self.numbers[terminal.uid]
        ended = [at for at, turn in enumerate(caller.rounds[:taken]) if turn.parents[number] < 0]
        assert ended or taken == len(caller.rounds) + 1, who
        due = ended[0] + 1 if ended else taken
        assert len(ids) == due, f"{who} was told {len(ids)} tokens in {due} turns"

    def _check_grammar(
        self, toy: Toy, terminal: Terminal, ids: list[int], expected: Answer | None
    ) -> bool:
        """Whether its grammar ended it; then what it was told before is right."""
        who = f"request {terminal.uid}"
        hung, hard = "mask_timeout" in terminal.error, terminal.error.endswith(TOO_HARD)
        if not hung and not hard:
            due = expected is not None and len(ids) < len(expected.output)
            ended = due and (toy.hangs or len(ids) == toy.fails_at)
            gone = terminal.reason in ("abort", "failed", "error") or expected is None
            assert gone or not ended, f"{who} ended as if it had a mask"
            return False
        assert expected is not None
        assert hung == toy.hangs, who
        reason = "failed" if hung else "refused" if is_refused(toy.number) else "error"
        assert terminal.reason == reason, who
        self.counts["refused by the machine"] += reason == "refused"
        # Forced tokens before the place where it fails may not have been taken yet.
        assert hung or len(ids) <= toy.fails_at, f"{who} failed behind {len(ids)} tokens"
        assert tuple(ids) == expected.output[: len(ids)], who
        self.counts["grammars failed"] += 1
        return True

    def _check_scores(self, ask: Ask, own: Any, states: list[int]) -> None:
        """Each token of output came with its own log-probability, or none did."""
        if ask.logprobs < 0:
            assert own.logprobs is None
            return
        assert len(own.logprobs) == len(own.offsets) == len(own.token_ids)
        decoder, text = Letters(), ""
        for index, token in enumerate(own.token_ids):
            assert own.offsets[index] == len(text)
            text += decoder.push(token)
            right = score(states[index], token, ask.logprobs)
            self._check_score(own.logprobs[index], right, token)

    def _check_prompt_scores(self, entry: Any) -> None:
        """What was told of the prompt is right, and all was told where there is output."""
        ask, uid = self._scenario.asks[self.positions[entry.submit.uid]], entry.submit.uid
        found, expected = entry._prompt_logprobs.values, self.answers[uid]
        if ask.prompt_logprobs < 0 or expected is None:
            assert found == [None]
            return
        assert found[0] is None
        if entry.answers[0].token_ids:
            assert len(found) == expected.prompt_length
        for index, logprobs in enumerate(found[1:], 1):
            token = expected.tokens[index]
            right = score(int(expected.states[index - 1]), token, ask.prompt_logprobs)
            self._check_score(logprobs, right, token)

    def _check_score(self, found: dict[int, Any], right: Scored, token: int) -> None:
        told = {token: (right.logprob, right.rank)}
        for rank, (top, value) in enumerate(zip(right.top_ids, right.top_logprobs, strict=True), 1):
            told[top] = value, rank
        assert {key: (each.logprob, each.rank) for key, each in found.items()} == told
        assert all(each.bytes == letter(key).encode() for key, each in found.items())
        self.counts["scores"] += 1

    def _check_nothing_hidden(self, terminal: Terminal, expected: Answer | None) -> None:
        """A row without a token lay past the request's end, if there was one."""
        for at in (self._failed.get(terminal.uid), self._choiceless.get(terminal.uid)):
            if at is not None and terminal.reason != "abort":
                assert expected is not None
                assert at >= expected.prompt_length + len(expected.output), (
                    f"request {terminal.uid} was told nothing of its row at {at}"
                )

    def _check_failed(
        self, terminal: Terminal, ids: list[int], text: str, expected: Answer | None
    ) -> None:
        """It failed, or has read what a failure left; what it was told before is right."""
        who = f"request {terminal.uid}"
        assert expected is not None
        own = terminal.uid in self._failed
        assert own or self._failed, f"{who} failed, though nothing did"
        self.counts["failed"] += own
        self.counts["tainted"] += not own
        assert terminal.error, who
        assert tuple(ids) == expected.output[: len(ids)], f"{who}: {ids}, not {expected.output}"
        ask = self._scenario.asks[self.positions[terminal.uid]]
        assert cut_by_text(ask, ids, hide_last=False)[1].startswith(text), who

    def _check_choiceless(
        self, terminal: Terminal, ids: list[int], text: str, expected: Answer
    ) -> None:
        """Its rules left it nothing; what it was told before is right."""
        who = f"request {terminal.uid}"
        assert terminal.uid in self._choiceless, f"{who}: {terminal.error}"
        assert "no token to choose" in terminal.error, who
        assert len(ids) == self._choiceless[terminal.uid] - expected.prompt_length, who
        assert tuple(ids) == expected.output[: len(ids)], f"{who}: {ids}, not {expected.output}"
        ask = self._scenario.asks[self.positions[terminal.uid]]
        assert cut_by_text(ask, ids, hide_last=False)[1].startswith(text), who
        self.counts["choiceless"] += 1

    def _check_nothing_spoilt(self) -> None:
        """Whatever is still in the prefix index can be read."""
        size = self._scenario.block_size
        for content, block in self.manager.pool._index.items():
            if content not in self._true:
                assert content.startswith(b"begun"), f"block {block} is indexed by {content!r}"
                continue
            held = self.device.kv[block * size : (block + 1) * size]
            assert (held == self._true[content].states).all(), f"block {block} is spoilt"

    def _check_nothing_held(self) -> None:
        actors: Any = self._world.actors
        scheduler, pool = self.scheduler, self.manager.pool
        scheduler.check_idle()
        self.manager.check()
        journal = actors["frontend"].statistics()
        self.counts["admitted by the frontend"] += journal.pop("direct")
        del journal["step_at"]  # a time, not something held
        held = {
            "live": len(scheduler.live),
            "waiting": len(scheduler._room.waiting._ready._heap),
            "parked": len(scheduler._room.waiting._parked._heap),
            "running": len(scheduler._running),
            "tombstones": len(scheduler.arrivals.tombstones),
            "slots": self._scenario.max_num_seqs - scheduler.budget.free_slots,
            "credits": self._scenario.blocks - scheduler.budget.credits,
            "seen": len(scheduler.arrivals.seen),
            "pages": self._scenario.encoder_pages - scheduler.items.budget.credits,
            "works": len(scheduler.items.entries),
            "pixels": len(self.device._side_inputs.pixels),
            "masks": len(self.device._side_inputs.masks),
            "grammars": len(actors["grammar"]._book) if "grammar" in actors else 0,
            "constrained": len(scheduler.constraints._open),
            "held": len(scheduler.held_sequences),
            "half encoded": len(self.device._half.keys() - set(self.device.dropped)),
            "wants": sum(actor.statistics()["wants"] for actor in self._vision),
            "unread": sum(actor.statistics()["unread"] for actor in self._vision),
            "waits": sum(actor.statistics()["waiting"] for actor in self._vision),
            "held items": sum(
                actor.statistics()["held"]
                for name, actor in actors.items()
                if name.startswith("tokenizer")
            ),
            "blocks": self._scenario.blocks - pool.available,
            "holdings": self.manager.num_held_slots,
            "entries": actors["detokenizer"]._detokenizer.entries,
            "pending": actors["detokenizer"]._detokenizer.pending,
            **journal,
            "untokenized": len(actors["frontend"]._untokenized),
            "messages": sum(len(edge.messages) for edge in self._world.edges.values()),
        }
        left = {name: count for name, count in held.items() if count}
        assert not left, f"left over: {left}"

    def _count(self) -> None:
        statistics = self.scheduler.statistics
        computed = statistics.prefill_tokens + statistics.decode_tokens
        assert computed == self.counts["tokens"] or self._world.cuts
        for name in ("preemptions", "overruns", "mixed_steps"):
            self.counts[name] += getattr(statistics, name)
        self.counts["hits"] += self.manager.hits.hit_tokens
        self.counts["images encoded"] += self.scheduler.items.encoded
        self.counts["encoder hits"] += self.manager.items.cache.hits
        self.counts["encoder evictions"] += self.manager.items.cache.evictions
        held = self.scheduler.held_sequences.figures()
        self.counts["places given up while held"] += held["held_yields"]
        self.counts["evictions"] += self.manager.pool.evictions
        self.counts["requests"] += len(self._world.entries)


def _prefills(sequence: Sequence) -> bool:
    return sequence.phase is Phase.RUNNING and sequence.scheduled < sequence.prefill_end


def _goes_on_one_by_one(sequence: Sequence, block_size: int) -> bool:
    """Whether it resumes behind a death, and lacks at most a block of tokens of its output."""
    resumed = prompt = sequence.prompt_length
    if sequence.target == sequence.resumed_to:
        resumed = sequence.target
    return 0 < resumed - max(sequence.scheduled, prompt) <= block_size


def _continued(sequence: Sequence, before: dict[int, int]) -> bool:
    """Whether its output went on when so many positions were planned."""
    began = before.get(sequence.uid, 0)
    return sequence.is_stepwise and began >= sequence.prompt_length


def _unanswered_units(sequence: Sequence) -> int:
    """What is to be encoded for it at most, where its match is not answered."""
    if sequence.items is None or sequence.items.entries:
        return 0
    return sum(units.count for units in sequence.items.units)


def _positions_left(sequence: Sequence) -> int:
    """Steps that have a row of it, one after the other: a constrained one computes a position, then
    chooses a token."""
    left = max(0, sequence.limit - (not sequence.spec.pools) - sequence.scheduled)
    return 2 * left + 1 if sequence.spec.grammar else left
