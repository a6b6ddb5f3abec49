"""The files in a model's directory: their location, and the configuration and defaults read from
them."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from nanoactor.errors import InvalidConfig
from nanoactor.model_files.generation_config import FILE, GenerationConfig, read_generation_config
from nanoactor.models.config import check_file, read_config
from nanoactor.models.errors import ModelError, UnsupportedModel
from nanoactor.models.families.registry import family_of, keeps_slot_state
from nanoactor.models.limits import MAX_FREEZE_IDS
from nanoactor.models.model_config import ModelConfig
from nanoactor.models.parallel import check_parallel
from nanoactor.models.vision.image_config import ImageConfig, read_image_config
from nanoactor.models.vision.video_config import VideoConfig, read_video_config
from nanoactor.options.config import EngineConfig
from nanoactor.options.pooling import (
    SCORE_TOKENS,
    PoolingConfig,
    is_pooling_checkpoint,
    read_pooling,
)
from nanoactor.text.end_token import end_token
from nanoactor.text.huggingface import find_tokenizer

log = logging.getLogger("nanoactor.engine")

DEMO = "demo"
DEMOS = {DEMO: "demo", "demo-vl": "demo_vl"}
"""Directories, in `nanoactor/models`, of the models that are part of the package, by name."""


MODEL_FILE_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
"""Name patterns of the files that are downloaded and read."""
Fingerprint = tuple[int, int, int]
"""Fingerprint of a file: size in bytes, modification time in ns, and inode."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's directory, and the settings read from its JSON files."""

    directory: Path
    config: ModelConfig
    generation: GenerationConfig
    """Sampling defaults recommended by the model's authors."""
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    tokenizer_directory: Path | None
    """Directory of `tokenizer.json` and the chat template; None if only token ids are served."""
    hf_tokenizer_directory: Path
    """Directory from which transformers reads the tokenizer."""
    images: ImageConfig | None = None
    """Parameters for resizing images; None for a text-only model."""
    videos: VideoConfig | None = None
    """Parameters for sampling and resizing video frames; None for a text-only model."""
    is_length_auto: bool = False
    """True if the option `max_model_len` is "auto", which limits the length to the capacity of the
    KV cache."""
    chat_template: str | None = None
    """Source of the chat template that replaces the model's own; None if the option is not set."""
    pooling: PoolingConfig | None = None
    """Pooling configuration; None for a model that only generates text."""
    generates: bool = True
    """True if the model generates text."""
    has_slot_state: bool = False
    """True if some layers keep per-sequence state (such as recurrent state) outside the KV blocks.
    Such a model cannot reuse cached prefixes."""
    fingerprints: Mapping[Path, Fingerprint] = dataclasses.field(default_factory=dict)
    """Fingerprints of all files that the engine's processes read, taken when the engine was
    created."""

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Token ids of the image and video placeholders; empty for a text-only model."""
        vision = self.config.vision
        return () if vision is None else (vision.image_token_id, vision.video_token_id)

    def fit_to_cache(self, tokens: int) -> ModelFiles:
        """Return the same files for a KV cache of `tokens` tokens. If the option `max_model_len` is
        "auto", the length is lowered to `tokens`."""
        if not self.is_length_auto or tokens >= self.max_model_len:
            return self
        return dataclasses.replace(self, max_model_len=tokens)


def read_model_files(config: EngineConfig) -> ModelFiles:
    """Find the model, read its configuration, and convert its tokenizer if necessary.

    Raises `ModelError` if files are missing or malformed, and `InvalidConfig` if the engine's
    options do not fit the model.
    """
    directory = resolve_model(config.model, config.revision, config.download_dir)
    model = read_config(directory)
    family_of(model.architecture)
    check_parallel(model, config.tensor_parallel_size)
    length = _max_model_len(config, model)
    generation = _generation(config, directory)
    eos = generation.eos_token_ids or model.eos_token_ids
    _check_eos(eos, model.vocab_size, directory)
    if keeps_slot_state(model) and len(eos) >= MAX_FREEZE_IDS:
        raise UnsupportedModel(
            f"{directory} has {len(eos)} end-of-sequence ids, but a model with states per "
            f"sequence (instead of a KV cache) may have at most {MAX_FREEZE_IDS - 1}"
        )
    skips, limit = config.skip_tokenizer_init, config.start_timeout
    images = None if model.vision is None else read_image_config(directory, model.vision)
    tokenizer_source = _resolve_tokenizer(config, directory)
    tokenizer = None if skips else find_tokenizer(tokenizer_source, limit)
    pooling = _pooling(config, directory, tokenizer)
    generates = model.has_head and not (pooling and is_pooling_checkpoint(directory))
    if not generates and pooling is None:
        raise ModelError(
            f"{directory}: {model.architecture} has no language-modeling head, so it cannot "
            "generate text; set the option pooling, or use a checkpoint for causal language "
            "modeling"
        )
    return ModelFiles(
        directory=directory,
        config=model,
        generation=generation,
        eos_token_ids=_with_tokenizer_eos(eos, tokenizer, model.vocab_size),
        max_model_len=length,
        tokenizer_directory=tokenizer,
        hf_tokenizer_directory=tokenizer_source,
        images=images,
        videos=_videos(directory, model, images),
        fingerprints=_fingerprints({directory, tokenizer or directory}),
        is_length_auto=config.max_model_len == "auto",
        chat_template=_chat_template(config.chat_template),
        pooling=pooling,
        generates=generates,
        has_slot_state=keeps_slot_state(model),
    )


def _pooling(config: EngineConfig, directory: Path, tokenizer: Path | None) -> PoolingConfig | None:
    """Return the model's pooling configuration; None if the model does not pool. For a reranker,
    the configuration includes the ids of the two tokens from which scores are computed."""
    found = read_pooling(directory, config.pooling)
    if found is None or not found.returns_scores:
        return found
    return dataclasses.replace(found, token_ids=_judgement_ids(directory, tokenizer))


def _judgement_ids(directory: Path, tokenizer: Path | None) -> tuple[int, ...]:
    """Return the token ids of a reranker's two judgments, "no" and "yes"."""
    if tokenizer is None:
        raise InvalidConfig(
            'pooling "yes_no" requires the tokenizer, but skip_tokenizer_init is set'
        )
    from nanoactor.text.tokenizer import load_tokenizer  # not imported by control processes

    loaded = load_tokenizer(tokenizer)
    ids = [token for word in SCORE_TOKENS if (token := loaded.token_to_id(word)) is not None]
    if len(ids) < len(SCORE_TOKENS):
        raise InvalidConfig(
            f'pooling "yes_no" requires a reranker, but the vocabulary of {directory} does not '
            f"contain the tokens {' and '.join(SCORE_TOKENS)}"
        )
    return tuple(ids)


