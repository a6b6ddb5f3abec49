"""The protocols of the two parts of a layer, and functions that create the parts from
descriptions."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch

from nanoactor.models.devices.protocols import Consumer
from nanoactor.models.layers.kinds import FeedForwardSpec, MixerSpec
from nanoactor.models.layers.state import LayerState, StateSpec
from nanoactor.models.layers.step import LayerContext, LayerStep


class Mixer(Protocol):
    """The part of a layer that passes information between the tokens of a sequence, such as
    attention."""

    state: StateSpec
    """Specification of the state that the mixer keeps between steps."""

    @property
    def input_operator(self) -> Consumer:
        """The operator that is called with the hidden states as they are. The norm before it may
        prepare its input. None if there is no such operator, or more than one."""

    def __call__(self, x: torch.Tensor, state: LayerState, step: LayerStep) -> torch.Tensor:
        """Map hidden states (tokens, hidden) to the same shape, or to (final rows, hidden) if
        `step.final_rows` is set."""


class FeedForward(Protocol):
    """The part of a layer that processes each token separately."""

    @property
    def input_operator(self) -> Consumer:
        """The operator that is called with the hidden states as they are. The norm before it may
        prepare its input. None if there is no such operator, or more than one."""

    def __call__(self, x: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """Map hidden states (tokens, hidden) to the same shape. In the last layer, `x` may contain
        only the rows in `step.final_rows`."""


def make_mixer(spec: MixerSpec, context: LayerContext, prefix: str) -> Mixer:
    """Create the mixer that `spec` describes. Its weights have names that start with `prefix`.

    Raises `TypeError` if `spec.keeps_slot_state` contradicts the state of the mixer: the scheduler
    relies on the description, and the runner on the state.
    """
    mixer: Mixer = _class_of(spec.implementation)(spec, context, prefix)
    bytes_per_slot = mixer.state.bytes_per_slot
    if spec.keeps_slot_state != (bytes_per_slot > 0):
        raise TypeError(
            f"{type(spec).__name__}.keeps_slot_state is {spec.keeps_slot_state}, but "
            f"{type(mixer).__name__} keeps {bytes_per_slot} bytes for each sequence"
        )
    return mixer


def make_feed_forward(spec: FeedForwardSpec, context: LayerContext, prefix: str) -> FeedForward:
    """Create the feed-forward part that `spec` describes. Its weights have names that start with
    `prefix`."""
    part: FeedForward = _class_of(spec.implementation)(spec, context, prefix)
    return part


def _class_of(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
