"""The protocol between a runner actor and the executor of its steps. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol

from nanoactor.messages.engine import Int32, Step
from nanoactor.messages.pooling import StepVectors
from nanoactor.messages.scores import StepScores
from nanoactor.runner.batch.pixels import PixelsByNumber


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step, and its times on the device, in ns of the host's monotonic clock."""

    counts: Int32
    """Number of tokens that each row yields, 0 or 1; empty if each row yields one."""
    token_ids: Int32
    begin: int
    forwarded: int
    """Time at which the layers had finished."""
    sampled: int
    """Time at which all tokens had been sampled."""
    end: int
    """Time at which the token ids had arrived on the host."""
    encoded: int = 0
    """Time at which the encoding of images had finished, before the layers; 0 if nothing was
    encoded."""
    scores: StepScores | None = None
    vectors: StepVectors | None = None


class PreparedStep(Protocol):
    """A step that `Executor.prepare` has laid out."""

    @property
    def rows(self) -> int:
        """Number of tokens that pass through the layers."""


class LaunchedStep(Protocol):
    """A step that `Executor.launch` has queued or computed."""

    def wait(self) -> StepResult:
        """Wait until the step is done, and return its results. Called once per step, in step order,
        from a single thread."""


class Executor(Protocol):
    """A device with a model loaded on it, which computes the steps of one rank. It is created on
    the thread that will call `launch`."""

    num_blocks: int
    allows_any_thread: bool
    """True if `launch` may also be called on other threads, though only one at a time."""
    max_depth: int
    """Maximum number of steps in flight."""
    warmed_up: tuple[tuple[int, float], ...]
    """(number of tokens, duration in seconds) of each warm-up step."""

    encoder_pages: int
    """Number of pages in the encoder cache; 0 if the model has no vision tower."""

    @property
    def block_size(self) -> int:
        """Number of tokens in a KV cache block."""

    @property
    def dtype_name(self) -> str:
        """Name of the dtype in which the model computes."""

    @property
    def device_name(self) -> str:
        """Human-readable name of the device."""

    @property
    def asynchronous(self) -> bool:
        """True if `launch` returns before the step is done. Another thread then calls `wait`."""

    @property
    def too_large(self) -> int:
        """Number of steps with prompts so far that were launched operator by operator because no
        captured step is large enough."""

    @property
    def uncaptured(self) -> int:
        """Number of steps so far that were launched operator by operator because their size could
        not be captured."""

    def prepare(self, step: Step, pixels: PixelsByNumber, masks: Int32) -> PreparedStep:
        """Lay out a step. Called on the event loop of the runner's process, in step order, while
        the device may be busy.

        `pixels` maps the number of each image or video that the step encodes to its pixels.
        `masks`, int32 (rows, words), are bit masks of the token ids that the step's constrained
        rows may sample.
        """

    def drop_pixels(self, numbers: list[int]) -> None:
        """Drop the partial encodings of the images and videos with these numbers, since no later
        step continues them."""

    def reset(self) -> None:
        """Drop all sequences. Called on the device thread while no step is in flight."""

    def launch(self, prepared: Any) -> LaunchedStep:
        """Queue or compute a step that `prepare` has returned. Called in step order."""

    def rehearse(self) -> Iterator[object]:
        """Lay out a dummy step in a separate batch, to warm up the CPU caches. Yields after each
        part, so that the caller can handle messages in between."""
