"""The official client, which must not notice whose server it talks to."""

import asyncio
import json

import httpx2 as httpx
import openai
import pytest

from nanoactor import LLM, SamplingParams
from tests.server.harness import events, here, served, url

ROMEO = "ROMEO:\nBut soft, what light"
CHAT = [{"role": "user", "content": "Speak, friend."}]


@pytest.fixture(scope="module")
def expected():
    """What the engine itself says, by seed."""
    with LLM("demo", device="cpu", dtype="float32", threads=1, max_num_seqs=8) as llm:

        def ask(prompt, **params):
            return llm.generate(prompt, SamplingParams.for_model(**params), use_tqdm=False)[
                0
            ].outputs[0]

        yield ask


# -- completions --------------------------------------------------------------------------


def test_a_completion_is_what_the_engine_says(client, expected):
    found = client.completions.create(model="demo", prompt=ROMEO, max_tokens=24, seed=5)
    assert found.object == "text_completion"
    assert found.model == "demo"
    (choice,) = found.choices
    assert choice.text == expected(ROMEO, max_tokens=24, seed=5).text
    assert choice.finish_reason == "length"
    assert found.usage.completion_tokens == 24
    assert found.usage.total_tokens == 24 + found.usage.prompt_tokens


def test_a_streamed_completion_is_the_same(client, expected):
    stream = client.completions.create(
        model="demo",
        prompt=ROMEO,
        max_tokens=24,
        seed=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    *text, usage = chunks
    assert "".join(c.choices[0].text for c in text) == expected(ROMEO, max_tokens=24, seed=5).text
    assert [c.choices[0].finish_reason for c in text] == [None] * (len(text) - 1) + ["length"]
    assert len(text) > 1  # a busy machine merges them
    assert usage.choices == []
    assert usage.usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in text)


def test_without_max_tokens_a_completion_has_16(client):
    assert client.completions.create(model="demo", prompt=ROMEO).usage.completion_tokens <= 16


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_echo(client, expected, stream):
    ids = [[5, 6, 7], [9, 10]]
    texts = ["ROMEO:", "JULIET:"]
    for prompts in (texts, ids):
        found = client.completions.create(
            model="demo", prompt=prompts, max_tokens=6, temperature=0, echo=True, stream=stream
        )
        said = ["", ""]
        for chunk in found if stream else [found]:
            for choice in chunk.choices:
                said[choice.index] += choice.text
        for prompt, text in zip(prompts, said, strict=True):
            given = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
            answer = expected(given, max_tokens=6, temperature=0.0).text
            assert text.endswith(answer)
            if isinstance(prompt, str):
                assert text == prompt + answer
            else:
                body = {"tokens": prompt}
                assert (
                    text == client.post("../detokenize", body=body, cast_to=dict)["prompt"] + answer
                )


def test_cached_tokens_of_all_prompts_are_counted(client):
    prompt = [7] * 40
    params = dict(model="demo", max_tokens=2)
    client.completions.create(prompt=prompt, **params)
    usage = client.completions.create(prompt=[[*prompt, 1], [*prompt, 2]], **params).usage
    assert usage.prompt_tokens_details.cached_tokens == 64
    assert usage.prompt_tokens == 82


def test_a_lower_priority_goes_first():
    async def main():
        async with here(max_num_seqs=1, device="simulated:10") as server:
            client = openai.AsyncOpenAI(base_url=f"{url(server)}/v1", api_key="x", max_retries=0)
            ended = []

            async def ask(name, priority, tokens=5):
                extra = {"ignore_eos": True, "priority": priority}
                await client.completions.create(
                    model="demo", prompt="a", max_tokens=tokens, extra_body=extra
                )
                ended.append(name)

            async def live(count):
                async with asyncio.timeout(30):
                    while (await server.llm.statistics())["scheduler"]["actor"]["live"] < count:
                        await asyncio.sleep(0.01)

            async with client:
                tasks = [asyncio.ensure_future(ask("first", 0, tokens=200))]
                await live(1)
                for name, priority in (("late", 1), ("usual", 0), ("early", -1)):
                    tasks.append(asyncio.ensure_future(ask(name, priority)))
                    await live(len(tasks))
                assert not ended
                await asyncio.gather(*tasks)
            assert ended == ["first", "early", "usual", "late"]

    asyncio.run(main())


