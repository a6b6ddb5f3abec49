"""One layer of a pre-norm decoder, assembled from its description."""

from __future__ import annotations

import dataclasses
from typing import TypeGuard, TypeVar

import torch

from nanoactor.models.devices.protocols import HasExpertMatrices, HasMatrix
from nanoactor.models.layers.attention import Attention
from nanoactor.models.layers.experts import Experts
from nanoactor.models.layers.kinds import LayerSpec
from nanoactor.models.layers.layer import FeedForward, make_feed_forward, make_mixer
from nanoactor.models.layers.linear import ColumnParallel, RowParallel
from nanoactor.models.layers.mlp import MLP
from nanoactor.models.layers.norm import RMSNorm
from nanoactor.models.layers.state import LayerState
from nanoactor.models.layers.step import LayerContext, LayerStep
from nanoactor.models.weights.whole_step import LayerWeights, Matrix

_Part = TypeVar("_Part")


class DecoderLayer:
    """A mixer (such as attention) and a feed-forward part. Each is preceded by a norm, and its
    output is added to the residual stream."""

    def __init__(self, spec: LayerSpec, context: LayerContext, prefix: str) -> None:
        size = context.config.hidden_size
        self._input_norm = RMSNorm(spec.norm, context, f"{prefix}.{spec.input_norm}", size)
        self._mixer = make_mixer(spec.mixer, context, prefix)
        self._post_norm = RMSNorm(spec.norm, context, f"{prefix}.{spec.post_norm}", size)
        self._feed_forward = make_feed_forward(spec.feed_forward, context, prefix)
        self._consumers = self._mixer.input_operator, self._feed_forward.input_operator
        self._residual_scale = spec.residual_scale
        self._is_plain = (
            spec.residual_scale == 1.0
            and not spec.norm.in_float32
            and spec.norm.eps == context.config.rms_norm_eps
        )
        self.state = self._mixer.state

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, state: LayerState, step: LayerStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (output of the feed-forward part, residual stream without that output), each
        (tokens, hidden).

        If `step.final_rows` is set, both contain only these rows. `residual` is None if `x` is
        already the complete residual stream.
        """
        if residual is None:
            x, residual = self._input_norm(x, self._consumers[0]), x
        else:
            x, residual = self._input_norm.add(x, residual, self._consumers[0])
        x = self._mixer(x, state, step)
        if step.final_rows is not None:
            residual = residual.index_select(0, step.final_rows.indices)
            if not len(x):
                return x, residual
        x, residual = self._post_norm.add(self._scaled(x), residual, self._consumers[1])
        return self._scaled(self._feed_forward(x, step)), residual

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._residual_scale == 1.0 else x * self._residual_scale

    def weights(self) -> LayerWeights | None:
        """Return the weight tensors for operators that run a whole decode step, or None if
        `LayerWeights` cannot describe the layer completely.

        `LayerWeights` has no fields for some kinds of parts, for device-specific layouts of
        matrices, and for some biases. A subclass of a known part is not known.
        """
        attention, feed_forward = self._mixer, self._feed_forward
        if not _is_exactly(attention, Attention) or not attention.is_plain or not self._is_plain:
            return None
        projections = _projections_of(attention.qkv, attention.out)
        feed_forward_projections = _feed_forward_of(feed_forward)
        if projections is None or feed_forward_projections is None:
            return None
        q_norm, k_norm = attention.norms or (None, None)
        return LayerWeights(
            norm1=self._input_norm.weight,
            qkv=projections.first,
            bias=projections.bias,
            q_norm=q_norm,
            k_norm=k_norm,
            o=projections.second,
            norm2=self._post_norm.weight,
            gate_up=feed_forward_projections.first,
            down=feed_forward_projections.second,
            router=feed_forward.router if _is_exactly(feed_forward, Experts) else None,
        )


def _is_exactly(part: object, kind: type[_Part]) -> TypeGuard[_Part]:
    """Return True if `part` is a `kind` and not one of its subclasses, which may compute something
    else."""
    return type(part) is kind


@dataclasses.dataclass(frozen=True, slots=True)
class _ProjectionPair:
    """The two matrices of attention or of a feed-forward part."""

    first: Matrix
    second: Matrix
    bias: torch.Tensor | None = None
    """Bias of `first`."""


def _projections_of(
    first_layer: ColumnParallel, second_layer: RowParallel
) -> _ProjectionPair | None:
    """Return the matrices of two consecutive projections and the bias of the first.

    Returns None if the operators do not expose both matrices, or if the second projection has a
    bias.
    """
    first, second = first_layer.operator, second_layer.operator
    if not isinstance(first, HasMatrix) or not isinstance(second, HasMatrix):
        return None
    matrices = first.matrix(), second.matrix()
    if second.bias is not None or matrices[0] is None or matrices[1] is None:
        return None
    return _ProjectionPair(matrices[0], matrices[1], first.bias)


def _feed_forward_of(part: FeedForward) -> _ProjectionPair | None:
    """Return the matrices of a feed-forward part or of its experts, or None if `LayerWeights`
    cannot describe the part."""
    if _is_exactly(part, Experts):
        operator = part.operator
        matrices = operator.matrices() if isinstance(operator, HasExpertMatrices) else None
        return None if matrices is None else _ProjectionPair(*matrices)
    pair = _projections_of(part.gate_up, part.down) if _is_exactly(part, MLP) else None
    return None if pair is None or pair.bias is not None else pair
