"""Requests of the Messages API as chats."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from nanoactor.server.anthropic.request import (
    AnthropicMessage,
    AnthropicTool,
    Block,
    CountTokensRequest,
    MessagesRequest,
    Source,
)
from nanoactor.server.canonical import ordered_arguments, ordered_schema
from nanoactor.server.errors import invalid
from nanoactor.server.fields import EXTENSIONS
from nanoactor.server.sealed import unseal

Warn = Callable[[str, str], None]
"""Takes a name and what becomes of it; logs that once."""
Chat = dict[str, Any]

VOLATILE_LINES = (re.compile(r"x-anthropic-billing-header:[^\n]*\n*"),)
"""Lines at the beginning of a system text that some clients change with every request, and that say
nothing to a model. Claude Code's names its version, and elsewhere a checksum of the request."""
_LEFT_OUT = "is left out of the prompt: only functions are called here"
_SERVER_BLOCKS = ("server_tool_use", "mcp_tool_use", "mcp_tool_result", "container_upload")
"""Blocks of tools that Anthropic runs itself; so are those that end with `_tool_result`."""
NAMES = {
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
}
"""Names of a chat's fields in this API, for errors."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Choices that requests leave open."""

    sees: bool = False
    """Whether the model takes pictures."""
    drop_volatile_lines: bool = True


def to_chat(body: MessagesRequest | CountTokensRequest, options: Options, warn: Warn) -> Chat:
    """Return the body of a chat that asks for the same. Raises `APIError`, naming the field."""
    tools = _Tools(body.tools or (), warn)
    reader = _Reader(tools, options, warn)
    messages = [
        message for text in reader.system(body.system) for message in (_said("system", text),)
    ]
    for number, message in enumerate(body.messages):
        messages += reader.message(message, f"messages[{number}]")
    chat: Chat = {"model": body.model, "messages": messages, "separate_reasoning": True}
    if tools.functions:
        chat["tools"] = tools.functions
    chat |= _choice(body, tools)
    chat |= _thinking(body)
    if _is_prefix(messages):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    output = body.output_config
    form = (output and output.format) or body.output_format
    if form is not None:
        schema = {"name": "answer", "schema": form.schema}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if body.chat_template_kwargs:
        chat["chat_template_kwargs"] = body.chat_template_kwargs
    if isinstance(body, MessagesRequest):
        chat |= _sampling(body)
    return chat


def _said(role: str, content: Any) -> Chat:
    return {"role": role, "content": content}


def _is_prefix(messages: Sequence[Chat]) -> bool:
    """Tell whether the last message is the beginning of the answer."""
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and bool(last["content"]) and "tool_calls" not in last


def _sampling(body: MessagesRequest) -> Chat:
    given = {name: getattr(body, name) for name in EXTENSIONS}
    given |= {"stop": body.stop_sequences, "priority": body.priority, "stream": body.stream}
    found = {name: value for name, value in given.items() if value is not None}
    return {**found, "max_tokens": body.max_tokens}


def _thinking(body: MessagesRequest | CountTokensRequest) -> Chat:
    """Return the fields that a template may read; the model's own way where nothing is said."""
    found: Chat = {}
    if body.output_config is not None and body.output_config.effort is not None:
        found["reasoning_effort"] = body.output_config.effort
    if body.thinking is not None:
        found["enable_thinking"] = body.thinking.type != "disabled"
    return found


