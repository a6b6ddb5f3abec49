"""Chat messages in requests: their documented structure, validation and conversion.

A conversation is passed to the chat template as the client wrote it: members keep their order, and
members that only a template reads are kept. The structures here are used to validate conversations
and to create the OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from nanoactor.errors import InvalidRequest
from nanoactor.server.errors import invalid
from nanoactor.server.media import MediaLoader
from nanoactor.text.conversation import TEXT_PARTS, THOUGHT_PARTS, check_messages

_IMAGE = "image_url"
_MEDIA = {"image": "images", "audio": "audio", "video": "videos", "file": "files"}
"""Words that occur in the types of media parts, each mapped to the plural that error messages
use."""


class ImageURL(Struct, forbid_unknown_fields=True):
    """The address of a picture."""

    url: Annotated[
        str, Meta(description="A data:image/...;base64 URL, or a URL of an allowed host")
    ]
    detail: Literal["auto", "low", "high"] | None = None


class ContentPart(Struct, omit_defaults=True):
    """A part of a message's content: text, earlier reasoning of the assistant, or a picture if the
    model has vision."""

    type: Annotated[str, Meta(examples=[*TEXT_PARTS, *THOUGHT_PARTS, _IMAGE])]
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None
    image_url: ImageURL | None = None


class CalledFunction(Struct):
    """The function that an assistant called."""

    name: str
    arguments: Annotated[
        str | dict[str, Any] | None, Meta(description="JSON text or a JSON object")
    ] = None


class ToolCall(Struct):
    """A call in an assistant's earlier message."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class Message(Struct):
    """One message of a conversation. The fields that are null in what servers answer may come
    back as such; members that only the model's chat template knows are given to it."""

    role: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=64,
            description="system, developer, user, assistant, tool, or one of the model's own roles",
        ),
    ]
    content: str | list[ContentPart] | None = None
    reasoning_content: str | None = None
    reasoning: Annotated[str, Meta(description="Another name for reasoning_content")] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: Annotated[str, Meta(description="Passed to the chat template")] | None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Meta(description="Passed to the chat template")] | None = None


_KNOWN = frozenset(Message.__struct_fields__) | {"thinking"}
_KNOWN_OF_PART = frozenset(ContentPart.__struct_fields__) | {"detail"}
_KNOWN_OF_CALL = frozenset(ToolCall.__struct_fields__)
_KNOWN_OF_FUNCTION = frozenset(CalledFunction.__struct_fields__)


def check_conversation(messages: Sequence[Message], given: Sequence[Any], sees: bool) -> None:
    """Raise `APIError` if the messages are invalid, or if one contains a picture and `sees` is
    False. `given` contains the same messages as the client wrote them."""
    for number, message in enumerate(messages):
        for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
            _check_part(part, f"messages[{number}].content[{index}]", sees)
    try:
        check_messages(given)
    except InvalidRequest as error:
        raise invalid(str(error), "messages") from None


def _check_part(part: ContentPart, path: str, sees: bool) -> None:
    kind = part.type
    if kind in TEXT_PARTS or kind in THOUGHT_PARTS:
        name = (TEXT_PARTS | THOUGHT_PARTS)[kind]
        if getattr(part, name) is None:
            raise invalid(f"{path}: a part of type {kind!r} requires the field {name}", path)
        return
    if kind == _IMAGE:
        if not sees:
            raise invalid("this model does not accept images, only text", f"{path}.type")
        if part.image_url is None:
            raise invalid(f"{path}: a part of type {kind!r} requires the field {kind}", path)
        return
    if media := [many for one, many in _MEDIA.items() if one in kind]:
        text = f"{media[0]} are not supported here; a part must be text or {_IMAGE}"
        raise invalid(text, f"{path}.type")
    known = ", ".join([*TEXT_PARTS, *THOUGHT_PARTS, _IMAGE])
    raise invalid(
        f"{path}: the type of a part must be one of {known}, got {kind!r:.100}", f"{path}.type"
    )


def unread_members(given: Sequence[Any], read: Collection[str]) -> Iterator[str]:
    """Yield the paths of message members that this server does not know and the chat template does
    not read. `read` contains the names of the members that the template reads."""
    for number, message in enumerate(given):
        path = f"messages[{number}]"
        yield from _unread(message, _KNOWN, read, path)
        content, calls = message.get("content"), message.get("tool_calls")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            yield from _unread(part, _KNOWN_OF_PART, read, f"{path}.content[{index}]")
        for index, call in enumerate(calls if isinstance(calls, list) else ()):
            at = f"{path}.tool_calls[{index}]"
            yield from _unread(call, _KNOWN_OF_CALL, read, at)
            yield from _unread(call["function"], _KNOWN_OF_FUNCTION, read, f"{at}.function")


def _unread(
    given: Mapping[str, Any], known: Collection[str], read: Collection[str], path: str
) -> Iterator[str]:
    for name in given.keys() - known:
        if name not in read and given[name] not in (None, [], {}, ""):
            yield f"{path}.{name}"


def conversation(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages in the form that `AsyncLLM` accepts: only picture parts are changed."""
    return [_message(message) for message in given]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return {**message}
    return {**message, "content": [_part(part) for part in content]}


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part.get("type") != _IMAGE:
        return {**part}
    address = part[_IMAGE]
    return {"type": "image", "image": address["url"], "detail": address.get("detail") or "auto"}


def without_pictures(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with each picture part reduced to its type."""
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            bare = [{"type": "image"} if part["type"] == "image" else part for part in content]
            message = {**message, "content": bare}
        found.append({**message})
    return found


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message's content."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content)
    return content or ""


async def load_pictures(messages: Sequence[dict[str, Any]], loader: MediaLoader) -> None:
    """Replace picture URLs with the pictures' bytes, in place. Raises `InvalidRequest` if a picture
    cannot be loaded."""
    pictures = [
        part
        for message in messages
        for part in (message["content"] if isinstance(message.get("content"), list) else ())
        if part["type"] == "image"
    ]
    for part in pictures:  # sequentially, so that a request fetches only one at a time
        part["image"] = await loader.load(part["image"])
