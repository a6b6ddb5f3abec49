"""The protocol between a runner actor and the executor of its steps; imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol

from nanoactor.messages.engine import Int32, Step
from nanoactor.messages.pooling import StepVectors
from nanoactor.messages.scores import StepScores
from nanoactor.runner.batch.pixels import PixelsOf


@dataclasses.dataclass(frozen=True, slots=True)
class Computed:
    """A step's result, and its times on the device, in ns of the host's monotonic clock."""

    counts: Int32
    """As in `StepDone`."""
    token_ids: Int32
    begin: int
    forwarded: int
    """Time at which the layers finished."""
    sampled: int
    """Time at which the tokens were sampled."""
    end: int
    """Time at which the tokens arrived on the host."""
    encoded: int = 0
    """Time at which encoding images finished, before all that; 0 if nothing was encoded."""
    scores: StepScores | None = None
    vectors: StepVectors | None = None


class Prepared(Protocol):
    """A step that has been laid out."""

    @property
    def rows(self) -> int:
        """Tokens that go through the layers."""


class Launched(Protocol):
    """A step that was handed to the device."""

    def wait(self) -> Computed:
        """Block until it is done. Called once, in the order of steps, from one thread."""


class Executor(Protocol):
    """A device with a model on it; made on the thread that will call `launch`."""

    num_blocks: int
    any_thread: bool
    """True if `launch` may be called from other threads too, one call at a time."""
    max_depth: int
    """Steps that may be in flight at once."""
    warmed_up: tuple[tuple[int, float], ...]
    """(tokens, seconds) of the warm-up steps."""

    encoder_pages: int
    """Pages of the encoder cache; 0 if the model has no vision."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""

    @property
    def dtype_name(self) -> str:
        """The type that the model computes in."""

    @property
    def device_name(self) -> str:
        """The device, for people."""

    @property
    def asynchronous(self) -> bool:
        """Return True if `launch` returns before the step is done; another thread then calls
        `wait`."""

    @property
    def too_large(self) -> int:
        """Steps with prompts launched operator by operator as no captured one holds as much."""

    @property
    def uncaptured(self) -> int:
        """Steps launched operator by operator because they could not be captured."""

    def prepare(self, step: Step, pixels: PixelsOf, masks: Int32) -> Prepared:
        """Lay out a step, in the order of steps, on the node's loop while the device is busy.

        `pixels` are those of the items that it encodes, by their numbers; `masks`, (rows, words),
        are the ids that its choices may take.
        """

    def drop_pixels(self, numbers: list[int]) -> None:
        """Drop partial encodings of these: no later step continues them."""

    def renew(self) -> None:
        """Forget all sequences; called on the device's thread with no step in flight."""

    def launch(self, prepared: Any) -> Launched:
        """Queue, or compute, what `prepare` returned, in the same order."""

    def rehearse(self) -> Iterator[object]:
        """Lay out a dummy step on a double, in parts; see `Actor.rehearse`."""
