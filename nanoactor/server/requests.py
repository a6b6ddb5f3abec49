"""Request bodies as typed classes, from which the OpenAPI document is also generated.

The classes declare the supported fields. `fields.py` defines how all other fields are treated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct

from nanoactor.api.engine import Prompt
from nanoactor.requests.outputs import RequestOutputKind
from nanoactor.requests.params import SamplingParams, TokenCap
from nanoactor.server.chat_messages import Message, check_conversation, unknown_members
from nanoactor.server.errors import context_length_exceeded, from_decoding, invalid
from nanoactor.server.fields import (
    EXTENSIONS,
    SAMPLING,
    TEMPLATE_FIELDS,
    TOKENIZE_FIELDS,
    Field,
    WarnOnce,
    is_neutral,
    route_fields,
)
from nanoactor.server.structured import STRICT_STRUCTS, Constrained, Constraint, constraint_of
from nanoactor.server.tool_choice import (
    Tool,
    ToolChoice,
    check_tool_choice,
    check_tool_kinds,
    demands_calls,
    possible_calls,
    tool_grammar,
    unenforced_format_paths,
)

MAX_PROMPTS, MAX_ITEMS = 512, 4096
"""Maximum number of prompts in a request, and of items in any other list. More would block the
event loop for too long."""
_DEFAULT_MAX_TOKENS = 16


_SGLANG = Meta(description="SGLang's name for max_tokens or min_tokens")


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options of a stream: additional information about token usage."""

    include_usage: bool | None = None
    """True if the stream ends with the token usage."""
    continuous_usage_stats: bool | None = None
    """True if every event contains the token usage so far."""
    include_obfuscation: Annotated[bool, Meta(description="Ignored")] | None = None


# All names in `SAMPLING` are fields of requests. They are created here, without declarations.
if TYPE_CHECKING:

    class _Sampling(Constrained, kw_only=True):
        skip_special_tokens: bool | None = None

    class Extended(Struct, kw_only=True):
        """Sampling parameters, created at runtime from `EXTENSIONS`. The declarations are for type
        checkers, and cover only the parameters that are accessed by name."""

        temperature: float | None = None
        top_p: float | None = None

else:
    _HINTS = get_type_hints(SamplingParams)
    _Sampling = msgspec.defstruct(
        "_Sampling",
        [(name, _HINTS[name] | None, None) for name in SAMPLING],
        bases=(Constrained,),
        kw_only=True,
    )
    Extended = msgspec.defstruct(
        "Extended", [(name, _HINTS[name] | None, None) for name in EXTENSIONS], kw_only=True
    )


class _Body(_Sampling, kw_only=True, forbid_unknown_fields=True):
    """Fields of both text and chat completions. The sampling parameters declared here are those
    that the HTTP API treats specially."""

    model: Annotated[str, Meta(description="Default: the served model")] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    prompt_logprobs: int | None = None
    max_tokens: int | None = None
    max_new_tokens: Annotated[int, _SGLANG] | None = None
    min_new_tokens: Annotated[int, _SGLANG] | None = None
    seed: Annotated[int, Meta(description="A 64-bit integer, which may be negative")] | None = None
    return_token_ids: (
        Annotated[bool, Meta(description="Return the token ids of the prompt and the answer")]
        | None
    ) = None
    return_tokens_as_token_ids: (
        Annotated[bool, Meta(description="Identify tokens by their ids in logprobs")] | None
    ) = None
    priority: Annotated[int, Meta(description="Lower values run first")] | None = None
    user: Annotated[str, Meta(description="Written to the access log")] | None = None


