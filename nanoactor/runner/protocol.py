"""The protocol between a runner actor and the executor of its steps; imports no torch."""

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
    """A step's results, and its times on the device in ns of the host's monotonic clock."""

    counts: Int32
    """Number of tokens of each row; see `StepDone.counts`."""
    token_ids: Int32
    begin: int
    forwarded: int
    """Time at which the layers finished."""
    sampled: int
    """Time at which the tokens were sampled."""
    end: int
    """Time at which the tokens arrived on the host."""
    encoded: int = 0
    """Time at which image encoding finished, before the layers started; 0 if nothing was
    encoded."""
    scores: StepScores | None = None
    vectors: StepVectors | None = None


class PreparedStep(Protocol):
    """A step that has been laid out."""

    @property
    def rows(self) -> int:
        """Return the number of tokens that go through the layers."""


class LaunchedStep(Protocol):
    """A step that was launched on the device."""

    def wait(self) -> StepResult:
        """Block until the step is done, and return its results. Called once, in step order, from
        one thread."""


class Executor(Protocol):
    """A device with a model loaded on it. It is created on the thread that will call `launch`."""

    num_blocks: int
    allows_any_thread: bool
    """True if other threads may call `launch` too, one at a time."""
    max_depth: int
    """Maximum number of steps in flight."""
    warmed_up: tuple[tuple[int, float], ...]
    """Number of tokens and duration in seconds of each warm-up step."""

    encoder_pages: int
    """Number of pages in the encoder cache; 0 if the model has no vision tower."""

    @property
    def block_size(self) -> int:
        """Return the number of tokens in a block."""

    @property
    def dtype_name(self) -> str:
        """Return the name of the dtype that the model computes in."""

    @property
    def device_name(self) -> str:
        """Return a human-readable name of the device."""

    @property
    def asynchronous(self) -> bool:
        """Return True if `launch` returns before the step is done; another thread then calls
        `wait`."""

    @property
    def too_large(self) -> int:
        """Return the number of steps with prompts that were launched operator by operator because
        no captured step is large enough."""

    @property
    def uncaptured(self) -> int:
        """Return the number of steps launched operator by operator because they could not be
        captured."""

    def prepare(self, step: Step, pixels: PixelsByNumber, masks: Int32) -> PreparedStep:
        """Lay out a step on the node's event loop while the device is busy; called in step order.

        `pixels` are the pixels of the items that the step encodes, by number. `masks`, (rows,
        words), are bit masks of the token ids that the step's choices may select.
        """

    def drop_pixels(self, numbers: list[int]) -> None:
        """Drop the partial encodings of these pixels, which no later step continues."""

    def reset(self) -> None:
        """Drop all sequences. Called on the device's thread while no step is in flight."""

    def launch(self, prepared: Any) -> LaunchedStep:
        """Queue or compute a step that `prepare` has returned; called in the same order."""

    def rehearse(self) -> Iterator[object]:
        """Lay out a dummy step in a separate batch, in parts (see `Actor.rehearse`)."""
