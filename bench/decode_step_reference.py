"""A decode step in float64 on the same weights, and random models to run it on."""

from __future__ import annotations

import dataclasses

import torch
from torch.nn import functional as F

from nanoactor.models.batch import KVCache
from nanoactor.models.devices.cuda.kernels.decode_step.arguments import StepInputs
from nanoactor.models.devices.cuda.kernels.decode_step.table import Shape
from nanoactor.models.weights.linear import Router
from nanoactor.models.weights.whole_step import (
    LayerWeights,
    Matrix,
    ModelWeights,
    PackedMatrix,
)

EPS = 1e-6


def _each(scales: torch.Tensor) -> torch.Tensor:
    """The scale of each number of a packed matrix."""
    return scales.repeat_interleave(8, -2).repeat_interleave(128, -1)


def random_weights(
    shape: Shape, generator: torch.Generator, group: int = 16, positions: int = 4096
) -> ModelWeights:
    """Draw a model whose activations stay of the order of 1. Each `group` outputs of a packed
    matrix have the same scale."""
    device = generator.device

    def normal(*size: int, scale: float) -> torch.Tensor:
        out = torch.empty(*size, dtype=torch.bfloat16, device=device)
        return out.normal_(0, scale, generator=generator)

    def norm(size: int) -> torch.Tensor:
        drawn = torch.randn(size, device=device, generator=generator)
        return (1 + 0.1 * drawn).bfloat16()

    def matrix(*size: int) -> Matrix:
        """Outputs and inputs, of each expert where there are some."""
        *of, outputs, inputs = size
        numbers = normal(*size, scale=inputs**-0.5)
        if not shape.packed:
            return numbers
        groups = *of, outputs // group, inputs // 128
        scales = 2.0 ** (torch.rand(groups, device=device, generator=generator) * 4 - 9)
        scales = scales.repeat_interleave(group // 8, -2)
        packed = (numbers.float() / _each(scales)).to(torch.float8_e4m3fn)
        return PackedMatrix(packed, scales)

    def router() -> Router | None:
        """Scores so far apart that rounding changes few choices."""
        if shape.mixture is None:
            return None
        drawn = torch.randn(shape.mixture.experts, shape.hidden, device=device, generator=generator)
        scaled = drawn * (4 * shape.hidden**-0.5)
        return Router(scaled, shape.mixture.top_k, shape.mixture.renormalize)

    def layer() -> LayerWeights:
        s = shape
        each = () if s.mixture is None else (s.mixture.experts,)
        return LayerWeights(
            norm(s.hidden),
            matrix(s.qkv, s.hidden),
            normal(s.qkv, scale=0.5) if s.qkv_bias else None,
            norm(s.head_dim) if s.qk_norm else None,
            norm(s.head_dim) if s.qk_norm else None,
            matrix(s.hidden, s.width),
            norm(s.hidden),
            matrix(*each, 2 * s.inter, s.hidden),
            matrix(*each, s.hidden, s.inter),
            router(),
        )

    layers = [layer() for _ in range(shape.layers)]
    embed = normal(shape.vocab, shape.hidden, scale=0.5)
    half = shape.head_dim // 2
    frequency = 1e6 ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    angle = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    return ModelWeights(layers, embed, norm(shape.hidden), embed, cos, sin)


def random_caches(
    shape: Shape, pages: int, used: torch.Tensor, generator: torch.Generator
) -> list[KVCache]:
    """Draw pages; those that are not `used` are NaN."""
    size = (pages, shape.block_size, shape.kv_heads, shape.head_dim)
    device = generator.device

    def one() -> torch.Tensor:
        drawn = torch.randn(size, device=device, generator=generator, dtype=torch.bfloat16)
        unused = torch.ones(pages, dtype=torch.bool, device=device)
        unused[used] = False
        drawn[unused] = torch.nan
        return drawn

    return [KVCache(one(), one()) for _ in range(shape.layers)]


def random_inputs(
    shape: Shape, contexts: list[int], generator: torch.Generator
) -> tuple[StepInputs, int, torch.Tensor]:
    """Deal pages out at random: (inputs, pages of the cache, those in use)."""
    device, size = generator.device, shape.block_size
    each = [-(-context // size) for context in contexts]
    pages = sum(each) + 3
    order = torch.randperm(pages, generator=generator, device=device)
    widest = max(each) + 1
    tables = torch.zeros(len(contexts) + 2, widest, dtype=torch.int32, device=device)
    slots = torch.randperm(len(contexts) + 1, generator=generator, device=device)[: len(contexts)]
    begin, places = 0, []
    for slot, context, count in zip(slots.tolist(), contexts, each, strict=True):
        tables[slot, :count] = order[begin : begin + count].int()
        last = context - 1
        places.append(int(tables[slot, last // size]) * size + last % size)
        begin += count

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    tokens = torch.randint(shape.vocab, (len(contexts),), generator=generator, device=device)
    inputs = StepInputs(
        tokens.int(),
        ints([context - 1 for context in contexts]),
        ints(contexts),
        slots.int(),
        torch.tensor(places, device=device),
        tables,
    )
    return inputs, pages, order[:begin]


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """The results that a step should give."""

    hidden: torch.Tensor
    logits: torch.Tensor
    keys: list[torch.Tensor]
    """Of the new tokens, (rows, kv_heads, head_dim) in each layer."""
    values: list[torch.Tensor]
    gaps: torch.Tensor
    """(rows,): the least difference, over the layers, between the scores of an expert that the row
    has chosen and of one that it has not. Where it is small, rounding changes the choice. Infinite
    without experts."""
    experts: list[int]
    """That rows have chosen in each layer, where there are some."""


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.to(x.dtype)


def _product(x: torch.Tensor, matrix: Matrix, rounds: bool) -> torch.Tensor:
    """x Wᵀ; in FP8 by activations that are rounded to e4m3, with a scale for each row and 128
    inputs.

    Rounding to three bits makes much of little: what is handed over in bfloat16 is rounded here
    too, or else results would be as far apart as if nothing were rounded."""
    if not isinstance(matrix, PackedMatrix):
        return x @ matrix.to(x.dtype).T
    factors = _each(matrix.scales).to(x.dtype)
    if rounds:
        each = x.unflatten(-1, (-1, 128))
        scale = each.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
        x = ((each / scale).float().to(torch.float8_e4m3fn).to(x.dtype) * scale).flatten(-2)
    return x @ (matrix.weight.to(x.dtype) * factors).T


def _normed_product(
    x: torch.Tensor, norm: torch.Tensor, matrix: Matrix, rounds: bool
) -> torch.Tensor:
    if not isinstance(matrix, PackedMatrix):
        return _product(_norm(x, norm), matrix, rounds)
    x = x.bfloat16().to(x.dtype)
    factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return _product(x * norm.to(x.dtype), matrix, rounds) * factor


def _handed_over(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    return x.bfloat16().to(x.dtype) if isinstance(matrix, PackedMatrix) else x


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _attend(
    shape: Shape,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: KVCache,
    table,
    past: int,
) -> torch.Tensor:
    """Attend with one row's heads."""
    pages = table[: -(-max(past, 1) // shape.block_size)].long()
    keys = torch.cat([cache.keys[pages].flatten(0, 1)[:past].to(q.dtype), k[None]])
    values = torch.cat([cache.values[pages].flatten(0, 1)[:past].to(q.dtype), v[None]])
    group = shape.heads // shape.kv_heads
    score = torch.einsum("hd,thd->ht", q, keys.repeat_interleave(group, 1)) * shape.head_dim**-0.5
    return torch.einsum("ht,thd->hd", score.softmax(-1), values.repeat_interleave(group, 1))


def _feed_forward(
    x: torch.Tensor, layer: LayerWeights, gate_up: Matrix, down: Matrix, rounds: bool
) -> torch.Tensor:
    gate, up = _normed_product(x, layer.norm2, gate_up, rounds).chunk(2, -1)
    return _product(_handed_over(F.silu(gate) * up, down), down, rounds)


def expert_of(matrix: Matrix, expert: int) -> Matrix:
    """Return one expert's matrix."""
    if isinstance(matrix, PackedMatrix):
        return PackedMatrix(matrix.weight[expert], matrix.scales[expert])
    return matrix[expert]


def _experts(
    x: torch.Tensor, layer: LayerWeights, router: Router, rounds: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the likeliest experts of each row give, by their shares; this layer's `Expected.gaps`;
    the experts, (rows, chosen)."""
    normed = _norm(x.bfloat16().to(x.dtype), layer.norm2)
    scores = normed @ router.weight.to(x.dtype).T
    ranked = F.pad(scores, (0, 1), value=-torch.inf).sort(-1, descending=True).values
    gaps = ranked[:, router.top_k - 1] - ranked[:, router.top_k]
    best, ids = scores.softmax(-1).topk(router.top_k, -1)
    if router.renormalize:
        best = best / best.sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        rows, at = (ids == expert).nonzero(as_tuple=True)
        of = expert_of(layer.gate_up, expert), expert_of(layer.down, expert)
        y[rows] += best[rows, at, None] * _feed_forward(x[rows], layer, *of, rounds)
    return y, gaps, ids


def expected_of(
    shape: Shape,
    weights: ModelWeights,
    caches: list[KVCache],
    inputs: StepInputs,
    dtype: torch.dtype = torch.float64,
    rounds: bool = True,
) -> Expected:
    """Compute a step; `caches` as they are before it. `rounds`: activations before products in FP8,
    as the format says."""
    x = weights.embed[inputs.token_ids.long()].to(dtype)
    positions = inputs.positions.long()
    cos = weights.cos[positions].to(dtype)[:, None]
    sin = weights.sin[positions].to(dtype)[:, None]
    all_keys, all_values, experts = [], [], []
    gaps = torch.full((len(x),), torch.inf, dtype=dtype, device=x.device)
    for layer, cache in zip(weights.layers, caches, strict=True):
        qkv = _normed_product(x, layer.norm1, layer.qkv, rounds)
        if layer.bias is not None:
            qkv = qkv + layer.bias.to(dtype)
        heads = qkv.view(len(x), -1, shape.head_dim)
        q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = _norm(q, layer.q_norm), _norm(k, layer.k_norm)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        all_keys.append(k)
        all_values.append(v)
        rows = [
            _attend(
                shape, q[r], k[r], v[r], cache, inputs.tables[int(inputs.slots[r])],
                int(inputs.contexts[r]) - 1,
            ).flatten()
            for r in range(len(x))
        ]  # fmt: skip
        x = x + _product(_handed_over(torch.stack(rows), layer.o), layer.o, rounds)
        if layer.router is None:
            x = x + _feed_forward(x, layer, layer.gate_up, layer.down, rounds)
        else:
            y, smallest, ids = _experts(x, layer, layer.router, rounds)
            x, gaps = x + y, torch.minimum(gaps, smallest)
            experts.append(len(ids.unique()))
    hidden = _norm(x, weights.norm)
    logits = torch.cat([hidden @ part.to(dtype).T for part in weights.head.split(16384)], -1)
    return Expected(hidden, logits, all_keys, all_values, gaps, experts)
