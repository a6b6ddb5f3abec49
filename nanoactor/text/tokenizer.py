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
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path} is not a tokenizer: {error}") from error


class ChatTemplate:
    """Renders messages as the model was trained to read them.

    The environment offers what transformers offers: a sandbox, `raise_exception`,
    `strftime_now`, `tojson`, and the special tokens by name.
    """

    def __init__(self, directory: Path) -> None:
        config: dict[str, Any] = {}
        if (directory / "tokenizer_config.json").exists():
            config = read_json(directory / "tokenizer_config.json")
        self._source = _template_source(directory, config)
        self._special = {
            key: value["content"] if isinstance(value, dict) else value
            for key, value in config.items()
            if key.endswith("_token") and isinstance(value, str | dict)
        }
        self._compiled: Any = None

    def render(self, messages: list[Any], options: Mapping[str, Any]) -> str:
        """The prompt for these messages.

        `options` are passed to the template (`add_generation_prompt` is true unless given).
        Raises `InvalidRequest` where the model has no template or the template refuses.
        """
        from jinja2 import TemplateError

        if self._source is None:
            raise InvalidRequest(
                "the model has no chat template; give a text prompt instead of messages"
            )
        if self._compiled is None:
            self._compiled = _compile(self._source)
        values = {"add_generation_prompt": True, "tools": None, "documents": None, **options}
        try:
            text: str = self._compiled.render(messages=messages, **self._special, **values)
        except (TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}") from error
        return text


def _template_source(directory: Path, config: Mapping[str, Any]) -> str | None:
    if (directory / "chat_template.jinja").exists():
        return (directory / "chat_template.jinja").read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((t["template"] for t in source if t.get("name") == "default"), None)
    return source if isinstance(source, str) else None


def _compile(source: str) -> Any:
    from datetime import datetime

    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(text: str) -> None:
        raise TemplateError(text)

    def tojson(value: Any, **kwargs: Any) -> str:
        return json.dumps(value, ensure_ascii=False, **kwargs)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
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
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
