"""Tools of a conversation, and the calls of them that a request demands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from nanoactor.grammar.formats import unenforced_formats, without_unenforced
from nanoactor.grammar.spec import ToolFunction, ToolGrammar
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
    return ToolGrammar(
        functions=tuple(_enforced([one])[0] if one.strict else _any(one) for one in functions),
        required=False,
        parallel=parallel,
    )


def _enforced(functions: Sequence[Function]) -> tuple[ToolFunction, ...]:
    return tuple(ToolFunction(name=one.name, parameters=_schema(one)) for one in functions)


def _schema(function: Function) -> str:
    parameters = _NO_PARAMETERS if function.parameters is None else function.parameters
    # Its own checks say what is wrong with a schema that is none.
    return msgspec.json.encode(without_unenforced(parameters)).decode()


def unenforced(grammar: ToolGrammar | None, tools: Sequence[Tool]) -> Iterator[str]:
    """Yield the places of formats that the arguments of calls are not held to, though their
    function's schema is enforced."""
    enforced = {one.name for one in grammar.functions if one.parameters} if grammar else set()
    for index, tool in enumerate(tools):
        function = tool.function
        if function.name in enforced and function.parameters:
            for name in unenforced_formats(function.parameters):
                yield f"tools[{index}].function.parameters: the format {name!r:.60}"


def _any(function: Function) -> ToolFunction:
    return ToolFunction(name=function.name)
