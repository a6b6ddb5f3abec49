"""Rotary position embedding (arXiv:2104.09864), with linear, YaRN and Llama 3 scaling."""

from __future__ import annotations

import math

import torch

from nanoactor.models.model_config import RopeConfig


class RotaryEmbedding:
    """Table of cosines and sines for all positions. All layers of a step share one lookup."""

    def __init__(
        self,
        config: RopeConfig,
        head_dim: int,
        max_positions: int,
    ) -> None:
        frequencies, scale = _frequencies(config, head_dim)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        self.cos = angles.cos() * scale
        self.sin = angles.sin() * scale
        self._axes = None
        if config.sections is not None:
            self._axes = interleaved_axes(config.sections, head_dim // 2)

    def to(self, device: torch.device, dtype: torch.dtype) -> RotaryEmbedding:
        """Move the tables, which were computed in float32, to a device and dtype. Return self."""
        self.cos = self.cos.to(device, dtype)
        self.sin = self.sin.to(device, dtype)
        self._axes = None if self._axes is None else self._axes.to(device)
        return self

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines, (tokens, head_dim / 2) each, of integer positions.

        `positions` is (tokens,), or (3, tokens) if the configuration has M-RoPE sections.
        """
        if positions.dim() == 1:
            return self.cos[positions], self.sin[positions]
        assert self._axes is not None
        indices = positions.index_select(0, self._axes).T  # (tokens, head_dim / 2)
        return self.cos.gather(0, indices), self.sin.gather(0, indices)


def interleaved_axes(sections: tuple[int, int, int], frequencies: int) -> torch.Tensor:
    """Return the position axis (0 time, 1 height, 2 width) of each frequency, int64 (frequencies,).

    The three axes alternate. When all frequencies of height or width are assigned, time takes that
    axis's places (Qwen3-VL, arXiv:2511.21631).
    """
    axes = torch.zeros(frequencies, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def _frequencies(config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Return (frequency of each pair of dimensions, factor on cosines and sines)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / config.theta**exponents
    if config.kind == "linear":
        return frequencies / config.factor, 1.0
    if config.kind == "yarn":
        return _yarn(config, head_dim, frequencies)
    if config.kind == "llama3":
        return _llama3(config, frequencies), 1.0
    return frequencies, 1.0


def _llama3(config: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Return frequencies scaled as in Llama 3.1 (arXiv:2407.21783).

    Low frequencies are divided by the factor, and high ones are kept. Those in between are blended
    according to their number of periods over the original context length.
    """
    periods = config.original_max_positions * frequencies / (2 * math.pi)
    width = config.high_freq_factor - config.low_freq_factor
    kept_fraction = ((periods - config.low_freq_factor) / width).clamp(0, 1)
    return frequencies / config.factor * (1 - kept_fraction) + frequencies * kept_fraction


def _yarn(
    config: RopeConfig, head_dim: int, frequencies: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Return frequencies scaled by YaRN (arXiv:2309.00071), and the factor on cosines and sines.

    Low frequencies are divided by the factor, and high ones are kept. Those in between are blended.
    """

    def dimension(rotations: float) -> float:
        # The dimension whose pair makes `rotations` turns over the original length.
        length = config.original_max_positions
        return (
            head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))
        )

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    kept_fraction = 1 - ramp.clamp(0, 1)
    blended = frequencies / config.factor * (1 - kept_fraction) + frequencies * kept_fraction
    return blended, _yarn_attention_factor(config)


def _yarn_attention_factor(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return float(config.attention_factor)

    def temperature(scale: float, mscale: float = 1.0) -> float:
        return 0.1 * mscale * math.log(scale) + 1.0 if scale > 1 else 1.0

    if config.mscale and config.mscale_all_dim:
        return temperature(config.factor, config.mscale) / temperature(
            config.factor, config.mscale_all_dim
        )
    return temperature(config.factor)
