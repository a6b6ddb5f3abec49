"""The messages of a conversation, from the HTTP API and from the library: one set of shapes.

`check_messages` rejects invalid messages; `fit_messages` converts the message forms of OpenAI's
API, vLLM and transformers to those that one chat template reads.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from nanoactor.errors import InvalidRequest

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts that hold text, and the member that holds it."""
THOUGHT_PARTS = {"thinking": "thinking", "reasoning": "text"}
"""Types of parts that hold an assistant's earlier reasoning, likewise."""
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""Names of an assistant's reasoning; the first one given counts, as in transformers."""
_OF_ROLE = {
    "tool_calls": "assistant",
    "reasoning_content": "assistant",
    "reasoning": "assistant",
    "tool_call_id": "tool",
}
STANDARD_ROLES = ("system", "developer", "user", "assistant", "tool")
_MOST_ROLE = 64
"""Characters of a role's name."""

NullContent = Literal["absent", "none", "empty"]


@dataclasses.dataclass(frozen=True, slots=True)
class Forms:
    """The forms of messages that a chat template reads."""

    part_roles: tuple[str, ...] = ()
    """Roles that accept a list of text parts as content; others get one text."""
    single_roles: tuple[str, ...] = ()
    """Roles that require a list with one text part as content."""
    argument_texts: bool = False
    """True if JSON-text arguments of a call are rendered unchanged."""
    argument_objects: bool = True
    """True if a call's arguments may be an object."""
    null_content: NullContent = "absent"
    """Replacement for null content."""
    names_developer: bool = False
    """True if the template knows the role "developer"; otherwise "system" is used."""


def check_messages(messages: Sequence[Any]) -> None:
    """Raise `InvalidRequest` for an invalid conversation, naming the place."""
    if not messages:
        raise InvalidRequest("the list of messages is empty")
    for number, message in enumerate(messages):
        try:
            _check_message(message)
        except InvalidRequest as error:
            raise InvalidRequest(f"messages[{number}]: {error}") from None


def _check_message(message: Any) -> None:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"a message must be a dict with a 'role', got {message!r:.100}")
    role, content = message["role"], message.get("content")
    if not role or len(role) > _MOST_ROLE:
        raise InvalidRequest(f"a role must have 1 to {_MOST_ROLE} characters, got {role!r:.100}")
    for name, owner in _OF_ROLE.items():
        if message.get(name) and role != owner and role in STANDARD_ROLES:
            raise InvalidRequest(f"{name} belongs to messages of the role {owner!r}")
    if not isinstance(content, str | list | tuple | None):
        raise InvalidRequest(
            f"content must be text, a list of parts or null, got {type(content).__name__}"
        )
    for index, part in enumerate(content if isinstance(content, list | tuple) else ()):
        _check_part(part, index, role)
    _check_calls(message.get("tool_calls"))


def _check_part(part: Any, index: int, role: str) -> None:
    if isinstance(part, str):
        return
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise InvalidRequest(f"content[{index}] must be text or a dict with a 'type'")
    name = TEXT_PARTS.get(kind) or THOUGHT_PARTS.get(kind)
    if name is not None and not isinstance(part.get(name), str):
        raise InvalidRequest(f"content[{index}]: a part of type {kind!r} needs a string {name!r}")
    if kind in THOUGHT_PARTS and role != "assistant":
        text = f"content[{index}]: {kind!r} belongs to messages of the role 'assistant'"
        raise InvalidRequest(text)


def _check_calls(calls: Any) -> None:
    if calls is None:
        return
    if not isinstance(calls, list | tuple):
        raise InvalidRequest(f"tool_calls must be a list, got {type(calls).__name__}")
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"tool_calls[{index}] must be a dict with a function's 'name'")
        if not isinstance(function.get("arguments"), str | Mapping | None):
            raise InvalidRequest(
                f"tool_calls[{index}]: arguments must be JSON text or an object, got "
                f"{type(function['arguments']).__name__}"
            )


