"""Routes of vLLM's server: probes, SageMaker, token ids in and out, and control of the engine."""

import asyncio

import httpx2 as httpx
import pytest

import nanoactor
from nanoactor import AsyncLLM, SamplingParams
from nanoactor.errors import InvalidRequest
from nanoactor.server.config import ServerConfig
from tests.server.harness import events, here, url
from tests.server.scripted import scripted

FAST = dict(device="simulated:1", placement="single")
CONTROL = {"enable_control_endpoints": True}
CHAT = {"messages": [{"role": "user", "content": "Speak."}], "max_tokens": 6}
TEXT = {"prompt": ["ROMEO:", "JULIET:"], "max_tokens": 6, "n": 2, "logprobs": 0}
IDS = {"return_token_ids": True}


def asked(function, config=None, **options):
    """Run a coroutine with a client of a server."""

    async def main():
        async with (
            here(config=config, **{**FAST, **options}) as server,
            httpx.AsyncClient(base_url=url(server), timeout=60) as client,
        ):
            await function(server, client)

    asyncio.run(main())


def test_probes_are_answered():
    async def look(server, client):
        assert (await client.get("/version")).json() == {"version": nanoactor.__version__}
        for method in ("GET", "POST"):
            answer = await client.request(method, "/ping")
            assert (answer.status_code, answer.json()["status"]) == (200, "ok")
        assert (await client.get("/load")).json() == {"server_load": 0}
        long = {**CHAT, "max_tokens": 400, "stream": True, "ignore_eos": True, "seed": 1}
        async with client.stream("POST", "/v1/chat/completions", json=long) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            assert (await client.get("/load")).json() == {"server_load": 1}
        page = await client.get("/docs")
        assert page.headers["Content-Type"].startswith("text/html")
        assert "/v1/messages/count_tokens" in page.text

    asked(look)


def test_invocations_are_chats_or_completions():
    async def ask(server, client):
        chat = (await client.post("/invocations", json=CHAT)).json()
        assert chat["object"] == "chat.completion"
        text = (await client.post("/invocations", json={"prompt": "a", "max_tokens": 2})).json()
        assert text["object"] == "text_completion"
        stream = await client.post("/invocations", json={**CHAT, "stream": True})
        assert stream.text.rstrip().endswith("data: [DONE]")
        for wrong in ({}, {**CHAT, "prompt": "a"}, []):
            answer = await client.post("/invocations", json=wrong)
            assert answer.status_code == 400
            assert "either messages (for a chat) or prompt" in answer.text
        assert (await client.post("/invocations", content=b"{}")).status_code == 415

    asked(ask)


def test_what_is_served_on_demand_is_not_served_without():
    async def ask(server, client):
        for path in ("/tokenizer_info", "/server_info", "/is_paused", "/get_world_size"):
            assert (await client.get(path)).status_code == 404
        for path in ("/pause?mode=keep", "/resume", "/reset_prefix_cache"):
            assert (await client.post(path)).status_code == 404

    asked(ask)
    assert not ServerConfig().enable_control_endpoints


def test_the_tokenizer_is_told_on_demand(tmp_path, monkeypatch):
    async def main():
        config = {"enable_tokenizer_info_endpoint": True}
        async with (
            scripted(tmp_path, monkeypatch, config) as (server, _),
            httpx.AsyncClient(base_url=url(server)) as client,
        ):
            told = (await client.get("/tokenizer_info")).json()
            assert told["eos_token"] == "<|im_end|>"
            assert "enable_thinking" in told["chat_template"]
            assert told["tokenizer_class"]
            assert str(tmp_path) not in str(told)

    asyncio.run(main())


# -- token ids ----------------------------------------------------------------------------


def test_token_ids_go_in_and_come_out_without_drift():
    async def ask(server, client):
        plain = {**CHAT, "seed": 3, "ignore_eos": True}
        prompt = (await client.post("/tokenize", json={"messages": CHAT["messages"]})).json()
        chat = (await client.post("/v1/chat/completions", json={**plain, **IDS})).json()
        assert chat["prompt_token_ids"] == prompt["tokens"]
        ids = chat["choices"][0]["token_ids"]
        assert len(ids) == chat["usage"]["completion_tokens"] == 6
        stream = await client.post("/v1/chat/completions", json={**plain, **IDS, "stream": True})
        chunks = [one for one in events(stream.text) if isinstance(one, dict) and one["choices"]]
        assert chunks[0]["prompt_token_ids"] == prompt["tokens"]
        assert not any("prompt_token_ids" in one for one in chunks[1:])
        told = [t for one in chunks for t in one["choices"][0].get("token_ids", ())]
        assert told == ids
        # What a client continues by ids is what the engine has written.
        more = {"prompt": [*prompt["tokens"], *ids[:3]], "max_tokens": 3, "ignore_eos": True}
        again = (await client.post("/v1/completions", json={**more, **IDS})).json()
        assert again["choices"][0]["prompt_token_ids"] == [*prompt["tokens"], *ids[:3]]
        without = (await client.post("/v1/chat/completions", json=plain)).json()
        assert "token_ids" not in str(without)

    asked(ask)


