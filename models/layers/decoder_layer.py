"""A layer of a pre-norm decoder, assembled from its description."""

from __future__ import annotations

import torch

from nanoactor.models.devices.protocols import HasMatrix
from nanoactor.models.layers.attention import Attention
from nanoactor.models.layers.kinds import LayerSpec
from nanoactor.models.layers.layer import make_feed_forward, make_mixer
from nanoactor.models.layers.mlp import MLP
from nanoactor.models.layers.norm import RMSNorm
from nanoactor.models.layers.state import LayerState
from nanoactor.models.layers.step import LayerContext, LayerStep
from nanoactor.models.weights.whole_step import LayerWeights


class DecoderLayer:
    """A mixer and a feed-forward part, each after a norm and beside the residual stream."""

    def __init__(self, spec: LayerSpec, context: LayerContext, prefix: str) -> None:
        size = context.config.hidden_size
        self._input_norm = RMSNorm(spec.norm, context, f"{prefix}.{spec.input_norm}", size)
        self._mixer = make_mixer(spec.mixer, context, prefix)
        self._post_norm = RMSNorm(spec.norm, context, f"{prefix}.{spec.post_norm}", size)
        self._feed_forward = make_feed_forward(spec.feed_forward, context, prefix)
        self._residual_scale = spec.residual_scale
        self._is_plain = spec.residual_scale == 1.0 and not spec.norm.in_float32
        self.state = self._mixer.state

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, state: LayerState, step: LayerStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(this layer's contribution, the residual stream without it), of the final rows alone
        where the step has some."""
        if residual is None:
            x, residual = self._input_norm(x), x
        else:
            x, residual = self._input_norm.add(x, residual)
        x = self._mixer(x, state, step)
        if step.final is not None:
            residual = residual.index_select(0, step.final.index)
            if not len(x):
                return x, residual
        x, residual = self._post_norm.add(self._scaled(x), residual)
        return self._scaled(self._feed_forward(x, step)), residual

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._residual_scale == 1.0 else x * self._residual_scale

    def weights(self) -> LayerWeights | None:
        """Return its tensors; None where `LayerWeights` does not say all of it: other parts than
        dense ones, a device's own layout of matrices, biases that it has no place for."""
        attention, mlp = self._mixer, self._feed_forward
        if not isinstance(attention, Attention) or not isinstance(mlp, MLP):
            return None
        if not attention.is_plain or not self._is_plain:
            return None
        found = [layer.operator for layer in (attention.qkv, attention.out, mlp.gate_up, mlp.down)]
        known = [each for each in found if isinstance(each, HasMatrix)]
        matrices = [each.matrix() for each in known]
        if len(known) < len(found) or any(each.bias is not None for each in known[1:]):
            return None
        qkv, o, gate_up, down = matrices
        if qkv is None or o is None or gate_up is None or down is None:
            return None
        q_norm, k_norm = attention.norms or (None, None)
        return LayerWeights(
            norm1=self._input_norm.weight,
            qkv=qkv,
            bias=known[0].bias,
            q_norm=q_norm,
            k_norm=k_norm,
            o=o,
            norm2=self._post_norm.weight,
            gate_up=gate_up,
            down=down,
        )
