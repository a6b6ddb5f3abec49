"""Tools of a request, and the grammars of the calls that the request demands or allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from nanoactor.grammar.check import MAX_FUNCTIONS
from nanoactor.grammar.formats import drop_unenforced, unenforced_formats
from nanoactor.requests.grammar_spec import MAX_GRAMMAR_BYTES, ToolFunction, ToolGrammar
from nanoactor.server.errors import invalid


class Function(Struct):
    """A function that the model may call. Undeclared members are passed to the chat template,
    too."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: (
        Annotated[bool, Meta(description="True enforces the schema of the arguments.")] | None
    ) = None


class Tool(Struct):
    """A tool. Only functions are supported."""

    function: Function
    type: Literal["function"] = "function"


class NamedFunction(Struct, forbid_unknown_fields=True):
    """Name of a function that a tool choice refers to."""

    name: str


class AllowedTool(Struct, forbid_unknown_fields=True):
    """A function that the model may call, in the list of `AllowedTools`."""

    function: NamedFunction
    type: Literal["function"] = "function"


class AllowedTools(Struct, forbid_unknown_fields=True):
    """The functions that the model may call, and whether it must call one. The prompt shows all
    tools of the request."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=MAX_FUNCTIONS)]


class ToolDemand(Struct, forbid_unknown_fields=True):
    """A tool choice that names one function to call, or several functions that may be called."""

    type: Literal["function", "allowed_tools"] = "function"
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


ToolChoice = Literal["none", "auto", "required"] | ToolDemand
# As in OpenAI's API, a function without `parameters` takes no arguments: they must be an empty
# object.
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def check_tool_kinds(tools: Any) -> None:
    """Raise `APIError` if `tools`, decoded from JSON but not validated yet, contains a tool that is
    not a function."""
    for number, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type", "function") if isinstance(tool, dict) else "function"
        if kind != "function" and isinstance(kind, str):
            path = f"tools[{number}].type"
            raise invalid(
                f"{path}: tools of type {kind!r:.100} are not supported; use tools of type "
                "'function'",
                path,
            )


def named_tool(choice: ToolChoice | None) -> str | None:
    """Return the name of the single function that a choice demands, or None."""
    if isinstance(choice, ToolDemand) and choice.function is not None:
        return choice.function.name
    return None


def _allowed_tools(choice: ToolChoice | None) -> AllowedTools | None:
    return choice.allowed_tools if isinstance(choice, ToolDemand) else None


def demands_calls(choice: ToolChoice | None) -> bool:
    """Return True if the tool choice requires the model to call a function."""
    allowed = _allowed_tools(choice)
    if allowed is not None:
        return allowed.mode == "required"
    return choice == "required" or isinstance(choice, ToolDemand)


def check_tool_choice(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Raise `APIError` if a tool choice is malformed, or if it names a function that is not among
    the tools."""
    if choice in (None, "none", "auto"):
        return
    if not tools:
        raise invalid('tool_choice must be "none" or "auto" if there are no tools', "tool_choice")
    if not isinstance(choice, ToolDemand):
        return
    members = {"function": choice.function, "allowed_tools": choice.allowed_tools}
    fields_set = [name for name, value in members.items() if value is not None]
    if fields_set != [choice.type]:
        (other,) = members.keys() - {choice.type}
        raise invalid(
            f"tool_choice: an object of type {choice.type!r} must have the field "
            f"{choice.type!r}, and must not have the field {other!r}",
            "tool_choice",
        )
    names = {tool.function.name for tool in tools}
    for name in _chosen_names(choice):
        if name not in names:
            known = ", ".join(repr(tool.function.name) for tool in tools)
            text = f"tool_choice: {name!r:.100} is not the name of one of the tools ({known})"
            raise invalid(text, "tool_choice")


def _chosen_names(choice: ToolChoice | None) -> list[str]:
    """Return the names of all functions that a tool choice contains."""
    allowed, named = _allowed_tools(choice), named_tool(choice)
    if allowed is not None:
        return [one.function.name for one in allowed.tools]
    return [] if named is None else [named]


