"""The weights of a checkpoint, converted and moved to a device, or random ones."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

import torch

from nanoactor.models.errors import WeightsError
from nanoactor.models.model_config import Quantization
from nanoactor.models.parallel import Span
from nanoactor.models.weights.files import Rows, Selection, TensorFiles, list_names
from nanoactor.models.weights.formats import FORMATS
from nanoactor.models.weights.linear import Dense, LinearWeights, Projection
from nanoactor.models.weights.read_ahead import ReadAhead
from nanoactor.models.weights.values import check_values

log = logging.getLogger("nanoactor.weights")

_UNUSED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
"""Name suffixes of buffers that older checkpoints contain and the model does not use."""


class Format(Protocol):
    """Reader of packed (quantized) weights in one format, created from a `Quantization`. The
    constructor raises `UnsupportedModel` for unknown options."""

    def is_quantized(self, projection: Projection) -> bool:
        """Return True if the weights of a projection are packed. If they are not, `Weights` loads
        them itself."""

    def read(self, weights: Weights, projection: Projection) -> LinearWeights:
        """Return this rank's share of a projection. Raises `WeightsError` if tensors do not fit."""


class Weights:
    """The tensors of a checkpoint, by name. Each tensor is converted and moved to the device when
    it is loaded.

    Use it as a context manager. The files stay open and mapped until the context ends. Loaded
    tensors do not refer to the files.
    """

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        device: torch.device,
        check: bool = True,
        *,
        packed: Format | None = None,
    ) -> None:
        """Open the files in `directory`. Tensors are converted to `dtype` and loaded to `device`.

        If `check` is True, `load` raises an error for values that are not finite. `packed` reads
        packed weights, if the checkpoint has any. Raises `WeightsError` if files are missing or
        damaged, or if two files without an index contain the same tensor.
        """
        self.dtype = dtype
        self.device = device
        self._check = check
        self._format = packed
        self._loaded_names: set[str] = set()
        self._files = TensorFiles(directory)
        self._read_ahead = ReadAhead(self._files.paths)

    def __enter__(self) -> Weights:
        """Return self. The files are already open."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self._read_ahead.close()
        self._files.close()

    def __contains__(self, name: str) -> bool:
        """Return True if the checkpoint has a tensor with this name."""
        return name in self._files.names

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

    def _load(
        self, name: str, part: Selection, dtype: torch.dtype, stored: torch.dtype | None
    ) -> torch.Tensor:
        """Return a part of a tensor as `dtype`. A packed tensor must have the dtype `stored` in the
        file."""
        self._files.check(name, part.shape, stored)
        tensor = self._files.read(name, part)
        if name not in self._loaded_names:  # other parts of it are behind the loader
            self._read_ahead.advance(math.prod(part.shape) * tensor.element_size())
        self._loaded_names.add(name)
        # A GPU checks the values in a fraction of the time.
        checked = tensor.to(self.device) if self.device.type == "cuda" else tensor
        if self._check and tensor.is_floating_point():
            check_values(checked, dtype, f"{self._files.path_of(name)}: {name}")
        converted = checked.to(self.device, dtype)
        # A tensor that was not converted still maps the file, which may change at any time.
        return converted.clone() if converted.data_ptr() == tensor.data_ptr() else converted

    @property
    def has_files(self) -> bool:
        """True if the tensors are those of a checkpoint."""
        return True

    @property
    def has_values(self) -> bool:
        """True if loaded tensors have values."""
        return True

    def warn_about_unused(self, ignored: Collection[str] = ()) -> None:
        """Log a warning if the checkpoint has tensors that were never loaded. Such a checkpoint may
        belong to another model.

        Names in `ignored` are exempt. A name that ends with a dot exempts all tensors of that
        module.
        """
        modules = tuple(name for name in ignored if name.endswith("."))
        ignored = {
            name
            for name in self._files.names
            if name in ignored or name.endswith(_UNUSED_SUFFIXES) or name.startswith(modules)
        }
        unused = set(self._files.names) - self._loaded_names - ignored
        if unused:
            log.warning(
                "%s contains %d tensors that the model does not use and that have no effect: %s",
                self._files.directory,
                len(unused),
                list_names(unused),
            )

    def is_packed(self, projection: Projection) -> bool:
        """Return True if, by config.json, the weights of a projection are packed."""
        return self._format is not None and self._format.is_quantized(projection)

    def linear(self, projection: Projection) -> LinearWeights:
        """Return the weights of a projection in the checkpoint's format. Raises `WeightsError` as
        `load` does."""
        if self._format is not None and self.is_packed(projection):
            return self._format.read(self, projection)
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
                    f"{self._files.directory}: {projection.parts[0].name} has the format "
                    f"{type(weights).__name__}, but other experts of its layer have the format "
                    f"{type(stack).__name__}; all experts of a layer must have the same format"
                )
            self._store(stack, index, weights)
        assert stack is not None, "nothing to stack"
        return stack

    def _store(self, stack: LinearWeights, index: int, weights: LinearWeights) -> None:
        """Copy the matrices of a projection to position `index` of a stack."""
        stack.copy_into(index, weights)

    def min_bytes(self, ignored: Collection[str] = (), *, unpacked: bool = False) -> int:
        """Return a lower bound on the total size of all ranks' weights, in bytes.

        Packed tensors count with their size in the file, or with the size of the model's dtype if
        `unpacked` is True. All others have the model's dtype. Tensors named in `ignored` do not
        count.
        """
        return self._files.min_bytes(self.dtype, ignored, unpacked=unpacked)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which must exist."""
        return tuple(self._files.slice_of(name).get_shape())


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


class RandomWeights(Weights):
    """Random weights of any requested shape, created on the device. No checkpoint is needed.

    They are for benchmarks. The duration of a step does not depend on the values of weights, except
    those of routers, which determine how many distinct experts are read.
    """

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        device: torch.device,
        check: bool = True,
        *,
        packed: Format | None = None,
    ) -> None:
        """Seed the random numbers. No files are read."""
        self.dtype, self.device, self._format = dtype, device, packed
        self._generator = torch.Generator(device).manual_seed(0)

    def __exit__(self, *_: object) -> None:
        """Do nothing, because no file is open."""

    @property
    def has_files(self) -> bool:
        """False, because any shape can be requested."""
        return False

    def warn_about_unused(self, ignored: Collection[str] = ()) -> None:
        """Do nothing. There are no tensors besides the requested ones."""

    def min_bytes(self, ignored: Collection[str] = (), *, unpacked: bool = False) -> int:
        """Return 0, because the size is unknown without files."""
        return 0

    def __contains__(self, name: str) -> bool:
        """Return False for the language-modeling head and for fused experts, and True for all other
        names.

        Tied weights therefore have no separate head, and experts have separate tensors.
        """
        return name != "lm_head.weight" and not name.endswith("experts.gate_up_proj")

    def _load(
        self, name: str, part: Selection, dtype: torch.dtype, stored: torch.dtype | None
    ) -> torch.Tensor:
        """Return normally distributed values with a standard deviation of 0.02, as in model
        initialization, or of 20 for integer dtypes. Weights of norms are ones."""
        sizes = part.sizes
        if len(part.shape) == 1 and "norm" in name:
            return torch.ones(sizes, dtype=dtype, device=self.device)
        is_wide_float = dtype.is_floating_point and dtype.itemsize > 1
        values = torch.empty(
            sizes, dtype=dtype if is_wide_float else torch.float32, device=self.device
        )
        values.normal_(0.0, 0.02 if dtype.is_floating_point else 20.0, generator=self._generator)
        return values.to(dtype)
