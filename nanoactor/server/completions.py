"""Handlers of `/v1/completions` and `/v1/chat/completions`. Chats of the Responses API and the
Messages API are answered here too."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from nanoactor.admission.request import Request
from nanoactor.api.engine import Prompt
from nanoactor.errors import InvalidRequest
from nanoactor.requests.grammar_spec import CallForm, Thoughts
from nanoactor.requests.params import SamplingParams
from nanoactor.runtime.concurrency import run_all
from nanoactor.server.answer import Answer, AnswerWriter, CompletionWriter, EchoedPrompt
from nanoactor.server.call_forms import SPECIAL_TOKEN_FORMS, call_finder, call_form
from nanoactor.server.chat_messages import (
    conversation,
    load_pictures,
    text_of,
    without_pictures,
)
from nanoactor.server.choices import ChatChoice, Choice, Delta, TextChoice
from nanoactor.server.context import context_of, json_response
from nanoactor.server.errors import (
    APIError,
    context_length_exceeded,
    from_engine,
    invalid,
)
from nanoactor.server.http import HttpFrontend
from nanoactor.server.logprobs import ChatLogprobs, TextLogprobs
from nanoactor.server.media import MediaLoader
from nanoactor.server.metrics import Metrics, Timer
from nanoactor.server.pings import Write, pinged
from nanoactor.server.reasoning import OutputStart, ReasoningParser, ends_in_thoughts
from nanoactor.server.requests import (
    Body,
    ChatRequest,
    CompletionRequest,
    num_logprobs,
    request_prompts,
    sampling_params,
    template_options,
)
from nanoactor.server.serving import Engine
from nanoactor.server.shares import Shares
from nanoactor.server.structured import Constraint, errors_name_field
from nanoactor.server.text_service import TextService
from nanoactor.server.tool_calls import CallFinder, CallsAfterReasoning
from nanoactor.server.tool_choice import named_tool
from nanoactor.server.turns import Turns
from nanoactor.text.template import TemplateFacts

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


class Completions:
    """Handlers of `/v1/completions` and `/v1/chat/completions`. The routes of other APIs use an
    instance to answer their chats."""

    def __init__(
        self,
        llm: Engine,
        text_service: TextService | None,
        http: HttpFrontend,
        metrics: Metrics,
        media: MediaLoader,
        *,
        separate_reasoning: bool,
        max_answers: int,
        cap_max_tokens: bool,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        """Store the services and options.

        `text_service` is None if the engine has no tokenizer. `separate_reasoning` applies to
        requests that do not set it. `max_answers` is the maximum number of answers in progress per
        client. With `cap_max_tokens`, a `max_tokens` that exceeds the remaining context is lowered
        instead of rejected.
        """
        self._llm = llm
        self._text_service = text_service
        self._http = http
        self._metrics = metrics
        self._media = media
        self._separate_reasoning = separate_reasoning
        self._cap_max_tokens = cap_max_tokens
        self._tool_call_parser, self._reasoning_parser = tool_call_parser, reasoning_parser
        self._turns = Turns()
        self._shares = Shares(max_answers)
        self._live: dict[Answer, Sequence[Request]] = {}
        """Answers in progress, each with its engine requests."""

    # -- handlers -------------------------------------------------------------------------

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /v1/completions`: continue one or more prompts."""
        body = await self._http.read(request, CompletionRequest)
        prompts = request_prompts(body, self._llm.files.max_model_len)
        is_muted = bool(body.echo) and body.max_tokens == 0
        wants_logprobs, constraint = num_logprobs(body) is not None, body.constraint
        if is_muted and not wants_logprobs and body.prompt_logprobs is None:
            return await self._answer_echo_only(request, body, prompts)

        async def choices() -> Sequence[Choice]:
            echoes = await self._echoes(prompts) if body.echo else [""] * len(prompts)
            logprob_factories = await self._text_logprobs(body, prompts)
            choice_range = range(body.n or 1)
            pairs = [
                (text, factory)
                for text, factory in zip(echoes, logprob_factories, strict=True)
                for _ in choice_range
            ]
            return [
                TextChoice(index, echo, make_logprobs and make_logprobs(), is_muted)
                for index, (echo, make_logprobs) in enumerate(pairs)
            ]

        if is_muted:
            body, constraint = _with_one_token(body), None
        inputs = _AnswerInputs(constraint=constraint)
        return await self._generate(request, body, prompts, choices, inputs)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /v1/chat/completions`: answer a conversation."""
        body = await self._http.read(request, ChatRequest)
        return await self.answer_chat(request, body)

    async def answer_chat(
        self, request: web.Request, body: ChatRequest, make_writer: MakeWriter = CompletionWriter
    ) -> web.StreamResponse:
        """Answer a chat request of any API. `make_writer` creates the writer that encodes the
        answer in the API's format."""
        template = self._text_service.template if self._text_service is not None else None
        variables = template.variables if template is not None else ()
        options = template_options(body, variables, self._http.template_defaults)
        if template is not None:
            self._http.decoder.drop_hidden_tools(body, options, template.renders_tools)
            template.check(options)
        separate = body.separate_reasoning
        if separate is None:
            separate = self._separate_reasoning and self._reasoning_parser != "none"
        if body.calls_tools and body.skip_special_tokens is None:
            body.skip_special_tokens = self._call_form not in SPECIAL_TOKEN_FORMS
        prompts = [conversation(body.raw["messages"])]
        messages = without_pictures(prompts[0])
        constraint, thoughts = body.constraint, None
        if constraint is not None:  # it constrains only the text after the reasoning
            thoughts = await self._thoughts(body, messages, options)
            constraint = constraint.for_model(thoughts, self._call_form)

        async def choices() -> Sequence[Choice]:
            output_start: OutputStart = thoughts or await self._thoughts(body, messages, options)
            # An output that continues a message's content does not start with reasoning.
            output_start = (
                "content"
                if body.continue_final_message and output_start == "none"
                else output_start
            )
            return [
                self._chat_choice(body, index, output_start, separate)
                for index in range(body.n or 1)
            ]

        await load_pictures(prompts[0], self._media)
        inputs = _AnswerInputs(options, constraint, make_writer, tuple(messages))
        return await self._generate(request, body, prompts, choices, inputs)

    async def _text_logprobs(
        self, body: CompletionRequest, prompts: Sequence[Prompt]
    ) -> list[Callable[[], TextLogprobs] | None]:
        """Return, for each prompt, a function that creates a `TextLogprobs`, or None if
        log-probabilities are not requested."""
        num_top, as_ids = num_logprobs(body), bool(body.return_tokens_as_token_ids)
        if num_top is None:
            return [None] * len(prompts)
        if not body.echo or self._text_service is None:
            return [functools.partial(TextLogprobs, num_top, as_ids)] * len(prompts)
        token_ids = [p["prompt_token_ids"] if isinstance(p, Mapping) else p for p in prompts]
        all_spans = await self._text_service.spans(token_ids)
        return [functools.partial(TextLogprobs, num_top, as_ids, spans) for spans in all_spans]

    def _chat_choice(
        self, body: ChatRequest, index: int, output_start: OutputStart, separate: bool
    ) -> ChatChoice:
        """Create a choice of a chat. With `separate=False`, reasoning stays in the content."""
        as_ids = bool(body.return_tokens_as_token_ids)
        tools: CallFinder | None = None
        if body.calls_tools:
            tools = call_finder(self._call_form, body.tools or ())
            tools = tools if separate else CallsAfterReasoning(output_start, tools)
        return ChatChoice(
            index,
            ReasoningParser(output_start) if separate else None,
            tools,
            body.parallel_tool_calls is False,
            ChatLogprobs(body.top_logprobs or 0, as_ids) if body.logprobs else None,
            named_call=named_tool(body.tool_choice) is not None,
        )

    async def _answer_echo_only(
        self, request: web.Request, body: CompletionRequest, prompts: Sequence[Prompt]
    ) -> web.StreamResponse:
        """Answer with the prompts alone, without generating anything."""
        sampling_params(_with_one_token(body))
        echoed = [EchoedPrompt(await self._token_ids(prompt)) for prompt in prompts]
        answer = Answer(body, echoed)
        answer.choices = [
            TextChoice(index * (body.n or 1) + answer, echo)
            for index, echo in enumerate(await self._echoes(prompts))
            for answer in range(body.n or 1)
        ]
        context_of(request).note += answer.log_note

        async def finish(send: Send) -> None:
            for choice in answer.choices:
                await send(choice.finish("length"))

        return await self._respond(request, answer, CompletionWriter(answer), finish)

    async def _token_ids(self, prompt: Prompt) -> Sequence[int]:
        """Return the token ids of a prompt. Raises `APIError` if the prompt leaves no room for
        output."""
        if isinstance(prompt, Mapping):
            ids: Sequence[int] = prompt["prompt_token_ids"]
        elif self._text_service is None or not isinstance(prompt, str):
            raise invalid(
                "a text prompt requires a tokenizer, but the engine has none "
                "(skip_tokenizer_init); send token ids instead",
                "prompt",
            )
        else:
            ids = await self._text_service.encode(prompt, add_special_tokens=True)
        if len(ids) >= self._llm.files.max_model_len:
            raise context_length_exceeded(len(ids), self._llm.files.max_model_len)
        return ids

    async def _echoes(self, prompts: Sequence[Prompt]) -> list[str]:
        """Return the text of each prompt, decoding those given as token ids."""
        ids = [prompt["prompt_token_ids"] for prompt in prompts if isinstance(prompt, Mapping)]
        if ids and self._text_service is None:
            raise invalid(
                "echo requires a tokenizer, but the engine has none (skip_tokenizer_init)", "echo"
            )
        texts = iter(await self._text_service.decode_all(ids) if self._text_service and ids else ())
        return [prompt if isinstance(prompt, str) else next(texts) for prompt in prompts]

    async def _thoughts(
        self, body: ChatRequest, messages: list[Any], options: Mapping[str, Any]
    ) -> Thoughts:
        """Return whether the output contains reasoning: "none", "optional" (the model may start it)
        or "open". "open" means that the output starts inside the reasoning, usually because the
        prompt ends with `<think>`."""
        if body.continue_final_message:
            return "open" if ends_in_thoughts(text_of(messages[-1])) else "none"
        if self._text_service is None or body.add_generation_prompt is False:
            return "none"
        thoughts = await self._text_service.thoughts(options, messages)
        # With this parser, outputs start with reasoning although no tag precedes it, unless the
        # prompt has closed the reasoning.
        return (
            "open" if self._reasoning_parser == "deepseek_r1" and thoughts != "none" else thoughts
        )

    @property
    def _call_form(self) -> CallForm:
        template = (
            self._text_service.template if self._text_service is not None else TemplateFacts()
        )
        return call_form(self._tool_call_parser, template.call_form)

    # -- generation -----------------------------------------------------------------------

    async def _generate(
        self,
        request: web.Request,
        body: Body,
        prompts: Sequence[Prompt],
        make_choices: Callable[[], Awaitable[Sequence[Choice]]],
        inputs: _AnswerInputs,
    ) -> web.StreamResponse:
        """Generate an answer. Raises `APIError` (429) if the client would exceed its limit on
        answers in progress. The prompts are queued before `make_choices` is called. A full queue is
        therefore reported at once, and the choices are prepared while the prompts wait."""
        # Check `n` first, so that an invalid value is not reported as too many answers.
        choices_per_prompt = SamplingParams(n=1 if body.n is None else body.n).n
        with self._shares.hold(self._http.client_of(request), len(prompts) * choices_per_prompt):
            return await self._run_answer(request, body, prompts, make_choices, inputs)

    async def _run_answer(
        self,
        request: web.Request,
        body: Body,
        prompts: Sequence[Prompt],
        make_choices: Callable[[], Awaitable[Sequence[Choice]]],
        inputs: _AnswerInputs,
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
            return await self._respond(
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

    def _count_turn_tokens(self, answer: Answer, inputs: _AnswerInputs) -> None:
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

    def _submit(
        self, body: Body, prompts: Sequence[Prompt], inputs: _AnswerInputs
    ) -> list[Request]:
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

    async def _respond(
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

    # -- shutdown -------------------------------------------------------------------------

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


def _with_one_token(body: CompletionRequest) -> CompletionRequest:
    """Return a copy of the body with `max_tokens=1`, because the engine cannot generate 0 tokens.
    The caller drops the output."""
    return msgspec.structs.replace(body, max_tokens=1, min_tokens=None)


@dataclasses.dataclass(frozen=True)
class _AnswerInputs:
    """Inputs of an answer in addition to the request's body."""

    options: Mapping[str, Any] | None = None
    """Variables for the chat template; None for a text completion."""
    constraint: Constraint | None = None
    writer: MakeWriter = CompletionWriter
    messages: Sequence[Any] = ()
    """Messages of a chat, without the data of images. Empty for a text completion."""
