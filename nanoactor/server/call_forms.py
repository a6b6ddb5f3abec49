"""Selection of a model's tool-call syntax, and of the parser for it."""

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
    """Return the tool-call syntax to use: `configured`, the value of the server option, or
    `template_form`, the syntax detected from the chat template, if the option is "auto". If the
    option is "mistral", the template may select one of Mistral's two syntaxes."""
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
