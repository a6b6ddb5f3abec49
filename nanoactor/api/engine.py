"""`AsyncLLM`: the engine's asynchronous interface."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import secrets
import sys
import time
import warnings
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nanoactor.actors.frontend import FrontendActor
from nanoactor.admission.request import Request
from nanoactor.admission.request_builder import (
    RequestBuilder,
    as_held,
    check_request_id,
    check_uint63,
)
from nanoactor.api.control import ControlCalls
from nanoactor.api.pooling_calls import PoolingCalls
from nanoactor.beams.requests import BeamSearcher
from nanoactor.errors import (
    EngineClosed,
    EngineDead,
    InvalidConfig,
    InvalidRequest,
    engine_dead,
    only_ours,
    public,
)
from nanoactor.kv.index_events import IndexEvents
from nanoactor.model_files.files import read_model_files
from nanoactor.model_files.fingerprints import FileFingerprints
from nanoactor.options.config import EngineConfig
from nanoactor.options.engine_options import engine_config
from nanoactor.placement.rendezvous import Rendezvous
from nanoactor.placement.system_options import system_options
from nanoactor.placement.topology import engine_topology
from nanoactor.recovery.journal import Entry, entry_maker
from nanoactor.requests.outputs import (
    BeamSearchOutput,
    OutputSoFar,
    RequestOutput,
    RequestOutputKind,
)
from nanoactor.requests.params import BeamSearchParams, SamplingParams
from nanoactor.requests.pooling_params import PoolingParams
from nanoactor.runtime.recovery import Death
from nanoactor.runtime.system import System, run_on
from nanoactor.runtime.topology import Topology
from nanoactor.setup.actors import ActorConfig, RunnerReady
from nanoactor.telemetry import open_telemetry
from nanoactor.telemetry.origin import Origin, origin_of
from nanoactor.text.huggingface import LazyTokenizer
from nanoactor.tracing import Trace
from nanoactor.vision.parts import needs_opening, snapshot

if TYPE_CHECKING:
    from nanoactor.text.huggingface import PreTrainedTokenizerBase

log = logging.getLogger("nanoactor.engine")

Prompt = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""A text, `{"prompt": text}`, `{"prompt_token_ids": [...]}`, or a list of chat messages. A dict may
have `"multi_modal_data": {"image": [...]}`; messages may have image content parts."""


