"""What every actor is given, what follows from it, and what runners report; imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nanoactor.config import EngineConfig, ModelFiles
from nanoactor.runtime.actor import ReadyInfo

if TYPE_CHECKING:
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


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerReady:
    """What a runner tells all others once the model is loaded."""

    num_blocks: int
    """KV blocks in the cache."""
    block_size: int
    """Tokens in a block."""
    dtype: str
    device: str
    """For people: what computes."""

    @classmethod
    def find(cls, ready: Mapping[str, ReadyInfo]) -> RunnerReady:
        """Return what rank 0 told; the ranks agree on the cache's size."""
        found = ready["runner.0"]
        assert isinstance(found, cls)
        return found


def max_prompt_bytes(files: ModelFiles) -> int:
    """Return the size of the longest text that is accepted for tokenizing.

    Prose has 3 to 5 bytes to a token, code with deep indentation perhaps 10; what has more
    than 32 throughout (runs of nothing but spaces) is refused unread.
    """
    return max(1 << 16, 32 * files.max_model_len)


def render_limits(config: EngineConfig, files: ModelFiles) -> RenderLimits:
    """Return what the model's chat template may take."""
    from nanoactor.text.renderer import RenderLimits  # few processes render

    return RenderLimits(config.template_timeout, max_prompt_bytes(files))
