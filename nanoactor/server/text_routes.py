"""Handlers of `/v1/models`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from nanoactor.server.chat_messages import conversation, load_images, without_images
from nanoactor.server.context import json_response
from nanoactor.server.errors import APIError, check_model
from nanoactor.server.http import HttpFrontend
from nanoactor.server.media import MediaLoader
from nanoactor.server.requests import (
    ChatRequest,
    DetokenizeRequest,
    TokenizeRequest,
    template_options,
)
from nanoactor.server.serving import Engine
from nanoactor.server.text_service import TextService
from nanoactor.text.template import TemplateFacts
from nanoactor.vision.counting import ImageExpander


class TextRoutes:
    """Handlers of routes that need only the tokenizer or properties of the model."""

    def __init__(
        self,
        llm: Engine,
        text_service: TextService | None,
        http: HttpFrontend,
        media: MediaLoader,
        names: Sequence[str],
    ) -> None:
        """Store the services. `text_service` is None if the engine has no tokenizer. `names` are
        the names that clients may use for the model."""
        self._llm = llm
        self._media = media
        self._image_expander = ImageExpander(llm.config, llm.files)
        self._text_service = text_service
        self._http = http
        self._names = names
        self._created = int(time.time())

    # -- models ---------------------------------------------------------------------------

    async def models(self, request: web.Request) -> web.StreamResponse:
        """Handle `GET /v1/models`: list the served model, once under each of its names."""
        cards = [self._card(name) for name in self._names]
        return json_response({"object": "list", "data": cards})

    async def model(self, request: web.Request) -> web.StreamResponse:
        """Handle `GET /v1/models/{name}`: return the properties and limits of the served model."""
        check_model(name := request.match_info["model"], self._names)
        return json_response(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        files, config, facts = self._llm.files, self._llm.config, self._llm.facts
        template = (
            self._text_service.template if self._text_service is not None else TemplateFacts()
        )
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "nanoactor",
            "max_model_len": files.max_model_len,
            "capabilities": {
                "completions": files.generates,
                "chat": files.generates and template.exists,
                "embeddings": files.pooling is not None and not files.pooling.returns_scores,
                "scores": files.pooling is not None,
                "tools": template.renders_tools,
                "reasoning": template.has_reasoning,
                "thinking_switch": "enable_thinking" in template.variables,
                "text": self._text_service is not None,
                "vision": files.images is not None,
                "logprobs": True,
            },
            "limits": {
                "max_logprobs": config.max_logprobs,
                "max_sequences": config.max_num_seqs,
                "max_waiting_requests": config.max_waiting_requests,
                "max_waiting_tokens": config.max_waiting_tokens,
                "max_waiting_media_bytes": config.max_waiting_media_bytes,
                "kv_blocks": facts["num_blocks"],
                "block_size": facts["block_size"],
            },
        }

    # -- text and ids ---------------------------------------------------------------------

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /tokenize`: return the token ids of a text or a conversation, as the engine
        would compute them."""
        body = await self._http.read(request, TokenizeRequest)
        text_service = self._require_text_service()
        if body.prompt is not None:
            ids = await text_service.encode(body.prompt, body.add_special_tokens is not False)
        else:
            ids = await self.chat_tokens(body)
        limit = self._llm.files.max_model_len
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": limit})

    async def chat_tokens(self, body: ChatRequest | TokenizeRequest) -> list[int]:
        """Return the token ids of a conversation's prompt, with one placeholder token per image
        token. Raises `APIError` or `InvalidRequest` if the conversation is invalid."""
        text_service = self._require_text_service()
        options = template_options(
            body, text_service.template.variables, self._http.template_defaults
        )
        messages = conversation(body.raw["messages"])
        self._http.decoder.drop_hidden_tools(body, options, text_service.template.renders_tools)
        text_service.template.check(options)
        await load_images(messages, self._media)
        ids = await text_service.encode_chat(without_images(messages), options)
        return await self._image_expander.expand(ids, messages)

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /detokenize`: return the text of token ids, including special tokens."""
        body = await self._http.read(request, DetokenizeRequest)
        (text,) = await self._require_text_service().decode_all([body.tokens])
        return json_response({"prompt": text})

    def _require_text_service(self) -> TextService:
        if self._text_service is None:
            raise APIError(404, "the engine has no tokenizer because skip_tokenizer_init is set")
        return self._text_service
