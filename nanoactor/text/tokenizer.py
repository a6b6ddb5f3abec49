"""A model's tokenizer and chat template, read from its files without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from nanoactor.errors import InvalidRequest
from nanoactor.messages import Int32
from nanoactor.models.config import read_json
from nanoactor.models.errors import ModelError


def load_tokenizer(directory: Path) -> Tokenizer:
    """The `tokenizer.json` of a model; `ModelError` where it is missing or malformed."""
    path = directory / "tokenizer.json"
    if not path.exists():
        raise ModelError(f"{path} does not exist")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path} is not a tokenizer: {error}") from error
    # Saved with some tokenizers for batches in training; a prompt must arrive as it is.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class ChatTemplate:
    """Renders messages as the model was trained to read them.

    The environment offers what transformers offers: a sandbox, `raise_exception`,
    `strftime_now`, `tojson`, and the special tokens by name.
    """

    def __init__(self, directory: Path) -> None:
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

    def render(self, messages: list[Any], options: Mapping[str, Any]) -> str:
        """The prompt for these messages.

        `options` are passed to the template (`add_generation_prompt` is true unless given).
        Raises `InvalidRequest` where the model has no template or the template refuses.
        """
        name = "tool_use" if options.get("tools") and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequest(
                "the model has no chat template; give a text prompt instead of messages"
            )
        values = {"add_generation_prompt": True, "tools": None, "documents": None}
        try:
            text: str = self._templates[name].render(
                messages=[_normalised(message) for message in messages],
                **{**self._special, **values, **options},
            )
        except Exception as error:  # a template is a program: it can fail in any way
            raise InvalidRequest(f"the chat template refuses these messages: {error}") from error
        return text


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
        return {"default": (directory / "chat_template.jinja").read_text(encoding="utf-8")}
    source = config.get("chat_template")
    if isinstance(source, list):
        return {str(item.get("name")): str(item.get("template")) for item in source}
    return {"default": source} if isinstance(source, str) else {}


def _compile(source: str) -> Any:
    from datetime import datetime

    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from nanoactor.text.jinja import GenerationTag

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
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ModelError(f"the model's chat template is malformed: {error}") from error


class TextEncoder:
    """Prompts to token ids."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = load_tokenizer(directory)
        self._template = ChatTemplate(directory)

    def encode_text(self, text: str) -> Int32:
        """The ids of a text, with the special tokens that the tokenizer adds by itself."""
        return np.array(self._tokenizer.encode(text).ids, np.int32)

    def encode_chat(self, messages: list[Any], options: Mapping[str, Any]) -> Int32:
        """The ids of a conversation; its template writes all special tokens itself."""
        text = self._template.render(messages, options)
        try:
            return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        except (TypeError, UnicodeError) as error:
            raise InvalidRequest(f"the conversation is not valid Unicode: {error}") from error
