"""What every actor is given, what follows from it, and what runners report; imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from nanoactor.config import EngineConfig
from nanoactor.model_files import ModelFiles, max_prompt_bytes
from nanoactor.runtime.actor import ReadyInfo

if TYPE_CHECKING:
    from nanoactor.text.renderer import RenderLimits

DELTA_BYTES = 1 << 18
"""The most text that one `OutputDelta` carries to the frontend."""


@dataclasses.dataclass(frozen=True, slots=True)
class ActorConfig:
    """One and the same for all actors of an engine; picklable."""

    engine: EngineConfig
    files: ModelFiles
    salt: bytes
    """The key of the prefix cache's hashes: 16 random bytes, one set per engine."""


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


def render_limits(config: EngineConfig, files: ModelFiles) -> RenderLimits:
    """Return what the model's chat template may take."""
    from nanoactor.text.renderer import RenderLimits  # few processes render

    return RenderLimits(config.template_timeout, max_prompt_bytes(files))
