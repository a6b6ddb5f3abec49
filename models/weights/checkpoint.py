"""Reads tensors from safetensors files, one or many, with or without an index."""

from __future__ import annotations

import contextlib
import logging
import math
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
_FLOATING = ("F64", "F32", "BF16", "F16")
"""The types of safetensors that hold weights as they are."""
_SPARE = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
"""Ends of the names of buffers that older checkpoints carry along."""
_MOST_NAMED = 5


class Weights:
    """Every tensor of a checkpoint by name, converted and placed as it is taken.

    Use it as a context manager: files stay open and mapped until it ends, and what was taken does
    not refer to them.
    """

    def __init__(
        self, directory: Path, dtype: torch.dtype, device: torch.device, check: bool = True
    ) -> None:
        """`check`: whether to look at every value. Raises `WeightsError` where files are missing,
        damaged, or hold the same tensor twice."""
        self.dtype = dtype
        self.device = device
        self._check = check
        self._taken: set[str] = set()
        self._directory = directory
        self._open = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        self._home = self._read_index() if (directory / INDEX).exists() else self._scan()

    def __enter__(self) -> Weights:
        """Nothing to prepare: the files were opened when it was made."""
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
            raise WeightsError(f"{path} has no weight_map from names to files")
        named = sorted(set(mapping.values()))
        for name in named:
            if not name or Path(name).name != name:
                raise WeightsError(
                    f"{path} names {name!r}, which is no file of this directory: only names "
                    "without a path are read"
                )
        for name in named:
            self._open_file(name)
        others = {f.name for f in self._directory.glob("*.safetensors")} - set(named)
        if others:
            log.warning(
                "%s: %s does not name %s: not read", self._directory, INDEX, _listed(others)
            )
        return mapping

    def _scan(self) -> dict[str, str]:
        files = sorted(self._directory.glob("*.safetensors"))
        if not files:
            raise WeightsError(
                f"{self._directory} holds no .safetensors file; convert the checkpoint first"
            )
        home: dict[str, str] = {}
        for key, name in ((key, f.name) for f in files for key in self._keys(f.name)):
            if key in home:
                raise WeightsError(
                    f"{self._directory}: both {home[key]} and {name} hold {key!r}; remove the one "
                    f"that does not belong here, or add {INDEX}"
                )
            home[key] = name
        return home

    def _open_file(self, name: str) -> Any:
        path = self._directory / name
        if path.is_symlink() and not path.exists():
            raise WeightsError(f"{path} is a link to {path.readlink()}, which does not exist")
        if not path.exists():
            raise WeightsError(f"{path} is missing, though {INDEX} names it")
        if not path.is_file():
            raise WeightsError(f"{path} is no regular file")
        try:
            self._files[name] = self._open.enter_context(safe_open(path, framework="pt"))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library's is no `Exception`
            raise WeightsError(f"{path} is damaged or incomplete: {error}") from error
        return self._files[name]

    def _keys(self, name: str) -> list[str]:
        return list(self._open_file(name).keys())

    def __contains__(self, name: str) -> bool:
        """Tell whether the checkpoint has a tensor of this name."""
        return name in self._home

    def load(
        self, name: str, *shape: int, rows: Span | None = None, columns: Span | None = None
    ) -> torch.Tensor:
        """One tensor, or a part of it, of the wanted type on the wanted device.

        `shape` is that of the whole; of the file only the part is read. Rows past the end are
        zero. Raises `WeightsError` where it is missing, of another shape or unreadable.
        """
        home = self._home.get(name)
        if home is None:
            raise WeightsError(
                f"{self._directory} has no weight {name!r}: is config.json of another model?"
            )
        self._taken.add(name)
        path = self._directory / home
        try:
            found = self._files[home].get_slice(name)
            if tuple(found.get_shape()) != shape:
                raise WeightsError(
                    f"{path}: {name} has the shape {tuple(found.get_shape())}, "
                    f"config.json asks for {shape}"
                )
            if found.get_dtype() not in _FLOATING:
                raise WeightsError(
                    f"{path}: {name} is stored as {found.get_dtype()}; quantized weights are not "
                    f"supported, only {', '.join(_FLOATING)}"
                )
            tensor = self._read(home, name, shape, rows, columns)
        except SafetensorError as error:
            raise WeightsError(f"{path}: {name}: {error}") from error
        if self._check:
            self._check_values(tensor, f"{path}: {name}")
        moved = tensor.to(self.device, self.dtype)
        # A tensor that needs no conversion is still the file, which may change at any time.
        return moved.clone() if moved.data_ptr() == tensor.data_ptr() else moved

    def _check_values(self, tensor: torch.Tensor, where: str) -> None:
        """Raise `WeightsError` for values that are not finite, or are not in the wanted type."""
        if not tensor.numel():
            return
        low, high = (float(value) for value in torch.aminmax(tensor))  # NaN comes through
        if not math.isfinite(low) or not math.isfinite(high):
            raise WeightsError(
                f"{where} holds values that are not finite (NaN or infinity): the file is damaged, "
                "or its training has diverged (check_weights=False loads it nevertheless)"
            )
        most = torch.finfo(self.dtype).max
        if max(-low, high) > most:
            raise WeightsError(
                f"{where} holds {low if -low > high else high:g}, which {self.dtype} cannot: its "
                f"largest number is {most:g}; choose another dtype"
            )

    def warn_of_unused(self, spare: Collection[str] = ()) -> None:
        """Name the tensors of the checkpoint that nobody has taken: is it another model's? Those in
        `spare` may be there, or all of a module where it ends with a dot."""
        modules = tuple(name for name in spare if name.endswith("."))
        spare = {
            name
            for name in self._home
            if name in spare or name.endswith(_SPARE) or name.startswith(modules)
        }
        unused = self._home.keys() - self._taken - spare
        if unused:
            log.warning(
                "%s holds %d tensors that the model does not use, and that change nothing: %s",
                self._directory,
                len(unused),
                _listed(unused),
            )

    def _read(
        self, home: str, name: str, shape: tuple[int, ...], rows: Span | None, columns: Span | None
    ) -> torch.Tensor:
        file = self._files[home]
        tensor: torch.Tensor
        if rows is None and columns is None:
            tensor = file.get_tensor(name)
            return tensor
        part = file.get_slice(name)
        if columns is not None:
            tensor = part[:, columns.start : columns.stop]
            return tensor
        assert rows is not None
        stop = min(rows.stop, shape[0])
        there = max(0, stop - rows.start)
        tensor = part[rows.start : stop] if there else torch.empty(0, *shape[1:])
        if there < rows.size:
            tensor = torch.cat((tensor, tensor.new_zeros(rows.size - there, *shape[1:])))
        return tensor

    def concatenated(
        self, names: list[str], outputs: list[int], *rest: int, rows: list[Span] | None = None
    ) -> torch.Tensor:
        """Several tensors, or parts of each, stacked along their first dimension, for one fused
        multiplication."""
        spans: Sequence[Span | None] = rows or [None] * len(names)
        parts = [
            self.load(name, n, *rest, rows=span)
            for name, n, span in zip(names, outputs, spans, strict=True)
        ]
        return torch.cat(parts) if len(parts) > 1 else parts[0]


