"""`/v1/completions` and `/v1/chat/completions`: requests to the engine, answers from it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from nanoactor.engine import AsyncLLM, Prompt
from nanoactor.errors import InvalidRequest, NanoactorError
from nanoactor.outputs import RequestOutput
from nanoactor.request import Request
from nanoactor.server.answers import ChatChoice, Choice, Delta, TextChoice
from nanoactor.server.config import ServerConfig
from nanoactor.server.desk import Desk
from nanoactor.server.errors import APIError, from_engine, invalid, unavailable
from nanoactor.server.exchange import Exchange, json_response
from nanoactor.server.http import Door
from nanoactor.server.metrics import Metrics
from nanoactor.server.reasoning import CLOSE, OPEN, ReasoningParser
from nanoactor.server.requests import (
    Body,
    ChatRequest,
    CompletionRequest,
    Decoder,
    conversation,
    names_of,
    prompts,
    sampling_params,
    template_options,
)
from nanoactor.server.streaming import EventStream, event
from nanoactor.server.tool_calls import ToolCallParser

log = logging.getLogger("nanoactor.server")

_MANY_OPENINGS = 256


class _Answer:
    """One answer under way: its requests to the engine, and what they have brought."""

    def __init__(self, body: Body, requests: Sequence[Request]) -> None:
        chat = isinstance(body, ChatRequest)
        self.body = body
        self.requests = requests
        self.choices: Sequence[Choice] = ()
        self.head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": body.model,
        }
        self.chunk_head = self.head | ({"object": "chat.completion.chunk"} if chat else {})
        self.cached = 0
        self._said = [0] * len(requests)
        """Tokens of each choice."""

    @property
    def tokens(self) -> int:
        """Of all choices."""
        return sum(self._said)

    def chunk(self, choices: list[Delta], usage: Any = None) -> bytes:
        """An event with new members of its choices."""
        value = {**self.chunk_head, "choices": choices}
        if self.body.continuous_usage and choices and self.requests:
            usage = self._usage_of(choices[0]["index"])
        return event(value | {"usage": usage} if self.body.include_usage else value)

    def _usage_of(self, index: int) -> dict[str, int]:
        """So far, of one choice."""
        prompt, said = len(self.requests[index].prompt_token_ids), self._said[index]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": said,
            "total_tokens": prompt + said,
        }

    def take(self, index: int, output: RequestOutput) -> list[Delta]:
        """What an output of the engine adds; raises `APIError` where it ends what should go on."""
        choice, completion = self.choices[index], output.outputs[0]
        self._said[index] += len(completion.token_ids)
        deltas = choice.push(completion.text)
        if completion.finish_reason == "abort":  # not by the client, who would have left
            raise unavailable("the server is shutting down; this answer is not complete")
        if completion.finish_reason is not None:
            self.cached += output.num_cached_tokens
            deltas += choice.finish(completion.finish_reason)
        return deltas

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens of all choices."""
        prompt = sum(len(request.prompt_token_ids) for request in self.requests)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.tokens,
            "total_tokens": prompt + self.tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def whole(self) -> dict[str, Any]:
        """All of it at once."""
        choices = [choice.whole() for choice in self.choices]
        return {**self.head, "choices": choices, "usage": self.usage}


