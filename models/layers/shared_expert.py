"""A mixture of experts with one expert for all tokens as the feed-forward part of a layer."""

from __future__ import annotations

import torch

from nanoactor.models.layers.kinds import MLPSpec, SharedExpertSpec
from nanoactor.models.layers.layer import make_feed_forward
from nanoactor.models.layers.mlp import MLP
from nanoactor.models.layers.step import LayerContext, LayerStep


class SharedExpert:
    """The sum of a mixture of experts and of one more expert, whose output is multiplied by the
    sigmoid of a product of the input. Each rank computes that product."""

    def __init__(self, spec: SharedExpertSpec, context: LayerContext, prefix: str) -> None:
        """Load all experts. Raises `UnsupportedModel` if they are too small to be divided."""
        self._experts = make_feed_forward(spec.experts, context, prefix)
        name = f"{prefix}.{spec.name}"
        self._shared = MLP(MLPSpec(spec.inner, name="shared_expert"), context, name)
        self._gate = context.weights.load(
            f"{name}.shared_expert_gate.weight", 1, context.config.hidden_size
        )

    def __call__(self, x: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """Map (tokens, hidden) to the same shape."""
        share = torch.sigmoid(torch.nn.functional.linear(x, self._gate))
        return self._experts(x, step) + share * self._shared(x, step)
