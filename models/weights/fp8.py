"""FP8 weights with block scales, as published by Qwen and DeepSeek: e4m3 numbers, and one scale for
each block of them.

Source: DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.3.2. The keys of
`quantization_config` have the names and meanings of transformers' `FineGrainedFP8Config`. In
published checkpoints a block has 128 x 128 numbers, and their values are the numbers times the
block's `weight_scale_inv`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from nanoactor.models.errors import ModelError, UnsupportedModel
from nanoactor.models.model_config import Quantization
from nanoactor.models.parallel import Span
from nanoactor.models.weights.linear import Part, Projection
from nanoactor.models.weights.weights import Weights

E4M3 = torch.float8_e4m3fn
_OUTPUTS_AT_ONCE = 1024
"""Number of outputs that are unpacked at a time, which limits the memory for float32 values."""
_SUPPORTED_OPTIONS = {
    "quant_method": ("fp8",),
    "activation_scheme": ("dynamic",),
    "fmt": ("e4m3",),
    "dequantize": (False,),
    "scale_fmt": ("float",),
}
"""Supported values of keys other than the block size and the list of excluded modules."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """A matrix of e4m3 numbers with block scales, or a stack of such matrices."""

    weight: torch.Tensor
    """float8_e4m3fn (outputs, inputs), or (matrices, outputs, inputs)."""
    scales: torch.Tensor
    """Scale of each group of outputs in each block of inputs, float32 (..., groups, blocks)."""
    block: int
    """Number of inputs in a block."""
    offset: int
    """Number of inputs in the first block that belong to another rank and are not stored here."""
    dtype: torch.dtype
    """Dtype of the unpacked matrix: that of the model."""
    group: int = 1
    """Number of outputs in a group; the last group may have fewer."""
    bias: torch.Tensor | None = None

    def dequantize(self) -> torch.Tensor:
        """Return the unpacked matrix in the dtype of the model."""
        unpacked = torch.empty(self.weight.shape, dtype=self.dtype, device=self.weight.device)
        packed, scales = self.weight.flatten(0, -2), self.scales_of_outputs().flatten(0, -2)
        for start in range(0, len(packed), _OUTPUTS_AT_ONCE):
            chunk = slice(start, start + _OUTPUTS_AT_ONCE)
            column_scales = scales[chunk].repeat_interleave(self.block, 1)
            column_scales = column_scales[:, self.offset : self.offset + packed.shape[1]]
            unpacked.view(packed.shape)[chunk] = packed[chunk].float() * column_scales
        return unpacked

    def scales_of_outputs(self) -> torch.Tensor:
        """Return the scale of each output in each block of inputs, float32 (..., outputs,
        blocks)."""
        scales = self.scales.repeat_interleave(self.group, -2)
        return scales[..., : self.weight.shape[-2], :]

    def without_bias(self) -> Fp8Blocks:
        """Return the same matrix without its bias."""
        return dataclasses.replace(self, bias=None)

    def empty_stack(self, count: int) -> Fp8Blocks:
        """Return a stack with uninitialized memory for `count` matrices of this shape, without
        biases."""
        weight = self.weight.new_empty(count, *self.weight.shape)
        scales = self.scales.new_empty(count, *self.scales.shape)
        return dataclasses.replace(self, weight=weight, scales=scales, bias=None)

    def copy_into(self, index: int, matrix: Fp8Blocks) -> None:
        """Copy a matrix to position `index` of this stack."""
        self.weight[index].copy_(matrix.weight)
        self.scales[index].copy_(matrix.scales)


def iter_experts(weights: Fp8Blocks) -> Iterator[Fp8Blocks]:
    """Yield the matrices of a stack as views."""
    for weight, scales in zip(weights.weight, weights.scales, strict=True):
        yield dataclasses.replace(weights, weight=weight, scales=scales)


class Fp8Format:
    """Reader of FP8 checkpoints with block scales; a
    `nanoactor.models.weights.weights.Format`."""

    def __init__(self, quantization: Quantization) -> None:
        """Check the options. Raises `UnsupportedModel` if they are not supported, and `ModelError`
        if they are invalid."""
        raw = quantization.raw
        for key, value in raw.items():
            if key in ("weight_block_size", "modules_to_not_convert") or value is None:
                continue
            if key not in _SUPPORTED_OPTIONS or value not in _SUPPORTED_OPTIONS[key]:
                supported = (
                    f"; only {_SUPPORTED_OPTIONS[key][0]!r} is" if key in _SUPPORTED_OPTIONS else ""
                )
                raise UnsupportedModel(
                    f"quantization_config: {key} {value!r:.50} is not supported{supported}"
                )
        sizes = raw.get("weight_block_size")
        block_shape = sizes if isinstance(sizes, list) else []
        if len(block_shape) != 2 or not all(type(size) is int and size > 0 for size in block_shape):
            raise UnsupportedModel(
                "quantization_config: weight_block_size must be a list of two positive integers, "
                f"got {sizes!r:.50}; FP8 without blocks is not supported"
            )
        self._block_rows, self._block_columns = block_shape
        unquantized_names = raw.get("modules_to_not_convert") or []
        if not isinstance(unquantized_names, list) or not all(
            isinstance(name, str) for name in unquantized_names
        ):
            raise ModelError(
                "quantization_config: modules_to_not_convert must be a list of names, got "
                f"{unquantized_names!r:.50}"
            )
        self._unquantized_names = frozenset(unquantized_names)
        # Published lists have hundreds of names, and checkpoints tens of thousands of projections.
        self._unquantized_prefixes = tuple(f"{name}." for name in unquantized_names)
        self._unquantized_suffixes = tuple(f".{name}" for name in unquantized_names)

    def is_quantized(self, projection: Projection) -> bool:
        """Return True if the weights of a projection are in FP8.

        Raises `ModelError` if only some parts of the projection are in FP8, because all parts are
        computed as one matrix product.
        """
        quantized_parts = {part.name: not self._is_excluded(part.name) for part in projection.parts}
        if len({*quantized_parts.values()}) > 1:
            excluded = ", ".join(
                name for name, quantized in quantized_parts.items() if not quantized
            )
            raise ModelError(
                f"quantization_config: modules_to_not_convert lists {excluded} but not all of "
                f"{', '.join(quantized_parts)}, which are fused and must have the same format"
            )
        return all(quantized_parts.values())

    def _is_excluded(self, name: str) -> bool:
        return (
            name in self._unquantized_names
            or name.startswith(self._unquantized_prefixes)
            or name.endswith(self._unquantized_suffixes)
        )

    def read(self, weights: Weights, projection: Projection) -> Fp8Blocks:
        """Return this rank's share of a projection. Raises `WeightsError` if tensors do not fit."""
        inputs, columns = projection.inputs, projection.columns or Span(0, projection.inputs)
        first, last = columns.start // self._block_columns, -(-columns.stop // self._block_columns)
        parts, scales = [], []
        for part in projection.parts:
            parts.append(self._matrix(weights, part, projection))
            shape = -(-part.outputs // self._block_rows), -(-inputs // self._block_columns)
            part_scales = weights.load(f"{part.name}.weight_scale_inv", *shape, dtype=torch.float32)
            scales.append(part_scales[:, first:last])
        layout = tuple((part.outputs, part.rows) for part in projection.parts)
        groups = _groups(layout, self._block_rows, weights.device)
        return Fp8Blocks(
            _concatenate(parts),
            _concatenate(scales)[groups.scale_rows],
            self._block_columns,
            columns.start - first * self._block_columns,
            weights.dtype,
            group=groups.size,
            bias=weights.load_bias(projection),
        )

    @staticmethod
    def _matrix(weights: Weights, part: Part, projection: Projection) -> torch.Tensor:
        return weights.load(
            f"{part.name}.weight",
            *(part.outputs, projection.inputs),
            rows=part.rows,
            columns=projection.columns,
            stored=E4M3,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Groups:
    """The division of a projection's outputs into groups that have the same scales."""

    size: int
    scale_rows: torch.Tensor
    """Row of each group in the scales of all parts, int64 (groups,), on the device."""


@functools.cache
def _groups(
    layout: tuple[tuple[int, tuple[Span, ...] | None], ...], block_rows: int, device: torch.device
) -> _Groups:
    """Return the groups of the projections with this layout, which are few.

    `layout` has the number of outputs of each part and the spans of the requested ones.
    """
    rows, parts_before = [], 0
    for outputs, spans in layout:
        indices = [np.arange(span.start, span.stop) for span in spans or (Span(0, outputs),)]
        rows.append(np.concatenate(indices) // block_rows + parts_before)
        parts_before += -(-outputs // block_rows)
    scale_of_output = np.concatenate(rows)
    size = _largest_group(scale_of_output, block_rows)
    return _Groups(size, torch.from_numpy(scale_of_output[::size].copy()).to(device))


def _largest_group(rows: npt.NDArray[np.int64], block_rows: int) -> int:
    """Return the largest group size for which all outputs of each group have the same scales. A
    group consists of consecutive outputs.

    The size is `block_rows`, or `block_rows` halved repeatedly. `rows` contains the row of each
    output in the table of scales, int64 (outputs,).
    """
    sizes = (block_rows >> shift for shift in range(block_rows.bit_length()))
    matching = (
        size for size in sizes if np.array_equal(np.repeat(rows[::size], size)[: len(rows)], rows)
    )
    return next(matching, 1)


def _concatenate(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]
