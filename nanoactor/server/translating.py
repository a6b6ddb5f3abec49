"""Helpers for converting requests of the Messages API and the Responses API to chat requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from nanoactor.server.errors import invalid

Warn = Callable[[str, str], None]
"""Function that receives the name of an unsupported feature and how it is treated. It logs each
name once. In strict mode, it raises `APIError` instead."""
Chat = dict[str, Any]
"""Body of a chat request, or an object inside it."""
ONLY_FUNCTIONS = "is left out of the prompt because only functions are supported"


def text_part(text: str) -> Chat:
    """Create a text part for the content of a chat message."""
    return {"type": "text", "text": text}


def content_of(parts: list[Chat]) -> Any:
    """Return content parts as one text, joined with line breaks, if all of them are text.
    Otherwise, return them as a list."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


@dataclasses.dataclass(frozen=True)
class Options:
    """Properties of the model and the server that affect the conversion of every request."""

    accepts_images: bool = False
    """True if the model accepts images."""
    renders_result_images: bool = False
    """True if the chat template renders images inside tool results."""
    drop_volatile_lines: bool = True


def split_images(parts: list[Chat], options: Options) -> tuple[Any, list[Chat]]:
    """Split a tool result. Return its content, and the images that the chat template cannot render
    inside a tool message. The caller puts these images into a user message."""
    if options.renders_result_images:
        return content_of(parts), []
    texts = [part for part in parts if part["type"] == "text"]
    return content_of(texts), [part for part in parts if part["type"] != "text"]


def require(value: Any, name: str, path: str) -> Any:
    """Return `value`, the member `name` of the object at `path`. Raises `APIError` if the value is
    None."""
    if value is None:
        raise invalid(f"{path} requires the field {name}", f"{path}.{name}")
    return value


def function_tool(name: str, description: str | None, schema: Any, strict: bool | None) -> Chat:
    """Create a tool of a chat request from a function. Values that are None are omitted."""
    members = {"name": name, "description": description, "parameters": schema, "strict": strict}
    present = {key: value for key, value in members.items() if value is not None}
    return {"type": "function", "function": present}
