"""Reads tensors from one or more safetensors files, with or without an index."""

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

log = logging.getLogger("nanoactor.weights")

INDEX = "model.safetensors.index.json"
_FLOATING = ("F64", "F32", "BF16", "F16")
"""Safetensors types of unpacked weights."""
_WIDE = {"I32": 4, "I64": 8, "I16": 2, "U16": 2, "U32": 4, "U64": 8}
"""Sizes in bytes of the other multi-byte types."""
_SPARE = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
"""Name suffixes of unused buffers in older checkpoints."""
_MOST_NAMED = 5
_NAMES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
"""Safetensors names of the types that packed weights and their scales may have."""

Rows = Span | Sequence[Span]


class Format(Protocol):
    """Reader of packed weights, created from a `Quantization`; it refuses unknown options."""

    def has(self, projection: Projection) -> bool:
        """Return True if a projection is quantized; other projections are read unchanged."""

    def read(self, weights: Weights, projection: Projection) -> LinearWeights:
        """Return this rank's part of a projection. Raises `WeightsError` if tensors do not fit."""


class Weights:
    """Tensors of a checkpoint by name, each converted and moved to the device when it is loaded.

    Use it as a context manager: files stay open and mapped until the context ends, and loaded
    tensors do not refer to them.
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
        """Open the files. `check` verifies that all loaded values are finite. `packed` reads packed
        weights, if there are any. Raises `WeightsError` if files are missing, damaged, or hold the
        same tensor twice."""
        self.dtype = dtype
        self.device = device
        self._check = check
        self._format = packed
        self._taken: set[str] = set()
        self._directory = directory
        self._open = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        self._home = self._read_index() if (directory / INDEX).exists() else self._scan()

    def __enter__(self) -> Weights:
        """Return self: the files are already open."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self._files.clear()
        self._open.close()

    def _read_index(self) -> dict[str, str]:
        path = self._directory / INDEX
        try:
            mapping = read_json(path).get("weight_map")
        except ModelError as error:
            raise WeightsError(str(error)) from error
        if not isinstance(mapping, dict) or not all(isinstance(f, str) for f in mapping.values()):
            raise WeightsError(f"{path} has no weight_map that maps tensor names to file names")
        named = sorted(set(mapping.values()))
        for name in named:
            if not name or Path(name).name != name:
                raise WeightsError(
                    f"{path} names the file {name!r}, which is not in the same directory: file "
                    "names must not contain a path"
                )
        for name in named:
            self._open_file(name)
        others = {f.name for f in self._directory.glob("*.safetensors")} - set(named)
        if others:
            log.warning(
                "%s: %s does not list these files, which are ignored: %s",
                self._directory,
                INDEX,
                _listed(others),
            )
        return mapping

    def _scan(self) -> dict[str, str]:
        files = sorted(self._directory.glob("*.safetensors"))
        if not files:
            raise WeightsError(
                f"{self._directory} contains no .safetensors files; convert the checkpoint first"
            )
        home: dict[str, str] = {}
        for key, name in ((key, f.name) for f in files for key in self._keys(f.name)):
            if key in home:
                raise WeightsError(
                    f"{self._directory}: both {home[key]} and {name} contain {key!r}; remove the "
                    f"file that does not belong here, or add {INDEX}"
                )
            home[key] = name
        return home

    def _open_file(self, name: str) -> Any:
        path = self._directory / name
        if path.is_symlink() and not path.exists():
            raise WeightsError(f"{path} is a link to {path.readlink()}, which does not exist")
        if not path.exists():
            raise WeightsError(f"{path} is missing, although {INDEX} lists it")
        if not path.is_file():
            raise WeightsError(f"{path} is not a regular file")
        try:
            self._files[name] = self._open.enter_context(safe_open(path, framework="pt"))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the library is not an `Exception`
            raise WeightsError(f"{path} is damaged or incomplete: {error}") from error
        return self._files[name]

    def _keys(self, name: str) -> list[str]:
        return list(self._open_file(name).keys())

    def __contains__(self, name: str) -> bool:
        """Return True if the checkpoint has a tensor with this name."""
        return name in self._home

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
        """Return one tensor, or a part of it, on the device.

        `shape` is the shape of the whole tensor, but only the requested part is read from the file.
        `rows` is one span of rows, or several in order; rows of a single span past the end are
        zero. `columns` is a span of columns, and `spans` has a span for each dimension, or None for
        all of it. The result has type `dtype`, by default the model's. A packed tensor must have
        the type `stored`, and keeps it.

        Raises `WeightsError` if the tensor is missing, has another shape or type, or is unreadable.
        """
        home = self._home.get(name)
        if home is None:
            raise WeightsError(
                f"{self._directory} has no weight {name!r}: check that config.json belongs to "
                "this checkpoint"
            )
        self._taken.add(name)
        path = self._directory / home
        try:
            found = self._files[home].get_slice(name)
            if tuple(found.get_shape()) != shape:
                raise WeightsError(
                    f"{path}: {name} has shape {tuple(found.get_shape())}, but config.json "
                    f"requires {shape}"
                )
            wanted = _FLOATING if stored is None else (_NAMES[stored],)
            if found.get_dtype() not in wanted:
                raise WeightsError(
                    f"{path}: {name} has dtype {found.get_dtype()}, but for this tensor "
                    f"config.json allows only {', '.join(wanted)}"
                )
            if spans:
                index = tuple(slice(s.start, s.stop) if s else slice(None) for s in spans)
                tensor: torch.Tensor = found[index]
            else:
                tensor = self._read(home, name, shape, rows, columns)
        except SafetensorError as error:
            raise WeightsError(f"{path}: {name}: {error}") from error
        dtype = stored or dtype or self.dtype
        if self._check and tensor.is_floating_point():
            self._check_values(tensor, dtype, f"{path}: {name}")
        moved = tensor.to(self.device, dtype)
        # A tensor that was not converted still maps the file, which may change at any time.
        return moved.clone() if moved.data_ptr() == tensor.data_ptr() else moved

    def _check_values(self, tensor: torch.Tensor, dtype: torch.dtype, where: str) -> None:
        """Raise `WeightsError` if a value is not finite, or is too large for `dtype`."""
        if not tensor.numel():
            return
        if tensor.dtype.itemsize == 1:  # aminmax is not implemented for one-byte types
            tensor = tensor.to(torch.bfloat16)
        low, high = (float(value) for value in torch.aminmax(tensor))  # NaN propagates
        if not math.isfinite(low) or not math.isfinite(high):
            raise WeightsError(
                f"{where} contains values that are not finite (NaN or infinity): the file is "
                "damaged, or the training diverged (check_weights=False loads it anyway)"
            )
        most = torch.finfo(dtype).max
        if max(-low, high) > most:
            raise WeightsError(
                f"{where} contains {low if -low > high else high:g}, which {dtype} cannot "
                f"represent, because its largest number is {most:g}; choose another dtype"
            )

    def warn_of_unused(self, spare: Collection[str] = ()) -> None:
        """Log a warning if tensors were never loaded: the checkpoint may belong to another model.
        Names in `spare` are exempt; a name that ends with a dot exempts a whole module."""
        modules = tuple(name for name in spare if name.endswith("."))
        spare = {
            name
            for name in self._home
            if name in spare or name.endswith(_SPARE) or name.startswith(modules)
        }
        unused = self._home.keys() - self._taken - spare
        if unused:
            log.warning(
                "%s contains %d tensors that the model does not use and that have no effect: %s",
                self._directory,
                len(unused),
                _listed(unused),
            )

    def _read(
        self, home: str, name: str, shape: tuple[int, ...], rows: Rows | None, columns: Span | None
    ) -> torch.Tensor:
        file = self._files[home]
        tensor: torch.Tensor
        if rows is None and columns is None:
            tensor = file.get_tensor(name)
            return tensor
        part = file.get_slice(name)
        if columns is not None:
            assert rows is None
            tensor = part[:, columns.start : columns.stop]
            return tensor
        assert rows is not None
        if not isinstance(rows, Span):
            return torch.cat([part[span.start : span.stop] for span in rows])
        stop = min(rows.stop, shape[0])
        there = max(0, stop - rows.start)
        tensor = part[rows.start : stop] if there else torch.empty(0, *shape[1:])
        if there < rows.size:
            tensor = torch.cat((tensor, tensor.new_zeros(rows.size - there, *shape[1:])))
        return tensor

    def linear(self, projection: Projection) -> LinearWeights:
        """Return the weights of a projection, in the checkpoint's format.

        Raises `WeightsError` as `load` does."""
        if self._format is not None and self._format.has(projection):
            return self._format.read(self, projection)
        weight = [
            self.load(
                f"{part.name}.weight",
                *(part.outputs, projection.inputs),
                rows=part.rows,
                columns=projection.columns,
            )
            for part in projection.parts
        ]
        return Dense(_joined(weight), self.bias_of(projection))

    def bias_of(self, projection: Projection) -> torch.Tensor | None:
        """Return the bias of a projection's outputs; None if the projection has no bias."""
        if not projection.bias:
            return None
        parts = projection.parts
        return _joined([self.load(f"{p.name}.bias", p.outputs, rows=p.rows) for p in parts])

    def stacked(
        self,
        projections: Sequence[Projection],
    ) -> LinearWeights:
        """Return the matrices of equally shaped projections as one stack, (projections, outputs,
        inputs). Each is copied to its place as soon as it is read, so that there is never a second
        copy of the whole stack.

        Raises `WeightsError` as `load` does, and if the projections have different formats."""
        whole: LinearWeights | None = None
        for at, projection in enumerate(projections):
            one = self.linear(projection)
            whole = one.room(len(projections)) if whole is None else whole
            if type(one) is not type(whole):
                raise WeightsError(
                    f"{self._directory}: {projection.parts[0].name} has the format "
                    f"{type(one).__name__}, but other experts of its layer have the format "
                    f"{type(whole).__name__}; all experts of a layer must have the same format"
                )
            whole.put(at, one)
        assert whole is not None, "nothing to stack"
        return whole

    def least_bytes(self, spare: Collection[str] = ()) -> int:
        """Return the minimum size of all ranks' weights in bytes: unpacked tensors in the model's
        type, packed ones as stored. Tensors named in `spare` are not counted."""
        own = torch.empty(0, dtype=self.dtype).element_size()
        total = 0
        for name, home in self._home.items():
            if name in spare:
                continue
            found = self._files[home].get_slice(name)
            stored = found.get_dtype()
            each = own if stored in _FLOATING else _WIDE.get(stored, 1)
            total += math.prod(found.get_shape()) * each
        return total

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of an existing tensor."""
        return tuple(self._files[self._home[name]].get_slice(name).get_shape())


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def format_of(quantization: Quantization | None) -> Format | None:
    """Return the reader of packed weights; None if nothing is packed. Raises `ModelError` for an
    invalid or unsupported configuration."""
    if quantization is None:
        return None
    module, _, name = FORMATS[quantization.method].partition(":")
    made: Format = getattr(importlib.import_module(module), name)(quantization)
    return made


def _listed(names: set[str]) -> str:
    """Return the first few names in sorted order, as one string."""
    listed = ", ".join(sorted(names)[:_MOST_NAMED])
    return listed + ", ..." * (len(names) > _MOST_NAMED)


class RandomWeights(Weights):
    """Weights of the requested shapes, drawn at random on the device.

    For benchmarks: the time of a step does not depend on the values of the weights.
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
        """Seed the generator; no files are read."""
        self.dtype, self.device, self._format = dtype, device, packed
        self._generator = torch.Generator(device).manual_seed(0)

    def __exit__(self, *_: object) -> None:
        """Do nothing: no file is open."""

    def warn_of_unused(self, spare: Collection[str] = ()) -> None:
        """Do nothing: there are no unused tensors."""

    def least_bytes(self, spare: Collection[str] = ()) -> int:
        """Return 0: without files the size is unknown."""
        return 0

    def __contains__(self, name: str) -> bool:
        """Return False for the head, so that tied weights have no separate one, and for fused
        experts, so that experts have separate tensors; True for all other names."""
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
        """Draw normally distributed values with a standard deviation of 0.02, as in model
        initialization, or 20 for integer types; norm weights are ones."""
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
        floating = dtype.is_floating_point and dtype.itemsize > 1
        drawn = torch.empty(sizes, dtype=dtype if floating else torch.float32, device=self.device)
        drawn.normal_(0.0, 0.02 if dtype.is_floating_point else 20.0, generator=self._generator)
        return drawn.to(dtype)
