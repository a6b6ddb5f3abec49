"""Request bodies of `/v1/responses`, as in OpenAI's Responses API."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from nanoactor.server.requests import MAX_ITEMS, Extended

_FOR_TEMPLATE = Meta(description="Passed to the chat template if the template reads it")
_IGNORED = Meta(description="Ignored")
_ECHOED = Meta(description="Returned in the response; has no other effect")


class Part(Struct, forbid_unknown_fields=True):
    """A part of an item's content, output or summary. `type` determines which of the other members
    are used."""

    type: Annotated[str, Meta(examples=["input_text", "output_text", "input_image", "refusal"])]
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None
    file_id: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    filename: Annotated[str, _IGNORED] | None = None
    input_audio: Annotated[Any, Meta(description="Refused")] = None
    annotations: Annotated[Any, _IGNORED] = None
    logprobs: Annotated[Any, _IGNORED] = None
    prompt_cache_breakpoint: Annotated[Any, _IGNORED] = None


class Item(Struct, forbid_unknown_fields=True):
    """An input item of any type. `type` determines which of the other members are used."""

    type: Annotated[str, Meta(examples=["message", "function_call", "function_call_output"])] = (
        "message"
    )
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Annotated[list[Part], Meta(max_length=MAX_ITEMS)] | None = None
    id: Annotated[str, _IGNORED] | None = None
    status: Annotated[str, _IGNORED] | None = None
    phase: Annotated[str, _IGNORED] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Annotated[Any, Meta(description="Arguments of a function_call, as JSON text")] = None
    output: Annotated[
        Any, Meta(description="Output of a function_call_output: text or a list of parts")
    ] = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None
    internal_chat_message_metadata_passthrough: Annotated[Any, _IGNORED] = None


class InnerTool(Struct):
    """A tool inside a `namespace`. Only functions are supported; tools of other types are ignored
    with a warning."""

    type: Annotated[str, Meta(examples=["function"])]
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesTool(InnerTool):
    """A tool: a `function`, or a `namespace` of functions. Tools that OpenAI itself runs are
    ignored with a warning."""

    type: Annotated[str, Meta(examples=["function", "namespace"])]
    tools: list[InnerTool] | None = None


class TextFormat(Struct, forbid_unknown_fields=True):
    """The format that the answer's text must have."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Annotated[str, _IGNORED] | None = None
    schema: dict[str, Any] | None = None
    description: Annotated[str, _IGNORED] | None = None
    strict: (
        Annotated[bool, Meta(description="The schema is enforced whatever the value")] | None
    ) = None


class TextOptions(Struct, forbid_unknown_fields=True):
    """Options for the text of the answer: its required format, and its verbosity."""

    format: TextFormat | None = None
    verbosity: (
        Annotated[str, Meta(description="Passed to the chat template if the template reads it")]
        | None
    ) = None


class Reasoning(Struct, forbid_unknown_fields=True):
    """Options for the model's reasoning. Only `effort` has an effect."""

    effort: (
        Annotated[str, Meta(description="Passed to the chat template if the template reads it")]
        | None
    ) = None
    summary: Annotated[str, _IGNORED] | None = None
    generate_summary: Annotated[str, _IGNORED] | None = None
    context: Annotated[str, _IGNORED] | None = None


class ResponsesRequest(Extended, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/responses` and of `POST /v1/responses/input_tokens`."""

    ROUTE: ClassVar[str] = "responses"
    model: Annotated[str, Meta(description="Default: the served model")] | None = None
    input: str | Annotated[list[Item], Meta(min_length=1, max_length=MAX_ITEMS)]
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: str | list[str] | None = None
    tools: Annotated[list[ResponsesTool], Meta(max_length=MAX_ITEMS)] | None = None
    tool_choice: (
        Annotated[
            str | dict[str, Any],
            Meta(description="`auto`, `none`, `required`, a function, or `allowed_tools`"),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: (
        Annotated[
            list[str],
            Meta(
                description="`reasoning.encrypted_content` and `message.output_text.logprobs` are "
                "supported"
            ),
        ]
        | None
    ) = None
    top_logprobs: (
        Annotated[
            int,
            Meta(
                ge=0,
                description="Number of likeliest tokens to return for each token of the text, "
                "besides the token itself",
            ),
        ]
        | None
    ) = None
    store: (
        Annotated[bool, Meta(description="Nothing is stored, and the response contains false")]
        | None
    ) = None
    truncation: (
        Annotated[Literal["auto", "disabled"], Meta(description="A long input is never truncated")]
        | None
    ) = None
    metadata: Annotated[dict[str, str], _ECHOED] | None = None
    user: Annotated[str, Meta(description="Written to the access log")] | None = None
    priority: Annotated[int, Meta(description="Lower values run first")] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
