"""Conversion of Messages API requests to chat requests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
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
from nanoactor.server.canonical import ArgumentOrder, canonical_schema
from nanoactor.server.errors import invalid
from nanoactor.server.fields import EXTENSIONS
from nanoactor.server.sealed import unseal
from nanoactor.server.translating import (
    ONLY_FUNCTIONS,
    Chat,
    Options,
    Warn,
    content_of,
    function_tool,
    require,
    split_images,
    text_part,
)

VOLATILE_LINES = (re.compile(r"x-anthropic-billing-header:[^\n]*\n*"),)
"""Patterns of lines at the start of a system prompt that some clients change with every request.
Such lines mean nothing to a model, but would invalidate the prefix cache. Claude Code's line
contains its version and a checksum of the request."""
_SERVER_BLOCK_TYPES = ("server_tool_use", "mcp_tool_use", "mcp_tool_result", "container_upload")
"""Types of content blocks for tools that Anthropic itself runs, besides all types that end with
`_tool_result`."""
FIELD_NAMES = {
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
}
"""Field names of a chat request, mapped to those of this API, for error messages."""


def to_chat(body: MessagesRequest | CountTokensRequest, options: Options, warn: Warn) -> Chat:
    """Convert a request to the body of an equivalent chat request. Raises `APIError`, naming the
    invalid field."""
    tools = _Tools(body.tools or (), warn)
    reader = _Reader(tools, options, warn)
    messages = [_message("system", text) for text in reader.system(body.system)]
    for number, message in enumerate(body.messages):
        messages += reader.message(message, f"messages[{number}]")
    chat: Chat = {"model": body.model, "messages": messages, "separate_reasoning": True}
    if tools.functions:
        chat["tools"] = tools.functions
    chat |= _tool_choice(body, tools)
    chat |= _thinking(body)
    if _prefills_response(messages):
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


def _message(role: str, content: Any) -> Chat:
    return {"role": role, "content": content}


def _mark_as_error(content: Any) -> Any:
    """Mark the content of a tool result as an error, by putting "Error" in front of it."""
    if isinstance(content, str):
        return f"Error: {content}" if content else "Error"
    return [text_part("Error:"), *content]


def _prefills_response(messages: Sequence[Chat]) -> bool:
    """Return True if the last message is the start of the answer, which the model continues."""
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and bool(last["content"]) and "tool_calls" not in last


def _sampling(body: MessagesRequest) -> Chat:
    parameters = {name: getattr(body, name) for name in EXTENSIONS}
    parameters |= {"stop": body.stop_sequences, "priority": body.priority, "stream": body.stream}
    present = {name: value for name, value in parameters.items() if value is not None}
    return {**present, "max_tokens": body.max_tokens}


def _thinking(body: MessagesRequest | CountTokensRequest) -> Chat:
    """Return the chat fields that control reasoning. Fields that the request does not set are
    omitted, so that the model's defaults apply."""
    fields: Chat = {}
    if body.output_config is not None and body.output_config.effort is not None:
        fields["reasoning_effort"] = body.output_config.effort
    if body.thinking is not None:
        fields["enable_thinking"] = body.thinking.type != "disabled"
    return fields


def _tool_choice(body: MessagesRequest | CountTokensRequest, tools: _Tools) -> Chat:
    choice = body.tool_choice
    if choice is None:
        return {}
    fields: Chat = {}
    if choice.type == "tool":
        if choice.name is None:
            raise invalid('tool_choice: the type "tool" requires a name', "tool_choice.name")
        if choice.name not in tools.argument_orders:
            known = ", ".join(map(repr, tools.argument_orders)) or "none"
            text = (
                f"tool_choice: {choice.name!r:.100} is not the name of one of the tools ({known})"
            )
            raise invalid(text, "tool_choice.name")
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice.type == "any" or tools.functions:
        fields["tool_choice"] = {"any": "required"}.get(choice.type, choice.type)
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


