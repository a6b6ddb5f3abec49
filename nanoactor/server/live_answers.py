"""Answers in progress: generation by the engine, and sending to the client."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from nanoactor.admission.request import Request
from nanoactor.api.engine import Prompt
from nanoactor.errors import InvalidRequest
from nanoactor.requests.params import SamplingParams
from nanoactor.runtime.concurrency import run_all
from nanoactor.server.answer import Answer, AnswerWriter, CompletionWriter
from nanoactor.server.choices import Choice, Delta
from nanoactor.server.context import context_of, json_response
from nanoactor.server.errors import APIError, from_engine, invalid
from nanoactor.server.http import HttpFrontend
from nanoactor.server.metrics import Metrics, Timer
from nanoactor.server.pings import Write, pinged
from nanoactor.server.requests import Body, ChatRequest, sampling_params
from nanoactor.server.serving import Engine
from nanoactor.server.shares import Shares
from nanoactor.server.structured import Constraint, errors_name_field
from nanoactor.server.turns import Turns

_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Unless this header forbids it, some proxies buffer a response until it is complete.
    "X-Accel-Buffering": "no",
}
_DISCONNECTED = (asyncio.CancelledError, ConnectionError)
"""Exceptions raised when a client has disconnected."""
Send = Callable[[list[Delta]], Awaitable[None]]
"""Function that sends deltas of an answer to the client."""
MakeWriter = Callable[[Answer], AnswerWriter]


@dataclasses.dataclass(frozen=True)
class AnswerInputs:
    """Inputs of an answer in addition to the request's body."""

    options: Mapping[str, Any] | None = None
    """Variables for the chat template; None for a text completion."""
    constraint: Constraint | None = None
    writer: MakeWriter = CompletionWriter
    messages: Sequence[Any] = ()
    """Messages of a chat, without the data of images. Empty for a text completion."""


