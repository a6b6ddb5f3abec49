"""Syntax of a model's tool calls: selection, and the parser for each syntax."""

from __future__ import annotations

from collections.abc import Sequence

from nanoactor.requests.grammar_spec import CallForm
from nanoactor.server.json_calls import LlamaCalls, MistralCalls
from nanoactor.server.tool_calls import CallFinder, ToolCallParser
from nanoactor.server.tool_choice import Tool
from nanoactor.server.xml_calls import QwenCoderCalls

SPECIAL_TOKEN_FORMS: tuple[CallForm, ...] = ("llama3_json", "mistral", "mistral_args")
"""Syntaxes marked by special tokens, which are omitted from the output text by default."""


def call_form(configured: str, template_form: CallForm) -> CallForm:
    """Return the tool-call syntax to use. `configured` is the server option. If it is "auto", the
    syntax detected from the chat template is used."""
    match configured:
        case "hermes" | "qwen3_coder" | "llama3_json":
            return configured
        case "mistral" if template_form not in ("mistral", "mistral_args"):
            return "mistral"
        case _:  # the template determines which of Mistral's two forms is used
            return template_form


def call_finder(form: CallForm, tools: Sequence[Tool]) -> CallFinder:
    """Create a parser that finds calls of `tools` in the model's output."""
    match form:
        case "qwen3_coder":
            return QwenCoderCalls({one.function.name: one.function.parameters for one in tools})
        case "llama3_json":
            return LlamaCalls([one.function.name for one in tools])
        case "mistral" | "mistral_args":
            return MistralCalls()
        case _:
            return ToolCallParser()
