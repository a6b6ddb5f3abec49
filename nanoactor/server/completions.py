"""Handlers for `/v1/completions` and for the chat requests of three APIs."""

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
from nanoactor.server.answer import Answer, AnswerWriter, CompletionWriter, Echoed
from nanoactor.server.call_forms import WITH_SPECIAL_TOKENS, call_finder, call_form
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
from nanoactor.server.reasoning import Begin, ReasoningParser, ends_in_thoughts
from nanoactor.server.requests import (
    Body,
    ChatRequest,
    CompletionRequest,
    prompts,
    sampling_params,
    template_options,
    wanted_logprobs,
)
from nanoactor.server.serving import Engine
from nanoactor.server.shares import Shares
from nanoactor.server.structured import Constraint, said_of
from nanoactor.server.text_service import TextService
from nanoactor.server.tool_calls import CallFinder, CallsBehindThoughts
from nanoactor.server.tool_choice import named_tool
from nanoactor.server.turns import Turns
from nanoactor.text.template import TemplateFacts

_STREAM = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Some proxies buffer responses until they are complete unless this header forbids it.
    "X-Accel-Buffering": "no",
}
_GONE = (asyncio.CancelledError, ConnectionError)
"""Exceptions raised if a client has disconnected."""
Send = Callable[[list[Delta]], Awaitable[None]]
"""Sends deltas of an answer to the client."""
MakeWriter = Callable[[Answer], AnswerWriter]