class AsyncLLM(ControlCalls, PoolingCalls):
    """An engine whose actors (tokenizer, scheduler, model runner and others) run in separate
    processes. Use it from a single event loop.

    Use it in an `async with` statement, or call `start` and `close`:

        async with AsyncLLM("demo") as llm:
            async for output in llm.generate("ROMEO:", SamplingParams(max_tokens=50)):
                print(output.outputs[0].text)
    """

    @public
    def __init__(self, model: str | EngineConfig, **options: Any) -> None:
        """Read the model's configuration, without starting the engine. `options` are fields of
        `EngineConfig`. If the model has no tokenizer.json, convert its tokenizer once.

        Raises `InvalidConfig` for an unknown or invalid option, and `ModelError` if the model's
        files are missing or malformed.
        """
        if isinstance(model, EngineConfig):
            if options:
                raise InvalidConfig(
                    "give engine options either in an EngineConfig or as keyword arguments, "
                    "not both"
                )
            self.config = model
        else:
            self.config = engine_config(model, options)
        with only_ours():
            self.files = read_model_files(self.config)
        if names := self.files.generation.not_applied:
            log.warning(
                "generation_config.json contains settings that are not supported: %s",
                ", ".join(names),
            )
        ranks = self.config.tensor_parallel_size
        self._rendezvous = Rendezvous(ranks) if ranks > 1 else None
        if self._rendezvous is not None:  # closes it if the engine is never started
            weakref.finalize(self, self._rendezvous.close)
        self._salt = self.config.prefix_salt or secrets.token_bytes(16)
        self._fingerprints = FileFingerprints(self.files)
        weakref.finalize(self, self._fingerprints.close)  # closes them if the engine is dropped
        topology = self._topology()
        self._frontend: FrontendActor | None = None
        seeds = random.Random(self.config.seed)
        self._requests = RequestBuilder(self.config, self.files, seeds)
        self._beams = BeamSearcher(self.config, self.files)
        self._opening_media: dict[str, asyncio.Future[None]] = {}
        """Futures of the requests whose images are being opened, by request id. A future is done
        once its request is aborted."""
        self._pretrained = LazyTokenizer()
        self._id_prefix = f"request-{secrets.token_hex(4)}"  # keeps our ids distinct from callers'
        self._died = asyncio.Event()
        self._started = False
        self._closed = False
        # The event loop and a thread hold references to the system, which must not keep a dropped
        # engine alive.
        on_death, engine_ref = weakref.WeakMethod(self._on_death), weakref.ref(self)
        on_cut, on_recovered = weakref.WeakMethod(self._on_cut), weakref.WeakMethod(self._resume)
        check = weakref.WeakMethod(self._before_restart)
        self._system = System(
            topology,
            system_options(self.config, len(topology.nodes)),
            lambda error: (found := on_death()) and found(error),
            lambda: bool((llm := engine_ref()) and llm._frontend and llm._frontend.has_work),
            on_cut=lambda deaths: found(deaths) if (found := on_cut()) else 0,
            on_recovered=lambda: (found := on_recovered()) and found(),
            before_restart=lambda nodes: found(nodes) if (found := check()) else asyncio.sleep(0),
        )
        self._telemetry = open_telemetry(self.config, self.files)
        if self._telemetry is not None:  # it has a thread
            weakref.finalize(self, self._telemetry.abandon).atexit = False

    def _topology(self) -> Topology:
        shared = ActorConfig(self.config, self.files, salt=self._salt)
        return engine_topology(shared, self._rendezvous)

    def __del__(self) -> None:
        """End the processes of an engine that was not closed, and emit a `ResourceWarning`."""
        system: System | None = self.__dict__.get("_system")
        if system is None or not self._started or self._closed or not system.is_ours:
            return
        if sys.is_finalizing():  # the processes end with this one
            return
        system.abandon()  # first, because the warning may raise
        warnings.warn(
            f"the engine of {self.config.model!r} was not closed; use `async with`, or call "
            "close()",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )

    @public
    async def start(self) -> AsyncLLM:
        """Start all processes, load the model, warm up, and return this engine. Afterwards, the
        engine can be used only in the current event loop. Raises `EngineClosed` if it was started
        before."""
        if self._started or self._closed:
            raise EngineClosed("an engine can be started only once; create a new one")
        self._started = True
        begin = time.monotonic()
        try:
            with only_ours():
                await self._system.start()
        except BaseException as error:
            if self._closed and isinstance(error, Exception):
                raise EngineClosed("the engine was closed while it was starting") from error
            self._closed = True
            raise
        finally:
            if self._rendezvous and (self._closed or not self.config.restarts_allowed):
                self._rendezvous.close()  # else ranks may reconnect
        frontend = self._system.actor("frontend")
        assert isinstance(frontend, FrontendActor)
        self._frontend = frontend
        if self._closed or self.dead is not None:  # just as startup completed
            await self.close()
            raise self.dead or EngineClosed("the engine was closed while it was starting")
        if self.config.restarts_allowed:
            self._fingerprints.start_hashing()
        self.files = self._requests.fit_to_cache(
            RunnerReady.find(self._system.ready).capacity_tokens
        )
        log.info("engine ready in %.1f s", time.monotonic() - begin)
        return self

    async def __aenter__(self) -> AsyncLLM:
        """Start the engine and return it."""
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        """Close the engine."""
        await self.close()

    @public
    async def close(self) -> None:
        """End all processes. Unfinished requests raise `EngineClosed`.

        May be called from another event loop while the engine's own loop is running. If that loop
        has ended, no request can be notified, and only the processes are ended.
        """
        self._closed = True
        loop = self._system.running_elsewhere
        if loop is not None and await run_on(loop, self.close):
            return
        if self._frontend is not None and self._system.is_here:
            self._frontend.fail_all(EngineClosed("the engine was closed"))
        self._fingerprints.close()
        await self._system.close()
        if self._rendezvous is not None:
            self._rendezvous.close()
        if self._telemetry is not None:
            await self._telemetry.close()

    def _on_death(self, error: BaseException) -> None:
        self._died.set()
        if self._frontend is not None:
            self._frontend.fail_all(engine_dead(error))

    def _on_cut(self, deaths: Sequence[Death]) -> int:
        return 0 if self._frontend is None else self._frontend.begin_restart(deaths)

    async def _before_restart(self, nodes: Collection[str]) -> None:
        with only_ours():
            relocated = await self._fingerprints.check(nodes)
        if relocated is not None:
            self.files = relocated
            self._system.set_topology(self._topology())

    def _resume(self) -> None:
        if self._frontend is not None:
            self._frontend.finish_restart()

    @property
    def recovering(self) -> tuple[str, float] | None:
        """Names of the processes that have died, as one string, and `time.monotonic()` at their
        death, while they are being replaced and requests wait. Otherwise None."""
        return self._system.recovering

    @property
    def restarts(self) -> tuple[Mapping[str, int], float]:
        """Number of restarts by process name, and the total duration of all restarts in seconds."""
        return dict(self._system.restarts), self._system.restart_seconds

    @property
    def dead(self) -> EngineDead | None:
        """Error that killed the engine; None if the engine is alive."""
        return None if self._system.dead is None else engine_dead(self._system.dead)

    async def death(self) -> EngineDead:
        """Wait until the engine dies, and return the error. Closing the engine does not count as
        its death."""
        await self._died.wait()
        assert self.dead is not None
        return self.dead

    def _require_frontend(self) -> FrontendActor:
        """Return the frontend actor, which runs in this process and passes requests to the engine.
        Raises `EngineClosed`, `EngineDead` or `NotUsableHere` if the engine cannot be used."""
        if self._closed or self._frontend is None:
            raise EngineClosed(
                "the engine was closed"
                if self._closed
                else "the engine has not been started; use `async with`, or call start() first"
            )
        with only_ours():
            self._system.check_usable()
        if self.dead is not None:
            raise self.dead
        return self._frontend

    # -- requests -------------------------------------------------------------------------

    @public
    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        so_far: OutputSoFar | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs as they arrive, in the form that `sampling_params.output_kind` selects.

        Invalid arguments raise `InvalidRequest` immediately. Errors that are found later are raised
        when the iterator is first awaited: prompts that are too long, invalid images (which are
        opened on a thread), `EngineOverloaded`, `EngineDead` and `EngineClosed`. Closing or
        canceling the iterator aborts the request. Requests with lower values of `priority` run
        first.

        `so_far` continues a sequence that another engine with the same model has partly generated.
        The result is the same as if that engine had finished the sequence. Prompt and parameters
        must be the same, with two exceptions: n is 1, and the seed is the sequence's own
        (`derived_seed` for all but the first). Outputs contain only the new part, but limits,
        penalties and offsets apply to the whole sequence. Continued requests are accepted even if
        the queue is full, and run before all requests that start here.

        `trace_headers` are the W3C headers `traceparent` and `tracestate` of the caller's span,
        which becomes the parent of the request's span. They have no effect without
        `otlp_traces_endpoint`.
        """
        origin = origin_of(trace_headers)
        if needs_opening(prompt):
            prompt = snapshot(prompt)
            params = self._requests.with_seed(self._requests.params_or_default(sampling_params))
            return self._open_then_stream(
                prompt, params, priority, chat_template_kwargs, request_id, so_far, origin=origin
            )
        if self._frontend is not None:
            self._frontend.announce()
        make_entry = self._prepare(
            prompt, sampling_params, priority, chat_template_kwargs, request_id, so_far
        )
        return self._stream(self._instrument(make_entry, origin), request_id)

    async def _open_then_stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int,
        chat_template_kwargs: Mapping[str, Any] | None,
        request_id: str | None,
        so_far: OutputSoFar | None,
        *,
        origin: Origin,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Read files and decode images on a thread, and then stream outputs like `generate`."""
        self._check_request_id(self._require_frontend(), request_id)
        opening = asyncio.get_running_loop().create_future()
        if request_id is not None:
            self._opening_media[request_id] = opening
        try:
            with only_ours():
                prompt_without_media, media = await asyncio.to_thread(
                    self._requests.extract_media, prompt
                )
            built = self._requests.build(
                prompt_without_media, params, priority, chat_template_kwargs, media, so_far
            )
        finally:
            aborted = opening.done()
            if request_id is not None:
                del self._opening_media[request_id]
        make_entry = entry_maker(built, params, request_id, self._id_prefix, so_far is not None)
        make_entry = self._instrument(make_entry, origin)
        async with contextlib.aclosing(self._stream(make_entry, request_id, aborted)) as outputs:
            async for output in outputs:
                yield output

    @public
    def submit(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        so_far: OutputSoFar | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> list[Request]:
        """Queue several prompts with the same parameters immediately: either all of them or none.

        Images are opened in the calling thread. A seed in `sampling_params` applies to each prompt.
        `so_far` and `trace_headers` have the same meaning as in `generate`. Raises `InvalidRequest`
        and `EngineOverloaded` immediately.
        """
        frontend, origin = self._require_frontend(), origin_of(trace_headers)
        frontend.announce()
        make_entries = [
            self._prepare(prompt, sampling_params, priority, chat_template_kwargs, so_far=so_far)
            for prompt in prompts
        ]
        make_entries = [self._instrument(make_entry, origin) for make_entry in make_entries]
        return [Request(frontend, entry, self) for entry in frontend.submit_all(make_entries)]

    @public
    def submit_held(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Request:
        """Queue a prompt whose sequences pause after each token until the caller resumes them, as
        `Request.held` describes.

        A search algorithm on top of the engine can use this method. The request counts as one
        waiting request. `sampling_params` must have `logprobs` and `max_tokens`. Raises the same
        errors as `submit`.
        """
        frontend = self._require_frontend()
        submit, media = self._requests.build(
            prompt, sampling_params, priority, chat_template_kwargs
        )
        built = as_held(sampling_params, submit, media), media
        make_entry = entry_maker(built, sampling_params, None, self._id_prefix)
        entry = frontend.submit(self._instrument(make_entry, origin_of(None)))
        return Request(frontend, entry, self)

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
        """Queue a text for which an embedding vector or a score is to be computed. Parameters and
        errors are those of `PoolingCalls.submit_pooled`."""
        frontend, origin = self._require_frontend(), origin_of(trace_headers)
        self._check_request_id(frontend, request_id)
        frontend.announce()
        submit = self._requests.build_pooled(prompt, pooling_params, priority, scores=scores)

        def make_entry(uid: int) -> Entry:
            name = request_id or f"{self._id_prefix}-{uid}"
            numbered = dataclasses.replace(submit, uid=uid)
            return Entry(name, numbered, RequestOutputKind.FINAL_ONLY)

        return Request(frontend, frontend.submit(self._instrument(make_entry, origin)), self)

    @public
    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        *,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> BeamSearchOutput:
        """Return the likeliest continuations found for a prompt, best first. Each beam is a
        sequence of one request. docs/sampling.md defines the algorithm and its cost.

        Raises `InvalidRequest` for invalid arguments, for images, and if `max_logprobs` is too low
        for `beam_width`. Raises `EngineOverloaded` if the queue is full at the start, and
        `HoldExpired` if the event loop is blocked for `hold_timeout` seconds. Canceling the search
        aborts its request.
        """
        return await self._beams.search(self, prompt, params, priority, chat_template_kwargs)

    def _prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        priority: int,
        chat_template_kwargs: Mapping[str, Any] | None,
        request_id: str | None = None,
        so_far: OutputSoFar | None = None,
    ) -> Callable[[int], Entry]:
        """Check a request, and return a function that creates its `Entry`, the record of its
        output, from a request number (uid)."""
        params = self._requests.params_or_default(sampling_params)
        built = self._requests.build(prompt, params, priority, chat_template_kwargs, so_far=so_far)
        return entry_maker(built, params, request_id, self._id_prefix, so_far is not None)

    def _instrument(
        self, make_entry: Callable[[int], Entry], origin: Origin
    ) -> Callable[[int], Entry]:
        """Return a function that creates the same entry as `make_entry`. If telemetry is on, it
        also exports OpenTelemetry spans when the request ends."""
        return (
            make_entry
            if self._telemetry is None
            else self._telemetry.instrument(make_entry, origin)
        )

    async def _stream(
        self, make_entry: Callable[[int], Entry], request_id: str | None, aborted: bool = False
    ) -> AsyncGenerator[RequestOutput, None]:
        frontend = self._require_frontend()
        self._check_request_id(frontend, request_id)
        entry = frontend.submit(make_entry)
        if aborted:  # while the request's images were opened
            frontend.abort(entry)
        request = Request(frontend, entry, self)
        try:
            async for output in request:
                yield output
        finally:
            request.close()

    def _check_request_id(self, frontend: FrontendActor, request_id: str | None) -> None:
        if request_id is None:
            return
        check_request_id(request_id)
        if request_id in self._opening_media or frontend.journal.find_by_id(request_id) is not None:
            raise InvalidRequest(f"request_id {request_id!r} is already in use by another request")

    @public
    async def abort(self, request_id: str) -> None:
        """Abort a request. Unknown ids are ignored.

        The request's iterator immediately yields a last output with finish_reason "abort". The
        engine releases the request's resources within a few steps: at most the number of steps that
        may be in flight, plus one.
        """
        check_request_id(request_id)
        frontend = self._require_frontend()
        opening = self._opening_media.get(request_id)
        if opening is not None and not opening.done():
            opening.set_result(None)  # the request has not reached the engine yet
        entry = frontend.journal.find_by_id(request_id)
        if entry is not None:
            frontend.abort(entry)
            frontend.end_for_reader(entry)

    @public
    async def wait_for_capacity(self) -> None:
        """Wait until the queue may accept another request. Call this after `EngineOverloaded`."""
        await self._require_frontend().queue.wait_for_capacity()

    @public
    def index_events(self) -> AsyncGenerator[IndexEvents, None]:
        """Yield the contents of the prefix index (the KV blocks that the engine has cached), as
        hashes of full blocks with the key `prefix_salt`.

        The first item contains the whole index, and each later one the changes since the previous
        item. Changes arrive slightly delayed and are merged until they are read. Raises
        `InvalidRequest` if `prefix_salt` is not set, and `EngineDead` or `EngineClosed` once the
        engine has ended.
        """
        if self.config.prefix_salt is None:
            raise InvalidRequest(
                "index_events requires an engine that was started with the option prefix_salt"
            )
        return self._require_frontend().index.read()

    @public
    async def statistics(self) -> dict[str, dict[str, Any]]:
        """Return each actor's statistics, by actor name, including those of its mailbox and of its
        message channels (edges)."""
        self._require_frontend()
        return await self._system.statistics()

    @public
    async def activity(self, begin: int, width: int, bins: int) -> dict[str, NDArray[np.float32]]:
        """Return the fraction of time, from 0 to 1, for which each actor and device was busy. The
        keys are the names of the actors and devices.

        Each array has `bins` elements, one for each interval of `width` ns from `begin` (ns on the
        monotonic clock). Work that has not finished is left out.
        """
        check_uint63(begin=begin, width=width, bins=bins)
        self._require_frontend()
        return await self._system.activity(begin, width, bins)

    @public
    async def trace(self, since: int = 0) -> Trace:
        """Return a trace of all actors from `since` (ns on the monotonic clock). Actors keep only
        the last few seconds."""
        check_uint63(since=since)
        self._require_frontend()
        nodes = await self._system.trace(since)
        figures = await self._system.statistics()
        tokens = figures.get("scheduler", {}).get("actor", {}).get("output_tokens", 0)
        return Trace(tuple(nodes), tokens)

    @public
    async def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer as transformers loads it, the same object each time.

        The engine need not be running. The first call takes some seconds on another thread: it
        imports transformers into this process, and torch if that is installed. Raises
        `InvalidRequest` if the engine has no tokenizer (skip_tokenizer_init), and `ModelError` if
        transformers cannot load it.
        """
        if self.config.skip_tokenizer_init:
            raise InvalidRequest("the engine has no tokenizer because skip_tokenizer_init is set")
        with only_ours():
            return await asyncio.to_thread(self._pretrained.load, self.files.hf_tokenizer_directory)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the engine's processes, by process name."""
        return self._system.pids

    @property
    def facts(self) -> dict[str, Any]:
        """Properties that the runner reported at startup, such as the dtype and the number and size
        of KV blocks. Empty before startup."""
        ready = self._system.ready
        return dataclasses.asdict(RunnerReady.find(ready)) if "runner.0" in ready else {}
