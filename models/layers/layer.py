"""The two parts of a layer as `DecoderLayer` calls them, and how they are made."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch

from nanoactor.models.layers.kinds import FeedForwardSpec, MixerSpec
from nanoactor.models.layers.state import LayerState, StateSpec
from nanoactor.models.layers.step import LayerContext, LayerStep


class Mixer(Protocol):
    """Lets the tokens of a sequence see each other."""

    state: StateSpec
    """State that it keeps for sequences."""

    def __call__(self, x: torch.Tensor, state: LayerState, step: LayerStep) -> torch.Tensor:
        """Map (tokens, hidden) to the same, or to (final rows, hidden) if the step has some."""


class FeedForward(Protocol):
    """Handles each token separately."""

    def __call__(self, x: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """Map (tokens, hidden) to the same. In the last layer, tokens may be the final rows."""


def make_mixer(spec: MixerSpec, context: LayerContext, prefix: str) -> Mixer:
    """Return the mixer that a spec describes, with the weights whose names begin with `prefix`."""
    mixer: Mixer = _class_of(spec.implementation)(spec, context, prefix)
    return mixer


def make_feed_forward(spec: FeedForwardSpec, context: LayerContext, prefix: str) -> FeedForward:
    """Return the feed-forward part of a description, with the weights named with `prefix`."""
    part: FeedForward = _class_of(spec.implementation)(spec, context, prefix)
    return part


def _class_of(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
