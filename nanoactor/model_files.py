"""The files of a model's directory: its place, the model's sizes, and defaults for its users."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nanoactor.config import EngineConfig
from nanoactor.errors import InvalidConfig, InvalidRequest
from nanoactor.models.columns import DEFAULTS
from nanoactor.models.config import (
    ModelConfig,
    as_ids,
    check_file,
    read_config,
    read_json,
)
from nanoactor.models.errors import ModelError
from nanoactor.models.image_config import ImageConfig, read_image_config
from nanoactor.models.parallel import check_parallel
from nanoactor.models.registry import family_of
from nanoactor.models.video_config import VideoConfig, read_video_config
from nanoactor.params import SamplingParams
from nanoactor.text.huggingface import find_tokenizer

DEMO = "demo"
DEMOS = {DEMO: "demo", "demo-vl": "demo_vl"}
"""Models that come with the package, and their directories."""


READ = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
"""Patterns of the files that are read."""
FilePrint = tuple[int, int, int]
"""Size, time of the last change in ns, inode."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's directory and what its JSON files say."""

    directory: Path
    config: ModelConfig
    defaults: Mapping[str, float]
    """What a sampling parameter is unless a request gives it, for those in `columns.DEFAULTS`."""
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    ignored: tuple[str, ...]
    """Settings of `generation_config.json` that are not applied."""
    tokenizer_directory: Path | None
    """Where `tokenizer.json` and the chat template lie; None where only token ids are served."""
    images: ImageConfig | None = None
    """How pictures are resized; None for a model that sees nothing."""
    videos: VideoConfig | None = None
    """How the frames of videos are; None for a model that takes none."""
    prints: Mapping[Path, FilePrint] = dataclasses.field(default_factory=dict)
    """Of all files that processes read, when the engine was made."""

    @property
    def placeholders(self) -> tuple[int, ...]:
        """The token ids that stand for pictures and videos in a prompt."""
        vision = self.config.vision
        return () if vision is None else (vision.image_token_id, vision.video_token_id)


def read_model_files(config: EngineConfig) -> ModelFiles:
    """Find the model and read its configuration; convert its tokenizer, where that must be.

    Raises `ModelError` where files are missing or wrong, `InvalidConfig` where the engine's
    options do not fit the model.
    """
    directory = resolve_model(config.model)
    model = read_config(directory)
    family_of(model.architecture)
    check_parallel(model, config.tensor_parallel_size)
    raw: dict[str, Any] = {}
    if (directory / "generation_config.json").exists():
        raw = read_json(directory / "generation_config.json")
    length = config.max_model_len or model.max_positions
    if length > model.max_positions:
        raise InvalidConfig(
            f"max_model_len {length} exceeds the model's max_position_embeddings, "
            f"{model.max_positions}"
        )
    if length < 2:
        raise InvalidConfig("max_model_len must be at least 2: a token of prompt, one of output")
    eos = as_ids(raw.get("eos_token_id")) or model.eos_token_ids
    _check_eos(eos, model.vocab_size, directory)
    defaults = _defaults(raw)
    skips = config.skip_tokenizer_init
    images = None if model.vision is None else read_image_config(directory, model.vision)
    tokenizer = None if skips else find_tokenizer(directory, config.start_timeout)
    return ModelFiles(
        directory=directory,
        config=model,
        defaults=defaults,
        eos_token_ids=eos,
        max_model_len=length,
        ignored=_ignored(raw),
        tokenizer_directory=tokenizer,
        images=images,
        videos=_videos(directory, model, images),
        prints=_prints({directory, tokenizer or directory}),
    )


def _prints(directories: Iterable[Path]) -> dict[Path, FilePrint]:
    found: dict[Path, FilePrint] = {}
    for directory in directories:
        for pattern in READ:
            for path in directory.glob(pattern):
                check_file(path)
                found[path] = file_print(path)
    return found


def file_print(path: Path) -> FilePrint:
    """Return what tells by its look whether a file was changed. Raises `OSError`."""
    told = path.stat()
    return told.st_size, told.st_mtime_ns, told.st_ino


def _videos(directory: Path, model: ModelConfig, images: ImageConfig | None) -> VideoConfig | None:
    if model.vision is None or images is None:
        return None
    return read_video_config(directory, model.vision, images)


def _check_eos(ids: tuple[int, ...], vocabulary: int, directory: Path) -> None:
    wrong = [token for token in ids if not 0 <= token < vocabulary]
    if wrong:
        raise ModelError(
            f"{directory}: eos_token_id {wrong[0]} is outside the vocabulary of {vocabulary} ids"
        )


def _defaults(raw: dict[str, Any]) -> Mapping[str, float]:
    given = {name: raw[name] for name in DEFAULTS if raw.get(name) is not None}
    try:
        SamplingParams(**given)
    except InvalidRequest as error:
        raise ModelError(f"generation_config.json: {error}") from error
    if raw.get("do_sample") is False:
        penalty = given.get("repetition_penalty", DEFAULTS["repetition_penalty"])
        return {**DEFAULTS, "temperature": 0.0, "repetition_penalty": penalty}
    return {**DEFAULTS, **given}


def _ignored(raw: dict[str, Any]) -> tuple[str, ...]:
    neutral = {"no_repeat_ngram_size": 0, "typical_p": 1.0}
    return tuple(name for name, value in neutral.items() if raw.get(name, value) != value)


def max_prompt_bytes(files: ModelFiles) -> int:
    """Return the length of the longest text that is accepted for tokenizing.

    Prose has 3 to 5 bytes to a token, code with deep indentation perhaps 10; what has more
    than 32 throughout (runs of nothing but spaces) is refused unread.
    """
    return max(1 << 16, 32 * files.max_model_len)


def resolve_model(name: str) -> Path:
    """Return a model's directory: as given, a demo, or from the Hugging Face cache or hub."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if name in DEMOS:
        return Path(__file__).parent / "models" / DEMOS[name]
    looks_local = path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1
    if looks_local or os.sep == "\\":
        raise ModelError(f"{name} is neither a directory nor a name on the hub (owner/model)")
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        found = Path(snapshot_download(name, local_files_only=True))
        if any(found.glob("*.safetensors")):
            return found
    except (LocalEntryNotFoundError, ValueError):
        pass  # not in the cache: ask the hub
    try:
        found = Path(snapshot_download(name, allow_patterns=list(READ)))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(
            f"{name} is no directory, is not in the Hugging Face cache, and cannot be "
            f"downloaded: {error}"
        ) from error
    if not any(found.glob("*.safetensors")):
        raise ModelError(f"{name} has no .safetensors files, or the cache holds it only in part")
    return found
