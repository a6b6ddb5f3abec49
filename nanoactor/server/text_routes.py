"""`/v1/models`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from nanoactor.engine import AsyncLLM
from nanoactor.errors import NanoactorError
from nanoactor.server.completions import Completions
from nanoactor.server.desk import Desk
from nanoactor.server.errors import APIError, from_engine, invalid
from nanoactor.server.exchange import Exchange, json_response
from nanoactor.server.http import Door
from nanoactor.server.requests import (
    Decoder,
    DetokenizeRequest,
    TokenizeRequest,
    conversation,
    names_of,
    template_options,
)
from nanoactor.text.template import TemplateFacts


class TextRoutes:
    """What needs a tokenizer, or only knowledge of the model."""

    def __init__(
        self,
        llm: AsyncLLM,
        desk: Desk | None,
        door: Door,
        completions: Completions,
        model: str,
        strict: bool,
    ) -> None:
        """`strict`: whether fields that nobody knows are refused."""
        self._llm = llm
        self._desk = desk
        self._door = door
        self._completions = completions
        self._model = model
        self._decoder = Decoder(strict)
        self._created = int(time.time())

    # -- models ---------------------------------------------------------------------------

    async def models(self, exchange: Exchange) -> web.StreamResponse:
        """`GET /v1/models`."""
        value = {"object": "list", "data": [self._card()]}
        return json_response(value, headers=exchange.headers)

    async def model(self, exchange: Exchange) -> web.StreamResponse:
        """`GET /v1/models/{name}`."""
        self._completions.check_model(exchange.path.removeprefix("/v1/models/"))
        return json_response(self._card(), headers=exchange.headers)

    def _card(self) -> dict[str, Any]:
        files, config = self._llm.files, self._llm.config
        template = self._desk.template if self._desk is not None else TemplateFacts()
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "nanoactor",
            "max_model_len": files.max_model_len,
            "capabilities": {
                "completions": True,
                "chat": template.exists,
                "tools": template.shows_tools,
                "reasoning": template.knows_thoughts,
                "text": self._desk is not None,
                "vision": False,
                "logprobs": False,
            },
            "limits": {
                "max_sequences": config.max_num_seqs,
                "max_waiting_requests": config.max_waiting_requests,
                "max_waiting_tokens": config.max_waiting_tokens,
                "kv_blocks": self._llm.facts["num_blocks"],
                "block_size": self._llm.facts["block_size"],
            },
        }

    # -- text and ids ---------------------------------------------------------------------

    async def tokenize(self, exchange: Exchange) -> web.StreamResponse:
        """`POST /tokenize`: of a text or of a conversation, as the engine would."""
        body: TokenizeRequest = self._decoder.decode(
            TokenizeRequest, await self._door.body(exchange)
        )
        desk = self._need_desk(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("give either prompt or messages", "prompt")
        if body.prompt is not None:
            only_chat = (body.tools, body.chat_template_kwargs, body.add_generation_prompt)
            if any(value is not None for value in (*only_chat, body.continue_final_message)):
                raise invalid("a prompt goes through no template: give messages", "prompt")
        elif body.add_special_tokens is not None:
            raise invalid(
                "add_special_tokens goes with a prompt: a template writes its own",
                "add_special_tokens",
            )
        try:
            if body.messages is None:
                assert body.prompt is not None
                ids = await desk.encode(body.prompt, body.add_special_tokens is not False)
            else:
                messages, options = conversation(body.messages), template_options(body)
                desk.template.check(options)
                ids = await desk.encode_chat(messages, options)
        except NanoactorError as error:
            raise from_engine(error, names_of(TokenizeRequest)) from error
        value = {"tokens": ids, "count": len(ids), "max_model_len": self._llm.files.max_model_len}
        return json_response(value, headers=exchange.headers)

    async def detokenize(self, exchange: Exchange) -> web.StreamResponse:
        """`POST /detokenize`: special tokens included."""
        body: DetokenizeRequest = self._decoder.decode(
            DetokenizeRequest, await self._door.body(exchange)
        )
        desk = self._need_desk(body.model)
        try:
            (text,) = await desk.decode_all([body.tokens])
        except NanoactorError as error:
            raise from_engine(error, names_of(DetokenizeRequest)) from error
        return json_response({"prompt": text}, headers=exchange.headers)

    def _need_desk(self, model: str | None) -> Desk:
        if model is not None:
            self._completions.check_model(model)
        if self._desk is None:
            raise APIError(404, "the engine has no tokenizer (skip_tokenizer_init)")
        return self._desk