def tool_grammar(
    tools: Sequence[Tool], choice: ToolChoice | None, parallel: bool
) -> ToolGrammar | None:
    """Return the grammar of the calls that the answer must or may contain. Return None if calls are
    unconstrained.

    Arguments must match the function's schema if a call is demanded, or if the function is strict.
    `parallel` allows several calls.
    """
    functions = _allowed_functions(tools, choice)
    if named_tool(choice) is not None:
        # Only one call, as in OpenAI's API: a client that names a function expects a single call.
        return ToolGrammar(
            functions=_constrained_functions(functions), required=True, parallel=False
        )
    if demands_calls(choice):
        return ToolGrammar(
            functions=_constrained_functions(functions), required=True, parallel=parallel
        )
    is_unconstrained = _allowed_tools(choice) is None and not any(
        function.strict for function in functions
    )
    if choice == "none" or is_unconstrained:
        return None
    return ToolGrammar(
        functions=_functions_by_strictness(functions), required=False, parallel=parallel
    )


def possible_calls(
    tools: Sequence[Tool], choice: ToolChoice | None, parallel: bool
) -> ToolGrammar | None:
    """Return the grammar of the calls that the model may make instead of an answer in
    `response_format`. Return None if no call is allowed, or if a call is demanded."""
    functions = _allowed_functions(tools, choice)
    if choice == "none" or demands_calls(choice) or not functions:
        return None
    return ToolGrammar(
        functions=_functions_by_strictness(functions), required=True, parallel=parallel
    )


def _allowed_functions(tools: Sequence[Tool], choice: ToolChoice | None) -> list[Function]:
    """Return the functions that a tool choice names, or all functions if it names none."""
    names = _chosen_names(choice)
    return [tool.function for tool in tools if not names or tool.function.name in names]


def _functions_by_strictness(functions: Sequence[Function]) -> tuple[ToolFunction, ...]:
    """Convert functions for a grammar. Only the arguments of strict functions are constrained."""
    constrained = iter(
        _constrained_functions([function for function in functions if function.strict])
    )
    return tuple(
        next(constrained) if function.strict else _unconstrained(function) for function in functions
    )


def _constrained_functions(functions: Sequence[Function]) -> tuple[ToolFunction, ...]:
    constrained = []
    for function, text in _schema_texts(functions):
        if b'"format"' in text:
            schema = msgspec.json.decode(text)
            drop_unenforced(schema)
            text = msgspec.json.encode(schema)
        constrained.append(ToolFunction(name=function.name, parameters=text.decode()))
    return tuple(constrained)


def unenforced_format_paths(grammar: ToolGrammar | None, tools: Sequence[Tool]) -> Iterator[str]:
    """Yield the location of each `format` that is not enforced, in the function schemas that are
    enforced otherwise."""
    if grammar is None:
        return
    enforced = {one.name for one in grammar.functions if one.parameters}
    for index, tool in enumerate(tools):
        if tool.function.name in enforced:
            for name in unenforced_formats(tool.function.parameters or {}):
                yield f"tools[{index}].function.parameters: the format {name!r:.60}"


def _schema_texts(functions: Sequence[Function]) -> Iterator[tuple[Function, bytes]]:
    """Yield each function with its schema as JSON text. Raises `APIError` as soon as the schemas
    together exceed the maximum size of a grammar, so that the event loop encodes no more of
    them."""
    size = 0
    for function in functions:
        parameters = function.parameters
        text = msgspec.json.encode(_NO_PARAMETERS if parameters is None else parameters)
        size += len(text)
        if size > MAX_GRAMMAR_BYTES:
            raise invalid(
                f"tools: the schemas of the functions to call have more than {MAX_GRAMMAR_BYTES} "
                "bytes of text in total",
                "tools",
            )
        yield function, text


def _unconstrained(function: Function) -> ToolFunction:
    return ToolFunction(name=function.name)
