"""Vocabulary of the two translations to chats."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from nanoactor.server.errors import invalid

Warn = Callable[[str, str], None]
"""Called with a name and its treatment; logs it once, or raises if strict."""
Chat = dict[str, Any]
"""A chat's body, or a part of it."""
LEFT_OUT = "is left out of the prompt: only functions are called here"


def text_part(text: str) -> Chat:
    """Return a part of a chat's content."""
    return {"type": "text", "text": text}


def content_of(parts: list[Chat]) -> Any:
    """Return parts as one text if they are nothing else: a list and a text are the same."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


@dataclasses.dataclass(frozen=True)
class Options:
    """Choices that requests leave open."""

    sees: bool = False
    """True if the model takes images."""
    shows_result_pictures: bool = False
    """True if its chat template renders images in tool results."""
    drop_volatile_lines: bool = True


def split_pictures(parts: list[Chat], options: Options) -> tuple[Any, list[Chat]]:
    """Return the content of a tool's result, and the pictures in it that its message cannot show:
    they follow in a user message."""
    if options.shows_result_pictures:
        return content_of(parts), []
    texts = [part for part in parts if part["type"] == "text"]
    return content_of(texts), [part for part in parts if part["type"] != "text"]


def needed(value: Any, name: str, path: str) -> Any:
    """Return a member of the object at a path; raise `APIError` if it is missing."""
    if value is None:
        raise invalid(f"{path} needs {name}", f"{path}.{name}")
    return value


def function_tool(name: str, description: str | None, schema: Any, strict: bool | None) -> Chat:
    """Return a function as a chat has it."""
    members = {"name": name, "description": description, "parameters": schema, "strict": strict}
    shown = {key: value for key, value in members.items() if value is not None}
    return {"type": "function", "function": shown}
