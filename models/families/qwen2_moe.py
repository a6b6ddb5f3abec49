"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with routed experts and one expert that processes all tokens.

Source: Qwen2 Technical Report, arXiv:2407.10671; options as in transformers' `Qwen2MoeConfig`.
Models with sliding windows in some layers (`use_sliding_window`) are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nanoactor.models.errors import UnsupportedModel
from nanoactor.models.families.qwen2 import QWEN2
from nanoactor.models.families.qwen3_moe import (
    EXPERT_OPTION_KEYS,
    ExpertOptions,
    make_sparse_layers,
    read_expert_options,
)
from nanoactor.models.fields import read_bool, read_positive_int
from nanoactor.models.layers.kinds import SharedExpertSpec

# Defaults of transformers' configuration.
_EXPERTS, _EXPERTS_PER_TOKEN, _INNER, _SHARED_INNER = 60, 4, 1408, 5632


def _read_options(raw: Mapping[str, Any], origin: object) -> ExpertOptions:
    if not read_bool(raw, "qkv_bias", origin, True):
        raise UnsupportedModel(
            f"{origin}: qkv_bias must be true, because this architecture always has these biases"
        )
    defaults = {
        "num_experts": _EXPERTS,
        "num_experts_per_tok": _EXPERTS_PER_TOKEN,
        "moe_intermediate_size": _INNER,
    }
    present = {key: value for key, value in raw.items() if value is not None}
    options = read_expert_options(defaults | present, origin, renormalize=False)
    shared = read_positive_int(raw, "shared_expert_intermediate_size", origin, _SHARED_INNER)
    return dataclasses.replace(options, spec=SharedExpertSpec(options.spec, shared))


QWEN2_MOE = dataclasses.replace(
    QWEN2,
    architecture="Qwen2MoeForCausalLM",
    layers=make_sparse_layers,
    read_options=_read_options,
    option_keys=EXPERT_OPTION_KEYS | {"qkv_bias", "shared_expert_intermediate_size"},
)
