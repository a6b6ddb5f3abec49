"""The OpenAPI document, generated from the classes into which request bodies are decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

import nanoactor
from nanoactor.server.anthropic.errors import AnthropicError
from nanoactor.server.anthropic.request import CountTokensRequest, MessagesRequest
from nanoactor.server.errors import Error
from nanoactor.server.fields import route_fields
from nanoactor.server.observe import MAX_TRACE_SECONDS
from nanoactor.server.pooling.request import EmbeddingRequest, RerankRequest, ScoreRequest
from nanoactor.server.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from nanoactor.server.responses.request import ResponsesRequest

_POST_ROUTES = {
    "/v1/chat/completions": (ChatRequest, "Generate the next message of a conversation"),
    "/v1/completions": (CompletionRequest, "Complete one or more prompts"),
    "/v1/responses": (
        ResponsesRequest,
        "Generate the next message of a conversation, with OpenAI's Responses API",
    ),
    "/v1/responses/input_tokens": (ResponsesRequest, "Count the tokens of a conversation's prompt"),
    "/v1/messages": (
        MessagesRequest,
        "Generate the next message of a conversation, with Anthropic's Messages API",
    ),
    "/v1/messages/count_tokens": (
        CountTokensRequest,
        "Count the tokens of a conversation's prompt",
    ),
    "/v1/embeddings": (EmbeddingRequest, "Compute embeddings of texts"),
    "/rerank": (
        RerankRequest,
        "Rank documents by how well they match a query; also served under /v1 and /v2",
    ),
    "/score": (ScoreRequest, "Score pairs of texts; also served under /v1"),
    "/tokenize": (TokenizeRequest, "Tokenize a prompt or a conversation"),
    "/detokenize": (DetokenizeRequest, "Convert token ids to text"),
}
_STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_GET_ROUTES = {
    "/v1/models": ("The served model, its capabilities and its limits", "application/json"),
    "/v1/models/{model}": ("Details of one model", "application/json"),
    "/live": ("Whether the process is running", "application/json"),
    "/ready": ("Whether the server accepts requests", "application/json"),
    "/health": ("Age of each actor's latest step", "application/json"),
    "/metrics": ("Metrics for Prometheus", "text/plain"),
    "/trace": ("A timeline for Perfetto", "application/json"),
    "/activity": ("Data that the web page displays", "application/json"),
    "/version": ("The server's version", "application/json"),
    "/load": ("Number of answers in progress", "application/json"),
    "/ping": ("Same as /health, for SageMaker", "application/json"),
    "/docs": ("All routes, as a web page", "text/html"),
    "/openapi.json": ("This document", "application/json"),
    "/": ("A chat and a live view of the actors", "text/html"),
}
_ALSO_POST = ("/ping",)
"""Routes of `_GET_ROUTES` that also accept POST. The body is ignored."""
_NAME_SCHEMA = {"type": "string", "minLength": 1}
_SECONDS_SCHEMA = {
    "type": "number",
    "exclusiveMinimum": 0,
    "maximum": MAX_TRACE_SECONDS,
    "default": 1,
}
_NUMBER_SCHEMA = {"type": "integer", "minimum": 0, "maximum": 10**15 - 1, "default": 0}
_PARAMETERS = {
    "/v1/models/{model}": {"name": "model", "in": "path", "required": True, "schema": _NAME_SCHEMA},
    "/trace": {"name": "seconds", "in": "query", "schema": _SECONDS_SCHEMA},
    "/activity": {"name": "since", "in": "query", "schema": _NUMBER_SCHEMA},
}
_ERROR_RESPONSES = {
    "400": "The request is invalid or not supported; the message says why",
    "401": "The API key is missing or wrong",
    "404": "The model, or the path, does not exist",
    "405": "The path does not accept the method; the header Allow lists the methods that it "
    "accepts",
    "408": "The body did not arrive in time",
    "413": "The body is too long",
    "415": "The body is not JSON",
    "429": "The queue is full; try again after the seconds in Retry-After",
    "500": "An internal error",
    "503": "The server is shutting down, or its engine has died",
}


def document(names: Sequence[str], needs_key: bool, root: str = "") -> dict[str, Any]:
    """Return the OpenAPI document of a server. `names` are the model's names. `needs_key` is True
    if clients need an API key. `root` is the path under which a proxy exposes the server."""
    kinds = [kind for kind, _ in _POST_ROUTES.values()]
    references, schemas = msgspec.json.schema_components(
        [*kinds, Error, AnthropicError], ref_template="#/components/schemas/{name}"
    )
    for kind in kinds:
        schemas[kind.__name__]["properties"]["model"] = {"enum": list(names)}
        schemas[kind.__name__].pop("additionalProperties", None)
    for kind in (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest):
        schemas[kind.__name__]["properties"] |= _refused_field_schemas(kind.ROUTE)
    paths: dict[str, Any] = {}
    for (path, (_, text)), schema in zip(_POST_ROUTES.items(), references, strict=False):
        event_stream = ("text/event-stream",) if path in _STREAMED else ()
        error = "AnthropicError" if path.startswith("/v1/messages") else "Error"
        paths[path] = {"post": _operation(text, "application/json", *event_stream, error=error)}
        content = {"application/json": {"schema": schema}}
        paths[path]["post"]["requestBody"] = {"required": True, "content": content}
    for path, (text, content_type) in _GET_ROUTES.items():
        paths[path] = {"get": _operation(text, content_type)}
        if path in _PARAMETERS:
            paths[path]["get"]["parameters"] = [_PARAMETERS[path]]
        if path in _ALSO_POST:
            paths[path]["post"] = paths[path]["get"]
    value: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "nanoactor",
            "version": nanoactor.__version__,
            "description": "An LLM inference engine made of actors, with the OpenAI API. A field "
            "that would change the answer but is not supported is rejected with an error that "
            "names it.",
        },
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if root:
        value["servers"] = [{"url": root}]
    if needs_key:
        value["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        value["security"] = [{"key": []}]
    return value


def _refused_field_schemas(route: str) -> dict[str, Any]:
    """Return schemas for the fields that a route rejects. Each schema lists the only values that
    are accepted."""
    text = "Not supported: other values are rejected."
    return {
        name: {"description": text, "enum": [None, *field.neutral]}
        for name, field in route_fields(route).items()
        if field.status == "refused"
    }


def _operation(text: str, *content_types: str, error: str = "Error") -> dict[str, Any]:
    """Return an OpenAPI operation with the summary `text`. Successful responses have the given
    content types, and `error` is the name of the schema of error responses."""
    shape = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    answer = {"description": "The answer", "content": {kind: {} for kind in content_types}}
    errors = {
        status: {"description": description, "content": shape}
        for status, description in _ERROR_RESPONSES.items()
    }
    return {"summary": text, "responses": {"200": answer, **errors}}