@pytest.mark.parametrize("stream", [False, True])
def test_completions_tell_the_ids_of_each_choice(stream):
    async def ask(server, client):
        body = {**TEXT, **IDS, "return_tokens_as_token_ids": True, "seed": 5, "stream": stream}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        prompts, found, named = {}, {}, {}
        chunks = events(answer.text) if stream else [answer.json()]
        for chunk in chunks:
            for choice in chunk["choices"] if isinstance(chunk, dict) else ():
                index = choice["index"]
                if "prompt_token_ids" in choice:
                    assert index not in prompts, "once"
                    prompts[index] = choice["prompt_token_ids"]
                found.setdefault(index, []).extend(choice.get("token_ids", ()))
                tokens = (choice["logprobs"] or {}).get("tokens", ())
                named.setdefault(index, []).extend(tokens)
        assert sorted(found) == [0, 1, 2, 3]
        assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
        for index, ids in found.items():
            assert named[index] == [f"token_id:{token}" for token in ids]
            assert len(ids) == 6

    asked(ask)


def steps_of(figures):
    return figures["scheduler"]["actor"]["steps"]


# -- control ------------------------------------------------------------------------------


def test_a_paused_engine_keeps_its_requests():
    async def ask(server, client):
        long = {**CHAT, "max_tokens": 200, "stream": True, "ignore_eos": True, "seed": 1}
        plain = (await client.post("/v1/chat/completions", json=long)).text
        async with client.stream("POST", "/v1/chat/completions", json=long) as stream:
            lines = stream.aiter_lines()
            first = [await anext(lines) for _ in range(20)]
            for _ in range(2):  # a second time changes nothing
                assert (await client.post("/pause?mode=keep")).json() == {"status": "paused"}
            assert (await client.get("/is_paused")).json() == {"is_paused": True}
            later = asyncio.ensure_future(client.post("/v1/chat/completions", json=CHAT))
            await asyncio.sleep(0.1)
            steps = await server.llm.statistics()
            await asyncio.sleep(0.3)
            again = await server.llm.statistics()
            assert steps_of(again) == steps_of(steps), "no step is planned"
            assert not later.done()
            assert (await client.get("/health")).status_code == 200
            assert (await client.post("/resume")).json() == {"status": "resumed"}
            text = "\n".join([*first, *[line async for line in lines]]).strip()
            assert (await later).status_code == 200
        said = [
            "".join(
                one["choices"][0]["delta"].get("content") or ""
                for one in events(whole)
                if isinstance(one, dict) and one["choices"]
            )
            for whole in (plain, text)
        ]
        assert said[0] == said[1]
        for mode in ("", "?mode=abort", "?mode=wait"):
            answer = await client.post(f"/pause{mode}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "mode")

    asked(ask, CONTROL)


def test_a_pause_is_no_delay():
    """Requests that waited for it are not late when it ends."""

    async def ask(server, client):
        long = {**CHAT, "max_tokens": 60, "stream": True, "ignore_eos": True}
        async with client.stream("POST", "/v1/chat/completions", json=long) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            await client.post("/pause?mode=keep")
            await asyncio.sleep(2.5)  # more than the stall timeout and a step together
            await client.post("/resume")
            await asyncio.sleep(0.6)
            health = (await client.get("/health")).json()
            assert health["status"] == "ok", health
            assert health["step_age"] is None or health["step_age"] < 2
            assert [line async for line in lines]

    asked(ask, CONTROL, device="simulated:50", stall_timeout=2.0)


def test_the_prefix_cache_is_emptied_on_demand():
    async def ask(server, client):
        body = {"prompt": list(range(3, 103)), "max_tokens": 2}

        async def cached():
            answer = (await client.post("/v1/completions", json=body)).json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [await cached(), await cached()] == [0, 96]
        assert (await client.post("/reset_prefix_cache")).json() == {"success": True}
        assert [await cached(), await cached()] == [0, 96]

    asked(ask, CONTROL)


def test_the_engines_options_are_told_under_vllms_names():
    async def ask(server, client):
        told = (await client.get("/server_info?config_format=json")).json()["vllm_config"]
        assert told["model_config"]["max_model_len"] == 40_960
        assert told["model_config"]["dtype"].startswith("torch.")
        assert told["weight_transfer_config"] is None
        assert isinstance((await client.get("/server_info")).json()["vllm_config"], str)
        assert (await client.get("/server_info?config_format=xml")).status_code == 400
        assert (await client.get("/get_world_size")).json() == {"world_size": 1}

    asked(ask, CONTROL)


def test_an_engine_in_processes_is_paused_and_goes_on():
    async def main():
        async with AsyncLLM("demo", device="simulated:1", placement="split") as llm:
            params = SamplingParams(max_tokens=60, ignore_eos=True, seed=2)
            (request,) = llm.submit(["ROMEO:"], params)
            tokens = 0
            async for output in request:
                tokens = len(output.outputs[0].token_ids)
                if tokens >= 5:
                    break
            await llm.pause_generation()
            assert await llm.is_paused()
            with pytest.raises(InvalidRequest, match='mode must be "keep"'):
                await llm.pause_generation(mode="abort")
            await asyncio.sleep(0.1)
            first = (await llm.statistics())["scheduler"]["actor"]
            await asyncio.sleep(0.2)
            second = (await llm.statistics())["scheduler"]["actor"]
            assert first["steps"] == second["steps"]
            assert second["paused"] == 1
            await llm.resume_generation()
            async for output in request:
                tokens = len(output.outputs[0].token_ids)
            assert tokens == 60
            assert await llm.reset_prefix_cache()

    asyncio.run(main())
