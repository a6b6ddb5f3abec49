"""The supported families of models, and their lookup by architecture name. Imports no torch."""

from __future__ import annotations

from nanoactor.models.errors import UnsupportedModel
from nanoactor.models.families.family import Family
from nanoactor.models.families.granite import GRANITE
from nanoactor.models.families.llama import LLAMA
from nanoactor.models.families.mistral import MISTRAL
from nanoactor.models.families.qwen2 import QWEN2
from nanoactor.models.families.qwen2_moe import QWEN2_MOE
from nanoactor.models.families.qwen3 import QWEN3
from nanoactor.models.families.qwen3_moe import QWEN3_MOE, QWEN3_VL_MOE
from nanoactor.models.families.qwen3_vl import QWEN3_VL
from nanoactor.models.layers.kinds import LayerSpec
from nanoactor.models.model_config import ModelConfig

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        QWEN3,
        QWEN2,
        LLAMA,
        MISTRAL,
        GRANITE,
        QWEN3_VL,
        QWEN3_MOE,
        QWEN3_VL_MOE,
        QWEN2_MOE,
    )
}

_HEAD_SUFFIX = "ForCausalLM"
HEADLESS_FAMILIES: dict[str, Family] = {
    f"{name.removesuffix(_HEAD_SUFFIX)}Model": family
    for name, family in FAMILIES.items()
    if name.endswith(_HEAD_SUFFIX)
}
"""Families by the architecture name that `AutoModel` writes when it saves the decoder without a
head."""


def family_of(architecture: str) -> Family:
    """Return the family of an architecture, as named in `config.json`.

    Raises `UnsupportedModel`, which lists the supported architectures, for any other name.
    """
    if architecture in HEADLESS_FAMILIES:
        return HEADLESS_FAMILIES[architecture]
    if architecture not in FAMILIES:
        raise UnsupportedModel(
            f"architecture {architecture!r} is not supported; supported architectures: "
            f"{', '.join(FAMILIES)}"
        )
    return FAMILIES[architecture]


def layers_of(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Return the descriptions of a model's layers, in order."""
    return family_of(config.architecture).layers(config)


def keeps_slot_state(config: ModelConfig) -> bool:
    """Return True if any layer of a model keeps per-sequence state outside the KV blocks."""
    return any(layer.mixer.keeps_slot_state for layer in layers_of(config))
