"""Requests that kill a process each time they run: they alone pay for it."""

import asyncio
import dataclasses
import math

import pytest

from nanoactor import AsyncLLM, SamplingParams
from nanoactor.api import engine as engine_module
from nanoactor.errors import ComputationFailed, PoisonRequest
from nanoactor.placement.topology import engine_topology
from tests.conftest import children
from tests.engine.harness import settled
from tests.engine.poisonous import FATAL, WORD
from tests.engine.test_recovery import compare, options, read

pytestmark = pytest.mark.deadly


@pytest.fixture
def poisonous(monkeypatch):
    """Engines of this test have actors that some requests kill."""

    def topology(*arguments):
        found, here = engine_topology(*arguments), "tests.engine.poisonous"
        kinds = {"runner.0": "PoisonousRunner", "tokenizer.0": "PoisonousTokenizer"}
        actors = (
            dataclasses.replace(spec, factory=f"{here}:{kinds[spec.name]}")
            if spec.name in kinds
            else spec
            for spec in found.actors
        )
        return dataclasses.replace(found, actors=tuple(actors))

    monkeypatch.setattr(engine_module, "engine_topology", topology)


def engine(**changes):
    return AsyncLLM(
        "demo",
        **options(
            **dict(device="simulated:1", max_num_seqs=80, max_restarts=5, restart_window=300)
            | changes
        ),
    )


def ids(length, first=7):
    return {"prompt_token_ids": [(first * n) % 1000 + 3 for n in range(length)]}


def innocents(count):
    return [
        (ids(20 + n % 60, n + 1), SamplingParams.for_model(seed=n, max_tokens=100, ignore_eos=True))
        for n in range(count)
    ]


def deadly(tokens=30, **more):
    """A request that kills with so many tokens."""
    return ids(FATAL.start - tokens), SamplingParams.for_model(
        max_tokens=200, ignore_eos=True, **more
    )


async def among(llm, poisons, count):
    """Whoever is not poison says what it says by itself; return who is told to be."""
    requests = innocents(count)
    wanted = await asyncio.gather(*(read(llm, *request) for request in requests))
    place = count // 2
    asked = [*requests[:place], *poisons, *requests[place:]]
    found = await asyncio.gather(*(read(llm, *one) for one in asked), return_exceptions=True)
    guilty = found[place : place + len(poisons)]
    for told, right in zip(found[:place] + found[place + len(poisons) :], wanted, strict=True):
        assert not isinstance(told, BaseException), told
        compare(told, right)
    await settled(llm)
    return guilty


async def reason(llm, prompt, params, name):
    """Why a request ends."""
    async for output in llm.generate(prompt, params, request_id=name):
        last = output
    return last.outputs[0].finish_reason


@pytest.mark.parametrize(
    ("poison", "others"),
    [
        pytest.param(deadly(), 63, id="while it decodes"),
        pytest.param(deadly(0), 15, id="with its prompt", marks=pytest.mark.long),
        pytest.param(deadly(3, n=3), 15, id="one of several answers", marks=pytest.mark.long),
    ],
)
@pytest.mark.usefixtures("poisonous")
def test_one_among_many_costs_itself_alone(poison, others):
    async def main():
        async with engine() as llm:
            (guilty,) = await among(llm, [poison], others)
            assert isinstance(guilty, PoisonRequest)
            assert "each time the request ran" in str(guilty)
            assert "runner.0 (signal SIGSEGV)" in str(guilty)
            assert llm._system._recoveries._deaths._budget.refund(9) == 0, "all deaths have a cause"
            assert llm.restarts[0].keys() == {"runner.0"}
            assert llm.restarts[0]["runner.0"] <= 2 + math.log2(others + 1) + 1
            # The engine is as good as before.
            for told in await asyncio.gather(*(read(llm, *one) for one in innocents(4))):
                assert len(told[0][0].ids) == 100

    asyncio.run(main())
    assert not children()


@pytest.mark.long  # tests/api/test_suspects.py has any number in any order
@pytest.mark.usefixtures("poisonous")
def test_two_are_found_one_after_the_other():
    async def main():
        async with engine() as llm:
            found = await among(llm, [deadly(), deadly(12)], 14)
            assert [type(one) for one in found] == [PoisonRequest] * 2

    asyncio.run(main())


@pytest.mark.usefixtures("poisonous")
def test_a_word_that_ends_the_tokenizer():
    async def main():
        async with engine() as llm:
            poison = f"To drink the {WORD}", SamplingParams.for_model(max_tokens=5)
            (guilty,) = await among(llm, [poison], 8)
            assert isinstance(guilty, PoisonRequest)
            assert "tokenizer.0 (actor tokenizer.0 failed: ValueError: it burns)" in str(guilty)
            assert llm.restarts[0].keys() == {"tokenizer.0"}

    asyncio.run(main())


@pytest.mark.usefixtures("poisonous")
def test_who_comes_during_a_trial_waits_and_may_give_up():
    async def main():
        async with engine() as llm:
            task = asyncio.ensure_future(read(llm, *deadly()))
            while llm.restarts[0].get("runner.0", 0) < 2 or llm.recovering is not None:
                await asyncio.sleep(0.001)
            late = asyncio.ensure_future(read(llm, *innocents(1)[0]))
            impatient = asyncio.ensure_future(reason(llm, *innocents(2)[1], "impatient"))
            await asyncio.sleep(0)
            kept = llm._frontend.statistics()["kept"]
            await llm.abort("impatient")
            assert await impatient == "abort"
            with pytest.raises(PoisonRequest):
                await task
            assert len((await late)[0][0].ids) == 100
            assert kept in (0, 2), "or the trial was over"
            await settled(llm)

    asyncio.run(main())


@pytest.mark.long
@pytest.mark.usefixtures("poisonous")
def test_many_that_kill_do_not_add_up_to_the_engines_death():
    """Each conviction gives back what its search has cost."""

    async def main():
        async with engine(max_restarts=2) as llm:
            found = await asyncio.gather(
                *(read(llm, *deadly(tokens)) for tokens in range(2, 30)), return_exceptions=True
            )
            assert {type(one) for one in found} == {PoisonRequest}
            assert llm.dead is None
            assert len((await read(llm, *innocents(1)[0]))[0][0].ids) == 100

    asyncio.run(main())


def test_it_is_a_failed_computation():
    assert issubclass(PoisonRequest, ComputationFailed)
