"""What every actor is given, and what follows from it; imports no torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nanoactor.config import EngineConfig, ModelFiles
from nanoactor.text.renderer import RenderLimits

CHUNK_BYTES = 1 << 18
"""The most text that one `Chunk` carries to the frontend."""


@dataclasses.dataclass(frozen=True, slots=True)
class ActorConfig:
    """One and the same for all actors of an engine; picklable."""

    engine: EngineConfig
    files: ModelFiles
    salt: bytes
    """The key of the prefix cache's hashes: 16 random bytes, one set per engine."""

    @property
    def text_directory(self) -> Path | None:
        """Where the tokenizer lies; None where only token ids are served."""
        return None if self.engine.skip_tokenizer_init else self.files.directory


def max_prompt_bytes(files: ModelFiles) -> int:
    """Return the size of the longest text that is accepted for tokenizing.

    Prose has 3 to 5 bytes to a token, code with deep indentation perhaps 10; what has more
    than 32 throughout (runs of nothing but spaces) is refused unread.
    """
    return max(1 << 16, 32 * files.max_model_len)


def render_limits(config: EngineConfig, files: ModelFiles) -> RenderLimits:
    """Return what the model's chat template may take."""
    return RenderLimits(config.template_timeout, max_prompt_bytes(files))
