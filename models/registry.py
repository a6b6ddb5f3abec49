"""Which class serves which architecture."""

from __future__ import annotations

from nanoactor.models.collective import Group
from nanoactor.models.config import ARCHITECTURES, ModelConfig, check_architecture
from nanoactor.models.device import Device
from nanoactor.models.qwen3 import Qwen3ForCausalLM
from nanoactor.models.weights import Weights

Model = Qwen3ForCausalLM
_CLASSES: dict[str, type[Model]] = dict(zip(ARCHITECTURES, (Qwen3ForCausalLM,), strict=True))


def build_model(
    config: ModelConfig,
    weights: Weights,
    device: Device,
    max_positions: int,
    group: Group | None = None,
) -> Model:
    """The model of `config.architecture`, or one rank's part of it.

    `UnsupportedModel` lists the known architectures otherwise.
    """
    check_architecture(config.architecture)
    return _CLASSES[config.architecture](config, weights, device, max_positions, group)
