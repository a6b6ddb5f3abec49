"""Vectors and scores over HTTP, in the shapes of OpenAI, Jina, Cohere and vLLM."""

import asyncio
import base64
import json

import httpx2 as httpx
import numpy as np
import openai
import pytest

from nanoactor import PoolingParams
from tests.engine.harness import on_a_loop
from tests.server.harness import here, url

ENGINE = dict(device="cpu", dtype="float32", pooling="last", max_model_len=256, num_kv_blocks=200)
TEXTS = ["ROMEO: But soft", "what light", "through yonder window breaks?"]


def client_of(server):
    return openai.AsyncOpenAI(base_url=f"{url(server)}/v1", api_key="x", max_retries=0)


@on_a_loop
async def test_the_official_client_gets_the_engines_vectors():
    async with here(**ENGINE) as server, client_of(server) as client:
        own = [(await server.llm.embed(text)).outputs.embedding for text in TEXTS]
        for form in (None, "float", "base64"):
            options = {} if form is None else {"encoding_format": form}
            found = await client.embeddings.create(model="demo", input=TEXTS, **options)
            assert (found.object, found.model) == ("list", "demo")
            assert [each.index for each in found.data] == [0, 1, 2]
            assert found.usage.prompt_tokens == found.usage.total_tokens > 3
            for each, right in zip(found.data, own, strict=True):
                vector = each.embedding
                if isinstance(vector, str):
                    vector = np.frombuffer(base64.b64decode(vector), "<f4")
                assert np.allclose(vector, right, atol=1e-5)
        cut = await client.embeddings.create(model="demo", input=TEXTS[0], dimensions=8)
        assert len(cut.data[0].embedding) == 8
        assert np.allclose(
            cut.data[0].embedding, own[0][:8] / np.linalg.norm(own[0][:8]), atol=1e-5
        )


@on_a_loop
async def test_inputs_are_texts_or_ids():
    async with here(**ENGINE) as server, httpx.AsyncClient() as client:
        ids = (await server.llm.embed(TEXTS[0])).prompt_token_ids
        vectors = []
        for given in (TEXTS[0], [TEXTS[0]], ids, [ids], [ids, TEXTS[0]]):
            answer = await client.post(f"{url(server)}/v1/embeddings", json=dict(input=given))
            assert answer.status_code == 200
            vectors += [each["embedding"] for each in answer.json()["data"]]
        assert len(vectors) == 6
        assert np.allclose(vectors, vectors[0], atol=1e-5)


@on_a_loop
async def test_documents_come_the_best_first():
    async with here(**ENGINE) as server, httpx.AsyncClient() as client:
        documents = [TEXTS[1], {"text": TEXTS[0]}, TEXTS[2]]
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            asked = dict(query=TEXTS[0], documents=documents)
            found = (await client.post(url(server) + path, json=asked)).json()
            order = [each["index"] for each in found["results"]]
            scores = [each["relevance_score"] for each in found["results"]]
            assert order[0] == 1
            assert scores == sorted(scores, reverse=True)
            assert scores[0] == pytest.approx(1, abs=1e-5)
            assert found["results"][0]["document"] == {"text": TEXTS[0]}
        asked |= dict(top_n=1, return_documents=False)
        (best,) = (await client.post(f"{url(server)}/rerank", json=asked)).json()["results"]
        assert best.keys() == {"index", "relevance_score"}