def _choice(body: MessagesRequest | CountTokensRequest, tools: _Tools) -> Chat:
    choice = body.tool_choice
    if choice is None:
        return {}
    found: Chat = {}
    if choice.type == "tool":
        if choice.name is None:
            raise invalid('tool_choice: the type "tool" needs a name', "tool_choice.name")
        if choice.name not in tools.schemas:
            known = ", ".join(map(repr, tools.schemas)) or "there are none"
            text = f"tool_choice: {choice.name!r:.100} is none of the tools: {known}"
            raise invalid(text, "tool_choice.name")
        found["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice.type == "any" or tools.functions:
        found["tool_choice"] = {"any": "required"}.get(choice.type, choice.type)
    if choice.disable_parallel_tool_use:
        found["parallel_tool_calls"] = False
    return found


class _Tools:
    """The functions among a request's tools."""

    def __init__(self, tools: Sequence[AnthropicTool], warn: Warn) -> None:
        self.functions: list[Chat] = []
        self.schemas: dict[str, Any] = {}
        """Of the arguments of each function, by its name."""
        for number, tool in enumerate(tools):
            if tool.type not in (None, "custom"):
                warn(f"tools: {tool.type}", _LEFT_OUT)
                continue
            if not tool.name or tool.input_schema is None:
                needed = "input_schema" if tool.name else "name"
                raise invalid(f"tools[{number}] needs {needed}", f"tools[{number}].{needed}")
            schema = ordered_schema(tool.input_schema)
            self.schemas[tool.name] = schema
            function = {"name": tool.name, "description": tool.description, "parameters": schema}
            if tool.strict is not None:
                function["strict"] = tool.strict
            shown = {name: value for name, value in function.items() if value is not None}
            self.functions.append({"type": "function", "function": shown})


class _Reader:
    """Reads messages and their blocks."""

    def __init__(self, tools: _Tools, options: Options, warn: Warn) -> None:
        self._tools, self._options, self._warn = tools, options, warn

    def system(self, given: str | list[Block] | None) -> list[str]:
        """Return the system's text, if there is any, without lines that change by themselves."""
        blocks = [Block("text", text=given)] if isinstance(given, str) else given or []
        texts = []
        for number, block in enumerate(blocks):
            path = f"system[{number}]"
            if block.type != "text" or block.text is None:
                raise invalid(f"{path} must be a block of type 'text' with a text", path)
            if text := self._without_volatile(block.text):
                texts.append(text)
        return ["\n".join(texts)] if texts else []

    def _without_volatile(self, text: str) -> str:
        if not self._options.drop_volatile_lines:
            return text
        for pattern in VOLATILE_LINES:
            if found := pattern.match(text):
                name = found[0].partition(":")[0]
                self._warn(f"system: {name}", "is left out of prompts: it changes by itself")
                text = text[found.end() :]
        return text

    def message(self, message: AnthropicMessage, path: str) -> Iterator[Chat]:
        """Yield the messages of a chat that one becomes: results of tools have their own."""
        given = message.content
        blocks = [Block("text", text=given)] if isinstance(given, str) else given
        if message.role == "system":
            for text in self.system(blocks):
                yield _said("system", text)
        elif message.role == "assistant":
            yield self._assistant(blocks, path)
        else:
            yield from self._user(blocks, path)

    def _user(self, blocks: Sequence[Block], path: str) -> Iterator[Chat]:
        parts: list[Chat] = []
        pictures: list[Chat] = []
        for index, block in enumerate(blocks):
            at = f"{path}.content[{index}]"
            if block.type != "tool_result":
                parts += [*pictures, *self._parts(block, at)]
                pictures = []
                continue
            if parts:
                yield _said("user", _content(parts))
                parts = []
            shown = self._result(block, at)
            texts = [part for part in shown if part["type"] == "text"]
            result = _said("tool", _content(texts))
            yield {**result, "tool_call_id": _needed(block.tool_use_id, "tool_use_id", at)}
            # Templates show no pictures in results: they follow, in a message of the user's.
            pictures += [part for part in shown if part["type"] != "text"]
        if parts or pictures or not blocks:
            yield _said("user", _content([*parts, *pictures]))

    def _result(self, block: Block, path: str) -> list[Chat]:
        given = block.content
        if not isinstance(given, list):
            return [_text(given)] if isinstance(given, str) else []
        return [
            part
            for number, one in enumerate(given)
            for part in self._parts(
                _block(one, f"{path}.content[{number}]"), f"{path}.content[{number}]"
            )
        ]

    def _parts(self, block: Block, path: str) -> list[Chat]:
        """Return the parts of a chat's content that a block becomes."""
        match block.type:
            case "text":
                return [_text(_needed(block.text, "text", path))]
            case "image":
                if not self._options.sees:
                    raise invalid("this model takes no images, only text", f"{path}.type")
                address = _address(_needed(block.source, "source", path), path)
                return [{"type": "image_url", "image_url": {"url": address}}]
            case "document":
                source = _needed(block.source, "source", path)
                if source.type != "text" or source.data is None:
                    raise invalid(f"{path}: of documents only text is taken", f"{path}.source")
                return [_text("\n".join(filter(None, (block.title, source.data))))]
            case "search_result":
                shown = self._result(block, path)
                return [_text(block.title), *shown] if block.title else shown
            case "tool_reference":
                self._warn("messages: tool_reference", "is left out: all tools are shown")
                return []
        if self._is_of_server(block):
            return []
        raise invalid(f"{path}: the type {block.type!r:.100} is not taken here", f"{path}.type")

    def _is_of_server(self, block: Block) -> bool:
        of_server = block.type in _SERVER_BLOCKS or block.type.endswith("_tool_result")
        if of_server:
            self._warn(f"messages: {block.type[:60]}", "is left out of prompts")
        return of_server

    def _assistant(self, blocks: Sequence[Block], path: str) -> Chat:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[Chat] = []
        for index, block in enumerate(blocks):
            at = f"{path}.content[{index}]"
            match block.type:
                case "text":
                    texts.append(_needed(block.text, "text", at))
                case "thinking":
                    thoughts.append(block.thinking or unseal(block.signature or "") or "")
                case "redacted_thinking":
                    thoughts.append(unseal(block.data or "") or "")
                case "tool_use":
                    calls.append(self._call(block, at))
                case _ if not self._is_of_server(block):
                    raise invalid(f"{at}: an assistant has no {block.type!r:.100}", f"{at}.type")
        message = _said("assistant", "\n".join(text for text in texts if text))
        if shown := "\n".join(text for text in thoughts if text):
            message["reasoning_content"] = shown
        if calls:
            message["tool_calls"] = calls
        return message

    def _call(self, block: Block, path: str) -> Chat:
        name, arguments = _needed(block.name, "name", path), block.input or {}
        function = {
            "name": name,
            "arguments": ordered_arguments(arguments, self._tools.schemas.get(name)),
        }
        call = {"id": block.id} if block.id is not None else {}
        return {**call, "type": "function", "function": function}


def _content(parts: list[Chat]) -> Any:
    """Return parts as one text where they are nothing else: a list and a text are the same."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _text(text: str) -> Chat:
    return {"type": "text", "text": text}


def _needed(value: Any, name: str, path: str) -> Any:
    if value is None:
        raise invalid(f"{path} needs {name}", f"{path}.{name}")
    return value


def _block(given: Any, path: str) -> Block:
    """Return a block within another, of which only a few members count."""
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(kind, str):
        raise invalid(f"{path} must be a block with a type", path)
    block = Block(kind)
    for name in ("text", "title"):
        value = given.get(name)
        if value is not None and not isinstance(value, str):
            raise invalid(f"{path}.{name} must be a text", f"{path}.{name}")
        setattr(block, name, value)
    if (source := given.get("source")) is not None:
        try:
            block.source = msgspec.convert(source, Source)
        except msgspec.ValidationError as error:
            raise invalid(f"{path}.source: {error}", f"{path}.source") from None
    content = given.get("content")
    block.content = content if isinstance(content, str | list) else None
    return block


def _address(source: Source, path: str) -> str:
    """Return the URL of a picture, which may hold it."""
    if source.type == "url" and source.url is not None:
        return source.url
    if source.type == "base64" and source.data is not None:
        return f"data:{source.media_type or 'image/png'};base64,{source.data}"
    raise invalid(
        f"{path}.source must be of type 'base64' with data, or 'url' with a url; files are not "
        "stored here",
        f"{path}.source",
    )
