"""HTTP routes of the Responses API."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from nanoactor.server.answer import Answer
from nanoactor.server.completions import Completions
from nanoactor.server.context import context_of, json_response
from nanoactor.server.errors import APIError
from nanoactor.server.http import HttpFrontend
from nanoactor.server.requests import ChatRequest
from nanoactor.server.responses.events import ResponsesWriter
from nanoactor.server.responses.request import ResponsesRequest
from nanoactor.server.responses.translate import FIELD_NAMES, Tools, to_chat
from nanoactor.server.text_routes import TextRoutes
from nanoactor.server.translating import Options


class ResponsesRoutes:
    """Handlers of `/v1/responses`, and of the routes for stored responses. No responses are stored,
    so the latter always return an error."""

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
        """Handle `POST /v1/responses`: answer a conversation, as a stream if requested."""
        body, tools, chat = await self._read(request)
        if body.store:
            treatment = (
                "is ignored because responses are not stored; send the whole input each time"
            )
            self._http.decoder.warn("store", treatment)

        def writer(answer: Answer) -> ResponsesWriter:
            return ResponsesWriter(answer, body, tools)

        return await self._completions.answer_chat(request, chat, writer)

    async def input_tokens(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /v1/responses/input_tokens`: render the input to a prompt and count its
        tokens."""
        _, _, chat = await self._read(request)
        ids = await self._text_routes.chat_tokens(chat)
        return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})

    async def _read(self, request: web.Request) -> tuple[ResponsesRequest, Tools, ChatRequest]:
        """Read a request. Return its body, its tools, and the equivalent chat request."""
        context_of(request).field_names = FIELD_NAMES
        body = await self._http.read(request, ResponsesRequest)
        decoder = self._http.decoder
        tools = Tools(body.tools or (), decoder.warn)
        translated = to_chat(body, tools, self._options(), decoder.warn)
        return body, tools, decoder.chat(translated)

    async def stored(self, request: web.Request) -> web.StreamResponse:
        """Handle requests for a stored response by raising `APIError` (404), because none is
        stored."""
        raise APIError(
            404,
            "responses are not stored; send the whole conversation as input each time",
            code="response_not_found",
        )

    async def compact(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /v1/responses/compact` by raising `APIError` (404): only OpenAI's own models
        can read the result of that route."""
        raise APIError(
            404,
            "this server does not compact conversations; send the whole conversation, "
            "or shorten it yourself",
        )
