"""Reads tensors from safetensors files, one or many, with or without an index."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nanoactor.models.config import read_json
from nanoactor.models.errors import ModelError, WeightsError

INDEX = "model.safetensors.index.json"


class Weights:
    """Every tensor of a checkpoint by name, converted and placed as it is taken.

    Use it as a context manager: files stay open and mapped until it ends.
    """

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Raises `WeightsError` where files are missing or damaged."""
        self.dtype = dtype
        self.device = device
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
        for name in sorted(set(mapping.values())):
            self._open_file(name)
        return mapping

    def _scan(self) -> dict[str, str]:
        files = sorted(self._directory.glob("*.safetensors"))
        if not files:
            raise WeightsError(
                f"{self._directory} holds no .safetensors file; convert the checkpoint first"
            )
        return {key: f.name for f in files for key in self._keys(f.name)}

    def _open_file(self, name: str) -> Any:
        path = self._directory / name
        if not path.exists():
            raise WeightsError(f"{path} is missing, though {INDEX} names it")
        try:
            self._files[name] = self._open.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path} is damaged or incomplete: {error}") from error
        return self._files[name]

    def _keys(self, name: str) -> list[str]:
        return list(self._open_file(name).keys())

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""
        return name in self._home

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """One tensor, of the wanted type on the wanted device.

        Raises `WeightsError` where it is missing, of another shape or unreadable.
        """
        home = self._home.get(name)
        if home is None:
            raise WeightsError(
                f"{self._directory} has no weight {name!r}: is config.json of another model?"
            )
        try:
            found = self._files[home].get_slice(name).get_shape()
            if tuple(found) != shape:
                raise WeightsError(
                    f"{self._directory / home}: {name} has the shape {tuple(found)}, "
                    f"config.json asks for {shape}"
                )
            tensor: torch.Tensor = self._files[home].get_tensor(name)
        except SafetensorError as error:
            raise WeightsError(f"{self._directory / home}: {name}: {error}") from error
        return tensor.to(self.device, self.dtype)

    def concatenated(self, names: list[str], rows: list[int], *rest: int) -> torch.Tensor:
        """Several tensors stacked along their first dimension, for one fused multiplication."""
        parts = [self.take(name, n, *rest) for name, n in zip(names, rows, strict=True)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]
