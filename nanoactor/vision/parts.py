"""Extraction of the images and videos of a request, from `multi_modal_data` or from chat
messages."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nanoactor.errors import InvalidRequest
from nanoactor.model_files.files import ModelFiles
from nanoactor.options.config import EngineConfig
from nanoactor.vision.media import Media
from nanoactor.vision.rules import MediaRules
from nanoactor.vision.video import Video, split_videos

_IMAGE_PARTS = ("image", "image_url", "image_pil")
_KINDS = ("image", "video")


class MediaExtractor:
    """Extracts images and videos from prompts. Every method may raise `InvalidRequest`."""

    def __init__(self, config: EngineConfig, files: ModelFiles, max_items: int) -> None:
        """Read the limits from the configuration. `max_items` is the maximum number of images and
        videos in a request, regardless of their size."""
        self._rules = None
        if files.images is not None:
            self._rules = MediaRules(files.images, config.max_image_pixels, files.videos)
        self._has_tokenizer = files.tokenizer_directory is not None
        self._limits = config.limit_mm_per_prompt or {}
        self._max_items = max_items

    def of_data(self, data: Any, kwargs: Any) -> tuple[Media, ...]:
        """Return the images, then the videos, in `multi_modal_data`.

        `kwargs` is the request's `mm_processor_kwargs` or None, and determines the size after
        resizing. The order of images relative to videos follows from the placeholders in the
        prompt.
        """
        if data is None:
            if kwargs is not None:
                raise InvalidRequest("mm_processor_kwargs requires multi_modal_data")
            return ()
        if not isinstance(data, Mapping):
            raise InvalidRequest(
                "multi_modal_data must be a dict such as {'image': [...]}, got "
                f"{type(data).__name__}"
            )
        if unknown := sorted(str(key) for key in data if key not in _KINDS):
            raise InvalidRequest(
                f"multi_modal_data: {unknown[0]!r:.50} is not a known key; use 'image' or 'video'"
            )
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise InvalidRequest(f"mm_processor_kwargs must be a dict, got {kwargs!r:.50}")
        extraction = _Extraction(self, kwargs or {})
        images, videos = data.get("image"), data.get("video")
        if images is not None:
            is_list = isinstance(images, list | tuple)
            for one in images if is_list else [images]:
                extraction.image(one)
        for one in split_videos(videos) if videos is not None else ():
            extraction.video(one)
        return tuple(extraction.media)

    def of_messages(self, messages: list[Any]) -> tuple[list[Any], tuple[Media, ...]]:
        """Return the conversation with each image or video part replaced by a marker such as
        `{"type": "image"}`, and the images and videos in order of appearance."""
        extraction = _Extraction(self, {})
        bare = [_without_media(message, extraction) for message in messages]
        return bare, tuple(extraction.media)

    def rules(self, kind: str, count: int) -> MediaRules:
        """Return the rules that apply to the next item of `kind`, "image" or "video". Raises
        `InvalidRequest` if no further item is allowed.

        `count` is the number of items of this kind in the request so far, including the next one.
        """
        if self._rules is None:
            raise InvalidRequest(f"the model does not support {kind}s; give only text")
        limit = self._limits.get(kind)
        if limit is not None and count > limit:
            raise InvalidRequest(
                f"the request has at least {count} {kind}s, but at most {limit} are allowed "
                "(limit_mm_per_prompt)"
            )
        if kind == "video" and not self._has_tokenizer:
            raise InvalidRequest(
                "videos require a tokenizer, because the times of their frames are part of the "
                "prompt, but the engine has none (skip_tokenizer_init)"
            )
        return self._rules

    def check_total(self, count: int) -> None:
        """Raise `InvalidRequest` if the encoder cache cannot hold `count` images and videos at
        once."""
        if count > self._max_items:
            raise InvalidRequest(
                f"the request has more than {self._max_items} images and videos, which is "
                "the most that the encoder cache can hold; send fewer, or raise "
                "encoder_cache_tokens"
            )


class _Extraction:
    """The images and videos extracted from one request so far."""

    def __init__(self, extractor: MediaExtractor, kwargs: Mapping[str, Any]) -> None:
        self.media: list[Media] = []
        self._extractor, self._kwargs = extractor, kwargs
        self._counts = dict.fromkeys(_KINDS, 0)

    def image(self, given: Any, detail: Any = "auto") -> None:
        """Add an image. A `Media`, which an HTTP front end on Ray has already read, is added
        unchanged."""
        rules, number = self._next("image")
        if isinstance(given, Media):
            self.media.append(given)
            return
        try:
            self.media.append(rules.read_image(given, rules.area(self._kwargs, detail)))
        except InvalidRequest as error:
            raise InvalidRequest(f"image {number}: {error}") from None

    def image_url(self, url: Mapping[str, Any], detail: Any) -> None:
        """Add an image from an `image_url` object as defined by OpenAI. Only `data:` URLs are
        allowed."""
        given = url.get("url")
        if not isinstance(given, str) or not given.startswith("data:"):
            raise InvalidRequest(
                f"image {self._counts['image'] + 1}: image_url must be a data: URL; give a "
                "file as {'type': 'image', 'image': path}"
            )
        self.image(given, url.get("detail") or detail)

    def video(self, given: Any) -> None:
        """Add a video. A `Media`, which an HTTP front end on Ray has already read, is added
        unchanged."""
        rules, number = self._next("video")
        if isinstance(given, Media):
            self.media.append(given)
            return
        try:
            self.media.append(rules.read_video(given, rules.video_area(self._kwargs)))
        except InvalidRequest as error:
            raise InvalidRequest(f"video {number}: {error}") from None

    def _next(self, kind: str) -> tuple[MediaRules, int]:
        self._counts[kind] += 1
        rules = self._extractor.rules(kind, self._counts[kind])
        self._extractor.check_total(sum(self._counts.values()))
        return rules, self._counts[kind]


def needs_opening(prompt: Any) -> bool:
    """Return True if extracting the prompt's images and videos would read files or decode
    images with Pillow."""
    if isinstance(prompt, Mapping):
        data = prompt.get("multi_modal_data")
        return isinstance(data, Mapping) and any(map(_needs_opening, data.values()))
    if not isinstance(prompt, list | tuple):
        return False
    contents = (message.get("content") for message in prompt if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list | tuple) for part in content)
    return any(
        _needs_opening(part.get(kind))
        for part in parts
        if isinstance(part, Mapping) and (kind := part.get("type")) in (*_IMAGE_PARTS, "video")
    )


def _needs_opening(given: Any) -> bool:
    if isinstance(given, list | tuple):
        return any(map(_needs_opening, given))
    if isinstance(given, Video):
        return _needs_opening(given.frames)
    if isinstance(given, str):
        return not given.startswith("data:")
    pillow = sys.modules.get("PIL.Image")
    return isinstance(given, Path) or (pillow is not None and isinstance(given, pillow.Image))


def snapshot(value: Any) -> Any:
    """Return a copy of a prompt that is unaffected by later changes to the original.

    Files, and images opened with Pillow, are not copied. Raises `InvalidRequest` if the prompt is
    nested too deeply.
    """
    try:
        return _snapshot(value)
    except RecursionError:
        raise InvalidRequest("the prompt is nested too deeply") from None


def _snapshot(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _snapshot(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        inner = map(_snapshot, value)
        return tuple(inner) if isinstance(value, tuple) else list(inner)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Video):
        return dataclasses.replace(
            value, frames=_snapshot(value.frames), times=_snapshot(value.times)
        )
    return bytes(value) if isinstance(value, bytearray | memoryview) else value


def _without_media(message: Any, extraction: _Extraction) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, Sequence) or isinstance(content, str):
        return message
    return {**message, "content": [_without_media_part(part, extraction) for part in content]}


def _without_media_part(part: Any, extraction: _Extraction) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "video_url":
        raise InvalidRequest(
            "video files cannot be decoded; give frames, as in {'type': 'video', 'video': "
            "[frame, ...], 'fps': 2}"
        )
    if kind == "video":
        extraction.video(_video_of(part))
        return {"type": "video"}
    if kind not in _IMAGE_PARTS:
        return part
    given, detail = part.get(kind), part.get("detail") or "auto"
    if isinstance(given, Mapping):
        extraction.image_url(given, detail)
    else:
        extraction.image(given, detail)
    return {"type": "image"}


def _video_of(part: Mapping[str, Any]) -> Any:
    """Return the video in a content part, combined with the part's `times` or `fps` if it has
    any."""
    given, times, fps = part.get("video"), part.get("times"), part.get("fps")
    return given if times is None and fps is None else Video(given, times=times, fps=fps)