class Completions:
    """The two handlers."""

    def __init__(
        self,
        llm: AsyncLLM,
        desk: Desk | None,
        door: Door,
        config: ServerConfig,
        model: str,
        metrics: Metrics,
    ) -> None:
        """`desk` is None where the engine has no tokenizer."""
        self._llm = llm
        self._desk = desk
        self._door = door
        self._config = config
        self._model = model
        self._metrics = metrics
        self._openings: dict[bytes, bool] = {}
        """By digest of template options: whether a prompt ends with an open `<think>`."""
        self._guessing = False
        self._decoder = Decoder(config.strict)
        self._live: set[_Answer] = set()

    # -- the two ways in ------------------------------------------------------------------

    async def completions(self, exchange: Exchange) -> web.StreamResponse:
        """`POST /v1/completions`."""
        body: CompletionRequest = await self._decode(CompletionRequest, exchange)
        wanted = prompts(body, self._llm.files.max_model_len)
        if body.echo and body.max_tokens == 0:
            return await self._echo_alone(exchange, body, wanted)

        async def choices() -> Sequence[Choice]:
            echoes = await self._echoes(wanted) if body.echo else [""] * len(wanted)
            return [TextChoice(index, echo) for index, echo in enumerate(echoes)]

        return await self._serve(exchange, body, wanted, choices, None)

    async def chat(self, exchange: Exchange) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        body: ChatRequest = await self._decode(ChatRequest, exchange)
        variables = self._desk.template.variables if self._desk is not None else ()
        options = template_options(body, variables)
        self._check_template(options)
        messages = conversation(body.messages)
        separate = body.separate_reasoning
        if separate is None:
            separate = self._config.separate_reasoning

        async def choices() -> Sequence[Choice]:
            reasoning = ReasoningParser(await self._opened(body, options)) if separate else None
            tools = ToolCallParser() if body.calls_tools else None
            return [ChatChoice(0, reasoning, tools, body.parallel_tool_calls is False)]

        return await self._serve(exchange, body, [messages], choices, options)

    async def _decode(self, kind: type[Any], exchange: Exchange) -> Any:
        body = self._decoder.decode(kind, await self._door.body(exchange))
        if body.user:
            exchange.note = f" user={body.user[:100]!r}"
        self.check_model(body.model)
        return body

    def _check_template(self, options: Mapping[str, Any]) -> None:
        try:
            if self._desk is not None:
                self._desk.template.check(options)
        except InvalidRequest as error:
            raise from_engine(error, names_of(ChatRequest)) from error

    def check_model(self, name: str) -> None:
        """Raise `APIError` for any model but the one that is served."""
        if name != self._model:
            raise APIError(
                404,
                f"the model {name[:200]!r} does not exist here; it is {self._model!r}",
                param="model",
                code="model_not_found",
            )

    async def _echo_alone(
        self, exchange: Exchange, body: CompletionRequest, wanted: Sequence[Prompt]
    ) -> web.StreamResponse:
        """The prompts, and nothing else: the engine is not asked."""
        sampling_params(msgspec.structs.replace(body, max_tokens=1, min_tokens=None))
        limit, counts = self._llm.files.max_model_len, []
        for prompt in wanted:
            counts.append(await self._count(prompt))
            if counts[-1] >= limit:
                raise APIError(
                    400,
                    f"a prompt has {counts[-1]} tokens, but max_model_len is {limit}",
                    param="prompt",
                    code="context_length_exceeded",
                )
        answer = _Answer(body, ())
        answer.choices = [
            TextChoice(index, echo) for index, echo in enumerate(await self._echoes(wanted))
        ]
        deltas = [delta for c in answer.choices for delta in (*c.begin(), *c.finish("length"))]
        usage = {
            "prompt_tokens": sum(counts),
            "completion_tokens": 0,
            "total_tokens": sum(counts),
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        exchange.note += f" {sum(counts)}+0 tokens"
        if not body.stream:
            return json_response({**answer.whole(), "usage": usage}, headers=exchange.headers)
        stream = EventStream(exchange)
        await stream.begin()
        of_one = [{**usage, "prompt_tokens": n, "total_tokens": n} for n in counts]
        for delta in deltas:
            so_far = of_one[delta["index"]] if body.continuous_usage else None
            await stream.send(answer.chunk([delta], so_far))
        if body.include_usage:
            await stream.send(answer.chunk([], usage))
        return await stream.end()

    async def _count(self, prompt: Prompt) -> int:
        """How many tokens it has."""
        if isinstance(prompt, Mapping):
            return len(prompt["prompt_token_ids"])
        if self._desk is None or not isinstance(prompt, str):
            raise invalid("a text needs a tokenizer, and the engine has none", "prompt")
        try:
            return len(await self._desk.encode(prompt, special=True))
        except NanoactorError as error:
            raise from_engine(error, names_of(CompletionRequest)) from error

    async def _echoes(self, wanted: Sequence[Prompt]) -> list[str]:
        """The prompts as text."""
        ids = [prompt["prompt_token_ids"] for prompt in wanted if isinstance(prompt, Mapping)]
        if ids and self._desk is None:
            raise invalid("echo needs a tokenizer, and the engine has none", "echo")
        texts = iter(await self._desk.decode_all(ids) if self._desk and ids else ())
        return [prompt if isinstance(prompt, str) else next(texts) for prompt in wanted]

    async def _opened(self, body: ChatRequest, options: Mapping[str, Any]) -> bool:
        """Whether the prompt ends with an open `<think>`, which the answer then will not repeat."""
        if body.continue_final_message:
            last = conversation(body.messages[-1:])[0]["content"]
            return bool(last.rfind(OPEN) > last.rfind(CLOSE))
        if self._desk is None or body.add_generation_prompt is False:
            return False
        plain = {name: value for name, value in options.items() if name != "tools"}
        if not plain:
            return self._desk.template.opens_thoughts
        # The request has been queued with these options: they can be written as JSON.
        key = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).digest()
        if key not in self._openings:
            if len(self._openings) >= _MANY_OPENINGS:
                self._openings.clear()
            try:
                opening = await self._desk.opening(plain)
            except InvalidRequest:
                return False  # the engine's own tokenizer has refused these options too, or will
            except NanoactorError as error:
                return self._guess_opening(self._desk, error)
            self._openings[key] = opening.rstrip().endswith(OPEN)
            self._guessing = False
        return self._openings[key]

    def _guess_opening(self, desk: Desk, error: NanoactorError) -> bool:
        """As without options, until the desk answers again."""
        if not self._guessing:
            self._guessing = True
            log.warning("thoughts may be taken for content, or the reverse, meanwhile: %s", error)
        return desk.template.opens_thoughts

    # -- the way through ------------------------------------------------------------------

    async def _serve(
        self,
        exchange: Exchange,
        body: Body,
        wanted: Sequence[Prompt],
        make_choices: Callable[[], Awaitable[Sequence[Choice]]],
        options: Mapping[str, Any] | None,
    ) -> web.StreamResponse:
        """Queue the prompts first: whether there is room shows at once, and what the answer still
        needs to know of them is found out while they wait."""
        params = sampling_params(body)
        try:
            requests = self._llm.submit(
                wanted, params, priority=body.priority or 0, chat_template_kwargs=options
            )
        except NanoactorError as error:
            raise from_engine(error, names_of(type(body))) from error
        answer = _Answer(body, requests)
        self._live.add(answer)
        try:
            answer.choices = await make_choices()
            for request in requests:
                await self._accepted(request, body)
            if body.stream:
                return await self._stream(exchange, answer)
            for choice in answer.choices:
                choice.begin()
            await self._read_all(answer, _ignore)
            return json_response(answer.whole(), headers=exchange.headers)
        finally:
            self._live.remove(answer)
            for request in requests:
                request.close()
            exchange.note += f" {answer.usage['prompt_tokens']}+{answer.tokens} tokens"

    async def _accepted(self, request: Request, body: Body) -> None:
        """Until here, whatever is wrong with a prompt can be told by a status."""
        try:
            await request.accepted()
        except NanoactorError as error:
            raise from_engine(error, names_of(type(body))) from error

    async def _stream(self, exchange: Exchange, answer: _Answer) -> web.StreamResponse:
        stream = EventStream(exchange)
        await stream.begin()
        error: APIError | None = None

        async def send(deltas: list[Delta]) -> None:
            await stream.send(b"".join([answer.chunk([delta]) for delta in deltas]))

        try:
            for choice in answer.choices:
                if deltas := choice.begin():
                    await send(deltas)
            await self._read_all(answer, send)
            if answer.body.include_usage:
                await stream.send(answer.chunk([], answer.usage))
        except APIError as problem:
            error = problem
        except NanoactorError as problem:
            error = from_engine(problem)
        except ConnectionError:
            raise
        except Exception as problem:
            log.exception("request %s failed in the middle of its answer", exchange.id)
            error = from_engine(problem)
        if error is not None:
            exchange.note += f" broken off: {error.message!r:.300}"
            self._metrics.broken_off.inc()
        return await stream.end(error)

    async def _read_all(
        self, answer: _Answer, send: Callable[[list[Delta]], Awaitable[None]]
    ) -> None:
        """Read every request to its end; the first error ends all."""
        if len(answer.requests) == 1:
            await self._read(answer, 0, send)
            return
        readers = [
            asyncio.ensure_future(self._read(answer, index, send))
            for index in range(len(answer.requests))
        ]
        try:
            await asyncio.gather(*readers)
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _read(
        self, answer: _Answer, index: int, send: Callable[[list[Delta]], Awaitable[None]]
    ) -> None:
        request = answer.requests[index]
        timer = self._metrics.timer(request.metrics)
        async for output in request:
            timer.tokens(len(output.outputs[0].token_ids))
            if deltas := answer.take(index, output):
                await send(deltas)
        timer.end(len(request.prompt_token_ids))

    # -- the end --------------------------------------------------------------------------

    @property
    def live(self) -> int:
        """Answers under way."""
        return len(self._live)

    def break_off(self) -> None:
        """End all that is under way: each client reads an error."""
        for answer in self._live:
            for request in answer.requests:
                request.close()


async def _ignore(deltas: list[Delta]) -> None:
    """The whole is asked for at the end."""
