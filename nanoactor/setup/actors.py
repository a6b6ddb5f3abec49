"""The configuration of all actors, what follows from it, and runners' reports; without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from nanoactor.media.units import EncoderLimits
from nanoactor.model_files.files import ModelFiles, max_prompt_bytes
from nanoactor.options.config import EngineConfig
from nanoactor.runtime.actor import ReadyInfo

if TYPE_CHECKING:
    from nanoactor.text.renderer import RenderOptions

DELTA_BYTES = 1 << 18
"""The most text that one `OutputDelta` carries to the frontend."""
_DEFAULT_ENCODER_TOKENS = 16384
# A template's words before a picture, say.
_SHORT = 64
MASKS_AT_ONCE = 32
"""The most masks that one message carries to the runners."""
ENCODER_PAGE_ROWS = 16
"""Rows of a page of the encoder cache: tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class ActorConfig:
    """One and the same for all actors of an engine; picklable."""

    engine: EngineConfig
    files: ModelFiles
    salt: bytes
    """The key of the prefix cache's hashes: 16 random bytes, one set per engine."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerReady:
    """The record a runner sends to all others once the model is loaded."""

    num_blocks: int
    """KV blocks in the cache."""
    block_size: int
    """Tokens in a block."""
    dtype: str
    device: str
    """For people: what computes."""
    encoder_pages: int = 0
    """Pages of the encoder cache; 0 for a model that sees nothing."""
    max_depth: int = 0
    """Steps that may be in flight at once while they are short; 0: as many as ever."""
    cache: int = 0
    """Identifies the cache's memory: a new runner reports another number."""

    @property
    def tokens(self) -> int:
        """Tokens that the cache holds."""
        return self.num_blocks * self.block_size

    @classmethod
    def find(cls, ready: Mapping[str, ReadyInfo]) -> RunnerReady:
        """Return the report of rank 0; the ranks agree on the cache size."""
        found = ready["runner.0"]
        assert isinstance(found, cls)
        return found


def encoder_limits(config: ActorConfig, cache: RunnerReady) -> EncoderLimits:
    """Return the limits for encoding images: how much fits at once, and how much a step encodes."""
    vision, engine = config.files.config.vision, config.engine
    if vision is None:
        return EncoderLimits()
    return EncoderLimits(
        pages=cache.encoder_pages,
        page_rows=ENCODER_PAGE_ROWS,
        budget=engine.max_num_batched_tokens,
        depth=vision.depth,
        ranks=engine.tensor_parallel_size,
        short=min(_SHORT, engine.max_num_batched_tokens // 32),
    )


def has_grammars(files: ModelFiles) -> bool:
    """Return True if outputs can be constrained by a grammar, which requires a tokenizer."""
    return files.tokenizer_directory is not None


def encoder_pages(config: EngineConfig, files: ModelFiles) -> int:
    """Return the number of pages of the encoder cache; 0 for a text-only model."""
    if files.images is None:
        return 0
    tokens = config.encoder_cache_tokens or min(files.max_model_len, _DEFAULT_ENCODER_TOKENS)
    return -(-tokens // ENCODER_PAGE_ROWS)


def render_options(config: EngineConfig, files: ModelFiles) -> RenderOptions:
    """Return the chat template, and what it may take."""
    from nanoactor.text.renderer import RenderOptions  # few processes render

    return RenderOptions(config.template_timeout, max_prompt_bytes(files), files.chat_template)
