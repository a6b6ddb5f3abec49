"""Requests as handles: accepted, read, closed; several at once, all or none."""

import asyncio

import pytest

from nanoactor import RequestOutputKind, SamplingParams
from nanoactor.errors import EngineOverloaded, InvalidRequest
from tests.engine.harness import collect, engine, greedy, settled

OPTIONS = dict(device="simulated:1", dtype="auto", num_kv_blocks=None, skip_tokenizer_init=False)
LONG = SamplingParams.for_model(
    max_tokens=400, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)


def test_a_request_is_accepted_read_and_closed():
    async def main():
        async with engine("demo", **OPTIONS) as llm:
            (request,) = llm.submit(["ROMEO:"], LONG)
            assert request.prompt_token_ids == []
            await request.accepted()
            assert len(request.prompt_token_ids) == 2
            output = await anext(request)
            assert not output.finished
            request.close()
            request.close()
            last = [output async for output in request][-1]
            assert last.outputs[0].finish_reason == "abort"
            with pytest.raises(StopAsyncIteration):
                await anext(request)
            request.close()

    asyncio.run(main())


def test_what_refuses_a_request_is_raised_while_it_waits_to_be_accepted():
    async def main():
        async with engine("demo", **OPTIONS, max_model_len=64) as llm:
            good, bad = llm.submit(
                ["ROMEO:", "to be " * 100], SamplingParams.for_model(max_tokens=3, ignore_eos=True)
            )
            with pytest.raises(InvalidRequest, match="max_model_len is 64"):
                await bad.accepted()
            with pytest.raises(InvalidRequest, match="max_model_len is 64"):
                await anext(bad)
            bad.close()
            await good.accepted()
            assert len([output async for output in good][-1].outputs[0].token_ids) == 3

    asyncio.run(main())


def test_of_a_prompt_that_is_cut_the_last_tokens_count():
    async def main():
        async with engine("demo", **OPTIONS, max_model_len=64) as llm:
            text, whole = "to be or not " * 40, list(range(5, 205))
            chat = [{"role": "user", "content": text}]
            tokenizer = await llm.get_tokenizer()
            texts = tokenizer.encode(text)
            chats = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_dict=False
            )
            for prompt, ids in ((text, texts), ({"prompt_token_ids": whole}, whole), (chat, chats)):
                for asked, tokens, kept in ((63, 1, 63), (5, 9, 5), (1, 63, 1), (-1, 9, 55)):
                    params = greedy(tokens, seed=1, truncate_prompt_tokens=asked)
                    output = await collect(llm, prompt, params)
                    assert output.prompt_token_ids == ids[-kept:]
                    assert len(output.outputs[0].token_ids) == tokens
                    cut = {"prompt_token_ids": ids[-kept:]}
                    same = await collect(llm, cut, greedy(tokens, seed=1))
                    assert output.outputs[0].token_ids == same.outputs[0].token_ids
                with pytest.raises(InvalidRequest, match="max_model_len is 64"):
                    await collect(llm, prompt, greedy(1))
                with pytest.raises(InvalidRequest, match="max_tokens is 2, .* room for only 1"):
                    await collect(llm, prompt, greedy(2, truncate_prompt_tokens=63))
            short = await collect(llm, "ROMEO:", greedy(3, truncate_prompt_tokens=63))
            assert short.prompt_token_ids == tokenizer.encode("ROMEO:")

    asyncio.run(main())


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_without_detokenizing_there_are_ids_and_no_text(kind):
    async def main():
        async with engine("demo", **OPTIONS) as llm:
            ids, texts = {}, {}
            for wanted in (True, False):
                params = greedy(20, seed=1, output_kind=kind, detokenize=wanted, bad_words=["be"])
                outputs = [output async for output in llm.generate("ROMEO:", params)]
                pieces = [output.outputs[0] for output in outputs]
                last = pieces if kind is RequestOutputKind.DELTA else pieces[-1:]
                ids[wanted] = [token for piece in last for token in piece.token_ids]
                texts[wanted] = "".join(piece.text for piece in last)
                assert pieces[-1].finish_reason == "length"
                assert outputs[-1].metrics.first_token_time is not None
            assert ids[False] == ids[True]
            assert len(ids[False]) == 20
            assert texts[True]
            assert not texts[False]

    asyncio.run(main())


def test_several_prompts_find_room_all_together_or_not_at_all():
    async def main():
        limits = dict(max_waiting_requests=4, max_waiting_tokens=100)
        async with engine("demo", **OPTIONS, **limits) as llm:
            three = llm.submit(["a", "b", "c"], LONG)
            with pytest.raises(EngineOverloaded, match="3 requests are already waiting"):
                llm.submit(["d", "e"], LONG)
            (fourth,) = llm.submit(["d"], LONG)
            with pytest.raises(
                InvalidRequest, match="5 answers were requested at once, but at most 4"
            ):
                llm.submit(["f"] * 5, LONG)
            for request in (*three, fourth):
                await anext(request)
                request.close()
            figures = await settled(llm)
            assert figures["frontend"]["actor"]["waiting_tokens"] == 0
            llm.submit(["x" * 60], LONG)[0].close()
            with pytest.raises(EngineOverloaded, match="max_waiting_tokens is 100"):
                llm.submit(["x" * 30, "x" * 30], LONG)
            assert figures["frontend"]["actor"]["entries"] == 0

    asyncio.run(main())


def test_one_bad_prompt_among_several_sends_none():
    async def main():
        async with engine("demo", **OPTIONS) as llm:
            with pytest.raises(InvalidRequest, match="empty"):
                llm.submit(["a", ""], LONG)
            assert (await llm.statistics())["frontend"]["actor"]["entries"] == 0

    asyncio.run(main())
