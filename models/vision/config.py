"""The configuration of a vision tower, read from `config.json`. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from nanoactor.models.errors import ModelError, UnsupportedModel
from nanoactor.models.fields import read_positive_int, read_positive_number

_KEY = "vision_config"


@dataclasses.dataclass(frozen=True, slots=True)
class VisionConfig:
    """Sizes of Qwen3-VL's vision tower, and the ids of the special tokens for images and
    videos."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    channels: int
    patch_size: int
    """Side of a patch in pixels."""
    temporal_patch_size: int
    """Number of frames in a patch. An image is repeated this many times."""
    merge_size: int
    """Side, in patches, of the square that is merged into one token."""
    out_hidden_size: int
    table_side: int
    """Side of the square table of learned position embeddings, which is resampled to each image's
    grid of patches."""
    deepstack_layers: tuple[int, ...]
    """Indices of the tower's blocks with a deepstack level: the block's output goes through a
    merger of its own, and is added to the hidden states after one of the decoder's first layers.

    Empty for a tower without deepstack, whose configuration lacks the key.
    """
    rope_theta: float
    image_token_id: int
    video_token_id: int
    start_token_id: int
    end_token_id: int

    @property
    def patch_values(self) -> int:
        """Number of values in a patch: channels x frames x side x side."""
        return self.channels * self.temporal_patch_size * self.patch_size**2

    @property
    def feature_size(self) -> int:
        """Number of values per token: the embedding, and one vector of the same size per deepstack
        level."""
        return self.out_hidden_size * (1 + len(self.deepstack_layers))


def parse_vision(raw: Mapping[str, Any], origin: object) -> VisionConfig:
    """Return the tower's configuration, given the parsed JSON of the whole `config.json`.

    Defaults are those of transformers. Raises `ModelError` for an invalid configuration, and
    `UnsupportedModel` for one that is not implemented.
    """
    section = raw.get(_KEY)
    if not isinstance(section, dict):
        raise ModelError(f"{origin}: {_KEY} must be an object, got {section!r:.50}")
    section_origin = f"{origin}: {_KEY}"
    if section.get("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise UnsupportedModel(
            f"{section_origin}: hidden_act is {section['hidden_act']!r}, but only "
            "gelu_pytorch_tanh is supported"
        )
    depth = read_positive_int(section, "depth", section_origin, 27)
    positions = read_positive_int(section, "num_position_embeddings", section_origin, 2304)
    config = VisionConfig(
        depth=depth,
        hidden_size=read_positive_int(section, "hidden_size", section_origin, 1152),
        intermediate_size=read_positive_int(section, "intermediate_size", section_origin, 4304),
        num_heads=read_positive_int(section, "num_heads", section_origin, 16),
        channels=read_positive_int(section, "in_channels", section_origin, 3),
        patch_size=read_positive_int(section, "patch_size", section_origin, 16),
        temporal_patch_size=read_positive_int(section, "temporal_patch_size", section_origin, 2),
        merge_size=read_positive_int(section, "spatial_merge_size", section_origin, 2),
        out_hidden_size=read_positive_int(section, "out_hidden_size", section_origin, 3584),
        table_side=math.isqrt(positions),
        deepstack_layers=_read_layers(
            section.get("deepstack_visual_indexes"), depth, section_origin
        ),
        rope_theta=_read_theta(section, section_origin),
        image_token_id=read_positive_int(raw, "image_token_id", origin, 151655),
        video_token_id=read_positive_int(raw, "video_token_id", origin, 151656),
        start_token_id=read_positive_int(raw, "vision_start_token_id", origin, 151652),
        end_token_id=read_positive_int(raw, "vision_end_token_id", origin, 151653),
    )
    _check(config, positions, section_origin)
    return config


def _check(config: VisionConfig, positions: int, section_origin: str) -> None:
    if config.table_side**2 != positions:
        raise ModelError(
            f"{section_origin}: num_position_embeddings must be a square number, got {positions}"
        )
    if config.hidden_size % (4 * config.num_heads):
        raise ModelError(
            f"{section_origin}: hidden_size {config.hidden_size} must be a multiple of 4 * "
            f"num_heads ({config.num_heads}), because each head is rotated by rows and by columns"
        )


def _read_layers(value: Any, depth: int, section_origin: str) -> tuple[int, ...]:
    layers = [] if value is None else value
    is_int_list = isinstance(layers, list) and all(type(layer) is int for layer in layers)
    if not is_int_list or len({*layers}) < len(layers) or not all(0 <= n < depth for n in layers):
        raise ModelError(
            f"{section_origin}: deepstack_visual_indexes must be a list of distinct integers from "
            f"0 to {depth - 1}, got {value!r}"
        )
    return tuple(layers)


def _read_theta(section: Mapping[str, Any], section_origin: str) -> float:
    rope = section.get("rope_parameters") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", "axial") != "axial":
        raise UnsupportedModel(
            f"{section_origin}: rope_parameters {rope!r} are not supported; the only supported "
            "rope_type is 'axial'"
        )
    return read_positive_number(rope, "rope_theta", section_origin, 10_000.0)
