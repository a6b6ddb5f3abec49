"""A mixture of experts as the feed-forward part of a layer."""

from __future__ import annotations

import torch

from nanoactor.models.errors import UnsupportedModel
from nanoactor.models.layers.kinds import ExpertsSpec
from nanoactor.models.layers.linear import columns_of_rank
from nanoactor.models.layers.step import LayerContext, LayerStep
from nanoactor.models.parallel import Span
from nanoactor.models.weights.linear import Dense, ExpertWeights, Part, Projection, Router
from nanoactor.models.weights.weights import Weights


class Experts:
    """A mixture of SwiGLU experts, with a float32 router that chooses some of them for each token.

    Each rank has a part of every expert's inner dimension, and the ranks' results are summed.
    """

    def __init__(self, spec: ExpertsSpec, context: LayerContext, prefix: str) -> None:
        """Load this rank's part of the experts. Raises `UnsupportedModel` if they are too small to
        be divided among the ranks."""
        name, hidden = f"{prefix}.{spec.name}", context.config.hidden_size
        span = context.shard.part(spec.inner)
        if spec.inner < context.shard.ranks:
            raise UnsupportedModel(
                f"tensor_parallel_size {context.shard.ranks} is too large for this model, "
                f"whose experts have a moe_intermediate_size of {spec.inner}"
            )
        gate = context.weights.load(
            f"{name}.gate.weight", spec.experts, hidden, dtype=torch.float32
        )
        self.router = Router(gate, spec.top_k, spec.renormalize)
        self._device, self._group = context.device, context.group
        read_experts = (
            _read_fused if f"{name}.experts.gate_up_proj" in context.weights else _read_separate
        )
        experts = read_experts(spec, context.weights, f"{name}.experts", hidden, span)
        self.operator = self.input_operator = context.device.experts(experts)

    def __call__(self, x: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """Map hidden states (tokens, hidden) to the same shape."""
        ids, topk_weights = self._device.route(x, self.router)
        return self._group.all_reduce(self.operator(x, ids, topk_weights))


def _read_separate(
    spec: ExpertsSpec, weights: Weights, name: str, hidden: int, span: Span
) -> ExpertWeights:
    """Load experts that are stored as one tensor per projection and expert."""
    gate_ups, downs = [], []
    for expert in range(spec.experts):
        tensor_names = (f"{name}.{expert}.{kind}_proj" for kind in ("gate", "up"))
        gate_ups.append(
            Projection(
                tuple(Part(tensor_name, spec.inner, (span,)) for tensor_name in tensor_names),
                hidden,
            )
        )
        down = Part(f"{name}.{expert}.down_proj", hidden)
        downs.append(Projection((down,), spec.inner, columns=columns_of_rank(spec.inner, span)))
    return ExpertWeights(weights.load_stacked(gate_ups), weights.load_stacked(downs))


def _read_fused(
    spec: ExpertsSpec, weights: Weights, name: str, hidden: int, rank_span: Span
) -> ExpertWeights:
    """Load experts that are stored in two tensors: gate and up projections of all experts, and down
    projections of all experts. The tensors may be transposed.

    Raises `UnsupportedModel` if the experts are packed.
    """
    gate_up_name, down_name = f"{name}.gate_up_proj", f"{name}.down_proj"
    experts, inner = spec.experts, spec.inner
    if weights.is_packed(Projection((Part(gate_up_name, 2 * inner),), hidden)):
        raise UnsupportedModel(
            f"{gate_up_name}: packed experts in one tensor per layer are not supported; store one "
            "tensor per expert and projection"
        )
    gate_up_shape, down_shape = (experts, 2 * inner, hidden), (experts, hidden, inner)
    # One of the two tensors always shows the order: hidden cannot equal both inner and 2 * inner.
    name_to_check, shape = (
        (down_name, down_shape) if hidden == 2 * inner else (gate_up_name, gate_up_shape)
    )
    is_transposed = name_to_check in weights and weights.shape_of(name_to_check) == (
        shape[0],
        *shape[:0:-1],
    )

    def load(tensor_name: str, shape: tuple[int, ...], *spans: Span | None) -> torch.Tensor:
        """Return a part of a tensor, (experts, outputs, inputs)."""
        if not is_transposed:
            return weights.load(tensor_name, *shape, spans=(None, *spans))
        stored_shape, stored_spans = (shape[0], *shape[:0:-1]), (None, *spans[::-1])
        return weights.load(tensor_name, *stored_shape, spans=stored_spans).transpose(1, 2)

    size = rank_span.size
    gate_up: torch.Tensor | None = None
    for index, span in enumerate((rank_span, rank_span.shifted(inner))):
        part = load(gate_up_name, gate_up_shape, span, None)
        if gate_up is None:
            gate_up = part.new_empty(experts, 2 * size, hidden)
        gate_up[:, index * size : (index + 1) * size].copy_(part)
    assert gate_up is not None
    down = load(down_name, down_shape, None, rank_span).contiguous()
    return ExpertWeights(Dense(gate_up), Dense(down))
