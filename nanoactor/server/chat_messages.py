"""Chat messages in requests: their structure, validation and conversion.

A conversation is passed to the chat template in the form in which the client sent it: members keep
their order, and members that only a template reads are kept. The structures here serve to validate
conversations and to generate the OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from nanoactor.errors import InvalidRequest
from nanoactor.server.errors import invalid
from nanoactor.server.media import MediaLoader
from nanoactor.text.conversation import REASONING_PARTS, TEXT_PARTS, check_messages

_IMAGE = "image_url"
_MEDIA = {"image": "images", "audio": "audio", "video": "videos", "file": "files"}
"""Words that occur in the types of media parts, each mapped to its plural for error messages."""


class ImageURL(Struct, forbid_unknown_fields=True):
    """An image, as a URL or with its data in a `data:` URL."""

    url: Annotated[
        str, Meta(description="A data:image/...;base64 URL, or a URL of an allowed host")
    ]
    detail: Literal["auto", "low", "high"] | None = None


class ContentPart(Struct, omit_defaults=True):
    """A content part of a message: text, the assistant's earlier reasoning, or, for vision models,
    an image."""

    type: Annotated[str, Meta(examples=[*TEXT_PARTS, *REASONING_PARTS, _IMAGE])]
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None
    image_url: ImageURL | None = None


class CalledFunction(Struct):
    """The function that the assistant called, and its arguments."""

    name: str
    arguments: Annotated[
        str | dict[str, Any] | None, Meta(description="JSON text or a JSON object")
    ] = None


class ToolCall(Struct):
    """A function call in an earlier message of the assistant."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class Message(Struct):
    """A message of a conversation. Members that are not declared here are passed to the chat
    template. Members that servers return as null may be sent back as null."""

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


_MESSAGE_MEMBERS = frozenset(Message.__struct_fields__) | {"thinking"}
_PART_MEMBERS = frozenset(ContentPart.__struct_fields__) | {"detail"}
_CALL_MEMBERS = frozenset(ToolCall.__struct_fields__)
_FUNCTION_MEMBERS = frozenset(CalledFunction.__struct_fields__)


def check_conversation(
    messages: Sequence[Message], raw: Sequence[Any], accepts_images: bool
) -> None:
    """Raise `APIError` if a message is invalid, or if it contains an image and `accepts_images` is
    False. `raw` contains the same messages as plain JSON values."""
    for number, message in enumerate(messages):
        for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
            _check_part(part, f"messages[{number}].content[{index}]", accepts_images)
    try:
        check_messages(raw)
    except InvalidRequest as error:
        raise invalid(str(error), "messages") from None


def _check_part(part: ContentPart, path: str, accepts_images: bool) -> None:
    kind = part.type
    if kind in TEXT_PARTS or kind in REASONING_PARTS:
        name = (TEXT_PARTS | REASONING_PARTS)[kind]
        if getattr(part, name) is None:
            raise invalid(f"{path}: a part of type {kind!r} requires the field {name}", path)
        return
    if kind == _IMAGE:
        if not accepts_images:
            raise invalid("this model does not accept images, only text", f"{path}.type")
        if part.image_url is None:
            raise invalid(f"{path}: a part of type {kind!r} requires the field {kind}", path)
        return
    if media := [many for one, many in _MEDIA.items() if one in kind]:
        text = f"{media[0]} are not supported here; a part must be text or {_IMAGE}"
        raise invalid(text, f"{path}.type")
    known = ", ".join([*TEXT_PARTS, *REASONING_PARTS, _IMAGE])
    raise invalid(
        f"{path}: the type of a part must be one of {known}, got {kind!r:.100}", f"{path}.type"
    )


def unknown_members(raw: Sequence[Any], template_members: Collection[str]) -> Iterator[str]:
    """Yield the paths of message members that neither this server nor the chat template reads.
    `template_members` are the names of members that the template reads."""
    for number, message in enumerate(raw):
        path = f"messages[{number}]"
        yield from _unknown_in(message, _MESSAGE_MEMBERS, template_members, path)
        content, calls = message.get("content"), message.get("tool_calls")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            yield from _unknown_in(
                part, _PART_MEMBERS, template_members, f"{path}.content[{index}]"
            )
        for index, call in enumerate(calls if isinstance(calls, list) else ()):
            at = f"{path}.tool_calls[{index}]"
            yield from _unknown_in(call, _CALL_MEMBERS, template_members, at)
            yield from _unknown_in(
                call["function"], _FUNCTION_MEMBERS, template_members, f"{at}.function"
            )


def _unknown_in(
    value: Mapping[str, Any],
    known_members: Collection[str],
    template_members: Collection[str],
    path: str,
) -> Iterator[str]:
    for name in value.keys() - known_members:
        if name not in template_members and value[name] not in (None, [], {}, ""):
            yield f"{path}.{name}"


def conversation(raw: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert messages to the form that `AsyncLLM` accepts. Only image parts are changed."""
    return [_message(message) for message in raw]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return {**message}
    return {**message, "content": [_part(part) for part in content]}


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part.get("type") != _IMAGE:
        return {**part}
    image = part[_IMAGE]
    return {"type": "image", "image": image["url"], "detail": image.get("detail") or "auto"}


def without_images(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a copy of the messages in which each image part has only its type."""
    reduced_messages = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            reduced = [{"type": "image"} if part["type"] == "image" else part for part in content]
            message = {**message, "content": reduced}
        reduced_messages.append({**message})
    return reduced_messages


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message. Several text parts are joined with line breaks."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content)
    return content or ""


async def load_images(messages: Sequence[dict[str, Any]], loader: MediaLoader) -> None:
    """Replace image URLs in content parts with the bytes of the images, in place. Raises
    `InvalidRequest` if an image cannot be loaded."""
    images = [
        part
        for message in messages
        for part in (message["content"] if isinstance(message.get("content"), list) else ())
        if part["type"] == "image"
    ]
    for part in images:  # one after the other, so that a request fetches only one image at a time
        part["image"] = await loader.load(part["image"])