def _generation(config: EngineConfig, directory: Path) -> GenerationConfig:
    """Return the generation defaults from the source that the option `generation_config` selects,
    with the option `override_generation_config` applied."""
    source = Path(config.generation_config)
    overrides = dict(config.override_generation_config or {})
    if config.generation_config in ("auto", "vllm"):
        generation = read_generation_config(directory)
    elif not (source / FILE).is_file():
        raise InvalidConfig(
            f'generation_config must be "auto", "vllm" or a directory with {FILE}, got {source}'
        )
    else:
        generation = read_generation_config(source)
    if config.generation_config == "vllm":
        generation = generation.without_recommendations()
    if overrides:
        generation = generation.overridden(overrides)
    return generation


def _chat_template(given: str | None) -> str | None:
    """Return the source of a chat template, or None if `given` is None. `given` is a file name or
    the source itself."""
    if given is None:
        return None
    if any(mark in given for mark in "{}\n"):
        return given
    try:
        return Path(given).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise InvalidConfig(
            f"chat_template {given!r:.200} is neither a template nor a file that can be read: "
            f"{error}"
        ) from None


def _resolve_tokenizer(config: EngineConfig, directory: Path) -> Path:
    """Return the directory that contains the tokenizer's files, which are downloaded if
    necessary."""
    if config.tokenizer is None or config.tokenizer == config.model:
        return directory
    return resolve_model(config.tokenizer, download_dir=config.download_dir, weights=False)


def _fingerprints(directories: Iterable[Path]) -> dict[Path, Fingerprint]:
    found: dict[Path, Fingerprint] = {}
    for directory in directories:
        for pattern in MODEL_FILE_PATTERNS:
            for path in directory.glob(pattern):
                check_file(path)
                found[path] = fingerprint_file(path)
    return found


def fingerprint_file(path: Path) -> Fingerprint:
    """Return a file's fingerprint: size, modification time and inode. Raises `OSError` if its
    metadata cannot be read."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _videos(directory: Path, model: ModelConfig, images: ImageConfig | None) -> VideoConfig | None:
    if model.vision is None or images is None:
        return None
    return read_video_config(directory, model.vision, images)


def _check_eos(ids: tuple[int, ...], vocabulary: int, directory: Path) -> None:
    invalid = [token for token in ids if not 0 <= token < vocabulary]
    if invalid:
        raise ModelError(
            f"{directory}: eos_token_id {invalid[0]} is outside the vocabulary of {vocabulary} ids"
        )


def _with_tokenizer_eos(
    eos: tuple[int, ...], tokenizer: Path | None, vocabulary: int
) -> tuple[int, ...]:
    """Return `eos` with the tokenizer's end-of-sequence id appended if it is missing, as in vLLM.
    Some tools for fine-tuning chat models write this id only to the tokenizer's files."""
    found = None if tokenizer is None else end_token(tokenizer)
    if found is None or found.id in eos or found.id >= vocabulary:
        return eos
    log.warning(
        "answers also end at %s (id %d), which is the end-of-sequence token in "
        "tokenizer_config.json but not in generation_config.json or config.json",
        found.text,
        found.id,
    )
    return (*eos, found.id)


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    requested = config.max_model_len
    length = model.default_max_length if requested is None or requested == "auto" else requested
    if length > model.max_context_length:
        raise InvalidConfig(
            f"max_model_len {length} exceeds {model.max_context_length}, which is the limit set by "
            f"the model's {_limiting_setting(model)}"
        )
    if length < 2:
        raise InvalidConfig(
            "max_model_len must be at least 2: one token for the prompt and one for the output"
        )
    return length


