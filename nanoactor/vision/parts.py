"""The pictures of a request, wherever in it they stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nanoactor.config import EngineConfig
from nanoactor.errors import InvalidRequest
from nanoactor.models.image_config import ImageConfig
from nanoactor.vision.media import Media, MediaRules

_IMAGE_PARTS = ("image", "image_url", "image_pil")


class MediaTaker:
    """Takes pictures out of prompts; every method raises `InvalidRequest`."""

    def __init__(self, config: EngineConfig, images: ImageConfig | None, most: int) -> None:
        """`images` is None for a model that sees nothing; no request may have more than `most`
        pictures, however small."""
        self._rules = MediaRules(images, config.max_image_pixels) if images else None
        limits = config.limit_mm_per_prompt or {}
        self._limit = limits.get("image")
        self._most = most

    def of_data(self, data: Any, kwargs: Any) -> tuple[Media, ...]:
        """Return the pictures of `multi_modal_data`, resized by `mm_processor_kwargs`."""
        if data is None:
            if kwargs is not None:
                raise InvalidRequest("mm_processor_kwargs go with multi_modal_data")
            return ()
        if not isinstance(data, Mapping):
            raise InvalidRequest(
                "multi_modal_data must be a dict such as {'image': [...]}, got "
                f"{type(data).__name__}"
            )
        if wrong := sorted(str(key) for key in data if key != "image"):
            raise InvalidRequest(f"multi_modal_data: {wrong[0]!r:.50} is not known; give 'image'")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise InvalidRequest(f"mm_processor_kwargs must be a dict, got {kwargs!r:.50}")
        given = data.get("image")
        if given is None:
            return ()
        pictures = list(given) if isinstance(given, list | tuple) else [given]
        self._check_count(len(pictures))
        return tuple(self._take(index, one, kwargs or {}) for index, one in enumerate(pictures))

    def of_messages(self, messages: list[Any]) -> tuple[list[Any], tuple[Media, ...]]:
        """Return a conversation in which a picture's part says only that there is one, and the
        pictures in their order."""
        media: list[Media] = []
        bare = [self._bare(message, media) for message in messages]
        return bare, tuple(media)

    def _bare(self, message: Any, media: list[Media]) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, Sequence) or isinstance(content, str):
            return message
        return {**message, "content": [self._bare_part(part, media) for part in content]}

    def _bare_part(self, part: Any, media: list[Media]) -> Any:
        if not isinstance(part, Mapping):
            return part
        kind = part.get("type")
        if kind in ("video", "video_url"):
            raise InvalidRequest("videos are not served yet: give their frames as pictures")
        if kind not in _IMAGE_PARTS:
            return part
        self._check_count(len(media) + 1)
        given: Any = part.get(kind)
        detail = part.get("detail") or "auto"
        if isinstance(given, Mapping):
            given, detail = given.get("url"), given.get("detail") or detail
            if not isinstance(given, str) or not given.startswith("data:"):
                raise InvalidRequest(
                    f"picture {len(media) + 1}: image_url takes data: URLs; give a file as "
                    "{'type': 'image', 'image': path}"
                )
        media.append(self._take(len(media), given, {}, detail))
        return {"type": "image"}

    def _check_count(self, count: int) -> None:
        if self._rules is None and count:
            raise InvalidRequest("the model sees no pictures: give text alone")
        if self._limit is not None and count > self._limit:
            raise InvalidRequest(
                f"the request has {count} pictures or more, at most {self._limit} are allowed "
                "(limit_mm_per_prompt)"
            )
        if count > self._most:
            raise InvalidRequest(
                f"the request has more than {self._most} pictures: the encoder cache holds no more "
                "at once (encoder_cache_tokens)"
            )

    def _take(
        self, index: int, given: Any, kwargs: Mapping[str, Any], detail: Any = "auto"
    ) -> Media:
        assert self._rules is not None
        try:
            return self._rules.take(given, self._rules.area(kwargs, detail))
        except InvalidRequest as error:
            raise InvalidRequest(f"picture {index + 1}: {error}") from None