@on_a_loop
async def test_pairs_are_scored():
    async with here(**ENGINE) as server, httpx.AsyncClient() as client:
        own = [(await server.llm.score(TEXTS[0], text)).outputs.score for text in TEXTS]
        for asked in (
            dict(text_1=TEXTS[0], text_2=TEXTS),
            dict(queries=[TEXTS[0]] * 3, documents=TEXTS),
        ):
            found = (await client.post(f"{url(server)}/score", json=asked)).json()
            assert [each["score"] for each in found["data"]] == pytest.approx(own, abs=1e-5)
            assert found["usage"]["prompt_tokens"] > 0


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/v1/embeddings", dict(input=[]), "input", "input must not be empty"),
        ("/v1/embeddings", dict(input=["a", 3]), "input", "contains only strings and lists"),
        ("/v1/embeddings", dict(input=[[]]), None, "the prompt is empty"),
        ("/v1/embeddings", dict(input=""), None, "the prompt is empty"),
        ("/v1/embeddings", dict(input=["x"] * 100_000), "input", "100000 items; at most 2048"),
        ("/v1/embeddings", dict(input=[2048]), None, "token id 2048 is outside the vocabulary"),
        ("/v1/embeddings", dict(input=[-1]), None, "token ids must be from 0"),
        ("/v1/embeddings", dict(input="w " * 300), None, "may have at most 256"),
        ("/v1/embeddings", dict(input="a", dimensions=257), "dimensions", "vectors have only 256"),
        ("/v1/embeddings", dict(input="a", dimensions=0), "dimensions", "at least 1"),
        ("/v1/embeddings", dict(input="a", encoding_format="hex"), None, "encoding_format"),
        ("/v1/embeddings", dict(input="a", prompt_name="q"), "prompt_name", "is unknown"),
        ("/v1/embeddings", dict(input="a", add_special_tokens=False), "add_special_tokens", "not"),
        ("/v1/embeddings", dict(input="a", model="other"), "model", "does not exist"),
        ("/rerank", dict(query="a", documents=[]), "documents", "documents must not be empty"),
        ("/rerank", dict(query="a", documents=["a"], top_n=-1), None, "top_n"),
        ("/rerank", dict(query="a", documents=["b"], instruction="c"), "instruction", "rerankers"),
        ("/score", dict(text_1="a"), "text_2", "give exactly one of text_2"),
        (
            "/score",
            dict(text_1="a", queries="b", text_2="c"),
            "text_1",
            "give exactly one of text_1",
        ),
        ("/score", dict(text_1=["a", "b"], text_2=["c"] * 3), None, "got 2 and 3 texts"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_said(shared, path, body, param, says):
    status, error = shared(path, body)
    assert status in (400, 404)
    assert says in error["message"]
    assert param is None or error["param"] == param


@pytest.fixture(scope="module")
def shared():
    """Posts to one server for all of these tests."""
    loop = asyncio.new_event_loop()
    context = here(**ENGINE)
    server = loop.run_until_complete(context.__aenter__())

    async def post(path, body):
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(url(server) + path, content=json.dumps(body), headers=JSON)
            return answer.status_code, answer.json()["error"]

    yield lambda path, body: loop.run_until_complete(post(path, body))
    loop.run_until_complete(context.__aexit__(None, None, None))
    loop.close()


JSON = {"Content-Type": "application/json"}


@on_a_loop
async def test_a_generative_model_says_what_to_load():
    async with here() as server, httpx.AsyncClient() as client:
        bodies = {
            "/v1/embeddings": dict(input="a"),
            "/rerank": dict(query="a", documents=["b"]),
            "/score": dict(text_1="a", text_2="b"),
        }
        for path, body in bodies.items():
            answer = await client.post(url(server) + path, json=body)
            assert answer.status_code == 400
            assert "load an embedding model or a reranker" in answer.json()["error"]["message"]
        card = (await client.get(f"{url(server)}/v1/models")).json()["data"][0]
        assert not card["capabilities"]["embeddings"]


@on_a_loop
async def test_many_texts_in_a_body_and_clients_who_leave():
    """What a client asked for who leaves is aborted; streams of others go on meanwhile."""
    options = {**ENGINE, "device": "simulated:1+20"}
    async with here(**options) as server, client_of(server) as client:
        found = await client.embeddings.create(model="demo", input=["x y z"] * 2048)
        assert len(found.data) == 2048
        stream = await client.completions.create(
            model="demo", prompt="a", max_tokens=50, stream=True, extra_body={"ignore_eos": True}
        )
        many = asyncio.ensure_future(
            client.embeddings.create(model="demo", input=["long text " * 20] * 2048)
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].choices[0].finish_reason == "length"
        assert not many.done()
        many.cancel()
        await asyncio.gather(many, return_exceptions=True)
    # `here` has waited until nothing of it was left.


@on_a_loop
async def test_one_client_does_not_take_the_queue():
    config = dict(max_answers_per_client=4)
    async with here(config=config, **ENGINE) as server, client_of(server) as client:
        found = await client.embeddings.create(model="demo", input=TEXTS * 10)
        assert len(found.data) == 30
        params = PoolingParams(normalize=False)
        assert (await server.llm.embed(TEXTS[0], params)).outputs.embedding.shape == (256,)
