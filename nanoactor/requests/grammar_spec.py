"""The specification of a request's grammar that is sent between processes: plain data, no
parser."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import msgspec

MAX_GRAMMAR_BYTES = 256 * 1024
"""Maximum size of a specification's text in bytes."""

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
"""Tag that starts calls, by form; empty if the form has none."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """The required form of a sequence."""

    kind: Kind
    value: str = ""
    """JSON text of a schema, of a list of strings to choose from, or of a `ToolGrammar`; a regular
    expression; or a grammar in Lark's notation or EBNF. Empty if any JSON object is allowed."""
    thoughts: Thoughts = "none"
    """Reasoning before the constrained text: "open" if the prompt has opened it, "optional" if the
    model may open it."""
    free: bool = False
    """True if reasoning, and text before a call, are excluded from the grammar, which then starts
    with the tag that ends them."""
    whitespace: bool = True
    """True if JSON may have spaces and line breaks between its tokens; if not, it is compact."""

    def to_text(self) -> str:
        """Return the specification as JSON text, which is the same for equal specifications."""
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
    """JSON text of the schema of the function's arguments; empty if any object is allowed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolGrammar:
    """The calls that a sequence may contain, written as `<tool_call>{"name": ..., "arguments":
    {...}}</tool_call>` or in another form."""

    functions: tuple[ToolFunction, ...]
    required: bool
    """True if the output must consist of calls, or of an answer that `answer` allows. If not, calls
    are optional, and text may come first."""
    parallel: bool = True
    """True if several calls are allowed."""
    form: CallForm = "hermes"
    """Syntax in which the model writes calls."""
    answer: str = ""
    """JSON text of the schema of an answer that may replace the calls; only with `required`."""
