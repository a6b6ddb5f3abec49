"""The weights of a model, by name: the interface that layers load them through."""

from __future__ import annotations

import abc
import contextlib
import importlib
from collections.abc import Sequence
from typing import Protocol, Self

import torch

from nanoactor.models.errors import WeightsError
from nanoactor.models.model_config import Quantization
from nanoactor.models.parallel import Span
from nanoactor.models.weights.files import Rows, Selection
from nanoactor.models.weights.formats import FORMATS
from nanoactor.models.weights.linear import Dense, LinearWeights, Projection


class Format(Protocol):
    """Reader of packed (quantized) weights in one format, created from a `Quantization`. The
    constructor raises `UnsupportedModel` for unknown options."""

    def is_quantized(self, projection: Projection) -> bool:
        """Return True if the weights of a projection are packed. If they are not, `Weights` loads
        them itself."""

    def read(self, weights: Weights, projection: Projection) -> LinearWeights:
        """Return this rank's share of a projection. Raises `WeightsError` if tensors do not fit."""


class Weights(abc.ABC):
    """The tensors of a model, by name. Each tensor is converted and moved to the device when it is
    loaded.

    Use it as a context manager, which closes files at the end. Loaded tensors do not refer to
    files.
    """

    def __init__(
        self, origin: str, dtype: torch.dtype, device: torch.device, packed: Format | None = None
    ) -> None:
        """Set what all kinds of weights have. `origin` says in errors where the weights are from.
        Tensors have the dtype `dtype` on `device`, and `packed` reads packed weights."""
        self._exit_stack = contextlib.ExitStack()
        self.origin = origin
        self.dtype = dtype
        self.device = device
        self.format = packed

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self._exit_stack.close()

    @property
    def has_values(self) -> bool:
        """True if loaded tensors have values."""
        return True

    @abc.abstractmethod
    def __contains__(self, name: str) -> bool:
        """Return True if there is a tensor with this name."""

    @abc.abstractmethod
    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises `WeightsError` if the shape is not known."""

    def load(
        self,
        name: str,
        *shape: int,
        rows: Rows | None = None,
        columns: Span | None = None,
        spans: tuple[Span | None, ...] = (),
        dtype: torch.dtype | None = None,
        stored: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return a tensor, or a part of it, on the device.

        `shape` is the shape of the whole tensor. `rows` is a range of rows, or several ranges to
        concatenate in this order. `columns` is a range of columns. `spans` contains a range for
        each dimension, where None means all. At most one of these three arguments may be set, and
        only the requested part is read from the file. If a single range of rows extends past the
        last row, the additional rows are zero.

        The result has the dtype `dtype`, by default that of the model. A packed tensor must have
        the dtype `stored` in the file, and keeps it.

        Raises `WeightsError` if the tensor is missing, has another shape or dtype, or cannot be
        read.
        """
        part = Selection(shape, rows, columns, spans)
        return self._load(name, part, stored or dtype or self.dtype, stored)

    @abc.abstractmethod
    def _load(
        self, name: str, part: Selection, dtype: torch.dtype, stored: torch.dtype | None
    ) -> torch.Tensor:
        """Return a part of a tensor as `dtype`. A packed tensor must have the dtype `stored` in the
        file."""

    def is_packed(self, projection: Projection) -> bool:
        """Return True if, by config.json, the weights of a projection are packed."""
        return self.format is not None and self.format.is_quantized(projection)

    def linear(self, projection: Projection) -> LinearWeights:
        """Return the weights of a projection in the checkpoint's format. Raises `WeightsError` as
        `load` does."""
        if self.format is not None and self.is_packed(projection):
            return self.format.read(self, projection)
        matrices = [
            self.load(
                f"{part.name}.weight",
                *(part.outputs, projection.inputs),
                rows=part.rows,
                columns=projection.columns,
            )
            for part in projection.parts
        ]
        return Dense(_concatenate(matrices), self.load_bias(projection))

    def load_bias(self, projection: Projection) -> torch.Tensor | None:
        """Return the bias of a projection's outputs, or None if it has no bias."""
        if not projection.bias:
            return None
        parts = projection.parts
        return _concatenate([self.load(f"{p.name}.bias", p.outputs, rows=p.rows) for p in parts])

    def load_stacked(
        self,
        projections: Sequence[Projection],
    ) -> LinearWeights:
        """Return the matrices of equally shaped projections as one stack, (projections, outputs,
        inputs).

        Each matrix is copied into the stack as soon as it is read, so no second copy of the whole
        stack ever exists. Raises `WeightsError` as `load` does, and if the projections have
        different formats.
        """
        stack: LinearWeights | None = None
        for index, projection in enumerate(projections):
            weights = self.linear(projection)
            stack = weights.empty_stack(len(projections)) if stack is None else stack
            if type(weights) is not type(stack):
                raise WeightsError(
                    f"{self.origin}: {projection.parts[0].name} has the format "
                    f"{type(weights).__name__}, but other experts of its layer have the format "
                    f"{type(stack).__name__}; all experts of a layer must have the same format"
                )
            self._store(stack, index, weights)
        assert stack is not None, "nothing to stack"
        return stack

    def _store(self, stack: LinearWeights, index: int, weights: LinearWeights) -> None:
        """Copy the matrices of a projection to position `index` of a stack."""
        stack.copy_into(index, weights)


def _concatenate(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def format_of(quantization: Quantization | None) -> Format | None:
    """Return the reader of a checkpoint's packed weights, or None if `quantization` is None. Raises
    `ModelError` if the configuration is invalid or not supported."""
    if quantization is None:
        return None
    module, _, name = FORMATS[quantization.method].partition(":")
    reader: Format = getattr(importlib.import_module(module), name)(quantization)
    return reader