def test_a_prompt_may_be_token_ids(client, expected):
    found = client.completions.create(model="demo", prompt=[5, 6, 7], max_tokens=4, temperature=0)
    answer = expected({"prompt_token_ids": [5, 6, 7]}, max_tokens=4, temperature=0.0)
    assert found.choices[0].text == answer.text
    assert found.usage.prompt_tokens == 3


@pytest.mark.parametrize("stop", ["\n", ["\n", "o"]])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client, expected, stop, stream):
    found = client.completions.create(
        model="demo", prompt=ROMEO, max_tokens=64, seed=1, stop=stop, stream=stream
    )
    chunks = list(found) if stream else [found]
    text = "".join(chunk.choices[0].text for chunk in chunks)
    answer = expected(ROMEO, max_tokens=64, seed=1, stop=stop)
    assert text == answer.text
    assert chunks[-1].choices[0].finish_reason == answer.finish_reason == "stop"


def test_the_usual_extensions_are_honoured(client, expected):
    params = dict(max_tokens=20, seed=3, temperature=1.2, top_p=0.9)
    more = dict(top_k=7, min_p=0.02, min_tokens=20, ignore_eos=True, stop_token_ids=[40])
    found = client.completions.create(model="demo", prompt=ROMEO, **params, extra_body=more)
    assert found.choices[0].text == expected(ROMEO, **params, **more).text
    for one in (
        dict(min_p=0.6),
        dict(skip_special_tokens=False),
        dict(stop=["th"], include_stop_str_in_output=True),
        dict(presence_penalty=1.5, frequency_penalty=0.5),
        dict(repetition_penalty=1.3),
        dict(logit_bias={"300": 20}),
        dict(allowed_token_ids=[40, 41, 300]),
        dict(bad_words=["the", "I", "and"]),
    ):
        values = {"max_tokens": 60, "seed": 4, "temperature": 1.5, "ignore_eos": True, **one}
        prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        body = {"model": "demo", "prompt": prompt, **values}
        found = client.post("/completions", body=body, cast_to=dict)
        assert found["choices"][0]["text"] == expected(prompt, **values).text
        plain = expected(prompt, **{k: v for k, v in values.items() if k not in one or k == "stop"})
        assert found["choices"][0]["text"] != plain.text, "it makes a difference"
    negative = client.completions.create(model="demo", prompt=ROMEO, max_tokens=9, seed=-3)
    assert negative.choices[0].text == expected(ROMEO, max_tokens=9, seed=2**64 - 3).text


# -- chat ---------------------------------------------------------------------------------


def test_chat_streamed_and_not_are_the_same(client):
    params = dict(model="demo", messages=CHAT, max_completion_tokens=20, seed=2)
    whole = client.chat.completions.create(**params)
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.role == "assistant"
    usage = {"include_usage": True}
    chunks = list(client.chat.completions.create(**params, stream=True, stream_options=usage))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.prompt_tokens_details.cached_tokens >= 0


def test_what_a_server_has_said_can_be_sent_back(client):
    params = dict(model="demo", max_tokens=8, seed=2)
    first = client.chat.completions.create(messages=CHAT, **params)
    said = first.choices[0].message.model_dump()
    parts = [{"type": "text", "text": "And "}, {"type": "text", "text": "now?"}]
    messages = [{"role": "developer", "content": "Be brief."}, *CHAT, said]
    messages += [{"role": "user", "content": parts}]
    again = client.chat.completions.create(messages=messages, **params)
    plain = [{"role": "system", "content": "Be brief."}, *CHAT]
    plain += [{"role": "assistant", "content": said["content"]}]
    plain += [{"role": "user", "content": "And \nnow?"}]
    same = client.chat.completions.create(messages=plain, **params)
    assert again.choices[0].message.content == same.choices[0].message.content
    assert same.usage.prompt_tokens_details.cached_tokens > 0


