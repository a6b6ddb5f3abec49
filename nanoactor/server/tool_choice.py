"""Tools of a conversation, and the calls of them that a request demands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from nanoactor.grammar.formats import drop_unenforced, unenforced_formats
from nanoactor.grammar.spec import MAX_GRAMMAR_BYTES, ToolFunction, ToolGrammar
from nanoactor.server.errors import invalid


class Function(Struct):
    """A function that a model may call. Members that are not named here go to the chat template,
    too."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: (
        Annotated[bool, Meta(description="True enforces the schema of the arguments.")] | None
    ) = None


class Tool(Struct):
    """A function, as the only kind of tool."""

    function: Function
    type: Literal["function"] = "function"


class NamedFunction(Struct, forbid_unknown_fields=True):
    """The function that is to be called."""

    name: str


class NamedTool(Struct, forbid_unknown_fields=True):
    """A choice of one function."""

    function: NamedFunction
    type: Literal["function"] = "function"


ToolChoice = Literal["none", "auto", "required"] | NamedTool
# OpenAI: without parameters a function has none, so that its arguments are an empty object.
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def check_tool_choice(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Raise `APIError` where a choice demands what the tools have not."""
    if choice in (None, "none", "auto"):
        return
    if not tools:
        raise invalid('tool_choice: without tools only "none" or "auto" is accepted', "tool_choice")
    names = [tool.function.name for tool in tools]
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        known = ", ".join(map(repr, names))
        text = f"tool_choice: {choice.function.name!r:.100} is none of the tools: {known}"
        raise invalid(text, "tool_choice")


def tool_grammar(
    tools: Sequence[Tool], choice: ToolChoice | None, parallel: bool
) -> ToolGrammar | None:
    """Return which calls an answer must or may have; None where they are the model's affair.

    A demanded call has arguments that its function's schema allows; any other call where a function
    is strict. `parallel`: whether there may be several calls.
    """
    functions = [tool.function for tool in tools]
    if isinstance(choice, NamedTool):
        # One call, as in OpenAI's API: who names a function reads one.
        named = [one for one in functions if one.name == choice.function.name]
        return ToolGrammar(functions=_enforced(named), required=True, parallel=False)
    if choice == "required":
        return ToolGrammar(functions=_enforced(functions), required=True, parallel=parallel)
    if choice == "none" or not any(function.strict for function in functions):
        return None
    held = iter(_enforced([one for one in functions if one.strict]))
    return ToolGrammar(
        functions=tuple(next(held) if one.strict else _any(one) for one in functions),
        required=False,
        parallel=parallel,
    )


def _enforced(functions: Sequence[Function]) -> tuple[ToolFunction, ...]:
    found = []
    for function, text in _texts(functions):
        if b'"format"' in text:
            schema = msgspec.json.decode(text)
            drop_unenforced(schema)
            text = msgspec.json.encode(schema)
        found.append(ToolFunction(name=function.name, parameters=text.decode()))
    return tuple(found)


def unenforced(grammar: ToolGrammar | None, tools: Sequence[Tool]) -> Iterator[str]:
    """Yield the places of formats that the arguments of calls are not held to, though their
    function's schema is enforced."""
    if grammar is None:
        return
    enforced = {one.name for one in grammar.functions if one.parameters}
    for index, tool in enumerate(tools):
        if tool.function.name in enforced:
            for name in unenforced_formats(tool.function.parameters or {}):
                yield f"tools[{index}].function.parameters: the format {name!r:.60}"


def _texts(functions: Sequence[Function]) -> Iterator[tuple[Function, bytes]]:
    """Yield each function with its schema as text. Raises `APIError` where all together are more
    than a grammar may be, before this loop looks into them."""
    size = 0
    for function in functions:
        given = function.parameters
        text = msgspec.json.encode(_NO_PARAMETERS if given is None else given)
        size += len(text)
        if size > MAX_GRAMMAR_BYTES:
            raise invalid(
                f"tools: the schemas of the functions to call have more than {MAX_GRAMMAR_BYTES} "
                "bytes of text",
                "tools",
            )
        yield function, text


def _any(function: Function) -> ToolFunction:
    return ToolFunction(name=function.name)