def _listed(names: set[str]) -> str:
    """Some of them, in order."""
    listed = ", ".join(sorted(names)[:_MOST_NAMED])
    return listed + ", ..." * (len(names) > _MOST_NAMED)


class RandomWeights(Weights):
    """Weights of the shapes that are asked for, drawn at random on the device.

    For measuring: the time of a step does not depend on what the weights are.
    """

    def __init__(
        self, directory: Path, dtype: torch.dtype, device: torch.device, check: bool = True
    ) -> None:
        """Reads nothing."""
        self.dtype, self.device = dtype, device
        self._generator = torch.Generator(device).manual_seed(0)

    def __exit__(self, *_: object) -> None:
        """Nothing was opened."""

    def warn_of_unused(self, spare: Collection[str] = ()) -> None:
        """There is nothing else."""

    def __contains__(self, name: str) -> bool:
        """Whatever the configuration asks for; beside a tied embedding there is no other head."""
        return name != "lm_head.weight"

    def load(
        self, name: str, *shape: int, rows: Span | None = None, columns: Span | None = None
    ) -> torch.Tensor:
        """Normal with a deviation of 0.02, as models are initialised; norms are ones."""
        sizes = list(shape)
        if rows is not None:
            sizes[0] = rows.size
        if columns is not None:
            sizes[1] = columns.size
        if len(shape) == 1 and "norm" in name:
            return torch.ones(sizes, dtype=self.dtype, device=self.device)
        drawn = torch.empty(sizes, dtype=self.dtype, device=self.device)
        return drawn.normal_(0.0, 0.02, generator=self._generator)
