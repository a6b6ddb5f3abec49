"""The weights of a checkpoint, converted and moved to a device."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from pathlib import Path

import torch

from nanoactor.models.weights.files import Selection, TensorFiles, list_names
from nanoactor.models.weights.read_ahead import ReadAhead
from nanoactor.models.weights.values import check_values
from nanoactor.models.weights.weights import Format, Weights

log = logging.getLogger("nanoactor.weights")

_UNUSED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
"""Name suffixes of buffers that older checkpoints contain and the model does not use."""


class CheckpointWeights(Weights):
    """The tensors of a checkpoint. Its files stay open and mapped until the context ends."""

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
        super().__init__(str(directory), dtype, device, packed)
        self._check = check
        self._loaded_names: set[str] = set()
        self.files = TensorFiles(directory)
        self._exit_stack.callback(self.files.close)
        self._read_ahead = ReadAhead(self.files.paths)
        self._exit_stack.callback(self._read_ahead.close)

    def __contains__(self, name: str) -> bool:
        """Return True if the checkpoint has a tensor with this name."""
        return name in self.files.names

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which must exist."""
        return self.files.shape_of(name)

    def _load(
        self, name: str, part: Selection, dtype: torch.dtype, stored: torch.dtype | None
    ) -> torch.Tensor:
        """Return a part of a tensor as `dtype`. A packed tensor must have the dtype `stored` in the
        file."""
        self.files.check(name, part.shape, stored)
        tensor = self.files.read(name, part)
        if name not in self._loaded_names:  # other parts of it are behind the loader
            self._read_ahead.advance(math.prod(part.shape) * tensor.element_size())
        self._loaded_names.add(name)
        # A GPU checks the values in a fraction of the time.
        checked = tensor.to(self.device) if self.device.type == "cuda" else tensor
        if self._check and tensor.is_floating_point():
            check_values(checked, dtype, f"{self.files.path_of(name)}: {name}")
        converted = checked.to(self.device, dtype)
        # A tensor that was not converted still maps the file, which may change at any time.
        return converted.clone() if converted.data_ptr() == tensor.data_ptr() else converted

    def warn_about_unused(self, ignored: Collection[str] = ()) -> None:
        """Log a warning if the checkpoint has tensors that were never loaded. Such a checkpoint may
        belong to another model.

        Names in `ignored` are exempt. A name that ends with a dot exempts all tensors of that
        module.
        """
        modules = tuple(name for name in ignored if name.endswith("."))
        ignored = {
            name
            for name in self.files.names
            if name in ignored or name.endswith(_UNUSED_SUFFIXES) or name.startswith(modules)
        }
        unused = set(self.files.names) - self._loaded_names - ignored
        if unused:
            log.warning(
                "%s contains %d tensors that the model does not use and that have no effect: %s",
                self.files.directory,
                len(unused),
                list_names(unused),
            )
