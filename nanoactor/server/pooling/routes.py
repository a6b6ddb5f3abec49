"""Handlers of `/v1/embeddings`, `/rerank` and `/score`."""

from __future__ import annotations

import asyncio
import base64
import functools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from nanoactor.api.engine import Prompt
from nanoactor.requests.pooling_outputs import EmbeddingRequestOutput, ScoringRequestOutput, cosine
from nanoactor.requests.pooling_params import PoolingParams
from nanoactor.runtime.concurrency import run_all
from nanoactor.server.context import context_of, json_response
from nanoactor.server.errors import invalid
from nanoactor.server.http import HttpFrontend
from nanoactor.server.metrics import Metrics
from nanoactor.server.pooling.request import EmbeddingRequest, RerankRequest, ScoreRequest
from nanoactor.server.serving import Engine
from nanoactor.server.shares import Shares

T = TypeVar("T", EmbeddingRequestOutput, ScoringRequestOutput)
_MAX_CONCURRENT = 256
"""Maximum number of texts of one request that the engine processes at the same time."""
_VECTORS_PER_YIELD = 32
"""Number of vectors encoded before other tasks can run. Encoding a thousand at once would block the
event loop for a tenth of a second."""


class PoolingRoutes:
    """Handlers of the routes for embeddings, reranking and scores."""

    def __init__(
        self,
        llm: Engine,
        http: HttpFrontend,
        metrics: Metrics,
        name: str,
        *,
        max_answers: int,
    ) -> None:
        """Store the services. `name` is the model's name in responses, and `max_answers` is the
        maximum number of texts in progress per client."""
        self._llm, self._http, self._metrics, self._name = llm, http, metrics, name
        self._max_answers = max_answers
        self._shares = Shares(max_answers)

    def routes(self) -> dict[str, Any]:
        """Return the HTTP method and the handler of each path."""
        rerank, score = ("POST", self.rerank), ("POST", self.score)
        return {
            "/v1/embeddings": ("POST", self.embeddings),
            "/rerank": rerank,
            "/v1/rerank": rerank,
            "/v2/rerank": rerank,
            "/score": score,
            "/v1/score": score,
        }

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /v1/embeddings`: return the embedding vector of each text."""
        body = await self._http.read(request, EmbeddingRequest)
        outputs = await self._embed(request, body.texts, body.params, body.priority or 0)
        tokens = sum(len(output.prompt_token_ids) for output in outputs)
        head = {"object": "list", "model": self._name}
        tail = {"usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
        as_base64 = body.encoding_format == "base64"
        return web.Response(
            body=await _join_json(head, "data", _vectors(outputs, as_base64), tail),
            content_type="application/json",
        )

    async def rerank(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /rerank`: return documents and their scores, best match first."""
        body = await self._http.read(request, RerankRequest)
        texts = body.texts
        scores, tokens = await self._score(request, body, [(body.query, text) for text in texts])
        best = sorted(range(len(texts)), key=lambda index: -scores[index])
        if body.top_n:
            best = best[: body.top_n]
        results: list[dict[str, Any]] = [
            {"index": index, "relevance_score": scores[index]} for index in best
        ]
        if body.return_documents is not False:
            for result in results:
                result["document"] = {"text": texts[result["index"]]}
        return json_response(
            {
                "id": f"rerank-{context_of(request).id}",
                "model": self._name,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
                "results": results,
            }
        )

    async def score(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /score`: return a score for each pair of texts."""
        body = await self._http.read(request, ScoreRequest)
        scores, tokens = await self._score(request, body, body.pairs)
        data = [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(scores)
        ]
        return json_response(
            {
                "id": f"score-{context_of(request).id}",
                "object": "list",
                "created": int(time.time()),
                "model": self._name,
                "data": data,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )

    # -- the engine -----------------------------------------------------------------------

    async def _run(
        self, request: web.Request, calls: Sequence[Callable[[], Awaitable[T]]]
    ) -> list[T]:
        """Run the engine calls of one request, a limited number at a time, and return their results
        in order. The number of concurrent calls counts toward the client's limit on texts in
        progress."""
        concurrency = min(len(calls), _MAX_CONCURRENT, self._max_answers)
        with self._shares.hold(self._http.client_of(request), concurrency):
            results = await run_all(calls, concurrency)
        for result in results:
            self._metrics.record_pooling(result.metrics, len(result.prompt_token_ids))
        return results

    async def _embed(
        self, request: web.Request, texts: Sequence[Prompt], params: PoolingParams, priority: int
    ) -> list[EmbeddingRequestOutput]:
        embed = functools.partial(
            self._llm.embed, pooling_params=params, request_id=None, priority=priority
        )
        return await self._run(request, [functools.partial(embed, text) for text in texts])

    async def _score(
        self,
        request: web.Request,
        body: RerankRequest | ScoreRequest,
        pairs: Sequence[tuple[str, str]],
    ) -> tuple[list[float], int]:
        """Score pairs of texts. Return the scores, and the total number of prompt tokens."""
        pooling, priority = self._llm.files.pooling, body.priority or 0
        params = PoolingParams(truncate_prompt_tokens=body.truncate_prompt_tokens)
        if pooling is None or pooling.returns_scores:
            score = functools.partial(
                self._llm.score,
                instruction=body.instruction,
                pooling_params=params,
                priority=priority,
            )
            scored = await self._run(request, [functools.partial(score, *pair) for pair in pairs])
            tokens = sum(len(output.prompt_token_ids) for output in scored)
            return [output.outputs.score for output in scored], tokens
        if body.instruction is not None:
            raise invalid(
                "instruction is supported only by rerankers, but this model is an embedding model",
                "instruction",
            )
        # Usually, all pairs have the same first text. Embed each distinct text only once.
        pair_params = pooling.params_of_pair(params)
        inputs = {item for pair in pairs for item in zip(pair_params, pair, strict=True)}
        embed = functools.partial(self._llm.embed, priority=priority)
        outputs = await self._run(
            request, [functools.partial(embed, text, text_params) for text_params, text in inputs]
        )
        vectors = dict(zip(inputs, outputs, strict=True))
        vector_pairs = [
            [vectors[item].outputs.embedding for item in zip(pair_params, pair, strict=True)]
            for pair in pairs
        ]
        tokens = sum(len(output.prompt_token_ids) for output in outputs)
        return [cosine(*vectors_of_pair) for vectors_of_pair in vector_pairs], tokens


def _vectors(outputs: Sequence[EmbeddingRequestOutput], as_base64: bool) -> Iterator[bytes]:
    """Yield the items of the response's `data`, encoded as JSON. `as_base64` encodes vectors as
    base64 of little-endian float32."""
    for index, output in enumerate(outputs):
        vector = output.outputs.embedding.astype("<f4", copy=False)
        value = base64.b64encode(vector.tobytes()).decode() if as_base64 else vector.tolist()
        yield msgspec.json.encode({"object": "embedding", "index": index, "embedding": value})


async def _join_json(
    head: dict[str, Any], name: str, members: Iterator[bytes], tail: dict[str, Any]
) -> bytes:
    """Encode a JSON object with the members of `head`, a list of the already encoded `members`
    under `name`, and the members of `tail`. The event loop can run other tasks meanwhile."""
    parts = []
    for number, member in enumerate(members):
        parts.append(member)
        if number % _VECTORS_PER_YIELD == _VECTORS_PER_YIELD - 1:
            await asyncio.sleep(0)
    head_json, tail_json = msgspec.json.encode(head)[:-1], msgspec.json.encode(tail)[1:]
    return b"".join((head_json, f',"{name}":['.encode(), b",".join(parts), b"],", tail_json))
