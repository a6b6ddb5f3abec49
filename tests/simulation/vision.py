"""The vision worker's own actor over images that are only told of."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from nanoactor.actors.vision import VisionActor
from nanoactor.models.vision.config import VisionConfig, parse_vision
from nanoactor.models.vision.image_config import ImageConfig
from nanoactor.setup.actors import ActorConfig
from nanoactor.vision.media import Media, ReadItem, Unusable
from nanoactor.vision.store import MediaStore
from tests.simulation.reference import key_of
from tests.simulation.scenario import END, IMAGE, START, VIDEO, Image, encode_text

if TYPE_CHECKING:
    from tests.simulation.world import World

DEPTH = 3
IMAGES = ImageConfig(1, 1 << 20, 1, rescale=1.0, mean=(0.0,) * 3, std=(1.0,) * 3)


def vision_config() -> VisionConfig:
    """A tower in which a pixel is a token."""
    tower = dict(
        depth=DEPTH,
        deepstack_visual_indexes=[0],
        patch_size=1,
        spatial_merge_size=1,
        temporal_patch_size=1,
    )
    ids = dict(
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    return parse_vision({"vision_config": tower, **ids}, "simulated")


def media_of(image: Image) -> Media:
    """What a user gives."""
    data = json.dumps(dataclasses.astuple(image))
    return Media("", (), (1, 1), data.encode(), times=image.times)


def image_of(pixels: Any) -> Image:
    """What pixels show."""
    frames, height, width, _ = pixels.shape
    return Image(int(pixels[0, 0, 0, 0]), height, width, frames=frames)


class Letters:
    """Stands where a `TextEncoder` does, for the times of videos."""

    def encode_text(self, text: str, special: bool) -> Any:
        """The ids of a text."""
        assert not special
        return np.array(encode_text(text), np.int32)


def _pixels_of(media: Media) -> Any:
    image = Image(*json.loads(media.data))
    if image.fault:
        return Unusable("broken")
    shape = max(1, image.frames), image.height, image.width, 3
    return np.full(shape, image.content, np.uint8)


class _Latency:
    """Stands where a `DecodingThread` does: one image after the other."""

    frames = 0

    def __init__(self, decode: Callable[[int, Media], None]) -> None:
        self._decode = decode

    def read(self, media: Media) -> ReadItem | Unusable:
        image = Image(*json.loads(media.data))
        if image.fault == "header":
            return Unusable("no image")
        return ReadItem(key_of(image), (max(1, image.frames), image.height, image.width))

    def decode(self, number: int, media: Media, done: Any) -> None:
        self._decode(number, media)


class SimulatedVision(VisionActor):
    """`VisionActor` with a latency in the place of its thread."""

    def __init__(self, config: ActorConfig, world: World, number: int) -> None:
        super().__init__(config)
        self._world = world
        self._free_at = 0.0
        self._slow = random.Random(f"{world.scenario.seed} decode {number}")

    def setup(self) -> None:
        """No Pillow, and no thread."""
        self._thread: Any = _Latency(self._decode)
        self._store = MediaStore(self._world.scenario.vision_store)

    def _decode(self, number: int, media: Media) -> None:
        scenario, loop = self._world.scenario, self._world.loop
        seconds = 0.0
        if scenario.decode_steps:
            mean = scenario.decode_steps * scenario.step_seconds
            seconds = self._slow.expovariate(1 / mean)
        self._free_at = max(self._free_at, loop.time()) + seconds
        loop.call_at(self._free_at, self._done, number, media)

    def _done(self, number: int, media: Media) -> None:
        if self.context.retired:
            return
        self._world.oracle.counts["images decoded"] += number in self._requests
        self._on_decoded(number, _pixels_of(media))
