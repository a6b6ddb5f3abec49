"""Interfaces that the server requires from its monitor and its engine, which may be a fleet
(several engines)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client.metrics_core import Metric

from nanoactor.admission.request import Request
from nanoactor.api.engine import Prompt
from nanoactor.model_files.files import ModelFiles
from nanoactor.options.config import EngineConfig
from nanoactor.requests.params import SamplingParams
from nanoactor.requests.pooling_outputs import EmbeddingRequestOutput, ScoringRequestOutput
from nanoactor.requests.pooling_params import PoolingParams
from nanoactor.server.health import Health
from nanoactor.tracing import Trace


class Engine(Protocol):
    """An `AsyncLLM`, or an equivalent for several engines."""

    config: EngineConfig
    files: ModelFiles

    async def start(self) -> Any:
        """Start the engine, and return when it accepts requests."""

    async def close(self) -> None:
        """Close the engine. Unfinished requests raise `EngineClosed`."""

    @property
    def facts(self) -> dict[str, Any]:
        """Properties known after startup, such as "dtype", "device", "num_blocks" (of the KV cache)
        and "block_size" (in tokens)."""

    def submit(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Request]:
        """Queue either all prompts or none of them, and return one request per prompt."""

    async def embed(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> EmbeddingRequestOutput:
        """Return the embedding vector of a text."""

    async def score(
        self,
        query: str,
        document: str,
        *,
        instruction: str | None = None,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> ScoringRequestOutput:
        """Return the relevance of a document to a query: a probability (from a reranker), or the
        cosine of two embedding vectors."""


class Tracer(Protocol):
    """An engine that can record a trace of its actors."""

    async def trace(self, since: int = 0) -> Trace:
        """Return a trace that starts at the time `since`, in ns on the monotonic clock."""


class MonitorProtocol(Protocol):
    """Provider of health, metrics and live data for `/health`, `/metrics` and the web page."""

    async def start(self) -> None:
        """Start monitoring in the background."""

    async def stop(self) -> None:
        """Stop monitoring, and wait until it has ended."""

    def health(self) -> Health:
        """Return the current health of the engine or the fleet."""

    def samples_since(self, number: int) -> dict[str, Any]:
        """Return the data of all snapshots after the one with this number, for the web page."""

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, for Prometheus."""
