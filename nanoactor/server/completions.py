"""Handlers of `/v1/completions` and `/v1/chat/completions`. Chats of the Responses API and the
Messages API are answered here too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from nanoactor.api.engine import Prompt
from nanoactor.requests.grammar_spec import CallForm, Thoughts
from nanoactor.server.answer import Answer, CompletionWriter, EchoedPrompt
from nanoactor.server.call_forms import SPECIAL_TOKEN_FORMS, call_finder, call_form
from nanoactor.server.chat_messages import (
    conversation,
    load_images,
    text_of,
    without_images,
)
from nanoactor.server.choices import ChatChoice, Choice, TextChoice
from nanoactor.server.context import context_of
from nanoactor.server.errors import context_length_exceeded, invalid
from nanoactor.server.http import HttpFrontend
from nanoactor.server.live_answers import AnswerInputs, LiveAnswers, MakeWriter, Send
from nanoactor.server.logprobs import ChatLogprobs, TextLogprobs
from nanoactor.server.media import MediaLoader
from nanoactor.server.reasoning import OutputStart, ReasoningParser, ends_in_thoughts
from nanoactor.server.requests import (
    ChatRequest,
    CompletionRequest,
    num_logprobs,
    request_prompts,
    sampling_params,
    template_options,
)
from nanoactor.server.serving import Engine
from nanoactor.server.text_service import TextService
from nanoactor.server.tool_calls import CallFinder, CallsAfterReasoning
from nanoactor.server.tool_choice import named_tool
from nanoactor.text.template import TemplateFacts


class Completions:
    """Handlers of `/v1/completions` and `/v1/chat/completions`. They determine the prompts and how
    the choices of an answer are built; `LiveAnswers` generates the answer. The routes of other APIs
    use an instance to answer their chats."""

    def __init__(
        self,
        llm: Engine,
        text_service: TextService | None,
        http: HttpFrontend,
        media: MediaLoader,
        answers: LiveAnswers,
        *,
        separate_reasoning: bool,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        """Store the services and options.

        `text_service` is None if the engine has no tokenizer. `answers` generates and sends the
        answers. `separate_reasoning` applies to requests that do not set it.
        """
        self._llm = llm
        self._text_service = text_service
        self._http = http
        self._media = media
        self._answers = answers
        self._separate_reasoning = separate_reasoning
        self._tool_call_parser, self._reasoning_parser = tool_call_parser, reasoning_parser

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
        inputs = AnswerInputs(constraint=constraint)
        return await self._answers.generate(request, body, prompts, choices, inputs)

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
        messages = without_images(prompts[0])
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

        await load_images(prompts[0], self._media)
        inputs = AnswerInputs(options, constraint, make_writer, tuple(messages))
        return await self._answers.generate(request, body, prompts, choices, inputs)

    # -- prompts and choices --------------------------------------------------------------

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

        return await self._answers.respond(request, answer, CompletionWriter(answer), finish)

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
        """Return the kind of reasoning in the output: "none", "optional" (the model may start it)
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


def _with_one_token(body: CompletionRequest) -> CompletionRequest:
    """Return a copy of the body with `max_tokens=1`, because the engine cannot generate 0 tokens.
    The caller drops the output."""
    return msgspec.structs.replace(body, max_tokens=1, min_tokens=None)