class Completions:
    """Handlers of the two completion routes, also used for the chats of other APIs."""

    def __init__(
        self,
        llm: Engine,
        texts: TextService | None,
        http: HttpFrontend,
        metrics: Metrics,
        media: MediaLoader,
        *,
        separate_reasoning: bool,
        most_answers: int,
        caps: bool,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        """`texts` is None if the engine has no tokenizer. `separate_reasoning` is the default for
        requests that do not set it. `most_answers` is the maximum number of answers in progress
        per client. If `caps`, a `max_tokens` that exceeds the remaining context is lowered instead
        of refused."""
        self._llm = llm
        self._texts = texts
        self._http = http
        self._metrics = metrics
        self._media = media
        self._separate_reasoning = separate_reasoning
        self._caps = caps
        self._tool_call_parser, self._reasoning_parser = tool_call_parser, reasoning_parser
        self._turns = Turns()
        self._shares = Shares(most_answers)
        self._live: dict[Answer, Sequence[Request]] = {}
        """Answers in progress, each with its engine requests."""

    # -- handlers -------------------------------------------------------------------------

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /v1/completions`."""
        body = await self._http.read(request, CompletionRequest)
        wanted = prompts(body, self._llm.files.max_model_len)
        mute = bool(body.echo) and body.max_tokens == 0
        scored, constraint = wanted_logprobs(body) is not None, body.constraint
        if mute and not scored and body.prompt_logprobs is None:
            return await self._echo_alone(request, body, wanted)

        async def choices() -> Sequence[Choice]:
            echoes = await self._echoes(wanted) if body.echo else [""] * len(wanted)
            made = await self._text_logprobs(body, wanted)
            each = range(body.n or 1)
            pairs = [(e, m) for e, m in zip(echoes, made, strict=True) for _ in each]
            return [
                TextChoice(index, echo, make and make(), mute)
                for index, (echo, make) in enumerate(pairs)
            ]

        if mute:
            body, constraint = _at_least_one(body), None
        how = _How(constraint=constraint)
        return await self._generate(request, body, wanted, choices, how)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /v1/chat/completions`."""
        body = await self._http.read(request, ChatRequest)
        return await self.answer_chat(request, body)

    async def answer_chat(
        self, request: web.Request, body: ChatRequest, make_writer: MakeWriter = CompletionWriter
    ) -> web.StreamResponse:
        """Answer a chat from any API. `make_writer` creates the writer for the API's format."""
        template = self._texts.template if self._texts is not None else None
        variables = template.variables if template is not None else ()
        options = template_options(body, variables, self._http.template_defaults)
        if template is not None:
            self._http.decoder.check_tools(body, options, template.shows_tools)
            template.check(options)
        separate = body.separate_reasoning
        if separate is None:
            separate = self._separate_reasoning and self._reasoning_parser != "none"
        if body.calls_tools and body.skip_special_tokens is None:
            body.skip_special_tokens = self._call_form not in WITH_SPECIAL_TOKENS
        wanted = [conversation(body.given["messages"])]
        bare = without_pictures(wanted[0])
        constraint, thoughts = body.constraint, None
        if constraint is not None:  # it applies only after the reasoning
            thoughts = await self._thoughts(body, bare, options)
            constraint = constraint.for_model(thoughts, self._call_form)

        async def choices() -> Sequence[Choice]:
            begins: Begin = thoughts or await self._thoughts(body, bare, options)
            # If the output continues a message's content, it does not start with reasoning.
            begins = "said" if body.continue_final_message and begins == "none" else begins
            return [
                self._chat_choice(body, index, begins, separate) for index in range(body.n or 1)
            ]

        await load_pictures(wanted[0], self._media)
        how = _How(options, constraint, make_writer, tuple(bare))
        return await self._generate(request, body, wanted, choices, how)

    async def _text_logprobs(
        self, body: CompletionRequest, wanted: Sequence[Prompt]
    ) -> list[Callable[[], TextLogprobs] | None]:
        """Return a `TextLogprobs` factory for each prompt, or None for each if not requested."""
        most, as_ids = wanted_logprobs(body), bool(body.return_tokens_as_token_ids)
        if most is None:
            return [None] * len(wanted)
        if not body.echo or self._texts is None:
            return [functools.partial(TextLogprobs, most, as_ids)] * len(wanted)
        given = [p["prompt_token_ids"] if isinstance(p, Mapping) else p for p in wanted]
        found = await self._texts.spans(given)
        return [functools.partial(TextLogprobs, most, as_ids, spans) for spans in found]

    def _chat_choice(
        self, body: ChatRequest, index: int, begins: Begin, separate: bool
    ) -> ChatChoice:
        """Create a choice. Unless `separate`, reasoning stays in the content."""
        as_ids = bool(body.return_tokens_as_token_ids)
        tools: CallFinder | None = None
        if body.calls_tools:
            tools = call_finder(self._call_form, body.tools or ())
            tools = tools if separate else CallsBehindThoughts(begins, tools)
        return ChatChoice(
            index,
            ReasoningParser(begins) if separate else None,
            tools,
            body.parallel_tool_calls is False,
            ChatLogprobs(body.top_logprobs or 0, as_ids) if body.logprobs else None,
            named_call=named_tool(body.tool_choice) is not None,
        )

    async def _echo_alone(
        self, request: web.Request, body: CompletionRequest, wanted: Sequence[Prompt]
    ) -> web.StreamResponse:
        """Answer with only the prompts, without using the engine."""
        sampling_params(_at_least_one(body))
        echoed = [Echoed(await self._token_ids(prompt)) for prompt in wanted]
        answer = Answer(body, echoed)
        answer.choices = [
            TextChoice(index * (body.n or 1) + answer, echo)
            for index, echo in enumerate(await self._echoes(wanted))
            for answer in range(body.n or 1)
        ]
        context_of(request).note += answer.note

        async def finish(send: Send) -> None:
            for choice in answer.choices:
                await send(choice.finish("length"))

        return await self._answer(request, answer, CompletionWriter(answer), finish)

    async def _token_ids(self, prompt: Prompt) -> Sequence[int]:
        """Return the token ids of a prompt. Raises `APIError` if they leave no room for output."""
        if isinstance(prompt, Mapping):
            ids: Sequence[int] = prompt["prompt_token_ids"]
        elif self._texts is None or not isinstance(prompt, str):
            raise invalid("a text prompt requires a tokenizer, but the engine has none", "prompt")
        else:
            ids = await self._texts.encode(prompt, special=True)
        if len(ids) >= self._llm.files.max_model_len:
            raise context_length_exceeded(len(ids), self._llm.files.max_model_len)
        return ids

    async def _echoes(self, wanted: Sequence[Prompt]) -> list[str]:
        """Return the text of each prompt."""
        ids = [prompt["prompt_token_ids"] for prompt in wanted if isinstance(prompt, Mapping)]
        if ids and self._texts is None:
            raise invalid("echo requires a tokenizer, but the engine has none", "echo")
        texts = iter(await self._texts.decode_all(ids) if self._texts and ids else ())
        return [prompt if isinstance(prompt, str) else next(texts) for prompt in wanted]

    async def _thoughts(
        self, body: ChatRequest, messages: list[Any], options: Mapping[str, Any]
    ) -> Thoughts:
        """Return the reasoning mode of the output: "open" if the prompt ends with an open
        `<think>`, which the output will not repeat."""
        if body.continue_final_message:
            return "open" if ends_in_thoughts(text_of(messages[-1])) else "none"
        if self._texts is None or body.add_generation_prompt is False:
            return "none"
        found = await self._texts.thoughts(options, messages)
        # In this format, outputs start with reasoning without a tag, unless the prompt closed it.
        return "open" if self._reasoning_parser == "deepseek_r1" and found != "none" else found

    @property
    def _call_form(self) -> CallForm:
        template = self._texts.template if self._texts is not None else TemplateFacts()
        return call_form(self._tool_call_parser, template.call_form)

    # -- generation -----------------------------------------------------------------------

    async def _generate(
        self,
        request: web.Request,
        body: Body,
        wanted: Sequence[Prompt],
        make_choices: Callable[[], Awaitable[Sequence[Choice]]],
        how: _How,
    ) -> web.StreamResponse:
        """Generate an answer within the client's limit. The prompts are queued first, so that a
        full queue is reported at once and the choices are prepared while the prompts wait."""
        # Validate `n` first, so that an invalid value is not reported as too many answers.
        each = SamplingParams(n=1 if body.n is None else body.n).n
        with self._shares.hold(self._http.client_of(request), len(wanted) * each):
            return await self._answered(request, body, wanted, make_choices, how)

    async def _answered(
        self,
        request: web.Request,
        body: Body,
        wanted: Sequence[Prompt],
        make_choices: Callable[[], Awaitable[Sequence[Choice]]],
        how: _How,
    ) -> web.StreamResponse:
        requests = self._submit(body, wanted, how)
        answer, constraint = Answer(body, requests), how.constraint
        self._live[answer] = requests
        try:
            answer.choices = await make_choices()
            # No header has been sent yet, so an error in a prompt can still set the HTTP status.
            with said_of(constraint):
                for each in requests:
                    await each.accepted()
                if constraint is not None:  # shared by all requests, so wait for one
                    await requests[0].begun()
            return await self._answer(
                request,
                answer,
                how.writer(answer),
                lambda send: self._read_all(answer, requests, send),
            )
        finally:
            del self._live[answer]
            for each in requests:
                each.close()
            self._note_ends(answer)
            context_of(request).note += answer.note
            self._note_turn(answer, how)

    def _note_ends(self, answer: Answer) -> None:
        """Count the answer's choices by finish reason."""
        error, gone = sys.exception(), "error"
        if isinstance(error, _GONE):
            gone = "abort"
        elif isinstance(error, Exception):
            problem = error if isinstance(error, APIError) else from_engine(error, frozenset())
            if problem.status < 500:
                return  # a refused request does not count as an answer
        for reason in answer.reasons:
            self._metrics.success.labels(reason or gone).inc()

    def _note_turn(self, answer: Answer, how: _How) -> None:
        """Record how many prompt tokens of the previous turn were reused and how many were
        recomputed, if the answer is complete."""
        if how.messages and answer.is_complete:
            size: int = self._llm.facts["block_size"]
            counted = self._turns.add(
                how.messages, how.options or {}, answer.prompt_tokens, answer.cached, size
            )
            for fate, tokens in zip(("reused", "computed"), counted, strict=True):
                self._metrics.turn_tokens.labels(fate).inc(tokens)

    def _submit(self, body: Body, wanted: Sequence[Prompt], how: _How) -> list[Request]:
        priority, options = body.priority or 0, how.options
        try:
            with said_of(how.constraint):
                params = sampling_params(body, how.constraint, caps=self._caps)
                return self._llm.submit(
                    wanted, params, priority=priority, chat_template_kwargs=options
                )
        except InvalidRequest as error:
            if isinstance(body, ChatRequest) and str(error).startswith("logprobs"):
                raise invalid(f"top_{error}", "top_logprobs") from None
            raise

    async def _answer(
        self,
        request: web.Request,
        answer: Answer,
        writer: AnswerWriter,
        read: Callable[[Send], Awaitable[None]],
    ) -> web.StreamResponse:
        """Send the deltas that `read` produces, either as a stream or as one response."""
        # Encoded before any header is sent, so that an error can still set the HTTP status.
        begin = writer.begin([delta for choice in answer.choices for delta in choice.begin()])
        if answer.streamed:
            return await self._stream(request, writer, begin, read)

        async def keep(deltas: list[Delta]) -> None:
            writer.take(deltas)

        await read(keep)
        return json_response(writer.whole())

    async def _stream(
        self,
        request: web.Request,
        writer: AnswerWriter,
        begin: bytes,
        read: Callable[[Send], Awaitable[None]],
    ) -> web.StreamResponse:
        """Send server-sent events. Once the headers are sent, errors are reported as events."""
        context, response = context_of(request), web.StreamResponse(headers=_STREAM)
        await response.prepare(request)

        try:
            async with pinged(response.write, writer.ping) as write:
                if begin:
                    await write(begin)
                await read(functools.partial(_send, writer, write))
            last = writer.end()
        except ConnectionError:
            raise
        except Exception as error:
            # The error event replaces the mark by which clients recognize the end.
            problem = context.explain(error)
            last = writer.error(problem)
            context.broken_off = True
            context.note += f" broken off: {problem.message!r:.300}"
            self._metrics.broken_off.inc()
        await response.write(last)
        await response.write_eof()
        return response

    async def _read_all(self, answer: Answer, requests: Sequence[Request], send: Send) -> None:
        """Read the outputs of all requests. The first error cancels the others."""
        if len(requests) == 1:
            await self._read(answer, 0, requests[0], send)
            return
        await run_all(
            [
                functools.partial(self._read, answer, index, each, send)
                for index, each in enumerate(requests)
            ]
        )

    async def _read(self, answer: Answer, index: int, request: Request, send: Send) -> None:
        timers: dict[int, Timer] = {}
        async for output in request:
            for completion in output.outputs:
                timer = timers.setdefault(
                    completion.index, Timer(self._metrics, request.metrics_of(completion.index))
                )
                timer.tokens(answer.said(index, completion))
            if deltas := answer.take(index, output):
                await send(deltas)
        for number, timer in timers.items():
            timer.end(None if number else len(request.prompt_token_ids))
        self._metrics.most_tokens.observe(max(timer.count for timer in timers.values()))

    # -- shutdown -------------------------------------------------------------------------

    @property
    def live(self) -> int:
        """Return the number of answers in progress."""
        return len(self._live)

    def break_off(self) -> None:
        """Abort all answers in progress. Each client receives an error."""
        for requests in self._live.values():
            for request in requests:
                request.close()


async def _send(writer: AnswerWriter, write: Write, deltas: list[Delta]) -> None:
    """Write deltas to the client. Waits while the client has 64 KiB of unread data; meanwhile, new
    output is merged at its source. Raises `ConnectionError` if the client has disconnected."""
    if written := writer.push(deltas):
        await write(written)


def _at_least_one(body: CompletionRequest) -> CompletionRequest:
    """Return the body with `max_tokens` 1, because the engine cannot generate 0 tokens. The caller
    drops the output."""
    return msgspec.structs.replace(body, max_tokens=1, min_tokens=None)


@dataclasses.dataclass(frozen=True)
class _How:
    """Inputs of an answer besides the request's body."""

    options: Mapping[str, Any] | None = None
    """Variables for the chat template."""
    constraint: Constraint | None = None
    writer: MakeWriter = CompletionWriter
    messages: Sequence[Any] = ()
    """Messages of a chat, without the content of pictures."""
