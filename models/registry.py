"""Which class serves which architecture."""

from __future__ import annotations

from nanoactor.models.config import ModelConfig
from nanoactor.models.device import Device
from nanoactor.models.errors import UnsupportedModel
from nanoactor.models.qwen3 import Qwen3ForCausalLM
from nanoactor.models.weights import Weights

Model = Qwen3ForCausalLM
ARCHITECTURES: dict[str, type[Model]] = {"Qwen3ForCausalLM": Qwen3ForCausalLM}


def build_model(config: ModelConfig, weights: Weights, device: Device, max_positions: int) -> Model:
    """The model of `config.architecture`; `UnsupportedModel` lists the known ones otherwise."""
    known = ARCHITECTURES.get(config.architecture)
    if known is None:
        raise UnsupportedModel(
            f"architecture {config.architecture!r} is not supported; known are "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    return known(config, weights, device, max_positions)
