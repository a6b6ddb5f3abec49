"""The runner's own actor over a device that takes virtual time and checks every byte it reads.

Each KV position holds a number that stands for all tokens up to it. A row may only run if
every position of its context holds what its own sequence has there; so a wrong block, a block
written too early, a stale table, a wrong length or a wrong token shows at once.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np

from nanoactor.actors.runner import RunnerActor
from nanoactor.messages.pooling import StepVectors
from nanoactor.messages.scores import StepScores
from nanoactor.models.limits import FROZEN, NO_TOKEN, NOTHING_ALLOWED
from nanoactor.runner.config import RankConfig
from nanoactor.runner.protocol import StepResult
from nanoactor.setup.actors import ENCODER_PAGE_ROWS, RunnerReady
from tests.simulation.grammar import mask_of
from tests.simulation.reference import row_of, sample, score, vector_of
from tests.simulation.resident import ResidentState, Row, StepInputs
from tests.simulation.scenario import VOCABULARY, Image
from tests.simulation.vision import DEPTH, image_of

if TYPE_CHECKING:
    from tests.simulation.world import World


SPOILT = -2
"""In the KV cache: written by a row that failed, or that had read such a thing."""
ASTRAY = -3
"""Likewise: written by a row behind the end of free text."""


class SimulatedRunner(RunnerActor):
    """`RunnerActor` with a latency model in the place of its thread."""

    def __init__(self, config: RankConfig, world: World) -> None:
        super().__init__(config)
        self._world = world
        self._cache = 1 + world.cuts
        self._busy = False
        self._life = 0
        """How often everybody began anew."""
        self._slow = random.Random(f"{world.scenario.seed} slow")
        self.allows_any_thread = False
        self.done = 0
        """The last step that the device has completed."""
        self.busy_seconds = 0.0
        self.kv = np.full(world.scenario.blocks * world.scenario.block_size, -1, np.int64)
        self._next_token = np.full(world.scenario.max_num_seqs, -1, np.int64)
        self._states = np.full((world.scenario.max_num_seqs, 2), -1, np.int64)
        """What layers keep of each slot: how many positions, and a number that stands for them."""
        self._spoilt: set[int] = set()
        """Requests whose rows failed, or read what such rows wrote."""
        self._ends: dict[int, int] = {}
        """By request: how many positions its last row reached."""
        self._samplers: set[int] = set()
        """Requests that the step at hand brings a token."""
        self.dropped: list[int] = []
        self._half: dict[int, int] = {}
        """By number of pixels: which unit comes next."""
        self.features = np.full(world.scenario.encoder_pages * ENCODER_PAGE_ROWS, -1, np.int64)
        self._kept: dict[int, tuple[int, int]] = {}
        """By slot: whose last state is kept, and behind how many tokens."""
        self._astray: set[int] = set()
        """Requests whose row is behind the end of their free text: it may be anything."""
        self._frozen: set[int] = set()
        """Slots whose decode rows change nothing."""
        self._last: dict[int, int] = {}
        """By request: which token of the step is the last of its row."""

    def setup(self) -> RunnerReady:
        """The cache's size, as the scenario has it."""
        self._executor: Any = self
        self._resident = self._empty()
        return self._ready_info()

    def _empty(self) -> ResidentState:
        scenario = self._world.scenario
        most = -(-scenario.max_model_len // scenario.block_size)
        layout = scenario.max_num_seqs, most, scenario.block_size
        traits = scenario.runs_from, scenario.pooling, scenario.slot_state
        return ResidentState(*layout, *traits)

    def _ready_info(self) -> RunnerReady:
        scenario = self._world.scenario
        return RunnerReady(
            scenario.blocks,
            scenario.block_size,
            "float32",
            "simulated",
            encoder_pages=scenario.encoder_pages,
            max_depth=scenario.max_depth,
            cache=self._cache,
        )

    def reset(self) -> RunnerReady:
        """What the device computes comes to nothing; what is in the cache stays there."""
        while not self._threads._prepared.empty():
            self._threads._prepared.get()
        self._reset_steps()
        self._resident = self._empty()
        self._busy, self.done, self.dropped, self._half = False, 0, [], {}
        self._next_token[:] = -1
        self._states[:] = -1
        self._kept, self._ends, self._last = {}, {}, {}
        self._spoilt, self._astray, self._frozen = set(), set(), set()
        self._life += 1
        return self._ready_info()

    def _on_step(self, step: Any) -> None:
        super()._on_step(step)
        self._pump()

    def prepare(self, step: Any, pixels: Any, masks: Any) -> StepInputs:
        """The runner's executor is the runner itself: a step waits for `_pump`."""
        dropped, self.dropped = self.dropped, []
        return self._resident.apply(step, pixels, dropped, masks)

    def drop_pixels(self, numbers: list[int]) -> None:
        """As the executor does: from the next step on."""
        self.dropped += numbers

    def _encode(self, inputs: StepInputs) -> None:
        """Write the rows of images whose last unit is in the step."""
        work = inputs.update.encoding
        for number in work.dropped if work else ():
            self._half.pop(number, None)
        for task in work.tasks if work else ():
            image = image_of(task.pixels)
            parts = self._parts(image)
            for unit in range(task.first, task.first + task.count):
                frame, part = divmod(unit, parts)
                assert self._half.pop(task.number, 0) == part, "units are encoded in order"
                if part < parts - 1:
                    self._half[task.number] = part + 1
                    continue
                each = image.rows // image.frames
                rows = range(frame * each, (frame + 1) * each)
                self.features[task.cache_rows[rows]] = [row_of(image, row) for row in rows]

    def _parts(self, image: Image) -> int:
        scenario = self._world.scenario
        each = image.rows // image.frames
        return min(DEPTH, -(-each // scenario.max_num_batched_tokens))

    def _pump(self) -> None:
        if self._busy or self._threads._prepared.empty():
            return
        self._busy = True
        prepared = self._threads._prepared.get()
        assert prepared is not None
        inputs: Any = prepared[1]
        if self._requests_steps:
            self.context.call_soon(self._on_begun, inputs.step)
        scenario = self._world.scenario
        seconds = scenario.step_seconds + scenario.token_seconds * len(inputs.token_ids)
        seconds *= 20.0 if self._slow.random() < scenario.slow_chance else 1.0
        self._world.loop.call_later(seconds, self._end, inputs, seconds, self._life)

    def _end(self, inputs: StepInputs, seconds: float, life: int) -> None:
        if life != self._life or self.context.retired:
            return
        ids = self._run(inputs)
        scores, vectors = self._score(inputs, ids), self._pool(inputs)
        self.done = inputs.step
        self.busy_seconds += seconds
        self._world.oracle.computed(inputs.step)
        self._busy = False
        end = round(self.context.now() * 1e9)
        begin = end - round(seconds * 1e9)
        order = inputs.update.order
        told = ids if order is None else ids[order]
        times = {"begin": begin, "forwarded": end, "sampled": end, "end": end}
        found = {"scores": scores, "vectors": vectors}
        self._on_done(inputs.step, StepResult(inputs.update.counts, told, **times, **found))
        self._pump()

    # -- the forward pass -----------------------------------------------------------------

    def _run(self, inputs: StepInputs) -> Any:
        """Copy blocks and states, then compute all chunks and all decode rows, and sample."""
        oracle = self._world.oracle
        self._frozen -= {*inputs.thawed}
        self._copy(inputs)
        self._copy_states(inputs)
        self._encode(inputs)
        self._look(inputs)
        free = inputs.sampling_slots[: len(inputs.sampling_slots) - inputs.choices]
        self._samplers = set(oracle.owners_of_slots(inputs.step, free))
        self._samplers |= {uid for uid, row in self._pooled(inputs) if self._ends_prompt(uid, row)}
        decoding = oracle.owners_of_slots(inputs.step, inputs.decode_slots.tolist())
        chunks = self._owners_of_chunks(inputs)
        assert sorted({*oracle.owners(inputs.step)}) == sorted({*chunks, *decoding})
        for row, uid in zip(inputs.prefills, chunks, strict=True):
            at = slice(row.first, row.first + row.tokens)
            ids = inputs.token_ids[at]
            self._row(uid, row.context, row.blocks, ids, inputs.slot_mapping[at])
            self._take(uid, inputs.prefill_slots[row.first], row.context - row.tokens, row.context)
            self._last[uid] = row.first + row.tokens - 1
            expected = np.arange(row.context - row.tokens, row.context)
            assert (inputs.positions[at] == expected).all(), f"request {uid}: wrong positions"
            self._check_sight(
                uid, row.context - row.tokens, inputs.rope_positions[:, at], row.first
            )
        first = len(inputs.token_ids) - len(inputs.decode_slots)
        free = len(inputs.decode_slots) - inputs.continued
        oracle.counts["rows of runs"] += len(decoding) - len({*decoding})
        for index, slot in enumerate(inputs.decode_slots.tolist()):
            uid = decoding[index]
            context = int(inputs.decode_contexts[index])
            at = slice(first + index, first + index + 1)
            ids, mapping = self._next_token[slot : slot + 1], inputs.slot_mapping[at]
            if index >= free:
                ids = inputs.token_ids[at]
                assert slot not in self._frozen, f"request {uid} is computed in a frozen slot"
            elif self._freezes(uid, slot, context, inputs.freeze_ids[index]) or (
                self._goes_astray(uid, context, mapping)
            ):
                self._last[uid], self._ends[uid] = first + index, context
                continue
            self._row(uid, context, inputs.decode_tables[index], ids, mapping)
            self._take(uid, slot, context - 1, context)
            self._last[uid] = first + index
            assert inputs.positions[first + index] == context - 1, f"request {uid}: position"
            turned = inputs.rope_positions[:, first + index : first + index + 1]
            self._check_sight(uid, context - 1, turned, first + index)
        assert not self._seen, "text is replaced by rows of an image"
        self._fork(inputs)
        self._keep(inputs)
        return self._sample(inputs)

    def _owners_of_chunks(self, inputs: StepInputs) -> list[int]:
        if inputs.update.prefill is None:
            return []
        slots = inputs.update.prefill.rows[0].tolist()
        return self._world.oracle.owners_of_slots(inputs.step, slots)

    def _freezes(self, uid: int, slot: int, context: int, watched: Any) -> bool:
        """Whether the slot of a decode row is frozen, as `BatchOperators.advance` has it."""
        oracle, token = self._world.oracle, int(self._next_token[slot])
        if not self._world.scenario.freezes:
            return False
        # Here a token may be one that a real device would have masked.
        if slot not in self._frozen and token not in oracle.masked(uid, context - 1):
            freezes = token >= 0 and bool((watched == token).any())
            due = oracle.freeze_ids(uid)
            assert freezes is (token in due), f"request {uid}: {watched} where {due} freeze it"
            self._frozen |= {slot} if freezes else set()
        oracle.counts["frozen rows"] += slot in self._frozen
        return slot in self._frozen

    def _goes_astray(self, uid: int, context: int, mapping: Any) -> bool:
        """Whether a row decodes behind the end of free text: nobody may read what it writes."""
        answer = self._world.oracle.answers[uid]
        assert answer is not None
        if not answer.is_chosen(context - 1):
            return False
        self._astray.add(uid)
        self._world.oracle.counts["rows behind free text"] += 1
        self.kv[mapping] = ASTRAY
        return True

    def _keep(self, inputs: StepInputs) -> None:
        """Keep the last state of constrained rows; every one that ends what is known is kept."""
        oracle = self._world.oracle
        ends = {self._last[uid]: uid for uid in oracle.owners(inputs.step)}
        for token, slot in inputs.kept:
            (owner,) = oracle.owners_of_slots(inputs.step, [slot])
            source = ends[token]
            if owner != source:
                oracle.forked(source, owner)
                self._ends[owner] = self._ends[source]
                self._spoilt |= {owner} if source in self._spoilt else set()
            self._kept[slot] = owner, self._ends[source]

    def _choose(self, uid: int, slot: int, mask: Any) -> int:
        """A constrained row's token, from what its slot has and its mask."""
        oracle = self._world.oracle
        answer = oracle.answers[uid]
        assert answer is not None
        kept, end = self._kept[slot]
        assert kept == uid, f"slot {slot} has the state of {kept}, not of {uid}"
        due = answer.masks[end - answer.prompt_length]
        right = mask_of(list(due), len(mask))
        assert (mask == right).all(), f"request {uid}: the mask for {end} is another's"
        self._ends[uid] = end
        return self._token(uid, masked=True)

    def _copy(self, inputs: StepInputs) -> None:
        """Copy blocks, all as they are before."""
        blocks = self.kv.reshape(-1, self._world.scenario.block_size)
        sources, targets = zip(*inputs.copies, strict=True) if inputs.copies else ((), ())
        blocks[list(targets)] = blocks[list(sources)]

    def _copy_states(self, inputs: StepInputs) -> None:
        """Copies, all as they are before; then new sequences begin with nothing."""
        given = inputs.update.inputs
        if not self._world.scenario.slot_state:
            assert not given.slot_copies
            assert given.admitted is None
            return
        if given.slot_copies:
            sources, targets = given.slot_copies
            self._states[targets] = self._states[sources]
            self._world.oracle.counts["copied states"] += len(targets)
        if given.admitted is not None:
            self._states[given.admitted] = 0

    def _take(self, uid: int, slot: int, begin: int, end: int) -> None:
        """Have a layer's state of a slot go on by some positions; each counts once."""
        if not self._world.scenario.slot_state:
            return
        answer = self._world.oracle.answers[uid]
        assert answer is not None
        count, value = self._states[slot].tolist()
        assert count == begin, f"request {uid}: a state of {count} positions goes on at {begin}"
        expected = int(answer.states[begin - 1]) if begin else 0
        if value == SPOILT:
            self._spoilt |= {uid}
        else:
            assert value == expected, f"request {uid}: the state of {begin} positions is another's"
        spoilt = uid in self._spoilt
        self._states[slot] = end, SPOILT if spoilt else int(answer.states[end - 1])
        self._world.oracle.counts["rows with states"] += 1

    def _fork(self, inputs: StepInputs) -> None:
        """A sequence that begins as a copy has what its source has."""
        oracle = self._world.oracle
        ends = {self._last[uid]: uid for uid in oracle.owners(inputs.step)}
        free = len(inputs.token_index)
        sampling = oracle.owners_of_slots(inputs.step, inputs.sampling_slots[:free])
        for uid, token in zip(sampling, inputs.token_index, strict=True):
            source = ends[token]
            if uid != source:
                oracle.forked(source, uid)
                self._ends[uid], self._last[uid] = self._ends[source], self._last[source]
                self._spoilt |= {uid} if source in self._spoilt else set()

    def _score(self, inputs: StepInputs, ids: Any) -> StepScores | None:
        """What is said of the prompts' tokens, then of those that were sampled."""
        wanted, results = inputs.update.inputs.scored, inputs.update.scored
        if wanted is None or results is None:
            return None
        oracle, rows = self._world.oracle, []
        firsts = {
            row.first + index: (uid, row.context - row.tokens + index)
            for row, uid in zip(inputs.prefills, self._owners_of_chunks(inputs), strict=True)
            for index in range(row.tokens)
        }
        for token, target in zip(wanted.prompt_rows.tolist(), wanted.targets.tolist(), strict=True):
            uid, position = firsts[token]
            assert oracle.token_after(uid, position + 1) == target, f"request {uid}: {position}"
            rows.append((uid, position, target))
        sampling = oracle.owners_of_slots(inputs.step, inputs.sampling_slots)
        for row in wanted.samplers.tolist():
            rows.append((sampling[row], self._ends[sampling[row]] - 1, int(ids[row])))
        table = np.zeros((len(rows), 2 + 2 * results.max_logprobs), np.int32)
        for line, (uid, position, token) in zip(table, rows, strict=True):
            answer = oracle.answers[uid]
            assert answer is not None
            found = score(int(answer.states[position]), token, results.max_logprobs)
            line[1], line[2 : 2 + results.max_logprobs] = found.rank, found.top_ids
            values = np.array([found.logprob, *found.top_logprobs], np.float32).view(np.int32)
            line[0], line[2 + results.max_logprobs :] = values[0], values[1:]
        return results.message(table)

    def _pooled(self, inputs: StepInputs) -> list[tuple[int, Row]]:
        """The request and the chunk of each row that pools."""
        pairs = list(zip(inputs.prefills, self._owners_of_chunks(inputs), strict=True))
        return [
            (uid, row)
            for token in inputs.pooled
            for row, uid in pairs
            if row.first <= token < row.first + row.tokens
        ]

    def _ends_prompt(self, uid: int, row: Row) -> bool:
        answer = self._world.oracle.answers[uid]
        return answer is not None and row.context == answer.prompt_length

    def _pool(self, inputs: StepInputs) -> StepVectors | None:
        """What the rows bring that pool; no number where a row failed, and another one where it
        has read what such a row wrote."""
        if (rows := inputs.update.pooled) is None:
            return None
        kind, oracle, values = self._world.scenario.pooling, self._world.oracle, []
        for index, (uid, row) in enumerate(self._pooled(inputs)):
            answer, begin = oracle.answers[uid], row.context - row.tokens
            assert answer is not None
            places = {"last": row.first + row.tokens - 1, "cls": row.first}
            if kind == "mean":
                assert (rows.firsts[index], rows.counts[index]) == (row.first, row.tokens)
                read = answer.states[begin : row.context]
            else:
                assert inputs.pooled[index] == places[kind], f"request {uid}: which state"
                at = row.context - 1 if kind == "last" else begin
                assert at == (answer.prompt_length - 1 if kind == "last" else 0), uid
                read = answer.states[at : at + 1]
            vector = vector_of(read) + np.float32(uid in self._spoilt)
            if self._ends_prompt(uid, row) and oracle.fails(uid, row.context):
                vector[1] = np.nan
            values.append(vector)
            oracle.counts["vectors"] += 1
        return rows.message(np.stack(values))

    def _look(self, inputs: StepInputs) -> None:
        """Read the rows that the step's tokens stand for."""
        self._seen: dict[int, int] = {}
        if inputs.update.inputs.visual is not None:
            rows = inputs.update.inputs.visual.rows
            (tokens,) = np.nonzero(rows >= 0)
            found = self.features[rows[tokens]].tolist()
            self._seen = dict(zip(tokens.tolist(), found, strict=True))

    def _check_sight(self, uid: int, begin: int, turned: Any, first: int) -> None:
        """A row's tokens see their own images, at their rotary positions."""
        answer = self._world.oracle.answers[uid]
        assert answer is not None
        count = turned.shape[1]
        for index in range(count):
            expected = answer.seen.get(begin + index)
            found = self._seen.pop(first + index, None)
            assert found == expected, f"request {uid}, {begin + index}: {found}, not {expected}"
        right = answer.positions[:, begin : begin + count]
        assert (turned == right).all(), f"request {uid}, from {begin}: rotary positions"

    def _row(self, uid: int, context: int, blocks: Any, ids: Any, mapping: Any) -> None:
        answer = self._world.oracle.answers[uid]
        assert answer is not None
        self._astray.discard(uid)
        begin = context - len(ids)
        size = self._world.scenario.block_size
        positions = np.arange(context)
        places = blocks[positions // size] * size + positions % size
        who = f"request {uid}, positions {begin} to {context - 1}"
        assert len(np.unique(places)) == context, f"{who}: two positions share a place"
        assert context < answer.limit, f"{who}: nothing may follow its last token"
        assert (places[begin:] == mapping).all(), f"{who}: written where they are not read"
        read = self.kv[places[:begin]]
        spoilt = bool((read == SPOILT).any() or (ids == NOTHING_ALLOWED).any())
        expected = np.array(answer.tokens[begin:context])
        assert spoilt or (ids == expected).all(), f"{who}: tokens {ids} where {expected} were due"
        wrong = np.flatnonzero((read != answer.states[:begin]) & (read != SPOILT))
        assert not len(wrong), f"{who}: the KV of position {wrong[:1]} is not its own"
        if uid in self._samplers and self._world.oracle.fails(uid, context):
            spoilt = True
        self._spoilt = self._spoilt | {uid} if spoilt else self._spoilt - {uid}
        self.kv[mapping] = SPOILT if spoilt else answer.states[begin:context]
        self._ends[uid] = context

    def _sample(self, inputs: StepInputs) -> Any:
        owners = self._world.oracle.owners_of_slots(inputs.step, inputs.sampling_slots)
        free = len(owners) - inputs.choices
        ids = [
            FROZEN if slot in self._frozen else self._token(uid)
            for uid, slot in zip(owners[:free], inputs.sampling_slots, strict=False)
        ]
        late = zip(owners[free:], inputs.sampling_slots[free:], inputs.masks, strict=True)
        ids += [self._choose(*row) for row in late]
        assert inputs.sampling_positions == [self._ends[uid] for uid in owners]
        assert inputs.token_index == [self._last[uid] for uid in owners[:free]]
        assert inputs.seeds == [self._world.oracle.seed_of(uid) for uid in owners]
        masked: dict[int, list[int]] = {}
        for row, token in inputs.masked:
            masked.setdefault(row, []).append(token)
        for row, uid in enumerate(owners):
            assert masked.get(row, []) == self._world.oracle.masked(uid, self._ends[uid])
        self._next_token[inputs.sampling_slots] = ids
        return np.array(ids, np.int32)

    def _token(self, uid: int, masked: bool = False) -> int:
        """The right one; none where the row failed, any where it has read what such a row wrote.
        Behind free text it is what would follow that."""
        oracle, end = self._world.oracle, self._ends[uid]
        answer, dropped = oracle.answers[uid], False
        token = oracle.token_after(uid, end)
        if answer is not None and answer.is_chosen(end) and not masked:
            token = sample(int(answer.states[end - 1]), oracle.numbers[uid])
            # Nobody knows yet that an end will be refused here: what else comes is taken.
            dropped = end != answer.refused
        if uid not in self._astray and oracle.fails(uid, end):
            return NO_TOKEN
        if oracle.is_choiceless(uid, end, dropped):
            return NOTHING_ALLOWED
        return (token + 1) % VOCABULARY if uid in self._spoilt else token