def test_the_last_message_may_be_continued(client, expected):
    messages = [*CHAT, {"role": "assistant", "content": "Good my"}]
    found = client.chat.completions.create(
        model="demo",
        messages=messages,
        max_tokens=8,
        temperature=0,
        extra_body={"continue_final_message": True},
    )
    prompt = "<|im_start|>user\nSpeak, friend.<|im_end|>\n<|im_start|>assistant\nGood my"
    assert found.choices[0].message.content == expected(prompt, max_tokens=8, temperature=0.0).text


def test_the_asynchronous_client(demo_server):
    async def main():
        base = f"{demo_server.url}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
            params = dict(model="demo", messages=CHAT, max_tokens=12)

            async def streamed(seed):
                stream = await client.chat.completions.create(**params, seed=seed, stream=True)
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            wholes = [client.chat.completions.create(**params, seed=seed) for seed in range(8)]
            answers = [
                answer.choices[0].message.content for answer in await asyncio.gather(*wholes)
            ]
            assert answers == await asyncio.gather(*(streamed(seed) for seed in range(8)))
            assert len(set(answers)) > 4
            assert [model.id async for model in client.models.list()] == ["demo"]
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("other")

    asyncio.run(main())


def test_models(client):
    (model,) = client.models.list()
    assert model.id == "demo"
    card = client.models.retrieve("demo")
    assert card.max_model_len == 1024
    assert card.capabilities["chat"] is True
    assert card.limits["kv_blocks"] == 512


# -- errors -------------------------------------------------------------------------------

REFUSED = {
    "n": 129,
    "logprobs": "all",
    "top_logprobs": 3,
    "logit_bias": {"5": 101},
    "presence_penalty": 2.5,
    "frequency_penalty": -3,
    "repetition_penalty": 0,
    "allowed_token_ids": [],
    "bad_words": [""],
    "guided_regex": "",
    "modalities": ["audio"],
    "tool_choice": "required",
    "temperature": -1,
    "top_p": 0,
    "max_tokens": 0,
    "max_completion_tokens": "many",
    "seed": 2**65,
    "stop": [""],
    "stop_token_ids": [99_999],
    "messages": [],
    "chat_template_kwargs": {"messages": []},
    "priority": 2**40,
}


@pytest.mark.parametrize(("name", "value"), REFUSED.items(), ids=REFUSED)
def test_what_is_not_honoured_is_refused_by_name(client, name, value):
    params = {"messages": CHAT, **({name: value} if name == "messages" else {})}
    extra = {} if name == "messages" else {name: value}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", **params, extra_body=extra)
    assert caught.value.param == name
    assert name in caught.value.body["message"]
    assert caught.value.type == "invalid_request_error"


NEUTRAL = dict(
    n=1,
    logprobs=False,
    top_logprobs=0,
    logit_bias={},
    presence_penalty=0.0,
    frequency_penalty=0,
    response_format={"type": "text"},
    parallel_tool_calls=True,
    store=False,
    metadata={},
    modalities=["text"],
    service_tier="auto",
    user="someone",
    tools=[],
    tool_choice="none",
)


def test_what_asks_for_nothing_is_accepted(client):
    for values in (NEUTRAL, dict.fromkeys(NEUTRAL)):
        client.chat.completions.create(model="demo", messages=CHAT, max_tokens=1, extra_body=values)


