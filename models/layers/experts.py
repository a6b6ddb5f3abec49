"""A mixture of experts as the feed-forward part of a layer."""

from __future__ import annotations

import torch

from nanoactor.models.errors import UnsupportedModel
from nanoactor.models.layers.kinds import ExpertsSpec
from nanoactor.models.layers.linear import part_of
from nanoactor.models.layers.step import LayerContext, LayerStep
from nanoactor.models.parallel import Span
from nanoactor.models.weights.checkpoint import Weights
from nanoactor.models.weights.linear import Dense, ExpertWeights, Part, Projection, Router


class Experts:
    """A float32 router, followed by SwiGLU in each token's experts. Each rank has a part of every
    expert's inner dimension, and the ranks' results are summed."""

    def __init__(self, spec: ExpertsSpec, context: LayerContext, prefix: str) -> None:
        """Load the experts. Raises `UnsupportedModel` if they are too small to be divided."""
        name, hidden = f"{prefix}.{spec.name}", context.config.hidden_size
        mine = context.shard.part(spec.inner)
        if spec.inner < context.shard.ranks:
            raise UnsupportedModel(
                f"tensor_parallel_size {context.shard.ranks} is too large for experts with a "
                f"moe_intermediate_size of {spec.inner}"
            )
        gate = context.weights.load(
            f"{name}.gate.weight", spec.experts, hidden, dtype=torch.float32
        )
        self.router = Router(gate, spec.chosen, spec.normalizes)
        self._device, self._group = context.device, context.group
        read = _fused if f"{name}.experts.gate_up_proj" in context.weights else _separate
        experts = read(spec, context.weights, f"{name}.experts", hidden, mine)
        self.operator = context.device.experts(experts)

    def __call__(self, x: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """Map (tokens, hidden) to the same shape."""
        ids, shares = self._device.route(x, self.router)
        return self._group.all_reduce(self.operator(x, ids, shares))


def _separate(
    spec: ExpertsSpec, weights: Weights, name: str, hidden: int, mine: Span
) -> ExpertWeights:
    """Read experts that are stored as one tensor for each projection of each expert."""
    pairs, downs = [], []
    for number in range(spec.experts):
        kinds = (f"{name}.{number}.{kind}_proj" for kind in ("gate", "up"))
        pairs.append(Projection(tuple(Part(one, spec.inner, (mine,)) for one in kinds), hidden))
        down = Part(f"{name}.{number}.down_proj", hidden)
        downs.append(Projection((down,), spec.inner, columns=part_of(spec.inner, mine)))
    return ExpertWeights(weights.stacked(pairs), weights.stacked(downs))


def _fused(
    spec: ExpertsSpec, weights: Weights, name: str, hidden: int, mine: Span
) -> ExpertWeights:
    """Read experts that are stored as one tensor of gates and ups, and one of down projections."""
    pair, down = f"{name}.gate_up_proj", f"{name}.down_proj"
    experts, inner, up = spec.experts, spec.inner, mine.moved(spec.inner)
    plain, turned = (experts, 2 * inner, hidden), (experts, hidden, 2 * inner)
    transposed = spec.transposed if plain == turned else weights.shape_of(pair) == turned
    if transposed:
        parts = [weights.load(pair, *turned, spans=(None, None, span)) for span in (mine, up)]
        gate_up = torch.cat(parts, -1).transpose(1, 2).contiguous()
        back = weights.load(down, experts, inner, hidden, spans=(None, mine, None))
        return ExpertWeights(Dense(gate_up), Dense(back.transpose(1, 2).contiguous()))
    parts = [weights.load(pair, *plain, spans=(None, span, None)) for span in (mine, up)]
    back = weights.load(down, experts, hidden, inner, spans=(None, None, mine))
    return ExpertWeights(Dense(torch.cat(parts, 1)), Dense(back))
