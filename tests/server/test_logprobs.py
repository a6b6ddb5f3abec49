"""Log-probabilities and several answers, over HTTP, as the official client reads them."""

import math

import openai
import pytest

from nanoactor import LLM, SamplingParams
from nanoactor.requests.params import derived_seed

ROMEO = "ROMEO:\nBut soft, what light"
# Characters of two, three and four bytes, which the demo's tokenizer takes apart.
FOREIGN = "日本 naïve 🙂 ROMEO:"
CHAT = [{"role": "user", "content": "Speak, friend."}]


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", device="cpu", dtype="float32", threads=1, max_num_seqs=8) as llm:
        yield llm


def said(llm, prompt, **params):
    return llm.generate(prompt, SamplingParams.for_model(**params), use_tqdm=False)[0]


def joined(choices):
    """The logprobs of a stream's chunks as one."""
    found = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for choice in choices:
        if choice.logprobs is not None:
            for name, values in found.items():
                values += getattr(choice.logprobs, name)
    return found


def as_dict(logprobs):
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: getattr(logprobs, name) for name in names}


# -- completions --------------------------------------------------------------------------


def test_a_completions_logprobs_are_the_engines(client, llm):
    found = client.completions.create(
        model="demo", prompt=ROMEO, max_tokens=12, seed=5, logprobs=3
    ).choices[0]
    expected = said(llm, ROMEO, max_tokens=12, seed=5, logprobs=3).outputs[0]
    told = found.logprobs
    assert "".join(told.tokens) == found.text == expected.text
    own = [
        one[token].logprob for token, one in zip(expected.token_ids, expected.logprobs, strict=True)
    ]
    assert told.token_logprobs == pytest.approx(own, abs=1e-4)
    for token, own, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        assert top[token] == own <= max(top.values()) < 0
        assert len(top) in (3, 4)
    starts = [len("".join(told.tokens[:index])) for index in range(12)]
    assert told.text_offset == starts


@pytest.mark.parametrize("prompt", [ROMEO, FOREIGN])
def test_echo_tells_those_of_the_prompt_too(client, llm, prompt):
    answer = client.completions.create(
        model="demo", prompt=prompt, max_tokens=4, seed=5, logprobs=2, echo=True
    )
    found, told = answer.choices[0], answer.choices[0].logprobs
    expected = said(llm, prompt, max_tokens=4, seed=5, logprobs=2, prompt_logprobs=2)
    count = len(expected.prompt_token_ids)
    assert answer.usage.prompt_tokens == count
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert found.text == prompt + expected.outputs[0].text
    assert told.token_logprobs[0] is told.top_logprobs[0] is None
    pairs = zip(expected.prompt_token_ids[1:], expected.prompt_logprobs[1:], strict=True)
    own = [one[token].logprob for token, one in pairs]
    assert told.token_logprobs[1:count] == pytest.approx(own, abs=1e-4)
    assert len(told.tokens) == len(told.text_offset) == count + 4
    for index, (token, at) in enumerate(zip(told.tokens, told.text_offset, strict=True)):
        if token.startswith("bytes:"):
            raw = bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
            character = found.text[at].encode()
            assert raw in character, f"token {index}: {raw} is not of {found.text[at]!r}"
        else:
            assert found.text[at : at + len(token)] == token, f"token {index}"
    if prompt == FOREIGN:
        assert sum(token.startswith("bytes:") for token in told.tokens) > 5


@pytest.mark.parametrize("prompt", [ROMEO, [ROMEO, FOREIGN], [[5, 6, 7], [9, 10, 11, 12]], [[9]]])
def test_a_stream_tells_the_same(client, prompt):
    options = dict(model="demo", prompt=prompt, max_tokens=6, seed=5, logprobs=2, echo=True, n=2)
    whole = client.completions.create(**options)
    chunks = [c.choices[0] for c in client.completions.create(**options, stream=True) if c.choices]
    assert len(whole.choices) == 2 * (1 if isinstance(prompt, str) else len(prompt))
    for choice in whole.choices:
        mine = [chunk for chunk in chunks if chunk.index == choice.index]
        assert "".join(chunk.text for chunk in mine) == choice.text
        found, right = joined(mine), as_dict(choice.logprobs)
        assert found["tokens"] == right["tokens"]
        assert found["text_offset"] == right["text_offset"]
        assert found["token_logprobs"] == [
            None if value is None else pytest.approx(value, abs=1e-4)
            for value in right["token_logprobs"]
        ]


def test_a_prompt_alone_is_scored_and_nothing_is_said(client, llm):
    answer = client.completions.create(
        model="demo", prompt=[ROMEO, "JULIET:\nO"], max_tokens=0, logprobs=1, echo=True
    )
    assert answer.usage.completion_tokens == 0
    for choice, prompt in zip(answer.choices, (ROMEO, "JULIET:\nO"), strict=True):
        assert choice.text == prompt == "".join(choice.logprobs.tokens)
        assert choice.finish_reason == "length"
        expected = said(llm, prompt, max_tokens=1, prompt_logprobs=1)
        assert len(choice.logprobs.token_logprobs) == len(expected.prompt_token_ids)


