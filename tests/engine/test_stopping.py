"""Where an output ends, and what of its end is shown."""

import asyncio

import pytest

from nanoactor import RequestOutputKind, SamplingParams
from tests.engine.conftest import DEMO
from tests.engine.harness import collect, engine, greedy


def run(check):
    async def main():
        async with engine(DEMO, skip_tokenizer_init=False, placement="single") as llm:
            return await check(llm)

    return asyncio.run(main())


async def one(llm, prompt="ROMEO:", **params):
    final = await collect(llm, prompt, SamplingParams.for_model(temperature=0.0, **params))
    return final.outputs[0]


def test_a_stop_token_ends_the_output_and_its_text_is_not_shown(demo_tokenizer):
    async def check(llm):
        whole = await one(llm, max_tokens=40, ignore_eos=True)
        token = whole.token_ids[12]
        at = whole.token_ids.index(token)
        cut = await one(llm, max_tokens=40, stop_token_ids=[token], ignore_eos=True)
        assert cut.token_ids == whole.token_ids[: at + 1]
        assert (cut.finish_reason, cut.stop_reason) == ("stop", token)
        assert cut.text == demo_tokenizer.decode(cut.token_ids[:-1])

    run(check)


def test_min_tokens_forbids_stop_tokens_until_then():
    async def check(llm):
        whole = await one(llm, max_tokens=30, ignore_eos=True)
        token = whole.token_ids[3]
        later = await one(llm, max_tokens=30, min_tokens=10, stop_token_ids=[token])
        assert token not in later.token_ids[:10]
        assert later.token_ids[:3] == whole.token_ids[:3]
        assert len(later.token_ids) >= 10

    run(check)


def test_any_end_of_sequence_id_ends_the_output_unless_it_is_ignored(demo_tokenizer):
    async def check(llm):
        assert len(llm.files.eos_token_ids) == 2
        chat = [{"role": "user", "content": "Who is there?"}]
        ended = await one(llm, chat, max_tokens=200)
        assert ended.token_ids[-1] in llm.files.eos_token_ids
        assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
        assert "<|" not in ended.text
        assert ended.text == demo_tokenizer.decode(ended.token_ids)
        ignored = await one(llm, chat, max_tokens=200, ignore_eos=True)
        assert ignored.token_ids[: len(ended.token_ids)] == ended.token_ids
        assert (len(ignored.token_ids), ignored.finish_reason) == (200, "length")
        shown = await one(llm, chat, max_tokens=200, ignore_eos=True, skip_special_tokens=False)
        assert shown.text == demo_tokenizer.decode(shown.token_ids, skip_special_tokens=False)

    run(check)


@pytest.mark.parametrize("include", [False, True])
def test_of_several_stop_strings_the_first_that_is_complete_ends_the_output(include):
    async def check(llm):
        whole = await one(llm, max_tokens=80, ignore_eos=True)
        first, second = whole.text[30:36], whole.text[50:58]
        end = min((whole.text.index(s) + len(s), s) for s in (first, second))
        params = dict(stop=[second, first], include_stop_str_in_output=include)
        cut = await one(llm, max_tokens=80, ignore_eos=True, **params)
        assert cut.stop_reason == end[1]
        assert cut.text == whole.text[: end[0] if include else end[0] - len(end[1])]
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]

    run(check)


def test_every_output_kind_tells_the_same_story():
    async def check(llm):
        told = {}
        for kind in RequestOutputKind:
            outputs = []
            params = greedy(30, output_kind=kind, stop=["zzzz", "qqq"])
            async for output in llm.generate("ROMEO:", params):
                outputs.append(output)
            if kind is RequestOutputKind.DELTA:
                text = "".join(output.outputs[0].text for output in outputs)
                ids = [i for output in outputs for i in output.outputs[0].token_ids]
            else:
                text, ids = outputs[-1].outputs[0].text, outputs[-1].outputs[0].token_ids
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            assert len(outputs) == 1 or kind is not RequestOutputKind.FINAL_ONLY
            told[kind] = (text, ids)
        assert len({str(story) for story in told.values()}) == 1

    run(check)


def test_an_output_of_one_token_and_one_that_fills_the_model():
    async def check(llm):
        assert len((await one(llm, max_tokens=1)).token_ids) == 1
        prompt = {"prompt_token_ids": [5] * 1000}
        full = await one(llm, prompt, ignore_eos=True)
        assert (len(full.token_ids), full.finish_reason) == (24, "length")
        last = await one(llm, {"prompt_token_ids": [5] * 1023}, ignore_eos=True)
        assert (len(last.token_ids), last.finish_reason) == (1, "length")

    run(check)
