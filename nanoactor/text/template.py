"""A model's chat template: rendering of conversations to prompts, and detection of the features
that the template supports."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoactor.errors import InvalidRequest
from nanoactor.models.errors import ModelError
from nanoactor.text.conversation import (
    Forms,
    append_marker,
    cut_at_marker,
    depends_on_forms,
    detect_forms,
    fit_messages,
    tool_call_conversation,
)
from nanoactor.text.template_files import read_template_files

if TYPE_CHECKING:  # not needed in the user's process, which imports this module
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    from nanoactor.requests.grammar_spec import CallForm, Thoughts


@dataclasses.dataclass(frozen=True, slots=True)
class TemplateFacts:
    """Capabilities of a model's chat template, as reported to other processes."""

    exists: bool = False
    variables: tuple[str, ...] = ()
    """Names of the variables that the template reads."""
    members: tuple[str, ...] = ()
    """Names that the template may look up in a message or in another object."""
    call_form: CallForm = "hermes"
    """Syntax in which the template writes the assistant's earlier tool calls."""
    renders_tools: bool = False
    renders_result_images: bool = False
    """True if an image in a tool result is rendered like an image in a user message."""
    thoughts: Thoughts = "none"
    """Reasoning mode after a prompt that is rendered without options, as `thoughts_after` returns
    it."""
    has_reasoning: bool = False
    reasoning_varies: bool = False
    """True if the messages, and not only the options, determine whether reasoning follows."""

    def effective_thoughts(self, thoughts: Thoughts) -> Thoughts:
        """Return `thoughts`, a result of `thoughts_after`, but "none" instead of "optional" if the
        model cannot reason."""
        return "none" if thoughts == "optional" and not self.has_reasoning else thoughts

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise `InvalidRequest` for an option that the template does not read, so that it would
        have no effect."""
        if options.get("tools") and not self.renders_tools:
            raise InvalidRequest(
                "tools cannot be used because the model's chat template does not show them "
                "to the model"
            )
        known = {*self.variables, "add_generation_prompt", "continue_final_message", "tools"}
        for name in options:
            if self.exists and name not in known:
                raise InvalidRequest(
                    "chat_template_kwargs: the model's chat template does not read "
                    f"{name!r:.100}; it reads only {', '.join(self.variables)}"
                )


def thoughts_after(prompt: str) -> Thoughts:
    """Return the reasoning mode of the output after a prompt: "open" if the prompt ends with
    `<think>`, "none" if it ends with `</think>`, and otherwise "optional".

    Qwen3's template, for example, ends the prompt with `</think>` if thinking is disabled.
    """
    end = prompt.rstrip()
    if end.endswith("<think>"):
        return "open"
    return "none" if end.endswith("</think>") else "optional"


_DUMMY_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}


_BEFORE, _AFTER = "before an image", "after an image"
_WITH_IMAGE = [
    {"type": "text", "text": _BEFORE},
    {"type": "image"},
    {"type": "text", "text": _AFTER},
]
_PROBES: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "?"}],
    [{"role": "user", "content": "? /no_think"}],
    [{"role": "system", "content": "/no_think"}, {"role": "user", "content": "?"}],
    tool_call_conversation({}, "{}"),
)
"""Test conversations. Some templates start reasoning after certain messages and not after
others."""


_CALL_FORM_MARKS: tuple[tuple[str, CallForm], ...] = (
    ("<function=", "qwen3_coder"),
    ("[ARGS]", "mistral_args"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ("Environment: ipython", "llama3_json"),
)
"""Texts in a template's source that identify the syntax of its tool calls. The first match is
used."""


def _call_form(source: str) -> CallForm:
    return next((form for mark, form in _CALL_FORM_MARKS if mark in source), "hermes")


class ChatTemplate:
    """Renders messages in the format that the model was trained on.

    The Jinja environment is the same as in transformers: a sandbox with `raise_exception`,
    `strftime_now`, `tojson`, and the special tokens by name.
    """

    def __init__(
        self, directory: Path, characters: int | None = None, source: str | None = None
    ) -> None:
        """Compile `source`, or the model's own templates if it is None. `characters` is the maximum
        length of a prompt; None sets no limit."""
        self._characters = characters
        files = read_template_files(directory, source)
        self._special, self._sources = files.special_tokens, files.sources
        # Compile now, so that a malformed template raises at startup and not during a request.
        self._templates = {name: _compile(source) for name, source in self._sources.items()}
        self._forms: dict[str, Forms] = {}
        """Message forms that each template reads, by template name. Detected on first use."""

    def facts(self) -> TemplateFacts:
        """Return the capabilities that can be read from the template's source."""
        from jinja2 import meta

        if not self._templates:
            return TemplateFacts()
        variables: set[str] = set()
        members: set[str] = set()
        for source in self._sources.values():
            tree = _environment().parse(source)
            variables |= meta.find_undeclared_variables(tree)
            members |= _looked_up_names(tree)
        has_reasoning = any("<think>" in source for source in self._sources.values())
        names = tuple(sorted(variables)), tuple(sorted(members))
        form = _call_form("\n".join(self._sources.values()))
        return TemplateFacts(True, *names, call_form=form, has_reasoning=has_reasoning)

    def probe(self) -> dict[str, Any]:
        """Return the fields of `TemplateFacts` that are detected by rendering test
        conversations."""
        baseline = self._try_render(_PROBES[0], {})
        others = [text for probe in _PROBES[1:] if (text := self._try_render(probe, {}))]
        thoughts = thoughts_after(baseline)
        return {
            "renders_tools": self._try_render(_PROBES[0], {"tools": [_DUMMY_TOOL]}) != baseline,
            "renders_result_images": self._renders_result_images(),
            "thoughts": thoughts,
            "reasoning_varies": any(thoughts_after(text) != thoughts for text in others),
        }

    def _renders_result_images(self) -> bool:
        *before, result = tool_call_conversation({}, "{}")
        expected = self._image_placeholder([{"role": "user", "content": _WITH_IMAGE}])
        result = {**result, "content": _WITH_IMAGE}
        return bool(expected.strip()) and self._image_placeholder([*before, result]) == expected

    def _image_placeholder(self, messages: list[Any]) -> str:
        """Return the text that the template writes for the image in `_WITH_IMAGE`, which
        `messages` must contain. Empty if the template rejects them."""
        _, _, rest = self._try_render(messages, {}).partition(_BEFORE)
        return rest.partition(_AFTER)[0]

    def _try_render(self, messages: list[Any], options: dict[str, Any]) -> str:
        try:
            return self.render(messages, options)
        except InvalidRequest:
            return ""

    def render(self, messages: list[Any], options: Mapping[str, Any]) -> str:
        """Render messages to a prompt.

        `options` are passed to the template. The option `continue_final_message` ends the prompt
        where the last message ends, as in transformers. `add_generation_prompt` defaults to False
        with that option and to True otherwise. Raises `InvalidRequest` if the model has no
        template, or if the template rejects the messages.
        """
        name = "tool_use" if options.get("tools") and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequest(
                "the model has no chat template; give a text prompt instead of messages"
            )
        options = dict(options)
        is_continued = options.pop("continue_final_message", False)
        if is_continued and options.setdefault("add_generation_prompt", False):
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt are mutually exclusive; "
                "set only one of them"
            )
        render_messages = self._render_continued if is_continued else self._render_template
        if not depends_on_forms(messages):
            try:
                return render_messages(name, fit_messages(messages, Forms()), options)
            except InvalidRequest as error:
                if (
                    isinstance(error.__cause__, MemoryError)
                    or not self._get_forms(name).single_roles
                ):
                    raise
        return render_messages(name, fit_messages(messages, self._get_forms(name)), options)

    def _render_continued(self, name: str, messages: list[Any], options: Mapping[str, Any]) -> str:
        """Render messages to a prompt that ends with the last message's text."""
        marker = f"\ue000{secrets.token_hex(8)}\ue001"
        marked, text = append_marker(messages, f"{marker} ")
        return cut_at_marker(self._render_template(name, marked, options), marker, text)

    def _get_forms(self, name: str) -> Forms:
        """Return the message forms that a template reads, detecting them on first use."""
        if name not in self._forms:

            def render_probe(probe: list[dict[str, Any]]) -> str:
                try:
                    return self._render_template(name, probe, {"tools": [_DUMMY_TOOL]})
                except InvalidRequest:
                    return ""

            self._forms[name] = detect_forms(render_probe, self._sources[name])
        return self._forms[name]

    def _render_template(self, name: str, messages: list[Any], options: Mapping[str, Any]) -> str:
        values: dict[str, Any] = {"add_generation_prompt": True, "tools": None, "documents": None}
        try:
            return self._join_bounded(
                self._templates[name].generate(
                    messages=messages, **{**self._special, **values, **options}
                )
            )
        except InvalidRequest:
            raise
        except MemoryError as error:
            reason = "the chat template was stopped because it used too much memory"
            raise InvalidRequest(reason) from error
        except Exception as error:  # a template is a program and may raise any exception
            reason = str(error) or type(error).__name__
            raise InvalidRequest(f"the chat template rejects these messages: {reason}") from error

    def _join_bounded(self, pieces: Iterator[str]) -> str:
        """Join pieces into one string. Raises `InvalidRequest` if it exceeds the maximum length."""
        parts, size = [], 0
        for piece in pieces:
            size += len(piece)
            if self._characters is not None and size > self._characters:
                raise InvalidRequest(
                    f"the chat template produces more than {self._characters} characters; "
                    "shorten the conversation"
                )
            parts.append(piece)
        return "".join(parts)


def _looked_up_names(tree: nodes.Template) -> set[str]:
    """Return the names that a template may look up in objects: those in `a.name` and `a["name"]`,
    and every other string literal that is a valid name, because it may serve as a key."""
    from jinja2 import nodes

    found = {node.attr for node in tree.find_all(nodes.Getattr)}
    constants = (node.value for node in tree.find_all(nodes.Const))
    return found | {text for text in constants if isinstance(text, str) and text.isidentifier()}


def _compile(source: str) -> Any:
    from jinja2 import TemplateError

    try:
        return _environment().from_string(source)
    except TemplateError as error:
        raise ModelError(f"the model's chat template is malformed: {error}") from error


def _environment() -> Any:
    from datetime import datetime

    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(text: str) -> None:
        raise TemplateError(text)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_tag()]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment


def _generation_tag() -> type[Extension]:
    """Return a Jinja extension for `{% generation %}` and `{% endgeneration %}`, the only tags that
    chat templates use in addition to Jinja's own. They mark an assistant's text for training and
    have no effect on a prompt."""
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012 - Jinja requires this name and type

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationTag
