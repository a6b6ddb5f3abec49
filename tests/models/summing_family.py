"""A family for tests whose mixer keeps a running sum of each sequence; imports no torch."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from nanoactor.models.families.family import Family, dense_layers
from nanoactor.models.families.registry import FAMILIES
from nanoactor.models.layers.kinds import LayerSpec, MixerSpec
from nanoactor.models.model_config import ModelConfig


@dataclasses.dataclass(frozen=True, slots=True)
class RunningSumSpec(MixerSpec):
    implementation: ClassVar[str] = "tests.models.summing:RunningSum"
    keeps_slot_state: ClassVar[bool] = True


def _alternating(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Sums in every second layer from the first on, attention in the others."""
    layers = dense_layers(config)
    return tuple(
        layer if number % 2 else dataclasses.replace(layer, mixer=RunningSumSpec())
        for number, layer in enumerate(layers)
    )


SUMMING = Family(architecture="SummingForCausalLM", layers=_alternating)


def register() -> None:
    """Let engines of this process know the family."""
    FAMILIES[SUMMING.architecture] = SUMMING
