"""The OpenAPI document, made from the structures that requests are decoded into."""

from __future__ import annotations

from typing import Any

import msgspec

import nanoactor
from nanoactor.server.fields import of_route
from nanoactor.server.observe import MAX_TRACE_SECONDS
from nanoactor.server.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_BODIES = {
    "/v1/chat/completions": (ChatRequest, "Continue a conversation", True),
    "/v1/completions": (CompletionRequest, "Continue one prompt or several", True),
    "/tokenize": (TokenizeRequest, "Token ids of a prompt or of a conversation", False),
    "/detokenize": (DetokenizeRequest, "Text of token ids", False),
}
_LOOKS = {
    "/v1/models": ("The model, what it can do, and its limits", "application/json"),
    "/live": ("Whether the process runs", "application/json"),
    "/ready": ("Whether requests are welcome", "application/json"),
    "/health": ("How old the latest step of each actor is", "application/json"),
    "/metrics": ("Figures for Prometheus", "text/plain"),
    "/openapi.json": ("This document", "application/json"),
    "/": ("A chat and a live picture of the actors", "text/html"),
}
_WRONG = {
    "400": "Something in the request is wrong, or not supported; the message says what",
    "401": "The API key is missing or wrong",
    "404": "The model, or the path, does not exist",
    "405": "The path takes another method, which Allow names",
    "408": "The body did not arrive in time",
    "413": "The body is too long",
    "415": "The body is not JSON",
    "429": "The queue is full; try again after the seconds in Retry-After",
    "500": "A bug",
    "503": "The server is shutting down, or its engine has died",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def document(model: str, keys: bool) -> dict[str, Any]:
    """The whole document, for a server of this model; `keys`: whether callers need one."""
    kinds = [kind for kind, _, _ in _BODIES.values()]
    references, schemas = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    for body in kinds:
        schemas[body.__name__]["properties"]["model"] = {"enum": [model]}
        schemas[body.__name__].pop("additionalProperties", None)
    for name, route in (("ChatRequest", "chat"), ("CompletionRequest", "completions")):
        schemas[name]["properties"] |= _refused(route)
    paths: dict[str, Any] = {}
    for (path, (_, text, streams)), schema in zip(_BODIES.items(), references, strict=True):
        paths[path] = {"post": _posted(text, schema, streams)}
    for path, (text, kind) in _LOOKS.items():
        paths[path] = {"get": _looked(text, kind)}
    paths["/v1/models/{model}"] = {"get": _looked("One model", "application/json", _MODEL)}
    paths["/trace"] = {"get": _looked("A timeline for Perfetto", "application/json", _TRACE)}
    paths["/activity"] = {"get": _looked("What the page draws", "application/json", _SINCE)}
    components: dict[str, Any] = {"schemas": {**schemas, "Error": _ERROR}}
    value: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "nanoactor",
            "version": nanoactor.__version__,
            "description": "An LLM inference engine made of actors, in the shapes of the OpenAI "
            "API. What changes an answer and is not honoured is refused by name.",
        },
        "paths": paths,
        "components": components,
    }
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        needed: list[dict[str, list[str]]] = [{"key": []}]
        value["security"] = needed
    return value


def _refused(route: str) -> dict[str, Any]:
    """The fields that are refused, with the values that are not."""
    return {
        name: {
            "description": "Not honoured: other values are refused.",
            "enum": [None, *field.neutral],
        }
        for name, field in of_route(route).items()
        if field.status == "refused"
    }


_NAME = {"type": "string", "minLength": 1}
_MODEL = {"name": "model", "in": "path", "required": True, "schema": _NAME}
_TRACE = {
    "name": "seconds",
    "in": "query",
    "schema": {
        "type": "number",
        "exclusiveMinimum": 0,
        "maximum": MAX_TRACE_SECONDS,
        "default": 1,
    },
}
_SINCE = {
    "name": "since",
    "in": "query",
    "schema": {"type": "integer", "minimum": 0, "maximum": 10**15 - 1, "default": 0},
}


def _posted(text: str, schema: Any, streams: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {}}
    if streams:
        content["text/event-stream"] = {}
    return {
        "summary": text,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": "The answer", "content": content}, **_errors()},
    }


def _looked(text: str, kind: str, parameter: Any = None) -> dict[str, Any]:
    answer = {"200": {"description": "The answer", "content": {kind: {}}}}
    value: dict[str, Any] = {"summary": text, "responses": {**answer, **_errors()}}
    if parameter is not None:
        value["parameters"] = [parameter]
    return value


def _errors() -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": text, "content": content} for status, text in _WRONG.items()}
