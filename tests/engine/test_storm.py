"""Thousands of requests, half of them ended at any moment: exact answers, and nothing is left."""

import asyncio
import contextlib
import dataclasses
import itertools
import random
import time
from collections import Counter

import pytest

from nanoactor import SamplingParams
from nanoactor.errors import EngineOverloaded
from nanoactor.messages.engine import Submit
from nanoactor.scheduling.sequences.sequence import Phase
from tests.engine.harness import Reference, collect, engine, greedy, ids, ragged_prompts, settled
from tests.models.checkpoints import make_checkpoint

REQUESTS, WAVE, DOOR = 1_050, 350, 300
LONGEST = 24
STEM = list(range(100, 140))
WAYS = ("abort", "break", "aclose", "cancel")
MOMENTS = ("at once", "some time", "some tokens", "after the end")
STORIES = (
    *("refused", "whole"),
    *("abort unread", "abort midway", "abort too late"),
    *("cancel unread", "cancel midway", "cancel too late"),
    *("break midway", "break too late", "aclose midway", "aclose too late"),
)
SMALL = dict(hidden_size=32, num_hidden_layers=1, head_dim=8, intermediate_size=48)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("storm")
    return directory, Reference(make_checkpoint(directory, **SMALL))


# -- what the answers must be -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Answer:
    """A prompt with its parameters, and the tokens it gets when it runs alone."""

    prompt: list[int]
    params: SamplingParams
    tokens: list[int]


def distinct_requests():
    """(prompt, parameters): few stems with many tails; a third of them sampled."""
    rng = random.Random(1)
    stems = ragged_prompts(211, [24] * 4, seed=1)
    tails = ragged_prompts(211, [rng.randrange(1, 9) for _ in range(48)], seed=2)
    for seed, tail in enumerate(tails):
        sampling = dict(temperature=0.0)
        if seed % 3 == 0:
            sampling = dict(temperature=0.9, seed=seed, top_k=rng.choice([0, 30]))
        params = SamplingParams.for_model(max_tokens=LONGEST, ignore_eos=True, **sampling)
        yield rng.choice(stems)[: rng.randrange(25)] + tail, params


async def run_alone(llm):
    """Every distinct request by itself, one after the other."""
    answers = []
    for prompt, params in distinct_requests():
        output = await collect(llm, ids(prompt), params)
        answers.append(Answer(prompt, params, output.outputs[0].token_ids))
    return answers


def check_alone(answers, reference):
    """The greedy ones are transformers' own, and none hangs on a tie, which may go either way."""
    for answer in answers:
        assert len(answer.tokens) == LONGEST
        if answer.params.temperature == 0:
            reference.check(answer.prompt, answer.tokens)
    assert reference.positions > 0
    assert reference.ties == 0


# -- the storm ----------------------------------------------------------------------------


class Request:
    """One request of the storm: how it is to end, and what came of it."""

    def __init__(self, llm, number, answer, rng):
        self.llm = llm
        self.name = f"storm-{number}"
        self.answer = answer
        self.length = rng.randrange(1, LONGEST + 1)
        self.way = rng.choice(WAYS) if number % 2 else None
        self.moment = rng.choice(MOMENTS)
        self.seconds = rng.random() ** 2
        self.wanted = rng.randrange(1, self.length + 1)
        self.tokens = []
        self.reason = None
        self.refusals = 0
        self.news = asyncio.Event()
        """Set when `wanted` tokens were seen."""

    async def run(self):
        """Read it and end it in its way; whatever was read must be right."""
        reader = asyncio.ensure_future(self.read())
        await asyncio.sleep(0)  # its first __anext__ has run
        if self.way in ("abort", "cancel"):
            await self.wait_for_the_moment(reader)
            if self.way == "cancel":
                reader.cancel()
            else:
                await self.abort()
        with contextlib.suppress(asyncio.CancelledError):
            await reader
        self.check()

    async def read(self):
        """Submit it, as often as a full queue refuses it, and read until its end or our own."""
        params = dataclasses.replace(self.answer.params, max_tokens=self.length)
        while True:
            stream = self.llm.generate(ids(self.answer.prompt), params, request_id=self.name)
            try:
                async for output in stream:
                    self.see(output.outputs[0])
                    if self.way in ("break", "aclose") and self.news.is_set():
                        return await self.leave(stream)
            except EngineOverloaded:
                self.refusals += 1
                await self.llm.wait_for_capacity()
            else:
                return None

    def see(self, completion):
        self.tokens, self.reason = completion.token_ids, completion.finish_reason
        if len(self.tokens) >= self.wanted:
            self.news.set()

    async def leave(self, stream):
        """Stop reading now, or read nothing for a while and stop then."""
        if self.moment in ("some time", "after the end"):
            await asyncio.sleep(0.2 * self.seconds)
        if self.way == "aclose":
            await stream.aclose()

    async def wait_for_the_moment(self, reader):
        match self.moment:
            case "some time":
                await asyncio.sleep(self.seconds)
            case "some tokens":
                await self.news.wait()
            case "after the end":
                await asyncio.wait([reader])

    async def abort(self):
        """When it returns nothing follows, whatever the moment was."""
        known = self.llm._frontend.journal.find_by_id(self.name)
        await self.llm.abort(self.name)
        assert known is None or known.is_over

    def story(self):
        """What it lived through, in the words of `STORIES`."""
        if self.refusals:
            yield "refused"
        if self.reason == "length":
            yield f"{self.way} too late" if self.way else "whole"
        else:
            yield f"{self.way} {'midway' if self.tokens else 'unread'}"

    def check(self):
        expected = self.answer.tokens[: self.length]
        if self.way is None or self.reason == "length":
            assert (self.tokens, self.reason) == (expected, "length")
        else:
            assert self.reason == ("abort" if self.way == "abort" else None)
            assert self.tokens == expected[: len(self.tokens)]


def test_a_storm_of_aborts_leaves_exact_answers_and_nothing_else(checkpoint):
    directory, reference = checkpoint
    changes = dict(
        max_num_seqs=32,
        max_num_batched_tokens=40,
        num_kv_blocks=88,
        block_size=4,
        max_model_len=64,
        max_waiting_requests=DOOR,
        placement="default",
    )

    async def main():
        rng = random.Random(0)
        told = Counter()
        async with engine(directory, **changes) as llm:
            answers = await run_alone(llm)
            check_alone(answers, reference)
            for first in range(0, REQUESTS, WAVE):
                numbers = range(first, min(first + WAVE, REQUESTS))
                wave = [Request(llm, n, rng.choice(answers), rng) for n in numbers]
                await asyncio.gather(*(request.run() for request in wave))
                for request in wave:
                    told.update(request.story())
            figures = await settled(llm)
            assert not llm._frontend._untokenized
            assert llm._frontend._untokenized._load == [0]
            return told, figures

    told, figures = asyncio.run(main())
    scheduler = figures["scheduler"]["actor"]
    # An abort that is here before its request leaves no trace in `finished`.
    admitted = figures["tokenizer.0"]["actor"]["requests"] + figures["frontend"]["actor"]["direct"]
    swallowed = admitted - scheduler["finished"]
    reached = dict(
        **{story: told[story] for story in STORIES},
        **{name: scheduler[name] for name in ("aborted", "preemptions", "overruns", "sat_out")},
        swallowed=swallowed,
        hits=figures["blocks"]["actor"]["hit_tokens"],
        evictions=figures["blocks"]["actor"]["evictions"],
    )
    # How often is up to the machine: on a busy one a reader is behind, and few aborts come midway.
    assert min(reached.values()) >= 1, str(reached)
    assert told["whole"] >= REQUESTS // 2
    assert scheduler["aborted"] >= REQUESTS // 8


# -- how soon an abort is done ------------------------------------------------------------


class Bench:
    """A single-placement engine whose streams decode all the while; one slot is for victims."""

    def __init__(self, llm, depth):
        self.llm = llm
        self.patience = depth + 1
        self.scheduler = llm._system.actor("scheduler")._scheduler
        self.manager = llm._system.actor("blocks")._manager
        self.names = itertools.count()
        self.back = {}
        """The step at which credits and slots, and blocks, were first seen to be all back."""
        after(self.scheduler, "handle", self.see_credits)
        after(self.manager, "apply_turn", self.see_blocks)
        slow_down(llm._system.actor("runner.0")._executor)
        self.streams = [self.start(STEM, 380)[1], self.start([7], 380)[1]]

    def start(self, prompt, tokens):
        """A new request's id, and the task that reads it."""
        name = f"bench-{next(self.names)}"
        output = collect(self.llm, ids(prompt), greedy(tokens), request_id=name)
        return name, asyncio.ensure_future(output)

    @property
    def steps(self):
        assert not any(stream.done() for stream in self.streams)
        return self.scheduler.statistics.steps

    def entries(self):
        """How many requests count in the journal."""
        return self.llm._frontend.statistics()["entries"]

    async def reach(self, name, wanted):
        """Wait until a request's sequence is where the test wants it."""
        while True:
            entry = self.llm._frontend.journal.find_by_id(name)
            sequence = self.scheduler.live.get(entry.submit.uid) if entry else None
            if sequence is not None and wanted(sequence):
                return
            await asyncio.sleep(0)

    def see_credits(self, event):
        scheduler, config = self.scheduler, self.scheduler.config
        held = sum(sequence.blocks for sequence in scheduler._running)
        slots = scheduler.budget.free_slots + len(scheduler._running)
        if (scheduler.budget.credits + held, slots) == (config.blocks, config.max_num_seqs):
            self.back.setdefault("credits", scheduler.statistics.steps)

    def see_blocks(self, event):
        held = {
            block for holding in self.manager.tables.holdings.values() for block in holding.table
        }
        if self.manager.pool.available + len(held) == self.scheduler.config.blocks:
            self.back.setdefault("blocks", event.done)

    async def end(self, name, task, way):
        """Its reader hears of an abort at once, the engine lets go of it within depth + 1 steps,
        and all it held is back within as many more."""
        begin, living = self.steps, self.entries()
        if way == "abort":
            await self.llm.abort(name)
            assert self.steps == begin
        else:
            task.cancel()
        while self.entries() == living:
            await asyncio.sleep(0)
        told = self.steps
        assert told - begin <= self.patience
        self.back.clear()
        while len(self.back) < 2 and self.steps < told + 10 * self.patience:
            await asyncio.sleep(0)
        assert set(self.back) == {"credits", "blocks"}
        assert max(self.back.values()) - told <= self.patience
        (output,) = await asyncio.gather(task, return_exceptions=True)
        if way == "abort":
            assert output.outputs[0].finish_reason == "abort"
        else:
            assert isinstance(output, asyncio.CancelledError)


