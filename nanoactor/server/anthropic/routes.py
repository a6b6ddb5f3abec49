"""HTTP routes of the Messages API."""

from __future__ import annotations

import functools
from collections.abc import Callable

from aiohttp import web

from nanoactor.server.anthropic.events import MessagesWriter
from nanoactor.server.anthropic.request import CountTokensRequest, MessagesRequest
from nanoactor.server.anthropic.translate import FIELD_NAMES, to_chat
from nanoactor.server.completions import Completions
from nanoactor.server.context import context_of, json_response
from nanoactor.server.http import HttpFrontend
from nanoactor.server.requests import ChatRequest
from nanoactor.server.text_routes import TextRoutes
from nanoactor.server.translating import Options


class MessagesRoutes:
    """Handlers of `/v1/messages` and `/v1/messages/count_tokens`."""

    def __init__(
        self,
        completions: Completions,
        text_routes: TextRoutes,
        http: HttpFrontend,
        options: Callable[[], Options],
    ) -> None:
        self._completions, self._text_routes, self._http = completions, text_routes, http
        self._options = options

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /v1/messages`: answer a conversation, as a stream if requested."""
        context_of(request).field_names = FIELD_NAMES
        body = await self._http.read(request, MessagesRequest)
        thinking = body.thinking
        omits = thinking is not None and thinking.display == "omitted"
        writer = functools.partial(MessagesWriter, omits_thoughts=omits)
        return await self._completions.answer_chat(request, self._chat(body), writer)

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /v1/messages/count_tokens`: render the messages to a prompt and count its
        tokens."""
        context_of(request).field_names = FIELD_NAMES
        body = await self._http.read(request, CountTokensRequest)
        ids = await self._text_routes.chat_tokens(self._chat(body))
        return json_response({"input_tokens": len(ids)})

    def _chat(self, body: MessagesRequest | CountTokensRequest) -> ChatRequest:
        decoder = self._http.decoder
        return decoder.chat(to_chat(body, self._options(), decoder.warn))
