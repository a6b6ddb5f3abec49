"""The safetensors files of a checkpoint, with or without an index."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nanoactor.models.config import read_json
from nanoactor.models.errors import ModelError, WeightsError
from nanoactor.models.parallel import Span

log = logging.getLogger("nanoactor.weights")

INDEX = "model.safetensors.index.json"
_FLOAT_TYPES = ("F64", "F32", "BF16", "F16")
"""Safetensors dtypes of weights that are not packed."""
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
_MAX_LISTED_NAMES = 5

Rows = Span | Sequence[Span]


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """The part of a tensor that is requested. At most one of `rows`, `columns` and `spans` is
    set."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    rows: Rows | None = None
    """A range of rows, or several ranges to concatenate in this order. If a single range extends
    past the last row, the additional rows are zero."""
    columns: Span | None = None
    spans: tuple[Span | None, ...] = ()
    """A range for each dimension, where None means all."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of the part."""
        sizes = list(self.shape)
        if self.rows is not None:
            rows = [self.rows] if isinstance(self.rows, Span) else self.rows
            sizes[0] = sum(span.size for span in rows)
        if self.columns is not None:
            sizes[1] = self.columns.size
        for axis, span in enumerate(self.spans):
            sizes[axis] = span.size if span else sizes[axis]
        return tuple(sizes)

    def read(self, tensor_slice: Any) -> torch.Tensor:
        """Return the part of a tensor's slice. It must not be the whole tensor. Only the part is
        read from the file."""
        tensor: torch.Tensor
        if self.spans:
            tensor = tensor_slice[
                tuple(slice(s.start, s.stop) if s else slice(None) for s in self.spans)
            ]
            return tensor
        if self.columns is not None:
            tensor = tensor_slice[:, self.columns.start : self.columns.stop]
            return tensor
        if isinstance(self.rows, Span):
            return self._read_rows(tensor_slice, self.rows)
        assert self.rows is not None
        return torch.cat([tensor_slice[span.start : span.stop] for span in self.rows])

    def _read_rows(self, tensor_slice: Any, rows: Span) -> torch.Tensor:
        stop = min(rows.stop, self.shape[0])
        available = max(0, stop - rows.start)
        tensor: torch.Tensor = (
            tensor_slice[rows.start : stop] if available else torch.empty(0, *self.shape[1:])
        )
        if available < rows.size:
            missing = tensor.new_zeros(rows.size - available, *self.shape[1:])
            tensor = torch.cat((tensor, missing))
        return tensor


class TensorFiles:
    """The open files of a checkpoint, and the tensors in them."""

    def __init__(self, directory: Path) -> None:
        """Open the files. Raises `WeightsError` if files are missing or damaged, or if two files
        without an index contain the same tensor."""
        self.directory = directory
        self._exit_stack = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        self._file_of = self._read_index() if (directory / INDEX).exists() else self._scan()

    def close(self) -> None:
        """Close the files."""
        self._files.clear()
        self._exit_stack.close()

    @property
    def paths(self) -> list[Path]:
        """The files."""
        return [self.directory / name for name in self._files]

    @property
    def listing(self) -> Path:
        """The file that lists all tensors, or the directory if several files do without an
        index."""
        if (self.directory / INDEX).exists():
            return self.directory / INDEX
        return self.paths[0] if len(self._files) == 1 else self.directory

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._file_of.keys()

    def _read_index(self) -> dict[str, str]:
        path = self.directory / INDEX
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
        unlisted = {f.name for f in self.directory.glob("*.safetensors")} - set(file_names)
        if unlisted:
            log.warning(
                "%s: %s does not list these files, which are ignored: %s",
                self.directory,
                INDEX,
                list_names(unlisted),
            )
        return mapping

    def _scan(self) -> dict[str, str]:
        files = sorted(self.directory.glob("*.safetensors"))
        if not files:
            raise WeightsError(
                f"{self.directory} contains no .safetensors files; convert the checkpoint "
                "to this format first"
            )
        file_of: dict[str, str] = {}
        for key, name in ((key, f.name) for f in files for key in self._keys(f.name)):
            if key in file_of:
                raise WeightsError(
                    f"{self.directory}: both {file_of[key]} and {name} contain {key!r}; "
                    f"remove the file that does not belong to the checkpoint, or add {INDEX}"
                )
            file_of[key] = name
        return file_of

    def _open_file(self, name: str) -> Any:
        path = self.directory / name
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

    def check(self, name: str, shape: tuple[int, ...], stored: torch.dtype | None) -> None:
        """Raise `WeightsError` unless a tensor exists and has this shape. A packed tensor must have
        the dtype `stored`, and others one of floating-point numbers."""
        if name not in self._file_of:
            raise WeightsError(
                f"{self.listing} has no weight {name!r}; check that config.json belongs to "
                "this checkpoint"
            )
        path, tensor_slice = self.path_of(name), self.slice_of(name)
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

    def read(self, name: str, part: Selection) -> torch.Tensor:
        """Return a part of a tensor, which must exist. A whole tensor maps the file. Raises
        `WeightsError` if it cannot be read."""
        try:
            if part == Selection(part.shape):
                tensor: torch.Tensor = self._files[self._file_of[name]].get_tensor(name)
                return tensor
            return part.read(self.slice_of(name))
        except SafetensorError as error:
            raise WeightsError(f"{self.path_of(name)}: {name}: {error}") from error

    def path_of(self, name: str) -> Path:
        """Return the path of the file that contains a tensor, which must exist."""
        return self.directory / self._file_of[name]

    def slice_of(self, name: str) -> Any:
        """Return the slice of a tensor in `names`. Raises `WeightsError` if its file does not
        contain it."""
        try:
            return self._files[self._file_of[name]].get_slice(name)
        except SafetensorError as error:
            raise WeightsError(f"{self.path_of(name)}: {name}: {error}") from error

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in `names`. Raises `WeightsError` if its file does not
        contain it."""
        return tuple(self.slice_of(name).get_shape())


def list_names(names: set[str]) -> str:
    """Return the first few names in sorted order, separated by commas, and an ellipsis if there are
    more."""
    listed = ", ".join(sorted(names)[:_MAX_LISTED_NAMES])
    return listed + ", ..." * (len(names) > _MAX_LISTED_NAMES)