IGNORED = dict(
    store=True,
    metadata={"a": "b"},
    service_tier="flex",
    reasoning_effort="low",
    no_such_thing=1,
    stream_options={"include_usage": True},
    parallel_tool_calls=False,
    tool_choice="auto",
    prompt_logprobs=None,
    safety_identifier="me",
)


def test_what_changes_nothing_is_accepted(client):
    client.chat.completions.create(model="demo", messages=CHAT, max_tokens=1, extra_body=IGNORED)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": ""}, None),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [-1]}, None),
        ({"prompt": [2**40]}, None),
        ({"prompt": [4000]}, None),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "\ud800"}, None),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_completions_refuse_too(demo_server, extra, param):
    body = {"model": "demo", "prompt": "a", **extra}
    with httpx.Client() as client:
        answer = client.post(
            f"{demo_server.url}/v1/completions",
            content=json.dumps(body),
            headers={"Content-Type": "application/json"},
        )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_has_its_code(client, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="to be " * 2000, stream=stream)
    assert caught.value.code == "context_length_exceeded"


def test_another_model_does_not_exist(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-4", prompt="a")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    "variable", ["NANOACTOR_API_KEY", pytest.param("VLLM_API_KEY", marks=pytest.mark.long)]
)
def test_keys(variable):
    with served("--device", "simulated:1", **{variable: "sesame"}) as server:
        assert server.get("/live").status_code == server.get("/ready").status_code == 200
        for path in ("/", "/health", "/metrics", "/v1/models", "/openapi.json", "/trace", "/x"):
            with httpx.Client() as client:
                for method in ("HEAD", "OPTIONS", "POST", "PUT"):
                    assert client.request(method, server.url + path).status_code == 401
            answer = server.get(path)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"
        wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong")
        with wrong as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame") as client:
            assert client.models.list().data[0].id == "demo"
        assert server.get("/", auth=("anybody", "sesame")).status_code == 200
        assert server.get("/", auth=("sesame", "wrong")).status_code == 401
        challenge = server.get("/", headers={"Accept": "text/html"}).headers["WWW-Authenticate"]
        assert challenge.startswith("Basic")


