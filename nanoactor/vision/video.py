"""Videos in requests: their frames, and the time of each frame."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nanoactor.errors import InvalidRequest
from nanoactor.requests.params import plain_number

DEFAULT_FPS = 24.0
"""Frame rate that is assumed if neither a rate nor times are specified, as in transformers."""
_MAX_TIME = 1e7
"""Exclusive upper limit of a frame's time, in seconds."""
_METADATA_KEYS = {
    "fps",
    "frames_indices",
    "total_num_frames",
    "duration",
    "video_backend",
    "do_sample_frames",
    "width",
    "height",
}
"""Keys accepted in the metadata of vLLM and transformers. Only "fps" and "frames_indices" are
used."""


@dataclasses.dataclass(frozen=True, slots=True)
class Video:
    """A video as a sequence of frames. The model sees exactly these frames; none are skipped or
    added."""

    frames: Any
    """Sequence of images of the same size, or a uint8 array of shape (frames, height, width,
    channels)."""
    times: Sequence[float] | None = None
    """Time of each frame in seconds; None if the times follow from `fps`."""
    fps: float | None = None
    """Frames per second. 24 is assumed if neither this nor `times` is set."""

    @classmethod
    def of(cls, given: Any) -> Video:
        """Return the `Video` for any form in which a user may pass one. Raises `InvalidRequest` if
        the form is not supported."""
        if isinstance(given, Video):
            video = given
        elif isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
            video = _with_metadata(*given)
        else:
            video = cls(given)
        frames = video.frames
        if isinstance(frames, list | tuple) or (isinstance(frames, np.ndarray) and frames.ndim > 2):
            return video
        raise InvalidRequest(
            "a video must be a list of images, or a uint8 array of the shape (frames, "
            f"height, width, channels), got {type(frames).__name__}; video files cannot be "
            "decoded"
        )


def split_videos(given: Any) -> list[Any]:
    """Return the videos in `multi_modal_data["video"]` as a list. The value is one video or a list
    of videos."""
    if not isinstance(given, list):
        return [given]
    is_list_of_videos = all(
        isinstance(one, Video | list | tuple) or (isinstance(one, np.ndarray) and one.ndim == 4)
        for one in given
    )
    return given if is_list_of_videos else [given]


def _with_metadata(frames: Any, metadata: Mapping[str, Any]) -> Video:
    if unknown := sorted(str(key) for key in metadata if key not in _METADATA_KEYS):
        raise InvalidRequest(
            f"a video's metadata has the unknown key {unknown[0]!r:.50}; the known keys are "
            f"{', '.join(sorted(_METADATA_KEYS))}"
        )
    fps, indices = metadata.get("fps"), metadata.get("frames_indices")
    if indices is None:
        return Video(frames, fps=fps)
    rate = _frame_rate(fps)
    try:
        return Video(frames, times=[index / rate for index in indices])
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequest("a video's frames_indices must be a list of frame numbers") from None


def _frame_rate(fps: Any) -> float:
    if fps is None:
        return DEFAULT_FPS
    fps = plain_number(fps)
    is_number = isinstance(fps, int | float) and not isinstance(fps, bool)
    if not is_number or not 1e-6 <= fps <= 1e6:
        raise InvalidRequest(
            "a video's fps must be a number greater than 0 and at most 1,000,000, or None if it "
            "is unknown"
        )
    return float(fps)


def frame_times(video: Video, frames: int) -> list[float]:
    """Return the time of each frame of a video in seconds; `frames` is the number of frames. Raises
    `InvalidRequest` if the video's times or its frame rate are invalid."""
    if video.times is None:
        rate = _frame_rate(video.fps)
        return [index / rate for index in range(frames)]
    if video.fps is not None:
        raise InvalidRequest("a video may have either times or fps, but not both")
    try:
        times = [float(time) for time in video.times]
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequest("a video's times must be numbers, in seconds, one per frame") from None
    if len(times) != frames:
        raise InvalidRequest(
            f"a video has {frames} frames, but {len(times)} times; each frame needs one time"
        )
    if not all(math.isfinite(time) and 0 <= time < _MAX_TIME for time in times):
        raise InvalidRequest(f"a video's times must be from 0 to {_MAX_TIME:.0f} seconds")
    if times != sorted(times):
        raise InvalidRequest("a video's times must be in ascending order")
    return times
