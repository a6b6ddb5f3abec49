"""Qwen3 and Qwen3-VL with a mixture of experts in some or all layers.

Source: Qwen3 Technical Report, arXiv:2505.09388; options as in transformers' `Qwen3MoeConfig`, and
`Qwen3VLMoeTextConfig` for the vision model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from nanoactor.models.errors import ModelError
from nanoactor.models.families.family import dense_layers
from nanoactor.models.families.qwen3 import QWEN3
from nanoactor.models.families.qwen3_vl import QWEN3_VL
from nanoactor.models.fields import read_bool, read_positive_int
from nanoactor.models.layers.kinds import ExpertsSpec, FeedForwardSpec, LayerSpec
from nanoactor.models.model_config import ModelConfig


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertOptions:
    """Options of `config.json` that determine which layers have experts, and the experts' sizes and
    routing."""

    spec: FeedForwardSpec
    """Feed-forward part of the layers that have experts."""
    step: int
    """Every `step`-th layer has experts, except the layers in `dense`."""
    dense: tuple[int, ...]
    """Indices of layers without experts."""


def read_expert_options(
    raw: Mapping[str, Any], origin: object, *, renormalize: bool
) -> ExpertOptions:
    """Return the options about experts in `raw`, the decoder's part of `config.json`.

    `renormalize` is the default of `norm_topk_prob`. Raises `ModelError` if values are invalid;
    `origin` names the file in the message.
    """
    counts = [key for key in ("num_experts", "num_local_experts") if raw.get(key) is not None]
    if len({raw[key] for key in counts}) > 1:
        raise ModelError(
            f"{origin}: num_experts and num_local_experts must be equal if both are set"
        )
    experts = read_positive_int(raw, counts[0] if counts else "num_experts", origin, 128)
    top_k = read_positive_int(raw, "num_experts_per_tok", origin, 8)
    if top_k > experts:
        raise ModelError(
            f"{origin}: num_experts_per_tok {top_k} exceeds the number of experts, {experts}"
        )
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ModelError(
            f"{origin}: mlp_only_layers must be a list of layer numbers, got {dense!r:.50}"
        )
    spec = ExpertsSpec(
        experts,
        top_k,
        read_positive_int(raw, "moe_intermediate_size", origin, 768),
        read_bool(raw, "norm_topk_prob", origin, renormalize),
    )
    return ExpertOptions(
        spec, read_positive_int(raw, "decoder_sparse_step", origin, 1), tuple(dense)
    )


def make_sparse_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Return the descriptions of the layers of a model in which some layers have experts."""
    options = config.family_options
    assert isinstance(options, ExpertOptions)
    return tuple(
        layer
        if index in options.dense or (index + 1) % options.step
        else dataclasses.replace(layer, feed_forward=options.spec)
        for index, layer in enumerate(dense_layers(config))
    )


EXPERT_OPTION_KEYS = frozenset(
    [
        "decoder_sparse_step",
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_experts",
        "num_experts_per_tok",
        "num_local_experts",
        # Keys about training and about returned values.
        "output_router_logits",
        "router_aux_loss_coef",
    ]
)

QWEN3_MOE = dataclasses.replace(
    QWEN3,
    architecture="Qwen3MoeForCausalLM",
    layers=make_sparse_layers,
    read_options=functools.partial(read_expert_options, renormalize=False),
    option_keys=EXPERT_OPTION_KEYS,
)
QWEN3_VL_MOE = dataclasses.replace(
    QWEN3_VL,
    architecture="Qwen3VLMoeForConditionalGeneration",
    layers=make_sparse_layers,
    read_options=functools.partial(read_expert_options, renormalize=True),
    option_keys=EXPERT_OPTION_KEYS,
)