def test_the_tokens_that_wait_are_bounded_and_text_counts_its_bytes():
    async def main():
        limits = dict(max_num_seqs=1, max_waiting_tokens=300, device="simulated:20")
        async with here(**limits) as server:
            client = openai.AsyncOpenAI(base_url=f"{url(server)}/v1", api_key="x", max_retries=0)
            async with client:
                params = dict(model="demo", stream=True, max_tokens=100)
                params["extra_body"] = {"ignore_eos": True}
                first = await client.completions.create(prompt="a", **params)
                await anext(aiter(first))
                # Tokenized it is shorter: what waits then leaves room for what did not fit before.
                second = await client.completions.create(prompt="to be " * 40, **params)
                waits = (await server.llm.statistics())["frontend"]["actor"]["waiting_tokens"]
                assert 0 < waits < 200
                for prompt in ("ß" * ((301 - waits) // 2), [5] * (301 - waits), ["x" * 120] * 3):
                    with pytest.raises(openai.RateLimitError, match="max_waiting_tokens"):
                        await client.completions.create(prompt=prompt, **params)
                third = await client.completions.create(prompt=[5] * (300 - waits), **params)
                for stream in (first, second, third):
                    await stream.close()

    asyncio.run(main())


def test_a_full_queue_is_429_at_once_and_says_when_to_come_again():
    async def main():
        async with here(max_num_seqs=1, max_waiting_requests=1, device="simulated:20") as server:
            base = f"{url(server)}/v1"
            client = openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0)
            async with client:
                params = dict(model="demo", prompt="a", stream=True, max_tokens=200)
                params["extra_body"] = {"ignore_eos": True}
                first = await client.completions.create(**params)
                await anext(aiter(first))
                second = await client.completions.create(**params)
                asked = (await server.llm.statistics())["tokenizer.0"]["actor"]["requests"]
                for stream in (False, True):
                    with pytest.raises(openai.RateLimitError) as caught:
                        await client.completions.create(**params | {"stream": stream})
                    figures = await server.llm.statistics()
                    assert figures["tokenizer.0"]["actor"]["requests"] == asked
                    assert figures["frontend"]["actor"]["waiting_requests"] == 1, "not later"
                    assert caught.value.response.headers["Retry-After"] == "1"
                    assert caught.value.code == "overloaded"
                text = server.metrics.text().decode()
                assert 'outcome="overloaded",path="/v1/completions"} 2.0' in text
                await first.close()
                await second.close()

    asyncio.run(main())


def test_a_stream_may_tell_its_usage_all_the_time(demo_server):
    body = dict(model="demo", prompt=["a", "To be"], max_tokens=5, ignore_eos=True, stream=True)
    options = dict(include_usage=True, continuous_usage_stats=True)
    values = events(demo_server.post("/v1/completions", {**body, "stream_options": options}).text)
    assert values[-1] == "[DONE]"
    last, chunks = values[-2], values[:-2]
    assert last["choices"] == []
    said, prompts = [0, 0], [0, 0]
    for chunk in chunks:
        index, usage = chunk["choices"][0]["index"], chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["completion_tokens"] >= said[index]
        said[index], prompts[index] = usage["completion_tokens"], usage["prompt_tokens"]
    assert said == [5, 5]
    assert last["usage"]["completion_tokens"] == 10
    assert last["usage"]["prompt_tokens"] == sum(prompts)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_alone_generates_nothing(demo_server, stream):
    body = dict(model="demo", prompt=["To be", [5, 6, 7]], echo=True, max_tokens=0, stream=stream)
    body["stream_options"] = {"include_usage": True}
    answer = demo_server.post("/v1/completions", body)
    assert answer.status_code == 200
    text = demo_server.post("/detokenize", {"tokens": [5, 6, 7]}).json()["prompt"]
    count = demo_server.post("/tokenize", {"prompt": "To be"}).json()["count"]
    if stream:
        *chunks, last, done = events(answer.text)
        assert done == "[DONE]"
        said = ["", ""]
        for chunk in chunks:
            (choice,) = chunk["choices"]
            said[choice["index"]] += choice["text"]
        usage, reasons = last["usage"], [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    else:
        choices = answer.json()["choices"]
        said, usage = [choice["text"] for choice in choices], answer.json()["usage"]
        reasons = [choice["finish_reason"] for choice in choices]
    assert said == ["To be", text]
    assert set(reasons) - {None} == {"length"}
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (count + 3, 0)
    too_long = demo_server.post("/v1/completions", {**body, "prompt": [5] * 1024})
    assert too_long.json()["error"]["code"] == "context_length_exceeded"


def test_paths_that_clients_get_slightly_wrong(demo_server):
    for path in ("/models", "/v1/models/", "/models/"):
        assert demo_server.get(path).json()["data"][0]["id"] == "demo"
    assert demo_server.get("/models/demo").json()["id"] == "demo"
    body = dict(model="demo", prompt="a", max_tokens=1)
    for path in ("/v1/completions/", "/completions"):
        assert demo_server.post(path, body).status_code == 200
    wrong = demo_server.get("/v1/model")
    assert wrong.status_code == 404
    assert "did you mean /v1/models?" in wrong.json()["error"]["message"]


def test_every_answer_names_the_server_and_nothing_else(demo_server):
    assert demo_server.get("/favicon.ico").headers["Content-Type"].startswith("image/svg+xml")
    body = dict(model="demo", prompt="a", max_tokens=1, stream=True)
    answers = [
        *(demo_server.get(path) for path in ("/favicon.ico", "/v1/models", "/", "/no", "/metrics")),
        demo_server.post("/v1/completions", body),
        demo_server.post("/v1/completions", {}),
    ]
    assert {answer.headers["Server"] for answer in answers} == {"nanoactor"}
