"""A model's chat template, which converts conversations to prompts."""

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
    asks_for_forms,
    calling,
    find_forms,
    fit_messages,
    up_to_marker,
    with_marker,
)
from nanoactor.text.template_files import read_template_files

if TYPE_CHECKING:  # the user's process imports this module but does not need the library
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    from nanoactor.requests.grammar_spec import CallForm, Thoughts


@dataclasses.dataclass(frozen=True, slots=True)
class TemplateFacts:
    """Capabilities of a model's chat template."""

    exists: bool = False
    variables: tuple[str, ...] = ()
    """Names of the variables that the template reads."""
    members: tuple[str, ...] = ()
    """Names that the template may look up in a message or in any other object."""
    call_form: CallForm = "hermes"
    """Form in which the template renders calls."""
    shows_tools: bool = False
    shows_result_pictures: bool = False
    """Whether an image in a tool result is rendered like one in a user message."""
    thoughts: Thoughts = "none"
    """Reasoning mode after a prompt that is rendered without options."""
    knows_thoughts: bool = False
    thoughts_vary: bool = False
    """Whether the reasoning mode depends on the messages as well as on the options."""

    def possible(self, thoughts: Thoughts) -> Thoughts:
        """Return `thoughts`, the result of `thoughts_after`, or "none" if it is "optional" and the
        model has no reasoning."""
        return "none" if thoughts == "optional" and not self.knows_thoughts else thoughts

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise `InvalidRequest` for an option that would have no effect."""
        if options.get("tools") and not self.shows_tools:
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
    """Return the reasoning mode after a prompt of a reasoning model: "open" if the prompt ends with
    an open `<think>`, "none" if it ends with `</think>`, as with Qwen3's template when thinking is
    disabled, else "optional"."""
    end = prompt.rstrip()
    if end.endswith("<think>"):
        return "open"
    return "none" if end.endswith("</think>") else "optional"


_SOME_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}


_BEFORE, _AFTER = "before a picture", "after a picture"
_WITH_PICTURE = [
    {"type": "text", "text": _BEFORE},
    {"type": "image"},
    {"type": "text", "text": _AFTER},
]
_PROBES: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "?"}],
    [{"role": "user", "content": "? /no_think"}],
    [{"role": "system", "content": "/no_think"}, {"role": "user", "content": "?"}],
    calling({}, "{}"),
)
"""Conversations after which some templates open reasoning and others do not."""


_FORMS: tuple[tuple[str, CallForm], ...] = (
    ("<function=", "qwen3_coder"),
    ("[ARGS]", "mistral_args"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ("Environment: ipython", "llama3_json"),
)
"""Texts in a template's source that identify the form in which it renders calls; the first match is
used."""


def _call_form(source: str) -> CallForm:
    return next((form for mark, form in _FORMS if mark in source), "hermes")


class ChatTemplate:
    """Renders messages as the model was trained to read them.

    The environment is the same as in transformers: a sandbox, `raise_exception`, `strftime_now`,
    `tojson`, and the special tokens by name.
    """

    def __init__(
        self, directory: Path, characters: int | None = None, source: str | None = None
    ) -> None:
        """Compile `source`, or the model's own templates if it is None. `characters` limits the
        length of the prompt."""
        self._characters = characters
        files = read_template_files(directory, source)
        self._special, self._sources = files.special_tokens, files.sources
        # Compiled now, so that a malformed template raises at startup and not during a request.
        self._templates = {name: _compile(source) for name, source in self._sources.items()}
        self._forms: dict[str, Forms] = {}
        """Forms of messages by template; determined when a conversation first needs them."""

    def facts(self) -> TemplateFacts:
        """Return the facts that can be derived from the template's source."""
        from jinja2 import meta

        if not self._templates:
            return TemplateFacts()
        variables: set[str] = set()
        members: set[str] = set()
        for source in self._sources.values():
            tree = _environment().parse(source)
            variables |= meta.find_undeclared_variables(tree)
            members |= _members(tree)
        thinks = any("<think>" in source for source in self._sources.values())
        names = tuple(sorted(variables)), tuple(sorted(members))
        form = _call_form("\n".join(self._sources.values()))
        return TemplateFacts(True, *names, call_form=form, knows_thoughts=thinks)

    def probe(self) -> dict[str, Any]:
        """Return the fields of `TemplateFacts` that are determined by rendering."""
        plain = self._tried(_PROBES[0], {})
        others = [text for probe in _PROBES[1:] if (text := self._tried(probe, {}))]
        thoughts = thoughts_after(plain)
        return {
            "shows_tools": self._tried(_PROBES[0], {"tools": [_SOME_TOOL]}) != plain,
            "shows_result_pictures": self._shows_result_pictures(),
            "thoughts": thoughts,
            "thoughts_vary": any(thoughts_after(text) != thoughts for text in others),
        }

    def _shows_result_pictures(self) -> bool:
        *before, result = calling({}, "{}")
        shown = self._picture([{"role": "user", "content": _WITH_PICTURE}])
        result = {**result, "content": _WITH_PICTURE}
        return bool(shown.strip()) and self._picture([*before, result]) == shown

    def _picture(self, messages: list[Any]) -> str:
        """Return the placeholder of the image in `_WITH_PICTURE` as these messages render it."""
        _, _, found = self._tried(messages, {}).partition(_BEFORE)
        return found.partition(_AFTER)[0]

    def _tried(self, messages: list[Any], options: dict[str, Any]) -> str:
        try:
            return self.render(messages, options)
        except InvalidRequest:
            return ""

    def render(self, messages: list[Any], options: Mapping[str, Any]) -> str:
        """Return the prompt for these messages.

        `options` are passed to the template (`add_generation_prompt` is true unless given). The
        exception is `continue_final_message`, with which the prompt ends where the last message
        ends, as in transformers. Raises `InvalidRequest` if the model has no template, or if the
        template rejects the messages.
        """
        name = "tool_use" if options.get("tools") and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequest(
                "the model has no chat template; give a text prompt instead of messages"
            )
        options = dict(options)
        continues = options.pop("continue_final_message", False)
        if continues and options.setdefault("add_generation_prompt", False):
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt are mutually exclusive"
            )
        show = self._continued if continues else self._rendered
        if not asks_for_forms(messages):
            try:
                return show(name, fit_messages(messages, Forms()), options)
            except InvalidRequest as error:
                if (
                    isinstance(error.__cause__, MemoryError)
                    or not self._forms_of(name).single_roles
                ):
                    raise
        return show(name, fit_messages(messages, self._forms_of(name)), options)

    def _continued(self, name: str, messages: list[Any], options: Mapping[str, Any]) -> str:
        """Return the prompt up to the end of the last message's text."""
        marker = f"\ue000{secrets.token_hex(8)}\ue001"
        marked, text = with_marker(messages, f"{marker} ")
        return up_to_marker(self._rendered(name, marked, options), marker, text)

    def _forms_of(self, name: str) -> Forms:
        """Return the message forms that a template reads."""
        if name not in self._forms:

            def tried(probe: list[dict[str, Any]]) -> str:
                try:
                    return self._rendered(name, probe, {"tools": [_SOME_TOOL]})
                except InvalidRequest:
                    return ""

            self._forms[name] = find_forms(tried, self._sources[name])
        return self._forms[name]

    def _rendered(self, name: str, messages: list[Any], options: Mapping[str, Any]) -> str:
        values: dict[str, Any] = {"add_generation_prompt": True, "tools": None, "documents": None}
        try:
            return self._bounded(
                self._templates[name].generate(
                    messages=messages, **{**self._special, **values, **options}
                )
            )
        except InvalidRequest:
            raise
        except MemoryError as error:
            why = "the chat template was stopped because it used too much memory"
            raise InvalidRequest(why) from error
        except Exception as error:  # a template is a program: it can fail in any way
            why = str(error) or type(error).__name__
            raise InvalidRequest(f"the chat template rejects these messages: {why}") from error

    def _bounded(self, pieces: Iterator[str]) -> str:
        """Join all pieces to one text. Raises `InvalidRequest` if the text is too long."""
        text, size = [], 0
        for piece in pieces:
            size += len(piece)
            if self._characters is not None and size > self._characters:
                raise InvalidRequest(
                    f"the chat template produces more than {self._characters} characters"
                )
            text.append(piece)
        return "".join(text)


def _members(tree: nodes.Template) -> set[str]:
    """Return the names that a template looks up: `a.name`, `a["name"]`, and strings that may be
    names."""
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
    """Return an extension for the only tag that chat templates use in addition to jinja's own: `{%
    generation %}` to `{% endgeneration %}` marks the text of an assistant, for training. A prompt
    is rendered as if the tags were not there."""
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012 - the name and type that jinja asks for

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationTag
