"""Every schedule gives the same tokens: all models, budgets, depths and leads, under one load.

The load holds prefix hits around every block boundary, preemptions, aborts, ends that nobody
could foresee and sampling. Greedy tokens are held against transformers, sampled ones against
what the request gives alone; each run then shows that what it is about has happened.
"""

import asyncio
import dataclasses
import functools
import itertools
import os
import random

import pytest

from nanoactor import SamplingParams
from tests.commit import commit_number
from tests.engine.harness import Reference, collect, engine, greedy, ids, ragged_prompts, settled
from tests.models.checkpoints import CONFIGURATIONS, make_checkpoint

BLOCK = 4
LONGEST = 48
# The fewest blocks that an engine accepts: two long sequences do not fit together.
CACHE = dict(block_size=BLOCK, max_model_len=LONGEST, num_kv_blocks=-(-LONGEST // BLOCK))
# (sequences at once, tokens a step). With the first there is never a second sequence, so no
# step is mixed and nobody is preempted; everything else happens with all of them.
BUDGETS = [(1, 1), (3, 3), (4, 5), (6, 17), (8, 64)]
DEPTHS = [1, 2, 3]
LEADS = ["eager", "late"]
PLACEMENTS = ["default", "split"]
SAMPLINGS = [dict(), dict(top_k=20), dict(top_p=0.8), dict(top_k=50, top_p=0.9, min_p=0.02)]
VOCABULARY = 211
STEM = 20
STEM_OUTPUT = 8


# -- which schedules ----------------------------------------------------------------------


# Those that differ in what a schedule could get wrong; tests/models and test_exactness.py have all.
USUAL = [
    "untied",
    "gqa_5",
    "wide_heads",
    "attention_bias",
    "rope_yarn",
    "qwen2",
    "qwen3_vl",
    "llama3",
    "qwen3_moe",
    "granite",
]


def covering(names=USUAL):
    """Three schedules of each of these models, one at each depth, with three of the budgets.
    Together they hold every pair of budget, depth and lead."""
    for (i, name), k in itertools.product(enumerate(names), range(3)):
        yield name, BUDGETS[(i + k) % 5], DEPTHS[k], LEADS[(i + k) % 2]


def drawn(names, shift):
    """One schedule for each model and budget; six shifts in turn hold the whole product.

    Each holds every pair of model, budget, depth and lead.
    """
    for (i, name), (k, budget) in itertools.product(enumerate(names), enumerate(BUDGETS)):
        yield name, budget, DEPTHS[(i + k + shift) % 3], LEADS[(i // 3 + k + shift // 3) % 2]


def schedules(usual, names):
    """What `make test` runs, and what `make test-long` adds: a part that the commit's hash draws,
    or everything with SCHEDULES=all in the environment."""
    usual = set(usual)
    if os.environ.get("SCHEDULES") == "all":
        wanted = {values for shift in range(6) for values in drawn(names, shift)}
    else:
        wanted = {*drawn(names, commit_number())}
    # Sorted, as each worker of pytest must collect the same.
    return [
        pytest.param(*values, marks=() if values in usual else pytest.mark.long)
        for values in sorted(usual | wanted, key=str)
    ]


MATRIX = list(itertools.product(CONFIGURATIONS, BUDGETS, DEPTHS, LEADS))
NODES = list(itertools.product(["gqa_2"], PLACEMENTS, DEPTHS, LEADS))
# An actor in each process: what could differ from one process does so here most.
USUAL_NODES = {("gqa_2", "split", 3, "late")}


def test_what_runs_each_time_covers_every_pair_but_some_budgets_of_a_model():
    for one, other in itertools.combinations(range(4), 2):
        wanted = {(v[one], v[other]) for v in MATRIX if v[0] in USUAL}
        found = {(values[one], values[other]) for values in covering()}
        assert found == wanted or (one, other) == (0, 1)
    budgets = {name: {b for n, b, *_ in covering() if n == name} for name in USUAL}
    assert all(len(found) == 3 for found in budgets.values())


def test_each_draw_covers_every_pair_and_six_draws_everything():
    draws = [{*drawn(CONFIGURATIONS, 100 + shift)} for shift in range(6)]
    for draw, (one, other) in itertools.product(draws, itertools.combinations(range(4), 2)):
        assert {(v[one], v[other]) for v in draw} == {(v[one], v[other]) for v in MATRIX}
    assert set().union(*draws) == {*MATRIX}


# -- the load -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Job:
    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def is_plain(self):
        """Whether transformers says what is right: it is greedy, and no logit is masked."""
        return self.params.temperature == 0 and not self.params.min_tokens


def params(number, tokens):
    """Every third request is sampled."""
    if number % 3 != 2:
        return greedy(tokens)
    kind = SAMPLINGS[number % len(SAMPLINGS)]
    return SamplingParams.for_model(
        temperature=0.9, seed=number, max_tokens=tokens, ignore_eos=True, **kind
    )


def apart(lengths, tokens, seed):
    prompts = ragged_prompts(VOCABULARY, lengths, seed)
    return [Job(tuple(prompt), params(i, tokens)) for i, prompt in enumerate(prompts)]


class Load:
    """The requests of one model, and what each of them gives alone."""

    def __init__(self, directory, model):
        self.directory = directory
        self.alone = {}
        asyncio.run(self._prepare())
        reference = Reference(model)
        for job, completion in self.alone.items():
            if job.is_plain:
                reference.check(job.prompt, completion.token_ids)
            if not job.params.stop_token_ids:
                assert completion.finish_reason == "length"
                assert len(completion.token_ids) == job.params.max_tokens
        # So there is one right output for each; should other weights bring a tie: other seeds.
        assert reference.positions > 0
        assert reference.ties == 0

    async def _prepare(self):
        self.stem = Job(tuple(ragged_prompts(VOCABULARY, [STEM], seed=1)[0]), greedy(STEM_OUTPUT))
        self.hungry = apart([12, 9, 14, 10, 11], tokens=26, seed=2)
        self.given_up = apart([3, 14, 20, 8, 17, 12], tokens=25, seed=3)
        uncut = apart([5, 9, 12, 6, 10], tokens=18, seed=4)
        changes = dict(block_size=BLOCK, pipeline_depth=1, enable_prefix_caching=False)
        async with engine(self.directory, placement="single", **changes) as llm:
            await self._run_alone(llm, [self.stem])
            self.near = [*self._boundaries(), *self._continuations()]
            await self._run_alone(llm, [*self.near, *self.hungry, *self.given_up, *uncut])
            self.cut = [self._cut(number, job) for number, job in enumerate(uncut)]
            self.masked = [self._masked(job) for job in self.cut]
            self.next_turns = {job: self._next_turn(job) for job in self.cut}
            await self._run_alone(llm, [*self.masked, *self.next_turns.values()])
        for job in self.masked:
            assert not set(job.params.stop_token_ids) & set(self.alone[job].token_ids[:11])

    async def _run_alone(self, llm, jobs):
        """Those of which transformers does not tell what is right: one after the other."""

        async def run(job):
            self.alone[job] = (await collect(llm, ids(job.prompt), job.params)).outputs[0]

        await asyncio.gather(*(run(job) for job in jobs if job.is_plain))
        for job in jobs:
            if not job.is_plain:
                await run(job)

    def _boundaries(self):
        """Prompts that leave the stem around block boundaries, or end there."""
        ends = [n for n in range(3, STEM + 1) if n % BLOCK != 2]
        tails = ragged_prompts(VOCABULARY, [1 + n % 3 for n in ends], seed=5)
        for n, tail in zip(ends, tails, strict=True):
            yield Job((*self.stem.prompt[:n], *tail), params(n, 2 + n % 3))
        for n in range(BLOCK, STEM + 1, BLOCK):
            yield Job(self.stem.prompt[:n], params(n // BLOCK, 2))

    def _continuations(self):
        """Prompts that go on where the stem's answer stands, as the next turn of a chat does."""
        told = (*self.stem.prompt, *self.alone[self.stem].token_ids)
        for n in range(STEM + 3, STEM + STEM_OUTPUT + 1):
            yield Job((*told[:n], n), params(n, 2))

    def _cut(self, number, job):
        """The same, ended by a token that only the result shows: the last one up to some
        place that is new in the output."""
        whole = self.alone[job]
        told = whole.token_ids
        end = max(i for i in range(4 + number) if told[i] not in told[:i])
        cut = Job(job.prompt, dataclasses.replace(job.params, stop_token_ids=[told[end]]))
        self.alone[cut] = dataclasses.replace(
            whole, token_ids=told[: end + 1], finish_reason="stop", stop_reason=told[end]
        )
        return cut

    def _masked(self, job):
        """The same, but the token that would end it must not come at first."""
        return Job(job.prompt, dataclasses.replace(job.params, min_tokens=12))

    def _next_turn(self, job):
        return Job((*job.prompt, *self.alone[job].token_ids, 7), greedy(3))

    def hit(self, job):
        """How much of a prompt the stem's run leaves in the cache: of it, all but the last
        token was computed; and one token of the prompt is always left to compute."""
        computed = (*self.stem.prompt, *self.alone[self.stem].token_ids[:-1])
        same = sum(itertools.takewhile(bool, map(int.__eq__, job.prompt, computed)))
        return min(same, len(job.prompt) - 1) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def loads(tmp_path_factory):
    @functools.cache
    def load(name):
        directory = tmp_path_factory.mktemp(name)
        return Load(directory, make_checkpoint(directory, **CONFIGURATIONS[name]))

    return load


# -- one run ------------------------------------------------------------------------------


async def one(llm, load, job):
    """A request's output, which must be what it is alone."""
    output = await collect(llm, ids(job.prompt), job.params)
    assert output.prompt_token_ids == list(job.prompt)
    assert output.outputs == [load.alone[job]]
    assert output.num_cached_tokens < len(job.prompt)
    return output


async def hits(llm, load):
    """One after the other, longest hit first: what is evicted meanwhile is not asked for again."""
    await one(llm, load, load.stem)
    before = await counts(llm)
    lengths = []
    for job in sorted(load.near, key=load.hit, reverse=True):
        lengths.append((await one(llm, load, job)).num_cached_tokens)
        assert lengths[-1] == load.hit(job)
    now = await counts(llm)
    assert set(lengths) == set(range(0, STEM + STEM_OUTPUT, BLOCK))
    assert now["hit_tokens"] - before["hit_tokens"] == sum(lengths)
    computed = sum(len(job.prompt) for job in load.near) - sum(lengths)
    assert now["prefill_tokens"] - before["prefill_tokens"] == computed


async def ends(llm, load):
    """Stop tokens that the scheduler cannot foresee; the next turn finds what they left."""

    async def two_turns(job):
        await one(llm, load, job)
        await one(llm, load, load.next_turns[job])

    await asyncio.gather(*map(two_turns, load.cut))


async def storm(llm, load, rng):
    """Everything at once, in random order: too much for the cache, and some is given up.

    Returns how many of these told less than they had to tell.
    """
    jobs = [*rng.sample(load.near, 7), *rng.sample(load.masked, 2), *load.hungry]
    requests = [one(llm, load, job) for job in jobs]
    for number, job in enumerate(load.given_up):
        way = ["abort", "break", "cancel"][number % 3]
        requests.append(give_up(llm, load, job, way, rng.choice([0, 1, 2, 5, 9])))
    results = await asyncio.gather(*(after(0.03 * rng.random(), each) for each in requests))
    return sum(results[len(jobs) :])


async def after(seconds, request):
    await asyncio.sleep(seconds)
    return await request


async def give_up(llm, load, job, way, moment):
    """End a request once it has told `moment` tokens; 0: wherever it is after a millisecond."""
    told, name, reached = [], str(job.prompt), asyncio.Event()

    async def read():
        async for output in llm.generate(ids(job.prompt), job.params, name):
            told[:] = output.outputs[0].token_ids
            if len(told) >= moment:
                reached.set()
                if way == "break":
                    break

    reader = asyncio.ensure_future(read())
    reader.add_done_callback(lambda _: reached.set())
    await (reached.wait() if moment else asyncio.sleep(0.001))
    if way == "abort":
        await llm.abort(name)
    elif way == "cancel":
        reader.cancel()
    await asyncio.wait([reader])
    assert reader.cancelled() or reader.exception() is None
    whole = load.alone[job].token_ids
    assert told == whole[: len(told)]
    return len(told) < len(whole)


async def counts(llm):
    figures = await llm.statistics()
    return {**figures["scheduler"]["actor"], **figures["blocks"]["actor"]}


async def run(load, budget, depth, lead, **changes):
    """The whole load on one engine; returns the counts at its end, which show what it was about."""
    seqs, tokens = budget
    changes |= dict(max_num_seqs=seqs, max_num_batched_tokens=tokens, **CACHE)
    async with engine(load.directory, pipeline_depth=depth, plan_lead=lead, **changes) as llm:
        await hits(llm, load)
        await ends(llm, load)
        # A late plan may come when the step before is done, and then nothing overruns.
        overruns = (await counts(llm))["overruns"]
        assert not overruns if depth == 1 else overruns or lead == "late"
        cut_short = await storm(llm, load, random.Random(f"{budget} {depth} {lead}"))
        await settled(llm)
        figures = {**await counts(llm), "cut_short": cut_short}
    assert (figures["mixed_steps"] > 0) == (seqs > 1)
    assert (figures["preemptions"] > 0) == (seqs > 1)
    assert figures["evictions"] > 0
    return figures


@pytest.mark.parametrize(
    ("name", "budget", "depth", "lead"), schedules(covering(), CONFIGURATIONS), ids=str
)
def test_every_schedule_gives_the_same_tokens(loads, name, budget, depth, lead):
    load = loads(name)
    figures = asyncio.run(run(load, budget, depth, lead, placement="single"))
    assert figures["aborted"] == figures["cut_short"] == len(load.given_up)


@pytest.mark.parametrize(
    ("name", "placement", "depth", "lead"),
    [pytest.param(*v, marks=() if v in USUAL_NODES else pytest.mark.long) for v in NODES],
    ids=str,
)
def test_every_schedule_gives_the_same_tokens_on_many_nodes(loads, name, placement, depth, lead):
    load = loads(name)
    figures = asyncio.run(run(load, (4, 5), depth, lead, placement=placement))
    assert figures["aborted"] > 0
    assert figures["cut_short"] > 0
