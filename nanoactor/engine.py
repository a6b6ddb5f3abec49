"""`AsyncLLM`: the engine as an async iterator."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import secrets
import sys
import time
import warnings
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoactor.actors.frontend import Entry, FrontendActor
from nanoactor.actors.tokenizer import no_tokens
from nanoactor.config import EngineConfig, read_model_files
from nanoactor.errors import (
    EngineClosed,
    EngineDead,
    InvalidConfig,
    InvalidRequest,
    only_ours,
)
from nanoactor.layout import engine_topology, max_prompt_bytes
from nanoactor.meeting import MeetingPoint
from nanoactor.messages import Int32, Sampling, Stopping, Submit, TextOptions
from nanoactor.outputs import RequestOutput
from nanoactor.params import SamplingParams, plain_number
from nanoactor.request import Request
from nanoactor.runtime.system import System, run_on
from nanoactor.runtime.wiring import Options
from nanoactor.tracing import Trace

log = logging.getLogger("nanoactor.engine")

Prompt = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Text, `{"prompt": text}`, `{"prompt_token_ids": [...]}`, or a list of chat messages."""


class AsyncLLM:
    """An engine in processes of its own, used from one event loop.

    async with AsyncLLM("demo") as llm:
        async for output in llm.generate("ROMEO:", SamplingParams(max_tokens=50)):
            print(output.outputs[0].text)
    """

    def __init__(self, model: str | EngineConfig, **options: Any) -> None:
        """`options` are those of `EngineConfig`. Nothing starts yet.

        Raises `InvalidConfig` for an unknown or impossible option, `ModelError` where the
        model's files are missing or wrong.
        """
        if isinstance(model, EngineConfig):
            if options:
                raise InvalidConfig("give options in the EngineConfig or by name, not both")
            self.config = model
        else:
            try:
                self.config = EngineConfig(model, **options)
            except TypeError as error:
                raise InvalidConfig(f"unknown engine option: {error}") from None
        with only_ours():
            self.files = read_model_files(self.config)
        for name in self.files.ignored:
            log.warning("generation_config.json sets %s, which is not applied", name)
        ranks = self.config.tensor_parallel_size
        self._meeting = MeetingPoint(ranks) if ranks > 1 else None
        if self._meeting is not None:  # for an engine that is never started
            weakref.finalize(self, self._meeting.close)
        salt = secrets.token_bytes(16)
        topology = engine_topology(self.config, self.files, salt, self._meeting)
        self._frontend: FrontendActor | None = None
        self._seeds = random.Random(self.config.seed)
        # Unguessable, so that no caller's own id can be one of ours.
        self._ids = f"request-{secrets.token_hex(4)}"
        self._died = asyncio.Event()
        self._started = False
        self._closed = False
        # The loop and a thread refer to the system. They must not keep an engine alive that its
        # user has dropped.
        on_death, has_work = weakref.WeakMethod(self._on_death), weakref.WeakMethod(self._has_work)
        self._system = System(
            topology,
            self._options(),
            lambda error: (found := on_death()) and found(error),
            lambda: bool((found := has_work()) and found()),
        )

    def __del__(self) -> None:
        """End the processes of an engine that was not closed, with a `ResourceWarning`."""
        system: System | None = self.__dict__.get("_system")
        if system is None or not self._started or self._closed or not system.is_ours:
            return
        if sys.is_finalizing():  # they end with this process
            return
        system.abandon()  # first: the warning may be an error
        warnings.warn(
            f"the engine of {self.config.model!r} was not closed: use `async with`, or await "
            "close()",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )

    def _options(self) -> Options:
        config = self.config
        return Options(
            transport=config.transport,
            debug=config.debug,
            debug_delay_ms=config.debug_delay_ms,
            record_dir=config.debug_record_dir,
            start_timeout=config.start_timeout,
            stop_timeout=config.stop_timeout,
            stall_timeout=config.stall_timeout,
        )

    async def start(self) -> AsyncLLM:
        """Start all processes, load the model, warm up. The running loop becomes the engine's."""
        if self._started or self._closed:
            raise EngineClosed("an engine starts once; make a new one")
        self._started = True
        begin = time.monotonic()
        try:
            with only_ours():
                await self._system.start()
        except BaseException as error:
            if self._closed and isinstance(error, Exception):
                raise EngineClosed("the engine was closed while it started") from error
            self._closed = True
            raise
        finally:
            if self._meeting is not None:
                self._meeting.close()
        frontend = self._system.actor("frontend")
        assert isinstance(frontend, FrontendActor)
        self._frontend = frontend
        if self.dead is not None:  # in the very moment in which all was ready
            await self.close()
            raise self.dead
        log.info("engine ready in %.1f s", time.monotonic() - begin)
        return self

    async def __aenter__(self) -> AsyncLLM:
        """Start."""
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()

    async def close(self) -> None:
        """End all processes; requests that are not over raise `EngineClosed`.

        On another loop than the engine's it does the same, if the engine's still runs; if that has
        ended, nobody is left to hear of the requests, and the processes end.
        """
        self._closed = True
        loop = self._system.running_elsewhere
        if loop is not None and await run_on(loop, self.close):
            return
        if self._frontend is not None and self._system.is_here:
            self._frontend.fail_all(EngineClosed("the engine was closed"))
        await self._system.close()
        if self._meeting is not None:
            self._meeting.close()

    def _on_death(self, error: BaseException) -> None:
        self._died.set()
        if self._frontend is not None:
            self._frontend.fail_all(_dead(error))

    @property
    def dead(self) -> EngineDead | None:
        """Why the engine serves no more, if it has died."""
        return None if self._system.dead is None else _dead(self._system.dead)

    async def death(self) -> EngineDead:
        """Wait until the engine has died, and return why; being closed is no death."""
        await self._died.wait()
        assert self.dead is not None
        return self.dead

    def _has_work(self) -> bool:
        """Whether the watchdog has something to watch."""
        return self._frontend is not None and self._frontend.has_work

    def _running(self) -> FrontendActor:
        """The frontend; raises where the engine cannot serve from here."""
        if self._closed or self._frontend is None:
            raise EngineClosed(
                "the engine was closed" if self._closed else "start the engine first"
            )
        with only_ours():
            self._system.check_usable()
        if self.dead is not None:
            raise self.dead
        return self._frontend

    # -- requests -------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs as they come, in the form that `sampling_params.output_kind` asks for.

        What can be checked here raises `InvalidRequest` at once, the rest (a prompt that is
        too long, say) when the iterator is first awaited; so do `EngineOverloaded`,
        `EngineDead` and `EngineClosed`. Closing or cancelling the iterator aborts the request.
        A lower `priority` goes first.
        """
        make = self._request(prompt, sampling_params, request_id, priority, chat_template_kwargs)
        return self._stream(make, request_id)

    def submit(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Request]:
        """Queue several prompts with the same parameters now, all or none of them.

        Raises `InvalidRequest` and `EngineOverloaded` at once. With a seed each has the same.
        """
        frontend = self._running()
        makes = [
            self._request(prompt, sampling_params, None, priority, chat_template_kwargs)
            for prompt in prompts
        ]
        return [Request(frontend, entry, self) for entry in frontend.submit_all(makes)]

    def _request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> Callable[[int], Entry]:
        """Check a request; what makes it, once it has a number."""
        params = sampling_params or SamplingParams()
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"sampling_params must be SamplingParams, got {params!r}")
        priority = plain_number(priority)
        whole = isinstance(priority, int) and not isinstance(priority, bool)
        if not whole or not -(2**31) <= priority < 2**31:
            raise InvalidRequest(f"priority must be a whole number of 32 bits, got {priority!r}")
        text, chat, token_ids = self._read_prompt(prompt)
        options = self._check_options(chat_template_kwargs)
        if chat_template_kwargs and chat is None:
            raise InvalidRequest("chat_template_kwargs go with a list of messages")
        self._check_params(params)
        stopping, text_options = self._stopping(params), _text_options(params)
        sampling = self._sampling(params)

        def make(uid: int) -> Entry:
            submit = Submit(
                uid, 0, text, chat, options, token_ids, priority, sampling, stopping, text_options
            )
            return Entry(request_id or f"{self._ids}-{uid}", submit, params.output_kind)

        return make

    async def _stream(
        self, make: Callable[[int], Entry], request_id: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        frontend = self._running()
        if request_id is not None and frontend.entry_of(request_id) is not None:
            raise InvalidRequest(f"request id {request_id!r} is in use")
        request = Request(frontend, frontend.submit(make), self)
        try:
            async for output in request:
                yield output
        finally:
            request.close()

    async def abort(self, request_id: str) -> None:
        """End a request and wait until the engine has let go of it; unknown ids are ignored.

        Its iterator yields a last output with finish_reason "abort".
        """
        frontend = self._running()
        entry = frontend.entry_of(request_id)
        if entry is None:
            return
        frontend.abort(entry.submit.uid)
        await entry.ended.wait()

    async def room(self) -> None:
        """Wait until a waiting request makes room at the door, after `EngineOverloaded`."""
        await self._running().room()

    async def statistics(self) -> dict[str, dict[str, Any]]:
        """Figures of every actor, its mailbox and its edges."""
        self._running()
        return await self._system.statistics()

    async def activity(self, begin: int, width: int, bins: int) -> dict[str, NDArray[np.float32]]:
        """How busy every actor and device was: by lane, its share of each of `bins` stretches of
        `width` ns from `begin` on, on the monotonic clock. What still goes on is left out."""
        self._running()
        return await self._system.activity(begin, width, bins)

    async def trace(self, since: int = 0) -> Trace:
        """What every actor did after a moment of the monotonic clock (ns), as far back as they
        remember, some seconds: a timeline to save, and its sums."""
        self._running()
        nodes = await self._system.trace(since)
        figures = await self._system.statistics()
        tokens = figures.get("scheduler", {}).get("actor", {}).get("output_tokens", 0)
        return Trace(tuple(nodes), tokens)

    @property
    def pids(self) -> dict[str, int]:
        """The engine's processes."""
        return self._system.pids

    @property
    def facts(self) -> dict[str, Any]:
        """What the runner found out: blocks of KV cache, their size, the data type."""
        return dict(self._system.facts.get("runner.0", {}))

    # -- checking and translating ---------------------------------------------------------

    def _read_prompt(self, prompt: Any) -> tuple[str | None, str | None, Int32]:
        """(text, messages, token ids): exactly one of them is given."""
        if isinstance(prompt, Mapping):
            keys = set(prompt)
            if keys == {"prompt_token_ids"}:
                return None, None, self._check_ids(_token_ids(prompt["prompt_token_ids"]))
            if keys != {"prompt"}:
                raise InvalidRequest(
                    "a prompt's keys must be 'prompt' or 'prompt_token_ids', got "
                    f"{sorted(map(str, keys))}"
                )
            prompt = prompt["prompt"]
        if self.config.skip_tokenizer_init:
            raise InvalidRequest(
                "the engine has no tokenizer (skip_tokenizer_init): give prompt_token_ids"
            )
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequest("the prompt is empty: it must have at least one token")
            return self._check_text(prompt), None, no_tokens()
        if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
            return None, self._check_chat(list(prompt)), no_tokens()
        raise InvalidRequest(
            "a prompt must be text, {'prompt_token_ids': [...]} or a list of messages, "
            f"got {type(prompt).__name__}"
        )

    def _check_ids(self, ids: Int32) -> Int32:
        limit = self.files.max_model_len
        if len(ids) >= limit:
            raise InvalidRequest(
                f"the prompt has {len(ids)} tokens, but max_model_len is {limit}: at most "
                f"{limit - 1} leave room for one token of output"
            )
        return ids

    def _check_text(self, text: str) -> str:
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the prompt is not valid Unicode: {error}") from None
        limit = max_prompt_bytes(self.files)
        if size > limit:
            raise InvalidRequest(
                f"the prompt has {size} bytes; with max_model_len {self.files.max_model_len} at "
                f"most {limit} are accepted"
            )
        return text

    def _check_chat(self, messages: list[Any]) -> str:
        if not messages:
            raise InvalidRequest("the list of messages is empty")
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise InvalidRequest(f"a message must be a dict with a 'role', got {message!r}")
        return self._as_json("messages", [dict(message) for message in messages])

    def _check_options(self, options: Any) -> str:
        if options is not None and not isinstance(options, Mapping):
            raise InvalidRequest(f"chat_template_kwargs must be a dict, got {options!r}")
        return self._as_json("chat_template_kwargs", dict(options or {}))

    def _as_json(self, name: str, value: Any) -> str:
        try:
            text = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"{name} must be plain values, as in JSON: {error}") from None
        return self._check_text(text)

    def _check_params(self, params: SamplingParams) -> None:
        vocabulary = self.files.config.vocab_size
        for token in params.stop_token_ids or ():
            if token >= vocabulary:
                raise InvalidRequest(
                    f"stop_token_ids: {token} is outside the vocabulary of {vocabulary} ids"
                )
        if params.stop and self.config.skip_tokenizer_init:
            raise InvalidRequest(
                "stop strings need a tokenizer, and the engine has none (skip_tokenizer_init)"
            )

    def _sampling(self, params: SamplingParams) -> Sampling:
        defaults = self.files.defaults

        def pick(value: Any, default: Any) -> Any:
            return default if value is None else value

        return Sampling(
            float(pick(params.temperature, defaults.temperature)),
            max(0, pick(params.top_k, defaults.top_k)),
            float(pick(params.top_p, defaults.top_p)),
            float(pick(params.min_p, defaults.min_p)),
            self._seeds.getrandbits(64) if params.seed is None else params.seed,
        )

    def _stopping(self, params: SamplingParams) -> Stopping:
        eos = () if params.ignore_eos else self.files.eos_token_ids
        # 0 stands for "as many as fit": the tokenizer, which knows the prompt's length, fills in.
        return Stopping(
            params.max_tokens or 0, params.min_tokens, eos, tuple(params.stop_token_ids or ())
        )


def _text_options(params: SamplingParams) -> TextOptions:
    return TextOptions(
        tuple(params.stop or ()),
        params.include_stop_str_in_output,
        params.skip_special_tokens,
        params.min_tokens,
    )


def _token_ids(values: Any) -> Int32:
    try:
        ids = np.asarray(values)
    except ValueError:
        ids = np.asarray(["ragged"])
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidRequest("prompt_token_ids must be a flat list of whole numbers")
    if not ids.size:
        raise InvalidRequest("the prompt is empty: it must have at least one token")
    with contextlib.suppress(OverflowError):
        if ids.min() >= 0 and ids.max() < 2**31:
            return ids.astype(np.int32)
    raise InvalidRequest(f"token ids must be from 0 to 2147483647, got {ids.min()} to {ids.max()}")


def _dead(error: BaseException) -> EngineDead:
    failure = EngineDead(f"the engine has died: {error}")
    failure.__cause__ = error
    return failure
