"""Interfaces of the two parts of a layer, and functions that create them from descriptions."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch

from nanoactor.models.layers.kinds import FeedForwardSpec, MixerSpec
from nanoactor.models.layers.state import LayerState, StateSpec
from nanoactor.models.layers.step import LayerContext, LayerStep


class Mixer(Protocol):
    """The part of a layer that passes information between the tokens of a sequence."""

    state: StateSpec
    """Spec of the state that the mixer keeps for sequences."""

    def __call__(self, x: torch.Tensor, state: LayerState, step: LayerStep) -> torch.Tensor:
        """Map (tokens, hidden) to the same shape, or to (final rows, hidden) if they are set."""


class FeedForward(Protocol):
    """The part of a layer that processes each token separately."""

    def __call__(self, x: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """Map (tokens, hidden) to the same shape. The last layer may pass only the final rows."""


def make_mixer(spec: MixerSpec, context: LayerContext, prefix: str) -> Mixer:
    """Create the mixer that `spec` describes, from the weights whose names start with `prefix`."""
    mixer: Mixer = _class_of(spec.implementation)(spec, context, prefix)
    return mixer


def make_feed_forward(spec: FeedForwardSpec, context: LayerContext, prefix: str) -> FeedForward:
    """Create the feed-forward part of `spec` from the weights whose names start with `prefix`."""
    part: FeedForward = _class_of(spec.implementation)(spec, context, prefix)
    return part


def _class_of(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
