"""A model's chat template: conversations to prompts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoactor.errors import InvalidRequest
from nanoactor.models.config import read_json
from nanoactor.models.errors import ModelError

if TYPE_CHECKING:  # the user's process imports this module, and has no use for the library
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    from nanoactor.grammar.spec import Thoughts


@dataclasses.dataclass(frozen=True, slots=True)
class TemplateFacts:
    """Facts about what a model's chat template does."""

    exists: bool = False
    variables: tuple[str, ...] = ()
    """The names that it reads."""
    shows_tools: bool = False
    thoughts: Thoughts = "none"
    """Whether thoughts may begin the answer to a prompt that is rendered without options."""
    knows_thoughts: bool = False

    def possible(self, thoughts: Thoughts) -> Thoughts:
        """Return what `thoughts_after` has found, but for a model that knows no thoughts."""
        return "none" if thoughts == "optional" and not self.knows_thoughts else thoughts

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise `InvalidRequest` for an option that would change nothing."""
        if options.get("tools") and not self.shows_tools:
            raise InvalidRequest("tools: the model's chat template does not show them to the model")
        known = {*self.variables, "add_generation_prompt", "continue_final_message", "tools"}
        for name in options:
            if self.exists and name not in known:
                raise InvalidRequest(
                    f"chat_template_kwargs: the model's chat template does not read {name!r:.100}; "
                    f"it reads {', '.join(self.variables)}"
                )


def thoughts_after(prompt: str) -> Thoughts:
    """Return whether thoughts may begin the answer to a prompt, if the model has any: "open" where
    it ends with an open `<think>`, "none" where they are closed already, as Qwen3's template writes
    where it is told not to think."""
    end = prompt.rstrip()
    if end.endswith("<think>"):
        return "open"
    return "none" if end.endswith("</think>") else "optional"


_SOME_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}


class ChatTemplate:
    """Renders messages as the model was trained to read them.

    The environment offers what transformers offers: a sandbox, `raise_exception`,
    `strftime_now`, `tojson`, and the special tokens by name.
    """

    def __init__(self, directory: Path, characters: int | None = None) -> None:
        """`characters`: how long a prompt may be."""
        self._characters = characters
        try:
            config = _optional_json(directory / "tokenizer_config.json")
            tokens = {**_optional_json(directory / "special_tokens_map.json"), **config}
            self._special = {
                key: value["content"] if isinstance(value, dict) else value
                for key, value in tokens.items()
                if key.endswith("_token") and isinstance(value, str | dict)
            }
            sources = _template_sources(directory, config)
        except (KeyError, AttributeError, UnicodeError) as error:
            raise ModelError(
                f"{directory}: its special tokens or chat templates are malformed: {error!r}"
            ) from error
        # Compiled now, so that a malformed template fails the start and not a request.
        self._templates = {name: _compile(source) for name, source in sources.items()}
        self._sources = sources

    def facts(self) -> TemplateFacts:
        """Read from its source what it does."""
        from jinja2 import meta

        if not self._templates:
            return TemplateFacts()
        variables: set[str] = set()
        for source in self._sources.values():
            variables |= meta.find_undeclared_variables(_environment().parse(source))
        thinks = any("<think>" in source for source in self._sources.values())
        return TemplateFacts(True, tuple(sorted(variables)), knows_thoughts=thinks)

    def probe(self) -> tuple[bool, Thoughts]:
        """(whether it shows tools, whether thoughts may follow), found out by trying."""
        plain = self._tried({})
        shows_tools = self._tried({"tools": [_SOME_TOOL]}) != plain
        return shows_tools, thoughts_after(plain)

    def _tried(self, options: dict[str, Any]) -> str:
        try:
            return self.render([{"role": "user", "content": "?"}], options)
        except InvalidRequest:
            return ""

    def render(self, messages: list[Any], options: Mapping[str, Any]) -> str:
        """The prompt for these messages.

        `options` are passed to the template (`add_generation_prompt` is true unless given), but for
        `continue_final_message`: with it the prompt ends where the last message does, as in
        transformers. Raises `InvalidRequest` where the model has no template, or it refuses.
        """
        name = "tool_use" if options.get("tools") and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequest(
                "the model has no chat template; give a text prompt instead of messages"
            )
        values: dict[str, Any] = {"add_generation_prompt": True, "tools": None, "documents": None}
        options = dict(options)
        continues = options.pop("continue_final_message", False)
        if continues and options.setdefault("add_generation_prompt", False):
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other"
            )
        try:
            text = self._bounded(
                self._templates[name].generate(
                    messages=[_normalised(message) for message in messages],
                    **{**self._special, **values, **options},
                )
            )
        except InvalidRequest:
            raise
        except MemoryError as error:
            why = "the chat template was stopped: it takes too much memory"
            raise InvalidRequest(why) from error
        except Exception as error:  # a template is a program: it can fail in any way
            why = str(error) or type(error).__name__
            raise InvalidRequest(f"the chat template refuses these messages: {why}") from error
        return _up_to_the_end_of(messages[-1], text) if continues else text

    def _bounded(self, pieces: Iterator[str]) -> str:
        """All of them, as long as they are not too many."""
        text, size = [], 0
        for piece in pieces:
            size += len(piece)
            if self._characters is not None and size > self._characters:
                raise InvalidRequest(
                    f"the chat template writes more than {self._characters} characters"
                )
            text.append(piece)
        return "".join(text)


def has_template(directory: Path) -> bool:
    """Tell whether a model has a chat template; raises `ModelError` where files are malformed."""
    try:
        sources = _template_sources(directory, _optional_json(directory / "tokenizer_config.json"))
    except (AttributeError, UnicodeError) as error:
        raise ModelError(f"{directory}: its chat templates are malformed: {error!r}") from error
    return bool(sources)


def _up_to_the_end_of(message: Mapping[str, Any], prompt: str) -> str:
    """A prompt without what the template writes behind its last message."""
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        raise InvalidRequest("continue_final_message needs text as the last message's content")
    begin = prompt.rfind(content.strip())
    if begin < 0:
        raise InvalidRequest(
            "continue_final_message: the chat template does not show the last message's content as "
            "it was given"
        )
    # Templates may trim what they show; space at its end is part of it where they do not.
    whole = content.lstrip()
    kept = whole if prompt.startswith(whole, begin) else content.strip()
    return prompt[: begin + len(kept)]


def _normalised(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without empty fields, and with the reasoning under each name that templates read."""
    given = {key: value for key, value in message.items() if value is not None}
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((given[name] for name in names if name in given), None)
    if reasoning is None:
        return given
    return {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _template_sources(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The model's templates by name; most have one, the default."""
    if (directory / "chat_template.jinja").exists():
        return {"default": (directory / "chat_template.jinja").read_text(encoding="utf-8-sig")}
    source = config.get("chat_template")
    if isinstance(source, list):
        return {str(item.get("name")): str(item.get("template")) for item in source}
    return {"default": source} if isinstance(source, str) else {}


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
    """Return the one tag that chat templates use beyond jinja's own: `{% generation %}` to
    `{% endgeneration %}` marks what an assistant wrote, for training. A prompt is rendered as if
    the tags were not there."""
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012 - the name and type that jinja asks for

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationTag
