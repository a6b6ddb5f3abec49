"""Configuration of the actors, values derived from it, and the reports of runners. Does not import
torch."""

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

MAX_DELTA_BYTES = 1 << 18
"""Approximate maximum size of one `OutputDelta` message to the frontend, in bytes."""
_DEFAULT_ENCODER_TOKENS = 16384
# Maximum length of a text before an image that does not get a step of its own, such as text of the
# chat template, in tokens.
_SHORT_TEXT_TOKENS = 64
MAX_MASKS_PER_MESSAGE = 32
"""Maximum number of grammar masks in one message to the runners."""
ENCODER_PAGE_ROWS = 16
"""Number of rows in a page of the encoder cache. A row belongs to one image token."""


@dataclasses.dataclass(frozen=True, slots=True)
class ActorConfig:
    """Configuration that all actors of an engine share. Picklable."""

    engine: EngineConfig
    files: ModelFiles
    salt: bytes
    """Key of the prefix cache's hashes: the option `prefix_salt`, or 16 random bytes per engine."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerReady:
    """Report that a runner sends to all other actors once it has loaded the model."""

    num_blocks: int
    """Number of blocks in the KV cache."""
    block_size: int
    """Number of tokens in a KV block."""
    dtype: str
    device: str
    """Human-readable name of the device."""
    encoder_pages: int = 0
    """Number of pages in the encoder cache; 0 for a text-only model."""
    max_depth: int = 0
    """Maximum number of steps in flight while steps are short; 0 if the usual maximum applies."""
    cache: int = 0
    """Identifier of the KV cache's memory. A new runner, whose cache is empty, reports a different
    one."""

    @property
    def capacity_tokens(self) -> int:
        """Number of tokens that fit into the KV cache."""
        return self.num_blocks * self.block_size

    @classmethod
    def find(cls, ready: Mapping[str, ReadyInfo]) -> RunnerReady:
        """Return the report of rank 0. All ranks have the same cache size."""
        report = ready["runner.0"]
        assert isinstance(report, cls)
        return report


def encoder_limits(config: ActorConfig, cache: RunnerReady) -> EncoderLimits:
    """Return the limits for encoding images: the capacity of the encoder cache, and the work per
    step."""
    vision, engine = config.files.config.vision, config.engine
    if vision is None:
        return EncoderLimits()
    return EncoderLimits(
        pages=cache.encoder_pages,
        page_rows=ENCODER_PAGE_ROWS,
        budget=engine.max_num_batched_tokens,
        depth=vision.depth,
        ranks=engine.tensor_parallel_size,
        short_prefix=min(_SHORT_TEXT_TOKENS, engine.max_num_batched_tokens // 32),
    )


def has_grammars(files: ModelFiles) -> bool:
    """Return True if outputs can be constrained by a grammar. This requires a tokenizer."""
    return files.tokenizer_directory is not None


def encoder_pages(config: EngineConfig, files: ModelFiles) -> int:
    """Return the number of pages in the encoder cache; 0 for a text-only model."""
    if files.images is None:
        return 0
    tokens = config.encoder_cache_tokens or min(files.max_model_len, _DEFAULT_ENCODER_TOKENS)
    return -(-tokens // ENCODER_PAGE_ROWS)


def render_options(config: EngineConfig, files: ModelFiles) -> RenderOptions:
    """Return the chat template to use, and the limits for rendering a conversation."""
    from nanoactor.text.renderer import RenderOptions  # few processes render

    return RenderOptions(config.template_timeout, max_prompt_bytes(files), files.chat_template)
