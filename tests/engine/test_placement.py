"""The engine's promises hold with all actors in one node, one node each, on every transport."""

import asyncio
import random

import pytest

from nanoactor import RequestOutputKind, SamplingParams
from tests.engine.conftest import DEMO
from tests.engine.harness import collect, engine, greedy

PLACES = [
    pytest.param(("default", "ring", 0.0), marks=pytest.mark.long),
    pytest.param(("default", "queue", 0.0), marks=pytest.mark.long),
    ("split", "ring", 4.0),
    ("single", "ring", 3.0),
]
TEXTS = ["ROMEO:", "To be, or not", "KING RICHARD:\nMy crown", "O, she doth teach the", "Hark!"]


@pytest.fixture(params=PLACES, ids=lambda p: f"{p[0]}-{p[1]}-{p[2]:g}ms")
def place(request):
    placement, transport, delay = request.param
    return dict(
        placement=placement,
        transport=transport,
        debug_delay_ms=delay,
        skip_tokenizer_init=False,
        max_num_seqs=8,
        num_tokenizers=2,
    )


def test_the_engine_cannot_tell_where_its_actors_are(  # noqa: C901 - five small parts
    place, demo, demo_tokenizer
):
    """One engine for each place: exact tokens, text, stops, aborts, refusals, idle at the end."""

    async def main():
        async with engine(DEMO, **place) as llm:
            await batch(llm)
            await stop_strings(llm)
            await aborts(llm)
            await refusals(llm)
            await seeded(llm)

    async def batch(llm):
        outputs = await asyncio.gather(*(collect(llm, t, greedy(24)) for t in TEXTS * 3))
        for text, output in zip(TEXTS * 3, outputs, strict=True):
            completion = output.outputs[0]
            assert output.prompt == text
            assert output.prompt_token_ids == demo_tokenizer.encode(text).ids
            demo.check(output.prompt_token_ids, completion.token_ids)
            assert completion.text == demo_tokenizer.decode(completion.token_ids)

    async def stop_strings(llm):
        whole = (await collect(llm, TEXTS[0], greedy(60))).outputs[0]
        stop = whole.text[40:47]
        params = greedy(60, stop=stop)
        cut = (await collect(llm, TEXTS[0], params)).outputs[0]
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]

    async def aborts(llm):
        rng = random.Random(1)

        async def one(number):
            params = SamplingParams.for_model(max_tokens=200, output_kind=RequestOutputKind.DELTA)
            stream = llm.generate(TEXTS[number % 5], params, request_id=f"a{number}")
            wanted = rng.randrange(6)
            if number % 3 == 0:
                asyncio.get_running_loop().call_later(
                    0.05 * rng.random(), lambda: asyncio.ensure_future(llm.abort(f"a{number}"))
                )
            async for _ in stream:
                wanted -= 1
                if wanted < 0 and number % 3:
                    break
            await stream.aclose()

        await asyncio.gather(*(one(number) for number in range(12)))

    async def refusals(llm):
        good = asyncio.ensure_future(collect(llm, TEXTS[1], greedy(20)))
        with pytest.raises(ValueError, match="max_model_len"):
            await collect(llm, "word " * 1500)
        demo.check(*_tokens(await good))

    async def seeded(llm):
        params = SamplingParams.for_model(temperature=1.0, top_k=30, seed=11, max_tokens=15)
        one, two = [await collect(llm, TEXTS[2], params) for _ in range(2)]
        assert one.outputs[0].token_ids == two.outputs[0].token_ids

    asyncio.run(main())
    demo.conclude()


def _tokens(output):
    return output.prompt_token_ids, output.outputs[0].token_ids
