"""What clients may ask for: bodies as typed structures, which also make the OpenAPI document.

Whatever is not listed is refused by name, and so is a listed parameter that the engine does not
honour, unless its value asks for nothing (`n` of 1, say).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from nanoactor.engine import Prompt
from nanoactor.errors import InvalidRequest
from nanoactor.outputs import RequestOutputKind
from nanoactor.params import SamplingParams
from nanoactor.server.errors import APIError, from_decoding, from_engine, invalid

MAX_PROMPTS, MAX_MESSAGES = 512, 4096
"""How many a request may hold: more would hold up the loop for too long."""
_DEFAULT_COMPLETION_TOKENS = 16

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "store": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
}
"""Parameters that are not honoured: the values, besides null, that ask for nothing."""


def _unhonoured(name: str) -> Any:
    values = [None, *_NEUTRAL[name]]
    return Meta(
        description="Not honoured: other values are refused.", extra_json_schema={"enum": values}
    )


class StreamOptions(Struct, forbid_unknown_fields=True):
    """What a stream tells besides text."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class _Body(Struct, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of completion have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: Annotated[int, Meta(description="64 bits; may be negative")] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Meta(description="A lower one goes first")] | None = None
    user: Annotated[str, Meta(description="Stands in the access log")] | None = None
    n: Annotated[Any, _unhonoured("n")] = None
    logprobs: Annotated[Any, _unhonoured("logprobs")] = None
    logit_bias: Annotated[Any, _unhonoured("logit_bias")] = None
    presence_penalty: Annotated[Any, _unhonoured("presence_penalty")] = None
    frequency_penalty: Annotated[Any, _unhonoured("frequency_penalty")] = None
    repetition_penalty: Annotated[Any, _unhonoured("repetition_penalty")] = None
    response_format: Annotated[Any, _unhonoured("response_format")] = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
