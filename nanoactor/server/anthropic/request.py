"""Request bodies of `/v1/messages` and `/v1/messages/count_tokens`, as in Anthropic's API."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from nanoactor.server.requests import MAX_ITEMS, Extended

_FOR_TEMPLATE = Meta(description="Passed to the chat template if the template reads it")
_IGNORED = Meta(description="Ignored")
_NO_EFFECT = Meta(description="Accepted, but has no effect")


class Source(Struct):
    """The source of an image or a document: data, or a URL."""

    type: Annotated[str, Meta(examples=["base64", "url", "text"])]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class Block(Struct, forbid_unknown_fields=True):
    """A content block of any type. `type` determines which of the other members are used."""

    type: Annotated[str, Meta(examples=["text", "image", "tool_use", "tool_result", "thinking"])]
    text: str | None = None
    source: Source | str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Any] | dict[str, Any] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    title: str | None = None
    context: Annotated[str, _IGNORED] | None = None
    citations: Annotated[Any, _IGNORED] = None
    cache_control: Annotated[Any, _NO_EFFECT] = None
    caller: Annotated[Any, _IGNORED] = None


class AnthropicMessage(Struct, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Meta(max_length=MAX_ITEMS)]
    id: Annotated[Any, _IGNORED] = None
    cache_control: Annotated[Any, _NO_EFFECT] = None


class AnthropicTool(Struct, forbid_unknown_fields=True):
    """A function that the model may call. A tool of another type is run by Anthropic itself; such
    tools are ignored with a warning."""

    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: Annotated[Any, _NO_EFFECT] = None
    defer_loading: Annotated[bool, _IGNORED] | None = None
    eager_input_streaming: Annotated[bool, _IGNORED] | None = None
    input_examples: Annotated[Any, _IGNORED] = None
    allowed_callers: Annotated[Any, _IGNORED] = None


class AnthropicToolChoice(Struct, forbid_unknown_fields=True):
    """Constraint on tool calls: the model may call any tool ("auto"), must call one ("any", or
    "tool" for a named one), or must not call any ("none")."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, forbid_unknown_fields=True):
    """Switch for reasoning before the answer. It has no effect if the chat template has no such
    switch."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, _IGNORED] | None = None
    display: (
        Annotated[str, Meta(description="`omitted` returns reasoning sealed instead of as text")]
        | None
    ) = None


class OutputFormat(Struct, forbid_unknown_fields=True):
    """The JSON schema that the answer must match."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, forbid_unknown_fields=True):
    """Options for the answer: the reasoning effort, and the required format."""

    effort: (
        Annotated[str, Meta(description="Passed to the chat template if the template reads it")]
        | None
    ) = None
    format: OutputFormat | None = None
    task_budget: Annotated[Any, _IGNORED] = None


class _Conversation(Extended, kw_only=True, forbid_unknown_fields=True):
    """Fields that `/v1/messages` and `/v1/messages/count_tokens` share, including all fields that
    determine the prompt."""

    ROUTE: ClassVar[str] = "messages"
    model: Annotated[str, Meta(description="Default: the served model")] | None = None
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=MAX_ITEMS)]
    system: str | list[Block] | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=MAX_ITEMS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: (
        Annotated[OutputFormat, Meta(description="Older location of `output_config.format`")] | None
    ) = None
    chat_template_kwargs: dict[str, Any] | None = None


class CountTokensRequest(_Conversation, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/messages/count_tokens`."""


class MessagesRequest(_Conversation, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/messages`."""

    max_tokens: Annotated[int, Meta(ge=1)]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    priority: Annotated[int, Meta(description="Lower values run first")] | None = None
