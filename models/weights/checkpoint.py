"""Access to the tensors of a checkpoint: one or more safetensors files, with or without an
index."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from nanoactor.models.config import read_json
from nanoactor.models.errors import ModelError, WeightsError
from nanoactor.models.model_config import Quantization
from nanoactor.models.parallel import Span
from nanoactor.models.weights.formats import FORMATS
from nanoactor.models.weights.linear import Dense, LinearWeights, Projection
from nanoactor.models.weights.read_ahead import ReadAhead
from nanoactor.models.weights.values import check_values

log = logging.getLogger("nanoactor.weights")

INDEX = "model.safetensors.index.json"
_FLOAT_TYPES = ("F64", "F32", "BF16", "F16")
"""Safetensors dtypes of weights that are not packed."""
_FP8_TYPES = ("F8_E4M3",)
"""Safetensors dtypes of packed weights with one element per number."""
_INTEGER_SIZES = {"I32": 4, "I64": 8, "I16": 2, "U16": 2, "U32": 4, "U64": 8}
"""Sizes in bytes of the integer dtypes that take more than one byte."""
_UNUSED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
"""Name suffixes of buffers that older checkpoints contain and the model does not use."""
_MAX_LISTED_NAMES = 5
_STORED_TYPE_NAMES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
"""Safetensors names of the dtypes that packed weights and their scales may have."""

Rows = Span | Sequence[Span]


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
        self._directory = directory
        self._exit_stack = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        self._file_of = self._read_index() if (directory / INDEX).exists() else self._scan()
        self._read_ahead = ReadAhead([directory / name for name in self._files])
        self._exit_stack.callback(self._read_ahead.close)

    def __enter__(self) -> Weights:
        """Return self. The files are already open."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self._files.clear()
        self._exit_stack.close()

    def _read_index(self) -> dict[str, str]:
        path = self._directory / INDEX
        try:
            mapping = read_json(path).get("weight_map")
        except ModelError as error:
            raise WeightsError(str(error)) from error
        if not isinstance(mapping, dict) or not all(isinstance(f, str) for f in mapping.values()):
            raise WeightsError(f"{path} has no weight_map that maps tensor names to file names")
        file_names = sorted(set(mapping.values()))
        for name in file_names:
            if not name or Path(name).name != name:
                raise WeightsError(
                    f"{path} names the file {name!r}, but may name only files in its own directory"
                )
        for name in file_names:
            self._open_file(name)
        unlisted = {f.name for f in self._directory.glob("*.safetensors")} - set(file_names)
        if unlisted:
            log.warning(
                "%s: %s does not list these files, which are ignored: %s",
                self._directory,
                INDEX,
                _list_names(unlisted),
            )
        return mapping

    def _scan(self) -> dict[str, str]:
        files = sorted(self._directory.glob("*.safetensors"))
        if not files:
            raise WeightsError(
                f"{self._directory} contains no .safetensors files; convert the checkpoint "
                "to this format first"
            )
        file_of: dict[str, str] = {}
        for key, name in ((key, f.name) for f in files for key in self._keys(f.name)):
            if key in file_of:
                raise WeightsError(
                    f"{self._directory}: both {file_of[key]} and {name} contain {key!r}; "
                    f"remove the file that does not belong to the checkpoint, or add {INDEX}"
                )
            file_of[key] = name
        return file_of

    def _open_file(self, name: str) -> Any:
        path = self._directory / name
        if path.is_symlink() and not path.exists():
            raise WeightsError(f"{path} is a link to {path.readlink()}, which does not exist")
        if not path.exists():
            raise WeightsError(f"{path} is missing, although {INDEX} lists it")
        if not path.is_file():
            raise WeightsError(f"{path} is not a regular file")
        try:
            self._files[name] = self._exit_stack.enter_context(safe_open(path, framework="pt"))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the library is not an `Exception`
            raise WeightsError(f"{path} is damaged or incomplete: {error}") from error
        return self._files[name]

    def _keys(self, name: str) -> list[str]:
        return list(self._open_file(name).keys())

    def __contains__(self, name: str) -> bool:
        """Return True if the checkpoint has a tensor with this name."""
        return name in self._file_of

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
        tensor_slice = self._find(name, shape, stored)
        self._loaded_names.add(name)
        file_name = self._file_of[name]
        path = self._directory / file_name
        try:
            if spans:
                index = tuple(slice(s.start, s.stop) if s else slice(None) for s in spans)
                tensor: torch.Tensor = tensor_slice[index]
            else:
                tensor = self._read(file_name, name, shape, rows, columns)
        except SafetensorError as error:
            raise WeightsError(f"{path}: {name}: {error}") from error
        dtype = stored or dtype or self.dtype
        self._read_ahead.advance(math.prod(shape) * tensor.element_size())
        # A GPU checks the values in a fraction of the time.
        checked = tensor.to(self.device) if self.device.type == "cuda" else tensor
        if self._check and tensor.is_floating_point():
            check_values(checked, dtype, f"{path}: {name}")
        converted = checked.to(self.device, dtype)
        # A tensor that was not converted still maps the file, which may change at any time.
        return converted.clone() if converted.data_ptr() == tensor.data_ptr() else converted

    def _find(self, name: str, shape: tuple[int, ...], stored: torch.dtype | None) -> Any:
        """Return a tensor's slice, of which nothing has been read yet. `shape` and `stored` are the
        required shape and dtype, as in `load`. Raises `WeightsError` if the tensor is missing or
        does not have them."""
        file_name = self._file_of.get(name)
        if file_name is None:
            raise WeightsError(
                f"{self._listing} has no weight {name!r}; check that config.json belongs to "
                "this checkpoint"
            )
        path = self._directory / file_name
        try:
            tensor_slice = self._files[file_name].get_slice(name)
        except SafetensorError as error:
            raise WeightsError(f"{path}: {name}: {error}") from error
        found_shape, found_type = tuple(tensor_slice.get_shape()), tensor_slice.get_dtype()
        if found_shape != shape:
            raise WeightsError(
                f"{path}: {name} has shape {found_shape}, but config.json requires {shape}"
            )
        allowed_types = _FLOAT_TYPES if stored is None else (_STORED_TYPE_NAMES[stored],)
        if found_type not in allowed_types:
            raise WeightsError(
                f"{path}: {name} has dtype {found_type}, but for this tensor config.json allows "
                f"only {', '.join(allowed_types)}"
            )
        return tensor_slice

    @property
    def _listing(self) -> Path:
        """The file that lists all tensors, or the directory if several files do without one."""
        if (self._directory / INDEX).exists():
            return self._directory / INDEX
        return (
            self._directory / next(iter(self._files)) if len(self._files) == 1 else self._directory
        )

    def _share_files(self, weights: Weights) -> None:
        """Use the open files and the format of other weights, which close them."""
        self._directory, self._format = weights._directory, weights._format
        self._files, self._file_of = weights._files, weights._file_of

    @property
    def has_files(self) -> bool:
        """True if the tensors are those of a checkpoint."""
        return True

    @property
    def has_values(self) -> bool:
        """True if loaded tensors have values."""
        return self.device.type != "meta"

    def warn_about_unused(self, ignored: Collection[str] = ()) -> None:
        """Log a warning if the checkpoint has tensors that were never loaded. Such a checkpoint may
        belong to another model.

        Names in `ignored` are exempt. A name that ends with a dot exempts all tensors of that
        module.
        """
        modules = tuple(name for name in ignored if name.endswith("."))
        ignored = {
            name
            for name in self._file_of
            if name in ignored or name.endswith(_UNUSED_SUFFIXES) or name.startswith(modules)
        }
        unused = self._file_of.keys() - self._loaded_names - ignored
        if unused:
            log.warning(
                "%s contains %d tensors that the model does not use and that have no effect: %s",
                self._directory,
                len(unused),
                _list_names(unused),
            )

    def _read(
        self,
        file_name: str,
        name: str,
        shape: tuple[int, ...],
        rows: Rows | None,
        columns: Span | None,
    ) -> torch.Tensor:
        file = self._files[file_name]
        tensor: torch.Tensor
        if rows is None and columns is None:
            tensor = file.get_tensor(name)
            return tensor
        tensor_slice = file.get_slice(name)
        if columns is not None:
            assert rows is None
            tensor = tensor_slice[:, columns.start : columns.stop]
            return tensor
        assert rows is not None
        if not isinstance(rows, Span):
            return torch.cat([tensor_slice[span.start : span.stop] for span in rows])
        stop = min(rows.stop, shape[0])
        available = max(0, stop - rows.start)
        tensor = tensor_slice[rows.start : stop] if available else torch.empty(0, *shape[1:])
        if available < rows.size:
            tensor = torch.cat((tensor, tensor.new_zeros(rows.size - available, *shape[1:])))
        return tensor

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
                    f"{self._directory}: {projection.parts[0].name} has the format "
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
        own_size = torch.empty(0, dtype=self.dtype).element_size()
        total = 0
        for name, file_name in self._file_of.items():
            if name in ignored:
                continue
            tensor_slice = self._files[file_name].get_slice(name)
            stored_type = tensor_slice.get_dtype()
            has_own_size = stored_type in _FLOAT_TYPES or (unpacked and stored_type in _FP8_TYPES)
            element_size = own_size if has_own_size else _INTEGER_SIZES.get(stored_type, 1)
            total += math.prod(tensor_slice.get_shape()) * element_size
        return total

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which must exist."""
        return tuple(self._files[self._file_of[name]].get_slice(name).get_shape())


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


def _list_names(names: set[str]) -> str:
    """Return the first few names in sorted order, separated by commas, and an ellipsis if there are
    more."""
    listed = ", ".join(sorted(names)[:_MAX_LISTED_NAMES])
    return listed + ", ..." * (len(names) > _MAX_LISTED_NAMES)


class RandomWeights(Weights):
    """Random weights of any requested shape, created on the device. No checkpoint is needed.

    They are for benchmarks, as the duration of a step does not depend on the values of weights.
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
        """Return normally distributed values with a standard deviation of 0.02, as in model
        initialization, or of 20 for integer dtypes. Weights of norms are ones."""
        sizes = list(shape)
        if rows is not None:
            sizes[0] = rows.size if isinstance(rows, Span) else sum(span.size for span in rows)
        if columns is not None:
            sizes[1] = columns.size
        for axis, span in enumerate(spans):
            sizes[axis] = span.size if span else sizes[axis]
        dtype = stored or dtype or self.dtype
        if len(shape) == 1 and "norm" in name:
            return torch.ones(sizes, dtype=dtype, device=self.device)
        is_wide_float = dtype.is_floating_point and dtype.itemsize > 1
        values = torch.empty(
            sizes, dtype=dtype if is_wide_float else torch.float32, device=self.device
        )
        values.normal_(0.0, 0.02 if dtype.is_floating_point else 20.0, generator=self._generator)
        return values.to(dtype)