class CompletionRequest(_Body, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/completions`."""

    ROUTE: ClassVar[str] = "completions"
    prompt: str | list[int | str | list[int]]
    echo: bool | None = None
    logprobs: (
        Annotated[
            int | bool,
            Meta(
                description="Number of likeliest tokens to return at each position; false for none"
            ),
        ]
        | None
    ) = None
    truncate_prompt_tokens: int | None = None

    @property
    def constraint(self) -> Constraint | None:
        """Constraint on the answers; None if there is none. Raises `APIError` if there are
        several."""
        return constraint_of(self)


class _WithRawBody(Struct, dict=True):
    """Base of request bodies with parts that are passed to the chat template unchanged."""

    @property
    def raw(self) -> dict[str, Any]:
        """The decoded JSON of the body, with unknown members and in the original order."""
        raw: dict[str, Any] | None = self.__dict__.get("raw")
        return msgspec.to_builtins(self) if raw is None else raw


_FOR_TEMPLATE = Meta(description="Passed to the chat template if the template reads it.")


class ChatRequest(_Body, _WithRawBody, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/chat/completions`."""

    ROUTE: ClassVar[str] = "chat"
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_ITEMS)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    separate_reasoning: (
        Annotated[bool, Meta(description="False leaves a `<think>` part in the content.")] | None
    ) = None
    parallel_tool_calls: (
        Annotated[bool, Meta(description="False allows at most one call in an answer.")] | None
    ) = None
    reasoning_effort: Annotated[str, _FOR_TEMPLATE] | None = None
    verbosity: Annotated[str, _FOR_TEMPLATE] | None = None
    enable_thinking: Annotated[bool, _FOR_TEMPLATE] | None = None
    thinking: Annotated[Any, _FOR_TEMPLATE] = None

    @property
    def calls_tools(self) -> bool:
        """True if the model may call a function."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def constraint(self) -> Constraint | None:
        """Constraint on the answer; None if there is none. Raises `APIError` if there are
        several."""
        parallel = self.parallel_tool_calls is not False
        tools, choice = self.tools or (), self.tool_choice
        demanded_calls = tool_grammar(tools, choice, parallel)
        return constraint_of(self, demanded_calls, possible_calls(tools, choice, parallel))

    def check(self) -> None:
        """Raise `APIError` if the fields contradict each other or are not supported."""
        check_tool_choice(self.tools or (), self.tool_choice)
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs requires logprobs to be true", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise invalid(
                "give max_completion_tokens or its older name max_tokens, not both", "max_tokens"
            )


