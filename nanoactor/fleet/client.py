"""`FleetLLM`, a client that makes several engines (replicas) look like one. The HTTP server in
front of the replicas (ingress) uses it as its engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import secrets
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import numpy as np

from nanoactor.admission.request import Request
from nanoactor.admission.request_builder import RequestBuilder
from nanoactor.api.engine import Prompt
from nanoactor.api.pooling_calls import PoolingCalls
from nanoactor.errors import (
    ComputationFailed,
    EngineClosed,
    EngineDead,
    EngineOverloaded,
    InvalidConfig,
    InvalidRequest,
    NanoactorError,
    only_ours,
    public,
)
from nanoactor.fleet import wire
from nanoactor.fleet.fleet import SILENCE_TIMEOUT, Fleet
from nanoactor.fleet.link_end import Connector
from nanoactor.fleet.prefix_map import block_keys
from nanoactor.fleet.prompts import PromptHasher
from nanoactor.fleet.requests import FleetRequest
from nanoactor.messages.engine import Submit
from nanoactor.model_files.files import max_prompt_bytes, read_model_files
from nanoactor.options.config import EngineConfig
from nanoactor.recovery.journal import Entry
from nanoactor.requests.outputs import RequestOutput, RequestOutputKind
from nanoactor.requests.params import SamplingParams
from nanoactor.requests.pooling_params import PoolingParams
from nanoactor.server.context import CURRENT_ID
from nanoactor.server.text_service import TextService
from nanoactor.setup.actors import render_options
from nanoactor.telemetry import open_telemetry
from nanoactor.telemetry.origin import Origin, origin_of
from nanoactor.vision.media import Media

log = logging.getLogger("nanoactor.fleet")

_UNUSED_PARAMS = SamplingParams(seed=0, output_kind=RequestOutputKind.FINAL_ONLY)
"""Placeholder for the sampling parameters of pooling requests, which sample nothing."""
_MAX_ATTEMPTS = 3
"""Maximum number of attempts to tokenize a text. An attempt fails if the tokenizing process
dies."""
_RETRY_SECONDS = 0.2
_HELD_UNSUPPORTED = (
    "requests of beam_search and submit_held must stay on the engine that began them, which is "
    "not supported with several replicas; use a single engine"
)


class FleetLLM(PoolingCalls):
    """Client that runs requests on a fleet of engines (replicas). It implements the `AsyncLLM`
    methods that the HTTP server needs. Use it from a single event loop."""

    def __init__(
        self,
        config: EngineConfig,
        connector: Connector,
        *,
        ingress: str | None = None,
        silence: float = SILENCE_TIMEOUT,
    ) -> None:
        """Create the client without connecting. `config` is the configuration of the replicas, and
        `connector` provides access to them. `ingress` is the name under which the replicas know
        this client; random by default. A replica that sends nothing for `silence` seconds is
        considered hung.

        Raises the same errors as `AsyncLLM`, and `InvalidConfig` if `prefix_salt` is None or
        `max_model_len` is "auto".
        """
        if config.prefix_salt is None:
            raise InvalidConfig(
                "a fleet requires prefix_salt to be set, to the same value for all of its engines"
            )
        if config.max_model_len == "auto":
            raise InvalidConfig(
                'max_model_len "auto" works only with a single engine, because replicas may '
                "have caches of different sizes; give a number"
            )
        self.config = config
        with only_ours():
            self.files = read_model_files(config)
        self._requests = RequestBuilder(config, self.files, random.Random(config.seed))
        self._hasher = PromptHasher(config, self.files)
        self._id_prefix = f"request-{secrets.token_hex(4)}"
        self.fleet = Fleet(connector, ingress or f"ingress-{secrets.token_hex(4)}", silence)
        self.text_service: TextService | None = None
        if self.files.tokenizer_directory is not None:
            self.text_service = TextService(
                self.files.tokenizer_directory,
                2 * max_prompt_bytes(self.files),
                render_options(config, self.files),
                self.files.placeholders,
            )
        self._next_uid = 0
        self._preparing: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._telemetry = open_telemetry(config, self.files)
        if self._telemetry is not None:  # it has a thread
            weakref.finalize(self, self._telemetry.abandon).atexit = False

    # -- lifecycle --------------------------------------------------------------------------

    @public
    async def start(self) -> FleetLLM:
        """Connect to the replicas, and return this client once the first replica is serving. Raises
        `EngineDead` if none is serving after `start_timeout` seconds."""
        if self.text_service is not None:
            with only_ours():
                await self.text_service.start()
        self.fleet.start()
        try:
            async with asyncio.timeout(self.config.start_timeout):
                await self.fleet.links.first_connected.wait()
        except TimeoutError:
            await self.close()
            raise EngineDead(
                f"no replica was ready to serve within {self.config.start_timeout:g} s "
                "(start_timeout)"
            ) from None
        return self

    async def __aenter__(self) -> FleetLLM:
        """Start the client and return it."""
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        """Close the client."""
        await self.close()

    @public
    async def close(self) -> None:
        """Close the connections to all replicas. Unfinished requests raise `EngineClosed`. The
        replicas keep running."""
        if self._is_closed:
            return
        self._is_closed = True
        for task in self._preparing:
            task.cancel()
        for request in list(self.fleet.requests.values()):
            self.fleet.fail(request, EngineClosed("the ingress was closed"))
        await self.fleet.close()
        if self.text_service is not None:
            await self.text_service.close()
        if self._telemetry is not None:
            await self._telemetry.close()

    @property
    def facts(self) -> dict[str, Any]:
        """Properties of the replica that connected last, such as its dtype and KV block size, as in
        `AsyncLLM.facts`. Empty before the first connection."""
        return dict(self.fleet.links.facts)

    @property
    def live(self) -> int:
        """Number of unfinished requests."""
        return len(self.fleet.requests)

    # -- requests ---------------------------------------------------------------------------

    @public
    def submit(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> list[Request]:
        """Queue several prompts with the same sampling parameters, either all of them or none, as
        `AsyncLLM.submit` does."""
        if self._is_closed:
            raise EngineClosed("the ingress was closed")
        origin = origin_of(trace_headers)
        params = self._requests.with_seed(self._requests.params_or_default(sampling_params))
        submits = [
            self._requests.build(prompt, params, priority, chat_template_kwargs)
            for prompt in prompts
        ]
        self._check_capacity(len(submits))
        return [self._queue(submit, media, params, priority, origin) for submit, media in submits]

    @public
    def submit_pooled(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        scores: bool = False,
        trace_headers: Mapping[str, str] | None = None,
    ) -> Request:
        """Queue a text whose embedding vector or score is computed, like
        `PoolingCalls.submit_pooled`. `request_id` is ignored, because the client assigns its own
        ids."""
        if self._is_closed:
            raise EngineClosed("the ingress was closed")
        origin = origin_of(trace_headers)
        submit = self._requests.build_pooled(prompt, pooling_params, priority, scores=scores)
        self._check_capacity(1)
        return self._queue(submit, (), _UNUSED_PARAMS, priority, origin)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request as they arrive, as `AsyncLLM.generate` does."""
        (request,) = self.submit(
            [prompt],
            sampling_params,
            priority=priority,
            chat_template_kwargs=chat_template_kwargs,
            trace_headers=trace_headers,
        )
        try:
            async for output in request:
                yield output
        finally:
            request.close()

    @public
    async def beam_search(self, *_: Any, **__: Any) -> None:
        """Raise `InvalidRequest`. A fleet does not support beam search, which cannot move to
        another replica if its own dies."""
        raise InvalidRequest(_HELD_UNSUPPORTED)

    def _check_capacity(self, requests: int) -> None:
        """Raise `EngineOverloaded` if all replicas are full, or if `requests` more requests would
        exceed the limit on requests that wait in this process."""
        replicas = self.fleet.replicas.values()
        if replicas and all(replica.state.is_full for replica in replicas):
            raise EngineOverloaded(f"all {len(replicas)} replicas are full; try again later")
        limit = max(self.config.max_waiting_requests, self.fleet.links.capacity)
        waiting = len(self._preparing) + self.fleet.queue.waiting
        if waiting + requests > limit:
            raise EngineOverloaded(
                f"{waiting} requests are already waiting for a replica; try again later"
            )

    def _queue(
        self,
        submit: Submit,
        media: tuple[Media, ...],
        params: SamplingParams,
        priority: int,
        origin: Origin,
    ) -> Request:
        uid = self._next_uid
        self._next_uid += params.n
        entry = Entry(
            f"{CURRENT_ID.get() or self._id_prefix}-{uid}",
            dataclasses.replace(submit, uid=uid),
            params.output_kind,
            media,
            params.n,
        )
        request = self.fleet.requests[uid] = FleetRequest(entry, params, priority)
        if self._telemetry is not None:
            request.on_end = self._telemetry.end_callback(origin)
        request.media = tuple(map(wire.media_to_bytes, media))
        self._hasher.block_size = self.fleet.links.block_size or self._hasher.block_size
        if len(submit.token_ids) and not media:
            self._enqueue(request, submit.token_ids, self._hasher.hash_tokens(submit.token_ids))
        else:
            task = asyncio.ensure_future(self._prepare(request))
            self._preparing.add(task)
            task.add_done_callback(self._preparing.discard)
        return Request(self, entry, self)

    def _enqueue(self, request: FleetRequest, token_ids: Any, block_hashes: bytes) -> None:
        request.token_ids = np.asarray(token_ids, np.int32).tobytes()
        request.prompt_length = request.prompt_length or len(token_ids)
        request.block_hashes, request.block_keys = block_hashes, block_keys(block_hashes)
        self.fleet.queue.add(request.begin())
        self.fleet.queue.advance()

    async def _prepare(self, request: FleetRequest) -> None:
        """Render the chat template, tokenize the prompt and hash its KV blocks, once for all
        replicas. Then queue the request, or end it with the error if one of these steps failed."""
        submit = request.entry.submit
        try:
            with only_ours():
                ids = np.asarray(await self._tokens(submit), np.int32)[-submit.keep_last :]
                media = request.entry.media
                if media:
                    request.prompt_length, block_hashes = await self._hasher.hash_with_images(
                        ids, media
                    )
                else:
                    block_hashes = self._hasher.hash_tokens(ids)
            if not request.entry.is_over:
                self._enqueue(request, ids, block_hashes)
        except NanoactorError as error:
            self.fleet.fail(request, error)
        except Exception as error:
            log.exception("request %s cannot be prepared", request.entry.request_id)
            self.fleet.fail(request, ComputationFailed(f"the prompt cannot be read: {error!r}"))

    async def _tokens(self, submit: Submit) -> Sequence[int]:
        if len(submit.token_ids):
            token_ids: list[int] = submit.token_ids.tolist()
            return token_ids
        assert self.text_service is not None
        for attempt in range(_MAX_ATTEMPTS):
            try:
                if submit.chat is None:
                    return await self.text_service.encode(
                        submit.text or "", add_special_tokens=True
                    )
                return await self.text_service.encode_conversation(submit.chat, submit.chat_options)
            except EngineDead:
                if attempt == _MAX_ATTEMPTS - 1:
                    raise
            await self._wait_for_text_service()
        raise AssertionError("unreachable")

    async def _wait_for_text_service(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.start_timeout):
                while self.text_service is not None and self.text_service.state == "dead":  # noqa: ASYNC110
                    await asyncio.sleep(_RETRY_SECONDS)

    # -- a request's journal ----------------------------------------------------------------

    def abort(self, entry: Entry) -> None:
        """Abort the request with this journal entry (the record of its output), because its output
        is no longer read."""
        request = self.fleet.requests.get(entry.submit.uid)
        if request is not None and not entry.is_over:
            self.fleet.abort(request)

    def resume_held(self, entry: Entry, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """Raise `InvalidRequest`, because a fleet does not support sequences that pause after each
        token."""
        raise InvalidRequest(_HELD_UNSUPPORTED)
