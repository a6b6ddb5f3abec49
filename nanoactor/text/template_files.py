"""The files that contain a model's chat templates and special tokens.

Locations and precedence are the same as for transformers' tokenizers and processors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoactor.models.config import read_json
from nanoactor.models.errors import ModelError

JINJA_TEMPLATE, LEGACY_TEMPLATE, ADDITIONAL_TEMPLATES = (
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)
PROCESSOR_CONFIG, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP = (
    "processor_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
TEMPLATE_FILES = (JINJA_TEMPLATE, LEGACY_TEMPLATE, PROCESSOR_CONFIG)
"""Files that contain templates, besides the tokenizer's configuration."""
_PROCESSOR_FILES = (PROCESSOR_CONFIG, "preprocessor_config.json")
"""Configuration files of a multimodal processor. If one exists, the processor's templates take
precedence over the tokenizer's, as in transformers."""
_QWEN = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
_DEFAULTS = {"Qwen2Tokenizer": _QWEN, "Qwen2TokenizerFast": _QWEN}
"""Special tokens by name, for each tokenizer class of transformers. Used unless the model's files
define others."""


@dataclasses.dataclass(frozen=True, slots=True)
class TemplateFiles:
    """Chat templates of a model, and the special tokens that they may use."""

    sources: Mapping[str, str]
    """Source of each template, by template name. Most models have only "default"."""
    special_tokens: Mapping[str, str]
    note: str = ""
    """Warning if the files contain different templates; empty otherwise."""


def read_template_files(directory: Path, template: str | None = None) -> TemplateFiles:
    """Read a model's chat templates and special tokens. `template` replaces the model's own
    templates. Raises `ModelError` for a malformed file."""
    try:
        config = optional_json(directory / TOKENIZER_CONFIG)
        found = _find_templates(directory, config)
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


def _find_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return, for each file that contains templates, their sources by template name. The files are
    in order of precedence."""
    has_processor = any((directory / name).exists() for name in _PROCESSOR_FILES)
    jinja = _read_jinja_files(directory)
    legacy = _templates_by_name(optional_json(directory / LEGACY_TEMPLATE).get("chat_template"))
    from_processor = _templates_by_name(
        optional_json(directory / PROCESSOR_CONFIG).get("chat_template")
    )
    from_tokenizer = _templates_by_name(config.get("chat_template"))
    first_sources = {PROCESSOR_CONFIG: from_processor, JINJA_TEMPLATE: jinja}
    if has_processor:
        places = {**first_sources, LEGACY_TEMPLATE: legacy, TOKENIZER_CONFIG: from_tokenizer}
    else:  # transformers' tokenizers do not read chat_template.json
        places = {**first_sources, TOKENIZER_CONFIG: from_tokenizer, LEGACY_TEMPLATE: legacy}
    return {place: sources for place, sources in places.items() if sources}


def _read_jinja_files(directory: Path) -> dict[str, str]:
    found = {}
    if (directory / JINJA_TEMPLATE).exists():
        found["default"] = _text(directory / JINJA_TEMPLATE)
    for path in sorted((directory / ADDITIONAL_TEMPLATES).glob("*.jinja")):
        found[path.name.removesuffix(".jinja")] = _text(path)
    return found


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8-sig")


def _templates_by_name(given: Any) -> dict[str, str]:
    """Convert a template setting to a dict from template names to sources. The setting is a string,
    a list of named templates, a dict or None."""
    if given is None:
        return {}
    found = {"default": given} if isinstance(given, str) else given
    if isinstance(given, list):
        found = {item["name"]: item["template"] for item in given}
    if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
        raise TypeError("chat_template must be a string, or strings by name")
    return found


def special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of a model by name, from the tokenizer's `config` and the model's
    other files. Names that only some models have, such as `image_token`, are included."""
    named: dict[str, Any] = {**_DEFAULTS.get(str(config.get("tokenizer_class")), {})}
    named |= {name: value for name, value in config.items() if name.endswith("_token")}
    extra = config.get("extra_special_tokens")
    named |= extra if isinstance(extra, dict) else {}
    if "added_tokens_decoder" not in config:  # older versions wrote a separate file
        legacy = optional_json(directory / SPECIAL_TOKENS_MAP)
        named |= {name: value for name, value in legacy.items() if name.endswith("_token")}
    texts = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in named.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def optional_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty dict if the file does not exist."""
    return read_json(path) if path.exists() else {}
