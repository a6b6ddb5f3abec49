"""Pooling configurations: how a model's hidden states are reduced to a vector or a score. This
module does not import torch.

Embedding checkpoints store the configuration in files of sentence-transformers: `modules.json`, the
configuration of the pooling module, and `config_sentence_transformers.json`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from nanoactor.models.config import check_file, read_json
from nanoactor.models.errors import ModelError, UnsupportedModel
from nanoactor.requests.pooling_params import PoolingParams

PoolingMethod = Literal["last", "mean", "cls", "yes_no"]
POOLING_METHODS = ("auto", "none", "last", "mean", "cls", "yes_no")
SCORE_TOKENS = "no", "yes"
"""Tokens whose logits determine the score of a pair of texts."""
MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
_METHOD_BY_MODE: Mapping[str, PoolingMethod] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_SUPPORTED_MODULES = ("Transformer", "Pooling", "Normalize")
"""Supported module types of sentence-transformers."""


@dataclasses.dataclass(frozen=True, slots=True)
class PoolingConfig:
    """Pooling method of a model, and the prompts that can precede its texts."""

    kind: PoolingMethod
    """Pooling method: "last" or "cls" is the final hidden state of the last or first token, "mean"
    is the mean over all tokens, and "yes_no" is the logits of two tokens at the last position."""
    normalize: bool = True
    """True if vectors are scaled to length 1 by default. A request can override this."""
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Prompts that a request can put before its text, by name."""
    default_prompt: str | None = None
    """Name of the prompt that is used by default; None for no prompt."""
    token_ids: tuple[int, ...] = ()
    """For "yes_no": ids of the tokens "no" and "yes", in this order."""

    @property
    def returns_scores(self) -> bool:
        """True if the model returns scores instead of vectors."""
        return self.kind == "yes_no"

    def params_of_pair(self, params: PoolingParams) -> tuple[PoolingParams, PoolingParams]:
        """Return the parameters for a query and a document whose vectors will be compared.

        Vectors are normalized. Unless `params` has a prompt, the model's prompts named `query` and
        `document` are used, if they exist.
        """
        prompt_names = [name if name in self.prompts else None for name in ("query", "document")]
        if params.prompt is not None or params.prompt_name is not None:
            prompt_names = [params.prompt_name, params.prompt_name]
        query, document = (
            dataclasses.replace(params, prompt_name=name, normalize=True) for name in prompt_names
        )
        return query, document

    def width(self, hidden_size: int) -> int:
        """Return the length of a pooling result: a vector, or the logits of two tokens."""
        return len(self.token_ids) or hidden_size


def is_pooling_checkpoint(directory: Path) -> bool:
    """Return True if a checkpoint is for pooling, and not for generating text."""
    return (directory / MODULES).exists()


def read_pooling(directory: Path, kind: str = "auto") -> PoolingConfig | None:
    """Read the pooling configuration of a checkpoint. `kind` is the option `pooling`: "auto",
    "none", or a method that overrides the checkpoint's own.

    Return None for "none", and for "auto" if the checkpoint has no configuration. If `kind` is a
    method and there is no configuration, vectors are normalized and there are no prompts. The token
    ids for "yes_no" are not set. Raises `ModelError` for malformed files, and `UnsupportedModel`
    for unknown modules or methods.
    """
    if kind == "none":
        return None
    if kind == "yes_no":
        return PoolingConfig("yes_no", normalize=False)
    method: PoolingMethod | None = next(
        (known for known in _METHOD_BY_MODE.values() if known == kind), None
    )
    if not is_pooling_checkpoint(directory):
        return None if method is None else PoolingConfig(method)
    modules = _read_modules(directory / MODULES)
    for name, _ in modules:
        if name not in _SUPPORTED_MODULES:
            raise UnsupportedModel(
                f"{directory / MODULES}: the module {name!r} is not supported; the supported "
                f"modules are {', '.join(_SUPPORTED_MODULES)}"
            )
    pooling_folders = [path for name, path in modules if name == "Pooling"]
    if not pooling_folders and method is None:
        raise UnsupportedModel(
            f"{directory / MODULES} has no Pooling module, so the option pooling must be set"
        )
    effective_method = method or _read_method(directory / pooling_folders[0] / "config.json")
    prompts, default = _read_prompts(directory / PROMPTS)
    normalizes = any(name == "Normalize" for name, _ in modules)
    return PoolingConfig(effective_method, normalizes, prompts, default)


def _read_modules(path: Path) -> list[tuple[str, str]]:
    """Return the class name and the folder of each module listed in `modules.json`."""
    check_file(path)
    try:
        entries = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    modules: list[tuple[str, str]] = []
    for entry in entries if isinstance(entries, list) else [entries]:
        if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
            raise ModelError(
                f"{path} must be a list of modules that each have a type, got {entry!r:.80}"
            )
        folder = entry.get("path") or ""
        if not isinstance(folder, str) or Path(folder).is_absolute() or ".." in Path(folder).parts:
            raise ModelError(
                f"{path}: the folder {folder!r:.80} of a module must be inside the model's "
                "directory"
            )
        modules.append((entry["type"].rpartition(".")[2], folder))
    return modules


def _read_method(path: Path) -> PoolingMethod:
    raw = read_json(path)
    mode = raw.get("pooling_mode")
    modes = (
        mode if isinstance(mode, list) else [mode] if mode is not None else _modes_from_flags(raw)
    )
    if len(modes) != 1 or modes[0] not in _METHOD_BY_MODE:
        raise UnsupportedModel(
            f"{path}: the pooling mode {', '.join(map(str, modes)) or 'none'} is not "
            f"supported; it must be exactly one of {', '.join(_METHOD_BY_MODE)}"
        )
    if raw.get("include_prompt") is False:
        raise UnsupportedModel(f"{path}: include_prompt must be true; false is not supported")
    return _METHOD_BY_MODE[modes[0]]


def _modes_from_flags(raw: Mapping[str, Any]) -> list[str]:
    """Return the pooling modes of a configuration in the older format, which has a flag per
    mode."""
    prefix = "pooling_mode_"
    return [
        name.removeprefix(prefix).removesuffix("_tokens").removesuffix("_token")
        for name, on in raw.items()
        if name.startswith(prefix) and on
    ]


def _read_prompts(path: Path) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the default prompt or None."""
    if not path.exists():
        return {}, None
    raw = read_json(path)
    prompts, default = raw.get("prompts") or {}, raw.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(one, str) for one in prompts.values()):
        raise ModelError(f"{path}: prompts must map names to strings, got {prompts!r:.80}")
    if default is not None and default not in prompts:
        raise ModelError(
            f"{path}: default_prompt_name {default!r:.80} is not one of the names in prompts"
        )
    return prompts, default
