"""The files that contain a model's chat templates and special tokens.

Their places and their precedence are those of transformers' tokenizers and processors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoactor.models.config import read_json
from nanoactor.models.errors import ModelError

JINJA, LEGACY, MORE = "chat_template.jinja", "chat_template.json", "additional_chat_templates"
PROCESSOR, CONFIG, SPECIAL = (
    "processor_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
TEMPLATE_FILES = (JINJA, LEGACY, PROCESSOR)
"""Files that contain templates, in addition to the tokenizer's configuration."""
_OF_PROCESSORS = (PROCESSOR, "preprocessor_config.json")
"""Files of models for which transformers reads the processor's templates before the tokenizer's."""
_QWEN = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
_DEFAULTS = {"Qwen2Tokenizer": _QWEN, "Qwen2TokenizerFast": _QWEN}
"""Special tokens by transformers class, used if no file names others."""


@dataclasses.dataclass(frozen=True, slots=True)
class TemplateFiles:
    """A model's chat templates, and the special tokens that they may refer to."""

    sources: Mapping[str, str]
    """Source of each template, by name; most models have only "default"."""
    special_tokens: Mapping[str, str]
    note: str = ""
    """Message about the template in use if the files contain different ones; else empty."""


def read_template_files(directory: Path, template: str | None = None) -> TemplateFiles:
    """Read a model's templates and special tokens; `template` replaces the model's own templates.
    Raises `ModelError` for a malformed file."""
    try:
        config = optional_json(directory / CONFIG)
        found = _found(directory, config)
        special = special_tokens(directory, config)
    except (KeyError, TypeError, AttributeError, UnicodeError) as error:
        raise ModelError(
            f"the special tokens or chat templates in {directory} are malformed: {error!r}"
        ) from error
    if template is not None:
        return TemplateFiles({"default": template}, special)
    if not found:
        return TemplateFiles({}, special)
    first, *others = found.items()
    different = [place for place, sources in others if sources != first[1]]
    note = ""
    if different:
        note = (
            f"the chat template of {first[0]} is used, but there is a different one in "
            f"{', '.join(different)}"
        )
    return TemplateFiles(first[1], special, note)


def _found(directory: Path, config: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the templates by the name of their file, in order of precedence."""
    processes = any((directory / name).exists() for name in _OF_PROCESSORS)
    jinja = _of_jinja_files(directory)
    legacy = _named(optional_json(directory / LEGACY).get("chat_template"))
    of_processor = _named(optional_json(directory / PROCESSOR).get("chat_template"))
    of_tokenizer = _named(config.get("chat_template"))
    of_files = {PROCESSOR: of_processor, JINJA: jinja}
    if processes:
        places = {**of_files, LEGACY: legacy, CONFIG: of_tokenizer}
    else:  # transformers' tokenizers do not read chat_template.json
        places = {**of_files, CONFIG: of_tokenizer, LEGACY: legacy}
    return {place: sources for place, sources in places.items() if sources}


def _of_jinja_files(directory: Path) -> dict[str, str]:
    found = {}
    if (directory / JINJA).exists():
        found["default"] = _text(directory / JINJA)
    for path in sorted((directory / MORE).glob("*.jinja")):
        found[path.name.removesuffix(".jinja")] = _text(path)
    return found


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8-sig")


def _named(given: Any) -> dict[str, str]:
    """Return templates by name, given a single text, a list of named templates, or a dict."""
    if given is None:
        return {}
    found = {"default": given} if isinstance(given, str) else given
    if isinstance(given, list):
        found = {item["name"]: item["template"] for item in given}
    if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
        raise TypeError("chat_template must be a string, or strings by name")
    return found


def special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens, by name, that the tokenizer's `config` and the model's other files
    define: the seven that all models may have, and those of a particular model (`image_token`,
    say)."""
    given: dict[str, Any] = {**_DEFAULTS.get(str(config.get("tokenizer_class")), {})}
    given |= {name: value for name, value in config.items() if name.endswith("_token")}
    own = config.get("extra_special_tokens")
    given |= own if isinstance(own, dict) else {}
    if "added_tokens_decoder" not in config:  # saved by versions that wrote a separate file
        older = optional_json(directory / SPECIAL)
        given |= {name: value for name, value in older.items() if name.endswith("_token")}
    texts = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in given.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def optional_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty dict if the file does not exist."""
    return read_json(path) if path.exists() else {}