class _Tools:
    """The functions among a request's tools, and the order in which each function's arguments are
    written into the prompt."""

    def __init__(self, tools: Sequence[AnthropicTool], warn: Warn) -> None:
        self.functions: list[Chat] = []
        self.argument_orders: dict[str, ArgumentOrder] = {}
        """Order of each function's arguments, by function name."""
        for number, tool in enumerate(tools):
            if tool.type not in (None, "custom"):
                warn(f"tools: {tool.type[:60]}", ONLY_FUNCTIONS)
                continue
            path = f"tools[{number}]"
            name = require(tool.name or None, "name", path)
            schema = canonical_schema(require(tool.input_schema, "input_schema", path))
            if name in self.argument_orders:
                raise invalid(
                    f"{path}: the name {name!r:.100} is already used by another tool",
                    f"{path}.name",
                )
            self.argument_orders[name] = ArgumentOrder(schema)
            self.functions.append(function_tool(name, tool.description, schema, tool.strict))


class _Reader:
    """Converts messages and their content blocks to chat messages."""

    def __init__(self, tools: _Tools, options: Options, warn: Warn) -> None:
        self._tools, self._options, self._warn = tools, options, warn

    def system(self, content: str | list[Block] | None) -> list[str]:
        """Return the system prompt as a list of one text, or an empty list if there is no text.
        Lines that match `VOLATILE_LINES` are dropped if the server is configured to do so."""
        blocks = [Block("text", text=content)] if isinstance(content, str) else content or []
        texts = []
        for number, block in enumerate(blocks):
            path = f"system[{number}]"
            if block.type != "text" or block.text is None:
                raise invalid(f"{path} must be a block of type 'text' with a field 'text'", path)
            if text := self._without_volatile(block.text):
                texts.append(text)
        return ["\n".join(texts)] if texts else []

    def _without_volatile(self, text: str) -> str:
        if not self._options.drop_volatile_lines:
            return text
        for pattern in VOLATILE_LINES:
            if match := pattern.match(text):
                name = match[0].partition(":")[0]
                self._warn(
                    f"system: {name}",
                    "is left out of the prompt because it changes with every request",
                )
                text = text[match.end() :]
        return text

    def message(self, message: AnthropicMessage, path: str) -> Iterator[Chat]:
        """Convert a message to chat messages. Each tool result becomes a separate chat message."""
        content = message.content
        blocks = [Block("text", text=content)] if isinstance(content, str) else content
        if message.role == "system":
            for text in self.system(blocks):
                yield _message("system", text)
        elif message.role == "assistant":
            yield self._assistant(blocks, path)
        else:
            yield from self._user(blocks, path)

    def _user(self, blocks: Sequence[Block], path: str) -> Iterator[Chat]:
        parts: list[Chat] = []
        images: list[Chat] = []
        for index, block in enumerate(blocks):
            at = f"{path}.content[{index}]"
            if block.type != "tool_result":
                parts += [*images, *self._parts(block, at)]
                images = []
                continue
            if parts:
                yield _message("user", content_of(parts))
                parts = []
            content, hidden_images = split_images(self._result(block, at), self._options)
            content = _mark_as_error(content) if block.is_error else content
            call = require(block.tool_use_id, "tool_use_id", at)
            yield {**_message("tool", content), "tool_call_id": call}
            images += hidden_images
        if parts or images or not blocks:
            yield _message("user", content_of([*parts, *images]))

    def _result(self, block: Block, path: str) -> list[Chat]:
        """Convert the content nested in a block to content parts of a chat message."""
        content = block.content
        if not isinstance(content, list):
            return [text_part(content)] if isinstance(content, str) else []
        parts: list[Chat] = []
        for number, nested in enumerate(content):
            at = f"{path}.content[{number}]"
            parts += self._parts(_inner_block(nested, at), at)
        return parts

    def _parts(self, block: Block, path: str) -> list[Chat]:
        """Convert a block to content parts of a chat message. Return no parts for a block that is
        ignored with a warning."""
        match block.type:
            case "text":
                return [text_part(require(block.text, "text", path))]
            case "image":
                if not self._options.accepts_images:
                    raise invalid("this model does not accept images, only text", f"{path}.type")
                return [{"type": "image_url", "image_url": {"url": _image_url(block, path)}}]
            case "document":
                source = _source(block, path)
                if source.type != "text" or source.data is None:
                    raise invalid(
                        f"{path}: only documents with a source of type 'text' are supported",
                        f"{path}.source",
                    )
                return [text_part("\n".join(filter(None, (block.title, source.data))))]
            case "search_result":
                origin = block.source if isinstance(block.source, str) else None
                head = "\n".join(filter(None, (block.title, origin)))
                return [*([text_part(head)] if head else []), *self._result(block, path)]
            case "tool_reference":
                self._warn(
                    "messages: tool_reference",
                    "is left out of the prompt because all tools are already shown",
                )
                return []
        if self._skip_server_block(block):
            return []
        raise invalid(
            f"{path}: content blocks of type {block.type!r:.100} are not supported", f"{path}.type"
        )

    def _skip_server_block(self, block: Block) -> bool:
        is_server_block = block.type in _SERVER_BLOCK_TYPES or block.type.endswith("_tool_result")
        if is_server_block:
            self._warn(f"messages: {block.type[:60]}", "is left out of the prompt")
        return is_server_block

    def _assistant(self, blocks: Sequence[Block], path: str) -> Chat:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[Chat] = []
        for index, block in enumerate(blocks):
            at = f"{path}.content[{index}]"
            match block.type:
                case "text":
                    texts.append(require(block.text, "text", at))
                case "thinking":
                    thoughts.append(block.thinking or unseal(block.signature or "") or "")
                case "redacted_thinking":
                    thoughts.append(unseal(block.data or "") or "")
                case "tool_use":
                    calls.append(self._call(block, at))
                case _ if not self._skip_server_block(block):
                    raise invalid(
                        f"{at}: an assistant message cannot contain a {block.type!r:.100} block",
                        f"{at}.type",
                    )
        message = _message("assistant", "\n".join(text for text in texts if text))
        if reasoning := "\n".join(text for text in thoughts if text):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def _call(self, block: Block, path: str) -> Chat:
        name, arguments = require(block.name, "name", path), block.input or {}
        order = self._tools.argument_orders.get(name) or ArgumentOrder(None)
        function = {"name": name, "arguments": order.apply(arguments)}
        call = {"id": block.id} if block.id is not None else {}
        return {**call, "type": "function", "function": function}