_ONE = {"anyOf": [_TEXT, _TOKEN_IDS]}
_PROMPT = {
    "anyOf": [
        _TEXT,
        _TOKEN_IDS,
        {"type": "array", "items": _ONE, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}


class CompletionRequest(_Body, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`."""

    prompt: Annotated[Any, Meta(extra_json_schema=_PROMPT)]
    echo: bool | None = None
    best_of: Annotated[Any, _unhonoured("best_of")] = None
    suffix: Annotated[Any, _unhonoured("suffix")] = None


class TextPart(Struct, forbid_unknown_fields=True):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(Struct, forbid_unknown_fields=True):
    """What an assistant called."""

    name: str
    arguments: str


class ToolCall(Struct, forbid_unknown_fields=True):
    """A call in an assistant's earlier message."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class Message(Struct, forbid_unknown_fields=True):
    """One message of a conversation. The fields that are null in what servers answer may come
    back as such."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None


class Function(Struct, forbid_unknown_fields=True):
    """What a model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(Struct, forbid_unknown_fields=True):
    """A function, as the only kind of tool."""

    function: Function
    type: Literal["function"] = "function"


class ChatRequest(_Body, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Annotated[
        Any,
        Meta(
            description="A call cannot be forced.",
            extra_json_schema={"enum": [None, "auto", "none"]},
        ),
    ] = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    separate_reasoning: (
        Annotated[bool, Meta(description="False leaves a `<think>` part in the content.")] | None
    ) = None
    top_logprobs: Annotated[Any, _unhonoured("top_logprobs")] = None
    parallel_tool_calls: Annotated[Any, _unhonoured("parallel_tool_calls")] = None
    store: Annotated[Any, _unhonoured("store")] = None
    metadata: Annotated[Any, _unhonoured("metadata")] = None
    modalities: Annotated[Any, _unhonoured("modalities")] = None
    service_tier: Annotated[Any, _unhonoured("service_tier")] = None

    @property
    def calls_tools(self) -> bool:
        """Whether the answer may call a function."""
        return bool(self.tools) and self.tool_choice != "none"


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: Annotated[str, Meta(min_length=1)] | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /detokenize`."""

    tokens: list[Annotated[int, Meta(ge=0, le=2**31 - 1)]]
    model: str | None = None


Body = CompletionRequest | ChatRequest
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind)
    for kind in (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
}


def decode(kind: type[Any], body: bytes) -> Any:
    """A body as a structure of this kind; `APIError` says what is wrong with it."""
    try:
        decoded = _DECODERS[kind].decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError, ValueError) as error:
        raise from_decoding(error) from None
    if isinstance(decoded, CompletionRequest | ChatRequest):
        _check(decoded)
    return decoded


def _check(body: Body) -> None:
    for name, neutral in _NEUTRAL.items():
        value = getattr(body, name, None)
        if value is not None and not any(_same(value, other) for other in neutral):
            shown = " or ".join(msgspec.json.encode(value).decode() for value in neutral)
            raise invalid(f"{name} is not supported; only null or {shown} is accepted", name)
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options go with stream set to true", "stream_options")
    if isinstance(body, ChatRequest):
        _check_chat(body)


def _same(value: Any, neutral: Any) -> bool:
    # To Python, true is 1 and false is 0; to a client they are not.
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _check_chat(body: ChatRequest) -> None:
    if body.tool_choice not in (None, "auto", "none"):
        raise invalid(
            'tool_choice: a call cannot be forced; only null, "auto" or "none" is accepted',
            "tool_choice",
        )
    if body.tool_choice == "auto" and not body.tools:
        raise invalid("tool_choice is given, but there are no tools", "tool_choice")
    if None not in (body.max_tokens, body.max_completion_tokens):
        raise invalid(
            "give max_completion_tokens or its older name max_tokens, not both", "max_tokens"
        )


def sampling_params(body: Body) -> SamplingParams:
    """The engine's parameters; `APIError` names the one that is wrong."""

    def given(**values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value is not None}

    seed = body.seed
    if seed is not None and -(2**63) <= seed < 0:
        seed += 2**64
    longest = body.max_tokens
    if isinstance(body, ChatRequest):
        longest = longest if longest is not None else body.max_completion_tokens
    elif longest is None:
        longest = max(_DEFAULT_COMPLETION_TOKENS, body.min_tokens or 0)
    try:
        return SamplingParams(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            seed=seed,
            max_tokens=longest,
            stop=body.stop,
            stop_token_ids=body.stop_token_ids,
            output_kind=RequestOutputKind.DELTA,
            **given(
                min_tokens=body.min_tokens,
                ignore_eos=body.ignore_eos,
                include_stop_str_in_output=body.include_stop_str_in_output,
                skip_special_tokens=body.skip_special_tokens,
            ),
        )
    except InvalidRequest as error:
        raise from_engine(error, names_of(type(body))) from None


def names_of(kind: type[Struct]) -> frozenset[str]:
    """The parameters of a request."""
    return frozenset(kind.__struct_fields__)


def prompts(body: CompletionRequest, max_model_len: int) -> list[Prompt]:
    """The engine's prompts: one, or several."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise invalid(
            "prompt must be text, token ids, or a list of texts and lists of token ids, and not be "
            "empty",
            "prompt",
        )
    if type(prompt[0]) is int:
        return [_prompt(prompt, max_model_len)]
    if len(prompt) > MAX_PROMPTS:
        raise invalid(f"prompt has {len(prompt)} items, {MAX_PROMPTS} at most", "prompt")
    return [_prompt(item, max_model_len) for item in prompt]


def _prompt(item: Any, max_model_len: int) -> Prompt:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and len(item) >= max_model_len:
        # As the engine says it, before it has looked at each of them.
        raise APIError(
            400,
            f"a prompt has {len(item)} tokens, but max_model_len is {max_model_len}",
            param="prompt",
            code="context_length_exceeded",
        )
    if isinstance(item, list) and item and _are_ids(item):
        return {"prompt_token_ids": item}
    raise invalid("the items of prompt must be texts or lists of token ids", "prompt")


def _are_ids(items: Sequence[Any]) -> bool:
    return all(type(item) is int for item in items)


def template_options(body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """What the chat template is given besides the messages."""
    options = dict(body.chat_template_kwargs or {})
    for reserved in ("messages", "tools", "add_generation_prompt", "continue_final_message"):
        if reserved in options:
            raise invalid(
                f"chat_template_kwargs: {reserved!r} is a parameter of its own",
                "chat_template_kwargs",
            )
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message:
        options["continue_final_message"] = True
    if body.tools and not (isinstance(body, ChatRequest) and body.tool_choice == "none"):
        options["tools"] = [msgspec.to_builtins(tool) for tool in body.tools]
        for tool in options["tools"]:
            tool["function"] = {k: v for k, v in tool["function"].items() if v is not None}
    return options


def conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as chat templates read them: content is text, arguments are objects."""
    return [_message(message) for message in messages]


_WHOSE = {"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"}


def _message(message: Message) -> dict[str, Any]:
    for name, role in _WHOSE.items():
        if getattr(message, name) and message.role != role:
            raise invalid(f"messages: {name} belongs to messages of the role {role!r}", "messages")
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    found: dict[str, Any] = {"role": role, "content": content or ""}
    for name in ("reasoning_content", "name", "tool_call_id"):
        if getattr(message, name) is not None:
            found[name] = getattr(message, name)
    if message.tool_calls:
        found["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return found


def _tool_call(call: ToolCall) -> dict[str, Any]:
    arguments: Any = call.function.arguments
    try:
        decoded = msgspec.json.decode(arguments)
        arguments = decoded if isinstance(decoded, dict) else arguments
    except (msgspec.DecodeError, UnicodeError, RecursionError, ValueError):
        pass  # a template shows text as it stands
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }
