"""Methods that return embedding vectors and scores, shared by single engines and fleets."""

from __future__ import annotations

import abc
import functools
from collections.abc import Mapping
from typing import Any

from nanoactor.admission.request import Request
from nanoactor.errors import InvalidRequest, public
from nanoactor.messages.pooling import Float32
from nanoactor.model_files.files import ModelFiles
from nanoactor.pooling.rerank import judgement_prompt
from nanoactor.requests.pooling_outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    match_probability,
    pair_score,
    postprocess_vector,
)
from nanoactor.requests.pooling_params import PoolingParams
from nanoactor.runtime.concurrency import run_all

_DEFAULT = PoolingParams()


class PoolingCalls(abc.ABC):
    """Base class of engines, and fleets of engines, that return embedding vectors and scores."""

    files: ModelFiles

    @abc.abstractmethod
    def submit_pooled(
        self,
        prompt: Any,
        pooling_params: PoolingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        scores: bool = False,
        trace_headers: Mapping[str, str] | None = None,
    ) -> Request:
        """Queue a text for pooling: its embedding vector is computed, or, with `scores`, the logits
        of a reranker. `Request.vector` returns the result. `trace_headers` have the same meaning as
        in `AsyncLLM.generate`.

        Raises `InvalidRequest` and `EngineOverloaded` immediately.
        """

    @public
    async def embed(
        self,
        prompt: Any,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
    ) -> EmbeddingRequestOutput:
        """Return the embedding vector of a text, or of `{"prompt_token_ids": [...]}`.

        Raises `InvalidRequest` if the model returns no vectors, `RequestAborted` after `abort`, and
        the errors of `AsyncLLM.generate`. Canceling the call aborts the request.
        """
        params = _DEFAULT if pooling_params is None else pooling_params
        request = self.submit_pooled(
            prompt, params, request_id, priority=priority, trace_headers=trace_headers
        )
        vector = await _vector(request)
        pooling = self.files.pooling
        assert pooling is not None
        normalize = pooling.normalize if params.normalize is None else params.normalize
        embedding = postprocess_vector(vector, dimensions=params.dimensions, normalize=normalize)
        return EmbeddingRequestOutput(
            request.request_id,
            EmbeddingOutput(embedding),
            request.prompt_token_ids,
            request.cached_tokens,
            request.metrics,
        )

    @public
    async def score(
        self,
        query: str,
        document: str,
        *,
        instruction: str | None = None,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
    ) -> ScoringRequestOutput:
        """Score how well a document matches a query.

        A reranker returns the probability of a match. `instruction` replaces the reranker's default
        instruction. For embedding models, the score is the cosine of the two vectors, and
        `instruction` is rejected. Raises the errors of `embed`.
        """
        for name, value in (("query", query), ("document", document), ("instruction", instruction)):
            if not isinstance(value, str) and (name != "instruction" or value is not None):
                raise InvalidRequest(f"{name} must be a string, got {value!r:.100}")
        pooling, params = self.files.pooling, pooling_params or _DEFAULT
        if pooling is not None and not pooling.returns_scores:
            if instruction is not None:
                raise InvalidRequest(
                    "instruction is supported only by rerankers, but this model is an "
                    "embedding model"
                )
            embed = functools.partial(self.embed, priority=priority, trace_headers=trace_headers)
            query_params, document_params = pooling.params_of_pair(params)
            calls = [
                functools.partial(embed, query, query_params, request_id),
                functools.partial(embed, document, document_params),
            ]
            return pair_score(*await run_all(calls, max_concurrent=2))
        prompt = judgement_prompt(query, document, instruction)
        request = self.submit_pooled(
            prompt,
            params,
            request_id,
            priority=priority,
            scores=True,
            trace_headers=trace_headers,
        )
        logits = await _vector(request)
        return ScoringRequestOutput(
            request.request_id,
            ScoringOutput(match_probability(logits)),
            request.prompt_token_ids,
            request.cached_tokens,
            request.metrics,
        )


async def _vector(request: Request) -> Float32:
    try:
        return await request.vector()
    finally:
        request.close()
