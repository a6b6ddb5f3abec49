"""Hashes of a prompt's KV blocks. The engines use the same hashes, so the router can find replicas
that have cached a prefix of the prompt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import numpy as np

from nanoactor.errors import NanoactorError
from nanoactor.kv.hashing import block_hashes
from nanoactor.media.prompt import VisualItem, block_extras, expand_prompt, items_message
from nanoactor.messages.engine import Int32
from nanoactor.model_files.files import ModelFiles
from nanoactor.options.config import EngineConfig
from nanoactor.vision.media import Media, MediaReader

log = logging.getLogger("nanoactor.fleet")

_MAX_HASHED_TOKENS = 16384
"""Maximum number of prompt tokens that are hashed, to limit the time for which hashing occupies the
event loop to about 2 ms. Prompts that differ only after these tokens look identical to the
router."""
_DEFAULT_BLOCK_SIZE = 16


class PromptHasher:
    """Hasher of prompts' KV blocks, with the fleet's `prefix_salt` and the engines' block size."""

    def __init__(self, config: EngineConfig, files: ModelFiles) -> None:
        assert config.prefix_salt is not None
        self._salt = config.prefix_salt
        self.block_size = config.block_size or _DEFAULT_BLOCK_SIZE
        """Number of tokens in a block; updated when a replica reports its block size."""
        self._vision = files.config.vision
        self._reader: MediaReader | None = None
        if files.images is not None:
            max_pixels = config.max_image_pixels
            self._reader = MediaReader(files.images, self._salt, max_pixels, files.videos)

    def hash_tokens(self, token_ids: Int32 | Sequence[int]) -> bytes:
        """Return the hashes of the full blocks in a prompt's first `_MAX_HASHED_TOKENS` tokens: 16
        bytes each, concatenated."""
        ids = np.asarray(token_ids, np.int32)[:_MAX_HASHED_TOKENS]
        return block_hashes(ids, self.block_size, self._salt).tobytes()

    async def hash_with_images(self, token_ids: Int32, media: Sequence[Media]) -> tuple[int, bytes]:
        """Return the number of tokens in a prompt after its image placeholders are expanded, and
        the hashes of its blocks as in `hash_tokens`.

        For a prompt with videos, or with an error that a replica will report, return the unexpanded
        length and no hashes. Image headers are read on a thread.
        """
        try:
            return await asyncio.to_thread(self._hash_with_images, token_ids, media)
        except NanoactorError:
            return len(token_ids), b""

    def _hash_with_images(self, token_ids: Int32, media: Sequence[Media]) -> tuple[int, bytes]:
        if self._reader is None or self._vision is None or any(one.frames for one in media):
            return len(token_ids), b""
        visuals = [self._reader.read(one) for one in media]
        items = [VisualItem(one.key, one.grid[1], one.grid[2]) for one in visuals]
        prompt = expand_prompt(token_ids, items, self._vision, lambda text: ())
        extras = block_extras(items_message(prompt, items, self._vision, 0), self.block_size)
        ids = prompt.token_ids[:_MAX_HASHED_TOKENS]
        hashes = block_hashes(ids, self.block_size, self._salt, extras=extras)
        return len(prompt.token_ids), hashes.tobytes()
