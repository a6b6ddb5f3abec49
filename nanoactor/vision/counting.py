"""Computation of the token ids of a prompt with images. No image is decoded, and no engine is
needed."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nanoactor.media.prompt import VisualItem, expand_prompt
from nanoactor.model_files.files import ModelFiles
from nanoactor.options.config import EngineConfig
from nanoactor.setup.actors import encoder_pages
from nanoactor.vision.media import Media, MediaReader
from nanoactor.vision.parts import MediaExtractor


class ImageExpander:
    """Expands placeholders in token ids: each image gets as many placeholder tokens as the model
    uses for it."""

    def __init__(self, config: EngineConfig, files: ModelFiles) -> None:
        """Read the limits on images from the engine's configuration and the model's files."""
        self._vision = files.config.vision
        self._extractor = MediaExtractor(config, files, encoder_pages(config, files))
        self._reader: MediaReader | None = None
        if files.images is not None:
            # The keys that the salt protects are not used here.
            salt = secrets.token_bytes(16)
            self._reader = MediaReader(files.images, salt, config.max_image_pixels)

    async def expand(
        self, token_ids: Sequence[int], messages: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """Return the token ids of a conversation with the placeholders of its images expanded.

        `token_ids` has one placeholder for each image in `messages`. Image headers are read on
        a thread. Raises `InvalidRequest` if the engine would reject an image.
        """
        _, media = self._extractor.of_messages(list(messages))
        return await asyncio.to_thread(self._expand, token_ids, media) if media else [*token_ids]

    def _expand(self, token_ids: Sequence[int], media: Sequence[Media]) -> list[int]:
        assert self._reader is not None
        assert self._vision is not None
        grids = [self._reader.read(one).grid for one in media]
        items = [VisualItem(b"", height, width) for _, height, width in grids]
        ids = np.asarray(token_ids, np.int32)
        found: list[int] = expand_prompt(
            ids, items, self._vision, lambda text: ()
        ).token_ids.tolist()
        return found
