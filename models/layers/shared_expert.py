"""A feed-forward part with routed experts and one shared expert, which processes all tokens."""

from __future__ import annotations

import torch

from nanoactor.models.layers.kinds import MLPSpec, SharedExpertSpec
from nanoactor.models.layers.layer import make_feed_forward
from nanoactor.models.layers.mlp import MLP
from nanoactor.models.layers.step import LayerContext, LayerStep


class SharedExpert:
    """The sum of routed experts and a shared expert. The shared expert's output is multiplied by a
    gate, the sigmoid of a linear function of the input.

    Every rank computes the gate.
    """

    input_operator = None

    def __init__(self, spec: SharedExpertSpec, context: LayerContext, prefix: str) -> None:
        """Load this rank's part of all experts. Raises `UnsupportedModel` if they are too small to
        be divided among the ranks."""
        self._experts = make_feed_forward(spec.experts, context, prefix)
        name = f"{prefix}.{spec.name}"
        self._shared = MLP(MLPSpec(spec.inner, name="shared_expert"), context, name)
        self._gate = context.weights.load(
            f"{name}.shared_expert_gate.weight", 1, context.config.hidden_size
        )

    def __call__(self, x: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """Map hidden states (tokens, hidden) to the same shape."""
        share = torch.sigmoid(torch.nn.functional.linear(x, self._gate))
        return self._experts(x, step) + share * self._shared(x, step)
