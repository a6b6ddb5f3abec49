"""Chat messages: validation, and conversion to the forms that a chat template reads. The HTTP API
and the library share this module.

`check_messages` rejects invalid messages. `fit_messages` converts the forms of OpenAI's API, vLLM
and transformers to those that a given chat template reads.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from nanoactor.errors import InvalidRequest

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that contain text, and the field of the part in which each type stores
it."""
REASONING_PARTS = {"thinking": "thinking", "reasoning": "text"}
"""Types of content parts that contain an assistant's earlier reasoning, and the field of the part
in which each type stores it."""
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""Fields in which a message may contain the assistant's reasoning. The first one present is used,
as in transformers."""
_ROLE_OF_MEMBER = {
    "tool_calls": "assistant",
    "reasoning_content": "assistant",
    "reasoning": "assistant",
    "tool_call_id": "tool",
}
STANDARD_ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_ROLE_CHARACTERS = 64
"""Maximum length of a role's name, in characters."""

NullContent = Literal["absent", "none", "empty"]


@dataclasses.dataclass(frozen=True, slots=True)
class Forms:
    """The forms in which a model's chat template expects messages, as detected by
    `detect_forms`."""

    part_roles: tuple[str, ...] = ()
    """Roles whose content may be a list of text parts. For other roles, the parts are joined into
    one string."""
    single_roles: tuple[str, ...] = ()
    """Roles whose content must be a list of exactly one text part."""
    accepts_text_arguments: bool = False
    """True if a tool call's arguments may be JSON text, which appears unchanged in the prompt."""
    accepts_object_arguments: bool = True
    """True if a tool call's arguments may be a JSON object (a dict)."""
    null_content: NullContent = "absent"
    """Representation of null content: without the field, as None, or as an empty string."""
    supports_developer: bool = False
    """True if the template supports the role "developer"; otherwise, "system" replaces it."""


def check_messages(messages: Sequence[Any]) -> None:
    """Raise `InvalidRequest` for an invalid conversation. The error message contains the position,
    such as `messages[2]`."""
    if not messages:
        raise InvalidRequest("the list of messages must not be empty")
    for number, message in enumerate(messages):
        try:
            _check_message(message)
        except InvalidRequest as error:
            raise InvalidRequest(f"messages[{number}]: {error}") from None


def _check_message(message: Any) -> None:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"a message must be a dict with the key 'role', got {message!r:.100}")
    role, content = message["role"], message.get("content")
    if not role or len(role) > _MAX_ROLE_CHARACTERS:
        raise InvalidRequest(
            f"a role must have 1 to {_MAX_ROLE_CHARACTERS} characters, got {role!r:.100}"
        )
    for name, owner in _ROLE_OF_MEMBER.items():
        if message.get(name) and role != owner and role in STANDARD_ROLES:
            raise InvalidRequest(f"{name} is allowed only in messages with the role {owner!r}")
    if not isinstance(content, str | list | tuple | None):
        raise InvalidRequest(
            f"content must be a string, a list of parts or null, got {type(content).__name__}"
        )
    for index, part in enumerate(content if isinstance(content, list | tuple) else ()):
        _check_part(part, index, role)
    _check_calls(message.get("tool_calls"))


def _check_part(part: Any, index: int, role: str) -> None:
    if isinstance(part, str):
        return
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise InvalidRequest(f"content[{index}] must be a string or a dict with the key 'type'")
    name = TEXT_PARTS.get(kind) or REASONING_PARTS.get(kind)
    if name is not None and not isinstance(part.get(name), str):
        raise InvalidRequest(
            f"content[{index}]: a part of type {kind!r} must have a field {name!r} that is a string"
        )
    if kind in REASONING_PARTS and role != "assistant":
        text = (
            f"content[{index}]: a part of type {kind!r} is allowed only in messages with the "
            "role 'assistant'"
        )
        raise InvalidRequest(text)


def _check_calls(calls: Any) -> None:
    if calls is None:
        return
    if not isinstance(calls, list | tuple):
        raise InvalidRequest(f"tool_calls must be a list, got {type(calls).__name__}")
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(
                f"tool_calls[{index}] must be a dict with the 'name' of a function"
            )
        if not isinstance(function.get("arguments"), str | Mapping | None):
            raise InvalidRequest(
                f"tool_calls[{index}]: arguments must be JSON text or an object, got "
                f"{type(function['arguments']).__name__}"
            )


