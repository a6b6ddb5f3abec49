"""Conversion of Responses API requests to chat requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from nanoactor.server.canonical import canonical_schema
from nanoactor.server.errors import invalid
from nanoactor.server.fields import EXTENSIONS
from nanoactor.server.responses.request import (
    InnerTool,
    Item,
    Part,
    ResponsesRequest,
    ResponsesTool,
)
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

_TEXT_TYPES = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
HOSTED_TOOLS = (
    "web_search",
    "web_search_preview",
    "file_search",
    "code_interpreter",
    "image_generation",
    "computer",
    "computer_use_preview",
    "computer_use",
    "local_shell",
    "shell",
    "apply_patch",
    "mcp",
    "tool_search",
)
"""Types of tools that OpenAI itself runs, or for which it has trained its own models. Actual types
may have a date as a suffix."""
FIELD_NAMES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
}
"""Field names of a chat request, mapped to those of this API, for error messages."""
_HOSTED_ITEM_SUFFIXES = (
    *("_call", "_call_output", "_search_output", "_list_tools"),
    *("_approval_request", "_approval_response"),
)
_IGNORED_ITEM_TYPES = ("compaction", "additional_tools")
"""Types of input items that other servers generate for their own use."""


class Tools:
    """The functions among a request's tools, under the names that the model sees. If several
    functions have the same name, each that belongs to a namespace gets the namespace as a
    prefix."""

    def __init__(self, tools: Sequence[ResponsesTool], warn: Warn) -> None:
        self.functions: list[Chat] = []
        self.origin_by_name: dict[str, tuple[str | None, str]] = {}
        """Namespace and original name of each function, by the name that the model sees."""
        self._names: dict[tuple[str | None, str], str] = {}
        functions = list(_flatten(tools, warn))
        counts = Counter(tool.name for _, tool, _ in functions)
        for namespace, tool, path in functions:
            function_name = require(tool.name or None, "name", path)
            is_unique = namespace is None or counts[function_name] == 1
            name = function_name if is_unique else f"{namespace}__{function_name}"
            if name in self.origin_by_name:
                raise invalid(
                    f"{path}: the name {name!r:.100} is already used by another tool",
                    f"{path}.name",
                )
            self.origin_by_name[name] = namespace, function_name
            self._names[namespace, function_name] = name
            schema = None if tool.parameters is None else canonical_schema(tool.parameters)
            self.functions.append(function_tool(name, tool.description, schema, tool.strict))

    def shown_name(self, namespace: str | None, name: str) -> str:
        """Return the name under which the model sees a function. An unknown function keeps its
        `name`."""
        return self._names.get((namespace, name), name)


def _flatten(
    tools: Sequence[ResponsesTool], warn: Warn
) -> Iterator[tuple[str | None, InnerTool, str]]:
    """Yield each function, with its namespace (or None) and its path in the request."""
    for number, tool in enumerate(tools):
        path = f"tools[{number}]"
        if tool.type == "function":
            yield None, tool, path
        elif tool.type == "namespace":
            for index, inner in enumerate(tool.tools or ()):
                if inner.type != "function":
                    warn(f"tools: {inner.type[:60]}", ONLY_FUNCTIONS)
                    continue
                yield tool.name, inner, f"{path}.tools[{index}]"
        elif tool.type == "custom":
            raise invalid(
                f"{path}: custom tools are not supported because their input has no schema; give "
                "a function with a parameter of type string",
                f"{path}.type",
            )
        elif _is_hosted(tool.type):
            warn(f"tools: {tool.type[:60]}", ONLY_FUNCTIONS)
        else:
            text = f"{path}: the type {tool.type!r:.100} is unknown; use tools of type 'function'"
            raise invalid(text, f"{path}.type")


def _is_hosted(kind: str) -> bool:
    return any(kind == name or kind.startswith(f"{name}_2") for name in HOSTED_TOOLS)


def to_chat(body: ResponsesRequest, tools: Tools, options: Options, warn: Warn) -> Chat:
    """Convert a request to the body of an equivalent chat request. Raises `APIError`, naming the
    invalid field."""
    messages: list[Chat] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += _Reader(tools, options, warn).messages(body.input)
    chat: Chat = {"model": body.model, "messages": messages, "separate_reasoning": True}
    if tools.functions:
        chat["tools"] = tools.functions
    chat |= _tool_choice(body.tool_choice, tools) | _response_format(body) | _sampling(body)
    return chat


def _sampling(body: ResponsesRequest) -> Chat:
    names = (*EXTENSIONS, "stop", "parallel_tool_calls", "stream", "user", "priority")
    parameters = {name: getattr(body, name) for name in (*names, "chat_template_kwargs")}
    parameters["max_completion_tokens"] = body.max_output_tokens
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        parameters |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.reasoning is not None:
        parameters["reasoning_effort"] = body.reasoning.effort
    if body.text is not None:
        parameters["verbosity"] = body.text.verbosity
    return {name: value for name, value in parameters.items() if value is not None}


def _response_format(body: ResponsesRequest) -> Chat:
    form = body.text.format if body.text is not None else None
    if form is None or form.type == "text":
        return {}
    if form.type == "json_object":
        return {"response_format": {"type": "json_object"}}
    if form.schema is None:
        raise invalid(
            'text.format: the type "json_schema" requires the field schema', "text.format.schema"
        )
    schema = {"name": form.name or "answer", "schema": form.schema}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _tool_choice(choice: str | dict[str, Any] | None, tools: Tools) -> Chat:
    """Convert the tool choice to that of a chat request. Raises `APIError` if it is invalid, or if
    it demands a tool that OpenAI runs."""
    if choice is None or (choice == "auto" and not tools.functions):
        return {}
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise invalid(
                f'tool_choice must be "auto", "none", "required" or an object, got {choice!r:.100}',
                "tool_choice",
            )
        return {"tool_choice": choice}
    kind = choice.get("type")
    if kind == "function":
        return {"tool_choice": _named_function(choice, tools, "tool_choice")}
    if kind == "allowed_tools":
        allowed_tools = choice.get("tools")
        if not isinstance(allowed_tools, list) or choice.get("mode") not in ("auto", "required"):
            text = (
                'tool_choice: the type "allowed_tools" requires a list of tools and the '
                'mode "auto" or "required"'
            )
            raise invalid(text, "tool_choice")
        names = [
            _named_function(one, tools, f"tool_choice.tools[{number}]")
            for number, one in enumerate(allowed_tools)
            if not (isinstance(one, dict) and _is_hosted(str(one.get("type"))))
        ]
        allowed = {"mode": choice["mode"], "tools": names}
        return {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    raise invalid(
        f"tool_choice: the type {kind!r:.100} is not supported; use the type 'function' or "
        "'allowed_tools'",
        "tool_choice.type",
    )


def _named_function(choice: Any, tools: Tools, path: str) -> Chat:
    name = choice.get("name") if isinstance(choice, dict) else None
    if not isinstance(name, str):
        raise invalid(f"{path} must be an object with the name of a function", path)
    namespace = choice.get("namespace")
    shown = tools.shown_name(namespace if isinstance(namespace, str) else None, name)
    if shown not in tools.origin_by_name:
        known = ", ".join(map(repr, tools.origin_by_name)) or "none"
        raise invalid(f"{path}: {name!r:.100} is not the name of one of the tools ({known})", path)
    return {"type": "function", "function": {"name": shown}}


class _Reader:
    """Converts input items to chat messages. Consecutive items of the assistant become one message,
    with reasoning, text and calls."""

    def __init__(self, tools: Tools, options: Options, warn: Warn) -> None:
        self._tools, self._options, self._warn = tools, options, warn
        self._texts: dict[str, list[str]] = {}
        """Texts of the assistant message that is being assembled, by member name."""
        self._calls: list[Chat] = []
        """Tool calls of the assistant message that is being assembled."""
        self._images: list[Chat] = []
        """Images in tool results that the chat template cannot render inside a result."""

    def messages(self, items: Sequence[Item]) -> list[Chat]:
        """Convert input items to chat messages."""
        messages: list[Chat] = []
        for number, item in enumerate(items):
            messages += self._item(item, f"input[{number}]")
        return [*messages, *self._flush()]

    def _flush(self) -> Iterator[Chat]:
        """Yield the assembled assistant message, if any, and then a user message with the images of
        tool results, if any."""
        yield from self._flush_answer()
        if self._images:
            yield {"role": "user", "content": self._images}
            self._images = []

    def _flush_answer(self) -> Iterator[Chat]:
        if self._texts or self._calls:
            texts = {
                member: "\n".join(filter(None, pieces)) for member, pieces in self._texts.items()
            }
            calls = {"tool_calls": self._calls} if self._calls else {}
            yield {"role": "assistant", "content": "", **texts, **calls}
        self._texts, self._calls = {}, []

    def _item(self, item: Item, path: str) -> Iterator[Chat]:
        match item.type:
            case "message":
                yield from self._message(item, path)
            case "reasoning":
                yield from self._add("reasoning_content", self._thoughts(item))
            case "function_call":
                yield from self._call(item, path)
            case "function_call_output":
                yield from self._result(item, path)
            case _:
                self._warn_left_out(item, path)

    def _warn_left_out(self, item: Item, path: str) -> None:
        """Warn that an item is omitted from the prompt. Raises `APIError` if the item must not be
        omitted."""
        kind, at = item.type[:100], f"{path}.type"
        if kind == "item_reference":
            raise invalid(
                f"{path}: items are not stored; send the item itself instead of a reference", at
            )
        if kind.startswith("custom_tool"):
            raise invalid(
                f"{path}: items of custom tools are not supported; use functions instead", at
            )
        if not kind.endswith(_HOSTED_ITEM_SUFFIXES) and kind not in _IGNORED_ITEM_TYPES:
            raise invalid(f"{path}: items of type {kind!r} are not supported", at)
        self._warn(f"input: {kind[:60]}", ONLY_FUNCTIONS)

    def _message(self, item: Item, path: str) -> Iterator[Chat]:
        if item.role is None or item.content is None:
            missing = "role" if item.role is None else "content"
            raise invalid(f"{path}: a message requires the field {missing}", f"{path}.{missing}")
        if item.role == "assistant":
            yield from self._add("content", self._text(item.content, f"{path}.content"))
            return
        yield from self._flush()
        yield {
            "role": item.role,
            "content": content_of(self._parts(item.content, f"{path}.content")),
        }

    def _add(self, member: str, text: str) -> Iterator[Chat]:
        """Add text to `member` of the assistant message that is being assembled. Yield the messages
        that must precede that message, if any."""
        if self._images:
            yield from self._flush()
        if text or member == "content":
            self._texts.setdefault(member, []).append(text)

    def _call(self, item: Item, path: str) -> Iterator[Chat]:
        if self._images:
            yield from self._flush()
        name = require(item.name, "name", path)
        function = {
            "name": self._tools.shown_name(item.namespace, name),
            "arguments": _require_text(item.arguments, "arguments", path),
        }
        call = {"id": require(item.call_id, "call_id", path), "type": "function"}
        self._calls.append({**call, "function": function})

    def _result(self, item: Item, path: str) -> Iterator[Chat]:
        yield from self._flush_answer()
        parts = self._parts(_call_output(item, path), f"{path}.output")
        content, images = split_images(parts, self._options)
        yield {
            "role": "tool",
            "tool_call_id": require(item.call_id, "call_id", path),
            "content": content,
        }
        self._images += images

    def _thoughts(self, item: Item) -> str:
        """Return the reasoning of an item: its text, or else the text that `seal` has encoded in
        it, or else its summary."""
        content = item.content if isinstance(item.content, list) else []
        text = "\n".join(part.text for part in content if part.text)
        sealed = unseal(item.encrypted_content or "")
        return text or sealed or "\n".join(part.text for part in item.summary or () if part.text)

    def _text(self, raw_content: str | list[Part], path: str) -> str:
        content = content_of(self._parts(raw_content, path))
        if not isinstance(content, str):
            raise invalid(f"{path}: an assistant message may contain only text", path)
        return content

    def _parts(self, content: str | list[Part], path: str) -> list[Chat]:
        parts = [Part("text", text=content)] if isinstance(content, str) else content
        return [self._part(part, f"{path}[{index}]") for index, part in enumerate(parts)]

    def _part(self, part: Part, path: str) -> Chat:
        if part.type in _TEXT_TYPES:
            return text_part(require(part.text, "text", path))
        if part.type == "refusal":
            return text_part(require(part.refusal, "refusal", path))
        if part.type != "input_image":
            what = "files are" if "file" in part.type else f"the type {part.type!r:.100} is"
            raise invalid(
                f"{path}: {what} not supported here; a part must be text or an image",
                f"{path}.type",
            )
        if not self._options.accepts_images:
            raise invalid("this model does not accept images, only text", f"{path}.type")
        if part.image_url is None:
            text = f"{path} requires image_url because files are not stored"
            raise invalid(text, f"{path}.image_url")
        image = {"url": part.image_url}
        if part.detail in ("auto", "low", "high"):
            image["detail"] = part.detail
        return {"type": "image_url", "image_url": image}


def _require_text(value: Any, name: str, path: str) -> str:
    """Return `value`, the member `name` of the item at `path`, which must be a string although its
    declared type is wider. Raises `APIError` for any other value."""
    if not isinstance(require(value, name, path), str):
        raise invalid(f"{path}.{name} must be a string", f"{path}.{name}")
    return str(value)


def _call_output(item: Item, path: str) -> str | list[Part]:
    """Return the output of a function call, which is a text or a list of parts. Unknown members of
    parts are ignored."""
    output = require(item.output, "output", path)
    if isinstance(output, str):
        return output
    if not isinstance(output, list) or not all(isinstance(one, dict) for one in output):
        raise invalid(f"{path}.output must be a string or a list of parts", f"{path}.output")
    raw_parts = [{k: v for k, v in one.items() if k in Part.__struct_fields__} for one in output]
    try:
        return msgspec.convert(raw_parts, list[Part])
    except msgspec.ValidationError as error:
        raise invalid(f"{path}.output: {error}", f"{path}.output") from None
