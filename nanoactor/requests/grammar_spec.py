"""The grammar of a request, in the form that is sent between processes: plain data without a
parser."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import msgspec

MAX_GRAMMAR_BYTES = 256 * 1024
"""Maximum size of a grammar's text, in bytes."""

Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "tools"]
Thoughts = Literal["none", "open", "optional"]
OPEN_TAG, CLOSE_TAG = "<think>", "</think>"
"""Tags before and after reasoning."""
CallForm = Literal["hermes", "qwen3_coder", "llama3_json", "mistral", "mistral_args"]
CALL_TAGS: Mapping[CallForm, str] = {
    "hermes": "<tool_call>",
    "qwen3_coder": "<tool_call>",
    "llama3_json": "",
    "mistral": "[TOOL_CALLS]",
    "mistral_args": "[TOOL_CALLS]",
}
"""Tag that starts tool calls, by their syntax; empty if the syntax has no tag."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """The form that the output of a sequence must have."""

    kind: Kind
    value: str = ""
    """Constraint, in a format that depends on `kind`: JSON text of a schema, of a list of strings
    to choose from, or of a `ToolGrammar`; a regular expression; or a grammar in Lark's notation or
    EBNF. Empty if any JSON object is allowed."""
    thoughts: Thoughts = "none"
    """Reasoning before the constrained text: "none", "open" if the prompt ends with the tag that
    starts it, or "optional" if the model may start it."""
    free: bool = False
    """True if the grammar applies only from the tag that ends reasoning or starts a tool call. The
    text before that tag is unconstrained."""
    whitespace: bool = True
    """True if JSON may have spaces and line breaks between its tokens. False requires compact
    JSON."""

    def to_text(self) -> str:
        """Encode the specification as JSON text. Equal specifications have equal texts."""
        return msgspec.json.encode(self, order="deterministic").decode()

    @classmethod
    def of_text(cls, text: str) -> GrammarSpec:
        """Decode a specification that `to_text` encoded."""
        return msgspec.json.decode(text, type=cls)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolFunction:
    """A function that the model may call, or must call."""

    name: str
    parameters: str = ""
    """JSON schema of the arguments, as text; empty if any object is allowed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolGrammar:
    """The tool calls that an output may contain. The default syntax is `<tool_call>{"name": ...,
    "arguments": {...}}</tool_call>`."""

    functions: tuple[ToolFunction, ...]
    required: bool
    """True if the output must consist of calls, or of an answer that matches `answer`. False if
    calls are optional and text may precede them."""
    parallel: bool = True
    """True if the output may contain more than one call."""
    form: CallForm = "hermes"
    """Syntax in which the model writes calls."""
    answer: str = ""
    """JSON schema, as text, of an answer that the model may give instead of calls. Used only with
    `required`."""
