"""The layers that decoder models are made of. A layer takes its weights when it is made."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from nanoactor.models.collective import Group
from nanoactor.models.config import ModelConfig
from nanoactor.models.device import Device
from nanoactor.models.parallel import Shard, Span
from nanoactor.models.weights import Weights


class ColumnParallel:
    """y = x Wᵀ + b, of which each rank computes the outputs of its own.

    Several projections of the same input are fused into one.
    """

    def __init__(
        self,
        weights: Weights,
        names: list[str],
        inputs: int,
        outputs: list[int],
        rows: list[Span],
        device: Device,
        bias: bool = False,
    ) -> None:
        """`outputs` are those of the whole layer, `rows` this rank's part of each."""
        names_w, names_b = [f"{n}.weight" for n in names], [f"{n}.bias" for n in names]
        weight = weights.concatenated(names_w, outputs, inputs, rows=rows)
        added = weights.concatenated(names_b, outputs, rows=rows) if bias else None
        self._operator = device.linear(weight, added)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, inputs) to (tokens, this rank's outputs)."""
        return self._operator(x)


class RowParallel:
    """y = x Wᵀ + b, of which each rank has a part of the inputs; the products are summed."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        inputs: int,
        columns: Span,
        outputs: int,
        device: Device,
        group: Group,
        bias: bool = False,
    ) -> None:
        whole = columns.size == inputs
        weight = weights.take(f"{name}.weight", outputs, inputs, columns=None if whole else columns)
        self._group = group
        added = weights.take(f"{name}.bias", outputs) if bias else None
        self._operator = device.linear(weight, added if group.size == 1 else None)
        self._bias = added if group.size > 1 else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, this rank's inputs) to (tokens, outputs)."""
        y = self._group.sum(self._operator(x))
        return y if self._bias is None else y + self._bias


class Embedding:
    """Rows of a table, of which each rank has those of its token ids."""

    def __init__(
        self, weights: Weights, name: str, shard: Shard, config: ModelConfig, group: Group
    ) -> None:
        rows = shard.vocabulary if group.size > 1 else None
        self.weight = weights.take(name, config.vocab_size, config.hidden_size, rows=rows)
        self._start, self._group = shard.vocabulary.start, group

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(tokens,) to (tokens, hidden)."""
        if self._group.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self._start
        foreign = (local < 0) | (local >= len(self.weight))
        x = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return self._group.sum(x.masked_fill(foreign[:, None], 0.0))


class RMSNorm:
    """Root mean square normalisation, optionally with the residual sum before it."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float, device: Device) -> None:
        self._weight = weights.take(f"{name}.weight", size)
        self._eps = eps
        self._device = device

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of x over its last dimension."""
        return self._device.rms_norm(x, self._weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual)."""
        return self._device.add_rms_norm(x, residual, self._weight, self._eps)