def asks_for_forms(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if the messages depend on the forms that the template accepts."""
    return any(
        not isinstance(message.get("content"), str)
        or message.get("tool_calls")
        or message.get("role") == "developer"
        for message in messages
    )


def fit_messages(messages: Sequence[Mapping[str, Any]], forms: Forms) -> list[dict[str, Any]]:
    """Return the messages in these forms. Content in a valid form is kept, with unknown members in
    their order; null members are left out."""
    return [_fit_message(message, forms) for message in messages]


def _fit_message(given: Mapping[str, Any], forms: Forms) -> dict[str, Any]:
    message = {name: value for name, value in given.items() if value is not None}
    if message.get("role") == "developer" and not forms.names_developer:
        message["role"] = "system"
    content = message.get("content")
    thoughts = next((message[name] for name in REASONING_NAMES if name in message), None)
    if isinstance(content, list | tuple):
        parts, own = _without_thoughts(content)
        thoughts = own if thoughts is None and own else thoughts
        message["content"] = _fit_parts(parts, str(message.get("role")), forms)
    elif isinstance(content, str) and message.get("role") in forms.single_roles:
        message["content"] = [{"type": "text", "text": content}]
    elif content is None and forms.null_content != "absent" and "content" in given:
        message["content"] = None if forms.null_content == "none" else ""
    if message.get("tool_calls"):
        message["tool_calls"] = [_fit_call(call, forms) for call in message["tool_calls"]]
    if thoughts is not None:
        message = {"thinking": thoughts, **message, "reasoning_content": thoughts}
    return message


def _without_thoughts(content: Sequence[Any]) -> tuple[list[Any], str]:
    """Return a content's parts without those that hold reasoning, and the reasoning as one text."""
    parts, thoughts = [], []
    for part in content:
        name = THOUGHT_PARTS.get(str(part.get("type"))) if isinstance(part, Mapping) else None
        if name is None:
            parts.append(part)
        else:
            thoughts.append(part[name])
    return parts, "\n".join(thoughts)


def _fit_parts(parts: list[Any], role: str, forms: Forms) -> Any:
    """Return text parts as a list in the one form that templates read, or as one text with line
    breaks between them, as in vLLM. Parts that hold no text make a list in any case."""
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
    # Some programs send nothing where a call has no arguments.
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = "{}"
    if isinstance(arguments, str) and not forms.argument_texts:
        arguments = _decoded(arguments)
    elif not isinstance(arguments, str) and not forms.argument_objects:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": arguments}


def _decoded(arguments: str) -> Any:
    """Return the object encoded in a text; a template shows any other text unchanged."""
    try:
        decoded = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return decoded if isinstance(decoded, dict) else arguments


# -- to continue the last message -------------------------------------------------------------


def with_marker(messages: list[dict[str, Any]], marker: str) -> tuple[list[dict[str, Any]], str]:
    """Return (fitted messages with a unique marker at the end of the last one's content, the text
    before it). Raises `InvalidRequest` if that holds no text."""
    *others, last = messages
    content = last.get("content")
    if isinstance(content, str):
        return [*others, {**last, "content": content + marker}], content
    if isinstance(content, list) and content and isinstance(content[-1].get("text"), str):
        text = content[-1]["text"]
        part = {**content[-1], "text": text + marker}
        return [*others, {**last, "content": [*content[:-1], part]}], text
    raise InvalidRequest("continue_final_message needs text as the last message's content")


def up_to_marker(prompt: str, marker: str, text: str) -> str:
    """Return a prompt up to the marker that follows `text`, without the marker and the template's
    output after it.

    If the template trims the content, which shows in the space after the marker, the text before it
    is trimmed too, as in transformers. Raises `InvalidRequest` if the template has changed the
    text.
    """
    at = prompt.rfind(marker)
    if at < 0 or not prompt[:at].rstrip().endswith(text.strip()):
        raise InvalidRequest(
            "continue_final_message: the chat template does not show the last message's content as "
            "it was given"
        )
    is_kept = prompt[at + len(marker) :].startswith(" ")
    return prompt[:at] if is_kept else prompt[:at].rstrip()


# -- which forms a template reads -------------------------------------------------------------

Tried = Callable[[list[dict[str, Any]]], str]
"""Renders a conversation; returns an empty text if the template rejects it."""
_KEY, _ONE, _TWO = "probe_key", "probe one", "probe two"
_TEXT = json.dumps({_KEY: "probe value"})
_PARTS = [{"type": "text", "text": _ONE}, {"type": "text", "text": _TWO}]
_ASKS = {"role": "user", "content": "?"}


def find_forms(tried: Tried, source: str) -> Forms:
    """Find out by rendering probes which forms a template reads. `source` is the template's."""
    null_content, texts, objects = _argument_forms(tried)
    several = tuple(role for role in STANDARD_ROLES if _shows(tried, role, _PARTS))
    single = tuple(
        role
        for role in STANDARD_ROLES
        if role not in several and _shows(tried, role, _PARTS[:1]) and not _shows(tried, role, _ONE)
    )
    developer = "developer" in source
    return Forms(several, single, texts, objects, null_content, names_developer=developer)


def _argument_forms(tried: Tried) -> tuple[NullContent, bool, bool]:
    """Return the replacement for null content, and whether arguments may be text or objects."""
    contents: dict[NullContent, dict[str, Any]] = {
        "absent": {},
        "none": {"content": None},
        "empty": {"content": ""},
    }
    for name, content in contents.items():
        texts = _TEXT in tried(calling(content, _TEXT))
        shown = tried(calling(content, json.loads(_TEXT)))
        objects = _KEY in shown and f"'{_KEY}'" not in shown  # a Python object, printed
        if texts or objects:
            return name, texts, objects
    return "absent", False, True


def calling(content: Mapping[str, Any], arguments: Any) -> list[dict[str, Any]]:
    """Return a conversation in which an assistant calls a function and gets its result."""
    function = {"name": "f", "arguments": arguments}
    # Mistral's templates ask for ids of nine characters.
    call = {"id": "probe0001", "type": "function", "function": function}
    return [
        _ASKS,
        {"role": "assistant", **content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "probe0001", "name": "f", "content": "?"},
    ]


def _shows(tried: Tried, role: str, content: str | list[dict[str, str]]) -> bool:
    """Return True if the texts of such content are rendered unchanged, not as Python's repr."""
    message = {"role": role, "content": content}
    before: list[dict[str, Any]] = []
    if role == "assistant":
        before = [_ASKS]
    elif role == "tool":
        *before, result = calling({"content": ""}, json.loads(_TEXT))
        message = {**result, "content": content}
    shown = tried([*before, message, *([_ASKS] if role in ("system", "developer") else [])])
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return all(text in shown and f"'{text}'" not in shown for text in texts)