def test_an_end_token_has_an_entry(client, llm):
    end = llm.get_tokenizer().eos_token_id
    answer = client.completions.create(
        model="demo", prompt=ROMEO, max_tokens=5, logprobs=0,
        extra_body={"allowed_token_ids": [end]},
    )  # fmt: skip
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("", "stop")
    assert len(choice.logprobs.tokens) == answer.usage.completion_tokens == 1


def test_tokens_can_be_told_by_their_ids(client, llm):
    expected = said(llm, ROMEO, max_tokens=3, temperature=0).outputs[0].token_ids
    found = client.completions.create(
        model="demo", prompt=ROMEO, max_tokens=3, temperature=0, logprobs=1,
        extra_body={"return_tokens_as_token_ids": True},
    )  # fmt: skip
    told = found.choices[0].logprobs
    assert told.tokens == [f"token_id:{token}" for token in expected]
    assert [*told.top_logprobs[0]] == [told.tokens[0]]


def test_the_prompts_and_the_outputs_may_be_of_different_width(client):
    for few, many in ((1, 4), (4, 0)):
        (choice,) = client.completions.create(
            model="demo", prompt=ROMEO, max_tokens=1, echo=True, logprobs=few,
            extra_body={"prompt_logprobs": many},
        ).choices  # fmt: skip
        assert max(len(top) for top in choice.logprobs.top_logprobs[1:]) <= few + 1
        told = choice.model_extra["prompt_logprobs"][1:]
        assert {len(one) for one in told} <= {max(many, 1), many + 1}


def test_prompt_logprobs_in_vllms_shape(client, llm):
    answer = client.completions.create(
        model="demo", prompt=ROMEO, max_tokens=1, extra_body={"prompt_logprobs": 2}
    )
    told = answer.choices[0].model_extra["prompt_logprobs"]
    expected = said(llm, ROMEO, max_tokens=1, prompt_logprobs=2)
    assert told[0] is None
    for token, found, right in zip(
        expected.prompt_token_ids[1:], told[1:], expected.prompt_logprobs[1:], strict=True
    ):
        assert found.keys() == {str(key) for key in right}
        one = found[str(token)]
        assert one["logprob"] == pytest.approx(right[token].logprob, abs=1e-4)
        assert (one["rank"], one["decoded_token"]) == (
            right[token].rank,
            right[token].decoded_token,
        )


# -- conversations ------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_a_conversations_logprobs(client, n):
    options = dict(model="demo", messages=CHAT, max_tokens=8, seed=4, logprobs=True, top_logprobs=2)
    whole = client.chat.completions.create(**options, n=n)
    chunks = [
        chunk.choices[0]
        for chunk in client.chat.completions.create(**options, n=n, stream=True)
        if chunk.choices
    ]
    assert [choice.index for choice in whole.choices] == [*range(n)]
    assert len({choice.message.content for choice in whole.choices}) == n
    for choice in whole.choices:
        content = choice.logprobs.content
        assert b"".join(bytes(one.bytes) for one in content).decode() == choice.message.content
        for one in content:
            assert len(one.top_logprobs) == 2
            assert one.logprob <= one.top_logprobs[0].logprob < 0
            assert one.top_logprobs[0].logprob >= one.top_logprobs[1].logprob
        mine = [chunk for chunk in chunks if chunk.index == choice.index]
        streamed = [one for chunk in mine if chunk.logprobs for one in chunk.logprobs.content]
        assert [one.token for one in streamed] == [one.token for one in content]
        assert [one.logprob for one in streamed] == pytest.approx(
            [one.logprob for one in content], abs=1e-4
        )


def test_logprobs_without_alternatives(client):
    (choice,) = client.chat.completions.create(
        model="demo", messages=CHAT, max_tokens=3, logprobs=True
    ).choices
    assert [one.top_logprobs for one in choice.logprobs.content] == [[], [], []]


# -- several answers ----------------------------------------------------------------------


def test_answers_have_seeds_of_their_own(client, llm):
    answer = client.completions.create(model="demo", prompt=ROMEO, max_tokens=8, seed=9, n=3)
    for choice in answer.choices:
        seed = derived_seed(9, choice.index)
        assert choice.text == said(llm, ROMEO, max_tokens=8, seed=seed).outputs[0].text
    prompt = len(llm.get_tokenizer()(ROMEO).input_ids)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, 24)


# -- what is refused ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 1.5}, "logprobs"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"best_of": 2}, "best_of"),
    ],
)
def test_what_is_refused_is_named(client, wrong, name):
    with pytest.raises(openai.BadRequestError, match=name) as caught:
        client.completions.create(model="demo", prompt=ROMEO, max_tokens=1, extra_body=wrong)
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
    ],
)
def test_what_a_conversation_refuses_is_named(client, wrong, name):
    with pytest.raises(openai.BadRequestError, match=name) as caught:
        client.chat.completions.create(model="demo", messages=CHAT, max_tokens=1, extra_body=wrong)
    assert caught.value.param == name


def test_sums_are_those_of_the_tokens(llm):
    output = said(llm, ROMEO, max_tokens=6, seed=1, logprobs=0).outputs[0]
    own = [one[token].logprob for token, one in zip(output.token_ids, output.logprobs, strict=True)]
    assert output.cumulative_logprob == pytest.approx(math.fsum(own))
