"""A request's grammar as it travels between processes: plain data, no parser."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import msgspec

MAX_GRAMMAR_BYTES = 256 * 1024
"""Maximum size of a specification as text."""

Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "tools"]
Thoughts = Literal["none", "open", "optional"]
OPEN_TAG, CLOSE_TAG = "<think>", "</think>"
"""Tags that start and end reasoning."""
CallForm = Literal["hermes", "qwen3_coder", "llama3_json", "mistral", "mistral_args"]
CALL_TAGS: Mapping[CallForm, str] = {
    "hermes": "<tool_call>",
    "qwen3_coder": "<tool_call>",
    "llama3_json": "",
    "mistral": "[TOOL_CALLS]",
    "mistral_args": "[TOOL_CALLS]",
}
"""By form: the tag that starts calls; empty if there is none."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """The required form of a sequence."""

    kind: Kind
    value: str = ""
    """JSON text of a schema, of a list of strings to choose from, or of `ToolGrammar`; a regular
    expression; a grammar in Lark's notation or EBNF. Empty for any JSON object."""
    thoughts: Thoughts = "none"
    """Reasoning before the grammar: the prompt has opened it, or the model may."""
    free: bool = False
    """True if reasoning, and text before a call, are not covered by the grammar, which starts with
    the tag that ends them."""
    whitespace: bool = True
    """True if JSON may have spaces and line breaks between its tokens; otherwise it is compact."""

    def to_text(self) -> str:
        """Return the specification as JSON text, the same for equal ones."""
        return msgspec.json.encode(self, order="deterministic").decode()

    @classmethod
    def of_text(cls, text: str) -> GrammarSpec:
        """Parse the output of `to_text`."""
        return msgspec.json.decode(text, type=cls)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolFunction:
    """A function that a sequence may, or must, call."""

    name: str
    parameters: str = ""
    """JSON text of the schema of its arguments; empty: any object."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolGrammar:
    """The calls of a sequence, as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` or in
    another form."""

    functions: tuple[ToolFunction, ...]
    required: bool
    """True if the output consists of calls, or of what `answer` allows; otherwise text may come
    first and calls are optional."""
    parallel: bool = True
    """True if several calls are allowed."""
    form: CallForm = "hermes"
    """Syntax in which the model writes calls."""
    answer: str = ""
    """With `required`: JSON text of the schema of an answer that may come instead of calls."""