def _limiting_setting(model: ModelConfig) -> str:
    """Return the name of the setting that limits the sequence length, for an error message."""
    if model.max_context_length == model.window:
        return "sliding_window"
    if model.max_context_length != model.max_positions:
        return "rope scaling"
    return "max_position_embeddings"


def max_prompt_bytes(files: ModelFiles) -> int:
    """Return the maximum length, in bytes of UTF-8, of a text that is accepted for tokenizing.

    It is 32 bytes per token of `max_model_len`, and at least 64 KiB. Prose has 3 to 5 bytes per
    token, deeply indented code perhaps 10. Longer texts are rejected without being tokenized.
    """
    return max(1 << 16, 32 * files.max_model_len)


def resolve_model(
    name: str, revision: str | None = None, download_dir: str | None = None, weights: bool = True
) -> Path:
    """Return the directory of a model.

    `name` is a directory, the name of a demo model, or a name on the Hugging Face hub, from which
    the model is downloaded unless it is in the cache. If `weights` is False, weight files are
    neither downloaded nor required. Raises `ModelError` if there is no model; the message describes
    what was found instead.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        found = path.resolve()
        if weights:
            _check_contents(found)
        return found
    if name in DEMOS:
        return Path(__file__).parent.parent / "models" / DEMOS[name]
    if path.is_file():
        raise ModelError(
            f"{name} is a file{_FORMAT_BY_SUFFIX.get(path.suffix, '')}; give the directory of a "
            "model, with config.json and .safetensors files"
        )
    looks_local = path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1
    if looks_local or os.sep == "\\":
        raise ModelError(
            f"{name} is neither an existing directory nor a name on the Hugging Face hub, such "
            "as owner/model"
        )
    return _download(name, revision, download_dir, weights)


_FORMAT_BY_SUFFIX = {
    ".gguf": " in GGUF, llama.cpp's format, which is not supported",
    ".bin": " with weights in PyTorch's format, which is not supported",
    ".pt": " with weights in PyTorch's format, which is not supported",
    ".pth": " with weights in PyTorch's format, which is not supported",
}


def _check_contents(directory: Path) -> None:
    """Raise `ModelError` if the directory has no `config.json` and its contents explain why."""
    if (directory / "config.json").exists():
        return
    if (directory / "adapter_config.json").exists():
        raise ModelError(
            f"{directory} contains an adapter (LoRA), not a model; merge it into its base model, "
            "and pass the directory of the merged model"
        )
    if next(directory.glob("*.gguf"), None) is not None:
        raise ModelError(
            f"{directory} contains a model in GGUF, llama.cpp's format, which is not "
            "supported; use the original checkpoint in .safetensors files"
        )
    if next(directory.iterdir(), None) is None:
        raise ModelError(
            f"{directory} is empty; the directory of a model must contain config.json and "
            ".safetensors files"
        )
    if next(directory.glob("*.safetensors"), None) is not None:
        raise ModelError(
            f"{directory} contains weights but no config.json; add the config.json of the model"
        )


def _download(name: str, revision: str | None, download_dir: str | None, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    download = functools.partial(snapshot_download, name, revision=revision, cache_dir=download_dir)
    try:
        found = Path(download(local_files_only=True))
        if not weights or any(found.glob("*.safetensors")):
            return found
    except (LocalEntryNotFoundError, ValueError):
        pass  # not in the cache: ask the hub
    patterns = [pattern for pattern in MODEL_FILE_PATTERNS if weights or pattern != "*.safetensors"]
    try:
        found = Path(download(allow_patterns=patterns))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(
            f"{name} is not a directory, is not in the Hugging Face cache, and cannot be "
            f"downloaded: {error}"
        ) from error
    if weights and not any(found.glob("*.safetensors")):
        raise ModelError(
            f"{name} has no .safetensors files, or only part of it is in the cache; download "
            "it again, or convert its weights to .safetensors files"
        )
    return found