def after(owner, name, look):
    """Have `look` see every event that this method has dealt with."""
    method = getattr(owner, name)

    def looked_on(event):
        result = method(event)
        look(event)
        return result

    setattr(owner, name, looked_on)


def slow_down(executor):
    """A step takes as long as on a large model: the host's turns are short compared with it."""
    launch = executor.launch

    def slow(inputs):
        time.sleep(0.004)
        return launch(inputs)

    executor.launch = slow


def waiting(sequence):
    return sequence.phase is Phase.WAITING


def matching(sequence):
    return sequence.phase is Phase.MATCHING


def prefilling(sequence):
    running = sequence.phase is Phase.RUNNING
    return running and len(STEM) < sequence.scheduled < sequence.target


def decoding(sequence):
    return sequence.length - sequence.prompt_length >= 3


@contextlib.asynccontextmanager
async def bench(directory, depth):
    changes = dict(
        pipeline_depth=depth,
        max_num_seqs=3,
        max_num_batched_tokens=20,
        num_kv_blocks=400,
        block_size=4,
        placement="single",
    )
    async with asyncio.timeout(60), engine(directory, **changes) as llm:
        bench = Bench(llm, depth)
        await asyncio.sleep(0)
        await asyncio.gather(*(bench.reach(f"bench-{i}", decoding) for i in range(2)))
        yield bench
        assert not any(stream.done() for stream in bench.streams)
        await asyncio.gather(llm.abort("bench-0"), llm.abort("bench-1"), *bench.streams)


@pytest.mark.parametrize("way", ["abort", "cancel"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_abort_is_done_and_its_memory_back_within_the_steps_in_flight(checkpoint, depth, way):
    directory, reference = checkpoint
    rng = random.Random(depth)

    async def main():
        async with bench(directory, depth) as b:

            async def end_one(wanted):
                prompt = STEM + [rng.randrange(211) for _ in range(80)]
                name, task = b.start(prompt, 200)
                await b.reach(name, wanted)
                await b.end(name, task, way)
                return prompt

            for wanted in [matching, prefilling, decoding] * 4:
                prompt = await end_one(wanted)
                # What it had no time to compute must not pass for a cached prefix.
                again = await collect(b.llm, ids(prompt), greedy(2))
                reference.check(prompt, again.outputs[0].token_ids)
            occupant = b.start([5], 300)
            await b.reach(occupant[0], decoding)
            for _ in range(4):
                await end_one(waiting)
            await b.end(*occupant, way)
            assert b.manager.hits.hit_tokens >= 12 * len(STEM)

    asyncio.run(main())


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_abort_ahead_of_the_tokenizer_waits_for_nothing_else(checkpoint, depth):
    """Its reader hears at once; the engine lets go of it when the tokenizer answers. It costs no
    step."""

    async def main():
        async with bench(checkpoint[0], depth) as b:
            held, tokenize = hold_back_the_tokenizer(b.llm)
            computed = b.scheduler.statistics.prefill_tokens
            name, task = b.start([1] * 150, 200)
            while not held:
                await asyncio.sleep(0)
            await b.llm.abort(name)
            begin, living = b.steps, b.entries()
            while b.steps < begin + 3 * b.patience:
                await asyncio.sleep(0)
            assert b.entries() == living, "it takes room still"
            assert len(b.scheduler.arrivals.tombstones) == 1
            answered = b.steps
            tokenize(held.pop())
            while b.entries() == living:
                await asyncio.sleep(0)
            assert b.steps - answered <= b.patience
            completion = (await task).outputs[0]
            assert (completion.finish_reason, completion.token_ids) == ("abort", [])
            assert b.scheduler.statistics.prefill_tokens == computed
            assert len(b.scheduler.arrivals.tombstones) == 0

    asyncio.run(main())


def hold_back_the_tokenizer(llm):
    """Where requests gather from now on, and what to give them to when they may go on; the frontend
    admits none itself."""
    llm._frontend._sender._admission.direct = lambda submit: None
    handlers = llm._system._nodes.own._edges.mailboxes["tokenizer.0"]._handlers
    held, tokenize = [], handlers[Submit]
    handlers[Submit] = held.append
    return held, tokenize