def _inner_block(raw: Any, path: str) -> Block:
    """Create a `Block` from the plain JSON values of a block that is nested in another one. Unknown
    members are ignored. `path` is the block's location, for errors."""
    if not isinstance(raw, dict):
        raise invalid(f"{path} must be a content block, that is, a JSON object with a type", path)
    members = {name: value for name, value in raw.items() if name in Block.__struct_fields__}
    try:
        return msgspec.convert(members, Block)
    except msgspec.ValidationError as error:
        raise invalid(f"{path}: {error}", path) from None


def _source(block: Block, path: str) -> Source:
    source = require(block.source, "source", path)
    if not isinstance(source, Source):
        raise invalid(f"{path}.source must be an object", f"{path}.source")
    return source


def _image_url(block: Block, path: str) -> str:
    """Return the URL of an image. If the block contains the image itself, return a `data:` URL."""
    source = _source(block, path)
    if source.type == "url" and source.url is not None:
        return source.url
    if source.type == "base64" and source.data is not None:
        return f"data:{source.media_type or 'image/png'};base64,{source.data}"
    raise invalid(
        f"{path}.source must have the type 'base64' and the field 'data', or the type 'url' and "
        "the field 'url'; other types would require stored files, which this server does not "
        "support",
        f"{path}.source",
    )