class LiveAnswers:
    """The answers in progress on the server. It submits the prompts of an answer to the engine,
    sends the outputs to the client as a stream or as a single response, and counts the answer in
    the metrics. Used by the handlers of completions and chats."""

    def __init__(
        self,
        llm: Engine,
        http: HttpFrontend,
        metrics: Metrics,
        *,
        max_answers: int,
        cap_max_tokens: bool,
    ) -> None:
        """Start without answers. `max_answers` is the maximum number of answers in progress per
        client. With `cap_max_tokens`, a `max_tokens` that exceeds the remaining context is lowered
        instead of rejected."""
        self._llm, self._http, self._metrics = llm, http, metrics
        self._cap_max_tokens = cap_max_tokens
        self._turns = Turns()
        self._shares = Shares(max_answers)
        self._live: dict[Answer, Sequence[Request]] = {}
        """Answers in progress, each with its engine requests."""

    async def generate(
        self,
        request: web.Request,
        body: Body,
        prompts: Sequence[Prompt],
        make_choices: Callable[[], Awaitable[Sequence[Choice]]],
        inputs: AnswerInputs,
    ) -> web.StreamResponse:
        """Generate an answer. Raises `APIError` (429) if the client would exceed its limit on
        answers in progress. The prompts are queued before `make_choices` is called. A full queue is
        therefore reported at once, and the choices are prepared while the prompts wait."""
        # Check `n` first, so that an invalid value is not reported as too many answers.
        choices_per_prompt = SamplingParams(n=1 if body.n is None else body.n).n
        with self._shares.hold(self._http.client_of(request), len(prompts) * choices_per_prompt):
            return await self._run(request, body, prompts, make_choices, inputs)

    async def _run(
        self,
        request: web.Request,
        body: Body,
        prompts: Sequence[Prompt],
        make_choices: Callable[[], Awaitable[Sequence[Choice]]],
        inputs: AnswerInputs,
    ) -> web.StreamResponse:
        requests = self._submit(body, prompts, inputs)
        answer, constraint = Answer(body, requests), inputs.constraint
        self._live[answer] = requests
        try:
            answer.choices = await make_choices()
            # No header has been sent yet, so an invalid prompt can still determine the HTTP status.
            with errors_name_field(constraint):
                for engine_request in requests:
                    await engine_request.accepted()
                if constraint is not None:  # shared by all requests, so wait for one
                    await requests[0].wait_for_output()
            return await self.respond(
                request,
                answer,
                inputs.writer(answer),
                lambda send: self._read_all(answer, requests, send),
            )
        finally:
            del self._live[answer]
            for engine_request in requests:
                engine_request.close()
            self._count_finish_reasons(answer)
            context_of(request).note += answer.log_note
            self._count_turn_tokens(answer, inputs)

    def _count_finish_reasons(self, answer: Answer) -> None:
        """Count an answer's choices by finish reason, for the metrics. Must be called while the
        exception that ended the answer, if any, is handled: it determines the reason of unfinished
        choices. A rejected request is not counted."""
        error, unfinished = sys.exception(), "error"
        if isinstance(error, _DISCONNECTED):
            unfinished = "abort"
        elif isinstance(error, Exception):
            problem = error if isinstance(error, APIError) else from_engine(error, frozenset())
            if problem.status < 500:
                return  # a refused request does not count as an answer
        for reason in answer.finish_reasons:
            self._metrics.success.labels(reason or unfinished).inc()

    def _count_turn_tokens(self, answer: Answer, inputs: AnswerInputs) -> None:
        """Record how many prompt tokens of the conversation's previous request were reused from the
        prefix cache, and how many were computed again. Does nothing if the answer has not
        finished."""
        if inputs.messages and answer.has_finished_request:
            size: int = self._llm.facts["block_size"]
            counted = self._turns.add(
                inputs.messages,
                inputs.options or {},
                answer.prompt_tokens,
                answer.cached_tokens,
                size,
            )
            for fate, tokens in zip(("reused", "computed"), counted, strict=True):
                self._metrics.turn_tokens.labels(fate).inc(tokens)

    def _submit(self, body: Body, prompts: Sequence[Prompt], inputs: AnswerInputs) -> list[Request]:
        priority, options = body.priority or 0, inputs.options
        try:
            with errors_name_field(inputs.constraint):
                params = sampling_params(
                    body, inputs.constraint, cap_max_tokens=self._cap_max_tokens
                )
                return self._llm.submit(
                    prompts, params, priority=priority, chat_template_kwargs=options
                )
        except InvalidRequest as error:
            if isinstance(body, ChatRequest) and str(error).startswith("logprobs"):
                raise invalid(f"top_{error}", "top_logprobs") from None
            raise

    async def respond(
        self,
        request: web.Request,
        answer: Answer,
        writer: AnswerWriter,
        read: Callable[[Send], Awaitable[None]],
    ) -> web.StreamResponse:
        """Send the deltas that `read` produces, as a stream or as a single response."""
        # Encode these events before the headers are sent, so that an error can set the HTTP status.
        first_events = writer.begin(
            [delta for choice in answer.choices for delta in choice.begin()]
        )
        if answer.is_streamed:
            return await self._stream(request, writer, first_events, read)

        async def collect(deltas: list[Delta]) -> None:
            writer.collect(deltas)

        await read(collect)
        return json_response(writer.response())

    async def _stream(
        self,
        request: web.Request,
        writer: AnswerWriter,
        first_events: bytes,
        read: Callable[[Send], Awaitable[None]],
    ) -> web.StreamResponse:
        """Send a stream of server-sent events. After the headers, errors are sent as events."""
        context, response = context_of(request), web.StreamResponse(headers=_STREAM_HEADERS)
        await response.prepare(request)

        try:
            async with pinged(response.write, writer.ping) as write:
                if first_events:
                    await write(first_events)
                await read(functools.partial(_send, writer, write))
            last = writer.end()
        except ConnectionError:
            raise
        except Exception as error:
            # The error event replaces the final event, by which clients recognize a complete
            # stream.
            problem = context.to_api_error(error)
            last = writer.error(problem)
            context.broken_off = True
            context.note += f" broken off: {problem.message!r:.300}"
            self._metrics.broken_off.inc()
        await response.write(last)
        await response.write_eof()
        return response

    async def _read_all(self, answer: Answer, requests: Sequence[Request], send: Send) -> None:
        """Read the outputs of all engine requests. The first error cancels the remaining ones."""
        if len(requests) == 1:
            await self._read(answer, 0, requests[0], send)
            return
        await run_all(
            [
                functools.partial(self._read, answer, index, engine_request, send)
                for index, engine_request in enumerate(requests)
            ]
        )

    async def _read(self, answer: Answer, index: int, request: Request, send: Send) -> None:
        timers: dict[int, Timer] = {}
        async for output in request:
            for completion in output.outputs:
                timer = timers.setdefault(
                    completion.index, Timer(self._metrics, request.metrics_of(completion.index))
                )
                timer.add_tokens(answer.count_visible_tokens(index, completion))
            if deltas := answer.process(index, output):
                await send(deltas)
        for number, timer in timers.items():
            timer.end(None if number else len(request.prompt_token_ids))
        self._metrics.longest_answer_tokens.observe(max(timer.count for timer in timers.values()))

    @property
    def num_live(self) -> int:
        """Number of answers in progress."""
        return len(self._live)

    def abort_all(self) -> None:
        """Abort all answers in progress. Their clients receive an error."""
        for requests in self._live.values():
            for request in requests:
                request.close()


async def _send(writer: AnswerWriter, write: Write, deltas: list[Delta]) -> None:
    """Send deltas to the client. While the client has 64 KiB of unread data, this waits, and output
    that is generated meanwhile is merged into fewer deltas. Raises `ConnectionError` if the client
    has disconnected."""
    if written := writer.push(deltas):
        await write(written)
