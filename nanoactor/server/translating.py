"""Helpers shared by the translations of the Messages and Responses APIs to chats."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from nanoactor.server.errors import invalid

Warn = Callable[[str, str], None]
"""Function that logs an unsupported feature and its treatment once, or raises if strict."""
Chat = dict[str, Any]
"""Body of a chat request, or a part of it."""
ONLY_FUNCTIONS = "is left out of the prompt because only functions are supported"


def text_part(text: str) -> Chat:
    """Return a text part of a message's content."""
    return {"type": "text", "text": text}


def content_of(parts: list[Chat]) -> Any:
    """Return the parts joined into one text if all of them are text, which is equivalent, or else
    the list."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a translation that do not depend on the request."""

    accepts_images: bool = False
    """True if the model accepts images."""
    renders_result_pictures: bool = False
    """True if the model's chat template renders images in tool results."""
    drop_volatile_lines: bool = True


def split_pictures(parts: list[Chat], options: Options) -> tuple[Any, list[Chat]]:
    """Return the content of a tool result, and the images in it that its message cannot show, which
    follow in a user message."""
    if options.renders_result_pictures:
        return content_of(parts), []
    texts = [part for part in parts if part["type"] == "text"]
    return content_of(texts), [part for part in parts if part["type"] != "text"]


def require(value: Any, name: str, path: str) -> Any:
    """Return `value`, a member of the object at `path`; raise `APIError` if it is missing."""
    if value is None:
        raise invalid(f"{path} requires the field {name}", f"{path}.{name}")
    return value


def function_tool(name: str, description: str | None, schema: Any, strict: bool | None) -> Chat:
    """Return a function as a tool of a chat request."""
    members = {"name": name, "description": description, "parameters": schema, "strict": strict}
    present = {key: value for key, value in members.items() if value is not None}
    return {"type": "function", "function": present}