def depends_on_forms(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if a message contains something that templates expect in different forms: tool
    calls, content that is not a string, or the role "developer"."""
    return any(
        not isinstance(message.get("content"), str)
        or message.get("tool_calls")
        or message.get("role") == "developer"
        for message in messages
    )


def fit_messages(messages: Sequence[Mapping[str, Any]], forms: Forms) -> list[dict[str, Any]]:
    """Convert messages to the forms that a template expects. Content that already has a valid form
    is kept, and unknown fields keep their order. Null fields are omitted, except for null content,
    which is represented as in `forms.null_content`."""
    return [_fit_message(message, forms) for message in messages]


def _fit_message(given: Mapping[str, Any], forms: Forms) -> dict[str, Any]:
    message = {name: value for name, value in given.items() if value is not None}
    if message.get("role") == "developer" and not forms.supports_developer:
        message["role"] = "system"
    content = message.get("content")
    reasoning = next((message[name] for name in REASONING_NAMES if name in message), None)
    if isinstance(content, list | tuple):
        parts, inline_reasoning = _split_reasoning(content)
        reasoning = inline_reasoning if reasoning is None and inline_reasoning else reasoning
        message["content"] = _fit_parts(parts, str(message.get("role")), forms)
    elif isinstance(content, str) and message.get("role") in forms.single_roles:
        message["content"] = [{"type": "text", "text": content}]
    elif content is None and forms.null_content != "absent" and "content" in given:
        message["content"] = None if forms.null_content == "none" else ""
    if message.get("tool_calls"):
        message["tool_calls"] = [_fit_call(call, forms) for call in message["tool_calls"]]
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _split_reasoning(content: Sequence[Any]) -> tuple[list[Any], str]:
    """Separate reasoning from other content parts. Return the other parts, and the reasoning as one
    string, which is empty if there is none."""
    parts, reasoning = [], []
    for part in content:
        name = REASONING_PARTS.get(str(part.get("type"))) if isinstance(part, Mapping) else None
        if name is None:
            parts.append(part)
        else:
            reasoning.append(part[name])
    return parts, "\n".join(reasoning)


def _fit_parts(parts: list[Any], role: str, forms: Forms) -> Any:
    """Convert content parts to the form that the template expects for `role`: a list of parts, or
    one string with the parts joined by line breaks, as in vLLM. If any part is not text, always
    return a list."""
    fitted = [_fit_part(part) for part in parts]
    if role in forms.part_roles or any(part.get("type") != "text" for part in fitted):
        return fitted
    text = "\n".join(part["text"] for part in fitted)
    return [{"type": "text", "text": text}] if role in forms.single_roles else text


def _fit_part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    name = TEXT_PARTS.get(part.get("type"))
    if name is None or part.get("type") == "text":
        return dict(part)
    others = {key: value for key, value in part.items() if key not in ("type", name)}
    return {"type": "text", "text": part[name], **others}


def _fit_call(call: Mapping[str, Any], forms: Forms) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _fit_arguments(call["function"], forms)}
    return _fit_arguments(call, forms)


def _fit_arguments(function: Mapping[str, Any], forms: Forms) -> dict[str, Any]:
    if "arguments" not in function:
        return dict(function)
    arguments = function["arguments"]
    # Some clients send null or an empty string for a call without arguments.
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = "{}"
    if isinstance(arguments, str) and not forms.accepts_text_arguments:
        arguments = _parse_arguments(arguments)
    elif not isinstance(arguments, str) and not forms.accepts_object_arguments:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": arguments}


def _parse_arguments(arguments: str) -> Any:
    """Parse call arguments in JSON. If the text does not encode an object, return it unchanged, so
    that it is rendered as it is."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


# -- continuing the last message --------------------------------------------------------------


def append_marker(messages: list[dict[str, Any]], marker: str) -> tuple[list[dict[str, Any]], str]:
    """Append a unique marker to the content of the last message. Return the messages, and the text
    that precedes the marker.

    `messages` must come from `fit_messages`. Raises `InvalidRequest` if the content has no text to
    continue.
    """
    *others, last = messages
    content = last.get("content")
    if isinstance(content, str):
        return [*others, {**last, "content": content + marker}], content
    if isinstance(content, list) and content and isinstance(content[-1].get("text"), str):
        text = content[-1]["text"]
        part = {**content[-1], "text": text + marker}
        return [*others, {**last, "content": [*content[:-1], part]}], text
    raise InvalidRequest(
        "continue_final_message requires the last message to have text as its content"
    )


def cut_at_marker(prompt: str, marker: str, text: str) -> str:
    """Cut a rendered prompt off at the marker that follows `text`, so that the model continues the
    last message.

    `append_marker` inserted the marker with a space after it. If the template trimmed that space,
    the end of the prompt is trimmed too, as in transformers. Raises `InvalidRequest` if the
    template changed the text.
    """
    at = prompt.rfind(marker)
    if at < 0 or not prompt[:at].rstrip().endswith(text.strip()):
        raise InvalidRequest(
            "continue_final_message cannot be used here, because the chat template changes the "
            "content of the last message"
        )
    keeps_space = prompt[at + len(marker) :].startswith(" ")
    return prompt[:at] if keeps_space else prompt[:at].rstrip()


# -- which forms a template reads -------------------------------------------------------------

RenderProbe = Callable[[list[dict[str, Any]]], str]
"""Function that renders a conversation. It returns an empty string if the template rejects the
conversation."""
_KEY, _ONE, _TWO = "probe_key", "probe one", "probe two"
_TEXT = json.dumps({_KEY: "probe value"})
_PARTS = [{"type": "text", "text": _ONE}, {"type": "text", "text": _TWO}]
_USER_TURN = {"role": "user", "content": "?"}


def detect_forms(render_probe: RenderProbe, source: str) -> Forms:
    """Determine which message forms a template reads, by rendering test conversations. `source` is
    the template's source text."""
    null_content, accepts_text, accepts_objects = _argument_forms(render_probe)
    list_roles = tuple(
        role for role in STANDARD_ROLES if _renders_unchanged(render_probe, role, _PARTS)
    )
    single_roles = tuple(
        role
        for role in STANDARD_ROLES
        if role not in list_roles
        and _renders_unchanged(render_probe, role, _PARTS[:1])
        and not _renders_unchanged(render_probe, role, _ONE)
    )
    developer = "developer" in source
    return Forms(
        list_roles,
        single_roles,
        accepts_text,
        accepts_objects,
        null_content,
        supports_developer=developer,
    )


def _argument_forms(render_probe: RenderProbe) -> tuple[NullContent, bool, bool]:
    """Return the form of null content that the template expects, whether call arguments may be JSON
    text, and whether they may be objects."""
    contents: dict[NullContent, dict[str, Any]] = {
        "absent": {},
        "none": {"content": None},
        "empty": {"content": ""},
    }
    for name, content in contents.items():
        accepts_text = _TEXT in render_probe(tool_call_conversation(content, _TEXT))
        rendered = render_probe(tool_call_conversation(content, json.loads(_TEXT)))
        accepts_objects = (
            _KEY in rendered and f"'{_KEY}'" not in rendered
        )  # else it is rendered as a Python repr
        if accepts_text or accepts_objects:
            return name, accepts_text, accepts_objects
    return "absent", False, True


def tool_call_conversation(content: Mapping[str, Any], arguments: Any) -> list[dict[str, Any]]:
    """Return a conversation in which the assistant calls a function `f` and receives its result.
    `content` is merged into the assistant's message."""
    function = {"name": "f", "arguments": arguments}
    # Mistral's templates require ids of nine characters.
    call = {"id": "probe0001", "type": "function", "function": function}
    return [
        _USER_TURN,
        {"role": "assistant", **content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "probe0001", "name": "f", "content": "?"},
    ]


def _renders_unchanged(
    render_probe: RenderProbe, role: str, content: str | list[dict[str, str]]
) -> bool:
    """Return True if the template copies the texts in `content` to the prompt verbatim, rather than
    as the repr of a Python list."""
    message = {"role": role, "content": content}
    before: list[dict[str, Any]] = []
    if role == "assistant":
        before = [_USER_TURN]
    elif role == "tool":
        *before, result = tool_call_conversation({"content": ""}, json.loads(_TEXT))
        message = {**result, "content": content}
    rendered = render_probe(
        [*before, message, *([_USER_TURN] if role in ("system", "developer") else [])]
    )
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return all(text in rendered and f"'{text}'" not in rendered for text in texts)