class TokenizeRequest(_WithRawBody, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /tokenize`, with either a prompt or messages."""

    ROUTE: ClassVar[str] = "tokenize"
    model: str | None = None
    prompt: Annotated[str, Meta(min_length=1)] | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_ITEMS)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Annotated[str, _FOR_TEMPLATE] | None = None
    verbosity: Annotated[str, _FOR_TEMPLATE] | None = None
    enable_thinking: Annotated[bool, _FOR_TEMPLATE] | None = None
    thinking: Annotated[Any, _FOR_TEMPLATE] = None

    def check(self) -> None:
        """Raise `APIError` if the fields contradict each other."""
        if (self.prompt is None) == (self.messages is None):
            raise invalid("give either prompt or messages, but not both", "prompt")
        chat_fields = (self.tools, self.chat_template_kwargs, self.add_generation_prompt)
        for value in (*chat_fields, self.continue_final_message):
            if self.prompt is not None and value is not None:
                raise invalid(
                    "a prompt cannot be combined with tools, chat_template_kwargs, "
                    "add_generation_prompt or continue_final_message, because the chat "
                    "template is applied only to messages",
                    "prompt",
                )
        if self.messages is not None and self.add_special_tokens:
            raise invalid(
                "add_special_tokens can be true only with a prompt, because the chat template "
                "adds the special tokens to messages",
                "add_special_tokens",
            )


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /detokenize`."""

    tokens: list[Annotated[int, Meta(ge=0, le=2**31 - 1)]]
    model: str | None = None


Body = CompletionRequest | ChatRequest
B = TypeVar("B", bound=Struct)
_MAX_UNKNOWN_FIELDS = 200


@functools.cache
def _route_fields(kind: type[Struct]) -> dict[str, Field]:
    """Return the known fields of the route with the body `kind`, by name. Empty if `kind` is not
    the body of a route."""
    route: str = getattr(kind, "ROUTE", "")
    return TOKENIZE_FIELDS if route == "tokenize" else route_fields(route)


@functools.cache
def _nested_structs(kind: type[Struct]) -> dict[str, type[Struct]]:
    """Return the classes of nested objects by field name. A field contains the object itself, or a
    list of such objects."""
    hints = get_type_hints(kind).items()
    return {name: inner for name, hint in hints for inner in _structures(hint)}


def _structures(hint: Any) -> Iterator[type[Struct]]:
    if isinstance(hint, type) and issubclass(hint, Struct):
        yield hint
    for part in get_args(hint):
        yield from _structures(part)


class Decoder:
    """Decoder of request bodies. Unknown fields are ignored with a warning; a strict decoder
    rejects them."""

    def __init__(
        self,
        strict: bool = False,
        accepts_images: bool = False,
        template_members: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """Create the decoder. `accepts_images` is True if the model accepts images.
        `template_members` returns the names of the message members that the chat template reads."""
        self._strict, self._accepts_images, self._template_members = (
            strict,
            accepts_images,
            template_members,
        )
        self._warn_once = WarnOnce()

    def decode(self, kind: type[B], body: bytes) -> B:
        """Decode a JSON body as an instance of `kind`. Raises `APIError` if it is invalid."""
        try:
            raw = msgspec.json.decode(body)
            if issubclass(kind, _WithRawBody) and isinstance(raw, dict):
                check_tool_kinds(raw.get("tools"))
            try:
                decoded = msgspec.convert(raw, kind, str_keys=True)
            except msgspec.ValidationError:
                self._remove_unknown_fields(raw, kind, "")
                decoded = msgspec.convert(raw, kind, str_keys=True)
        except (msgspec.DecodeError, UnicodeError, RecursionError, ValueError) as error:
            raise from_decoding(error) from None
        if isinstance(decoded, ChatRequest | TokenizeRequest):
            self._check(decoded, raw)
        return decoded

    def chat(self, translated: dict[str, Any]) -> ChatRequest:
        """Validate a request of another API that has been translated to the body of a chat request,
        and return it as a `ChatRequest`. Raises `APIError` if it is invalid."""
        try:
            body = msgspec.convert(translated, ChatRequest)
        except msgspec.ValidationError as error:
            raise from_decoding(error) from None
        self._check(body, translated)
        return body

    def warn(self, name: str, treatment: str) -> None:
        """Log, once, how an unsupported field is treated. A strict decoder raises `APIError`
        instead."""
        if self._strict:
            raise invalid(f"{name} {treatment}", name.partition(":")[0])
        self._warn_once.warn(name, f"{treatment} (--strict rejects it)")

    def drop_hidden_tools(
        self,
        body: ChatRequest | TokenizeRequest,
        options: dict[str, Any],
        template_renders_tools: bool,
    ) -> None:
        """Remove tools from `options`, the chat template's variables, if the template would not
        show them to the model. A warning is logged.

        Requests whose tool choice demands a call keep their tools and are rejected later.
        """
        choice = body.tool_choice if isinstance(body, ChatRequest) else None
        if options.get("tools") and not template_renders_tools and not demands_calls(choice):
            self.warn("tools", "is not shown to the model by its chat template")
            del options["tools"]

    def _check(self, body: ChatRequest | TokenizeRequest, raw: dict[str, Any]) -> None:
        body.__dict__["raw"] = raw
        body.check()
        self._check_messages(body.messages or (), raw.get("messages") or ())
        if isinstance(body, ChatRequest):
            self._check_formats(body)

    def _check_formats(self, body: ChatRequest) -> None:
        calls = tool_grammar(body.tools or (), body.tool_choice, parallel=True)
        for path in unenforced_format_paths(calls, body.tools or ()):
            if self._strict:
                raise invalid(f"{path} cannot be enforced", "tools")
            self._warn_once.warn(path, "is not enforced (--strict rejects it)")

    def _check_messages(self, messages: Sequence[Message], raw: Sequence[Any]) -> None:
        if not messages:
            return
        check_conversation(messages, raw, self._accepts_images)
        for path in unknown_members(raw, self._template_members()):
            if self._strict:
                text = (
                    f"{path[:200]!r} is not a known parameter, and the chat template does not "
                    "read it"
                )
                raise invalid(text, path[:200])
            self._warn_once.warn(path, "the chat template does not read (--strict rejects it)")

    def _remove_unknown_fields(self, raw: Any, kind: type[Struct], path: str) -> None:
        """Remove ignored fields from a decoded body, in place. Raises `APIError` for rejected
        fields."""
        if not isinstance(raw, dict):
            return  # decoding reports this error
        config = kind.__struct_config__
        unknown = raw.keys() - set(kind.__struct_fields__) if config.forbid_unknown_fields else ()
        if len(unknown) > _MAX_UNKNOWN_FIELDS:
            raise invalid(
                f"the request has {len(unknown)} unknown fields; at most {_MAX_UNKNOWN_FIELDS} "
                "are accepted"
            )
        for name in unknown:
            self._remove_field(raw, kind, name, f"{path}{name}")
        for name, inner in _nested_structs(kind).items():
            value = raw.get(name)
            if not isinstance(value, list):
                self._remove_unknown_fields(value, inner, f"{path}{name}.")
                continue
            if len(value) > MAX_ITEMS:
                text = f"{name} has {len(value)} items; at most {MAX_ITEMS} are accepted"
                raise invalid(text, f"{path}{name}")
            for index, item in enumerate(value):
                self._remove_unknown_fields(item, inner, f"{path}{name}[{index}].")

    def _remove_field(self, raw: dict[str, Any], kind: type[Struct], name: str, path: str) -> None:
        value, field = raw.pop(name), _route_fields(kind).get(name)
        neutral = field.neutral if field is not None else ()
        if is_neutral(value, neutral):
            return
        if field is not None and field.status == "refused":
            accepted_values = [msgspec.json.encode(one).decode() for one in (None, *neutral)]
            note = f" ({field.note})" if field.note else ""
            text = f"{name} is not supported; only {' or '.join(accepted_values)} is accepted{note}"
            raise invalid(text, name)
        if field is None and (self._strict or kind in STRICT_STRUCTS):
            raise invalid(f"{path[:200]!r} is not a known parameter", path[:200])
        if field is None:
            self._warn_once.warn(path, "is ignored (--strict rejects it)")
        elif field.status == "ignored":
            self._warn_once.warn(path, "is ignored")
        # A field that is honored only by the route for which tokens are counted does not affect the
        # count.


def sampling_params(
    body: Body, constraint: Constraint | None = None, *, cap_max_tokens: bool = False
) -> SamplingParams:
    """Convert a request to the engine's sampling parameters.

    `cap_max_tokens` lowers a `max_tokens` that exceeds the remaining context, instead of rejecting
    it. Raises `InvalidRequest` or `APIError`, naming the invalid parameter.
    """
    values = {name: getattr(body, name) for name in SAMPLING}
    _apply_aliases(body, values)
    if values["max_tokens"] is None:
        if isinstance(body, ChatRequest):
            values["max_tokens"] = body.max_completion_tokens
        else:
            values["max_tokens"] = max(_DEFAULT_MAX_TOKENS, values["min_tokens"] or 0)
    if cap_max_tokens and values["max_tokens"] is not None:
        values["max_tokens"] = TokenCap(values["max_tokens"])
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs cannot be streamed; set stream to false", "prompt_logprobs")
    values["logprobs"] = num_logprobs(body)
    if isinstance(body, CompletionRequest) and body.echo and values["logprobs"] is not None:
        values["prompt_logprobs"] = max(values["logprobs"], body.prompt_logprobs or 0)
    if body.seed is not None and -(2**63) <= body.seed < -1:
        values["seed"] = body.seed + 2**64
    values["structured_outputs"] = constraint and constraint.params
    parameters = {name: value for name, value in values.items() if value is not None}
    return SamplingParams.for_model(output_kind=RequestOutputKind.DELTA, **parameters)


def _apply_aliases(body: Body, values: dict[str, Any]) -> None:
    """Copy `max_new_tokens` and `min_new_tokens`, SGLang's names, to `max_tokens` and `min_tokens`
    in `values`. Raises `APIError` if both names of a parameter are set to different values."""
    for name in ("max_tokens", "min_tokens"):
        alias = name.replace("_", "_new_")
        if (value := getattr(body, alias)) is not None:
            if values[name] not in (None, value):
                raise invalid(
                    f"{alias} and {name} are two names for the same parameter; give only one of "
                    "them",
                    alias,
                )
            values[name] = value


def num_logprobs(body: Body) -> int | None:
    """Return the number of likeliest tokens to report per position; None if no log-probabilities
    are requested."""
    if isinstance(body, ChatRequest):
        return (body.top_logprobs or 0) if body.logprobs else None
    if body.logprobs is True:
        raise invalid(
            "logprobs must be an integer, the number of most likely tokens to return at "
            "each position",
            "logprobs",
        )
    return None if body.logprobs is False else body.logprobs


def request_prompts(body: CompletionRequest, max_model_len: int) -> list[Prompt]:
    """Return the prompts of a request in the form that the engine accepts. Raises `APIError` if
    they are invalid."""
    prompt, is_truncated = body.prompt, body.truncate_prompt_tokens is not None
    if body.echo and is_truncated:
        raise invalid(
            "echo cannot be combined with truncate_prompt_tokens", "truncate_prompt_tokens"
        )
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid(
            "prompt must not be an empty list; give a string, a list of token ids, or a list of "
            "strings and lists of token ids",
            "prompt",
        )
    items: Sequence[Any] = [prompt] if isinstance(prompt[0], int) else prompt
    if len(items) > MAX_PROMPTS:
        raise invalid(
            f"prompt has {len(items)} items; at most {MAX_PROMPTS} are accepted", "prompt"
        )
    return [_prompt(item, None if is_truncated else max_model_len) for item in items]


def _prompt(item: str | int | list[Any], max_model_len: int | None) -> Prompt:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and max_model_len is not None and len(item) >= max_model_len:
        raise context_length_exceeded(len(item), max_model_len)  # before each id is checked
    if isinstance(item, list) and item and all(isinstance(token, int) for token in item):
        return {"prompt_token_ids": item}
    raise invalid("each item of prompt must be a string or a non-empty list of token ids", "prompt")


def template_options(
    body: ChatRequest | TokenizeRequest,
    variables: Collection[str] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the variables to pass to the chat template in addition to the messages.

    Request fields such as `reasoning_effort` are included only if `variables`, the names that the
    template reads, contains them. `defaults` replace variables that are omitted or null.
    """
    variables_set = _template_fields(body, variables) | (body.chat_template_kwargs or {})
    options = {
        name: defaults[name] if variables_set.get(name) is None else variables_set[name]
        for name in defaults
    }
    options |= {name: value for name, value in variables_set.items() if name not in defaults}
    for reserved in ("messages", "tools", "add_generation_prompt", "continue_final_message"):
        if reserved in options:
            raise invalid(
                f"chat_template_kwargs must not contain {reserved!r}, which is a separate "
                "parameter of the request",
                "chat_template_kwargs",
            )
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message:
        options["continue_final_message"] = True
    if body.tools:  # even for choice "none", so that all prompts of a conversation match
        options["tools"] = body.raw["tools"]
    return options


def _template_fields(
    body: ChatRequest | TokenizeRequest, variables: Collection[str]
) -> dict[str, Any]:
    """Return the request fields that the template reads as variables. If `enable_thinking` is not
    set, `reasoning_effort` determines it, as in vLLM."""
    fields = {name: getattr(body, name, None) for name in TEMPLATE_FIELDS}
    if fields["reasoning_effort"] is not None and fields["enable_thinking"] is None:
        fields["enable_thinking"] = fields["reasoning_effort"] != "none"
    return {
        name: value for name, value in fields.items() if value is not None and name in variables
    }
