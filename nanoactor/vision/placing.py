"""Expansion of the images and videos in a prompt, within the limits of the model and of the
encoder cache."""

from __future__ import annotations

from collections.abc import Sequence

from nanoactor.errors import InvalidRequest
from nanoactor.media.prompt import Encode, Int32, VisualItem, expand_prompt, items_message
from nanoactor.media.units import EncoderLimits
from nanoactor.messages.vision import Items
from nanoactor.model_files.files import ModelFiles


class ItemPlacer:
    """Places images and videos in prompts. Used by `TokenizedAdmission`."""

    def __init__(self, files: ModelFiles, limits: EncoderLimits, encode: Encode) -> None:
        """`encode` returns the token ids of the text that states a time in a video."""
        self._vision, self._max_model_len = files.config.vision, files.max_model_len
        self._limits, self._encode = limits, encode

    def place(
        self, tokens: Int32, visual: Sequence[VisualItem], worker: int
    ) -> tuple[Int32, Items | None]:
        """Return the prompt with one placeholder token for each embedding of its images, and the
        `Items` message that describes the images, or None if there are none.

        `worker` is the index of the vision worker that has their bytes. Raises `InvalidRequest` if
        the placeholders do not match the images, or if these are too large.
        """
        if self._vision is None:
            return tokens, None
        self._check_room(visual, len(tokens))
        prompt = expand_prompt(tokens, visual, self._vision, self._encode)
        if not visual:
            return tokens, None
        return prompt.token_ids, items_message(prompt, visual, self._vision, worker)

    def _check_room(self, visual: Sequence[VisualItem], tokens: int) -> None:
        """Raise `InvalidRequest` if the images and videos have too many tokens for the context or
        the encoder cache. `tokens` is the length of the rest of the prompt."""
        rows, limit = sum(item.tokens for item in visual), self._max_model_len
        if rows + tokens > 2 * limit:  # otherwise a later error states the whole prompt's length
            raise InvalidRequest(
                f"the request's images and videos have {rows} tokens, but max_model_len is "
                f"{limit}; send fewer or smaller ones"
            )
        pages = sum(-(-item.tokens // self._limits.page_rows) for item in visual)
        if pages > self._limits.pages:
            room = self._limits.pages * self._limits.page_rows
            raise InvalidRequest(
                f"the request's images and videos have {rows} tokens and do not fit into the "
                f"encoder cache, which holds {room} tokens and rounds up the size of each "
                "item; send fewer or smaller ones, or raise encoder_cache_tokens"
            )
