"""The vision tower of Qwen3-VL (arXiv:2511.21631), which maps patches of pixels to the decoder's
input rows.

Patches that are merged into one token are consecutive. A patch attends to all patches of the same
image, or of the same temporal patch of a video.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from nanoactor.models.devices.protocols import LinearOperator, Operators
from nanoactor.models.layers.step import Rotation
from nanoactor.models.vision.config import VisionConfig
from nanoactor.models.weights.linear import Dense
from nanoactor.models.weights.weights import Weights

_EPS = 1e-6


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """Size of the grid of patches of an image or a video."""

    frames: int
    """Number of temporal patches; 1 for an image."""
    height: int
    width: int

    @property
    def patches(self) -> int:
        """Total number of patches."""
        return self.frames * self.height * self.width


@dataclasses.dataclass(slots=True)
class TowerState:
    """Intermediate state of images that are being encoded, between `begin` and `finish`."""

    x: torch.Tensor
    """Hidden states, (patches, hidden)."""
    rotation: Rotation
    segments: list[int]
    """Number of patches in each group of consecutive patches that attend to one another."""
    deepstack_features: list[torch.Tensor] = dataclasses.field(default_factory=list)
    """Features of the deepstack levels computed so far, (tokens, out_hidden_size) each."""


class VisionTower:
    """The vision tower: the patch embedding, the blocks, the merger of the last block's output, and
    one merger for each deepstack level."""

    def __init__(
        self, config: VisionConfig, weights: Weights, device: Operators, prefix: str
    ) -> None:
        """Load all weights. Every rank has the whole tower. Raises `WeightsError` if a tensor is
        missing or does not fit."""
        self._config = config
        self._patch = _patch_embedding(config, weights, device, f"{prefix}.patch_embed.proj")
        shape = config.table_side**2, config.hidden_size
        self._table = weights.load(f"{prefix}.pos_embed.weight", *shape)
        self._blocks = [
            _Block(config, weights, device, f"{prefix}.blocks.{index}")
            for index in range(config.depth)
        ]
        self._merger = _Merger(config, weights, device, f"{prefix}.merger", norm_merged=False)
        self._deepstack_mergers = {
            layer: _Merger(
                config, weights, device, f"{prefix}.deepstack_merger_list.{index}", norm_merged=True
            )
            for index, layer in enumerate(config.deepstack_layers)
        }

    def __call__(self, patches: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """Encode `patches`, (patches, patch_values), of consecutive grids. Return the features,
        (tokens, feature_size).

        Each row is the embedding, followed by the features of the deepstack levels in the order of
        their blocks.
        """
        state = self.begin(patches, grids)
        self.run(state, range(len(self._blocks)))
        return self.finish(state)

    def begin(self, patches: torch.Tensor, grids: Sequence[Grid]) -> TowerState:
        """Embed the patches and return the state before the first block. Call `run` next, for all
        blocks in order, and then `finish`."""
        coordinates = torch.cat([self._patch_coordinates(grid) for grid in grids])
        x = self._patch(patches) + self._positions(coordinates, grids).to(patches.dtype)
        segments = [grid.height * grid.width for grid in grids for _ in range(grid.frames)]
        return TowerState(x, self._rotation(coordinates), segments)

    def run(self, state: TowerState, blocks: range) -> None:
        """Run the blocks with the indices in `blocks`, updating `state` in place."""
        for index in blocks:
            state.x = self._blocks[index](state.x, state.rotation, state.segments)
            if index in self._deepstack_mergers:
                state.deepstack_features.append(self._deepstack_mergers[index](state.x))

    def finish(self, state: TowerState) -> torch.Tensor:
        """Merge patches after the last block, and return the features, (tokens, feature_size)."""
        return torch.cat((self._merger(state.x), *state.deepstack_features), dim=1)

    def _patch_coordinates(self, grid: Grid) -> torch.Tensor:
        """Return the row and column of each patch, int64 (patches, 2). Patches that are merged into
        one token are consecutive."""
        merge, device = self._config.merge_size, self._table.device
        rows = torch.arange(grid.height, device=device).view(-1, 1, merge, 1)
        columns = torch.arange(grid.width, device=device).view(1, -1, 1, merge)
        shape = grid.height // merge, grid.width // merge, merge, merge
        coordinates = torch.stack((rows.expand(shape), columns.expand(shape)), dim=-1).view(-1, 2)
        return coordinates.repeat(grid.frames, 1)

    def _positions(self, coordinates: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """Return the position embeddings, (patches, hidden), interpolated bilinearly from the
        learned table with aligned corners."""
        side = self._config.table_side
        counts = [grid.patches for grid in grids]
        neighbors, weights = [], []
        for axis, sizes in enumerate(([g.height for g in grids], [g.width for g in grids])):
            # Created on the device: a copy from the host would wait for all earlier steps.
            intervals = [
                torch.full((count,), max(1, size - 1), device=coordinates.device)
                for count, size in zip(counts, sizes, strict=True)
            ]
            source = coordinates[:, axis].float() * (side - 1) / torch.cat(intervals)
            lower = source.floor()
            nearest = torch.stack((lower, lower + 1), dim=1)
            neighbors.append(nearest.long().clamp(max=side - 1))
            weights.append((1 - (source[:, None] - nearest).abs()).clamp(min=0))
        index = (neighbors[0][:, :, None] * side + neighbors[1][:, None, :]).flatten(1)
        weight = (weights[0][:, :, None] * weights[1][:, None, :]).flatten(1)
        return (F.embedding(index, self._table) * weight[:, :, None]).sum(1)

    def _rotation(self, coordinates: torch.Tensor) -> Rotation:
        """Return (cos, sin) of the patches' rotary positions, float32 (patches, head_dim / 2) each:
        first by row, then by column."""
        config = self._config
        size = config.hidden_size // config.num_heads // 2
        exponents = torch.arange(0, size, 2, dtype=torch.float32, device=coordinates.device) / size
        angles = coordinates[..., None].float() * (1.0 / config.rope_theta**exponents)
        angles = angles.flatten(1)
        return angles.cos(), angles.sin()


def _patch_embedding(
    config: VisionConfig, weights: Weights, device: Operators, name: str
) -> LinearOperator:
    """Return the patch embedding. It is a convolution whose stride equals its kernel size, so it is
    computed as one matrix product."""
    sides = config.temporal_patch_size, config.patch_size, config.patch_size
    weight = weights.load(f"{name}.weight", config.hidden_size, config.channels, *sides)
    bias = weights.load(f"{name}.bias", config.hidden_size)
    return device.linear(Dense(weight.flatten(1), bias))


def _linear(
    weights: Weights, device: Operators, name: str, inputs: int, outputs: int
) -> LinearOperator:
    weight = weights.load(f"{name}.weight", outputs, inputs)
    return device.linear(Dense(weight, weights.load(f"{name}.bias", outputs)))


class _LayerNorm:
    """Layer normalization over the last dimension, with scale and shift (arXiv:1607.06450)."""

    def __init__(self, weights: Weights, name: str, size: int) -> None:
        self._weight = weights.load(f"{name}.weight", size)
        self._bias = weights.load(f"{name}.bias", size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, _EPS)


class _Block:
    """One block of the tower: attention and an MLP. Each is preceded by a norm, and its output is
    added to the residual stream."""

    def __init__(
        self, config: VisionConfig, weights: Weights, device: Operators, prefix: str
    ) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        self._norms = [_LayerNorm(weights, f"{prefix}.norm{n}", size) for n in (1, 2)]
        self._qkv = _linear(weights, device, f"{prefix}.attn.qkv", size, 3 * size)
        self._out = _linear(weights, device, f"{prefix}.attn.proj", size, size)
        self._up = _linear(weights, device, f"{prefix}.mlp.linear_fc1", size, inner)
        self._down = _linear(weights, device, f"{prefix}.mlp.linear_fc2", inner, size)
        self._heads, self._device = config.num_heads, device

    def __call__(self, x: torch.Tensor, rotation: Rotation, segments: list[int]) -> torch.Tensor:
        x = x + self._out(self._attend(self._norms[0](x), rotation, segments))
        return x + self._down(F.gelu(self._up(self._norms[1](x)), approximate="tanh"))

    def _attend(self, x: torch.Tensor, rotation: Rotation, segments: list[int]) -> torch.Tensor:
        heads = self._heads
        qkv = self._qkv(x).view(len(x), 3 * heads, -1)
        qk, v = self._device.rotary(qkv[:, : 2 * heads], *rotation), qkv[:, 2 * heads :]
        return self._device.segment_attention(qk[:, :heads], qk[:, heads:], v, segments).flatten(1)


class _Merger:
    """Merges the features of a square of patches into one token of the decoder's hidden size."""

    def __init__(
        self,
        config: VisionConfig,
        weights: Weights,
        device: Operators,
        prefix: str,
        *,
        norm_merged: bool,
    ) -> None:
        """If `norm_merged` is True, as in deepstack levels, the norm is applied to whole squares
        instead of single patches."""
        merged = config.hidden_size * config.merge_size**2
        self._merged, self._norm_merged = merged, norm_merged
        size = merged if norm_merged else config.hidden_size
        self._norm = _LayerNorm(weights, f"{prefix}.norm", size)
        self._up = _linear(weights, device, f"{prefix}.linear_fc1", merged, merged)
        self._down = _linear(
            weights, device, f"{prefix}.linear_fc2", merged, config.out_hidden_size
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._norm_merged:
            x = self._norm(x.view(-1, self._merged))
        else:
            x = self._norm(x).view(-1, self._merged)
        return self._down(F.gelu(self._up(x)))
